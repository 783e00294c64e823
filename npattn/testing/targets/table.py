"""The implementations known by name, a row each."""

from __future__ import annotations

from typing import Any

from npattn.profiles import PROFILES
from npattn.testing.targets.target import Target

__all__ = ["MODELS", "TARGETS"]

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


def _row(name: str, home: str, profile: str, about: str | None = None, **more: Any) -> Target:
    """Return a target; `home` is ``module:function``, the module one of this folder after a dot.

    It needs the package that its name begins with, unless `needs` says otherwise.
    """
    module, _, function = home.partition(":")
    known = PROFILES[profile]
    if name.partition("@")[0] in _SINGLE:
        more["dtypes"] = ("float32",)
    needs = more.pop("needs", (name.partition(".")[0],))
    return Target(
        name,
        _HERE + module if module.startswith(".") else module,
        function,
        more.pop("backward", None),
        needs,
        known,
        known.about if about is None else about,
        **more,
    )


def _drop_in(name: str, home: str, profile: str, about: str | None = None, **more: Any) -> Target:
    """Return the target of a library's own function, called as its profile says."""
    return _row(name, home, profile, about, drop_in=True, **more)


def _of_model(name: str) -> Target:
    """Return the target of a model's eager attention."""
    return _drop_in(
        f"transformers.{name}",
        f"transformers.models.{name}.modeling_{name}:eager_attention_forward",
        "transformers",
        f"eager_attention_forward of Hugging Face's {name}",
    )


_SMALL = {"B": (1, 2), "H": (2, 1), "K": (1, 2), "D": (3, 8, 17), "E": (2, 8, 17)}
_LENGTHS = (5, 1, 3, 17, 33, 129)  # the last takes two tiles of queries
_SHORT = (5, 1, 3, 17, 33, 65)
_FEW = (5, 1, 17, 33)
_BLOCKS = (64, 5, 130, 1)  # whole tiles of 64 keys, and others
_IN_TRITON: dict[str, Any] = {
    "environment": {"TRITON_INTERPRET": "1"},
    "dtypes": ("float32",),
    "sizes": {**_SMALL, "T": _LENGTHS, "S": _LENGTHS},
    "timeout": 60.0,
}
"""Variables with which a Triton kernel runs without a GPU, and sizes that take minutes."""
_ON_CUDA: dict[str, Any] = {
    "dtypes": (),
    "device": "cuda",
    "sizes": {"D": (64, 32, 128), "E": (64, 32, 128)},
}

_ON_PAGES: dict[str, Any] = {**_ON_CUDA, "sizes": {**_ON_CUDA["sizes"], "P": (16,)}}
_NPATTN = (
    _row(
        "numpy.flash",
        ".numpy:flash",
        "npattn",
        "online softmax in float32 with backward, shipped with npattn",
        backward="flash_backward",
        needs=(),
    ),
    _row(
        "numpy.naive",
        ".numpy:naive",
        "npattn",
        "the textbook ten lines, shipped with npattn: what everybody writes first",
        needs=(),
    ),
)
_TORCH = (
    _row(
        "torch.sdpa",
        ".torch:sdpa",
        "torch.sdpa",
        "torch.nn.functional.scaled_dot_product_attention, as a user calls it",
    ),
    _row("torch.sdpa-math", ".torch:sdpa_math", "torch.sdpa", "the same, held to its MATH backend"),
    _row(
        "torch.sdpa-flash",
        ".torch:sdpa_flash",
        "torch.sdpa",
        "the same, held to its FLASH_ATTENTION backend",
    ),
    _drop_in("torch.nested", ".torch_modules:nested_sdpa", "torch.nested"),
    _drop_in("torch.mha", ".torch:mha", "torch.mha"),
    _drop_in("torch.mha-sdpa", ".torch:mha_sdpa", "torch.mha-sdpa"),
    _drop_in("torch.mha-fast", ".torch_modules:mha_fast", "torch.mha-fast"),
    _drop_in("torch.flex", "torch.nn.attention.flex_attention:flex_attention", "flex"),
    _drop_in(
        "torch.flex-compiled",
        ".torch_modules:flex_compiled",
        "flex",
        "the same by torch.compile, which compiles for every shape: few are asked",
        sizes={"B": (2,), "H": (2,), "K": (2,), "T": (16,), "S": (16, 64), "D": (16,), "E": (16,)},
        timeout=120.0,
    ),
    _row(
        "npattn.torch",
        ".torch:npattn_torch",
        "npattn",
        "npattn.torch.forward: the oracle on tensors, judged as anything else",
        needs=("torch",),
    ),
    _row(
        "npattn.torch-fused",
        ".torch:npattn_fused",
        "npattn",
        "npattn.torch with engine=\"fused\": PyTorch's kernels in npattn's terms",
        needs=("torch",),
    ),
)
_JAX = (
    _drop_in("jax.nn", ".jax:attention", "jax.nn"),
    _drop_in(
        "jax.nn.lengths",
        ".jax:attention",
        "jax.nn.lengths",
        sizes={"B": (2,), "H": (2, 4), "K": (2,), "T": (5, 1), "S": (7, 5), "D": (8,)},
    ),
    _drop_in("flax.linen", ".flax:linen_attention", "flax"),
    _drop_in("flax.nnx", ".flax:nnx_attention", "flax.nnx"),
    _drop_in("flax.nnx-weights", ".flax:nnx_weights", "flax.nnx-weights"),
    _drop_in("haiku", ".haiku:attention", "haiku"),
    _drop_in("equinox", ".equinox:attention", "equinox"),
)
_ONNX = (
    _row(
        "onnx.reference",
        ".onnx:attention",
        "onnx",
        "operator Attention of ONNX, opset 25, by its reference evaluator; forward only",
    ),
    _row(
        "onnxruntime",
        ".onnxruntime:attention",
        "onnxruntime",
        "operator Attention, opset 24, by ONNX Runtime on the CPU; forward only",
    ),
)
_ONNX_VERSIONS = (
    ("1.18", "1.18.0", "onnx@1.18"),
    ("1.19", "1.19.0", "onnx@1.19"),
    ("1.20", "1.20.1", "onnx@1.21"),
    ("1.21", "1.21.0", "onnx@1.21"),
    ("1.22", "1.22.0", "onnx@1.22"),
)
"""Minor version, the release of it that is a target, and its profile."""


def _of_onnx(version: str, release: str, profile: str) -> Target:
    """Return the target of an earlier version of onnx, in an environment of its own."""
    return _row(
        f"onnx.reference@{version}",
        ".onnx_versions:attention",
        profile,
        f"operator Attention of ONNX, opset 23, by the reference evaluator of {release}",
        needs=("onnx",),
        pip=(f"onnx=={release}",),
    )


_RUNTIMES = (
    _row(
        "onnx.body",
        ".onnx_versions:body",
        "onnx",
        "the function body of operator Attention of ONNX, opset 23, by its evaluator",
    ),
    *(_of_onnx(*row) for row in _ONNX_VERSIONS),
    _drop_in(
        "onnxruntime.mha",
        ".onnxruntime_contrib:mha",
        "onnxruntime.mha",
        pip=("onnx", "onnxruntime"),
    ),
    _row(
        "onnxruntime.gqa",
        ".onnxruntime_contrib:gqa",
        "onnxruntime.gqa",
        pip=("onnx", "onnxruntime"),
    ),
    _drop_in("openvino", ".openvino:attention", "openvino", pip=("openvino",)),
    _drop_in(
        "keras.openvino",
        ".keras_others:attention",
        "keras.openvino",
        needs=("keras", "openvino"),
        pip=("keras", "openvino", "scipy"),
        environment={"KERAS_BACKEND": "openvino"},
    ),
    _drop_in(
        "keras.tensorflow",
        ".keras_others:attention",
        "keras.tensorflow",
        backward="tensorflow_backward",
        needs=("keras", "tensorflow"),
        pip=("tensorflow-cpu",),
        environment={"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
    ),
    _drop_in(
        "paddle",
        ".paddle:attention",
        "paddle",
        backward="attention_backward",
        pip=("paddlepaddle", "setuptools"),
    ),
    _drop_in(
        "tinygrad",
        ".tinygrad:attention",
        "tinygrad",
        backward="attention_backward",
        pip=("tinygrad",),
        environment={"DEV": "PYTHON", "PARALLEL": "0"},
        # It compiles seconds for each new shape, and computes in Python.
        sizes={"B": (2,), "H": (2,), "D": (2,), "E": (2,), "T": (3, 1), "S": (4, 3)},
        timeout=60.0,
    ),
    _drop_in(
        "ggml.flash",
        ".ggml:flash",
        "ggml",
        needs=("xllamacpp",),
        pip=("xllamacpp",),
        dtypes=("float32",),
    ),
    _drop_in("ncnn", ".ncnn:attention", "ncnn", pip=("ncnn",), dtypes=("float32",)),
)
_KERAS = (
    _drop_in("keras.numpy", ".keras:on_numpy", "keras"),
    _drop_in("keras.jax", ".keras:on_jax", "keras.jax", needs=("keras", "jax")),
    _drop_in("keras.torch", ".keras:on_torch", "keras.torch", needs=("keras", "torch")),
    *(
        _drop_in(
            f"keras.{name}-{backend}",
            f".keras:{name}_{backend}",
            f"keras.{name}",
            f"{PROFILES[f'keras.{name}'].about}, on {label}",
            needs=("keras", *also),
        )
        for name in ("attention", "mha")
        for backend, label, also in (
            ("numpy", "NumPy", ()),
            ("jax", "JAX", ("jax",)),
            ("torch", "PyTorch", ("torch",)),
        )
    ),
)
_OTHERS = (_drop_in("mlx", ".mlx:attention", "mlx"),)
_PUBLIC = (
    _drop_in(
        "numpy_ml",
        ".numpy_public:numpy_ml",
        "numpy_ml",
        backward="numpy_ml_backward",
        pip=("numpy-ml",),
        sizes={"T": _SHORT, "S": _SHORT},  # its backward has S × S numbers for every row
    ),
    _drop_in(
        "neuralnetlib",
        ".numpy_public:neuralnetlib",
        "neuralnetlib",
        backward="neuralnetlib_backward",
        pip=("neuralnetlib",),
    ),
    _drop_in(
        "neuralnetworknumpy",
        ".numpy_public:neuralnetworknumpy",
        "neuralnetworknumpy",
        backward="neuralnetworknumpy_backward",
        needs=("neuralnetworknumpy", "regex"),  # it imports regex, and does not ask for it
        pip=("neuralnetworknumpy", "regex"),
    ),
    _drop_in(
        "picogpt",
        ".numpy_public:picogpt",
        "picogpt",
        needs=("gpt2",),
        install="clone the repository jaymody/picoGPT and put it on PYTHONPATH",
    ),
)
_INTERPRETED = (
    _row(
        "fla.parallel",
        ".fla:parallel",
        "fla.parallel",
        "fla.ops.attn.parallel_attn, a Triton kernel, in Triton's interpreter",
        **_IN_TRITON | {"sizes": {**_SMALL, "T": _FEW, "S": _FEW}},
    ),
    _row(
        "fla.decoding",
        ".fla:decoding",
        "fla.decoding",
        "one step of decoding by fla, a Triton kernel, in Triton's interpreter; forward only",
        **_IN_TRITON | {"sizes": {**_SMALL, "T": (1,), "S": _LENGTHS}},
    ),
    _drop_in(
        "sageattention",
        ".sageattention:sageattn",
        "sageattention",
        "sageattn of SageAttention 1, int8, a Triton kernel in Triton's interpreter; forward only",
        rounding="int8",
        **_IN_TRITON | {"sizes": {**_SMALL, "T": _BLOCKS, "S": _BLOCKS, "D": (64,), "E": (64,)}},
    ),
    _row(
        "pallas.gpu",
        ".pallas:gpu",
        "pallas.gpu",
        "mha of JAX's Pallas kernels for GPUs, interpreted",
        needs=("jax",),
        project="jax",
        dtypes=("float32",),
        # Its backward takes as many blocks of keys as of queries, of 64: one.
        sizes={"B": (1, 2), "H": (2, 1), "T": (16, 64, 5), "S": (64, 16, 33), "D": (16, 64)},
    ),
    _row(
        "pallas.gpu-decode",
        ".pallas:gpu_decode",
        "pallas.gpu-decode",
        "gqa of JAX's Pallas kernels for GPUs, one step of decoding, interpreted; forward only",
        needs=("jax",),
        project="jax",
        dtypes=("float32",),
        sizes={"T": (1,), "S": (32, 64, 512)},
    ),
    _drop_in(
        "pallas.gpu-paged",
        ".pallas:gpu_paged",
        "pallas.gpu-paged",
        "paged_attention of JAX's Pallas kernels for GPUs, interpreted; forward only",
        needs=("jax",),
        project="jax",
        dtypes=("float32",),
        sizes={"B": (2,), "H": (4,), "K": (2,), "T": (1,), "S": (13, 32), "D": (16,), "P": (16,)},
        timeout=120.0,
    ),
    _row(
        "pallas.tpu-flash",
        ".pallas:tpu_flash",
        "pallas.tpu-flash",
        "flash_attention of JAX's Pallas kernels for TPUs, interpreted",
        needs=("jax",),
        project="jax",
        dtypes=("float32",),
        sizes={"B": (1,), "H": (2,), "T": (128,), "S": (128,), "D": (16,)},
        timeout=120.0,
    ),
    _row(
        "pallas.tpu-splash",
        ".pallas:tpu_splash",
        "pallas.tpu-splash",
        "splash attention of JAX's Pallas kernels for TPUs, interpreted",
        needs=("jax",),
        project="jax",
        dtypes=("float32",),
        sizes={"B": (1,), "H": (2,), "T": (128,), "S": (128,), "D": (16,), "E": (16,)},
        timeout=120.0,
    ),
    _drop_in(
        "pallas.tpu-paged",
        ".pallas:tpu_paged",
        "pallas.tpu-paged",
        "paged_attention of JAX's Pallas kernels for TPUs, interpreted: k and v in bfloat16",
        needs=("jax",),
        project="jax",
        dtypes=("bfloat16",),  # it rounds float32 to it
        sizes={"B": (2,), "H": (4,), "K": (2,), "T": (1,), "S": (13, 32), "D": (128,), "P": (16,)},
        timeout=120.0,
    ),
)
_CUDA = (
    _drop_in(
        "flash_attn",
        "flash_attn:flash_attn_func",
        "flash_attn",
        pip=("flash-attn",),
        **_ON_CUDA,
    ),
    _drop_in(
        "flash_attn.varlen",
        "flash_attn:flash_attn_varlen_func",
        "flash_attn_varlen",
        pip=("flash-attn",),
        **_ON_CUDA,
    ),
    *(
        _drop_in(
            f"flash_attn.{name.replace('_', '-')}",
            f"flash_attn:flash_attn_{name}_func",
            f"flash_attn_{name}",
            pip=("flash-attn",),
            **_ON_CUDA,
        )
        for name in ("qkvpacked", "kvpacked", "varlen_qkvpacked")
    ),
    _drop_in(
        "flash_attn.kvcache",
        "flash_attn:flash_attn_with_kvcache",
        "flash_attn_with_kvcache",
        pip=("flash-attn",),
        **_ON_PAGES | {"sizes": {**_ON_CUDA["sizes"], "P": (256,)}},
    ),
    _drop_in(
        "vllm.paged",
        "vllm.vllm_flash_attn:flash_attn_varlen_func",
        "vllm.paged",
        pip=("vllm",),
        **_ON_PAGES,
    ),
    _drop_in(
        "flash_attn_3",
        "flash_attn_interface:flash_attn_func",
        "flash_attn@3",
        needs=("flash_attn_interface",),
        install="build hopper/ of the repository flash-attention",
        **_ON_CUDA,
    ),
    _drop_in(
        "flash_attn_4",
        "flash_attn.cute:flash_attn_func",
        "flash_attn@4",
        needs=("flash_attn.cute",),
        pip=("flash-attn-4",),
        **_ON_CUDA,
    ),
    _drop_in(
        "xformers",
        "xformers.ops:memory_efficient_attention",
        "xformers",
        pip=("xformers",),
        **_ON_CUDA,
    ),
    _row(
        "torch.sdpa-cudnn",
        ".cuda:sdpa_cudnn",
        "torch.sdpa",
        "torch.sdpa, held to its CUDNN_ATTENTION backend",
        device="cuda",
        dtypes=(),
    ),
    _row(
        "flashinfer",
        ".cuda:flashinfer",
        "flashinfer",
        "flashinfer.single_prefill_with_kv_cache; forward only",
        pip=("flashinfer-python",),
        **_ON_CUDA,
    ),
    _drop_in(
        "flashinfer.paged",
        ".cuda:flashinfer_paged",
        "flashinfer.paged",
        pip=("flashinfer-python",),
        **_ON_PAGES,
    ),
    _row(
        "transformer_engine",
        ".cuda:transformer_engine",
        "transformer_engine",
        pip=("transformer-engine[pytorch]",),
        device="cuda",
        dtypes=(),
    ),
    _row(
        "thunderkittens",
        ".cuda:thunderkittens",
        "thunderkittens",
        needs=("_C",),
        install="build kernels/attention/mha_h100 of the repository ThunderKittens",
        device="cuda",
        dtypes=(),
        sizes={"T": (64, 128, 256), "S": (64, 128, 256), "D": (64, 128), "E": (64, 128)},
    ),
)
_TRANSFORMERS = (
    *map(_of_model, MODELS),
    *(
        _drop_in(f"transformers.{name}", f".transformers:{name}", f"transformers.{name}")
        for name in ("gpt_oss", "bloom", "falcon", "sdpa")
    ),
)

_CPU = (*_NPATTN, *_TORCH, *_JAX, *_ONNX, *_KERAS, *_RUNTIMES, *_OTHERS, *_PUBLIC, *_INTERPRETED)
_ALL = (*_CPU, *_CUDA, *_TRANSFORMERS)
TARGETS = {target.name: target for target in _ALL}
"""The known targets, by name."""
