// Runs the CUDA sources on the CPU, for tests: found by the host compiler in the place of CUDA's header of this name.
//
// A block's threads are fibers of one thread of the operating system. They run one after the other, each up to its next
// barrier or warp operation, in turns from the first to the last and from the last to the first, every other block the
// other way round, so that a missing barrier shows. Blocks run one after the other. Shared memory is static memory. A
// block whose threads wait for one another for ever ends the process with a message.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __launch_bounds__(...)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct EmulatedIndex {
  unsigned x = 0;
};
inline EmulatedIndex threadIdx, blockIdx;

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 4;
  return cudaSuccess;
}

namespace emulation {

constexpr int kLanes = 32;
constexpr int kMostThreads = 512;
constexpr size_t kStackBytes = size_t{1} << 17;
constexpr size_t kSlotBytes = 32;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done = false;
  uint64_t block_waits = 0, warp_waits = 0;  // how often it has waited for its block, for its warp
};

// What the lanes of a warp hand one another; two sets, since a lane may be one operation ahead of the slowest.
struct Warp {
  alignas(16) unsigned char slots[2][kLanes][kSlotBytes];
  uint64_t arrived = 0;
};

struct Block {
  std::vector<Fiber> fibers{kMostThreads};
  Warp warps[kMostThreads / kLanes];
  ucontext_t scheduler;
  const std::function<void()>* body = nullptr;
  int threads = 0, current = 0;
  uint64_t arrived = 0;
  bool moved = false;  // since the scheduler last looked

  Fiber& self() { return fibers[current]; }

  void yield_until(const uint64_t& counter, uint64_t wanted) {
    while (counter < wanted) swapcontext(&self().context, &scheduler);
    moved = true;
  }

  // All threads that a barrier needs: none of the kernels lets some of a block leave before a barrier.
  void wait_for_block() {
    ++arrived;
    moved = true;
    yield_until(arrived, ++self().block_waits * static_cast<uint64_t>(threads));
  }

  // The values that all lanes gave, once they all have.
  template <class T>
  const unsigned char (*exchange(const T& value))[kSlotBytes] {
    static_assert(sizeof(T) <= kSlotBytes);
    Warp& warp = warps[current / kLanes];
    const uint64_t turn = self().warp_waits++;
    std::memcpy(warp.slots[turn % 2][current % kLanes], &value, sizeof value);
    ++warp.arrived;
    moved = true;
    yield_until(warp.arrived, (turn + 1) * kLanes);
    return warp.slots[turn % 2];
  }

  void run(const std::function<void()>& work, int count);
};

inline Block block;

inline void enter() {
  (*block.body)();
  block.self().done = true;
  block.moved = true;
  swapcontext(&block.self().context, &block.scheduler);
}

inline void Block::run(const std::function<void()>& work, int count) {
  body = &work;
  threads = count;
  arrived = 0;
  for (Warp& warp : warps) warp.arrived = 0;
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = fibers[i];
    if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
    fiber.done = false;
    fiber.block_waits = fiber.warp_waits = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  for (int round = 0, left = count; left > 0; ++round) {
    moved = false;
    left = 0;
    for (int i = 0; i < count; ++i) {
      current = (round + blockIdx.x) % 2 ? count - 1 - i : i;
      if (self().done) continue;
      threadIdx.x = static_cast<unsigned>(current);
      swapcontext(&scheduler, &self().context);
      left += !self().done;
    }
    if (left > 0 && !moved) {
      std::fprintf(stderr, "emulation: %d threads of block %u wait for others that never come\n", left, blockIdx.x);
      std::abort();
    }
  }
}

template <class T>
T value_of(const unsigned char (&slot)[kSlotBytes]) {
  T value;
  std::memcpy(&value, slot, sizeof value);
  return value;
}

inline int lane() { return block.current % kLanes; }

}  // namespace emulation

template <class Body>
void emulate_grid(int64_t blocks, int threads, const Body& body) {
  const std::function<void()> work = body;
  for (int64_t b = 0; b < blocks; ++b) {
    blockIdx.x = static_cast<unsigned>(b);
    emulation::block.run(work, threads);
  }
}

inline void __syncthreads() { emulation::block.wait_for_block(); }

template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return emulation::value_of<T>(emulation::block.exchange(value)[source % emulation::kLanes]);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::value_of<T>(emulation::block.exchange(value)[emulation::lane() ^ mask]);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const auto* all = emulation::block.exchange(value);
  return emulation::lane() < distance ? value : emulation::value_of<T>(all[emulation::lane() - distance]);
}
inline unsigned __ballot_sync(unsigned, bool value) {
  const auto* all = emulation::block.exchange(value);
  unsigned set = 0;
  for (int lane = 0; lane < emulation::kLanes; ++lane) {
    set |= static_cast<unsigned>(emulation::value_of<bool>(all[lane])) << lane;
  }
  return set;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline uint4 __ldcs(const uint4* from) { return *from; }
inline unsigned long long atomicOr(unsigned long long* to, unsigned long long bits) {
  const unsigned long long before = *to;
  *to |= bits;
  return before;
}

// c += A x B, in the layout of csrc/cuda/mma.h; `convert` turns 16 bits into a float.
template <class Convert>
void emulate_multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Convert& convert) {
  struct Fragments {
    uint32_t a[4], b[2];
  };
  const auto* all = emulation::block.exchange(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const auto half = [&](uint32_t word, int k) { return convert(static_cast<uint16_t>(k % 2 ? word >> 16 : word)); };
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + (i >= 2 ? 8 : 0), column = 2 * t + i % 2;
    for (int k = 0; k < 16; ++k) {
      const auto of_row = emulation::value_of<Fragments>(all[row % 8 * 4 + k % 8 / 2]);
      const auto of_column = emulation::value_of<Fragments>(all[column * 4 + k % 8 / 2]);
      c[i] += half(of_row.a[row / 8 + k / 8 * 2], k) * half(of_column.b[k / 8], k);
    }
  }
}

inline void emulate_load_matrices(uint32_t (&r)[4], const void* row, bool transposed) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
    std::fprintf(stderr, "emulation: a matrix row is not 16-byte aligned\n");
    std::abort();
  }
  const auto* all = emulation::block.exchange(row);
  const int g = emulation::lane() / 4, t = emulation::lane() % 4;
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto element = [&](int at_row, int at_column) -> uint32_t {
      return static_cast<const uint16_t*>(emulation::value_of<const void*>(all[matrix * 8 + at_row]))[at_column];
    };
    r[matrix] = transposed ? element(2 * t, g) | element(2 * t + 1, g) << 16
                           : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
  }
}
