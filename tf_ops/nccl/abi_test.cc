// Whether abi.h declares NCCL as it is, where its header is found.
#include "tf_ops/nccl/abi.h"

#include <gtest/gtest.h>

#if __has_include(<nccl.h>)
#include <nccl.h>

#include <string>
#include <utility>
#include <vector>

#include "tf_ops/testing/abi.h"

namespace keras_hvd::nccl {
namespace {

// F(member, the function).
#define KERAS_HVD_REAL_FUNCTIONS(F)            \
  F(version, ncclGetVersion)                   \
  F(unique_id, ncclGetUniqueId)                \
  F(init_rank, ncclCommInitRankConfig)         \
  F(split, ncclCommSplit)                      \
  F(finalize, ncclCommFinalize)                \
  F(destroy, ncclCommDestroy)                  \
  F(abort, ncclCommAbort)                      \
  F(async_error, ncclCommGetAsyncError)        \
  F(error_text, ncclGetErrorString)            \
  F(last_error, ncclGetLastError)              \
  F(group_start, ncclGroupStart)               \
  F(group_end, ncclGroupEnd)                   \
  F(make_scaled_sum, ncclRedOpCreatePreMulSum) \
  F(destroy_op, ncclRedOpDestroy)              \
  F(all_reduce, ncclAllReduce)                 \
  F(broadcast, ncclBroadcast)                  \
  F(reduce, ncclReduce)                        \
  F(all_gather, ncclAllGather)                 \
  F(reduce_scatter, ncclReduceScatter)         \
  F(send, ncclSend)                            \
  F(receive, ncclRecv)

#define KERAS_HVD_CHECK(member, function) \
  static_assert(kPassesAs<decltype(Functions::member), decltype(&function)>, #member);
KERAS_HVD_REAL_FUNCTIONS(KERAS_HVD_CHECK)
#undef KERAS_HVD_CHECK

template <typename Ours>
constexpr bool Is(Ours ours, int theirs) {
  return static_cast<int>(ours) == theirs;
}

static_assert(Is(Result::kSuccess, ncclSuccess));
static_assert(Is(Result::kUnhandledCudaError, ncclUnhandledCudaError));
static_assert(Is(Result::kSystemError, ncclSystemError));
static_assert(Is(Result::kInternalError, ncclInternalError));
static_assert(Is(Result::kInvalidArgument, ncclInvalidArgument));
static_assert(Is(Result::kInvalidUsage, ncclInvalidUsage));
static_assert(Is(Result::kRemoteError, ncclRemoteError));
static_assert(Is(Result::kInProgress, ncclInProgress));

static_assert(Is(Type::kInt8, ncclInt8) && Is(Type::kUint8, ncclUint8));
static_assert(Is(Type::kInt32, ncclInt32) && Is(Type::kUint32, ncclUint32));
static_assert(Is(Type::kInt64, ncclInt64) && Is(Type::kUint64, ncclUint64));
static_assert(Is(Type::kFloat16, ncclFloat16) && Is(Type::kFloat32, ncclFloat32));
static_assert(Is(Type::kFloat64, ncclFloat64) && Is(Type::kBfloat16, ncclBfloat16));
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 0)
static_assert(Is(Type::kFloat8e4m3, ncclFloat8e4m3));
static_assert(Is(Type::kFloat8e5m2, ncclFloat8e5m2));
#endif

static_assert(Is(kSum, ncclSum) && Is(kProduct, ncclProd) && Is(kAverage, ncclAvg));
static_assert(Is(kMax, ncclMax) && Is(kMin, ncclMin));
static_assert(Is(Residence::kDevice, ncclScalarDevice));
static_assert(Is(Residence::kHostImmediate, ncclScalarHostImmediate));
static_assert(kNoColor == NCCL_SPLIT_NOCOLOR);
static_assert(kOldestVersion == NCCL_VERSION(2, 19, 0));

// Ours ends where that of the oldest version does; later ones have more behind it.
static_assert(sizeof(Config) <= sizeof(ncclConfig_t));
#define KERAS_HVD_CHECK(ours, theirs)                                       \
  static_assert(offsetof(Config, ours) == offsetof(ncclConfig_t, theirs) && \
                sizeof(Config::ours) == sizeof(ncclConfig_t::theirs));
KERAS_HVD_CHECK(size, size)
KERAS_HVD_CHECK(magic, magic)
KERAS_HVD_CHECK(version, version)
KERAS_HVD_CHECK(blocking, blocking)
KERAS_HVD_CHECK(cga_cluster_size, cgaClusterSize)
KERAS_HVD_CHECK(min_ctas, minCTAs)
KERAS_HVD_CHECK(max_ctas, maxCTAs)
KERAS_HVD_CHECK(net_name, netName)
KERAS_HVD_CHECK(split_share, splitShare)
#undef KERAS_HVD_CHECK

TEST(Abi, ConfigStartsAsTheirs) {
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const Config ours;
  EXPECT_EQ(ours.magic, theirs.magic);
  EXPECT_EQ(ours.blocking, theirs.blocking);
  EXPECT_EQ(ours.cga_cluster_size, theirs.cgaClusterSize);
  EXPECT_EQ(ours.min_ctas, theirs.minCTAs);
  EXPECT_EQ(ours.max_ctas, theirs.maxCTAs);
  EXPECT_EQ(ours.net_name, theirs.netName);
  EXPECT_EQ(ours.split_share, theirs.splitShare);
}

using Names = std::vector<std::pair<std::string, std::string>>;

TEST(Abi, EveryFunctionIsChecked) {
  const Names declared = {
#define KERAS_HVD_NAMES(member, symbol, result, parameters) {#member, symbol},
      KERAS_HVD_NCCL_FUNCTIONS(KERAS_HVD_NAMES)
#undef KERAS_HVD_NAMES
  };
  const Names checked = {
#define KERAS_HVD_NAMES(member, function) {#member, #function},
      KERAS_HVD_REAL_FUNCTIONS(KERAS_HVD_NAMES)
#undef KERAS_HVD_NAMES
  };
  EXPECT_EQ(declared, checked);
  printf("checked against NCCL %d in %s\n", NCCL_VERSION_CODE, KERAS_HVD_NCCL_INCLUDE);
}

}  // namespace
}  // namespace keras_hvd::nccl

#else
TEST(Abi, EveryFunctionIsChecked) {
  GTEST_SKIP() << "no header of NCCL is here to check against: install "
                  "nvidia-nccl-cu12, or name its folder in KERAS_HVD_NCCL_INCLUDE";
}
#endif
