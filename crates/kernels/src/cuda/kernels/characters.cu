// What reads words as characters: the largest value of each filter over the windows of a sequence, and highway gates. The definitions are
// cpu/convolution.rs and cpu/highway.rs.
//
// Legend: W sequences (words), N rows (their characters) of D columns, F filters of width K in a bank, columns: filters of all banks.
//
// The products of windows and filters are cuBLASLt's: windows are laid out one by one for the widest bank, and narrower ones read the
// beginnings of the same rows. Products of a block of rows are looked through before the next block's are made. The backward touches one
// window for each sequence and filter, so it has no products: sums over sequences are taken in chunks with fixed borders, which are added
// in order.
//
// Compiled for the storage type STORE, and for EVEN rows or not.
#include "common.cuh"
#include "activation.cuh"

#define MOST_BANKS 32
#define NOWHERE 0xffffffffu

// As in characters.rs.
struct Banks {
    // F×K·D, F.
    const STORE *weights[MOST_BANKS];
    const float *biases[MOST_BANKS];
    float *dweights[MOST_BANKS], *dbiases[MOST_BANKS];
    // K; the bank's first column; its first number in a row of partial sums, which are K·D + 1 for each filter.
    u32 widths[MOST_BANKS], firsts[MOST_BANKS], places[MOST_BANKS];
    // A bit for each bank whose gradient is added to what is there.
    u32 add_weights, add_biases;
    u32 count, columns, d, sums;
};

enum Activation { NONE, RELU, TANH };

__device__ __forceinline__ u32 bank_of(const Banks &b, u32 column) {
    u32 bank = 0;
    while (bank + 1 < b.count && b.firsts[bank + 1] <= column) bank++;
    return bank;
}

// Row i becomes the `columns` numbers of x from row first + i on, with zeros behind the end of x. A thread has eight of them.
extern "C" __global__ void __launch_bounds__(256)
    unfold(const STORE *x, STORE *out, u32 first, u32 rows, u32 all, u32 d, u32 columns, u32 stride) {
    const u32 units = groups(columns);
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, row = i / units;
    if (row >= rows) return;
    const u32 c = (u32)(i % units) * 8;
    const u64 left = (u64)(all - first - row) * d;
    const u32 there = left < columns ? (u32)left : columns;
    float v[8] = {};
    if (c < there) load8<EVEN>(x + (first + row) * d, c, there, v);
    store8<EVEN>(out + row * stride, c, columns, v);
}

// The largest sums of word blockIdx.x in the block of rows from `first` on: a thread for each filter. What is found goes on to the next
// block of rows by `running` and `at`, until the word has no more windows.
extern "C" __global__ void __launch_bounds__(128)
    largest(Banks b, const float *sums, const u32 *offsets, u32 first, u32 rows, float *running, STORE *out, u32 *at,
            u32 activation, u32 *fault) {
    const u32 word = blockIdx.x, f = blockIdx.y * blockDim.x + threadIdx.x;
    if (f >= b.columns) return;
    const u32 bank = bank_of(b, f), start = offsets[word], length = offsets[word + 1] - start;
    const u64 i = (u64)word * b.columns + f;
    if (length < b.widths[bank]) {
        // It has no window.
        if (first == 0) report(fault, FAULT_CONVOLUTION);
        out[i] = narrow<STORE>(NOT_A_NUMBER);
        at[i] = NOWHERE;
        return;
    }
    const u32 windows = start + length - b.widths[bank] + 1;
    const u32 from = max(start, first), to = min(windows, first + rows);
    if (from >= to) return;
    float best = -INFINITE;
    u32 row = from;
    if (start < first) best = running[i], row = at[i];
    for (u32 t = from; t < to; t++) {
        const float x = sums[(u64)(t - first) * b.columns + f];
        // A NaN stays: nothing is larger.
        if (x > best || x != x) best = x, row = t;
    }
    at[i] = row;
    if (to < windows) {
        running[i] = best;
        return;
    }
    best += b.biases[bank][f - b.firsts[bank]];
    out[i] = narrow<STORE>(activation == RELU ? relu::value(best) : activation == TANH ? hyperbolic::value(best) : best);
}

// Gradients of the sums, from what came out and its gradient. A grid of any size.
extern "C" __global__ void __launch_bounds__(256) slopes(const STORE *y, const STORE *dy, float *out, u64 n, u32 activation) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        const float v = widen(y[i]), d = widen(dy[i]);
        // What ReLU gave has its own slope.
        out[i] = activation == RELU ? d * relu::slope(v) : activation == TANH ? d * (1.0f - v * v) : d;
    }
}

// A warp has a filter, and takes the words of chunk blockIdx.y: the sums of its weights' and its bias' gradients in row blockIdx.y of
// `partial`.
#define WARPS 8
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    weight_sums(Banks b, const STORE *x, const float *slopes, const u32 *at, float *partial, u32 words, u32 chunk) {
    const u32 lane = threadIdx.x % 32, f = blockIdx.x * WARPS + threadIdx.x / 32;
    if (f >= b.columns) return;
    const u32 bank = bank_of(b, f), size = b.widths[bank] * b.d, first = blockIdx.y * chunk, last = min(words, first + chunk);
    float *to = partial + (u64)blockIdx.y * b.sums + b.places[bank] + (u64)(f - b.firsts[bank]) * (size + 1);
    for (u32 start = 0; start < size; start += 128) {
        float sum[4] = {}, all = 0.0f;
#pragma unroll 4
        for (u32 word = first; word < last; word++) {
            const float g = slopes[(u64)word * b.columns + f];
            const u32 row = at[(u64)word * b.columns + f];
            if (g == 0.0f || row == NOWHERE) continue;
            const STORE *window = x + (u64)row * b.d;
            all += g;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u32 c = start + 32 * k + lane;
                if (c < size) sum[k] = fmaf(g, widen(window[c]), sum[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u32 c = start + 32 * k + lane;
            if (c < size) to[c] = sum[k];
        }
        if (start == 0 && lane == 0) to[size] = all;
    }
}

// Adds the chunks' sums in order. A thread for each number.
extern "C" __global__ void __launch_bounds__(256) weight_finish(Banks b, const float *partial, u32 chunks) {
    const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= b.sums) return;
    u32 bank = 0;
    while (bank + 1 < b.count && b.places[bank + 1] <= i) bank++;
    float sum = 0.0f;
    for (u32 k = 0; k < chunks; k++) sum += partial[(u64)k * b.sums + i];
    const u32 size = b.widths[bank] * b.d, f = (i - b.places[bank]) / (size + 1), c = (i - b.places[bank]) % (size + 1);
    float *to = c < size ? b.dweights[bank] + (u64)f * size + c : b.dbiases[bank] + f;
    const bool add = (c < size ? b.add_weights : b.add_biases) >> bank & 1;
    *to = add ? *to + sum : sum;
}

// The gradient of the rows of word blockIdx.x; the last block has the rows behind the last word, which get zeros. A thread adds, for one
// number of a row, what all filters say whose window has the row.
#define FILTERS 256
extern "C" __global__ void __launch_bounds__(FILTERS)
    input_sums(Banks b, const float *slopes, const u32 *at, const u32 *offsets, STORE *dx, u32 words, u32 all) {
    __shared__ float g[FILTERS];
    __shared__ u32 rows[FILTERS];
    const u32 word = blockIdx.x, start = offsets[word], end = word < words ? offsets[word + 1] : all;
    const u64 numbers = (u64)(end - start) * b.d;
    for (u64 first = 0; first < numbers; first += FILTERS) {
        const u64 i = first + threadIdx.x;
        const u32 row = start + (u32)(i / b.d), c = (u32)(i % b.d);
        float sum = 0.0f;
        for (u32 bank = 0; bank < b.count && word < words; bank++) {
            const u32 from = b.firsts[bank], to = bank + 1 < b.count ? b.firsts[bank + 1] : b.columns, width = b.widths[bank];
            for (u32 tile = from; tile < to; tile += FILTERS) {
                __syncthreads();
                if (tile + threadIdx.x < to) {
                    const u64 place = (u64)word * b.columns + tile + threadIdx.x;
                    rows[threadIdx.x] = at[place];
                    g[threadIdx.x] = at[place] == NOWHERE ? 0.0f : slopes[place];
                }
                __syncthreads();
                const u32 count = min(to - tile, FILTERS);
                for (u32 f = 0; f < count; f++) {
                    const u32 k = row - rows[f];
                    if (g[f] == 0.0f || k >= width) continue;
                    sum = fmaf(g[f], widen(b.weights[bank][((u64)(tile - from + f) * width + k) * b.d + c]), sum);
                }
            }
        }
        if (i < numbers) dx[(u64)start * b.d + i] = narrow<STORE>(sum);
    }
}

// --- highway -------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

// σ(g)∘relu(t) + (1 − σ(g))∘x, where a row of z (T×2H) is t and then g. A thread has eight columns of a row.
extern "C" __global__ void __launch_bounds__(256) highway(const STORE *z, const STORE *x, STORE *out, u32 rows, u32 h) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, row = i / groups(h);
    const u32 c = (u32)(i % groups(h)) * 8;
    if (row >= rows) return;
    float t[8], gate[8], v[8];
    load8<EVEN>(z + row * 2 * h, c, h, t);
    load8<EVEN>(z + row * 2 * h + h, c, h, gate);
    load8<EVEN>(x + row * h, c, h, v);
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = fmaf(sigmoid(gate[k]), relu::value(t[k]) - v[k], v[k]);
    store8<EVEN>(out + row * h, c, h, v);
}

extern "C" __global__ void __launch_bounds__(256)
    highway_backward(const STORE *z, const STORE *x, const STORE *dy, STORE *dz, STORE *dx, u32 rows, u32 h) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, row = i / groups(h);
    const u32 c = (u32)(i % groups(h)) * 8;
    if (row >= rows) return;
    float t[8], gate[8], v[8], d[8];
    load8<EVEN>(z + row * 2 * h, c, h, t);
    load8<EVEN>(z + row * 2 * h + h, c, h, gate);
    load8<EVEN>(x + row * h, c, h, v);
    load8<EVEN>(dy + row * h, c, h, d);
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float share = sigmoid(gate[k]), through = d[k] * (1.0f - share);
        gate[k] = through * share * (relu::value(t[k]) - v[k]);
        t[k] = d[k] * share * relu::slope(t[k]);
        d[k] = through;
    }
    store8<EVEN>(dz + row * 2 * h, c, h, t);
    store8<EVEN>(dz + row * 2 * h + h, c, h, gate);
    store8<EVEN>(dx + row * h, c, h, d);
}
