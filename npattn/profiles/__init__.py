"""Known systems by name and version: what they mean, how they are called, what they promise."""

from difflib import get_close_matches

from npattn.errors import OptionError
from npattn.profiles import (
    equinox,
    fla,
    flash_attn,
    flashinfer,
    flax,
    flex,
    ggml,
    haiku,
    jax,
    keras,
    mlx,
    ncnn,
    numpy_public,
    onnx,
    openvino,
    own,
    paddle,
    pallas,
    sageattention,
    thunderkittens,
    tinygrad,
    torch,
    transformer_engine,
    transformers,
    xformers,
)
from npattn.profiles.profile import Profile

__all__ = ["PROFILES", "Profile", "find_profile"]

PROFILES = {
    profile.name: profile
    for profile in (
        own.NPATTN,
        torch.SDPA,
        torch.MULTIHEAD,
        torch.MULTIHEAD_SDPA,
        torch.MULTIHEAD_FAST,
        torch.NESTED,
        flex.FLEX,
        flash_attn.FLASH_ATTN,
        flash_attn.FLASH_ATTN_3,
        flash_attn.FLASH_ATTN_4,
        flash_attn.VARLEN,
        flash_attn.KVCACHE,
        flash_attn.QKVPACKED,
        flash_attn.KVPACKED,
        flash_attn.VARLEN_QKVPACKED,
        flash_attn.VLLM_PAGED,
        xformers.MEMORY_EFFICIENT,
        jax.NN,
        jax.LENGTHS,
        flax.LINEN,
        flax.NNX,
        flax.NNX_WEIGHTS,
        haiku.MULTIHEAD,
        equinox.HEAD,
        keras.OPS,
        keras.OPS_JAX,
        keras.OPS_TORCH,
        keras.OPS_TENSORFLOW,
        keras.OPS_OPENVINO,
        keras.LAYER,
        keras.MULTIHEAD,
        mlx.FAST,
        onnx.ATTENTION,
        onnx.ATTENTION_1_22,
        onnx.ATTENTION_1_21,
        onnx.ATTENTION_1_19,
        onnx.ATTENTION_1_18,
        onnx.RUNTIME,
        onnx.RUNTIME_MHA,
        onnx.RUNTIME_GQA,
        openvino.SDPA,
        paddle.SDPA,
        tinygrad.SDPA,
        ggml.FLASH,
        ncnn.SDPA,
        numpy_public.NUMPY_ML,
        numpy_public.NEURALNETLIB,
        numpy_public.NEURALNETWORKNUMPY,
        numpy_public.PICOGPT,
        transformers.EAGER,
        fla.PARALLEL,
        fla.DECODING,
        sageattention.SAGEATTENTION,
        pallas.GPU_MHA,
        pallas.GPU_DECODE,
        pallas.GPU_PAGED,
        pallas.TPU_FLASH,
        pallas.TPU_SPLASH,
        pallas.TPU_PAGED,
        flashinfer.PREFILL,
        flashinfer.PAGED,
        transformer_engine.DOT_PRODUCT,
        thunderkittens.MHA,
        transformers.GPT_OSS,
        transformers.SDPA,
        transformers.BLOOM,
        transformers.FALCON,
    )
}
"""The profiles of known systems, by name: "onnx" is the newest version, "onnx@1.22" another."""


def find_profile(name: str) -> Profile:
    """Return the profile of a system.

    Raises
    ------
    OptionError
        If there is none of this name; the message says which there are.
    """
    if name not in PROFILES:
        near = get_close_matches(name, PROFILES, 1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise OptionError(f"like is {name!r}, must be a known system: {', '.join(PROFILES)}{hint}")
    return PROFILES[name]
