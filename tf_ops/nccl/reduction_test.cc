// The reductions that are NCCL's.
#include "tf_ops/nccl/reduction.h"

#include <limits>

#include "tf_ops/nccl/testing.h"

namespace keras_hvd::nccl {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<DataType> AllTypes() {
  std::vector<DataType> types;
  for (int i = 0; i < kReducedDataTypes; ++i) types.push_back(static_cast<DataType>(i));
  return types;
}

// Of NCCL and GPUs that have all types.
bool Has(const Reduction& reduction, DataType dtype, int count = 3) {
  return CanReduce(reduction, dtype, count, kAllTypes);
}

TEST(ReductionTest, SumsAreThoseOfNumbers) {
  for (DataType dtype : AllTypes()) {
    EXPECT_EQ(Has({ReduceOp::kSum}, dtype), dtype != DataType::kBool);
    EXPECT_EQ(Has({ReduceOp::kProduct}, dtype), true) << Name(dtype);
  }
}

TEST(ReductionTest, AveragesAndScalesAreThoseOfFloats) {
  for (DataType dtype : AllTypes()) {
    EXPECT_EQ(Has({ReduceOp::kAverage}, dtype, 4), IsFloating(dtype));
    EXPECT_EQ(Has({ReduceOp::kAverage}, dtype, 3),
              IsFloating(dtype) && !IsFloat8(dtype));
    EXPECT_EQ(Has({ReduceOp::kSum, 0.5, 1}, dtype), IsFloating(dtype));
    EXPECT_EQ(Has({ReduceOp::kSum, 1, 4}, dtype), IsFloating(dtype));
  }
}

TEST(ReductionTest, MinimaAndMaximaAreThoseOfWhatHasNoNan) {
  for (DataType dtype : AllTypes()) {
    EXPECT_EQ(Has({ReduceOp::kMin}, dtype), !IsFloating(dtype));
    EXPECT_EQ(Has({ReduceOp::kMax}, dtype), !IsFloating(dtype));
  }
}

TEST(ReductionTest, OnlySumsHaveScales) {
  for (DataType dtype : AllTypes()) {
    for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      EXPECT_FALSE(Has({op, 0.5, 1}, dtype)) << Name(op) << Name(dtype);
      EXPECT_FALSE(Has({op, 1, 0.5}, dtype)) << Name(op) << Name(dtype);
    }
    EXPECT_FALSE(Has({ReduceOp::kAdasum}, dtype, 2));
  }
}

// The library takes the sums that we say NCCL takes, and the other way round.
void ExpectSums(const Capabilities& capabilities, Rank* rank) {
  Communicator* const communicator = rank->communicator.get();
  EXPECT_EQ(rank->gpu->compute_capability(), capabilities.compute_capability);
  for (DataType dtype : AllTypes()) {
    // NCCL adds truth values as bytes, which is no sum of theirs.
    if (dtype == DataType::kBool) continue;
    const cuda::Memory memory = rank->Input(Numbers(dtype, 5, 0, 1));
    const auto sum = [&] {
      return communicator->library()->all_reduce(memory.data(), memory.data(), 5,
                                                 TypeOf(dtype), kSum,
                                                 communicator->comm(), rank->caller);
    };
    const auto check = [&] { return communicator->Check(sum(), "ncclAllReduce"); };
    if (CanReduce({ReduceOp::kSum}, dtype, 1, capabilities)) {
      EXPECT_EQ(communicator->Group(check).message, "") << Name(dtype);
    } else {
      EXPECT_TRUE(IsFloat8(dtype)) << Name(dtype);
      EXPECT_EQ(sum(), Result::kInvalidArgument) << Name(dtype);
    }
    // Also has the memory's stream come to its end before it is freed.
    EXPECT_EQ(rank->Contents(memory), Numbers(dtype, 5, 0, 1));
  }
}

TEST(ReductionTest, Float8DependsOnTheVersionAndTheGpu) {
  for (const Capabilities& capabilities :
       {Capabilities{kOldestVersion, 120}, Capabilities{22399, 90},
        Capabilities{22400, 89}, Capabilities{22400, 90}, Capabilities{23004, 120}}) {
    const bool has =
        capabilities.version >= 22400 && capabilities.compute_capability >= 90;
    for (DataType dtype : {DataType::kFloat8E5m2, DataType::kFloat8E4m3fn}) {
      EXPECT_EQ(CanReduce({ReduceOp::kSum}, dtype, 3, capabilities), has);
      EXPECT_EQ(CanReduce({ReduceOp::kProduct}, dtype, 3, capabilities), has);
    }
    Libraries libraries(1);
    libraries.control()->SetNcclVersion(capabilities.version);
    libraries.control()->SetComputeCapability(0, capabilities.compute_capability);
    RunRanks(libraries, 1, [&](Rank* rank) {
      const cuda::Gpu::Current current(*rank->gpu);
      ExpectSums(capabilities, rank);
    });
  }
}

TEST(ReductionTest, ScalesOf8BitsAreExact) {
  for (DataType dtype : {DataType::kFloat8E5m2, DataType::kFloat8E4m3fn}) {
    EXPECT_TRUE(Has({ReduceOp::kSum, 0.125, 1}, dtype));
    EXPECT_FALSE(Has({ReduceOp::kSum, 0.1, 1}, dtype));
    EXPECT_FALSE(Has({ReduceOp::kAverage}, dtype, 5));
    EXPECT_TRUE(Has({ReduceOp::kAverage, 1.5, 2}, dtype, 3));
    // 9 needs four bits of precision: the one has three, the other four.
    EXPECT_EQ(Has({ReduceOp::kSum, 9, 1}, dtype), dtype == DataType::kFloat8E4m3fn);
    // The one's range ends at 57344, the other's at 448, and at a 512th.
    EXPECT_EQ(Has({ReduceOp::kSum, 512, 1}, dtype), dtype == DataType::kFloat8E5m2);
    EXPECT_EQ(Has({ReduceOp::kAverage}, dtype, 1024), dtype == DataType::kFloat8E5m2);
  }
}

TEST(ReductionTest, ScalesOf16BitsAreExact) {
  for (DataType dtype : {DataType::kFloat16, DataType::kBfloat16}) {
    EXPECT_TRUE(Has({ReduceOp::kSum, 0.125, 1}, dtype, 3));
    EXPECT_FALSE(Has({ReduceOp::kSum, 0.1, 1}, dtype, 3));
    // The scale of all counts: 0.5 / 4, and 0.5 / 3.
    EXPECT_TRUE(Has({ReduceOp::kAverage, 0.5, 1}, dtype, 4));
    EXPECT_FALSE(Has({ReduceOp::kAverage, 0.5, 1}, dtype, 3));
    EXPECT_TRUE(Has({ReduceOp::kAverage, 1.5, 2}, dtype, 3));
    // 257 needs nine bits of precision: a float16 has eleven, a bfloat16 eight.
    EXPECT_EQ(Has({ReduceOp::kSum, 257, 1}, dtype, 3), dtype == DataType::kFloat16);
    // A float16 ends at 65504.
    EXPECT_EQ(Has({ReduceOp::kSum, 65536, 1}, dtype, 3), dtype == DataType::kBfloat16);
  }
  EXPECT_TRUE(Has({ReduceOp::kSum, 0.1, 1}, DataType::kFloat32, 3));
}

TEST(ReductionTest, ScalesOutOfRangeAreLeftToTheCpu) {
  for (DataType dtype : {DataType::kFloat16, DataType::kBfloat16, DataType::kFloat32,
                         DataType::kFloat64}) {
    for (double scale : {0.0, kInfinity, std::nan("")}) {
      EXPECT_FALSE(Has({ReduceOp::kSum, scale, 1}, dtype, 3));
    }
    // Each has its effect there, where their product has none, or too much.
    EXPECT_FALSE(Has({ReduceOp::kSum, 1e-200, 1e-200}, dtype, 3));
    EXPECT_FALSE(Has({ReduceOp::kSum, 1e200, 1e200}, dtype, 3));
  }
  EXPECT_FALSE(Has({ReduceOp::kSum, 1e-30, 1e-30}, DataType::kFloat32, 3));
  EXPECT_TRUE(Has({ReduceOp::kSum, 1e-30, 1e-30}, DataType::kFloat64, 3));
}

TEST(ReductionTest, OpsAreMadeOnceForEachTypeAndOnlyWhereNeeded) {
  Libraries libraries(1);
  RunRanks(libraries, 1, [&](Rank* rank) {
    Communicator* const communicator = rank->communicator.get();
    const cuda::Gpu::Current current(*rank->gpu);
    ScopedOps plain({ReduceOp::kAverage, 1, 1});
    EXPECT_TRUE(plain.Add(DataType::kFloat32, communicator).ok());
    EXPECT_EQ(plain.Of(DataType::kFloat32), kAverage);
    ScopedOps neutral({ReduceOp::kSum, 0.5, 2});
    EXPECT_TRUE(neutral.Add(DataType::kFloat16, communicator).ok());
    EXPECT_EQ(neutral.Of(DataType::kFloat16), kSum);
    EXPECT_EQ(libraries.CountCalls("ncclRedOpCreatePreMulSum"), 0);
    {
      ScopedOps scaled({ReduceOp::kSum, 0.5, 1});
      EXPECT_TRUE(scaled.Add(DataType::kFloat32, communicator).ok());
      EXPECT_TRUE(scaled.Add(DataType::kFloat64, communicator).ok());
      EXPECT_TRUE(scaled.Add(DataType::kFloat32, communicator).ok());
      EXPECT_NE(scaled.Of(DataType::kFloat32), scaled.Of(DataType::kFloat64));
    }
    EXPECT_EQ(libraries.CountCalls("ncclRedOpCreatePreMulSum"), 2);
    EXPECT_EQ(libraries.CountCalls("ncclRedOpDestroy"), 2);
    ScopedOps none({ReduceOp::kAverage, 1, 1});
    EXPECT_EQ(none.Add(DataType::kInt32, communicator).message,
              "NCCL has no such reduction: Average of int32");
  });
}

}  // namespace
}  // namespace keras_hvd::nccl
