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
  for (uint32_t left = per_thread; left > 0;) {
    const uint32_t count = left < kDepth ? left : kDepth;
    Package packages[kDepth];
#pragma unroll
    for (uint32_t i = 0; i < kDepth; ++i) {
      if (i < count) {
        packages[i] = grouped_load<Package>(source);
        source += step;
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kDepth; ++i) {
      if (i < count) {
        *reinterpret_cast<Package *>(target) = packages[i];
        target += step;
      }
    }
    left -= count;
  }
}

// Element number `number` of a span, page after page. Elements must be one piece on both sides.
template <typename Package>
KVFERRY_HD __forceinline__ void grouped_element(const Transfer &transfer, const Span &span,
                                                uint32_t number, uint32_t thread, uint32_t threads,
                                                uint32_t per_thread) {
  const uint32_t page = number / span.rows_per_page;
  const uint32_t row = number - page * span.rows_per_page;
  const Place place = place_of(transfer, span, page, row * span.element.divisor);
  if (!place.in_range) {
    note_fault(transfer, span, page, row);
    return;
  }
  const bool is_load = transfer.is_load != 0;
  grouped_share<Package>(is_load ? place.device : place.host, is_load ? place.host : place.device,
                         thread, threads, per_thread);
}

}  // namespace kvferry
