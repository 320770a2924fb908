// The update by ordinary loads and stores, for state in HBM or staged there.
//
// A thread has GROUPS groups of four elements and loads all of them before it computes: no loop, so
// what hides the memory's latency is other blocks. With int8 moments a warp's group is one block of
// codes.

#include "some.cuh"

constexpr u32 THREADS = 256;
constexpr u32 GROUPS = 1;
constexpr u32 CHUNK = 4 * THREADS * GROUPS;  // elements of one block; adam_cuda.py has the same
constexpr u32 ANY = 3;                       // a dtype that only the piece knows

// Streaming: each byte is used once.
template <u32 BYTES>
__device__ __forceinline__ Four<BYTES> load_four(const char* at) {
    Four<BYTES> four;
    if constexpr (BYTES == 4) {
        const uint4 x = __ldcs(reinterpret_cast<const uint4*>(at));
        four.word[0] = x.x, four.word[1] = x.y, four.word[2] = x.z, four.word[3] = x.w;
    } else if constexpr (BYTES == 2) {
        const uint2 x = __ldcs(reinterpret_cast<const uint2*>(at));
        four.word[0] = x.x, four.word[1] = x.y;
    } else {
        four.word[0] = __ldcs(reinterpret_cast<const u32*>(at));
    }
    return four;
}

template <u32 BYTES>
__device__ __forceinline__ void store_four(char* at, const Four<BYTES>& four) {
    if constexpr (BYTES == 4)
        __stcs(reinterpret_cast<uint4*>(at),
               make_uint4(four.word[0], four.word[1], four.word[2], four.word[3]));
    else if constexpr (BYTES == 2)
        __stcs(reinterpret_cast<uint2*>(at), make_uint2(four.word[0], four.word[1]));
    else
        __stcs(reinterpret_cast<u32*>(at), four.word[0]);
}

// n of four elements, as one word where they are all there and aligned.
template <u32 BYTES>
__device__ __forceinline__ Four<BYTES> load(const char* base, i64 i, u32 n, bool whole) {
    return whole ? load_four<BYTES>(base + BYTES * i) : load_some<BYTES>(base + BYTES * i, n);
}

template <u32 BYTES>
__device__ __forceinline__ void store(char* base, i64 i, const Four<BYTES>& four, u32 n,
                                      bool whole) {
    if (whole)
        store_four(base + BYTES * i, four);
    else
        store_some(base + BYTES * i, four, n);
}

template <u32 CODE>
__device__ __forceinline__ Four<CODE == ANY || CODE == FP32 ? 4 : 2> load_number(const char* base,
                                                                                 i64 i, u32 code,
                                                                                 u32 n,
                                                                                 bool whole) {
    if constexpr (CODE == ANY) {
        if (code == FP32) return load<4>(base, i, n, whole);
        const Four<2> half = load<2>(base, i, n, whole);
        return {{half.word[0], half.word[1], 0, 0}};
    } else {
        return load<CODE == FP32 ? 4 : 2>(base, i, n, whole);
    }
}

template <u32 BYTES>
__device__ __forceinline__ void unpack_number(u32 (&bits)[4], const Four<BYTES>& four, u32 code) {
    const bool wide = BYTES == 4 && code == FP32;
#pragma unroll
    for (int j = 0; j < 4; ++j)
        bits[j] = wide ? four.word[j % BYTES] : four.word[j / 2] >> (16 * (j & 1)) & 0xFFFFu;
}

// W and G are the dtypes of weights and gradients where they are known.
template <u32 MASTER, u32 MOMENTS, bool AMSGRAD, u32 W, u32 G, u32 N>
__device__ __forceinline__ void update_chunk(const Table<N>& t, const Piece& piece) {
    const float* row = t.scalars + u64(piece.scalars_row) * SCALARS;
    if (row[SKIP] != 0.0f) return;
    constexpr u32 MOMENT = moment_bytes(MOMENTS), REST = master_bytes(MASTER);
    const i64 offset = piece.offset;
    char *exp_avg = t.exp_avg + MOMENT * offset, *exp_avg_sq = t.exp_avg_sq + MOMENT * offset;
    char* max_exp_avg_sq = t.max_exp_avg_sq + 4 * offset;
    char* master = t.master + REST * offset;
    const u32 weight_code = W == ANY ? piece.weight_code : W;
    const u32 grad_code = G == ANY ? piece.grad_code : G;
    const i64 begin = i64(blockIdx.x - piece.first_chunk) * CHUNK;
    const u64 start = piece.start | u64(piece.start_high) << 32;

    State<MASTER, MOMENTS, AMSGRAD> state[GROUPS];
    decltype(load_number<W>(nullptr, 0, 0, 0, false)) weights[GROUPS];
    decltype(load_number<G>(nullptr, 0, 0, 0, false)) grads[GROUPS];
    u32 there[GROUPS];
#pragma unroll
    for (u32 k = 0; k < GROUPS; ++k) {
        const i64 i = begin + 4 * (k * THREADS + threadIdx.x);
        const i64 left = piece.count - i;
        const u32 n = left >= 4 ? 4 : left > 0 ? static_cast<u32>(left) : 0;
        const bool whole = n == 4 && piece.vector;
        there[k] = n;
        state[k].exp_avg = load<MOMENT>(exp_avg, i, n, whole);
        state[k].exp_avg_sq = load<MOMENT>(exp_avg_sq, i, n, whole);
        if constexpr (AMSGRAD) state[k].max_exp_avg_sq = load<4>(max_exp_avg_sq, i, n, whole);
        if constexpr (MASTER != NO_MASTER) state[k].master = load<REST>(master, i, n, whole);
        weights[k] = load_number<W>(piece.weight, i, weight_code, n, whole);
        grads[k] = load_number<G>(piece.grad, i, grad_code, n, whole);
        if constexpr (MOMENTS == MOMENTS_INT8) {
            const i64 block = (offset + i) / BLOCK;
            // Of a block that has elements, every lane needs the scales.
            if (begin + 4 * (k * THREADS + threadIdx.x / 32 * 32) < piece.count) {
                state[k].exp_avg_scale = t.exp_avg_scale[block];
                state[k].exp_avg_sq_scale = t.exp_avg_sq_scale[block];
            }
        }
    }
    const Scalars s = scalars_of(row);
#pragma unroll
    for (u32 k = 0; k < GROUPS; ++k) {
        const i64 i = begin + 4 * (k * THREADS + threadIdx.x);
        const u32 n = there[k];
        const bool whole = n == 4 && piece.vector;
        u32 weight[4], grad[4];
        unpack_number(weight, weights[k], weight_code);
        unpack_number(grad, grads[k], grad_code);
        update_four(s, state[k], weight, weight_code, grad, grad_code, start + i);
        store<MOMENT>(exp_avg, i, state[k].exp_avg, n, whole);
        store<MOMENT>(exp_avg_sq, i, state[k].exp_avg_sq, n, whole);
        if constexpr (AMSGRAD) store<4>(max_exp_avg_sq, i, state[k].max_exp_avg_sq, n, whole);
        if constexpr (MASTER != NO_MASTER) store<REST>(master, i, state[k].master, n, whole);
        if (weight_code == FP32)
            store<4>(piece.weight, i, four_of<4>(weight), n, whole);
        else
            store<2>(piece.weight, i, four_of<2>(weight), n, whole);
        if constexpr (MOMENTS == MOMENTS_INT8) {
            const i64 block = (offset + i) / BLOCK;
            if (threadIdx.x % 32 == 0 && n != 0) {
                t.exp_avg_scale[block] = state[k].exp_avg_scale;
                t.exp_avg_sq_scale[block] = state[k].exp_avg_sq_scale;
            }
        }
    }
}

template <u32 MASTER, u32 MOMENTS, bool AMSGRAD, u32 N>
__device__ __forceinline__ void update(const Table<N>& t) {
    const Piece& piece = t.piece[piece_of(t, blockIdx.x)];
    if (piece.weight_code == BF16 && piece.grad_code == BF16)
        update_chunk<MASTER, MOMENTS, AMSGRAD, BF16, BF16>(t, piece);
    else
        update_chunk<MASTER, MOMENTS, AMSGRAD, MASTER == SPLIT_MASTER ? BF16 : ANY, ANY>(t, piece);
}

// A small and a large table of one variant.
#define UPDATE(NAME, MASTER, MOMENTS, AMSGRAD)                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                            \
        adam_update_small##NAME(const __grid_constant__ Table<SMALL_PIECES> table) { \
        update<MASTER, MOMENTS, AMSGRAD>(table);                                     \
    }                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                            \
        adam_update_large##NAME(const __grid_constant__ Table<LARGE_PIECES> table) { \
        update<MASTER, MOMENTS, AMSGRAD>(table);                                     \
    }
