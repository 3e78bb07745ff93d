// Blocks of threads whose groups of four warps do different things at once, for Hopper: one fetches, the others multiply. What passes
// between them lies in rings of shared memory, each place of which has two barriers: it is full, it is empty. Stands after common.cuh.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

constexpr u32 GROUP_THREADS = 128;

// ---- Barriers in shared memory --------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_begin(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives when all copies that this thread began have come.
__device__ __forceinline__ void barrier_arrive_with_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}
// Barriers by number, of some groups: those who wait, and those who only say that they were there.
__device__ __forceinline__ void groups_wait(u32 number, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void groups_arrive(u32 number, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// A place in a ring of N, and how often it came round. Who fills it waits for `empty` with the other parity.
template <u32 N> struct Ring {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == N) stage = 0, parity ^= 1;
    }
};

template <int N> __device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- Products -------------------------------------------------------------------------------------------------------

// How wgmma is told of a factor whose rows in memory are what is summed over, N columns of 64 each `panel` bytes apart.
__device__ __forceinline__ u64 panels_at(u32 address, u32 panel) {
    constexpr u64 EIGHT_ROWS = 8 * 128 >> 4, MIXED_128 = 1;
    return static_cast<u64>(address >> 4 & 0x3fff) | static_cast<u64>(panel >> 4) << 16 | EIGHT_ROWS << 32 | MIXED_128 << 62;
}

#define FOUR(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define SIXTEEN(n) FOUR(n), FOUR(n + 1), FOUR(n + 2), FOUR(n + 3)
#define NUMBERS_64                                                                                                         \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, "  \
    "%25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d (64 × 128) = or += a (64 × 16) · b (16 × 128): as wgmma.cuh has it for 64 columns.
template <int LEFT_ACROSS, int RIGHT_ACROSS>
__device__ __forceinline__ void group_multiply(float (&d)[16][4], u64 a, u64 b, bool add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NUMBERS_64 "}, %64, %65, p, 1, 1, %67, %68;\n}"
                 : SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12)
                 : "l"(a), "l"(b), "r"((u32)add), "n"(LEFT_ACROSS), "n"(RIGHT_ACROSS));
}
__device__ __forceinline__ void group_multiply_add(float (&d)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NUMBERS_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
                 : SIXTEEN(0), SIXTEEN(4), SIXTEEN(8), SIXTEEN(12)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#undef NUMBERS_64
#undef SIXTEEN
#undef FOUR

#endif
