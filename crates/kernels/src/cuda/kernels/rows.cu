// Whole rows of a T×H matrix: picking, adding back, pooling over sequences, and sums of rows that share an index.
//
// Compiled for storage types STORE of what goes in and OUT of what comes out, and for EVEN rows or not.
#include "common.cuh"

// --- picking ---------------------------------------------------------------------------------------------------------

// A row that stands for nothing: what fills a batch up to the size that a graph was recorded with.
#define NOWHERE 0xffffffffu

// Row i of `out` becomes row rows[i] of x, zeros where that is nowhere; a warp a row.
template <class E, class O, bool ALIGNED>
__device__ __forceinline__ void gather(const E *x, const u32 *rows, O *out, u32 count, u32 limit, u32 h, u32 *fault) {
    const u32 i = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (i >= count) return;
    const u32 row = rows[i];
    if (row >= limit && row != NOWHERE) report(fault, FAULT_GATHER);
    for (u32 c = lane * 8; c < h; c += 256) {
        float v[8];
        if (row < limit) {
            load8<ALIGNED>(x + (u64)row * h, c, h, v);
        } else {
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] = row == NOWHERE ? 0.0f : NOT_A_NUMBER;
        }
        store8<ALIGNED>(out + (u64)i * h, c, h, v);
    }
}

// Row i of dy is added to row rows[i] of dx, or written there; no row may occur twice, but for nowhere.
template <class E, class O, bool ALIGNED>
__device__ __forceinline__ void scatter(const E *dy, const u32 *rows, O *dx, u32 count, u32 limit, u32 h, u32 add, u32 *fault) {
    const u32 i = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (i >= count) return;
    const u32 row = rows[i];
    if (row >= limit) {
        if (row != NOWHERE) report(fault, FAULT_SCATTER);
        return;
    }
    for (u32 c = lane * 8; c < h; c += 256) {
        float v[8];
        load8<ALIGNED>(dy + (u64)i * h, c, h, v);
        if (add) {
            float old[8];
            load8<ALIGNED>(dx + (u64)row * h, c, h, old);
#pragma unroll
            for (int k = 0; k < 8; k++) v[k] += old[k];
        }
        store8<ALIGNED>(dx + (u64)row * h, c, h, v);
    }
}

// --- sums of rows that share an index ----------------------------------------------------------------------------------

// Sorted indices are divided into chunks of this many. A run of equal indices that lies within a chunk is added to its row
// at once; one that crosses a border leaves a sum in each chunk, and `scatter_runs` adds those in order. So a row is added
// to by one block only, in one order, and a frequent index is not one thread's work.
#define CHUNK 32

// keys: sorted indices; order: where each came from. Sums of runs that came in from the left go to row 2·chunk of
// `partial`, of those that go on to the right (and began here) to row 2·chunk + 1.
template <class E, class O, bool ALIGNED>
__device__ __forceinline__ void scatter_chunks(const E *dy, const u32 *keys, const u32 *order, O *dx, float *partial,
                                               u32 count, u32 limit, u32 h, u32 *fault) {
    const u32 start = blockIdx.x * CHUNK, end = min(count, start + CHUNK);
    const u32 c = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (c >= h) return;
    const bool from_left = start > 0 && keys[start - 1] == keys[start];
    const bool to_right = end < count && keys[end] == keys[end - 1];
    u32 i = start;
    while (i < end) {
        const u32 key = keys[i], first = i;
        float sum[8] = {};
        while (i < end) {
            // Four rows at a time, as far as the run goes.
            const u32 many = i + 3 < end && keys[i + 3] == key ? 4 : 1;
            float v[4][8];
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (k < many) load8<ALIGNED>(dy + (u64)order[i + k] * h, c, h, v[k]);
#pragma unroll
            for (int k = 0; k < 4; k++)
                if (k < many) {
#pragma unroll
                    for (int j = 0; j < 8; j++) sum[j] += v[k][j];
                }
            i += many;
            if (i < end && keys[i] != key) break;
        }
        const bool open_left = first == start && from_left, open_right = i == end && to_right;
        if (open_left || open_right) {
            store8<ALIGNED>(partial + (u64)(2 * blockIdx.x + (open_left ? 0 : 1)) * h, c, h, sum);
        } else if (key >= limit) {
            if (key != NOWHERE) report(fault, FAULT_SCATTER);
        } else {
            float old[8];
            load8<ALIGNED>(dx + (u64)key * h, c, h, old);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += old[j];
            store8<ALIGNED>(dx + (u64)key * h, c, h, sum);
        }
    }
}

#define RUN_GROUPS 8

// Adds the chunks' sums of a run that begins in chunk blockIdx.x and goes on. Eight groups of threads take turns at the
// chunks.
template <class O, bool ALIGNED>
__device__ __forceinline__ void scatter_runs(const u32 *keys, const float *partial, O *dx, u32 count, u32 limit, u32 h,
                                             u32 *fault) {
    __shared__ float space[RUN_GROUPS][32 * 8];
    const u32 chunk = blockIdx.x, start = chunk * CHUNK, end = min(count, start + CHUNK);
    if (end >= count || keys[end] != keys[end - 1]) return;
    const u32 key = keys[end - 1];
    const bool began_before = start > 0 && keys[start - 1] == key;
    if (began_before) return;
    if (key >= limit) {
        if (threadIdx.x == 0 && key != NOWHERE) report(fault, FAULT_SCATTER);
        return;
    }
    // The last chunk that the run reaches: one after the last sorted index that equals the key.
    u32 low = end, high = count;
    while (low < high) {
        const u32 middle = (low + high) / 2;
        if (keys[middle] > key) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    const u32 last = (low - 1) / CHUNK;
    const u32 lane = threadIdx.x % 32, group = threadIdx.x / 32, c = (blockIdx.y * 32 + lane) * 8;
    float sum[8] = {};
    if (c < h) {
#pragma unroll 4
        for (u32 k = chunk + group; k <= last; k += RUN_GROUPS) {
            float v[8];
            load8<ALIGNED>(partial + (u64)(2 * k + (k == chunk ? 1 : 0)) * h, c, h, v);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += v[j];
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) space[group][j * 32 + lane] = sum[j];
    __syncthreads();
    if (group != 0 || c >= h) return;
    float total[8];
    load8<ALIGNED>(dx + (u64)key * h, c, h, total);
#pragma unroll
    for (int g = 0; g < RUN_GROUPS; g++)
#pragma unroll
        for (int j = 0; j < 8; j++) total[j] += space[g][j * 32 + lane];
    store8<ALIGNED>(dx + (u64)key * h, c, h, total);
}

// Row p of `out`, for every p below gridDim.x, becomes (or gets added) the sum of the rows at place p of all sequences that are
// so long: the gradient of a table of positions. Eight groups of threads take turns at the sequences.
template <class E, class O, bool ALIGNED>
__device__ __forceinline__ void add_places(const E *dy, const u32 *offsets, O *out, u32 sequences, u32 h, u32 add) {
    __shared__ float space[RUN_GROUPS][32 * 8];
    const u32 place = blockIdx.x, lane = threadIdx.x % 32, group = threadIdx.x / 32, c = (blockIdx.y * 32 + lane) * 8;
    float sum[8] = {};
    if (c < h) {
#pragma unroll 4
        for (u32 b = group; b < sequences; b += RUN_GROUPS) {
            const u32 row = offsets[b] + place;
            if (row >= offsets[b + 1]) continue;
            float v[8];
            load8<ALIGNED>(dy + (u64)row * h, c, h, v);
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] += v[j];
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) space[group][j * 32 + lane] = sum[j];
    __syncthreads();
    if (group != 0 || c >= h) return;
    float total[8] = {};
    if (add) load8<ALIGNED>(out + (u64)place * h, c, h, total);
#pragma unroll
    for (int g = 0; g < RUN_GROUPS; g++)
#pragma unroll
        for (int j = 0; j < 8; j++) total[j] += space[g][j * 32 + lane];
    store8<ALIGNED>(out + (u64)place * h, c, h, total);
}

// --- sequences -------------------------------------------------------------------------------------------------------

// Row i of `out` becomes the mean, or the largest, of rows offsets[i]..offsets[i + 1] of x.
template <class E, class O, bool ALIGNED>
__device__ __forceinline__ void pool(const E *x, const u32 *offsets, O *out, u32 h, u32 largest) {
    const u32 start = offsets[blockIdx.x], end = offsets[blockIdx.x + 1], c = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (c >= h) return;
    float total[8], bad[8] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) total[i] = largest && end > start ? -INFINITE : 0.0f;
#pragma unroll 4
    for (u32 t = start; t < end; t++) {
        float v[8];
        load8<ALIGNED>(x + (u64)t * h, c, h, v);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            total[i] = largest ? fmaxf(total[i], v[i]) : total[i] + v[i];
            // The largest forgets a NaN with the next number; a sum of zeros does not.
            if (largest) bad[i] = fmaf(v[i], 0.0f, bad[i]);
        }
    }
    const float share = largest ? 1.0f : 1.0f / max(end - start, 1u);
#pragma unroll
    for (int i = 0; i < 8; i++) total[i] = total[i] * share + bad[i];
    store8<ALIGNED>(out + (u64)blockIdx.x * h, c, h, total);
}

// Divides each row by its length, or by 1e-12 where that is larger; a warp a row.
template <class E, bool ALIGNED> __device__ __forceinline__ void l2_normalise(E *x, u32 rows, u32 h) {
    const u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    float squares = 0.0f;
    for (u32 c = lane * 8; c < h; c += 256) {
        float v[8];
        load8<ALIGNED>(x + (u64)row * h, c, h, v);
#pragma unroll
        for (int i = 0; i < 8; i++) squares = fmaf(v[i], v[i], squares);
    }
    const float length = sqrtf(warp_sum(squares));
    // Not fmaxf, which would drop a NaN.
    const float inverse = 1.0f / (length < 1e-12f ? 1e-12f : length);
    for (u32 c = lane * 8; c < h; c += 256) {
        float v[8];
        load8<ALIGNED>(x + (u64)row * h, c, h, v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= inverse;
        store8<ALIGNED>(x + (u64)row * h, c, h, v);
    }
}

// Rows offsets[i]..offsets[i + 1] of dx get row i of dy, divided by how many they are: added, or written over. The last block
// has the rows after the last sequence, which get nothing.
template <class E, class O, bool ALIGNED>
__device__ __forceinline__ void spread(const E *dy, const u32 *offsets, O *dx, u32 segments, u32 tokens, u32 h, u32 add) {
    const u32 i = blockIdx.x, c = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (c >= h || (i == segments && add)) return;
    const u32 start = offsets[i], end = i < segments ? offsets[i + 1] : tokens;
    float share[8] = {};
    if (i < segments) {
        load8<ALIGNED>(dy + (u64)i * h, c, h, share);
        const float part = 1.0f / max(end - start, 1u);
#pragma unroll
        for (int k = 0; k < 8; k++) share[k] *= part;
    }
#pragma unroll 4
    for (u32 t = start; t < end; t++) {
        float v[8] = {};
        if (add) load8<ALIGNED>(dx + (u64)t * h, c, h, v);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] += share[k];
        store8<ALIGNED>(dx + (u64)t * h, c, h, v);
    }
}

// The gradient of l2_normalise at x, in the place of dy; a warp a row.
template <class E, bool ALIGNED> __device__ __forceinline__ void l2_normalise_gradient(const E *x, E *dy, u32 rows, u32 h) {
    const u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    float squares = 0.0f, along = 0.0f;
    for (u32 c = lane * 8; c < h; c += 256) {
        float v[8], d[8];
        load8<ALIGNED>(x + (u64)row * h, c, h, v);
        load8<ALIGNED>(dy + (u64)row * h, c, h, d);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            squares = fmaf(v[i], v[i], squares);
            along = fmaf(v[i], d[i], along);
        }
    }
    const float length = sqrtf(warp_sum(squares));
    along = warp_sum(along);
    // A row too short to be normalised is only multiplied.
    const bool tiny = length < 1e-12f;
    const float inverse = tiny ? 1e12f : 1.0f / length, turn = tiny ? 0.0f : -along / length / length;
    for (u32 c = lane * 8; c < h; c += 256) {
        float v[8], d[8];
        load8<ALIGNED>(x + (u64)row * h, c, h, v);
        load8<ALIGNED>(dy + (u64)row * h, c, h, d);
#pragma unroll
        for (int i = 0; i < 8; i++) d[i] = fmaf(turn, v[i], d[i]) * inverse;
        store8<ALIGNED>(dy + (u64)row * h, c, h, d);
    }
}

// In each column the first of a sequence's largest gets its gradient: added to dx, or written over it with zeros everywhere else. The last
// block has the rows after the last sequence, which get nothing.
template <class E, class O, bool ALIGNED>
__device__ __forceinline__ void largest_gradient(const O *x, const E *dy, const u32 *offsets, O *dx, u32 segments, u32 tokens, u32 h,
                                                 u32 add) {
    const u32 i = blockIdx.x, c = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    if (c >= h || (i == segments && add)) return;
    const u32 start = offsets[i], end = i < segments ? offsets[i + 1] : tokens;
    float d[8] = {}, best[8];
    u32 at[8];
#pragma unroll
    for (int k = 0; k < 8; k++) at[k] = start;
    if (i < segments && start < end) {
        load8<ALIGNED>(dy + (u64)i * h, c, h, d);
        load8<ALIGNED>(x + (u64)start * h, c, h, best);
#pragma unroll 4
        for (u32 t = start + 1; t < end; t++) {
            float v[8];
            load8<ALIGNED>(x + (u64)t * h, c, h, v);
#pragma unroll
            for (int k = 0; k < 8; k++)
                if (v[k] > best[k]) best[k] = v[k], at[k] = t;
        }
    }
    for (u32 t = start; t < end; t++) {
        float v[8] = {};
        if (add) load8<ALIGNED>(dx + (u64)t * h, c, h, v);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] += at[k] == t ? d[k] : 0.0f;
        store8<ALIGNED>(dx + (u64)t * h, c, h, v);
    }
}

// `columns` numbers of each row: of rows that are `from` numbers apart to rows that are `to` apart. A thread has eight of them.
template <class E, class O, bool ALIGNED>
__device__ __forceinline__ void copy_columns(const E *x, u32 from, O *out, u32 to, u32 rows, u32 columns) {
    const u32 units = groups(columns);
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 row = i / units;
    if (row >= rows) return;
    const u32 c = (u32)(i % units) * 8;
    float v[8];
    load8<ALIGNED>(x + row * from, c, columns, v);
    store8<ALIGNED>(out + row * to, c, columns, v);
}

// The sequence of each token, and place 0: dropout by these rows drops the same columns at all tokens of a sequence.
extern "C" __global__ void __launch_bounds__(256) sequence_rows(const uint2 *tokens, uint2 *out, u32 count) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = make_uint2(tokens[i].x, 0);
}

extern "C" __global__ void __launch_bounds__(128)
    gather(const STORE *x, const u32 *rows, OUT *out, u32 count, u32 limit, u32 h, u32 *fault) {
    gather<STORE, OUT, EVEN>(x, rows, out, count, limit, h, fault);
}
extern "C" __global__ void __launch_bounds__(128)
    scatter(const STORE *dy, const u32 *rows, OUT *dx, u32 count, u32 limit, u32 h, u32 add, u32 *fault) {
    scatter<STORE, OUT, EVEN>(dy, rows, dx, count, limit, h, add, fault);
}
extern "C" __global__ void __launch_bounds__(128)
    scatter_chunks(const STORE *dy, const u32 *keys, const u32 *order, OUT *dx, float *partial, u32 count, u32 limit, u32 h,
                   u32 *fault) {
    scatter_chunks<STORE, OUT, EVEN>(dy, keys, order, dx, partial, count, limit, h, fault);
}
extern "C" __global__ void __launch_bounds__(32 * RUN_GROUPS)
    scatter_runs(const u32 *keys, const float *partial, OUT *dx, u32 count, u32 limit, u32 h, u32 *fault) {
    scatter_runs<OUT, EVEN>(keys, partial, dx, count, limit, h, fault);
}
extern "C" __global__ void __launch_bounds__(32 * RUN_GROUPS)
    add_places(const STORE *dy, const u32 *offsets, OUT *out, u32 sequences, u32 h, u32 add) {
    add_places<STORE, OUT, EVEN>(dy, offsets, out, sequences, h, add);
}
extern "C" __global__ void __launch_bounds__(128) pool(const STORE *x, const u32 *offsets, OUT *out, u32 h, u32 largest) {
    pool<STORE, OUT, EVEN>(x, offsets, out, h, largest);
}
extern "C" __global__ void __launch_bounds__(128) l2_normalise(STORE *x, u32 rows, u32 h) { l2_normalise<STORE, EVEN>(x, rows, h); }
extern "C" __global__ void __launch_bounds__(128)
    spread(const STORE *dy, const u32 *offsets, OUT *dx, u32 segments, u32 tokens, u32 h, u32 add) {
    spread<STORE, OUT, EVEN>(dy, offsets, dx, segments, tokens, h, add);
}
extern "C" __global__ void __launch_bounds__(128) l2_normalise_gradient(const STORE *x, STORE *dy, u32 rows, u32 h) {
    l2_normalise_gradient<STORE, EVEN>(x, dy, rows, h);
}
extern "C" __global__ void __launch_bounds__(128)
    largest_gradient(const OUT *x, const STORE *dy, const u32 *offsets, OUT *dx, u32 segments, u32 tokens, u32 h, u32 add) {
    largest_gradient<STORE, OUT, EVEN>(x, dy, offsets, dx, segments, tokens, h, add);
}
extern "C" __global__ void __launch_bounds__(128)
    copy_columns(const STORE *x, u32 from, OUT *out, u32 to, u32 rows, u32 columns) {
    copy_columns<STORE, OUT, EVEN>(x, from, out, to, rows, columns);
}
