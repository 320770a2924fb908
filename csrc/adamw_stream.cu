// Adam and AdamW with fp32 moments, in place over the link. Compute capability 9.0 and later.

#if __CUDA_ARCH__ >= 900

#include "stream.cuh"

STREAM(, NO_MASTER, MOMENTS_FP32, false)
STREAM(_master, FULL_MASTER, MOMENTS_FP32, false)
STREAM(_split, SPLIT_MASTER, MOMENTS_FP32, false)
STREAM(_amsgrad, NO_MASTER, MOMENTS_FP32, true)
STREAM(_master_amsgrad, FULL_MASTER, MOMENTS_FP32, true)
STREAM(_split_amsgrad, SPLIT_MASTER, MOMENTS_FP32, true)

#endif
