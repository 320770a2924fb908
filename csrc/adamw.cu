// Adam and AdamW, bit for bit what ghoffload/kernels/adam_host.py computes; the formula, the order
// of operations and the columns of `scalars` are written down there.
//
// Everything a launch needs travels by value as kernel parameters (32,764 bytes at most), so there
// is no table in device memory to upload, to reuse too early or to keep alive. Kernels come with a
// small and a large table because the parameters of every launch are copied whole.
//
// Compiled with --fmad=false: only __fmaf_rn fuses.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 SMALL_PIECES = 64, LARGE_PIECES = 640;
constexpr u32 SMALL_INDICES = 64, LARGE_INDICES = 7680;
constexpr u32 THREADS = 256;
constexpr u32 CHUNK = 4096;  // elements of one block
constexpr u32 SCALARS = 16;  // columns of a row of `scalars`

constexpr u32 SKIP = 0, FACTOR = 1, DECAY = 2, KEEP = 3, BETA1 = 4, NOT_BETA1 = 5, BETA2 = 6;
constexpr u32 NOT_BETA2 = 7, ROOT = 8, EPS = 9, STEP = 10;

constexpr u32 FP32 = 0, BF16 = 1;  // 2 is fp16

// ---- prepare: step counters and scalars ----

struct Hyper {
    double lr, beta1, beta2, eps, weight_decay, found_inf, grad_scale;
    const void *lr_at, *beta1_at, *beta2_at;  // where not null, the number is on the device
    const float *found_inf_at, *grad_scale_at;
    float* steps;
    float* scalars;
    u32 count;
    u32 flags;
};
static_assert(sizeof(Hyper) == 120, "adam_cuda.py has the same layout");

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

__device__ float canonical(float x) { return x == x ? x : __uint_as_float(0x7FC00000u); }

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
    float factor = 1.0f;
    if (h.flags & HAS_GRAD_SCALE)
        factor = static_cast<float>(__ddiv_rn(1.0, number(h.grad_scale, h.grad_scale_at, false)));
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
}

// ---- update: the elements ----

struct Piece {
    char *weight, *grad;  // the first element's byte
    i64 offset;           // first element in the state arrays
    i64 count;
    u32 scalars_row;
    u32 first_chunk;  // blocks of the launch before this piece
    u32 weight_code, grad_code_and_vector;
};
static_assert(sizeof(Piece) == 48, "adam_cuda.py has the same layout");

constexpr u32 VECTOR = 0x100;  // in grad_code_and_vector: groups of four are aligned

template <u32 N>
struct Table {
    float *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *master;
    const float* scalars;
    u32 pieces;
    u32 unused;
    Piece piece[N];
};
static_assert(sizeof(Table<LARGE_PIECES>) <= 32764, "kernel parameters have no more room");

__device__ __forceinline__ float from_half(u32 bits, u32 code) {
    if (code == BF16) return __uint_as_float(bits << 16);
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<u16>(bits)));
    return x;
}

__device__ __forceinline__ u32 to_half(float x, u32 code) {
    if (code == BF16) {
        u32 b = __float_as_uint(x);
        return x == x ? (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16 : 0x7FC0u;
    }
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return x == x ? half : 0x7E00u;
}

struct Scalars {
    float factor, decay, keep, beta1, not_beta1, beta2, not_beta2, root, eps, step;
};

// One element. p, m, v and vmax are updated in place.
template <bool AMSGRAD>
__device__ __forceinline__ void element(const Scalars& s, float g, float& p, float& m, float& v,
                                        float& vmax) {
    g = __fmul_rn(g, s.factor);
    if (s.decay != 0.0f) g = __fmaf_rn(s.decay, p, g);
    p = __fmul_rn(p, s.keep);
    m = __fmaf_rn(s.not_beta1, g, __fmul_rn(s.beta1, m));
    v = __fmaf_rn(__fmul_rn(s.not_beta2, g), g, __fmul_rn(s.beta2, v));
    float under = v;
    if constexpr (AMSGRAD) {
        vmax = v > vmax || v != v ? v : vmax;
        under = vmax;
    }
    float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(under), s.root), s.eps);
    p = __fmaf_rn(s.step, __fdiv_rn(m, denominator), p);
}

// The weight as fp32: the master where it rounds to the weight, so that an edited weight wins.
__device__ __forceinline__ float joined(float weight, u32 weight_bits, float master, u32 code) {
    return to_half(master, code) == weight_bits ? master : weight;
}

// A group of four elements as it lies in memory: 16 bytes of fp32 or 8 bytes of half precision.
__device__ __forceinline__ uint4 load_group(const char* base, i64 index, u32 code) {
    if (code == FP32) return *reinterpret_cast<const uint4*>(base + 4 * index);
    uint2 half = *reinterpret_cast<const uint2*>(base + 2 * index);
    return make_uint4(half.x, half.y, 0, 0);
}

__device__ __forceinline__ u32 group_bits(const uint4& group, int j, u32 code) {
    if (code == FP32) return j == 0 ? group.x : j == 1 ? group.y : j == 2 ? group.z : group.w;
    return ((j < 2 ? group.x : group.y) >> (16 * (j & 1))) & 0xFFFFu;
}

__device__ __forceinline__ float decode(u32 bits, u32 code) {
    return code == FP32 ? __uint_as_float(bits) : from_half(bits, code);
}

__device__ __forceinline__ void load4(float (&x)[4], const float* from) {
    float4 group = *reinterpret_cast<const float4*>(from);
    x[0] = group.x, x[1] = group.y, x[2] = group.z, x[3] = group.w;
}

__device__ __forceinline__ void store4(float* to, const float (&x)[4]) {
    *reinterpret_cast<float4*>(to) =
        make_float4(canonical(x[0]), canonical(x[1]), canonical(x[2]), canonical(x[3]));
}

template <u32 N, bool MASTER, bool AMSGRAD>
__device__ __forceinline__ void update(const Table<N>& t) {
    // The last piece that begins at or before this block; there are no empty ones.
    u32 low = 0, high = t.pieces;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (t.piece[middle].first_chunk <= blockIdx.x)
            low = middle;
        else
            high = middle;
    }
    const Piece& piece = t.piece[low];
    const float* row = t.scalars + u64(piece.scalars_row) * SCALARS;
    if (row[SKIP] != 0.0f) return;
    const Scalars s = {row[FACTOR], row[DECAY],     row[KEEP], row[BETA1], row[NOT_BETA1],
                       row[BETA2],  row[NOT_BETA2], row[ROOT], row[EPS],   row[STEP]};
    char *weight = piece.weight, *grad = piece.grad;
    const u32 weight_code = piece.weight_code, grad_code = piece.grad_code_and_vector & 0xFFu;
    const i64 begin = i64(blockIdx.x - piece.first_chunk) * CHUNK;
    const i64 end = begin + CHUNK < piece.count ? begin + CHUNK : piece.count;
    float* exp_avg = t.exp_avg + piece.offset;
    float* exp_avg_sq = t.exp_avg_sq + piece.offset;
    float* max_exp_avg_sq = AMSGRAD ? t.max_exp_avg_sq + piece.offset : nullptr;
    float* master = MASTER ? t.master + piece.offset : nullptr;

    i64 rest = begin + threadIdx.x;  // this thread's first element outside the vector path
    if (piece.grad_code_and_vector & VECTOR) {
        const i64 groups_end = end & ~i64(3);
#pragma unroll 1
        for (i64 i = begin + 4 * threadIdx.x; i < groups_end; i += 4 * THREADS) {
            float m[4], v[4], vmax[4], kept[4], p[4];
            load4(m, exp_avg + i);
            load4(v, exp_avg_sq + i);
            if constexpr (AMSGRAD) load4(vmax, max_exp_avg_sq + i);
            if constexpr (MASTER) load4(kept, master + i);
            uint4 weights = load_group(weight, i, weight_code);
            uint4 grads = load_group(grad, i, grad_code);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 bits = group_bits(weights, j, weight_code);
                p[j] = decode(bits, weight_code);
                if constexpr (MASTER) p[j] = joined(p[j], bits, kept[j], weight_code);
                float g = decode(group_bits(grads, j, grad_code), grad_code);
                element<AMSGRAD>(s, g, p[j], m[j], v[j], vmax[j]);
            }
            store4(exp_avg + i, m);
            store4(exp_avg_sq + i, v);
            if constexpr (AMSGRAD) store4(max_exp_avg_sq + i, vmax);
            if constexpr (MASTER) store4(master + i, p);
            if (weight_code == FP32) {
                store4(reinterpret_cast<float*>(weight) + i, p);
            } else {
                *reinterpret_cast<uint2*>(weight + 2 * i) =
                    make_uint2(to_half(p[0], weight_code) | to_half(p[1], weight_code) << 16,
                               to_half(p[2], weight_code) | to_half(p[3], weight_code) << 16);
            }
        }
        rest = groups_end + threadIdx.x;  // the tail, at most three elements
    }
#pragma unroll 1
    for (i64 i = rest; i < end; i += THREADS) {
        u32 bits = weight_code == FP32 ? *reinterpret_cast<const u32*>(weight + 4 * i)
                                       : *reinterpret_cast<const u16*>(weight + 2 * i);
        u32 grad_bits = grad_code == FP32 ? *reinterpret_cast<const u32*>(grad + 4 * i)
                                          : *reinterpret_cast<const u16*>(grad + 2 * i);
        float p = decode(bits, weight_code), m = exp_avg[i], v = exp_avg_sq[i], vmax = 0.0f;
        if constexpr (AMSGRAD) vmax = max_exp_avg_sq[i];
        if constexpr (MASTER) p = joined(p, bits, master[i], weight_code);
        element<AMSGRAD>(s, decode(grad_bits, grad_code), p, m, v, vmax);
        exp_avg[i] = canonical(m);
        exp_avg_sq[i] = canonical(v);
        if constexpr (AMSGRAD) max_exp_avg_sq[i] = canonical(vmax);
        if constexpr (MASTER) master[i] = canonical(p);
        if (weight_code == FP32)
            *reinterpret_cast<float*>(weight + 4 * i) = canonical(p);
        else
            *reinterpret_cast<u16*>(weight + 2 * i) = static_cast<u16>(to_half(p, weight_code));
    }
}

// ---- entry points ----

#define PREPARE(SIZE, N)                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) adam_prepare_##SIZE(             \
        const __grid_constant__ Hyper hyper, const __grid_constant__ Indices<N> indices) { \
        prepare<N>(hyper, indices);                                                        \
    }
PREPARE(small, SMALL_INDICES)
PREPARE(large, LARGE_INDICES)

#define UPDATE(NAME, N, MASTER, AMSGRAD)                             \
    extern "C" __global__ void __launch_bounds__(THREADS)            \
        adam_update_##NAME(const __grid_constant__ Table<N> table) { \
        update<N, MASTER, AMSGRAD>(table);                           \
    }
UPDATE(small, SMALL_PIECES, false, false)
UPDATE(small_master, SMALL_PIECES, true, false)
UPDATE(small_amsgrad, SMALL_PIECES, false, true)
UPDATE(small_master_amsgrad, SMALL_PIECES, true, true)
UPDATE(large, LARGE_PIECES, false, false)
UPDATE(large_master, LARGE_PIECES, true, false)
UPDATE(large_amsgrad, LARGE_PIECES, false, true)
UPDATE(large_master_amsgrad, LARGE_PIECES, true, true)
