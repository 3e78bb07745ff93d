// Sums and extremes over whole buffers, in two stages: a fixed number of blocks, each with its own range, then one block
// that takes the ranges in order.
#include "common.cuh"

#define THREADS 256
#define TURNS 4

// Σ x² of each block's range, in f64 over f32 sums of a thread's elements.
extern "C" __global__ void __launch_bounds__(THREADS) squares(const float *x, u64 n, u64 range, double *partial) {
    __shared__ double space[32];
    const u64 start = blockIdx.x * range, end = min(n, start + range);
    double total = 0.0;
    // Ranges begin at multiples of four, and so does the buffer.
    for (u64 i = start + threadIdx.x * 4; i < end; i += THREADS * 4 * TURNS) {
        float4 v[TURNS];
#pragma unroll
        for (int t = 0; t < TURNS; t++) {
            const u64 at = i + (u64)t * THREADS * 4;
            if (at + 3 < end) {
                v[t] = *(const float4 *)(x + at);
            } else {
                v[t] = make_float4(at < end ? x[at] : 0.0f, at + 1 < end ? x[at + 1] : 0.0f, at + 2 < end ? x[at + 2] : 0.0f, 0.0f);
            }
        }
        float sum = 0.0f;
#pragma unroll
        for (int t = 0; t < TURNS; t++)
            sum = fmaf(v[t].x, v[t].x, fmaf(v[t].y, v[t].y, fmaf(v[t].z, v[t].z, fmaf(v[t].w, v[t].w, sum))));
        total += (double)sum;
    }
    total = block_sum(total, space);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// Adds the blocks' sums.
extern "C" __global__ void __launch_bounds__(1024) add_squares(const double *partial, u32 n, double *out) {
    __shared__ double space[32];
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum, space);
    if (threadIdx.x == 0) *out = sum;
}

// The most digits of a rank's number.
#define DEPTH 12

// What all ranks have of a shard, added in the tree over their numbers, as a binary counter does it: the sums that wait for their
// other half are those of the counter's digits that are set.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_shards(float *own, const float *received, u64 n, u32 rank, u32 size) {
    const u64 place = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (place >= n) return;
    float waiting[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) waiting[d] = 0.0f;
    for (u32 r = 0; r < size; r++) {
        float sum = r == rank ? own[place] : received[(u64)(r < rank ? r : r - 1) * n + place];
        bool carried = true;
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const bool set = r >> d & 1;
            if (carried && set) sum = waiting[d] + sum;
            if (carried && !set) waiting[d] = sum;
            carried = carried && set;
        }
    }
    // What is left, the last first.
    float sum = 0.0f;
    bool any = false;
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (size >> d & 1) {
            sum = any ? waiting[d] + sum : waiting[d];
            any = true;
        }
    own[place] = sum;
}

// The largest |x| of each block's range; NaN where an element is infinite or a NaN.
extern "C" __global__ void __launch_bounds__(THREADS) largest(const float *x, u64 n, u64 range, float *partial) {
    __shared__ float space[32];
    const u64 start = blockIdx.x * range, end = min(n, start + range);
    float top = 0.0f, bad = 0.0f;
    for (u64 i = start + threadIdx.x; i < end; i += THREADS) {
        top = fmaxf(top, fabsf(x[i]));
        bad = fmaf(x[i], 0.0f, bad);
    }
    top = warp_max(top);
    bad = block_sum(bad, space);
    __syncthreads();
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < THREADS / 32; w++) top = fmaxf(top, space[w]);
        partial[blockIdx.x] = top + bad;
    }
}

extern "C" __global__ void __launch_bounds__(1024) largest_of_all(const float *partial, u32 n, float *out) {
    __shared__ float space[32];
    float top = 0.0f, bad = 0.0f;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        top = fmaxf(top, partial[i]);
        bad = fmaf(partial[i], 0.0f, bad);
    }
    top = warp_max(top);
    bad = block_sum(bad, space);
    __syncthreads();
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < 32; w++) top = fmaxf(top, space[w]);
        *out = top + bad;
    }
}

// --- columns ----------------------------------------------------------------------------------------------------------

#define LANES 32
#define GROUPS 8

// The chunks' sums, in order, for up to three vectors of h numbers: columns 0..h for the first, h..2h for the second. Bit i of
// `add`: whether vector i is added to or written over. 32 columns and eight groups of chunks a block.
extern "C" __global__ void __launch_bounds__(LANES *GROUPS)
    finish(const float *partial, u32 chunks, u32 columns, u32 h, float *a, float *b, float *c, u32 add) {
    __shared__ float space[GROUPS][LANES];
    const u32 lane = threadIdx.x % LANES, group = threadIdx.x / LANES, column = blockIdx.x * LANES + lane;
    float sum = 0.0f;
    if (column < columns) {
#pragma unroll 4
        for (u32 i = group; i < chunks; i += GROUPS) sum += partial[(u64)i * columns + column];
    }
    space[group][lane] = sum;
    __syncthreads();
    if (group == 0 && column < columns) {
        float total = 0.0f;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) total += space[g][lane];
        const u32 which = column / h;
        float *out = which == 0 ? a : which == 1 ? b : c;
        if (out) out[column % h] = (add >> which & 1) ? out[column % h] + total : total;
    }
}
