/* Moves one span (one layer of one plane) of many pages between two pools in host memory, and
 * makes or checks its digests on the way. Plain C over addresses: it knows no Python and no
 * framework. docs/architecture.md has the words, kvferry/kernels/digest.py the digest. */

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__) && \
    !defined(KVFERRY_NO_CLONES)
/* One binary for every processor: the loader picks the widest version it can run. */
#define KVFERRY_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KVFERRY_CLONES
#endif

#define KVFERRY_EXPORT __attribute__((visibility("default")))

static const uint64_t kPosition = 0x9E3779B97F4A7C15u;
static const uint64_t kStart = 0x243F6A8885A308D3u;
static const uint64_t kSpread = 0xC2B2AE3D27D4EB4Fu;
static const uint64_t kWeight = 0xD6E8FEB86659FD93u;

/* Where row r of a layer lies; the same arithmetic as kvferry.geometry.LayerView. Bytes. */
struct kvferry_view {
  uint8_t *base;
  int64_t row_stride;
  int64_t block_rows;
  int64_t block_stride;
  int64_t num_pieces;
  int64_t piece_size;
  int64_t piece_stride;
};

/* One span of every page. Arrays belong to the caller and have `num_pages` entries. */
struct kvferry_move {
  struct kvferry_view device;
  struct kvferry_view host;
  const int64_t *device_rows; /* [num_pages, rows_per_page] */
  const int64_t *host_slots;
  const uint64_t *seeds;
  uint64_t *digests;     /* the host pool's column for this span, indexed by slot */
  int64_t digest_stride; /* in entries */
  int64_t num_pages;
  int64_t rows_per_page;
  uint8_t *scratch; /* room for one span */
  uint8_t *good;    /* out, load: 1 where the digest matched or was not asked for */
  int32_t is_load;
  int32_t verify;
};

static inline uint64_t weigh_word(uint64_t word, uint64_t position) {
  uint64_t key = kStart + position * kPosition;
  key ^= key >> 32;
  const uint64_t keyed = word ^ (key * kSpread);
  return keyed * ((keyed >> 32) + kWeight);
}

KVFERRY_CLONES
static uint64_t weigh_words(const uint8_t *bytes, int64_t num_words) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < num_words; ++i) {
    uint64_t word;
    memcpy(&word, bytes + i * 8, 8);
    sum += weigh_word(word, (uint64_t)i);
  }
  return sum;
}

static uint64_t mix(uint64_t value) {
  value ^= value >> 33;
  value *= 0xFF51AFD7ED558CCDu;
  value ^= value >> 33;
  value *= 0xC4CEB9FE1A85EC53u;
  return value ^ (value >> 33);
}

/* `seed` is that of the span, not of the page. Never 0, which means "no digest". */
KVFERRY_EXPORT
uint64_t kvferry_digest(const uint8_t *span, int64_t num_bytes, uint64_t seed) {
  const int64_t whole = num_bytes / 8;
  uint64_t sum = weigh_words(span, whole);
  if (whole * 8 < num_bytes) {
    uint64_t word = 0;
    memcpy(&word, span + whole * 8, (size_t)(num_bytes - whole * 8));
    sum += weigh_word(word, (uint64_t)whole);
  }
  const uint64_t digest = mix(sum + seed);
  return digest ? digest : 1;
}

/* Into memory that is not read again soon: past the caches, so that the old bytes need not be
 * fetched first. What it wrote is ordered before later stores by the fence at the end. */
static void copy_away(uint8_t *to, const uint8_t *from, int64_t num_bytes) {
#if defined(__SSE2__)
  const int64_t head = (int64_t)(-(uintptr_t)to % 16);
  if (num_bytes >= 1024) {
    memcpy(to, from, (size_t)head);
    to += head, from += head, num_bytes -= head;
    for (; num_bytes >= 64; to += 64, from += 64, num_bytes -= 64) {
      for (int i = 0; i < 64; i += 16) {
        _mm_stream_si128((__m128i *)(void *)(to + i),
                         _mm_loadu_si128((const __m128i *)(const void *)(from + i)));
      }
    }
    _mm_sfence();
  }
#endif
  memcpy(to, from, (size_t)num_bytes);
}

static void copy_bytes(uint8_t *in_pool, uint8_t *in_span, int64_t num_bytes, int to_pool) {
  if (to_pool) {
    memcpy(in_pool, in_span, (size_t)num_bytes);
  } else {
    memcpy(in_span, in_pool, (size_t)num_bytes);
  }
}

/* Runs lie anywhere, so the processor cannot guess where the next one begins: it is told while the
 * one before is copied. */
static void fetch_ahead(const struct kvferry_view *view, int64_t row, int64_t num_bytes) {
#if defined(__GNUC__)
  enum { kLine = 64, kMost = 2048 };
  const uint8_t *at = view->base + (row / view->block_rows) * view->block_stride +
                      row % view->block_rows * view->row_stride;
  const int64_t end = num_bytes < kMost ? num_bytes : kMost;
  for (int64_t ahead = 0; ahead < end; ahead += kLine) {
    __builtin_prefetch(at + ahead);
  }
#endif
}

/* Between rows of a pool and a contiguous span. `rows` NULL: `num_rows` rows from `first`. */
static void copy_rows(const struct kvferry_view *view, const int64_t *rows, int64_t first,
                      int64_t num_rows, uint8_t *span, int to_pool) {
  const int64_t element = view->num_pieces * view->piece_size;
  const int joined = view->num_pieces == 1 && view->row_stride == view->piece_size;
  int64_t i = 0;
  while (i < num_rows) {
    const int64_t row = rows ? rows[i] : first + i;
    const int64_t within = row % view->block_rows;
    uint8_t *at =
        view->base + (row / view->block_rows) * view->block_stride + within * view->row_stride;
    int64_t run = 1;
    if (joined) {
      /* Neighbours in one block are one run of bytes. */
      int64_t limit = view->block_rows - within;
      if (limit > num_rows - i) {
        limit = num_rows - i;
      }
      while (run < limit && (!rows || rows[i + run] == row + run)) {
        ++run;
      }
      if (!to_pool && rows && i + run < num_rows) {
        fetch_ahead(view, rows[i + run], run * element);
      }
      copy_bytes(at, span + i * element, run * element, to_pool);
    } else {
      for (int64_t piece = 0; piece < view->num_pieces; ++piece) {
        copy_bytes(at + piece * view->piece_stride, span + i * element + piece * view->piece_size,
                   view->piece_size, to_pool);
      }
    }
    i += run;
  }
}

/* A page's span into its slot of the host pool. */
static void put_away(const struct kvferry_view *host, int64_t first, int64_t num_rows,
                     uint8_t *span) {
  if (host->num_pieces == 1 && host->row_stride == host->piece_size &&
      host->block_rows % num_rows == 0) {
    copy_away(host->base + first / host->block_rows * host->block_stride +
                  first % host->block_rows * host->row_stride,
              span, num_rows * host->piece_size);
  } else {
    copy_rows(host, 0, first, num_rows, span, 1);
  }
}

/* What the caller's structures must be like: it asks before the first call. */
KVFERRY_EXPORT
int64_t kvferry_host_abi(void) {
  enum { kVersion = 1 };
  return (int64_t)kVersion << 32 | (int64_t)sizeof(struct kvferry_move);
}

KVFERRY_EXPORT
void kvferry_move_span(const struct kvferry_move *move) {
  const struct kvferry_view *host = &move->host;
  const int64_t num_rows = move->rows_per_page;
  const int64_t num_bytes = num_rows * host->num_pieces * host->piece_size;
  /* What is digested is what is moved, to the byte: both come from the scratch buffer, which nobody
   * else can write. Over the slot itself a store by another thread could come in between. */
  uint8_t *span = move->scratch;
  for (int64_t page = 0; page < move->num_pages; ++page) {
    const int64_t slot = move->host_slots[page];
    const int64_t *rows = move->device_rows + page * num_rows;
    uint64_t *digest = move->digests + slot * move->digest_stride;
    const int64_t first = slot * num_rows;
    if (move->is_load) {
      copy_rows(host, 0, first, num_rows, span, 0);
      if (move->verify) {
        const uint64_t found = kvferry_digest(span, num_bytes, move->seeds[page]);
        move->good[page] = found == *digest;
        if (found != *digest) {
          continue;
        }
      } else {
        move->good[page] = 1;
      }
      copy_rows(&move->device, rows, 0, num_rows, span, 1);
    } else {
      *digest = 0; /* never a digest over bytes that are being replaced */
      copy_rows(&move->device, rows, 0, num_rows, span, 0);
      put_away(host, first, num_rows, span);
      if (move->verify) {
        *digest = kvferry_digest(span, num_bytes, move->seeds[page]);
      }
      move->good[page] = 1;
    }
  }
}
