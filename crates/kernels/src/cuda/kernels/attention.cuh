// What the attention kernels share: the table, tiles in shared memory, products on tensor cores, dropout. Stands before
// attention.cu and attention_hopper.cu.
//
// Legend: T tokens of the flat batch, S tokens of one sequence, A heads, D = HEAD_SIZE, H = A·D. A row of `qkv` holds
// query, key and value of a token, 3·H numbers; `out` is T×H; `log_sums` is A×T in f32.
//
// A block of threads works on a tile of 128 rows: 128 rows of one head of a long sequence, or all rows of one head (S ≤
// 128), of two heads (S ≤ 64) or of four (S ≤ 32). Rows of the tile are called x: x = head·R + token, where R is the
// room of a head. An Item of the table tells the sequence and, for long ones, which 128 of its rows.
//
// Every sum has one order, so the same input gives the same bits; there are no atomic operations.

#include "common.cuh"

constexpr int D = HEAD_SIZE;
constexpr int TILE = 128;
// 16-byte pieces of a row.
constexpr int PIECES = D / 8;
constexpr u32 ROW_BYTES = 2 * D;
constexpr u32 TILE_BYTES = TILE * ROW_BYTES;
constexpr float LOG2_E = 1.4426950408889634f;
// 1 / √D, and the same for powers of two.
constexpr float SCALE =
    D == 32 ? 0.17677669529663687f : D == 64 ? 0.125f : D == 96 ? 0.10206207261596577f : 0.08838834764831845f;
constexpr float FACTOR = SCALE * LOG2_E;


struct Item {
    u32 first;   // The sequence's first token in the flat batch.
    u32 tokens;  // S; 0: nothing to do.
    u32 number;  // The sequence's number in the global batch, for dropout.
    u32 block;   // Which 128 rows.
};

struct Arguments {
    const u16 *qkv;
    const u16 *out;   // Backward: what the forward gave.
    const u16 *dout;
    u16 *result;      // out or dqkv.
    float *log_sums;
    float2 *terms;    // A×T, for `backward_long`: see `terms_of`.
    float *dqueries;  // T×H, likewise.
    const Item *items;
    u32 total;        // T.
    u32 heads;        // A.
    u32 head_size;    // D.
    u32 causal;
    u32 keys[14];     // Philox' keys of its seven rounds.
    Dropout dropout;
};

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

__device__ __forceinline__ Draws draws_of(const Arguments &a, u32 number, u32 head, u32 tokens) {
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
__device__ __forceinline__ void draw_keys(u32 (&words)[4], const Draws &common, const Arguments &arguments, u32 query,
                                          u32 group) {
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

// ---- The tile -------------------------------------------------------------------------------------------------------

// What a block of threads works on.
struct Work {
    u32 first, tokens, number;
    u32 row;    // The first token of the tile's rows.
    u32 head;   // The first head.
    u32 shift;  // x → head by this shift, x → token by this mask.
    u32 mask;
    u32 room;   // R: rows of a head in the tile.

    __device__ __forceinline__ bool begin(const Arguments &a) {
        const uint4 item = reinterpret_cast<const uint4 *>(a.items)[blockIdx.y];
        first = item.x;
        tokens = item.y;
        number = item.z;
        // As many heads as the tile has room for and as divide A.
        const u32 bits = tokens <= 32 && a.heads % 4 == 0 ? 5 : tokens <= 64 && a.heads % 2 == 0 ? 6 : 7;
        room = 1u << bits;
        shift = bits == 7 ? 31 : bits;
        mask = (1u << shift) - 1;
        row = item.w * TILE;
        head = blockIdx.x * (TILE >> bits);
        return tokens > 0 && head < a.heads;
    }

    // From the tile's row to the head (counted from `head`) and the token (in its sequence).
    __device__ __forceinline__ u32 head_of(u32 x) const { return x >> shift; }
    __device__ __forceinline__ u32 token_of(u32 x) const { return x & mask; }
};

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

// Copies rows of up to three matrices that lie in the same rows of device memory. A pass copies as many rows as there
// are threads for, so that within a pass all rows belong to one head.
template <int THREADS> struct Loader {
    static constexpr int FIT = THREADS / PIECES;
    static constexpr int ROWS = FIT >= 32 ? 32 : 16;
    static_assert(FIT >= 16, "a pass has at least 16 rows");

    const Work &work;
    u32 row, piece, stride, jump;
    bool idle;

    __device__ __forceinline__ Loader(const Work &work, u32 stride)
        : work(work), row(threadIdx.x / PIECES), piece(threadIdx.x % PIECES), stride(stride) {
        // From the end of a head's room to the beginning of the next head.
        jump = work.room * stride - D;
        idle = FIT != ROWS && row >= ROWS;
    }

    // Rows x0 to x0 + N to their places in the ring of 128 rows at `tile`.
    template <Order O, int N> __device__ __forceinline__ void load(u32 tile, const u16 *from, u32 x0) const {
        constexpr int PERIOD = 32 / ROWS;
        if (idle) return;
        const u16 *own = from + row * stride + piece * 8;
        u32 to[PERIOD];
#pragma unroll
        for (int i = 0; i < PERIOD; i++) to[i] = tile + place(arranged<O>(i * ROWS + row), piece);
#pragma unroll
        for (int i = 0; i < N / ROWS; i++) {
            const u32 x = x0 + i * ROWS, head = work.head_of(x), token = work.token_of(x);
            copy_16(to[i % PERIOD] + (x0 % TILE + i / PERIOD * 32) * ROW_BYTES, own + (x * stride - head * jump),
                    static_cast<int>(row) < static_cast<int>(work.tokens - token));
        }
    }
};

// Writes a warp's M·16 rows of sums, times a factor, by way of its own rows of a tile, which nobody else reads any
// more. `to` is where its first row goes, `left` how many of its rows there are.
template <Order O, int M>
__device__ __forceinline__ void store_rows(u32 tile_rows, const float (&sums)[M][D / 8][4],
                                           const float (&factors)[M][2], u16 *to, u32 stride, u32 left) {
    const u32 lane = threadIdx.x % 32;
    __syncwarp();
    const u32 base = tile_rows + lane_left();
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            u32 part[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float f = factors[m][i % 2];
                part[i] = pack(sums[m][n + i / 2][i % 2 * 2] * f, sums[m][n + i / 2][i % 2 * 2 + 1] * f);
            }
            store_matrices(piece_at(base, n) + 16 * m * ROW_BYTES, part);
        }
    }
    __syncwarp();
    // Lanes with neighbouring numbers have neighbouring pieces; a pass has a multiple of 2 rows, or of 8 for D = 96.
    constexpr int ROWS = PIECES == 12 ? 8 : 32 / PIECES;
    constexpr int PARTS = ROWS * PIECES / 32;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const u32 row = (part * 32 + lane) / PIECES, piece = (part * 32 + lane) % PIECES;
        const u32 key = arranged_back<O>(row);
        u16 *own = to + key * stride + piece * 8;
#pragma unroll
        for (int i = 0; i < 16 * M / ROWS; i++) {
            // The order of rows is such that those of a pass are as far from the first pass' for all lanes.
            const u32 further = arranged_back<O>(i * ROWS);
            const uint4 v = load_shared(tile_rows + place(i * ROWS + row, piece));
            if (key + further < left) store_global(own + further * stride, v);
        }
    }
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

// Keys that the tile's queries look at: all, or up to the last query.
__device__ __forceinline__ u32 keys_of(const Work &work, u32 causal) {
    return causal ? min(work.tokens, work.row + work.room) : work.tokens;
}

// ---- Backward -------------------------------------------------------------------------------------------------------
//
// With P = softmax(scores), k = 0 or 1/(1 − p) by dropout, W = k·P: dW = dout·valueᵀ, dP = k·dW, and the scores'
// gradient is P·(dP − δ) where δ = Σ P·dP = Σ dout·out. All of it is computed divided by 1/(1 − p), which the last
// factors put in.

// What the backward needs of each query: −log₂e·(its log-sum), and −δ·(1 − p). A warp computes them for its M·16 rows:
// the diagonal of dout·outᵀ. Lanes with lane / 8 = lane % 4 get them, for rows g and g + 8 of each of M tiles.
template <int M, bool DROPS>
__device__ __forceinline__ void terms_of(float2 (&terms)[M][2], const Arguments &a, u32 gradient_rows, u32 out_rows,
                                         u64 sums_at, u32 left) {
    const u32 lane = threadIdx.x % 32, g = lane / 4;
    const float keep = DROPS ? reciprocal(a.dropout.scale) : 1.0f;
#pragma unroll
    for (int m = 0; m < M; m++) {
        u32 gradient[1][D / 16][4];
        float products[1][2][4];
        load_left<1>(gradient, gradient_rows + 16 * m * ROW_BYTES);
        multiply_transposed<1, 2>(products, gradient, out_rows + 16 * m * ROW_BYTES + lane_right());
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u32 at = 16 * m + 8 * r + g;
            const float delta = g % 2 ? products[0][r][2 * r + 1] : products[0][r][2 * r];
            terms[m][r] = make_float2(at < left ? -LOG2_E * a.log_sums[sums_at + at] : 0.0f, -keep * delta);
        }
    }
}

// The words of Philox for M·16 keys (rows) from `key` on and 16 queries (columns) from `query` on. words[n][b][m] has
// in its lower and upper half the draws of rows g and g + 8 of tile m, column 8n + 2q + b. Lanes draw for each other.
template <int M>
__device__ __forceinline__ void draw_rows(u32 (&words)[2][2][M], const Draws &draws, const Arguments &a, u32 key,
                                          u32 query) {
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
