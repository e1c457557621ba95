// flat: spans as runs of wide packages, whatever the element size. A warp takes kFlatDepth lines of
// 32 neighbouring packages, so it stays in one page nearly always.
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

// What a lane adds up of the lines of a chunk, and which page each line is in: the same for all
// lanes of the warp.
struct LaneSums {
  uint64_t sums[kFlatDepth];
  uint32_t pages[kFlatDepth];
};

// One lane's package of one line; `target` is 0 where it has none.
struct FlatUnit {
  uint64_t source;
  uint64_t target;
  uint32_t page;
  uint32_t offset;
};

// Lines are 32 neighbouring packages, numbered through a page, and begin where the host has 128
// aligned bytes: so no two warps share what the link carries at once. A host run that begins
// elsewhere has a shorter first line.
KVFERRY_HD __forceinline__ FlatUnit flat_unit(const Transfer &transfer, const Span &span,
                                              uint32_t line, uint32_t lane, uint32_t package) {
  FlatUnit unit = {0, 0, 0, 0};
  if (line >= span.page_lines.divisor * transfer.num_pages) {
    return unit;
  }
  unit.page = divide(line, span.page_lines);
  const uint32_t in_page = line - unit.page * span.page_lines.divisor;
  const uint32_t run = divide(in_page, span.run_lines);
  const uint32_t in_run = in_page - run * span.run_lines.divisor;
  const uint32_t run_bytes = static_cast<uint32_t>(span.host.run_bytes);
  const uint32_t begin = run * run_bytes;
  const uint32_t host_row = divide(begin, span.element);
  const uint64_t host_run =
      host_address(transfer, span, unit.page, host_row, begin - host_row * span.element.divisor);
  const uint32_t skew = static_cast<uint32_t>(host_run) & span.line_mask;
  const uint32_t at = (in_run * kWarp + lane) * package;
  if (at < skew || at - skew >= run_bytes) {
    return unit;
  }
  unit.offset = begin + at - skew;
  const uint32_t row = divide(unit.offset, span.element);
  const int64_t device_at = device_row(transfer, span, unit.page, row);
  if (static_cast<uint64_t>(device_at) >= static_cast<uint64_t>(span.device.num_rows)) {
    note_fault(transfer, span, unit.page, row);
    // All of staging crosses the link: zeros, and not what another transfer has left there.
    if (transfer.is_load == 0 && transfer.host_base != 0) {
      for (uint32_t done = 0; done < package; done += 8) {
        store_once8(host_run + (at - skew) + done, Package8{{0, 0}});
      }
    }
    return unit;
  }
  const uint64_t host = host_run + (at - skew);
  const uint64_t device =
      address_of(span.device, device_at, unit.offset - row * span.element.divisor);
  unit.source = transfer.is_load != 0 ? host : device;
  unit.target = transfer.is_load != 0 ? device : host;
  return unit;
}

// One lane's packages of one chunk of lines.
template <typename Package>
KVFERRY_HD __forceinline__ LaneSums flat_lane(const Transfer &transfer, const Span &span,
                                              uint32_t chunk, uint32_t lane) {
  Package packages[kFlatDepth];
  FlatUnit units[kFlatDepth];
#pragma unroll
  for (uint32_t i = 0; i < kFlatDepth; ++i) {
    units[i] = flat_unit(transfer, span, chunk * kFlatDepth + i, lane,
                         static_cast<uint32_t>(sizeof(Package)));
    if (units[i].target != 0) {
      load_once(packages[i], units[i].source);
    }
  }
  LaneSums lane_sums;
#pragma unroll
  for (uint32_t i = 0; i < kFlatDepth; ++i) {
    lane_sums.sums[i] = 0;
    lane_sums.pages[i] = units[i].page;
    if (units[i].target == 0) {
      continue;
    }
    store_once(units[i].target, packages[i]);
    if (transfer.verify != 0) {
      lane_sums.sums[i] = weigh_package(packages[i], units[i].offset);
    }
  }
  return lane_sums;
}

KVFERRY_HD __forceinline__ uint32_t flat_chunks(const Transfer &transfer, const Span &span) {
  return (span.page_lines.divisor * transfer.num_pages + kFlatDepth - 1) / kFlatDepth;
}

#if defined(__CUDACC__)

__device__ __forceinline__ void flat_chunk(const Transfer &transfer, uint32_t span_index,
                                           uint32_t chunk, uint32_t lane) {
  const Span &span = span_of(transfer, span_index);
  const LaneSums lane_sums = span.flat_package == 16
                                 ? flat_lane<Package16>(transfer, span, chunk, lane)
                                 : flat_lane<Package8>(transfer, span, chunk, lane);
  if (transfer.verify == 0) {
    return;
  }
  // One addition a page and not one a lane: where pages are short, those would be the slowest part.
  uint64_t sum = lane_sums.sums[0];
#pragma unroll
  for (uint32_t i = 0; i < kFlatDepth; ++i) {
    if (i + 1 < kFlatDepth && lane_sums.pages[i + 1] == lane_sums.pages[i]) {
      sum += lane_sums.sums[i + 1];
      continue;
    }
    sum = warp_sum(sum);
    if (lane == 0 && sum != 0) {
      atomic_add(sum_address(transfer, span_index, lane_sums.pages[i]), sum);
    }
    sum = i + 1 < kFlatDepth ? lane_sums.sums[i + 1] : 0;
  }
}

#endif

}  // namespace kvferry
