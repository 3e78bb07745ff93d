// Attention over flat tokens in bf16, forward and backward, on tensor cores (mma.sync, sm_80 and newer), for head sizes
// of 32, 64, 96 and 128. Scores live in registers only; the backward computes them again from the kept log-sums. Not
// for f32 and other head sizes: attention_plain.cu does the rest.

// ---- Forward --------------------------------------------------------------------------------------------------------

// Queries are rows: a warp has M·16 of them and goes over the keys, 32 at a time. Keys and values lie in a ring of 128
// rows that is filled 64 at a time; where a head has at most 128 keys, all are copied at once.
template <int M, bool DROPS> __device__ __forceinline__ void forward_tile(const Arguments &a) {
    constexpr int THREADS = TILE / (16 * M) * 32;
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 queries = shared_address(memory), keys = queries + TILE_BYTES, values = keys + TILE_BYTES;
    Work work;
    if (!work.begin(a)) return;

    const u32 h = a.heads * D, stride = 3 * h;
    const u16 *qkv = a.qkv + static_cast<u64>(work.first) * stride + work.head * D;
    const u32 all_keys = keys_of(work, a.causal);
    // Halves of the ring to be filled in all: of one head as many as it has keys, else those of all heads' rooms.
    const u32 blocks = work.room == TILE ? (all_keys + 63) / 64 : 2;
    const Loader<THREADS> loader(work, stride);
    loader.template load<PLAIN, TILE>(queries, qkv, work.row);
    loader.template load<COLUMNS, TILE>(keys, qkv + h, 0);
    loader.template load<COLUMNS, TILE>(values, qkv + 2 * h, 0);
    copies_end_group();

    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 warp_row = warp_number() * 16 * M;
    const u32 head = work.head_of(warp_row), query = work.row + work.token_of(warp_row);
    const bool active = query < work.tokens;
    Draws draws;
    if (DROPS) draws = draws_of(a, work.number, work.head + head, work.tokens);

    float sums[M][D / 8][4], total[M][2], most[M][2];
    clear(sums);
    fill<M>(total, 0.0f);
    fill<M>(most, -INFINITE);

    copies_wait<0>();
    __syncthreads();
    u32 left[M][D / 16][4];
    load_left<M>(left, queries + warp_row * ROW_BYTES);

    const u32 steps = (all_keys + 31) / 32;
    for (u32 step = 0; step < steps; step++) {
        if (blocks > 2 && step >= 4 && step % 2 == 0) {
            copies_wait<1>();
            __syncthreads();
        }
        const u32 key = 32 * step;
        if (active && !(a.causal && key >= query + 16 * M)) {
            const u32 at_row = (head * work.room + key) % TILE * ROW_BYTES;
            float scores[M][4][4];
            multiply_transposed<M, 4>(scores, left, keys + at_row + lane_right());
            if (key + 32 > work.tokens || (a.causal && key + 31 > query)) {
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int n = 0; n < 4; n++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const u32 column = key + 8 * q + 2 * n + e % 2, at = query + 16 * m + 8 * (e / 2) + g;
                            if (column >= work.tokens || (a.causal && column > at)) scores[m][n][e] = -INFINITE;
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
                    for (int n = 1; n < 4; n++) {
                        here[m][r] = fmaxf(here[m][r], fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
                    }
                    raise |= here[m][r] > most[m][r] + 8.0f / FACTOR;
                }
            }
            if (__any_sync(ALL_LANES, raise)) {
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float raised = fmaxf(most[m][r], quad_max(here[m][r]));
                        const float fade = exp2_fast((most[m][r] - raised) * FACTOR);
                        most[m][r] = raised;
                        total[m][r] *= fade;
#pragma unroll
                        for (int n = 0; n < D / 8; n++) sums[m][n][2 * r] *= fade, sums[m][n][2 * r + 1] *= fade;
                    }
                }
            }
            u32 weights[2][M][4];
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    u32 words[4];
                    if (DROPS) draw_keys(words, draws, a, query + 16 * m + 8 * r + g, key / 8 + q);
                    const float offset = most[m][r] * FACTOR;
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        float p0 = exp2_fast(fmaf(scores[m][n][2 * r], FACTOR, -offset));
                        float p1 = exp2_fast(fmaf(scores[m][n][2 * r + 1], FACTOR, -offset));
                        total[m][r] += p0 + p1;
                        if (DROPS) {
                            p0 = keeps(words[n], 0, draws.threshold) ? p0 : 0.0f;
                            p1 = keeps(words[n], 1, draws.threshold) ? p1 : 0.0f;
                        }
                        weights[n / 2][m][n % 2 * 2 + r] = pack(p0, p1);
                    }
                }
            }
            multiply_add<M, D / 8>(sums, weights[0], values + at_row + lane_left());
            multiply_add<M, D / 8>(sums, weights[1], values + at_row + lane_left() + 16 * ROW_BYTES);
        }
        if (blocks > 2 && step % 2 == 1) {
            __syncthreads();
            const u32 next = step / 2 + 2;
            if (next < blocks) {
                loader.template load<COLUMNS, 64>(keys, qkv + h, 64 * next);
                loader.template load<COLUMNS, 64>(values, qkv + 2 * h, 64 * next);
            }
            copies_end_group();
        }
    }
    if (!active) return;

    float factors[M][2], log_sum = 0.0f;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float sum = quad_sum(total[m][r]);
            factors[m][r] = (DROPS ? a.dropout.scale : 1.0f) * reciprocal(sum);
            // Of the four lanes that share rows, each writes one.
            if (q == 2 * m + r) log_sum = most[m][r] * SCALE + __logf(sum);
        }
    }
    const u32 at = query + 8 * q + g;
    if (q < 2 * M && at < work.tokens) {
        a.log_sums[static_cast<u64>(work.head + head) * a.total + work.first + at] = log_sum;
    }
    u16 *out = a.result + static_cast<u64>(work.first + query) * h + (work.head + head) * D;
    store_rows<PLAIN, M>(queries + warp_row * ROW_BYTES, sums, factors, out, h, work.tokens - query);
}

// ---- Backward -------------------------------------------------------------------------------------------------------

// A warp's M·16 keys, from `key` on, as rows of the scores, and what is summed up for them.
template <int M, bool DROPS> struct Keys {
    static constexpr Order ORDER = M == 2 ? ROWS_32 : ROWS_16;
    // How many queries are worked on at a time.
    static constexpr int QUERIES = 32;

    float dkeys[M][D / 8][4], dvalues[M][D / 8][4];
    u32 key, key_rows, value_rows;

    __device__ __forceinline__ void begin(u32 first_key, u32 keys, u32 values) {
        key = first_key;
        key_rows = keys + lane_left();
        value_rows = values + lane_left();
        clear(dkeys);
        clear(dvalues);
    }

    // Takes QUERIES in, from `query` on, whose rows begin at `query_row` and `gradient_row`, and gives the scores'
    // gradients.
    __device__ __forceinline__ void step(u32 (&slopes)[QUERIES / 16][M][4], const Arguments &a, const Work &work,
                                         const Draws &draws, u32 query, u32 query_row, u32 gradient_row,
                                         const float2 *terms) {
        constexpr int N = QUERIES / 8;
        const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
        float scores[M][N][4], dweights[M][N][4];
        multiply_rows<M, N>(scores, key_rows, query_row + lane_right());
        multiply_rows<M, N>(dweights, value_rows, gradient_row + lane_right());
        if (key + 16 * M > work.tokens || (a.causal && query < key + 16 * M - 1)) {
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int n = 0; n < N; n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const u32 at = key + 2 * M * g + 2 * m + e / 2, column = query + 8 * n + 2 * q + e % 2;
                        if (at >= work.tokens || (a.causal && at > column)) scores[m][n][e] = -INFINITE;
                    }
                }
            }
        }
#pragma unroll
        for (int half = 0; half < QUERIES / 16; half++) {
            u32 words[2][2][M], weights[M][4];
            if (DROPS) draw_rows<M>(words, draws, a, key, query + 16 * half);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float4 two = *reinterpret_cast<const float4 *>(terms + 16 * half + 8 * n + 2 * q);
                const float offset[2] = {two.x, two.z}, delta[2] = {two.y, two.w};
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        float w[2], d[2];
#pragma unroll
                        for (int b = 0; b < 2; b++) {
                            const float p = exp2_fast(fmaf(scores[m][2 * half + n][2 * r + b], FACTOR, offset[b]));
                            const float dw = dweights[m][2 * half + n][2 * r + b];
                            if (DROPS) {
                                w[b] = keeps(words[n][b][m], r, draws.threshold) ? p : 0.0f;
                                d[b] = fmaf(w[b], dw, p * delta[b]);
                            } else {
                                w[b] = p;
                                d[b] = p * (dw + delta[b]);
                            }
                        }
                        weights[m][2 * n + r] = pack(w[0], w[1]);
                        slopes[half][m][2 * n + r] = pack(d[0], d[1]);
                    }
                }
            }
            multiply_add<M, D / 8>(dvalues, weights, gradient_row + lane_left() + 16 * half * ROW_BYTES);
            multiply_add<M, D / 8>(dkeys, slopes[half], query_row + lane_left() + 16 * half * ROW_BYTES);
        }
    }

    // Writes the gradients; `rows` are the warp's rows of a tile that nobody else reads.
    __device__ __forceinline__ void end(const Arguments &a, const Work &work, u64 head, u32 rows) {
        const u32 h = a.heads * D, stride = 3 * h;
        u16 *to = a.result + static_cast<u64>(work.first + key) * stride + head * D;
        const float keep_scale = DROPS ? a.dropout.scale : 1.0f;
        float factors[M][2];
        fill<M>(factors, keep_scale);
        store_rows<ORDER, M>(rows, dvalues, factors, to + 2 * h, stride, work.tokens - key);
        fill<M>(factors, keep_scale * SCALE);
        store_rows<ORDER, M>(rows, dkeys, factors, to + h, stride, work.tokens - key);
    }
};

// For S ≤ 128: the tile holds all keys and all queries. The scores' gradients go through shared memory to the queries'.
template <int M, bool DROPS> __device__ __forceinline__ void backward_tile(const Arguments &a) {
    constexpr int THREADS = TILE / (16 * M) * 32;
    constexpr Order ORDER = Keys<M, DROPS>::ORDER;
    extern __shared__ __align__(1024) unsigned char memory[];
    float2 *terms = reinterpret_cast<float2 *>(memory);
    const u32 queries = shared_address(memory) + 1024, keys = queries + TILE_BYTES, values = keys + TILE_BYTES;
    const u32 gradients = values + TILE_BYTES;
    // A key in each row, its queries in 16 pieces of 8; before that, `out`.
    const u32 dscores = gradients + TILE_BYTES;
    constexpr u32 PITCH = 2 * TILE;
    Work work;
    if (!work.begin(a)) return;

    const u32 h = a.heads * D, stride = 3 * h;
    const u16 *qkv = a.qkv + static_cast<u64>(work.first) * stride + work.head * D;
    const u64 single = static_cast<u64>(work.first) * h + work.head * D;
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 warp_row = warp_number() * 16 * M;
    // Of the warp's rows, be they keys or queries: the head, the first token, how many there are.
    const u32 head = work.head_of(warp_row), token = work.token_of(warp_row);
    const bool active = token < work.tokens;
    const u32 left = active ? work.tokens - token : 0;
    const u64 own_head = work.head + head;

    const Loader<THREADS> loader(work, stride), single_loader(work, h);
    loader.template load<ORDER, TILE>(keys, qkv + h, 0);
    loader.template load<PLAIN, TILE>(queries, qkv, 0);
    loader.template load<ORDER, TILE>(values, qkv + 2 * h, 0);
    single_loader.template load<PLAIN, TILE>(gradients, a.dout + single, 0);
    single_loader.template load<PLAIN, TILE>(dscores, a.out + single, 0);
    copies_end_group();
    Draws draws;
    if (DROPS) draws = draws_of(a, work.number, work.head + head, work.tokens);
    copies_wait<0>();
    __syncthreads();
    float2 own[M][2];
    terms_of<M, DROPS>(own, a, gradients + warp_row * ROW_BYTES, dscores + warp_row * ROW_BYTES,
                         own_head * a.total + work.first + token, left);
    if (lane / 8 == q) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) terms[warp_row + 16 * m + 8 * r + g] = own[m][r];
        }
    }
    __syncthreads();

    Keys<M, DROPS> sums;
    sums.begin(token, keys + warp_row * ROW_BYTES, values + warp_row * ROW_BYTES);
    const u32 dscores_at = dscores + (warp_row + lane % 16) * PITCH + ((lane / 16 ^ lane % 8) << 4);
    constexpr int QUERIES = Keys<M, DROPS>::QUERIES;
    const u32 steps = active ? (work.tokens + QUERIES - 1) / QUERIES : 0;
    for (u32 step = a.causal ? token / QUERIES : 0; step < steps; step++) {
        const u32 row = head * work.room + QUERIES * step;
        u32 slopes[QUERIES / 16][M][4];
        sums.step(slopes, a, work, draws, QUERIES * step, queries + row * ROW_BYTES, gradients + row * ROW_BYTES,
                  terms + row);
#pragma unroll
        for (int half = 0; half < QUERIES / 16; half++) {
            const u32 part = QUERIES / 16 * step + half;
            const u32 to = (dscores_at ^ (part & 3) << 5) + ((part & 4) << 5);
#pragma unroll
            for (int m = 0; m < M; m++) store_matrices(to + 16 * m * PITCH, slopes[half][m]);
        }
    }
    if (active) sums.end(a, work, own_head, values + warp_row * ROW_BYTES);
    __syncthreads();
    if (!active) return;

    // From here on the warp's rows are queries.
    float dqueries[M][D / 8][4];
    clear(dqueries);
    const u32 all = a.causal ? min(work.tokens, token + 16 * M) : work.tokens;
    const u32 key_steps = (all + 16 * M - 1) / (16 * M);
    // Rows are keys; of a 16×16 part the matrices come as (upper, left), (upper, right), (lower, left), (lower, right).
    const u32 from_row = lane % 8 + lane / 16 * 8, from_piece = token / 8 + lane / 8 % 2;
    u32 from = dscores + (head * work.room + from_row) * PITCH + ((from_piece ^ lane % 8) << 4);
    u32 right = keys + head * work.room * ROW_BYTES + lane_left();
    for (u32 step = 0; step < key_steps; step++) {
#pragma unroll
        for (int k = 0; k < M; k++) {
            u32 slopes[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) load_matrices_transposed(slopes[m], (from ^ m << 5) + 16 * k * PITCH);
            multiply_add<M, D / 8>(dqueries, slopes, right + 16 * k * ROW_BYTES);
        }
        from += 16 * M * PITCH;
        right += 16 * M * ROW_BYTES;
    }
    float factors[M][2];
    fill<M>(factors, (DROPS ? a.dropout.scale : 1.0f) * SCALE);
    u16 *to = a.result + static_cast<u64>(work.first + token) * stride + own_head * D;
    store_rows<PLAIN, M>(queries + warp_row * ROW_BYTES, dqueries, factors, to, stride, left);
}

// For longer sequences: goes over blocks of 128 keys and, for each, over blocks of 64 queries, of which shared memory
// holds two. The queries' gradients are summed up in device memory, `dqueries`, until the last keys have been seen.
template <int M, bool DROPS> __device__ __forceinline__ void backward_sequence(const Arguments &a) {
    constexpr int WARPS = TILE / (16 * M), THREADS = 32 * WARPS, BLOCK = 64, QUERIES = Keys<M, DROPS>::QUERIES;
    constexpr Order ORDER = Keys<M, DROPS>::ORDER;
    extern __shared__ __align__(1024) unsigned char memory[];
    float2 *terms = reinterpret_cast<float2 *>(memory);
    const u32 queries = shared_address(memory) + 1024, keys = queries + TILE_BYTES, values = keys + TILE_BYTES;
    const u32 gradients = values + TILE_BYTES, dscores = gradients + TILE_BYTES;
    constexpr u32 PITCH = 2 * BLOCK;
    Work work;
    // The table has an item for every 128 queries; here one is enough.
    if (!work.begin(a) || work.row > 0) return;

    const u32 h = a.heads * D, stride = 3 * h;
    const u16 *qkv = a.qkv + static_cast<u64>(work.first) * stride + work.head * D;
    const u64 single = static_cast<u64>(work.first) * h + work.head * D;
    const u64 sums_at = static_cast<u64>(work.head) * a.total + work.first;
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, warp = warp_number(), warp_row = warp * 16 * M;
    const Loader<THREADS> loader(work, stride), single_loader(work, h);

    // The terms of all queries.
    for (u32 row = 0; row < work.tokens; row += TILE) {
        single_loader.template load<PLAIN, TILE>(queries, a.out + single, row);
        single_loader.template load<PLAIN, TILE>(gradients, a.dout + single, row);
        copies_end_group();
        copies_wait<0>();
        __syncthreads();
        const u32 query = row + warp_row, left = query < work.tokens ? work.tokens - query : 0;
        float2 own[M][2];
        terms_of<M, DROPS>(own, a, gradients + warp_row * ROW_BYTES, queries + warp_row * ROW_BYTES, sums_at + query,
                           left);
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const u32 at = 16 * m + 8 * r + g;
                if (lane / 8 == q && at < left) a.terms[sums_at + query + at] = own[m][r];
            }
        }
        __syncthreads();
    }

    auto load_queries = [&](u32 block) {
        const u32 x = BLOCK * block;
        loader.template load<PLAIN, BLOCK>(queries, qkv, x);
        single_loader.template load<PLAIN, BLOCK>(gradients, a.dout + single, x);
        const u32 own = x + threadIdx.x;
        if (threadIdx.x < BLOCK) {
            copy_8(shared_address(terms + own % TILE), a.terms + sums_at + min(own, work.tokens - 1),
                   own < work.tokens);
        }
        copies_end_group();
    };
    Draws draws;
    if (DROPS) draws = draws_of(a, work.number, work.head, work.tokens);
    const u32 blocks = (work.tokens + BLOCK - 1) / BLOCK;
    const u32 dscores_at = dscores + (warp_row + lane % 16) * PITCH + ((lane / 16 ^ lane % 8) << 4);
    // For the queries' gradients: a warp has 16 queries of a block and all columns, or every other pair of eight
    // columns.
    constexpr int SHARE = WARPS / 4, N = D / 8 / SHARE;
    const u32 query_row = warp % 4 * 16, column = SHARE == 1 ? 0 : warp / 4 * 2;
    const u32 from_row = lane % 8 + lane / 16 * 8, from_piece = query_row / 8 + lane / 8 % 2;
    const u32 from = dscores + from_row * PITCH + ((from_piece ^ lane % 8) << 4);
    const float factor = (DROPS ? a.dropout.scale : 1.0f) * SCALE;

    for (u32 first_key = 0; first_key < work.tokens; first_key += TILE) {
        const u32 key = first_key + warp_row;
        const u32 first_block = a.causal ? first_key / BLOCK : 0;
        __syncthreads();
        loader.template load<ORDER, TILE>(keys, qkv + h, first_key);
        loader.template load<ORDER, TILE>(values, qkv + 2 * h, first_key);
        load_queries(first_block);
        copies_wait<0>();
        __syncthreads();
        Keys<M, DROPS> sums;
        sums.begin(key, keys + warp_row * ROW_BYTES, values + warp_row * ROW_BYTES);

        for (u32 block = first_block; block < blocks; block++) {
            if (block > first_block) {
                copies_wait<0>();
                __syncthreads();
            }
            if (block + 1 < blocks) load_queries(block + 1);
            const u32 slot = block % 2 * BLOCK;
            if (key < work.tokens) {
                for (u32 step = 0; step < BLOCK / QUERIES; step++) {
                    const u32 query = BLOCK * block + QUERIES * step, row = slot + QUERIES * step;
                    if (query >= work.tokens || (a.causal && query + QUERIES - 1 < key)) continue;
                    u32 slopes[QUERIES / 16][M][4];
                    sums.step(slopes, a, work, draws, query, queries + row * ROW_BYTES, gradients + row * ROW_BYTES,
                              terms + row);
#pragma unroll
                    for (int half = 0; half < QUERIES / 16; half++) {
                        const u32 to = dscores_at ^ (QUERIES / 16 * step + half) << 5;
#pragma unroll
                        for (int m = 0; m < M; m++) store_matrices(to + 16 * m * PITCH, slopes[half][m]);
                    }
                }
            }

            // The queries' gradients, from these keys.
            const u32 query = BLOCK * block + query_row;
            const u32 seen = a.causal ? min(work.tokens, query + 16) : work.tokens;
            const bool last = seen <= first_key + TILE;
            float *home = a.dqueries + single + static_cast<u64>(query) * h + 8 * column + 4 * q;
            float dqueries[1][N][4];
            clear(dqueries);
            if (first_key > 0 && seen > first_key) {
#pragma unroll
                for (int n = 0; n < N; n += 2) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        if (query + 8 * r + g < work.tokens) {
                            const float4 v = *reinterpret_cast<const float4 *>(home + (8 * r + g) * h + 8 * n * SHARE);
                            dqueries[0][n][2 * r] = v.x, dqueries[0][n][2 * r + 1] = v.y;
                            dqueries[0][n + 1][2 * r] = v.z, dqueries[0][n + 1][2 * r + 1] = v.w;
                        }
                    }
                }
            }
            __syncthreads();
            if (query >= work.tokens || seen <= first_key) continue;
            const u32 key_steps = (min(seen - first_key, TILE) + 16 * M - 1) / (16 * M);
            const u32 right = piece_at(keys + lane_left(), column);
            for (u32 step = 0; step < key_steps; step++) {
#pragma unroll
                for (int k = 0; k < M; k++) {
                    u32 slopes[1][4];
                    load_matrices_transposed(slopes[0], from + (M * step + k) * 16 * PITCH);
                    multiply_add<1, N, 2 * SHARE>(dqueries, slopes, right + (M * step + k) * 16 * ROW_BYTES);
                }
            }
            if (last) {
                // By way of the block's queries, which nobody reads any more.
                const u32 rows = queries + (slot + query_row) * ROW_BYTES;
                u16 *to = a.result + static_cast<u64>(work.first + query + lane / 2) * stride + work.head * D +
                          lane % 2 * 8;
#pragma unroll
                for (int n = 0; n < N; n += 2) {
                    u32 part[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int r = i % 2 * 2;
                        part[i] = pack(dqueries[0][n + i / 2][r] * factor, dqueries[0][n + i / 2][r + 1] * factor);
                    }
                    store_matrices(piece_at(piece_at(rows + lane_left(), column), n * SHARE), part);
                    __syncwarp();
                    const u32 piece = column + n * SHARE;
                    const uint4 v = load_shared(rows + place(lane / 2, piece + lane % 2));
                    if (query + lane / 2 < work.tokens) store_global(to + 8 * piece, v);
                }
            } else {
#pragma unroll
                for (int n = 0; n < N; n += 2) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        if (query + 8 * r + g < work.tokens) {
                            const float(&low)[4] = dqueries[0][n], (&high)[4] = dqueries[0][n + 1];
                            const uint4 v = make_uint4(__float_as_uint(low[2 * r]), __float_as_uint(low[2 * r + 1]),
                                                       __float_as_uint(high[2 * r]), __float_as_uint(high[2 * r + 1]));
                            store_global(home + (8 * r + g) * h + 8 * n * SHARE, v);
                        }
                    }
                }
            }
        }
        if (key < work.tokens) sums.end(a, work, work.head, values + warp_row * ROW_BYTES);
    }
}

// ---- Kernels --------------------------------------------------------------------------------------------------------

// Tiles of 16 rows for each warp: as many as registers allow. Then blocks of threads for each multiprocessor.
constexpr int M = D <= 64 ? 2 : 1;
constexpr int THREADS = TILE / (16 * M) * 32;
constexpr int FORWARD_BLOCKS = D <= 64 ? 3 : 2, BACKWARD_BLOCKS = D <= 64 ? 2 : 1;

extern "C" __global__ void __launch_bounds__(THREADS, FORWARD_BLOCKS) forward(const __grid_constant__ Arguments a) {
    forward_tile<M, DROPOUT>(a);
}

extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_BLOCKS) backward(const __grid_constant__ Arguments a) {
    backward_tile<M, DROPOUT>(a);
}

extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_BLOCKS)
    backward_long(const __grid_constant__ Arguments a) {
    backward_sequence<M, DROPOUT>(a);
}
