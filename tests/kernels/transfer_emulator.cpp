// The transfer kernels as a shared library, for tests in Python: what Python lays out is read by
// the same functions that a GPU runs.
#include "transfer_lanes.h"

extern "C" {

void emulate_flat(const kvferry::Transfer *transfer) { lanes::flat(*transfer); }

void emulate_realign(const kvferry::Transfer *transfer, int digest_only) {
  lanes::realign(*transfer, digest_only != 0);
}

void emulate_grouped(const kvferry::Transfer *transfer, uint32_t threads, uint32_t package,
                     uint32_t per_thread) {
  lanes::grouped(*transfer, threads, package, per_thread);
}

void emulate_finish(const kvferry::Transfer *transfer) { lanes::finish(*transfer); }

// How many of `count` dividends are not divided exactly.
int64_t wrong_quotients(const kvferry::FastDivisor *by, const uint32_t *dividends, int64_t count) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) {
    wrong += kvferry::divide(dividends[i], *by) != dividends[i] / by->divisor;
  }
  return wrong;
}

}  // extern "C"
