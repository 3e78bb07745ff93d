// Adafactor over flat buffers: matrices that are kept by rows and columns in tiles, all else in pieces. What changes from step to step
// is read from device memory. Gradients are read three times (sums of rows and columns, with which their norm is known, too; the update's
// size; the step), parameters twice: the size of a step depends on theirs, and on that of the whole update.
//
// Stands behind flat.cuh. Legend: R rows and C columns of a matrix.

// A tile of a matrix has so many rows and columns at most: a warp has a row at a time, four columns a lane.
#define TILE 128
#define WARPS 8
// Rows or columns of which a block adds up the tiles' sums.
#define LINES 32

// A tile of a matrix, or so many numbers (`rows`) of another tensor.
struct Piece {
    u64 start;  // Its first number.
    u32 tensor;
    u32 row, column, rows;
};

struct Tensor {
    u64 start, length;
    u64 state;                       // Of what is kept, in the state: R + C means, or all moments.
    u64 roots;                       // Of R + C factors.
    u64 row_sums, column_sums;       // Among the tiles' sums: R for each tile of a row, C for each tile of a column.
    u32 rows, columns;               // 0 where it is not divided.
    u32 first_piece, end_piece;
    u32 first_line, end_line;        // Its blocks of rows among `lines`.
    float rate;                      // On the learning rate.
    u32 decays;
};

// Up to LINES rows or columns of a matrix.
struct Line {
    u32 tensor, first, of_columns;
};

// What `prepare` computes for a step; as in optimizer.rs.
struct Factors {
    float learning_rate, beta, rest, gradient_scale;
    float norm;
    u32 skip;
};

#define LEAST_SQUARE 1e-30

// A warp's part of a tile, in units of four columns, which lie 32 apart where rows do not begin at multiples of 16 bytes.
struct Tile {
    u64 start;
    u32 columns, width, lane;
    bool vector;

    __device__ __forceinline__ Tile(const Piece &piece, const Tensor &tensor)
        : start(piece.start), columns(tensor.columns), width(min(TILE, tensor.columns - piece.column)), lane(threadIdx.x % 32),
          vector(piece.start % UNIT == 0 && tensor.columns % UNIT == 0) {}

    // The column of the lane's k-th number; it may lie beyond the tile.
    __device__ __forceinline__ u32 column(int k) const { return vector ? UNIT * lane + k : lane + 32 * k; }
    __device__ __forceinline__ u64 row(u32 row) const { return start + (u64)row * columns; }

    // Zeros beyond the tile.
    __device__ __forceinline__ void load(const float *p, u64 row, float (&x)[UNIT]) const {
        if (vector) {
            x[0] = x[1] = x[2] = x[3] = 0.0f;
            if (column(0) < width) ::load(p, row + column(0), UNIT, x);
        } else {
#pragma unroll
            for (int k = 0; k < UNIT; k++) x[k] = column(k) < width ? p[row + column(k)] : 0.0f;
        }
    }
    template <class E> __device__ __forceinline__ void store(E *p, u64 row, const float (&x)[UNIT]) const {
        if (vector) {
            if (column(0) < width) ::store(p, row + column(0), UNIT, x);
        } else {
#pragma unroll
            for (int k = 0; k < UNIT; k++)
                if (column(k) < width) p[row + column(k)] = narrow<E>(x[k]);
        }
    }
};

// The sums of g² over a tile's rows and columns, and Σg² and Σp² of each piece. p: null where nobody asks for the latter.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    sums(const Piece *pieces, const Tensor *tensors, const float *p, const float *g, float *of_tiles, double2 *squares) {
    __shared__ double space[32];
    __shared__ float by_warp[WARPS][TILE];
    const Piece piece = pieces[blockIdx.x];
    const Tensor &tensor = tensors[piece.tensor];
    double of_g = 0.0, of_p = 0.0;
    if (tensor.columns == 0) {
        for_piece(piece.start, piece.rows, [&](u64 i, int count) {
            float gg[UNIT], pp[UNIT] = {}, squares_g = 0.0f, squares_p = 0.0f;
            load(g, i, count, gg);
            if (p) load(p, i, count, pp);
#pragma unroll
            for (int k = 0; k < UNIT; k++) {
                if (k >= count) break;
                squares_g = fmaf(gg[k], gg[k], squares_g);
                squares_p = fmaf(pp[k], pp[k], squares_p);
            }
            of_g += (double)squares_g;
            of_p += (double)squares_p;
        });
    } else {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const Tile tile(piece, tensor);
        float *of_rows = of_tiles + tensor.row_sums + (u64)(piece.column / TILE) * tensor.rows + piece.row;
        float of_columns[UNIT] = {}, rows = 0.0f, squares_p = 0.0f;
#pragma unroll 4
        for (u32 row = warp; row < piece.rows; row += WARPS) {
            float gg[UNIT], pp[UNIT] = {}, sum = 0.0f;
            tile.load(g, tile.row(row), gg);
            if (p) tile.load(p, tile.row(row), pp);
#pragma unroll
            for (int k = 0; k < UNIT; k++) {
                const float square = gg[k] * gg[k];
                sum += square;
                of_columns[k] += square;
                squares_p = fmaf(pp[k], pp[k], squares_p);
            }
            sum = warp_sum(sum);
            if (lane == 0) of_rows[row] = sum;
            rows += sum;
        }
#pragma unroll
        for (int k = 0; k < UNIT; k++) by_warp[warp][tile.column(k)] = of_columns[k];
        __syncthreads();
        if (threadIdx.x < tile.width) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += by_warp[w][threadIdx.x];
            of_tiles[tensor.column_sums + (u64)(piece.row / TILE) * tensor.columns + piece.column + threadIdx.x] = sum;
        }
        of_g = lane == 0 ? (double)rows : 0.0;
        of_p = (double)squares_p;
    }
    of_g = block_sum(of_g, space);
    of_p = block_sum(of_p, space);
    if (threadIdx.x == 0) squares[blockIdx.x] = make_double2(of_g, of_p);
}

// control: as of optimizer.cu's `prepare`, where the number is that of the step in any case. Gradients whose norm is not finite change
// nothing: `skip`. One block.
extern "C" __global__ void __launch_bounds__(1024)
    prepare(const double *control, const double2 *squares, u32 pieces, double decay_rate, Factors *factors) {
    __shared__ double space[32];
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < pieces; i += blockDim.x) sum += squares[i].x;
    sum = block_sum(sum, space);
    if (threadIdx.x != 0) return;
    const double bound = control[2], norm = sqrt(sum) * control[3];
    const double clip = bound > 0.0 ? fmin(bound / (norm + 1e-6), 1.0) : 1.0;
    const double beta = 1.0 - pow(control[1], -decay_rate);
    factors->learning_rate = (float)control[0];
    factors->beta = (float)beta;
    factors->rest = (float)(1.0 - beta);
    factors->gradient_scale = (float)(control[3] * clip);
    factors->norm = (float)norm;
    factors->skip = isfinite(norm) ? 0 : 1;
}

// The means of some rows or columns, and Σ of the rows' over the block. Of columns also the factors: one over the mean's root.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    means(const Line *lines, const Tensor *tensors, const Factors *factors, const float *of_tiles, float *state, float *roots,
          double *of_lines) {
    __shared__ double by_warp[WARPS][LINES];
    const Factors f = *factors;
    if (f.skip) return;
    const Line line = lines[blockIdx.x];
    const Tensor &tensor = tensors[line.tensor];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = line.first + lane;
    const u32 count = line.of_columns ? tensor.columns : tensor.rows, others = line.of_columns ? tensor.rows : tensor.columns;
    const float *from = of_tiles + (line.of_columns ? tensor.column_sums : tensor.row_sums);
    double sum = 0.0;
    if (i < count) {
        // Each warp has every eighth tile.
#pragma unroll 4
        for (u32 tile = warp; tile < (others + TILE - 1) / TILE; tile += WARPS) sum += (double)from[(u64)tile * count + i];
    }
    by_warp[warp][lane] = sum;
    __syncthreads();
    if (warp != 0) return;
    sum = 0.0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += by_warp[w][lane];
    double mean = 0.0;
    if (i < count) {
        const u64 place = (line.of_columns ? tensor.rows : 0) + i;
        const double scale = (double)f.gradient_scale, now = sum * scale * scale / (double)others + LEAST_SQUARE;
        const float kept = fmaf(f.beta, state[tensor.state + place], f.rest * (float)now);
        state[tensor.state + place] = kept;
        mean = (double)kept;
        if (line.of_columns) roots[tensor.roots + place] = (float)(1.0 / sqrt(mean));
    }
    mean = warp_sum(mean);
    if (lane == 0) of_lines[blockIdx.x] = mean;
}

// The rows' factors: the root of the mean over all rows over their own, and the gradients' scale. A block for some rows.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    row_roots(const Line *lines, const Tensor *tensors, const Factors *factors, const double *of_lines, const float *state,
              float *roots) {
    __shared__ double space[32];
    const Factors f = *factors;
    if (f.skip) return;
    const Line line = lines[blockIdx.x];
    const Tensor &tensor = tensors[line.tensor];
    double sum = 0.0;
    for (u32 i = tensor.first_line + threadIdx.x; i < tensor.end_line; i += blockDim.x) sum += of_lines[i];
    const double mean = block_sum(sum, space) / (double)tensor.rows;
    const u32 row = line.first + threadIdx.x;
    if (threadIdx.x >= LINES || row >= tensor.rows) return;
    roots[tensor.roots + row] = (float)(sqrt(mean / (double)state[tensor.state + row]) * (double)f.gradient_scale);
}

// A lane's columns' factors in a tile.
__device__ __forceinline__ void column_roots(const Tile &tile, const Piece &piece, const Tensor &tensor, const float *roots,
                                             float (&x)[UNIT]) {
#pragma unroll
    for (int k = 0; k < UNIT; k++) {
        const u32 column = tile.column(k);
        x[k] = column < tile.width ? roots[tensor.roots + tensor.rows + piece.column + column] : 0.0f;
    }
}

// Σ of the update's squares of each piece; moments that are not divided are updated on the way.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    updates(const Piece *pieces, const Tensor *tensors, const Factors *factors, const float *g, const float *roots, float *state,
            double *squares) {
    __shared__ double space[32];
    const Factors f = *factors;
    if (f.skip) return;
    const Piece piece = pieces[blockIdx.x];
    const Tensor &tensor = tensors[piece.tensor];
    double total = 0.0;
    if (tensor.columns == 0) {
        // A lane has one number at a time: what is kept need not begin where vectors do.
        for (u32 i = threadIdx.x; i < piece.rows; i += blockDim.x) {
            const float gg = g[piece.start + i] * f.gradient_scale;
            float &v = state[tensor.state + (piece.start - tensor.start) + i];
            const float kept = fmaf(f.beta, v, fmaf(gg, gg, (float)LEAST_SQUARE) * f.rest);
            v = kept;
            total += (double)(gg * gg / kept);
        }
    } else {
        const Tile tile(piece, tensor);
        float of_columns[UNIT], sum = 0.0f;
        column_roots(tile, piece, tensor, roots, of_columns);
#pragma unroll 4
        for (u32 row = threadIdx.x / 32; row < piece.rows; row += WARPS) {
            const float of_row = roots[tensor.roots + piece.row + row];
            float gg[UNIT];
            tile.load(g, tile.row(row), gg);
#pragma unroll
            for (int k = 0; k < UNIT; k++) {
                const float u = gg[k] * of_row * of_columns[k];
                sum = fmaf(u, u, sum);
            }
        }
        total = (double)sum;
    }
    total = block_sum(total, space);
    if (threadIdx.x == 0) squares[blockIdx.x] = total;
}

// What a tensor's step is multiplied by, and what decay leaves of its numbers. A block a tensor.
extern "C" __global__ void __launch_bounds__(256)
    rates(const Tensor *tensors, const Factors *factors, const double2 *squares, const double *of_updates, double clip,
          double least_scale, u32 scales, double weight_decay, float2 *to) {
    __shared__ double space[32];
    const Factors f = *factors;
    if (f.skip) return;
    const Tensor &tensor = tensors[blockIdx.x];
    double u = 0.0, p = 0.0;
    for (u32 i = tensor.first_piece + threadIdx.x; i < tensor.end_piece; i += blockDim.x) {
        u += of_updates[i];
        p += squares[i].y;
    }
    u = block_sum(u, space);
    p = block_sum(p, space);
    if (threadIdx.x != 0) return;
    const double length = (double)max(tensor.length, 1ull);
    const double scale = scales ? fmax(sqrt(p / length), least_scale) : 1.0;
    const double rate = (double)f.learning_rate * (double)tensor.rate * scale;
    const double stays = tensor.decays ? 1.0 - weight_decay * rate : 1.0;
    to[blockIdx.x] = make_float2((float)(rate / fmax(sqrt(u / length) / clip, 1.0)), (float)stays);
}

// The step.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    apply(const Piece *pieces, const Tensor *tensors, const Factors *factors, const float *g, const float *roots,
          const float *state, const float2 *rates, float *p, bf16 *copy) {
    const Factors f = *factors;
    if (f.skip) return;
    const Piece piece = pieces[blockIdx.x];
    const Tensor &tensor = tensors[piece.tensor];
    const float rate = rates[piece.tensor].x, stays = rates[piece.tensor].y;
    if (tensor.columns == 0) {
        for (u32 i = threadIdx.x; i < piece.rows; i += blockDim.x) {
            const u64 place = piece.start + i;
            const float v = state[tensor.state + (place - tensor.start)];
            const float updated = fmaf(g[place] * f.gradient_scale / sqrtf(v), -rate, p[place] * stays);
            p[place] = updated;
            if (copy) copy[place] = narrow<bf16>(updated);
        }
        return;
    }
    const Tile tile(piece, tensor);
    float of_columns[UNIT];
    column_roots(tile, piece, tensor, roots, of_columns);
#pragma unroll 4
    for (u32 row = threadIdx.x / 32; row < piece.rows; row += WARPS) {
        const u64 start = tile.row(row);
        const float of_row = roots[tensor.roots + piece.row + row];
        float gg[UNIT], pp[UNIT];
        tile.load(g, start, gg);
        tile.load(p, start, pp);
#pragma unroll
        for (int k = 0; k < UNIT; k++) pp[k] = fmaf(gg[k] * of_row * of_columns[k], -rate, pp[k] * stays);
        tile.store(p, start, pp);
        if (copy) tile.store(copy, start, pp);
    }
}
