// Everything that is the vendor's own: wide accesses, atomics, lanes of a warp. Nothing else in
// these headers knows what it is compiled for. Without a GPU the same names are plain C++.
#pragma once

#include "shim.cuh"

#if !defined(__CUDACC__)
#include <string.h>
#endif

namespace kvferry {

struct alignas(16) Package16 {
  uint32_t words[4];
};

struct alignas(8) Package8 {
  uint32_t words[2];
};

#if defined(__CUDACC__)

// Bytes that move once: past the first-level cache, which could keep nothing of use.
__device__ __forceinline__ Package16 load_once16(uint64_t address) {
  Package16 p;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(p.words[0]), "=r"(p.words[1]), "=r"(p.words[2]), "=r"(p.words[3])
               : "l"(address));
  return p;
}

__device__ __forceinline__ Package8 load_once8(uint64_t address) {
  Package8 p;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(p.words[0]), "=r"(p.words[1])
               : "l"(address));
  return p;
}

__device__ __forceinline__ void store_once16(uint64_t address, const Package16 &p) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "r"(p.words[0]), "r"(p.words[1]), "r"(p.words[2]), "r"(p.words[3])
               : "memory");
}

__device__ __forceinline__ void store_once8(uint64_t address, const Package8 &p) {
  asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(p.words[0]),
               "r"(p.words[1])
               : "memory");
}

__device__ __forceinline__ void atomic_add(uint64_t address, uint64_t value) {
  asm volatile("red.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ __forceinline__ void atomic_min(uint64_t address, uint64_t value) {
  asm volatile("red.global.min.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// The high half of a 32 by 32 bit product.
__device__ __forceinline__ uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }

// Bits [shift, shift + 32) of high:low.
__device__ __forceinline__ uint32_t funnel(uint32_t low, uint32_t high, uint32_t shift) {
  return __funnelshift_r(low, high, shift);
}

// Σ over the lanes, valid in lane 0. All lanes of the warp must call it.
__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
  for (int step = 16; step > 0; step /= 2) {
    value += __shfl_down_sync(0xFFFFFFFFu, value, step);
  }
  return value;
}

__device__ __forceinline__ bool warp_all(bool holds) { return __all_sync(0xFFFFFFFFu, holds) != 0; }

__device__ __forceinline__ void warp_barrier() { __syncwarp(); }

#else

template <typename T>
inline T load_at(uint64_t address) {
  T value;
  memcpy(&value, reinterpret_cast<const void *>(address), sizeof value);
  return value;
}

template <typename T>
inline void store_at(uint64_t address, const T &value) {
  memcpy(reinterpret_cast<void *>(address), &value, sizeof value);
}

// On the GPU these trap on a misaligned address; so must they here.
inline void check_aligned(uint64_t address, uint64_t size) {
  if (address % size != 0) {
    __builtin_trap();
  }
}

inline Package16 load_once16(uint64_t address) {
  check_aligned(address, 16);
  return load_at<Package16>(address);
}

inline Package8 load_once8(uint64_t address) {
  check_aligned(address, 8);
  return load_at<Package8>(address);
}

inline void store_once16(uint64_t address, const Package16 &p) {
  check_aligned(address, 16);
  store_at(address, p);
}

inline void store_once8(uint64_t address, const Package8 &p) {
  check_aligned(address, 8);
  store_at(address, p);
}

inline void atomic_add(uint64_t address, uint64_t value) {
  store_at(address, load_at<uint64_t>(address) + value);
}

inline void atomic_min(uint64_t address, uint64_t value) {
  if (value < load_at<uint64_t>(address)) {
    store_at(address, value);
  }
}

inline uint32_t multiply_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}

inline uint32_t funnel(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31)));
}

#endif

}  // namespace kvferry
