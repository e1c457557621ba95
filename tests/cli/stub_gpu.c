/* A libcuda.so.1 with a GPU made of host memory, for the calls that `kvferry doctor` makes through
 * the real bindings. STUB_FAULT chooses what is wrong with it. */
#include "../stub_driver.h"

#include <stdlib.h>
#include <unistd.h>

#define INVALID_VALUE 1
#define NO_DEVICE 100
#define INVALID_CONTEXT 201
#define ALREADY_REGISTERED 712
#define NOT_REGISTERED 713
#define NOT_SUPPORTED 801

/* The GPU knows host memory at other addresses than the CPU does. */
#define SHIFT ((uint64_t)1 << 46)

static char *registered;
static size_t registered_bytes;

static int is(const char *fault) {
  const char *chosen = getenv("STUB_FAULT");
  return chosen && !strcmp(chosen, fault);
}
static int in_registered(const char *at) {
  return registered && at >= registered && at < registered + registered_bytes;
}
static int needs_context(void) { return stub_depth > 0 ? 0 : INVALID_CONTEXT; }

EXPORT int stub_cuInit(unsigned flags) {
  if (is("crash")) abort();
  if (is("hang")) pause();
  if (is("no_start")) return 999;
  return is("no_device") ? NO_DEVICE : (int)flags;
}
EXPORT int stub_cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? (is("old") ? 7 : 9) : attribute == 76 ? (is("old") ? 5 : 0) : 132;
  return device;
}
EXPORT int stub_cuDeviceGetName(char *name, int length, int device) {
  snprintf(name, (size_t)length, "Stub GPU");
  return device;
}
EXPORT int stub_cuDeviceTotalMem(size_t *bytes, int device) {
  *bytes = (size_t)96 << 30;
  return device;
}
EXPORT int stub_cuDeviceGetPCIBusId(char *id, int length, int device) {
  snprintf(id, (size_t)length, "0000:AB:00.0");
  return device;
}
EXPORT int stub_cuMemGetInfo(size_t *free_bytes, size_t *total) {
  *total = (size_t)96 << 30;
  *free_bytes = is("full") ? 1 << 20 : *total;
  return needs_context();
}
EXPORT int stub_cuMemHostRegister(void *at, size_t bytes, unsigned flags) {
  if (is("no_register")) return NOT_SUPPORTED;
  if (registered) return ALREADY_REGISTERED;
  if (flags != 3) return INVALID_VALUE;
  registered = at;
  registered_bytes = bytes;
  return needs_context();
}
EXPORT int stub_cuMemHostUnregister(void *at) {
  if (at != registered) return NOT_REGISTERED;
  registered = NULL;
  return needs_context();
}
EXPORT int stub_cuPointerGetAttribute(void *data, int attribute, uint64_t at) {
  if (!in_registered((char *)at)) return INVALID_VALUE;
  if (attribute == 2) {
    *(unsigned *)data = 1;
  } else if (attribute == 3) {
    *(uint64_t *)data = at + SHIFT;
  } else {
    return INVALID_VALUE;
  }
  return needs_context();
}
EXPORT int stub_cuMemAlloc(uint64_t *at, size_t bytes) {
  *at = (uint64_t)malloc(bytes);
  return needs_context();
}
EXPORT int stub_cuMemFree(uint64_t at) {
  free((void *)at);
  return needs_context();
}
EXPORT int stub_cuMemcpyHtoDAsync(uint64_t to, const void *from, size_t bytes, void *stream) {
  if (!in_registered(from)) return INVALID_VALUE;
  memcpy((void *)to, from, bytes);
  (void)stream;
  return needs_context();
}
EXPORT int stub_cuMemcpyDtoHAsync(void *to, uint64_t from, size_t bytes, void *stream) {
  if (!in_registered(to)) return INVALID_VALUE;
  memcpy(to, (void *)from, bytes);
  if (is("corrupt")) ((char *)to)[bytes / 2] ^= 1;
  (void)stream;
  return needs_context();
}
EXPORT int stub_cuStreamSynchronize(void *stream) {
  (void)stream;
  return needs_context();
}
EXPORT int stub_cuCtxSynchronize(void) { return needs_context(); }
EXPORT int stub_cuModuleLoadData(void **module, const void *image) {
  *module = THE_MODULE;
  return memcmp(image, "\177ELF", 4) ? 200 : needs_context();
}
EXPORT int stub_cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = THE_FUNCTION;
  return module == THE_MODULE && !strcmp(name, "probe") ? 0 : 500;
}
EXPORT int stub_cuFuncGetAttribute(int *value, int attribute, void *function) {
  static const int values[] = {1024, 0, 0, 0, 16};
  *value = attribute < 5 ? values[attribute] : -1;
  return function != THE_FUNCTION;
}
EXPORT int stub_cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                               unsigned by, unsigned bz, unsigned shared, void *stream,
                               void **parameters, void **extra) {
  char *from = (char *)(*(uint64_t *)parameters[0] - SHIFT);
  char *to = (char *)(*(uint64_t *)parameters[1] - SHIFT);
  if (function != THE_FUNCTION || gx * gy * gz * by * bz != 1 || shared || stream || extra) {
    return INVALID_VALUE;
  }
  for (unsigned i = 0; i < bx; ++i) {
    uint32_t word;
    /* A kernel must be given the GPU's addresses of registered memory. */
    if (!in_registered(from + 4 * i) || !in_registered(to + 4 * i)) return 700;
    memcpy(&word, from + 4 * i, 4);
    word ^= is("lost_write") ? 0 : 0x5a5a5a5a;
    memcpy(to + 4 * i, &word, 4);
  }
  return needs_context();
}
EXPORT int stub_cuGetErrorName(int error, const char **text) {
  *text = error == NO_DEVICE         ? "CUDA_ERROR_NO_DEVICE"
          : error == NOT_SUPPORTED   ? "CUDA_ERROR_NOT_SUPPORTED"
          : error == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
                                     : "CUDA_ERROR_OTHER";
  return 0;
}
EXPORT int stub_cuGetErrorString(int error, const char **text) {
  (void)error;
  *text = "as the stub says";
  return 0;
}
