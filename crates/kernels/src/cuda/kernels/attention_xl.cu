// What Transformer-XL's attention needs besides the kernels for a MATRIX of attention_general.cu and attention_plain.cu: queries with
// their biases, the matrix of what distances and segments add to scores, the ways back from its gradient, and the table of distances.
//
// A row of (q + w)·Rᵀ has what every distance adds for a query; the matrix has the part of it that belongs to the query's keys, moved to
// where they are. Heads are worked on some at a time: there, rows of the matrix and of products are those of these heads.
//
// Compiled for a storage type STORE. Legend: A heads, D = head size, H = A·D; P rows of the table of positions.

typedef STORE E;
typedef Described<E> Arguments;

constexpr u32 TILE = 128, WARPS = 8;

// As in xl.rs. Numbers of queries and keys may be absent.
struct Xl {
    const float *biases;            // 3·H: of contents, of positions, of segments.
    const float *segments;          // 2·H: the same segment, another.
    const E *query;                 // Without a bias.
    E *content, *position;          // Queries with their biases, T×H.
    float2 *by_segment;             // T×A: what each of the two adds, scaled; on the way back, the sums of their scores' gradients.
    E *products;                    // T × heads at a time × P; on the way back, gradients where they lie.
    E *matrix;                      // T × heads at a time × a.reach.
    const u32 *places;              // Where queries stand among their keys.
    const u32 *query_segments, *key_segments;
    const u32 *query_orders, *key_orders;
    u32 stride;                     // Of queries.
    u32 first;                      // The distance of the first position.
    float factor;                   // Of gradients.
};

constexpr u32 UNSEEN = 0xffffffffu;

// A warp for each head of each query.
extern "C" __global__ void __launch_bounds__(32 * WARPS) shift_queries(const __grid_constant__ Arguments a, const __grid_constant__ Xl x) {
    const u64 unit = (u64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (unit >= (u64)a.queries * a.heads) return;
    const u32 row = unit / a.heads, head = unit % a.heads, d = a.head_size, h = a.heads * d;
    float2 sums = make_float2(0.0f, 0.0f);
    for (u32 c = threadIdx.x % 32; c < d; c += 32) {
        const u32 column = head * d + c;
        const float q = widen(x.query[(u64)row * x.stride + column]);
        x.content[(u64)row * h + column] = narrow<E>(q + x.biases[column]);
        x.position[(u64)row * h + column] = narrow<E>(q + x.biases[h + column]);
        if (x.segments) {
            const float shifted = q + x.biases[2 * h + column];
            sums.x = fmaf(shifted, x.segments[column], sums.x);
            sums.y = fmaf(shifted, x.segments[h + column], sums.y);
        }
    }
    if (!x.segments) return;
    sums.x = warp_sum(sums.x), sums.y = warp_sum(sums.y);
    if (threadIdx.x % 32 == 0) x.by_segment[unit] = make_float2(sums.x * a.scale, sums.y * a.scale);
}

// A query of a part, and how its keys stand to it.
struct Query {
    u64 row;        // Among all queries.
    u64 unit;       // Its row in the matrix and in products.
    u32 own;        // Its own key.
    u32 first;      // The position of its first key.
    u32 order, segment;

    __device__ __forceinline__ Query(const Arguments &a, const Xl &x, const Part &part, u32 query)
        : row(part.first_query + query), unit(row * a.matrix_heads + blockIdx.x), own(query + part.shift),
          first(x.first - (x.places ? x.places[row] : own)), order(x.query_orders ? x.query_orders[row] : 0),
          segment(x.query_segments ? x.query_segments[row] : 0) {}

    __device__ __forceinline__ bool sees(const Xl &x, const Part &part, u32 key) const {
        if (!x.key_orders) return true;
        const u32 its = x.key_orders[part.first_key + key];
        return its < order || (key == own && its != UNSEEN);
    }
    __device__ __forceinline__ bool same_segment(const Xl &x, const Part &part, u32 key) const {
        return x.key_segments[part.first_key + key] == segment;
    }
};

// The matrix of some heads: what positions and segments add to scores, and −∞ where a query does not see a key. A warp a row, eight keys
// a lane.
extern "C" __global__ void __launch_bounds__(32 * WARPS) gather(const __grid_constant__ Arguments a, const __grid_constant__ Xl x) {
    Part part;
    if (!part.begin(a, TILE, false)) return;
    const u32 end = min(part.queries, part.row + TILE);
    for (u32 query = part.row + threadIdx.x / 32; query < end && part.keys > 0; query += WARPS) {
        const Query own(a, x, part, query);
        const E *from = x.products + own.unit * a.positions + own.first;
        E *to = x.matrix + own.unit * a.reach;
        float2 added = make_float2(0.0f, 0.0f);
        if (x.segments) added = x.by_segment[own.row * a.heads + a.first_head + blockIdx.x];
        for (u32 key = threadIdx.x % 32 * 8; key < part.keys; key += 32 * 8) {
            float y[8];
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                y[i] = 0.0f;
                if (key + i >= part.keys) continue;
                y[i] = widen(from[key + i]);
                if (x.segments) y[i] += own.same_segment(x, part, key + i) ? added.x : added.y;
                if (!own.sees(x, part, key + i)) y[i] = -INFINITE;
            }
            store8<true>(to, key, a.reach, y);
        }
    }
}

// From the matrix' gradient, times a factor: that of the products, zeros where no key is, and for each of the two segments the sum over
// its keys.
extern "C" __global__ void __launch_bounds__(32 * WARPS) spread(const __grid_constant__ Arguments a, const __grid_constant__ Xl x) {
    Part part;
    if (!part.begin(a, TILE, false)) return;
    const u32 end = min(part.queries, part.row + TILE);
    for (u32 query = part.row + threadIdx.x / 32; query < end; query += WARPS) {
        const Query own(a, x, part, query);
        const E *from = a.dscores + own.unit * a.reach;
        E *to = x.products + own.unit * a.positions;
        for (u32 position = threadIdx.x % 32 * 8; position < a.positions; position += 32 * 8) {
            float y[8];
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                // Before the first key it wraps around.
                const u32 key = position + i - own.first;
                y[i] = key < part.keys ? widen(from[key]) * x.factor : 0.0f;
            }
            store8<true>(to, position, a.positions, y);
        }
        if (!x.segments) continue;
        float2 sums = make_float2(0.0f, 0.0f);
        for (u32 key = threadIdx.x % 32; key < part.keys; key += 32) {
            const float slope = widen(from[key]);
            const bool same = own.same_segment(x, part, key);
            sums.x += same ? slope : 0.0f;
            sums.y += same ? 0.0f : slope;
        }
        sums.x = warp_sum(sums.x) * x.factor, sums.y = warp_sum(sums.y) * x.factor;
        if (threadIdx.x % 32 == 0) x.by_segment[own.row * a.heads + a.first_head + blockIdx.x] = sums;
    }
}

// The queries' gradients (rows `stride` apart) from those with the biases of contents and of positions (T×H) and the sums by segment;
// and over each chunk of rows the sums of the gradients of the three biases, and of the two segments: chunks × 3·H, chunks × 2·H. A
// thread a column.
extern "C" __global__ void __launch_bounds__(256)
    finish_queries(const __grid_constant__ Arguments a, const __grid_constant__ Xl x, const E *of_content, const E *of_position,
                   E *dquery, float *dbiases, float *dsegments, u32 chunk) {
    const u32 h = a.heads * a.head_size, column = blockIdx.x * 256 + threadIdx.x;
    if (column >= h) return;
    const u32 head = column / a.head_size, first = blockIdx.y * chunk, last = min(a.queries, first + chunk);
    const float bias = x.biases[2 * h + column];
    const float same = x.segments ? x.segments[column] : 0.0f, other = x.segments ? x.segments[h + column] : 0.0f;
    float sums[5] = {};
#pragma unroll 4
    for (u32 row = first; row < last; row++) {
        const float by_content = widen(of_content[(u64)row * h + column]), by_position = widen(of_position[(u64)row * h + column]);
        float by_segment = 0.0f;
        if (x.segments) {
            const float2 both = x.by_segment[(u64)row * a.heads + head];
            const float shifted = widen(x.query[(u64)row * x.stride + column]) + bias;
            by_segment = a.scale * fmaf(both.x, same, both.y * other);
            sums[3] = fmaf(both.x * a.scale, shifted, sums[3]);
            sums[4] = fmaf(both.y * a.scale, shifted, sums[4]);
        }
        sums[0] += by_content;
        sums[1] += by_position;
        sums[2] += by_segment;
        dquery[(u64)row * x.stride + column] = narrow<E>(by_content + by_position + by_segment);
    }
#pragma unroll
    for (u32 i = 0; i < 3; i++) dbiases[((u64)blockIdx.y * 3 + i) * h + column] = sums[i];
    if (!x.segments) return;
#pragma unroll
    for (u32 i = 0; i < 2; i++) dsegments[((u64)blockIdx.y * 2 + i) * h + column] = sums[3 + i];
}

// The sines, then the cosines, of the distances from `first` downwards, as on the CPU; distances beyond `most` count as that many. And
// what dropout counts each row by: which side, how far. A block a row.
extern "C" __global__ void __launch_bounds__(256) sinusoids(E *out, u32 *ids, u32 first, u32 most, u32 width) {
    const u32 row = blockIdx.x, half = width / 2;
    const int distance = (int)first - (int)row;
    const float clamped = (float)max(min(distance, (int)most), -(int)most);
    for (u32 t = threadIdx.x; t < half; t += blockDim.x) {
        const float frequency = 1.0f / (float)pow(10000.0, 2.0 * (double)t / (double)width);
        const double angle = (double)(clamped * frequency);
        out[(u64)row * width + t] = narrow<E>((float)sin(angle));
        out[(u64)row * width + half + t] = narrow<E>((float)cos(angle));
    }
    if (threadIdx.x == 0) ids[2 * row] = row > first, ids[2 * row + 1] = (u32)abs(distance);
}
