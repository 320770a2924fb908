// Enough of CUDA to run a warp-specialised kernel on the CPU: a thread for each of a block's, block
// after block, and a copy engine that does bulk copies later and in any order.
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH__ 900
#define __cvta_global_to_generic(p) ((void*)(p))

struct Index {
    unsigned x;
};
static Index blockIdx, blockDim, gridDim;
static thread_local Index threadIdx;

// ---- a barrier of threads ----

struct Meeting {
    std::mutex lock;
    std::condition_variable all_here;
    unsigned here = 0;
    unsigned long long round = 0;
    void wait(unsigned expected) {
        std::unique_lock<std::mutex> held(lock);
        const auto mine = round;
        if (++here == expected) {
            here = 0, ++round;
            all_here.notify_all();
        } else {
            all_here.wait(held, [&] { return round != mine; });
        }
    }
};
static Meeting block_meeting, warp_meeting[32];
static unsigned reduced[32][32];
static void __syncthreads() { block_meeting.wait(blockDim.x); }
static void __syncwarp() { warp_meeting[threadIdx.x / 32].wait(32); }
static unsigned __reduce_max_sync(unsigned, unsigned x) {
    unsigned* row = reduced[threadIdx.x / 32];
    row[threadIdx.x % 32] = x;
    __syncwarp();
    for (int k = 0; k < 32; ++k) x = row[k] > x ? row[k] : x;
    __syncwarp();
    return x;
}

// ---- mbarriers and the copy engine ----

struct Barrier {
    unsigned arrivals, pending;
    long long bytes;
    unsigned phase;
};
static std::mutex lock;
static std::condition_variable changed;
static std::map<void*, Barrier> barriers;
static std::vector<std::function<void()>> copies;
static unsigned stores_begun = 0;
static std::vector<unsigned> group_ends;  // stores begun when each group was committed
static std::vector<char> store_is_done;
static std::mt19937 dice(1);

static void fail(const char* what) {
    fprintf(stderr, "stream_shim: %s\n", what);
    abort();
}

static void settle(Barrier& b) {
    if (b.pending == 0 && b.bytes == 0) b.pending = b.arrivals, b.phase ^= 1;
    changed.notify_all();
}

static void aligned(const void* a, const void* b, unsigned bytes) {
    if (((unsigned long long)a | (unsigned long long)b | bytes) % 16) fail("misaligned bulk copy");
    if (bytes == 0) fail("empty bulk copy");
}

static void barrier_init(unsigned long long* at, unsigned arrivals) {
    std::lock_guard<std::mutex> held(lock);
    barriers[at] = {arrivals, arrivals, 0, 0};
}
static void barriers_are_ready() {}
static void barrier_arrive(unsigned long long* at) {
    std::lock_guard<std::mutex> held(lock);
    Barrier& b = barriers.at(at);
    --b.pending;
    settle(b);
}
static void barrier_expect(unsigned long long* at, unsigned bytes) {
    std::lock_guard<std::mutex> held(lock);
    Barrier& b = barriers.at(at);
    b.bytes += bytes;
    --b.pending;
    settle(b);
}
static void barrier_wait(unsigned long long* at, unsigned parity) {
    std::unique_lock<std::mutex> held(lock);
    changed.wait(held, [&] { return barriers.at(at).phase != parity; });
}
static void bulk_load(void* to, const char* from, unsigned bytes, unsigned long long* barrier) {
    aligned(to, from, bytes);
    std::lock_guard<std::mutex> held(lock);
    memset(to, 0x7B, bytes);  // whoever still uses the stage, or uses it too early, will see this
    copies.push_back([=] {
        memcpy(to, from, bytes);
        Barrier& b = barriers.at(barrier);
        b.bytes -= bytes;
        settle(b);
    });
    changed.notify_all();
}
static void bulk_store(char* to, const void* from, unsigned bytes) {
    aligned(to, from, bytes);
    std::lock_guard<std::mutex> held(lock);
    const unsigned number = stores_begun++;
    store_is_done.push_back(0);
    copies.push_back([=] {
        memcpy(to, from, bytes);
        store_is_done[number] = 1;
        changed.notify_all();
    });
    changed.notify_all();
}
static void bulk_commit() {
    std::lock_guard<std::mutex> held(lock);
    group_ends.push_back(stores_begun);
}
static void wait_for_groups(unsigned but_last) {
    std::unique_lock<std::mutex> held(lock);
    if (group_ends.size() <= but_last) return;
    const unsigned end = group_ends[group_ends.size() - 1 - but_last];
    changed.wait(held, [&] {
        for (unsigned k = 0; k < end; ++k)
            if (!store_is_done[k]) return false;
        return true;
    });
}
template <unsigned PENDING>
static void bulk_wait_read() {
    wait_for_groups(PENDING);
}
static void bulk_wait_written() { wait_for_groups(0); }
static void bulk_fence() {}

// ---- running a grid ----

static char* stages;  // the dynamic shared memory

template <typename Kernel>
static void run_grid(Kernel kernel, unsigned blocks, unsigned threads, unsigned shared_bytes) {
    std::vector<char> shared(shared_bytes + 128);
    stages = (char*)(((unsigned long long)shared.data() + 127) & ~127ull);
    gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        barriers.clear(), copies.clear(), group_ends.clear(), store_is_done.clear();
        stores_begun = 0;
        memset(stages, 0x7B, shared_bytes);
        bool finished = false;
        std::thread engine([&] {
            std::unique_lock<std::mutex> held(lock);
            while (true) {
                changed.wait(held, [&] { return finished || !copies.empty(); });
                if (copies.empty()) return;
                const size_t k = dice() % copies.size();
                const auto copy = copies[k];
                copies.erase(copies.begin() + k);
                copy();
                held.unlock();
                std::this_thread::yield();
                held.lock();
            }
        });
        std::vector<std::thread> all;
        for (unsigned k = 0; k < threads; ++k)
            all.emplace_back([&, k] {
                threadIdx.x = k;
                kernel();
            });
        for (auto& thread : all) thread.join();
        if (!copies.empty()) fail("the kernel ended before its copies");
        {
            std::lock_guard<std::mutex> held(lock);
            finished = true;
            changed.notify_all();
        }
        engine.join();
    }
}
