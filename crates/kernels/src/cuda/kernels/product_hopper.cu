// Matrix products with an activation, or its derivative, on the way out; for Hopper (sm_90a), bf16. Compiled with an ACTIVATION for
// the gates of gated layers, and without one for BERT's erf GELU.
//
// A block computes one tile after the other, 128 rows by 256 columns of products. Five groups of four warps:
// - one thread of the first has the bulk copy engine fetch 64 columns of the left factor and 64 rows of the right one after
//   the other into a ring of shared memory;
// - the last two multiply, 64×256 numbers each, and leave what comes out in shared memory, rounded to bf16;
// - the other two take it from there through the activation to memory, while the next tile is multiplied already.
//
// A gated layer's tile has the same 128 columns of both halves side by side. A gate's gradient has tiles of 256 rows by 128 columns, for
// its layers have any multiple of 128 columns: ModernBERT's 1,152 are no multiple of 256.
//
// The multiplying groups hand over one half of their tile while the tensor cores are still busy with the other. Tried on
// an H200 without a gain: clusters of two blocks that share the right factor, the next rows fetched into the cache ahead.
//
// Stands after wgmma.cuh and pipeline.cuh.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr u32 DEPTH = 64, STAGES = 3;
// Registers of a thread. Five groups begin with 96 each; the first one's 24 and twice each of these are not more.
constexpr u32 FINISH_REGISTERS = 64, MULTIPLY_REGISTERS = 160;
constexpr u32 THREADS = 5 * GROUP_THREADS, MULTIPLYING_WARPS = 8;
// Rows of 128 bytes are what copies and wgmma both call the 128-byte swizzle.
constexpr u32 LINE = DEPTH * sizeof(bf16);

// ACROSS: the right factor is k×n, and the way out a gradient's; otherwise it is n×k, or 2n×k where it is GATED.
template <bool ACROSS_, bool GATED_> struct Form {
    static constexpr bool ACROSS = ACROSS_, GATED = GATED_;
    // Each multiplying group has two parts of 64×128 products: above each other where the tile is tall, else side by side.
    static constexpr bool TALL = GATED && ACROSS;
    static constexpr u32 ROWS = TALL ? 256 : 128, COLUMNS = TALL ? 128 : 256;
    // Columns of the result that a tile is for.
    static constexpr u32 WIDTH = GATED ? 128 : 256;
    static constexpr u32 LEFT_BYTES = ROWS * LINE, TILE_ROW = COLUMNS * sizeof(bf16);
};
typedef Form<false, false> Gelu;
typedef Form<true, false> GeluGradient;
typedef Form<false, true> Gate;
typedef Form<true, true> GateGradient;

// What lies where in shared memory: the ring, the tile that is handed over, sums of each warp's columns, barriers.
constexpr u32 STAGE_BYTES = (128 + 256) * LINE, TILE_BYTES = 128 * 256 * sizeof(bf16), SUMS = 256;
constexpr u32 TILE_AT = STAGES * STAGE_BYTES, SUMS_AT = TILE_AT + TILE_BYTES;
constexpr u32 BARRIERS_AT = SUMS_AT + 8 * SUMS * sizeof(float);

// How the copy engine is told of a matrix; made by the driver.
struct alignas(64) Map {
    u64 words[16];
};

// A row of the result is n numbers, of a gate's gradient 2n. What is kept for the backward, a derivative or both halves of a gated
// product, may be absent in the forward direction; a gate's bias (2n) may be absent, too.
struct Arguments {
    const bf16 *bias;
    bf16 *kept, *out;
    float *sums;
    u32 m, n, k;
};

// --- barriers ---------------------------------------------------------------------------------------------------------

// Arrives, and has the barrier wait for so many bytes of copies too.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Numbers of the groups' barriers, one for each half of the tile: it is there, there is room for it, sums are there.
enum { HALF_THERE = 1, HALF_ROOM = 3, SUMS_THERE = 5 };

__device__ __forceinline__ u32 full(u32 memory, u32 stage) { return memory + BARRIERS_AT + 8 * stage; }
__device__ __forceinline__ u32 empty(u32 memory, u32 stage) { return memory + BARRIERS_AT + 8 * (STAGES + stage); }

// --- copies and factors -----------------------------------------------------------------------------------------------

// A box of the matrix from (column, row) on.
__device__ __forceinline__ void copy_box(u32 to, const Map &map, u32 barrier, u32 column, u32 row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(&map), "r"(barrier), "r"(column), "r"(row)
                 : "memory");
}

// How wgmma is told of a factor: its address, the distance of 64 columns where rows are what is summed over, and the
// distance of eight rows, all in units of 16 bytes, and the swizzle.
__device__ __forceinline__ u64 factor_at(u32 address) {
    constexpr u64 COLUMNS_64 = DEPTH * LINE >> 4, ROWS_8 = 8 * LINE >> 4, SWIZZLE_128 = 1;
    return (u64)(address >> 4 & 0x3fff) | COLUMNS_64 << 16 | ROWS_8 << 32 | SWIZZLE_128 << 62;
}

// --- the roles --------------------------------------------------------------------------------------------------------

// The tiles of a block. With GELU they always have the same columns, whose sums stay in registers; a gate's are dealt in turn to all
// blocks, which leaves none without work for long.
template <class F> struct Tiles {
    u32 column, row, step, end;
    __device__ __forceinline__ Tiles(const Arguments &a) {
        const u32 wide = a.n / F::WIDTH;
        if (F::GATED) {
            // Here steps and the end are in tiles, and `step` is the one that comes next.
            end = (a.m + F::ROWS - 1) / F::ROWS * wide;
            step = blockIdx.x;
            find(a);
        } else {
            column = blockIdx.x % wide * F::WIDTH;
            row = blockIdx.x / wide * F::ROWS;
            step = gridDim.x / wide * F::ROWS;
            end = a.m;
        }
    }
    __device__ __forceinline__ void find(const Arguments &a) {
        const u32 wide = a.n / F::WIDTH;
        column = step % wide * F::WIDTH;
        row = step / wide * F::ROWS;
    }
    __device__ __forceinline__ bool done() const { return (F::GATED ? step : row) >= end; }
    // How many there are; at least one.
    __device__ __forceinline__ u32 count() const {
        const u32 stride = F::GATED ? gridDim.x : step;
        return (end - (F::GATED ? step : row) + stride - 1) / stride;
    }
    __device__ __forceinline__ void next(const Arguments &a) {
        if (F::GATED) {
            step += gridDim.x;
            find(a);
        } else {
            row += step;
        }
    }
};

template <class F>
__device__ __forceinline__ void fetch(const Map &left, const Map &right, const Arguments &a, u32 memory) {
    Ring<STAGES> ring;
    for (Tiles<F> tiles(a); !tiles.done(); tiles.next(a)) {
        for (u32 k = 0; k < a.k; k += DEPTH, ring.next()) {
            const u32 to = memory + ring.stage * STAGE_BYTES, barrier = full(memory, ring.stage);
            barrier_wait(empty(memory, ring.stage), ring.parity ^ 1);
            barrier_expect(barrier, STAGE_BYTES);
            copy_box(to, left, barrier, k, tiles.row);
            if (F::ACROSS) {
#pragma unroll
                for (u32 c = 0; c < F::COLUMNS; c += DEPTH) {
                    copy_box(to + F::LEFT_BYTES + c * LINE, right, barrier, tiles.column + c, k);
                }
            } else {
                copy_box(to + F::LEFT_BYTES, right, barrier, k, tiles.column);
                // The other half of a gated layer.
                if (F::GATED) copy_box(to + F::LEFT_BYTES + F::WIDTH * LINE, right, barrier, k, a.n + tiles.column);
            }
        }
    }
}

// A part of 64×128 numbers of the tile, to shared memory. Pieces of 16 bytes are mixed so that no two fall on one bank.
template <class F, u32 PART> __device__ __forceinline__ void hand_over(const float (&d)[16][4], u32 row_address, u32 mixed) {
    const u32 odd = threadIdx.x / 16 % 2;
    constexpr u32 BELOW = F::TALL ? PART * 64 * F::TILE_ROW : 0, ASIDE = F::TALL ? 0 : PART * 16;
#pragma unroll
    for (u32 c = 0; c < 16; c += 2) {
        const u32 address = row_address + ((ASIDE + c + odd ^ mixed) << 4) + BELOW;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                     "r"(pack(d[c][0], d[c][1])), "r"(pack(d[c][2], d[c][3])), "r"(pack(d[c + 1][0], d[c + 1][1])),
                     "r"(pack(d[c + 1][2], d[c + 1][3]))
                     : "memory");
    }
}

// A part of 64×128 products, by a stage of the ring. `add`: to what is there.
template <class F, u32 PART>
__device__ __forceinline__ void multiply_part(float (&d)[16][4], u32 stage, u32 half, bool add) {
    // From one 16 of what is summed over to the next.
    constexpr u32 LEFT_STEP = 32 >> 4, RIGHT_STEP = F::ACROSS ? 16 * LINE >> 4 : 32 >> 4;
    const u32 row = F::TALL ? half * 128 + PART * 64 : half * 64, column = F::TALL ? 0 : PART * 128;
    const u64 left = factor_at(stage + row * LINE), right = factor_at(stage + F::LEFT_BYTES + column * LINE);
    group_begin();
#pragma unroll
    for (u32 i = 0; i < DEPTH / 16; i++) group_multiply<0, F::ACROSS>(d, left + i * LEFT_STEP, right + i * RIGHT_STEP, add || i > 0);
    group_commit();
}

// `half`: which half of the tile's rows.
template <class F> __device__ __forceinline__ void multiply_tiles(const Arguments &a, u32 memory, u32 half) {
    const u32 lane = threadIdx.x % 32, row = half * (F::ROWS / 2) + threadIdx.x / 32 % 4 * 16 + lane % 16;
    const u32 to = memory + TILE_AT + row * F::TILE_ROW;
    float first[16][4], second[16][4];
    Ring<STAGES> ring;
    auto release = [&](u32 stage) {
        if (lane == 0) barrier_arrive(empty(memory, stage));
    };
    u32 tiles = Tiles<F>(a).count();
    barrier_wait(full(memory, 0), 0);
    multiply_part<F, 0>(first, memory, half, false);
    multiply_part<F, 1>(second, memory, half, false);
    while (true) {
        u32 last = ring.stage;
        ring.next();
        for (u32 k = DEPTH; k < a.k; k += DEPTH, ring.next()) {
            const u32 stage = memory + ring.stage * STAGE_BYTES;
            barrier_wait(full(memory, ring.stage), ring.parity);
            multiply_part<F, 0>(first, stage, half, true);
            multiply_part<F, 1>(second, stage, half, true);
            group_wait<2>();
            release(last);
            last = ring.stage;
        }
        group_wait<1>();
        groups_wait(HALF_ROOM + half, 2 * GROUP_THREADS);
        hand_over<F, 0>(first, to, row % 8);
        group_wait<0>();
        release(last);
        if (--tiles == 0) break;
        const u32 stage = memory + ring.stage * STAGE_BYTES;
        barrier_wait(full(memory, ring.stage), ring.parity);
        multiply_part<F, 0>(first, stage, half, false);
        hand_over<F, 1>(second, to, row % 8);
        groups_arrive(HALF_THERE + half, 2 * GROUP_THREADS);
        multiply_part<F, 1>(second, stage, half, false);
    }
    hand_over<F, 1>(second, to, row % 8);
    groups_arrive(HALF_THERE + half, 2 * GROUP_THREADS);
}

__device__ __forceinline__ Raw<bf16> load_shared(u32 address) {
    Raw<bf16> r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.v.x), "=r"(r.v.y), "=r"(r.v.z), "=r"(r.v.w)
                 : "r"(address)
                 : "memory");
    return r;
}

#ifndef ACTIVATION

// A warp takes 16 rows of the tile, a lane eight columns of each.
struct Rows {
    u32 lane, local, from;
    __device__ __forceinline__ Rows(u32 memory, u32 half) {
        lane = threadIdx.x % 32;
        local = half * 64 + threadIdx.x / 32 % 4 * 16;
        from = memory + TILE_AT + local * Gelu::TILE_ROW;
    }
    __device__ __forceinline__ Raw<bf16> load(u32 i) const {
        return load_shared(from + i * Gelu::TILE_ROW + ((lane ^ i % 8) << 4));
    }
};

// out = gelu(tile + bias), and its derivative there.
template <bool SLOPE> __device__ __forceinline__ void finish_gelu(const Arguments &a, u32 memory, u32 half) {
    const Rows rows(memory, half);
    Tiles<Gelu> tiles(a);
    const u32 column = tiles.column + 8 * rows.lane;
    float bias[8];
    unpack(load_raw(a.bias + column), bias);
    for (; !tiles.done(); tiles.next(a)) {
        groups_arrive(HALF_ROOM + half, 2 * GROUP_THREADS);
        groups_wait(HALF_THERE + half, 2 * GROUP_THREADS);
        const u32 row = tiles.row + rows.local;
        const u64 to = (u64)row * a.n + column;
#pragma unroll 2
        for (u32 i = 0; i < 16; i++) {
            float x[8], slope[8];
            unpack(rows.load(i), x);
#pragma unroll
            for (int c = 0; c < 8; c++) {
                x[c] += bias[c];
                if (SLOPE) slope[c] = gelu::slope(x[c]);
                x[c] = gelu::value(x[c]);
            }
            Raw<bf16> y, dy;
            repack(x, y);
            if (SLOPE) repack(slope, dy);
            if (row + i < a.m) {
                store_raw(a.out + to + i * a.n, y);
                if (SLOPE) store_raw(a.kept + to + i * a.n, dy);
            }
        }
    }
}

// out = tile times the derivative that was kept, and the sums of its columns.
__device__ __forceinline__ void finish_gradient(const Arguments &a, u32 memory, u32 half) {
    constexpr u32 AHEAD = 4;
    const Rows rows(memory, half);
    Tiles<GeluGradient> tiles(a);
    const u32 column = tiles.column + 8 * rows.lane, number = tiles.row / GeluGradient::ROWS * 2 + half;
    // What was kept is on its way some rows ahead; beyond the end the last row is as good as any.
    Raw<bf16> kept[AHEAD];
    auto fetch_slope = [&](u32 row) { return load_raw(a.kept + (u64)min(row, a.m - 1) * a.n + column); };
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) kept[i] = fetch_slope(tiles.row + rows.local + i);
    float sum[8] = {};
    for (; !tiles.done(); tiles.next(a)) {
        groups_arrive(HALF_ROOM + half, 2 * GROUP_THREADS);
        groups_wait(HALF_THERE + half, 2 * GROUP_THREADS);
        for (u32 eight = 0; eight < 16; eight += 8) {
            const u32 row = tiles.row + rows.local + eight, next = eight == 0 ? row + 8 : row - 8 + tiles.step;
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                float slope[8], d[8];
                unpack(kept[i % AHEAD], slope);
                unpack(rows.load(eight + i), d);
                kept[i % AHEAD] = fetch_slope(i + AHEAD < 8 ? row + i + AHEAD : next + i + AHEAD - 8);
#pragma unroll
                for (int c = 0; c < 8; c++) sum[c] += d[c] *= slope[c];
                Raw<bf16> dz;
                repack(d, dz);
                if (row + i < a.m) store_raw(a.out + (u64)(row + i) * a.n + column, dz);
            }
        }
    }
    // The four warps' sums of each column.
    extern __shared__ __align__(1024) unsigned char shared[];
    float *space = (float *)(shared + SUMS_AT) + half * 4 * SUMS;
    const u32 thread = threadIdx.x % GROUP_THREADS;
#pragma unroll
    for (int c = 0; c < 8; c++) space[thread / 32 * SUMS + 8 * rows.lane + c] = sum[c];
    groups_wait(SUMS_THERE + half, GROUP_THREADS);
    for (u32 c = thread; c < SUMS; c += GROUP_THREADS) {
        float total = 0.0f;
        for (u32 w = 0; w < 4; w++) total += space[w * SUMS + c];
        a.sums[(u64)number * a.n + tiles.column + c] = total;
    }
}

__device__ __forceinline__ void finish(Gelu, const Arguments &a, u32 memory, u32 half) {
    if (a.kept) {
        finish_gelu<true>(a, memory, half);
    } else {
        finish_gelu<false>(a, memory, half);
    }
}
__device__ __forceinline__ void finish(GeluGradient, const Arguments &a, u32 memory, u32 half) {
    finish_gradient(a, memory, half);
}

#else

// A half warp takes a row of the tile, a lane eight columns: of the gate, and of what it gates. `i` counts pairs of rows.
template <class F> struct Pairs {
    u32 local, piece, from;
    __device__ __forceinline__ Pairs(u32 memory, u32 half) {
        const u32 lane = threadIdx.x % 32;
        local = half * (F::ROWS / 2) + threadIdx.x / 32 % 4 * (F::ROWS / 8) + lane / 16;
        piece = lane % 16;
        from = memory + TILE_AT + local * F::TILE_ROW;
    }
    static constexpr u32 COUNT = F::ROWS / 16;
    __device__ __forceinline__ Raw<bf16> load(u32 i, u32 aside) const {
        return load_shared(from + 2 * i * F::TILE_ROW + ((aside + piece ^ (local + 2 * i) % 8) << 4));
    }
};

// Adds the bias of both halves at eight columns.
__device__ __forceinline__ void add_bias(const Arguments &a, u32 column, float (&gate)[8], float (&value)[8]) {
    float bias[8];
    unpack(load_raw(a.bias + column), bias);
#pragma unroll
    for (int c = 0; c < 8; c++) gate[c] += bias[c];
    unpack(load_raw(a.bias + a.n + column), bias);
#pragma unroll
    for (int c = 0; c < 8; c++) value[c] += bias[c];
}

// out = activation(gate + bias) ∘ (value + bias); what is kept are the products without the bias.
template <bool KEEP, bool BIAS> __device__ __forceinline__ void finish_gate(const Arguments &a, u32 memory, u32 half) {
    const Pairs<Gate> pairs(memory, half);
    for (Tiles<Gate> tiles(a); !tiles.done(); tiles.next(a)) {
        groups_arrive(HALF_ROOM + half, 2 * GROUP_THREADS);
        groups_wait(HALF_THERE + half, 2 * GROUP_THREADS);
        const u32 first = tiles.row + pairs.local, column = tiles.column + 8 * pairs.piece;
#pragma unroll 2
        for (u32 i = 0; i < pairs.COUNT; i++) {
            const u32 row = first + 2 * i;
            const Raw<bf16> raw_gate = pairs.load(i, 0), raw_value = pairs.load(i, 16);
            if (KEEP && row < a.m) {
                bf16 *kept = a.kept + (u64)row * 2 * a.n + column;
                store_raw(kept, raw_gate);
                store_raw(kept + a.n, raw_value);
            }
            float gate[8], value[8];
            unpack(raw_gate, gate);
            unpack(raw_value, value);
            if (BIAS) add_bias(a, column, gate, value);
#pragma unroll
            for (int c = 0; c < 8; c++) value[c] *= ACTIVATION::both(gate[c]).x;
            Raw<bf16> y;
            repack(value, y);
            if (row < a.m) store_raw(a.out + (u64)row * a.n + column, y);
        }
    }
}

// The gradients of both halves: the tile times value ∘ activation′(gate), and times activation(gate). They may take the place of what
// was kept: a thread reads each number before it, and nobody else, writes there.
template <bool BIAS> __device__ __forceinline__ void finish_gate_gradient(const Arguments &a, u32 memory, u32 half) {
    constexpr u32 AHEAD = 2;
    const Pairs<GateGradient> pairs(memory, half);
    Tiles<GateGradient> tiles(a);
    // What was kept is on its way some rows ahead; beyond the end the last row is as good as any.
    Raw<bf16> gates[AHEAD], values[AHEAD];
    auto place = [&](u32 row, u32 column) { return (u64)row * 2 * a.n + column + 8 * pairs.piece; };
    auto fetch_kept = [&](u32 row, u32 column, u32 i) {
        const bf16 *kept = a.kept + place(min(row + pairs.local, a.m - 1), column);
        gates[i] = load_raw(kept);
        values[i] = load_raw(kept + a.n);
    };
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) fetch_kept(tiles.row + 2 * i, tiles.column, i);
    while (!tiles.done()) {
        const u32 row = tiles.row, column = tiles.column;
        tiles.next(a);
        groups_arrive(HALF_ROOM + half, 2 * GROUP_THREADS);
        groups_wait(HALF_THERE + half, 2 * GROUP_THREADS);
        for (u32 i = 0; i < pairs.COUNT; i += AHEAD) {
            // Whose rows come next: those of this tile, or the first of the next one.
            const bool within = i + AHEAD < pairs.COUNT;
            const u32 next_row = within ? row + 2 * (i + AHEAD) : tiles.row, next_column = within ? column : tiles.column;
#pragma unroll
            for (u32 j = 0; j < AHEAD; j++) {
                float gate[8], value[8], d[8];
                unpack(gates[j], gate);
                unpack(values[j], value);
                unpack(pairs.load(i + j, 0), d);
                fetch_kept(next_row + 2 * j, next_column, j);
                if (BIAS) add_bias(a, column + 8 * pairs.piece, gate, value);
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    const float2 both = ACTIVATION::both(gate[c]);
                    gate[c] = d[c] * value[c] * both.y;
                    value[c] = d[c] * both.x;
                }
                Raw<bf16> dgate, dvalue;
                repack(gate, dgate);
                repack(value, dvalue);
                const u32 to = row + 2 * (i + j) + pairs.local;
                if (to < a.m) {
                    bf16 *out = a.out + place(to, column);
                    store_raw(out, dgate);
                    store_raw(out + a.n, dvalue);
                }
            }
        }
    }
}

__device__ __forceinline__ void finish(Gate, const Arguments &a, u32 memory, u32 half) {
    if (a.kept && a.bias) {
        finish_gate<true, true>(a, memory, half);
    } else if (a.kept) {
        finish_gate<true, false>(a, memory, half);
    } else if (a.bias) {
        finish_gate<false, true>(a, memory, half);
    } else {
        finish_gate<false, false>(a, memory, half);
    }
}
__device__ __forceinline__ void finish(GateGradient, const Arguments &a, u32 memory, u32 half) {
    if (a.bias) {
        finish_gate_gradient<true>(a, memory, half);
    } else {
        finish_gate_gradient<false>(a, memory, half);
    }
}

#endif

template <class F> __device__ __forceinline__ void product(const Map &left, const Map &right, const Arguments &a) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 memory = (u32)__cvta_generic_to_shared(shared), group = __shfl_sync(ALL_LANES, threadIdx.x / GROUP_THREADS, 0);
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < STAGES; s++) {
            barrier_begin(full(memory, s), 1);
            barrier_begin(empty(memory, s), MULTIPLYING_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (group == 0) {
        fewer_registers<24>();
        if (threadIdx.x == 0) fetch<F>(left, right, a, memory);
    } else if (group <= 2) {
        fewer_registers<FINISH_REGISTERS>();
        finish(F(), a, memory, group - 1);
    } else {
        more_registers<MULTIPLY_REGISTERS>();
        multiply_tiles<F>(a, memory, group - 3);
    }
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)
#define PARAMETERS const __grid_constant__ Map left, const __grid_constant__ Map right, const __grid_constant__ Arguments a

#ifndef ACTIVATION

// out = gelu(left·rightᵀ + bias), and gelu′ of the same into `kept`.
KERNEL gelu_product(PARAMETERS) {
    product<Gelu>(left, right, a);
}
// out = left·right times `kept`, and the sums of its columns, two rows of them for each block that has these columns.
KERNEL gelu_gradient_product(PARAMETERS) {
    product<GeluGradient>(left, right, a);
}

#else

// out (m×n) = the gate of left·rightᵀ (m×2n), which goes into `kept`.
KERNEL gate_product(PARAMETERS) {
    product<Gate>(left, right, a);
}
// out (m×2n) = the gradient of the same at `kept`, that of its result being left·right (m×n).
KERNEL gate_gradient_product(PARAMETERS) {
    product<GateGradient>(left, right, a);
}

#endif

#endif
