// Attention by a description (described.cuh) in bf16, forward and backward, on tensor cores (mma.sync, sm_80 and newer): separate
// queries and keys, fewer key heads, windows, bias. Heads have up to HEAD_SIZE numbers; rows of tiles are filled up with zeros. Scores
// live in registers only. Not for f32: attention_plain.cu.
//
// Every sum has one order, so the same input gives the same bits; there are no atomic operations. The backward computes the scores
// twice, once for the queries' gradients and once for those of keys and values, so that all blocks of threads are independent.
//
// Compiled for a HEAD_SIZE, with DROPOUT or not, and with a BIAS or not; for 64 and 128 also for HOPPER, where products are wgmma's. With
// a BIAS also for POSITIONS that contents are scored against: their products are there already, and are gathered by distance; or for a
// MATRIX that is added to scores.

// What is for Hopper is empty for other targets.
#if !defined(HOPPER) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

typedef Described<u16> Arguments;

// Rows that a block of threads works on, tiles of 16 of them for each warp, and rows that it goes over at a time. Warps of a group go
// together: GROUP rows. Keys that are worked on at a time by the queries' kernels.
constexpr int ROWS = D <= 128 ? 128 : 64;
#ifdef HOPPER
constexpr int M = 1, GROUP = 64, STEP = 64;
#else
constexpr int M = D <= 64 ? 2 : 1, GROUP = 16 * M, STEP = 32;
#endif
constexpr int WARPS = ROWS / (16 * M), THREADS = 32 * WARPS;
constexpr int BLOCK = D <= 128 ? 64 : 32;
constexpr u32 ROWS_BYTES = ROWS * ROW_BYTES, BLOCK_BYTES = BLOCK * ROW_BYTES;
constexpr float LN_2 = 0.6931471805599453f;
// Rows of keys' gradients in whose registers not all columns have room are computed in two parts.
constexpr int PARTS = D <= 128 ? 1 : 2;

// Where a piece of a row lies in a tile of N rows: for wgmma, 64 columns of all rows after the other.
template <int N> __device__ __forceinline__ u32 tile_place(u32 row, u32 piece) {
#ifdef HOPPER
    return (piece / 8 * N + row) * 128 + ((piece % 8 ^ row % 8) << 4);
#else
    return place(row, piece);
#endif
}

// Copies rows `first` to `first + N`, as far as they are before `end`, to a tile. `row_of` gives the row in device memory.
template <Order O, int N, class F>
__device__ __forceinline__ void load_rows(u32 tile, const u16 *from, u32 stride, u32 columns, u32 first, u32 end, F row_of) {
#pragma unroll
    for (int i = 0; i < N * PIECES; i += THREADS) {
        const u32 at = i + threadIdx.x;
        if (N * PIECES % THREADS != 0 && at >= N * PIECES) break;
        const u32 row = at / PIECES, piece = at % PIECES;
        const bool valid = first + row < end && piece * 8 < columns;
        const u64 start = valid ? (u64)row_of(first + row) * stride + piece * 8 : 0;
        copy_16(tile + tile_place<N>(arranged<O>(row), piece), from + start, valid);
    }
}

// Writes a warp's sums, times a factor for each row, where there are such rows and columns. `row_at` gives the row in the tile.
template <int N, class F>
__device__ __forceinline__ void write_rows(const float (&sums)[M][N][4], const float (&factors)[M][2], u16 *to, u32 stride,
                                           u32 first_column, u32 columns, F row_at, u32 left) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u32 row = row_at(m, r, g);
            if (row >= left) continue;
            u16 *own = to + (u64)row * stride + first_column + 2 * q;
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (first_column + 8 * n >= columns) break;
                *(u32 *)(own + 8 * n) = pack(sums[m][n][2 * r] * factors[m][r], sums[m][n][2 * r + 1] * factors[m][r]);
            }
        }
    }
}

// A key's place in a step, as `COLUMNS` arranges them.
__device__ __forceinline__ u32 column_at(int n, int b, u32 q) { return n / 4 * 32 + 8 * q + n % 4 * 2 + b; }
__device__ __forceinline__ u32 query_row_at(int m, int r, u32 g) { return 16 * m + 8 * r + g; }
// As the keys of a tile are arranged.
constexpr Order KEY_ORDER = M == 2 ? ROWS_32 : ROWS_16;
__device__ __forceinline__ u32 key_row_at(int m, int r, u32 g) { return 2 * M * g + 2 * m + r; }

// As `multiply_add`, of the tile's columns those from the eight `first` on.
template <int N>
__device__ __forceinline__ void multiply_add_from(float (&sums)[M][N][4], const u32 (&left)[M][4], u32 right, u32 first) {
    if constexpr (PARTS == 1) {
        multiply_add<M, N>(sums, left, right);
    } else {
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 part[4];
            load_matrices_transposed(part, piece_at(right, first + n));
#pragma unroll
            for (int m = 0; m < M; m++) {
                multiply(sums[m][n], left[m], part[0], part[1]);
                multiply(sums[m][n + 1], left[m], part[2], part[3]);
            }
        }
    }
}

#ifdef HOPPER

// products (64 × N·8) = the group's rows of a tile · (N·8 rows of a block from `at` on)ᵀ. `row` is the warp's first.
template <int N> __device__ __forceinline__ void multiply_tiles(float (&products)[1][N][4], u32 tile, u32 row, u32 block, u32 at) {
    pin(products[0]);
    group_begin();
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        const u64 left = rows_at(tile + (k / 4 * ROWS + row / 64 * 64) * 128) + k % 4 * 2;
        const u64 right = rows_at(block + (k / 4 * BLOCK + at) * 128) + k % 4 * 2;
        group_multiply<0, 0>(products[0], left, right, k > 0);
    }
    group_commit();
}

// sums (64 × N·8) += left (64 × 16·K) · (16·K rows of a block from `at` on).
template <int N, int K>
__device__ __forceinline__ void add_product(float (&sums)[1][N][4], const u32 (&left)[K][1][4], u32 block, u32 at, u32) {
    pin(sums[0]);
    group_begin();
#pragma unroll
    for (int panel = 0; panel < N / 8; panel++) {
        float(&part)[8][4] = *reinterpret_cast<float(*)[8][4]>(&sums[0][8 * panel]);
#pragma unroll
        for (int k = 0; k < K; k++) group_multiply_add(part, left[k][0], rows_at(block + (panel * BLOCK + at + 16 * k) * 128));
    }
    group_commit();
}

// Waits for products that were begun.
template <int N> __device__ __forceinline__ void finish(float (&products)[1][N][4]) {
    group_wait<0>();
    pin(products[0]);
}
// What was copied becomes visible to the others' products; before a barrier.
__device__ __forceinline__ void copied() { publish(); }

#else

template <int N> __device__ __forceinline__ void multiply_tiles(float (&products)[M][N][4], u32 tile, u32 row, u32 block, u32 at) {
    multiply_rows<M, N>(products, tile + row * ROW_BYTES + lane_left(), block + at * ROW_BYTES + lane_right());
}
template <int N, int K>
__device__ __forceinline__ void add_product(float (&sums)[M][N][4], const u32 (&left)[K][M][4], u32 block, u32 at, u32 first) {
#pragma unroll
    for (int k = 0; k < K; k++) multiply_add_from<N>(sums, left[k], block + (at + 16 * k) * ROW_BYTES + lane_left(), first);
}
template <int N> __device__ __forceinline__ void finish(float (&products)[M][N][4]) {}
__device__ __forceinline__ void copied() {}

#endif

#ifdef MATRIX

__device__ __forceinline__ float half_of(u32 word, int half) {
    return __uint_as_float(half ? word & 0xffff0000u : word << 16);
}

// What a lane adds to its scores: for each of its rows of queries, neighbouring keys in pairs.
struct Added {
    u32 words[M][2][STEP / 8];

    __device__ __forceinline__ Added(const Part &, const float *, float, u32) {}
    __device__ __forceinline__ void load(const Arguments &a, const Part &part, u32 head, u32 query, u32 key) {
        const u32 g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const u32 at = query + 16 * m + 8 * r + g;
                const u16 *row = a.by_query + a.matrix_row(part.first_query + at, head);
#pragma unroll
                for (int n = 0; n < STEP / 8; n += 4) {
                    const u32 first = key + 8 * n + 8 * q;
                    // Columns beyond the last key are never seen, whatever stands there.
                    const bool there = at < part.queries && first < a.reach;
                    const uint4 eight = there ? *reinterpret_cast<const uint4 *>(row + first) : make_uint4(0, 0, 0, 0);
                    words[m][r][n] = eight.x, words[m][r][n + 1] = eight.y;
                    words[m][r][n + 2] = eight.z, words[m][r][n + 3] = eight.w;
                }
            }
        }
    }
    __device__ __forceinline__ float at(float score, float factor, int m, int r, int n, int b) const {
        return fmaf(score, factor, LOG2_E * half_of(words[m][r][n], b));
    }
};

// The same where rows are keys: neighbouring keys of each of eight queries.
struct AddedByKeys {
    u32 words[4][2][M];

    __device__ __forceinline__ void load(const Arguments &a, const Part &part, u32 head, u32 query, u32 key) {
        const u32 g = threadIdx.x % 32 / 4, q = threadIdx.x % 4, first = key + key_row_at(0, 0, g);
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const u32 at = query + 8 * n + 2 * q + b;
                const bool there = at < part.queries && first < a.reach;
                const u16 *row = a.by_query + a.matrix_row(part.first_query + at, head);
#pragma unroll
                for (int m = 0; m < M; m++) words[n][b][m] = there ? *reinterpret_cast<const u32 *>(row + first + 2 * m) : 0;
            }
        }
    }
    __device__ __forceinline__ float at(float score, float factor, int m, int r, int n, int b) const {
        return fmaf(score, factor, LOG2_E * half_of(words[n][b][m], r));
    }
};

#else

// Adds the bias to scores and brings them into powers of two.
struct Added {
    const Part &part;
    const float *by_distance;
    float slope;
    u32 head;
    __device__ __forceinline__ float operator()(const Arguments &a, float score, float factor, u32 query, u32 key) const {
#ifdef POSITIONS
        return fmaf(score, factor, LOG2_E * part.by_position(a, by_distance, head, query, key));
#endif
        const int distance = (int)key - (int)query - part.shift;
        const float bias = fmaf(slope, (float)abs(distance), by_distance[a.near(distance)]);
        return fmaf(score, factor, bias);
    }
};

#endif

// ---- Forward --------------------------------------------------------------------------------------------------------

#ifdef HOPPER
constexpr int FORWARD_BLOCKS = 2;
#else
constexpr int FORWARD_BLOCKS = D <= 64 ? 3 : D <= 128 ? 2 : 1;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, FORWARD_BLOCKS) forward(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 queries = shared_address(memory), keys = queries + ROWS_BYTES, values = keys + 2 * BLOCK_BYTES;
    float *by_distance = reinterpret_cast<float *>(memory + ROWS_BYTES + 4 * BLOCK_BYTES);
    Part part;
    // Where later queries see more keys, the last come first, so that no block begins its long work when the others are done.
    if (!part.begin(a, ROWS, false, a.right < (int)(1 << 30))) return;
    const u32 head = a.begin_head() + blockIdx.x, d = a.head_size, width = a.heads * d;
    const u16 *query_from = a.query + (u64)part.first_query * a.query_stride + head * d;
    const u16 *key_from = a.key + head / a.group * d, *value_from = a.value + head / a.group * d;
    const u32 from = part.keys_from(a, part.row) / BLOCK * BLOCK;
    const u32 to = part.keys_to(a, min(part.row + ROWS, part.queries) - 1);
    const u32 blocks = to > from ? (to - from + BLOCK - 1) / BLOCK : 0;
    auto load_keys = [&](u32 block) {
        if (block < blocks) {
            const u32 first = from + BLOCK * block, at = block % 2 * BLOCK_BYTES;
            auto row_of = [&](u32 key) { return part.key_row(a, key); };
            load_rows<COLUMNS, BLOCK>(keys + at, key_from, a.key_stride, d, first, part.keys, row_of);
            load_rows<COLUMNS, BLOCK>(values + at, value_from, a.value_stride, d, first, part.keys, row_of);
        }
        copies_end_group();
    };
    load_rows<PLAIN, ROWS>(queries, query_from, a.query_stride, d, part.row, part.queries, [](u32 row) { return row; });
    load_keys(0);
    load_keys(1);
    Added added{part, by_distance, 0.0f, head};
#ifndef MATRIX
    if (BIAS) a.fill_bias(by_distance, added.slope, head, LOG2_E);
#endif

    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 warp_row = warp_number() * 16 * M, query = part.row + warp_row;
    const u32 group_query = part.row + warp_row / GROUP * GROUP;
    const bool active = group_query < part.queries;
    const Seen seen(a, part.shift, part.keys);
    Draws draws;
    if (DROPOUT) draws = draws_of(a, part.number, head, part.keys);
    // What scores are multiplied with to become powers of two, where that is not done when the bias is added.
    const float scaled = a.scale * LOG2_E, factor = BIAS ? 1.0f : scaled, step_up = 8.0f / factor;

    float sums[M][D / 8][4], total[M][2], most[M][2];
    clear(sums);
    fill<M>(total, 0.0f);
    fill<M>(most, -INFINITE);
    for (u32 block = 0; block < blocks; block++) {
        copies_wait<1>();
        copied();
        __syncthreads();
#pragma unroll 1
        for (u32 step = 0; step < BLOCK / STEP; step++) {
            const u32 key = from + BLOCK * block + STEP * step;
            if (!active || !seen.any(group_query, GROUP, key, STEP)) continue;
            const u32 slot = block % 2 * BLOCK_BYTES;
            float scores[M][STEP / 8][4];
            multiply_tiles(scores, queries, warp_row, keys + slot, STEP * step);
#ifdef MATRIX
            added.load(a, part, head, query, key);
#endif
            finish(scores);
            const bool whole = seen.all(query, 16 * M, key, STEP);
            if (BIAS || !whole) {
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int n = 0; n < STEP / 8; n++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const u32 column = key + column_at(n, e % 2, q), at = query + 16 * m + 8 * (e / 2) + g;
                            float &score = scores[m][n][e];
#ifdef MATRIX
                            score = added.at(score, scaled, m, e / 2, n, e % 2);
#else
                            if (BIAS) score = added(a, score, scaled, at, column);
#endif
                            if (!whole && !seen.one(at, column)) score = -INFINITE;
                        }
                    }
                }
            }
            // The subtracted maximum need not be the true one, only near it: it is raised when a score exceeds it by
            // more than 8 powers of two, which after the first step is rare.
            float here[M][2];
            bool raise = false;
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    here[m][r] = fmaxf(scores[m][0][2 * r], scores[m][0][2 * r + 1]);
#pragma unroll
                    for (int n = 1; n < STEP / 8; n++) {
                        here[m][r] = fmaxf(here[m][r], fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
                    }
                    raise |= here[m][r] > most[m][r] + step_up;
                }
            }
            if (__any_sync(ALL_LANES, raise)) {
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float raised = fmaxf(most[m][r], quad_max(here[m][r]));
                        // A row that has seen nothing yet has nothing that could fade.
                        const float fade = raised == -INFINITE ? 1.0f : exp2_fast((most[m][r] - raised) * factor);
                        most[m][r] = raised;
                        total[m][r] *= fade;
#pragma unroll
                        for (int n = 0; n < D / 8; n++) sums[m][n][2 * r] *= fade, sums[m][n][2 * r + 1] *= fade;
                    }
                }
            }
            u32 weights[STEP / 16][M][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    u32 words[4];
                    const float offset = most[m][r] == -INFINITE ? 0.0f : most[m][r] * factor;
#pragma unroll
                    for (int n = 0; n < STEP / 8; n++) {
                        if (DROPOUT && n % 4 == 0) draw_keys(words, draws, a, query + 16 * m + 8 * r + g, key / 8 + n + q);
                        float p0 = exp2_fast(fmaf(scores[m][n][2 * r], factor, -offset));
                        float p1 = exp2_fast(fmaf(scores[m][n][2 * r + 1], factor, -offset));
                        total[m][r] += p0 + p1;
                        if (DROPOUT) {
                            p0 = keeps(words[n % 4], 0, draws.threshold) ? p0 : 0.0f;
                            p1 = keeps(words[n % 4], 1, draws.threshold) ? p1 : 0.0f;
                        }
                        weights[n / 2][m][n % 2 * 2 + r] = pack(p0, p1);
                    }
                }
            }
            add_product(sums, weights, values + slot, STEP * step, 0);
            finish(sums);
        }
        __syncthreads();
        load_keys(block + 2);
    }
    if (query >= part.queries) return;

    float factors[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float sum = quad_sum(total[m][r]);
            factors[m][r] = sum > 0.0f ? (DROPOUT ? a.dropout.scale : 1.0f) * reciprocal(sum) : sum * 0.0f;
            const u32 at = query + 16 * m + 8 * r + g;
            if (q == 0 && at < part.queries) {
                const float log_sum = sum == 0.0f ? -INFINITE : most[m][r] * factor * LN_2 + __logf(sum);
                a.log_sums[(u64)head * a.queries + part.first_query + at] = log_sum;
            }
        }
    }
    u16 *out = a.result + (u64)(part.first_query + query) * width + head * d;
    write_rows<D / 8>(sums, factors, out, width, 0, d, query_row_at, part.queries - query);
}

// ---- Backward -------------------------------------------------------------------------------------------------------
//
// With P = softmax(scores), k = 0 or 1/(1 − p) by dropout, W = k·P: dW = dout·valueᵀ, dP = k·dW, and the scores' gradient is
// P·(dP − δ) where δ = Σ P·dP = Σ dout·out. All of it is computed divided by 1/(1 − p), which the last factors put in.

// The terms of every query and head, −log₂e·(its log-sum) and −δ·(1 − p): lanes for 16 bytes of a row each.
extern "C" __global__ void __launch_bounds__(256) backward_terms(const __grid_constant__ Arguments a) {
    constexpr int LANES = PIECES <= 4 ? 4 : PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32;
    const u64 unit = ((u64)blockIdx.x * 256 + threadIdx.x) / LANES;
    const u32 piece = threadIdx.x % LANES, row = unit / a.heads, head = unit % a.heads;
    float sum = 0.0f;
    if (row < a.queries && piece * 8 < a.head_size) {
        const u64 at = (u64)row * a.heads * a.head_size + head * a.head_size + piece * 8;
        float x[8], y[8];
        unpack(load_raw(reinterpret_cast<const bf16 *>(a.out) + at), x);
        unpack(load_raw(reinterpret_cast<const bf16 *>(a.dout) + at), y);
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(x[i], y[i], sum);
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
    if (row < a.queries && piece == 0) {
        const u64 at = (u64)head * a.queries + row;
        const float log_sum = a.log_sums[at], keep = DROPOUT ? reciprocal(a.dropout.scale) : 1.0f;
        a.terms[at] = make_float2(log_sum == -INFINITE ? 0.0f : -LOG2_E * log_sum, -keep * sum);
    }
}

constexpr int BACKWARD_BLOCKS = D <= 64 ? 2 : 1;
// Between the numbers of neighbouring rows, so that neither rows nor diagonals meet in a bank.
constexpr int PITCH = STEP + 1;

#ifdef POSITIONS
// Keeps two neighbouring gradients of scores of a row, of queries or of keys, where there are such. Rows have room for an even number.
__device__ __forceinline__ void write_dscores(const Arguments &a, u32 head, u32 first, u32 row, u32 rows, u32 column, u32 columns,
                                              const float (&ds)[2], float factor) {
    if (row >= rows || column >= columns) return;
    u16 *to = a.dscores + ((u64)(first + row) * a.heads + head) * a.reach + column;
    *(u32 *)to = pack(ds[0] * factor, ds[1] * factor);
}
#endif

// The queries' gradients, as the forward: a block has queries and goes over keys. Also the share of the bias' table: the sums of the
// scores' gradients along diagonals, which belong to one distance each.
extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_BLOCKS)
    backward_queries(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 queries = shared_address(memory), gradients = queries + ROWS_BYTES;
    const u32 keys = gradients + ROWS_BYTES, values = keys + 2 * BLOCK_BYTES;
    // By distance: the bias, then each warp's sums of its gradient; then each warp's scores' gradients.
    float *by_distance = reinterpret_cast<float *>(memory + 2 * ROWS_BYTES + 4 * BLOCK_BYTES);
    const u32 warp = warp_number(), distances = 2 * a.reach + 1;
    float *dbias = by_distance + (1 + warp) * distances;
    float *dscores = by_distance + (1 + WARPS) * distances + warp * 16 * M * PITCH;
    const bool with_dbias = BIAS && a.dbias;
    const u32 head = a.begin_head() + blockIdx.x, d = a.head_size, width = a.heads * d;
    const float keep_scale = DROPOUT ? a.dropout.scale : 1.0f;
    Part part;
    if (!part.begin(a, ROWS, false, a.right < (int)(1 << 30))) {
        if (with_dbias) a.write_dbias(nullptr, 0, 0.0f);
        return;
    }
    const u16 *query_from = a.query + (u64)part.first_query * a.query_stride + head * d;
    const u16 *gradient_from = a.dout + (u64)part.first_query * width + head * d;
    const u16 *key_from = a.key + head / a.group * d, *value_from = a.value + head / a.group * d;
    const u32 from = part.keys_from(a, part.row) / BLOCK * BLOCK;
    const u32 to = part.keys_to(a, min(part.row + ROWS, part.queries) - 1);
    const u32 blocks = to > from ? (to - from + BLOCK - 1) / BLOCK : 0;
    auto load_keys = [&](u32 block) {
        if (block < blocks) {
            const u32 first = from + BLOCK * block, at = block % 2 * BLOCK_BYTES;
            auto row_of = [&](u32 key) { return part.first_key + key; };
            load_rows<COLUMNS, BLOCK>(keys + at, key_from, a.key_stride, d, first, part.keys, row_of);
            load_rows<COLUMNS, BLOCK>(values + at, value_from, a.value_stride, d, first, part.keys, row_of);
        }
        copies_end_group();
    };
    auto as_is = [](u32 row) { return row; };
    load_rows<PLAIN, ROWS>(queries, query_from, a.query_stride, d, part.row, part.queries, as_is);
    load_rows<PLAIN, ROWS>(gradients, gradient_from, width, d, part.row, part.queries, as_is);
    load_keys(0);
    load_keys(1);
    Added added{part, by_distance, 0.0f, head};
#ifndef MATRIX
    if (BIAS) a.fill_bias(by_distance, added.slope, head, LOG2_E);
#endif
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    if (with_dbias) {
        for (u32 i = lane; i < distances; i += 32) dbias[i] = 0.0f;
    }
    const u32 warp_row = warp * 16 * M, query = part.row + warp_row, group_query = part.row + warp_row / GROUP * GROUP;
    const bool active = group_query < part.queries;
    const Seen seen(a, part.shift, part.keys);
    Draws draws;
    if (DROPOUT) draws = draws_of(a, part.number, head, part.keys);
    const float scaled = a.scale * LOG2_E, factor = BIAS ? 1.0f : scaled;
    Terms terms[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const u32 at = query + 16 * m + 8 * r + g;
            const u64 place = (u64)head * a.queries + part.first_query + at;
            terms[m][r] = at < part.queries ? a.terms[place] : make_float2(0.0f, 0.0f);
        }
    }

    float dqueries[M][D / 8][4], far_before = 0.0f, far_after = 0.0f;
    clear(dqueries);
    for (u32 block = 0; block < blocks; block++) {
        copies_wait<1>();
        copied();
        __syncthreads();
#pragma unroll 1
        for (u32 step = 0; step < BLOCK / STEP; step++) {
            const u32 key = from + BLOCK * block + STEP * step;
            if (!active || !seen.any(group_query, GROUP, key, STEP)) continue;
            const u32 slot = block % 2 * BLOCK_BYTES;
            float scores[M][STEP / 8][4], dweights[M][STEP / 8][4];
            multiply_tiles(scores, queries, warp_row, keys + slot, STEP * step);
            multiply_tiles(dweights, gradients, warp_row, values + slot, STEP * step);
#ifdef MATRIX
            added.load(a, part, head, query, key);
#endif
            finish(scores);
            finish(dweights);
            const bool whole = seen.all(query, 16 * M, key, STEP);
            u32 slopes[STEP / 16][M][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const u32 at = query + 16 * m + 8 * r + g;
                    u32 words[4];
#pragma unroll
                    for (int n = 0; n < STEP / 8; n++) {
                        if (DROPOUT && n % 4 == 0) draw_keys(words, draws, a, at, key / 8 + n + q);
                        float ds[2];
#pragma unroll
                        for (int b = 0; b < 2; b++) {
                            const u32 column = key + column_at(n, b, q);
                            float score = scores[m][n][2 * r + b];
#ifdef MATRIX
                            score = added.at(score, scaled, m, r, n, b);
#else
                            if (BIAS) score = added(a, score, scaled, at, column);
#endif
                            if (!whole && !seen.one(at, column)) score = -INFINITE;
                            const float p = exp2_fast(fmaf(score, factor, terms[m][r].x));
                            const float dw = dweights[m][n][2 * r + b], delta = terms[m][r].y;
                            if (DROPOUT) {
                                ds[b] = fmaf(keeps(words[n % 4], b, draws.threshold) ? p : 0.0f, dw, p * delta);
                            } else {
                                ds[b] = p * (dw + delta);
                            }
                            if (with_dbias) dscores[(16 * m + 8 * r + g) * PITCH + column_at(n, b, q)] = ds[b];
                        }
                        slopes[n / 2][m][n % 2 * 2 + r] = pack(ds[0], ds[1]);
#ifdef POSITIONS
                        write_dscores(a, head, part.first_query, at, part.queries, key + column_at(n, 0, q), part.keys, ds, keep_scale);
#endif
                    }
#ifdef MATRIX
                    // Divided by 1/(1 − p), as they are.
#pragma unroll
                    for (int n = 0; n < STEP / 8; n += 4) {
                        const u32 first = key + 8 * n + 8 * q;
                        const u32(&low)[4] = slopes[n / 2][m], (&high)[4] = slopes[n / 2 + 1][m];
                        if (at >= part.queries || first >= a.reach) continue;
                        u16 *to = a.dscores + a.matrix_row(part.first_query + at, head) + first;
                        *reinterpret_cast<uint4 *>(to) = make_uint4(low[r], low[2 + r], high[r], high[2 + r]);
                    }
#endif
                }
            }
            if (with_dbias) {
                __syncwarp();
                // The key that stands `diagonal` − 16M + 1 after its query, counted within the step.
                for (int diagonal = lane; diagonal < 16 * M + STEP - 1; diagonal += 32) {
                    const int first = max(0, 16 * M - 1 - diagonal), last = min(16 * M - 1, 16 * M + STEP - 2 - diagonal);
                    float sum = 0.0f;
                    for (int row = first; row <= last; row++) sum += dscores[row * PITCH + row + diagonal - 16 * M + 1];
                    const int distance = (int)key + diagonal - 16 * M + 1 - (int)query - part.shift;
                    if (distance >= a.reach) {
                        far_after += sum;
                    } else if (distance <= -a.reach) {
                        far_before += sum;
                    } else {
                        dbias[distance + a.reach] += sum;
                    }
                }
                __syncwarp();
            }
            add_product(dqueries, slopes, keys + slot, STEP * step, 0);
            finish(dqueries);
        }
        __syncthreads();
        load_keys(block + 2);
    }
    if (with_dbias) {
        far_before = warp_sum(far_before);
        far_after = warp_sum(far_after);
        if (lane == 0) dbias[0] += far_before;
        __syncwarp();
        if (lane == 0) dbias[2 * a.reach] += far_after;
        a.write_dbias(by_distance + distances, WARPS, keep_scale);
    }
    if (query >= part.queries) return;
    float factors[M][2];
    fill<M>(factors, keep_scale * a.scale);
    u16 *out = a.dquery + (u64)(part.first_query + query) * a.query_stride + head * d;
    write_rows<D / 8>(dqueries, factors, out, a.query_stride, 0, d, query_row_at, part.queries - query);
}

// The gradients of keys and values: a block has keys and goes over the queries of all heads that share them.
extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_BLOCKS) backward_keys(const __grid_constant__ Arguments a) {
    constexpr int N = D / 8 / PARTS;
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 keys = shared_address(memory), values = keys + ROWS_BYTES;
    const u32 queries = values + ROWS_BYTES, gradients = queries + 2 * BLOCK_BYTES;
    Terms *terms = reinterpret_cast<Terms *>(memory + 2 * ROWS_BYTES + 4 * BLOCK_BYTES);
    float *by_distance = reinterpret_cast<float *>(terms + 2 * BLOCK);
    Part part;
    if (!part.begin(a, ROWS, true)) return;
    const u32 key_head = a.begin_head() + blockIdx.x / PARTS, first_column = blockIdx.x % PARTS * N * 8;
    const u32 d = a.head_size, width = a.heads * d;
    const u16 *key_from = a.key + (u64)part.first_key * a.key_stride + key_head * d;
    const u16 *value_from = a.value + (u64)part.first_key * a.value_stride + key_head * d;
    const u32 from = part.queries_from(a, part.row) / BLOCK * BLOCK;
    const u32 to = part.queries_to(a, min(part.row + ROWS, part.keys) - 1);
    const u32 blocks = to > from ? (to - from + BLOCK - 1) / BLOCK : 0, all = blocks * a.group;
    auto as_is = [](u32 row) { return row; };
    auto load_queries = [&](u32 block) {
        if (block < all) {
            const u32 head = key_head * a.group + block / blocks, first = from + BLOCK * (block % blocks);
            const u32 slot = block % 2, at = slot * BLOCK_BYTES;
            const u64 row = part.first_query;
            load_rows<PLAIN, BLOCK>(queries + at, a.query + row * a.query_stride + head * d, a.query_stride, d, first,
                                    part.queries, as_is);
            load_rows<PLAIN, BLOCK>(gradients + at, a.dout + row * width + head * d, width, d, first, part.queries, as_is);
            const u32 own = first + threadIdx.x;
            if (threadIdx.x < BLOCK) {
                const u64 place = (u64)head * a.queries + row + min(own, part.queries - 1);
                copy_8(shared_address(terms + slot * BLOCK + threadIdx.x), a.terms + place, own < part.queries);
            }
        }
        copies_end_group();
    };
    load_rows<KEY_ORDER, ROWS>(keys, key_from, a.key_stride, d, part.row, part.keys, as_is);
    load_rows<KEY_ORDER, ROWS>(values, value_from, a.value_stride, d, part.row, part.keys, as_is);
    load_queries(0);
    load_queries(1);

    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 warp_row = warp_number() * 16 * M, key = part.row + warp_row, group_key = part.row + warp_row / GROUP * GROUP;
    const bool active = group_key < part.keys;
    const Seen seen(a, part.shift, part.keys);
    const float scaled = a.scale * LOG2_E, factor = BIAS ? 1.0f : scaled, keep_scale = DROPOUT ? a.dropout.scale : 1.0f;
    Draws draws;
#ifdef MATRIX
    AddedByKeys added;
#else
    Added added{part, by_distance, 0.0f, 0};
#endif
    float dkeys[M][N][4], dvalues[M][N][4];
    clear(dkeys);
    clear(dvalues);
    for (u32 block = 0; block < all; block++) {
        const u32 head = key_head * a.group + block / blocks;
        if (block % blocks == 0) {
            if (DROPOUT) draws = draws_of(a, part.number, head, part.keys);
#ifndef MATRIX
            // All have left the last head's steps: see the end of the loop.
            if (BIAS) a.fill_bias(by_distance, added.slope, head, LOG2_E);
            added.head = head;
#endif
        }
        copies_wait<1>();
        copied();
        __syncthreads();
#pragma unroll 1
        for (u32 step = 0; step < BLOCK / 32; step++) {
            const u32 query = from + BLOCK * (block % blocks) + 32 * step;
            if (!active || query >= part.queries || !seen.any(query, 32, group_key, GROUP)) continue;
            const u32 row = block % 2 * BLOCK + 32 * step, slot = block % 2 * BLOCK_BYTES;
            float scores[M][4][4], dweights[M][4][4];
            multiply_tiles(scores, keys, warp_row, queries + slot, 32 * step);
            multiply_tiles(dweights, values, warp_row, gradients + slot, 32 * step);
#ifdef MATRIX
            added.load(a, part, head, query, key);
#endif
            finish(scores);
            finish(dweights);
            const bool whole = seen.all(query, 32, key, 16 * M);
            if (BIAS || !whole) {
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int n = 0; n < 4; n++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const u32 at = key + key_row_at(m, e / 2, g), column = query + 8 * n + 2 * q + e % 2;
                            float &score = scores[m][n][e];
#ifdef MATRIX
                            score = added.at(score, scaled, m, e / 2, n, e % 2);
#else
                            if (BIAS) score = added(a, score, scaled, column, at);
#endif
                            if (!whole && !seen.one(column, at)) score = -INFINITE;
                        }
                    }
                }
            }
            u32 weights[2][M][4], slopes[2][M][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 words[2][2][M];
                if (DROPOUT) draw_rows<M>(words, draws, a, key, query + 16 * half);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float4 two = *reinterpret_cast<const float4 *>(terms + row + 16 * half + 8 * n + 2 * q);
                    const float offset[2] = {two.x, two.z}, delta[2] = {two.y, two.w};
#pragma unroll
                    for (int m = 0; m < M; m++) {
#pragma unroll
                        for (int r = 0; r < 2; r++) {
                            float w[2], ds[2];
#pragma unroll
                            for (int b = 0; b < 2; b++) {
                                const float p = exp2_fast(fmaf(scores[m][2 * half + n][2 * r + b], factor, offset[b]));
                                const float dw = dweights[m][2 * half + n][2 * r + b];
                                if (DROPOUT) {
                                    w[b] = keeps(words[n][b][m], r, draws.threshold) ? p : 0.0f;
                                    ds[b] = fmaf(w[b], dw, p * delta[b]);
                                } else {
                                    w[b] = p;
                                    ds[b] = p * (dw + delta[b]);
                                }
                            }
                            weights[half][m][2 * n + r] = pack(w[0], w[1]);
                            slopes[half][m][2 * n + r] = pack(ds[0], ds[1]);
#ifdef POSITIONS
                            write_dscores(a, head, part.first_key, key + key_row_at(m, r, g), part.keys,
                                          query + 8 * (2 * half + n) + 2 * q, part.queries, ds, keep_scale);
#endif
                        }
                    }
                }
            }
            add_product(dvalues, weights, gradients + slot, 32 * step, first_column / 8);
            add_product(dkeys, slopes, queries + slot, 32 * step, first_column / 8);
            finish(dvalues);
            finish(dkeys);
        }
        __syncthreads();
        load_queries(block + 2);
    }
    if (key >= part.keys) return;
    const u64 first = part.first_key + key;
    float factors[M][2];
    fill<M>(factors, keep_scale);
    u16 *to_value = a.dvalue + first * a.value_stride + key_head * d, *to_key = a.dkey + first * a.key_stride + key_head * d;
    write_rows<N>(dvalues, factors, to_value, a.value_stride, first_column, d, key_row_at, part.keys - key);
    fill<M>(factors, keep_scale * a.scale);
    write_rows<N>(dkeys, factors, to_key, a.key_stride, first_column, d, key_row_at, part.keys - key);
}

#endif
