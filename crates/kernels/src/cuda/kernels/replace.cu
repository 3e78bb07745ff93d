// Replaced tokens: what was drawn is put into a text, and labels say which tokens are no longer what they were.
//
// Legend: T tokens, P places where something was drawn.
#include "common.cuh"

// The text as it was, and no token replaced.
extern "C" __global__ void __launch_bounds__(256) begin_replacing(const u32 *ids, u32 tokens, u32 *out, float *labels) {
    const u32 t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= tokens) return;
    out[t] = ids[t];
    labels[t] = 0.0f;
}

// A thread for each place; one that stands nowhere changes nothing.
extern "C" __global__ void __launch_bounds__(256)
    replace(const u32 *ids, const u32 *rows, const u32 *drawn, u32 count, u32 tokens, u32 *out, float *labels, u32 *fault) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const u32 row = rows[i];
    if (row == 0xffffffffu) return;
    if (row >= tokens) {
        report(fault, FAULT_REPLACE);
        return;
    }
    out[row] = drawn[i];
    labels[row] = drawn[i] != ids[row] ? 1.0f : 0.0f;
}

// Counts of tokens that are replaced, said to be, and both; whole numbers, so that their order does not matter.
extern "C" __global__ void __launch_bounds__(256)
    count_found(const float *logits, const float *labels, const float *weights, u32 tokens, u32 *counts) {
    u32 own[3] = {0, 0, 0};
    for (u32 t = blockIdx.x * blockDim.x + threadIdx.x; t < tokens; t += gridDim.x * blockDim.x) {
        if (!(weights[t] > 0.0f)) continue;
        const bool replaced = labels[t] > 0.5f, said = logits[t] > 0.0f;
        own[0] += replaced, own[1] += said, own[2] += replaced && said;
    }
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const u32 sum = warp_sum(own[i]);
        if (threadIdx.x % 32 == 0 && sum > 0) atomicAdd(&counts[i], sum);
    }
}
