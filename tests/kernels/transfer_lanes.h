// The transfer kernels without a GPU: every warp's lanes one after another, with a phase ended for
// all of them where the kernel has a barrier.
#pragma once

#include <stdlib.h>
#include <string.h>

#include "flat.cuh"
#include "grouped.cuh"
#include "realign.cuh"

namespace lanes {

using namespace kvferry;

// Lanes must not depend on each other inside a phase, so their order must not matter.
template <typename Body>
void each_lane(uint32_t turn, Body body) {
  for (uint32_t i = 0; i < 32; ++i) {
    body(turn % 2 == 0 ? i : 31 - i);
  }
}

template <typename Package>
void flat_span(const Transfer &transfer, uint32_t index) {
  const Span &span = span_of(transfer, index);
  const uint32_t num_units = span.page_units.divisor * transfer.num_pages;
  for (uint32_t chunk = 0; chunk * kFlatChunk < num_units; ++chunk) {
    each_lane(chunk, [&](uint32_t lane) {
      const LaneSum sum = flat_lane<Package>(transfer, index, span, chunk, lane);
      if (transfer.verify != 0 && sum.sum != 0) {
        atomic_add(sum_address(transfer, index, sum.page), sum.sum);
      }
    });
  }
}

inline void flat(const Transfer &transfer) {
  for (uint32_t i = 0; i < transfer.num_spans; ++i) {
    if (span_of(transfer, i).flat_package == 16) {
      flat_span<Package16>(transfer, i);
    } else {
      flat_span<Package8>(transfer, i);
    }
  }
}

inline void realign(const Transfer &transfer, bool digest_only) {
  // Exactly as long as a kernel's, with something else than zeros in it.
  unsigned char *room = static_cast<unsigned char *>(malloc(kTileRoom));
  memset(room, 0xC3, kTileRoom);
  const bool from_host = transfer.is_load != 0 && !digest_only;
  for (uint32_t i = 0; i < transfer.num_spans; ++i) {
    const Span &span = span_of(transfer, i);
    for (uint32_t page = 0; page < transfer.num_pages; ++page) {
      for (uint32_t number = 0; number < tiles_of(span); ++number) {
        const Tile tile = make_tile(transfer, span, i, page, number);
        const uint32_t turn = page + number;
        bool whole = true;
        each_lane(turn, [&](uint32_t lane) {
          whole = read_tile(transfer, span, tile, from_host, room, lane) && whole;
        });
        if (!digest_only && (whole || from_host)) {
          each_lane(turn, [&](uint32_t lane) {
            write_tile(transfer, span, tile, !from_host, room, lane);
          });
        } else if (!digest_only) {
          each_lane(turn,
                    [&](uint32_t lane) { write_torn_tile(transfer, span, tile, room, lane); });
        }
        if (transfer.verify != 0) {
          each_lane(turn, [&](uint32_t lane) {
            atomic_add(sum_address(transfer, i, page), weigh_tile(tile, room, lane));
          });
        }
      }
    }
  }
  free(room);
}

template <typename Package>
void grouped_span(const Transfer &transfer, uint32_t index, uint32_t threads, uint32_t per_thread) {
  const Span &span = span_of(transfer, index);
  for (uint64_t number = 0; number < uint64_t{span.rows_per_page} * transfer.num_pages; ++number) {
    for (uint32_t thread = 0; thread < threads; ++thread) {
      grouped_element<Package>(transfer, span, number, thread, threads, per_thread);
    }
  }
}

inline void grouped(const Transfer &transfer, uint32_t threads, uint32_t package,
                    uint32_t per_thread) {
  for (uint32_t i = 0; i < transfer.num_spans; ++i) {
    if (package == 16) {
      grouped_span<Package16>(transfer, i, threads, per_thread);
    } else if (package == 8) {
      grouped_span<Package8>(transfer, i, threads, per_thread);
    } else {
      grouped_span<Package4>(transfer, i, threads, per_thread);
    }
  }
}

inline void finish(const Transfer &transfer) {
  for (uint32_t i = 0; i < transfer.num_spans * transfer.num_pages; ++i) {
    finish_page(transfer, i / transfer.num_pages, i % transfer.num_pages);
  }
}

}  // namespace lanes
