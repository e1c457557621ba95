/* Random moves through kvferry_move_span, compiled with sanitizers by test_host_move.py. Every
 * buffer is exactly as long as its view reaches, so that one byte too far is caught, and whatever
 * lies between elements must keep its canary. Prints the number of cases. */

#include <stdio.h>
#include <stdlib.h>

#include "../../src/kvferry/kernels/csrc/host_move.c"

enum { kCanary = 0xA5 };

static uint64_t state = 88172645463325252u;

static int64_t draw(int64_t low, int64_t high) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return low + (int64_t)(state % (uint64_t)(high - low + 1));
}

static void check(int holds, const char *what, int64_t at) {
  if (!holds) {
    fprintf(stderr, "%s at %lld\n", what, (long long)at);
    exit(1);
  }
}

struct pool {
  struct kvferry_view view;
  int64_t num_rows;
  int64_t num_bytes;
  uint8_t *memory;
};

static int64_t offset_of(const struct kvferry_view *view, int64_t row, int64_t byte) {
  return row / view->block_rows * view->block_stride + row % view->block_rows * view->row_stride +
         byte / view->piece_size * view->piece_stride + byte % view->piece_size;
}

static struct pool make_pool(int64_t num_blocks, int64_t block_rows, int64_t element, int plain) {
  struct pool pool;
  int64_t pieces = 1;
  if (!plain && draw(0, 2) == 0) {
    for (pieces = draw(2, 4); element % pieces; --pieces) {
    }
  }
  struct kvferry_view *view = &pool.view;
  view->num_pieces = pieces;
  view->piece_size = element / pieces;
  view->piece_stride = view->piece_size + (plain ? 0 : draw(0, 1) * draw(0, 9));
  const int64_t extent = (pieces - 1) * view->piece_stride + view->piece_size;
  view->row_stride = extent + (plain ? 0 : draw(0, 1) * draw(0, 20));
  view->block_rows = block_rows;
  view->block_stride = (block_rows - 1) * view->row_stride + extent + draw(0, 1) * draw(0, 33);
  pool.num_rows = num_blocks * block_rows;
  pool.num_bytes =
      (num_blocks - 1) * view->block_stride + (block_rows - 1) * view->row_stride + extent;
  pool.memory = malloc((size_t)pool.num_bytes);
  memset(pool.memory, kCanary, (size_t)pool.num_bytes);
  view->base = pool.memory;
  return pool;
}

static void fill(struct pool *pool, int64_t element) {
  for (int64_t row = 0; row < pool->num_rows; ++row) {
    for (int64_t byte = 0; byte < element; ++byte) {
      pool->memory[offset_of(&pool->view, row, byte)] = (uint8_t)draw(0, 255);
    }
  }
}

/* `count` different numbers below `limit`, sometimes in runs. */
static void choose(int64_t *chosen, int64_t count, int64_t limit) {
  int64_t *all = malloc((size_t)limit * sizeof *all);
  for (int64_t i = 0; i < limit; ++i) {
    all[i] = i;
  }
  const int64_t run = draw(0, 1) ? 1 : draw(1, 8);
  for (int64_t i = 0; i + run <= limit; i += run) {
    const int64_t j = draw(0, (limit - i) / run - 1) * run + i;
    for (int64_t k = 0; k < run; ++k) {
      const int64_t kept = all[i + k];
      all[i + k] = all[j + k];
      all[j + k] = kept;
    }
  }
  memcpy(chosen, all, (size_t)count * sizeof *all);
  free(all);
}

static void one_case(void) {
  const int64_t element = draw(0, 3) ? draw(1, 40) : draw(1, 700);
  const int64_t per_page = draw(1, 9);
  const int64_t num_slots = draw(1, 6);
  const int64_t num_pages = draw(0, num_slots);
  const int ours = (int)draw(0, 1);
  struct pool host =
      make_pool(ours ? num_slots : 1, ours ? per_page : num_slots * per_page, element, ours);
  const int64_t block_rows = draw(1, 12);
  const int64_t num_blocks = (num_pages * per_page) / block_rows + draw(1, 3);
  struct pool device = make_pool(num_blocks, block_rows, element, (int)draw(0, 1));
  fill(&device, element);
  uint8_t *before = malloc((size_t)device.num_bytes);
  memcpy(before, device.memory, (size_t)device.num_bytes);

  int64_t *rows = malloc((size_t)(num_pages * per_page) * sizeof *rows + 1);
  int64_t *slots = malloc((size_t)num_pages * sizeof *slots + 1);
  choose(rows, num_pages * per_page, device.num_rows);
  choose(slots, num_pages, num_slots);
  uint64_t *seeds = malloc((size_t)num_pages * sizeof *seeds + 1);
  for (int64_t page = 0; page < num_pages; ++page) {
    seeds[page] = (uint64_t)draw(0, INT64_MAX - 1);
  }
  uint64_t *digests = calloc((size_t)num_slots * 3, sizeof *digests);
  uint8_t *good = malloc((size_t)num_pages + 1);
  uint8_t *scratch = malloc((size_t)(per_page * element));
  struct kvferry_move move = {
      .device = device.view,
      .host = host.view,
      .device_rows = rows,
      .host_slots = slots,
      .seeds = seeds,
      .digests = digests + 1,
      .digest_stride = 3,
      .num_pages = num_pages,
      .rows_per_page = per_page,
      .scratch = scratch,
      .good = good,
      .is_load = 0,
      .verify = 1,
  };
  kvferry_move_span(&move);
  check(memcmp(before, device.memory, (size_t)device.num_bytes) == 0, "store wrote the device", 0);

  /* The host holds exactly the chosen rows, and canaries elsewhere. */
  uint8_t *expected = malloc((size_t)host.num_bytes);
  memset(expected, kCanary, (size_t)host.num_bytes);
  for (int64_t i = 0; i < num_pages * per_page; ++i) {
    for (int64_t byte = 0; byte < element; ++byte) {
      expected[offset_of(&host.view, slots[i / per_page] * per_page + i % per_page, byte)] =
          device.memory[offset_of(&device.view, rows[i], byte)];
    }
  }
  for (int64_t byte = 0; byte < host.num_bytes; ++byte) {
    check(host.memory[byte] == expected[byte], "host byte", byte);
  }
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    check(digests[slot * 3] == 0 && digests[slot * 3 + 2] == 0, "a neighbour's digest", slot);
  }

  /* Back into poisoned rows; one page may be damaged and must then be left alone. */
  const int64_t damaged = num_pages && draw(0, 1) ? draw(0, num_pages - 1) : -1;
  if (damaged >= 0) {
    host.memory[offset_of(&host.view, slots[damaged] * per_page + draw(0, per_page - 1),
                          draw(0, element - 1))] ^= (uint8_t)(1 << draw(0, 7));
  }
  for (int64_t i = 0; i < num_pages * per_page; ++i) {
    for (int64_t byte = 0; byte < element; ++byte) {
      const int64_t at = offset_of(&device.view, rows[i], byte);
      device.memory[at] = kCanary;
      if (i / per_page == damaged) {
        before[at] = kCanary;
      }
    }
  }
  move.is_load = 1;
  kvferry_move_span(&move);
  for (int64_t page = 0; page < num_pages; ++page) {
    check(good[page] == (page != damaged), "verdict on page", page);
  }
  for (int64_t byte = 0; byte < device.num_bytes; ++byte) {
    check(device.memory[byte] == before[byte], "device byte", byte);
  }
  free(expected), free(scratch), free(good), free(digests), free(seeds), free(slots), free(rows);
  free(before), free(device.memory), free(host.memory);
}

int main(void) {
  enum { kCases = 4000 };
  for (int i = 0; i < kCases; ++i) {
    one_case();
  }
  printf("%d cases\n", kCases);
  return 0;
}
