"""Targets that need CUDA, with stand-ins that have the signatures of the libraries."""

import inspect
import math
import sys
from dataclasses import replace
from types import ModuleType

import pytest

from npattn.errors import OptionError
from npattn.problem import Cotangents
from npattn.problem.options import FEATURES
from npattn.testing import Implementation, Recipe, check, compare
from npattn.testing.targets import TARGETS

torch = pytest.importorskip("torch")

ELSEWHERE = {"fla", "jax", "sageattention", "transformers"}
"""Projects whose targets on CUDA call what their tests call interpreted, or on a CPU."""
CUDA = [n for n, one in TARGETS.items() if one.device == "cuda" and one.project not in ELSEWHERE]
SIZES = {"lead": (2,), "H": 6, "K": 3, "T": 5, "S": 7, "D": 11, "E": 11}


def plain(q, k, v, visible=None, bias=None, scale=None, softcap=0.0, sinks=None):
    """o and lse of (B, H, T, D) in PyTorch; fully masked rows give 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], -1)
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return p[..., : k.shape[2]] @ v, lse


def band(T, S, causal, left, right):
    """What causal and a window leave, aligned to the bottom right; a side of None has no end."""
    gap = torch.arange(S)[None] - torch.arange(T)[:, None] - (S - T)
    visible = torch.ones(T, S, dtype=torch.bool)
    visible &= (gap <= 0) if causal else True
    visible &= (gap >= -left) if left is not None else True
    return visible & ((gap <= right) if right is not None else True)


FP8 = torch.float8_e4m3fn


def whole(x, descale):
    """Float32 (B, T, H, D) of float8 with factors (B, K), whose query heads share them."""
    group = x.shape[2] // descale.shape[1]
    return x.float() * descale.repeat_interleave(group, 1)[:, None, :, None]


def plain_fp8(q, k, v, descales, visible, scale, softcap, sinks=None, factor=256.0):
    """o in bfloat16 and lse of (B, T, H, D) in float8: P relative to its maximum, in float8 too."""
    q, k = (whole(x, y) for x, y in zip((q, k), descales[:2], strict=True))
    q, k, v = swap(q, k, v.float())
    group = q.shape[1] // k.shape[1]
    k, v, of_v = (x.repeat_interleave(group, 1) for x in (k, v, descales[2]))
    s = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s, S = s.masked_fill(~visible, -torch.inf), s.shape[-1]
    logits = torch.full((q.shape[1],), -torch.inf) if sinks is None else sinks.float()
    s = torch.cat([s, logits[:, None, None].expand(*s.shape[:3], 1)], -1)
    top = s.amax(-1, keepdim=True)
    p = (s - top.masked_fill(top == -torch.inf, 0)).exp()
    total, p = p.sum(-1, keepdim=True), p[..., :S]
    stored = (p * factor).to(FP8).float() / factor
    o = torch.where(visible[..., None], stored[..., None] * v[..., None, :, :], 0).sum(-2)
    o = o / total.masked_fill(total == 0, 1) * of_v[..., None, None]
    return o.bfloat16().transpose(1, 2), s.logsumexp(-1)


def swap(*arrays):
    return [x.transpose(1, 2) for x in arrays]


# --- stand-ins: the signatures are those of the libraries -----------------------------------------


def flash_attn_2(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    sides = [None if n < 0 else n for n in window_size]
    visible = band(q.shape[1], k.shape[1], causal, *sides)
    o, lse = plain(*swap(q, k, v), visible, scale=softmax_scale, softcap=softcap)
    o, lse = o.transpose(1, 2), lse.masked_fill(lse == -torch.inf, torch.inf).detach()
    return (o, lse, None) if return_attn_probs else o


def flash_attn_3(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    sides = [None if n < 0 else n for n in window_size]
    visible = band(q.shape[1], k.shape[1], causal, *sides)
    descales = q_descale, k_descale, v_descale
    assert (q.dtype == FP8) == all(x is not None and x.dtype == torch.float32 for x in descales)
    if q.dtype == FP8:
        assert all(x.shape == (q.shape[0], k.shape[2]) for x in descales)
        o, lse = plain_fp8(q, k, v, descales, visible, softmax_scale, softcap)
        return (o, lse) if return_attn_probs else o
    o, lse = plain(*swap(q, k, v), visible, scale=softmax_scale, softcap=softcap)
    return (o.transpose(1, 2), lse.detach()) if return_attn_probs else o.transpose(1, 2)


def flash_attn_4(
    q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
    deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
    aux_scalars=None, block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False,
):  # fmt: skip
    assert score_mod is None
    visible = band(q.shape[1], k.shape[1], causal, *window_size)
    o, lse = plain(
        *swap(q, k, v), visible, scale=softmax_scale, softcap=softcap, sinks=learnable_sink
    )
    return (o.transpose(1, 2), lse) if return_lse else o.transpose(1, 2)


def each(q, k, v, cu_q, keys, attend):
    """o and lse of packed queries; `keys` gives those of a sequence from k or v."""
    found = [
        attend(q[None, cu_q[b] : cu_q[b + 1]], keys(k, b)[None], keys(v, b)[None])
        for b in range(len(cu_q) - 1)
    ]
    return torch.cat([o[0] for o, *_ in found]), torch.cat([lse[0] for _, lse, *_ in found], -1)


def in_pages(table, lengths):
    """Return keys of a sequence from pages."""

    def keys(pages, b):
        rows = table[b, : -(-int(lengths[b]) // pages.shape[1])].long()
        return pages[rows].flatten(0, 1)[: lengths[b]]

    return keys


def flash_attn_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    o, lse = each(
        *(q, k, v, cu_seqlens_q),
        lambda x, b: x[cu_seqlens_k[b] : cu_seqlens_k[b + 1]],
        lambda *x: flash_attn_2(*x, 0.0, softmax_scale, causal, window_size, softcap, None, 0, 1),
    )
    return (o, lse, None) if return_attn_probs else o


def flash_attn_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    B, T = q.shape[:2]
    assert block_table is None or (cache_batch_idx is None and cache_leftpad is None)
    rows = torch.arange(B) if cache_batch_idx is None else cache_batch_idx
    first = torch.zeros(B, dtype=int) if cache_leftpad is None else cache_leftpad
    new = 0 if k is None else k.shape[1]

    def place(cache, b, begin, end):
        at, P = torch.arange(int(begin), int(end)), cache.shape[1]
        return (rows[b], at) if block_table is None else (block_table[b, at // P].long(), at % P)

    if rotary_cos is not None:
        assert new
        assert len(rotary_cos) >= (k_cache.shape[1] if block_table is None else 1)
        table = torch.complex(rotary_cos, rotary_sin)
        steps = torch.arange(max(T, new))
        along = causal or tuple(window_size) != (-1, -1)
        turned = [turn(q, table, cache_seqlens, steps[:T] * along, rotary_interleaved)]
        q, k = *turned, turn(k, table, cache_seqlens, steps[:new], rotary_interleaved)
    with torch.no_grad():
        for cache, x in ((k_cache, k), (v_cache, v)) if new else ():
            for b in range(B):
                cache[place(cache, b, cache_seqlens[b], cache_seqlens[b] + new)] = x[b]
    o, lse = each(
        *(q.flatten(0, 1), k_cache, v_cache, [b * T for b in range(B + 1)]),
        lambda cache, b: cache[place(cache, b, first[b], cache_seqlens[b] + new)],
        lambda *x: flash_attn_2(*x, 0.0, softmax_scale, causal, window_size, softcap, None, 0, 1),
    )
    o, lse = o.unflatten(0, (B, T)), lse.unflatten(1, (B, T)).transpose(0, 1)
    return (o, lse) if return_softmax_lse else o


def turn(x, table, begin, steps, interleaved):
    """Turn features of (B, T, H, D) by numbers of absolute value 1, which a table has."""
    half = table.shape[1]
    own, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = own.unflatten(-1, (half, 2)) if interleaved else own.unflatten(-1, (2, half)).mT
    turned = torch.view_as_real(
        torch.view_as_complex(pairs.contiguous())
        * table[(begin[:, None] + steps).long()][:, :, None]
    )
    return torch.cat([(turned if interleaved else turned.mT).flatten(-2), rest], -1)


def flash_attn_qkvpacked(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return flash_attn_2(
        *(*qkv.unbind(2), 0.0, softmax_scale, causal, window_size, softcap, None, 0),
        return_attn_probs,
    )


def flash_attn_kvpacked(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    return flash_attn_2(
        *(q, *kv.unbind(2), 0.0, softmax_scale, causal, window_size, softcap, None, 0),
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
):  # fmt: skip
    return flash_attn_varlen(
        *(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, softmax_scale),
        *(causal, window_size, softcap, None, 0, return_attn_probs),
    )


def vllm_flash_attn(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None,
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=None, softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
    return_softmax_lse=False, out=None, scheduler_metadata=None, q_descale=None, k_descale=None,
    v_descale=None, num_splits=0, fa_version=3, s_aux=None,
):  # fmt: skip
    assert cu_seqlens_k is None
    assert max_seqlen_k == seqused_k.max()
    sides = [None if n < 0 else n for n in window_size or (-1, -1)]
    rows = iter(range(len(seqused_k)))

    def attend(q, k, v):
        visible = band(q.shape[1], k.shape[1], causal, *sides)
        if q.dtype == FP8:
            b = next(rows)
            own = [x[b : b + 1] for x in (q_descale, k_descale, v_descale)]
            o, lse = plain_fp8(q, k, v, own, visible, softmax_scale, softcap, s_aux)
            return o, lse.masked_fill(lse == -torch.inf, torch.inf)
        arrays = swap(q, k, v)
        o, lse = plain(*arrays, visible, scale=softmax_scale, softcap=softcap, sinks=s_aux)
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        return o.transpose(1, 2), lse.detach()

    o, lse = each(q, k, v, cu_seqlens_q, in_pages(block_table, seqused_k), attend)
    return (o, lse) if return_softmax_lse else o


def one_mask(
    q, k, v, attn_mask=None, causal=False, sm_scale=None, is_causal=False, scale=None,
    enable_gqa=False,
):  # fmt: skip
    visible = torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool)
    visible = visible.tril() if causal or is_causal else visible
    assert attn_mask is None or attn_mask.shape == visible.shape
    kept = attn_mask is not None and attn_mask.dtype == torch.bool
    seen, bias = (visible & attn_mask, None) if kept else (visible, attn_mask)
    return plain(q, k, v, seen, bias, scale if sm_scale is None else sm_scale)[0]


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        self.heads_first = kv_layout == "HND"
        assert kv_layout in ("NHD", "HND")

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        self.sizes = (num_qo_heads, head_dim_qk), (page_size, num_kv_heads, head_dim_vo)
        self.offsets, self.causal = (qo_indptr, paged_kv_indptr), causal
        self.pages, self.last = paged_kv_indices, paged_kv_last_page_len
        self.scale, self.softcap, self.mask = sm_scale, logits_soft_cap, custom_mask

    def run(self, q, paged_kv_cache, *, return_lse=False):
        if self.heads_first:
            paged_kv_cache = swap(*paged_kv_cache)
        assert (q.shape[1:], paged_kv_cache[1].shape[1:]) == self.sizes
        (cu_q, offsets), masks = self.offsets, self.mask

        def keys(pages, b):
            own = self.pages[offsets[b] : offsets[b + 1]].long()
            length = max(len(own) - 1, 0) * pages.shape[1] + self.last[b]
            return pages[own].flatten(0, 1)[:length]

        def attend(q, k, v):
            nonlocal masks
            T, S = q.shape[1], k.shape[1]
            visible = band(T, S, self.causal, None, None)
            if masks is not None:
                visible, masks = masks[: T * S].unflatten(0, (T, S)), masks[T * S :]
            arrays = swap(q, k, v)
            o, lse = plain(*arrays, visible, scale=self.scale, softcap=self.softcap or 0)
            return o.transpose(1, 2), lse / math.log(2)

        o, lse = each(q, *paged_kv_cache, cu_q, keys, attend)
        return (o, lse.T.detach()) if return_lse else o


def memory_efficient_attention(
    query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None
):
    o, _ = plain(*swap(query, key, value), bias=attn_bias, scale=scale)
    return o.transpose(1, 2)


def single_prefill_with_kv_cache(
    q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None,
    packed_custom_mask=None, causal=False, kv_layout="NHD", pos_encoding_mode="NONE",
    use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
    rope_scale=None, rope_theta=None, backend="auto", return_lse=False, kv_cache_sf=None,
    k_scale=None, v_scale=None,
):  # fmt: skip
    causal = causal and custom_mask is None
    left = None if window_left < 0 else window_left
    visible = band(q.shape[0], k.shape[0], causal, left, None)
    visible = visible if custom_mask is None else visible & custom_mask
    arrays = swap(*(x.detach()[None] for x in (q, k, v)))
    o, lse = plain(*arrays, visible, scale=sm_scale, softcap=logits_soft_cap or 0)
    o, lse = o[0].transpose(0, 1), lse[0].T / math.log(2)
    return (o, lse) if return_lse else o


class DotProductAttention:
    def __init__(
        self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0,
        qkv_format="sbhd", attn_mask_type="causal", window_size=None, bottom_right_diagonal=None,
        softmax_scale=None, softmax_type="vanilla",
    ):  # fmt: skip
        assert qkv_format == "bshd"
        self.sizes = (num_attention_heads, num_gqa_groups, *kv_channels)
        self.kind, self.window, self.scale = attn_mask_type, window_size, softmax_scale

    def __call__(
        self, query_layer, key_layer, value_layer, attention_mask=None,
        core_attention_bias_type="no_bias", core_attention_bias=None,
    ):  # fmt: skip
        q, k, v = swap(query_layer, key_layer, value_layer)
        assert self.sizes == (q.shape[1], k.shape[1], q.shape[3], v.shape[3])
        assert (core_attention_bias is None) == (core_attention_bias_type == "no_bias")
        sides = [None if n < 0 else n for n in self.window]
        visible = band(q.shape[2], k.shape[2], self.kind == "causal_bottom_right", *sides)
        if self.kind == "arbitrary":
            visible = visible & ~attention_mask
        o, _ = plain(q, k, v, visible, core_attention_bias, self.scale)
        return o.transpose(1, 2).flatten(2)


def mha_forward(q, k, v, causal):
    T = q.shape[2]
    visible = band(T, T, causal, None, None)
    o, lse = plain(*(x.float() for x in (q, k, v)), visible)
    return o.to(q.dtype), lse[..., None]


def mha_backward(q, k, v, o, l_vec, og, causal):
    with torch.enable_grad():
        inputs = [x.detach().float().requires_grad_() for x in (q, k, v)]
        visible = band(q.shape[2], q.shape[2], causal, None, None)
        out, _ = plain(*inputs, visible)
        return torch.autograd.grad(out, inputs, og.float())


@pytest.fixture
def libraries(monkeypatch):
    """The libraries in sys.modules, as stand-ins."""
    contents = {
        "flash_attn": {
            "flash_attn_func": flash_attn_2,
            "flash_attn_varlen_func": flash_attn_varlen,
            "flash_attn_with_kvcache": flash_attn_kvcache,
            "flash_attn_qkvpacked_func": flash_attn_qkvpacked,
            "flash_attn_kvpacked_func": flash_attn_kvpacked,
            "flash_attn_varlen_qkvpacked_func": flash_attn_varlen_qkvpacked,
        },
        "vllm": {},
        "vllm.vllm_flash_attn": {"flash_attn_varlen_func": vllm_flash_attn},
        "flash_attn_interface": {"flash_attn_func": flash_attn_3},
        "flash_attn.cute": {"flash_attn_func": flash_attn_4},
        "xformers": {},
        "xformers.ops": {"memory_efficient_attention": memory_efficient_attention},
        "flashinfer": {
            "single_prefill_with_kv_cache": single_prefill_with_kv_cache,
            "BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper,
        },
        "transformer_engine": {},
        "transformer_engine.pytorch": {"DotProductAttention": DotProductAttention},
        "_C": {"mha_forward": mha_forward, "mha_backward": mha_backward},
        "flash_attn_triton": {"flash_attn_func": flash_attn_2},
        "jvp_flash_attention.jvp_attention": {"attention": one_mask},
        "flag_gems.ops.attention": {"scaled_dot_product_attention": one_mask},
    }
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    monkeypatch.setattr("npattn.testing.targets.torch._compile", lambda: flex)
    for name, functions in contents.items():
        module = ModuleType(name)
        vars(module).update(functions, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)


def read(name):
    """Return the target as the judge reads it, wherever it runs."""
    target = TARGETS[name]
    found = Implementation(target.load()[0], like=target.like, framework="torch")
    found.conventions = target.conventions
    return found


def compare_all(found, recipe):
    """Compare o, lse and every gradient with the oracle, within the derived tolerance."""
    problem = recipe.problem(found.conventions.causal)
    cotangents = Cotangents(recipe.cotangents(problem).dout, None)
    results = dict(found.forward(problem).pairs)
    forward_only = [TARGETS[name].load()[0] for name in ("flashinfer", "torch.flex-cuda")]
    if found.has_gradients and found.f not in forward_only:  # the latter on a CPU
        results |= dict(found.gradients(problem, cotangents).pairs)
    wrong = [
        str(comparison)
        for comparison in compare(
            results, problem, dout=cotangents.dout, conventions=found.conventions
        )
        if not comparison.passed
    ]
    assert wrong == []
    return set(results)


# --- what is asked --------------------------------------------------------------------------------

WAYS = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.75},
    "window": {"window": (2, 1)},
    "window to the left": {"window": (3, None)},
    "causal window": {"causal": True, "window": (1, 0)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "mask": {"mask": "matrix", "scale": 0.75},
    "mask and causal": {"mask": "padding", "causal": True},
    "bias": {"bias": "full", "mask": "padding"},
    "bias alone": {"bias": "heads", "scale": 0.75},
    "causal that hides all of a row": {"causal": True, "T": 7, "S": 5},
    "lengths": {"mask": "padding"},
    "a length of 0": {"mask": "empty padding"},
}
STORED = ("flash_attn.varlen", "flash_attn.kvcache", "vllm.paged")
PACKED = ("flash_attn.qkvpacked", "flash_attn.varlen-qkvpacked")
NOT_ASKED = {
    *((name, way) for name in STORED for way in ("mask", "mask and causal")),
    ("flashinfer", "window"),  # it has an end to the right
    ("flashinfer", "mask and causal"),
    *((name, "bias") for name in ("jvp_flash_attention", "flag_gems")),  # and a mask
}


FLASH = {"causal", "scale", "softcap", "window"}
SDPA = {"bias", "causal", "mask", "scale"}
HAS = {
    "flash_attn": FLASH,
    "flash_attn.varlen": {*FLASH, "mask"},
    "flash_attn.kvcache": {*FLASH, "mask"},
    "flash_attn.qkvpacked": FLASH,
    "flash_attn.kvpacked": FLASH,
    "flash_attn.varlen-qkvpacked": FLASH,
    "vllm.paged": {*FLASH, "mask", "sinks"},
    "flashinfer.paged": {*FLASH, "mask"} - {"window"},
    "flash_attn_3": FLASH,
    "flash_attn_4": {*FLASH, "sinks", "score_mod"},
    "xformers": {"bias", "scale"},
    "flashinfer": {*FLASH, "mask"},
    "transformer_engine": {"bias", "causal", "mask", "scale", "window"},
    "thunderkittens": {"causal"},
    "torch.sdpa-cudnn": SDPA,
    "torch.sdpa-efficient": SDPA,
    "jvp_flash_attention": SDPA,
    "flag_gems": SDPA,
    "torch.flex-cuda": {*FLASH, "mask"},
    "flash_attn_triton": {"causal", "scale"},
}


# Compiling takes a minute: here FlexAttention runs as it is written.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for name in CUDA
        for way, options in WAYS.items()
        if name not in ("torch.sdpa-cudnn", "torch.sdpa-efficient", "thunderkittens")
        and set(options) & set(FEATURES) <= HAS[name]
    ],
)
def test_adapter_agrees_with_the_oracle(libraries, name, way):
    found = read(name)
    recipe = Recipe(**(SIZES | WAYS[way]), seed=3)
    if name == "xformers":
        recipe = Recipe(**(SIZES | WAYS[way] | {"K": 6}), seed=3)
    if name in (*PACKED, "jvp_flash_attention"):
        recipe = replace(recipe, K=6, S=recipe.T)
    if (name, way) in NOT_ASKED:
        with pytest.raises(
            Exception, match=r"right|ignored beside|lengths alone|would count|or added"
        ):
            found.forward(recipe.problem(found.conventions.causal))
    else:
        names = compare_all(found, recipe)
        assert ("lse" in names) == ("return_lse" in found.returns)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["flash_attn.kvcache", "flashinfer.paged"])
def test_caches_and_pages_are_judged_in_every_way(libraries, monkeypatch, name):
    monkeypatch.setattr("npattn.testing.targets.cuda.WORKSPACE", 16)  # nobody works in it here
    rules = ["agreement-o", "inputs-unchanged", "other-sequences"]
    sizes = {"P": (4,), "T": (3, 1, 5), "S": (5, 7, 11), "D": (11, 16, 37)}
    report = check(read(name), examples=10, only=rules, sizes=sizes, shrink=False)
    assert report.passed, str(report)
    assert {o.rule: o.status for o in report.outcomes} == dict.fromkeys(rules, "passed")


IN_8_BITS = ("flash_attn_3", "vllm.paged")
ASKED = {"dtypes": ("bfloat16",), "examples": 6, "only": ["agreement-o", "other-sequences"]}


def read_fp8(name, f=None, quantized="fp8"):
    """Return a target as `--like` reads it in float8."""
    target = TARGETS[name]
    f = target.load()[0] if f is None else f
    return Implementation(f, like=target.like, framework="torch", quantized=quantized)


@pytest.mark.thorough
@pytest.mark.parametrize("name", IN_8_BITS)
def test_profile_knows_the_factors_of_float8(libraries, name):
    found = read_fp8(name)
    assert found.quantized.words.endswith("v in float8_e4m3fn with factors (B, K)")
    assert not any("descale" in line for line in found.untested)
    report = check(found, **ASKED, rounding="fp8")
    assert report.passed, str(report)
    assert {o.rule: o.worst for o in report.outcomes}["agreement-o"] > 0
    unasked = read(name)
    assert unasked.quantized is None
    assert sum("unless quantized=" in line for line in unasked.untested) == 3


@pytest.mark.thorough
def test_factor_of_k_for_v_is_named_in_the_words_of_the_system(libraries):
    def wrong(
        q, k, v, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None
    ):
        return flash_attn_3(q, k, v, softmax_scale, causal, None, q_descale, k_descale, k_descale)

    report = check(read_fp8("flash_attn_3", wrong), **ASKED)
    assert [c.text for c in report.causes] == ["v is multiplied by k_descale, must be by v_descale"]


def test_profile_takes_no_other_format(libraries):
    with pytest.raises(OptionError, match=r"quantized is 'int8', must be float8_e4m3fn: flash"):
        read_fp8("flash_attn_3", quantized="int8")


@pytest.mark.parametrize("causal", [False, True])
def test_thunderkittens_agrees_in_bfloat16(libraries, causal):
    sizes = {"lead": (2,), "H": 4, "K": 2, "T": 64, "S": 64, "D": 64, "E": 64}
    names = compare_all(
        read("thunderkittens"), Recipe(**sizes, dtype="bfloat16", causal=causal, seed=5)
    )
    assert names == {"o", "dq", "dk", "dv"}


def test_cudnn_is_asked_by_its_backend(monkeypatch):
    from npattn.testing.targets import torch as targets

    def enabled(*_, **options):
        assert options == {"causal": True}
        return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()

    monkeypatch.setattr(targets, "sdpa", enabled)
    assert targets.sdpa_cudnn(*torch.ones(3, 1, 1, 2, 2), causal=True) == (False, True)


@pytest.mark.parametrize("name", CUDA)
def test_every_name_of_a_profile_is_a_parameter(libraries, name):
    target = TARGETS[name]
    assert read(name).features == HAS[name]
    if target.drop_in:
        assert set(target.profile.signature) <= set(inspect.signature(target.load()[0]).parameters)
    assert ("score_mod" in HAS[name]) == ("score_mod" in target.profile.refused_names)


@pytest.mark.parametrize(
    ("name", "shapes", "options", "message"),
    [
        ("flashinfer", [(2, 3, 5, 11), (1, 3, 7, 11)], {}, "4 axes, with one B"),
        ("flashinfer", [(2, 3, 5, 11), (2, 3, 7, 11)], {"mask": (3, 5, 7)}, "one matrix for all"),
        ("transformer_engine", [(3, 5, 11), (3, 7, 11)], {}, "4 axes, with one B"),
        ("thunderkittens", [(2, 3, 5, 11), (2, 3, 7, 11)], {}, "with one T and one D"),
        ("torch.flex-cuda", [(2, 3, 5, 11), (1, 3, 7, 11)], {}, "4 axes, with one B"),
        ("flag_gems", [(3, 5, 11), (3, 7, 11)], {}, "4 axes, with one B"),
        ("jvp_flash_attention", [(2, 3, 5, 11), (2, 3, 7, 11)], {}, "one shape"),
        ("thunderkittens", [(2, 3, 5, 11), (2, 3, 5, 11)], {}, "it takes bfloat16"),
    ],
)
def test_adapter_refuses_what_is_not_there(libraries, name, shapes, options, message):
    f, _ = TARGETS[name].load()
    q, k = (torch.ones(shape) for shape in shapes)
    masks = {n: torch.ones(shape, dtype=torch.bool) for n, shape in options.items()}
    with pytest.raises(ValueError, match=message):
        f(q, k, k, **masks)


@pytest.mark.parametrize("name", CUDA)
def test_target_that_needs_cuda_says_so(monkeypatch, tmp_path, name):
    monkeypatch.setattr("npattn.testing.targets.target.DRIVER", tmp_path / "none")
    assert TARGETS[name].lacks == "an NVIDIA GPU, and there is none here"
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr("npattn.testing.targets.target.DRIVER", driver)
    if TARGETS[name].needs != ("torch",):
        assert "which is not installed: " in (TARGETS[name].lacks or "")
    if TARGETS[name].install:
        assert "which is not installed: to install it, build " in TARGETS[name].lacks
