// Bulk copies between global and shared memory, and the mbarriers that tell when a load has arrived
// (compute capability 9.0 and later). Addresses and sizes are multiples of 16 bytes.

#include "table.cuh"

__device__ __forceinline__ u32 shared(const void* at) {
    return static_cast<u32>(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared(barrier)), "r"(arrivals)
                 : "memory");
}

// Bulk copies must find the barriers initialised.
__device__ __forceinline__ void barriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared(barrier)) : "memory");
}

// Arrives, and holds the phase open until that many bytes more have come.
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    u32 arrived;
    do
        asm volatile(
            "{\n"
            ".reg .pred arrived;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 arrived, [%1], %2;\n"
            "selp.u32 %0, 1, 0, arrived;\n"
            "}"
            : "=r"(arrived)
            : "r"(shared(barrier)), "r"(parity)
            : "memory");
    while (!arrived);
}

__device__ __forceinline__ void bulk_load(void* to, const char* from, u32 bytes, u64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared(to)),
        "l"(from), "r"(bytes), "r"(shared(barrier))
        : "memory");
}

__device__ __forceinline__ void bulk_store(char* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                 "r"(shared(from)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All of this thread's groups but the last PENDING have read their shared memory.
template <u32 PENDING>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void bulk_wait_written() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// What this thread wrote to shared memory is there for bulk copies that are issued later.
__device__ __forceinline__ void bulk_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
