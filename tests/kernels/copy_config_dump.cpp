// Writes what the C++ twin of the resolver answers, for test_copy_config_twin.py to compare.
// Arguments: file for the sizes 1 to 65,536 × unroll, file for sizes × rows × alignments.

#include <stdio.h>

#include "copy_config.cuh"

namespace {

constexpr int64_t kUnrolls[] = {kvferry::kDefaultUnroll, 1, 2, 4, 8, 16, 32};
constexpr int64_t kRows[] = {1, 2, 3, 16, 64};
constexpr int64_t kAlignments[] = {1, 2, 4, 8, 16};
constexpr int64_t kSomeUnrolls[] = {kvferry::kDefaultUnroll, 4, 32};

bool write(FILE *file, const kvferry::CopyDecision &decision) {
  const kvferry::GroupedConfig &grouped = decision.grouped;
  const int64_t record[] = {static_cast<int64_t>(decision.chosen),
                            decision.flat_eligible,
                            decision.span_bytes,
                            decision.flat_package,
                            static_cast<int64_t>(grouped.refusal),
                            grouped.unroll,
                            grouped.threads,
                            grouped.bytes_per_thread,
                            grouped.package,
                            grouped.packages_per_thread,
                            grouped.packages_in_flight};
  return fwrite(record, sizeof(record), 1, file) == 1;
}

bool write_sizes(FILE *file) {
  bool ok = true;
  for (int64_t size = 1; size <= 65536; ++size) {
    for (const int64_t unroll : kUnrolls) {
      ok = ok && write(file, kvferry::resolve_copy(size, 1, unroll));
    }
  }
  return ok;
}

bool write_spans(FILE *file) {
  bool ok = true;
  for (int64_t size = 1; size <= 160; ++size) {
    for (const int64_t rows : kRows) {
      for (const int64_t unroll : kSomeUnrolls) {
        for (const int64_t source : kAlignments) {
          for (const int64_t destination : kAlignments) {
            ok = ok && write(file, kvferry::resolve_copy(size, rows, unroll, source, destination));
          }
        }
      }
    }
  }
  // The largest that Python takes: products must not overflow.
  const int64_t largest = int64_t{1} << 40;
  return ok && write(file, kvferry::resolve_copy(largest, int64_t{1} << 20));
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 3) {
    return 2;
  }
  FILE *sizes = fopen(argv[1], "wb");
  FILE *spans = fopen(argv[2], "wb");
  if (sizes == nullptr || spans == nullptr) {
    return 3;
  }
  const bool ok = write_sizes(sizes) && write_spans(spans);
  return fclose(sizes) == 0 && fclose(spans) == 0 && ok ? 0 : 4;
}
