// libcublasLt on a CPU: products with the epilogues that henson uses.
//
// Matrices are column-major: D (m×n) = alpha · op(A) (m×k) · op(B) (k×n) + beta · C, then bias and GELU.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define VISIBLE extern "C" __attribute__((visibility("default")))

void henson_submit(void *stream, std::function<void()> work);

namespace {

constexpr int OK = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15;
constexpr int R_32F = 0, R_16BF = 14, FAST_TF32 = 77;
enum Epilogue { DEFAULT = 1, BIAS = 4, GELU_AUX = 160, GELU_AUX_BIAS = 164, DGELU = 192, BGRADB = 512 };

struct Layout {
    int type;
    uint64_t rows, columns;
    int64_t stride;
    int32_t batch = 1;
    int64_t step = 0;
};
struct Description {
    int compute, transposed_a = 0, transposed_b = 0, epilogue = DEFAULT;
    void *bias = nullptr, *kept = nullptr;
    int64_t kept_stride = 0;
};
struct Heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

float load(const void *from, int type, size_t i) {
    if (type == R_32F) return ((const float *)from)[i];
    const uint32_t word = (uint32_t)((const uint16_t *)from)[i] << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}
void store(void *to, int type, size_t i, float value) {
    if (type == R_32F) {
        ((float *)to)[i] = value;
        return;
    }
    uint32_t word;
    memcpy(&word, &value, 4);
    ((uint16_t *)to)[i] = value != value ? 0x7fff : (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
// Ten bits behind the point.
float to_tf32(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    word = (word + 0xfff + (word >> 13 & 1)) & ~0x1fffu;
    memcpy(&value, &word, 4);
    return value;
}

float gelu(float x) { return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }
float gelu_slope(float x) {
    const float t = tanhf(0.7978845608f * (x + 0.044715f * x * x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
}

struct Call {
    Description description;
    Layout a, b, d;
    const void *from_a, *from_b, *from_c;
    void *to;
    float alpha, beta;
};

size_t bytes(int type) { return type == R_32F ? 4 : 2; }

void multiply_one(const Call &call, int number) {
    const Description &e = call.description;
    const auto at = [&](const void *p, const Layout &l) { return (const char *)p + bytes(l.type) * (size_t)(l.step * number); };
    const void *a = at(call.from_a, call.a), *b = at(call.from_b, call.b), *c = at(call.from_c, call.d);
    void *d = (void *)at(call.to, call.d);
    const size_t m = call.d.rows, n = call.d.columns, k = e.transposed_a ? call.a.rows : call.a.columns;
    // op(A) by columns, op(B) by columns.
    std::vector<float> left(k * m), right(k * n), sums(m);
    const auto rounded = [&](float x) { return e.compute == FAST_TF32 ? to_tf32(x) : x; };
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < k; j++)
            left[j * m + i] = rounded(load(a, call.a.type, e.transposed_a ? i * call.a.stride + j : j * call.a.stride + i));
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < k; j++)
            right[i * k + j] = rounded(load(b, call.b.type, e.transposed_b ? j * call.b.stride + i : i * call.b.stride + j));
    if (e.epilogue == BGRADB)
        for (size_t i = 0; i < n; i++) {
            float sum = 0;
            for (size_t j = 0; j < k; j++) sum += right[i * k + j];
            store(e.bias, call.d.type, i, sum);
        }
    for (size_t i = 0; i < n; i++) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (size_t j = 0; j < k; j++) {
            const float factor = right[i * k + j];
            const float *column = &left[j * m];
            for (size_t r = 0; r < m; r++) sums[r] += factor * column[r];
        }
        for (size_t r = 0; r < m; r++) {
            const size_t place = i * call.d.stride + r, kept = i * e.kept_stride + r;
            float x = call.alpha * sums[r] + (call.beta != 0 ? call.beta * load(c, call.d.type, place) : 0.0f);
            if (e.epilogue == BIAS || e.epilogue == GELU_AUX_BIAS) x += load(e.bias, call.d.type, r);
            if (e.epilogue == GELU_AUX || e.epilogue == GELU_AUX_BIAS) {
                store(e.kept, call.d.type, kept, x);
                x = gelu(x);
            }
            if (e.epilogue == DGELU) x *= gelu_slope(load(e.kept, call.d.type, kept));
            store(d, call.d.type, place, x);
        }
    }
}

}  // namespace

VISIBLE size_t cublasLtGetVersion() { return 130000; }
VISIBLE int cublasLtCreate(void **handle) {
    *handle = new int(0);
    return OK;
}
VISIBLE int cublasLtDestroy(void *handle) {
    delete (int *)handle;
    return OK;
}
VISIBLE int cublasLtMatrixLayoutCreate(Layout **out, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    *out = new Layout{type, rows, columns, stride};
    return type == R_32F || type == R_16BF ? OK : NOT_SUPPORTED;
}
VISIBLE int cublasLtMatrixLayoutDestroy(Layout *layout) {
    delete layout;
    return OK;
}
VISIBLE int cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *value, size_t size) {
    if (attribute == 5 && size == 4) memcpy(&layout->batch, value, 4);
    else if (attribute == 6 && size == 8) memcpy(&layout->step, value, 8);
    else return INVALID_VALUE;
    return OK;
}
VISIBLE int cublasLtMatmulDescCreate(Description **out, int compute, int) {
    *out = new Description{compute};
    return OK;
}
VISIBLE int cublasLtMatmulDescDestroy(Description *description) {
    delete description;
    return OK;
}
VISIBLE int cublasLtMatmulDescSetAttribute(Description *d, int attribute, const void *value, size_t size) {
    const auto set = [&](auto &field) {
        if (size != sizeof(field)) return INVALID_VALUE;
        memcpy(&field, value, size);
        return OK;
    };
    switch (attribute) {
        case 3: return set(d->transposed_a);
        case 4: return set(d->transposed_b);
        case 7: return set(d->epilogue);
        case 8: return set(d->bias);
        case 11: return set(d->kept);
        case 12: return set(d->kept_stride);
        default: return INVALID_VALUE;
    }
}
VISIBLE int cublasLtMatmulPreferenceCreate(void **out) {
    *out = new int(0);
    return OK;
}
VISIBLE int cublasLtMatmulPreferenceDestroy(void *preference) {
    delete (int *)preference;
    return OK;
}
VISIBLE int cublasLtMatmulPreferenceSetAttribute(void *, int, const void *, size_t) { return OK; }
VISIBLE int cublasLtMatmulAlgoGetHeuristic(void *, Description *d, Layout *, Layout *, Layout *, Layout *, void *, int wanted, Heuristic *found,
                                           int *count) {
    *count = 0;
    switch (d->epilogue) {
        case DEFAULT: case BIAS: case GELU_AUX: case GELU_AUX_BIAS: case DGELU: case BGRADB: break;
        default: return NOT_SUPPORTED;
    }
    // Two names for the same, so that there is something to choose from.
    for (; *count < std::min(wanted, 2); ++*count) {
        memset(&found[*count], 0, sizeof *found);
        found[*count].algorithm[0] = (uint64_t)*count + 1;
    }
    return OK;
}
VISIBLE int cublasLtMatmulAlgoCheck(void *, Description *, Layout *, Layout *, Layout *, Layout *, const uint64_t *algorithm, Heuristic *found) {
    memset(found, 0, sizeof *found);
    return algorithm[0] == 1 || algorithm[0] == 2 ? OK : NOT_SUPPORTED;
}
VISIBLE int cublasLtMatmul(void *, Description *description, const float *alpha, const void *a, Layout *layout_a, const void *b,
                           Layout *layout_b, const float *beta, const void *c, Layout *, void *d, Layout *layout_d, const void *, void *,
                           size_t, void *stream) {
    const Call call = {*description, *layout_a, *layout_b, *layout_d, a, b, c, d, *alpha, *beta};
    henson_submit(stream, [call] {
        for (int i = 0; i < call.d.batch; i++) multiply_one(call, i);
    });
    return OK;
}
VISIBLE const char *cublasLtGetStatusName(int status) { return status == OK ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_NOT_SUPPORTED"; }
VISIBLE const char *cublasLtGetStatusString(int status) { return cublasLtGetStatusName(status); }
