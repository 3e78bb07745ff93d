// What the kernels of self-attention share: the table, and how a tile is filled and written. Stands after tiles.cuh and before
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

// 1 / √D, and the same for powers of two.
constexpr float SCALE =
    D == 32 ? 0.17677669529663687f : D == 64 ? 0.125f : D == 96 ? 0.10206207261596577f : 0.08838834764831845f;
constexpr float FACTOR = SCALE * LOG2_E;
constexpr int TILE = 128;
constexpr u32 TILE_BYTES = TILE * ROW_BYTES;

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
