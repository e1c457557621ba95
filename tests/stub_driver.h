/* What every stub of libcuda.so.1 answers alike: one device, one context, and functions that the
 * bindings find under their name with "stub_" before it. Included once a library, and first. */
#ifndef KVFERRY_TESTS_STUB_DRIVER_H
#define KVFERRY_TESTS_STUB_DRIVER_H

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INVALID_DEVICE 101
#define THE_CONTEXT ((void *)0x1000)
#define THE_MODULE ((void *)0x2000)
#define THE_FUNCTION ((void *)0x3000)

EXPORT int stub_depth;                           /* contexts on the stack of the calling thread */
EXPORT int stub_version = 13000;                 /* what the driver says it is */
EXPORT int stub_oldest_asked, stub_newest_asked; /* versions that functions were asked for with */

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
EXPORT int stub_cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = THE_CONTEXT;
  return device;
}
EXPORT int stub_cuDevicePrimaryCtxRelease(int device) { return device; }
EXPORT int stub_cuCtxPushCurrent(void *context) {
  stub_depth += context == THE_CONTEXT;
  return 0;
}
EXPORT int stub_cuCtxPopCurrent(void **context) {
  *context = THE_CONTEXT;
  --stub_depth;
  return 0;
}
EXPORT int stub_cuModuleUnload(void *module) { return module != THE_MODULE; }
EXPORT int stub_cuFuncLoad(void *function) { return function != THE_FUNCTION; }
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

#endif
