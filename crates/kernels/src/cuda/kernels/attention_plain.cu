// Attention by a description (described.cuh) for every head size up to 256, in f32 or bf16: a warp for each row, no tensor cores. The
// measure for the fast kernels, and what runs where those do not apply.
//
// Compiled for a storage type STORE, and with a BIAS or not; with one also for POSITIONS that contents are scored against, and for a
// MATRIX that is added to scores.

typedef STORE E;
typedef Described<E> Arguments;

constexpr u32 TILE = 128, WARPS = 8;
// Numbers of a row that a lane has: 32·i + lane.
constexpr int OWN = 8;

__device__ __forceinline__ void load_row(float (&x)[OWN], const E *row, u32 d) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const u32 c = 32 * i + threadIdx.x % 32;
        x[i] = c < d ? widen(row[c]) : 0.0f;
    }
}

__device__ __forceinline__ void store_row(E *row, u32 d, const float (&x)[OWN], float factor) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const u32 c = 32 * i + threadIdx.x % 32;
        if (c < d) row[c] = narrow<E>(x[i] * factor);
    }
}

__device__ __forceinline__ float dot(const float (&x)[OWN], const float (&y)[OWN]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; i++) sum = fmaf(x[i], y[i], sum);
    return warp_sum(sum);
}

// One head of the queries of a sequence.
struct Head : HeadOf<E, BIAS> {
    using HeadOf::HeadOf;

#ifdef MATRIX
    __device__ __forceinline__ float score(float product, u32 query, u32 key) const {
        return product * a.scale + widen(a.by_query[a.matrix_row(part.first_query + query, head) + key]);
    }
#endif
#ifdef POSITIONS
    __device__ __forceinline__ float score(float product, u32 query, u32 key) const {
        return product * a.scale + part.by_position(a, by_distance, head, query, key);
    }
#endif

    // The probability of a score; 0 where a query does not see the key, whatever else it sees.
    __device__ __forceinline__ float probability(float score, float log_sum) const {
        return score == -INFINITE ? 0.0f : expf(score - log_sum);
    }

    // 0 where the weight of a key for a query is dropped, else what it is multiplied by. `bits` are those of `group`.
    __device__ __forceinline__ float kept(u32 query, u32 key, uint4 &bits, u32 &group) const {
        if (dropout.threshold == 0) return 1.0f;
        if (group != key / 8) {
            group = key / 8;
            bits = draw(dropout, RowId{part.number, query}, part.keys, group);
        }
        const u32 word = key % 8 < 2 ? bits.x : key % 8 < 4 ? bits.y : key % 8 < 6 ? bits.z : bits.w;
        return (word >> 16 * (key % 2) & 0xffffu) >= dropout.threshold ? dropout.scale : 0.0f;
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) forward(const __grid_constant__ Arguments a) {
    extern __shared__ float by_distance[];
    Part part;
    if (!part.begin(a, TILE, false)) return;
    const Head head(a, part, a.begin_head() + blockIdx.x, by_distance);
    const u32 end = min(part.queries, part.row + TILE);
    for (u32 query = part.row + threadIdx.x / 32; query < end; query += WARPS) {
        float q[OWN], k[OWN], v[OWN], sums[OWN] = {};
        load_row(q, a.query + head.query(query), head.d);
        float most = -INFINITE, total = 0.0f;
        uint4 bits;
        u32 group = ~0u;
        const u32 keys = part.keys_to(a, query);
        for (u32 key = part.keys_from(a, query); key < keys; key++) {
            load_row(k, a.key + head.key(key), head.d);
            load_row(v, a.value + head.value(key), head.d);
            const float score = head.score(dot(q, k), query, key), raised = fmaxf(most, score);
            if (score == -INFINITE) continue;
            const float fade = expf(most - raised), p = expf(score - raised);
            const float weight = p * head.kept(query, key, bits, group);
            total = fmaf(total, fade, p);
            most = raised;
#pragma unroll
            for (int i = 0; i < OWN; i++) sums[i] = fmaf(weight, v[i], sums[i] * fade);
        }
        // A query that sees nothing gives zeros.
        store_row(a.result + head.single(query), head.d, sums, total == 0.0f ? 0.0f : 1.0f / total);
        if (threadIdx.x % 32 == 0) a.log_sums[head.sums(query)] = most + logf(total);
    }
}

// The queries' gradients, their terms for `backward_keys`, and the share of the bias' table.
extern "C" __global__ void __launch_bounds__(32 * WARPS) backward_queries(const __grid_constant__ Arguments a) {
    // By distance: the bias, then each warp's sums of its gradient.
    extern __shared__ float by_distance[];
    const u32 distances = 2 * a.reach + 1;
    float *sums_by_distance = by_distance + (1 + threadIdx.x / 32) * distances;
    Part part;
    if (!part.begin(a, TILE, false)) {
        if (BIAS && a.dbias) a.write_dbias(nullptr, 0, 0.0f);
        return;
    }
    const Head head(a, part, a.begin_head() + blockIdx.x, by_distance);
    if (BIAS && a.dbias) {
        for (u32 i = threadIdx.x % 32; i < distances; i += 32) sums_by_distance[i] = 0.0f;
        __syncwarp();
    }
    const u32 end = min(part.queries, part.row + TILE);
    for (u32 query = part.row + threadIdx.x / 32; query < end; query += WARPS) {
        float q[OWN], k[OWN], v[OWN], dout[OWN], sums[OWN] = {};
        load_row(q, a.query + head.query(query), head.d);
        load_row(dout, a.dout + head.single(query), head.d);
        load_row(v, a.out + head.single(query), head.d);
        const float delta = dot(v, dout), log_sum = a.log_sums[head.sums(query)];
        if (threadIdx.x % 32 == 0) a.terms[head.sums(query)] = make_float2(log_sum, delta);
        uint4 bits;
        u32 group = ~0u;
        const u32 keys = part.keys_to(a, query);
        for (u32 key = part.keys_from(a, query); key < keys; key++) {
            load_row(k, a.key + head.key(key), head.d);
            load_row(v, a.value + head.value(key), head.d);
            const float p = head.probability(head.score(dot(q, k), query, key), log_sum);
            const float slope = p * (dot(dout, v) * head.kept(query, key, bits, group) - delta);
#pragma unroll
            for (int i = 0; i < OWN; i++) sums[i] = fmaf(slope, k[i], sums[i]);
#ifdef MATRIX
            if (threadIdx.x % 32 == 0) a.dscores[a.matrix_row(part.first_query + query, head.head) + key] = narrow<E>(slope);
#endif
#ifdef POSITIONS
            const u64 row = (u64)(part.first_query + query) * a.heads + head.head;
            if (threadIdx.x % 32 == 0) a.dscores[row * a.reach + key] = narrow<E>(slope);
#endif
            if (BIAS && a.dbias && threadIdx.x % 32 == 0) {
                sums_by_distance[a.near((int)key - (int)query - part.shift)] += slope;
            }
        }
        store_row(a.dquery + head.query(query), head.d, sums, a.scale);
    }
    if (BIAS && a.dbias) a.write_dbias(by_distance + distances, WARPS, 1.0f);
}

// After `backward_queries`, which leaves the terms: the gradients of keys and values, from all heads that share them.
extern "C" __global__ void __launch_bounds__(32 * WARPS) backward_keys(const __grid_constant__ Arguments a) {
    extern __shared__ float by_distance[];
    Part part;
    if (!part.begin(a, TILE, true)) return;
    const u32 end = min(part.keys, part.row + TILE), lane_row = part.row + threadIdx.x / 32, d = a.head_size;
    // A warp has every eighth key. All warps change the head together, for its bias is theirs in common.
    for (u32 first = part.row; first < end; first += WARPS) {
        const u32 key = first + (lane_row - part.row);
        float q[OWN], k[OWN], v[OWN], dout[OWN], dkey[OWN] = {}, dvalue[OWN] = {};
        for (u32 g = 0; g < a.group; g++) {
            const Head head(a, part, a.begin_head() + blockIdx.x * a.group + g, by_distance);
            if (key >= end) continue;
            load_row(k, a.key + head.key(key), d);
            load_row(v, a.value + head.value(key), d);
            const u32 queries = part.queries_to(a, key);
            for (u32 query = part.queries_from(a, key); query < queries; query++) {
                load_row(q, a.query + head.query(query), d);
                load_row(dout, a.dout + head.single(query), d);
                uint4 bits;
                u32 group = ~0u;
                const float kept = head.kept(query, key, bits, group);
                const Terms terms = a.terms[head.sums(query)];
                const float p = head.probability(head.score(dot(q, k), query, key), terms.x);
                const float slope = p * (dot(dout, v) * kept - terms.y);
#ifdef POSITIONS
                const u64 row = (u64)(part.first_key + key) * a.heads + head.head;
                if (threadIdx.x % 32 == 0) a.dscores[row * a.reach + query] = narrow<E>(slope);
#endif
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    dkey[i] = fmaf(slope, q[i], dkey[i]);
                    dvalue[i] = fmaf(p * kept, dout[i], dvalue[i]);
                }
            }
        }
        if (key >= end) continue;
        const u32 column = (a.begin_head() + blockIdx.x) * d;
        store_row(a.dkey + (u64)(part.first_key + key) * a.key_stride + column, d, dkey, a.scale);
        store_row(a.dvalue + (u64)(part.first_key + key) * a.value_stride + column, d, dvalue, 1.0f);
    }
}

// Probabilities before dropout of one sequence, A×N×M, to where log-sums go otherwise. For people to look at, so
// without haste.
extern "C" __global__ void __launch_bounds__(32 * WARPS) probabilities(const __grid_constant__ Arguments a) {
    extern __shared__ float by_distance[];
    Part part;
    if (!part.begin(a, TILE, false)) return;
    const Head head(a, part, a.begin_head() + blockIdx.x, by_distance);
    const u32 end = min(part.queries, part.row + TILE);
    for (u32 query = part.row + threadIdx.x / 32; query < end; query += WARPS) {
        float q[OWN], k[OWN];
        load_row(q, a.query + head.query(query), head.d);
        float most = -INFINITE, total = 0.0f;
        const u32 from = part.keys_from(a, query), to = part.keys_to(a, query);
        float *row = a.log_sums + ((u64)head.head * part.queries + query) * part.keys;
        for (u32 key = from; key < to; key++) {
            load_row(k, a.key + head.key(key), head.d);
            const float score = head.score(dot(q, k), query, key), raised = fmaxf(most, score);
            if (threadIdx.x % 32 == key % 32) row[key] = score;
            if (score == -INFINITE) continue;
            total = fmaf(total, expf(most - raised), expf(score - raised));
            most = raised;
        }
        // Each lane reads what it wrote.
        for (u32 key = threadIdx.x % 32; key < part.keys; key += 32) {
            row[key] = key >= from && key < to ? expf(row[key] - most) / total : 0.0f;
        }
    }
}
