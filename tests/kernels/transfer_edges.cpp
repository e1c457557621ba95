// What random transfers do not reach: numbers beyond 32 bits, many spans in one launch, digests
// that come out as 0. Compiled with sanitizers by test_transfer_kernels.py.
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "transfer_lanes.h"

namespace {

using namespace kvferry;

void check(bool holds, const char *what, uint64_t at) {
  if (!holds) {
    fprintf(stderr, "%s is wrong at %llu\n", what, static_cast<unsigned long long>(at));
    exit(1);
  }
}

uint64_t address(const void *at) { return reinterpret_cast<uint64_t>(at); }

// A launch may have almost 2^31 sums, which are 16 GiB.
void check_sum_addresses() {
  for (const uint32_t num_pages : {1u, 1000u, (1u << 29) + 3, (1u << 31) - 1}) {
    for (const uint32_t first_span : {0u, 1u, 61u, (1u << 20) + 1}) {
      Transfer transfer = {};
      transfer.sums = 4096;
      transfer.sums_stride = num_pages;
      transfer.first_span = first_span;
      const uint64_t row = uint64_t{first_span} + 2;
      const uint64_t expected = 4096 + (row * num_pages + num_pages - 1) * 8;
      check(sum_address(transfer, 2, num_pages - 1) == expected, "a sum's address", num_pages);
    }
  }
}

// Each item of each span is dealt once, in order for each worker, by either way of counting.
void check_shares() {
  for (uint32_t num_spans = 1; num_spans < 24; ++num_spans) {
    for (uint32_t items = 1; items < 24; ++items) {
      for (const uint32_t workers : {1u, 2u, 7u, 64u, 1000u}) {
        for (const bool told : {false, true}) {
          std::vector<Span> spans(num_spans);
          Transfer transfer = {};
          transfer.spans = address(spans.data());
          transfer.num_spans = num_spans;
          transfer.items_per_span = told ? items : 0;
          std::vector<std::pair<uint32_t, uint32_t>> dealt;
          for (uint32_t worker = 0; worker < workers; ++worker) {
            share_out(
                transfer, worker, workers, [&](const Span &) { return items; },
                [&](uint32_t span, uint32_t item) { dealt.emplace_back(span, item); });
          }
          std::sort(dealt.begin(), dealt.end());
          check(dealt.size() == uint64_t{num_spans} * items, "the number of shares", items);
          for (uint32_t i = 0; i < dealt.size(); ++i) {
            check(dealt[i] == std::make_pair(i / items, i % items), "a share", i);
          }
        }
      }
    }
  }
}

// One page of one span: a digest `kept` in slot `slot`, and what `finish_page` makes of it.
struct Page {
  uint64_t sum = 0;
  uint64_t seed = 0;
  int64_t slot = 0;
  uint64_t kept = 0;
  unsigned char bad = 0;

  void finish(uint64_t where, int64_t stride, bool is_load) {
    Span span = {};
    span.where = where;
    span.digest_stride = stride;
    // Nobody has slots enough: the first of them is said to lie so far before this one.
    span.digests = address(&kept) - static_cast<uint64_t>(slot) * static_cast<uint64_t>(stride);
    Transfer transfer = {};
    transfer.spans = address(&span);
    transfer.host_slots = address(&slot);
    transfer.page_seeds = address(&seed);
    transfer.sums = address(&sum);
    transfer.bad_pages = address(&bad);
    transfer.num_pages = transfer.num_spans = transfer.sums_stride = 1;
    transfer.is_load = is_load ? 1 : 0;
    transfer.verify = 1;
    const uint64_t given = sum;
    lanes::finish(transfer);
    check(sum == 0, "a sum that was finished", slot);
    sum = given;
  }
};

constexpr uint64_t kWhere = 0x1234567u;

void check_far_digests() {
  for (const int64_t stride : {int64_t{8}, int64_t{488}, int64_t{1} << 20}) {
    for (const int64_t offset : {int64_t{1} << 31, int64_t{1} << 32, int64_t{1} << 40}) {
      Page page;
      page.sum = 99;
      page.seed = 5;
      page.slot = offset / stride + 1;
      page.finish(kWhere, stride, false);
      const uint64_t stored = page.kept;
      check(stored == finish_digest(99, 5, kWhere), "the digest of a far slot", page.slot);
      page.finish(kWhere, stride, true);
      check(page.bad == 0, "the verdict on a far slot", page.slot);
      page.kept ^= 1;
      page.finish(kWhere, stride, true);
      check(page.bad == 1, "the verdict on a far slot's flipped bit", page.slot);
    }
  }
}

// 0 says that there is none: what would come out as 0 is 1.
void check_no_digest() {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Page page;
    page.seed = seed;
    page.sum = 0 - mix(seed ^ kWhere);
    page.finish(kWhere, 8, false);
    check(page.kept == 1, "the digest instead of 0", seed);
    page.finish(kWhere, 8, true);
    check(page.bad == 0, "the verdict on a digest instead of 0", seed);
    page.kept = 0;
    page.finish(kWhere, 8, true);
    check(page.bad == 1, "the verdict where there is no digest", seed);
    page.sum = seed;
    page.bad = 0;
    page.finish(kWhere, 8, true);
    check(page.bad == 1, "the verdict where there is no digest", seed);
    page.kept = 7;
    page.finish(kWhere, 8, false);
    check(page.kept == 0, "the digest of a page that is not whole", seed);
  }
}

}  // namespace

int main() {
  check_sum_addresses();
  check_shares();
  check_far_digests();
  check_no_digest();
  printf("all edges\n");
}
