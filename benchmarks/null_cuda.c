// A CUDA driver that does nothing, on a machine without a GPU: work on a stream has run
// at once, and memory of the device is the host's. The rest of a collective's time is
// the engine's own. Its calls are counted.
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { kContext = 0x1000, kAlignment = 256, kMostContexts = 64, kMajorVersion = 75 };
// Setting more shows nothing, and would add to the measured time.
enum { kMostSet = 1 << 20 };

// Calls since the start of the process.
typedef struct {
  _Atomic int64_t pushes, waits, creates, records;
} null_cuda_counts;
null_cuda_counts null_cuda_counted;

static _Thread_local void* contexts[kMostContexts];
static _Thread_local int depth;

static void count(_Atomic int64_t* calls) {
  atomic_fetch_add_explicit(calls, 1, memory_order_relaxed);
}

static void* allocate(size_t bytes) {
  return aligned_alloc(kAlignment, (bytes + kAlignment) / kAlignment * kAlignment);
}

int cuInit(unsigned flags) { return 0; }

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuDeviceGetCount(int* devices) {
  const char* const wanted = getenv("NULL_CUDA_DEVICES");
  *devices = wanted == NULL ? 2 : atoi(wanted);
  return 0;
}

int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}

int cuDeviceGetUuid_v2(char* uuid, int device) {
  memset(uuid, 0, 16);
  uuid[0] = (char)(1 + device);
  return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == kMajorVersion ? 9 : 0;
  return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(uintptr_t)(kContext + device);
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }

int cuCtxPushCurrent_v2(void* context) {
  contexts[depth++] = context;
  count(&null_cuda_counted.pushes);
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = contexts[--depth];
  return 0;
}

int cuCtxGetDevice(int* device) {
  *device = (int)((uintptr_t)contexts[depth - 1] - kContext);
  return 0;
}

int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return 0;
}

// A stream is its context.
int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  void** const made = malloc(sizeof(void*));
  *made = contexts[depth - 1];
  *stream = made;
  return 0;
}

int cuStreamDestroy_v2(void* stream) {
  free(stream);
  return 0;
}

int cuStreamGetCtx(void* stream, void** context) {
  *context = stream == NULL ? contexts[depth - 1] : *(void**)stream;
  return 0;
}

int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  count(&null_cuda_counted.waits);
  return 0;
}

int cuEventCreate(void** event, unsigned flags) {
  *event = malloc(1);
  count(&null_cuda_counted.creates);
  return 0;
}

int cuEventRecord(void* event, void* stream) {
  count(&null_cuda_counted.records);
  return 0;
}

int cuEventQuery(void* event) { return 0; }

int cuEventElapsedTime(float* milliseconds, void* start, void* end) {
  *milliseconds = 0.001f;
  return 0;
}

int cuEventDestroy_v2(void* event) {
  free(event);
  return 0;
}

int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  *address = (uint64_t)(uintptr_t)allocate(bytes);
  return 0;
}

int cuMemFree_v2(uint64_t address) {
  free((void*)(uintptr_t)address);
  return 0;
}

int cuMemHostAlloc(void** memory, size_t bytes, unsigned flags) {
  *memory = allocate(bytes);
  return 0;
}

int cuMemFreeHost(void* memory) {
  free(memory);
  return 0;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  memcpy((void*)(uintptr_t)to, from, bytes);
  return 0;
}

int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  memcpy(to, (const void*)(uintptr_t)from, bytes);
  return 0;
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  memmove((void*)(uintptr_t)to, (const void*)(uintptr_t)from, bytes);
  return 0;
}

int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void* stream) {
  if (bytes <= kMostSet) memset((void*)(uintptr_t)to, value, bytes);
  return 0;
}

int cuGetErrorName(int result, const char** name) {
  *name = "CUDA_ERROR_OF_NULL_CUDA";
  return 0;
}

int cuGetErrorString(int result, const char** text) {
  *text = "an error of the driver that does nothing";
  return 0;
}
