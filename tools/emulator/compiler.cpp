// libnvrtc on a CPU: a CUDA source becomes a shared library, by the system's C++ compiler.
//
// The source is preprocessed by itself, then rewritten: `asm` becomes a call of the function that device.h has for the instruction,
// kernels get functions that take their arguments from an array, dynamic shared memory becomes a pointer. An instruction that is not in
// the table below is an error, which names it.

#include <dlfcn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#define VISIBLE extern "C" __attribute__((visibility("default")))

namespace {

// A part of an instruction's text, and the function that does the same. The first that fits is taken.
struct Instruction {
    const char *part, *function;
};
const Instruction INSTRUCTIONS[] = {
    {"cvt.rn.bf16x2.f32", "ptx::cvt_bf16x2"},
    {"cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier", "ptx::copy_box"},
    {"cp.async.cg.shared.global [%0], [%1], 16;", "ptx::copy_16"},
    {"setp.eq.u32 p, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, p;", "ptx::copy_16_if"},
    {"setp.eq.u32 p, %2, 0; cp.async.ca.shared.global [%0], [%1], 8, p;", "ptx::copy_8_if"},
    {"cp.async.mbarrier.arrive.noinc.shared::cta.b64", "ptx::mbarrier_arrive_with_copies"},
    {"cp.async.commit_group;", "ptx::copies_commit"},
    {"cp.async.wait_group %0;", "ptx::copies_wait"},
    {"ex2.approx.ftz.f32", "ptx::ex2"},
    {"rcp.approx.ftz.f32", "ptx::rcp"},
    {"sqrt.approx.f32", "ptx::square_root"},
    {"tanh.approx.f32", "ptx::tanh_fast"},
    {"ld.shared.v4.b32", "ptx::load_shared_4"},
    {"ld.shared.v4.u32", "ptx::load_shared_4"},
    {"st.shared.b32 [%0], %1;", "ptx::store_shared"},
    {"st.global.v4.b32 [%0]", "ptx::store_global_4"},
    {"ld.global.cg.v4.f32", "ptx::load_global_4"},
    {"red.relaxed.gpu.global.add.v4.f32 [%0]", "ptx::add_global_4"},
    {"ld.acquire.gpu.global.u32", "ptx::load_acquire"},
    {"st.release.gpu.global.u32 [%0], %1;", "ptx::store_release"},
    {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", "ptx::load_matrices_plain"},
    {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "ptx::load_matrices_transposed"},
    {"stmatrix.sync.aligned.m8n8.x4.shared.b16", "ptx::store_matrices"},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "ptx::mma_bf16"},
    {"bar.sync", "ptx::barrier_sync"},
    {"bar.arrive", "ptx::barrier_arrive"},
    {"mbarrier.init.shared::cta.b64", "ptx::mbarrier_init"},
    {"mbarrier.arrive.expect_tx.shared::cta.b64", "ptx::mbarrier_expect"},
    {"mbarrier.arrive.shared::cta.b64", "ptx::mbarrier_arrive"},
    {"mbarrier.try_wait.parity.shared::cta.b64", "ptx::mbarrier_try"},
    {"setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", "ptx::wgmma_from_registers<64>"},
    {"setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "ptx::wgmma_from_registers<128>"},
    {"wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16", "ptx::wgmma<32>"},
    {"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", "ptx::wgmma<64>"},
    {"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "ptx::wgmma<128>"},
    // What orders accesses needs no doing: every instruction is over before the next.
    {"wgmma.fence", "ptx::nothing"},
    {"wgmma.commit_group", "ptx::nothing"},
    {"wgmma.wait_group", "ptx::nothing"},
    {"fence.", "ptx::nothing"},
    {"setmaxnreg.", "ptx::nothing"},
};

// Contraction as NVRTC has it. Kernels are many: little optimisation compiles soonest and runs well enough. Every kernel's functions and
// shared variables are its own, whatever others call theirs.
const char FLAGS[] =
    " -shared -fPIC -fvisibility=hidden -fno-gnu-unique -std=c++20 -O1 -march=native -ffp-contract=fast -fno-strict-aliasing -w";

struct Program {
    std::string text, name, log;
    std::vector<std::pair<std::string, std::string>> headers;
    std::string code;
};

bool is_name(char c) { return isalnum((unsigned char)c) || c == '_'; }

// Where the bracket at `at` is closed; strings are passed over.
size_t closing(const std::string &text, size_t at) {
    int depth = 0;
    for (size_t i = at; i < text.size(); i++) {
        const char c = text[i];
        if (c == '"' || c == '\'') {
            for (i++; i < text.size() && text[i] != c; i++)
                if (text[i] == '\\') i++;
        } else if (c == '(' || c == '[' || c == '{') {
            depth++;
        } else if (c == ')' || c == ']' || c == '}') {
            if (--depth == 0) return i;
        }
    }
    throw std::runtime_error("a bracket is not closed");
}

std::string squeezed(const std::string &text) {
    std::string out;
    for (char c : text) {
        if (isspace((unsigned char)c)) c = ' ';
        if (c == ' ' && (out.empty() || out.back() == ' ')) continue;
        out += c;
    }
    while (!out.empty() && out.back() == ' ') out.pop_back();
    return out;
}

// A string literal at `i`, which is moved behind it.
std::string literal(const std::string &text, size_t &i) {
    std::string out;
    for (i++; i < text.size() && text[i] != '"'; i++) {
        if (text[i] == '\\') {
            i++;
            out += text[i] == 'n' || text[i] == 't' ? ' ' : text[i];
        } else {
            out += text[i];
        }
    }
    i++;
    return out;
}

// What stands between the brackets of `asm`, as a call.
std::string call(const std::string &body) {
    size_t i = 0;
    const auto skip = [&] {
        while (i < body.size() && isspace((unsigned char)body[i])) i++;
    };
    std::string instruction;
    for (skip(); i < body.size() && body[i] == '"'; skip()) instruction += literal(body, i);
    instruction = squeezed(instruction);
    // Outputs, inputs, clobbers: the first two have operands.
    std::vector<std::string> operands;
    for (int list = 0; i < body.size() && list < 3; skip()) {
        if (body[i] == ':') {
            list++, i++;
        } else if (body[i] == ',') {
            i++;
        } else if (body[i] == '"') {
            literal(body, i);
            skip();
            if (list == 3 || i >= body.size() || body[i] != '(') continue;
            const size_t end = closing(body, i);
            operands.push_back(body.substr(i, end + 1 - i));
            i = end + 1;
        } else {
            throw std::runtime_error("asm is not understood: " + body);
        }
    }
    if (instruction.empty()) return "((void)0)";
    for (const Instruction &known : INSTRUCTIONS) {
        if (instruction.find(known.part) == std::string::npos) continue;
        std::string out = std::string(known.function) + "(";
        // A barrier's number and threads may stand in the instruction itself.
        if (operands.empty() && instruction.rfind("bar.", 0) == 0) {
            const size_t start = instruction.find(' '), end = instruction.find(';');
            return out + instruction.substr(start, end - start) + ")";
        }
        for (size_t n = 0; n < operands.size(); n++) out += (n ? ", " : "") + operands[n];
        return out + ")";
    }
    throw std::runtime_error("the instruction `" + instruction + "` is not in the emulator's table");
}

std::string rewritten(const std::string &text) {
    std::string out, ends;
    for (size_t i = 0; i < text.size();) {
        const char c = text[i];
        if (c == '"' || c == '\'') {
            size_t end = i + 1;
            while (end < text.size() && text[end] != c) end += text[end] == '\\' ? 2 : 1;
            out += text.substr(i, end + 1 - i);
            i = end + 1;
            continue;
        }
        if (!is_name(c)) {
            out += c;
            i++;
            continue;
        }
        size_t end = i;
        while (end < text.size() && is_name(text[end])) end++;
        const std::string word = text.substr(i, end - i);
        if (word == "asm") {
            const size_t open = text.find('(', end), close = closing(text, open);
            out += call(text.substr(open + 1, close - open - 1));
            i = close + 1;
        } else if (word == "__global__") {
            // `void`, perhaps __launch_bounds__(…), the name, its parameters.
            size_t at = text.find("void", end) + 4;
            std::string name;
            for (;;) {
                while (isspace((unsigned char)text[at])) at++;
                size_t last = at;
                while (is_name(text[last])) last++;
                name = text.substr(at, last - at);
                if (name != "__launch_bounds__") break;
                at = closing(text, text.find('(', last)) + 1;
            }
            if (name.empty()) throw std::runtime_error("a kernel without a name");
            out += "void henson_kernel_" + name;
            ends += "extern \"C\" __attribute__((visibility(\"default\"))) void henson_run_" + name + "(void **a) { henson::call(&henson_kernel_" + name + ", a); }\n";
            ends += "extern \"C\" __attribute__((visibility(\"default\"))) size_t henson_sizes_" + name + "(size_t *s) { return henson::sizes(&henson_kernel_" + name + ", s); }\n";
            i = text.find(name, at) + name.size();
        } else if (word == "extern") {
            size_t at = end;
            while (isspace((unsigned char)text[at])) at++;
            const std::string shared = "__shared__";
            if (text.compare(at, shared.size(), shared) != 0) {
                out += word;
                i = end;
                continue;
            }
            // extern __shared__ [__align__(n)] type name[];
            const size_t stop = text.find(';', at);
            std::string declared = text.substr(at + shared.size(), stop - at - shared.size());
            const size_t align = declared.find("__align__");
            if (align != std::string::npos) declared.erase(align, closing(declared, declared.find('(', align)) + 1 - align);
            const size_t bracket = declared.find('[');
            size_t last = bracket;
            while (last > 0 && is_name(declared[last - 1])) last--;
            const std::string type = declared.substr(0, last), name = declared.substr(last, bracket - last);
            out += type + " *const " + name + " = (" + type + " *)henson_shared();";
            i = stop + 1;
        } else {
            out += word;
            i = end;
        }
    }
    return out + "\n" + ends;
}

std::string directory_of_this() {
    Dl_info info;
    if (!dladdr((void *)&directory_of_this, &info)) return ".";
    const std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

std::string read(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

void write(const std::string &path, const std::string &text) {
    std::ofstream file(path, std::ios::binary);
    file << text;
    if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

std::string quoted(const std::string &text) {
    std::string out = "'";
    for (char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
    return out + "'";
}

// Runs a command with its output in a file.
void run(const std::string &command, const std::string &log) {
    const int status = system((command + " >" + quoted(log) + " 2>&1").c_str());
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) throw std::runtime_error(command + "\n" + read(log));
}

struct Folder {
    std::string path;
    Folder() {
        const char *base = getenv("TMPDIR");
        path = std::string(base && *base ? base : "/tmp") + "/henson-emulator-XXXXXX";
        if (!mkdtemp(path.data())) throw std::runtime_error("cannot make a folder for a kernel");
    }
    ~Folder() {
        if (system(("rm -rf " + quoted(path)).c_str()) != 0) fprintf(stderr, "%s stays behind\n", path.c_str());
    }
};

// FNV-1a, 64 bits, twice with different starts: a name for a file.
std::string name_of(const std::vector<std::string> &parts) {
    std::string name;
    for (uint64_t hash : {0xcbf29ce484222325ull, 0x84222325cbf29ce4ull}) {
        for (const std::string &part : parts) {
            for (const char c : part) hash = (hash ^ (unsigned char)c) * 0x100000001b3ull;
            hash = (hash ^ 0xff) * 0x100000001b3ull;
        }
        char text[20];
        snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
        name += text;
    }
    return name;
}

void compile(Program &program, const std::vector<std::string> &options) {
    // What was compiled is kept: tests open the device again and again.
    std::vector<std::string> parts = options;
    parts.insert(parts.end(), {program.text, read(directory_of_this() + "/device.h"), FLAGS});
    for (const auto &[name, text] : program.headers) parts.push_back(text);
    const std::string kept = directory_of_this() + "/kernels/" + name_of(parts) + ".so";
    program.code = read(kept);
    if (!program.code.empty()) return;
    Folder folder;
    const std::string in = folder.path + "/", compiler = getenv("CXX") ? getenv("CXX") : "c++";
    std::string definitions;
    for (const std::string &option : options) {
        const std::string target = "--gpu-architecture=sm_";
        if (option.rfind("-D", 0) == 0) {
            definitions += " " + quoted(option);
        } else if (option.rfind(target, 0) == 0) {
            const int number = atoi(option.c_str() + target.size());
            definitions += " -D__CUDA_ARCH__=" + std::to_string(10 * number);
            if (option.back() == 'a' && number == 90) definitions += " -D__CUDA_ARCH_FEAT_SM90_ALL";
        }
    }
    for (const auto &[name, text] : program.headers) write(in + name, text);
    write(in + "source.cu", program.text);
    const std::string log = in + "log";
    run(compiler + " -E -P -x c++ -std=c++20" + definitions + " -I" + quoted(folder.path) + " -o " + quoted(in + "plain.cu") + " " +
            quoted(in + "source.cu"),
        log);
    write(in + "kernel.cpp", "#include \"device.h\"\n" + rewritten(read(in + "plain.cu")));
    run(compiler + FLAGS + " -I" + quoted(directory_of_this()) + " -o " + quoted(in + "kernel.so") + " " + quoted(in + "kernel.cpp"),
        log);
    program.code = read(in + "kernel.so");
    // Under a name of its own first: other processes may compile the same.
    mkdir((directory_of_this() + "/kernels").c_str(), 0777);
    const std::string partial = kept + "." + std::to_string(getpid());
    write(partial, program.code);
    if (rename(partial.c_str(), kept.c_str()) != 0) throw std::runtime_error("cannot keep " + kept);
}

}  // namespace

VISIBLE int nvrtcVersion(int *major, int *minor) {
    // Part of the name under which henson keeps machine code, so it changes with what kernels are compiled against.
    uint32_t hash = 2166136261u;
    for (const char c : read(directory_of_this() + "/device.h")) hash = (hash ^ (unsigned char)c) * 16777619u;
    *major = 13;
    *minor = (int)(hash % 1000000);
    return 0;
}
VISIBLE int nvrtcGetNumSupportedArchs(int *n) {
    *n = 2;
    return 0;
}
VISIBLE int nvrtcGetSupportedArchs(int *all) {
    all[0] = 80, all[1] = 90;
    return 0;
}
VISIBLE int nvrtcCreateProgram(Program **out, const char *text, const char *name, int headers, const char *const *texts,
                               const char *const *names) {
    auto *program = new Program{text, name ? name : "", "", {}, ""};
    for (int i = 0; i < headers; i++) program->headers.emplace_back(names[i], texts[i]);
    *out = program;
    return 0;
}
VISIBLE int nvrtcDestroyProgram(Program **program) {
    delete *program;
    *program = nullptr;
    return 0;
}
VISIBLE int nvrtcCompileProgram(Program *program, int count, const char *const *options) {
    try {
        compile(*program, std::vector<std::string>(options, options + count));
        return 0;
    } catch (const std::exception &error) {
        program->log = error.what();
        return 6;
    }
}
VISIBLE int nvrtcGetCUBINSize(Program *program, size_t *size) {
    *size = program->code.size();
    return 0;
}
VISIBLE int nvrtcGetCUBIN(Program *program, char *out) {
    memcpy(out, program->code.data(), program->code.size());
    return 0;
}
VISIBLE int nvrtcGetProgramLogSize(Program *program, size_t *size) {
    *size = program->log.size() + 1;
    return 0;
}
VISIBLE int nvrtcGetProgramLog(Program *program, char *out) {
    memcpy(out, program->log.c_str(), program->log.size() + 1);
    return 0;
}
VISIBLE const char *nvrtcGetErrorString(int status) { return status == 0 ? "done" : "the emulator's compiler failed"; }
