/* Puts a direct transfer into its stream: what DirectMover.launch does, in one call from Python.
 * See staged_submit.c for how the two are kept alike. */

#include "submit.h"

/* What the driver said, 0 if all of it is in the stream; `step` tells which call it was. */
KVFERRY_EXPORT
int kvferry_submit_direct(struct kvferry_direct *s) {
  s->num_reached = 0;
  s->step = kNothing;
  s->detail = 0;
  for (int64_t number = 0; number < s->num_steps; ++number) {
    const struct kvferry_launches *step = &s->steps[number];
    for (int64_t which = 0; s->num_pages && which < step->num_launches; ++which) {
      const struct kvferry_launch *one = &step->launches[which];
      s->detail = (uint64_t)(uintptr_t)one;
      TRY(kLaunch, start_kernel(s->launch, one, &s->fields, s->num_pages, s->stream));
    }
    TRY(kRecord, s->record(s->reached[number], s->stream));
    s->num_reached = number + 1;
  }
  return 0;
}

KVFERRY_EXPORT
int64_t kvferry_direct_abi(void) {
  enum { kVersion = 1 };
  return (int64_t)kVersion << 32 | (int64_t)sizeof(struct kvferry_direct);
}
