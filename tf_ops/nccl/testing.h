// For tests of NCCL's collectives: ranks as threads over libraries that stand in for
// CUDA and NCCL.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tf_ops/collectives/dtype.h"
#include "tf_ops/collectives/numbers_testing.h"
#include "tf_ops/collectives/reduce.h"
#include "tf_ops/cuda/gpu.h"
#include "tf_ops/nccl/communicator.h"
#include "tf_ops/nccl/reduction.h"
#include "tf_ops/testing/gpu/stand_in.h"

namespace keras_hvd::nccl {

inline bool KeepWaitingForEver(int64_t) {
  sched_yield();
  return true;
}

// Each rank has one of them.
inline constexpr int kDevices = 8;

// The libraries' capabilities, for all types.
inline constexpr Capabilities kAllTypes = {kFloat8Version, kFloat8Capability};

// The libraries, as new. At the end nothing made of them may be left.
class Libraries {
 public:
  explicit Libraries(uint64_t seed) {
    stand_in_->Reset(seed, kDevices);
    stand_in_->SetNcclVersion(kAllTypes.version);
    for (int device = 0; device < kDevices; ++device) {
      stand_in_->SetComputeCapability(device, kAllTypes.compute_capability);
    }
    EXPECT_EQ(cuda::Driver::Open(stand_in::kCudaLibrary, &driver).message, "");
    EXPECT_EQ(Library::Open(stand_in::kNcclLibrary, &nccl).message, "");
  }
  ~Libraries() {
    EXPECT_EQ(control()->Violations(), std::vector<std::string>());
    EXPECT_EQ(control()->CountLeaks().sum(), 0);
    // The threads of streams end here.
    control()->Reset(1);
  }

  const stand_in::StandIn& control() const { return stand_in_; }
  int CountCalls(const std::string& function) const {
    int64_t count = 0;
    for (const stand_in::Call& call : control()->Calls()) {
      if (call.function == function) count += call.times;
    }
    return static_cast<int>(count);
  }

  std::shared_ptr<const cuda::Driver> driver;
  std::shared_ptr<const Library> nccl;

 private:
  stand_in::StandIn stand_in_;
};

// One rank, on a GPU of its own, with the stream of a caller.
class Rank {
 public:
  Rank(const Libraries& libraries, int index) : libraries_(libraries), index_(index) {
    libraries.control()->SetRank(index);
    EXPECT_EQ(cuda::Gpu::Open(libraries.driver, index, &gpu).message, "");
    const cuda::Gpu::Current current(*gpu);
    EXPECT_EQ((*libraries.driver)->create_stream(&caller, cuda::kStreamNonBlocking, 0),
              cuda::Result::kSuccess);
  }
  ~Rank() {
    const cuda::Gpu::Current current(*gpu);
    if (communicator != nullptr) {
      EXPECT_EQ(communicator->Finalize().message, "");
    }
    communicator.reset();
    EXPECT_EQ((*libraries_.driver)->destroy_stream(caller), cuda::Result::kSuccess);
  }

  Status Create(const UniqueId& id, int count,
                KeepWaiting keep_waiting = KeepWaitingForEver) {
    watch_ = std::make_unique<CallWatch>(
        std::move(keep_waiting), [](const AbortCall& abort) { abort(); },
        [] { ADD_FAILURE() << "a call is stuck"; });
    const cuda::Gpu::Current current(*gpu);
    std::unique_ptr<Communicator> created;
    const Status status = Communicator::Create(libraries_.nccl, id, count, index_,
                                               gpu->stream(), watch_.get(), &created);
    if (status.ok()) communicator = std::move(created);
    return status;
  }

  int index() const { return index_; }
  const Libraries& libraries() const { return libraries_; }

  // Has these bytes as soon as the caller's stream has come there, and not before.
  cuda::Memory Input(std::vector<char> bytes) const {
    cuda::Memory memory = Output(bytes.size());
    char* const to = static_cast<char*>(memory.data());
    if (!bytes.empty()) {
      libraries_.control()->Enqueue(caller, [to, bytes = std::move(bytes)] {
        memcpy(to, bytes.data(), bytes.size());
      });
    }
    return memory;
  }
  cuda::Memory Output(int64_t bytes) const {
    cuda::Memory memory;
    EXPECT_EQ(cuda::Memory::Allocate(gpu, cuda::Memory::Space::kDevice, bytes, &memory)
                  .message,
              "");
    return memory;
  }
  // Runs a collective behind the caller's stream, and that one behind it.
  void Run(const std::function<Status()>& collective) const {
    const cuda::Gpu::Current current(*gpu);
    Follow(caller, gpu->stream());
    EXPECT_EQ(collective().message, "");
    Follow(gpu->stream(), caller);
  }
  // The memory's content when the caller's stream has come here.
  std::vector<char> Contents(const cuda::Memory& memory) const {
    std::vector<char> bytes(memory.bytes());
    const void* const from = memory.data();
    if (!bytes.empty()) {
      libraries_.control()->Enqueue(
          caller, [&bytes, from] { memcpy(bytes.data(), from, bytes.size()); });
    }
    EXPECT_EQ(libraries_.control()->Synchronize(caller), "");
    return bytes;
  }

  std::shared_ptr<cuda::Gpu> gpu;
  cuda::Stream caller = nullptr;

 private:
  std::unique_ptr<CallWatch> watch_;

 public:
  std::unique_ptr<Communicator> communicator;  // before its watch ends

 private:
  void Follow(cuda::Stream first, cuda::Stream second) const {
    cuda::Event event = nullptr;
    EXPECT_EQ(gpu->Record(first, &event).message, "");
    EXPECT_EQ(gpu->MakeWait(second, event).message, "");
    gpu->Release(event);
  }

  const Libraries& libraries_;
  const int index_;
};

// Runs `body(index)` on a thread for each rank.
inline void RunThreads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int index = 0; index < count; ++index) threads.emplace_back(body, index);
  for (std::thread& thread : threads) thread.join();
}

// Runs `body` on ranks that have a communicator of all, each on a thread of its own.
inline void RunRanks(const Libraries& libraries, int count,
                     const std::function<void(Rank*)>& body) {
  UniqueId id;
  EXPECT_EQ(Communicator::NewId(*libraries.nccl, &id).message, "");
  RunThreads(count, [&](int index) {
    Rank rank(libraries, index);
    EXPECT_EQ(rank.Create(id, count).message, "");
    if (rank.communicator != nullptr) body(&rank);
  });
}

// A rank's tensor: numbers of which sums and products of a few are exact in all types.
inline std::vector<char> Numbers(DataType dtype, int64_t elements, int rank,
                                 uint64_t seed) {
  std::vector<double> numbers(elements);
  for (int64_t i = 0; i < elements; ++i) {
    const uint64_t number = (i * 7 + rank * 3 + seed) * 2654435761u >> 7;
    numbers[i] = static_cast<double>(number % (dtype == DataType::kBool ? 2 : 4));
  }
  return Encoded(dtype, numbers);
}

// The reduction of all ranks' Numbers, one after another.
inline double Reduced(const Reduction& reduction,
                      const std::vector<std::vector<double>>& tensors, int64_t i) {
  double result = tensors[0][i] * reduction.prescale;
  for (size_t rank = 1; rank < tensors.size(); ++rank) {
    const double next = tensors[rank][i] * reduction.prescale;
    switch (reduction.op) {
      case ReduceOp::kMin: result = std::min(result, next); break;
      case ReduceOp::kMax: result = std::max(result, next); break;
      case ReduceOp::kProduct: result *= next; break;
      default: result += next;
    }
  }
  if (reduction.op == ReduceOp::kAverage) result /= tensors.size();
  return result * reduction.postscale;
}

// How much a result of a few of them may differ, relatively: NCCL rounds each step.
inline double ToleranceOfNccl(DataType dtype) {
  // Four times the error of each step.
  if (dtype == DataType::kFloat16) return 1.0 / (1 << 8);
  if (dtype == DataType::kBfloat16) return 1.0 / (1 << 5);
  if (dtype == DataType::kFloat32) return 4 * std::numeric_limits<float>::epsilon();
  if (dtype == DataType::kFloat64) return 4 * std::numeric_limits<double>::epsilon();
  return Tolerance(dtype);
}

// Expects a tensor to be the reduction of all ranks' `tensors`, from element `start`
// on.
inline void ExpectReduced(const Reduction& reduction, DataType dtype,
                          const std::vector<std::vector<char>>& tensors, int64_t start,
                          const std::vector<char>& result) {
  std::vector<std::vector<double>> inputs;
  for (const std::vector<char>& tensor : tensors) {
    inputs.push_back(Decoded(dtype, tensor));
  }
  const std::vector<double> numbers = Decoded(dtype, result);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const double expected = Reduced(reduction, inputs, start + i);
    ASSERT_NEAR(numbers[i], expected, std::abs(expected) * ToleranceOfNccl(dtype))
        << Name(reduction.op) << " of " << Name(dtype) << ", element " << start + i;
  }
}

inline const std::vector<Reduction>& SomeReductions() {
  static const auto* const reductions = new std::vector<Reduction>{
      {ReduceOp::kSum, 1, 1},       {ReduceOp::kAverage, 1, 1},
      {ReduceOp::kMin, 1, 1},       {ReduceOp::kMax, 1, 1},
      {ReduceOp::kProduct, 1, 1},   {ReduceOp::kSum, 0.5, 1},
      {ReduceOp::kSum, 1, 0.25},    {ReduceOp::kSum, 0.5, 2},
      {ReduceOp::kSum, 0.1, 3},     {ReduceOp::kAverage, 0.5, 1},
      {ReduceOp::kAverage, 1, 0.1},
  };
  return *reductions;
}

}  // namespace keras_hvd::nccl
