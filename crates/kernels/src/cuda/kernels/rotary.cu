// Rotary positions in place: pairs of columns of a head are rotated by an angle that belongs to the token's position.
//
// Legend: T tokens, D = head size, R = 2·`half` rotated columns of a head, which come first.
//
// Compiled for a storage type STORE, a PAIRING (0: i and i + R/2, 1: neighbours) and EVEN heads or not: R/2 a multiple of eight, and
// everything at multiples of 16 bytes.
#include "common.cuh"

// A thread has eight pairs of a head of a token. `x` is the first token's first head; rows are `stride` apart.
extern "C" __global__ void __launch_bounds__(256)
    rotate(STORE *x, u64 stride, const float *table, const u32 *positions, u32 tokens, u32 heads, u32 d, u32 half, float sign,
           u32 known, u32 *fault) {
    const u32 units = (half + 7) / 8;
    const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    const u64 token = thread / (heads * units);
    if (token >= tokens) return;
    const u32 within = thread % (heads * units), head = within / units, i = within % units * 8;
    const u32 position = positions[token];
    if (position >= known) report(fault, FAULT_ROTARY);
    const float *row = table + (u64)min(position, known - 1) * 2 * half;
    float cosine[8], sine[8], a[8], b[8];
    load8<EVEN>(row, i, half, cosine);
    load8<EVEN>(row + half, i, half, sine);
    STORE *own = x + token * stride + (u64)head * d;
    if (PAIRING == 0) {
        load8<EVEN>(own, i, half, a);
        load8<EVEN>(own + half, i, half, b);
    } else {
        float low[8], high[8];
        load8<EVEN>(own, 2 * i, 2 * half, low);
        load8<EVEN>(own, 2 * i + 8, 2 * half, high);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            a[k] = low[2 * k], b[k] = low[2 * k + 1];
            a[4 + k] = high[2 * k], b[4 + k] = high[2 * k + 1];
        }
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float s = position < known ? sine[k] * sign : NOT_A_NUMBER, old = a[k];
        a[k] = old * cosine[k] - b[k] * s;
        b[k] = fmaf(old, s, b[k] * cosine[k]);
    }
    if (PAIRING == 0) {
        store8<EVEN>(own, i, half, a);
        store8<EVEN>(own + half, i, half, b);
    } else {
        float low[8], high[8];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            low[2 * k] = a[k], low[2 * k + 1] = b[k];
            high[2 * k] = a[4 + k], high[2 * k + 1] = b[4 + k];
        }
        store8<EVEN>(own, 2 * i, 2 * half, low);
        store8<EVEN>(own, 2 * i + 8, 2 * half, high);
    }
}
