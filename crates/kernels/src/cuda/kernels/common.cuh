// What all kernels share: storage types, vectors of eight, dropout, and sums over warps and blocks.
//
// Numbers are stored as f32 or bf16 and computed with in f32. A thread's unit is eight neighbouring columns: 16 bytes of
// bf16, and what one call of Philox decides about.
//
// Each source is compiled for what it is used with, which comes as definitions in capitals: STORE, the type that numbers are
// stored as; EVEN, whether rows begin at multiples of 16 bytes and have a multiple of eight columns; others as the source
// says.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INFINITE __int_as_float(0x7f800000)

struct bf16 {
    u16 bits;
};

// --- storage ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// Two numbers rounded to bf16, to nearest, ties to even; the first in the lower half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

template <class E> __device__ __forceinline__ E narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) { return bf16{(u16)pack(x, 0.0f)}; }

// x as it is after storing and loading.
template <class E> __device__ __forceinline__ float rounded(float x) { return widen(narrow<E>(x)); }

// Eight numbers as they are stored: what a thread keeps of a row without spending a register on each bf16.
template <class E> struct Raw;
template <> struct Raw<bf16> {
    uint4 v;
};
template <> struct Raw<float> {
    float4 a, b;
};

__device__ __forceinline__ Raw<bf16> load_raw(const bf16 *p) { return {*(const uint4 *)p}; }
__device__ __forceinline__ Raw<float> load_raw(const float *p) { return {*(const float4 *)p, *(const float4 *)(p + 4)}; }
__device__ __forceinline__ void store_raw(bf16 *p, const Raw<bf16> &r) { *(uint4 *)p = r.v; }
__device__ __forceinline__ void store_raw(float *p, const Raw<float> &r) {
    *(float4 *)p = r.a;
    *(float4 *)(p + 4) = r.b;
}

__device__ __forceinline__ void unpack(const Raw<bf16> &r, float (&x)[8]) {
    const u32 w[4] = {r.v.x, r.v.y, r.v.z, r.v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = __uint_as_float(w[i] << 16);
        x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
}
__device__ __forceinline__ void unpack(const Raw<float> &r, float (&x)[8]) {
    x[0] = r.a.x, x[1] = r.a.y, x[2] = r.a.z, x[3] = r.a.w;
    x[4] = r.b.x, x[5] = r.b.y, x[6] = r.b.z, x[7] = r.b.w;
}
__device__ __forceinline__ void repack(const float (&x)[8], Raw<bf16> &r) {
    r.v = make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}
__device__ __forceinline__ void repack(const float (&x)[8], Raw<float> &r) {
    r.a = make_float4(x[0], x[1], x[2], x[3]);
    r.b = make_float4(x[4], x[5], x[6], x[7]);
}

// Eight numbers of a row from column `c` on. ALIGNED: the row begins at a multiple of 16 bytes and `columns` is a multiple
// of eight; otherwise one by one, with zeros beyond the end.
template <bool ALIGNED, class E> __device__ __forceinline__ Raw<E> load8_raw(const E *row, u32 c, u32 columns) {
    if (ALIGNED) return load_raw(row + c);
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = c + i < columns ? widen(row[c + i]) : 0.0f;
    Raw<E> r;
    repack(x, r);
    return r;
}
template <bool ALIGNED, class E> __device__ __forceinline__ void load8(const E *row, u32 c, u32 columns, float (&x)[8]) {
    if (ALIGNED) {
        unpack(load_raw(row + c), x);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = c + i < columns ? widen(row[c + i]) : 0.0f;
    }
}
template <bool ALIGNED, class E> __device__ __forceinline__ void store8(E *row, u32 c, u32 columns, const float (&x)[8]) {
    if (ALIGNED) {
        Raw<E> r;
        repack(x, r);
        store_raw(row + c, r);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (c + i < columns) row[c + i] = narrow<E>(x[i]);
    }
}

// --- copies ahead -----------------------------------------------------------------------------------------------------

// Eight numbers in 16-byte words, `stride` words apart, as they travel through shared memory.
template <class E> struct Words {
    static const int COUNT = sizeof(E) / 2;
};
__device__ __forceinline__ Raw<bf16> from_words(const uint4 *at, u32 stride, bf16) { return {at[0]}; }
__device__ __forceinline__ Raw<float> from_words(const uint4 *at, u32 stride, float) {
    return {*(const float4 *)at, *(const float4 *)(at + stride)};
}
__device__ __forceinline__ void to_words(const Raw<bf16> &raw, uint4 *at, u32 stride) { at[0] = raw.v; }
__device__ __forceinline__ void to_words(const Raw<float> &raw, uint4 *at, u32 stride) {
    *(float4 *)at = raw.a;
    *(float4 *)(at + stride) = raw.b;
}

// Starts a copy of 16 bytes to shared memory.
__device__ __forceinline__ void copy_async(uint4 *to, const void *from) {
    const u32 address = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last N groups of this thread's copies are there.
template <int N> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Starts a copy of eight numbers of a row from column `c` on, or makes it at once where they are not aligned.
template <bool ALIGNED, class E>
__device__ __forceinline__ void copy8_async(uint4 *to, u32 stride, const E *row, u32 c, u32 columns) {
    if (ALIGNED) {
#pragma unroll
        for (int w = 0; w < Words<E>::COUNT; w++) copy_async(to + w * stride, row + c + w * (16 / sizeof(E)));
    } else {
        to_words(load8_raw<ALIGNED>(row, c, columns), to, stride);
    }
}

// --- dropout ---------------------------------------------------------------------------------------------------------

// As in gpu.rs. A threshold of 0 drops nothing.
struct Dropout {
    u64 seed;
    const u32 *step_address;
    u32 step, site, threshold;
    float scale;

    // The step's number, read once at the start of a kernel.
    __device__ __forceinline__ void begin() {
        if (threshold != 0 && step_address) step = *step_address;
    }
};

// Where a row belongs: the sequence's number in the global batch, and the place within it.
struct RowId {
    u32 sequence, position;
};

// Philox 4x32, with seven rounds for dropout and ten for all else, bit for bit as in philox.rs.
template <int ROUNDS = 7> __device__ __forceinline__ uint4 philox(u64 seed, uint4 c) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        const u64 a = (u64)0xD2511F53u * c.x, b = (u64)0xCD9E8D57u * c.z;
        c = make_uint4((u32)(b >> 32) ^ c.y ^ k0, (u32)b, (u32)(a >> 32) ^ c.w ^ k1, (u32)a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// Groups of eight columns in a row; a row never shares one with the next.
__device__ __forceinline__ u32 groups(u32 columns) { return (columns + 7) / 8; }

// The 128 bits that decide about eight columns, `group` counted within the row.
__device__ __forceinline__ uint4 draw(const Dropout &d, RowId row, u32 columns, u32 group) {
    return philox(d.seed, make_uint4(row.position * groups(columns) + group, row.sequence, d.step, d.site));
}

// Multiplies eight numbers by the scale, or by zero where they are dropped.
__device__ __forceinline__ void drop8(const Dropout &d, const uint4 &bits, float (&x)[8]) {
    const u32 w[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = (w[i] & 0xffffu) >= d.threshold ? x[2 * i] * d.scale : 0.0f;
        x[2 * i + 1] = w[i] >= d.threshold << 16 ? x[2 * i + 1] * d.scale : 0.0f;
    }
}

// --- sums ------------------------------------------------------------------------------------------------------------

#define ALL_LANES 0xffffffffu

template <class T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

// The sum over a block, known to all of its threads; `space` holds one number for each of up to 32 warps. Always the same
// order, so always the same bits.
template <class T> __device__ __forceinline__ T block_sum(T x, T *space) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) space[warp] = x;
    __syncthreads();
    x = lane < warps ? space[lane] : (T)0;
    return warp_sum(x);
}

// A factor by value, or from device memory where an address is given.
__device__ __forceinline__ float scalar(const float *address, float value) { return address ? *address : value; }

// eˣ by one instruction, relative error some 2⁻²²·(1 + |x|).
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * 1.4426950408889634f); }
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Marks that an operation met an index outside of its table; numbers as FAULTS in gpu.rs.
enum Fault {
    FAULT_EMBEDDING = 1,
    FAULT_GATHER,
    FAULT_SCATTER,
    FAULT_CROSS_ENTROPY,
    FAULT_SPAN,
    FAULT_SAMPLE,
    FAULT_ROTARY,
    FAULT_REPLACE,
    FAULT_CONVOLUTION,
    FAULT_CRF,
};
__device__ __forceinline__ void report(u32 *fault, Fault which) { atomicMax(fault, (u32)which); }
#define NOT_A_NUMBER __int_as_float(0x7fc00000)
