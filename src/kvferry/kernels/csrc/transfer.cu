// The kernels of the direct mover. Each takes one Transfer by value and goes over its spans; grids
// of any size work, so the number of blocks is a quota and nothing else.
//
// Compiling takes time: KVFERRY_KERNEL_FLAT, _REALIGN, _GROUPED and _FINISH choose kernels, and
// with none of them all are compiled.
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

// Blocks on a multiprocessor at once, for fewer registers a thread. Over the link one is faster;
// on the device more are, as they have more on the way.
#if !defined(KVFERRY_RESIDENT_BLOCKS)
#define KVFERRY_RESIDENT_BLOCKS 1
#endif
constexpr int kResident = KVFERRY_RESIDENT_BLOCKS;

constexpr int kFlatThreads = 512;
constexpr int kRealignThreads = 512;
constexpr int kGroupedThreads = 512;
constexpr int kFinishThreads = 256;

}  // namespace

#if defined(KVFERRY_KERNEL_FLAT)
extern "C" __global__ void __launch_bounds__(kFlatThreads, kResident)
    kvferry_flat(const __grid_constant__ kvferry::Transfer transfer) {
  using namespace kvferry;
  const uint32_t lane = threadIdx.x % kWarp;
  share_out(
      transfer, (blockIdx.x * blockDim.x + threadIdx.x) / kWarp, gridDim.x * blockDim.x / kWarp,
      [&](const Span &span) { return flat_chunks(transfer, span); },
      [&](uint32_t span, uint32_t chunk) { flat_chunk(transfer, span, chunk, lane); });
}
#endif

#if defined(KVFERRY_KERNEL_REALIGN)
// Shared memory: kTileRoom bytes a warp.
extern "C" __global__ void __launch_bounds__(kRealignThreads, kResident)
    kvferry_realign(const __grid_constant__ kvferry::Transfer transfer, uint32_t digest_only) {
  using namespace kvferry;
  extern __shared__ __align__(16) unsigned char rooms[];
  unsigned char *room = rooms + threadIdx.x / kLanes * kTileRoom;
  const uint32_t lane = threadIdx.x % kLanes;
  share_out(
      transfer, (blockIdx.x * blockDim.x + threadIdx.x) / kLanes, gridDim.x * blockDim.x / kLanes,
      [&](const Span &span) { return tiles_of(span) * transfer.num_pages; },
      [&](uint32_t span, uint32_t number) {
        realign_tile(transfer, span, number, room, lane, digest_only != 0);
      });
}
#endif

#if defined(KVFERRY_KERNEL_GROUPED)
// All spans of a launch share one resolution: (threads, package, packages a thread).
extern "C" __global__ void __launch_bounds__(kGroupedThreads, 1)
    kvferry_grouped(const __grid_constant__ kvferry::Transfer transfer, uint32_t threads,
                    uint32_t package, uint32_t per_thread) {
  using namespace kvferry;
  const uint32_t thread = threadIdx.x % threads;
  share_out(
      transfer, (blockIdx.x * blockDim.x + threadIdx.x) / threads, gridDim.x * blockDim.x / threads,
      [&](const Span &span) { return span.rows_per_page * transfer.num_pages; },
      [&](uint32_t index, uint32_t number) {
        const Span &span = span_of(transfer, index);
        if (package == 16) {
          grouped_element<Package16>(transfer, span, number, thread, threads, per_thread);
        } else if (package == 8) {
          grouped_element<Package8>(transfer, span, number, thread, threads, per_thread);
        } else {
          grouped_element<Package4>(transfer, span, number, thread, threads, per_thread);
        }
      });
}
#endif

#if defined(KVFERRY_KERNEL_FINISH)
extern "C" __global__ void __launch_bounds__(kFinishThreads)
    kvferry_finish(const __grid_constant__ kvferry::Transfer transfer) {
  const uint32_t count = transfer.num_spans * transfer.num_pages;
  const uint32_t stride = gridDim.x * blockDim.x;
  // Digests of one page are neighbours on the host: those that cross the link together.
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
    kvferry::finish_page(transfer, i % transfer.num_spans, i / transfer.num_spans);
  }
}
#endif
