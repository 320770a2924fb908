// Codes of a byte an element with one scale for every 128, bit for bit what
// ghoffload/kernels/coding_host.py computes; what the codes are is written down there.
//
// One warp does a block of 128 elements, four to a lane, and has four blocks in flight. The scale
// comes from the maximum over the warp, found in the bits: they order as the magnitudes do. Needs
// Ampere or later, and converts by instructions from Ada on.

#include "adam.cuh"

namespace coding {

constexpr u32 THREADS = 256, LANES = 32;
constexpr u32 BLOCK = 128;                         // elements that share a scale
constexpr u32 AT_ONCE = 4;                         // blocks of a warp
constexpr u32 BLOCKS = THREADS / LANES * AT_ONCE;  // of a launch's block; coding_cuda.py has it

constexpr u32 FP16 = 2;
constexpr u32 INFINITE = 0x7F800000u;

__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// ---- e4m3: Hopper and Ada convert, others compute ----

__device__ __forceinline__ u32 to_e4m3(float x) {  // at most 464, or NaN
    u32 m = magnitude(x), sign = (__float_as_uint(x) >> 24) & 0x80u;
    if (m > INFINITE) return 0x7Fu;
    if (m < (121u << 23)) {  // below 2^-6: 2^14 and more is 2^-9 apart, as the smallest codes are
        u32 on_grid = __float_as_uint(__fadd_rn(__uint_as_float(m), 16384.0f));
        return (on_grid - (141u << 23)) | sign;
    }
    return (((m + 0x7FFFFu + ((m >> 20) & 1u)) >> 20) - (120u << 3)) | sign;
}

__device__ __forceinline__ float from_e4m3(u32 code) {  // NaN is its caller's
    float x = __fmul_rn(__uint_as_float((code & 0x7Fu) << 20), 0x1p120f);
    return __uint_as_float(__float_as_uint(x) | (code & 0x80u) << 24);
}

__device__ __forceinline__ u32 to_e4m3x4(const float (&x)[4]) {
#if __CUDA_ARCH__ >= 890
    u16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(x[1]), "f"(x[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(x[3]), "f"(x[2]));
    return low | static_cast<u32>(high) << 16;
#else
    return to_e4m3(x[0]) | to_e4m3(x[1]) << 8 | to_e4m3(x[2]) << 16 | to_e4m3(x[3]) << 24;
#endif
}

__device__ __forceinline__ void from_e4m3x4(float (&x)[4], u32 codes) {
#if __CUDA_ARCH__ >= 890
    u32 low, high;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(low) : "h"(static_cast<u16>(codes)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(high) : "h"(static_cast<u16>(codes >> 16)));
    x[0] = from_half(low & 0xFFFFu, FP16), x[1] = from_half(low >> 16, FP16);
    x[2] = from_half(high & 0xFFFFu, FP16), x[3] = from_half(high >> 16, FP16);
#else
    for (int j = 0; j < 4; ++j) {
        u32 code = (codes >> (8 * j)) & 0xFFu;
        x[j] = (code & 0x7Fu) == 0x7Fu ? __uint_as_float(0x7FC00000u) : from_e4m3(code);
    }
#endif
}

// ---- one block, four elements to a lane ----

struct Scale {
    float value, inverse;
};

// From the bits of the largest finite magnitude.
template <bool FP8>
__device__ __forceinline__ Scale scale_of(u32 most) {
    if constexpr (FP8) {
        u32 exponent = (most + (0x7FFFFFu - 0x680000u)) >> 23;  // one more above 1.8125 * 2^e
        u32 biased = exponent > 9 ? exponent - 8 : 1;
        return {__uint_as_float(biased << 23), __uint_as_float((254 - biased) << 23)};
    } else {
        float value = __fmul_rn(__uint_as_float(most), 0x1.020408p-7f);  // 1 / 127
        value = __uint_as_float((__float_as_uint(value) + 0x40u) & ~0x7Fu);
        value = value > 0x1p-126f ? value : 0x1p-126f;
        return {value, __fdiv_rn(1.0f, value)};
    }
}

// The codes of a lane's four elements, and the scale of the warp's block.
template <bool FP8>
__device__ __forceinline__ u32 encode_four(const float (&x)[4], float& scale) {
    u32 most = 0;
    bool finite[4];
    for (int j = 0; j < 4; ++j) {
        u32 m = magnitude(x[j]);
        finite[j] = m < INFINITE;
        most = finite[j] && m > most ? m : most;
    }
    const Scale s = scale_of<FP8>(__reduce_max_sync(0xFFFFFFFFu, most));
    scale = s.value;
    if constexpr (FP8) {
        float y[4];
        for (int j = 0; j < 4; ++j)
            y[j] = finite[j] ? __fmul_rn(x[j], s.inverse) : __uint_as_float(0x7FC00000u);
        return to_e4m3x4(y);
    } else {
        u32 codes = 0;
        for (int j = 0; j < 4; ++j) {
            // Adding 1.5 * 2^23 leaves rint(y) in the lowest bits.
            float y = __fadd_rn(__fmul_rn(x[j], s.inverse), 12582912.0f);
            codes |= (finite[j] ? __float_as_uint(y) & 0xFFu : 0x80u) << (8 * j);
        }
        return codes;
    }
}

constexpr u32 LARGEST[] = {0x7F7FFFFFu, 0x7F7F0000u, 0x477FE000u};  // finite, by dtype code

template <bool FP8, u32 CODE>
__device__ __forceinline__ void decode_four(float (&x)[4], u32 codes, float scale) {
    const float largest = __uint_as_float(LARGEST[CODE]);
    if constexpr (FP8) {
        from_e4m3x4(x, codes);
        for (int j = 0; j < 4; ++j) x[j] = __fmul_rn(x[j], scale);
    } else {
        for (int j = 0; j < 4; ++j) {
            u32 code = (codes >> (8 * j)) & 0xFFu;
            // 2^23 + 128 + the code, less 2^23 + 128.
            float number = __fsub_rn(__uint_as_float(0x4B000000u | (code ^ 0x80u)), 8388736.0f);
            x[j] = code == 0x80u ? __uint_as_float(0x7FC00000u) : __fmul_rn(number, scale);
        }
    }
    // Only the blocks with the largest numbers there are can overflow.
    if (!(magnitude(scale) <= LARGEST[CODE] - (9u << 23)))
        for (int j = 0; j < 4; ++j)
            x[j] = x[j] > largest ? largest : x[j] < -largest ? -largest : x[j];
}

// ---- the launch ----

// Four elements as they lie in memory: 16 bytes of fp32 or 8 bytes of half precision.
template <u32 CODE>
__device__ __forceinline__ uint4 load_four(const char* source, i64 i) {
    if constexpr (CODE == FP32) return *reinterpret_cast<const uint4*>(source + 4 * i);
    const uint2 half = *reinterpret_cast<const uint2*>(source + 2 * i);
    return make_uint4(half.x, half.y, 0, 0);
}

template <u32 CODE>
__device__ __forceinline__ void widen_four(float (&x)[4], const uint4& four) {
    if constexpr (CODE == FP32) {
        x[0] = __uint_as_float(four.x), x[1] = __uint_as_float(four.y);
        x[2] = __uint_as_float(four.z), x[3] = __uint_as_float(four.w);
    } else {
        x[0] = from_half(four.x & 0xFFFFu, CODE), x[1] = from_half(four.x >> 16, CODE);
        x[2] = from_half(four.y & 0xFFFFu, CODE), x[3] = from_half(four.y >> 16, CODE);
    }
}

template <u32 CODE>
__device__ __forceinline__ void store_four(char* destination, i64 i, const float (&x)[4]) {
    if constexpr (CODE == FP32)
        *reinterpret_cast<float4*>(destination + 4 * i) =
            make_float4(canonical(x[0]), canonical(x[1]), canonical(x[2]), canonical(x[3]));
    else
        *reinterpret_cast<uint2*>(destination + 2 * i) =
            make_uint2(to_half(x[0], CODE) | to_half(x[1], CODE) << 16,
                       to_half(x[2], CODE) | to_half(x[3], CODE) << 16);
}

template <u32 CODE>
__device__ __forceinline__ float load_one(const char* source, i64 i) {
    if constexpr (CODE == FP32) return *reinterpret_cast<const float*>(source + 4 * i);
    return from_half(*reinterpret_cast<const u16*>(source + 2 * i), CODE);
}

template <u32 CODE>
__device__ __forceinline__ void store_one(char* destination, i64 i, float x) {
    if constexpr (CODE == FP32)
        *reinterpret_cast<float*>(destination + 4 * i) = canonical(x);
    else
        *reinterpret_cast<u16*>(destination + 2 * i) = static_cast<u16>(to_half(x, CODE));
}

// This warp's first block. 64 bits: there may be more than 2^31 elements.
__device__ __forceinline__ i64 first_block() {
    return i64(blockIdx.x) * BLOCKS + threadIdx.x / LANES * AT_ONCE;
}

// `vector`: groups of four elements, and of four codes, are aligned.
template <bool FP8, u32 CODE>
__device__ __forceinline__ void encode_blocks(const char* source, u8* codes, float* scales,
                                              i64 elements, u32 vector) {
    const i64 first = first_block(), begin = first * BLOCK;
    const u32 lane = threadIdx.x % LANES;
    float x[4], scale = 0.0f;
    if (vector && begin + AT_ONCE * BLOCK <= elements) {
        uint4 groups[AT_ONCE];
        float mine = 0.0f;
#pragma unroll
        for (u32 b = 0; b < AT_ONCE; ++b)
            groups[b] = load_four<CODE>(source, begin + b * BLOCK + 4 * lane);
#pragma unroll
        for (u32 b = 0; b < AT_ONCE; ++b) {
            widen_four<CODE>(x, groups[b]);
            u32 four = encode_four<FP8>(x, scale);
            *reinterpret_cast<u32*>(codes + begin + b * BLOCK + 4 * lane) = four;
            mine = lane == b ? scale : mine;
        }
        if (lane < AT_ONCE) scales[first + lane] = mine;
        return;
    }
#pragma unroll 1
    for (u32 b = 0; b < AT_ONCE; ++b) {  // any alignment, and the end
        const i64 at = begin + b * BLOCK;
        if (at >= elements) return;
        const i64 left = elements - at;
        for (int j = 0; j < 4; ++j) {
            u32 i = lane + LANES * j;
            x[j] = i < left ? load_one<CODE>(source, at + i) : 0.0f;
        }
        u32 four = encode_four<FP8>(x, scale);
        for (int j = 0; j < 4; ++j) {
            u32 i = lane + LANES * j;
            if (i < left) codes[at + i] = static_cast<u8>(four >> (8 * j));
        }
        if (lane == 0) scales[first + b] = scale;
    }
}

template <bool FP8, u32 CODE>
__device__ __forceinline__ void decode_blocks(const u8* codes, const float* scales,
                                              char* destination, i64 elements, u32 vector) {
    const i64 first = first_block(), begin = first * BLOCK;
    const u32 lane = threadIdx.x % LANES;
    float x[4];
    if (vector && begin + AT_ONCE * BLOCK <= elements) {
        u32 four[AT_ONCE];
        float scale[AT_ONCE];
#pragma unroll
        for (u32 b = 0; b < AT_ONCE; ++b) {
            four[b] = *reinterpret_cast<const u32*>(codes + begin + b * BLOCK + 4 * lane);
            scale[b] = scales[first + b];
        }
#pragma unroll
        for (u32 b = 0; b < AT_ONCE; ++b) {
            decode_four<FP8, CODE>(x, four[b], scale[b]);
            store_four<CODE>(destination, begin + b * BLOCK + 4 * lane, x);
        }
        return;
    }
#pragma unroll 1
    for (u32 b = 0; b < AT_ONCE; ++b) {
        const i64 at = begin + b * BLOCK;
        if (at >= elements) return;
        const i64 left = elements - at;
        u32 four = 0;
        for (int j = 0; j < 4; ++j) {
            u32 i = lane + LANES * j;
            if (i < left) four |= static_cast<u32>(codes[at + i]) << (8 * j);
        }
        decode_four<FP8, CODE>(x, four, scales[first + b]);
        for (int j = 0; j < 4; ++j) {
            u32 i = lane + LANES * j;
            if (i < left) store_one<CODE>(destination, at + i, x[j]);
        }
    }
}

// fp32 to bf16 by stochastic rounding; `offset` is the number of the first element.
__device__ __forceinline__ void cast_chunk(const float* source, u16* destination, i64 elements,
                                           u64 offset, u32 key, u32 vector) {
    const i64 begin = i64(blockIdx.x) * (BLOCKS * BLOCK);
    if (vector && begin + BLOCKS * BLOCK <= elements) {
        constexpr u32 ROUNDS = BLOCKS * BLOCK / (4 * THREADS);
        float4 four[ROUNDS];
#pragma unroll
        for (u32 r = 0; r < ROUNDS; ++r)
            four[r] =
                *reinterpret_cast<const float4*>(source + begin + 4 * (r * THREADS + threadIdx.x));
#pragma unroll
        for (u32 r = 0; r < ROUNDS; ++r) {
            const i64 i = begin + 4 * (r * THREADS + threadIdx.x);
            const float x[4] = {four[r].x, four[r].y, four[r].z, four[r].w};
            u32 half[4];
            for (int j = 0; j < 4; ++j)
                half[j] = stochastic_bfloat16(x[j], random_bits(key, offset + i + j) & 0xFFFFu);
            *reinterpret_cast<uint2*>(destination + i) =
                make_uint2(half[0] | half[1] << 16, half[2] | half[3] << 16);
        }
        return;
    }
    const i64 end = begin + BLOCKS * BLOCK < elements ? begin + BLOCKS * BLOCK : elements;
#pragma unroll 1
    for (i64 i = begin + threadIdx.x; i < end; i += THREADS)
        destination[i] = static_cast<u16>(
            stochastic_bfloat16(source[i], random_bits(key, offset + i) & 0xFFFFu));
}

#define CODING(FORMAT, IS_FP8, DTYPE, CODE)                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) encode_##FORMAT##_##DTYPE(         \
        const char* source, u8* codes, float* scales, i64 elements, u32 vector) {            \
        encode_blocks<IS_FP8, CODE>(source, codes, scales, elements, vector);                \
    }                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) decode_##FORMAT##_##DTYPE(         \
        const u8* codes, const float* scales, char* destination, i64 elements, u32 vector) { \
        decode_blocks<IS_FP8, CODE>(codes, scales, destination, elements, vector);           \
    }
CODING(fp8, true, fp32, FP32)
CODING(fp8, true, bf16, BF16)
CODING(fp8, true, fp16, FP16)
CODING(int8, false, fp32, FP32)
CODING(int8, false, bf16, BF16)
CODING(int8, false, fp16, FP16)

extern "C" __global__ void __launch_bounds__(THREADS)
    stochastic_cast(const float* source, u16* destination, i64 elements, u64 offset, u32 key,
                    u32 vector) {
    cast_chunk(source, destination, elements, offset, key, vector);
}

}  // namespace coding
