// The backward of attention by a description (described.cuh) for Hopper (sm_90a), bf16, heads of up to HEAD_SIZE = 64 or 128 numbers:
// separate queries and keys, fewer key heads, windows, dropout; no bias. Stands after tiles.cuh, wgmma.cuh, pipeline.cuh and
// described.cuh.
//
//     for each query i, key j:  P = exp(scale·q·k − log-sum), dP = dout·v, dS = P·(dP − δ)
//     dv[j] += P·dout[i],  dk[j] += scale·dS·q[i],  dq[i] += scale·dS·k[j]
//
// The scores are computed once, so these are five products. A block takes a tile of 128 keys of a key head after the other and goes over
// the queries that see them, from the last to the first, of all heads that share the key head. Three groups of four warps:
// - the first fetches: two of its warps copy queries and their gradients into a ring, one thread keeps the order of sums (below);
// - two multiply, 64 keys each. Their keys' gradients stay in registers. The gradients of scores pass through shared memory, where both
//   groups find those of all 128 keys, for the part of the queries' gradients that each computes.
//
// The gradients of queries are sums over tiles of keys, which different blocks have. Each adds its part to f32 in device memory, in the
// order of the tiles, so that the same input gives the same bits; a count for each tile of queries says whose turn it is. The first
// stores, the last makes bf16 of it. Nobody waits for a tile that was claimed later, so blocks need not all run at once. That there is
// seldom anything to wait for is by two choices: neighbouring tiles of keys are claimed with other heads' in between, and queries come
// from the last to the first, so that a window's tile meets those that it shares with the tile before at its end.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

typedef Described<u16> Arguments;

// Besides the arguments; as in backward.rs.
struct Sums {
    float *dqueries;  // A × all queries × D: sums so far, in an order of their own within a row.
    u32 *counts;      // A × all queries, at the first of each tile: how many tiles of keys have been added.
    u32 *ticket;      // The next work that nobody has claimed.
    u32 items;        // Of the keys' layout.
    u32 key_heads;    // K.
    u32 together;     // Key heads whose tiles are claimed in turn.
};

// Keys of a block, queries of a step.
constexpr u32 KEYS = 128, STEP = 64;
// Steps after which the queries' gradients are computed. With heads of 64 each group has the queries of one of two steps, with heads of
// 128 half of the columns: 64×64 numbers either way.
constexpr int HALVES = D == 64 ? 2 : 1;
constexpr u32 TILE = HALVES * STEP;
constexpr u32 PANELS = D / 64;
// Keys and values of the next work fit beside the present ones for heads of 64 only.
constexpr u32 STAGES = D == 64 ? 5 : 3, KEY_STAGES = D == 64 ? 2 : 1;
constexpr u32 GROUP = 64, FETCHING = 64, CONSUMING_WARPS = 8, THREADS = 3 * GROUP_THREADS;

// Whether there are registers for dP's product before the queries' gradients have left theirs.
constexpr bool EARLY = D == 64;
// Registers of a thread, of 168 that each group begins with.
constexpr int MULTIPLY_REGISTERS = D == 128 && DROPOUT ? 240 : 232, FETCH_REGISTERS = 3 * 168 - 2 * MULTIPLY_REGISTERS;

// What lies where in shared memory. Tiles are panels of 64 columns; the scores' gradients have a key in each row, 64 queries in a panel.
constexpr u32 PANEL_KEYS = KEYS * 128, PANEL_STEP = STEP * 128;
constexpr u32 KEYS_BYTES = PANELS * PANEL_KEYS, STEP_BYTES = PANELS * PANEL_STEP;
constexpr u32 RING_AT = KEY_STAGES * 2 * KEYS_BYTES, SLOPES_AT = RING_AT + STAGES * 2 * STEP_BYTES;
constexpr u32 TERMS_AT = SLOPES_AT + 2 * HALVES * PANEL_KEYS, WORK_AT = TERMS_AT + STAGES * STEP * sizeof(Terms);
constexpr u32 WORK_BYTES = 48, BARRIERS_AT = WORK_AT + 2 * WORK_BYTES;
// Barriers by number: a ring's places are full or empty; a tile's sum may be added to, and has been.
constexpr u32 FULL = 0, EMPTY = FULL + STAGES, KEYS_FULL = EMPTY + STAGES, KEYS_EMPTY = KEYS_FULL + KEY_STAGES;
constexpr u32 WORK_FULL = KEYS_EMPTY + KEY_STAGES, WORK_EMPTY = WORK_FULL + 2, FETCHED = WORK_EMPTY + 2, TURN = FETCHED + 2, ADDED = TURN + 1;
// Those of two groups, by the hardware's numbers.
constexpr u32 EXCHANGED = 1;

__device__ __forceinline__ u32 barrier_at(u32 memory, u32 number) { return memory + BARRIERS_AT + 8 * number; }

// As `Ring` for N = 1 or 2, in a single register.
template <u32 N> struct Rounds {
    u32 count = 0;
    __device__ __forceinline__ u32 stage() const { return count % N; }
    __device__ __forceinline__ u32 parity() const { return count / N % 2; }
    __device__ __forceinline__ void next() { count++; }
};

// A tile of keys, and the tiles of queries that see some of them.
struct Work {
    u32 first_query, queries;  // N.
    u32 first_key, keys;       // M; 0: there is no more work.
    u32 number;                // In the global batch.
    u32 row;                   // The first key.
    u32 key_head;
    u32 first_tile, tiles;
    u32 unused[3];
};
static_assert(sizeof(Work) == WORK_BYTES, "as shared memory has room for");

// Whose turn it is to add to a tile of queries.
struct Turn {
    u32 before;  // How many tiles of keys come before this one.
    bool last;

    __device__ __forceinline__ Turn(const Arguments &a, const Work &work, u32 tile) {
        const int shift = (int)work.keys - (int)work.queries, first = (int)(tile * TILE) + shift;
        const int end = (int)min((tile + 1) * TILE, work.queries) + shift;
        const u32 from = max(first - a.left, 0), to = min(max(end + a.right, 0), (int)work.keys);
        before = work.row / KEYS - from / KEYS;
        last = to <= work.row + KEYS;
    }
};

// ---- The terms, and what the sums begin with ------------------------------------------------------------------------

// As in attention_general.cu; besides, counts of zero, and gradients of zero for queries that see nothing, which nobody adds to.
extern "C" __global__ void __launch_bounds__(256)
    backward_begin(const __grid_constant__ Arguments a, const __grid_constant__ Sums sums) {
    const u64 unit = ((u64)blockIdx.x * 256 + threadIdx.x) / PIECES;
    const u32 piece = threadIdx.x % PIECES, row = unit / a.heads, head = unit % a.heads;
    const bool there = row < a.queries && piece * 8 < a.head_size;
    float sum = 0.0f;
    if (there) {
        const u64 at = (u64)row * a.heads * a.head_size + head * a.head_size + piece * 8;
        float x[8], y[8];
        unpack(load_raw(reinterpret_cast<const bf16 *>(a.out) + at), x);
        unpack(load_raw(reinterpret_cast<const bf16 *>(a.dout) + at), y);
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(x[i], y[i], sum);
    }
#pragma unroll
    for (int offset = PIECES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, offset);
    if (row >= a.queries) return;
    const u64 at = (u64)head * a.queries + row;
    const float log_sum = a.log_sums[at], keep = DROPOUT ? reciprocal(a.dropout.scale) : 1.0f;
    if (piece == 0) {
        a.terms[at] = make_float2(log_sum == -INFINITE ? 0.0f : -LOG2_E * log_sum, -keep * sum);
        sums.counts[at] = 0;
        if (at == 0) *sums.ticket = 0;
    }
    if (there && log_sum == -INFINITE) {
        store_global(a.dquery + (u64)row * a.query_stride + head * a.head_size + piece * 8, make_uint4(0, 0, 0, 0));
    }
}

// ---- Fetching -------------------------------------------------------------------------------------------------------

// Begins to copy N rows from `from` on to a tile, 64 columns of all rows after the other; beyond the first `left` rows, and beyond the
// last column, there are zeros. Few registers are at hand, so only the copies of 16 rows are written out. Within these an order of rows
// permutes bits, so that a row's place is that of a thread's first row with some bits set.
template <Order O, u32 N> __device__ __forceinline__ void fetch_rows(u32 tile, const u16 *from, u32 stride, u32 columns, int left) {
    constexpr u32 PASS = FETCHING / PIECES;
    const u32 first = threadIdx.x / PIECES, piece = threadIdx.x % PIECES, row = arranged<O>(first);
    const u16 *own = from + (u64)first * stride + piece * 8;
    u32 to = tile + (piece / 8 * N + row) * 128 + ((piece % 8 ^ row % 8) << 4);
    left = piece * 8 < columns ? left - (int)first : 0;
#pragma unroll 1
    for (u32 block = 0; block < N / 16; block++) {
#pragma unroll
        for (u32 i = 0; i < 16; i += PASS) {
            copy_16((to ^ (arranged<O>(i) % 8) << 4) + arranged<O>(i) * 128, own, (int)i < left);
            own += PASS * stride;
        }
        to += 16 * 128;
        left -= 16;
    }
}

// Claims the next work.
__device__ __forceinline__ void claim(Work &work, const Arguments &a, const Sums &sums) {
    const u32 all = sums.items * sums.key_heads;
    for (;;) {
        const u32 ticket = atomicAdd(sums.ticket, 1);
        work.keys = 0;
        if (ticket >= all) return;
        const u32 set = ticket / (sums.items * sums.together) * sums.together, width = min(sums.together, sums.key_heads - set);
        const u32 within = ticket - set * sums.items;
        work.key_head = set + within % width;
        const Item item = a.items[within / width];
        Part part;
        if (item.tokens == 0 || !part.begin(a, item, item.block, KEYS, true, false)) continue;
        work.first_query = part.first_query, work.queries = part.queries;
        work.first_key = part.first_key, work.keys = part.keys;
        work.number = part.number, work.row = part.row;
        const u32 from = part.queries_from(a, part.row), to = part.queries_to(a, min(part.row + KEYS, part.keys) - 1);
        work.first_tile = from / TILE;
        work.tiles = to > from ? (to + TILE - 1) / TILE - from / TILE : 0;
        return;
    }
}

// One thread claims work when the last copies of the present one have begun: early enough for them to go on, and no earlier, because
// others may wait for what is claimed.
__device__ __forceinline__ void claim_all(const Arguments &a, const Sums &sums, unsigned char *shared) {
    const u32 memory = shared_address(shared);
    for (Rounds<2> works;; works.next()) {
        const u32 at = works.stage(), phase = works.parity();
        Work &work = reinterpret_cast<Work *>(shared + WORK_AT)[at];
        barrier_wait(barrier_at(memory, WORK_EMPTY + at), phase ^ 1);
        claim(work, a, sums);
        const bool over = work.keys == 0;
        barrier_arrive(barrier_at(memory, WORK_FULL + at));
        if (over) break;
        barrier_wait(barrier_at(memory, FETCHED + at), phase);
    }
}

__device__ __forceinline__ void fetch(const Arguments &a, unsigned char *shared) {
    const u32 memory = shared_address(shared), thread = threadIdx.x, d = a.head_size;
    Ring<STAGES> ring;
    Rounds<KEY_STAGES> key_ring;
    for (Rounds<2> works;; works.next()) {
        const u32 at = works.stage(), phase = works.parity();
        barrier_wait(barrier_at(memory, WORK_FULL + at), phase);
        const Work &work = reinterpret_cast<const Work *>(shared + WORK_AT)[at];
        if (work.keys == 0) break;
        // The first steps' rows have places already while the last work's keys and values are in use.
        for (u32 step = 0; work.tiles > 0; step++) {
            const u32 of_head = work.tiles * HALVES, steps = of_head * a.group;
            if (step == min(steps, STAGES - 1)) {
                const u32 to = memory + key_ring.stage() * 2 * KEYS_BYTES, row = work.first_key + work.row;
                barrier_wait(barrier_at(memory, KEYS_EMPTY + key_ring.stage()), key_ring.parity() ^ 1);
                fetch_rows<ROWS_16, KEYS>(to, a.key + (u64)row * a.key_stride + work.key_head * d, a.key_stride, d, work.keys - work.row);
                fetch_rows<ROWS_16, KEYS>(to + KEYS_BYTES, a.value + (u64)row * a.value_stride + work.key_head * d, a.value_stride, d,
                                          work.keys - work.row);
                barrier_arrive_with_copies(barrier_at(memory, KEYS_FULL + key_ring.stage()));
                key_ring.next();
            }
            if (step == steps) break;
            // The last tile first, its steps in order. Computed anew each time, for the sake of registers.
            const u32 head = work.key_head * a.group + step / of_head, done = step % of_head;
            const u32 first = (work.first_tile + work.tiles - 1 - done / HALVES) * TILE + done % HALVES * STEP;
            const u32 row = work.first_query + first, width = a.heads * d;
            const int rows = (int)work.queries - (int)first;
            const u32 to = memory + RING_AT + ring.stage * 2 * STEP_BYTES;
            barrier_wait(barrier_at(memory, EMPTY + ring.stage), ring.parity ^ 1);
            fetch_rows<PLAIN, STEP>(to, a.query + (u64)row * a.query_stride + head * d, a.query_stride, d, rows);
            fetch_rows<PLAIN, STEP>(to + STEP_BYTES, a.dout + (u64)row * width + head * d, width, d, rows);
            copy_8(memory + TERMS_AT + (ring.stage * STEP + thread) * sizeof(Terms), a.terms + (u64)head * a.queries + row + thread,
                   (int)thread < rows);
            barrier_arrive_with_copies(barrier_at(memory, FULL + ring.stage));
            ring.next();
        }
        __syncwarp();
        if (thread % 32 == 0) barrier_arrive(barrier_at(memory, FETCHED + at));
    }
    // Nobody leaves with copies under way.
    copies_end_group();
    copies_wait<0>();
}

// ---- The order of sums ----------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 load_acquire(const u32 *p) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ void store_release(u32 *p, u32 x) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

// One thread waits for a tile's turn, lets the groups add, and when they have, tells the next. What the others added is told by a barrier
// to this thread and by its release to the next block's, which passes it on the same way.
__device__ __forceinline__ void keep_order(const Arguments &a, const Sums &sums, unsigned char *shared) {
    const u32 memory = shared_address(shared);
    u32 parity = 0;
    for (Rounds<2> works;; works.next()) {
        const u32 at = works.stage(), phase = works.parity();
        barrier_wait(barrier_at(memory, WORK_FULL + at), phase);
        const Work &work = reinterpret_cast<const Work *>(shared + WORK_AT)[at];
        if (work.keys == 0) break;
        for (u32 i = 0; i < a.group; i++) {
            const u32 head = work.key_head * a.group + i;
            for (u32 left = work.tiles; left-- > 0; parity ^= 1) {
                const u32 tile = work.first_tile + left;
                const Turn turn(a, work, tile);
                u32 *added = sums.counts + (u64)head * a.queries + work.first_query + tile * TILE;
                if (turn.before > 0) {
                    while (load_acquire(added) != turn.before) {
                    }
                }
                barrier_arrive(barrier_at(memory, TURN));
                barrier_wait(barrier_at(memory, ADDED), parity);
                if (!turn.last) store_release(added, turn.before + 1);
            }
        }
        barrier_arrive(barrier_at(memory, WORK_EMPTY + at));
    }
}

// ---- Products -------------------------------------------------------------------------------------------------------

// Numbers of no value, which a product without a sum before it begins with: those that were there need no registers until then.
__device__ __forceinline__ void begin_anew(float (&d)[8][4]) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "=f"(d[n][e])::"memory");
    }
}

// products (64 keys × 64 queries) = the group's rows of a tile of keys · (rows of a step)ᵀ.
__device__ __forceinline__ void begin_product(float (&products)[8][4], u32 keys, u32 step) {
    group_begin();
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        group_multiply<0, 0>(products, rows_at(keys + k / 4 * PANEL_KEYS) + k % 4 * 2, rows_at(step + k / 4 * PANEL_STEP) + k % 4 * 2, k > 0);
    }
    group_commit();
}

// sums (64 keys × D) += left (64 keys × 64 queries) · (rows of a step).
__device__ __forceinline__ void begin_sum(float (&sums)[D / 8][4], const u32 (&left)[4][4], u32 step) {
    group_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) group_multiply_add(sums, left[k], panels_at(step + k * 16 * 128, PANEL_STEP));
    group_commit();
}

// products (64 queries × 64 columns) = (128 keys × 64 queries)ᵀ · (128 keys × 64 columns).
__device__ __forceinline__ void begin_dqueries(float (&products)[8][4], u32 slopes, u32 keys) {
    group_begin();
#pragma unroll
    for (int k = 0; k < (int)KEYS / 16; k++) {
        group_multiply<1, 1>(products, rows_at(slopes + k * 16 * 128), rows_at(keys + k * 16 * 128), k > 0);
    }
    group_commit();
}

// Four lanes have two columns each of four pieces of a row; afterwards each has one of the pieces.
__device__ __forceinline__ uint4 gather_piece(u32 (&words)[4]) {
    const u32 q = threadIdx.x % 4;
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool set = q & bit;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            if (k & bit) continue;
            const u32 other = __shfl_xor_sync(ALL_LANES, set ? words[k] : words[k | bit], bit);
            words[k] = set ? other : words[k];
            words[k | bit] = set ? words[k | bit] : other;
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Writes two rows of sums, times a factor, where there are such rows and columns.
template <int N>
__device__ __forceinline__ void write_rows(const float (&sums)[N][4], float factor, u16 *first, u16 *second, const bool (&there)[2],
                                           int columns) {
    const int own = 8 * (threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < N; n += 4) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 words[4];
#pragma unroll
            for (int i = 0; i < 4; i++) words[i] = pack(sums[n + i][2 * r] * factor, sums[n + i][2 * r + 1] * factor);
            const uint4 piece = gather_piece(words);
            if (there[r] && 8 * n + own < columns) store_global((r ? second : first) + 8 * n + own, piece);
        }
    }
}

// ---- Sums in device memory ------------------------------------------------------------------------------------------

__device__ __forceinline__ void add_global(float *to, float x, float y, float z, float w) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
// From the cache that all multiprocessors share.
__device__ __forceinline__ float4 load_global(const float *from) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
    return v;
}

// Adds the group's part of a tile's gradients (64 queries from `query` on × 64 columns from `column` on) to what others added, or writes
// the gradients.
__device__ __forceinline__ void add_dqueries(float (&parts)[8][4], const Arguments &a, const Sums &sums, const Work &work, u32 head,
                                             u32 query, u32 column, bool first, bool last) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, own = query + threadIdx.x / 32 % 4 * 16 + g;
    const bool there[2] = {own < work.queries, own + 8 < work.queries};
    float *home = sums.dqueries + ((u64)head * a.queries + work.first_query + own) * D + column + 4 * q;
    // Four numbers of a row are neighbours there, which are two and two here.
    const auto for_all = [&](auto each) {
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (there[r]) each(home + 8 * r * D + 8 * n, parts[n][2 * r], parts[n][2 * r + 1], parts[n + 1][2 * r], parts[n + 1][2 * r + 1]);
            }
        }
    };
    if (!last) {
        if (first) {
            for_all([](float *to, float x, float y, float z, float w) {
                store_global(to, make_uint4(__float_as_uint(x), __float_as_uint(y), __float_as_uint(z), __float_as_uint(w)));
            });
        } else {
            for_all([](float *to, float x, float y, float z, float w) { add_global(to, x, y, z, w); });
        }
    } else if (!first) {
        for_all([](float *from, float &x, float &y, float &z, float &w) {
            const float4 before = load_global(from);
            x += before.x, y += before.y, z += before.z, w += before.w;
        });
    }
    if (!last) return;
    u16 *to = a.dquery + (u64)(work.first_query + own) * a.query_stride + head * a.head_size + column;
    write_rows(parts, (DROPOUT ? a.dropout.scale : 1.0f) * a.scale, to, to + 8 * a.query_stride, there, (int)a.head_size - (int)column);
}

// ---- Multiplying ----------------------------------------------------------------------------------------------------
//
// While a group computes, the tensor cores have something to do for it: the product for dP while it makes P, the sum of the values'
// gradients while it makes dS, that of the keys' while it waits for the other group, the next step's scores, and where registers allow the
// product after them, while it hands the queries' gradients on. Products end in the order in which they are begun:
//
//     S(n) | dP(n) | dV(n) | dK(n) | dQ(n) | S(n + 1)
//
// All are waited for before S(n + 1): the assembler does not follow that dQ(n) is over when S(n + 1) alone is under way, and would wait
// after every product.
//
// Why nothing is read or written too early, though the emulator would not show it:
// - Rows that were copied (by copies that are no bulk copies) are awaited at a barrier, then published to the tensor cores.
// - P and dS as left factors stay in registers of their own until the wait at the end of the step.
// - The scores' gradients are published before the barrier of both groups, behind which both multiply them. There are two places for
//   them: a group that writes one of the next tile has passed the last tile's barrier, before which both had waited for the products of
//   the tile before, which had read that place.
// - A ring's place is given back after the wait at the end of the step: no more than S(n + 1) is under way, which reads the next place.

template <class A> __device__ __forceinline__ void multiply_tiles(const A &a, const Sums &all_sums, unsigned char *shared, u32 warp) {
    const u32 memory = shared_address(shared), lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 warp_row = warp * 16, group = warp / 4;
    const u32 slopes_at = memory + SLOPES_AT + (warp_row + lane % 16) * 128 + ((lane / 16 ^ lane % 8) << 4);
    const float factor = a.scale * LOG2_E;
    Ring<STAGES> ring;
    Rounds<KEY_STAGES> key_ring;
    // Of the tile's turn, and which place the gradients of its scores have.
    u32 parity = 0;
    auto release = [&](u32 number) {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier_at(memory, number));
    };
    for (Rounds<2> works;; works.next()) {
        const u32 at = works.stage(), phase = works.parity();
        barrier_wait(barrier_at(memory, WORK_FULL + at), phase);
        const Work &work = reinterpret_cast<const Work *>(shared + WORK_AT)[at];
        if (work.keys == 0) break;
        const u32 tiles = work.tiles, key = work.row + warp_row;
        const u32 keys = memory + key_ring.stage() * 2 * KEYS_BYTES, own_keys = keys + group * GROUP * 128;
        float dkeys[D / 8][4], dvalues[D / 8][4], scores[8][4];
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) dkeys[n][e] = dvalues[n][e] = 0.0f;
        }
        pin(dkeys);
        pin(dvalues);
        if (tiles > 0) {
            const Seen seen(a, (int)work.keys - (int)work.queries, work.keys);
            u32 head = work.key_head * a.group, tile = work.first_tile + tiles;
            Draws draws;
            if (DROPOUT) draws = draws_of(a, work.number, head, work.keys);
            float dqueries[8][4], dweights[8][4];
            const auto begin_scores = [&] {
                barrier_wait(barrier_at(memory, FULL + ring.stage), ring.parity);
                publish();
                begin_anew(scores);
                begin_product(scores, own_keys, memory + RING_AT + ring.stage * 2 * STEP_BYTES);
            };
            const auto begin_dweights = [&] {
                begin_anew(dweights);
                begin_product(dweights, own_keys + KEYS_BYTES, memory + RING_AT + (ring.stage * 2 + 1) * STEP_BYTES);
            };
            // What ends a step, when its products are done.
            const auto release_step = [&](u32 stage) {
                pin(dvalues);
                pin(dkeys);
                release(EMPTY + stage);
            };
            const auto hand_on = [&] {
                pin(dqueries);
                const Turn turn(a, work, tile);
                const u32 own = tile * TILE + (HALVES == 2 ? group * STEP : 0), column = HALVES == 2 ? 0 : group * 64;
                barrier_wait(barrier_at(memory, TURN), parity);
                add_dqueries(dqueries, a, all_sums, work, head, own, column, turn.before == 0, turn.last);
                release(ADDED);
                parity ^= 1;
            };
            barrier_wait(barrier_at(memory, KEYS_FULL + key_ring.stage()), key_ring.parity());
            begin_scores();
            if (EARLY) begin_dweights();
            u32 left = tiles * a.group, stage;
            for (;;) {
                if (tile == work.first_tile) {
                    tile += tiles, head++;
                    if (DROPOUT) draws = draws_of(a, work.number, head, work.keys);
                }
                tile--;
#pragma unroll
                for (int half = 0; half < HALVES; half++) {
                    stage = ring.stage;
                    const u32 query = tile * TILE + half * STEP;
                    const u32 queries = memory + RING_AT + stage * 2 * STEP_BYTES, gradients = queries + STEP_BYTES;
                    const u32 slopes_to = (parity * HALVES + half) * PANEL_KEYS;
                    const unsigned char *terms = shared + TERMS_AT + (stage * STEP + 2 * q) * sizeof(Terms);
                    if (!EARLY || half > 0) begin_dweights();
                    group_wait<1>();
                    pin(scores);

                    // P; of what is dropped, with the other sign.
                    if (!seen.all(query, STEP, key, 16)) {
#pragma unroll
                        for (int n = 0; n < 8; n++) {
#pragma unroll
                            for (int e = 0; e < 4; e++) {
                                if (!seen.one(query + 8 * n + 2 * q + e % 2, key + 2 * g + e / 2)) scores[n][e] = -INFINITE;
                            }
                        }
                    }
                    u32 weights[4][4], slopes[4][4];
#pragma unroll
                    for (int part = 0; part < 4; part++) {
                        u32 words[2][2][1];
                        if (DROPOUT) draw_rows<1>(words, draws, a, key, query + 16 * part);
#pragma unroll
                        for (int n = 0; n < 2; n++) {
                            const float4 two = *reinterpret_cast<const float4 *>(terms + (16 * part + 8 * n) * sizeof(Terms));
                            const float offset[2] = {two.x, two.z};
#pragma unroll
                            for (int r = 0; r < 2; r++) {
                                float w[2];
#pragma unroll
                                for (int b = 0; b < 2; b++) {
                                    float &score = scores[2 * part + n][2 * r + b];
                                    score = w[b] = exp2_fast(fmaf(score, factor, offset[b]));
                                    if (DROPOUT) {
                                        score = keeps(words[n][b][0], r, draws.threshold) ? score : -score;
                                        w[b] = fmaxf(score, 0.0f);
                                    }
                                }
                                weights[part][2 * n + r] = pack(w[0], w[1]);
                            }
                        }
                    }
                    pin(dvalues);
                    begin_sum(dvalues, weights, gradients);

                    // dS.
                    group_wait<1>();
                    pin(dweights);
#pragma unroll
                    for (int part = 0; part < 4; part++) {
#pragma unroll
                        for (int n = 0; n < 2; n++) {
                            const float4 two = *reinterpret_cast<const float4 *>(terms + (16 * part + 8 * n) * sizeof(Terms));
                            const float delta[2] = {two.y, two.w};
#pragma unroll
                            for (int r = 0; r < 2; r++) {
                                float ds[2];
#pragma unroll
                                for (int b = 0; b < 2; b++) {
                                    const float p = scores[2 * part + n][2 * r + b], dw = dweights[2 * part + n][2 * r + b];
                                    ds[b] = DROPOUT ? fabsf(p) * ((p > 0.0f ? dw : 0.0f) + delta[b]) : p * (dw + delta[b]);
                                }
                                slopes[part][2 * n + r] = pack(ds[0], ds[1]);
                            }
                        }
                        store_matrices((slopes_at + slopes_to) ^ part << 5, slopes[part]);
                    }
                    pin(dkeys);
                    begin_sum(dkeys, slopes, queries);
                    publish();
                    ring.next();
                    if (half == HALVES - 1) break;
                    begin_scores();
                    group_wait<1>();
                    release_step(stage);
                }
                groups_wait(EXCHANGED, 2 * GROUP_THREADS);
                const u32 from = memory + SLOPES_AT + (parity * HALVES + (HALVES == 2 ? group : 0)) * PANEL_KEYS;
                begin_anew(dqueries);
                begin_dqueries(dqueries, from, keys + (HALVES == 2 ? 0 : group * PANEL_KEYS));
                group_wait<0>();
                release_step(stage);
                if (--left == 0) break;
                begin_scores();
                if (EARLY) begin_dweights();
                hand_on();
            }
            release(KEYS_EMPTY + key_ring.stage());
            key_ring.next();
            hand_on();
        }
        // A lane has two neighbouring keys: see `arranged`.
        const u32 own = key + 2 * g, d = a.head_size;
        const bool there[2] = {own < work.keys, own + 1 < work.keys};
        const float keep = DROPOUT ? a.dropout.scale : 1.0f;
        u16 *to_value = a.dvalue + (u64)(work.first_key + own) * a.value_stride + work.key_head * d;
        u16 *to_key = a.dkey + (u64)(work.first_key + own) * a.key_stride + work.key_head * d;
        write_rows(dvalues, keep, to_value, to_value + a.value_stride, there, d);
        write_rows(dkeys, keep * a.scale, to_key, to_key + a.key_stride, there, d);
        release(WORK_EMPTY + at);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    backward(const __grid_constant__ Arguments a, const __grid_constant__ Sums sums) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 memory = shared_address(shared), warp = warp_number();
    if (threadIdx.x == 0) {
        const auto begin = [&](u32 first, u32 count, u32 arrivals) {
            for (u32 i = first; i < first + count; i++) barrier_begin(barrier_at(memory, i), arrivals);
        };
        begin(FULL, STAGES, FETCHING);
        begin(EMPTY, STAGES, CONSUMING_WARPS);
        begin(KEYS_FULL, KEY_STAGES, FETCHING);
        begin(KEYS_EMPTY, KEY_STAGES, CONSUMING_WARPS);
        begin(WORK_FULL, 2, 1);
        // Those who multiply, and the thread that keeps the order. Who fetches is done before.
        begin(WORK_EMPTY, 2, CONSUMING_WARPS + 1);
        begin(FETCHED, 2, FETCHING / 32);
        begin(TURN, 1, 1);
        begin(ADDED, 1, CONSUMING_WARPS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp < 4) {
        fewer_registers<FETCH_REGISTERS>();
        if (warp < FETCHING / 32) {
            fetch(a, shared);
        } else if (warp == 2 && threadIdx.x % 32 == 0) {
            claim_all(a, sums, shared);
        } else if (warp == 3 && threadIdx.x % 32 == 0) {
            keep_order(a, sums, shared);
        }
    } else {
        more_registers<MULTIPLY_REGISTERS>();
        multiply_tiles(a, sums, shared, warp - 4);
    }
}

#endif
