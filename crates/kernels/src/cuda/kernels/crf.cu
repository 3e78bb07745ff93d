// A linear-chain conditional random field: sums over all labellings of a sequence, what they say about each label, and the best labelling.
// The definition is cpu/crf.rs, and as there all is computed in f64: logarithms of sums grow with a sequence, and labels are few.
//
// Legend: B sequences, T tokens of all of them, K labels. Steps along a sequence follow each other within a block: a label is a group of
// lanes, which share the K terms of its sum. Gradients of the field are summed over chunks of sequences with fixed borders.
//
// Compiled for the storage type STORE of the logits.
#include "common.cuh"

#define THREADS 128

// As in crf.rs.
struct Field {
    // K, K, K×K from row to column.
    const float *start, *end, *transitions;
    u32 labels;
    // Lanes of a label: a power of two, at most 32.
    u32 group;
};

__device__ __forceinline__ double lowest() { return -(double)INFINITE; }

// ln Σ eˣ over the terms that a group of lanes has together: `term(i)` for i below `count`. All lanes of the block come here.
template <class F> __device__ __forceinline__ double log_sum(u32 count, u32 group, F term) {
    const u32 lane = threadIdx.x % group;
    double largest = lowest();
    for (u32 i = lane; i < count; i += group) largest = fmax(largest, term(i));
    for (u32 by = group / 2; by > 0; by /= 2) largest = fmax(largest, __shfl_xor_sync(ALL_LANES, largest, by));
    // All are −∞, or one is ∞; a NaN shows below.
    const bool finite = isfinite(largest);
    double sum = 0.0;
    for (u32 i = lane; i < count; i += group) {
        const double x = term(i);
        sum += finite ? exp(x - largest) : x != x ? x : 0.0;
    }
    for (u32 by = group / 2; by > 0; by /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, by);
    return finite ? largest + log(sum) : largest + sum;
}

// Runs `body(label)` for every label with all lanes of its group; those beyond the last label run along with that, and `active` is false.
template <class F> __device__ __forceinline__ void for_labels(const Field &f, F body) {
    for (u32 first = 0; first < f.labels; first += THREADS / f.group) {
        const u32 label = first + threadIdx.x / f.group;
        body(min(label, f.labels - 1), label < f.labels && threadIdx.x % f.group == 0);
    }
}

// Sums over the labels of the tokens up to each (`before`, T×K, which includes its own), or, of blocks with blockIdx.y = 1, of those after
// it (`after`); and over all labellings of a sequence (`all`, B).
extern "C" __global__ void __launch_bounds__(THREADS)
    sums(Field f, const STORE *logits, const u32 *offsets, double *before, double *after, double *all) {
    const u32 k = f.labels, first = offsets[blockIdx.x], end = offsets[blockIdx.x + 1];
    if (first >= end) return;
    if (blockIdx.y == 0) {
        for_labels(f, [&](u32 label, bool active) {
            const u64 at = (u64)first * k + label;
            if (active) before[at] = (double)widen(logits[at]) + (double)f.start[label];
        });
        for (u32 token = first + 1; token < end; token++) {
            __syncthreads();
            const double *done = before + (u64)(token - 1) * k;
            for_labels(f, [&](u32 label, bool active) {
                const double sum = log_sum(k, f.group, [&](u32 i) { return done[i] + (double)f.transitions[(u64)i * k + label]; });
                const u64 at = (u64)token * k + label;
                if (active) before[at] = (double)widen(logits[at]) + sum;
            });
        }
        __syncthreads();
        // Every warp takes the same sum.
        const double *last = before + (u64)(end - 1) * k;
        const double sum = log_sum(k, 32, [&](u32 i) { return last[i] + (double)f.end[i]; });
        if (threadIdx.x == 0) all[blockIdx.x] = sum;
    } else {
        for_labels(f, [&](u32 label, bool active) {
            if (active) after[(u64)(end - 1) * k + label] = (double)f.end[label];
        });
        for (u32 token = end - 1; token > first; token--) {
            __syncthreads();
            const double *done = after + (u64)token * k;
            const STORE *own = logits + (u64)token * k;
            for_labels(f, [&](u32 label, bool active) {
                const double sum = log_sum(k, f.group, [&](u32 i) {
                    return (double)f.transitions[(u64)label * k + i] + (double)widen(own[i]) + done[i];
                });
                if (active) after[(u64)(token - 1) * k + label] = sum;
            });
        }
    }
}

// What chunk blockIdx.x of the sequences adds to the loss and, where they are wanted, to the gradients of the field, before the scale: a row
// of `partial` is the loss, K of start, K of end, K×K of transitions.
extern "C" __global__ void __launch_bounds__(256)
    differences(Field f, const STORE *logits, const u32 *offsets, const u32 *labels, const double *before, const double *after,
                const double *all, double *partial, u32 sequences, u32 chunk, u32 wanted, u32 *fault) {
    __shared__ double space[32];
    const u32 k = f.labels, first = blockIdx.x * chunk, last = min(sequences, first + chunk);
    double *to = partial + (u64)blockIdx.x * (1 + (u64)k * (k + 2));
    double loss = 0.0;
    for (u32 s = first; s < last; s++) {
        const u32 start = offsets[s], end = offsets[s + 1];
        if (threadIdx.x == 0 && start < end) loss += all[s];
        for (u32 t = start + threadIdx.x; t < end; t += blockDim.x) {
            const u32 label = labels[t], previous = t > start ? labels[t - 1] : 0;
            if (label >= k || previous >= k) {
                report(fault, FAULT_CRF);
                loss = (double)NOT_A_NUMBER;
                continue;
            }
            loss -= (double)widen(logits[(u64)t * k + label]);
            loss -= (double)(t > start ? f.transitions[(u64)previous * k + label] : f.start[label]);
            if (t + 1 == end) loss -= (double)f.end[label];
        }
    }
    loss = block_sum(loss, space);
    if (threadIdx.x == 0) to[0] = loss;
    if (!wanted) return;
    for (u32 label = threadIdx.x; label < k; label += blockDim.x) {
        double begins = 0.0, ends = 0.0;
        for (u32 s = first; s < last; s++) {
            const u32 start = offsets[s], end = offsets[s + 1];
            if (start >= end) continue;
            const u64 one = (u64)start * k + label, other = (u64)(end - 1) * k + label;
            begins += exp(before[one] + after[one] - all[s]) - (labels[start] == label ? 1.0 : 0.0);
            ends += exp(before[other] + after[other] - all[s]) - (labels[end - 1] == label ? 1.0 : 0.0);
        }
        to[1 + label] = begins;
        to[1 + k + label] = ends;
    }
    for (u64 pair = threadIdx.x; pair < (u64)k * k; pair += blockDim.x) {
        const u32 from = (u32)(pair / k), into = (u32)(pair % k);
        const double step = (double)f.transitions[pair];
        double sum = 0.0;
        for (u32 s = first; s < last; s++) {
            for (u32 t = offsets[s] + 1; t < offsets[s + 1]; t++) {
                const u64 at = (u64)t * k + into;
                const double together = before[(u64)(t - 1) * k + from] + step + (double)widen(logits[at]) + after[at];
                sum += exp(together - all[s]) - (labels[t - 1] == from && labels[t] == into ? 1.0 : 0.0);
            }
        }
        to[1 + 2 * (u64)k + pair] = sum;
    }
}

// Adds the chunks in order: the loss, and where they are wanted the gradients of the field, all times the scale.
extern "C" __global__ void __launch_bounds__(256)
    finish(const double *partial, u32 chunks, u32 k, float scale, float *loss, float *dstart, float *dend, float *dtransitions) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, numbers = 1 + (u64)k * (k + 2);
    if (i >= (dstart ? numbers : 1)) return;
    double sum = 0.0;
    for (u32 c = 0; c < chunks; c++) sum += partial[c * numbers + i];
    const float x = (float)((double)scale * sum);
    if (i == 0) *loss = x;
    else if (i <= k) dstart[i - 1] = x;
    else if (i <= 2 * k) dend[i - 1 - k] = x;
    else dtransitions[i - 1 - 2 * (u64)k] = x;
}

// How likely each label of each token of sequence blockIdx.x is; the last block has the tokens behind the last sequence, which get zeros.
// With `labels`, how far that is from what is right, times the scale, which takes the place of the logits.
template <class O>
__device__ __forceinline__ void shares(const Field &f, const u32 *offsets, const u32 *labels, const double *before,
                                       const double *after, const double *all, O *out, u32 sequences, u32 tokens, float scale) {
    const u32 k = f.labels, s = blockIdx.x;
    const u64 start = (u64)offsets[s] * k, end = (u64)(s < sequences ? offsets[s + 1] : tokens) * k;
    for (u64 i = start + threadIdx.x; i < end; i += blockDim.x) {
        double share = 0.0;
        if (s < sequences) {
            share = exp(before[i] + after[i] - all[s]);
            if (labels && labels[i / k] == i % k) share -= 1.0;
        }
        out[i] = narrow<O>((float)((double)scale * share));
    }
}
extern "C" __global__ void __launch_bounds__(256)
    gradient(Field f, const u32 *offsets, const u32 *labels, const double *before, const double *after, const double *all,
             STORE *logits, u32 sequences, u32 tokens, float scale) {
    shares(f, offsets, labels, before, after, all, logits, sequences, tokens, scale);
}
extern "C" __global__ void __launch_bounds__(256)
    probabilities(Field f, const u32 *offsets, const double *before, const double *after, const double *all, float *out,
                  u32 sequences, u32 tokens) {
    shares(f, offsets, (const u32 *)nullptr, before, after, all, out, sequences, tokens, 1.0f);
}

// What an illegal step takes off a score: more than any other, so that a labelling has as few of them as there can be.
#define ILLEGAL 1e9

// The likeliest labels of sequence blockIdx.x, by Viterbi's algorithm; of equals, the first. legal: K, K and K×K of 0 and 1, or 0. `scores`
// has two rows of K for each sequence, `from` is T×K.
extern "C" __global__ void __launch_bounds__(THREADS)
    best(Field f, const u32 *legal, const STORE *logits, const u32 *offsets, double *scores, u32 *from, u32 *out) {
    const u32 k = f.labels, first = offsets[blockIdx.x], end = offsets[blockIdx.x + 1];
    if (first >= end) return;
    double *rows = scores + (u64)blockIdx.x * 2 * k;
    const u32 *legal_end = legal + k, *legal_steps = legal + 2 * (u64)k;
    for_labels(f, [&](u32 label, bool active) {
        const double own = (double)widen(logits[(u64)first * k + label]) + (double)f.start[label];
        if (active) rows[label] = own - (legal && !legal[label] ? ILLEGAL : 0.0);
    });
    for (u32 token = first + 1; token < end; token++) {
        __syncthreads();
        const double *done = rows + (token - first + 1) % 2 * k;
        double *now = rows + (token - first) % 2 * k;
        for_labels(f, [&](u32 label, bool active) {
            double most = lowest();
            u32 place = 0;
            for (u32 i = threadIdx.x % f.group; i < k; i += f.group) {
                const u64 step = (u64)i * k + label;
                const double score = done[i] + (double)f.transitions[step] - (legal && !legal_steps[step] ? ILLEGAL : 0.0);
                if (score > most) most = score, place = i;
            }
            for (u32 by = f.group / 2; by > 0; by /= 2) {
                const double other = __shfl_xor_sync(ALL_LANES, most, by);
                const u32 there = __shfl_xor_sync(ALL_LANES, place, by);
                if (other > most || (other == most && there < place)) most = other, place = there;
            }
            const u64 at = (u64)token * k + label;
            if (active) now[label] = most + (double)widen(logits[at]), from[at] = place;
        });
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    const double *last = rows + (end - 1 - first) % 2 * k;
    u32 label = 0;
    double most = lowest();
    for (u32 i = 0; i < k; i++) {
        const double total = last[i] + (double)f.end[i] - (legal && !legal_end[i] ? ILLEGAL : 0.0);
        if (total > most) most = total, label = i;
    }
    for (u32 token = end; token > first; token--) {
        out[token - 1] = label;
        if (token - 1 > first) label = from[(u64)(token - 1) * k + label];
    }
}
