// Passes over any number of elements: add, multiply, cast, activations. 16 elements a thread, the rest one by one.
//
// Compiled for a storage type STORE, and for an ACTIVATION or without.
#include "common.cuh"
#include "activation.cuh"

// A unit is 16 bytes of the larger type: a warp then reads and writes whole lines. A thread has 16 elements, whose loads are
// under way together.
template <class E, class O> struct Units {
    static const int SIZE = sizeof(E) == 4 || sizeof(O) == 4 ? 4 : 8;
    static const int COUNT = 16 / SIZE;
};

__device__ __forceinline__ void load_unit(const float *p, float (&x)[4]) {
    const float4 v = *(const float4 *)p;
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}
__device__ __forceinline__ void load_unit(const bf16 *p, float (&x)[4]) {
    const uint2 v = *(const uint2 *)p;
    x[0] = __uint_as_float(v.x << 16), x[1] = __uint_as_float(v.x & 0xffff0000u);
    x[2] = __uint_as_float(v.y << 16), x[3] = __uint_as_float(v.y & 0xffff0000u);
}
__device__ __forceinline__ void load_unit(const bf16 *p, float (&x)[8]) { unpack(load_raw(p), x); }
__device__ __forceinline__ void store_unit(float *p, const float (&x)[4]) { *(float4 *)p = make_float4(x[0], x[1], x[2], x[3]); }
__device__ __forceinline__ void store_unit(bf16 *p, const float (&x)[4]) {
    *(uint2 *)p = make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
}
__device__ __forceinline__ void store_unit(bf16 *p, const float (&x)[8]) {
    Raw<bf16> r;
    repack(x, r);
    store_raw(p, r);
}

// out = f(x, y) for every element; without y it is f(x, 0). `out` may be x or y. Where `aligned` is false, one by one.
template <class E, class O, class F>
__device__ __forceinline__ void map(const E *x, const E *y, O *out, u64 n, u32 aligned, F f) {
    constexpr int SIZE = Units<E, O>::SIZE, COUNT = Units<E, O>::COUNT;
    const u64 units = aligned ? n / SIZE : 0, first = (u64)blockIdx.x * blockDim.x * COUNT + threadIdx.x;
    float u[COUNT][SIZE], v[COUNT][SIZE] = {};
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        const u64 unit = first + (u64)t * blockDim.x;
        if (unit < units) {
            load_unit(x + unit * SIZE, u[t]);
            if (y) load_unit(y + unit * SIZE, v[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        const u64 unit = first + (u64)t * blockDim.x;
        if (unit >= units) continue;
#pragma unroll
        for (int i = 0; i < SIZE; i++) u[t][i] = f(u[t][i], v[t][i]);
        store_unit(out + unit * SIZE, u[t]);
    }
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x, threads = (u64)gridDim.x * blockDim.x;
    for (u64 i = units * SIZE + thread; i < n; i += threads) out[i] = narrow<O>(f(widen(x[i]), y ? widen(y[i]) : 0.0f));
}

#ifdef ACTIVATION

extern "C" __global__ void forward(const STORE *x, STORE *y, u64 n, u32 aligned) {
    map(x, (const STORE *)nullptr, y, n, aligned, [](float x, float) { return ACTIVATION::value(x); });
}
extern "C" __global__ void backward(const STORE *x, const STORE *dy, STORE *dx, u64 n, u32 aligned) {
    map(x, dy, dx, n, aligned, [](float x, float dy) { return dy * ACTIVATION::slope(x); });
}

#else

extern "C" __global__ void add(const STORE *x, STORE *y, u64 n, u32 aligned) {
    map(x, (const STORE *)y, y, n, aligned, [](float x, float y) { return x + y; });
}
extern "C" __global__ void multiply(const STORE *x, STORE *y, u64 n, u32 aligned) {
    map(x, (const STORE *)y, y, n, aligned, [](float x, float y) { return x * y; });
}
extern "C" __global__ void scale(const STORE *x, STORE *y, u64 n, u32 aligned, float factor) {
    map(x, (const STORE *)nullptr, y, n, aligned, [factor](float x, float) { return factor * x; });
}
extern "C" __global__ void to_bf16(const STORE *x, bf16 *out, u64 n, u32 aligned) {
    map(x, (const STORE *)nullptr, out, n, aligned, [](float x, float) { return x; });
}
extern "C" __global__ void to_f32(const STORE *x, float *out, u64 n, u32 aligned) {
    map(x, (const STORE *)nullptr, out, n, aligned, [](float x, float) { return x; });
}
// A few words that come with the launch itself.
struct FewWords {
    u32 word[16];
};
extern "C" __global__ void set(u32 *to, FewWords words, u32 count) {
    if (threadIdx.x < count) to[threadIdx.x] = words.word[threadIdx.x];
}
extern "C" __global__ void fill(STORE *x, u64 n, float value) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) x[i] = narrow<STORE>(value);
}

#endif
