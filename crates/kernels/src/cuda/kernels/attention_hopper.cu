// The kernels of attention.cu for Hopper (sm_90a) and D = 64: four warps multiply 64 rows at a time by wgmma, and the
// factors come from shared memory as they lie there, since a tile's rows of 128 bytes with their pieces mixed are what
// the instruction calls the 128-byte swizzle. So fragments need neither loads nor registers.
//
// A group of four warps has 64 rows of the tile. Where heads have room for 32 rows only, it has two heads, and the
// scores between them are masked.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr int GROUP = 64;
constexpr int THREADS = 256;

// A barrier of four warps.
__device__ __forceinline__ void group_barrier(u32 group) {
    if (group == 0) {
        asm volatile("bar.sync 1, 128;" ::: "memory");
    } else {
        asm volatile("bar.sync 2, 128;" ::: "memory");
    }
}

// For S > 64: queries are rows, keys come 64 at a time; see attention.cu.
template <bool DROPS> __device__ __forceinline__ void forward_tile(const Arguments &a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const u32 queries = shared_address(memory), keys = queries + TILE_BYTES, values = keys + TILE_BYTES;
    Work work;
    if (!work.begin(a)) return;

    const u32 h = a.heads * D, stride = 3 * h;
    const u16 *qkv = a.qkv + static_cast<u64>(work.first) * stride + work.head * D;
    const u32 steps = (keys_of(work, a.causal) + GROUP - 1) / GROUP;
    const Loader<THREADS> loader(work, stride);
    loader.template load<PLAIN, TILE>(queries, qkv, work.row);
    loader.template load<COLUMNS, TILE>(keys, qkv + h, 0);
    loader.template load<COLUMNS, TILE>(values, qkv + 2 * h, 0);
    copies_end_group();

    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 warp_row = warp_number() * 16, group = warp_row / GROUP;
    const u32 query = work.row + warp_row, group_query = work.row + group * GROUP;
    const bool active = group_query < work.tokens;
    Draws draws;
    if (DROPS) draws = draws_of(a, work.number, work.head, work.tokens);

    float sums[1][D / 8][4], total[1][2], most[1][2];
    clear(sums);
    fill<1>(total, 0.0f);
    fill<1>(most, -INFINITE);
    copies_wait<0>();
    publish();
    __syncthreads();

    const u64 left = rows_at(queries + group * GROUP * ROW_BYTES);
    for (u32 step = 0; step < steps; step++) {
        if (step >= 2) {
            copies_wait<1>();
            publish();
            __syncthreads();
        }
        const u32 key = GROUP * step;
        if (active && !(a.causal && key >= group_query + GROUP)) {
            const u32 at_row = key % TILE * ROW_BYTES;
            const u64 key_rows = rows_at(keys + at_row), value_rows = rows_at(values + at_row);
            float scores[GROUP / 8][4];
            pin(scores);
            group_begin();
#pragma unroll
            for (int k = 0; k < D / 16; k++) group_multiply<0, 0>(scores, left + 2 * k, key_rows + 2 * k, k > 0);
            group_commit();
            group_wait<0>();
            pin(scores);
            if (key + GROUP > work.tokens || (a.causal && key + GROUP - 1 > query)) {
#pragma unroll
                for (int n = 0; n < 8; n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const u32 column = key + n / 4 * 32 + 8 * q + n % 4 * 2 + e % 2, at = query + 8 * (e / 2) + g;
                        if (column >= work.tokens || (a.causal && column > at)) scores[n][e] = -INFINITE;
                    }
                }
            }
            float here[2];
            bool raise = false;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                here[r] = fmaxf(scores[0][2 * r], scores[0][2 * r + 1]);
#pragma unroll
                for (int n = 1; n < 8; n++) here[r] = fmaxf(here[r], fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
                raise |= here[r] > most[0][r] + 8.0f / FACTOR;
            }
            if (__any_sync(ALL_LANES, raise)) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float raised = fmaxf(most[0][r], quad_max(here[r]));
                    const float fade = exp2_fast((most[0][r] - raised) * FACTOR);
                    most[0][r] = raised;
                    total[0][r] *= fade;
#pragma unroll
                    for (int n = 0; n < D / 8; n++) sums[0][n][2 * r] *= fade, sums[0][n][2 * r + 1] *= fade;
                }
            }
            u32 weights[4][4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    u32 words[4];
                    if (DROPS) draw_keys(words, draws, a, query + 8 * r + g, key / 8 + 4 * half + q);
                    const float offset = most[0][r] * FACTOR;
#pragma unroll
                    for (int n = 0; n < 4; n++) {
                        float p0 = exp2_fast(fmaf(scores[4 * half + n][2 * r], FACTOR, -offset));
                        float p1 = exp2_fast(fmaf(scores[4 * half + n][2 * r + 1], FACTOR, -offset));
                        total[0][r] += p0 + p1;
                        if (DROPS) {
                            p0 = keeps(words[n], 0, draws.threshold) ? p0 : 0.0f;
                            p1 = keeps(words[n], 1, draws.threshold) ? p1 : 0.0f;
                        }
                        weights[2 * half + n / 2][n % 2 * 2 + r] = pack(p0, p1);
                    }
                }
            }
            pin(sums[0]);
            group_begin();
#pragma unroll
            for (int k = 0; k < 4; k++) group_multiply_add(sums[0], weights[k], value_rows + k * (16 * ROW_BYTES >> 4));
            group_commit();
            group_wait<0>();
            pin(sums[0]);
        }
        if (steps > 2) {
            __syncthreads();
            if (step + 2 < steps) {
                loader.template load<COLUMNS, GROUP>(keys, qkv + h, GROUP * (step + 2));
                loader.template load<COLUMNS, GROUP>(values, qkv + 2 * h, GROUP * (step + 2));
            }
            copies_end_group();
        }
    }
    if (!active) return;

    float factors[1][2], log_sum = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = quad_sum(total[0][r]);
        factors[0][r] = (DROPS ? a.dropout.scale : 1.0f) * reciprocal(sum);
        if (q == r) log_sum = most[0][r] * SCALE + __logf(sum);
    }
    const u32 at = query + 8 * q + g;
    if (q < 2 && at < work.tokens) {
        a.log_sums[static_cast<u64>(work.head) * a.total + work.first + at] = log_sum;
    }
    group_barrier(group);
    if (query >= work.tokens) return;
    u16 *out = a.result + static_cast<u64>(work.first + query) * h + work.head * D;
    store_rows<PLAIN, 1>(queries + warp_row * ROW_BYTES, sums, factors, out, h, work.tokens - query);
}

// As `Keys`, for the 64 keys of a group.
template <bool DROPS> struct GroupKeys {
    static constexpr int QUERIES = 32;

    float dkeys[1][D / 8][4], dvalues[1][D / 8][4];
    u64 key_rows, value_rows;
    u32 key;

    __device__ __forceinline__ void begin(u32 first_key, u32 keys, u32 values) {
        key = first_key;
        key_rows = rows_at(keys);
        value_rows = rows_at(values);
        clear(dkeys);
        clear(dvalues);
    }

    // The scores' gradients go to `panel`, from piece `piece` on. `other`: the queries belong to another head than the
    // warp's keys.
    __device__ __forceinline__ void step(const Arguments &a, const Work &work, const Draws &draws, u32 query,
                                         u32 query_row, u32 gradient_row, const float2 *terms, u32 panel, u32 piece,
                                         bool other) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
        const u64 query_rows = rows_at(query_row), gradient_rows = rows_at(gradient_row);
        float scores[4][4], dweights[4][4];
        pin(scores);
        pin(dweights);
        group_begin();
#pragma unroll
        for (int k = 0; k < D / 16; k++) group_multiply<0, 0>(scores, key_rows + 2 * k, query_rows + 2 * k, k > 0);
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            group_multiply<0, 0>(dweights, value_rows + 2 * k, gradient_rows + 2 * k, k > 0);
        }
        group_commit();
        group_wait<0>();
        pin(scores);
        pin(dweights);
        if (other || key + 16 > work.tokens || (a.causal && query < key + 15)) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const u32 at = key + 2 * g + e / 2, column = query + 8 * n + 2 * q + e % 2;
                    if (other || at >= work.tokens || (a.causal && at > column)) scores[n][e] = -INFINITE;
                }
            }
        }
        u32 weights[2][4], slopes[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 words[2][2][1];
            if (DROPS) draw_rows<1>(words, draws, a, key, query + 16 * half);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const float4 two = *reinterpret_cast<const float4 *>(terms + 16 * half + 8 * n + 2 * q);
                const float offset[2] = {two.x, two.z}, delta[2] = {two.y, two.w};
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float w[2], d[2];
#pragma unroll
                    for (int b = 0; b < 2; b++) {
                        const float p = exp2_fast(fmaf(scores[2 * half + n][2 * r + b], FACTOR, offset[b]));
                        const float dw = dweights[2 * half + n][2 * r + b];
                        if (DROPS) {
                            w[b] = keeps(words[n][b][0], r, draws.threshold) ? p : 0.0f;
                            d[b] = fmaf(w[b], dw, p * delta[b]);
                        } else {
                            w[b] = p;
                            d[b] = p * (dw + delta[b]);
                        }
                    }
                    weights[half][2 * n + r] = pack(w[0], w[1]);
                    slopes[half][2 * n + r] = pack(d[0], d[1]);
                }
            }
        }
        pin(dkeys[0]);
        pin(dvalues[0]);
        group_begin();
#pragma unroll
        for (int k = 0; k < 2; k++) {
            group_multiply_add(dvalues[0], weights[k], gradient_rows + k * (16 * ROW_BYTES >> 4));
            group_multiply_add(dkeys[0], slopes[k], query_rows + k * (16 * ROW_BYTES >> 4));
        }
        group_commit();
#pragma unroll
        for (int half = 0; half < 2; half++) store_matrices(panel ^ (piece + 2 * half) << 4, slopes[half]);
        group_wait<0>();
        pin(dkeys[0]);
        pin(dvalues[0]);
    }

    // All products are done, and nobody reads the group's rows any more.
    __device__ __forceinline__ void end(const Arguments &a, const Work &work, u64 head, u32 rows) {
        if (key >= work.tokens) return;
        const u32 h = a.heads * D, stride = 3 * h;
        u16 *to = a.result + static_cast<u64>(work.first + key) * stride + head * D;
        const float keep_scale = DROPS ? a.dropout.scale : 1.0f;
        float factors[1][2];
        fill<1>(factors, keep_scale);
        store_rows<ROWS_16, 1>(rows, dvalues, factors, to + 2 * h, stride, work.tokens - key);
        fill<1>(factors, keep_scale * SCALE);
        store_rows<ROWS_16, 1>(rows, dkeys, factors, to + h, stride, work.tokens - key);
    }
};

// The scores' gradients lie in panels of 64 queries: a key in each row.
constexpr u32 PANEL_BYTES = TILE * 2 * GROUP;

template <bool DROPS> __device__ __forceinline__ void backward_tile(const Arguments &a) {
    constexpr int QUERIES = GroupKeys<DROPS>::QUERIES;
    extern __shared__ __align__(1024) unsigned char memory[];
    float2 *terms = reinterpret_cast<float2 *>(memory);
    const u32 queries = shared_address(memory) + 1024, keys = queries + TILE_BYTES, values = keys + TILE_BYTES;
    const u32 gradients = values + TILE_BYTES;
    // Two panels; before that, `out`.
    const u32 dscores = gradients + TILE_BYTES;
    Work work;
    if (!work.begin(a)) return;

    const u32 h = a.heads * D, stride = 3 * h;
    const u16 *qkv = a.qkv + static_cast<u64>(work.first) * stride + work.head * D;
    const u64 single = static_cast<u64>(work.first) * h + work.head * D;
    const bool whole = work.room == TILE, pairs = work.room == 32;
    const Loader<THREADS> loader(work, stride), single_loader(work, h);
    loader.template load<ROWS_16, TILE>(keys, qkv + h, 0);
    loader.template load<PLAIN, TILE>(queries, qkv, 0);
    loader.template load<ROWS_16, TILE>(values, qkv + 2 * h, 0);
    single_loader.template load<PLAIN, TILE>(gradients, a.dout + single, 0);
    single_loader.template load<PLAIN, TILE>(dscores, a.out + single, 0);
    copies_end_group();

    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 warp_row = warp_number() * 16, group = warp_row / GROUP;
    const u32 head = work.head_of(warp_row), token = work.token_of(warp_row);
    const u32 group_token = whole ? group * GROUP : 0;
    const bool active = group_token < work.tokens;
    const u32 left = token < work.tokens ? work.tokens - token : 0;
    const u64 own_head = work.head + head;
    Draws draws;
    if (DROPS) draws = draws_of(a, work.number, work.head + head, work.tokens);
    copies_wait<0>();
    publish();
    __syncthreads();
    float2 own[1][2];
    terms_of<1, DROPS>(own, a, gradients + warp_row * ROW_BYTES, dscores + warp_row * ROW_BYTES,
                       own_head * a.total + work.first + token, left);
    if (lane / 8 == q) {
#pragma unroll
        for (int r = 0; r < 2; r++) terms[warp_row + 8 * r + g] = own[0][r];
    }
    __syncthreads();

    // The rows of the queries that the group's keys meet.
    const u32 span = whole ? 0 : group * GROUP;
    GroupKeys<DROPS> sums;
    sums.begin(token, keys + group * GROUP * ROW_BYTES, values + group * GROUP * ROW_BYTES);
    const u32 dscores_at = dscores + (warp_row + lane % 16) * (2 * GROUP) + ((lane / 16 ^ lane % 8) << 4);
    const u32 steps = !active ? 0 : pairs ? 2 : (work.tokens + QUERIES - 1) / QUERIES;
    for (u32 step = a.causal && whole ? group_token / QUERIES : 0; step < steps; step++) {
        const u32 row = span + QUERIES * step;
        sums.step(a, work, draws, pairs ? 0 : QUERIES * step, queries + row * ROW_BYTES, gradients + row * ROW_BYTES,
                  terms + row, dscores_at + step / 2 * PANEL_BYTES, step % 2 * 4, pairs && step != (warp_row / 32 & 1));
    }
    if (active) {
        group_barrier(group);
        sums.end(a, work, own_head, values + warp_row * ROW_BYTES);
    }
    publish();
    __syncthreads();
    if (!active) return;

    // From here on the group's rows are queries.
    float dqueries[1][D / 8][4];
    clear(dqueries);
    pin(dqueries[0]);
    const u32 all = a.causal ? min(work.tokens, group_token + GROUP) : work.tokens;
    const u32 key_groups = whole ? (all + GROUP - 1) / GROUP : 1;
    u64 slope_rows = rows_at(dscores + (whole ? group * PANEL_BYTES : group * GROUP * (2 * GROUP)));
    u64 key_rows = rows_at(keys + span * ROW_BYTES);
    group_begin();
    for (u32 step = 0; step < key_groups; step++) {
#pragma unroll
        for (int k = 0; k < GROUP / 16; k++) {
            group_multiply<1, 1>(dqueries[0], slope_rows, key_rows, true);
            slope_rows += 16 * (2 * GROUP) >> 4;
            key_rows += 16 * ROW_BYTES >> 4;
        }
    }
    group_commit();
    group_wait<0>();
    pin(dqueries[0]);
    if (token >= work.tokens) return;
    float factors[1][2];
    fill<1>(factors, (DROPS ? a.dropout.scale : 1.0f) * SCALE);
    u16 *to = a.result + static_cast<u64>(work.first + token) * stride + own_head * D;
    store_rows<PLAIN, 1>(queries + warp_row * ROW_BYTES, dqueries, factors, to, stride, left);
}

template <bool DROPS> __device__ __forceinline__ void backward_sequence(const Arguments &a) {
    constexpr int QUERIES = GroupKeys<DROPS>::QUERIES, BLOCK = 64;
    extern __shared__ __align__(1024) unsigned char memory[];
    float2 *terms = reinterpret_cast<float2 *>(memory);
    const u32 queries = shared_address(memory) + 1024, keys = queries + TILE_BYTES, values = keys + TILE_BYTES;
    const u32 gradients = values + TILE_BYTES, dscores = gradients + TILE_BYTES;
    Work work;
    if (!work.begin(a) || work.row > 0) return;

    const u32 h = a.heads * D, stride = 3 * h;
    const u16 *qkv = a.qkv + static_cast<u64>(work.first) * stride + work.head * D;
    const u64 single = static_cast<u64>(work.first) * h + work.head * D;
    const u64 sums_at = static_cast<u64>(work.head) * a.total + work.first;
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 warp_row = warp_number() * 16, group = warp_row / GROUP;
    const Loader<THREADS> loader(work, stride), single_loader(work, h);

    // The terms of all queries.
    for (u32 row = 0; row < work.tokens; row += TILE) {
        single_loader.template load<PLAIN, TILE>(queries, a.out + single, row);
        single_loader.template load<PLAIN, TILE>(gradients, a.dout + single, row);
        copies_end_group();
        copies_wait<0>();
        __syncthreads();
        const u32 query = row + warp_row, left = query < work.tokens ? work.tokens - query : 0;
        float2 own[1][2];
        terms_of<1, DROPS>(own, a, gradients + warp_row * ROW_BYTES, queries + warp_row * ROW_BYTES, sums_at + query,
                           left);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (lane / 8 == q && 8 * r + g < left) a.terms[sums_at + query + 8 * r + g] = own[0][r];
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
    const u32 dscores_at = dscores + (warp_row + lane % 16) * (2 * GROUP) + ((lane / 16 ^ lane % 8) << 4);
    // For the queries' gradients: a group has the 64 queries of a block and 32 columns; a warp has 16 of the queries.
    const u32 query_row = warp_row % GROUP, column = group * 32;
    const float factor = (DROPS ? a.dropout.scale : 1.0f) * SCALE;

    for (u32 first_key = 0; first_key < work.tokens; first_key += TILE) {
        const u32 group_key = first_key + group * GROUP;
        const u32 first_block = a.causal ? first_key / BLOCK : 0;
        __syncthreads();
        loader.template load<ROWS_16, TILE>(keys, qkv + h, first_key);
        loader.template load<ROWS_16, TILE>(values, qkv + 2 * h, first_key);
        load_queries(first_block);
        copies_wait<0>();
        publish();
        __syncthreads();
        GroupKeys<DROPS> sums;
        sums.begin(first_key + warp_row, keys + group * GROUP * ROW_BYTES, values + group * GROUP * ROW_BYTES);

        for (u32 block = first_block; block < blocks; block++) {
            if (block > first_block) {
                copies_wait<0>();
                publish();
                __syncthreads();
            }
            if (block + 1 < blocks) load_queries(block + 1);
            const u32 slot = block % 2 * BLOCK;
            if (group_key < work.tokens) {
                for (u32 step = 0; step < BLOCK / QUERIES; step++) {
                    const u32 query = BLOCK * block + QUERIES * step, row = slot + QUERIES * step;
                    if (query >= work.tokens || (a.causal && query + QUERIES - 1 < group_key)) continue;
                    sums.step(a, work, draws, query, queries + row * ROW_BYTES, gradients + row * ROW_BYTES,
                              terms + row, dscores_at, 4 * step, false);
                }
            }

            // The queries' gradients, from these keys.
            const u32 block_query = BLOCK * block, query = block_query + query_row;
            const u32 seen = a.causal ? min(work.tokens, block_query + BLOCK) : work.tokens;
            const bool last = seen <= first_key + TILE;
            float *home = a.dqueries + single + static_cast<u64>(query) * h + column + 4 * q;
            float dqueries[4][4];
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    if (first_key > 0 && query + 8 * r + g < work.tokens) {
                        v = *reinterpret_cast<const float4 *>(home + (8 * r + g) * h + 8 * n);
                    }
                    dqueries[n][2 * r] = v.x, dqueries[n][2 * r + 1] = v.y;
                    dqueries[n + 1][2 * r] = v.z, dqueries[n + 1][2 * r + 1] = v.w;
                }
            }
            publish();
            __syncthreads();
            u64 slope_rows = rows_at(dscores), key_rows = rows_at(keys + 2 * column);
            const u32 key_groups = (min(seen - first_key, TILE) + GROUP - 1) / GROUP;
            pin(dqueries);
            group_begin();
            for (u32 step = 0; step < key_groups; step++) {
#pragma unroll
                for (int k = 0; k < GROUP / 16; k++) {
                    group_multiply<1, 1>(dqueries, slope_rows, key_rows, true);
                    slope_rows += 16 * (2 * GROUP) >> 4;
                    key_rows += 16 * ROW_BYTES >> 4;
                }
            }
            group_commit();
            group_wait<0>();
            pin(dqueries);
            if (query >= work.tokens) continue;
            if (last) {
                // By way of the block's queries, which nobody reads any more.
                const u32 rows = queries + (slot + query_row) * ROW_BYTES;
                u16 *to = a.result + static_cast<u64>(work.first + query + lane / 2) * stride + work.head * D +
                          lane % 2 * 8;
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
                    u32 part[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int r = i % 2 * 2;
                        part[i] = pack(dqueries[n + i / 2][r] * factor, dqueries[n + i / 2][r + 1] * factor);
                    }
                    const u32 piece = column / 8 + n;
                    store_matrices((rows + lane_left()) ^ piece << 4, part);
                    __syncwarp();
                    const uint4 v = load_shared(rows + place(lane / 2, piece + lane % 2));
                    if (query + lane / 2 < work.tokens) store_global(to + 8 * piece, v);
                }
            } else {
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        if (query + 8 * r + g < work.tokens) {
                            const float(&low)[4] = dqueries[n], (&high)[4] = dqueries[n + 1];
                            const uint4 v = make_uint4(__float_as_uint(low[2 * r]), __float_as_uint(low[2 * r + 1]),
                                                       __float_as_uint(high[2 * r]), __float_as_uint(high[2 * r + 1]));
                            store_global(home + (8 * r + g) * h + 8 * n, v);
                        }
                    }
                }
            }
        }
        group_barrier(group);
        sums.end(a, work, work.head, values + warp_row * ROW_BYTES);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) forward(const __grid_constant__ Arguments a) {
    forward_tile<DROPOUT>(a);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) backward(const __grid_constant__ Arguments a) {
    backward_tile<DROPOUT>(a);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) backward_long(const __grid_constant__ Arguments a) {
    backward_sequence<DROPOUT>(a);
}

#endif
