// Additive attention: a key's score is v·tanh(query + key), and a query gets the mean of the values by the softmax of its scores. The
// definition is cpu/additive.rs.
//
// Legend: B sequences; N queries and M keys, those of a sequence side by side; A columns of projections, H of values.
//
// Scores are kept nowhere: how many there are depends on the lengths of sequences, with which a recorded graph may not change. A query keeps
// the logarithm of its softmax's sum, and each kernel computes the scores again that it needs, some 64 keys (or queries) at a time: a warp
// takes one after the other, and then every thread a column. So all sums have one order.
//
// Compiled for the storage type STORE.
#include "common.cuh"
#include "activation.cuh"

#define THREADS 256
#define WARPS (THREADS / 32)
#define TILE 64

// As in additive.rs.
struct Inputs {
    // N×A, or 0: then each sequence has one query that is zero. M×A, A, M×H.
    const STORE *queries, *keys;
    const float *v;
    const STORE *values;
    // B + 1, or 0; B + 1.
    const u32 *query_offsets, *key_offsets;
    u32 sequences, a, h;
};

// A sequence's part of the queries or the keys.
struct Range {
    u32 start, end;
};
__device__ __forceinline__ Range queries_of(const Inputs &in, u32 sequence) {
    if (!in.query_offsets) return {sequence, sequence + 1};
    return {in.query_offsets[sequence], in.query_offsets[sequence + 1]};
}
__device__ __forceinline__ Range keys_of(const Inputs &in, u32 sequence) {
    return {in.key_offsets[sequence], in.key_offsets[sequence + 1]};
}

// The sequence of a row; B for rows behind the last one. Without offsets, a sequence has one row.
__device__ __forceinline__ u32 sequence_of(const u32 *offsets, u32 sequences, u32 row) {
    if (!offsets) return min(row, sequences);
    u32 low = 0, high = sequences;
    while (low < high) {
        const u32 middle = (low + high) / 2;
        if (offsets[middle + 1] > row) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// The fast functions are off by some 2⁻²², and a score sums that over all columns: more than f32's own rounding.
__device__ __forceinline__ float tanh_of(float x) { return sizeof(STORE) == 4 ? tanhf(x) : hyperbolic::value(x); }
__device__ __forceinline__ float exp_of(float x) { return sizeof(STORE) == 4 ? expf(x) : exp_fast(x); }

// tanh(query + key) at a column.
__device__ __forceinline__ float bent(const Inputs &in, u32 query, u32 key, u32 c) {
    const float x = widen(in.keys[(u64)key * in.a + c]);
    return tanh_of(in.queries ? x + widen(in.queries[(u64)query * in.a + c]) : x);
}

// The score of a key, known to all lanes of the warp.
__device__ __forceinline__ float score(const Inputs &in, u32 query, u32 key) {
    float sum = 0.0f;
    for (u32 c = threadIdx.x % 32; c < in.a; c += 32) sum = fmaf(in.v[c], bent(in, query, key, c), sum);
    return warp_sum(sum);
}

// The product of a query's gradient with a value, known to all lanes of the warp.
__device__ __forceinline__ float along(const Inputs &in, const STORE *dout, u32 query, u32 key) {
    float sum = 0.0f;
    const STORE *d = dout + (u64)query * in.h, *value = in.values + (u64)key * in.h;
    for (u32 c = threadIdx.x % 32; c < in.h; c += 32) sum = fmaf(widen(d[c]), widen(value[c]), sum);
    return warp_sum(sum);
}

// Query blockIdx.x and 256 columns of the values. `sums` (N) gets the logarithm of the softmax's sum.
extern "C" __global__ void __launch_bounds__(THREADS) forward(Inputs in, float *sums, STORE *out) {
    __shared__ float scores[TILE];
    const u32 query = blockIdx.x, c = blockIdx.y * THREADS + threadIdx.x, warp = threadIdx.x / 32;
    const u32 sequence = sequence_of(in.query_offsets, in.sequences, query);
    float largest = -INFINITE, total = 0.0f, mean = 0.0f;
    if (sequence < in.sequences) {
        const Range keys = keys_of(in, sequence);
        for (u32 first = keys.start; first < keys.end; first += TILE) {
            const u32 count = min(keys.end - first, TILE);
            __syncthreads();
            for (u32 j = warp; j < count; j += WARPS) {
                const float x = score(in, query, first + j);
                if (threadIdx.x % 32 == 0) scores[j] = x;
            }
            __syncthreads();
            float top = largest;
            for (u32 j = 0; j < count; j++) top = fmaxf(top, scores[j]);
            const float shrunk = exp_of(largest - top);
            largest = top, total *= shrunk, mean *= shrunk;
            for (u32 j = 0; j < count; j++) {
                const float share = exp_of(scores[j] - largest);
                total += share;
                if (c < in.h) mean = fmaf(share, widen(in.values[(u64)(first + j) * in.h + c]), mean);
            }
        }
        mean /= total;
    }
    if (c < in.h) out[(u64)query * in.h + c] = narrow<STORE>(mean);
    if (c == 0) sums[query] = sequence < in.sequences ? largest + logf(total) : 0.0f;
}

// Query blockIdx.x and 256 columns of the projections: the gradients of the query (where there are queries) and of v by this query
// (dv: N×A). `means` (N) gets the mean of its products with the values, which the keys need.
extern "C" __global__ void __launch_bounds__(THREADS)
    of_queries(Inputs in, const float *sums, const STORE *dout, float *means, STORE *dqueries, float *dv) {
    __shared__ float dscores[TILE];
    __shared__ float space[32];
    const u32 query = blockIdx.x, c = blockIdx.y * THREADS + threadIdx.x, warp = threadIdx.x / 32;
    const u32 sequence = sequence_of(in.query_offsets, in.sequences, query);
    float dquery = 0.0f, dweight = 0.0f;
    if (sequence < in.sequences) {
        const Range keys = keys_of(in, sequence);
        const float sum = sums[query];
        float mean = 0.0f;
        for (u32 key = keys.start + warp; key < keys.end; key += WARPS) {
            const float share = exp_of(score(in, query, key) - sum), product = along(in, dout, query, key);
            if (threadIdx.x % 32 == 0) mean = fmaf(share, product, mean);
        }
        mean = block_sum(mean, space);
        if (c == 0) means[query] = mean;
        for (u32 first = keys.start; first < keys.end; first += TILE) {
            const u32 count = min(keys.end - first, TILE);
            __syncthreads();
            for (u32 j = warp; j < count; j += WARPS) {
                const float share = exp_of(score(in, query, first + j) - sum), product = along(in, dout, query, first + j);
                if (threadIdx.x % 32 == 0) dscores[j] = share * (product - mean);
            }
            __syncthreads();
            for (u32 j = 0; j < count && c < in.a; j++) {
                const float t = bent(in, query, first + j, c);
                dweight = fmaf(dscores[j], t, dweight);
                dquery = fmaf(dscores[j] * in.v[c], 1.0f - t * t, dquery);
            }
        }
    } else if (c == 0) {
        means[query] = 0.0f;
    }
    if (c >= in.a) return;
    dv[(u64)query * in.a + c] = dweight;
    if (dqueries) dqueries[(u64)query * in.a + c] = narrow<STORE>(dquery);
}

// Key blockIdx.x: blocks below `strips` have 256 columns of its projection's gradient each, those after them of its value's.
extern "C" __global__ void __launch_bounds__(THREADS)
    of_keys(Inputs in, const float *sums, const STORE *dout, const float *means, STORE *dkeys, STORE *dvalues, u32 strips) {
    __shared__ float shares[TILE];
    __shared__ float dscores[TILE];
    const bool value = blockIdx.y >= strips;
    const u32 key = blockIdx.x, warp = threadIdx.x / 32;
    const u32 c = (value ? blockIdx.y - strips : blockIdx.y) * THREADS + threadIdx.x, columns = value ? in.h : in.a;
    const u32 sequence = sequence_of(in.key_offsets, in.sequences, key);
    float gradient = 0.0f;
    if (sequence < in.sequences) {
        const Range queries = queries_of(in, sequence);
        for (u32 first = queries.start; first < queries.end; first += TILE) {
            const u32 count = min(queries.end - first, TILE);
            __syncthreads();
            for (u32 i = warp; i < count; i += WARPS) {
                const float share = exp_of(score(in, first + i, key) - sums[first + i]);
                const float product = value ? 0.0f : along(in, dout, first + i, key);
                if (threadIdx.x % 32 == 0) shares[i] = share, dscores[i] = share * (product - means[first + i]);
            }
            __syncthreads();
            for (u32 i = 0; i < count && c < columns; i++) {
                if (value) {
                    gradient = fmaf(shares[i], widen(dout[(u64)(first + i) * in.h + c]), gradient);
                } else {
                    const float t = bent(in, first + i, key, c);
                    gradient = fmaf(dscores[i] * in.v[c], 1.0f - t * t, gradient);
                }
            }
        }
    }
    if (c < columns) (value ? dvalues : dkeys)[(u64)key * columns + c] = narrow<STORE>(gradient);
}
