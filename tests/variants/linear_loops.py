"""Linear attention in plain Python loops over numbers, from its formulas: shares no code."""

import math

import numpy as np


def features(kind, row):
    if kind == "identity":
        return list(row)
    if kind == "relu":
        return [max(x, 0.0) for x in row]
    if kind == "elu":
        return [x + 1 if x > 0 else math.exp(x) for x in row]
    if kind == "softmax":
        e = [math.exp(x) for x in row]
        return [x / math.fsum(e) for x in e]
    return [float(kind(np.float64(x))) for x in row]


def delta_forward(q, k, v, *, beta, feature_map, scale=None, log_decay=None, initial_state=None):
    """Return out and state by the delta rule, one number after another."""
    (B, H, T, D), (_, K, _, _), E = q.shape, k.shape, v.shape[-1]
    scale = D**-0.5 if scale is None else scale
    g = np.zeros((B, K, T, D)) if log_decay is None else np.broadcast_to(log_decay, (B, K, T, D))
    betas = np.broadcast_to(beta, (B, K, T, 1))
    out, states = np.zeros((B, H, T, E)), np.zeros((B, K, D, E))
    for b, j in np.ndindex(B, K):
        state = [[0.0] * E for _ in range(D)]
        if initial_state is not None:
            state = np.broadcast_to(initial_state, (B, K, D, E))[b, j].tolist()
        for t in range(T):
            row = features(feature_map, k[b, j, t])
            state = [[math.exp(g[b, j, t, f]) * x for x in state[f]] for f in range(D)]
            for e in range(E):
                held = math.fsum(row[f] * state[f][e] for f in range(D))
                u = float(betas[b, j, t, 0]) * (float(v[b, j, t, e]) - held)
                for f in range(D):
                    state[f][e] += row[f] * u
            for h in range(j * H // K, (j + 1) * H // K):
                query = features(feature_map, q[b, h, t])
                for e in range(E):
                    out[b, h, t, e] = scale * math.fsum(query[f] * state[f][e] for f in range(D))
        states[b, j] = state
    return out, states


def forward(
    q, k, v, *, causal, feature_map, normalise, eps=0.0, scale=None, log_decay=None,
    initial_state=None, initial_normaliser=None,
):  # fmt: skip
    """Return out, state, normaliser of arrays (B, heads, length, size), by sums over keys.

    Query t of head h reads key s with the weight Σ_f φ(q)_f φ(k)_f Π_{s < r ≤ t} exp(g_rf), and the
    initial state with the product of all decays up to t.
    """
    (B, H, T, D), (_, K, S, _), E = q.shape, k.shape, v.shape[-1]
    scale = D**-0.5 if scale is None else scale
    g = np.zeros((B, K, S, D)) if log_decay is None else np.broadcast_to(log_decay, (B, K, S, D))
    S0 = np.zeros((B, K, D, E)) + (0 if initial_state is None else initial_state)
    z0 = np.zeros((B, K, D)) + (0 if initial_normaliser is None else initial_normaliser)
    out, state, normaliser = np.zeros((B, H, T, E)), np.zeros((B, K, D, E)), np.zeros((B, K, D))

    def decay(b, j, f, after, upto):
        return math.exp(math.fsum(float(g[b, j, r, f]) for r in range(after + 1, upto + 1)))

    for b in range(B):
        for j in range(K):
            phi = [features(feature_map, k[b, j, s]) for s in range(S)]
            for f in range(D):
                keys = [phi[s][f] * decay(b, j, f, s, S - 1) for s in range(S)]
                past = decay(b, j, f, -1, S - 1)
                normaliser[b, j, f] = math.fsum([*keys, past * z0[b, j, f]])
                for e in range(E):
                    parts = [keys[s] * v[b, j, s, e] for s in range(S)]
                    state[b, j, f, e] = math.fsum([*parts, past * S0[b, j, f, e]])
            for h in range(j * H // K, (j + 1) * H // K):
                for t in range(T):
                    row = [scale * x for x in features(feature_map, q[b, h, t])]
                    last = t if causal else S - 1
                    past = [row[f] * decay(b, j, f, -1, last) for f in range(D)]
                    weights = [
                        math.fsum(row[f] * phi[s][f] * decay(b, j, f, s, last) for f in range(D))
                        for s in range(last + 1)
                    ]
                    total = 1.0
                    if normalise:
                        total = eps + math.fsum(
                            [*weights, *(past[f] * z0[b, j, f] for f in range(D))]
                        )
                    for e in range(E):
                        parts = [weights[s] * v[b, j, s, e] for s in range(last + 1)]
                        parts += [past[f] * S0[b, j, f, e] for f in range(D)]
                        out[b, h, t, e] = math.fsum(parts) / total if total else 0.0
    return out, state, normaliser if normalise else None
