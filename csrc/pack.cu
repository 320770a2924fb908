// Byte copies between many places in one launch. The table travels by value.

#include "table.cuh"

constexpr u32 THREADS = 256;
constexpr u32 CHUNK = 16384;  // bytes of one block

struct Piece {
    char *destination, *source;
    i64 bytes;
    u32 first_chunk;  // blocks of the launch before this piece
    u32 width;        // both ends are multiples of it: 16, 4, 2 or 1
};
static_assert(sizeof(Piece) == 32, "pack_cuda.py has the same layout");

template <u32 N>
struct Table {
    u32 pieces;
    u32 unused;
    Piece piece[N];
};
static_assert(sizeof(Table<LARGE_PIECES>) <= 32764, "kernel parameters have no more room");

// Copies whole words of [begin, end) and returns where they stop. Four loads are in flight.
template <typename Word>
__device__ __forceinline__ i64 copy_words(char* destination, const char* source, i64 begin,
                                          i64 end) {
    const Word* from = reinterpret_cast<const Word*>(source + begin);
    Word* to = reinterpret_cast<Word*>(destination + begin);
    const u32 words = static_cast<u32>((end - begin) / sizeof(Word));
    u32 i = threadIdx.x;
    for (; i + 3 * THREADS < words; i += 4 * THREADS) {
        Word a = from[i], b = from[i + THREADS], c = from[i + 2 * THREADS],
             d = from[i + 3 * THREADS];
        to[i] = a, to[i + THREADS] = b, to[i + 2 * THREADS] = c, to[i + 3 * THREADS] = d;
    }
    for (; i < words; i += THREADS) to[i] = from[i];
    return begin + i64(words) * sizeof(Word);
}

template <u32 N>
__device__ __forceinline__ void copy(const Table<N>& t) {
    const Piece& piece = t.piece[piece_of(t, blockIdx.x)];
    char *to = piece.destination, *from = piece.source;
    i64 begin = i64(blockIdx.x - piece.first_chunk) * CHUNK;
    const i64 end = begin + CHUNK < piece.bytes ? begin + CHUNK : piece.bytes;
    if (piece.width == 16) begin = copy_words<uint4>(to, from, begin, end);
    if (piece.width == 4) begin = copy_words<u32>(to, from, begin, end);
    if (piece.width == 2) begin = copy_words<u16>(to, from, begin, end);
    copy_words<u8>(to, from, begin, end);  // the tail, or everything
}

#define COPY(SIZE, N)                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)            \
        copy_pieces_##SIZE(const __grid_constant__ Table<N> table) { \
        copy<N>(table);                                              \
    }
COPY(small, SMALL_PIECES)
COPY(large, LARGE_PIECES)
