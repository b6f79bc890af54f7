// The part of NCCL's interface that keras_hvd uses, declared here as in NCCL 2.19, the
// oldest supported version. Later versions only add to it.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "tf_ops/cuda/abi.h"

namespace keras_hvd::nccl {

// ncclResult_t.
enum class Result : int32_t {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,  // from a nonblocking communicator: ask it again
};

// ncclDataType_t.
enum class Type : int32_t {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
  kFloat8e4m3 = 10,  // from here on: needs kFloat8Version
  kFloat8e5m2 = 11,
};

// ncclRedOp_t: one of these, or a created one.
using Op = int32_t;
inline constexpr Op kSum = 0;
inline constexpr Op kProduct = 1;
inline constexpr Op kMax = 2;
inline constexpr Op kMin = 3;
inline constexpr Op kAverage = 4;

// ncclScalarResidence_t: where an op's scale is stored.
enum class Residence : int32_t {
  kDevice = 0,
  kHostImmediate = 1,  // in host memory, read during the call
};

using Comm = struct CommState*;

struct UniqueId {
  char bytes[128];
};

// ncclConfig_t. It grows only at its end; `size` and `version` give its extent.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21900;
  int blocking = INT_MIN;  // INT_MIN in any field: NCCL's default
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

inline constexpr int kOldestVersion = 21900;
inline constexpr int kFloat8Version = 22400;
// Devices of compute capability 9.0 and higher reduce float8.
inline constexpr int kFloat8Capability = 90;
// For CommSplit: this rank is in none of the new communicators.
inline constexpr int kNoColor = -1;

// F(member, "symbol", result, (parameters)).
#define KERAS_HVD_NCCL_FUNCTIONS(F)                                                 \
  F(version, "ncclGetVersion", Result, (int* version))                              \
  F(unique_id, "ncclGetUniqueId", Result, (UniqueId * id))                          \
  F(init_rank, "ncclCommInitRankConfig", Result,                                    \
    (Comm * comm, int count, UniqueId id, int rank, Config* config))                \
  F(split, "ncclCommSplit", Result,                                                 \
    (Comm comm, int color, int key, Comm* part, Config* config))                    \
  F(finalize, "ncclCommFinalize", Result, (Comm comm))                              \
  F(destroy, "ncclCommDestroy", Result, (Comm comm))                                \
  F(abort, "ncclCommAbort", Result, (Comm comm))                                    \
  F(async_error, "ncclCommGetAsyncError", Result, (Comm comm, Result * error))      \
  F(error_text, "ncclGetErrorString", const char*, (Result result))                 \
  F(last_error, "ncclGetLastError", const char*, (Comm comm))                       \
  F(group_start, "ncclGroupStart", Result, ())                                      \
  F(group_end, "ncclGroupEnd", Result, ())                                          \
  F(make_scaled_sum, "ncclRedOpCreatePreMulSum", Result,                            \
    (Op * op, void* scale, Type type, Residence residence, Comm comm))              \
  F(destroy_op, "ncclRedOpDestroy", Result, (Op op, Comm comm))                     \
  F(all_reduce, "ncclAllReduce", Result,                                            \
    (const void* input, void* output, size_t count, Type type, Op op, Comm comm,    \
     cuda::Stream stream))                                                          \
  F(broadcast, "ncclBroadcast", Result,                                             \
    (const void* input, void* output, size_t count, Type type, int root, Comm comm, \
     cuda::Stream stream))                                                          \
  F(reduce, "ncclReduce", Result,                                                   \
    (const void* input, void* output, size_t count, Type type, Op op, int root,     \
     Comm comm, cuda::Stream stream))                                               \
  F(all_gather, "ncclAllGather", Result,                                            \
    (const void* input, void* output, size_t count, Type type, Comm comm,           \
     cuda::Stream stream))                                                          \
  F(reduce_scatter, "ncclReduceScatter", Result,                                    \
    (const void* input, void* output, size_t count, Type type, Op op, Comm comm,    \
     cuda::Stream stream))                                                          \
  F(send, "ncclSend", Result,                                                       \
    (const void* input, size_t count, Type type, int peer, Comm comm,               \
     cuda::Stream stream))                                                          \
  F(receive, "ncclRecv", Result,                                                    \
    (void* output, size_t count, Type type, int peer, Comm comm, cuda::Stream stream))

struct Functions {
#define KERAS_HVD_DECLARE(member, symbol, result, parameters) \
  result(*member) parameters = nullptr;
  KERAS_HVD_NCCL_FUNCTIONS(KERAS_HVD_DECLARE)
#undef KERAS_HVD_DECLARE
};

}  // namespace keras_hvd::nccl
