// grouped: each element is shared among a few threads, the resolution that engines publish
// (copy_config.cuh). Kept for fidelity and comparison; flat and realign are faster.
#pragma once

#include "copy_config.cuh"
#include "transfer.cuh"

namespace kvferry {

struct alignas(4) Package4 {
  uint32_t words[1];
};

template <typename Package>
KVFERRY_HD __forceinline__ Package grouped_load(uint64_t at) {
  return *reinterpret_cast<const Package *>(at);
}

// One thread's share of one element: package i of thread t lies at (i * threads + t) * package.
template <typename Package>
KVFERRY_HD __forceinline__ void grouped_share(uint64_t target, uint64_t source, uint32_t thread,
                                              uint32_t threads, uint32_t per_thread) {
  constexpr uint32_t kDepth = static_cast<uint32_t>(kMaxPackagesInFlight);
  const uint64_t step = static_cast<uint64_t>(threads) * sizeof(Package);
  source += thread * sizeof(Package);
  target += thread * sizeof(Package);
  for (uint32_t first = 0; first < per_thread; first += kDepth) {
    Package packages[kDepth];
#pragma unroll
    for (uint32_t i = 0; i < kDepth; ++i) {
      if (first + i < per_thread) {
        packages[i] = grouped_load<Package>(source + (first + i) * step);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kDepth; ++i) {
      if (first + i < per_thread) {
        *reinterpret_cast<Package *>(target + (first + i) * step) = packages[i];
      }
    }
  }
}

// Element number `number` of a span, page after page. Elements must be one piece on both sides.
template <typename Package>
KVFERRY_HD __forceinline__ void grouped_element(const Transfer &transfer, const Span &span,
                                                uint64_t number, uint32_t thread, uint32_t threads,
                                                uint32_t per_thread) {
  const uint32_t page = static_cast<uint32_t>(number / span.rows_per_page);
  const uint32_t row = static_cast<uint32_t>(number - uint64_t{page} * span.rows_per_page);
  const Place place = place_of(transfer, span, page, row * span.element.divisor);
  if (!place.in_range) {
    note_fault(transfer, span, page, row);
    return;
  }
  if (transfer.is_load != 0) {
    grouped_share<Package>(place.device, place.host, thread, threads, per_thread);
  } else {
    grouped_share<Package>(place.host, place.device, thread, threads, per_thread);
  }
}

#if defined(__CUDACC__)

template <typename Package>
__device__ __forceinline__ void grouped_span(const Transfer &transfer, const Span &span,
                                             uint32_t threads, uint32_t per_thread) {
  const uint32_t thread = threadIdx.x % threads;
  const uint32_t group = (blockIdx.x * blockDim.x + threadIdx.x) / threads;
  const uint32_t num_groups = gridDim.x * blockDim.x / threads;
  const uint64_t num_elements = uint64_t{span.rows_per_page} * transfer.num_pages;
  for (uint64_t number = group; number < num_elements; number += num_groups) {
    grouped_element<Package>(transfer, span, number, thread, threads, per_thread);
  }
}

#endif

}  // namespace kvferry
