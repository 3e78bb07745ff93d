// Attention by a description (described.cuh) in f32 for heads of up to 128 numbers, forward and backward: every product is exact f32
// multiply-adds over tiles in shared memory, sums are taken in a fixed order, and nothing is added atomically.
//
// Compiled for a HEAD_SIZE that heads are filled up to with zeros, and with a BIAS or not.
//
// A block of 16×16 threads has ROWS rows of queries (or keys) and goes over the others 64 at a time. Thread (x, y) has rows y + 16i and
// columns x + 16j of the scores, so that the rows of 64 + 4 or D + 4 numbers that neighbours read at once lie on different banks.

typedef Described<float> Arguments;

constexpr u32 D = HEAD_SIZE, STRIDE = D + 4, COLUMNS = 64, PITCH = COLUMNS + 4, THREADS = 256;
constexpr u32 FORWARD_ROWS = D <= 64 ? 128 : 64, BACKWARD_ROWS = 64;
// Numbers of a row of D that a thread has: pieces of VECTOR, 16 pieces apart.
constexpr u32 VECTOR = D % 64 == 0 ? 4 : 2, OWN = D / 16;
constexpr u32 BLOCKS = D <= 64 ? 2 : 1;

__device__ __forceinline__ u32 own_x() { return threadIdx.x % 16; }
__device__ __forceinline__ u32 own_y() { return threadIdx.x / 16; }
__device__ __forceinline__ u32 own_column(u32 i) { return (16 * (i / VECTOR) + own_x()) * VECTOR + i % VECTOR; }

// Starts copies of rows of `d` numbers, which `from` gives the addresses of, and fills up with zeros.
template <u32 ROWS, class F> __device__ __forceinline__ void load_rows(float *to, u32 rows, u32 d, F from) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < ROWS * (D / 4); i += THREADS) {
        const u32 row = i / (D / 4), column = i % (D / 4) * 4;
        float *place = to + row * STRIDE + column;
        if (row < rows && column < d) {
            copy_async((uint4 *)place, from(row) + column);
        } else {
            *(float4 *)place = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
}

// sums (rows × 64) = a (rows × D) · b (64 × D)ᵀ.
template <u32 I> __device__ __forceinline__ void multiply_rows(float (&sums)[I][4], const float *a, const float *b) {
    const float *left = a + own_y() * STRIDE, *right = b + own_x() * STRIDE;
#pragma unroll
    for (u32 i = 0; i < I; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) sums[i][j] = 0.0f;
#pragma unroll 1
    for (u32 d = 0; d < D; d += 4) {
        float4 r[4];
#pragma unroll
        for (u32 j = 0; j < 4; j++) r[j] = *(const float4 *)(right + 16 * j * STRIDE + d);
#pragma unroll
        for (u32 i = 0; i < I; i++) {
            const float4 l = *(const float4 *)(left + 16 * i * STRIDE + d);
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                sums[i][j] = fmaf(l.x, r[j].x, sums[i][j]);
                sums[i][j] = fmaf(l.y, r[j].y, sums[i][j]);
                sums[i][j] = fmaf(l.z, r[j].z, sums[i][j]);
                sums[i][j] = fmaf(l.w, r[j].w, sums[i][j]);
            }
        }
    }
}

// sums (rows × D) += weights (rows × 64) · b (64 × D).
template <u32 I>
__device__ __forceinline__ void add_weighted(float (&sums)[I][OWN], const float *weights, const float *b) {
    const float *left = weights + own_y() * PITCH;
#pragma unroll 1
    for (u32 k = 0; k < COLUMNS; k += 4) {
        float4 w[I];
#pragma unroll
        for (u32 i = 0; i < I; i++) w[i] = *(const float4 *)(left + 16 * i * PITCH + k);
#pragma unroll
        for (u32 t = 0; t < 4; t++) {
            float r[OWN];
#pragma unroll
            for (u32 c = 0; c < OWN; c += VECTOR) {
                const float *at = b + (k + t) * STRIDE + own_column(c);
                if (VECTOR == 4) {
                    const float4 v = *(const float4 *)at;
                    r[c] = v.x, r[c + 1] = v.y, r[c + VECTOR - 2] = v.z, r[c + VECTOR - 1] = v.w;
                } else {
                    const float2 v = *(const float2 *)at;
                    r[c] = v.x, r[c + 1] = v.y;
                }
            }
#pragma unroll
            for (u32 i = 0; i < I; i++) {
                const float x = t == 0 ? w[i].x : t == 1 ? w[i].y : t == 2 ? w[i].z : w[i].w;
#pragma unroll
                for (u32 c = 0; c < OWN; c++) sums[i][c] = fmaf(x, r[c], sums[i][c]);
            }
        }
    }
}

// What a thread has of a row, times a factor, to its first d numbers.
__device__ __forceinline__ void store_own(float *row, u32 d, const float (&x)[OWN], float factor) {
#pragma unroll
    for (u32 c = 0; c < OWN; c += 2) {
        if (own_column(c) < d) *(float2 *)(row + own_column(c)) = make_float2(x[c] * factor, x[c + 1] * factor);
    }
}

// The sum, or the largest, over the 16 threads of a row.
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
    return x;
}

// One head of the queries of a sequence.
struct Head : HeadOf<float, BIAS> {
    using HeadOf::HeadOf;

    __device__ __forceinline__ bool sees(u32 query, u32 key) const {
        const int distance = (int)key - (int)query - part.shift;
        return query < part.queries && key < part.keys && distance >= -a.left && distance <= a.right;
    }
    // Whether each of some queries sees each of some keys.
    __device__ __forceinline__ bool all_seen(u32 query, u32 queries, u32 key, u32 keys) const {
        const int nearest = (int)key - (int)(query + queries - 1) - part.shift, furthest = (int)(key + keys - 1) - (int)query - part.shift;
        return query + queries <= part.queries && key + keys <= part.keys && nearest >= -a.left && furthest <= a.right;
    }

    // Which of 64 keys each of some queries keeps: a byte for every eight.
    __device__ __forceinline__ void draw_masks(u8 *masks, u32 first_query, u32 rows, u32 first_key) const {
        if (dropout.threshold == 0) return;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < rows * 8; i += THREADS) {
            const uint4 bits = draw(dropout, RowId{part.number, first_query + i / 8}, part.keys, first_key / 8 + i % 8);
            const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
            u32 mask = 0;
#pragma unroll
            for (u32 c = 0; c < 8; c++) mask |= (u32)((words[c / 2] >> 16 * (c % 2) & 0xffffu) >= dropout.threshold) << c;
            masks[i] = (u8)mask;
        }
    }
    // 0 where a key is dropped, else what its weight is multiplied by.
    __device__ __forceinline__ float kept(const u8 *masks, u32 query, u32 key) const {
        if (dropout.threshold == 0) return 1.0f;
        return masks[query * 8 + key / 8] >> key % 8 & 1 ? dropout.scale : 0.0f;
    }

    template <u32 ROWS> __device__ __forceinline__ void load_queries(float *to, u32 first, u32 end) const {
        load_rows<ROWS>(to, end > first ? end - first : 0, d, [&](u32 row) { return a.query + query(first + row); });
    }
    template <u32 ROWS> __device__ __forceinline__ void load_dout(float *to, u32 first, u32 end) const {
        load_rows<ROWS>(to, end > first ? end - first : 0, d, [&](u32 row) { return a.dout + single(first + row); });
    }
    __device__ __forceinline__ void load_keys(float *to, u32 first, u32 end) const {
        load_rows<COLUMNS>(to, end > first ? end - first : 0, d, [&](u32 row) { return a.key + key(first + row); });
    }
    __device__ __forceinline__ void load_values(float *to, u32 first, u32 end) const {
        load_rows<COLUMNS>(to, end > first ? end - first : 0, d, [&](u32 row) { return a.value + value(first + row); });
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) forward(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) float shared[];
    constexpr u32 ROWS = FORWARD_ROWS, I = ROWS / 16;
    float *query = shared, *key = query + ROWS * STRIDE, *value = key + COLUMNS * STRIDE, *weights = value + COLUMNS * STRIDE;
    u8 *masks = (u8 *)(weights + ROWS * PITCH);
    Part part;
    if (!part.begin(a, ROWS, false)) return;
    const Head head(a, part, blockIdx.x, (float *)(masks + ROWS * 8));
    const u32 x = own_x(), y = own_y(), rows = min(part.queries - part.row, ROWS);
    const u32 begin = part.keys_from(a, part.row) / COLUMNS * COLUMNS, end = part.keys_to(a, part.row + rows - 1);
    head.load_queries<ROWS>(query, part.row, part.queries);
    head.load_keys(key, begin, end);
    commit_copies();
    head.load_values(value, begin, end);
    commit_copies();
    float sums[I][OWN] = {}, most[I], total[I] = {};
#pragma unroll
    for (u32 i = 0; i < I; i++) most[i] = -INFINITE;
    for (u32 first = begin; first < end; first += COLUMNS) {
        head.draw_masks(masks, part.row, ROWS, first);
        wait_copies<1>();
        __syncthreads();
        float scores[I][4];
        multiply_rows(scores, query, key);
        __syncthreads();
        // The next keys come while weights are computed and used, the next values while scores are.
        if (first + COLUMNS < end) head.load_keys(key, first + COLUMNS, end);
        commit_copies();
        const bool whole = head.all_seen(part.row, ROWS, first, COLUMNS);
#pragma unroll
        for (u32 i = 0; i < I; i++) {
            float raised = most[i];
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 row = part.row + y + 16 * i, column = first + x + 16 * j;
                const float score = head.score(scores[i][j], row, column);
                scores[i][j] = whole || head.sees(row, column) ? score : -INFINITE;
                raised = fmaxf(raised, scores[i][j]);
            }
            raised = row_max(raised);
            // Nothing seen so far: no difference of infinities.
            const float base = raised == -INFINITE ? 0.0f : raised, fade = exp_fast(most[i] - base);
            most[i] = raised;
            total[i] *= fade;
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const float p = exp_fast(scores[i][j] - base);
                total[i] += p;
                weights[(y + 16 * i) * PITCH + x + 16 * j] = p * head.kept(masks, y + 16 * i, x + 16 * j);
            }
#pragma unroll
            for (u32 c = 0; c < OWN; c++) sums[i][c] *= fade;
        }
        wait_copies<1>();
        __syncthreads();
        add_weighted(sums, weights, value);
        __syncthreads();
        if (first + COLUMNS < end) head.load_values(value, first + COLUMNS, end);
        commit_copies();
    }
    wait_copies<0>();
#pragma unroll
    for (u32 i = 0; i < I; i++) {
        const u32 row = part.row + y + 16 * i;
        const float sum = row_sum(total[i]);
        if (row >= part.queries) continue;
        // A query that sees nothing gives zeros.
        store_own(a.result + head.single(row), head.d, sums[i], sum == 0.0f ? 0.0f : 1.0f / sum);
        if (x == 0) a.log_sums[head.sums(row)] = most[i] + logf(sum);
    }
}

// The queries' gradients, and their terms for `backward_keys`.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) backward_queries(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) float shared[];
    constexpr u32 ROWS = BACKWARD_ROWS, I = ROWS / 16;
    float *query = shared, *dout = query + ROWS * STRIDE, *key = dout + ROWS * STRIDE, *value = key + COLUMNS * STRIDE;
    float *slopes = value + COLUMNS * STRIDE, *log_sums = slopes + ROWS * PITCH, *deltas = log_sums + ROWS;
    u8 *masks = (u8 *)(deltas + ROWS);
    Part part;
    if (!part.begin(a, ROWS, false)) return;
    const Head head(a, part, blockIdx.x, (float *)(masks + ROWS * 8));
    const u32 x = own_x(), y = own_y(), rows = min(part.queries - part.row, ROWS);
    const u32 begin = part.keys_from(a, part.row) / COLUMNS * COLUMNS, end = part.keys_to(a, part.row + rows - 1);
    head.load_queries<ROWS>(query, part.row, part.queries);
    head.load_dout<ROWS>(dout, part.row, part.queries);
    head.load_keys(key, begin, end);
    head.load_values(value, begin, end);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    // Four threads a row.
    const u32 row = threadIdx.x / 4;
    float delta = 0.0f;
    if (row < rows) {
        const float *out = a.out + head.single(part.row + row);
        for (u32 c = threadIdx.x % 4 * 4; c < head.d; c += 16) {
            const float4 o = *(const float4 *)(out + c), g = *(const float4 *)(dout + row * STRIDE + c);
            delta = fmaf(o.x, g.x, fmaf(o.y, g.y, fmaf(o.z, g.z, fmaf(o.w, g.w, delta))));
        }
    }
    delta += __shfl_xor_sync(ALL_LANES, delta, 1);
    delta += __shfl_xor_sync(ALL_LANES, delta, 2);
    if (threadIdx.x % 4 == 0) {
        const float log_sum = row < rows ? a.log_sums[head.sums(part.row + row)] : 0.0f;
        log_sums[row] = log_sum;
        deltas[row] = delta;
        if (row < rows) a.terms[head.sums(part.row + row)] = make_float2(log_sum, delta);
    }
    float sums[I][OWN] = {};
    for (u32 first = begin; first < end; first += COLUMNS) {
        head.draw_masks(masks, part.row, ROWS, first);
        wait_copies<0>();
        __syncthreads();
        float scores[I][4], products[I][4];
        multiply_rows(scores, query, key);
        multiply_rows(products, dout, value);
        const bool whole = head.all_seen(part.row, ROWS, first, COLUMNS);
#pragma unroll
        for (u32 i = 0; i < I; i++) {
            const u32 r = y + 16 * i;
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 q = part.row + r, k = first + x + 16 * j;
                const bool seen = whole || head.sees(q, k);
                const float p = seen ? exp_fast(head.score(scores[i][j], q, k) - log_sums[r]) : 0.0f;
                slopes[r * PITCH + x + 16 * j] = p * (products[i][j] * head.kept(masks, r, x + 16 * j) - deltas[r]);
            }
        }
        __syncthreads();
        if (first + COLUMNS < end) head.load_values(value, first + COLUMNS, end);
        add_weighted(sums, slopes, key);
        __syncthreads();
        if (first + COLUMNS < end) head.load_keys(key, first + COLUMNS, end);
        commit_copies();
    }
#pragma unroll
    for (u32 i = 0; i < I; i++) {
        const u32 r = part.row + y + 16 * i;
        if (r < part.queries) store_own(a.dquery + head.query(r), head.d, sums[i], a.scale);
    }
}

// After `backward_queries`, which leaves the terms: the gradients of keys and values, from all heads that share them. Rows of scores
// are keys here, columns queries.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) backward_keys(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(16) float shared[];
    constexpr u32 ROWS = BACKWARD_ROWS, I = ROWS / 16;
    float *query = shared, *dout = query + COLUMNS * STRIDE, *key = dout + COLUMNS * STRIDE, *value = key + ROWS * STRIDE;
    float *weights = value + ROWS * STRIDE, *log_sums = weights + ROWS * PITCH, *deltas = log_sums + COLUMNS;
    u8 *masks = (u8 *)(deltas + COLUMNS);
    Part part;
    if (!part.begin(a, ROWS, true)) return;
    const u32 x = own_x(), y = own_y(), rows = min(part.keys - part.row, ROWS), d = a.head_size;
    const u32 begin = part.queries_from(a, part.row) / COLUMNS * COLUMNS, end = part.queries_to(a, part.row + rows - 1);
    float dkey[I][OWN] = {}, dvalue[I][OWN] = {};
    for (u32 g = 0; g < a.group; g++) {
        const Head head(a, part, blockIdx.x * a.group + g, (float *)(masks + COLUMNS * 8));
        if (g == 0) {
            head.load_keys(key, part.row, part.keys);
            head.load_values(value, part.row, part.keys);
        }
        for (u32 first = begin; first < end; first += COLUMNS) {
            head.load_queries<COLUMNS>(query, first, part.queries);
            head.load_dout<COLUMNS>(dout, first, part.queries);
            commit_copies();
            head.draw_masks(masks, first, COLUMNS, part.row);
            if (threadIdx.x < COLUMNS) {
                const bool there = first + threadIdx.x < part.queries;
                const Terms terms = there ? a.terms[head.sums(first + threadIdx.x)] : make_float2(0.0f, 0.0f);
                log_sums[threadIdx.x] = terms.x;
                deltas[threadIdx.x] = terms.y;
            }
            wait_copies<0>();
            __syncthreads();
            float scores[I][4], slopes[I][4];
            multiply_rows(scores, key, query);
            multiply_rows(slopes, value, dout);
            const bool whole = head.all_seen(first, COLUMNS, part.row, ROWS);
#pragma unroll
            for (u32 i = 0; i < I; i++) {
                const u32 r = y + 16 * i;
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    const u32 c = x + 16 * j, q = first + c, k = part.row + r;
                    const bool seen = whole || head.sees(q, k);
                    const float p = seen ? exp_fast(head.score(scores[i][j], q, k) - log_sums[c]) : 0.0f;
                    const float kept = head.kept(masks, c, r);
                    slopes[i][j] = p * (slopes[i][j] * kept - deltas[c]);
                    weights[r * PITCH + c] = p * kept;
                }
            }
            __syncthreads();
            add_weighted(dvalue, weights, dout);
            __syncthreads();
#pragma unroll
            for (u32 i = 0; i < I; i++)
#pragma unroll
                for (u32 j = 0; j < 4; j++) weights[(y + 16 * i) * PITCH + x + 16 * j] = slopes[i][j];
            __syncthreads();
            add_weighted(dkey, weights, query);
            __syncthreads();
        }
    }
    wait_copies<0>();
#pragma unroll
    for (u32 i = 0; i < I; i++) {
        const u32 k = part.row + y + 16 * i;
        if (k >= part.keys) continue;
        store_own(a.dkey + (u64)(part.first_key + k) * a.key_stride + blockIdx.x * d, d, dkey[i], a.scale);
        store_own(a.dvalue + (u64)(part.first_key + k) * a.value_stride + blockIdx.x * d, d, dvalue[i], 1.0f);
    }
}
