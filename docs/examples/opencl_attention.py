"""Attention in OpenCL, one work item for each query [docs/how-to/triton-on-a-laptop.md]."""

import math

import numpy as np
import pyopencl as cl

SOURCE = """
__kernel void attend(__global const float *q, __global const float *k, __global const float *v,
                     __global float *o, float scale, int causal,
                     int heads, int shared, int T, int S, int D, int E)
{
    int row = get_global_id(0), h = row / T, t = row % T;
    q += row * D; o += row * E;
    k += h / (heads / shared) * S * D; v += h / (heads / shared) * S * E;
    float top = -INFINITY, total = 0;
    for (int e = 0; e < E; e++) o[e] = 0;
    for (int s = 0; s < S; s++) {
        if (causal && s > t + S - T) continue;
        float x = 0;
        for (int d = 0; d < D; d++) x += q[d] * k[s * D + d];
        x *= scale;
        float new = fmax(top, x), shrink = exp(top - new), p = exp(x - new);
        total = total * shrink + p;
        for (int e = 0; e < E; e++) o[e] = o[e] * shrink + p * v[s * E + e];
        top = new;
    }
    for (int e = 0; e < E; e++) o[e] = total > 0 ? o[e] / total : 0;
}
"""
context = cl.Context([cl.get_platforms()[0].get_devices()[0]])
program = cl.Program(context, SOURCE).build()


def attention(q, k, v, *, causal=False, scale=None):
    if q.ndim != 4 or q.shape[0] != k.shape[0] or 0 in q.shape + v.shape:
        raise ValueError("q, k, v must have four axes, one B and no size of 0")
    if q.dtype != np.float32:
        raise TypeError("the kernel takes float32")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    (B, H, T, D), (K, S), E = q.shape, k.shape[1:3], v.shape[3]
    o = np.empty((B, H, T, E), q.dtype)
    flags = cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR
    inputs = [cl.Buffer(context, flags, hostbuf=np.ascontiguousarray(x)) for x in (q, k, v)]
    out = cl.Buffer(context, cl.mem_flags.WRITE_ONLY, o.nbytes)
    sizes = map(np.int32, (causal, B * H, B * K, T, S, D, E))
    with cl.CommandQueue(context) as queue:
        cl.Kernel(program, "attend")(
            queue, (B * H * T,), None, *inputs, out, np.float32(scale), *sizes
        )
        cl.enqueue_copy(queue, o, out)
    return o
