// Losses, whose gradient takes the place of what they are computed from, and the softmax that they share.
//
// Legend: P rows of logits, `columns` apart, of which the first `classes` count; the rest is padding, whatever it holds, and
// its gradient is 0. A row with a logit that is infinite or a NaN gives NaN everywhere.
//
// Compiled for a storage type STORE, and one of: UNITS of eight columns for each of BLOCK_THREADS, where cross-entropy keeps
// a row in registers; EVEN or not, for cross-entropy over rows of any length; neither, for the rest.
#include "common.cuh"

#define LOG2_E 1.4426950408889634f

// The largest number of a row and Σ e^(x − largest), as far as a thread, a warp or a block has seen it. A number that is not
// finite makes the sum a NaN.
struct Softmax {
    float largest, sum;
    __device__ __forceinline__ Softmax() : largest(-INFINITE), sum(0.0f) {}

    // Joins eight numbers of which the first `count` are there.
    __device__ __forceinline__ void join(const float (&x)[8], int count) {
        float top = largest, bad = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < count) {
                top = fmaxf(top, x[i]);
                bad = fmaf(x[i], 0.0f, bad);
            }
        float more = bad;
        // Not x·log₂e − top·log₂e: the difference of large numbers would lose the digits that count.
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < count) more += exp2_fast((x[i] - top) * LOG2_E);
        sum = sum * exp2_fast((largest - top) * LOG2_E) + more;
        largest = top;
    }
    // Joins what another thread has seen.
    __device__ __forceinline__ void join(float other_largest, float other_sum) {
        const float top = fmaxf(largest, other_largest);
        // Where nobody has seen anything, both are −∞ and their difference would be a NaN.
        const float a = largest == top ? 1.0f : exp2_fast((largest - top) * LOG2_E);
        const float b = other_largest == top ? 1.0f : exp2_fast((other_largest - top) * LOG2_E);
        sum = sum * a + other_sum * b;
        largest = top;
    }
    __device__ __forceinline__ void join_warp() {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            join(__shfl_xor_sync(ALL_LANES, largest, offset), __shfl_xor_sync(ALL_LANES, sum, offset));
    }
    // Over the block, known to all of its threads; `space` holds one for each of up to 32 warps.
    __device__ __forceinline__ void join_block(float2 *space) {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
        join_warp();
        if (warps == 1) return;
        if (lane == 0) space[warp] = make_float2(largest, sum);
        __syncthreads();
        largest = lane < warps ? space[lane].x : -INFINITE;
        sum = lane < warps ? space[lane].y : 0.0f;
        join_warp();
    }
};

__device__ __forceinline__ int present(u32 c, u32 classes) { return c < classes ? min(classes - c, 8u) : 0; }

// scale·weight·(softmax − target) of eight columns; zeros in padding. The target has `spread` at every class and `peak` more at
// its own.
__device__ __forceinline__ void gradient(float (&x)[8], u32 c, u32 classes, u32 target, float largest, float share, float factor,
                                         float inverse, float peak, float spread) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float e = exp2_fast((x[i] - largest) * LOG2_E);
        x[i] = c + i < classes ? (c + i == target ? factor * (e * inverse - (peak + spread)) : e * share - factor * spread) : 0.0f;
    }
}

// What a row is computed with; `counts`: whether it has a weight.
struct Row {
    float factor;
    u32 target;
    bool counts;
    __device__ __forceinline__ Row(u32 row, const u32 *targets, const float *weights, float scale, u32 classes, u32 *fault) {
        const float weight = weights ? weights[row] : 1.0f;
        counts = weight != 0.0f;
        target = counts ? targets[row] : 0;
        factor = scale * weight;
        if (target >= classes) {
            if (threadIdx.x == 0) report(fault, FAULT_CROSS_ENTROPY);
            factor = NOT_A_NUMBER;
        }
    }
    // Of a target that is no class the loss is a NaN. With label smoothing, `total` is the sum of all logits less the largest.
    __device__ __forceinline__ float loss(const Softmax &s, float logit, u32 classes, float smoothing, float total) const {
        if (target >= classes) return NOT_A_NUMBER;
        const float own = (s.largest - logit) + logf(s.sum);
        // ln Σ eˣ − (1 − smoothing)·x[target] − smoothing·mean = own − smoothing·(mean − x[target]).
        return smoothing == 0.0f ? own : own - smoothing * (total / classes + (s.largest - logit));
    }
};

// A block has a row, each thread N units of eight columns, which stay in registers: one read and one write.
template <class E, int N, int THREADS>
__device__ __forceinline__ void cross_entropy(E *logits, u32 columns, u32 classes, const u32 *targets, const float *weights,
                                              float smoothing, float scale, u32 want_gradient, float *losses, u32 *fault) {
    __shared__ float2 space[32];
    __shared__ float sums[32];
    E *x = logits + (u64)blockIdx.x * columns;
    const Row row(blockIdx.x, targets, weights, scale, classes, fault);
    Raw<E> raw[N];
    if (!row.counts) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
        if (!want_gradient) return;
        const float zero[8] = {};
#pragma unroll
        for (int n = 0; n < N; n++) {
            const u32 c = (threadIdx.x + n * THREADS) * 8;
            if (c < columns) store8<true>(x, c, columns, zero);
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
        const u32 c = (threadIdx.x + n * THREADS) * 8;
        if (c < columns) raw[n] = load_raw(x + c);
    }
    const float logit = threadIdx.x == 0 && row.target < classes ? widen(x[row.target]) : 0.0f;
    Softmax s;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const u32 c = (threadIdx.x + n * THREADS) * 8;
        if (c < classes) {
            float v[8];
            unpack(raw[n], v);
            s.join(v, present(c, classes));
        }
    }
    // Everybody has read the row when this is over, thread 0 its target as well.
    s.join_block(space);
    float total = 0.0f;
    if (smoothing != 0.0f) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            const u32 c = (threadIdx.x + n * THREADS) * 8;
            float v[8];
            unpack(raw[n], v);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (c + i < classes) total += v[i] - s.largest;
        }
        total = block_sum(total, sums);
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = row.loss(s, logit, classes, smoothing, total);
    if (!want_gradient) return;
    const float inverse = 1.0f / s.sum, share = row.factor * inverse, spread = smoothing / classes;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const u32 c = (threadIdx.x + n * THREADS) * 8;
        if (c >= columns) continue;
        float v[8];
        unpack(raw[n], v);
        gradient(v, c, classes, row.target, s.largest, share, row.factor, inverse, 1.0f - smoothing, spread);
        store8<true>(x, c, columns, v);
    }
}

// Rows of any length, read twice.
template <class E, bool ALIGNED>
__device__ __forceinline__ void cross_entropy_any(E *logits, u32 columns, u32 classes, const u32 *targets,
                                                  const float *weights, float smoothing, float scale, u32 want_gradient,
                                                  float *losses, u32 *fault) {
    __shared__ float2 space[32];
    __shared__ float sums[32];
    E *x = logits + (u64)blockIdx.x * columns;
    const Row row(blockIdx.x, targets, weights, scale, classes, fault);
    const u32 step = blockDim.x * 8;
    if (!row.counts) {
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
        const float zero[8] = {};
        if (want_gradient)
            for (u32 c = threadIdx.x * 8; c < columns; c += step) store8<ALIGNED>(x, c, columns, zero);
        return;
    }
    const float logit = threadIdx.x == 0 && row.target < classes ? widen(x[row.target]) : 0.0f;
    Softmax s;
    for (u32 c = threadIdx.x * 8; c < classes; c += step) {
        float v[8];
        load8<ALIGNED>(x, c, columns, v);
        s.join(v, present(c, classes));
    }
    s.join_block(space);
    float total = 0.0f;
    if (smoothing != 0.0f) {
        for (u32 c = threadIdx.x * 8; c < classes; c += step) {
            float v[8];
            load8<ALIGNED>(x, c, columns, v);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (c + i < classes) total += v[i] - s.largest;
        }
        total = block_sum(total, sums);
    }
    if (threadIdx.x == 0) losses[blockIdx.x] = row.loss(s, logit, classes, smoothing, total);
    if (!want_gradient) return;
    // A block of one warp has met no barrier: nobody may write before thread 0 has read its target.
    __syncthreads();
    const float inverse = 1.0f / s.sum, share = row.factor * inverse, spread = smoothing / classes;
    for (u32 c = threadIdx.x * 8; c < columns; c += step) {
        float v[8];
        load8<ALIGNED>(x, c, columns, v);
        gradient(v, c, classes, row.target, s.largest, share, row.factor, inverse, 1.0f - smoothing, spread);
        store8<ALIGNED>(x, c, columns, v);
    }
}

// eˣ / Σ eˣ of each row, or x − ln Σ eˣ: `out` is P×classes.
template <class E>
__device__ __forceinline__ void softmax(const E *logits, u32 columns, u32 classes, float *out, u32 log) {
    __shared__ float2 space[32];
    const E *x = logits + (u64)blockIdx.x * columns;
    const u32 step = blockDim.x * 8;
    Softmax s;
    for (u32 c = threadIdx.x * 8; c < classes; c += step) {
        float v[8];
        load8<false>(x, c, classes, v);
        s.join(v, present(c, classes));
    }
    s.join_block(space);
    const float inverse = 1.0f / s.sum, ln = logf(s.sum);
    for (u32 c = threadIdx.x; c < classes; c += blockDim.x) {
        const float d = widen(x[c]) - s.largest;
        out[(u64)blockIdx.x * classes + c] = log ? d - ln : exp2_fast(d * LOG2_E) * inverse;
    }
}

// The largest of a warp's numbers, the first of several, with its place; known to all lanes.
template <class T> __device__ __forceinline__ void join_best(T &best, u32 &place) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        const T other = __shfl_xor_sync(ALL_LANES, best, offset);
        const u32 at = __shfl_xor_sync(ALL_LANES, place, offset);
        if (other > best || (other == best && at < place)) best = other, place = at;
    }
}

// Whether each row has its largest logit (the first of several) at the target, and how many do that have a weight above 0.
template <class E>
__device__ __forceinline__ void hits(const E *logits, u32 columns, u32 classes, const u32 *targets, const float *weights,
                                     u32 *hit, u32 *count) {
    __shared__ float values[32];
    __shared__ u32 places[32];
    const E *x = logits + (u64)blockIdx.x * columns;
    float best = -INFINITE, bad = 0.0f;
    u32 place = 0xffffffffu;
    const bool even = columns % 8 == 0 && (u64)logits % 16 == 0;
    for (u32 c = threadIdx.x * 8; c < classes; c += blockDim.x * 8) {
        float v[8];
        if (even) {
            load8<true>(x, c, columns, v);
        } else {
            load8<false>(x, c, columns, v);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (c + i >= classes) continue;
            bad = fmaf(v[i], 0.0f, bad);
            if (v[i] > best) best = v[i], place = c + i;
        }
    }
    // A NaN anywhere is a NaN everywhere.
    bad = warp_sum(bad);
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    join_best(best, place);
    if (lane == 0) values[warp] = best + bad, places[warp] = place;
    __syncthreads();
    if (warp != 0) return;
    best = lane < warps ? values[lane] : -INFINITE;
    place = lane < warps ? places[lane] : 0xffffffffu;
    bad = warp_sum(lane < warps ? (best == -INFINITE ? 0.0f : best * 0.0f) : 0.0f);
    join_best(best, place);
    if (lane == 0) {
        const bool is_hit = bad == 0.0f && place == targets[blockIdx.x] && place < classes;
        if (hit) hit[blockIdx.x] = is_hit;
        // Whole numbers come out the same in any order.
        if (count && is_hit && (!weights || weights[blockIdx.x] > 0.0f)) atomicAdd(count, 1u);
    }
}

// Of each row: ln Σ eˣ, not finite where a number is not, and the first of the largest numbers with its place. One pass: a thread's sum is
// relative to its own largest so far.
template <class E>
__device__ __forceinline__ void likeliest(const E *logits, u32 columns, u32 classes, float *log_sums, float *values, u32 *places) {
    __shared__ float bests[32], sums[32];
    __shared__ u32 ids[32];
    const E *x = logits + (u64)blockIdx.x * columns;
    float best = -INFINITE, sum = 0.0f, bad = 0.0f;
    u32 place = 0xffffffffu;
    const bool even = columns % 8 == 0 && (u64)logits % 16 == 0;
    for (u32 c = threadIdx.x * 8; c < classes; c += blockDim.x * 8) {
        float v[8];
        if (even) {
            load8<true>(x, c, columns, v);
        } else {
            load8<false>(x, c, columns, v);
        }
        const float before = best;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if (c + i >= classes) v[i] = -INFINITE;
            else bad = fmaf(v[i], 0.0f, bad);
            if (v[i] > best) best = v[i], place = c + i;
        }
        if (best == -INFINITE) continue;
        sum *= __expf(before - best);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += __expf(v[i] - best);
    }
    // The rows' largest, then all sums relative to it, in a fixed order.
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const float own = best;
    join_best(best, place);
    best = __shfl_sync(ALL_LANES, best, 0);
    sum = warp_sum((own == -INFINITE ? 0.0f : sum * __expf(own - best)) + bad);
    if (lane == 0) bests[warp] = best, ids[warp] = place, sums[warp] = sum;
    __syncthreads();
    if (warp != 0) return;
    best = lane < warps ? bests[lane] : -INFINITE;
    place = lane < warps ? ids[lane] : 0xffffffffu;
    const float warps_best = best;
    join_best(best, place);
    best = __shfl_sync(ALL_LANES, best, 0);
    // A warp without numbers has nothing but, perhaps, what is bad.
    const float part = lane < warps ? sums[lane] : 0.0f;
    sum = warp_sum(warps_best == -INFINITE ? part : part * __expf(warps_best - best));
    if (lane == 0) {
        log_sums[blockIdx.x] = best + __logf(sum);
        values[blockIdx.x] = best;
        places[blockIdx.x] = place;
    }
}

#if defined(UNITS)

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    cross_entropy(STORE *logits, u32 columns, u32 classes, const u32 *targets, const float *weights, float smoothing,
                  const float *scale_address, float scale, u32 want_gradient, float *losses, u32 *fault) {
    cross_entropy<STORE, UNITS, BLOCK_THREADS>(logits, columns, classes, targets, weights, smoothing, scalar(scale_address, scale),
                                               want_gradient, losses, fault);
}

#elif defined(EVEN)

extern "C" __global__ void __launch_bounds__(1024)
    cross_entropy(STORE *logits, u32 columns, u32 classes, const u32 *targets, const float *weights, float smoothing,
                  const float *scale_address, float scale, u32 want_gradient, float *losses, u32 *fault) {
    cross_entropy_any<STORE, EVEN>(logits, columns, classes, targets, weights, smoothing, scalar(scale_address, scale),
                                   want_gradient, losses, fault);
}

#else

// Elements that one block of the small losses takes.
#define BLOCK_ELEMENTS 4096

// Runs f(x, target, loss) for each element, adds the losses of a block, and writes what f gives in the place of x; both times
// the element's weight, if there are weights.
template <class E, class F>
__device__ __forceinline__ void elements(E *x, const float *targets, const float *weights, u64 n, u32 want_gradient,
                                         double *partial, F f) {
    __shared__ double space[32];
    const u64 start = (u64)blockIdx.x * BLOCK_ELEMENTS, end = min(n, start + BLOCK_ELEMENTS);
    double loss = 0.0;
    for (u64 i = start + threadIdx.x; i < end; i += blockDim.x) {
        const float weight = weights ? weights[i] : 1.0f;
        double own = 0.0;
        const float gradient = f(widen(x[i]), targets[i], own);
        loss += (double)weight * own;
        if (want_gradient) x[i] = narrow<E>(weight * gradient);
    }
    loss = block_sum(loss, space);
    if (threadIdx.x == 0) partial[blockIdx.x] = loss;
}

// As `Sampler` in cpu/sample.rs.
struct Sampler {
    u64 seed;
    const u32 *step_address;
    u32 step, site;
    float temperature;
    u32 unused;
};

// Draws the class with the largest logit/temperature + Gumbel noise, the first of several, for a row. Noise is at most
// (leading zeros + 1)·ln 2 of the bits' distance to the largest number, so few classes can still be the best of their thread and need
// their two logarithms. The class that `never` names for the row, where given, is not drawn.
template <class E>
__device__ __forceinline__ void sample(const E *logits, u32 columns, u32 classes, const RowId *ids, const u32 *rows, u32 tokens,
                                       const u32 *never, Sampler sampler, u32 *out, u32 *fault) {
    __shared__ double values[32];
    __shared__ u32 places[32];
    const E *x = logits + (u64)blockIdx.x * columns;
    const u32 row = rows[blockIdx.x];
    if (row == 0xffffffffu || row >= tokens) {
        // A row that stands nowhere draws nothing.
        if (threadIdx.x == 0) out[blockIdx.x] = 0;
        if (threadIdx.x == 0 && row != 0xffffffffu) report(fault, FAULT_SAMPLE);
        return;
    }
    if (sampler.step_address) sampler.step = *sampler.step_address;
    const u32 not_this = never ? never[blockIdx.x] : 0xffffffffu;
    const RowId id = ids[row];
    const u32 groups = (classes + 3) / 4, first = id.position * groups;
    const float inverse = 1.0f / sampler.temperature;
    double best = -INFINITE;
    float least = -INFINITE;
    u32 place = 0xffffffffu;
    for (u32 group = threadIdx.x; group < groups; group += blockDim.x) {
        const uint4 bits = philox<10>(sampler.seed, make_uint4(first + group, id.sequence, sampler.step, sampler.site));
        const u32 w[4] = {bits.x, bits.y, bits.z, bits.w};
        for (int i = 0; i < 4; i++) {
            const u32 c = 4 * group + i;
            if (c >= classes) break;
            if (c == not_this) continue;
            const float logit = widen(x[c]);
            const float bound = logit * inverse + (float)(__clz(~w[i]) + 1) * 0.69314718f;
            if (!(bound > least)) continue;
            const double uniform = ((double)w[i] + 0.5) / 4294967296.0;
            const double score = (double)logit / (double)sampler.temperature - log(-log(uniform));
            if (score > best) {
                best = score, place = c;
                least = (float)(best - 1e-4 - 1e-5 * fabs(best));
            }
        }
    }
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    join_best(best, place);
    if (lane == 0) values[warp] = best, places[warp] = place;
    __syncthreads();
    if (warp != 0) return;
    best = lane < warps ? values[lane] : -INFINITE;
    place = lane < warps ? places[lane] : 0xffffffffu;
    join_best(best, place);
    if (lane == 0) out[blockIdx.x] = place < classes ? place : 0;
}

// A block for the starts (blockIdx.y = 0) or ends of a sequence. Targets count from the sequence's first token.
template <class E>
__device__ __forceinline__ void span(E *logits, const u32 *offsets, const u32 *targets, const float *weights, float scale,
                                     u32 want_gradient, double *losses, u32 *fault) {
    __shared__ float2 space[32];
    const u32 b = blockIdx.x, which = blockIdx.y, start = offsets[b], tokens = offsets[b + 1] - start;
    const u32 target = targets[2 * b + which];
    const float weight = weights[2 * b + which] * scale;
    E *x = logits + 2 * (u64)start + which;
    if (target >= tokens && threadIdx.x == 0) report(fault, FAULT_SPAN);
    const float logit = threadIdx.x == 0 && target < tokens ? widen(x[2 * (u64)target]) : NOT_A_NUMBER;
    Softmax s;
    for (u32 t = threadIdx.x; t < tokens; t += blockDim.x) {
        const float v[8] = {widen(x[2 * (u64)t])};
        s.join(v, 1);
    }
    s.join_block(space);
    if (threadIdx.x == 0) {
        const double loss = (double)weight * (double)(s.largest + logf(s.sum) - logit);
        losses[2 * b + which] = weight == 0.0f ? 0.0 : loss;
    }
    if (!want_gradient) return;
    __syncthreads();
    const float inverse = 1.0f / s.sum;
    for (u32 t = threadIdx.x; t < tokens; t += blockDim.x) {
        const float p = exp2_fast((widen(x[2 * (u64)t]) - s.largest) * LOG2_E) * inverse;
        const float d = target < tokens ? weight * (p - (t == target ? 1.0f : 0.0f)) : NOT_A_NUMBER;
        x[2 * (u64)t] = narrow<E>(weight == 0.0f ? 0.0f : d);
    }
}

extern "C" __global__ void __launch_bounds__(1024) softmax(const STORE *logits, u32 columns, u32 classes, float *out, u32 log) {
    softmax<STORE>(logits, columns, classes, out, log);
}
extern "C" __global__ void __launch_bounds__(1024)
    hits(const STORE *logits, u32 columns, u32 classes, const u32 *targets, const float *weights, u32 *hit, u32 *count) {
    hits<STORE>(logits, columns, classes, targets, weights, hit, count);
}
extern "C" __global__ void __launch_bounds__(1024)
    likeliest(const STORE *logits, u32 columns, u32 classes, float *log_sums, float *values, u32 *places) {
    likeliest<STORE>(logits, columns, classes, log_sums, values, places);
}
extern "C" __global__ void __launch_bounds__(256)
    sample(const STORE *logits, u32 columns, u32 classes, const RowId *ids, const u32 *rows, u32 tokens, const u32 *never,
           Sampler sampler, u32 *out, u32 *fault) {
    sample<STORE>(logits, columns, classes, ids, rows, tokens, never, sampler, out, fault);
}
extern "C" __global__ void __launch_bounds__(256)
    mean_squared_error(STORE *x, const float *targets, const float *weights, u64 n, const float *scale_address, float scale,
                       u32 want_gradient, double *partial) {
    elements(x, targets, weights, n, want_gradient, partial, [&](float x, float t, double &loss) {
        const float d = x - t;
        loss += (double)d * d;
        return 2.0f * scalar(scale_address, scale) * d;
    });
}
extern "C" __global__ void __launch_bounds__(256)
    binary_cross_entropy(STORE *x, const float *targets, const float *weights, u64 n, const float *scale_address, float scale,
                         u32 want_gradient, double *partial) {
    elements(x, targets, weights, n, want_gradient, partial, [&](float logit, float target, double &loss) {
        const double x = logit, t = target, e = exp(-fabs(x)), bad = x * 0.0;
        loss += fmax(x, 0.0) - t * x + log1p(e) + bad;
        const double sigmoid = x > 0.0 ? 1.0 / (1.0 + e) : e / (1.0 + e);
        return (float)((double)scalar(scale_address, scale) * (sigmoid - t + bad));
    });
}
extern "C" __global__ void __launch_bounds__(256)
    span(STORE *logits, const u32 *offsets, const u32 *targets, const float *weights, const float *scale_address, float scale,
         u32 want_gradient, double *losses, u32 *fault) {
    span<STORE>(logits, offsets, targets, weights, scalar(scale_address, scale), want_gradient, losses, fault);
}

// loss = scale·Σ weight·x in f64, in a fixed order; one block. With `add` to what is there.
template <class T>
__device__ __forceinline__ void total(const T *x, const float *weights, u32 n, float scale, float *loss, u32 add) {
    __shared__ double space[32];
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        // A row without weight has no loss, whatever stands there.
        const float weight = weights ? weights[i] : 1.0f;
        if (weight != 0.0f) sum += (double)weight * (double)x[i];
    }
    sum = block_sum(sum, space);
    if (threadIdx.x == 0) *loss = (float)((double)scale * sum) + (add ? *loss : 0.0f);
}
extern "C" __global__ void __launch_bounds__(1024)
    total_f32(const float *x, const float *weights, u32 n, const float *scale_address, float scale, float *loss, u32 add) {
    total(x, weights, n, scalar(scale_address, scale), loss, add);
}
extern "C" __global__ void __launch_bounds__(1024)
    total_f64(const double *x, const float *weights, u32 n, const float *scale_address, float scale, float *loss, u32 add) {
    total(x, weights, n, scalar(scale_address, scale), loss, add);
}

#endif
