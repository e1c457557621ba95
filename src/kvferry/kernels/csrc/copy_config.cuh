// Which path carries an element, and how its threads share the work: the constexpr twin of
// kvferry/kernels/copy_config.py, which has the reasons. Names and results are the same; tests
// compare the two over every size up to 65,536. Sizes and alignments are in bytes.
#pragma once

#include "shim.cuh"

namespace kvferry {

constexpr int64_t kWarpThreads = 32;
constexpr int64_t kWidestPackage = 16;
constexpr int64_t kNarrowestGroupedPackage = 4;
constexpr int64_t kGroupedTile = 128;
constexpr int64_t kMaxPackagesInFlight = 8;
constexpr int64_t kNarrowestFlatPackage = 8;
// In place of an unroll: none was given.
constexpr int64_t kDefaultUnroll = 0;

// Both in the order of Python's members.
enum class RefusalKind : int32_t { kNone, kPackageTooWide, kDoesNotTile, kNoTiling, kMisaligned };
enum class CopyPath : int32_t { kFlat, kRealign, kGrouped };

// Package i of thread t lies at (i * threads + t) * package. All zero beside a refusal.
struct GroupedConfig {
  RefusalKind refusal;
  int64_t unroll;
  int64_t threads;
  int64_t bytes_per_thread;
  int64_t package;
  int64_t packages_per_thread;
  int64_t packages_in_flight;
};

struct CopyDecision {
  CopyPath chosen;
  bool flat_eligible;
  int64_t span_bytes;
  int64_t flat_package;
  GroupedConfig grouped;
};

// The widest package that divides `bits`, which may be several byte counts joined by `|`.
KVFERRY_HD constexpr int64_t alignment_of(int64_t bits) {
  const uint64_t limited = static_cast<uint64_t>(bits) | static_cast<uint64_t>(kWidestPackage);
  return static_cast<int64_t>(limited & (~limited + 1));
}

KVFERRY_HD constexpr GroupedConfig refuse_grouped(RefusalKind kind) {
  return GroupedConfig{kind, 0, 0, 0, 0, 0, 0};
}

// The package that `threads` threads tile an element with, or 0.
KVFERRY_HD constexpr int64_t grouped_package(int64_t element_size, int64_t threads) {
  if (element_size % threads != 0) {
    return 0;
  }
  if (element_size % kGroupedTile == 0) {
    const int64_t wanted = kGroupedTile / threads;
    return wanted <= kWidestPackage ? wanted : 0;
  }
  const int64_t widest = alignment_of(element_size / threads);
  return widest >= kNarrowestGroupedPackage ? widest : 0;
}

KVFERRY_HD constexpr GroupedConfig tile_grouped(int64_t element_size, int64_t threads,
                                                int64_t package) {
  const int64_t share = element_size / threads;
  const int64_t count = share / package;
  return GroupedConfig{RefusalKind::kNone,
                       kWarpThreads / threads,
                       threads,
                       share,
                       package,
                       count,
                       count < kMaxPackagesInFlight ? count : kMaxPackagesInFlight};
}

// `element_size` >= 1; `unroll` 1, 2, 4, 8, 16, 32 or kDefaultUnroll.
KVFERRY_HD constexpr GroupedConfig resolve_grouped(int64_t element_size,
                                                   int64_t unroll = kDefaultUnroll) {
  if (unroll != kDefaultUnroll) {
    const int64_t threads = kWarpThreads / unroll;
    const int64_t package = grouped_package(element_size, threads);
    if (package == 0) {
      return refuse_grouped(element_size % kGroupedTile == 0 ? RefusalKind::kPackageTooWide
                                                             : RefusalKind::kDoesNotTile);
    }
    return tile_grouped(element_size, threads, package);
  }
  const int64_t wished = element_size <= 512 ? 4 : element_size <= 1024 ? 2 : 1;
  for (int64_t threads = kWarpThreads / wished; threads >= 1; threads /= 2) {
    const int64_t package = grouped_package(element_size, threads);
    if (package != 0) {
      return tile_grouped(element_size, threads, package);
    }
  }
  return refuse_grouped(RefusalKind::kNoTiling);
}

// `rows` neighbouring rows are contiguous on both sides, in every span; the alignments are those of
// the spans' first bytes. An explicit unroll puts grouped before the others.
KVFERRY_HD constexpr CopyDecision resolve_copy(int64_t element_size, int64_t rows = 1,
                                               int64_t unroll = kDefaultUnroll,
                                               int64_t source_alignment = kWidestPackage,
                                               int64_t destination_alignment = kWidestPackage) {
  const int64_t span_bytes = element_size * rows;
  const int64_t flat_package = alignment_of(span_bytes | source_alignment | destination_alignment);
  const bool flat_eligible = flat_package >= kNarrowestFlatPackage;
  GroupedConfig grouped = resolve_grouped(element_size, unroll);
  if (grouped.package > alignment_of(source_alignment | destination_alignment)) {
    grouped = refuse_grouped(RefusalKind::kMisaligned);
  }
  CopyPath chosen = flat_eligible ? CopyPath::kFlat : CopyPath::kRealign;
  if (unroll != kDefaultUnroll && grouped.refusal == RefusalKind::kNone) {
    chosen = CopyPath::kGrouped;
  }
  return CopyDecision{chosen, flat_eligible, span_bytes, flat_package, grouped};
}

}  // namespace kvferry
