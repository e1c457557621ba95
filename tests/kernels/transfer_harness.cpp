// Random transfers through the device headers, compiled with sanitizers by
// test_transfer_kernels.py. A pool's memory is exactly as long as its view reaches and what lies
// between elements is poisoned, so that one byte too far is caught, read or written; then every
// byte of both pools and every digest is compared with a plain reference, which shares nothing with
// the headers.
#include <sanitizer/asan_interface.h>
#include <stdio.h>

#include <numeric>
#include <vector>

#include "transfer_lanes.h"

namespace {

using namespace kvferry;

using Bytes = std::vector<unsigned char>;

uint64_t state = 88172645463325252u;
int64_t current_case = 0;

uint64_t random_word() {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state * 0x2545F4914F6CDD1Du;
}

int64_t draw(int64_t low, int64_t high) {
  return low + static_cast<int64_t>((random_word() >> 8) % static_cast<uint64_t>(high - low + 1));
}

bool chance(int64_t one_in) { return draw(1, one_in) == 1; }

template <typename T, size_t n>
T one_of(const T (&choices)[n]) {
  return choices[draw(0, n - 1)];
}

void check(bool holds, const char *path, const char *what, int64_t at) {
  if (!holds) {
    fprintf(stderr, "case %lld, %s: %s at %lld\n", static_cast<long long>(current_case), path, what,
            static_cast<long long>(at));
    exit(1);
  }
}

uint64_t address(const void *at) { return reinterpret_cast<uint64_t>(at); }

// ------------------------------------------------------------------------------- the reference

uint64_t plain_mix(uint64_t value) {
  value = (value ^ value >> 33) * 0xFF51AFD7ED558CCDull;
  value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53ull;
  return value ^ value >> 33;
}

uint64_t plain_digest(const Bytes &span, uint64_t page_seed, uint64_t where) {
  uint64_t total = plain_mix(page_seed ^ where);
  for (size_t begin = 0; begin < span.size(); begin += 8) {
    uint64_t word = 0;
    for (size_t i = begin; i < begin + 8 && i < span.size(); ++i) {
      word += static_cast<uint64_t>(span[i]) << (i - begin) * 8;
    }
    const uint64_t step = 0x243F6A8885A308D3ull + begin / 8 * 0x9E3779B97F4A7C15ull;
    const uint64_t keyed = word ^ (step ^ step >> 32) * 0xC2B2AE3D27D4EB4Full;
    total += keyed * ((keyed >> 32) + 0xD6E8FEB86659FD93ull);
  }
  const uint64_t digest = plain_mix(total);
  return digest == 0 ? 1 : digest;
}

// --------------------------------------------------------------------------------------- pools

// As kvferry.geometry.LayerView has it.
struct PlainView {
  uint64_t base;
  int64_t num_rows;
  int64_t row_stride;
  int64_t block_rows;
  int64_t block_stride;
  int64_t piece_size;
  int64_t piece_stride;
  int64_t num_pieces;
  int64_t run_bytes;
};

struct Pool {
  PlainView view;
  int64_t num_rows;  // the view's may be fewer: whole runs only
  int64_t lead;
  int64_t num_bytes;
  unsigned char *memory;  // lead, then the pool, then nothing
  Bytes original;
  std::vector<bool> in_element;
};

int64_t offset_of(const Pool &pool, int64_t row, int64_t byte) {
  const PlainView &v = pool.view;
  int64_t at = pool.lead;
  at += (row / v.block_rows) * v.block_stride;
  at += (row - row / v.block_rows * v.block_rows) * v.row_stride;
  at += (byte / v.piece_size) * v.piece_stride;
  return at + (byte - byte / v.piece_size * v.piece_size);
}

FastDivisor plain_divisor(uint32_t divisor) {
  uint32_t bits = 0;
  while ((uint64_t{1} << bits) < divisor) {
    ++bits;
  }
  if (bits == 0) {
    return {1, 0, 0};
  }
  const unsigned __int128 scaled = static_cast<unsigned __int128>(1) << (31 + bits);
  return {divisor, static_cast<uint32_t>((scaled + divisor - 1) / divisor), bits - 1};
}

// Blocks that follow each other may be told as one.
View told_view(const PlainView &view) {
  View told = {};
  told.base = view.base;
  told.num_rows = view.num_rows;
  told.row_stride = view.row_stride;
  told.block_stride = view.block_stride;
  told.piece_stride = view.piece_stride;
  told.run_bytes = view.run_bytes;
  told.block_rows = plain_divisor(static_cast<uint32_t>(view.block_rows));
  told.piece_size = plain_divisor(static_cast<uint32_t>(view.piece_size));
  const bool apart = view.block_stride != view.block_rows * view.row_stride;
  const int64_t num_blocks = (view.num_rows + view.block_rows - 1) / view.block_rows;
  told.num_blocks = apart || chance(2) ? static_cast<uint32_t>(num_blocks) : 1;
  told.num_pieces = static_cast<uint32_t>(view.num_pieces);
  return told;
}

int64_t gap(int64_t unit) { return chance(2) ? 0 : unit * draw(1, 4); }

// A dense, padded, blocked or permuted pool whose addresses are multiples of a random unit, as far
// as its element allows. `run` rows from a multiple of it may be taken together.
Pool make_pool(int64_t element, int64_t block_rows, int64_t num_blocks, int64_t run) {
  const int64_t units[] = {1, 2, 4, 8, 16, 16};
  const int64_t unit = one_of(units);
  Pool pool = {};
  PlainView &view = pool.view;
  view.num_pieces = chance(3) ? draw(2, 4) : 1;
  while (element % view.num_pieces != 0) {
    --view.num_pieces;
  }
  view.piece_size = element / view.num_pieces;
  view.block_rows = block_rows;
  int64_t covered;
  if (view.num_pieces > 1 && chance(2)) {  // all rows of a piece, then the next piece
    view.row_stride = view.piece_size + gap(unit);
    view.piece_stride = block_rows * view.row_stride + gap(unit);
    covered = view.num_pieces * view.piece_stride;
  } else {
    view.piece_stride = view.piece_size + (view.num_pieces > 1 ? gap(unit) : 0);
    view.row_stride = view.num_pieces * view.piece_stride + gap(unit);
    covered = block_rows * view.row_stride;
  }
  view.block_stride = covered + gap(unit);
  const bool dense = view.num_pieces == 1 && view.row_stride == element;
  const bool apart = num_blocks > 1 && view.block_stride != block_rows * view.row_stride;
  const int64_t run_rows = dense ? (apart ? std::gcd(run, block_rows) : run) : 1;
  view.run_bytes = dense ? run_rows * element : view.piece_size;
  pool.num_rows = block_rows * num_blocks;
  view.num_rows = pool.num_rows / run_rows * run_rows;
  pool.lead = gap(unit);
  pool.num_bytes = offset_of(pool, pool.num_rows - 1, element - 1) + 1;
  pool.memory = static_cast<unsigned char *>(malloc(static_cast<size_t>(pool.num_bytes)));
  view.base = address(pool.memory + pool.lead);
  pool.original.resize(static_cast<size_t>(pool.num_bytes));
  for (unsigned char &byte : pool.original) {
    byte = static_cast<unsigned char>(random_word() >> 56);
  }
  pool.in_element.resize(pool.original.size());
  for (int64_t row = 0; row < pool.num_rows; ++row) {
    for (int64_t byte = 0; byte < element; ++byte) {
      pool.in_element[static_cast<size_t>(offset_of(pool, row, byte))] = true;
    }
  }
  return pool;
}

void fence(const Pool &pool) {
  for (int64_t begin = 0; begin < pool.num_bytes; ++begin) {
    int64_t end = begin;
    while (end < pool.num_bytes && !pool.in_element[static_cast<size_t>(end)]) {
      ++end;
    }
    if (end > begin) {
      ASAN_POISON_MEMORY_REGION(pool.memory + begin, static_cast<size_t>(end - begin));
      begin = end;
    }
  }
}

void unfence(const Pool &pool) {
  ASAN_UNPOISON_MEMORY_REGION(pool.memory, static_cast<size_t>(pool.num_bytes));
}

// --------------------------------------------------------------------------------------- cases

constexpr int64_t kNone = -1;

struct SpanCase {
  int64_t element;
  Pool device;
  Pool host;
  std::vector<int64_t> rows;  // [pages, R]
  Bytes index;                // `rows` as the kernel reads them
  std::vector<uint64_t> digests;
};

// One plan over some spans, and what a path is expected to leave behind.
struct Case {
  int64_t num_pages;
  int64_t rows_per_page;
  int64_t num_slots;
  int64_t run;
  int64_t index_bytes;
  uint32_t skipped_spans;
  bool is_load;
  bool verify;
  std::vector<SpanCase> spans;
  std::vector<int64_t> slots;
  std::vector<uint64_t> seeds;
};

const int64_t kElements[] = {1,   2,   3,   7,   16,  66,  100, 131,  132,  160, 288,
                             512, 576, 584, 656, 656, 512, 576, 1152, 4100, 9216};

int64_t draw_divisor(int64_t of) {
  int64_t divisor = draw(1, of);
  while (of % divisor != 0) {
    divisor = draw(1, of);
  }
  return divisor;
}

// `count` different numbers below `limit`.
std::vector<int64_t> draw_distinct(int64_t count, int64_t limit) {
  std::vector<int64_t> all(static_cast<size_t>(limit));
  std::iota(all.begin(), all.end(), 0);
  for (int64_t i = 0; i < count; ++i) {
    std::swap(all[static_cast<size_t>(i)], all[static_cast<size_t>(draw(i, limit - 1))]);
  }
  all.resize(static_cast<size_t>(count));
  return all;
}

bool in_range(const SpanCase &span, int64_t row) { return row >= 0 && row < span.device.num_rows; }

SpanCase draw_span(const Case &of, int64_t element) {
  SpanCase span;
  span.element = element;
  const int64_t runs = of.num_pages * of.rows_per_page / of.run;
  const int64_t wanted = (runs + draw(0, 3)) * of.run;
  const int64_t blocks[] = {1, of.run, 2 * of.run, 3, 16, wanted};
  const int64_t block_rows = one_of(blocks);
  span.device = make_pool(element, block_rows, (wanted + block_rows - 1) / block_rows, of.run);
  const int64_t host_rows = of.num_slots * of.rows_per_page;
  const int64_t host_blocks[] = {of.rows_per_page, host_rows, draw_divisor(of.rows_per_page)};
  const int64_t host_block = one_of(host_blocks);
  span.host = make_pool(element, host_block, host_rows / host_block, of.rows_per_page);

  const int64_t past = (span.device.num_rows + of.run - 1) / of.run * of.run;
  const int64_t far = of.index_bytes == 8 ? int64_t{1} << 62 : int64_t{1} << 30;
  const int64_t outside[] = {past, -of.run, far / of.run * of.run};
  const bool faulty = chance(4);
  for (const int64_t start : draw_distinct(runs, span.device.num_rows / of.run)) {
    const int64_t first = faulty && chance(4) ? one_of(outside) : start * of.run;
    for (int64_t i = 0; i < of.run; ++i) {
      span.rows.push_back(first + i);
    }
  }
  for (const int64_t row : span.rows) {
    for (int64_t i = 0; i < of.index_bytes; ++i) {
      span.index.push_back(static_cast<unsigned char>(static_cast<uint64_t>(row) >> i * 8));
    }
  }
  for (int64_t slot = 0; slot < of.num_slots; ++slot) {
    span.digests.push_back(random_word());
  }
  return span;
}

Case draw_case() {
  Case made = {};
  const int64_t rows[] = {1, 2, 3, 4, 5, 8, 16, 32, 64};
  const int64_t element = chance(4) ? draw(1, 300) : one_of(kElements);
  do {
    made.rows_per_page = one_of(rows);
    made.num_pages = draw(1, 5);
  } while (made.rows_per_page * made.num_pages * element > 40000 && made.rows_per_page > 2);
  made.num_slots = made.num_pages + draw(0, 3);
  made.run = chance(3) ? made.rows_per_page : draw_divisor(made.rows_per_page);
  made.index_bytes = chance(2) ? 4 : 8;
  made.skipped_spans = static_cast<uint32_t>(draw(0, 2));
  made.is_load = chance(2);
  made.verify = !chance(4);
  made.slots = draw_distinct(made.num_pages, made.num_slots);
  for (int64_t page = 0; page < made.num_pages; ++page) {
    made.seeds.push_back(random_word());
  }
  made.spans.push_back(draw_span(made, element));
  if (chance(3)) {
    made.spans.push_back(draw_span(made, chance(2) ? element : draw(1, 300)));
  }
  return made;
}

int64_t row_at(const Case &of, const SpanCase &span, int64_t page, int64_t row) {
  return span.rows[static_cast<size_t>(page * of.rows_per_page + row)];
}

// Where byte `at` of a page's span lies; kNone for a device row that does not exist.
int64_t find(const Case &of, const SpanCase &span, int64_t page, int64_t at, bool host) {
  const int64_t row = at / span.element;
  if (host) {
    const int64_t slot = of.slots[static_cast<size_t>(page)];
    return offset_of(span.host, slot * of.rows_per_page + row, at % span.element);
  }
  const int64_t device_row = row_at(of, span, page, row);
  return in_range(span, device_row) ? offset_of(span.device, device_row, at % span.element) : kNone;
}

// Whether packages of this size tile every page with aligned, contiguous bytes on both sides.
bool tiles(const Case &of, const SpanCase &span, int64_t package) {
  const int64_t num_bytes = span.element * of.rows_per_page;
  if (span.host.view.run_bytes % package != 0) {
    return false;
  }
  for (const bool host : {false, true}) {
    const unsigned char *memory = host ? span.host.memory : span.device.memory;
    for (int64_t page = 0; page < of.num_pages; ++page) {
      int64_t first = kNone;
      for (int64_t at = 0; at < num_bytes; ++at) {
        const int64_t here = find(of, span, page, at, host);
        if (at % package == 0) {
          first = here;
          if (here != kNone && address(memory + here) % package != 0) {
            return false;
          }
        } else if (here != (first == kNone ? kNone : first + at % package)) {
          return false;
        }
      }
    }
  }
  return true;
}

void check_runs(const Case &of, const SpanCase &span) {
  for (const bool host : {false, true}) {
    const int64_t run = host ? span.host.view.run_bytes : span.device.view.run_bytes;
    for (int64_t page = 0; page < of.num_pages; ++page) {
      for (int64_t at = 1; at < span.element * of.rows_per_page; ++at) {
        const int64_t here = find(of, span, page, at, host);
        const int64_t before = find(of, span, page, at - 1, host);
        const bool together = here == kNone ? before == kNone : before == here - 1;
        check(together || at % run == 0, "the harness", "a run is not one", at);
      }
    }
  }
}

// ----------------------------------------------------------------------------------------- runs

enum class Path { kFlat, kRealign, kDigestOnly, kGrouped };

const char *const kNames[] = {"flat", "realign", "digest only", "grouped"};

struct Choice {
  Path path;
  uint32_t package;
  uint32_t threads;
};

// `is_staged`: a store leaves zeros where it has no row, as all of staging crosses the link.
void write_element(const Case &of, const SpanCase &span, int64_t page, int64_t row, Bytes &device,
                   Bytes &host, bool is_staged = false) {
  for (int64_t byte = row * span.element; byte < (row + 1) * span.element; ++byte) {
    const int64_t there = find(of, span, page, byte, false);
    const int64_t here = find(of, span, page, byte, true);
    if (there != kNone) {
      unsigned char &on_device = device[static_cast<size_t>(there)];
      unsigned char &on_host = host[static_cast<size_t>(here)];
      (of.is_load ? on_device : on_host) = of.is_load ? on_host : on_device;
    } else if (is_staged && !of.is_load) {
      host[static_cast<size_t>(here)] = 0;
    }
  }
}

// The launch over `num_pages` pages from `first` on.
Transfer part_of(const Case &of, Transfer transfer, uint32_t first, uint32_t num_pages) {
  const uint64_t skipped_rows = uint64_t{first} * static_cast<uint64_t>(of.rows_per_page);
  for (size_t s = 0; s < of.spans.size(); ++s) {
    transfer.rows[s] += skipped_rows * static_cast<uint64_t>(of.index_bytes);
  }
  transfer.host_slots += uint64_t{first} * sizeof(int64_t);
  transfer.page_seeds += uint64_t{first} * sizeof(uint64_t);
  transfer.sums += uint64_t{first} * sizeof(uint64_t);
  transfer.bad_pages += first;
  transfer.first_page = first;
  transfer.num_pages = num_pages;
  return transfer;
}

void launch(const Case &of, const Choice &choice, Transfer transfer, const Span *spans) {
  uint32_t items = 0;
  for (size_t s = 0; s < of.spans.size(); ++s) {
    const Span &told = spans[s];
    const uint32_t here = choice.path == Path::kFlat      ? flat_chunks(transfer, told)
                          : choice.path == Path::kGrouped ? told.rows_per_page * transfer.num_pages
                                                          : tiles_of(told) * transfer.num_pages;
    items = s == 0 || here == items ? here : 0;
    if (items == 0) {
      break;
    }
  }
  transfer.items_per_span = chance(2) ? items : 0;

  switch (choice.path) {
    case Path::kFlat:
      lanes::flat(transfer);
      break;
    case Path::kGrouped:
      lanes::grouped(transfer, choice.threads, choice.package,
                     static_cast<uint32_t>(of.spans[0].element) / choice.threads / choice.package);
      break;
    default:
      lanes::realign(transfer, choice.path == Path::kDigestOnly);
      break;
  }
}

// Carries out one path on fresh memory and compares all that it should and should not change.
void run(Case &of, const Choice &choice) {
  const char *const name = kNames[static_cast<int>(choice.path)];
  const size_t num_pages = static_cast<size_t>(of.num_pages);
  // What a mover that stages adds, and the address it adds it to lies elsewhere then.
  const bool is_staged = choice.path != Path::kGrouped && chance(2);
  const bool digest_only = choice.path == Path::kDigestOnly;
  const bool weighs = choice.path != Path::kGrouped && of.verify;
  // A bit that changes in between must be seen on a load.
  const bool corrupt = weighs && of.is_load && chance(2);
  const size_t bad_span = static_cast<size_t>(draw(0, static_cast<int64_t>(of.spans.size()) - 1));
  const int64_t bad_page = draw(0, of.num_pages - 1);

  std::vector<Bytes> devices, hosts;
  std::vector<std::vector<uint64_t>> digests, expected_digests;
  std::vector<unsigned char> expected_bad(num_pages, 0);
  uint64_t expected_fault = ~uint64_t{0};
  Span *spans = static_cast<Span *>(malloc(sizeof(Span) * (of.skipped_spans + of.spans.size())));
  memset(static_cast<void *>(spans), 0xEE, sizeof(Span) * of.skipped_spans);
  Transfer transfer = {};

  for (size_t s = 0; s < of.spans.size(); ++s) {
    SpanCase &span = of.spans[s];
    Bytes device = span.device.original;
    Bytes host = span.host.original;
    for (int64_t page = 0; page < of.num_pages; ++page) {
      for (int64_t row = 0; row < of.rows_per_page; ++row) {
        if (!in_range(span, row_at(of, span, page, row))) {
          const uint64_t code = static_cast<uint64_t>(page) << 32 |
                                static_cast<uint64_t>(row) << 4 | static_cast<uint64_t>(s);
          expected_fault = code < expected_fault ? code : expected_fault;
          expected_bad[static_cast<size_t>(page)] = 1;
        }
      }
    }
    digests.push_back(span.digests);
    expected_digests.push_back(span.digests);
    if (digest_only && of.is_load) {  // another mover has brought the bytes
      for (int64_t page = 0; page < of.num_pages; ++page) {
        for (int64_t row = 0; row < of.rows_per_page; ++row) {
          write_element(of, span, page, row, device, host);
        }
      }
    }
    for (int64_t page = 0; of.is_load && page < of.num_pages; ++page) {
      Bytes bytes;
      for (int64_t at = 0; at < span.element * of.rows_per_page; ++at) {
        bytes.push_back(host[static_cast<size_t>(find(of, span, page, at, true))]);
      }
      const size_t slot = static_cast<size_t>(of.slots[static_cast<size_t>(page)]);
      const size_t seed = static_cast<size_t>(page);
      digests[s][slot] = plain_digest(bytes, of.seeds[seed], span.device.view.base * 31);
      expected_digests[s][slot] = digests[s][slot];
    }
    if (corrupt && s == bad_span) {
      const int64_t at = draw(0, span.element * of.rows_per_page - 1);
      const int64_t where = find(of, span, bad_page, at, !digest_only);
      if (where != kNone) {
        (digest_only ? device : host)[static_cast<size_t>(where)] ^= 1 << draw(0, 7);
        expected_bad[static_cast<size_t>(bad_page)] = 1;
      }
    }
    memcpy(span.device.memory, device.data(), device.size());
    memcpy(span.host.memory, host.data(), host.size());
    for (int64_t page = 0; page < of.num_pages; ++page) {
      for (int64_t row = 0; !digest_only && row < of.rows_per_page; ++row) {
        write_element(of, span, page, row, device, host, is_staged);
      }
    }
    devices.push_back(device);
    hosts.push_back(host);

    Span &told = spans[of.skipped_spans + s];
    told = Span{};
    told.device = told_view(span.device.view);
    told.host = told_view(span.host.view);
    told.digests = address(digests[s].data());
    told.digest_stride = 8;
    told.where = span.device.view.base * 31;
    told.num_bytes = span.element * of.rows_per_page;
    told.element = plain_divisor(static_cast<uint32_t>(span.element));
    told.rows_per_page = static_cast<uint32_t>(of.rows_per_page);
    told.rows_table = static_cast<uint32_t>(s);
    told.flat_package = choice.path == Path::kFlat ? choice.package : 0;
    // Any host run may be told to begin anywhere; lines then take the shortest start into account.
    told.line_mask = chance(2) ? 127 : 0;
    const int64_t run_bytes = span.host.view.run_bytes;
    const int64_t line = 32 * (told.flat_package != 0 ? told.flat_package : 1);
    const int64_t slack = told.line_mask != 0 ? 128 - line / 32 : 0;
    const int64_t run_lines = (run_bytes + slack + line - 1) / line;
    told.run_lines = plain_divisor(static_cast<uint32_t>(run_lines));
    told.page_lines = plain_divisor(static_cast<uint32_t>(told.num_bytes / run_bytes * run_lines));
    transfer.rows[s] = address(span.index.data());
  }
  for (size_t s = 0; weighs && !of.is_load && s < of.spans.size(); ++s) {
    const SpanCase &span = of.spans[s];
    for (size_t page = 0; page < num_pages; ++page) {
      Bytes bytes;
      for (int64_t at = 0; at < span.element * of.rows_per_page && expected_bad[page] == 0; ++at) {
        const int64_t where = find(of, span, static_cast<int64_t>(page), at, false);
        bytes.push_back(devices[s][static_cast<size_t>(where)]);
      }
      expected_digests[s][static_cast<size_t>(of.slots[page])] =
          expected_bad[page] != 0 ? 0
                                  : plain_digest(bytes, of.seeds[page], span.device.view.base * 31);
    }
  }

  std::vector<uint64_t> sums((of.skipped_spans + of.spans.size()) * num_pages, 0);
  std::vector<unsigned char> bad(num_pages, 0);
  uint64_t fault = ~uint64_t{0};
  transfer.spans = address(spans);
  transfer.host_slots = address(of.slots.data());
  transfer.page_seeds = address(of.seeds.data());
  transfer.sums = address(sums.data());
  transfer.bad_pages = address(bad.data());
  transfer.fault = address(&fault);
  transfer.num_pages = static_cast<uint32_t>(of.num_pages);
  transfer.sums_stride = transfer.num_pages;
  transfer.first_page = 0;
  transfer.host_base = is_staged ? 0x7000 : 0;
  for (size_t s = 0; s < of.spans.size(); ++s) {
    spans[of.skipped_spans + s].host.base -= transfer.host_base;
  }
  transfer.first_span = of.skipped_spans;
  transfer.num_spans = static_cast<uint32_t>(of.spans.size());
  transfer.index_bytes = static_cast<uint32_t>(of.index_bytes);
  transfer.is_load = of.is_load ? 1 : 0;
  transfer.verify = of.verify ? 1 : 0;
  for (const SpanCase &span : of.spans) {
    fence(span.device);
    fence(span.host);
  }
  // In one launch, or in two over some pages each, as they fit a staging buffer.
  const uint32_t cut = chance(2) ? 0 : static_cast<uint32_t>(draw(0, of.num_pages));
  for (const auto &[first, end] :
       {std::make_pair(0u, cut), std::make_pair(cut, transfer.num_pages)}) {
    if (first < end) {
      launch(of, choice, part_of(of, transfer, first, end - first), spans + of.skipped_spans);
    }
  }
  if (weighs) {
    lanes::finish(transfer);
  }
  for (const SpanCase &span : of.spans) {
    unfence(span.device);
    unfence(span.host);
  }

  check(fault == expected_fault, name, "fault", static_cast<int64_t>(fault));
  for (size_t page = 0; page < num_pages; ++page) {
    check(bad[page] == expected_bad[page], name, "bad page", static_cast<int64_t>(page));
  }
  for (size_t i = 0; i < of.skipped_spans * num_pages; ++i) {
    check(sums[i] == 0, name, "a sum of another launch", static_cast<int64_t>(i));
  }
  for (size_t s = 0; s < of.spans.size(); ++s) {
    const SpanCase &span = of.spans[s];
    for (size_t i = 0; i < devices[s].size(); ++i) {
      check(span.device.memory[i] == devices[s][i], name, "device byte", static_cast<int64_t>(i));
    }
    for (size_t i = 0; i < hosts[s].size(); ++i) {
      check(span.host.memory[i] == hosts[s][i], name, "host byte", static_cast<int64_t>(i));
    }
    for (size_t slot = 0; slot < digests[s].size(); ++slot) {
      check(digests[s][slot] == expected_digests[s][slot], name, "digest",
            static_cast<int64_t>(slot));
    }
  }
  free(spans);
}

// The largest of 16, 8 and 4 that divides all of a span's addresses and its element.
bool can_group(const SpanCase &span, uint32_t threads, uint32_t package) {
  if (span.element % (threads * package) != 0) {
    return false;
  }
  for (const Pool *pool : {&span.device, &span.host}) {
    const PlainView &view = pool->view;
    const int64_t strides =
        view.row_stride | (pool->num_rows > view.block_rows ? view.block_stride : 0);
    if (view.num_pieces > 1 || view.base % package != 0 || strides % package != 0) {
      return false;
    }
  }
  return true;
}

int64_t counts[4];

void run_all(Case &of) {
  const auto go = [&](Choice choice) {
    run(of, choice);
    ++counts[static_cast<int>(choice.path)];
  };
  for (const uint32_t package : {16u, 8u}) {
    bool all = true;
    for (const SpanCase &span : of.spans) {
      all = all && tiles(of, span, package);
    }
    if (all) {
      go({Path::kFlat, package, 0});
    }
  }
  go({Path::kRealign, 0, 0});
  go({Path::kDigestOnly, 0, 0});
  const uint32_t first = static_cast<uint32_t>(draw(0, 5));
  for (const uint32_t package : {16u, 8u, 4u}) {
    for (uint32_t i = 0; i < 6; ++i) {
      const uint32_t threads = 1u << (first + i) % 6;
      bool all = true;
      for (const SpanCase &span : of.spans) {
        all = all && span.element == of.spans[0].element && can_group(span, threads, package);
      }
      if (all) {
        go({Path::kGrouped, package, threads});
        break;
      }
    }
  }
}

// ------------------------------------------------------------------------------ arithmetic alone

void check_addresses() {
  for (int64_t i = 0; i < 20000; ++i) {
    PlainView view = {};
    const int64_t pieces[] = {1, 1, 2, 8, 64};
    view.num_pieces = one_of(pieces);
    view.piece_size = draw(1, 5000);
    view.piece_stride = view.piece_size + draw(0, int64_t{1} << draw(0, 34));
    view.row_stride = view.num_pieces * view.piece_stride + draw(0, int64_t{1} << draw(0, 20));
    view.block_rows = draw(1, 1 << draw(0, 15));
    const int64_t room = (int64_t{1} << 62) / view.row_stride / view.block_rows;
    const int64_t many = int64_t{1} << draw(0, 15);
    const int64_t num_blocks = draw(1, many < room ? many : room);
    view.block_stride = view.block_rows * view.row_stride + draw(0, 4096);
    view.num_rows = num_blocks * view.block_rows;
    view.base = static_cast<uint64_t>(draw(0, int64_t{1} << draw(0, 61)));
    const int64_t row = chance(3) ? view.num_rows - 1 : draw(0, view.num_rows - 1);
    const int64_t within = draw(0, view.num_pieces * view.piece_size - 1);
    const __int128 expected = static_cast<__int128>(view.base) +
                              static_cast<__int128>(row / view.block_rows) * view.block_stride +
                              static_cast<__int128>(row % view.block_rows) * view.row_stride +
                              static_cast<__int128>(within / view.piece_size) * view.piece_stride +
                              within % view.piece_size;
    check(static_cast<__int128>(address_of(told_view(view), row, within)) == expected, "address_of",
          "address", i);
  }
  // Just beyond what 31, 32 and 40 bits hold.
  for (const int64_t offset : {int64_t{1} << 31, int64_t{1} << 32, int64_t{1} << 40}) {
    for (const int64_t stride : {656, 4096}) {
      PlainView view = {};
      view.base = 4096;
      view.num_rows = offset / stride + 2;
      view.row_stride = view.piece_size = view.piece_stride = stride;
      view.block_rows = view.num_rows;
      view.num_pieces = 1;
      view.block_stride = view.block_rows * stride;
      const int64_t row = offset / stride + 1;
      check(address_of(told_view(view), row, stride - 1) ==
                4096 + static_cast<uint64_t>(row * stride + stride - 1),
            "address_of", "far row", offset);
    }
  }
}

void check_division() {
  const uint32_t limit = 0x7FFFFFFF;
  for (int64_t i = 0; i < 100000; ++i) {
    const uint32_t divisor = static_cast<uint32_t>(draw(1, int64_t{1} << draw(1, 30)));
    const FastDivisor by = plain_divisor(divisor);
    const uint32_t multiple = static_cast<uint32_t>(draw(0, limit / divisor)) * divisor;
    for (const uint32_t n : {multiple, multiple - (multiple != 0), limit, limit / divisor * divisor,
                             static_cast<uint32_t>(draw(0, limit))}) {
      check(divide(n, by) == n / divisor, "divide", "quotient", n);
    }
  }
}

}  // namespace

int main(int count, char **arguments) {
  const int64_t num_cases = count > 1 ? atoll(arguments[1]) : 3000;
  state ^= count > 2 ? strtoull(arguments[2], nullptr, 10) : 0;
  check_addresses();
  check_division();
  for (current_case = 0; current_case < num_cases; ++current_case) {
    Case made = draw_case();
    for (const SpanCase &span : made.spans) {
      check_runs(made, span);
    }
    run_all(made);
    for (const SpanCase &span : made.spans) {
      free(span.device.memory);
      free(span.host.memory);
    }
  }
  printf("%lld cases", static_cast<long long>(num_cases));
  for (int i = 0; i < 4; ++i) {
    printf(", %lld %s", static_cast<long long>(counts[i]), kNames[i]);
  }
  printf("\n");
}
