// The formats of host state, four elements at a time, bit for bit what ghoffload/kernels/
// adam_host.py and adam_block_host.py compute; formats.py says what they are.
//
// A Four is four elements as they lie in memory, so it may come from global memory, from shared
// memory or element by element. Of a group with fewer elements, zeros stand for the others.

#include "adam.cuh"

constexpr u32 NO_MASTER = 0, FULL_MASTER = 1, SPLIT_MASTER = 2;
constexpr u32 MOMENTS_FP32 = 0, MOMENTS_BF16 = 1, MOMENTS_INT8 = 2;
constexpr u32 BLOCK = 128;  // elements that share the scales of int8 moments: four to a lane

// Bytes of an element of the array.
constexpr u32 moment_bytes(u32 moments) {
    return moments == MOMENTS_FP32 ? 4 : moments == MOMENTS_BF16 ? 2 : 1;
}
constexpr u32 master_bytes(u32 master) {
    return master == FULL_MASTER ? 4 : master == SPLIT_MASTER ? 2 : 0;
}

template <u32 BYTES>
struct Four {
    u32 word[BYTES == 0 ? 1 : BYTES];
};

template <u32 BYTES>
__device__ __forceinline__ u32 bits_of(const Four<BYTES>& four, int j) {
    if constexpr (BYTES == 4) return four.word[j];
    if constexpr (BYTES == 2) return four.word[j / 2] >> (16 * (j & 1)) & 0xFFFFu;
    return four.word[0] >> (8 * j) & 0xFFu;
}

// Bits above the element's own are dropped.
template <u32 BYTES>
__device__ __forceinline__ Four<BYTES> four_of(const u32 (&bits)[4]) {
    Four<BYTES> four;
    if constexpr (BYTES == 4) {
        for (int j = 0; j < 4; ++j) four.word[j] = bits[j];
    } else if constexpr (BYTES == 2) {
        four.word[0] = __byte_perm(bits[0], bits[1], 0x5410u);
        four.word[1] = __byte_perm(bits[2], bits[3], 0x5410u);
    } else {
        four.word[0] = __byte_perm(__byte_perm(bits[0], bits[1], 0x0040u),
                                   __byte_perm(bits[2], bits[3], 0x0040u), 0x5410u);
    }
    return four;
}

template <u32 MASTER, u32 MOMENTS, bool AMSGRAD>
struct State {
    Four<moment_bytes(MOMENTS)> exp_avg, exp_avg_sq;
    Four<AMSGRAD ? 4 : 0> max_exp_avg_sq;
    Four<master_bytes(MASTER)> master;              // the rests of a split one
    float exp_avg_scale = 0, exp_avg_sq_scale = 0;  // of the block, with int8 moments
};

// ---- split master ----

__device__ __forceinline__ float join(u32 weight_bits, u32 rest) {
    const int r = static_cast<short>(rest);
    const u32 magnitude = weight_bits & 0x7FFFu;
    const bool stale = (magnitude == 0 && r < 0) || (magnitude == 0x7F80u && r > 0);
    return __uint_as_float((weight_bits << 16) + (stale ? 0 : r));
}

// ---- int8 moments ----

constexpr float EXP_AVG_TOP = 127 * 127, EXP_AVG_SQ_TOP = 255 * 255;
// What has a code: the greatest is its own code's number. First moments up to TINY have code 0.
constexpr float EXP_AVG_LIMIT = EXP_AVG_TOP * 0x1p113f, ROOT_LIMIT = EXP_AVG_SQ_TOP * 0x1p48f;
constexpr u32 TINY = 0x00200000u;  // 2^-128
constexpr float LEAST_EXP_AVG_SCALE = 0x1p-126f, LEAST_EXP_AVG_SQ_SCALE = 0x1p-63f;

// Bytes to floats and back by way of the lowest bits of a float of size 2^23.
__device__ __forceinline__ float decode_exp_avg(u32 codes, int j, float scale) {
    const u32 biased = __byte_perm(codes ^ 0x80808080u, 0x4B000000u, 0x7650u + j);
    const float c = __fadd_rn(__uint_as_float(biased), -8388736.0f);
    return __fmul_rn(scale, __fmul_rn(c, fabsf(c)));
}

__device__ __forceinline__ float decode_exp_avg_sq(u32 codes, int j, float scale) {
    const u32 biased = __byte_perm(codes, 0x4B000000u, 0x7650u + j);
    const float c = __fadd_rn(__uint_as_float(biased), -8388608.0f);
    const float root = __fmul_rn(scale, __fmul_rn(c, c));
    return __fmul_rn(root, root);
}

// The scale for a block's greatest value (as bits), and its inverse; both 0 up to `nothing`.
__device__ __forceinline__ float block_scale(u32 greatest, u32 nothing, float top, float least,
                                             float& inverse) {
    const u32 b = __float_as_uint(__fmul_rn(__uint_as_float(greatest), 1.0f / top)) + 8u;
    float scale = __uint_as_float(b & ~15u);
    scale = scale > least ? scale : least;
    inverse = greatest <= nothing ? 0.0f : __fdiv_rn(1.0f, scale);
    return greatest <= nothing ? 0.0f : scale;
}

// The integer next to the root of x, up to 255 or so; its caller puts right what is one too many.
__device__ __forceinline__ float about_root(float x) {
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(x));
    return __fadd_rn(__fadd_rn(root, 8388608.0f), -8388608.0f);
}

// The code's magnitude as a float: the c with c * c - c + 1/4 < x <= c * c + c + 1/4.
__device__ __forceinline__ float encode_exp_avg(float x) {
    float c = about_root(x);
    c = __fmul_rn(c, c) > x ? __fadd_rn(c, -1.0f) : c;
    return x > __fadd_rn(__fmaf_rn(c, c, c), 0.25f) ? __fadd_rn(c, 1.0f) : c;
}

// x is root / scale, `random` 2^-12 ... 1 - 2^-12: up from c with c * c <= x < (c + 1) * (c + 1) as
// often as keeps the mean of the second moment.
__device__ __forceinline__ float encode_exp_avg_sq(float x, float random) {
    float c = about_root(x);
    c = __fmul_rn(c, c) > x ? __fadd_rn(c, -1.0f) : c;
    const float square = __fmul_rn(c, c), twice = __fadd_rn(c, c);
    const float part = __fmul_rn(__fadd_rn(x, -square), __fadd_rn(x, square));
    const float whole =
        __fmul_rn(__fadd_rn(twice, 1.0f), __fadd_rn(__fmaf_rn(2.0f, square, twice), 1.0f));
    c = __fmul_rn(random, whole) < part ? __fadd_rn(c, 1.0f) : c;
    return x > 0.0f && c < 1.0f ? 1.0f : c;
}

// ---- four elements ----

// One step. `index` is the first element's in its parameter. With int8 moments every lane of the
// warp calls this with its four of the block's elements, and index is a multiple of 4.
template <u32 MASTER, u32 MOMENTS, bool AMSGRAD>
__device__ __forceinline__ void update_four(const Scalars& s,
                                            State<MASTER, MOMENTS, AMSGRAD>& state,
                                            u32 (&weight)[4], u32 weight_code, const u32 (&grad)[4],
                                            u32 grad_code, u64 index) {
    static_assert(!AMSGRAD || MOMENTS == MOMENTS_FP32, "");
    u32 master[4], m_bits[4], v_bits[4], vmax_bits[4];
    float m[4], root[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float p, v, vmax = 0.0f;
        if constexpr (MASTER == SPLIT_MASTER)
            p = join(weight[j], bits_of(state.master, j));
        else
            p = decode(weight[j], weight_code);
        if constexpr (MASTER == FULL_MASTER)
            p = joined(p, weight[j], __uint_as_float(bits_of(state.master, j)), weight_code);
        if constexpr (MOMENTS == MOMENTS_INT8) {
            m[j] = decode_exp_avg(state.exp_avg.word[0], j, state.exp_avg_scale);
            v = decode_exp_avg_sq(state.exp_avg_sq.word[0], j, state.exp_avg_sq_scale);
        } else {
            m[j] = decode(bits_of(state.exp_avg, j), MOMENTS);
            v = decode(bits_of(state.exp_avg_sq, j), MOMENTS);
        }
        if constexpr (AMSGRAD) vmax = __uint_as_float(bits_of(state.max_exp_avg_sq, j));
        root[j] = element<AMSGRAD>(s, decode(grad[j], grad_code), p, m[j], v, vmax);
        if constexpr (MOMENTS == MOMENTS_FP32) {
            m_bits[j] = __float_as_uint(canonical(m[j]));
            v_bits[j] = __float_as_uint(canonical(v));
        } else if constexpr (MOMENTS == MOMENTS_BF16) {
            const u32 random = random_bits(s.key, index + j);
            m_bits[j] = stochastic_bfloat16(m[j], random & 0xFFFFu);
            v_bits[j] = stochastic_bfloat16(v, random >> 16);
        }
        if constexpr (AMSGRAD) vmax_bits[j] = __float_as_uint(canonical(vmax));
        if constexpr (MASTER != NO_MASTER) master[j] = __float_as_uint(canonical(p));
        if constexpr (MASTER == SPLIT_MASTER)
            weight[j] = (master[j] + 0x8000u) >> 16;
        else
            weight[j] =
                weight_code == FP32 ? __float_as_uint(canonical(p)) : to_half(p, weight_code);
    }
    if constexpr (MOMENTS == MOMENTS_INT8) {
        u32 greatest_m = 0, greatest_root = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            // What has no code, NaN among it, begins again at zero.
            if (!(fabsf(m[j]) <= EXP_AVG_LIMIT)) m[j] = 0.0f;
            if (!(root[j] <= ROOT_LIMIT)) root[j] = 0.0f;
            const u32 m_size = __float_as_uint(m[j]) & 0x7FFFFFFFu;
            const u32 root_size = __float_as_uint(root[j]) & 0x7FFFFFFFu;
            greatest_m = greatest_m > m_size ? greatest_m : m_size;
            greatest_root = greatest_root > root_size ? greatest_root : root_size;
        }
        greatest_m = __reduce_max_sync(0xFFFFFFFFu, greatest_m);
        greatest_root = __reduce_max_sync(0xFFFFFFFFu, greatest_root);
        float m_inverse, root_inverse;
        state.exp_avg_scale =
            block_scale(greatest_m, TINY, EXP_AVG_TOP, LEAST_EXP_AVG_SCALE, m_inverse);
        state.exp_avg_sq_scale =
            block_scale(greatest_root, 0, EXP_AVG_SQ_TOP, LEAST_EXP_AVG_SQ_SCALE, root_inverse);
        u32 random = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j % 2 == 0) random = random_bits(s.key, (index + j) >> 1);
            const u32 random11 = (j % 2 == 0 ? random << 7 : random >> 9) & 0x7FF000u;
            const float c = encode_exp_avg(__fmul_rn(fabsf(m[j]), m_inverse));
            m_bits[j] = __float_as_uint(__fadd_rn(m[j] < 0.0f ? -c : c, 12582912.0f));
            const float at = __fadd_rn(__uint_as_float(0x3F800800u | random11), -1.0f);
            const float q = encode_exp_avg_sq(__fmul_rn(root[j], root_inverse), at);
            v_bits[j] = __float_as_uint(__fadd_rn(q, 8388608.0f));
        }
    }
    state.exp_avg = four_of<moment_bytes(MOMENTS)>(m_bits);
    state.exp_avg_sq = four_of<moment_bytes(MOMENTS)>(v_bits);
    if constexpr (AMSGRAD) state.max_exp_avg_sq = four_of<4>(vmax_bits);
    if constexpr (MASTER != NO_MASTER) state.master = four_of<master_bytes(MASTER)>(master);
}
