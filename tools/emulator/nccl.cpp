// NCCL between processes of one machine whose GPUs are emulated: device memory is the process's own, and bytes go through TCP on the
// loopback. Communicators are non-blocking, as henson makes them.
//
// As on GPUs: two ranks on one device are refused unless NCCL_HOSTID tells their machines apart; a transfer with a rank that is gone
// never ends, and only the communicator's state says so. Stricter than on GPUs: a call within a stream capture is refused, and so is a
// message of another length than its receiver expects.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#define VISIBLE extern "C" __attribute__((visibility("default")))

extern void henson_submit(void *stream, std::function<void()> work);
extern "C" int cuStreamIsCapturing(void *stream, int *status);
extern "C" int cuCtxGetDevice(int *device);

namespace {

using Result = int;
constexpr Result SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7;
constexpr size_t NAME = 80;

struct Id {
    char bytes[128];
};
// What an id holds: where the first rank's thread waits, and what strangers do not know.
struct Door {
    uint64_t token[2];
    uint16_t port;
};
// What a rank says of itself.
struct Hello {
    uint64_t token[2];
    int32_t rank, size, device;
    uint16_t port;
    char host[NAME];
};

struct Message {
    unsigned char *data;
    uint64_t bytes;
    // What was moved so far of the length before it and of itself.
    uint64_t header, moved;
    size_t done;
};

struct Operation {
    bool sends;
    int peer;
    void *data;
    size_t bytes;
};

struct Communicator {
    int rank = 0, size = 0;
    std::vector<int> peers;
    std::atomic<Result> state{IN_PROGRESS};
    std::atomic<bool> aborted{false};
    std::thread joining;
};

std::mutex guard;
std::string last_error;

Result fail(Result code, const std::string &what) {
    std::lock_guard<std::mutex> lock(guard);
    last_error = what;
    return code;
}

void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

int listening(uint16_t &port) {
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    if (s < 0 || bind(s, (sockaddr *)&address, length) != 0 || listen(s, 1024) != 0 ||
        getsockname(s, (sockaddr *)&address, &length) != 0)
        return -1;
    port = ntohs(address.sin_port);
    return s;
}

int connected(uint16_t port) {
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (s >= 0 && connect(s, (sockaddr *)&address, sizeof address) == 0) {
        return s;
    }
    if (s >= 0) close(s);
    return -1;
}

bool write_all(int s, const void *data, size_t bytes) {
    for (auto *at = (const char *)data; bytes > 0;) {
        const ssize_t n = send(s, at, bytes, MSG_NOSIGNAL);
        if (n <= 0) return false;
        at += n, bytes -= (size_t)n;
    }
    return true;
}
bool read_all(int s, void *data, size_t bytes) {
    for (auto *at = (char *)data; bytes > 0;) {
        const ssize_t n = recv(s, at, bytes, 0);
        if (n <= 0) return false;
        at += n, bytes -= (size_t)n;
    }
    return true;
}

// Gives each rank what all have said, once all have come.
void introduce(int door, Door own) {
    std::vector<int> came;
    std::vector<Hello> all;
    size_t size = 1;
    while (came.size() < size) {
        const int s = accept4(door, nullptr, nullptr, SOCK_CLOEXEC);
        if (s < 0) break;
        Hello hello;
        if (!read_all(s, &hello, sizeof hello) || memcmp(hello.token, own.token, sizeof own.token) != 0) {
            close(s);
            continue;
        }
        size = (size_t)hello.size;
        came.push_back(s);
        all.push_back(hello);
    }
    std::vector<Hello> ordered(all.size());
    for (const Hello &hello : all)
        if ((size_t)hello.rank < ordered.size()) ordered[(size_t)hello.rank] = hello;
    for (const int s : came) {
        write_all(s, ordered.data(), ordered.size() * sizeof(Hello));
        close(s);
    }
    close(door);
}

Result join(Communicator &self, const Door &door, int device) {
    Hello own = {};
    memcpy(own.token, door.token, sizeof own.token);
    own.rank = self.rank, own.size = self.size, own.device = device;
    const char *name = getenv("NCCL_HOSTID");
    if (name && *name) snprintf(own.host, NAME, "%s", name);
    else gethostname(own.host, NAME - 1);
    const int incoming = listening(own.port);
    const int root = connected(door.port);
    if (incoming < 0 || root < 0) return fail(SYSTEM_ERROR, "the first rank cannot be reached");
    std::vector<Hello> all((size_t)self.size);
    const bool met = write_all(root, &own, sizeof own) && read_all(root, all.data(), all.size() * sizeof(Hello));
    close(root);
    if (!met) return fail(REMOTE_ERROR, "the first rank is gone");
    for (int a = 0; a < self.size; a++)
        for (int b = a + 1; b < self.size; b++)
            if (all[(size_t)a].device == all[(size_t)b].device && strcmp(all[(size_t)a].host, all[(size_t)b].host) == 0) {
                close(incoming);
                return fail(INVALID_USAGE, "Duplicate GPU detected : rank " + std::to_string(a) + " and rank " + std::to_string(b) +
                                               " both on CUDA device " + std::to_string(all[(size_t)a].device));
            }
    self.peers.assign((size_t)self.size, -1);
    for (int peer = 0; peer < self.rank; peer++) {
        const int s = connected(all[(size_t)peer].port);
        const int32_t number = self.rank;
        if (s < 0 || !write_all(s, own.token, sizeof own.token) || !write_all(s, &number, sizeof number))
            return fail(REMOTE_ERROR, "rank " + std::to_string(peer) + " is gone");
        self.peers[(size_t)peer] = s;
    }
    for (int missing = self.size - 1 - self.rank; missing > 0;) {
        const int s = accept4(incoming, nullptr, nullptr, SOCK_CLOEXEC);
        if (s < 0) return fail(SYSTEM_ERROR, "no connection can be accepted");
        uint64_t token[2];
        int32_t number = 0;
        if (!read_all(s, token, sizeof token) || memcmp(token, own.token, sizeof token) != 0 || !read_all(s, &number, sizeof number) ||
            number <= self.rank || number >= self.size) {
            close(s);
            continue;
        }
        self.peers[(size_t)number] = s;
        missing--;
    }
    close(incoming);
    for (const int s : self.peers) {
        // A message's length and itself are two writes, of which the second must not wait for an answer to the first.
        const int on = 1;
        if (s < 0) continue;
        setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        fcntl(s, F_SETFL, fcntl(s, F_GETFL) | O_NONBLOCK);
    }
    return SUCCESS;
}

// A stream that waits for what never comes.
void hang(Communicator &self, Result code, const std::string &what) {
    self.state = fail(code, what);
    while (!self.aborted) pause();
}

// Moves some bytes of a message; negative where the peer is gone.
ssize_t move(int s, bool sends, void *data, size_t bytes) {
    const ssize_t n = sends ? send(s, data, bytes, MSG_NOSIGNAL) : recv(s, data, bytes, 0);
    if (n > 0) return n;
    return n < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
}

void run(Communicator &self, const std::vector<Operation> &operations) {
    // By rank: what goes out, what comes in.
    std::vector<std::deque<Message>> queues[2];
    for (auto &queue : queues) queue.resize((size_t)self.size);
    size_t left = 0;
    for (const Operation &o : operations) {
        queues[o.sends][(size_t)o.peer].push_back({(unsigned char *)o.data, o.bytes, o.bytes, 0, 0});
        left++;
    }
    while (left > 0 && !self.aborted) {
        std::vector<pollfd> waiting;
        for (int sends = 0; sends < 2; sends++)
            for (int peer = 0; peer < self.size; peer++) {
                auto &queue = queues[sends][(size_t)peer];
                while (!queue.empty()) {
                    Message &m = queue.front();
                    const bool head = m.done < sizeof m.header;
                    auto *at = head ? (unsigned char *)&m.header + m.done : m.data + m.moved;
                    const size_t bytes = head ? sizeof m.header - m.done : m.bytes - m.moved;
                    const int s = self.peers[(size_t)peer];
                    const ssize_t n = bytes == 0 ? 0 : move(s, sends != 0, at, bytes);
                    if (n < 0) return hang(self, REMOTE_ERROR, "rank " + std::to_string(peer) + " has closed its connection");
                    if (n == 0 && bytes > 0) {
                        waiting.push_back({s, (short)(sends ? POLLOUT : POLLIN), 0});
                        break;
                    }
                    if (head) {
                        m.done += (size_t)n;
                        if (m.done == sizeof m.header && m.header != m.bytes)
                            return hang(self, INVALID_USAGE, "rank " + std::to_string(peer) + " has sent " + std::to_string(m.header) +
                                                                 " bytes where " + std::to_string(m.bytes) + " are expected");
                    } else {
                        m.moved += (uint64_t)n;
                    }
                    if (m.done == sizeof m.header && m.moved == m.bytes) {
                        queue.pop_front();
                        left--;
                    }
                }
            }
        if (!waiting.empty()) poll(waiting.data(), waiting.size(), 20);
    }
}

// What a group of calls has asked for.
thread_local int depth = 0;
thread_local std::vector<Operation> asked;
thread_local Communicator *asked_of = nullptr;
thread_local void *asked_on = nullptr;

Result ask(Operation operation, Communicator *of, void *stream) {
    int capturing = 0;
    cuStreamIsCapturing(stream, &capturing);
    if (capturing) return fail(INVALID_USAGE, "a transfer within a stream capture: ranks do not record at the same time");
    if (!of || of->state != SUCCESS) return fail(INVALID_ARGUMENT, "the communicator is not ready");
    if (operation.peer < 0 || operation.peer >= of->size || operation.peer == of->rank)
        return fail(INVALID_ARGUMENT, "there is no other rank " + std::to_string(operation.peer));
    if (asked_of && (asked_of != of || asked_on != stream)) return fail(INVALID_USAGE, "a group of several communicators or streams");
    asked.push_back(operation);
    asked_of = of, asked_on = stream;
    return SUCCESS;
}

Result finish() {
    if (depth > 0 || !asked_of) return SUCCESS;
    Communicator *const of = asked_of;
    henson_submit(asked_on, [of, operations = std::move(asked)] { run(*of, operations); });
    asked.clear();
    asked_of = nullptr;
    return SUCCESS;
}

}  // namespace

VISIBLE Result ncclGetVersion(int *version) {
    *version = 22800;
    return SUCCESS;
}
VISIBLE const char *ncclGetErrorString(Result code) {
    switch (code) {
        case SUCCESS: return "no error";
        case SYSTEM_ERROR: return "unhandled system error";
        case INVALID_ARGUMENT: return "invalid argument";
        case INVALID_USAGE: return "invalid usage";
        case REMOTE_ERROR: return "remote process exited or there was a network error";
        case IN_PROGRESS: return "NCCL operation in progress";
        default: return "unknown result code";
    }
}
VISIBLE const char *ncclGetLastError(Communicator *) {
    std::lock_guard<std::mutex> lock(guard);
    static thread_local std::string text;
    text = last_error;
    return text.c_str();
}

VISIBLE Result ncclGetUniqueId(Id *id) {
    Door door = {};
    std::random_device random;
    for (uint64_t &word : door.token) word = (uint64_t)random() << 32 | random();
    const int s = listening(door.port);
    if (s < 0) return fail(SYSTEM_ERROR, "no port on the loopback");
    memset(id, 0, sizeof *id);
    memcpy(id->bytes, &door, sizeof door);
    std::thread(introduce, s, door).detach();
    return SUCCESS;
}
VISIBLE Result ncclCommInitRankConfig(Communicator **out, int size, Id id, int rank, const void *config) {
    size_t length;
    unsigned magic;
    memcpy(&length, config, sizeof length);
    memcpy(&magic, (const char *)config + 8, sizeof magic);
    int blocking;
    memcpy(&blocking, (const char *)config + 16, sizeof blocking);
    if (length < 48 || magic != 0xcafebeef) return fail(INVALID_ARGUMENT, "the configuration is not initialised");
    if (blocking != 0) return fail(INVALID_ARGUMENT, "the emulator has non-blocking communicators alone");
    if (rank < 0 || rank >= size) return fail(INVALID_ARGUMENT, "the rank is not one of them");
    Door door;
    memcpy(&door, id.bytes, sizeof door);
    int device = 0;
    if (cuCtxGetDevice(&device) != 0) return fail(INVALID_USAGE, "no context is current");
    auto *made = new Communicator;
    made->rank = rank, made->size = size;
    *out = made;
    made->joining = std::thread([made, door, device] { made->state = join(*made, door, device); });
    return IN_PROGRESS;
}
VISIBLE Result ncclCommGetAsyncError(Communicator *of, Result *state) {
    *state = of->state;
    return SUCCESS;
}
VISIBLE Result ncclCommFinalize(Communicator *) { return SUCCESS; }
VISIBLE Result ncclCommDestroy(Communicator *of) {
    if (of->joining.joinable()) of->joining.join();
    for (const int s : of->peers)
        if (s >= 0) close(s);
    delete of;
    return SUCCESS;
}
VISIBLE Result ncclCommAbort(Communicator *of) {
    // Another thread may still be within a transfer, and sees the flag; so nothing is given back.
    of->aborted = true;
    if (of->joining.joinable()) of->joining.detach();
    return SUCCESS;
}

VISIBLE Result ncclGroupStart() {
    depth++;
    return SUCCESS;
}
VISIBLE Result ncclGroupEnd() {
    if (depth == 0) return fail(INVALID_USAGE, "no group has begun");
    depth--;
    return finish();
}
VISIBLE Result ncclSend(const void *from, size_t count, int type, int peer, Communicator *of, void *stream) {
    if (type != 0) return fail(INVALID_ARGUMENT, "the emulator moves bytes alone");
    const Result code = ask({true, peer, (void *)from, count}, of, stream);
    return code == SUCCESS ? finish() : code;
}
VISIBLE Result ncclRecv(void *to, size_t count, int type, int peer, Communicator *of, void *stream) {
    if (type != 0) return fail(INVALID_ARGUMENT, "the emulator moves bytes alone");
    const Result code = ask({false, peer, to, count}, of, stream);
    return code == SUCCESS ? finish() : code;
}
VISIBLE Result ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *of, void *stream) {
    if (type != 0 || from != to) return fail(INVALID_ARGUMENT, "the emulator moves bytes alone, in their place");
    ncclGroupStart();
    Result code = SUCCESS;
    if (of && of->rank == root) {
        for (int peer = 0; peer < of->size && code == SUCCESS; peer++)
            if (peer != root) code = ask({true, peer, to, count}, of, stream);
    } else {
        code = ask({false, root, to, count}, of, stream);
    }
    const Result ended = ncclGroupEnd();
    return code == SUCCESS ? ended : code;
}
