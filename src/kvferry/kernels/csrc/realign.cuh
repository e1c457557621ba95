// realign: any size and any alignment, exactly. A warp takes a tile of a span, reads one side's
// runs in aligned 16-byte granules into shared memory, weighs the words there, and writes the other
// side's runs in aligned 16-byte granules out of it. Only the ends of a run move in narrower steps,
// and never a byte outside it is read or written.
//
// Each phase is a function of one lane without a barrier; the warp meets between phases.
#pragma once

#include "digest.cuh"
#include "transfer.cuh"

namespace kvferry {

#if !defined(KVFERRY_TILE_BYTES)
#define KVFERRY_TILE_BYTES 2048
#endif
constexpr uint32_t kTileBytes = KVFERRY_TILE_BYTES;
constexpr uint32_t kGranule = 16;
// Room to put the tile so that its granules align with those of one side, and for the word that a
// funnel reads past the end.
constexpr uint32_t kTileRoom = kTileBytes + 2 * kGranule;
constexpr uint32_t kLanes = 32;

struct Tile {
  uint32_t span_index;
  uint32_t page;
  uint32_t begin;  // bytes of the span
  uint32_t end;
  uint32_t shift;  // where the tile begins in its room, 0 to 15
};

KVFERRY_HD __forceinline__ uint32_t tiles_of(const Span &span) {
  return static_cast<uint32_t>((span.num_bytes + kTileBytes - 1) / kTileBytes);
}

KVFERRY_HD __forceinline__ const View &side_of(const Span &span, bool host) {
  return host ? span.host : span.device;
}

// The address of byte `offset` of the tile's span on one side; 0 where its device row is none.
KVFERRY_HD __forceinline__ uint64_t side_address(const Transfer &transfer, const Span &span,
                                                 const Tile &tile, uint32_t offset, bool host) {
  const uint32_t row = divide(offset, span.element);
  const int64_t within = offset - row * span.element.divisor;
  if (host) {
    return host_address(transfer, span, tile.page, row, within);
  }
  const int64_t at = device_row(transfer, span, tile.page, row);
  if (static_cast<uint64_t>(at) >= static_cast<uint64_t>(span.device.num_rows)) {
    note_fault(transfer, span, tile.page, row);
    return 0;
  }
  return address_of(span.device, at, within);
}

KVFERRY_HD __forceinline__ Tile make_tile(const Transfer &transfer, const Span &span,
                                          uint32_t span_index, uint32_t page, uint32_t number) {
  Tile tile;
  tile.span_index = span_index;
  tile.page = page;
  tile.begin = number * kTileBytes;
  const uint32_t end = tile.begin + kTileBytes;
  tile.end = end < span.num_bytes ? end : static_cast<uint32_t>(span.num_bytes);
  // Granules align with the side that has the longer runs: there they are worth most.
  const bool host = span.host.run_bytes >= span.device.run_bytes;
  const uint64_t address = side_address(transfer, span, tile, tile.begin, host);
  tile.shift = static_cast<uint32_t>(address % kGranule);
  return tile;
}

// The part of one run inside the tile that lies in one aligned granule of memory.
struct Granule {
  uint64_t address;
  uint32_t in_tile;  // bytes from the tile's begin
  uint32_t size;     // 0 where there is none
  bool in_range;     // whether the run's device row exists
};

// Granules a lane may find in a run, for numbering: one more than fit, as both ends may be cut.
KVFERRY_HD __forceinline__ uint32_t granules_of(const View &view) {
  const int64_t run = view.run_bytes < kTileBytes ? view.run_bytes : kTileBytes;
  return static_cast<uint32_t>((run + kGranule - 2) / kGranule) + 1;
}

KVFERRY_HD __forceinline__ uint32_t runs_in(const Tile &tile, const View &view) {
  const uint32_t run = static_cast<uint32_t>(view.run_bytes);
  return (tile.end - 1) / run - tile.begin / run + 1;
}

KVFERRY_HD __forceinline__ Granule granule_of(const Transfer &transfer, const Span &span,
                                              const Tile &tile, bool host, uint32_t number) {
  const View &view = side_of(span, host);
  const uint32_t per_run = granules_of(view);
  const uint32_t run = static_cast<uint32_t>(view.run_bytes);
  const uint32_t which = tile.begin / run + number / per_run;
  uint32_t begin = which * run;
  uint32_t end = begin + run;
  begin = begin < tile.begin ? tile.begin : begin;
  end = end > tile.end ? tile.end : end;
  Granule granule = {0, 0, 0, true};
  const uint64_t address = side_address(transfer, span, tile, begin, host);
  if (address == 0) {
    granule.in_range = false;
    return granule;
  }
  const uint64_t first = address / kGranule * kGranule + number % per_run * kGranule;
  const uint64_t low = first < address ? address : first;
  const uint64_t limit = address + (end - begin);
  const uint64_t high = first + kGranule < limit ? first + kGranule : limit;
  if (low < high) {
    granule.address = low;
    granule.in_tile = static_cast<uint32_t>(low - address) + begin - tile.begin;
    granule.size = static_cast<uint32_t>(high - low);
  }
  return granule;
}

// The widest step from `address` that is aligned and no longer than `size`.
KVFERRY_HD __forceinline__ uint32_t step_at(uint64_t address, uint32_t size) {
  const uint32_t low = static_cast<uint32_t>(address) & 7u;
  uint32_t step = low == 0 ? 8u : low & (~low + 1u);
  while (step > size) {
    step /= 2;
  }
  return step;
}

KVFERRY_HD __forceinline__ uint64_t read_step(const void *at, uint32_t step) {
  switch (step) {
    case 8:
      return *static_cast<const uint64_t *>(at);
    case 4:
      return *static_cast<const uint32_t *>(at);
    case 2:
      return *static_cast<const unsigned short *>(at);
    default:
      return *static_cast<const unsigned char *>(at);
  }
}

KVFERRY_HD __forceinline__ void write_step(void *at, uint32_t step, uint64_t value) {
  switch (step) {
    case 8:
      *static_cast<uint64_t *>(at) = value;
      break;
    case 4:
      *static_cast<uint32_t *>(at) = static_cast<uint32_t>(value);
      break;
    case 2:
      *static_cast<unsigned short *>(at) = static_cast<unsigned short>(value);
      break;
    default:
      *static_cast<unsigned char *>(at) = static_cast<unsigned char>(value);
      break;
  }
}

// 32 bits from any byte of a tile's room, whose start is aligned.
KVFERRY_HD __forceinline__ uint32_t read_word(const unsigned char *room, uint32_t at) {
  const uint32_t *words = reinterpret_cast<const uint32_t *>(room);
  const uint32_t low = words[at / 4];
  return at % 4 == 0 ? low : funnel(low, words[at / 4 + 1], at % 4 * 8);
}

// 1 to 8 bytes from any byte of a tile's room; bytes past `count` are 0.
KVFERRY_HD __forceinline__ uint64_t read_bytes(const unsigned char *room, uint32_t at,
                                               uint32_t count) {
  uint64_t value = read_word(room, at);
  if (count > 4) {
    value |= static_cast<uint64_t>(read_word(room, at + 4)) << 32;
  }
  return count < 8 ? value & ((uint64_t{1} << count * 8) - 1) : value;
}

KVFERRY_HD __forceinline__ void put_package(unsigned char *room, uint32_t at,
                                            const Package16 &package) {
  if (at % 16 == 0) {
    *reinterpret_cast<Package16 *>(room + at) = package;
  } else if (at % 4 == 0) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      *reinterpret_cast<uint32_t *>(room + at + i * 4) = package.words[i];
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
      room[at + i] = static_cast<unsigned char>(package.words[i / 4] >> i % 4 * 8);
    }
  }
}

KVFERRY_HD __forceinline__ Package16 take_package(const unsigned char *room, uint32_t at) {
  if (at % 16 == 0) {
    return *reinterpret_cast<const Package16 *>(room + at);
  }
  Package16 package;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    package.words[i] = read_word(room, at + i * 4);
  }
  return package;
}

// Loads that a lane has on the way before it writes the first to shared memory.
constexpr uint32_t kTileDepth = 4;

// Phase 1: the source side's granules into the room; whether all of this lane's were there.
KVFERRY_HD __forceinline__ bool read_tile(const Transfer &transfer, const Span &span,
                                          const Tile &tile, bool from_host, unsigned char *room,
                                          uint32_t lane) {
  const View &view = side_of(span, from_host);
  const uint32_t count = runs_in(tile, view) * granules_of(view);
  bool whole = true;
  for (uint32_t first = lane; first < count; first += kLanes * kTileDepth) {
    Granule granules[kTileDepth];
    Package16 packages[kTileDepth];
#pragma unroll
    for (uint32_t i = 0; i < kTileDepth; ++i) {
      const uint32_t number = first + i * kLanes;
      granules[i] = {0, 0, 0, true};
      if (number < count) {
        granules[i] = granule_of(transfer, span, tile, from_host, number);
        whole = whole && granules[i].in_range;
        if (granules[i].size == kGranule) {
          packages[i] = load_once16(granules[i].address);
        }
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kTileDepth; ++i) {
      const Granule &granule = granules[i];
      const uint32_t at = tile.shift + granule.in_tile;
      if (granule.size == kGranule) {
        put_package(room, at, packages[i]);
        continue;
      }
      for (uint32_t done = 0; done < granule.size;) {
        const uint64_t address = granule.address + done;
        const uint32_t step = step_at(address, granule.size - done);
        const uint64_t value = read_step(reinterpret_cast<const void *>(address), step);
        for (uint32_t byte = 0; byte < step; ++byte) {
          room[at + done + byte] = static_cast<unsigned char>(value >> byte * 8);
        }
        done += step;
      }
    }
  }
  return whole;
}

// Phase 2: the weights of this lane's words of the tile.
KVFERRY_HD __forceinline__ uint64_t weigh_tile(const Tile &tile, const unsigned char *room,
                                               uint32_t lane) {
  uint64_t sum = 0;
  const uint32_t size = tile.end - tile.begin;
  for (uint32_t word = lane; word * 8 < size; word += kLanes) {
    const uint32_t left = size - word * 8;
    const uint64_t value = read_bytes(room, tile.shift + word * 8, left < 8 ? left : 8);
    sum += weigh_word(value, tile.begin / 8 + word);
  }
  return sum;
}

// A store's tile that lacks device rows: byte by byte, so that what has no source stays as it is,
// whatever the host's granules hold of it. Else they would get what the room held before. In
// staging, all of which crosses the link, it is zeros instead of what another transfer has left.
KVFERRY_HD __forceinline__ void write_torn_tile(const Transfer &transfer, const Span &span,
                                                const Tile &tile, const unsigned char *room,
                                                uint32_t lane) {
  for (uint32_t at = tile.begin + lane; at < tile.end; at += kLanes) {
    const bool there = side_address(transfer, span, tile, at, false) != 0;
    if (there || transfer.host_base != 0) {
      const uint64_t address = side_address(transfer, span, tile, at, true);
      *reinterpret_cast<unsigned char *>(address) =
          there ? room[tile.shift + at - tile.begin] : static_cast<unsigned char>(0);
    }
  }
}

// Phase 3: out of the room into the destination side's granules. `whole`: what phase 1 said, of all
// lanes.
KVFERRY_HD __forceinline__ void write_tile(const Transfer &transfer, const Span &span,
                                           const Tile &tile, bool to_host, bool whole,
                                           const unsigned char *room, uint32_t lane) {
  if (!whole && to_host) {
    write_torn_tile(transfer, span, tile, room, lane);
    return;
  }
  const View &view = side_of(span, to_host);
  const uint32_t count = runs_in(tile, view) * granules_of(view);
  for (uint32_t number = lane; number < count; number += kLanes) {
    const Granule granule = granule_of(transfer, span, tile, to_host, number);
    const uint32_t at = tile.shift + granule.in_tile;
    if (granule.size == kGranule) {
      store_once16(granule.address, take_package(room, at));
      continue;
    }
    for (uint32_t done = 0; done < granule.size;) {
      const uint64_t address = granule.address + done;
      const uint32_t step = step_at(address, granule.size - done);
      write_step(reinterpret_cast<void *>(address), step, read_bytes(room, at + done, step));
      done += step;
    }
  }
}

#if defined(__CUDACC__)

// `number` counts the tiles of all pages of a span.
__device__ __forceinline__ void realign_tile(const Transfer &transfer, uint32_t span_index,
                                             uint32_t number, unsigned char *room, uint32_t lane,
                                             bool digest_only) {
  const Span &span = span_of(transfer, span_index);
  const uint32_t per_page = tiles_of(span);
  const uint32_t page = number / per_page;
  const bool from_host = transfer.is_load != 0 && !digest_only;
  const Tile tile = make_tile(transfer, span, span_index, page, number - page * per_page);
  const bool whole = warp_all(read_tile(transfer, span, tile, from_host, room, lane));
  warp_barrier();
  if (!digest_only) {
    write_tile(transfer, span, tile, !from_host, whole, room, lane);
  }
  if (transfer.verify != 0) {
    const uint64_t sum = warp_sum(weigh_tile(tile, room, lane));
    if (lane == 0) {
      atomic_add(sum_address(transfer, span_index, page), sum);
    }
  }
  warp_barrier();
}

#endif

}  // namespace kvferry
