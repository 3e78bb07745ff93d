// Recurrent layers over flat tokens: what happens between two products with the states, for all rows of a step and both
// directions at once. The definition is cpu/recurrent.
//
// Legend: B sequences, T tokens; rows are sequences, the longest first; C units of a layer, P numbers of its state (C, or fewer
// where it is projected), G gates, D directions. A thread has one column of one row: a step is short, and what counts is that
// many threads wait for memory at once.
//
// A launch may have more rows and more steps than a batch needs, for graphs are played with the sizes they were recorded with.
// Rows whose sequence has ended do nothing. What stands in them is never read: a sequence's row depends on itself alone, also in
// the products.
//
// Compiled for the storage type STORE.
#include "common.cuh"
#include "activation.cuh"

// As in recurrent.rs.
struct Scan {
    // B + 1: where sequences begin, and the end of the last. B: which sequence each row is.
    const u32 *offsets, *order;
    // T×D·G·C: what tokens say; becomes the gates, and in the backward the gradient of what they said.
    STORE *gates;
    // D×T×C, or 0: cells of an LSTM, what the state says to the new value of a GRU.
    STORE *aside;
    // D×B×G·C, or 0: what states say.
    const float *sums;
    // D·G·C, or 0.
    const float *bias;
    // D·B×P and D·B×C in the order of the sequences, or 0.
    const STORE *initial_states, *initial_cells;
    // D×B×P, D×B×C: of the step before, then of this one.
    STORE *states;
    float *cells;
    // D×B×C: what is projected; T×D·C in the backward.
    STORE *inner;
    // T×D·P.
    STORE *out;
    // D·B×P and D·B×C in the order of the sequences, or 0: what sequences end with; in the backward, its gradients.
    STORE *last_states, *last_cells;
    // T×D·P: gradients of the states.
    const STORE *dout;
    // D×B×P, D×B×C: what a step hands to the one before.
    float *dstates, *dcells;
    // D×B×C: gradients of what is projected.
    const float *dinner;
    // D×B×P, T×D·P: gradients of what was projected.
    STORE *dprojected, *dprojections;
    // D×B×G·C: gradients of what states said. T×D·G·C: the same by token, where it is not that of what tokens said (a GRU's).
    STORE *dsums, *all_dsums;
    // T×D·P: the state before each token.
    STORE *before;
    u32 sequences, tokens, hidden, width, directions;
    // A bit for each direction that begins at the ends.
    u32 reverse;
    u32 rows, step;
    // Whether a plain layer's activation is ReLU.
    u32 relu;
    float clip_cell, clip_projection;
};

// A row of a step: which sequence and token it is, and whether it takes part.
struct Row {
    u32 row, column, direction, sequence, token, previous;
    bool runs, first, last;
};

// The row and column of this thread, where rows have so many columns.
__device__ __forceinline__ Row row_of(const Scan &s, u32 columns) {
    Row r;
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    r.row = (u32)(i / columns), r.column = (u32)(i % columns), r.direction = blockIdx.y;
    r.runs = r.row < s.rows;
    if (!r.runs) return r;
    r.sequence = s.order[r.row];
    const u32 start = s.offsets[r.sequence], end = s.offsets[r.sequence + 1];
    r.runs = s.step < end - start;
    const bool reverse = s.reverse >> r.direction & 1;
    r.token = reverse ? end - 1 - s.step : start + s.step;
    r.previous = reverse ? r.token + 1 : r.token - 1;
    r.first = s.step == 0;
    r.last = s.step + 1 == end - start;
    return r;
}

// Where a row of work space begins, and a token's in columns of all directions, and a sequence's.
__device__ __forceinline__ u64 work_row(const Scan &s, const Row &r, u32 columns) {
    return ((u64)r.direction * s.sequences + r.row) * columns;
}
__device__ __forceinline__ u64 token_row(const Scan &s, const Row &r, u32 columns) {
    return ((u64)r.token * s.directions + r.direction) * columns;
}
__device__ __forceinline__ u64 aside_row(const Scan &s, u32 direction, u32 token) {
    return ((u64)direction * s.tokens + token) * s.hidden;
}
__device__ __forceinline__ u64 sequence_row(const Scan &s, const Row &r, u32 columns) {
    return ((u64)r.direction * s.sequences + r.sequence) * columns;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

// x, or ±limit where that is nearer to 0; a NaN stays one.
__device__ __forceinline__ float bounded(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// --- forward -----------------------------------------------------------------------------------------------------------

// The states and cells before the first step, in the order of the rows. A thread for each number.
extern "C" __global__ void __launch_bounds__(128) start_states(Scan s) {
    const u32 c = s.initial_cells ? s.hidden : 0, columns = s.width + c;
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u32 row = (u32)(i / columns), column = (u32)(i % columns), direction = blockIdx.y;
    if (row >= s.sequences) return;
    const u64 to = (u64)direction * s.sequences + row, from = (u64)direction * s.sequences + s.order[row];
    if (column < s.width) {
        s.states[to * s.width + column] = s.initial_states[from * s.width + column];
    } else {
        s.cells[to * c + column - s.width] = widen(s.initial_cells[from * c + column - s.width]);
    }
}

// What fills a batch up is no sequence's: zeros, which nobody's gradient depends on. A grid of any size.
extern "C" __global__ void __launch_bounds__(256) clear_rest(STORE *x, u32 columns, const u32 *offsets, u32 sequences, u32 tokens) {
    const u64 start = (u64)offsets[sequences] * columns, end = (u64)tokens * columns;
    const u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = start + (u64)blockIdx.x * blockDim.x + threadIdx.x; i < end; i += stride) x[i] = narrow<STORE>(0.0f);
}

// What the state says to a gate.
__device__ __forceinline__ float of_state(const Scan &s, const Row &r, u32 gates, u32 gate) {
    const u32 width = gates * s.hidden, at = gate * s.hidden + r.column;
    const float sum = s.sums ? s.sums[work_row(s, r, width) + at] : 0.0f;
    return s.bias ? sum + s.bias[(u64)r.direction * width + at] : sum;
}

// A state goes to its token, to the next product, and out where it is a sequence's last.
__device__ __forceinline__ void give(const Scan &s, const Row &r, float state) {
    const STORE h = narrow<STORE>(state);
    s.states[work_row(s, r, s.width) + r.column] = h;
    s.out[token_row(s, r, s.width) + r.column] = h;
    if (r.last && s.last_states) s.last_states[sequence_row(s, r, s.width) + r.column] = h;
}

extern "C" __global__ void __launch_bounds__(128) lstm_forward(Scan s) {
    const u32 c = s.hidden;
    const Row r = row_of(s, c);
    if (!r.runs) return;
    STORE *gates = s.gates + token_row(s, r, 4 * c) + r.column;
    const float i = sigmoid(widen(gates[0]) + of_state(s, r, 4, 0));
    const float f = sigmoid(widen(gates[c]) + of_state(s, r, 4, 1));
    const float g = hyperbolic::value(widen(gates[2 * c]) + of_state(s, r, 4, 2));
    const float o = sigmoid(widen(gates[3 * c]) + of_state(s, r, 4, 3));
    float *cell = s.cells + work_row(s, r, c) + r.column;
    const float before = r.first && !s.initial_cells ? 0.0f : *cell;
    const float now = bounded(fmaf(f, before, i * g), s.clip_cell);
    *cell = now;
    if (s.aside) s.aside[aside_row(s, r.direction, r.token) + r.column] = narrow<STORE>(now);
    if (r.last && s.last_cells) s.last_cells[sequence_row(s, r, c) + r.column] = narrow<STORE>(now);
    gates[0] = narrow<STORE>(i), gates[c] = narrow<STORE>(f), gates[2 * c] = narrow<STORE>(g), gates[3 * c] = narrow<STORE>(o);
    const float inner = o * hyperbolic::value(now);
    if (s.inner) {
        s.inner[work_row(s, r, c) + r.column] = narrow<STORE>(inner);
    } else {
        give(s, r, inner);
    }
}

extern "C" __global__ void __launch_bounds__(128) gru_forward(Scan s) {
    const u32 c = s.hidden;
    const Row r = row_of(s, c);
    if (!r.runs) return;
    STORE *gates = s.gates + token_row(s, r, 3 * c) + r.column;
    const float reset = sigmoid(widen(gates[0]) + of_state(s, r, 3, 0));
    const float update = sigmoid(widen(gates[c]) + of_state(s, r, 3, 1));
    const float q = of_state(s, r, 3, 2);
    const float fresh = hyperbolic::value(fmaf(reset, q, widen(gates[2 * c])));
    const float before = r.first && !s.initial_states ? 0.0f : widen(s.states[work_row(s, r, c) + r.column]);
    if (s.aside) s.aside[aside_row(s, r.direction, r.token) + r.column] = narrow<STORE>(q);
    gates[0] = narrow<STORE>(reset), gates[c] = narrow<STORE>(update), gates[2 * c] = narrow<STORE>(fresh);
    give(s, r, fmaf(update, before - fresh, fresh));
}

extern "C" __global__ void __launch_bounds__(128) plain_forward(Scan s) {
    const Row r = row_of(s, s.hidden);
    if (!r.runs) return;
    STORE *gate = s.gates + token_row(s, r, s.hidden) + r.column;
    const float sum = widen(*gate) + of_state(s, r, 1, 0);
    const float h = s.relu ? relu::value(sum) : hyperbolic::value(sum);
    *gate = narrow<STORE>(h);
    give(s, r, h);
}

// Bounds what was projected.
extern "C" __global__ void __launch_bounds__(128) projected(Scan s) {
    const Row r = row_of(s, s.width);
    if (r.runs) give(s, r, bounded(widen(s.states[work_row(s, r, s.width) + r.column]), s.clip_projection));
}

// --- backward ----------------------------------------------------------------------------------------------------------

// For every token and direction: the state before it, and what an LSTM projects there. What fills a batch up gets zeros
// everywhere. A block for each token.
extern "C" __global__ void __launch_bounds__(128) prepare(Scan s, u32 gates) {
    const u32 token = blockIdx.x, direction = blockIdx.y;
    const u64 both = (u64)token * s.directions + direction;
    if (token >= s.offsets[s.sequences]) {
        const STORE zero = narrow<STORE>(0.0f);
        for (u32 j = threadIdx.x; j < gates; j += blockDim.x) {
            s.gates[both * gates + j] = zero;
            if (s.all_dsums) s.all_dsums[both * gates + j] = zero;
        }
        for (u32 j = threadIdx.x; j < s.width; j += blockDim.x) {
            s.before[both * s.width + j] = zero;
            if (s.dprojections) s.dprojections[both * s.width + j] = zero;
        }
        for (u32 j = threadIdx.x; s.inner && j < s.hidden; j += blockDim.x) s.inner[both * s.hidden + j] = zero;
        return;
    }
    // The last sequence that begins at the token or before.
    u32 low = 0, high = s.sequences;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (s.offsets[middle] <= token) low = middle;
        else high = middle;
    }
    const u32 start = s.offsets[low], end = s.offsets[low + 1];
    const bool reverse = s.reverse >> direction & 1, first = reverse ? token + 1 == end : token == start;
    const u32 previous = reverse ? token + 1 : token - 1;
    const STORE *from = first ? s.initial_states + ((u64)direction * s.sequences + low) * s.width
                              : s.out + ((u64)previous * s.directions + direction) * s.width;
    const bool nothing = first && !s.initial_states;
    for (u32 j = threadIdx.x; j < s.width; j += blockDim.x) {
        s.before[both * s.width + j] = nothing ? narrow<STORE>(0.0f) : from[j];
    }
    for (u32 j = threadIdx.x; s.inner && j < s.hidden; j += blockDim.x) {
        const float o = widen(s.gates[both * gates + 3 * s.hidden + j]);
        const float cell = widen(s.aside[aside_row(s, direction, token) + j]);
        s.inner[both * s.hidden + j] = narrow<STORE>(o * hyperbolic::value(cell));
    }
}

// What a step gets from the one behind it: a sequence's last, from what is asked of its last state.
__device__ __forceinline__ float from_behind(const Scan &s, const Row &r, const float *handed, const STORE *last, u32 columns) {
    if (!r.last) return handed[work_row(s, r, columns) + r.column];
    return last ? widen(last[sequence_row(s, r, columns) + r.column]) : 0.0f;
}

// The gradient of what was projected, where it was not bounded.
extern "C" __global__ void __launch_bounds__(128) projected_backward(Scan s) {
    const Row r = row_of(s, s.width);
    if (!r.runs) return;
    const u64 at = token_row(s, r, s.width) + r.column;
    const float d = widen(s.dout[at]) + from_behind(s, r, s.dstates, s.last_states, s.width);
    const STORE kept = narrow<STORE>(fabsf(widen(s.out[at])) < s.clip_projection ? d : 0.0f);
    s.dprojected[work_row(s, r, s.width) + r.column] = kept;
    s.dprojections[at] = kept;
}

// The gradient of a state, or of what is projected.
__device__ __forceinline__ float of_output(const Scan &s, const Row &r) {
    if (s.dinner) return s.dinner[work_row(s, r, s.hidden) + r.column];
    return widen(s.dout[token_row(s, r, s.hidden) + r.column]) + from_behind(s, r, s.dstates, s.last_states, s.hidden);
}

extern "C" __global__ void __launch_bounds__(128) lstm_backward(Scan s) {
    const u32 c = s.hidden;
    const Row r = row_of(s, c);
    if (!r.runs) return;
    STORE *gates = s.gates + token_row(s, r, 4 * c) + r.column;
    const float i = widen(gates[0]), f = widen(gates[c]), g = widen(gates[2 * c]), o = widen(gates[3 * c]);
    const float cell = widen(s.aside[aside_row(s, r.direction, r.token) + r.column]);
    float before = 0.0f;
    if (!r.first) before = widen(s.aside[aside_row(s, r.direction, r.previous) + r.column]);
    else if (s.initial_cells) before = widen(s.initial_cells[sequence_row(s, r, c) + r.column]);
    const float t = hyperbolic::value(cell), dh = of_output(s, r);
    float dc = fmaf(dh * o, 1.0f - t * t, from_behind(s, r, s.dcells, s.last_cells, c));
    dc = fabsf(cell) < s.clip_cell ? dc : 0.0f;
    s.dcells[work_row(s, r, c) + r.column] = dc * f;
    const float d[4] = {dc * g * (i * (1.0f - i)), dc * before * (f * (1.0f - f)), dc * i * (1.0f - g * g),
                        dh * t * (o * (1.0f - o))};
    STORE *dsums = s.dsums + work_row(s, r, 4 * c) + r.column;
#pragma unroll
    for (int k = 0; k < 4; k++) gates[k * c] = dsums[k * c] = narrow<STORE>(d[k]);
}

extern "C" __global__ void __launch_bounds__(128) gru_backward(Scan s) {
    const u32 c = s.hidden;
    const Row r = row_of(s, c);
    if (!r.runs) return;
    const u64 at = token_row(s, r, 3 * c) + r.column, work = work_row(s, r, 3 * c) + r.column;
    STORE *gates = s.gates + at;
    const float reset = widen(gates[0]), update = widen(gates[c]), fresh = widen(gates[2 * c]);
    const float q = widen(s.aside[aside_row(s, r.direction, r.token) + r.column]);
    const float before = widen(s.before[token_row(s, r, c) + r.column]), dh = of_output(s, r);
    const float dfresh = dh * (1.0f - update) * (1.0f - fresh * fresh);
    const STORE dreset = narrow<STORE>(dfresh * q * (reset * (1.0f - reset)));
    const STORE dupdate = narrow<STORE>(dh * (before - fresh) * (update * (1.0f - update)));
    const STORE dq = narrow<STORE>(dfresh * reset);
    gates[0] = s.dsums[work] = s.all_dsums[at] = dreset;
    gates[c] = s.dsums[work + c] = s.all_dsums[at + c] = dupdate;
    gates[2 * c] = narrow<STORE>(dfresh);
    s.dsums[work + 2 * c] = s.all_dsums[at + 2 * c] = dq;
    s.dstates[work_row(s, r, c) + r.column] = dh * update;
}

extern "C" __global__ void __launch_bounds__(128) plain_backward(Scan s) {
    const Row r = row_of(s, s.hidden);
    if (!r.runs) return;
    STORE *gate = s.gates + token_row(s, r, s.hidden) + r.column;
    const float h = widen(*gate), dh = of_output(s, r);
    *gate = s.dsums[work_row(s, r, s.hidden) + r.column] = narrow<STORE>(dh * (s.relu ? relu::slope(h) : 1.0f - h * h));
}

// What is left after the first step is the gradient of the states before it.
extern "C" __global__ void __launch_bounds__(128) end_states(Scan s, STORE *dinitial_states, STORE *dinitial_cells) {
    const u32 c = dinitial_cells ? s.hidden : 0, columns = s.width + c;
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u32 row = (u32)(i / columns), column = (u32)(i % columns), direction = blockIdx.y;
    if (row >= s.sequences) return;
    const u64 from = (u64)direction * s.sequences + row, to = (u64)direction * s.sequences + s.order[row];
    if (column < s.width) {
        dinitial_states[to * s.width + column] = narrow<STORE>(s.dstates[from * s.width + column]);
    } else {
        dinitial_cells[to * c + column - s.width] = narrow<STORE>(s.dcells[from * c + column - s.width]);
    }
}
