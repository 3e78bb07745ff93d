// A learned mixture of layers that lie side by side: γ·Σ softmax(w)ᵢ·layerᵢ. The definition is cpu/mix.rs.
//
// Legend: T tokens, n layers of W columns. Sums for the gradients of the weights are taken over chunks of rows with fixed borders, and the
// chunks are added in order.
//
// Compiled for the storage type STORE, and for EVEN rows of a layer or not.
#include "common.cuh"

#define THREADS 256

// As in mix.rs.
#define MOST 256

// softmax(w) in shared memory, known to all threads of the block.
__device__ __forceinline__ void shares_of(const float *weights, u32 n, float *shares) {
    float largest = -INFINITE, sum = 0.0f;
    for (u32 i = 0; i < n; i++) largest = fmaxf(largest, weights[i]);
    for (u32 i = 0; i < n; i++) sum += expf(weights[i] - largest);
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) shares[i] = expf(weights[i] - largest) / sum;
    __syncthreads();
}

// A thread has eight columns of a row.
extern "C" __global__ void __launch_bounds__(THREADS)
    forward(const STORE *x, const float *weights, const float *gamma, STORE *out, u32 rows, u32 n, u32 w) {
    __shared__ float shares[MOST];
    shares_of(weights, n, shares);
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, row = i / groups(w);
    const u32 c = (u32)(i % groups(w)) * 8;
    if (row >= rows) return;
    float sum[8] = {};
#pragma unroll 4
    for (u32 layer = 0; layer < n; layer++) {
        float v[8];
        load8<EVEN>(x + (row * n + layer) * w, c, w, v);
#pragma unroll
        for (int k = 0; k < 8; k++) sum[k] = fmaf(shares[layer], v[k], sum[k]);
    }
#pragma unroll
    for (int k = 0; k < 8; k++) sum[k] *= *gamma;
    store8<EVEN>(out + row * w, c, w, sum);
}

// Layer blockIdx.y in chunk blockIdx.x of the rows: dx, where it is wanted, and layer·dy into partial[chunk][layer].
extern "C" __global__ void __launch_bounds__(THREADS)
    backward(const STORE *x, const float *weights, const float *gamma, const STORE *dy, STORE *dx, double *partial, u32 rows,
             u32 n, u32 w, u32 chunk) {
    __shared__ float shares[MOST];
    __shared__ double space[32];
    shares_of(weights, n, shares);
    const u32 layer = blockIdx.y, units = groups(w), first = blockIdx.x * chunk, last = min(rows, first + chunk);
    const float factor = *gamma * shares[layer];
    const u64 end = (u64)(last - first) * units;
    double total = 0.0;
    for (u64 i = threadIdx.x; i < end; i += THREADS) {
        const u64 row = first + i / units, at = (row * n + layer) * w;
        const u32 c = (u32)(i % units) * 8;
        float v[8], d[8], dot = 0.0f;
        load8<EVEN>(x + at, c, w, v);
        load8<EVEN>(dy + row * w, c, w, d);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            dot = fmaf(v[k], d[k], dot);
            d[k] *= factor;
        }
        if (dx) store8<EVEN>(dx + at, c, w, d);
        total += (double)dot;
    }
    total = block_sum(total, space);
    if (threadIdx.x == 0) partial[(u64)blockIdx.x * n + layer] = total;
}

// The gradients of the weights and of γ from the chunks' sums; bit 0 of `add`: whether the weights' are added to, bit 1: that of γ.
extern "C" __global__ void __launch_bounds__(THREADS)
    finish(const double *partial, u32 chunks, const float *weights, const float *gamma, float *dweights, float *dgamma, u32 n,
           u32 add) {
    __shared__ float shares[MOST];
    __shared__ double dots[MOST];
    shares_of(weights, n, shares);
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        double sum = 0.0;
        for (u32 k = 0; k < chunks; k++) sum += partial[(u64)k * n + i];
        dots[i] = sum;
    }
    __syncthreads();
    double along = 0.0;
    for (u32 i = 0; i < n; i++) along += (double)shares[i] * dots[i];
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        const float d = (float)((double)*gamma * (double)shares[i] * (dots[i] - along));
        dweights[i] = add & 1 ? dweights[i] + d : d;
    }
    if (threadIdx.x == 0) *dgamma = add & 2 ? *dgamma + (float)along : (float)along;
}
