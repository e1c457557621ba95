/* Puts a staged transfer into its streams: what StagedMover.launch does, in one call from Python.
 *
 * Every call of the driver here is one that transfer/movers.py makes, in its order and with its
 * arguments; tests hold the two against each other. The driver is known by the addresses of its
 * functions alone, so that neither CUDA's headers nor its library are needed to build this. */

#include "submit.h"

static int in_the_way(const struct kvferry_ring *ring, const struct kvferry_room *room,
                      uint64_t begin, uint64_t end) {
  /* Also rooms behind the point where the ring was left early: they are older than what begins at
   * its start. */
  const int wrapped = begin == ring->address && room->begin >= ring->next;
  return wrapped || (room->begin < end && begin < room->end);
}

static int take_room(struct kvferry_staged *s, uint64_t num_bytes, struct kvferry_room **taken) {
  enum { kAlignment = 512 };
  struct kvferry_ring *ring = s->ring;
  uint64_t begin = ring->next;
  if (begin + num_bytes > ring->address + ring->num_bytes) {
    begin = ring->address;
  }
  const uint64_t end = begin + (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  while (ring->num_live) {
    const struct kvferry_room *oldest = &ring->rooms[ring->oldest];
    if (ring->num_live < ring->num_rooms && !in_the_way(ring, oldest, begin, end)) {
      break;
    }
    if (s->is_load) {
      TRY(kWait, s->wait(s->copies, oldest->emptied, 0));
    } else {
      TRY(kWait, s->wait(s->lanes[0], oldest->emptied, 0));
      TRY(kWait, s->wait(s->lanes[1], oldest->emptied, 0));
    }
    /* Only now: where a wait is refused, the next must wait, too. */
    ring->oldest = (ring->oldest + 1) % ring->num_rooms;
    --ring->num_live;
  }
  struct kvferry_room *room = &ring->rooms[(ring->oldest + ring->num_live) % ring->num_rooms];
  room->begin = begin;
  room->end = end;
  ++ring->num_live;
  ring->next = end;
  *taken = room;
  return 0;
}

/* Where the registration of `address` ends; 0: it lies in none. */
static uint64_t end_of_chunk(const struct kvferry_staged *s, uint64_t address) {
  int64_t low = 0, high = s->num_chunks;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (s->chunks[middle].begin <= address) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low && address < s->chunks[low - 1].end ? s->chunks[low - 1].end : 0;
}

static int copy_rows(struct kvferry_staged *s, uint64_t host, int64_t host_pitch, uint64_t device,
                     int64_t device_pitch, int64_t width, int64_t rows) {
  struct row_copy told = {0};
  told.width = (size_t)width;
  told.rows = (size_t)rows;
  if (s->is_load) {
    told.source_kind = kOnHost;
    told.source_host = (const void *)(uintptr_t)host;
    told.source_pitch = (size_t)host_pitch;
    told.target_kind = kOnDevice;
    told.target_device = device;
    told.target_pitch = (size_t)device_pitch;
  } else {
    told.source_kind = kOnDevice;
    told.source_device = device;
    told.source_pitch = (size_t)device_pitch;
    told.target_kind = kOnHost;
    told.target_host = (void *)(uintptr_t)host;
    told.target_pitch = (size_t)host_pitch;
  }
  s->detail = 0;
  TRY(kCopyRows, s->copy_rows(&told, s->copies));
  return 0;
}

#define END_OF_CHUNK(end, address)      \
  do {                                  \
    (end) = end_of_chunk(s, (address)); \
    if (!(end)) {                       \
      s->detail = (address);            \
      s->step = kNotPinned;             \
      return -1;                        \
    }                                   \
  } while (0)

/* `cut_copy`: a strided copy in parts that stay inside one registration each. */
static int copy_inside_chunks(struct kvferry_staged *s, uint64_t host, int64_t pitch,
                              uint64_t device, int64_t device_pitch, int64_t width, int64_t rows) {
  int64_t row = 0;
  while (row < rows) {
    const uint64_t at = host + (uint64_t)(row * pitch);
    const uint64_t to = device + (uint64_t)(row * device_pitch);
    uint64_t end;
    END_OF_CHUNK(end, at);
    const int64_t room = (int64_t)(end - at);
    if (room >= width) {
      const int64_t fit = (room - width) / pitch + 1;
      const int64_t count = fit < rows - row ? fit : rows - row;
      const int failed = copy_rows(s, at, pitch, to, device_pitch, width, count);
      if (failed) {
        return failed;
      }
      row += count;
      continue;
    }
    for (int64_t offset = 0; offset < width;) {
      END_OF_CHUNK(end, at + (uint64_t)offset);
      const int64_t left = (int64_t)(end - at) - offset;
      const int64_t part = left < width - offset ? left : width - offset;
      const int failed =
          copy_rows(s, at + (uint64_t)offset, pitch, to + (uint64_t)offset, device_pitch, part, 1);
      if (failed) {
        return failed;
      }
      offset += part;
    }
    ++row;
  }
  return 0;
}

static int copy_runs(struct kvferry_staged *s, const struct kvferry_piece *piece,
                     const struct kvferry_group *group, uint64_t staging, int64_t first,
                     int64_t last) {
  const int64_t end_page = piece->first_page + piece->num_pages;
  for (int64_t at = first; at < last; ++at) {
    const struct kvferry_run *run = &s->runs[at];
    const int64_t begin = run->first_page > piece->first_page ? run->first_page : piece->first_page;
    const int64_t end =
        run->first_page + run->num_pages < end_page ? run->first_page + run->num_pages : end_page;
    const int64_t rows = end - begin;
    const int64_t slot = run->first_slot + begin - run->first_page;
    for (int64_t which = 0; which < group->num_bands; ++which) {
      const struct kvferry_band *band = &group->bands[which];
      const uint64_t host = band->address + (uint64_t)(slot * band->pitch);
      const uint64_t device = staging + (uint64_t)((begin - piece->first_page) * group->pitch) +
                              (uint64_t)band->in_staging;
      const int failed =
          copy_inside_chunks(s, host, band->pitch, device, group->pitch, band->width, rows);
      if (failed) {
        return failed;
      }
    }
  }
  return 0;
}

static int flush_parts(struct kvferry_staged *s, int64_t count) {
  uint64_t *host = s->part_sources, *device = s->part_targets;
  uint64_t *targets = s->is_load ? device : host, *sources = s->is_load ? host : device;
  int status;
  if (s->piece_failed) {
    status = ((copy_pieces_12_fn)s->copy_pieces)(targets, sources, s->part_sizes, (size_t)count,
                                                 s->piece_attributes, s->piece_first, 1,
                                                 s->piece_failed, s->copies);
  } else {
    status = ((copy_pieces_fn)s->copy_pieces)(targets, sources, s->part_sizes, (size_t)count,
                                              s->piece_attributes, s->piece_first, 1, s->copies);
  }
  s->detail = (uint64_t)count;
  TRY(kCopyPieces, status);
  return 0;
}

/* Every band of every page as a part of one call, or of a few where they are very many. */
static int copy_pages(struct kvferry_staged *s, const struct kvferry_piece *piece,
                      const struct kvferry_group *group, uint64_t staging) {
  int64_t count = 0;
  for (int64_t page = 0; page < piece->num_pages; ++page) {
    const int64_t slot = s->host_slots[piece->first_page + page];
    for (int64_t which = 0; which < group->num_bands; ++which) {
      const struct kvferry_band *band = &group->bands[which];
      const uint64_t host = band->address + (uint64_t)(slot * band->pitch);
      const uint64_t device =
          staging + (uint64_t)(page * group->pitch) + (uint64_t)band->in_staging;
      for (int64_t offset = 0; offset < band->width;) {
        uint64_t end;
        END_OF_CHUNK(end, host + (uint64_t)offset);
        const int64_t left = (int64_t)(end - host) - offset;
        const int64_t part = left < band->width - offset ? left : band->width - offset;
        if (count == s->max_parts) {
          const int failed = flush_parts(s, count);
          if (failed) {
            return failed;
          }
          count = 0;
        }
        s->part_sources[count] = host + (uint64_t)offset;
        s->part_targets[count] = device + (uint64_t)offset;
        s->part_sizes[count] = (size_t)part;
        ++count;
        offset += part;
      }
    }
  }
  return count ? flush_parts(s, count) : 0;
}

/* The first run that ends behind `page`, from run `first` on. */
static int64_t run_of(const struct kvferry_staged *s, int64_t page) {
  int64_t low = 0, high = s->num_runs;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (s->runs[middle].first_page <= page) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

static int copy_piece(struct kvferry_staged *s, const struct kvferry_piece *piece,
                      const struct kvferry_group *group, uint64_t staging) {
  const int64_t first = run_of(s, piece->first_page);
  const int64_t last = run_of(s, piece->first_page + piece->num_pages - 1) + 1;
  const int64_t num_calls = (last - first) * group->num_bands;
  const int64_t num_parts = piece->num_pages * group->num_bands;
  if (s->num_runs > 1 && s->copy_pieces && num_calls > 1 &&
      num_calls * s->parts_worth_a_call > num_parts) {
    return copy_pages(s, piece, group, staging);
  }
  return copy_runs(s, piece, group, staging, first, last);
}

static int begin_interval(struct kvferry_staged *s) {
  if (s->interval && !s->interval_begun) {
    TRY(kRecord, s->record(s->interval, s->copies));
    s->interval_begun = 1;
  }
  return 0;
}

static int launch_piece(struct kvferry_staged *s, const struct kvferry_piece *piece,
                        const struct kvferry_group *group, uint64_t staging, void *lane) {
  const struct kvferry_fields *to = &s->fields;
  const uint64_t page = (uint64_t)piece->first_page;
  for (int64_t table = 0; table < s->num_row_tables; ++table) {
    to->rows[table] = s->row_tables[table].address + page * s->row_tables[table].page_bytes;
  }
  *to->page_seeds = s->page_seeds + page * 8;
  *to->sums = s->sums + page * 8;
  *to->bad_pages = s->bad_pages + page;
  *to->first_page = (uint32_t)page;
  *to->num_pages = (uint32_t)piece->num_pages;
  *to->host_slots = 0;
  *to->host_base = staging;
  for (int64_t which = 0; which < group->num_launches; ++which) {
    const struct kvferry_launch *one = &group->launches[which];
    s->detail = (uint64_t)(uintptr_t)one;
    TRY(kLaunch, start_kernel(s->launch, one, to, piece->num_pages, lane));
  }
  return 0;
}

#define PASS(call)              \
  do {                          \
    const int failed_ = (call); \
    if (failed_) {              \
      return failed_;           \
    }                           \
  } while (0)

/* What the driver said, 0 if all of it is in the streams; `step` tells which call it was. -1 where
 * `detail` is a host address that is not pinned. */
KVFERRY_EXPORT
int kvferry_submit_staged(struct kvferry_staged *s) {
  s->num_reached = s->interval_begun = 0;
  s->step = kNothing;
  s->detail = 0;
  TRY(kRecord, s->record(s->begun, s->lanes[0]));
  TRY(kWait, s->wait(s->lanes[1], s->begun, 0));
  void *before = NULL; /* where the piece before is, in the other lane */
  for (int64_t number = 0; number < s->num_pieces; ++number) {
    const struct kvferry_piece *piece = &s->pieces[number];
    const struct kvferry_group *group = &s->groups[piece->group];
    void *lane = s->lanes[number % 2];
    struct kvferry_room *room;
    PASS(take_room(s, (uint64_t)(piece->num_pages * group->pitch), &room));
    if (s->is_load) {
      PASS(begin_interval(s));
      PASS(copy_piece(s, piece, group, room->begin));
      TRY(kRecord, s->record(room->filled, s->copies));
      TRY(kWait, s->wait(lane, room->filled, 0));
      PASS(launch_piece(s, piece, group, room->begin, lane));
      TRY(kRecord, s->record(room->emptied, lane));
    } else {
      PASS(launch_piece(s, piece, group, room->begin, lane));
      TRY(kRecord, s->record(room->filled, lane));
      TRY(kWait, s->wait(s->copies, room->filled, 0));
      PASS(begin_interval(s));
      PASS(copy_piece(s, piece, group, room->begin));
      TRY(kRecord, s->record(room->emptied, s->copies));
    }
    if (piece->ends_group) {
      /* Of this group, or of layers before it: bytes are there layer after layer, and where the
       * last are there, all are. */
      if (before) {
        TRY(kWait, s->wait(lane, before, 0));
      }
      TRY(kRecord, s->record(s->reached[piece->group], lane));
      s->num_reached = piece->group + 1;
    }
    before = s->is_load ? room->emptied : room->filled;
  }
  if (before) {
    TRY(kWait, s->wait(s->lanes[0], before, 0));
  } else { /* there are no pages, and what is over in either stream is over */
    TRY(kWait, s->wait(s->copies, s->begun, 0));
  }
  return 0;
}

KVFERRY_EXPORT
int64_t kvferry_staged_abi(void) {
  enum { kVersion = 1 };
  return (int64_t)kVersion << 32 | (int64_t)sizeof(struct kvferry_staged);
}
