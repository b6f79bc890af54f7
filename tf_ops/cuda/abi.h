// The part of the CUDA driver's interface that keras_hvd uses, declared here. Building
// needs nothing of CUDA, and one library serves machines with and without a GPU.
//
// The driver keeps old symbols forever, so no version is needed. Some functions have a
// newer form under another symbol: the quoted names are the ones used.
#pragma once

#include <cstddef>
#include <cstdint>

namespace keras_hvd::cuda {

// CUresult. Only values that the code distinguishes have a name here.
enum class Result : int32_t {
  kSuccess = 0,
  kNotReady = 600,
};

using Device = int32_t;    // a device's number
using Pointer = uint64_t;  // an address on the device
using Context = struct ContextState*;
using Stream = struct StreamState*;  // null: the context's default stream
using Event = struct EventState*;

struct Uuid {
  char bytes[16];
};

// The calling thread's default stream; each thread has its own.
inline const Stream kStreamPerThread = reinterpret_cast<Stream>(uintptr_t{2});

// CUdevice_attribute.
inline constexpr int kCapabilityMajor = 75;
inline constexpr int kCapabilityMinor = 76;

inline constexpr unsigned int kStreamNonBlocking = 1;
inline constexpr unsigned int kEventDefault = 0;
inline constexpr unsigned int kEventDisableTiming = 2;

// F(member, "symbol", result, (parameters)).
#define KERAS_HVD_CUDA_FUNCTIONS(F)                                                   \
  F(init, "cuInit", Result, (unsigned int flags))                                     \
  F(driver_version, "cuDriverGetVersion", Result, (int* version))                     \
  F(device_count, "cuDeviceGetCount", Result, (int* count))                           \
  F(device, "cuDeviceGet", Result, (Device * device, int ordinal))                    \
  F(device_uuid, "cuDeviceGetUuid_v2", Result, (Uuid * uuid, Device device))          \
  F(device_attribute, "cuDeviceGetAttribute", Result,                                 \
    (int* value, int attribute, Device device))                                       \
  F(retain_primary_context, "cuDevicePrimaryCtxRetain", Result,                       \
    (Context * context, Device device))                                               \
  F(release_primary_context, "cuDevicePrimaryCtxRelease_v2", Result, (Device device)) \
  F(push_context, "cuCtxPushCurrent_v2", Result, (Context context))                   \
  F(pop_context, "cuCtxPopCurrent_v2", Result, (Context * context))                   \
  F(context_device, "cuCtxGetDevice", Result, (Device * device))                      \
  F(stream_priorities, "cuCtxGetStreamPriorityRange", Result,                         \
    (int* least, int* greatest))                                                      \
  F(create_stream, "cuStreamCreateWithPriority", Result,                              \
    (Stream * stream, unsigned int flags, int priority))                              \
  F(destroy_stream, "cuStreamDestroy_v2", Result, (Stream stream))                    \
  F(stream_context, "cuStreamGetCtx", Result, (Stream stream, Context * context))     \
  F(stream_wait_event, "cuStreamWaitEvent", Result,                                   \
    (Stream stream, Event event, unsigned int flags))                                 \
  F(create_event, "cuEventCreate", Result, (Event * event, unsigned int flags))       \
  F(record_event, "cuEventRecord", Result, (Event event, Stream stream))              \
  F(query_event, "cuEventQuery", Result, (Event event))                               \
  F(elapsed_time, "cuEventElapsedTime", Result,                                       \
    (float* milliseconds, Event start, Event end))                                    \
  F(destroy_event, "cuEventDestroy_v2", Result, (Event event))                        \
  F(allocate, "cuMemAlloc_v2", Result, (Pointer * memory, size_t bytes))              \
  F(free, "cuMemFree_v2", Result, (Pointer memory))                                   \
  F(allocate_host, "cuMemHostAlloc", Result,                                          \
    (void** memory, size_t bytes, unsigned int flags))                                \
  F(free_host, "cuMemFreeHost", Result, (void* memory))                               \
  F(copy_to_device, "cuMemcpyHtoDAsync_v2", Result,                                   \
    (Pointer to, const void* from, size_t bytes, Stream stream))                      \
  F(copy_to_host, "cuMemcpyDtoHAsync_v2", Result,                                     \
    (void* to, Pointer from, size_t bytes, Stream stream))                            \
  F(copy_on_device, "cuMemcpyDtoDAsync_v2", Result,                                   \
    (Pointer to, Pointer from, size_t bytes, Stream stream))                          \
  F(set_bytes, "cuMemsetD8Async", Result,                                             \
    (Pointer memory, unsigned char value, size_t bytes, Stream stream))               \
  F(error_name, "cuGetErrorName", Result, (Result result, const char** name))         \
  F(error_text, "cuGetErrorString", Result, (Result result, const char** text))

struct Functions {
#define KERAS_HVD_DECLARE(member, symbol, result, parameters) \
  result(*member) parameters = nullptr;
  KERAS_HVD_CUDA_FUNCTIONS(KERAS_HVD_DECLARE)
#undef KERAS_HVD_DECLARE
};

inline Pointer Address(const void* memory) { return reinterpret_cast<Pointer>(memory); }

}  // namespace keras_hvd::cuda
