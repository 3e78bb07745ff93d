// Kernels over T×H matrices whose columns mean something: a bias or a sum belongs to each.
//
// A block takes a strip of 256 columns (32 threads of eight) and a chunk of rows, eight of them at a time. Sums over rows
// come in two stages with fixed borders: each block writes the sums of its chunk, then `finish` of reduce.cu adds the
// chunks in order.
//
// Compiled for a storage type STORE, EVEN rows or not, and for an ACTIVATION with a BIAS of some type or without.
#include "common.cuh"
#include "activation.cuh"

#define LANES 32
#define ROWS 8
// Rows of a thread whose loads are under way together.
#define TURNS 4

struct Place {
    u32 column, first, last;
    __device__ __forceinline__ Place(u32 rows, u32 chunk) {
        column = (blockIdx.x * LANES + threadIdx.x % LANES) * 8;
        first = blockIdx.y * chunk + threadIdx.x / LANES;
        last = min(rows, (blockIdx.y + 1) * chunk);
    }
};

// Adds up the eight row threads' sums of each column and writes them to row blockIdx.y of `partial`, whose rows are `width` apart.
__device__ __forceinline__ void write_partial(const float (&sum)[8], float *partial, u32 column, u32 h, u32 width) {
    __shared__ float space[ROWS][LANES * 8 + 8];
    const u32 lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
#pragma unroll
    for (int i = 0; i < 8; i++) space[row][i * LANES + lane] = sum[i];
    __syncthreads();
    // Thread k adds the column at (k % 8) of lane k / 8.
    const u32 k = threadIdx.x, c = blockIdx.x * LANES * 8 + k, at = k % 8 * LANES + k / 8;
    float total = 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; r++) total += space[r][at];
    if (c < h) partial[(u64)blockIdx.y * width + c] = total;
}

template <class E, bool ALIGNED>
__device__ __forceinline__ void column_sums(const E *x, float *partial, u32 rows, u32 h, u32 chunk) {
    const Place p(rows, chunk);
    float sum[8] = {};
    if (p.column < h) {
        for (u32 r = p.first; r < p.last; r += ROWS * TURNS) {
            Raw<E> raw[TURNS];
#pragma unroll
            for (int t = 0; t < TURNS; t++)
                if (r + t * ROWS < p.last) raw[t] = load8_raw<ALIGNED>(x + (u64)(r + t * ROWS) * h, p.column, h);
#pragma unroll
            for (int t = 0; t < TURNS; t++) {
                if (r + t * ROWS >= p.last) continue;
                float v[8];
                unpack(raw[t], v);
#pragma unroll
                for (int i = 0; i < 8; i++) sum[i] += v[i];
            }
        }
    }
    write_partial(sum, partial, p.column, h, h);
}

// The sums of the rows of each of up to three kinds.
template <class E, bool ALIGNED>
__device__ __forceinline__ void kind_sums(const E *x, const u32 *kinds, float *partial, u32 rows, u32 h, u32 chunk, u32 count,
                                          u32 *fault) {
    const Place p(rows, chunk);
    float sum[3][8] = {};
    if (p.column < h) {
        for (u32 r = p.first; r < p.last; r += ROWS * TURNS) {
            Raw<E> raw[TURNS];
            u32 kind[TURNS];
#pragma unroll
            for (int t = 0; t < TURNS; t++) {
                if (r + t * ROWS >= p.last) continue;
                raw[t] = load8_raw<ALIGNED>(x + (u64)(r + t * ROWS) * h, p.column, h);
                kind[t] = kinds[r + t * ROWS];
            }
#pragma unroll
            for (int t = 0; t < TURNS; t++) {
                if (r + t * ROWS >= p.last) continue;
                if (kind[t] >= count) report(fault, FAULT_SCATTER);
                float v[8];
                unpack(raw[t], v);
#pragma unroll
                for (int k = 0; k < 3; k++)
#pragma unroll
                    for (int i = 0; i < 8; i++) sum[k][i] += kind[t] == k ? v[i] : 0.0f;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < 3; k++) {
        if (k >= count) break;
        __syncthreads();
        write_partial(sum[k], partial + k * h, p.column, h, count * h);
    }
}

// y = act(x + bias); y may be x.
template <class E, class B, class ACT, bool ALIGNED>
__device__ __forceinline__ void forward(const E *x, const B *bias, E *y, u32 rows, u32 h, u32 chunk) {
    const Place p(rows, chunk);
    if (p.column >= h) return;
    float b[8];
    load8<ALIGNED>(bias, p.column, h, b);
    for (u32 r = p.first; r < p.last; r += ROWS * TURNS) {
        Raw<E> raw[TURNS];
#pragma unroll
        for (int t = 0; t < TURNS; t++)
            if (r + t * ROWS < p.last) raw[t] = load8_raw<ALIGNED>(x + (u64)(r + t * ROWS) * h, p.column, h);
#pragma unroll
        for (int t = 0; t < TURNS; t++) {
            if (r + t * ROWS >= p.last) continue;
            float v[8];
            unpack(raw[t], v);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = ACT::value(v[i] + b[i]);
            store8<ALIGNED>(y + (u64)(r + t * ROWS) * h, p.column, h, v);
        }
    }
}

// dx = dy·act′(x + bias), which may take the place of dy, and the sums of its columns. Each thread has a ring of rows in
// shared memory, which it alone writes and reads, so that many copies are under way and cost no registers.
template <class E, class B, class ACT, bool ALIGNED>
__device__ __forceinline__ void backward(const E *x, const B *bias, const E *dy, E *dx, float *partial, u32 rows, u32 h,
                                         u32 chunk) {
    constexpr int WORDS = Words<E>::COUNT, AHEAD = 4 / WORDS, STRIDE = LANES * ROWS;
    __shared__ uint4 ring[AHEAD * 2 * WORDS * STRIDE];
    const Place p(rows, chunk);
    auto slot = [&](u32 stage, int which) { return ring + ((stage * 2 + which) * WORDS) * STRIDE + threadIdx.x; };
    float sum[8] = {}, b[8] = {};
    if (p.column < h) {
        if (bias) load8<ALIGNED>(bias, p.column, h, b);
        auto fetch = [&](u32 r, u32 stage) {
            if (r < p.last) {
                copy8_async<ALIGNED>(slot(stage, 0), STRIDE, x + (u64)r * h, p.column, h);
                copy8_async<ALIGNED>(slot(stage, 1), STRIDE, dy + (u64)r * h, p.column, h);
            }
            commit_copies();
        };
#pragma unroll
        for (int s = 0; s < AHEAD - 1; s++) fetch(p.first + s * ROWS, s);
        for (u32 r = p.first, stage = 0; r < p.last; r += ROWS, stage = (stage + 1) % AHEAD) {
            fetch(r + (AHEAD - 1) * ROWS, (stage + AHEAD - 1) % AHEAD);
            wait_copies<AHEAD - 1>();
            float v[8], d[8];
            unpack(from_words(slot(stage, 0), STRIDE, E()), v);
            unpack(from_words(slot(stage, 1), STRIDE, E()), d);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                d[i] *= ACT::slope(v[i] + b[i]);
                sum[i] += d[i];
            }
            store8<ALIGNED>(dx + (u64)r * h, p.column, h, d);
        }
    }
    if (partial) write_partial(sum, partial, p.column, h, h);
}

// A gate's two inputs at eight columns: what is activated, and what that is multiplied with.
template <class E, class B, bool ALIGNED>
__device__ __forceinline__ void load_gate(const E *row, const B *bias, u32 c, u32 n, float (&gate)[8], float (&value)[8]) {
    load8<ALIGNED>(row, c, n, gate);
    load8<ALIGNED>(row + n, c, n, value);
    if (!bias) return;
    float b[8];
    load8<ALIGNED>(bias, c, n, b);
#pragma unroll
    for (int i = 0; i < 8; i++) gate[i] += b[i];
    load8<ALIGNED>(bias + n, c, n, b);
#pragma unroll
    for (int i = 0; i < 8; i++) value[i] += b[i];
}

// y (rows×n) = act(first half of x + bias) ∘ (second half + bias).
template <class E, class B, class ACT, bool ALIGNED>
__device__ __forceinline__ void gate_forward(const E *x, E *y, const B *bias, u32 rows, u32 n, u32 chunk) {
    const Place p(rows, chunk);
    if (p.column >= n) return;
#pragma unroll 2
    for (u32 r = p.first; r < p.last; r += ROWS) {
        float gate[8], value[8];
        load_gate<E, B, ALIGNED>(x + (u64)r * 2 * n, bias, p.column, n, gate, value);
#pragma unroll
        for (int i = 0; i < 8; i++) value[i] *= ACT::value(gate[i]);
        store8<ALIGNED>(y + (u64)r * n, p.column, n, value);
    }
}

// dx (rows×2n) from dy (rows×n).
template <class E, class B, class ACT, bool ALIGNED>
__device__ __forceinline__ void gate_backward(const E *x, const E *dy, E *dx, const B *bias, u32 rows, u32 n, u32 chunk) {
    const Place p(rows, chunk);
    if (p.column >= n) return;
    for (u32 r = p.first; r < p.last; r += ROWS) {
        float gate[8], value[8], d[8];
        load8<ALIGNED>(dy + (u64)r * n, p.column, n, d);
        load_gate<E, B, ALIGNED>(x + (u64)r * 2 * n, bias, p.column, n, gate, value);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            value[i] *= d[i] * ACT::slope(gate[i]);
            d[i] *= ACT::value(gate[i]);
        }
        store8<ALIGNED>(dx + (u64)r * 2 * n, p.column, n, value);
        store8<ALIGNED>(dx + (u64)r * 2 * n + n, p.column, n, d);
    }
}

// Dropout of rows in place.
template <class E, bool ALIGNED>
__device__ __forceinline__ void drop(E *x, Dropout dropout, const RowId *ids, u32 rows, u32 h, u32 chunk) {
    const Place p(rows, chunk);
    if (p.column >= h) return;
    dropout.begin();
    for (u32 r = p.first; r < p.last; r += ROWS) {
        float v[8];
        load8<ALIGNED>(x + (u64)r * h, p.column, h, v);
        drop8(dropout, draw(dropout, ids[r], h, p.column / 8), v);
        store8<ALIGNED>(x + (u64)r * h, p.column, h, v);
    }
}

#define STRIPS __global__ void __launch_bounds__(LANES *ROWS, 5)

#ifdef ACTIVATION

extern "C" STRIPS forward(const STORE *x, const BIAS *bias, STORE *y, u32 rows, u32 h, u32 chunk) {
    forward<STORE, BIAS, ACTIVATION, EVEN>(x, bias, y, rows, h, chunk);
}
extern "C" STRIPS backward(const STORE *x, const BIAS *bias, const STORE *dy, STORE *dx, float *partial, u32 rows, u32 h, u32 chunk) {
    backward<STORE, BIAS, ACTIVATION, EVEN>(x, bias, dy, dx, partial, rows, h, chunk);
}
extern "C" STRIPS gate_forward(const STORE *x, const STORE *unused, STORE *y, const BIAS *bias, u32 rows, u32 n, u32 chunk) {
    gate_forward<STORE, BIAS, ACTIVATION, EVEN>(x, y, bias, rows, n, chunk);
}
extern "C" STRIPS gate_backward(const STORE *x, const STORE *dy, STORE *dx, const BIAS *bias, u32 rows, u32 n, u32 chunk) {
    gate_backward<STORE, BIAS, ACTIVATION, EVEN>(x, dy, dx, bias, rows, n, chunk);
}

#else

extern "C" STRIPS column_sums(const STORE *x, float *partial, u32 rows, u32 h, u32 chunk) {
    column_sums<STORE, EVEN>(x, partial, rows, h, chunk);
}
extern "C" STRIPS kind_sums(const STORE *x, const u32 *kinds, float *partial, u32 rows, u32 h, u32 chunk, u32 count, u32 *fault) {
    kind_sums<STORE, EVEN>(x, kinds, partial, rows, h, chunk, count, fault);
}
extern "C" STRIPS drop(STORE *x, Dropout dropout, const RowId *ids, u32 rows, u32 h, u32 chunk) {
    drop<STORE, EVEN>(x, dropout, ids, rows, h, chunk);
}

#endif
