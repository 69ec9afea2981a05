// Runs CUDA kernels on a CPU, one block after the other, each thread a context of its own: for the
// arithmetic and the indices of kernels, not for their speed or their races.
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)

struct uint3_ {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }

static uint3_ threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {
constexpr size_t STACK_NBYTES = 1 << 16;

struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    bool over;
};
struct Warp {
    uint64_t values[32];
};
static std::vector<Thread> threads;
static std::vector<Warp> warps;
static ucontext_t scheduler;
static unsigned current;
static std::function<void()> body;

inline void pause() { swapcontext(&threads[current].context, &scheduler); }

inline void enter() {
    body();
    threads[current].over = true;
    pause();
}

enum Wait { NONE, WARP_BARRIER, BLOCK_BARRIER };
static std::vector<Wait> waits;

inline void wait(Wait what) {
    waits[current] = what;
    pause();
}

inline void run_until_waiting(unsigned thread) {
    current = thread;
    threadIdx.x = thread;
    waits[thread] = NONE;
    swapcontext(&scheduler, &threads[thread].context);
}

// Warps run in turn, each to its next barrier of the block. Returns false if the threads of a warp
// wait for different things, or for ones that have ended: a GPU might hang, or worse.
inline bool run_block() {
    const unsigned count = blockDim.x;
    for (unsigned thread = 0; thread < count; ++thread) {
        Thread &one = threads[thread];
        one.over = false;
        getcontext(&one.context);
        one.context.uc_stack.ss_sp = one.stack.data();
        one.context.uc_stack.ss_size = one.stack.size();
        one.context.uc_link = nullptr;
        makecontext(&one.context, enter, 0);
    }
    for (bool going = true; going;) {
        going = false;
        for (unsigned first = 0; first < count; first += 32) {
            for (bool again = true; again;) {
                unsigned at_warp = 0, at_block = 0, alive = 0;
                for (unsigned thread = first; thread < first + 32 && thread < count; ++thread) {
                    if (!threads[thread].over) {
                        run_until_waiting(thread);
                    }
                    if (threads[thread].over) {
                        continue;
                    }
                    ++alive;
                    at_warp += waits[thread] == WARP_BARRIER;
                    at_block += waits[thread] == BLOCK_BARRIER;
                }
                if (at_warp && (at_block || alive != 32)) {
                    return false;
                }
                again = at_warp;
                going |= at_block != 0;
            }
        }
    }
    return true;
}

inline uint64_t exchange(uint64_t own, int source) {
    Warp &warp = warps[current / 32];
    warp.values[current % 32] = own;
    wait(WARP_BARRIER);
    const uint64_t other = warps[current / 32].values[source < 0 ? current % 32 : source];
    wait(WARP_BARRIER);
    return other;
}

inline unsigned ballot(bool own) {
    Warp &warp = warps[current / 32];
    warp.values[current % 32] = own;
    wait(WARP_BARRIER);
    unsigned lanes = 0;
    for (unsigned lane = 0; lane < 32; ++lane) {
        lanes |= unsigned(warps[current / 32].values[lane]) << lane;
    }
    wait(WARP_BARRIER);
    return lanes;
}

template <class Function> bool launch(unsigned grid, unsigned block, Function function) {
    blockDim = {block, 1, 1};
    gridDim = {grid, 1, 1};
    if (threads.size() < block) {
        threads.resize(block);
        for (Thread &one : threads) {
            one.stack.resize(STACK_NBYTES);
        }
    }
    warps.assign((block + 31) / 32, {});
    waits.assign(block, NONE);
    body = function;
    for (unsigned index = 0; index < grid; ++index) {
        blockIdx = {index, 0, 0};
        if (!run_block()) {
            return false;
        }
    }
    return true;
}

template <class... Arguments, size_t... Indices>
bool call(void (*kernel)(Arguments...), unsigned grid, unsigned block, const uint64_t *values,
          std::index_sequence<Indices...>) {
    return launch(grid, block, [=] { kernel((Arguments)(values[Indices])...); });
}
} // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::BLOCK_BARRIER); }
inline void __syncwarp(unsigned = ~0u) { emulation::wait(emulation::WARP_BARRIER); }
template <class T> T __shfl_sync(unsigned, T own, int source) {
    return T(emulation::exchange(uint64_t(own), source));
}
template <class T> T __shfl_up_sync(unsigned, T own, unsigned step) {
    return T(emulation::exchange(uint64_t(own), int(emulation::current % 32) - int(step)));
}
inline bool __any_sync(unsigned, bool own) { return emulation::ballot(own) != 0; }
inline bool __all_sync(unsigned, bool own) { return emulation::ballot(own) == ~0u; }

// Give a kernel to Python: `name##_on_cpu(grid, block, values)`, where values are addresses and
// integers as 64 bits each.
#define EMULATE(name)                                                                              \
    extern "C" bool name##_on_cpu(unsigned grid, unsigned block, const uint64_t *values) {         \
        return emulation::call(name, grid, block, values, emulation::indices(name));               \
    }
namespace emulation {
template <class... Arguments>
std::index_sequence_for<Arguments...> indices(void (*)(Arguments...)) {
    return {};
}
} // namespace emulation
