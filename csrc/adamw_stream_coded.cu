// Adam and AdamW with moments of one or two bytes, in place over the link. Compute capability 9.0
// and later.

#if __CUDA_ARCH__ >= 900

#include "stream.cuh"

STREAM(_bf16, NO_MASTER, MOMENTS_BF16, false)
STREAM(_master_bf16, FULL_MASTER, MOMENTS_BF16, false)
STREAM(_split_bf16, SPLIT_MASTER, MOMENTS_BF16, false)
STREAM(_int8, NO_MASTER, MOMENTS_INT8, false)
STREAM(_master_int8, FULL_MASTER, MOMENTS_INT8, false)
STREAM(_split_int8, SPLIT_MASTER, MOMENTS_INT8, false)

#endif
