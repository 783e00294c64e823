/* Attention in float32, forward and backward, as a worker for npattn:
 *
 *     make && npattn check attention --worker ./attention
 */

#include "npattn_worker.h"

static const char *DESCRIPTION =
    "\"version\": 1, \"name\": \"attention\", \"gradients\": \"backward\", "
    "\"parameters\": ["
    "[\"q\", \"POSITIONAL_ONLY\", []], [\"k\", \"POSITIONAL_ONLY\", []], [\"v\", \"POSITIONAL_ONLY\", []], "
    "[\"mask\", \"KEYWORD_ONLY\", [null]], [\"causal\", \"KEYWORD_ONLY\", [false]], "
    "[\"scale\", \"KEYWORD_ONLY\", [null]], [\"return_lse\", \"KEYWORD_ONLY\", [false]]], "
    "\"backward\": ["
    "[\"dout\", \"POSITIONAL_ONLY\", []], "
    "[\"q\", \"POSITIONAL_ONLY\", []], [\"k\", \"POSITIONAL_ONLY\", []], [\"v\", \"POSITIONAL_ONLY\", []], "
    "[\"dlse\", \"KEYWORD_ONLY\", [null]], [\"mask\", \"KEYWORD_ONLY\", [null]], "
    "[\"causal\", \"KEYWORD_ONLY\", [false]], [\"scale\", \"KEYWORD_ONLY\", [null]]]";

typedef struct {
    npattn_tensor *q, *k, *v, *mask;
    size_t B, H, K, T, S, D, E;
    size_t step[4]; /* of the mask, 0 along an axis that it is broadcast along */
    float scale;
    int causal;
} problem;

static npattn_tensor *take(npattn_call *call, int position, const char *name)
{
    npattn_tensor *x = npattn_array(call, position, name);
    if (!x)
        npattn_raise("TypeError", "%s is missing", name);
    if (strcmp(x->dtype, "F32"))
        npattn_raise("ValueError", "%s has dtype %s, must have float32", name, x->dtype);
    if (x->rank != 4)
        npattn_raise("ValueError", "%s has rank %d, must have 4: (batch, heads, length, size)", name, x->rank);
    return x;
}

/* Raise unless x has this shape. */
static void check_shape(const char *name, const npattn_tensor *x, int rank, const size_t *shape)
{
    if (x->rank != rank || memcmp(x->shape, shape, (size_t)rank * sizeof *shape))
        npattn_raise("ValueError", "%s has a shape that does not fit the others", name);
}

static void take_mask(npattn_call *call, problem *p)
{
    const size_t scores[4] = {p->B, p->H, p->T, p->S};
    size_t step = 1;
    p->mask = npattn_array(call, NPATTN_TENSORS, "mask");
    if (!p->mask)
        return;
    if (strcmp(p->mask->dtype, "BOOL"))
        npattn_raise("TypeError", "mask has dtype %s, must have bool", p->mask->dtype);
    if (p->mask->rank < 2 || p->mask->rank > 4)
        npattn_raise("ValueError", "mask has rank %d, must have 2, 3 or 4", p->mask->rank);
    for (int n = 1; n <= p->mask->rank; n++) {
        size_t size = p->mask->shape[p->mask->rank - n];
        if (size != 1 && size != scores[4 - n])
            npattn_raise("ValueError", "mask does not broadcast against the scores");
        p->step[4 - n] = size == 1 ? 0 : step;
        step *= size;
    }
}

/* Return the problem of a call whose q stands at a position: 0, or 1 behind dout. */
static problem read_problem(npattn_call *call, int position)
{
    problem p = {0};
    p.q = take(call, position, "q");
    p.k = take(call, position + 1, "k");
    p.v = take(call, position + 2, "v");
    p.B = p.q->shape[0], p.H = p.q->shape[1], p.T = p.q->shape[2], p.D = p.q->shape[3];
    p.K = p.k->shape[1], p.S = p.k->shape[2], p.E = p.v->shape[3];
    check_shape("k", p.k, 4, (size_t[]){p.B, p.K, p.S, p.D});
    check_shape("v", p.v, 4, (size_t[]){p.B, p.K, p.S, p.E});
    if (p.K ? p.H % p.K : p.H)
        npattn_raise("ValueError", "q has %zu heads, must have a multiple of the %zu of k", p.H, p.K);
    take_mask(call, &p);
    p.causal = npattn_flag(call, "causal");
    p.scale = (float)npattn_number(call, "scale", p.D ? 1 / sqrt((double)p.D) : 1);
    if (!isfinite(p.scale))
        npattn_raise("ValueError", "scale must be finite in float32");
    return p;
}

static int sees(const problem *p, size_t b, size_t h, size_t t, size_t s)
{
    const unsigned char *mask = p->mask ? p->mask->data : NULL;
    if (p->causal && s + p->T > t + p->S) /* bottom-right: the last query sees the last key */
        return 0;
    return !mask || mask[b * p->step[0] + h * p->step[1] + t * p->step[2] + s * p->step[3]];
}

static float dot(const float *x, const float *y, size_t n)
{
    float sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += x[i] * y[i];
    return sum;
}

/* Rows of the arrays that belong to one query of one head. */
typedef struct {
    size_t query, key; /* index of the query's row; of the first key's row */
    float *weights;    /* of the keys that it sees, 0 for others */
    unsigned char *seen;
    float lse; /* −inf without a key */
} row;

/* Fill the weights and lse of a row; keys whose score is −inf leave as hidden ones do. */
static void attend(const problem *p, size_t b, size_t h, size_t t, row *r)
{
    const float *q = p->q->data, *k = p->k->data;
    float most = -INFINITY, sum = 0;
    r->query = (b * p->H + h) * p->T + t;
    r->key = (b * p->K + h / (p->H / p->K)) * p->S;
    for (size_t s = 0; s < p->S; s++) {
        float score = -INFINITY;
        if (sees(p, b, h, t, s))
            score = p->scale * dot(q + r->query * p->D, k + (r->key + s) * p->D, p->D);
        r->seen[s] = score != -INFINITY;
        r->weights[s] = score;
        if (score > most || isnan(score))
            most = score; /* NaN stays: nothing is more */
    }
    for (size_t s = 0; s < p->S; s++) {
        r->weights[s] = r->seen[s] ? expf(r->weights[s] - most) : 0;
        sum += r->weights[s];
    }
    r->lse = most == -INFINITY ? most : most + logf(sum);
    for (size_t s = 0; s < p->S; s++)
        r->weights[s] = r->seen[s] ? r->weights[s] / sum : 0;
}

static row make_row(const problem *p)
{
    row r = {0};
    r.weights = npattn_alloc(p->S * sizeof *r.weights);
    r.seen = npattn_alloc(p->S);
    return r;
}

static void forward(npattn_call *call)
{
    problem p = read_problem(call, 0);
    row r = make_row(&p);
    float *o = npattn_result(call, "o", "F32", 4, (size_t[]){p.B, p.H, p.T, p.E}), *lse = NULL;
    const float *v = p.v->data;
    if (npattn_flag(call, "return_lse"))
        lse = npattn_result(call, "lse", "F32", 3, (size_t[]){p.B, p.H, p.T});
    for (size_t b = 0; b < p.B; b++)
        for (size_t h = 0; h < p.H; h++)
            for (size_t t = 0; t < p.T; t++) {
                attend(&p, b, h, t, &r);
                if (lse)
                    lse[r.query] = r.lse;
                for (size_t s = 0; s < p.S; s++)
                    for (size_t e = 0; r.seen[s] && e < p.E; e++)
                        o[r.query * p.E + e] += r.weights[s] * v[(r.key + s) * p.E + e];
            }
}

static void backward(npattn_call *call)
{
    problem p = read_problem(call, 1);
    npattn_tensor *dout = take(call, 0, "dout"), *dlse = npattn_array(call, NPATTN_TENSORS, "dlse");
    row r = make_row(&p);
    float *dp = npattn_alloc(p.S * sizeof *dp);
    float *dq = npattn_result(call, "dq", "F32", 4, p.q->shape);
    float *dk = npattn_result(call, "dk", "F32", 4, p.k->shape);
    float *dv = npattn_result(call, "dv", "F32", 4, p.v->shape);
    const float *q = p.q->data, *k = p.k->data, *v = p.v->data;
    check_shape("dout", dout, 4, (size_t[]){p.B, p.H, p.T, p.E});
    if (dlse)
        check_shape("dlse", dlse, 3, p.q->shape);
    for (size_t b = 0; b < p.B; b++)
        for (size_t h = 0; h < p.H; h++)
            for (size_t t = 0; t < p.T; t++) {
                const float *from;
                float mean = 0;
                attend(&p, b, h, t, &r);
                from = (const float *)dout->data + r.query * p.E;
                for (size_t s = 0; s < p.S; s++) {
                    dp[s] = r.seen[s] ? dot(from, v + (r.key + s) * p.E, p.E) : 0;
                    mean += r.weights[s] * dp[s];
                }
                for (size_t s = 0; s < p.S; s++) {
                    size_t key = r.key + s;
                    float ds = dp[s] - mean + (dlse ? ((const float *)dlse->data)[r.query] : 0);
                    if (!r.seen[s])
                        continue;
                    ds *= p.scale * r.weights[s];
                    for (size_t d = 0; d < p.D; d++) {
                        dq[r.query * p.D + d] += ds * k[key * p.D + d];
                        dk[key * p.D + d] += ds * q[r.query * p.D + d];
                    }
                    for (size_t e = 0; e < p.E; e++)
                        dv[key * p.E + e] += r.weights[s] * from[e];
                }
            }
}

int main(void)
{
    return npattn_serve(DESCRIPTION, forward, backward);
}
