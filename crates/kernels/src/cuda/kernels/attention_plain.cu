// Attention over flat tokens for every head size up to 256, in f32 or bf16: a warp for each row, no tensor cores. The
// measure for the fast kernels of attention.cu, and what runs where those do not apply. Legend and table as there.

#include "common.cuh"

typedef STORE E;

struct Item {
    u32 first, tokens, number, block;
};

// As in attention.cu, where the types differ.
struct Arguments {
    const E *qkv;
    const E *out;
    const E *dout;
    E *result;
    float *log_sums;
    float *deltas;
    void *unused;
    const Item *items;
    u32 total, heads, head_size, causal, keys[14];
    Dropout dropout;
};

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

// One head of one sequence, and which of its rows belong to this block of threads.
struct Part {
    const Arguments &a;
    Item item;
    u32 head, h, d, begin, end;
    float scale;
    Dropout dropout;

    __device__ __forceinline__ Part(const Arguments &a) : a(a), item(a.items[blockIdx.y]), dropout(a.dropout) {
        head = blockIdx.x;
        d = a.head_size;
        h = a.heads * d;
        begin = min(item.tokens, item.block * TILE);
        end = min(item.tokens, begin + TILE);
        scale = 1.0f / sqrtf((float)d);
        dropout.begin();
        dropout.site |= (head + 1) << 16;
    }

    // Where query (0), key (1) or value (2) of a token begins.
    __device__ __forceinline__ u64 fused(u32 which, u32 token) const {
        return (u64)(item.first + token) * 3 * h + which * h + head * d;
    }
    __device__ __forceinline__ u64 single(u32 token) const { return (u64)(item.first + token) * h + head * d; }
    __device__ __forceinline__ u64 sums(u32 token) const { return (u64)head * a.total + item.first + token; }

    // 0 where the weight of a key for a query is dropped, else what it is multiplied by. `bits` are those of `group`.
    __device__ __forceinline__ float kept(u32 query, u32 key, uint4 &bits, u32 &group) const {
        if (dropout.threshold == 0) return 1.0f;
        if (group != key / 8) {
            group = key / 8;
            bits = draw(dropout, RowId{item.number, query}, item.tokens, group);
        }
        const u32 word = key % 8 < 2 ? bits.x : key % 8 < 4 ? bits.y : key % 8 < 6 ? bits.z : bits.w;
        return (word >> 16 * (key % 2) & 0xffffu) >= dropout.threshold ? dropout.scale : 0.0f;
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS) forward(const __grid_constant__ Arguments a) {
    const Part part(a);
    for (u32 query = part.begin + threadIdx.x / 32; query < part.end; query += WARPS) {
        float q[OWN], k[OWN], v[OWN], sums[OWN] = {};
        load_row(q, a.qkv + part.fused(0, query), part.d);
        float most = -INFINITE, total = 0.0f;
        uint4 bits;
        u32 group = ~0u;
        const u32 keys = a.causal ? query + 1 : part.item.tokens;
        for (u32 key = 0; key < keys; key++) {
            load_row(k, a.qkv + part.fused(1, key), part.d);
            load_row(v, a.qkv + part.fused(2, key), part.d);
            const float score = dot(q, k) * part.scale, raised = fmaxf(most, score);
            const float fade = expf(most - raised), p = expf(score - raised);
            const float weight = p * part.kept(query, key, bits, group);
            total = fmaf(total, fade, p);
            most = raised;
#pragma unroll
            for (int i = 0; i < OWN; i++) sums[i] = fmaf(weight, v[i], sums[i] * fade);
        }
        store_row(a.result + part.single(query), part.d, sums, 1.0f / total);
        if (threadIdx.x % 32 == 0) a.log_sums[part.sums(query)] = most + logf(total);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) backward_queries(const __grid_constant__ Arguments a) {
    const Part part(a);
    for (u32 query = part.begin + threadIdx.x / 32; query < part.end; query += WARPS) {
        float q[OWN], k[OWN], v[OWN], dout[OWN], sums[OWN] = {};
        load_row(q, a.qkv + part.fused(0, query), part.d);
        load_row(dout, a.dout + part.single(query), part.d);
        load_row(v, a.out + part.single(query), part.d);
        const float delta = dot(v, dout), log_sum = a.log_sums[part.sums(query)];
        if (threadIdx.x % 32 == 0) a.deltas[part.sums(query)] = delta;
        uint4 bits;
        u32 group = ~0u;
        const u32 keys = a.causal ? query + 1 : part.item.tokens;
        for (u32 key = 0; key < keys; key++) {
            load_row(k, a.qkv + part.fused(1, key), part.d);
            load_row(v, a.qkv + part.fused(2, key), part.d);
            const float p = expf(dot(q, k) * part.scale - log_sum);
            const float slope = p * (dot(dout, v) * part.kept(query, key, bits, group) - delta);
#pragma unroll
            for (int i = 0; i < OWN; i++) sums[i] = fmaf(slope, k[i], sums[i]);
        }
        store_row(a.result + part.fused(0, query), part.d, sums, part.scale);
    }
}

// After `backward_queries`, which leaves the deltas.
extern "C" __global__ void __launch_bounds__(32 * WARPS) backward_keys(const __grid_constant__ Arguments a) {
    const Part part(a);
    for (u32 key = part.begin + threadIdx.x / 32; key < part.end; key += WARPS) {
        float q[OWN], k[OWN], v[OWN], dout[OWN], dkey[OWN] = {}, dvalue[OWN] = {};
        load_row(k, a.qkv + part.fused(1, key), part.d);
        load_row(v, a.qkv + part.fused(2, key), part.d);
        for (u32 query = a.causal ? key : 0; query < part.item.tokens; query++) {
            load_row(q, a.qkv + part.fused(0, query), part.d);
            load_row(dout, a.dout + part.single(query), part.d);
            uint4 bits;
            u32 group = ~0u;
            const float kept = part.kept(query, key, bits, group);
            const float p = expf(dot(q, k) * part.scale - a.log_sums[part.sums(query)]);
            const float slope = p * (dot(dout, v) * kept - a.deltas[part.sums(query)]);
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                dkey[i] = fmaf(slope, q[i], dkey[i]);
                dvalue[i] = fmaf(p * kept, dout[i], dvalue[i]);
            }
        }
        store_row(a.result + part.fused(1, key), part.d, dkey, part.scale);
        store_row(a.result + part.fused(2, key), part.d, dvalue, 1.0f);
    }
}

// Probabilities before dropout of one sequence, A×S×S, to where log-sums go otherwise. For people to look at, so
// without haste.
extern "C" __global__ void __launch_bounds__(32 * WARPS) probabilities(const __grid_constant__ Arguments a) {
    const Part part(a);
    const u32 s = part.item.tokens;
    for (u32 query = part.begin + threadIdx.x / 32; query < part.end; query += WARPS) {
        float q[OWN], k[OWN];
        load_row(q, a.qkv + part.fused(0, query), part.d);
        float most = -INFINITE, total = 0.0f;
        const u32 keys = a.causal ? query + 1 : s;
        float *row = a.log_sums + ((u64)part.head * s + query) * s;
        for (u32 key = 0; key < s; key++) {
            load_row(k, a.qkv + part.fused(1, key), part.d);
            const float score = key < keys ? dot(q, k) * part.scale : -INFINITE, raised = fmaxf(most, score);
            total = fmaf(total, expf(most - raised), expf(score - raised));
            most = raised;
            if (threadIdx.x % 32 == key % 32) row[key] = score;
        }
        // Each lane reads what it wrote.
        for (u32 key = threadIdx.x % 32; key < s; key += 32) row[key] = expf(row[key] - most) / total;
    }
}
