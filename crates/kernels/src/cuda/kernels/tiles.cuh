// What kernels on tensor cores share: tiles in shared memory, products of them, and dropout of their results. Stands before
// attention.cuh and attention_general.cu.
//
// A tile has rows of D = HEAD_SIZE numbers in bf16.

#include "common.cuh"

constexpr int D = HEAD_SIZE;
// 16-byte pieces of a row.
constexpr int PIECES = D / 8;
constexpr u32 ROW_BYTES = 2 * D;
constexpr float LOG2_E = 1.4426950408889634f;

// ---- Small things ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void *p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Bytes from device to shared memory; zeros where `valid` is not set.
__device__ __forceinline__ void copy_16(u32 to, const void *from, bool valid) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %2, 0;\ncp.async.cg.shared.global [%0], [%1], 16, p;\n}\n" ::"r"(to),
                 "l"(from), "r"((u32)valid));
}

__device__ __forceinline__ void copy_8(u32 to, const void *from, bool valid) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, %2, 0;\ncp.async.ca.shared.global [%0], [%1], 8, p;\n}\n" ::"r"(to),
                 "l"(from), "r"((u32)valid));
}

__device__ __forceinline__ void copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `N` groups of this thread's copies are under way.
template <int N> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ uint4 load_shared(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// Written out because the compiler makes four stores of it elsewhere.
__device__ __forceinline__ void store_global(void *to, const uint4 &v) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// Four 8×8 matrices of 16-bit numbers; lanes 8i to 8i + 7 name the rows of matrix i.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The reverse of `load_matrices` for a 16×16 part: matrices (upper, left), (lower, left), (upper, right), (lower,
// right).
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&r)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
#else
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 row = __shfl_sync(ALL_LANES, address, 8 * i + lane / 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + 4 * (lane % 4)), "r"(r[i]) : "memory");
    }
#endif
}

// c (16×8) += a (16×16) · b (16×8). Of c, a lane has rows g and g + 8 (g = lane / 4), columns 2·(lane % 4) and the
// next.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where a 16-byte piece of a tile's row lies. Pieces change places so that the same piece of eight neighbouring rows
// lies in eight different banks.
constexpr u32 MIXED = D % 64 == 0 ? 7 : 3;
__device__ __forceinline__ u32 phase(u32 row) { return D % 64 == 0 ? row & 7 : row >> 1 & 3; }
__device__ __forceinline__ u32 place(u32 row, u32 piece) { return row * ROW_BYTES + ((piece ^ phase(row)) << 4); }

// The address of an even piece of a row from that of the row's piece 0 or, counting from it, of piece 1.
__device__ __forceinline__ u32 piece_at(u32 address, int piece) {
    return (address ^ (piece & MIXED) << 4) + ((piece & ~MIXED) << 4);
}

// What a lane adds to a tile's address for `load_matrices` of 16 rows × 2 pieces: as a left factor or a stored part,
// and as a right factor whose rows are columns of the product.
__device__ __forceinline__ u32 lane_left() { return place(threadIdx.x % 16, threadIdx.x / 16 % 2); }
__device__ __forceinline__ u32 lane_right() {
    return place(threadIdx.x % 8 + (threadIdx.x & 16) / 2, threadIdx.x / 8 % 2);
}

// ---- Dropout --------------------------------------------------------------------------------------------------------

// Philox 4×32 with the seven rounds of dropout, for counters that differ in their first word only: what the first two rounds have in common is
// computed once for a head of a sequence.
struct Draws {
    u32 a, b, c, d;
    u32 groups;
    u32 threshold;
};

constexpr u32 PHILOX_0 = 0xD2511F53u, PHILOX_1 = 0xCD9E8D57u;

template <class A> __device__ __forceinline__ Draws draws_of(const A &a, u32 number, u32 head, u32 tokens) {
    const Dropout &drop = a.dropout;
    const u32 step = drop.step_address ? *drop.step_address : drop.step;
    const u32 n0 = __umulhi(PHILOX_1, step) ^ number ^ a.keys[0];
    return Draws{(drop.site | (head + 1) << 16) ^ a.keys[1],
                 (PHILOX_1 * step) ^ a.keys[2],
                 __umulhi(PHILOX_0, n0) ^ a.keys[3],
                 PHILOX_0 * n0,
                 groups(tokens),
                 drop.threshold << 16};
}

// The draws for eight keys of a query; `group` is the number of their group.
template <class A>
__device__ __forceinline__ void draw_keys(u32 (&words)[4], const Draws &common, const A &arguments, u32 query, u32 group) {
    u64 a = static_cast<u64>(PHILOX_0) * (query * common.groups + group);
    u32 c2 = static_cast<u32>(a >> 32) ^ common.a;
    u64 b = static_cast<u64>(PHILOX_1) * c2;
    u32 c0 = static_cast<u32>(b >> 32) ^ common.b;
    u32 c1 = static_cast<u32>(b);
    c2 = static_cast<u32>(a) ^ common.c;
    u32 c3 = common.d;
#pragma unroll
    for (int round = 2; round < 7; round++) {
        a = static_cast<u64>(PHILOX_0) * c0;
        b = static_cast<u64>(PHILOX_1) * c2;
        c0 = static_cast<u32>(b >> 32) ^ c1 ^ arguments.keys[2 * round];
        c1 = static_cast<u32>(b);
        c2 = static_cast<u32>(a >> 32) ^ c3 ^ arguments.keys[2 * round + 1];
        c3 = static_cast<u32>(a);
    }
    words[0] = c0;
    words[1] = c1;
    words[2] = c2;
    words[3] = c3;
}

// Whether the draw in the lower (0) or upper (1) half of a word keeps its element.
__device__ __forceinline__ bool keeps(u32 word, int half, u32 threshold) {
    return (half ? word : word << 16) >= threshold;
}

// ---- Rows of a tile -------------------------------------------------------------------------------------------------

// A warp's number, in a form that the compiler knows to be the same for all lanes.
__device__ __forceinline__ u32 warp_number() { return __shfl_sync(ALL_LANES, threadIdx.x / 32, 0); }

// How rows of keys and values are arranged in shared memory, so that the eight keys that one call of Philox decides
// about belong to as few lanes as possible. All within 32 rows.
enum Order {
    // As they are.
    PLAIN,
    // Keys are columns of the scores: a lane has columns 2q and 2q + 1 of four tiles of 8 (q = lane % 4); they shall be
    // the eight keys from 8q on.
    COLUMNS,
    // Keys are rows of the scores: a lane has rows g and g + 8 (g = lane / 4) of M tiles of 16; they shall be the 2M
    // keys from 2M·g on.
    ROWS_16,
    ROWS_32,
};

// The row of shared memory for the tile's row x.
template <Order O> __device__ __forceinline__ u32 arranged(u32 x) {
    if (O == COLUMNS) return (x & ~31u) | (x & 6) << 2 | (x >> 2 & 6) | (x & 1);
    if (O == ROWS_16) return (x & ~15u) | (x & 1) << 3 | (x >> 1 & 7);
    if (O == ROWS_32) return (x & ~31u) | (x & 2) << 3 | (x & 1) << 3 | (x >> 2 & 7);
    return x;
}

// And back.
template <Order O> __device__ __forceinline__ u32 arranged_back(u32 row) {
    if (O == ROWS_16) return (row & ~15u) | (row & 7) << 1 | (row >> 3 & 1);
    if (O == ROWS_32) return (row & ~31u) | (row & 7) << 2 | (row >> 3 & 2) | (row >> 3 & 1);
    return row;
}

// Fragments of M·16 rows as the left factor.
template <int M> __device__ __forceinline__ void load_left(u32 (&to)[M][D / 16][4], u32 tile_rows) {
    const u32 base = tile_rows + lane_left();
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int k = 0; k < D / 16; k++) load_matrices(to[m][k], piece_at(base, 2 * k) + 16 * m * ROW_BYTES);
    }
}

template <int M, int N> __device__ __forceinline__ void clear(float (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) sums[m][n][e] = 0.0f;
        }
    }
}

// scores (M·16 × N·8) = left · (N·8 rows of a tile)ᵀ. `right` is the address of the first row plus `lane_right`.
template <int M, int N>
__device__ __forceinline__ void multiply_transposed(float (&scores)[M][N][4], const u32 (&left)[M][D / 16][4],
                                                    u32 right) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) scores[m][n][e] = 0.0f;
        }
    }
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 part[4];
            load_matrices(part, piece_at(right, 2 * k) + 8 * n * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply(scores[m][n], left[m][k], part[0], part[1]);
                multiply(scores[m][n + 1], left[m][k], part[2], part[3]);
            }
        }
    }
}

template <int M> __device__ __forceinline__ void fill(float (&factors)[M][2], float value) {
#pragma unroll
    for (int m = 0; m < M; m++) factors[m][0] = factors[m][1] = value;
}

// Over the four lanes that share rows; each gets it.
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// scores (M·16 × N·8) = M·16 rows of a tile · (N·8 rows of a tile)ᵀ. `left` is the address of the first row plus
// `lane_left`, `right` of the other plus `lane_right`.
template <int M, int N>
__device__ __forceinline__ void multiply_rows(float (&scores)[M][N][4], u32 left, u32 right) {
    clear(scores);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        u32 own[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_matrices(own[m], piece_at(left, 2 * k) + 16 * m * ROW_BYTES);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 part[4];
            load_matrices(part, piece_at(right, 2 * k) + 8 * n * ROW_BYTES);
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply(scores[m][n], own[m], part[0], part[1]);
                multiply(scores[m][n + 1], own[m], part[2], part[3]);
            }
        }
    }
}

// sums (M·16 × N·8) += left (M·16 × 16) · (16 rows of a tile). `right` is the address of the first row plus
// `lane_left`; of the tile's columns, pairs of eight that lie STEP eights apart.
template <int M, int N, int STEP = 2>
__device__ __forceinline__ void multiply_add(float (&sums)[M][N][4], const u32 (&left)[M][4], u32 right) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        u32 part[4];
        load_matrices_transposed(part, piece_at(right, n / 2 * STEP));
#pragma unroll
        for (int m = 0; m < M; m++) {
            multiply(sums[m][n], left[m], part[0], part[1]);
            multiply(sums[m][n + 1], left[m], part[2], part[3]);
        }
    }
}

// The words of Philox for M·16 keys (rows) from `key` on and 16 queries (columns) from `query` on. words[n][b][m] has
// in its lower and upper half the draws of rows g and g + 8 of tile m, column 8n + 2q + b. Lanes draw for each other.
template <int M, class A>
__device__ __forceinline__ void draw_rows(u32 (&words)[2][2][M], const Draws &draws, const A &a, u32 key, u32 query) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    if constexpr (M == 2) {
        // Two lanes share eight keys, four each: each draws for one of the two queries.
        const bool odd = g & 1;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            u32 own[4];
            draw_keys(own, draws, a, query + 8 * n + 2 * q + (g & 1), key / 8 + g / 2);
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const u32 mine = odd ? own[2 + m] : own[m];
                const u32 other = __shfl_xor_sync(ALL_LANES, odd ? own[m] : own[2 + m], 4);
                words[n][0][m] = odd ? other : mine;
                words[n][1][m] = odd ? mine : other;
            }
        }
    } else {
        // Four lanes share eight keys, two each: each draws for one of the four queries.
        const u32 i = g & 3;
        u32 own[4];
        draw_keys(own, draws, a, query + 8 * (i >> 1) + 2 * q + (i & 1), key / 8 + g / 4);
#pragma unroll
        for (int bit = 1; bit <= 2; bit *= 2) {
            const bool set = i & bit;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                if (k & bit) continue;
                const u32 other = __shfl_xor_sync(ALL_LANES, set ? own[k] : own[k | bit], 4 * bit);
                own[k] = set ? other : own[k];
                own[k | bit] = set ? own[k | bit] : other;
            }
        }
#pragma unroll
        for (int u = 0; u < 4; u++) words[u / 2][u % 2][0] = own[u];
    }
}
