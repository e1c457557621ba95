// What a transfer kernel is told, and where a byte of a span lies on either side. The structures
// are filled by kvferry/kernels/transfer_args.py, whose tests compare sizes and offsets.
#pragma once

#include "ptx.cuh"
#include "shim.cuh"

namespace kvferry {

// Division of numbers below 2^31 by one that does not change, without a division: Granlund and
// Montgomery, "Division by Invariant Integers using Multiplication", PLDI 1994.
struct FastDivisor {
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;
};

KVFERRY_HD __forceinline__ uint32_t divide(uint32_t n, const FastDivisor &by) {
  return by.divisor == 1 ? n : multiply_high(n, by.multiplier) >> by.shift;
}

// One layer of one plane in a pool: kvferry.geometry.LayerView. Bytes.
struct View {
  uint64_t base;
  int64_t num_rows;  // below 2^31
  int64_t row_stride;
  int64_t block_stride;
  int64_t piece_stride;
  // Bytes of a span that are one run of bytes here, from any multiple of it: whole neighbouring
  // rows, or one piece of an element.
  int64_t run_bytes;
  FastDivisor block_rows;
  FastDivisor piece_size;
  uint32_t num_blocks;  // 1 where each block follows the one before
  uint32_t num_pieces;
};

// One span: a layer of a plane, with everything about it that is the same for every transfer.
struct Span {
  View device;
  View host;
  uint64_t digests;       // the host pool's digest of slot 0, as the device sees it
  int64_t digest_stride;  // bytes from one slot's digest to the next
  uint64_t where;         // the span's share of the seed
  int64_t num_bytes;
  FastDivisor element;     // by the element size
  FastDivisor page_lines;  // by the flat lines of a page's span
  FastDivisor run_lines;   // by those of one run on the host
  uint32_t rows_per_page;
  uint32_t rows_table;    // which of Transfer::rows has its device rows
  uint32_t flat_package;  // 16 or 8; 0 where flat cannot carry it
  uint32_t line_mask;     // 127 where runs on the host begin anywhere; 0 where on 128 bytes
  uint32_t unused;
};

constexpr int kMaxRowTables = 16;

// One launch: some spans of a plan, some neighbouring pages of it. Arrays begin at the first one.
struct Transfer {
  uint64_t spans;                // Span[]
  uint64_t rows[kMaxRowTables];  // device rows of each page, [num_pages, rows_per_page]
  uint64_t host_slots;           // int64 [num_pages]; 0: page i is in slot i
  uint64_t host_base;            // what the addresses of hosts begin at; 0 in place on the host
  uint64_t page_seeds;           // uint64 [num_pages]
  uint64_t sums;                 // uint64 [spans, sums_stride], zero before the first launch
  uint64_t bad_pages;            // uint8 [num_pages], set to 1
  uint64_t fault;                // uint64: the lowest fault_code, all ones where there is none
  uint32_t num_pages;
  uint32_t first_span;  // in `spans`
  uint32_t num_spans;
  uint32_t index_bytes;  // 4 or 8
  uint32_t is_load;
  uint32_t verify;
  uint32_t items_per_span;  // work of each span, where all have the same; else 0
  uint32_t sums_stride;     // pages of the plan
  uint32_t first_page;      // in the plan
  uint32_t unused;
};

// Which device row was out of range: ordered so that the lowest is the first of the plan.
KVFERRY_HD __forceinline__ uint64_t fault_code(uint32_t table, uint32_t page, uint32_t row) {
  return static_cast<uint64_t>(page) << 32 | static_cast<uint64_t>(row) << 4 | table;
}

KVFERRY_HD __forceinline__ const Span &span_of(const Transfer &transfer, uint32_t index) {
  return reinterpret_cast<const Span *>(transfer.spans)[transfer.first_span + index];
}

KVFERRY_HD __forceinline__ int64_t device_row(const Transfer &transfer, const Span &span,
                                              uint32_t page, uint32_t row) {
  const uint64_t at = static_cast<uint64_t>(page) * span.rows_per_page + row;
  const uint64_t table = transfer.rows[span.rows_table];
  return transfer.index_bytes == 8 ? reinterpret_cast<const int64_t *>(table)[at]
                                   : reinterpret_cast<const int32_t *>(table)[at];
}

KVFERRY_HD __forceinline__ int64_t host_slot(const Transfer &transfer, uint32_t page) {
  return transfer.host_slots == 0 ? page
                                  : reinterpret_cast<const int64_t *>(transfer.host_slots)[page];
}

// The address of byte `within` of the element in `row`. Both are in range; offsets have 64 bits,
// but nothing here is divided in 64 bits, which takes a GPU a hundred instructions.
KVFERRY_HD __forceinline__ uint64_t address_of(const View &view, int64_t row, int64_t within) {
  int64_t offset = within;
  if (view.num_pieces > 1) {
    const uint32_t byte = static_cast<uint32_t>(within);
    const uint32_t piece = divide(byte, view.piece_size);
    offset = piece * view.piece_stride + (byte - piece * view.piece_size.divisor);
  }
  if (view.num_blocks > 1) {
    const uint32_t all = static_cast<uint32_t>(row);
    const uint32_t block = divide(all, view.block_rows);
    offset += block * view.block_stride;
    row = all - block * view.block_rows.divisor;
  }
  offset += row * view.row_stride;
  return view.base + static_cast<uint64_t>(offset);
}

// The address on the host of byte `within` of a page's row.
KVFERRY_HD __forceinline__ uint64_t host_address(const Transfer &transfer, const Span &span,
                                                 uint32_t page, uint32_t row, int64_t within) {
  const int64_t host_row = host_slot(transfer, page) * span.rows_per_page + row;
  return transfer.host_base + address_of(span.host, host_row, within);
}

// Where byte `offset` of a page's span lies on both sides.
struct Place {
  uint64_t device;
  uint64_t host;
  bool in_range;
  uint32_t row;
};

KVFERRY_HD __forceinline__ Place place_of(const Transfer &transfer, const Span &span, uint32_t page,
                                          uint32_t offset) {
  Place place;
  place.row = divide(offset, span.element);
  const int64_t within = offset - place.row * span.element.divisor;
  const int64_t row = device_row(transfer, span, page, place.row);
  place.in_range = static_cast<uint64_t>(row) < static_cast<uint64_t>(span.device.num_rows);
  place.device = place.in_range ? address_of(span.device, row, within) : 0;
  place.host = host_address(transfer, span, page, place.row, within);
  return place;
}

// A device row that does not exist: its element is left out, its page is bad, and the first of
// them is told. Never a trap: other transfers go on.
KVFERRY_HD __forceinline__ void note_fault(const Transfer &transfer, const Span &span,
                                           uint32_t page, uint32_t row) {
  atomic_min(transfer.fault, fault_code(span.rows_table, transfer.first_page + page, row));
  *reinterpret_cast<volatile unsigned char *>(transfer.bad_pages + page) = 1;
}

KVFERRY_HD __forceinline__ uint64_t sum_address(const Transfer &transfer, uint32_t span,
                                                uint32_t page) {
  const uint64_t row = transfer.first_span + span;
  return transfer.sums + (row * transfer.sums_stride + page) * 8;
}

// Shares out the work of a launch: items are numbered through over all of its spans and dealt to
// `workers` in turn, so that small spans keep all of them busy. `count` gives a span's items. There
// is one call of `body`, for each is compiled into the kernel in full.
template <typename Count, typename Body>
KVFERRY_HD __forceinline__ void share_out(const Transfer &transfer, uint32_t worker,
                                          uint32_t workers, Count count, Body body) {
  uint32_t span = 0;
  for (uint32_t item = worker;; item += workers) {
    if (transfer.items_per_span != 0) {
      const uint32_t passed = item / transfer.items_per_span;
      span += passed;
      item -= passed * transfer.items_per_span;
    } else {
      for (; span < transfer.num_spans; ++span) {
        const uint32_t items = count(span_of(transfer, span));
        if (item < items) {
          break;
        }
        item -= items;
      }
    }
    if (span >= transfer.num_spans) {
      return;
    }
    body(span, item);
  }
}

}  // namespace kvferry
