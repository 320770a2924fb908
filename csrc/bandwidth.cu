// What `ghoffload bandwidth` times: copies by load and store, copies by the bulk-copy engine of an
// SM, a read, and two kernels that do nothing, one of them for a while.
//
// Addresses are multiples of 16 (kernels/bandwidth.py sees to it); sizes are any number of bytes.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 THREADS = 512;
constexpr u32 DEPTH = 8;  // 16-byte loads a thread has in flight: 64 KB for a block

// Copies with ordinary loads and stores; the tiles of 64 KB go round the blocks.
extern "C" __global__ void __launch_bounds__(THREADS)
    move_words(char* to, const char* from, i64 nbytes) {
    const uint4* source = reinterpret_cast<const uint4*>(from);
    uint4* destination = reinterpret_cast<uint4*>(to);
    const i64 words = nbytes / 16, tile = THREADS * DEPTH;
    for (i64 first = blockIdx.x * tile; first < words; first += gridDim.x * tile) {
        const i64 i = first + threadIdx.x;
        if (first + tile <= words) {
            uint4 word[DEPTH];
#pragma unroll
            for (u32 k = 0; k < DEPTH; ++k) word[k] = source[i + k * THREADS];
#pragma unroll
            for (u32 k = 0; k < DEPTH; ++k) destination[i + k * THREADS] = word[k];
        } else {
            for (i64 j = i; j < words; j += THREADS) destination[j] = source[j];
        }
    }
    const i64 left = words * 16 + threadIdx.x;
    if (blockIdx.x == 0 && left < nbytes) to[left] = from[left];
}

// Reads whole 16-byte words and leaves the exclusive or of their 32-bit parts in `sink`, so that no
// load can be dropped and a test can tell that each was made.
extern "C" __global__ void __launch_bounds__(THREADS)
    read_words(u32* sink, const char* from, i64 nbytes) {
    const uint4* source = reinterpret_cast<const uint4*>(from);
    const i64 words = nbytes / 16, tile = THREADS * DEPTH;
    u32 seen = 0;
    for (i64 first = blockIdx.x * tile; first < words; first += gridDim.x * tile) {
        const i64 i = first + threadIdx.x;
        if (first + tile <= words) {
            uint4 word[DEPTH];
#pragma unroll
            for (u32 k = 0; k < DEPTH; ++k) word[k] = source[i + k * THREADS];
#pragma unroll
            for (u32 k = 0; k < DEPTH; ++k) seen ^= word[k].x ^ word[k].y ^ word[k].z ^ word[k].w;
        } else {
            for (i64 j = i; j < words; j += THREADS) {
                const uint4 word = source[j];
                seen ^= word.x ^ word.y ^ word.z ^ word.w;
            }
        }
    }
    for (u32 distance = 16; distance > 0; distance /= 2)
        seen ^= __shfl_xor_sync(0xFFFFFFFF, seen, distance);
    if (threadIdx.x % 32 == 0) atomicXor(sink, seen);
}

extern "C" __global__ void nothing() {}

// Keeps its stream busy while the host queues what is to be timed behind it.
extern "C" __global__ void spin(u64 nanoseconds) {
    u64 start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - start < nanoseconds);
}

#if __CUDA_ARCH__ >= 900

constexpr u32 STAGES = 6;
constexpr u32 CHUNK = 16384;  // bytes of a stage
constexpr u32 BEHIND = 2;     // stores that may still read their stages when one is loaded again

__device__ __forceinline__ u32 shared(const void* at) {
    return static_cast<u32>(__cvta_generic_to_shared(at));
}

// Copies by bulk copies through shared memory. One thread of a block issues everything, no thread
// touches the bytes: a few blocks fill the link and leave the SMs to others.
extern "C" __global__ void __launch_bounds__(32) move_bulk(char* to, const char* from, i64 nbytes) {
    extern __shared__ __align__(128) char stages[];  // STAGES * CHUNK bytes, given at the launch
    __shared__ __align__(8) u64 full[STAGES];        // mbarriers: the stage's load has arrived

    const i64 whole = nbytes / 16 * 16;  // bulk copies move multiples of 16 bytes
    const i64 left = whole + threadIdx.x - 16;
    if (blockIdx.x == 0 && threadIdx.x >= 16 && left < nbytes) to[left] = from[left];
    if (threadIdx.x != 0) return;

    // Chunks go round the blocks. 32 bits count 64 TiB of them.
    const u32 chunks = static_cast<u32>((whole + CHUNK - 1) / CHUNK);
    if (blockIdx.x >= chunks) return;
    const u32 mine = (chunks - 1 - blockIdx.x) / gridDim.x + 1;

    for (u32 s = 0; s < STAGES; ++s)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&full[s])) : "memory");
    // The bulk copies must find the barriers initialised.
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");

    auto begin = [&](u32 i) { return (blockIdx.x + i64(i) * gridDim.x) * CHUNK; };
    auto size = [&](i64 at) { return static_cast<u32>(whole - at < CHUNK ? whole - at : CHUNK); };
    auto load = [&](u32 i) {
        const u32 s = i % STAGES, barrier = shared(&full[s]);
        const i64 at = begin(i);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(size(at))
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
            "[%3];" ::"r"(shared(stages + s * CHUNK)),
            "l"(from + at), "r"(size(at)), "r"(barrier)
            : "memory");
    };

    for (u32 i = 0; i < STAGES && i < mine; ++i) load(i);
    for (u32 i = 0; i < mine; ++i) {
        const u32 s = i % STAGES, parity = i / STAGES & 1;
        u32 arrived;
        do
            asm volatile(
                "{\n"
                ".reg .pred arrived;\n"
                "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%1], %2;\n"
                "selp.u32 %0, 1, 0, arrived;\n"
                "}"
                : "=r"(arrived)
                : "r"(shared(&full[s])), "r"(parity)
                : "memory");
        while (!arrived);
        const i64 at = begin(i);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + at),
                     "r"(shared(stages + s * CHUNK)), "r"(size(at))
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        if (i >= BEHIND && i - BEHIND + STAGES < mine) {
            // All stores but the last BEHIND have read their stages, chunk i - BEHIND's among them.
            asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(BEHIND) : "memory");
            load(i - BEHIND + STAGES);
        }
    }
    // Shared memory must outlive the reads, and the kernel ends with everything written.
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

#endif
