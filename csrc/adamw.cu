// Adam and AdamW with fp32 moments, by ordinary loads and stores.

#include "update.cuh"

UPDATE(, NO_MASTER, MOMENTS_FP32, false, 4)
UPDATE(_master, FULL_MASTER, MOMENTS_FP32, false, 4)
UPDATE(_split, SPLIT_MASTER, MOMENTS_FP32, false, 4)
UPDATE(_amsgrad, NO_MASTER, MOMENTS_FP32, true, 4)
UPDATE(_master_amsgrad, FULL_MASTER, MOMENTS_FP32, true, 4)
UPDATE(_split_amsgrad, SPLIT_MASTER, MOMENTS_FP32, true, 4)
