// The stand-in of CUDA's driver: its streams, events and memory, and what it finds.
#include <gtest/gtest.h>

#include <cstring>

#include "tf_ops/testing/gpu/stand_in.h"

namespace keras_hvd::stand_in {
namespace {

using cuda::Result;

constexpr int kSeeds = 40;
constexpr int kCount = 64;

// A device with a stream for the caller's kernels and one for what is tested.
class Device {
 public:
  explicit Device(const StandIn& libraries) : cuda_(libraries.cuda()) {
    EXPECT_EQ(cuda_.init(0), Result::kSuccess);
    EXPECT_EQ(cuda_.retain_primary_context(&context_, 0), Result::kSuccess);
    EXPECT_EQ(cuda_.push_context(context_), Result::kSuccess);
    for (cuda::Stream* stream : {&compute, &copies}) {
      EXPECT_EQ(cuda_.create_stream(stream, cuda::kStreamNonBlocking, 0),
                Result::kSuccess);
    }
  }
  ~Device() {
    for (cuda::Stream stream : {compute, copies}) cuda_.destroy_stream(stream);
    cuda_.pop_context(&context_);
    cuda_.release_primary_context(0);
  }

  int* NewArray() {
    cuda::Pointer memory = 0;
    EXPECT_EQ(cuda_.allocate(&memory, kCount * sizeof(int)), Result::kSuccess);
    return reinterpret_cast<int*>(memory);
  }

  cuda::Event Record(cuda::Stream stream) {
    cuda::Event event = nullptr;
    EXPECT_EQ(cuda_.create_event(&event, cuda::kEventDisableTiming), Result::kSuccess);
    EXPECT_EQ(cuda_.record_event(event, stream), Result::kSuccess);
    return event;
  }

  void Await(cuda::Event event) {
    while (cuda_.query_event(event) == Result::kNotReady) sched_yield();
    EXPECT_EQ(cuda_.query_event(event), Result::kSuccess);
  }

  cuda::Stream compute = nullptr;
  cuda::Stream copies = nullptr;

 private:
  const cuda::Functions& cuda_;
  cuda::Context context_ = nullptr;
};

void Fill(int* array, int value) {
  for (int i = 0; i < kCount; ++i) array[i] = value;
}

TEST(CudaStandIn, EventsOrderStreams) {
  StandIn libraries;
  const cuda::Functions& cuda = libraries.cuda();
  for (int seed = 0; seed < kSeeds; ++seed) {
    libraries->Reset(seed, 1);
    {
      Device device(libraries);
      int* const from = device.NewArray();
      int* const to = device.NewArray();
      libraries->Enqueue(device.compute, [from] { Fill(from, 7); });
      const cuda::Event made = device.Record(device.compute);
      EXPECT_EQ(cuda.stream_wait_event(device.copies, made, 0), Result::kSuccess);
      EXPECT_EQ(cuda.copy_on_device(cuda::Address(to), cuda::Address(from),
                                    kCount * sizeof(int), device.copies),
                Result::kSuccess);
      const cuda::Event copied = device.Record(device.copies);
      EXPECT_EQ(cuda.stream_wait_event(device.compute, copied, 0), Result::kSuccess);
      libraries->Enqueue(device.compute, [from] { Fill(from, 8); });
      device.Await(copied);
      for (int i = 0; i < kCount; ++i) EXPECT_EQ(to[i], 7);
      EXPECT_EQ(libraries->Synchronize(device.compute), "");
      for (cuda::Event event : {made, copied}) cuda.destroy_event(event);
      for (int* array : {from, to}) cuda.free(cuda::Address(array));
    }
    EXPECT_EQ(libraries->Violations(), std::vector<std::string>());
    EXPECT_EQ(libraries->CountLeaks().sum(), 0);
  }
}

}  // namespace
}  // namespace keras_hvd::stand_in
