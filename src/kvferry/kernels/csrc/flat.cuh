// flat: spans as runs of wide packages, whatever the element size. A warp takes kFlatDepth rows of
// 32 neighbouring packages, so that it asks for whole lines and stays in one page nearly always.
#pragma once

#include "digest.cuh"
#include "transfer.cuh"

namespace kvferry {

// Loads that a thread has on the way before its first store. Measured: docs/performance.md.
#if !defined(KVFERRY_FLAT_DEPTH)
#define KVFERRY_FLAT_DEPTH 4
#endif
constexpr uint32_t kFlatDepth = KVFERRY_FLAT_DEPTH;
constexpr uint32_t kWarp = 32;
constexpr uint32_t kFlatChunk = kFlatDepth * kWarp;

KVFERRY_HD __forceinline__ uint64_t weigh_package(const Package16 &p, uint32_t offset) {
  return weigh_word(join_word(p.words[0], p.words[1]), offset / 8) +
         weigh_word(join_word(p.words[2], p.words[3]), offset / 8 + 1);
}

KVFERRY_HD __forceinline__ uint64_t weigh_package(const Package8 &p, uint32_t offset) {
  return weigh_word(join_word(p.words[0], p.words[1]), offset / 8);
}

KVFERRY_HD __forceinline__ void load_once(Package16 &p, uint64_t at) { p = load_once16(at); }
KVFERRY_HD __forceinline__ void load_once(Package8 &p, uint64_t at) { p = load_once8(at); }
KVFERRY_HD __forceinline__ void store_once(uint64_t at, const Package16 &p) { store_once16(at, p); }
KVFERRY_HD __forceinline__ void store_once(uint64_t at, const Package8 &p) { store_once8(at, p); }

// What a lane adds up of the page it is in.
struct LaneSum {
  uint64_t sum;
  uint32_t page;
};

// One lane's packages of one chunk. Sums of pages other than the returned one are already added.
template <typename Package>
KVFERRY_HD __forceinline__ LaneSum flat_lane(const Transfer &transfer, uint32_t span_index,
                                             const Span &span, uint32_t chunk, uint32_t lane) {
  const uint32_t units = span.page_units.divisor;
  const uint32_t num_units = units * transfer.num_pages;
  Package packages[kFlatDepth];
  uint64_t targets[kFlatDepth];
  uint32_t pages[kFlatDepth];
  uint32_t offsets[kFlatDepth];
#pragma unroll
  for (uint32_t i = 0; i < kFlatDepth; ++i) {
    const uint32_t unit = chunk * kFlatChunk + i * kWarp + lane;
    targets[i] = 0;
    if (unit < num_units) {
      const uint32_t page = divide(unit, span.page_units);
      const uint32_t offset = (unit - page * units) * static_cast<uint32_t>(sizeof(Package));
      const Place place = place_of(transfer, span, page, offset);
      pages[i] = page;
      offsets[i] = offset;
      if (place.in_range) {
        load_once(packages[i], transfer.is_load != 0 ? place.host : place.device);
        targets[i] = transfer.is_load != 0 ? place.device : place.host;
      } else {
        note_fault(transfer, span, page, place.row);
      }
    }
  }
  LaneSum lane_sum = {0, 0};
#pragma unroll
  for (uint32_t i = 0; i < kFlatDepth; ++i) {
    if (targets[i] == 0) {
      continue;
    }
    store_once(targets[i], packages[i]);
    if (transfer.verify == 0) {
      continue;
    }
    if (lane_sum.page != pages[i]) {
      if (lane_sum.sum != 0) {
        atomic_add(sum_address(transfer, span_index, lane_sum.page), lane_sum.sum);
      }
      lane_sum = {0, pages[i]};
    }
    lane_sum.sum += weigh_package(packages[i], offsets[i]);
  }
  return lane_sum;
}

#if defined(__CUDACC__)

template <typename Package>
__device__ __forceinline__ void flat_span(const Transfer &transfer, uint32_t span_index,
                                          const Span &span) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
  const uint32_t num_warps = gridDim.x * blockDim.x / kWarp;
  const uint32_t num_units = span.page_units.divisor * transfer.num_pages;
  const uint32_t num_chunks = (num_units + kFlatChunk - 1) / kFlatChunk;
  for (uint32_t chunk = warp; chunk < num_chunks; chunk += num_warps) {
    const LaneSum lane_sum = flat_lane<Package>(transfer, span_index, span, chunk, lane);
    if (transfer.verify == 0) {
      continue;
    }
    if (warp_agrees(lane_sum.page)) {
      const uint64_t sum = warp_sum(lane_sum.sum);
      if (lane == 0 && sum != 0) {
        atomic_add(sum_address(transfer, span_index, lane_sum.page), sum);
      }
    } else if (lane_sum.sum != 0) {
      atomic_add(sum_address(transfer, span_index, lane_sum.page), lane_sum.sum);
    }
  }
}

#endif

}  // namespace kvferry
