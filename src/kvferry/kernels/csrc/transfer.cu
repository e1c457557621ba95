// The kernels of the direct mover. Each takes one Transfer by value and goes over its spans; grids
// of any size work, so the number of blocks is a quota and nothing else.
//
// Compiling takes time: KVFERRY_KERNEL_FLAT, _REALIGN, _GROUPED and _FINISH choose kernels, and with
// none of them all are compiled.
#if !defined(KVFERRY_KERNEL_FLAT) && !defined(KVFERRY_KERNEL_REALIGN) && \
    !defined(KVFERRY_KERNEL_GROUPED) && !defined(KVFERRY_KERNEL_FINISH)
#define KVFERRY_KERNEL_FLAT
#define KVFERRY_KERNEL_REALIGN
#define KVFERRY_KERNEL_GROUPED
#define KVFERRY_KERNEL_FINISH
#endif

#include "digest.cuh"
#include "flat.cuh"
#include "grouped.cuh"
#include "realign.cuh"

namespace {

constexpr int kFlatThreads = 512;
constexpr int kRealignThreads = 512;
constexpr int kGroupedThreads = 512;
constexpr int kFinishThreads = 256;

}  // namespace

#if defined(KVFERRY_KERNEL_FLAT)
extern "C" __global__ void __launch_bounds__(kFlatThreads, 1)
    kvferry_flat(const __grid_constant__ kvferry::Transfer transfer) {
  for (uint32_t i = 0; i < transfer.num_spans; ++i) {
    const kvferry::Span &span = kvferry::span_of(transfer, i);
    if (span.flat_package == 16) {
      kvferry::flat_span<kvferry::Package16>(transfer, i, span);
    } else {
      kvferry::flat_span<kvferry::Package8>(transfer, i, span);
    }
  }
}
#endif

#if defined(KVFERRY_KERNEL_REALIGN)
// Shared memory: kTileRoom bytes a warp.
extern "C" __global__ void __launch_bounds__(kRealignThreads, 1)
    kvferry_realign(const __grid_constant__ kvferry::Transfer transfer, uint32_t digest_only) {
  extern __shared__ __align__(16) unsigned char rooms[];
  unsigned char *room = rooms + threadIdx.x / kvferry::kLanes * kvferry::kTileRoom;
  for (uint32_t i = 0; i < transfer.num_spans; ++i) {
    kvferry::realign_span(transfer, i, kvferry::span_of(transfer, i), room, digest_only != 0);
  }
}
#endif

#if defined(KVFERRY_KERNEL_GROUPED)
// All spans of a launch share one resolution: (threads, package, packages a thread).
extern "C" __global__ void __launch_bounds__(kGroupedThreads, 1)
    kvferry_grouped(const __grid_constant__ kvferry::Transfer transfer, uint32_t threads,
                    uint32_t package, uint32_t per_thread) {
  for (uint32_t i = 0; i < transfer.num_spans; ++i) {
    const kvferry::Span &span = kvferry::span_of(transfer, i);
    switch (package) {
      case 16:
        kvferry::grouped_span<kvferry::Package16>(transfer, span, threads, per_thread);
        break;
      case 8:
        kvferry::grouped_span<kvferry::Package8>(transfer, span, threads, per_thread);
        break;
      default:
        kvferry::grouped_span<kvferry::Package4>(transfer, span, threads, per_thread);
        break;
    }
  }
}
#endif

#if defined(KVFERRY_KERNEL_FINISH)
extern "C" __global__ void __launch_bounds__(kFinishThreads)
    kvferry_finish(const __grid_constant__ kvferry::Transfer transfer) {
  const uint32_t count = transfer.num_spans * transfer.num_pages;
  const uint32_t stride = gridDim.x * blockDim.x;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
    kvferry::finish_page(transfer, i / transfer.num_pages, i % transfer.num_pages);
  }
}
#endif
