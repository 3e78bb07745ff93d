// libcuda on a CPU: memory, streams, graphs, and kernels whose threads are fibers of one thread of the process.
//
// Everything is done at once, in the order of the calls, whatever its stream; under stream capture it is kept and done when the
// graph is played. A block's threads run one after the other, each until it waits for others; blocks run one after the other. With
// HENSON_EMULATOR_ORDER=backward both go from the last to the first, so that a result that depends on the order shows.
//
// A mistake ends the program with the kernel, the block and the thread: a deadlock, lanes of a warp that meet at different
// instructions, an address outside of what was allocated.

#include <dlfcn.h>
#include <elf.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define VISIBLE extern "C" __attribute__((visibility("default")))

// --- the machine --------------------------------------------------------------------------------------------------------

namespace {

constexpr unsigned MOST_THREADS = 1024, WARPS = MOST_THREADS / 32;
constexpr size_t STACK = 256 << 10, PAGE = 4096, EXCHANGED = 64, SHARED = 256 << 10;
// What a block may have; the first 256 KiB are what 18 bits of a descriptor can name.
alignas(1024) unsigned char shared_memory[SHARED];
// Shared addresses are 32 bits wide, and only those of shared memory. The low bits of the first are zero.
constexpr uint32_t SHARED_BASE = 0x80000000u;

enum class State { Ready, Polls, AtWarp, AtBarrier, Done };

struct Copy {
    uint32_t to;
    const void *from;
    uint32_t bytes;
};

struct Thread {
    void *stack_pointer = nullptr;
    unsigned char *stack = nullptr;
    State state = State::Done;
    unsigned barrier = 0;
    std::vector<std::vector<Copy>> copies;
};

struct Warp {
    unsigned arrived, mask, done, turn;
    const char *what;
    alignas(64) unsigned char values[2][32 * EXCHANGED];
};

struct NamedBarrier {
    unsigned arrived;
};

Thread threads[MOST_THREADS];
Warp warps[WARPS];
NamedBarrier barriers[16];
std::map<uint32_t, int> barrier_bytes;
unsigned count, unfinished, running;
void *scheduler;
void (*entry)(void **);
void **entry_arguments;
const char *kernel_name = "";
bool backward_order = false, in_kernel = false;
// The process may have several threads that use the device.
std::recursive_mutex device;

[[noreturn]] void fail(const std::string &what);

}  // namespace

struct Place {
    unsigned x, y, z;
};
VISIBLE Place threadIdx, blockIdx, blockDim, gridDim;
Place threadIdx, blockIdx, blockDim, gridDim;

#if defined(__x86_64__)
// Saves what a function must not change, and goes on where the other fiber left.
asm(R"(
.text
.hidden henson_switch
henson_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
extern "C" void henson_switch(void **save, void *to);
#elif defined(__aarch64__)
asm(R"(
.text
.hidden henson_switch
henson_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
extern "C" void henson_switch(void **save, void *to);
#else
#error "fibers are written for x86-64 and 64-bit ARM"
#endif

namespace {

std::string where() {
    if (!in_kernel) return "";
    char text[160];
    snprintf(text, sizeof text, " (kernel %s, block %u, %u, thread %u)", kernel_name, blockIdx.x, blockIdx.y, running);
    return text;
}

[[noreturn]] void fail(const std::string &what) {
    fprintf(stderr, "the GPU's emulator: %s%s\n", what.c_str(), where().c_str());
    fflush(stderr);
    _exit(134);
}

void resume(unsigned t) {
    running = t;
    threadIdx.x = t;
    henson_switch(&scheduler, threads[t].stack_pointer);
}

void leave() { henson_switch(&threads[running].stack_pointer, scheduler); }

// Whether all lanes of a warp that are to meet have come.
void meet(unsigned w) {
    Warp &warp = warps[w];
    if (warp.arrived == 0 || (warp.arrived & ~warp.done) != (warp.mask & ~warp.done)) return;
    for (unsigned lane = 0; lane < 32; lane++)
        if (warp.arrived >> lane & 1) threads[32 * w + lane].state = State::Ready;
    warp.arrived = 0;
    warp.turn ^= 1;
}

void release(unsigned number, unsigned wanted) {
    if (barriers[number].arrived < wanted) return;
    barriers[number].arrived = 0;
    for (unsigned t = 0; t < count; t++)
        if (threads[t].state == State::AtBarrier && threads[t].barrier == number) threads[t].state = State::Ready;
}

// Barrier 0 with all threads that are left.
void release_all() {
    if (barriers[0].arrived > 0) release(0, unfinished);
}

[[noreturn]] void thread_main() {
    entry(entry_arguments);
    Thread &self = threads[running];
    self.state = State::Done;
    warps[running / 32].done |= 1u << running % 32;
    unfinished--;
    meet(running / 32);
    release_all();
    leave();
    abort();
}

void begin(unsigned t) {
    Thread &thread = threads[t];
    if (!thread.stack) {
        void *memory = mmap(nullptr, STACK + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) fail("no memory for the stacks of threads");
        mprotect(memory, PAGE, PROT_NONE);
        thread.stack = (unsigned char *)memory + PAGE;
    }
    void **top = (void **)(thread.stack + STACK);
#if defined(__x86_64__)
    // As if thread_main had been called: a return address that is never used, then ours, then six registers.
    *--top = nullptr;
    *--top = (void *)thread_main;
    for (int i = 0; i < 6; i++) *--top = nullptr;
#else
    top -= 20;
    memset(top, 0, 160);
    top[11] = (void *)thread_main;
#endif
    thread.stack_pointer = top;
    thread.state = State::Ready;
    thread.copies.assign(1, {});
}

const char *state_name(State state) {
    switch (state) {
        case State::Ready: return "ready";
        case State::Polls: return "polls a barrier in shared memory";
        case State::AtWarp: return "waits for lanes of its warp";
        case State::AtBarrier: return "waits at a barrier";
        default: return "done";
    }
}

void run_block() {
    memset(shared_memory, 0xff, sizeof shared_memory);
    memset(barriers, 0, sizeof barriers);
    barrier_bytes.clear();
    for (unsigned w = 0; w < (count + 31) / 32; w++) {
        const unsigned lanes = std::min(32u, count - 32 * w);
        warps[w].arrived = warps[w].turn = 0;
        warps[w].done = lanes == 32 ? 0 : ~0u << lanes;
    }
    for (unsigned t = 0; t < count; t++) begin(t);
    unfinished = count;
    const auto placed = [](unsigned i, unsigned n) { return backward_order ? n - 1 - i : i; };
    unsigned idle = 0;
    while (unfinished > 0) {
        bool ran = false;
        for (unsigned t = 0; t < count; t++)
            if (threads[t].state == State::Polls) threads[t].state = State::Ready, ran = true;
        // Polling threads alone are no progress.
        idle = ran ? idle + 1 : 0;
        ran = false;
        const unsigned all = (count + 31) / 32;
        for (unsigned i = 0; i < all; i++) {
            const unsigned w = placed(i, all), lanes = std::min(32u, count - 32 * w);
            for (bool more = true; more;) {
                more = false;
                for (unsigned j = 0; j < lanes; j++) {
                    const unsigned t = 32 * w + placed(j, lanes);
                    if (threads[t].state != State::Ready) continue;
                    resume(t);
                    more = ran = true;
                    if (threads[t].state != State::Polls) idle = 0;
                }
            }
        }
        if (!ran || idle > 100000) {
            for (unsigned t = 0; t < count; t++)
                if (threads[t].state != State::Done) {
                    running = t;
                    fail(std::string("deadlock: a thread ") + state_name(threads[t].state));
                }
        }
    }
}

}  // namespace

VISIBLE void henson_fail(const char *what) { fail(what); }

VISIBLE const unsigned char *henson_exchange(const char *what, unsigned mask, const void *value, size_t bytes) {
    const unsigned w = running / 32, lane = running % 32;
    Warp &warp = warps[w];
    if (!(mask >> lane & 1)) fail(std::string(what) + ": the mask leaves out the lane itself");
    if (warp.arrived == 0) {
        warp.mask = mask;
        warp.what = what;
    } else if (warp.mask != mask || (warp.what != what && strcmp(warp.what, what) != 0)) {
        fail(std::string(what) + ": another lane of the warp is at " + warp.what);
    }
    unsigned char *const values = warp.values[warp.turn];
    memcpy(values + EXCHANGED * lane, value, bytes);
    warp.arrived |= 1u << lane;
    threads[running].state = State::AtWarp;
    meet(w);
    if (threads[running].state != State::Ready) leave();
    return values;
}

VISIBLE void henson_barrier(unsigned number, unsigned wanted, bool wait) {
    if (number >= 16) fail("a barrier's number is above 15");
    barriers[number].arrived++;
    if (wait) {
        threads[running].state = State::AtBarrier;
        threads[running].barrier = number;
    }
    release(number, wanted == 0 ? unfinished : wanted);
    if (wait && threads[running].state != State::Ready) leave();
}

VISIBLE void henson_poll() {
    threads[running].state = State::Polls;
    leave();
}

VISIBLE unsigned char *henson_shared() { return shared_memory; }
VISIBLE unsigned henson_shared_address(const void *p) {
    // Shared arrays of fixed size are static variables of the kernel's library; their addresses are taken as they are, by distance.
    const intptr_t distance = (const unsigned char *)p - shared_memory;
    if (distance < -(intptr_t)0x7fffffff || distance > (intptr_t)0x7fffffff) fail("shared memory is too far away");
    return SHARED_BASE + (uint32_t)(int32_t)distance;
}
VISIBLE unsigned char *henson_shared_pointer(unsigned address) { return shared_memory + (intptr_t)(int32_t)(address - SHARED_BASE); }

VISIBLE void henson_copy_later(unsigned to, const void *from, unsigned bytes) {
    if (to % bytes != 0 || (uintptr_t)from % bytes != 0) fail("an asynchronous copy is not aligned");
    threads[running].copies.back().push_back({to, from, bytes});
}
VISIBLE void henson_copies_commit() { threads[running].copies.emplace_back(); }
VISIBLE void henson_copies_wait(unsigned groups) {
    auto &copies = threads[running].copies;
    // The last one is not committed yet.
    while (copies.size() - 1 > groups) {
        for (const Copy &copy : copies.front()) {
            unsigned char *const to = henson_shared_pointer(copy.to);
            if (copy.from) memcpy(to, copy.from, copy.bytes);
            else memset(to, 0, copy.bytes);
        }
        copies.erase(copies.begin());
    }
}

VISIBLE int &henson_barrier_bytes(unsigned address) { return barrier_bytes[address]; }

// --- the driver ---------------------------------------------------------------------------------------------------------

namespace {

using Result = int;
constexpr Result OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_IMAGE = 200, NOT_FOUND = 500;
constexpr size_t MEMORY = size_t(16) << 30;

using Work = std::function<void()>;

struct Stream {
    bool capturing = false;
    std::vector<Work> kept;
};
struct Graph {
    std::vector<Work> work;
};
struct Event {
    double seconds = 0;
};
struct Module {
    void *library;
};
struct Function {
    void (*run)(void **);
    std::vector<size_t> sizes;
    std::string name;
};
struct Block {
    void *mapped;
    size_t length, bytes;
};

std::map<uint64_t, Block> blocks;
size_t allocated = 0;
int capability = 80;

// Says which kernel it was, and which block of memory lies before the address.
void on_signal(int, siginfo_t *info, void *) {
    const auto address = (uint64_t)info->si_addr;
    char text[400], near[120] = "";
    const auto behind = blocks.upper_bound(address);
    if (behind != blocks.begin()) {
        const auto &[start, block] = *std::prev(behind);
        snprintf(near, sizeof near, ", %llu bytes behind the start of a block of %zu", (unsigned long long)(address - start), block.bytes);
    }
    const int n = snprintf(text, sizeof text, "the GPU's emulator: memory fault at %p%s%s\n", info->si_addr, near, where().c_str());
    if (write(2, text, (size_t)n) < 0) _exit(138);
    _exit(139);
}

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void launch(const Function &function, Place grid, Place block, size_t shared, void **arguments) {
    std::lock_guard<std::recursive_mutex> lock(device);
    if (block.x > MOST_THREADS || block.y != 1 || block.z != 1 || shared > SHARED) fail("a launch of " + function.name + " is too large");
    kernel_name = function.name.c_str();
    entry = function.run;
    entry_arguments = arguments;
    count = block.x;
    gridDim = grid;
    blockDim = block;
    in_kernel = true;
    const unsigned all = grid.x * grid.y;
    for (unsigned i = 0; i < all; i++) {
        const unsigned place = backward_order ? all - 1 - i : i;
        blockIdx = {place % grid.x, place / grid.x, 0};
        run_block();
    }
    in_kernel = false;
}

// The length of a shared library in memory: its section headers come last.
size_t elf_length(const unsigned char *image) {
    const auto *header = (const Elf64_Ehdr *)image;
    return header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
}

}  // namespace

// Does it now, or keeps it for the graph that the stream records. For products.cpp, too.
__attribute__((visibility("default"))) void henson_submit(void *stream, Work work) {
    std::lock_guard<std::recursive_mutex> lock(device);
    auto *s = (Stream *)stream;
    if (s && s->capturing) s->kept.push_back(std::move(work));
    else work();
}

VISIBLE Result cuInit(unsigned) {
    static std::once_flag once;
    std::call_once(once, [] {
        const char *order = getenv("HENSON_EMULATOR_ORDER");
        backward_order = order && strcmp(order, "backward") == 0;
        if (const char *wanted = getenv("HENSON_EMULATOR_CAPABILITY")) capability = atoi(wanted);
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, nullptr);
        sigaction(SIGBUS, &action, nullptr);
    });
    return OK;
}
VISIBLE Result cuDeviceGetCount(int *n) {
    const char *wanted = getenv("HENSON_EMULATOR_DEVICES");
    *n = wanted ? atoi(wanted) : 1;
    return OK;
}
VISIBLE Result cuDeviceGet(int *out, int ordinal) {
    int n = 0;
    cuDeviceGetCount(&n);
    *out = ordinal;
    return ordinal >= 0 && ordinal < n ? OK : INVALID_DEVICE;
}
VISIBLE Result cuDeviceGetName(char *name, int length, int) {
    snprintf(name, (size_t)length, "henson's emulator");
    return OK;
}
VISIBLE Result cuDeviceGetAttribute(int *out, int what, int) {
    switch (what) {
        case 16: *out = capability >= 90 ? 132 : 4; break;          // multiprocessors
        case 75: *out = capability / 10; break;                     // compute capability
        case 76: *out = capability % 10; break;
        case 97: *out = capability >= 90 ? 232448 : 166912; break;  // shared memory of a block
        default: *out = 0; return INVALID_VALUE;
    }
    return OK;
}
VISIBLE Result cuDeviceTotalMem_v2(size_t *bytes, int) {
    *bytes = MEMORY;
    return OK;
}
VISIBLE Result cuDevicePrimaryCtxRetain(void **context, int device_number) {
    *context = (void *)(intptr_t)(device_number + 1);
    return OK;
}
VISIBLE Result cuDevicePrimaryCtxRelease_v2(int) { return OK; }
namespace {
// Of each thread, as on a GPU.
thread_local void *current = nullptr;
}  // namespace
VISIBLE Result cuCtxSetCurrent(void *context) {
    current = context;
    return OK;
}
VISIBLE Result cuCtxGetDevice(int *device_number) {
    *device_number = (int)(intptr_t)current - 1;
    return current ? OK : INVALID_VALUE;
}
// The same for the device of that number in all processes, as with a GPU that they share.
VISIBLE Result cuDeviceGetUuid_v2(void *uuid, int device_number) {
    char text[24];
    snprintf(text, sizeof text, "emulated GPU %03u", (unsigned)device_number % 1000u);
    memcpy(uuid, text, 16);
    return OK;
}
VISIBLE Result cuDeviceGetUuid(void *uuid, int device_number) { return cuDeviceGetUuid_v2(uuid, device_number); }
VISIBLE Result cuCtxSynchronize() { return OK; }
VISIBLE Result cuGetErrorName(int error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error == INVALID_IMAGE ? "CUDA_ERROR_INVALID_IMAGE" : "CUDA_ERROR";
    return OK;
}
VISIBLE Result cuGetErrorString(int, const char **text) {
    *text = "an error of the GPU's emulator";
    return OK;
}

// Memory ends at a page that nobody may touch, and starts as NaN.
VISIBLE Result cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    std::lock_guard<std::recursive_mutex> lock(device);
    if (bytes == 0) return INVALID_VALUE;
    if (allocated + bytes > MEMORY) return OUT_OF_MEMORY;
    const size_t whole = (bytes + 255) / 256 * 256, pages = (whole + PAGE - 1) / PAGE * PAGE, length = pages + PAGE;
    void *mapped = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) return OUT_OF_MEMORY;
    mprotect((char *)mapped + pages, PAGE, PROT_NONE);
    unsigned char *const start = (unsigned char *)mapped + (pages - whole);
    // Very large blocks are pools that are not used in full.
    memset(start, 0xff, std::min(whole, size_t(64) << 20));
    *address = (uint64_t)start;
    blocks[*address] = {mapped, length, bytes};
    allocated += bytes;
    return OK;
}
VISIBLE Result cuMemFree_v2(uint64_t address) {
    std::lock_guard<std::recursive_mutex> lock(device);
    const auto found = blocks.find(address);
    if (found == blocks.end()) return INVALID_VALUE;
    munmap(found->second.mapped, found->second.length);
    allocated -= found->second.bytes;
    blocks.erase(found);
    return OK;
}
VISIBLE Result cuMemHostAlloc(void **out, size_t bytes, unsigned) {
    *out = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *out ? OK : OUT_OF_MEMORY;
}
VISIBLE Result cuMemFreeHost(void *p) {
    free(p);
    return OK;
}
VISIBLE Result cuMemGetInfo_v2(size_t *left, size_t *total) {
    *total = MEMORY;
    *left = MEMORY - allocated;
    return OK;
}
VISIBLE Result cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    henson_submit(stream, [=] { memcpy((void *)to, from, bytes); });
    return OK;
}
VISIBLE Result cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    henson_submit(stream, [=] { memcpy(to, (const void *)from, bytes); });
    return OK;
}
VISIBLE Result cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    henson_submit(stream, [=] { memmove((void *)to, (const void *)from, bytes); });
    return OK;
}
VISIBLE Result cuMemsetD8Async(uint64_t to, unsigned char value, size_t n, void *stream) {
    henson_submit(stream, [=] { memset((void *)to, value, n); });
    return OK;
}
VISIBLE Result cuMemsetD8_v2(uint64_t to, unsigned char value, size_t n) {
    memset((void *)to, value, n);
    return OK;
}

VISIBLE Result cuStreamCreate(void **out, unsigned) {
    *out = new Stream;
    return OK;
}
VISIBLE Result cuStreamDestroy_v2(void *stream) {
    delete (Stream *)stream;
    return OK;
}
VISIBLE Result cuStreamSynchronize(void *stream) { return ((Stream *)stream)->capturing ? 900 : OK; }
VISIBLE Result cuStreamWaitEvent(void *, void *, unsigned) { return OK; }
VISIBLE Result cuStreamBeginCapture_v2(void *stream, int) {
    auto *s = (Stream *)stream;
    s->capturing = true;
    s->kept.clear();
    return OK;
}
VISIBLE Result cuStreamEndCapture(void *stream, void **graph) {
    auto *s = (Stream *)stream;
    s->capturing = false;
    *graph = new Graph{std::move(s->kept)};
    s->kept.clear();
    return OK;
}
VISIBLE Result cuStreamIsCapturing(void *stream, int *status) {
    *status = ((Stream *)stream)->capturing;
    return OK;
}
VISIBLE Result cuGraphInstantiateWithFlags(void **ready, void *graph, unsigned long long) {
    *ready = new Graph(*(Graph *)graph);
    return OK;
}
VISIBLE Result cuGraphDestroy(void *graph) {
    delete (Graph *)graph;
    return OK;
}
VISIBLE Result cuGraphExecDestroy(void *graph) {
    delete (Graph *)graph;
    return OK;
}
VISIBLE Result cuGraphLaunch(void *graph, void *) {
    std::lock_guard<std::recursive_mutex> lock(device);
    for (const Work &work : ((Graph *)graph)->work) work();
    return OK;
}

VISIBLE Result cuEventCreate(void **out, unsigned) {
    *out = new Event;
    return OK;
}
VISIBLE Result cuEventDestroy_v2(void *event) {
    delete (Event *)event;
    return OK;
}
VISIBLE Result cuEventRecord(void *event, void *) {
    ((Event *)event)->seconds = now();
    return OK;
}
VISIBLE Result cuEventSynchronize(void *) { return OK; }
VISIBLE Result cuEventQuery(void *) { return OK; }
VISIBLE Result cuEventElapsedTime_v2(float *ms, void *start, void *end) {
    *ms = (float)(1e3 * (((Event *)end)->seconds - ((Event *)start)->seconds));
    return OK;
}
VISIBLE Result cuEventElapsedTime(float *ms, void *start, void *end) { return cuEventElapsedTime_v2(ms, start, end); }

// Machine code is a shared library that compiler.cpp made.
VISIBLE Result cuModuleLoadData(void **module, const void *image) {
    const auto *bytes = (const unsigned char *)image;
    if (memcmp(bytes, ELFMAG, SELFMAG) != 0) return INVALID_IMAGE;
    const size_t length = elf_length(bytes);
    // A file of its own for each: the loader takes equal names for equal libraries.
    const char *base = getenv("TMPDIR");
    std::string path = std::string(base && *base ? base : "/tmp") + "/henson-kernel-XXXXXX";
    const int file = mkstemp(path.data());
    if (file < 0) return INVALID_IMAGE;
    const bool written = write(file, bytes, length) == (ssize_t)length;
    close(file);
    void *library = written ? dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL) : nullptr;
    unlink(path.c_str());
    if (!library) {
        fprintf(stderr, "the GPU's emulator: %s\n", dlerror());
        return INVALID_IMAGE;
    }
    *module = new Module{library};
    return OK;
}
VISIBLE Result cuModuleUnload(void *module) {
    dlclose(((Module *)module)->library);
    delete (Module *)module;
    return OK;
}
VISIBLE Result cuModuleGetFunction(void **function, void *module, const char *name) {
    void *library = ((Module *)module)->library;
    const std::string text = name;
    auto run = (void (*)(void **))dlsym(library, ("henson_run_" + text).c_str());
    auto sizes = (size_t(*)(size_t *))dlsym(library, ("henson_sizes_" + text).c_str());
    if (!run || !sizes) return NOT_FOUND;
    auto *found = new Function{run, std::vector<size_t>(sizes(nullptr)), text};
    sizes(found->sizes.data());
    *function = found;
    return OK;
}
VISIBLE Result cuFuncSetAttribute(void *, int, int) { return OK; }

VISIBLE Result cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                              void *stream, void **arguments, void **) {
    const auto &f = *(const Function *)function;
    if (gz != 1 || gx == 0 || gy == 0 || bx == 0) return INVALID_VALUE;
    // Arguments are the caller's until this returns; addresses of what they hold must be aligned for any type.
    size_t total = 0;
    for (size_t size : f.sizes) total += (size + 63) / 64 * 64;
    std::shared_ptr<unsigned char> kept((unsigned char *)aligned_alloc(64, std::max<size_t>(total, 64)), free);
    std::vector<void *> places;
    unsigned char *at = kept.get();
    for (size_t i = 0; i < f.sizes.size(); i++) {
        memcpy(at, arguments[i], f.sizes[i]);
        places.push_back(at);
        at += (f.sizes[i] + 63) / 64 * 64;
    }
    henson_submit(stream, [&f, gx, gy, bx, by, bz, shared, kept, places]() mutable {
        launch(f, {gx, gy, 1}, {bx, by, bz}, shared, places.data());
    });
    return OK;
}

namespace {

// What cuTensorMapEncodeTiled keeps, as product_hopper.cu uses it: two dimensions of 16-bit numbers, 128-byte swizzle.
struct TensorMap {
    uint64_t address, columns, rows, stride;
    uint32_t part_columns, part_rows;
};

}  // namespace

VISIBLE Result cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                                      const uint32_t *part, const uint32_t *, int, int swizzle, int, int) {
    if (type != 9 || rank != 2 || swizzle != 3) return INVALID_VALUE;
    const TensorMap kept = {(uint64_t)address, sizes[0], sizes[1], strides[0], part[0], part[1]};
    memset(map, 0, 128);
    memcpy(map, &kept, sizeof kept);
    return OK;
}

VISIBLE void henson_copy_box(unsigned to, const void *map, unsigned barrier, unsigned column, unsigned row) {
    TensorMap m;
    memcpy(&m, map, sizeof m);
    unsigned char *const start = henson_shared_pointer(to);
    for (unsigned r = 0; r < m.part_rows; r++)
        for (unsigned c = 0; c < m.part_columns; c++) {
            uint16_t bits = 0;
            if (row + r < m.rows && column + c < m.columns)
                memcpy(&bits, (const unsigned char *)m.address + (row + r) * m.stride + 2 * (column + c), 2);
            unsigned at = (unsigned)(start - shared_memory) + r * 128 + 2 * c;
            at ^= (at >> 7 & 7) << 4;
            memcpy(shared_memory + at, &bits, 2);
        }
    // The barrier's layout is that of device.h.
    struct Barrier {
        uint16_t phase, missing, expected, unused;
    } *b = (Barrier *)henson_shared_pointer(barrier);
    barrier_bytes[barrier] -= (int)(2 * m.part_rows * m.part_columns);
    if (b->missing == 0 && barrier_bytes[barrier] == 0) b->phase ^= 1, b->missing = b->expected;
}
