// Whether abi.h declares the driver's functions as they are, where CUDA's headers are
// found.
#include "tf_ops/cuda/abi.h"

#include <gtest/gtest.h>

#if __has_include(<cudaTypedefs.h>)
#include <cuda.h>
#include <cudaTypedefs.h>

#include <string>
#include <utility>
#include <vector>

#include "tf_ops/testing/abi.h"

namespace keras_hvd::cuda {
namespace {

// F(member, symbol, the type of that version of the function).
#define KERAS_HVD_REAL_FUNCTIONS(F)                                                  \
  F(init, cuInit, PFN_cuInit_v2000)                                                  \
  F(driver_version, cuDriverGetVersion, PFN_cuDriverGetVersion_v2020)                \
  F(device_count, cuDeviceGetCount, PFN_cuDeviceGetCount_v2000)                      \
  F(device, cuDeviceGet, PFN_cuDeviceGet_v2000)                                      \
  F(device_uuid, cuDeviceGetUuid_v2, PFN_cuDeviceGetUuid_v11040)                     \
  F(device_attribute, cuDeviceGetAttribute, PFN_cuDeviceGetAttribute_v2000)          \
  F(retain_primary_context, cuDevicePrimaryCtxRetain,                                \
    PFN_cuDevicePrimaryCtxRetain_v7000)                                              \
  F(release_primary_context, cuDevicePrimaryCtxRelease_v2,                           \
    PFN_cuDevicePrimaryCtxRelease_v11000)                                            \
  F(push_context, cuCtxPushCurrent_v2, PFN_cuCtxPushCurrent_v4000)                   \
  F(pop_context, cuCtxPopCurrent_v2, PFN_cuCtxPopCurrent_v4000)                      \
  F(context_device, cuCtxGetDevice, PFN_cuCtxGetDevice_v2000)                        \
  F(stream_priorities, cuCtxGetStreamPriorityRange,                                  \
    PFN_cuCtxGetStreamPriorityRange_v5050)                                           \
  F(create_stream, cuStreamCreateWithPriority, PFN_cuStreamCreateWithPriority_v5050) \
  F(destroy_stream, cuStreamDestroy_v2, PFN_cuStreamDestroy_v4000)                   \
  F(stream_context, cuStreamGetCtx, PFN_cuStreamGetCtx_v9020)                        \
  F(stream_wait_event, cuStreamWaitEvent, PFN_cuStreamWaitEvent_v3020)               \
  F(create_event, cuEventCreate, PFN_cuEventCreate_v2000)                            \
  F(record_event, cuEventRecord, PFN_cuEventRecord_v2000)                            \
  F(query_event, cuEventQuery, PFN_cuEventQuery_v2000)                               \
  F(elapsed_time, cuEventElapsedTime, PFN_cuEventElapsedTime_v2000)                  \
  F(destroy_event, cuEventDestroy_v2, PFN_cuEventDestroy_v4000)                      \
  F(allocate, cuMemAlloc_v2, PFN_cuMemAlloc_v3020)                                   \
  F(free, cuMemFree_v2, PFN_cuMemFree_v3020)                                         \
  F(allocate_host, cuMemHostAlloc, PFN_cuMemHostAlloc_v2020)                         \
  F(free_host, cuMemFreeHost, PFN_cuMemFreeHost_v2000)                               \
  F(copy_to_device, cuMemcpyHtoDAsync_v2, PFN_cuMemcpyHtoDAsync_v3020)               \
  F(copy_to_host, cuMemcpyDtoHAsync_v2, PFN_cuMemcpyDtoHAsync_v3020)                 \
  F(copy_on_device, cuMemcpyDtoDAsync_v2, PFN_cuMemcpyDtoDAsync_v3020)               \
  F(set_bytes, cuMemsetD8Async, PFN_cuMemsetD8Async_v3020)                           \
  F(error_name, cuGetErrorName, PFN_cuGetErrorName_v6000)                            \
  F(error_text, cuGetErrorString, PFN_cuGetErrorString_v6000)

#define KERAS_HVD_CHECK(member, symbol, type) \
  static_assert(kPassesAs<decltype(Functions::member), type>, #member);
KERAS_HVD_REAL_FUNCTIONS(KERAS_HVD_CHECK)
#undef KERAS_HVD_CHECK

static_assert(sizeof(Uuid) == sizeof(CUuuid));
static_assert(static_cast<int>(Result::kSuccess) == CUDA_SUCCESS);
static_assert(static_cast<int>(Result::kNotReady) == CUDA_ERROR_NOT_READY);
static_assert(kCapabilityMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(kCapabilityMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kEventDefault == CU_EVENT_DEFAULT);
static_assert(kEventDisableTiming == CU_EVENT_DISABLE_TIMING);

using Names = std::vector<std::pair<std::string, std::string>>;

TEST(Abi, EveryFunctionIsChecked) {
  const Names declared = {
#define KERAS_HVD_NAMES(member, symbol, result, parameters) {#member, symbol},
      KERAS_HVD_CUDA_FUNCTIONS(KERAS_HVD_NAMES)
#undef KERAS_HVD_NAMES
  };
  const Names checked = {
#define KERAS_HVD_NAMES(member, symbol, type) {#member, #symbol},
      KERAS_HVD_REAL_FUNCTIONS(KERAS_HVD_NAMES)
#undef KERAS_HVD_NAMES
  };
  EXPECT_EQ(declared, checked);
  printf("checked against CUDA %d in %s\n", CUDA_VERSION, KERAS_HVD_CUDA_INCLUDE);
}

}  // namespace
}  // namespace keras_hvd::cuda

#else
TEST(Abi, EveryFunctionIsChecked) {
  GTEST_SKIP() << "no CUDA headers are here to check against: install "
                  "nvidia-cuda-runtime-cu12, or name their folder in "
                  "KERAS_HVD_CUDA_INCLUDE";
}
#endif
