// Adam and AdamW in place over the link, for state that stays in host memory.
//
// Note [stages]
//     A block is one producer warp and some consumer warps, and a ring of stages in shared memory.
//     A stage holds one chunk: consecutive elements of one piece, of each state array, of the
//     weight and of the gradient. Its life: bulk loads (the producer issues them, `full` completes
//     when all bytes are there) -> updated in place by the consumers (each warp arrives at `done`)
//     -> bulk stores (the producer) -> loaded again, once the stores have read it. So the link is
//     busy both ways, loads are as far ahead as there are stages, and no thread waits for a load to
//     use it. Chunks go round the blocks: a few blocks fill the link and leave the SMs to others.
//
// Note [ordinary loads]
//     Bulk copies move multiples of 16 bytes from and to multiples of 16. The last elements of a
//     piece (fewer than 16), operands that are aligned otherwise and pieces whose state is, go
//     directly between memory and registers, by the lane that has them.
//
// Stages, elements of a chunk, consumer warps and blocks are arguments of the launch.

#include "bulk.cuh"
#include "some.cuh"

constexpr u32 MOST_STAGES = 16;
constexpr u32 MOST_THREADS = 768;
constexpr u32 LINE = 128;  // elements a warp updates at once, four consecutive ones in a lane
constexpr u32 GROUP = 16;  // elements: 16 bytes or more of every array
constexpr u32 BATCH = 16;  // chunks that the producer's lanes look up at once
constexpr u32 RING = 2 * BATCH;
constexpr u32 BEHIND = 1;  // chunks whose stores may still read their stages when one is loaded
static_assert(MOST_STAGES <= BATCH, "a description must last until its chunk is done");

// ---- parameters ----

struct StreamPiece {
    char *weight, *grad;  // the first element's byte
    i64 offset;           // first element in the state arrays
    i64 start;            // first element in its parameter
    i64 count_and_codes;  // count << 8 | codes
    u32 scalars_row;
    u32 first_chunk;  // chunks of the launch before this piece
};
static_assert(sizeof(StreamPiece) == 48, "adam_stream_cuda.py has the same layout");

// Codes of a piece: the weight's dtype, the gradient's (<< 2), and what bulk copies can move.
constexpr u32 STATE_ALIGNED = 0x10, WEIGHT_ALIGNED = 0x20, GRAD_ALIGNED = 0x40;

template <u32 N>
struct StreamTable {
    char *exp_avg, *exp_avg_sq, *max_exp_avg_sq, *master;  // `master` is the rest of a split one
    char *exp_avg_scale, *exp_avg_sq_scale;
    const float* scalars;
    u32 pieces;
    u32 chunks;
    u32 chunk;                     // elements, a multiple of LINE
    u32 stages;                    // 2 ... MOST_STAGES
    u32 weight_bytes, grad_bytes;  // of an element: the widest of the launch
    StreamPiece piece[N];
};
static_assert(sizeof(StreamTable<LARGE_PIECES>) <= 32764, "kernel parameters have no more room");

// One chunk, as the producer describes it to the consumers.
struct alignas(16) Work {
    float row[SCALARS];
    i64 begin;  // the chunk's first element in its piece
    i64 first;  // it in the state arrays
    i64 start;  // it in its parameter
    u32 count;  // elements; 0 for a parameter that is skipped
    u32 moved;  // the first of them, by bulk copies
    u32 codes;
    u32 piece;
};

// ---- the arrays of a stage ----

// Where the arrays of a stage begin, in bytes for each element of a chunk. Behind the gradients are
// the scales of int8 moments.
template <u32 MASTER, u32 MOMENTS, bool AMSGRAD>
struct Layout {
    static constexpr u32 MOMENT = moment_bytes(MOMENTS), REST = master_bytes(MASTER);
    static constexpr u32 EXP_AVG = 0, EXP_AVG_SQ = MOMENT, MAX_EXP_AVG_SQ = 2 * MOMENT;
    static constexpr u32 AT_MASTER = MAX_EXP_AVG_SQ + (AMSGRAD ? 4 : 0);
    static constexpr u32 WEIGHT = AT_MASTER + REST;
    static constexpr bool SCALED = MOMENTS == MOMENTS_INT8;
};

// Bytes for the scales of one array: bulk copies bring up to 12 bytes before and behind them, too.
__device__ __forceinline__ u32 scale_bytes(u32 chunk) { return (chunk / BLOCK * 4 + 31) / 16 * 16; }

// A chunk's first weight, and gradient. Pointers come from the kernel's parameters alone: those the
// compiler knows to be global memory. (NVRTC 13.0 comes to no end where they are integers that
// __cvta_global_to_generic makes pointers of.)
template <u32 N>
__device__ __forceinline__ char* weight_of(const StreamTable<N>& t, const Work& work) {
    return t.piece[work.piece].weight + work.begin * ((work.codes & 3u) == FP32 ? 4 : 2);
}

template <u32 N>
__device__ __forceinline__ char* grad_of(const StreamTable<N>& t, const Work& work) {
    return t.piece[work.piece].grad + work.begin * ((work.codes >> 2 & 3u) == FP32 ? 4 : 2);
}

// How far behind a multiple of 16 an address is.
__device__ __forceinline__ u32 behind(const char* at) {
    return static_cast<u32>(reinterpret_cast<u64>(at) % 16);
}

// Four elements in the stage where bulk copies moved them, else n of them in memory.
struct Place {
    u32 element;  // in the chunk
    u32 n;
    bool staged;
};

template <u32 BYTES>
__device__ __forceinline__ Four<BYTES> read(const char* stage, const char* memory,
                                            const Place& at) {
    if (!at.staged) return load_some<BYTES>(memory + BYTES * at.element, at.n);
    Four<BYTES> four;
    const char* from = stage + BYTES * at.element;
    if constexpr (BYTES == 4) {
        const uint4 x = *reinterpret_cast<const uint4*>(from);
        four.word[0] = x.x, four.word[1] = x.y, four.word[2] = x.z, four.word[3] = x.w;
    } else if constexpr (BYTES == 2) {
        const uint2 x = *reinterpret_cast<const uint2*>(from);
        four.word[0] = x.x, four.word[1] = x.y;
    } else {
        four.word[0] = *reinterpret_cast<const u32*>(from);
    }
    return four;
}

template <u32 BYTES>
__device__ __forceinline__ void write(char* stage, char* memory, const Place& at,
                                      const Four<BYTES>& four) {
    char* to = stage + BYTES * at.element;
    if (!at.staged)
        store_some(memory + BYTES * at.element, four, at.n);
    else if constexpr (BYTES == 4)
        *reinterpret_cast<uint4*>(to) =
            make_uint4(four.word[0], four.word[1], four.word[2], four.word[3]);
    else if constexpr (BYTES == 2)
        *reinterpret_cast<uint2*>(to) = make_uint2(four.word[0], four.word[1]);
    else
        *reinterpret_cast<u32*>(to) = four.word[0];
}

// The bits of four numbers of a dtype that only the piece knows.
__device__ __forceinline__ void read_numbers(u32 (&bits)[4], const char* stage, const char* memory,
                                             const Place& at, bool wide) {
    if (wide) {
        const Four<4> four = read<4>(stage, memory, at);
#pragma unroll
        for (int j = 0; j < 4; ++j) bits[j] = bits_of(four, j);
    } else {
        const Four<2> four = read<2>(stage, memory, at);
#pragma unroll
        for (int j = 0; j < 4; ++j) bits[j] = bits_of(four, j);
    }
}

// ---- the producer ----

template <u32 N>
__device__ __forceinline__ void describe(Work* ring, const StreamTable<N>& t, u32 k) {
    const u32 chunk = blockIdx.x + k * gridDim.x;
    const u32 index = piece_of(t, chunk);
    const StreamPiece& piece = t.piece[index];
    Work& work = ring[k % RING];
    const float* row = t.scalars + u64(piece.scalars_row) * SCALARS;
#pragma unroll
    for (u32 j = 0; j < SCALARS; ++j) work.row[j] = row[j];
    const u32 codes = static_cast<u32>(piece.count_and_codes) & 0xFFu;
    const i64 begin = i64(chunk - piece.first_chunk) * t.chunk;
    const i64 left = (piece.count_and_codes >> 8) - begin;
    u32 count = static_cast<u32>(left < t.chunk ? left : t.chunk);
    if (row[SKIP] != 0.0f) count = 0;
    work.begin = begin;
    work.first = piece.offset + begin;
    work.start = piece.start + begin;
    work.count = count;
    work.moved = codes & STATE_ALIGNED ? count / GROUP * GROUP : 0;
    work.codes = codes;
    work.piece = index;
}

// Calls each(array in the stage, its bytes, its address in memory) for what of a chunk the bulk
// copies load, or store.
template <typename At, u32 N, typename Each>
__device__ __forceinline__ void for_arrays(const StreamTable<N>& t, const Work& work, char* stage,
                                           bool loads, Each each) {
    const u32 weight_bytes = (work.codes & 3u) == FP32 ? 4 : 2;
    const u32 grad_bytes = (work.codes >> 2 & 3u) == FP32 ? 4 : 2;
    const u32 n = work.moved;
    if (n == 0) return;
    each(stage + At::EXP_AVG * t.chunk, At::MOMENT * n, t.exp_avg + At::MOMENT * work.first);
    each(stage + At::EXP_AVG_SQ * t.chunk, At::MOMENT * n, t.exp_avg_sq + At::MOMENT * work.first);
    if constexpr (At::AT_MASTER != At::MAX_EXP_AVG_SQ)
        each(stage + At::MAX_EXP_AVG_SQ * t.chunk, 4 * n, t.max_exp_avg_sq + 4 * work.first);
    if constexpr (At::REST != 0)
        each(stage + At::AT_MASTER * t.chunk, At::REST * n, t.master + At::REST * work.first);
    if (work.codes & WEIGHT_ALIGNED)
        each(stage + At::WEIGHT * t.chunk, weight_bytes * n, weight_of(t, work));
    if (loads && work.codes & GRAD_ALIGNED)
        each(stage + (At::WEIGHT + t.weight_bytes) * t.chunk, grad_bytes * n, grad_of(t, work));
    if (At::SCALED && loads) {
        // Aligned, and so perhaps a few of the neighbours': those are not used.
        char* scales = stage + (At::WEIGHT + t.weight_bytes + t.grad_bytes) * t.chunk;
        const i64 at = work.first / BLOCK * 4;
        const u32 bytes = (work.count + BLOCK - 1) / BLOCK * 4;
        char *m = t.exp_avg_scale + at, *v = t.exp_avg_sq_scale + at;
        each(scales, (behind(m) + bytes + 15) / 16 * 16, m - behind(m));
        each(scales + scale_bytes(t.chunk), (behind(v) + bytes + 15) / 16 * 16, v - behind(v));
    }
}

// Scales are too few and lie too unevenly for bulk copies; a warp's stores go out together.
template <typename At, u32 N>
__device__ __forceinline__ void store_scales(const StreamTable<N>& t, const Work& work,
                                             const char* stage, u32 lane) {
    const char* scales = stage + (At::WEIGHT + t.weight_bytes + t.grad_bytes) * t.chunk;
    const i64 at = work.first / BLOCK * 4;
    char *m = t.exp_avg_scale + at, *v = t.exp_avg_sq_scale + at;
    for (u32 k = lane; k * BLOCK < work.count; k += 32) {
        *reinterpret_cast<float*>(m + 4 * k) =
            *reinterpret_cast<const float*>(scales + behind(m) + 4 * k);
        *reinterpret_cast<float*>(v + 4 * k) =
            *reinterpret_cast<const float*>(scales + scale_bytes(t.chunk) + behind(v) + 4 * k);
    }
}

template <typename At, u32 N>
__device__ __forceinline__ void produce(const StreamTable<N>& t, char* stages, u32 stage_bytes,
                                        Work* ring, u64* full, u64* done, u32 mine) {
    const u32 lane = threadIdx.x % 32;
    u32 loaded = 0, load_stage = 0;
    auto load = [&] {
        if (loaded % BATCH == 0) {
            if (lane < BATCH && loaded + lane < mine) describe(ring, t, loaded + lane);
            __syncwarp();
        }
        if (lane == 0) {
            const Work& work = ring[loaded % RING];
            char* stage = stages + load_stage * stage_bytes;
            u64* barrier = &full[load_stage];
            u32 bytes = 0;
            for_arrays<At>(t, work, stage, true,
                           [&](char*, u32 size, const char*) { bytes += size; });
            barrier_expect(barrier, bytes);
            for_arrays<At>(t, work, stage, true, [&](char* to, u32 size, const char* from) {
                bulk_load(to, from, size, barrier);
            });
        }
        ++loaded;
        load_stage = load_stage + 1 == t.stages ? 0 : load_stage + 1;
    };

    while (loaded < t.stages && loaded < mine) load();
    u32 s = 0, parity = 0;
    for (u32 i = 0; i < mine; ++i) {
        const Work& work = ring[i % RING];
        char* stage = stages + s * stage_bytes;
        barrier_wait(&done[s], parity);
        if (lane == 0) {
            for_arrays<At>(t, work, stage, false,
                           [&](char* from, u32 size, char* to) { bulk_store(to, from, size); });
            bulk_commit();
        }
        if (At::SCALED && work.moved != 0) store_scales<At>(t, work, stage, lane);
        if (lane == 0) bulk_wait_read<BEHIND>();
        __syncwarp();
        if (i >= BEHIND && loaded < mine) load();
        if (++s == t.stages) s = 0, parity ^= 1;
    }
    // Shared memory must outlive the reads, and the kernel ends with everything written.
    if (lane == 0) bulk_wait_written();
}

// ---- the consumers ----

// One line of a chunk; lane l has the elements line + 4 * l and the three behind it.
template <u32 MASTER, u32 MOMENTS, bool AMSGRAD, u32 N>
__device__ __forceinline__ void update_line(const Scalars& s, const StreamTable<N>& t,
                                            const Work& work, char* stage, u32 line, u32 lane) {
    using At = Layout<MASTER, MOMENTS, AMSGRAD>;
    const u32 e = line + 4 * lane;
    const u32 n = e >= work.count ? 0 : work.count - e < 4 ? work.count - e : 4;
    const Place at{e, n, e < work.moved};
    const Place weight_at{e, n, at.staged && work.codes & WEIGHT_ALIGNED};
    const Place grad_at{e, n, at.staged && work.codes & GRAD_ALIGNED};
    const u32 weight_code = MASTER == SPLIT_MASTER ? BF16 : work.codes & 3u;
    const u32 grad_code = work.codes >> 2 & 3u;
    // With a master the weight is half precision; without one it may be either.
    const bool wide_weight = MASTER == NO_MASTER && weight_code == FP32;
    char* m_at = stage + At::EXP_AVG * t.chunk;
    char* v_at = stage + At::EXP_AVG_SQ * t.chunk;
    char* vmax_at = stage + At::MAX_EXP_AVG_SQ * t.chunk;
    char* master_at = stage + At::AT_MASTER * t.chunk;
    char* weights = stage + At::WEIGHT * t.chunk;
    char* grads = weights + t.weight_bytes * t.chunk;
    char *m = t.exp_avg + At::MOMENT * work.first, *v = t.exp_avg_sq + At::MOMENT * work.first;
    char *vmax = t.max_exp_avg_sq + 4 * work.first, *master = t.master + At::REST * work.first;
    char *weight_memory = weight_of(t, work), *grad_memory = grad_of(t, work);
    const i64 block = (work.first + line) / BLOCK * 4, first_block = work.first / BLOCK * 4;
    char *m_scale = t.exp_avg_scale + block, *v_scale = t.exp_avg_sq_scale + block;
    char* m_scale_at =
        grads + t.grad_bytes * t.chunk + behind(t.exp_avg_scale + first_block) + line / BLOCK * 4;
    char* v_scale_at = grads + t.grad_bytes * t.chunk + scale_bytes(t.chunk) +
                       behind(t.exp_avg_sq_scale + first_block) + line / BLOCK * 4;

    State<MASTER, MOMENTS, AMSGRAD> state;
    u32 weight[4], grad[4];
    state.exp_avg = read<At::MOMENT>(m_at, m, at);
    state.exp_avg_sq = read<At::MOMENT>(v_at, v, at);
    if constexpr (AMSGRAD) state.max_exp_avg_sq = read<4>(vmax_at, vmax, at);
    if constexpr (MASTER != NO_MASTER) state.master = read<At::REST>(master_at, master, at);
    if constexpr (At::SCALED) {
        const bool staged = work.moved != 0;
        state.exp_avg_scale =
            staged ? *reinterpret_cast<float*>(m_scale_at) : *reinterpret_cast<float*>(m_scale);
        state.exp_avg_sq_scale =
            staged ? *reinterpret_cast<float*>(v_scale_at) : *reinterpret_cast<float*>(v_scale);
    }
    read_numbers(weight, weights, weight_memory, weight_at, wide_weight);
    read_numbers(grad, grads, grad_memory, grad_at, grad_code == FP32);
    update_four(s, state, weight, weight_code, grad, grad_code, work.start + e);
    write(m_at, m, at, state.exp_avg);
    write(v_at, v, at, state.exp_avg_sq);
    if constexpr (AMSGRAD) write(vmax_at, vmax, at, state.max_exp_avg_sq);
    if constexpr (MASTER != NO_MASTER) write(master_at, master, at, state.master);
    if constexpr (At::SCALED) {
        if (lane == 0) {
            const bool staged = work.moved != 0;
            if (staged) {
                *reinterpret_cast<float*>(m_scale_at) = state.exp_avg_scale;
                *reinterpret_cast<float*>(v_scale_at) = state.exp_avg_sq_scale;
            } else {
                *reinterpret_cast<float*>(m_scale) = state.exp_avg_scale;
                *reinterpret_cast<float*>(v_scale) = state.exp_avg_sq_scale;
            }
        }
    }
    if (wide_weight)
        write(weights, weight_memory, weight_at, four_of<4>(weight));
    else
        write(weights, weight_memory, weight_at, four_of<2>(weight));
}

template <u32 MASTER, u32 MOMENTS, bool AMSGRAD, u32 N>
__device__ __forceinline__ void consume(const StreamTable<N>& t, char* stages, u32 stage_bytes,
                                        const Work* ring, u64* full, u64* done, u32 mine) {
    const u32 warp = threadIdx.x / 32 - 1, warps = blockDim.x / 32 - 1, lane = threadIdx.x % 32;
    u32 s = 0, parity = 0, turn = warp;  // short pieces begin with another warp each
#pragma unroll 1
    for (u32 i = 0; i < mine; ++i) {
        const Work& work = ring[i % RING];
        barrier_wait(&full[s], parity);
        const Scalars scalars = scalars_of(work.row);
        const u32 count = work.count;
#pragma unroll 1
        for (u32 line = turn * LINE; line < count; line += warps * LINE)
            update_line<MASTER, MOMENTS, AMSGRAD>(scalars, t, work, stages + s * stage_bytes, line,
                                                  lane);
        bulk_fence();
        __syncwarp();
        if (lane == 0) barrier_arrive(&done[s]);
        if (++s == t.stages) s = 0, parity ^= 1;
        turn = turn == 0 ? warps - 1 : turn - 1;
    }
}

template <u32 MASTER, u32 MOMENTS, bool AMSGRAD, u32 N>
__device__ __forceinline__ void stream(const StreamTable<N>& t) {
    extern __shared__ __align__(128) char stages[];  // t.stages of stage_bytes
    __shared__ Work ring[RING];
    __shared__ __align__(8) u64 full[MOST_STAGES], done[MOST_STAGES];

    using At = Layout<MASTER, MOMENTS, AMSGRAD>;
    const u32 stage_bytes = (At::WEIGHT + t.weight_bytes + t.grad_bytes) * t.chunk +
                            (At::SCALED ? 2 * scale_bytes(t.chunk) : 0);
    if (blockIdx.x >= t.chunks) return;
    const u32 mine = (t.chunks - 1 - blockIdx.x) / gridDim.x + 1;
    if (threadIdx.x == 0) {
        for (u32 s = 0; s < t.stages; ++s) {
            barrier_init(&full[s], 1);
            barrier_init(&done[s], blockDim.x / 32 - 1);
        }
        barriers_are_ready();
    }
    __syncthreads();
    if (threadIdx.x < 32)
        produce<At>(t, stages, stage_bytes, ring, full, done, mine);
    else
        consume<MASTER, MOMENTS, AMSGRAD>(t, stages, stage_bytes, ring, full, done, mine);
}

// A small and a large table of one variant.
#define STREAM(NAME, MASTER, MOMENTS, AMSGRAD)                                             \
    extern "C" __global__ void __launch_bounds__(MOST_THREADS)                             \
        adam_stream_small##NAME(const __grid_constant__ StreamTable<SMALL_PIECES> table) { \
        stream<MASTER, MOMENTS, AMSGRAD>(table);                                           \
    }                                                                                      \
    extern "C" __global__ void __launch_bounds__(MOST_THREADS)                             \
        adam_stream_large##NAME(const __grid_constant__ StreamTable<LARGE_PIECES> table) { \
        stream<MASTER, MOMENTS, AMSGRAD>(table);                                           \
    }
