// Adam and AdamW for one element or four, bit for bit what ghoffload/kernels/adam_host.py computes;
// the formula, the order of operations and the columns of `scalars` are written down there.
//
// Compiled with --fmad=false: only __fmaf_rn fuses.

#include "round.cuh"

constexpr u32 SCALARS = 16;  // columns of a row of `scalars`

constexpr u32 SKIP = 0, FACTOR = 1, DECAY = 2, KEEP = 3, BETA1 = 4, NOT_BETA1 = 5, BETA2 = 6;
constexpr u32 NOT_BETA2 = 7, ROOT = 8, EPS = 9, STEP = 10, KEY = 11;

constexpr u32 FP32 = 0, BF16 = 1;  // 2 is fp16

// ---- the table of an update launch ----

struct Piece {
    char *weight, *grad;  // the first element's byte
    i64 offset;           // first element in the state arrays
    i64 count;
    u32 scalars_row;
    u32 first_chunk;  // blocks of the launch before this piece
    u32 start;        // first element in its parameter: the lower 32 bits of 40
    u8 start_high;
    u8 weight_code, grad_code;
    u8 vector;  // groups of four are aligned in every array
};
static_assert(sizeof(Piece) == 48, "adam_cuda.py has the same layout");

template <u32 N>
struct Table {
    char *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *master;  // `master` is the rest of a split one
    float *exp_avg_scale, *exp_avg_sq_scale;
    const float* scalars;
    u32 pieces;
    u32 unused;
    Piece piece[N];
};
static_assert(sizeof(Table<LARGE_PIECES>) <= 32764, "kernel parameters have no more room");

// ---- the elements ----

__device__ __forceinline__ float canonical(float x) {
    return x == x ? x : __uint_as_float(0x7FC00000u);
}

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
    u32 key;
};

__device__ __forceinline__ Scalars scalars_of(const float* row) {
    return {row[FACTOR],    row[DECAY], row[KEEP], row[BETA1], row[NOT_BETA1],           row[BETA2],
            row[NOT_BETA2], row[ROOT],  row[EPS],  row[STEP],  __float_as_uint(row[KEY])};
}

// One element. p, m, v and vmax are updated in place; returns the root of v (or of vmax).
template <bool AMSGRAD>
__device__ __forceinline__ float element(const Scalars& s, float g, float& p, float& m, float& v,
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
    const float root = __fsqrt_rn(under);
    const float denominator = __fadd_rn(__fdiv_rn(root, s.root), s.eps);
    p = __fmaf_rn(s.step, __fdiv_rn(m, denominator), p);
    return root;
}

// The weight as fp32: the master where it rounds to the weight, so that an edited weight wins.
__device__ __forceinline__ float joined(float weight, u32 weight_bits, float master, u32 code) {
    return to_half(master, code) == weight_bits ? master : weight;
}

__device__ __forceinline__ float decode(u32 bits, u32 code) {
    return code == FP32 ? __uint_as_float(bits) : from_half(bits, code);
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

__device__ __forceinline__ void store4(float* to, const float (&x)[4]) {
    *reinterpret_cast<float4*>(to) =
        make_float4(canonical(x[0]), canonical(x[1]), canonical(x[2]), canonical(x[3]));
}
