// Step counters and scalars: what the update kernels need of each parameter, once per step. The
// formula is in ghoffload/kernels/adam_host.py.

#include "adam.cuh"

constexpr u32 SMALL_INDICES = 64, LARGE_INDICES = 7680;
constexpr u32 THREADS = 256;

struct Hyper {
    double lr, beta1, beta2, eps, weight_decay, found_inf, grad_scale, clip;
    const void *lr_at, *beta1_at, *beta2_at;  // where not null, the number is on the device
    const float *found_inf_at, *grad_scale_at, *clip_at;
    u64 seed;
    float* steps;
    float* scalars;
    u32 count;
    u32 flags;
};
static_assert(sizeof(Hyper) == 144, "prepare_cuda.py has the same layout");

constexpr u32 MAXIMIZE = 1, DECOUPLED = 2, LR_IS_DOUBLE = 4, BETA1_IS_DOUBLE = 8;
constexpr u32 BETA2_IS_DOUBLE = 16, HAS_GRAD_SCALE = 32;

template <u32 N>
struct Indices {
    u32 at[N];
};

__device__ double number(double value, const void* at, bool is_double) {
    if (at == nullptr) return value;
    return is_double ? *static_cast<const double*>(at) : *static_cast<const float*>(at);
}

__device__ double power(double base, i64 exponent) {
    double result = 1.0;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) result = __dmul_rn(result, base);
        base = __dmul_rn(base, base);
    }
    return result;
}

// 32 random bits for a parameter and a step.
__device__ u32 random_key(u64 seed, u32 index, i64 t) {
    u64 z = (seed + index) * 0x9E3779B97F4A7C15ull + u64(t);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return static_cast<u32>((z ^ (z >> 31)) >> 32);
}

template <u32 N>
__device__ __forceinline__ void prepare(const Hyper& h, const Indices<N>& indices) {
    u32 k = blockIdx.x * THREADS + threadIdx.x;
    if (k >= h.count) return;
    u32 index = indices.at[k];
    float* s = h.scalars + u64(index) * SCALARS;
    for (u32 j = 0; j < SCALARS; ++j) s[j] = 0.0f;
    if (number(h.found_inf, h.found_inf_at, false) != 0.0) {
        s[SKIP] = 1.0f;
        return;
    }
    float step = h.steps[index] + 1.0f;
    h.steps[index] = step;
    i64 t = static_cast<i64>(step);
    double lr = number(h.lr, h.lr_at, h.flags & LR_IS_DOUBLE);
    double beta1 = number(h.beta1, h.beta1_at, h.flags & BETA1_IS_DOUBLE);
    double beta2 = number(h.beta2, h.beta2_at, h.flags & BETA2_IS_DOUBLE);
    bool decoupled = h.flags & DECOUPLED;
    double inverse = 1.0;
    if (h.flags & HAS_GRAD_SCALE)
        inverse = __ddiv_rn(1.0, number(h.grad_scale, h.grad_scale_at, false));
    float factor = static_cast<float>(__dmul_rn(inverse, number(h.clip, h.clip_at, false)));
    s[FACTOR] = canonical(h.flags & MAXIMIZE ? -factor : factor);
    s[DECAY] = canonical(decoupled ? 0.0f : static_cast<float>(h.weight_decay));
    double keep = decoupled ? __dsub_rn(1.0, __dmul_rn(lr, h.weight_decay)) : 1.0;
    s[KEEP] = canonical(static_cast<float>(keep));
    s[BETA1] = canonical(static_cast<float>(beta1));
    s[NOT_BETA1] = canonical(static_cast<float>(__dsub_rn(1.0, beta1)));
    s[BETA2] = canonical(static_cast<float>(beta2));
    s[NOT_BETA2] = canonical(static_cast<float>(__dsub_rn(1.0, beta2)));
    double correction1 = __dsub_rn(1.0, power(beta1, t));
    double correction2 = __dsub_rn(1.0, power(beta2, t));
    s[ROOT] = canonical(static_cast<float>(__dsqrt_rn(correction2)));
    s[EPS] = canonical(static_cast<float>(h.eps));
    s[STEP] = canonical(static_cast<float>(-__ddiv_rn(lr, correction1)));
    reinterpret_cast<u32*>(s)[KEY] = random_key(h.seed, index, t);
}

#define PREPARE(SIZE, N)                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) adam_prepare_##SIZE(             \
        const __grid_constant__ Hyper hyper, const __grid_constant__ Indices<N> indices) { \
        prepare<N>(hyper, indices);                                                        \
    }
PREPARE(small, SMALL_INDICES)
PREPARE(large, LARGE_INDICES)
