/* What staged_submit.c and direct_submit.c are handed; their twin in Python is
 * kvferry/kernels/submit_call.py. */

#ifndef KVFERRY_SUBMIT_H_
#define KVFERRY_SUBMIT_H_

#include <stddef.h>
#include <stdint.h>

typedef int (*launch_fn)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z,
                         unsigned shared_bytes, void *stream, void **parameters, void **extra);
typedef int (*record_fn)(void *event, void *stream);
typedef int (*wait_fn)(void *stream, void *event, unsigned flags);
/* CUDA_MEMCPY2D, version 2 */
struct row_copy {
  size_t source_x, source_y;
  int source_kind;
  const void *source_host;
  uint64_t source_device;
  void *source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  int target_kind;
  void *target_host;
  uint64_t target_device;
  void *target_array;
  size_t target_pitch;
  size_t width, rows;
};
enum { kOnHost = 1, kOnDevice = 2 };
typedef int (*copy_rows_fn)(const struct row_copy *told, void *stream);
/* cuMemcpyBatchAsync of 13.0 and of 12.8 */
typedef int (*copy_pieces_fn)(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count,
                              void *attributes, size_t *first, size_t num_attributes, void *stream);
typedef int (*copy_pieces_12_fn)(uint64_t *targets, uint64_t *sources, size_t *sizes, size_t count,
                                 void *attributes, size_t *first, size_t num_attributes,
                                 size_t *failed, void *stream);

struct kvferry_piece {
  int64_t group, first_page, num_pages, ends_group;
};
struct kvferry_band {
  uint64_t address;
  int64_t pitch, width, in_staging;
};
struct kvferry_launch {
  void *function;
  void **parameters;
  int64_t blocks, threads, shared_bytes;
  int64_t first_span, num_spans;
  int64_t page_work, depth; /* `share_out`: page_work · pages / depth, rounded up */
};
struct kvferry_group {
  int64_t pitch;
  const struct kvferry_band *bands;
  int64_t num_bands;
  const struct kvferry_launch *launches;
  int64_t num_launches;
};
struct kvferry_run {
  int64_t first_page, first_slot, num_pages;
};
struct kvferry_chunk {
  uint64_t begin, end;
};
struct kvferry_row_table {
  uint64_t address, page_bytes;
};

/* `StagingRing`. Room i of the array is used in turn, with its two events. */
struct kvferry_room {
  uint64_t begin, end;
  void *filled, *emptied;
};
struct kvferry_ring {
  uint64_t address, num_bytes, next;
  struct kvferry_room *rooms;
  int64_t num_rooms, oldest, num_live;
};

/* Where the fields of the `Transfer` that all kernels take lie: see transfer.cuh. */
struct kvferry_fields {
  uint64_t *rows, *host_slots, *host_base, *page_seeds, *sums, *bad_pages;
  uint32_t *num_pages, *first_page, *first_span, *num_spans, *items_per_span;
};

/* The kernels of some model layers that are complete together. */
struct kvferry_launches {
  const struct kvferry_launch *launches;
  int64_t num_launches;
};

enum kvferry_step { kNothing, kLaunch, kRecord, kWait, kCopyRows, kCopyPieces, kNotPinned };

struct kvferry_staged {
  launch_fn launch;
  record_fn record;
  wait_fn wait;
  copy_rows_fn copy_rows;
  void *copy_pieces; /* NULL: the driver has none */
  void *piece_attributes;
  size_t *piece_first, *piece_failed; /* `piece_failed` NULL: the call of 13.0 */
  void *lanes[2], *copies;
  void *begun; /* the event where lane 0 was before the first piece */

  const struct kvferry_piece *pieces;
  int64_t num_pieces;
  const struct kvferry_group *groups;
  const struct kvferry_run *runs;
  int64_t num_runs;
  const int64_t *host_slots;
  const struct kvferry_chunk *chunks; /* by address */
  int64_t num_chunks;
  int64_t is_load, parts_worth_a_call;

  struct kvferry_fields fields;
  const struct kvferry_row_table *row_tables;
  int64_t num_row_tables;
  uint64_t page_seeds, sums, bad_pages;

  struct kvferry_ring *ring;
  void *const *reached; /* an event of each group */
  void *interval;       /* to be recorded before the first copy, or NULL */
  uint64_t *part_targets, *part_sources;
  size_t *part_sizes;
  int64_t max_parts;

  /* out */
  int64_t num_reached, interval_begun;
  int64_t step; /* what failed: `kvferry_step` */
  uint64_t detail;
};

struct kvferry_direct {
  launch_fn launch;
  record_fn record;
  void *stream;
  const struct kvferry_launches *steps;
  int64_t num_steps, num_pages;
  struct kvferry_fields fields;
  void *const *reached; /* an event of each step */

  /* out */
  int64_t num_reached;
  int64_t step; /* what failed: `kvferry_step` */
  uint64_t detail;
};

#define KVFERRY_EXPORT __attribute__((visibility("default")))

/* Ends the function with what the driver said, if that is not 0. */
#define TRY(kind, call)         \
  do {                          \
    const int status_ = (call); \
    if (status_) {              \
      s->step = (kind);         \
      return status_;           \
    }                           \
  } while (0)

/* Starts one kernel for `num_pages` pages, which `fields` are filled in for but for the spans. */
static inline int start_kernel(launch_fn launch, const struct kvferry_launch *one,
                               const struct kvferry_fields *fields, int64_t num_pages,
                               void *stream) {
  *fields->first_span = (uint32_t)one->first_span;
  *fields->num_spans = (uint32_t)one->num_spans;
  *fields->items_per_span = (uint32_t)((one->page_work * num_pages + one->depth - 1) / one->depth);
  return launch(one->function, (unsigned)one->blocks, 1, 1, (unsigned)one->threads, 1, 1,
                (unsigned)one->shared_bytes, stream, one->parameters, NULL);
}

#endif /* KVFERRY_SUBMIT_H_ */
