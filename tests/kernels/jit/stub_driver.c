/* A libcuda.so.1 that has no GPU behind it: it answers as a driver would and writes down what the
 * last launch was given, so that calls through the real bindings can be tested anywhere. */
#include "../../stub_driver.h"

#define NOT_FOUND 500
#define ILLEGAL_ADDRESS 700
#define FAILING_STREAM ((void *)0xbad0)

struct pair {
  int64_t first;
  uint8_t second;
};

struct launch {
  unsigned grid[3], block[3], shared_bytes;
  void *function, *stream;
  uint64_t address;
  int32_t count;
  struct pair pair;
};

EXPORT struct launch stub_launch;
EXPORT int stub_dynamic_shared;

EXPORT int stub_cuInit(unsigned flags) { return (int)flags; }
EXPORT int stub_cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : -1;
  return device;
}
EXPORT int stub_cuCtxSetCurrent(void *context) {
  stub_depth = context == THE_CONTEXT;
  return 0;
}
EXPORT int stub_cuModuleLoadData(void **module, const void *image) {
  *module = THE_MODULE;
  return memcmp(image, "\177ELF", 4) ? 200 : 0;
}
EXPORT int stub_cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = THE_FUNCTION;
  return strcmp(name, "copy") ? NOT_FOUND : 0;
}
EXPORT int stub_cuFuncGetAttribute(int *value, int attribute, void *function) {
  static const int values[] = {1024, 2048, 0, 16, 40};
  *value = attribute < 5 ? values[attribute] : -1;
  return function != THE_FUNCTION;
}
EXPORT int stub_cuFuncSetAttribute(void *function, int attribute, int value) {
  stub_dynamic_shared = attribute == 8 ? value : -1;
  return function != THE_FUNCTION;
}
EXPORT int stub_cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                               unsigned by, unsigned bz, unsigned shared, void *stream,
                               void **parameters, void **extra) {
  struct launch seen = {{gx, gy, gz}, {bx, by, bz}, shared, function, stream, 0, 0, {0, 0}};
  if (stream == FAILING_STREAM || extra) return ILLEGAL_ADDRESS;
  seen.address = *(uint64_t *)parameters[0];
  seen.count = *(int32_t *)parameters[1];
  seen.pair = *(struct pair *)parameters[2];
  stub_launch = seen;
  return 0;
}
EXPORT int stub_cuGetErrorName(int error, const char **text) {
  *text = error == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : error == NOT_FOUND     ? "CUDA_ERROR_NOT_FOUND"
                                   : "CUDA_ERROR_OTHER";
  return 0;
}
EXPORT int stub_cuGetErrorString(int error, const char **text) {
  *text = error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "something else";
  return 0;
}
