// Attention to keys and values in pages, for decoding: appending new ones, and a few queries of each sequence to all of its keys.
// Forward only. For many queries of a sequence, attention_general.cu and attention_plain.cu read pages too.
//
// Compiled for a storage type STORE and EVEN heads or not: a multiple of eight numbers, at multiples of 16 bytes.

typedef STORE E;
typedef Described<E> Arguments;

constexpr u32 WARPS = 8;

// Keys of a group that are under way at a time: there are few blocks, and each would wait for every key.
constexpr u32 AHEAD = 4;

// Copies the keys (blockIdx.y = 0) or values of new tokens to the last places of their sequences, a block for each token.
extern "C" __global__ void __launch_bounds__(128)
    append(const E *from, u64 stride, u32 width, const u32 *offsets, u32 sequences, const u32 *pages, const u32 *page_offsets,
           const u32 *lengths, u32 page_size, E *keys, E *values) {
    const u32 token = blockIdx.x;
    if (token >= offsets[sequences]) return;
    // The last sequence that begins at or before the token. Where each has one new token, its number is the token's.
    u32 low = 0, high = sequences;
    if (token < sequences && offsets[token] == token) low = token, high = token + 1;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (offsets[middle] <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    // What fills a step up has no tokens in the cache, not even its own.
    if (lengths[low] < offsets[low + 1] - offsets[low]) return;
    const u32 place = lengths[low] - (offsets[low + 1] - token);
    const u64 row = (u64)pages[page_offsets[low] + place / page_size] * page_size + place % page_size;
    const E *source = from + token * stride + blockIdx.y * width;
    E *target = (blockIdx.y ? values : keys) + row * width;
    for (u32 c = threadIdx.x * 8; c < width; c += 128 * 8) {
        float x[8];
        load8<EVEN>(source, c, width, x);
        store8<EVEN>(target, c, width, x);
    }
}

// What a group of lanes has seen of a row's softmax.
struct Softmax {
    float most, total, sums[8];

    __device__ __forceinline__ Softmax() : most(-INFINITE), total(0.0f), sums{} {}
    __device__ __forceinline__ void add(float score, const float (&value)[8]) {
        const float raised = fmaxf(most, score), fade = exp_fast(most - raised), p = exp_fast(score - raised);
        total = fmaf(total, fade, p);
#pragma unroll
        for (int i = 0; i < 8; i++) sums[i] = fmaf(p, value[i], sums[i] * fade);
        most = raised;
    }
    // Takes in what others have seen.
    __device__ __forceinline__ void join(float other_most, float other_total, const float (&other)[8]) {
        const float raised = fmaxf(most, other_most);
        // Where nobody has seen anything, there is nothing that could fade.
        const float a = most == raised ? 1.0f : exp_fast(most - raised);
        const float b = other_most == raised ? 1.0f : exp_fast(other_most - raised);
        total = total * a + other_total * b;
#pragma unroll
        for (int i = 0; i < 8; i++) sums[i] = sums[i] * a + other[i] * b;
        most = raised;
    }
};

// A block has a head of a sequence with few queries; a group of lanes, of eight columns each, has every so many keys. The groups' sums
// are joined in a fixed order, which depends on the head size alone.
extern "C" __global__ void __launch_bounds__(32 * WARPS) decode(const __grid_constant__ Arguments a) {
    extern __shared__ float by_distance[];
    __shared__ float space[WARPS][2 + 256];
    Part part;
    if (!part.begin(a, 128, false)) return;
    const u32 head = blockIdx.x, d = a.head_size, width = a.heads * d;
    float slope = 0.0f;
    if (a.bias_kind != NO_BIAS) {
        a.fill_bias(by_distance, slope, head, 1.0f);
        __syncthreads();
    }
    u32 lanes = 1;
    while (lanes * 8 < d) lanes *= 2;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane % lanes * 8;
    const u32 groups = WARPS * 32 / lanes, group = threadIdx.x / lanes;
    const E *keys = a.key + head / a.group * d, *values = a.value + head / a.group * d;
    const u32 last = min(part.row + 128, part.queries);
    for (u32 query = part.row; query < last; query++) {
        const u64 row = part.first_query + query;
        float q[8] = {};
        if (column < d) load8<EVEN>(a.query + row * a.query_stride + head * d, column, d, q);
        const u32 from = part.keys_from(a, query), to = part.keys_to(a, query);
        Softmax softmax;
        for (u32 first = from; first < to; first += AHEAD * groups) {
            Raw<E> some_keys[AHEAD] = {}, some_values[AHEAD] = {};
#pragma unroll
            for (u32 round = 0; round < AHEAD; round++) {
                const u32 key = first + round * groups + group;
                if (key >= to || column >= d) continue;
                const u64 at = part.key_row(a, key);
                some_keys[round] = load8_raw<EVEN>(keys + at * a.key_stride, column, d);
                some_values[round] = load8_raw<EVEN>(values + at * a.value_stride, column, d);
            }
            // All lanes go as many rounds, for they exchange their products.
#pragma unroll
            for (u32 round = 0; round < AHEAD; round++) {
                if (first + round * groups >= to) break;
                const u32 key = first + round * groups + group;
                float k[8], v[8], score = 0.0f;
                unpack(some_keys[round], k);
#pragma unroll
                for (int i = 0; i < 8; i++) score = fmaf(q[i], k[i], score);
                for (u32 offset = lanes / 2; offset > 0; offset /= 2) score += __shfl_xor_sync(ALL_LANES, score, offset);
                if (key >= to) continue;
                score *= a.scale;
                if (a.bias_kind != NO_BIAS) {
                    const int distance = (int)key - (int)query - part.shift;
                    score += fmaf(slope, (float)abs(distance), by_distance[a.near(distance)]);
                }
                unpack(some_values[round], v);
                softmax.add(score, v);
            }
        }
        for (u32 offset = lanes; offset < 32; offset *= 2) {
            float other[8];
#pragma unroll
            for (int i = 0; i < 8; i++) other[i] = __shfl_xor_sync(ALL_LANES, softmax.sums[i], offset);
            const float most = __shfl_xor_sync(ALL_LANES, softmax.most, offset);
            const float total = __shfl_xor_sync(ALL_LANES, softmax.total, offset);
            softmax.join(most, total, other);
        }
        if (lane < lanes) {
            if (lane == 0) space[warp][0] = softmax.most, space[warp][1] = softmax.total;
#pragma unroll
            for (int i = 0; i < 8; i++) space[warp][2 + column + i] = softmax.sums[i];
        }
        __syncthreads();
        if (threadIdx.x < lanes && column < d) {
            Softmax all;
            for (u32 w = 0; w < WARPS; w++) {
                float other[8];
#pragma unroll
                for (int i = 0; i < 8; i++) other[i] = space[w][2 + column + i];
                all.join(space[w][0], space[w][1], other);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) all.sums[i] = all.total == 0.0f ? 0.0f : all.sums[i] / all.total;
            store8<EVEN>(a.result + row * width + head * d, column, d, all.sums);
        }
        __syncthreads();
    }
}
