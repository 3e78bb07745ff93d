// Sorting indices with the places that they come from, stably, eight bits at a time from the lowest: equal indices keep
// their order, so sums over them always come out the same.
#include "common.cuh"

// Keys of a block: eight warps, each with this many rounds of 32 consecutive keys.
#define WARPS 8
#define ROUNDS 8
#define TILE (WARPS * ROUNDS * 32)
#define BINS 256

// Counts each warp's digits into `counts` (WARPS×BINS in shared memory).
__device__ __forceinline__ void count_digits(const u32 *keys, u32 n, u32 shift, u32 (*counts)[BINS]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (u32 i = threadIdx.x; i < WARPS * BINS; i += blockDim.x) counts[i / BINS][i % BINS] = 0;
    __syncthreads();
    const u32 first = blockIdx.x * TILE + warp * ROUNDS * 32 + lane;
    for (u32 k = 0; k < ROUNDS; k++) {
        const u32 i = first + k * 32;
        // What lies behind the end is in a bin of its own, which nobody reads.
        const u32 digit = i < n ? keys[i] >> shift & (BINS - 1) : BINS;
        const u32 peers = __match_any_sync(ALL_LANES, digit);
        if (digit < BINS && lane == __ffs(peers) - 1) counts[warp][digit] += __popc(peers);
        __syncwarp();
    }
    __syncthreads();
}

// totals[digit·gridDim.x + block]: how often the block's tile has the digit.
extern "C" __global__ void __launch_bounds__(WARPS * 32) histogram(const u32 *keys, u32 *totals, u32 n, u32 shift) {
    __shared__ u32 counts[WARPS][BINS];
    count_digits(keys, n, shift, counts);
    u32 total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) total += counts[w][threadIdx.x];
    totals[threadIdx.x * gridDim.x + blockIdx.x] = total;
}

// Each number becomes the sum of those before it. One block of 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) exclusive_sums(u32 *x, u32 n) {
    __shared__ u32 space[32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 carry = 0;
    for (u32 start = 0; start < n; start += 1024) {
        const u32 i = start + threadIdx.x, own = i < n ? x[i] : 0;
        u32 sum = own;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const u32 other = __shfl_up_sync(ALL_LANES, sum, offset);
            if (lane >= offset) sum += other;
        }
        if (lane == 31) space[warp] = sum;
        __syncthreads();
        u32 warps = space[lane];
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const u32 other = __shfl_up_sync(ALL_LANES, warps, offset);
            if (lane >= offset) warps += other;
        }
        const u32 before = __shfl_sync(ALL_LANES, warps, (warp + 31) % 32), all = __shfl_sync(ALL_LANES, warps, 31);
        if (i < n) x[i] = carry + (warp > 0 ? before : 0) + sum - own;
        carry += all;
        __syncthreads();
    }
}

// Puts keys and places in the order of the digit. Without `order_in` the place of a key is where it stands.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    reorder(const u32 *keys_in, const u32 *order_in, const u32 *starts, u32 *keys_out, u32 *order_out, u32 n, u32 shift) {
    __shared__ u32 counts[WARPS][BINS];
    count_digits(keys_in, n, shift, counts);
    // From counts to where each warp's keys with that digit go.
    u32 at = starts[threadIdx.x * gridDim.x + blockIdx.x];
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        const u32 count = counts[w][threadIdx.x];
        counts[w][threadIdx.x] = at;
        at += count;
    }
    __syncthreads();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 first = blockIdx.x * TILE + warp * ROUNDS * 32 + lane;
    for (u32 k = 0; k < ROUNDS; k++) {
        const u32 i = first + k * 32;
        const u32 key = i < n ? keys_in[i] : 0, digit = i < n ? key >> shift & (BINS - 1) : BINS;
        const u32 peers = __match_any_sync(ALL_LANES, digit);
        if (digit < BINS) {
            const u32 to = counts[warp][digit] + __popc(peers & ((1u << lane) - 1));
            keys_out[to] = key;
            order_out[to] = order_in ? order_in[i] : i;
        }
        __syncwarp();
        if (digit < BINS && lane == __ffs(peers) - 1) counts[warp][digit] += __popc(peers);
        __syncwarp();
    }
}
