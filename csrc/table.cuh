// Tables of pieces that travel by value as kernel parameters (32,764 bytes at most), so that there
// is no table in device memory to upload, to reuse too early or to keep alive. Kernels come with a
// small and a large table because the parameters of every launch are copied whole.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 SMALL_PIECES = 64, LARGE_PIECES = 640;

// The last piece that begins at or before a chunk of the launch; there are no empty ones.
template <typename Table>
__device__ __forceinline__ u32 piece_of(const Table& t, u32 chunk) {
    u32 low = 0, high = t.pieces;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (t.piece[middle].first_chunk <= chunk)
            low = middle;
        else
            high = middle;
    }
    return low;
}
