// The page digest, as kvferry/kernels/digest.py defines it. Kernels add up the weights of the
// words they move, in any order; `finish_digest` turns the sum into the digest.
#pragma once

#include "transfer.cuh"

namespace kvferry {

constexpr uint64_t kPosition = 0x9E3779B97F4A7C15u;
constexpr uint64_t kStart = 0x243F6A8885A308D3u;
constexpr uint64_t kSpread = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kWeight = 0xD6E8FEB86659FD93u;

KVFERRY_HD constexpr uint64_t mix(uint64_t value) {
  value ^= value >> 33;
  value *= 0xFF51AFD7ED558CCDu;
  value ^= value >> 33;
  value *= 0xC4CEB9FE1A85EC53u;
  return value ^ (value >> 33);
}

// The weight of the 64-bit word number `position` of a span.
KVFERRY_HD constexpr uint64_t weigh_word(uint64_t word, uint32_t position) {
  uint64_t key = kStart + position * kPosition;
  key ^= key >> 32;
  const uint64_t keyed = word ^ (key * kSpread);
  return keyed * ((keyed >> 32) + kWeight);
}

KVFERRY_HD constexpr uint64_t finish_digest(uint64_t sum, uint64_t page_seed, uint64_t where) {
  const uint64_t digest = mix(sum + mix(page_seed ^ where));
  return digest != 0 ? digest : 1;
}

KVFERRY_HD constexpr uint64_t join_word(uint32_t low, uint32_t high) {
  return static_cast<uint64_t>(high) << 32 | low;
}

// Ends one span of one page: a store writes its digest, a load compares. The sum is zero after it,
// so that nothing has to be cleared before the next transfer.
KVFERRY_HD __forceinline__ void finish_page(const Transfer &transfer, uint32_t span_index,
                                            uint32_t page) {
  const Span &span = span_of(transfer, span_index);
  uint64_t *const sum_at = reinterpret_cast<uint64_t *>(sum_address(transfer, span_index, page));
  const uint64_t sum = *sum_at;
  *sum_at = 0;
  const uint64_t seed = reinterpret_cast<const uint64_t *>(transfer.page_seeds)[page];
  const uint64_t found = finish_digest(sum, seed, span.where);
  volatile uint64_t *kept = reinterpret_cast<volatile uint64_t *>(
      span.digests + static_cast<uint64_t>(host_slot(transfer, page) * span.digest_stride));
  volatile unsigned char *bad =
      reinterpret_cast<volatile unsigned char *>(transfer.bad_pages + page);
  if (transfer.is_load != 0) {
    if (*kept != found) {
      *bad = 1;
    }
  } else {
    // 0 is no digest: a page that is not whole must not be vouched for.
    *kept = *bad != 0 ? 0 : found;
  }
}

}  // namespace kvferry
