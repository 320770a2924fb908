// Adam and AdamW with moments of one or two bytes, by ordinary loads and stores.

#include "update.cuh"

UPDATE(_bf16, NO_MASTER, MOMENTS_BF16, false, 4)
UPDATE(_master_bf16, FULL_MASTER, MOMENTS_BF16, false, 4)
UPDATE(_split_bf16, SPLIT_MASTER, MOMENTS_BF16, false, 5)
UPDATE(_int8, NO_MASTER, MOMENTS_INT8, false, 4)
UPDATE(_master_int8, FULL_MASTER, MOMENTS_INT8, false, 4)
UPDATE(_split_int8, SPLIT_MASTER, MOMENTS_INT8, false, 4)
