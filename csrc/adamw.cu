// Adam and AdamW with fp32 moments, by ordinary loads and stores.

#include "update.cuh"

UPDATE(, NO_MASTER, MOMENTS_FP32, false)
UPDATE(_master, FULL_MASTER, MOMENTS_FP32, false)
UPDATE(_split, SPLIT_MASTER, MOMENTS_FP32, false)
UPDATE(_amsgrad, NO_MASTER, MOMENTS_FP32, true)
UPDATE(_master_amsgrad, FULL_MASTER, MOMENTS_FP32, true)
UPDATE(_split_amsgrad, SPLIT_MASTER, MOMENTS_FP32, true)
