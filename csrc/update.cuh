// The update by ordinary loads and stores, for state in HBM or staged there.
//
// A thread has four elements and loads all that it needs of them before it computes: no loop, so
// what hides the memory's latency is other blocks. With int8 moments a warp has one block of codes.

#include "some.cuh"

constexpr u32 THREADS = 256;
constexpr u32 CHUNK = 4 * THREADS;  // elements of one block; adam_cuda.py has the same
constexpr u32 ANY = 3;              // a dtype that only the piece knows

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

// Four elements of a weight or gradient as they lie in memory.
template <u32 CODE>
using Number = Four<CODE == ANY || CODE == FP32 ? 4 : 2>;

template <u32 CODE>
__device__ __forceinline__ Number<CODE> load_number(const char* base, i64 i, u32 code) {
    if constexpr (CODE != ANY) {
        return load_four<CODE == FP32 ? 4 : 2>(base + (CODE == FP32 ? 4 : 2) * i);
    } else {
        if (code == FP32) return load_four<4>(base + 4 * i);
        const Four<2> half = load_four<2>(base + 2 * i);
        return {{half.word[0], half.word[1], 0, 0}};
    }
}

template <u32 BYTES>
__device__ __forceinline__ void unpack_number(u32 (&bits)[4], const Four<BYTES>& four, u32 code) {
    const bool wide = BYTES == 4 && code == FP32;
#pragma unroll
    for (int j = 0; j < 4; ++j)
        bits[j] = wide ? four.word[j % BYTES] : four.word[j / 2] >> (16 * (j & 1)) & 0xFFFFu;
}

__device__ __forceinline__ void load_some_numbers(u32 (&bits)[4], const char* base, i64 i, u32 code,
                                                  u32 n) {
    if (code == FP32)
        unpack_number(bits, load_some<4>(base + 4 * i, n), FP32);
    else
        unpack_number(bits, load_some<2>(base + 2 * i, n), code);
}

__device__ __forceinline__ void store_some_numbers(char* base, i64 i, const u32 (&bits)[4],
                                                   u32 code, u32 n) {
    if (code == FP32)
        store_some(base + 4 * i, four_of<4>(bits), n);
    else
        store_some(base + 2 * i, four_of<2>(bits), n);
}

// Where the elements of a piece are, and their numbers in the parameter.
struct Place {
    char *weight, *grad;
    i64 offset;
    u64 start;
    u32 weight_code, grad_code;
};

// Four elements, aligned in every array. W and G are the dtypes where they are known.
template <u32 MASTER, u32 MOMENTS, bool AMSGRAD, u32 W, u32 G, u32 N>
__device__ __forceinline__ void update_whole(const Table<N>& t, const Place& at, const float* row,
                                             i64 i) {
    constexpr u32 MOMENT = moment_bytes(MOMENTS), REST = master_bytes(MASTER);
    const u32 weight_code = W == ANY ? at.weight_code : W;
    const u32 grad_code = G == ANY ? at.grad_code : G;
    i64 k = at.offset + i;
    State<MASTER, MOMENTS, AMSGRAD> state;
    state.exp_avg = load_four<MOMENT>(t.exp_avg + MOMENT * k);
    state.exp_avg_sq = load_four<MOMENT>(t.exp_avg_sq + MOMENT * k);
    if constexpr (AMSGRAD) state.max_exp_avg_sq = load_four<4>(t.max_exp_avg_sq + 4 * k);
    if constexpr (MASTER != NO_MASTER) state.master = load_four<REST>(t.master + REST * k);
    if constexpr (MOMENTS == MOMENTS_INT8) {
        state.exp_avg_scale = t.exp_avg_scale[k / BLOCK];
        state.exp_avg_sq_scale = t.exp_avg_sq_scale[k / BLOCK];
    }
    const Number<W> weights = load_number<W>(at.weight, i, weight_code);
    const Number<G> grads = load_number<G>(at.grad, i, grad_code);
    u32 weight[4], grad[4];
    unpack_number(weight, weights, weight_code);
    unpack_number(grad, grads, grad_code);
    update_four(scalars_of(row), state, weight, weight_code, grad, grad_code, at.start + i);
    // Addresses are made anew: kept, they cost a block of threads an SM.
    asm volatile("" : "+l"(k));
    store_four(t.exp_avg + MOMENT * k, state.exp_avg);
    store_four(t.exp_avg_sq + MOMENT * k, state.exp_avg_sq);
    if constexpr (AMSGRAD) store_four(t.max_exp_avg_sq + 4 * k, state.max_exp_avg_sq);
    if constexpr (MASTER != NO_MASTER) store_four(t.master + REST * k, state.master);
    if (weight_code == FP32)
        store_four(at.weight + 4 * i, four_of<4>(weight));
    else
        store_four(at.weight + 2 * i, four_of<2>(weight));
    if constexpr (MOMENTS == MOMENTS_INT8) {
        if (threadIdx.x % 32 == 0) {
            t.exp_avg_scale[k / BLOCK] = state.exp_avg_scale;
            t.exp_avg_sq_scale[k / BLOCK] = state.exp_avg_sq_scale;
        }
    }
}

// The first n of four elements, wherever they lie. With int8 moments all lanes of a warp call this,
// some with no elements.
template <u32 MASTER, u32 MOMENTS, bool AMSGRAD, u32 N>
__device__ __forceinline__ void update_some(const Table<N>& t, const Place& at, const float* row,
                                            i64 i, u32 n) {
    constexpr u32 MOMENT = moment_bytes(MOMENTS), REST = master_bytes(MASTER);
    const i64 k = at.offset + i;
    State<MASTER, MOMENTS, AMSGRAD> state;
    state.exp_avg = load_some<MOMENT>(t.exp_avg + MOMENT * k, n);
    state.exp_avg_sq = load_some<MOMENT>(t.exp_avg_sq + MOMENT * k, n);
    if constexpr (AMSGRAD) state.max_exp_avg_sq = load_some<4>(t.max_exp_avg_sq + 4 * k, n);
    if constexpr (MASTER != NO_MASTER) state.master = load_some<REST>(t.master + REST * k, n);
    if constexpr (MOMENTS == MOMENTS_INT8) {
        state.exp_avg_scale = t.exp_avg_scale[k / BLOCK];
        state.exp_avg_sq_scale = t.exp_avg_sq_scale[k / BLOCK];
    }
    u32 weight[4], grad[4];
    load_some_numbers(weight, at.weight, i, at.weight_code, n);
    load_some_numbers(grad, at.grad, i, at.grad_code, n);
    update_four(scalars_of(row), state, weight, at.weight_code, grad, at.grad_code, at.start + i);
    store_some(t.exp_avg + MOMENT * k, state.exp_avg, n);
    store_some(t.exp_avg_sq + MOMENT * k, state.exp_avg_sq, n);
    if constexpr (AMSGRAD) store_some(t.max_exp_avg_sq + 4 * k, state.max_exp_avg_sq, n);
    if constexpr (MASTER != NO_MASTER) store_some(t.master + REST * k, state.master, n);
    store_some_numbers(at.weight, i, weight, at.weight_code, n);
    if constexpr (MOMENTS == MOMENTS_INT8) {
        if (threadIdx.x % 32 == 0 && n != 0) {
            t.exp_avg_scale[k / BLOCK] = state.exp_avg_scale;
            t.exp_avg_sq_scale[k / BLOCK] = state.exp_avg_sq_scale;
        }
    }
}

template <u32 MASTER, u32 MOMENTS, bool AMSGRAD, u32 N>
__device__ __forceinline__ void update(const Table<N>& t) {
    const Piece& piece = t.piece[piece_of(t, blockIdx.x)];
    const float* row = t.scalars + u64(piece.scalars_row) * SCALARS;
    if (row[SKIP] != 0.0f) return;
    const Place at{piece.weight,
                   piece.grad,
                   piece.offset,
                   piece.start | u64(piece.start_high) << 32,
                   MASTER == SPLIT_MASTER ? BF16 : piece.weight_code,
                   piece.grad_code};
    const i64 begin = i64(blockIdx.x - piece.first_chunk) * CHUNK;
    const i64 i = begin + 4 * threadIdx.x;
    const i64 first_of_warp = begin + 4 * (threadIdx.x / 32 * 32);
    if (first_of_warp >= piece.count) return;
    constexpr bool TOGETHER = MOMENTS == MOMENTS_INT8;
    if (piece.vector && (TOGETHER ? first_of_warp + BLOCK : i + 4) <= piece.count) {
        if (at.weight_code == BF16 && at.grad_code == BF16)
            update_whole<MASTER, MOMENTS, AMSGRAD, BF16, BF16>(t, at, row, i);
        else
            update_whole<MASTER, MOMENTS, AMSGRAD, MASTER == SPLIT_MASTER ? BF16 : ANY, ANY>(
                t, at, row, i);
        return;
    }
    const i64 left = piece.count - i;
    const u32 n = left >= 4 ? 4 : left > 0 ? static_cast<u32>(left) : 0;
    if constexpr (TOGETHER) {
        update_some<MASTER, MOMENTS, AMSGRAD>(t, at, row, i, n);
    } else {
        // One by one, which needs the fewest registers.
#pragma unroll 1
        for (u32 j = 0; j < n; ++j) update_some<MASTER, MOMENTS, AMSGRAD>(t, at, row, i + j, 1);
    }
}

// A small and a large table of one variant. BLOCKS, the least of an SM, bounds the registers.
#define UPDATE(NAME, MASTER, MOMENTS, AMSGRAD, BLOCKS)                               \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                    \
        adam_update_small##NAME(const __grid_constant__ Table<SMALL_PIECES> table) { \
        update<MASTER, MOMENTS, AMSGRAD>(table);                                     \
    }                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)                    \
        adam_update_large##NAME(const __grid_constant__ Table<LARGE_PIECES> table) { \
        update<MASTER, MOMENTS, AMSGRAD>(table);                                     \
    }
