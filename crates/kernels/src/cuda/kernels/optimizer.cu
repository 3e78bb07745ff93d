// AdamW, StableAdamW, LAMB, Adagrad and plain gradient descent over flat buffers, in pieces of one tensor each. What changes from step to
// step is read from device memory, so that a recorded graph can be played again. Stands behind flat.cuh.

// A piece of one segment.
struct Chunk {
    u64 start;
    u32 length, segment;
};

// Of a segment: its weight decay and its factor on the learning rate, the first of its chunks and the end of them,
// whether LAMB trusts it, and its elements.
struct Segment {
    float decay, rate;
    u32 first, end;
    u32 trusted, length;
};

// What `prepare` computes for a step; as in optimizer.rs.
struct Factors {
    float learning_rate, correct_m, correct_root, gradient_scale;
    float norm;
    u32 skip;
};

// What stays over a run.
struct Rule {
    float beta1, beta2, rest1, rest2, epsilon;
};

// control: (learning rate, step's number or 0 without correction, bound on the gradients' norm or 0 for none, factor on the
// gradients). squares: Σ g², or null where nobody asks. Gradients that are not finite change nothing: `skip`.
extern "C" __global__ void prepare(const double *control, const double *squares, double beta1, double beta2, Factors *factors) {
    const double step = control[1], bound = control[2];
    const double norm = squares ? sqrt(*squares) * control[3] : 0.0;
    const double clip = bound > 0.0 ? fmin(bound / (norm + 1e-6), 1.0) : 1.0;
    factors->learning_rate = (float)control[0];
    factors->correct_m = step > 0.0 ? (float)(1.0 / (1.0 - pow(beta1, step))) : 1.0f;
    factors->correct_root = step > 0.0 ? (float)sqrt(1.0 / (1.0 - pow(beta2, step))) : 1.0f;
    factors->gradient_scale = (float)(control[3] * clip);
    factors->norm = (float)norm;
    factors->skip = isfinite(norm) ? 0 : 1;
}

// m = β₁m + (1 − β₁)g and v = β₂v + (1 − β₂)g².
__device__ __forceinline__ void moments(const Rule &rule, float scale, float g, float &m, float &v) {
    g *= scale;
    m = fmaf(g, rule.rest1, m * rule.beta1);
    v = fmaf(g * g, rule.rest2, v * rule.beta2);
}

// m̂/(√v̂ + ε) + decay·p.
__device__ __forceinline__ float direction(const Rule &rule, const Factors &f, float decay, float p, float m, float v) {
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(v));
    return fmaf(p, decay, __fdividef(m * f.correct_m, fmaf(root, f.correct_root, rule.epsilon)));
}

extern "C" __global__ void __launch_bounds__(256)
    adamw(const Chunk *chunks, const Segment *segments, const Factors *factors, Rule rule, float *p, const float *g, float *m,
          float *v, bf16 *copy) {
    const Factors f = *factors;
    if (f.skip) return;
    const Chunk chunk = chunks[blockIdx.x];
    const Segment segment = segments[chunk.segment];
    const float rate = f.learning_rate * segment.rate;
    for_piece(chunk.start, chunk.length, [&](u64 i, int count) {
        float pp[UNIT], gg[UNIT], mm[UNIT], vv[UNIT];
        load(p, i, count, pp);
        load(g, i, count, gg);
        load(m, i, count, mm);
        load(v, i, count, vv);
#pragma unroll
        for (int k = 0; k < UNIT; k++) {
            if (k >= count) break;
            moments(rule, f.gradient_scale, gg[k], mm[k], vv[k]);
            pp[k] = fmaf(direction(rule, f, segment.decay, pp[k], mm[k], vv[k]), -rate, pp[k]);
        }
        store(p, i, count, pp);
        store(m, i, count, mm);
        store(v, i, count, vv);
        if (copy) store(copy, i, count, pp);
    });
}

// p −= rate·(g + decay·p), or, with `sums`, Adagrad: a += g², then p −= rate·(g/(√a + ε) + decay·p).
__device__ __forceinline__ void descend(const Chunk *chunks, const Segment *segments, const Factors *factors, const Rule &rule,
                                        float *p, const float *g, float *sums, bf16 *copy) {
    const Factors f = *factors;
    if (f.skip) return;
    const Chunk chunk = chunks[blockIdx.x];
    const Segment segment = segments[chunk.segment];
    const float rate = f.learning_rate * segment.rate;
    for_piece(chunk.start, chunk.length, [&](u64 i, int count) {
        float pp[UNIT], gg[UNIT], aa[UNIT];
        load(p, i, count, pp);
        load(g, i, count, gg);
        if (sums) load(sums, i, count, aa);
#pragma unroll
        for (int k = 0; k < UNIT; k++) {
            if (k >= count) break;
            float step = gg[k] * f.gradient_scale;
            if (sums) {
                aa[k] = fmaf(step, step, aa[k]);
                step /= sqrtf(aa[k]) + rule.epsilon;
            }
            pp[k] = fmaf(fmaf(pp[k], segment.decay, step), -rate, pp[k]);
        }
        store(p, i, count, pp);
        if (sums) store(sums, i, count, aa);
        if (copy) store(copy, i, count, pp);
    });
}
extern "C" __global__ void __launch_bounds__(256)
    sgd(const Chunk *chunks, const Segment *segments, const Factors *factors, Rule rule, float *p, const float *g, bf16 *copy) {
    descend(chunks, segments, factors, rule, p, g, (float *)nullptr, copy);
}
extern "C" __global__ void __launch_bounds__(256)
    adagrad(const Chunk *chunks, const Segment *segments, const Factors *factors, Rule rule, float *p, const float *g,
            float *sums, bf16 *copy) {
    descend(chunks, segments, factors, rule, p, g, sums, copy);
}

// Updates the moments and writes Σp² and Σdirection² of the chunk.
extern "C" __global__ void __launch_bounds__(256)
    lamb_moments(const Chunk *chunks, const Segment *segments, const Factors *factors, Rule rule, const float *p,
                 const float *g, float *m, float *v, double2 *squares) {
    __shared__ double space[32];
    const Factors f = *factors;
    if (f.skip) return;
    const Chunk chunk = chunks[blockIdx.x];
    const Segment segment = segments[chunk.segment];
    double lengths = 0.0, steps = 0.0;
    for_piece(chunk.start, chunk.length, [&](u64 i, int count) {
        float pp[UNIT], gg[UNIT], mm[UNIT], vv[UNIT];
        load(p, i, count, pp);
        load(g, i, count, gg);
        load(m, i, count, mm);
        load(v, i, count, vv);
        float length = 0.0f, step = 0.0f;
#pragma unroll
        for (int k = 0; k < UNIT; k++) {
            if (k >= count) break;
            moments(rule, f.gradient_scale, gg[k], mm[k], vv[k]);
            const float d = direction(rule, f, segment.decay, pp[k], mm[k], vv[k]);
            length = fmaf(pp[k], pp[k], length);
            step = fmaf(d, d, step);
        }
        store(m, i, count, mm);
        store(v, i, count, vv);
        lengths += (double)length;
        steps += (double)step;
    });
    lengths = block_sum(lengths, space);
    steps = block_sum(steps, space);
    if (threadIdx.x == 0) squares[blockIdx.x] = make_double2(lengths, steps);
}

// Each segment's rate: learning rate times ‖p‖/‖direction‖, where it is decayed and both are above 0. A block a segment.
extern "C" __global__ void __launch_bounds__(256)
    lamb_rates(const Segment *segments, const Factors *factors, const double2 *squares, float *rates) {
    __shared__ double space[32];
    const Factors f = *factors;
    if (f.skip) return;
    const Segment segment = segments[blockIdx.x];
    double lengths = 0.0, steps = 0.0;
    for (u32 i = segment.first + threadIdx.x; i < segment.end; i += blockDim.x) {
        lengths += squares[i].x;
        steps += squares[i].y;
    }
    const double length = sqrt(block_sum(lengths, space)), step = sqrt(block_sum(steps, space));
    if (threadIdx.x == 0) {
        const double trust = segment.trusted && length > 0.0 && step > 0.0 ? length / step : 1.0;
        rates[blockIdx.x] = (float)((double)(f.learning_rate * segment.rate) * trust);
    }
}

// Updates the moments and writes Σg²/max(v̂, ε²) of the chunk.
extern "C" __global__ void __launch_bounds__(256)
    stable_moments(const Chunk *chunks, const Segment *, const Factors *factors, Rule rule, const float *, const float *g,
                   float *m, float *v, double2 *sums) {
    __shared__ double space[32];
    const Factors f = *factors;
    if (f.skip) return;
    const Chunk chunk = chunks[blockIdx.x];
    const float least = fmaxf(rule.epsilon * rule.epsilon, 1.1754944e-38f), correct = f.correct_root * f.correct_root;
    double ratios = 0.0;
    for_piece(chunk.start, chunk.length, [&](u64 i, int count) {
        float gg[UNIT], mm[UNIT], vv[UNIT];
        load(g, i, count, gg);
        load(m, i, count, mm);
        load(v, i, count, vv);
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < UNIT; k++) {
            if (k >= count) break;
            moments(rule, f.gradient_scale, gg[k], mm[k], vv[k]);
            const float scaled = gg[k] * f.gradient_scale;
            sum += __fdividef(scaled * scaled, fmaxf(vv[k] * correct, least));
        }
        store(m, i, count, mm);
        store(v, i, count, vv);
        ratios += (double)sum;
    });
    ratios = block_sum(ratios, space);
    if (threadIdx.x == 0) sums[blockIdx.x] = make_double2(ratios, 0.0);
}

// Each segment's rate: learning rate over the root of the mean of those sums, where that is above 1. A block a segment.
extern "C" __global__ void __launch_bounds__(256)
    stable_rates(const Segment *segments, const Factors *factors, const double2 *sums, float *rates) {
    __shared__ double space[32];
    const Factors f = *factors;
    if (f.skip) return;
    const Segment segment = segments[blockIdx.x];
    double ratios = 0.0;
    for (u32 i = segment.first + threadIdx.x; i < segment.end; i += blockDim.x) ratios += sums[i].x;
    ratios = block_sum(ratios, space);
    if (threadIdx.x == 0) {
        const double rms = sqrt(ratios / (double)segment.length);
        rates[blockIdx.x] = (float)((double)(f.learning_rate * segment.rate) / fmax(rms, 1.0));
    }
}

// Takes the step along the direction that the moments give.
extern "C" __global__ void __launch_bounds__(256)
    apply(const Chunk *chunks, const Segment *segments, const Factors *factors, Rule rule, float *p, const float *m,
          const float *v, const float *rates, bf16 *copy) {
    const Factors f = *factors;
    if (f.skip) return;
    const Chunk chunk = chunks[blockIdx.x];
    const float decay = segments[chunk.segment].decay, rate = rates[chunk.segment];
    for_piece(chunk.start, chunk.length, [&](u64 i, int count) {
        float pp[UNIT], mm[UNIT], vv[UNIT];
        load(p, i, count, pp);
        load(m, i, count, mm);
        load(v, i, count, vv);
#pragma unroll
        for (int k = 0; k < UNIT; k++) {
            if (k >= count) break;
            pp[k] = fmaf(direction(rule, f, decay, pp[k], mm[k], vv[k]), -rate, pp[k]);
        }
        store(p, i, count, pp);
        if (copy) store(copy, i, count, pp);
    });
}
