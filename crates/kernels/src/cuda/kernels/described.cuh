// What an attention by a description reads, and what follows from the description: which keys a query sees, and what is added to
// their scores. Stands before attention_general.cu, attention_plain.cu and attention_cache.cu.
//
// Legend: A heads, K key heads, D = head size; N queries and M keys of one sequence. Query i stands at position M − N + i.

struct Item {
    u32 first;   // The sequence's first row.
    u32 tokens;  // 0: nothing to do.
    u32 number;  // Its number in the global batch, for dropout.
    u32 block;   // Which 128 rows.
};

enum BiasKind { NO_BIAS = 0, RELATIVE = 1, SLOPES = 2 };

constexpr int LEVELS = 63;

// As in general.rs. Gradients lie as what they belong to does.
template <class E> struct Described {
    const E *query, *key, *value;  // Of the first head.
    const E *out, *dout;           // Rows of A·D numbers.
    E *result;                     // The output, likewise.
    E *dquery, *dkey, *dvalue;
    float *log_sums;               // A × all queries.
    float2 *terms;                 // Likewise: see `Terms`.
    float *dbias;                  // Each block's share of the table's gradient: blocks × buckets × A.
    const float *bias;             // The table, buckets × A, or A slopes.
    const Item *items;             // Of the queries' layout, or of the keys'.
    // Where the sequences of that layout begin, and those of the other; none where they are the same layout.
    const u32 *own_offsets, *other_offsets;
    const u32 *numbers;            // The sequences' numbers, where there are two layouts.
    // Where keys and values lie in pages: see cache.rs.
    const u32 *pages, *page_offsets, *lengths;
    // Where contents are scored against positions (POSITIONS): the scaled products of each query, and of each key, with all of them, rows
    // × A × positions, either of which may be absent; where gradients of scores go, rows × A × reach; and the position of each
    // distance from −reach to reach.
    const E *by_query, *by_key;
    E *dscores;
    const u32 *distance_rows;
    u32 page_size;
    u32 sequences;
    u32 query_stride, key_stride, value_stride;
    u32 queries;                   // Of all sequences.
    u32 heads, group;              // A, and A/K.
    u32 head_size;                 // D.
    int left, right;               // Keys that a query sees before and after its own position.
    float scale;
    u32 bias_kind;
    int reach;                     // Distances further away share the last bucket of their side.
    u32 side;                      // Buckets of a side.
    u32 bidirectional;
    u32 least_queries, most_queries;  // Sequences with fewer or more are left to another kernel.
    u32 thresholds[LEVELS];        // The least distance of each bucket of a side but the first.
    u32 keys[14];                  // Philox' keys of its seven rounds.
    u32 positions;
    // Of a MATRIX that is added to scores (`by_query`: rows × some heads × reach; −∞ where a query does not see a key), the first of
    // these heads and how many there are. Gradients of scores (`dscores`) lie as it does.
    u32 first_head, matrix_heads;
    Dropout dropout;

    // The first head of those that are worked on.
    __device__ __forceinline__ u32 begin_head() const {
#ifdef MATRIX
        return first_head;
#else
        return 0;
#endif
    }
    // Where the numbers of a query, counted among all, and a head begin in the matrix.
    __device__ __forceinline__ u64 matrix_row(u32 query, u32 head) const {
        return ((u64)query * matrix_heads + (head - first_head)) * reach;
    }

    // The bucket of a key that stands `distance` after the query.
    __device__ __forceinline__ u32 bucket(int distance) const {
        const u32 far = bidirectional ? abs(distance) : max(-distance, 0);
        u32 level = bidirectional && distance > 0 ? side : 0;
        for (int i = 0; i + 1 < side; i++) level += far >= thresholds[i];
        return level;
    }
    // Buckets of the table.
    __device__ __forceinline__ u32 buckets() const { return bidirectional ? 2 * side : side; }

    // What is added to the scores of a head at distances of −reach to reach, times `factor`; `slope` where it grows with the distance.
    __device__ __forceinline__ void fill_bias(float *by_distance, float &slope, u32 head, float factor) const {
#ifdef POSITIONS
        for (int i = threadIdx.x; i <= 2 * reach; i += blockDim.x) by_distance[i] = __uint_as_float(distance_rows[i]);
        return;
#elif defined(MATRIX)
        return;
#endif
        slope = bias_kind == SLOPES ? -bias[head] * factor : 0.0f;
        for (int i = threadIdx.x; i <= 2 * reach; i += blockDim.x) {
            by_distance[i] = bias_kind == RELATIVE ? bias[bucket(i - reach) * heads + head] * factor : 0.0f;
        }
    }

    // A distance's place in `by_distance`.
    __device__ __forceinline__ int near(int distance) const { return min(max(distance, -reach), reach) + reach; }

    // Writes a block's share of the table's gradient from the sums by distance of all of its warps, one after the other, which the
    // first warp's take in. Without sums it has none.
    __device__ __forceinline__ void write_dbias(float *sums, u32 warps, float factor) const {
        const int distances = 2 * reach + 1;
        __syncthreads();
        for (int i = threadIdx.x; sums && i < distances; i += blockDim.x) {
            for (u32 w = 1; w < warps; w++) sums[i] += sums[w * distances + i];
        }
        __syncthreads();
        for (u32 b = threadIdx.x; b < buckets(); b += blockDim.x) {
            const u32 level = b % side;
            const int near_end = level == 0 ? 0 : (int)min(thresholds[level - 1], (u32)reach + 1);
            const int far_end = level + 1 == side ? reach : (int)min(thresholds[level], (u32)reach + 1) - 1;
            // Keys at or before the query, or after it; without buckets of their own, those after it count as at it.
            int first = -far_end, last = -near_end;
            if (b >= side) first = max(near_end, 1), last = far_end;
            if (!bidirectional && level == 0) last = reach;
            float total = 0.0f;
            for (int i = first; sums && i <= last; i++) total += sums[i + reach];
            dbias[((u64)blockIdx.y * buckets() + b) * heads + blockIdx.x] = total * factor;
        }
    }
};

template <class E> __device__ __forceinline__ float stored(E x) { return widen(x); }
template <> __device__ __forceinline__ float stored<u16>(u16 x) { return __uint_as_float((u32)x << 16); }

// What the backward needs of a query: −(its log-sum), 0 where it sees nothing, and −Σ out·dout.
typedef float2 Terms;

// Rows of one sequence that a block of threads works on.
struct Part {
    u32 first_query, queries;  // N.
    u32 first_key, keys;       // M.
    u32 number, index;         // In the global batch, and in this one where there are two layouts.
    u32 row;                   // The first row of the block, of queries or of keys.
    int shift;                 // M − N.

    // `rows` is how many a block has; `by_keys` whether its rows are keys. False where there is nothing to do.
    template <class E>
    __device__ __forceinline__ bool begin(const Described<E> &a, u32 rows, bool by_keys, bool last_first = false) {
        const u32 halves = 128 / rows;
        const Item item = a.items[blockIdx.y / halves];
        return begin(a, item, item.block * halves + blockIdx.y % halves, rows, by_keys, last_first);
    }
    // Block number `block` of an item's sequence.
    template <class E>
    __device__ __forceinline__ bool begin(const Described<E> &a, const Item &item, u32 block, u32 rows, bool by_keys, bool last_first) {
        const u32 blocks = (item.tokens + rows - 1) / rows;
        if (block >= blocks) return false;
        row = (last_first ? blocks - 1 - block : block) * rows;
        number = item.number;
        index = 0;
        u32 other_first = item.first, other = item.tokens;
        if (a.own_offsets) {
            // Where each sequence has one row, its number is the row's.
            const bool guessed = item.first < a.sequences && a.own_offsets[item.first] == item.first;
            u32 low = guessed ? item.first : 0, high = guessed ? low : a.sequences;
            while (low < high) {
                const u32 middle = (low + high) / 2;
                if (a.own_offsets[middle] < item.first) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            // What fills a batch up has no counterpart.
            const bool found = low < a.sequences && a.own_offsets[low] == item.first;
            index = found ? low : 0;
            if (!found) {
                other_first = other = 0;
            } else if (a.pages) {
                other_first = 0;
                other = a.lengths[index];
            } else {
                other_first = a.other_offsets[index];
                other = a.other_offsets[index + 1] - other_first;
            }
            if (found && a.numbers) number = a.numbers[index];
        }
        first_query = by_keys ? other_first : item.first;
        queries = by_keys ? other : item.tokens;
        first_key = by_keys ? item.first : other_first;
        keys = by_keys ? item.tokens : other;
        shift = (int)keys - (int)queries;
        return queries >= a.least_queries && queries <= a.most_queries;
    }

    // The row of a key among all.
    template <class E> __device__ __forceinline__ u32 key_row(const Described<E> &a, u32 key) const {
        if (!a.pages) return first_key + key;
        return a.pages[a.page_offsets[index] + key / a.page_size] * a.page_size + key % a.page_size;
    }

    // What positions add to the score of a query and a key. `rows` holds the position of each distance, as `fill_bias` left it. Beyond
    // the end of the sequence it is that of the last.
    template <class E>
    __device__ __forceinline__ float by_position(const Described<E> &a, const float *rows, u32 head, u32 query, u32 key) const {
        const int distance = (int)key - (int)query - shift;
        float sum = 0.0f;
        if (a.by_query) {
            const u64 row = (u64)(first_query + min(query, queries - 1)) * a.heads + head;
            sum += stored(a.by_query[row * a.positions + __float_as_uint(rows[a.near(-distance)])]);
        }
        if (a.by_key) {
            const u64 row = (u64)(first_key + min(key, keys - 1)) * a.heads + head;
            sum += stored(a.by_key[row * a.positions + __float_as_uint(rows[a.near(-distance)])]);
        }
        return sum;
    }

    // The keys that one of these queries sees at least, and the end of them.
    template <class E> __device__ __forceinline__ u32 keys_from(const Described<E> &a, u32 query) const {
        return min(max((int)query + shift - a.left, 0), (int)keys);
    }
    template <class E> __device__ __forceinline__ u32 keys_to(const Described<E> &a, u32 query) const {
        return min(max((int)query + shift + a.right + 1, 0), (int)keys);
    }
    // The same the other way: the queries that see a key.
    template <class E> __device__ __forceinline__ u32 queries_from(const Described<E> &a, u32 key) const {
        return min(max((int)key - shift - a.right, 0), (int)queries);
    }
    template <class E> __device__ __forceinline__ u32 queries_to(const Described<E> &a, u32 key) const {
        return min(max((int)key - shift + a.left + 1, 0), (int)queries);
    }
};

// Which scores of a tile count: queries from `query` on and keys from `key` on, some of each.
struct Seen {
    int shift, left, right;
    u32 keys;

    template <class E>
    __device__ __forceinline__ Seen(const Described<E> &a, int shift, u32 keys)
        : shift(shift), left(a.left), right(a.right), keys(keys) {}
    // Whether any of them counts.
    __device__ __forceinline__ bool any(u32 query, u32 queries, u32 key, u32 count) const {
        const int first = (int)query + shift, last = first + (int)queries - 1;
        return key < keys && (int)key <= last + right && (int)(key + count) > first - left;
    }
    // Whether all of them do.
    __device__ __forceinline__ bool all(u32 query, u32 queries, u32 key, u32 count) const {
        const int first = (int)query + shift, last = first + (int)queries - 1;
        return key + count <= keys && (int)(key + count) - 1 <= first + right && (int)key >= last - left;
    }
    __device__ __forceinline__ bool one(u32 query, u32 key) const {
        const int position = (int)query + shift;
        return key < keys && (u32)((int)key - (position - left)) <= (u32)left + (u32)right;
    }
};

// One head of the queries of a sequence, for kernels without tensor cores: where its rows lie, and scores.
template <class E, bool BIASED> struct HeadOf {
    const Described<E> &a;
    const Part &part;
    u32 head, d;
    Dropout dropout;
    const float *by_distance;
    float slope;

    __device__ __forceinline__ HeadOf(const Described<E> &a, const Part &part, u32 head, float *by_distance)
        : a(a), part(part), head(head), d(a.head_size), dropout(a.dropout), by_distance(by_distance), slope(0.0f) {
        dropout.begin();
        dropout.site |= (head + 1) << 16;
        if (!BIASED) return;
        __syncthreads();
        a.fill_bias(by_distance, slope, head, 1.0f);
        __syncthreads();
    }

    __device__ __forceinline__ u64 query(u32 query) const {
        return (u64)(part.first_query + query) * a.query_stride + head * d;
    }
    __device__ __forceinline__ u64 key(u32 key) const { return (u64)part.key_row(a, key) * a.key_stride + head / a.group * d; }
    __device__ __forceinline__ u64 value(u32 key) const {
        return (u64)part.key_row(a, key) * a.value_stride + head / a.group * d;
    }
    // A row of the output.
    __device__ __forceinline__ u64 single(u32 query) const {
        return (u64)(part.first_query + query) * a.heads * d + head * d;
    }
    __device__ __forceinline__ u64 sums(u32 query) const { return (u64)head * a.queries + part.first_query + query; }

    __device__ __forceinline__ float score(float product, u32 query, u32 key) const {
        if (!BIASED) return product * a.scale;
        const int distance = (int)key - (int)query - part.shift;
        return product * a.scale + fmaf(slope, (float)abs(distance), by_distance[a.near(distance)]);
    }
};
