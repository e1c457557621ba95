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

// As many workers as divide nothing: each must find its share.
constexpr uint32_t kWorkers = 7;

template <typename Count, typename Body>
void share_out_all(const Transfer &transfer, Count count, Body body) {
  for (uint32_t worker = 0; worker < kWorkers; ++worker) {
    share_out(transfer, worker, kWorkers, count, body);
  }
}

template <typename Package>
void flat_chunk(const Transfer &transfer, uint32_t index, uint32_t chunk) {
  each_lane(chunk, [&](uint32_t lane) {
    const Span &span = span_of(transfer, index);
    const LaneSums found = flat_lane<Package>(transfer, span, chunk, lane);
    for (uint32_t i = 0; i < kFlatDepth; ++i) {
      if (transfer.verify != 0 && found.sums[i] != 0) {
        atomic_add(sum_address(transfer, index, found.pages[i]), found.sums[i]);
      }
    }
  });
}

inline void flat(const Transfer &transfer) {
  share_out_all(
      transfer, [&](const Span &span) { return flat_chunks(transfer, span); },
      [&](uint32_t index, uint32_t chunk) {
        if (span_of(transfer, index).flat_package == 16) {
          flat_chunk<Package16>(transfer, index, chunk);
        } else {
          flat_chunk<Package8>(transfer, index, chunk);
        }
      });
}

inline void realign(const Transfer &transfer, bool digest_only) {
  // Exactly as long as a kernel's, with something else than zeros in it.
  unsigned char *room = static_cast<unsigned char *>(malloc(kTileRoom));
  memset(room, 0xC3, kTileRoom);
  const bool from_host = transfer.is_load != 0 && !digest_only;
  share_out_all(
      transfer, [&](const Span &span) { return tiles_of(span) * transfer.num_pages; },
      [&](uint32_t index, uint32_t number) {
        const Span &span = span_of(transfer, index);
        const uint32_t page = number / tiles_of(span);
        const Tile tile = make_tile(transfer, span, index, page, number % tiles_of(span));
        bool whole = true;
        each_lane(number, [&](uint32_t lane) {
          whole = read_tile(transfer, span, tile, from_host, room, lane) && whole;
        });
        if (!digest_only) {
          each_lane(number, [&](uint32_t lane) {
            write_tile(transfer, span, tile, !from_host, whole, room, lane);
          });
        }
        if (transfer.verify != 0) {
          each_lane(number, [&](uint32_t lane) {
            atomic_add(sum_address(transfer, index, page), weigh_tile(tile, room, lane));
          });
        }
      });
  free(room);
}

inline void grouped(const Transfer &transfer, uint32_t threads, uint32_t package,
                    uint32_t per_thread) {
  share_out_all(
      transfer, [&](const Span &span) { return span.rows_per_page * transfer.num_pages; },
      [&](uint32_t index, uint32_t number) {
        const Span &span = span_of(transfer, index);
        for (uint32_t thread = 0; thread < threads; ++thread) {
          if (package == 16) {
            grouped_element<Package16>(transfer, span, number, thread, threads, per_thread);
          } else if (package == 8) {
            grouped_element<Package8>(transfer, span, number, thread, threads, per_thread);
          } else {
            grouped_element<Package4>(transfer, span, number, thread, threads, per_thread);
          }
        }
      });
}

inline void finish(const Transfer &transfer) {
  for (uint32_t i = 0; i < transfer.num_spans * transfer.num_pages; ++i) {
    finish_page(transfer, i / transfer.num_pages, i % transfer.num_pages);
  }
}

}  // namespace lanes
