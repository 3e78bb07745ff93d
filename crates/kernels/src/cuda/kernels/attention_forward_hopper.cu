// Attention by a description without bias in bf16, forward, for Hopper (sm_90a): the description's windows, layouts and key heads, heads
// of up to HEAD_SIZE numbers, 64 or 128.
//
// A block of threads stays on its multiprocessor and takes one job after the other: ROWS queries of a head. Its first group of four warps
// fetches queries, keys and values into rings of shared memory, further jobs' ahead of time; each of the others has 64 of the queries.
// Such a group begins the scores of a step of keys before it adds up the values of the step before, so that the tensor cores multiply
// while it computes powers; and groups take turns to begin theirs, so that one's powers fall into the others' products.
//
// Rows of keys and values lie in the order COLUMNS. What is beyond a sequence's end is filled with zeros and never read from memory.
// Every output is computed by one group in one order: the same input gives the same bits.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

typedef Described<u16> Arguments;

static_assert(D == 64 || D == 128, "heads have room for 64 or 128 numbers");
// Groups that multiply, and queries and keys that are worked on at a time. Registers of a thread: all groups together have 504 or 512.
constexpr u32 GROUPS = D == 64 ? 3 : 2, ROWS = 64 * GROUPS, KEYS = 128;
constexpr int FETCH_REGISTERS = D == 64 ? 32 : 40, MULTIPLY_REGISTERS = D == 64 ? 160 : 232;
// Whether groups begin their products in turns. With dropout and heads of 64 they have so much else to do that waiting costs more (measured).
constexpr bool TURNS = D == 128 || !DROPOUT;
constexpr u32 THREADS = (GROUPS + 1) * GROUP_THREADS, STAGES = 2, JOBS = 2;
constexpr float LN_2 = 0.6931471805599453f;

// What lies where in shared memory: rings of queries, of keys and of values, what a job is, barriers.
constexpr u32 QUERY_BYTES = ROWS * ROW_BYTES, KEY_BYTES = KEYS * ROW_BYTES;
constexpr u32 KEYS_AT = JOBS * QUERY_BYTES, VALUES_AT = KEYS_AT + STAGES * KEY_BYTES, JOBS_AT = VALUES_AT + STAGES * KEY_BYTES;

// What the multiplying groups are told. After the last job comes one of no head.
constexpr u32 NO_HEAD = ~0u;
struct Job {
    u32 head, number;
    u32 first_query, queries, keys;
    int shift;
    u32 row;     // The first of its queries.
    u32 from;    // Its first key, a multiple of KEYS.
    u32 blocks;  // Steps of KEYS keys.
    u32 unused[7];
};
constexpr u32 BARRIERS_AT = JOBS_AT + JOBS * sizeof(Job);

// Barriers in shared memory: of rings, two for each place.
enum { JOB_FULL = 0, JOB_EMPTY = JOBS, KEYS_FULL = 2 * JOBS, KEYS_EMPTY = KEYS_FULL + STAGES };
enum { VALUES_FULL = KEYS_EMPTY + STAGES, VALUES_EMPTY = VALUES_FULL + STAGES, BARRIERS = VALUES_EMPTY + STAGES };
// And by number: each group's turn, and each group's own.
enum { TURN = 1, OWN = TURN + GROUPS, FETCHING = OWN + GROUPS };
// The next two pieces of work.
constexpr u32 NEXT_AT = BARRIERS_AT + 8 * BARRIERS;

__device__ __forceinline__ u32 barrier_at(u32 memory, u32 number) { return memory + BARRIERS_AT + 8 * number; }

// Where a piece of a row lies in N rows: 64 columns of all rows after the other, with pieces mixed as wgmma has it.
template <u32 N> __device__ __forceinline__ u32 panel_place(u32 row, u32 piece) {
    return (piece / 8 * N + row) * 128 + ((piece % 8 ^ row % 8) << 4);
}

// A group copies N rows from `first` on, as far as they are before `end`; in the order COLUMNS or as they are. A thread has a piece of
// every FIT-th row.
template <bool ARRANGED, u32 N>
__device__ __forceinline__ void fetch_rows(u32 to, const u16 *from, u32 stride, u32 columns, u32 first, u32 end) {
    constexpr u32 FIT = GROUP_THREADS / PIECES;
    const u32 thread = threadIdx.x % GROUP_THREADS, row = thread / PIECES, piece = thread % PIECES;
    // The key that lies in a row: the reverse of arranged<COLUMNS>, within 32 rows.
    const u32 key = ARRANGED ? (row & 1) | (row >> 1 & 3) << 3 | (row >> 3 & 3) << 1 : row;
    u32 left = piece * 8 < columns && first + key < end ? end - first - key : 0;
    to += panel_place<N>(row, piece);
    from += (u64)(first + key) * stride + piece * 8;
    // Not unrolled: there are few registers.
#pragma unroll 1
    for (u32 i = 0; i < N; i += 32) {
#pragma unroll
        for (u32 j = 0; j < 32; j += FIT) {
            const u32 at = ARRANGED ? j / 8 * 2 : j;
            copy_16(to + j * 128, at < left ? from + at * stride : from, at < left);
        }
        from += 32 * stride;
        to += 32 * 128;
        left = left > 32 ? left - 32 : 0;
    }
}

// ---- The group that fetches -----------------------------------------------------------------------------------------

// Pieces of work are taken one by one: `tickets` counts those beyond the first of each block, and the blocks that are done. The last block
// sets both back to zero.
__device__ __forceinline__ void fetch(const Arguments &a, u32 items, u32 *tickets, u32 memory, Job *jobs, u32 *next) {
    Ring<JOBS> ring;
    Ring<STAGES> stage;
    const u32 d = a.head_size;
    // Says what the ring's next job is. Its queries are on their way.
    auto job_is_told = [&] {
        if (threadIdx.x == 0) barrier_arrive(barrier_at(memory, JOB_FULL + ring.stage));
        barrier_arrive_with_copies(barrier_at(memory, JOB_FULL + ring.stage));
        ring.next();
    };
    auto wait_for_room = [&] { barrier_wait(barrier_at(memory, JOB_EMPTY + ring.stage), ring.parity ^ 1); };
    // Jobs of one head of a sequence follow each other: they share keys and values.
    auto fetch_job = [&](u32 work) {
        const u32 head = work / items;
        const Item item = a.items[work % items];
        Part part;
        // Where later queries see more keys, the last come first, so that no block begins its long work when the others are done.
        if (!part.begin(a, item, item.block, ROWS, false, a.right < (int)(1 << 30))) return;
        const u32 from = part.keys_from(a, part.row) / KEYS * KEYS;
        const u32 to = part.keys_to(a, min(part.row + ROWS, part.queries) - 1);
        const u32 blocks = to > from ? (to - from + KEYS - 1) / KEYS : 0;
        wait_for_room();
        if (threadIdx.x == 0) {
            Job &job = jobs[ring.stage];
            job.head = head, job.number = part.number;
            job.first_query = part.first_query, job.queries = part.queries, job.keys = part.keys;
            job.shift = part.shift, job.row = part.row, job.from = from, job.blocks = blocks;
        }
        const u16 *query_from = a.query + (u64)part.first_query * a.query_stride + head * d;
        const u16 *key_from = a.key + (u64)part.first_key * a.key_stride + head / a.group * d;
        const u16 *value_from = a.value + (u64)part.first_key * a.value_stride + head / a.group * d;
        fetch_rows<false, ROWS>(memory + ring.stage * QUERY_BYTES, query_from, a.query_stride, d, part.row, part.queries);
        job_is_told();
        // Values are wanted a step later than keys.
        Ring<STAGES> behind = stage;
        for (u32 block = 0; block <= blocks; block++) {
            if (block < blocks) {
                barrier_wait(barrier_at(memory, KEYS_EMPTY + stage.stage), stage.parity ^ 1);
                fetch_rows<true, KEYS>(memory + KEYS_AT + stage.stage * KEY_BYTES, key_from, a.key_stride, d, from + KEYS * block, part.keys);
                barrier_arrive_with_copies(barrier_at(memory, KEYS_FULL + stage.stage));
                stage.next();
            }
            if (block > 0) {
                barrier_wait(barrier_at(memory, VALUES_EMPTY + behind.stage), behind.parity ^ 1);
                fetch_rows<true, KEYS>(memory + VALUES_AT + behind.stage * KEY_BYTES, value_from, a.value_stride, d,
                                       from + KEYS * (block - 1), part.keys);
                barrier_arrive_with_copies(barrier_at(memory, VALUES_FULL + behind.stage));
                behind.next();
            }
        }
    };
    const u32 all = items * a.heads;
    u32 turn = 0;
    for (u32 work = blockIdx.x; work < all;) {
        // Asked for early, as the answer takes its time.
        if (threadIdx.x == 0) next[turn] = gridDim.x + atomicAdd(tickets, 1);
        fetch_job(work);
        groups_wait(FETCHING, GROUP_THREADS);
        work = next[turn];
        turn ^= 1;
    }
    if (threadIdx.x == 0 && atomicAdd(tickets + 1, 1) == gridDim.x - 1) tickets[0] = tickets[1] = 0;
    wait_for_room();
    if (threadIdx.x == 0) jobs[ring.stage].head = NO_HEAD;
    job_is_told();
    // What was begun must have come before the block ends.
    copies_end_group();
    copies_wait<0>();
}

// ---- A group that multiplies ----------------------------------------------------------------------------------------

typedef float Sums[D / 8][4];
typedef float Scores[KEYS / 8][4];
typedef u32 Weights[KEYS / 16][4];

__device__ __forceinline__ void pin(Weights &weights) {
#pragma unroll
    for (u32 k = 0; k < KEYS / 16; k++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) asm volatile("" : "+r"(weights[k][i])::"memory");
    }
}

// A key's place in a step: COLUMNS.
__device__ __forceinline__ u32 column_at(int n, int b, u32 q) { return n / 4 * 32 + 8 * q + n % 4 * 2 + b; }

// scores (64 × KEYS) = the group's queries · keysᵀ. `queries` is the first of its rows.
__device__ __forceinline__ void scores_begin(Scores &scores, u32 queries, u32 keys) {
    pin(scores);
    group_begin();
#pragma unroll
    for (u32 k = 0; k < D / 16; k++) {
        const u64 left = rows_at(queries + k / 4 * ROWS * 128) + k % 4 * 2, right = rows_at(keys + k / 4 * KEYS * 128) + k % 4 * 2;
        group_multiply<0, 0>(scores, left, right, k > 0);
    }
    group_commit();
}

// sums (64 × D) += weights (64 × KEYS) · values.
__device__ __forceinline__ void values_begin(Sums &sums, Weights &weights, u32 values) {
    pin(sums);
    pin(weights);
    group_begin();
#pragma unroll
    for (u32 k = 0; k < KEYS / 16; k++) group_multiply_add(sums, weights[k], panels_at(values + 16 * k * 128, KEYS * 128));
    group_commit();
}

// Two rows of a thread: their softmax so far. Scores are in powers of two after multiplication with `factor`.
struct Softmax {
    float most[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f};
    float factor;

    // Turns scores into weights before rounding. True where sums so far are to be multiplied with `fade`. The subtracted maximum need
    // not be the true one, only near it: it is raised when a score exceeds it by more than 8 powers of two, which is rare after the first
    // step.
    __device__ __forceinline__ bool add(Scores &scores, float (&fade)[2], const Arguments &a, const Draws &draws, u32 query, u32 key) {
        const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
        float here[2];
        bool raise = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            here[r] = fmaxf(scores[0][2 * r], scores[0][2 * r + 1]);
#pragma unroll
            for (u32 n = 1; n < KEYS / 8; n++) here[r] = fmaxf(here[r], fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            raise |= here[r] > most[r] + 8.0f / factor;
        }
        raise = __any_sync(ALL_LANES, raise);
        if (raise) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float raised = fmaxf(most[r], quad_max(here[r]));
                // A row that has seen nothing yet has nothing that could fade.
                fade[r] = raised == -INFINITE ? 1.0f : exp2_fast((most[r] - raised) * factor);
                most[r] = raised;
                total[r] *= fade[r];
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            u32 words[4];
            const float offset = most[r] == -INFINITE ? 0.0f : most[r] * factor;
            float sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (u32 n = 0; n < KEYS / 8; n++) {
                if (DROPOUT && n % 4 == 0) draw_keys(words, draws, a, query + 8 * r + g, key / 8 + n + q);
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    const float p = exp2_fast(fmaf(scores[n][2 * r + b], factor, -offset));
                    sum[b] += p;
                    scores[n][2 * r + b] = !DROPOUT || keeps(words[n % 4], b, draws.threshold) ? p : 0.0f;
                }
            }
            total[r] += sum[0] + sum[1];
        }
        return raise;
    }
};

__device__ __forceinline__ void round_weights(Weights &weights, const Scores &scores) {
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
        for (int r = 0; r < 2; r++) weights[n / 2][n % 2 * 2 + r] = pack(scores[n][2 * r], scores[n][2 * r + 1]);
    }
}

__device__ __forceinline__ void mask(Scores &scores, const Seen &seen, u32 query, u32 key) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (!seen.one(query + 8 * (e / 2) + g, key + column_at(n, e % 2, q))) scores[n][e] = -INFINITE;
        }
    }
}

// Writes a warp's 16 rows, by way of its own rows of the queries, which nobody reads any more.
__device__ __forceinline__ void write_rows(const Sums &sums, const float (&factors)[2], u32 rows, u16 *to, u32 stride, u32 columns,
                                           u32 left) {
    const u32 lane = threadIdx.x % 32, row = lane % 16;
#pragma unroll
    for (u32 n = 0; n < D / 8; n += 2) {
        u32 part[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float f = factors[i % 2];
            part[i] = pack(sums[n + i / 2][i % 2 * 2] * f, sums[n + i / 2][i % 2 * 2 + 1] * f);
        }
        store_matrices(rows + panel_place<ROWS>(row, n + lane / 16), part);
    }
    __syncwarp();
    const u32 piece = lane % PIECES;
#pragma unroll
    for (u32 i = lane / PIECES; i < 16; i += 32 / PIECES) {
        const uint4 v = load_shared(rows + panel_place<ROWS>(i, piece));
        if (i < left && piece * 8 < columns) store_global(to + (u64)i * stride + piece * 8, v);
    }
}

__device__ __forceinline__ void multiply_jobs(const Arguments &a, u32 memory, const Job *jobs) {
    const u32 lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const u32 group = warp_number() / 4 - 1, warp_row = (warp_number() - 4) * 16;
    const u32 d = a.head_size, width = a.heads * d;
    Ring<JOBS> ring;
    Ring<STAGES> keys_ring, values_ring;
    auto release = [&](u32 number) {
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier_at(memory, number));
    };
    auto keys_wait = [&] {
        barrier_wait(barrier_at(memory, KEYS_FULL + keys_ring.stage), keys_ring.parity);
        publish();
    };
    auto keys_release = [&] {
        release(KEYS_EMPTY + keys_ring.stage);
        keys_ring.next();
    };
    auto values_wait = [&] {
        barrier_wait(barrier_at(memory, VALUES_FULL + values_ring.stage), values_ring.parity);
        publish();
    };
    auto values_release = [&] {
        release(VALUES_EMPTY + values_ring.stage);
        values_ring.next();
    };
    // Turns go round; the first is the first group's.
    auto turn_begin = [&] {
        if (TURNS) groups_wait(TURN + group, 2 * GROUP_THREADS);
    };
    auto turn_end = [&] {
        if (TURNS) groups_arrive(TURN + (group + 1) % GROUPS, 2 * GROUP_THREADS);
    };
    if (group == GROUPS - 1) turn_end();

    for (;; ring.next()) {
        barrier_wait(barrier_at(memory, JOB_FULL + ring.stage), ring.parity);
        publish();
        const Job &job = jobs[ring.stage];
        if (job.head == NO_HEAD) break;
        const u32 head = job.head, queries = job.queries, from = job.from, blocks = job.blocks;
        const u32 query = job.row + warp_row, group_query = job.row + group * 64;
        const u64 first_query = job.first_query;
        const Seen seen(a, job.shift, job.keys);
        // The steps that the group's queries see something of.
        u32 begin = 0, end = 0;
        if (group_query < queries) {
            const int first = (int)group_query + job.shift - a.left, last = (int)min(group_query + 63, queries - 1) + job.shift + a.right;
            begin = first > (int)from ? min((first - from) / KEYS, blocks) : 0;
            end = last >= (int)from ? min((last - from) / KEYS + 1, blocks) : 0;
        }
        Draws draws;
        if (DROPOUT) draws = draws_of(a, job.number, head, job.keys);
        const u32 query_rows = memory + ring.stage * QUERY_BYTES + group * 64 * 128;

        Softmax softmax;
        softmax.factor = a.scale * LOG2_E;
        Sums sums;
#pragma unroll
        for (u32 n = 0; n < D / 8; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
        Weights weights;
        for (u32 block = 0; block < blocks; block++) {
            const u32 key = from + KEYS * block;
            if (block < begin || block >= end) {
                // Nothing is seen there: values that are still to come are those of the step before.
                turn_begin();
                turn_end();
                keys_wait();
                keys_release();
                if (block == end && end > begin) {
                    values_wait();
                    values_begin(sums, weights, memory + VALUES_AT + values_ring.stage * KEY_BYTES);
                    group_wait<0>();
                    pin(sums);
                    pin(weights);
                    values_release();
                }
                values_wait();
                values_release();
                continue;
            }
            Scores scores;
            float fade[2];
            keys_wait();
            turn_begin();
            scores_begin(scores, query_rows, memory + KEYS_AT + keys_ring.stage * KEY_BYTES);
            const bool whole = seen.all(query, 16, key, KEYS);
            if (block == begin) {
                turn_end();
                group_wait<0>();
                pin(scores);
                keys_release();
                if (!whole) mask(scores, seen, query, key);
                softmax.add(scores, fade, a, draws, query, key);
            } else {
                values_wait();
                values_begin(sums, weights, memory + VALUES_AT + values_ring.stage * KEY_BYTES);
                turn_end();
                group_wait<1>();
                pin(scores);
                keys_release();
                if (!whole) mask(scores, seen, query, key);
                const bool fades = softmax.add(scores, fade, a, draws, query, key);
                group_wait<0>();
                pin(sums);
                pin(weights);
                values_release();
                if (fades) {
#pragma unroll
                    for (u32 n = 0; n < D / 8; n++) {
#pragma unroll
                        for (int e = 0; e < 4; e++) sums[n][e] *= fade[e / 2];
                    }
                }
            }
            round_weights(weights, scores);
        }
        if (end == blocks && end > begin) {
            values_wait();
            values_begin(sums, weights, memory + VALUES_AT + values_ring.stage * KEY_BYTES);
            group_wait<0>();
            pin(sums);
            pin(weights);
            values_release();
        }

        float factors[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float sum = quad_sum(softmax.total[r]);
            factors[r] = sum > 0.0f ? (DROPOUT ? a.dropout.scale : 1.0f) * reciprocal(sum) : sum * 0.0f;
            const u32 at = query + 8 * r + g;
            if (q == 0 && at < queries) {
                const float log_sum = sum == 0.0f ? -INFINITE : softmax.most[r] * softmax.factor * LN_2 + __logf(sum);
                a.log_sums[(u64)head * a.queries + first_query + at] = log_sum;
            }
        }
        // Until all warps of the group have multiplied their rows.
        groups_wait(OWN + group, GROUP_THREADS);
        u16 *out = a.result + (first_query + query) * width + head * d;
        write_rows(sums, factors, query_rows + warp_row % 64 * 128, out, width, d, query < queries ? queries - query : 0);
        release(JOB_EMPTY + ring.stage);
    }
    if (group == 0) turn_begin();
}

// `items`: how many the table has.
extern "C" __global__ void __launch_bounds__(THREADS, 1) forward(const __grid_constant__ Arguments a, u32 items, u32 *tickets) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 memory = shared_address(shared);
    Job *jobs = reinterpret_cast<Job *>(shared + JOBS_AT);
    if (threadIdx.x == 0) {
        for (u32 number = 0; number < BARRIERS; number++) {
            // Full: every fetching thread's copies, and for jobs the word that they are described. Empty: a word of each multiplying warp.
            const bool job = number < KEYS_FULL;
            const bool full = job ? number < JOB_EMPTY : number < KEYS_EMPTY || (number >= VALUES_FULL && number < VALUES_EMPTY);
            barrier_begin(barrier_at(memory, number), full ? GROUP_THREADS + job : 4 * GROUPS);
        }
        publish();
    }
    __syncthreads();
    if (threadIdx.x < GROUP_THREADS) {
        fewer_registers<FETCH_REGISTERS>();
        fetch(a, items, tickets, memory, jobs, reinterpret_cast<u32 *>(shared + NEXT_AT));
    } else {
        more_registers<MULTIPLY_REGISTERS>();
        multiply_jobs(a, memory, jobs);
    }
}

#endif
