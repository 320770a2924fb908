// Up to four elements one by one, wherever they lie.

#include "formats.cuh"

template <u32 BYTES>
struct Element;
template <>
struct Element<4> {
    using type = u32;
};
template <>
struct Element<2> {
    using type = u16;
};
template <>
struct Element<1> {
    using type = u8;
};

// The first n of four elements; the others are zeros.
template <u32 BYTES>
__device__ __forceinline__ Four<BYTES> load_some(const char* at, u32 n) {
    u32 bits[4];
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
        bits[j] = j < n ? reinterpret_cast<const typename Element<BYTES>::type*>(at)[j] : 0;
    return four_of<BYTES>(bits);
}

template <u32 BYTES>
__device__ __forceinline__ void store_some(char* at, const Four<BYTES>& four, u32 n) {
    using Type = typename Element<BYTES>::type;
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
        if (j < n) reinterpret_cast<Type*>(at)[j] = static_cast<Type>(bits_of(four, j));
}
