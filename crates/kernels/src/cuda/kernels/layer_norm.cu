// LayerNorm with what BERT puts around it, and with the embeddings in front of it: y = drop(LN(residual + drop(x + bias))).
// Without β where that is null; RMSNorm where it is not `centred`.
//
// Forward: a warp has a row, each lane N units of eight columns; the row stays in registers. Backward: a group of threads
// has two rows at a time, each thread one unit of eight columns, so that the sums for the parameters' gradients stay in
// registers over all rows of the group; the next rows are copied to shared memory meanwhile.
//
// Compiled for a storage type STORE, EVEN rows or not, and one of: UNITS of 256 columns for the forward, LONG for longer
// rows, a TABLE type for embeddings alone, BLOCK_THREADS for the backward, AHEAD_OF the reader that many pairs of rows, or ROWS of
// as many units for rows that a warp holds, with dropout AFTER the normalisation or not, and with the gradient that the sum has from
// a STREAM of residuals or without.
#include "common.cuh"

// --- forward ---------------------------------------------------------------------------------------------------------

// Normalises a row that a warp holds, v as it is stored, and writes the output and the statistics.
template <class E, int N, bool ALIGNED>
__device__ __forceinline__ void normalise(float (&v)[N][8], const float *gamma, const float *beta, float epsilon,
                                          u32 centred, const Dropout &after, const RowId *ids, E *y, float2 *statistics,
                                          u32 row, u32 h) {
    const u32 lane = threadIdx.x % 32;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 8; i++) sum += v[n][i];
    const float mean = centred ? warp_sum(sum) / h : 0.0f;
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const u32 c = (lane + 32 * n) * 8;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float d = v[n][i] - mean;
            if (ALIGNED ? c < h : c + i < h) squares = fmaf(d, d, squares);
        }
    }
    const float inverse = 1.0f / sqrtf(warp_sum(squares) / h + epsilon);
    if (lane == 0 && statistics) statistics[row] = make_float2(mean, inverse);
    const RowId id = after.threshold ? ids[row] : RowId{0, 0};
#pragma unroll
    for (int n = 0; n < N; n++) {
        const u32 c = (lane + 32 * n) * 8;
        if (c >= h) continue;
        float g[8], b[8] = {}, out[8];
        load8<ALIGNED>(gamma, c, h, g);
        if (beta) load8<ALIGNED>(beta, c, h, b);
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = fmaf((v[n][i] - mean) * inverse, g[i], b[i]);
        if (after.threshold) drop8(after, draw(after, id, h, c / 8), out);
        store8<ALIGNED>(y + (u64)row * h, c, h, out);
    }
}

template <class E, int N, bool ALIGNED>
__device__ __forceinline__ void forward(E *x, const float *bias, const E *residual, const float *gamma,
                                        const float *beta, float epsilon, u32 centred, Dropout before, Dropout after,
                                        const RowId *ids, E *y, float2 *statistics, u32 rows, u32 h) {
    const u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    before.begin();
    after.begin();
    E *own = x + (u64)row * h;
    Raw<E> raw[N], other[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const u32 c = (lane + 32 * n) * 8;
        if (c < h) {
            raw[n] = load8_raw<ALIGNED>(own, c, h);
            if (residual) other[n] = load8_raw<ALIGNED>(residual + (u64)row * h, c, h);
        }
    }
    const RowId id = before.threshold ? ids[row] : RowId{0, 0};
    float v[N][8];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const u32 c = (lane + 32 * n) * 8;
        if (c >= h) {
#pragma unroll
            for (int i = 0; i < 8; i++) v[n][i] = 0.0f;
            continue;
        }
        unpack(raw[n], v[n]);
        if (bias) {
            float b[8];
            load8<ALIGNED>(bias, c, h, b);
#pragma unroll
            for (int i = 0; i < 8; i++) v[n][i] += b[i];
        }
        if (before.threshold) drop8(before, draw(before, id, h, c / 8), v[n]);
        if (residual) {
            float r[8];
            unpack(other[n], r);
#pragma unroll
            for (int i = 0; i < 8; i++) v[n][i] += r[i];
        }
        if (bias || residual || before.threshold) {
            // The statistics are those of the sum as it is stored, which the backward sees.
#pragma unroll
            for (int i = 0; i < 8; i++) v[n][i] = rounded<E>(v[n][i]);
            if (statistics) store8<ALIGNED>(own, c, h, v[n]);
        }
    }
    normalise<E, N, ALIGNED>(v, gamma, beta, epsilon, centred, after, ids, y, statistics, row, h);
}

// Up to four tables and the rows that tokens take of them.
template <class W> struct Tables {
    const W *table[4];
    const u32 *ids[4];
    u32 rows[4];
    u32 count;
};

// The sum of a token's rows at eight columns; NaN where an id is outside of its table.
template <bool ALIGNED, class W>
__device__ __forceinline__ void sum_tables(const Tables<W> &tables, const u32 (&id)[4], u32 c, u32 h, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = 0.0f;
#pragma unroll
    for (int t = 0; t < 4; t++) {
        if (t >= tables.count) break;
        float w[8];
        if (id[t] < tables.rows[t]) {
            load8<ALIGNED>(tables.table[t] + (u64)id[t] * h, c, h, w);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) w[i] = NOT_A_NUMBER;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] += w[i];
    }
}

template <class W> __device__ __forceinline__ void token_ids(const Tables<W> &tables, u32 row, u32 (&id)[4], u32 *fault) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
        id[t] = t < tables.count ? tables.ids[t][row] : 0;
        if (t < tables.count && id[t] >= tables.rows[t]) report(fault, FAULT_EMBEDDING);
    }
}

template <class E, class W, bool ALIGNED>
__device__ __forceinline__ void embed(const Tables<W> &tables, E *out, u32 rows, u32 h, u32 *fault) {
    const u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    u32 id[4];
    token_ids(tables, row, id, fault);
    for (u32 c = lane * 8; c < h; c += 256) {
        float v[8];
        sum_tables<ALIGNED>(tables, id, c, h, v);
        store8<ALIGNED>(out + (u64)row * h, c, h, v);
    }
}

template <class E, int N, bool ALIGNED>
__device__ __forceinline__ void embed_normalise(const Tables<E> &tables, E *sum, const float *gamma, const float *beta,
                                                float epsilon, u32 centred, Dropout after, const RowId *ids, E *y,
                                                float2 *statistics, u32 rows, u32 h, u32 *fault) {
    const u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    after.begin();
    u32 id[4];
    token_ids(tables, row, id, fault);
    float v[N][8];
#pragma unroll
    for (int n = 0; n < N; n++) {
        const u32 c = (lane + 32 * n) * 8;
        if (c < h) {
            sum_tables<ALIGNED>(tables, id, c, h, v[n]);
#pragma unroll
            for (int i = 0; i < 8; i++) v[n][i] = rounded<E>(v[n][i]);
            if (statistics) store8<ALIGNED>(sum + (u64)row * h, c, h, v[n]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) v[n][i] = 0.0f;
        }
        // Beyond the row's end, columns of an odd row are zeros: `load8` says so.
    }
    normalise<E, N, ALIGNED>(v, gamma, beta, epsilon, centred, after, ids, y, statistics, row, h);
}

// Rows too long for registers: a block a row, which is read again for each of three passes.
template <class E, bool ALIGNED>
__device__ __forceinline__ void forward_long(E *x, const float *bias, const E *residual, const float *gamma,
                                             const float *beta, float epsilon, u32 centred, Dropout before, Dropout after,
                                             const RowId *ids, E *y, float2 *statistics, u32 h) {
    __shared__ float space[32];
    before.begin();
    after.begin();
    const u32 row = blockIdx.x, step = blockDim.x * 8;
    const RowId id = before.threshold || after.threshold ? ids[row] : RowId{0, 0};
    E *own = x + (u64)row * h;
    float sum = 0.0f;
    for (u32 c = threadIdx.x * 8; c < h; c += step) {
        float v[8];
        load8<ALIGNED>(own, c, h, v);
        if (bias) {
            float b[8];
            load8<ALIGNED>(bias, c, h, b);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] += b[i];
        }
        if (before.threshold) drop8(before, draw(before, id, h, c / 8), v);
        if (residual) {
            float r[8];
            load8<ALIGNED>(residual + (u64)row * h, c, h, r);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] += r[i];
        }
        if (bias || residual || before.threshold) store8<ALIGNED>(own, c, h, v);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += rounded<E>(v[i]);
    }
    const float mean = centred ? block_sum(sum, space) / h : 0.0f;
    float squares = 0.0f;
    for (u32 c = threadIdx.x * 8; c < h; c += step) {
        float v[8];
        load8<ALIGNED>(own, c, h, v);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (c + i < h) squares = fmaf(v[i] - mean, v[i] - mean, squares);
    }
    const float inverse = 1.0f / sqrtf(block_sum(squares, space) / h + epsilon);
    if (threadIdx.x == 0 && statistics) statistics[row] = make_float2(mean, inverse);
    for (u32 c = threadIdx.x * 8; c < h; c += step) {
        float v[8], g[8], b[8] = {};
        load8<ALIGNED>(own, c, h, v);
        load8<ALIGNED>(gamma, c, h, g);
        if (beta) load8<ALIGNED>(beta, c, h, b);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = fmaf((v[i] - mean) * inverse, g[i], b[i]);
        if (after.threshold) drop8(after, draw(after, id, h, c / 8), v);
        store8<ALIGNED>(y + (u64)row * h, c, h, v);
    }
}

#if defined(UNITS)

extern "C" __global__ void __launch_bounds__(128)
    forward(STORE *x, const float *bias, const STORE *residual, const float *gamma, const float *beta, float epsilon,
            u32 centred, Dropout before, Dropout after, const RowId *ids, STORE *y, float2 *statistics, u32 rows, u32 h) {
    forward<STORE, UNITS, EVEN>(x, bias, residual, gamma, beta, epsilon, centred, before, after, ids, y, statistics, rows, h);
}
extern "C" __global__ void __launch_bounds__(128)
    embed_normalise(Tables<STORE> tables, STORE *sum, const float *gamma, const float *beta, float epsilon, u32 centred,
                    Dropout after, const RowId *ids, STORE *y, float2 *statistics, u32 rows, u32 h, u32 *fault) {
    embed_normalise<STORE, UNITS, EVEN>(tables, sum, gamma, beta, epsilon, centred, after, ids, y, statistics, rows, h, fault);
}

#elif defined(LONG)

extern "C" __global__ void __launch_bounds__(256)
    forward(STORE *x, const float *bias, const STORE *residual, const float *gamma, const float *beta, float epsilon,
            u32 centred, Dropout before, Dropout after, const RowId *ids, STORE *y, float2 *statistics, u32 rows, u32 h) {
    forward_long<STORE, EVEN>(x, bias, residual, gamma, beta, epsilon, centred, before, after, ids, y, statistics, h);
}

#elif defined(TABLE)

extern "C" __global__ void __launch_bounds__(128) embed(Tables<TABLE> tables, STORE *out, u32 rows, u32 h, u32 *fault) {
    embed<STORE, TABLE, EVEN>(tables, out, rows, h, fault);
}

#endif

// --- backward --------------------------------------------------------------------------------------------------------

// Rows that a group works on at a time.
#define PAIR 2

// Whether the sum is a stream of residuals, which has a gradient of its own: `dstream`.
#ifdef STREAM
constexpr bool STREAMS = true;
#else
constexpr bool STREAMS = false;
#endif

// The sums over a warp of four numbers: lane l gets that of number (l / 16) * 2 + l / 8 % 2, in six exchanges.
__device__ __forceinline__ float warp_sum4(float (&x)[4]) {
    const u32 lane = threadIdx.x % 32;
    const bool upper = lane & 16, second = lane & 8;
    float a = upper ? x[2] : x[0], b = upper ? x[3] : x[1];
    a += __shfl_xor_sync(ALL_LANES, upper ? x[0] : x[2], 16);
    b += __shfl_xor_sync(ALL_LANES, upper ? x[1] : x[3], 16);
    float y = second ? b : a;
    y += __shfl_xor_sync(ALL_LANES, second ? a : b, 8);
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) y += __shfl_xor_sync(ALL_LANES, y, offset);
    return y;
}

// Waits for all threads of a group; a group of one warp needs less.
__device__ __forceinline__ void group_barrier(u32 group, u32 threads) {
    if (threads == 32) {
        __syncwarp();
    } else {
        asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
    }
}

// `threads` is the number of threads of a group: a multiple of 32 that has h columns, eight a thread. A block has several
// groups. `partial` gets the sums of dγ, dβ and, where wanted, of the columns of dx: a row of 2h or 3h for each block.
//
// Each thread has a ring of AHEAD pairs of rows in shared memory, which it alone writes and reads: so many copies are under
// way that the memory is never idle, and they cost no registers.
template <class E, bool ALIGNED, bool DROPPED_AFTER, int AHEAD>
__device__ __forceinline__ void backward(const E *dy, const E *dstream, const E *sum, const float2 *statistics,
                                         const float *gamma, u32 centred, Dropout before, Dropout after, const RowId *ids, E *dsum, E *dx, float *partial,
                                         u32 rows, u32 h, u32 threads, u32 with_columns) {
    extern __shared__ float space[];
    before.begin();
    if (DROPPED_AFTER) after.begin();
    const u32 group = threadIdx.x / threads, thread = threadIdx.x % threads, lane = threadIdx.x % 32;
    const u32 groups_of_block = blockDim.x / threads, warps = threads / 32, warp = thread / 32;
    const u32 c = thread * 8;
    const bool active = c < h;
    const float share = 1.0f / h;
    // Two rows of sums for each group, so that a fast warp can write the next before a slow one has read the last.
    float *exchange = space + group * 2 * warps * 4;
    // Behind the exchange, which has a byte for each thread of the block.
    uint4 *ring = (uint4 *)(space + blockDim.x / 4) + threadIdx.x;
    const u32 stride = blockDim.x;
    constexpr int WORDS = Words<E>::COUNT;
    auto slot = [&](u32 stage, int p, int which) { return ring + (((stage * PAIR + p) * 2 + which) * WORDS) * stride; };

    float g[8] = {}, dgamma[8] = {}, dbeta[8] = {}, columns[8] = {};
    if (active) load8<ALIGNED>(gamma, c, h, g);

    const u32 step = gridDim.x * groups_of_block * PAIR;
    u32 r = (blockIdx.x * groups_of_block + group) * PAIR;
    auto fetch = [&](u32 r, u32 stage) {
#pragma unroll
        for (int p = 0; p < PAIR; p++) {
            if (!active || r + p >= rows) continue;
            copy8_async<ALIGNED>(slot(stage, p, 0), stride, dy + (u64)(r + p) * h, c, h);
            copy8_async<ALIGNED>(slot(stage, p, 1), stride, sum + (u64)(r + p) * h, c, h);
        }
        commit_copies();
    };
    float2 next_st[PAIR];
    RowId next_id[PAIR];
    auto look = [&](u32 r) {
#pragma unroll
        for (int p = 0; p < PAIR; p++) {
            const bool there = r + p < rows;
            next_st[p] = there ? statistics[r + p] : make_float2(0.0f, 0.0f);
            next_id[p] = there && (before.threshold || DROPPED_AFTER) ? ids[r + p] : RowId{0, 0};
        }
    };
#pragma unroll
    for (int s = 0; s < AHEAD - 1; s++) fetch(r + s * step, s);
    look(r);
    for (u32 turn = 0, stage = 0; r < rows; r += step, turn ^= 1, stage = (stage + 1) % AHEAD) {
        // The last turn is done with the stage that is filled now.
        fetch(r + (AHEAD - 1) * step, (stage + AHEAD - 1) % AHEAD);
        float2 st[PAIR];
        RowId id[PAIR];
#pragma unroll
        for (int p = 0; p < PAIR; p++) st[p] = next_st[p], id[p] = next_id[p];
        look(r + step);
        wait_copies<AHEAD - 1>();
        float sums[4] = {};
#pragma unroll
        for (int p = 0; p < PAIR; p++) {
            if (!active || r + p >= rows) continue;
            float d[8], s[8];
            unpack(from_words(slot(stage, p, 0), stride, E()), d);
            unpack(from_words(slot(stage, p, 1), stride, E()), s);
            if (DROPPED_AFTER) {
                drop8(after, draw(after, id[p], h, c / 8), d);
                Raw<E> dropped;
                repack(d, dropped);
                unpack(dropped, d);
                to_words(dropped, slot(stage, p, 0), stride);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float normal = (s[i] - st[p].x) * st[p].y, weighted = d[i] * g[i];
                sums[2 * p] += weighted;
                sums[2 * p + 1] = fmaf(weighted, normal, sums[2 * p + 1]);
                dgamma[i] = fmaf(d[i], normal, dgamma[i]);
                dbeta[i] += d[i];
            }
        }
        const float total = warp_sum4(sums);
        float *own = exchange + turn * warps * 4;
        if (lane % 8 == 0) own[warp * 4 + lane / 8] = total;
        group_barrier(group, threads);
        float4 all = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (u32 w = 0; w < warps; w++) {
            const float4 one = *(const float4 *)(own + 4 * w);
            all.x += one.x, all.y += one.y, all.z += one.z, all.w += one.w;
        }
#pragma unroll
        for (int p = 0; p < PAIR; p++) {
            if (!active || r + p >= rows) continue;
            // inverse·(d·γ − a − normal·b), with what is the same for all columns taken together.
            const float a = centred ? -st[p].y * (p ? all.z : all.x) * share : 0.0f;
            const float b = -st[p].y * st[p].y * (p ? all.w : all.y) * share;
            float d[8], s[8];
            unpack(from_words(slot(stage, p, 0), stride, E()), d);
            unpack(from_words(slot(stage, p, 1), stride, E()), s);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                d[i] = fmaf(d[i] * g[i], st[p].y, fmaf(s[i] - st[p].x, b, a));
            }
            if (STREAMS) {
                float more[8];
                load8<ALIGNED>(dstream + (u64)(r + p) * h, c, h, more);
#pragma unroll
                for (int i = 0; i < 8; i++) d[i] += more[i];
            }
            store8<ALIGNED>(dsum + (u64)(r + p) * h, c, h, d);
            if (before.threshold) {
                drop8(before, draw(before, id[p], h, c / 8), d);
                store8<ALIGNED>(dx + (u64)(r + p) * h, c, h, d);
            }
            if (with_columns) {
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (ALIGNED || c + i < h) columns[i] += d[i];
            }
        }
    }

    // The groups' sums, in order. Exchange and rings are over, so their space is free once all are here.
    const u32 sets = with_columns ? 3 : 2;
    const u32 width = threads * 8;
    for (u32 set = 0; set < sets; set++) {
        __syncthreads();
        float *mine = space + group * width;
#pragma unroll
        for (int i = 0; i < 8; i++) mine[i * threads + thread] = set == 0 ? dgamma[i] : set == 1 ? dbeta[i] : columns[i];
        __syncthreads();
        for (u32 k = threadIdx.x; k < h; k += blockDim.x) {
            float total = 0.0f;
            for (u32 q = 0; q < groups_of_block; q++) total += space[q * width + k % 8 * threads + k / 8];
            partial[((u64)blockIdx.x * sets + set) * h + k] = total;
        }
    }
}

// The same for even rows of bf16 that a warp can hold: no thread waits for another warp, and the next row is on its way
// meanwhile. The sums of all rows of a warp stay in registers.
template <class E, int N, bool DROPPED_AFTER>
__device__ __forceinline__ void backward_rows(const E *dy, const E *dstream, const E *sum, const float2 *statistics,
                                              const float *gamma, u32 centred, Dropout before, Dropout after, const RowId *ids, E *dsum, E *dx, float *partial,
                                              u32 rows, u32 h, u32 with_columns) {
    extern __shared__ float space[];
    before.begin();
    if (DROPPED_AFTER) after.begin();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const u32 step = gridDim.x * warps;
    const float share = 1.0f / h;
    float dgamma[N][8] = {}, dbeta[N][8] = {}, columns[N][8] = {};
    u32 row = blockIdx.x * warps + warp;
    Raw<E> next_d[N], next_s[N];
    float2 next_st = make_float2(0.0f, 0.0f);
    RowId next_id = {0, 0};
    auto fetch = [&](u32 row) {
        if (row >= rows) return;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const u32 c = (lane + 32 * n) * 8;
            if (c >= h) continue;
            next_d[n] = load_raw(dy + (u64)row * h + c);
            next_s[n] = load_raw(sum + (u64)row * h + c);
        }
        next_st = statistics[row];
        if (before.threshold || DROPPED_AFTER) next_id = ids[row];
    };
    fetch(row);
    for (; row < rows; row += step) {
        Raw<E> d_raw[N], s_raw[N];
#pragma unroll
        for (int n = 0; n < N; n++) d_raw[n] = next_d[n], s_raw[n] = next_s[n];
        const float2 st = next_st;
        const RowId id = next_id;
        fetch(row + step);
        float weighted_sum = 0.0f, normal_sum = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const u32 c = (lane + 32 * n) * 8;
            if (c >= h) continue;
            float d[8], s[8], g[8];
            unpack(d_raw[n], d);
            if (DROPPED_AFTER) {
                drop8(after, draw(after, id, h, c / 8), d);
                repack(d, d_raw[n]);
                unpack(d_raw[n], d);
            }
            unpack(s_raw[n], s);
            load8<true>(gamma, c, h, g);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float normal = (s[i] - st.x) * st.y, weighted = d[i] * g[i];
                weighted_sum += weighted;
                normal_sum = fmaf(weighted, normal, normal_sum);
                dgamma[n][i] = fmaf(d[i], normal, dgamma[n][i]);
                dbeta[n][i] += d[i];
            }
        }
        // inverse·(d·γ − a − normal·b), with what is the same for all columns taken together.
        const float a = centred ? -st.y * warp_sum(weighted_sum) * share : 0.0f;
        const float b = -st.y * st.y * warp_sum(normal_sum) * share;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const u32 c = (lane + 32 * n) * 8;
            if (c >= h) continue;
            float d[8], s[8], g[8];
            unpack(d_raw[n], d);
            unpack(s_raw[n], s);
            load8<true>(gamma, c, h, g);
#pragma unroll
            for (int i = 0; i < 8; i++) d[i] = fmaf(d[i] * g[i], st.y, fmaf(s[i] - st.x, b, a));
            if (STREAMS) {
                float more[8];
                load8<true>(dstream + (u64)row * h, c, h, more);
#pragma unroll
                for (int i = 0; i < 8; i++) d[i] += more[i];
            }
            store8<true>(dsum + (u64)row * h, c, h, d);
            if (before.threshold) {
                drop8(before, draw(before, id, h, c / 8), d);
                store8<true>(dx + (u64)row * h, c, h, d);
            }
            if (with_columns) {
#pragma unroll
                for (int i = 0; i < 8; i++) columns[n][i] += d[i];
            }
        }
    }

    // The warps' sums, in order.
    const u32 sets = with_columns ? 3 : 2;
    for (u32 set = 0; set < sets; set++) {
        __syncthreads();
#pragma unroll
        for (int n = 0; n < N; n++) {
            const u32 c = (lane + 32 * n) * 8;
            if (c >= h) continue;
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = set == 0 ? dgamma[n][i] : set == 1 ? dbeta[n][i] : columns[n][i];
            store8<true>(space + warp * h, c, h, v);
        }
        __syncthreads();
        for (u32 k = threadIdx.x; k < h; k += blockDim.x) {
            float total = 0.0f;
            for (u32 w = 0; w < warps; w++) total += space[w * h + k];
            partial[((u64)blockIdx.x * sets + set) * h + k] = total;
        }
    }
}

#if defined(ROWS)

extern "C" __global__ void __launch_bounds__(128, ROWS == 1 ? 4 : ROWS <= 3 ? 3 : 2)
    backward(const STORE *dy, const STORE *dstream, const STORE *sum, const float2 *statistics, const float *gamma, u32 centred,
             Dropout before, Dropout after, const RowId *ids, STORE *dsum, STORE *dx, float *partial, u32 rows, u32 h, u32 threads, u32 with_columns) {
    backward_rows<STORE, ROWS, AFTER>(dy, dstream, sum, statistics, gamma, centred, before, after, ids, dsum, dx, partial, rows, h, with_columns);
}

#elif defined(BLOCK_THREADS)

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    backward(const STORE *dy, const STORE *dstream, const STORE *sum, const float2 *statistics, const float *gamma, u32 centred,
             Dropout before, Dropout after, const RowId *ids, STORE *dsum, STORE *dx, float *partial, u32 rows, u32 h, u32 threads, u32 with_columns) {
    backward<STORE, EVEN, AFTER, AHEAD_OF>(dy, dstream, sum, statistics, gamma, centred, before, after, ids, dsum, dx, partial, rows, h, threads, with_columns);
}

#endif
