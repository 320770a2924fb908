// Stochastic rounding, bit for bit what ghoffload/kernels/random_host.py computes.

#include "table.cuh"

// 32 random bits of an element (or of whatever else `index` counts): the same wherever and whenever
// they are computed. The key must be well mixed: indices that differ from each other as two keys do
// change places. Chris Wellons' lowbias32 of (index ^ key).
__device__ __forceinline__ u32 random_bits(u32 key, u64 index) {
    u32 x = static_cast<u32>(index) ^ key ^ (static_cast<u32>(index >> 32) * 0x9E3779B9u);
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    return x ^ x >> 16;
}

// The bits of one of the two bfloat16 beside x, the nearer one more often, so that the mean over
// all 16-bit random numbers is x. A bfloat16 stays what it is, infinities too, and nothing finite
// becomes infinite: beyond the largest bfloat16 x becomes that. NaN is 0x7FC0.
__device__ __forceinline__ u32 stochastic_bfloat16(float x, u32 random16) {
    const u32 b = __float_as_uint(x);
    const u32 step = (b & 0x7FFFFFFFu) >= 0x7F7F0000u ? 0u : random16;
    return x == x ? (b + step) >> 16 : 0x7FC0u;
}
