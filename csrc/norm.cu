// The norm of many gradients in one read of them: a partial result for each chunk, and one block
// that makes the norm, the non-finite flag and the clip factor of the partials, all on the device.
// Bit for bit what ghoffload/kernels/norm_host.py computes; the order of operations is written down
// there.

#include "adam.cuh"

constexpr u32 LARGE_TENSORS = 1280;
constexpr u32 THREADS = 256, FINISH_THREADS = 1024;
constexpr u32 CHUNK = 32768;   // elements of one block
constexpr u32 VECTOR = 0x100;  // in code_and_vector: aligned to 16 bytes

struct Gradient {
    const char* at;
    i64 count;
    u32 first_chunk;  // blocks of the launch before this tensor
    u32 code_and_vector;
};
static_assert(sizeof(Gradient) == 24, "norm_cuda.py has the same layout");

template <u32 N>
struct Gradients {
    double* partials;
    u32 pieces;
    u32 unused;
    Gradient piece[N];
};
static_assert(sizeof(Gradients<LARGE_TENSORS>) <= 32764, "kernel parameters have no more room");

struct Finish {
    const double* partials;
    i64 count;
    double max_norm, grad_scale;
    const float* grad_scale_at;  // where not null, the number is on the device
    float *total_norm, *found_inf, *clip;
};
static_assert(sizeof(Finish) == 64, "norm_cuda.py has the same layout");

// A sum, or a maximum that keeps NaN.
template <bool MAXIMUM>
__device__ __forceinline__ double merged(double a, double b) {
    if constexpr (MAXIMUM) return b > a || b != b ? b : a;
    return __dadd_rn(a, b);
}

template <bool MAXIMUM>
__device__ __forceinline__ double with_element(double sum, float element) {
    double x = element;
    if constexpr (MAXIMUM) return merged<true>(sum, fabs(x));
    return __fma_rn(x, x, sum);  // the square is exact, so this rounds as a sum does
}

// Neighbours first, so that the tree goes up through a thread, a warp and the warps of the block.
template <u32 WARPS, bool MAXIMUM>
__device__ __forceinline__ double block_total(double x) {
    __shared__ double warps[WARPS];
#pragma unroll
    for (u32 distance = 1; distance < 32; distance *= 2)
        x = merged<MAXIMUM>(x, __shfl_xor_sync(~0u, x, distance));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = warps[threadIdx.x % WARPS];
#pragma unroll
    for (u32 distance = 1; distance < WARPS; distance *= 2)
        x = merged<MAXIMUM>(x, __shfl_xor_sync(~0u, x, distance));
    return x;
}

template <u32 CODE>
__device__ __forceinline__ float element_of(const uint4& group, u32 k) {
    const u32 which = CODE == FP32 ? k : k / 2;
    const u32 word = which == 0 ? group.x : which == 1 ? group.y : which == 2 ? group.z : group.w;
    if constexpr (CODE == FP32) return __uint_as_float(word);
    return from_half(k & 1 ? word >> 16 : word & 0xFFFFu, CODE);
}

// This thread's part of a chunk: of every WIDTH * THREADS elements the WIDTH at its place.
template <u32 CODE, bool MAXIMUM>
__device__ __forceinline__ double thread_total(const char* at, u32 count, bool vector) {
    constexpr u32 WIDTH = CODE == FP32 ? 4 : 8;  // elements in 16 bytes
    constexpr u32 STRETCH = THREADS * WIDTH;
    double sum[WIDTH] = {};
    u32 i = threadIdx.x * WIDTH;
    if (vector) {
        const uint4* groups = reinterpret_cast<const uint4*>(at);
#pragma unroll 1
        for (; i + 3 * STRETCH + WIDTH <= count; i += 4 * STRETCH) {
            uint4 group[4];
#pragma unroll
            for (u32 u = 0; u < 4; ++u) group[u] = groups[i / WIDTH + u * THREADS];
#pragma unroll
            for (u32 u = 0; u < 4; ++u)
#pragma unroll
                for (u32 k = 0; k < WIDTH; ++k)
                    sum[k] = with_element<MAXIMUM>(sum[k], element_of<CODE>(group[u], k));
        }
#pragma unroll 1
        for (; i + WIDTH <= count; i += STRETCH) {
            const uint4 group = groups[i / WIDTH];
#pragma unroll
            for (u32 k = 0; k < WIDTH; ++k)
                sum[k] = with_element<MAXIMUM>(sum[k], element_of<CODE>(group, k));
        }
    }
    // The tail, or everything.
#pragma unroll 1
    for (; i < count; i += STRETCH) {
#pragma unroll
        for (u32 k = 0; k < WIDTH; ++k) {
            if (i + k >= count) continue;
            float x;
            if constexpr (CODE == FP32)
                x = reinterpret_cast<const float*>(at)[i + k];
            else
                x = from_half(reinterpret_cast<const u16*>(at)[i + k], CODE);
            sum[k] = with_element<MAXIMUM>(sum[k], x);
        }
    }
#pragma unroll
    for (u32 distance = 1; distance < WIDTH; distance *= 2)
#pragma unroll
        for (u32 k = 0; k < WIDTH; k += 2 * distance)
            sum[k] = merged<MAXIMUM>(sum[k], sum[k + distance]);
    return sum[0];
}

template <u32 N, bool MAXIMUM>
__device__ __forceinline__ void partials(const Gradients<N>& t) {
    const Gradient& gradient = t.piece[piece_of(t, blockIdx.x)];
    const i64 begin = i64(blockIdx.x - gradient.first_chunk) * CHUNK;
    const i64 left = gradient.count - begin;
    const u32 count = left < CHUNK ? static_cast<u32>(left) : CHUNK;
    const u32 code = gradient.code_and_vector & 0xFFu;
    const bool vector = gradient.code_and_vector & VECTOR;
    const char* at = gradient.at + begin * (code == FP32 ? 4 : 2);
    double x;
    if (code == FP32)
        x = thread_total<FP32, MAXIMUM>(at, count, vector);
    else if (code == BF16)
        x = thread_total<BF16, MAXIMUM>(at, count, vector);
    else
        x = thread_total<2, MAXIMUM>(at, count, vector);
    x = block_total<THREADS / 32, MAXIMUM>(x);
    if (threadIdx.x == 0) t.partials[blockIdx.x] = x;
}

template <bool MAXIMUM>
__device__ __forceinline__ void finish(const Finish& f) {
    double x = 0.0;
#pragma unroll 8
    for (i64 k = threadIdx.x; k < f.count; k += FINISH_THREADS)
        x = merged<MAXIMUM>(x, f.partials[k]);
    x = block_total<FINISH_THREADS / 32, MAXIMUM>(x);
    if (threadIdx.x != 0) return;
    const double scale = f.grad_scale_at == nullptr ? f.grad_scale : double(*f.grad_scale_at);
    const double total = __ddiv_rn(MAXIMUM ? x : __dsqrt_rn(x), fabs(scale));
    const double clip = __ddiv_rn(f.max_norm, __dadd_rn(total, 1e-6));
    *f.total_norm = canonical(static_cast<float>(total));
    *f.found_inf = x - x == 0.0 ? 0.0f : 1.0f;  // infinite or NaN
    *f.clip = canonical(static_cast<float>(clip > 1.0 ? 1.0 : clip));
}

#define PARTIALS(NAME, N, MAXIMUM)                                         \
    extern "C" __global__ void __launch_bounds__(THREADS)                  \
        norm_partials_##NAME(const __grid_constant__ Gradients<N> table) { \
        partials<N, MAXIMUM>(table);                                       \
    }
PARTIALS(small_2, SMALL_PIECES, false)
PARTIALS(large_2, LARGE_TENSORS, false)
PARTIALS(small_inf, SMALL_PIECES, true)
PARTIALS(large_inf, LARGE_TENSORS, true)

#define FINISH(NAME, MAXIMUM)                                    \
    extern "C" __global__ void __launch_bounds__(FINISH_THREADS) \
        norm_finish_##NAME(const __grid_constant__ Finish f) {   \
        finish<MAXIMUM>(f);                                      \
    }
FINISH(2, false)
FINISH(inf, true)
