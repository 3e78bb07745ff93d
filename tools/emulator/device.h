// What a CUDA kernel finds when a C++ compiler for the CPU translates it: built-in types and functions, and a function for every PTX
// instruction that henson's sources use in `asm`. compiler.cpp puts this in front of a source after it has rewritten `asm`,
// `__global__` and `extern __shared__`. The parts that need other threads of a block are in driver.cpp.
//
// What is stricter here than on a GPU, so that mistakes show: asynchronous copies arrive as late as they may (at the wait for their
// group), lanes that meet at different instructions end the program, shared memory starts as NaN.

#pragma once
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static

struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline double2 make_double2(double x, double y) { return {x, y}; }

// --- the block, in driver.cpp -------------------------------------------------------------------------------------------

extern "C" {
extern uint3 threadIdx, blockIdx, blockDim, gridDim;

// Waits for the other lanes in `mask` to come here with `what`, and gives the values of all 32, `EXCHANGED` bytes apart.
const unsigned char *henson_exchange(const char *what, unsigned mask, const void *value, size_t bytes);
// Named barriers; a count of 0 is all threads of the block.
void henson_barrier(unsigned number, unsigned count, bool wait);
// Lets others run until something may have changed.
void henson_poll();
// The block's dynamic shared memory, and what its threads call addresses in it.
unsigned char *henson_shared();
unsigned henson_shared_address(const void *p);
unsigned char *henson_shared_pointer(unsigned address);
// Copies that arrive at a later wait.
void henson_copy_later(unsigned to, const void *from, unsigned bytes);
void henson_copies_commit();
void henson_copies_wait(unsigned groups);
// How the copy engine was told of a matrix.
void henson_copy_box(unsigned to, const void *map, unsigned barrier, unsigned column, unsigned row);
[[noreturn]] void henson_fail(const char *what);
}

namespace henson {

constexpr size_t EXCHANGED = 64;

// The values that all lanes of the warp came with.
template <class T> struct Lanes {
    const unsigned char *all;
    const T &operator[](unsigned lane) const { return *(const T *)(all + EXCHANGED * lane); }
};
template <class T> inline Lanes<T> exchange(const char *what, unsigned mask, const T &value) {
    static_assert(sizeof(T) <= EXCHANGED, "too large for an exchange");
    return {henson_exchange(what, mask, &value, sizeof(T))};
}
inline unsigned lane() { return threadIdx.x % 32; }
inline float from_bf16(uint16_t bits) {
    const uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}
inline uint16_t to_bf16(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    if (value != value) return 0x7fff;
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
inline float half_of(uint32_t word, unsigned high) { return from_bf16((uint16_t)(word >> 16 * high)); }

// Kernels take their arguments from an array of addresses.
template <class... A, size_t... I> inline void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<A> *>(arguments[I])...);
}
template <class... A> inline void call(void (*kernel)(A...), void **arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>{});
}
template <class... A> inline size_t sizes(void (*)(A...), size_t *out) {
    const size_t all[] = {sizeof(A)..., 0};
    if (out) memcpy(out, all, sizeof...(A) * sizeof(size_t));
    return sizeof...(A);
}

}  // namespace henson

// --- built-in functions -------------------------------------------------------------------------------------------------

inline void __syncthreads() { henson_barrier(0, 0, true); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { henson::exchange("__syncwarp", mask, 0); }
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T> inline T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    const unsigned lane = henson::lane();
    return henson::exchange("__shfl_sync", mask, value)[(lane & ~(width - 1)) | (from & (width - 1))];
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int with) {
    return henson::exchange("__shfl_xor_sync", mask, value)[henson::lane() ^ with];
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned by) {
    const unsigned lane = henson::lane();
    return henson::exchange("__shfl_up_sync", mask, value)[lane >= by ? lane - by : lane];
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned by) {
    const unsigned lane = henson::lane();
    return henson::exchange("__shfl_down_sync", mask, value)[lane + by < 32 ? lane + by : lane];
}
inline unsigned __ballot_sync(unsigned mask, int yes) {
    const auto all = henson::exchange("__ballot_sync", mask, yes);
    unsigned bits = 0;
    for (unsigned i = 0; i < 32; i++)
        if ((mask >> i & 1) && all[i]) bits |= 1u << i;
    return bits;
}
inline int __any_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) != 0; }
inline int __all_sync(unsigned mask, int yes) { return __ballot_sync(mask, yes) == mask; }
template <class T> inline unsigned __match_any_sync(unsigned mask, T value) {
    const auto all = henson::exchange("__match_any_sync", mask, value);
    unsigned bits = 0;
    for (unsigned i = 0; i < 32; i++)
        if ((mask >> i & 1) && all[i] == value) bits |= 1u << i;
    return bits;
}

using std::isfinite;
using std::isinf;
using std::isnan;
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline float __logf(float x) { return logf(x); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
template <class T> inline T __ldg(const T *p) { return *p; }
// As CUDA has them: mixed signs compare as unsigned.
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// One thread runs at a time, so plain operations are atomic.
template <class T> inline T atomicAdd(T *at, std::common_type_t<T> value) {
    const T before = *at;
    *at = before + value;
    return before;
}
template <class T> inline T atomicMax(T *at, std::common_type_t<T> value) {
    const T before = *at;
    if (value > before) *at = value;
    return before;
}

inline size_t __cvta_generic_to_shared(const void *p) { return henson_shared_address(p); }

// --- instructions, by the names that compiler.cpp gives them --------------------------------------------------------------

namespace ptx {

template <class... A> inline void nothing(const A &...) {}
inline void cvt_bf16x2(unsigned &out, float high, float low) {
    out = (unsigned)henson::to_bf16(high) << 16 | henson::to_bf16(low);
}
inline void ex2(float &out, float x) { out = exp2f(x); }
inline void rcp(float &out, float x) { out = 1.0f / x; }
inline void square_root(float &out, float x) { out = sqrtf(x); }
inline void tanh_fast(float &out, float x) { out = tanhf(x); }

template <class P> inline void copy_16(unsigned to, P from) { henson_copy_later(to, (const void *)from, 16); }
inline void copy_unless(unsigned to, const void *from, unsigned valid, unsigned bytes) {
    // Nothing is read where the bytes are not wanted.
    henson_copy_later(to, valid ? from : nullptr, bytes);
}
template <class P> inline void copy_16_if(unsigned to, P from, unsigned valid) { copy_unless(to, (const void *)from, valid, 16); }
template <class P> inline void copy_8_if(unsigned to, P from, unsigned valid) { copy_unless(to, (const void *)from, valid, 8); }
inline void copies_commit() { henson_copies_commit(); }
inline void copies_wait(unsigned groups) { henson_copies_wait(groups); }

inline void aligned(unsigned address, unsigned to) {
    if (address % to != 0) henson_fail("a shared address is not aligned");
}
inline void load_shared_4(unsigned &a, unsigned &b, unsigned &c, unsigned &d, unsigned address) {
    aligned(address, 16);
    unsigned words[4];
    memcpy(words, henson_shared_pointer(address), 16);
    a = words[0], b = words[1], c = words[2], d = words[3];
}
inline void store_shared(unsigned address, unsigned value) {
    aligned(address, 4);
    memcpy(henson_shared_pointer(address), &value, 4);
}
template <class P> inline void store_global_4(P to, unsigned a, unsigned b, unsigned c, unsigned d) {
    *(uint4 *)to = make_uint4(a, b, c, d);
}

inline void global_aligned(const void *p, unsigned to) {
    if ((uintptr_t)p % to != 0) henson_fail("an address is not aligned");
}
template <class P> inline void load_global_4(float &a, float &b, float &c, float &d, P from) {
    global_aligned((const void *)from, 16);
    const float4 v = *(const float4 *)from;
    a = v.x, b = v.y, c = v.z, d = v.w;
}
template <class P> inline void add_global_4(P to, float a, float b, float c, float d) {
    global_aligned((const void *)to, 16);
    float4 &v = *(float4 *)to;
    v = {v.x + a, v.y + b, v.z + c, v.w + d};
}
// Whoever waits for a number lets others run.
template <class P> inline void load_acquire(unsigned &out, P from) {
    out = *(const volatile unsigned *)from;
    henson_poll();
}
template <class P> inline void store_release(P to, unsigned value) { *(volatile unsigned *)to = value; }

// Matrix i has its rows at the addresses of lanes 8i to 8i + 7.
inline unsigned matrix_part(const henson::Lanes<unsigned> &rows, unsigned matrix, bool transposed) {
    const unsigned lane = henson::lane(), near = lane / 4, far = 2 * (lane % 4);
    uint16_t two[2];
    for (unsigned i = 0; i < 2; i++) {
        const unsigned row = transposed ? far + i : near, column = transposed ? near : far + i;
        const unsigned address = rows[8 * matrix + row];
        aligned(address, 16);
        memcpy(&two[i], henson_shared_pointer(address) + 2 * column, 2);
    }
    return (unsigned)two[1] << 16 | two[0];
}
inline void load_matrices(unsigned &a, unsigned &b, unsigned &c, unsigned &d, unsigned address, bool transposed) {
    const auto rows = henson::exchange("ldmatrix", 0xffffffffu, address);
    a = matrix_part(rows, 0, transposed), b = matrix_part(rows, 1, transposed);
    c = matrix_part(rows, 2, transposed), d = matrix_part(rows, 3, transposed);
}
inline void load_matrices_plain(unsigned &a, unsigned &b, unsigned &c, unsigned &d, unsigned address) {
    load_matrices(a, b, c, d, address, false);
}
inline void load_matrices_transposed(unsigned &a, unsigned &b, unsigned &c, unsigned &d, unsigned address) {
    load_matrices(a, b, c, d, address, true);
}
inline void store_matrices(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
    const auto rows = henson::exchange("stmatrix", 0xffffffffu, address);
    const unsigned words[4] = {a, b, c, d}, lane = henson::lane();
    for (unsigned i = 0; i < 4; i++) {
        aligned(rows[8 * i + lane / 4], 16);
        memcpy(henson_shared_pointer(rows[8 * i + lane / 4]) + 4 * (lane % 4), &words[i], 4);
    }
}

struct Factors {
    unsigned a[4], b[2];
};
// c (16×8) += a (16×16) · b (16×8), bf16. Products are exact in f32, their sum is rounded once.
inline void mma_bf16(float &c0, float &c1, float &c2, float &c3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                     unsigned b1) {
    const auto all = henson::exchange("mma", 0xffffffffu, Factors{{a0, a1, a2, a3}, {b0, b1}});
    const unsigned lane = henson::lane(), group = lane / 4, place = lane % 4;
    double left[2][16], right[2][16];
    for (unsigned side = 0; side < 2; side++)
        for (unsigned k = 0; k < 16; k++) {
            const unsigned half = k / 8, owner = k % 8 / 2, high = k % 2;
            left[side][k] = henson::half_of(all[4 * group + owner].a[side + 2 * half], high);
            right[side][k] = henson::half_of(all[4 * (2 * place + side) + owner].b[half], high);
        }
    float *const out[4] = {&c0, &c1, &c2, &c3};
    for (unsigned i = 0; i < 4; i++) {
        double sum = *out[i];
        for (unsigned k = 0; k < 16; k++) sum += left[i / 2][k] * right[i % 2][k];
        *out[i] = (float)sum;
    }
}

inline void barrier_sync(unsigned number, unsigned threads) { henson_barrier(number, threads, true); }
inline void barrier_arrive(unsigned number, unsigned threads) { henson_barrier(number, threads, false); }

// mbarrier: the phase's parity, arrivals that are missing and expected, bytes that are missing.
struct Barrier {
    uint16_t phase, missing, expected, unused;
};
static_assert(sizeof(Barrier) == 8);
// Bytes are counted apart: eight bytes of shared memory have no room for them.
extern "C" int &henson_barrier_bytes(unsigned address);
inline Barrier *barrier_at(unsigned address) {
    aligned(address, 8);
    return (Barrier *)henson_shared_pointer(address);
}
inline void barrier_turn(unsigned address) {
    Barrier *b = barrier_at(address);
    if (b->missing == 0 && henson_barrier_bytes(address) == 0) b->phase ^= 1, b->missing = b->expected;
}
inline void mbarrier_init(unsigned address, unsigned arrivals) {
    *barrier_at(address) = {0, (uint16_t)arrivals, (uint16_t)arrivals, 0};
    henson_barrier_bytes(address) = 0;
}
inline void mbarrier_expect(unsigned address, unsigned bytes) {
    henson_barrier_bytes(address) += (int)bytes;
    barrier_at(address)->missing--;
    barrier_turn(address);
}
inline void mbarrier_arrive(unsigned address) {
    barrier_at(address)->missing--;
    barrier_turn(address);
}
inline void mbarrier_arrive_with_copies(unsigned address) {
    copies_commit();
    copies_wait(0);
    mbarrier_arrive(address);
}
inline void mbarrier_try(unsigned &done, unsigned address, unsigned parity) {
    done = barrier_at(address)->phase != parity;
    if (!done) henson_poll();
}
template <class P> inline void copy_box(unsigned to, P map, unsigned barrier, unsigned column, unsigned row) {
    henson_copy_box(to, (const void *)map, barrier, column, row);
}

// wgmma: a factor in shared memory by its descriptor, with the 128-byte swizzle. `across`: rows in memory are what is summed over, and
// 64 columns of them lie together; the next 64 are `leading` further.
inline float factor(uint64_t descriptor, unsigned outer, unsigned k, bool across) {
    if (descriptor >> 62 != 1) henson_fail("wgmma: only the 128-byte swizzle is known");
    const unsigned start = (unsigned)(descriptor & 0x3fff) << 4, leading = (unsigned)(descriptor >> 16 & 0x3fff) << 4;
    const unsigned eight_rows = (unsigned)(descriptor >> 32 & 0x3fff) << 4;
    const unsigned row = across ? k : outer, column = across ? outer % 64 : k;
    unsigned at = start + row / 8 * eight_rows + row % 8 * 128 + 2 * column + (across ? outer / 64 * leading : 0);
    at ^= (at >> 7 & 7) << 4;
    uint16_t bits;
    memcpy(&bits, henson_shared() + at, 2);
    return henson::from_bf16(bits);
}
// The factors of a warp's instruction as its lanes have read them, each a part.
struct Tile {
    float left[16][16], right[256][16];
};
inline Tile &tile() {
    static Tile tiles[32];
    return tiles[threadIdx.x / 32];
}
// d (16×N of the warp) = or += left · right. Nobody goes on before all have read, and read again before all have multiplied.
template <int N, class Left> inline void group_multiply(float *const *d, Left left, uint64_t right, bool add, bool across) {
    const unsigned lane = henson::lane(), group = lane / 4, place = lane % 4;
    Tile &t = tile();
    for (unsigned i = lane; i < 256; i += 32) t.left[i / 16][i % 16] = left(i / 16, i % 16);
    for (unsigned i = lane; i < 16 * N; i += 32) t.right[i / 16][i % 16] = factor(right, i / 16, i % 16, across);
    henson::exchange("wgmma, factors read", 0xffffffffu, 0);
    for (unsigned n = 0; n < N / 8; n++)
        for (unsigned i = 0; i < 4; i++) {
            const float *a = t.left[group + 8 * (i / 2)], *b = t.right[8 * n + 2 * place + i % 2];
            double sum = add ? (double)*d[4 * n + i] : 0.0;
            for (unsigned k = 0; k < 16; k++) sum += (double)a[k] * b[k];
            *d[4 * n + i] = (float)sum;
        }
    henson::exchange("wgmma, done", 0xffffffffu, 0);
}
template <int N, class... Rest, size_t... I>
inline void wgmma_memory(std::tuple<Rest...> all, std::index_sequence<I...>) {
    float *const d[] = {&std::get<I>(all)...};
    constexpr size_t AT = N / 2;
    const uint64_t left = std::get<AT>(all), right = std::get<AT + 1>(all);
    const bool add = std::get<AT + 2>(all);
    // Where only one of the two stands among the operands, it is the right factor's: the left one's is 0 in the instruction.
    constexpr size_t LAST = sizeof...(Rest) - 1;
    const bool right_across = std::get<LAST>(all), left_across = LAST == AT + 4 ? (bool)std::get<AT + 3>(all) : false;
    henson::exchange("wgmma", 0xffffffffu, 0);
    const unsigned first = threadIdx.x / 32 % 4 * 16;
    const auto from_memory = [&](unsigned row, unsigned k) { return factor(left, first + row, k, left_across); };
    group_multiply<N>(d, from_memory, right, add, right_across);
}
template <int N, class... Rest> inline void wgmma(Rest &&...all) {
    wgmma_memory<N>(std::tuple<Rest &&...>(std::forward<Rest>(all)...), std::make_index_sequence<N / 2>{});
}
template <int N, class... Rest, size_t... I>
inline void wgmma_registers(std::tuple<Rest...> all, std::index_sequence<I...>) {
    float *const d[] = {&std::get<I>(all)...};
    constexpr size_t AT = N / 2;
    const Factors own = {{std::get<AT>(all), std::get<AT + 1>(all), std::get<AT + 2>(all), std::get<AT + 3>(all)}, {0, 0}};
    const uint64_t right = std::get<AT + 4>(all);
    const auto lanes = henson::exchange("wgmma", 0xffffffffu, own);
    const auto from_lanes = [&](unsigned row, unsigned k) {
        return henson::half_of(lanes[4 * (row % 8) + k % 8 / 2].a[row / 8 + 2 * (k / 8)], k % 2);
    };
    group_multiply<N>(d, from_lanes, right, true, true);
}
template <int N, class... Rest> inline void wgmma_from_registers(Rest &&...all) {
    wgmma_registers<N>(std::tuple<Rest &&...>(std::forward<Rest>(all)...), std::make_index_sequence<N / 2>{});
}

}  // namespace ptx
