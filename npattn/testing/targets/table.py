"""The implementations known by name, a row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from npattn.profiles import PROFILES
from npattn.testing.targets.target import Target

_HERE = "npattn.testing.targets"
_UPCAST = ("bloom", "deepseek_v3", "gemma2", "gpt_neox", "llama", "mistral", "phi", "qwen2")
_SINGLE = {
    *("flax.nnx", "jax.nn", "jax.nn.lengths", "mlx", "openvino", "torch.flex-compiled"),
    *("keras.jax", "keras.numpy", "keras.openvino", "keras.tensorflow", "keras.torch"),
    *("keras.attention-numpy", "keras.attention-torch", "keras.mha-numpy"),
    *("onnx.body", "onnx.reference", "onnxruntime", "onnxruntime.gqa", "onnxruntime.mha"),
    *(f"transformers.{model}" for model in _UPCAST),
}
"""They compute in float32 what comes in float64, as run, or refuse it."""
MODELS = (
    *("bert", "deepseek_v3", "gemma2", "gpt2", "gpt_neox", "llama", "mistral", "phi", "qwen2"),
    *("t5", "whisper"),
)
"""Models of Hugging Face whose eager attention is a target."""


def _row(name: str, home: str, about: str = "", *, like: str = "", **more: Any) -> Target:
    """Return a target; `home` is ``module:function``, the module one of this folder after a dot.

    Its profile, which describes it unless `about` does, is that of its name unless `like` names
    another. It needs the package that its name begins with, unless `needs` says otherwise.
    """
    module, _, function = home.partition(":")
    profile = PROFILES[like or name]
    if name.partition("@")[0] in _SINGLE:
        more["dtypes"] = ("float32",)
    module = _HERE + module if module.startswith(".") else module
    names = (module, function, more.pop("backward", None))
    needs = more.pop("needs", (name.partition(".")[0],))
    return Target(name, *names, needs, profile, about or profile.about, **more)


def _drop_in(name: str, home: str, about: str = "", **more: Any) -> Target:
    """Return the target of a library's own function, called as its profile says."""
    return _row(name, home, about, drop_in=True, **more)


_SMALL = {"B": (1, 2), "H": (2, 1), "K": (1, 2), "D": (3, 8, 17), "E": (2, 8, 17)}
_LENGTHS = (5, 1, 3, 17, 33, 129)  # the last takes two tiles of queries
_SHORT = (5, 1, 3, 17, 33, 65)
_FEW = (5, 1, 17, 33)
_BLOCKS = (64, 5, 130, 1)  # whole tiles of 64 keys, and others
_ONE_STEP = {"B": (2,), "H": (4,), "K": (2,), "T": (1,), "S": (13, 32), "P": (16,)}
_FLOAT32: dict[str, Any] = {"dtypes": ("float32",)}


def _in_triton(**sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return variables with which a kernel runs without a GPU, and sizes that take minutes."""
    variables = {"TRITON_INTERPRET": "1"}
    return {"environment": variables, "sizes": _SMALL | sizes, "timeout": 60.0, **_FLOAT32}


def _on_cuda(pip: str = "", **sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return the words of a target that needs a GPU, with sizes of heads that kernels have."""
    heads = {"D": (64, 32, 128), "E": (64, 32, 128)}
    pips = {"pip": (pip,)} if pip else {}
    return {"dtypes": (), "device": "cuda", "sizes": heads | sizes, **pips}


_NPATTN = (
    _row("numpy.flash", ".numpy:flash",
         "online softmax in float32 with backward, shipped with npattn", like="npattn",
         backward="flash_backward", needs=()),
    _row("numpy.naive", ".numpy:naive",
         "the textbook ten lines, shipped with npattn: what everybody writes first", like="npattn",
         needs=()),
)  # fmt: skip
_SDPA = "torch.nn.functional.scaled_dot_product_attention, as a user calls it"
_TORCH = (
    _row("torch.sdpa", ".torch:sdpa", _SDPA),
    *(
        _row(
            f"torch.sdpa-{name}",
            f".torch:sdpa_{name}",
            f"the same, held to its {backend} backend",
            like="torch.sdpa",
        )
        for name, backend in (("math", "MATH"), ("flash", "FLASH_ATTENTION"))
    ),
    _drop_in("torch.nested", ".torch:nested_sdpa"),
    _drop_in("torch.mha", ".torch:mha"),
    _drop_in("torch.mha-sdpa", ".torch:mha_sdpa"),
    _drop_in("torch.mha-fast", ".torch:mha_fast"),
    _drop_in("torch.flex", "torch.nn.attention.flex_attention:flex_attention", like="flex"),
    _drop_in(
        "torch.flex-compiled",
        ".torch:flex_compiled",
        "the same by torch.compile, which compiles for every shape: few are asked",
        like="flex",
        sizes={"B": (2,), "H": (2,), "K": (2,), "T": (16,), "S": (16, 64), "D": (16,), "E": (16,)},
        timeout=120.0,
    ),
    _row("npattn.torch", ".torch:npattn_torch",
         "npattn.torch.forward: the oracle on tensors, judged as anything else", like="npattn",
         needs=("torch",)),
    _row("npattn.torch-fused", ".torch:npattn_fused",
         "npattn.torch with engine=\"fused\": PyTorch's kernels in npattn's terms", like="npattn",
         needs=("torch",)),
)  # fmt: skip
_LENGTHS_OF_JAX = {"B": (2,), "H": (2, 4), "K": (2,), "T": (5, 1), "S": (7, 5), "D": (8,)}
_JAX = (
    _drop_in("jax.nn", ".jax:attention"),
    _drop_in("jax.nn.lengths", ".jax:attention", sizes=_LENGTHS_OF_JAX),
    _drop_in("flax.linen", ".flax:linen_attention", like="flax"),
    _drop_in("flax.nnx", ".flax:nnx_attention"),
    _drop_in("flax.nnx-weights", ".flax:nnx_weights"),
    _drop_in("haiku", ".haiku:attention"),
    _drop_in("equinox", ".equinox:attention"),
)
_OPERATOR = "operator Attention of ONNX"
_BY_ONNX = "by its reference evaluator; forward only"
_ONNX = (
    _row("onnx.reference", ".onnx:attention", f"{_OPERATOR}, opset 25, {_BY_ONNX}", like="onnx"),
    _row("onnxruntime", ".onnxruntime:attention",
         "operator Attention, opset 24, by ONNX Runtime on the CPU; forward only"),
)  # fmt: skip
_BACKENDS = (("numpy", "NumPy", ()), ("jax", "JAX", ("jax",)), ("torch", "PyTorch", ("torch",)))
_KERAS = (
    _drop_in("keras.numpy", ".keras:on_numpy", like="keras"),
    _drop_in("keras.jax", ".keras:on_jax", needs=("keras", "jax")),
    _drop_in("keras.torch", ".keras:on_torch", needs=("keras", "torch")),
    *(
        _drop_in(
            f"keras.{name}-{backend}",
            f".keras:{name}_{backend}",
            f"{PROFILES[f'keras.{name}'].about}, on {label}",
            like=f"keras.{name}",
            needs=("keras", *also),
        )
        for name in ("attention", "mha")
        for backend, label, also in _BACKENDS
    ),
)  # fmt: skip
_RELEASES = (
    ("1.18", "1.18.0", "1.18"),
    ("1.19", "1.19.0", "1.19"),
    ("1.20", "1.20.1", "1.21"),
    ("1.21", "1.21.0", "1.21"),
    ("1.22", "1.22.0", "1.22"),
)
"""Minor version of onnx, the release of it that is a target, and that of its profile."""
_RUNTIMES = (
    _row("onnx.body", ".onnx:body",
         "the function body of operator Attention of ONNX, opset 23, by its evaluator",
         like="onnx"),
    *(
        _row(
            f"onnx.reference@{version}",
            ".onnx:attention_23",
            f"{_OPERATOR}, opset 23, by the reference evaluator of {release}",
            like=f"onnx@{profile}",
            needs=("onnx",),
            pip=(f"onnx=={release}",),
        )
        for version, release, profile in _RELEASES
    ),
    _drop_in("onnxruntime.mha", ".onnxruntime:mha", pip=("onnx", "onnxruntime")),
    _row("onnxruntime.gqa", ".onnxruntime:gqa", pip=("onnx", "onnxruntime")),
    _drop_in("openvino", ".openvino:attention", pip=("openvino",)),
    _drop_in("keras.openvino", ".keras_others:attention", needs=("keras", "openvino"),
             pip=("keras", "openvino", "scipy"), environment={"KERAS_BACKEND": "openvino"}),
    _drop_in("keras.tensorflow", ".keras_others:attention", backward="tensorflow_backward",
             needs=("keras", "tensorflow"), pip=("tensorflow-cpu",),
             environment={"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}),
    _drop_in("paddle", ".paddle:attention", backward="attention_backward",
             pip=("paddlepaddle", "setuptools")),
    _drop_in(
        "tinygrad",
        ".tinygrad:attention",
        backward="attention_backward",
        pip=("tinygrad",),
        environment={"DEV": "PYTHON", "PARALLEL": "0"},
        # It compiles seconds for each new shape, and computes in Python.
        sizes={"B": (2,), "H": (2,), "D": (2,), "E": (2,), "T": (3, 1), "S": (4, 3)},
        timeout=60.0,
    ),
    _drop_in("ggml.flash", ".ggml:flash", like="ggml", needs=("xllamacpp",), pip=("xllamacpp",),
             **_FLOAT32),
    _drop_in("ncnn", ".ncnn:attention", pip=("ncnn",), **_FLOAT32),
)  # fmt: skip


def _of_numpy(name: str, pip: tuple[str, ...], **more: Any) -> Target:
    """Return the target of a layer in NumPy alone, which has a backward."""
    return _drop_in(name, f".numpy_public:{name}", backward=f"{name}_backward", pip=pip, **more)


_PUBLIC = (
    # Its backward has S × S numbers for every row.
    _of_numpy("numpy_ml", ("numpy-ml",), sizes={"T": _SHORT, "S": _SHORT}),
    _of_numpy("neuralnetlib", ("neuralnetlib",)),
    _of_numpy(
        "neuralnetworknumpy",
        ("neuralnetworknumpy", "regex"),
        needs=("neuralnetworknumpy", "regex"),  # it imports regex, and does not ask for it
    ),
    _drop_in("picogpt", ".numpy_public:picogpt", needs=("gpt2",),
             install="clone the repository jaymody/picoGPT and put it on PYTHONPATH"),
)  # fmt: skip


def _pallas(name: str, about: str, make: Callable[..., Target] = _row, **more: Any) -> Target:
    """Return the target of a kernel of JAX, interpreted, in float32."""
    more = {"needs": ("jax",), "project": "jax", **_FLOAT32, **more}
    return make(f"pallas.{name}", f".pallas:{name.replace('-', '_')}", about, **more)


_GPUS, _TPUS = (f"JAX's Pallas kernels for {device}, interpreted" for device in ("GPUs", "TPUs"))
_INTERPRETED = (
    _row("fla.parallel", ".fla:parallel",
         "fla.ops.attn.parallel_attn, a Triton kernel, in Triton's interpreter",
         **_in_triton(T=_FEW, S=_FEW)),
    _row("fla.decoding", ".fla:decoding",
         "one step of decoding by fla, a Triton kernel, in Triton's interpreter; forward only",
         **_in_triton(T=(1,), S=_LENGTHS)),
    _drop_in(
        "sageattention",
        ".sageattention:sageattn",
        "sageattn of SageAttention 1, int8, a Triton kernel in Triton's interpreter; forward only",
        rounding="int8",
        **_in_triton(T=_BLOCKS, S=_BLOCKS, D=(64,), E=(64,)),
    ),
    _pallas(
        "gpu",
        f"mha of {_GPUS}",
        # Its backward takes as many blocks of keys as of queries, of 64: one.
        sizes={"B": (1, 2), "H": (2, 1), "T": (16, 64, 5), "S": (64, 16, 33), "D": (16, 64)},
    ),
    _pallas("gpu-decode",
            "gqa of JAX's Pallas kernels for GPUs, one step of decoding, interpreted; forward only",
            sizes={"T": (1,), "S": (32, 64, 512)}),
    _pallas("gpu-paged", f"paged_attention of {_GPUS}; forward only", _drop_in,
            sizes=_ONE_STEP | {"D": (16,)}, timeout=120.0),
    _pallas("tpu-flash", f"flash_attention of {_TPUS}",
            sizes={"B": (1,), "H": (2,), "T": (128,), "S": (128,), "D": (16,)}, timeout=120.0),
    _pallas("tpu-splash", f"splash attention of {_TPUS}",
            sizes={"B": (1,), "H": (2,), "T": (128,), "S": (128,), "D": (16,), "E": (16,)},
            timeout=120.0),
    _pallas(
        "tpu-paged",
        f"paged_attention of {_TPUS}: k and v in bfloat16",
        _drop_in,
        dtypes=("bfloat16",),  # it rounds float32 to it
        sizes=_ONE_STEP | {"D": (128,)},
        timeout=120.0,
    ),
)  # fmt: skip
_FLASH = {
    "flash_attn": "flash_attn",
    "flash_attn.varlen": "flash_attn_varlen",
    "flash_attn.qkvpacked": "flash_attn_qkvpacked",
    "flash_attn.kvpacked": "flash_attn_kvpacked",
    "flash_attn.varlen-qkvpacked": "flash_attn_varlen_qkvpacked",
}
"""Functions of flash-attn, by target: each is called as its profile."""
_CUDA = (
    *(
        _drop_in(name, f"flash_attn:{function}_func", like=function, **_on_cuda("flash-attn"))
        for name, function in _FLASH.items()
    ),
    _drop_in("flash_attn.kvcache", "flash_attn:flash_attn_with_kvcache",
             like="flash_attn_with_kvcache", **_on_cuda("flash-attn", P=(256,))),
    _drop_in("vllm.paged", "vllm.vllm_flash_attn:flash_attn_varlen_func",
             **_on_cuda("vllm", P=(16,))),
    _drop_in("flash_attn_3", "flash_attn_interface:flash_attn_func", like="flash_attn@3",
             needs=("flash_attn_interface",),
             install="build hopper/ of the repository flash-attention", **_on_cuda()),
    _drop_in("flash_attn_4", "flash_attn.cute:flash_attn_func", like="flash_attn@4",
             needs=("flash_attn.cute",), **_on_cuda("flash-attn-4")),
    _drop_in("xformers", "xformers.ops:memory_efficient_attention", **_on_cuda("xformers")),
    *(
        _row(f"torch.sdpa-{name}", f".torch:sdpa_{name}",
             f"torch.sdpa, held to its {backend} backend",
             like="torch.sdpa", **_on_cuda() | {"sizes": {}})
        for name, backend in (("efficient", "EFFICIENT_ATTENTION"), ("cudnn", "CUDNN_ATTENTION"))
    ),
    _row("torch.flex-cuda", ".torch:flex_cuda",
         "FlexAttention by torch.compile: causal, window and mask as block masks, softcap, GQA",
         like="npattn", project="torch", timeout=120.0,
         **_on_cuda(B=(2,), H=(4,), K=(2, 4), T=(128, 33), S=(128, 257), D=(64,), E=(64,))),
    *(
        _drop_in(f"jax.nn-{name}", f".jax:{name}",
                 f'jax.nn.dot_product_attention with implementation="{name}"',
                 like="jax.nn", **_on_cuda() | {"sizes": {}})
        for name in ("cudnn", "xla")
    ),
    _row("pallas.gpu-cuda", ".pallas:gpu", "mha of JAX's Pallas kernels for GPUs, compiled",
         like="pallas.gpu", needs=("jax",), project="jax",
         **_on_cuda(T=(64, 128, 256, 5), S=(64, 128, 256, 33))),
    _row("fla.parallel-cuda", ".fla:parallel", like="fla.parallel", **_on_cuda("fla-core")),
    _row("fla.decoding-cuda", ".fla:decoding", like="fla.decoding", **_on_cuda("fla-core", T=(1,))),
    _drop_in("sageattention-cuda", ".sageattention:sageattn", like="sageattention",
             needs=("sageattention",), project="sageattention", rounding="int8",
             **_on_cuda("sageattention", D=(64, 128), E=(64, 128))),
    _row("flash_attn_triton", ".cuda:flash_attn_triton", "flash_attn_triton.flash_attn_func",
         like="flash_attn", **_on_cuda("flash-attn-triton", T=(128, 256, 5), S=(128, 256, 33))),
    _row("jvp_flash_attention", ".cuda:jvp_flash_attention",
         "jvp_flash_attention.jvp_attention.attention, a Triton kernel", like="npattn",
         project="jvp_flash_attention",
         **_on_cuda("jvp-flash-attention", T=(128, 256, 32), S=(128, 256, 32))),
    _row("flag_gems", ".cuda:flag_gems", "flag_gems.scaled_dot_product_attention, in Triton",
         like="torch.sdpa", **_on_cuda("flag-gems")),
    _row("transformers.flex", ".transformers:flex",
         "flex_attention_forward of Hugging Face's models", like="npattn", project="transformers",
         timeout=120.0,
         **_on_cuda(B=(2,), H=(4,), K=(2, 4), T=(128, 33), S=(128, 257), D=(64,), E=(64,))),
    _row("flashinfer", ".cuda:flashinfer", "flashinfer.single_prefill_with_kv_cache; forward only",
         **_on_cuda("flashinfer-python")),
    _drop_in("flashinfer.paged", ".cuda:flashinfer_paged",
             **_on_cuda("flashinfer-python", P=(16,))),
    _row("transformer_engine", ".cuda:transformer_engine",
         **_on_cuda("transformer-engine[pytorch]") | {"sizes": {}}),
    _row("thunderkittens", ".cuda:thunderkittens", needs=("_C",),
         install="build kernels/attention/mha_h100 of the repository ThunderKittens",
         **_on_cuda(T=(64, 128, 256), S=(64, 128, 256), D=(64, 128), E=(64, 128))),
)  # fmt: skip
_TRANSFORMERS = (
    *(
        _drop_in(
            f"transformers.{name}",
            f"transformers.models.{name}.modeling_{name}:eager_attention_forward",
            f"eager_attention_forward of Hugging Face's {name}",
            like="transformers",
        )
        for name in MODELS
    ),
    *(
        _drop_in(f"transformers.{name}", f".transformers:{name}")
        for name in ("gpt_oss", "bloom", "falcon", "sdpa")
    ),
)

_CPU = (*_NPATTN, *_TORCH, *_JAX, *_ONNX, *_KERAS, *_RUNTIMES)
_ALL = (*_CPU, _drop_in("mlx", ".mlx:attention"), *_PUBLIC, *_INTERPRETED, *_CUDA, *_TRANSFORMERS)
TARGETS = {target.name: target for target in _ALL}
"""The known targets, by name."""
