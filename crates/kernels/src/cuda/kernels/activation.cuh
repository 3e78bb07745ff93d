// Activation functions and their derivatives. Over [-8, 8] each is within 1e-6 of the exact one; a NaN stays one. `both` gives the two at
// once for results in bf16: what they share is computed once, and no division is exact.

struct identity {
    static __device__ __forceinline__ float value(float x) { return x; }
    static __device__ __forceinline__ float slope(float x) { return 1.0f; }
    static __device__ __forceinline__ float2 both(float x) { return make_float2(x, 1.0f); }
};

// x·Φ(x). Abramowitz and Stegun 7.1.26 for the tail q = 1 − Φ(|x|), whose exponential is also what the derivative needs.
struct gelu {
    // (Φ(x), e^(−x²/2)).
    static __device__ __forceinline__ float2 parts(float x) {
        // −x²/2 in powers of two.
        const float e = exp2_fast(x * x * -0.72134752044448170f);
        const float t = reciprocal(fmaf(fabsf(x), 0.3275911f * 0.70710678118654752f, 1.0f));
        float y = 0.5f * 1.061405429f;
        y = fmaf(y, t, 0.5f * -1.453152027f);
        y = fmaf(y, t, 0.5f * 1.421413741f);
        y = fmaf(y, t, 0.5f * -0.284496736f);
        y = fmaf(y, t, 0.5f * 0.254829592f);
        const float tail = y * t * e;
        return make_float2(x < 0.0f ? tail : 1.0f - tail, e);
    }
    static __device__ __forceinline__ float value(float x) { return x * parts(x).x; }
    static __device__ __forceinline__ float slope(float x) {
        const float2 p = parts(x);
        return fmaf(x * p.y, 0.39894228040143268f, p.x);
    }
    static __device__ __forceinline__ float2 both(float x) {
        const float2 p = parts(x);
        return make_float2(x * p.x, fmaf(x * p.y, 0.39894228040143268f, p.x));
    }
};

// ½x(1 + tanh u) = x / (1 + e^(−2u)), u = √(2/π)·(x + 0.044715·x³); x² counts as 100 at most, where tanh is ±1 already.
struct gelu_tanh {
    static __device__ __forceinline__ float value(float x) {
        const float square = fminf(x * x, 100.0f);
        const float u = x * fmaf(square, 0.79788456080286536f * 0.044715f, 0.79788456080286536f);
        return x / (1.0f + exp_fast(-2.0f * u));
    }
    static __device__ __forceinline__ float slope(float x) {
        const float square = fminf(x * x, 100.0f);
        const float u = x * fmaf(square, 0.79788456080286536f * 0.044715f, 0.79788456080286536f);
        // With e = e^(−2|u|): |tanh u| = (1 − e)/(1 + e), and 1 − tanh² u = 4e/(1 + e)² without cancellation.
        const float e = exp_fast(-2.0f * fabsf(u)), r = 1.0f / (1.0f + e);
        const float t = copysignf((1.0f - e) * r, u);
        const float inner = fmaf(square, 6.0f * 0.79788456080286536f * 0.044715f, 2.0f * 0.79788456080286536f);
        return fmaf(fminf(fmaxf(x, -20.0f), 20.0f) * inner, e * r * r, fmaf(t, 0.5f, 0.5f)) + x * 0.0f;
    }
    static __device__ __forceinline__ float2 both(float x) {
        const float square = fminf(x * x, 100.0f);
        const float u = x * fmaf(square, 0.79788456080286536f * 0.044715f, 0.79788456080286536f);
        // ½(1 + tanh u) is 1/(1 + e) or e/(1 + e).
        const float e = exp_fast(-2.0f * fabsf(u)), r = reciprocal(1.0f + e), share = x < 0.0f ? e * r : r;
        const float inner = fmaf(square, 6.0f * 0.79788456080286536f * 0.044715f, 2.0f * 0.79788456080286536f);
        const float slope = fmaf(fminf(fmaxf(x, -20.0f), 20.0f) * inner, e * r * r, share) + x * 0.0f;
        return make_float2(x * share, slope);
    }
};

struct relu {
    static __device__ __forceinline__ float value(float x) { return x < 0.0f ? 0.0f : x; }
    static __device__ __forceinline__ float slope(float x) { return x > 0.0f ? 1.0f : 0.0f; }
    static __device__ __forceinline__ float2 both(float x) { return make_float2(value(x), slope(x)); }
};

// x·σ(x).
struct silu {
    static __device__ __forceinline__ float value(float x) { return x / (1.0f + exp_fast(-x)); }
    static __device__ __forceinline__ float slope(float x) {
        // With e = e^(−|x|), which cannot overflow: σ(|x|) = 1/(1 + e), and σ(−|x|) = e/(1 + e).
        const float e = exp_fast(-fabsf(x)), r = 1.0f / (1.0f + e);
        const float share = x < 0.0f ? e * r : r, rest = x < 0.0f ? r : e * r;
        // Far out x·σ(x)·σ(−x) is 0, which ∞·0 is not.
        return fmaf(fminf(fmaxf(x, -100.0f), 100.0f) * share, rest, share) + x * 0.0f;
    }
    static __device__ __forceinline__ float2 both(float x) {
        const float e = exp_fast(-fabsf(x)), r = reciprocal(1.0f + e), share = x < 0.0f ? e * r : r, y = x * share;
        return make_float2(y, fmaf(fminf(y, 100.0f), 1.0f - share, share) + x * 0.0f);
    }
};

struct hyperbolic {
    static __device__ __forceinline__ float value(float x) {
        const float e = exp_fast(-2.0f * fabsf(x));
        return copysignf((1.0f - e) / (1.0f + e), x);
    }
    static __device__ __forceinline__ float slope(float x) {
        const float t = value(x);
        return fmaf(-t, t, 1.0f);
    }
    static __device__ __forceinline__ float2 both(float x) {
        const float e = exp_fast(-2.0f * fabsf(x)), t = copysignf((1.0f - e) * reciprocal(1.0f + e), x);
        return make_float2(t, fmaf(-t, t, 1.0f));
    }
};
