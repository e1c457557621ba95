// What lets the device headers compile as CUDA C++ (NVRTC has no standard headers) and, where there
// is no GPU, as plain C++17, so that the same functions run under sanitizers.
#pragma once

#if defined(__CUDACC_RTC__)
// As on every Linux that CUDA runs on, so that a header which declares them too agrees.
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
static_assert(sizeof(int64_t) == 8, "kvferry needs an LP64 target");
#else
#include <stdint.h>
#endif

#if !defined(__CUDACC__)
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#endif

#define KVFERRY_HD __host__ __device__
