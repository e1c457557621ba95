/* A libcuda.so.1 that has no GPU behind it: it answers as a driver would and writes down what the
 * last launch was given, so that calls through the real bindings can be tested anywhere. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INVALID_DEVICE 101
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
EXPORT int stub_depth;           /* contexts on the stack of the calling thread */
EXPORT int stub_version = 13000; /* what the driver says it is */
EXPORT int stub_dynamic_shared;
EXPORT int stub_oldest_asked, stub_newest_asked; /* versions that functions were asked for with */

EXPORT int stub_cuInit(unsigned flags) { return (int)flags; }
EXPORT int cuDriverGetVersion(int *version) {
  *version = stub_version;
  return 0;
}
EXPORT int stub_cuDriverGetVersion(int *version) { return cuDriverGetVersion(version); }
EXPORT int stub_cuDeviceGetCount(int *count) {
  *count = 1;
  return 0;
}
EXPORT int stub_cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return ordinal ? INVALID_DEVICE : 0;
}
EXPORT int stub_cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : -1;
  return device;
}
EXPORT int stub_cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = (void *)0x1000;
  return device;
}
EXPORT int stub_cuDevicePrimaryCtxRelease(int device) { return device; }
EXPORT int stub_cuCtxPushCurrent(void *context) {
  stub_depth += context == (void *)0x1000;
  return 0;
}
EXPORT int stub_cuCtxPopCurrent(void **context) {
  *context = (void *)0x1000;
  --stub_depth;
  return 0;
}
EXPORT int stub_cuCtxSetCurrent(void *context) {
  stub_depth = context == (void *)0x1000;
  return 0;
}
EXPORT int stub_cuModuleLoadData(void **module, const void *image) {
  *module = (void *)0x2000;
  return memcmp(image, "\177ELF", 4) ? 200 : 0;
}
EXPORT int stub_cuModuleUnload(void *module) { return module != (void *)0x2000; }
EXPORT int stub_cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)0x3000;
  return strcmp(name, "copy") ? NOT_FOUND : 0;
}
EXPORT int stub_cuFuncLoad(void *function) { return function != (void *)0x3000; }
EXPORT int stub_cuFuncGetAttribute(int *value, int attribute, void *function) {
  static const int values[] = {1024, 2048, 0, 16, 40};
  *value = attribute < 5 ? values[attribute] : -1;
  return function != (void *)0x3000;
}
EXPORT int stub_cuFuncSetAttribute(void *function, int attribute, int value) {
  stub_dynamic_shared = attribute == 8 ? value : -1;
  return function != (void *)0x3000;
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
EXPORT int cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags,
                               int *status) {
  char stub[128];
  Dl_info self;
  (void)flags;
  if (!stub_oldest_asked || version < stub_oldest_asked) stub_oldest_asked = version;
  if (version > stub_newest_asked) stub_newest_asked = version;
  snprintf(stub, sizeof stub, "stub_%s", name);
  dladdr((void *)cuGetProcAddress_v2, &self);
  void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  *address = version > stub_version ? NULL : dlsym(library, stub);
  if (status) *status = *address ? 0 : 1;
  return 0;
}
EXPORT int stub_cuGetProcAddress(const char *name, void **address, int version, uint64_t flags,
                                 int *status) {
  return cuGetProcAddress_v2(name, address, version, flags, status);
}
