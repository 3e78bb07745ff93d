// Passes over flat buffers of f32 in pieces, four numbers at a time: a warp then reads and writes whole lines. Stands before
// optimizer.cu and adafactor.cu.
#include "common.cuh"

#define UNIT 4

// Runs `body(i, count)` for units of four elements, or single ones where the piece does not begin at a multiple of four.
template <class F> __device__ __forceinline__ void for_piece(u64 start, u32 length, F body) {
    const u64 end = start + length;
    const u64 whole = start % UNIT == 0 ? start + length / UNIT * UNIT : start;
#pragma unroll 2
    for (u64 i = start + threadIdx.x * UNIT; i < whole; i += blockDim.x * UNIT) body(i, UNIT);
    for (u64 i = whole + threadIdx.x; i < end; i += blockDim.x) body(i, 1);
}

__device__ __forceinline__ void load(const float *p, u64 i, int count, float (&x)[UNIT]) {
    if (count == UNIT) {
        const float4 v = *(const float4 *)(p + i);
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
        x[0] = p[i];
    }
}
__device__ __forceinline__ void store(float *p, u64 i, int count, const float (&x)[UNIT]) {
    if (count == UNIT) {
        *(float4 *)(p + i) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
        p[i] = x[0];
    }
}
__device__ __forceinline__ void store(bf16 *p, u64 i, int count, const float (&x)[UNIT]) {
    if (count == UNIT) {
        *(uint2 *)(p + i) = make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
    } else {
        p[i] = narrow<bf16>(x[0]);
    }
}
