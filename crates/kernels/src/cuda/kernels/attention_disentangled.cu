// What disentangled attention needs besides the kernels for POSITIONS of attention_general.cu and attention_plain.cu: gradients of scores
// become gradients of the products with positions that they were gathered from.
//
// Compiled for a storage type STORE.

typedef STORE E;
typedef Described<E> Arguments;

constexpr u32 TILE = 128;

// to (rows × A × positions) = for each row the sum of those gradients of its scores that belong to a position: those at distances from
// starts[position] to before starts[position + 1], the query's place less the key's. Rows are queries, or keys. One thread adds them in
// order.
extern "C" __global__ void __launch_bounds__(256)
    contract(const __grid_constant__ Arguments a, E *to, const int *starts, u32 by_keys) {
    Part part;
    if (!part.begin(a, TILE, false)) return;
    const u32 head = blockIdx.x, rows_end = min(part.queries, part.row + TILE);
    for (u32 row = part.row; row < rows_end; row++) {
        const u64 at = (u64)(part.first_query + row) * a.heads + head;
        const E *from = a.dscores + at * a.reach;
        for (u32 position = threadIdx.x; position < a.positions; position += 256) {
            const int near = starts[position], end = starts[position + 1];
            const int first = max((int)row + (by_keys ? near : 1 - end), 0);
            const int last = min((int)row + (by_keys ? end - 1 : -near), (int)part.queries - 1);
            float sum = 0.0f;
            for (int other = first; other <= last; other++) sum += widen(from[other]);
            to[at * a.positions + position] = narrow<E>(sum);
        }
    }
}
