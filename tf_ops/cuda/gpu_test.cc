// Streams, events and memory of a GPU.
#include "tf_ops/cuda/gpu.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <thread>

#include "tf_ops/testing/gpu/stand_in.h"

namespace keras_hvd::cuda {
namespace {

using stand_in::Call;

class GpuTest : public testing::TestWithParam<uint64_t> {
 protected:
  GpuTest() {
    control_->Reset(GetParam());
    EXPECT_EQ(Driver::Open(stand_in::kCudaLibrary, &driver_).message, "");
  }
  ~GpuTest() override {
    gpu_.reset();
    EXPECT_EQ(control_->Violations(), std::vector<std::string>());
    EXPECT_EQ(control_->CountLeaks().sum(), 0);
    // The threads of streams end here.
    control_->Reset(1);
  }

  void Open(int ordinal = 1) {
    ASSERT_EQ(Gpu::Open(driver_, ordinal, &gpu_).message, "");
  }
  Stream NewStream() {
    const Gpu::Current current(*gpu_);
    Stream stream = nullptr;
    EXPECT_EQ((*driver_)->create_stream(&stream, kStreamNonBlocking, 0),
              Result::kSuccess);
    return stream;
  }
  void Destroy(Stream stream) {
    const Gpu::Current current(*gpu_);
    EXPECT_EQ((*driver_)->destroy_stream(stream), Result::kSuccess);
  }
  Memory Allocate(Memory::Space space, size_t bytes) {
    Memory memory;
    EXPECT_EQ(Memory::Allocate(gpu_, space, bytes, &memory).message, "");
    return memory;
  }
  int64_t CountCalls(const std::string& function) {
    int64_t count = 0;
    for (const Call& call : control_->Calls()) {
      if (call.function == function) count += call.times;
    }
    return count;
  }

  const stand_in::StandIn control_;
  std::shared_ptr<const Driver> driver_;
  std::shared_ptr<Gpu> gpu_;
};

TEST_P(GpuTest, ItsStreamIsOfTheGreatestPriorityAndItsOwn) {
  Open();
  EXPECT_EQ(gpu_->ordinal(), 1);
  for (const Call& call : control_->Calls()) {
    if (call.function != "cuStreamCreateWithPriority") continue;
    EXPECT_EQ(call.arguments, "flags 1, priority -5");
  }
  EXPECT_EQ(CountCalls("cuStreamCreateWithPriority"), 1);
}

TEST_P(GpuTest, TimedEventsMeasureAndAreUsedAgain) {
  Open();
  Stream idle = nullptr;
  ASSERT_EQ(gpu_->OpenIdleStream(&idle).message, "");
  for (int round = 0; round < 5; ++round) {
    Event events[2] = {};
    for (Event& event : events) {
      ASSERT_EQ(gpu_->Record(idle, &event, Timing::kOn).message, "");
    }
    bool passed = false;
    while (!passed) ASSERT_EQ(gpu_->Query(events[1], &passed).message, "");
    std::chrono::nanoseconds elapsed(-1);
    ASSERT_EQ(gpu_->Elapsed(events[0], events[1], &elapsed).message, "");
    EXPECT_GE(elapsed.count(), 0);
    EXPECT_LT(elapsed, std::chrono::minutes(1));
    for (Event event : events) gpu_->Release(event, Timing::kOn);
  }
  EXPECT_EQ(CountCalls("cuEventCreate"), 2);
  // The others are none of these.
  Event event = nullptr;
  ASSERT_EQ(gpu_->Record(idle, &event).message, "");
  gpu_->Release(event);
  EXPECT_EQ(CountCalls("cuEventCreate"), 3);
  Stream again = nullptr;
  ASSERT_EQ(gpu_->OpenIdleStream(&again).message, "");
  EXPECT_EQ(again, idle);
}

TEST_P(GpuTest, AStreamWaitsForAnotherOnesEvent) {
  Open();
  const Stream caller = NewStream();
  std::vector<int> order;  // written by streams that wait for each other
  for (int round = 0; round < 10; ++round) {
    control_->Enqueue(caller, [&, round] { order.push_back(round); });
    Event event = nullptr;
    ASSERT_EQ(gpu_->Record(caller, &event).message, "");
    ASSERT_EQ(gpu_->MakeWait(gpu_->stream(), event).message, "");
    gpu_->Release(event);
    control_->Enqueue(gpu_->stream(), [&, round] { order.push_back(100 + round); });
    ASSERT_EQ(gpu_->Record(gpu_->stream(), &event).message, "");
    ASSERT_EQ(gpu_->MakeWait(caller, event).message, "");
    gpu_->Release(event);
  }
  EXPECT_EQ(control_->Synchronize(caller), "");
  ASSERT_EQ(order.size(), 20u);
  for (int round = 0; round < 10; ++round) {
    EXPECT_EQ(order[2 * round], round);
    EXPECT_EQ(order[2 * round + 1], 100 + round);
  }
  // One that is given back is used again, though streams still wait for it.
  EXPECT_EQ(CountCalls("cuEventCreate"), 1);
  Destroy(caller);
}

TEST_P(GpuTest, AnEventHasComeWhenItsStreamHas) {
  Open();
  const Stream caller = NewStream();
  control_->Hold(caller, true);
  Event event = nullptr;
  ASSERT_EQ(gpu_->Record(caller, &event).message, "");
  bool passed = true;
  ASSERT_EQ(gpu_->Query(event, &passed).message, "");
  EXPECT_FALSE(passed);
  control_->Hold(caller, false);
  while (!passed) {
    ASSERT_EQ(gpu_->Query(event, &passed).message, "");
    sched_yield();
  }
  gpu_->Release(event);
  Destroy(caller);
}

TEST_P(GpuTest, EventsOfSeveralThreads) {
  Open();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const Stream stream = NewStream();
      for (int round = 0; round < 50; ++round) {
        Event event = nullptr;
        EXPECT_EQ(gpu_->Record(stream, &event).message, "");
        EXPECT_EQ(gpu_->MakeWait(gpu_->stream(), event).message, "");
        gpu_->Release(event);
      }
      EXPECT_EQ(control_->Synchronize(stream), "");
      Destroy(stream);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(CountCalls("cuEventCreate"), 4);
}

TEST_P(GpuTest, CopiesGoInTheOrderOfItsStream) {
  Open();
  constexpr size_t kBytes = 1000;
  const Memory in = Allocate(Memory::Space::kHost, kBytes);
  const Memory out = Allocate(Memory::Space::kHost, kBytes);
  const Memory one = Allocate(Memory::Space::kDevice, kBytes);
  memset(in.data(), 7, kBytes);
  char* const result = static_cast<char*>(out.data());
  EXPECT_EQ(gpu_->CopyToDevice(one.data(), in.data(), kBytes).message, "");
  EXPECT_EQ(gpu_->SetZero(one.data(), 10).message, "");
  EXPECT_EQ(gpu_->CopyToHost(result, one.data(), kBytes).message, "");
  EXPECT_EQ(control_->Synchronize(gpu_->stream()), "");
  EXPECT_EQ(std::count(result, result + kBytes, 7), 990);
  EXPECT_EQ(std::count(result, result + 10, 0), 10);
}

TEST_P(GpuTest, MemoryMovesAndIsGivenBackOnce) {
  Open();
  Memory memory = Allocate(Memory::Space::kDevice, 100);
  void* const data = memory.data();
  Memory moved = std::move(memory);
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(moved.bytes(), 100u);
  EXPECT_EQ(memory.data(), nullptr);
  moved = Allocate(Memory::Space::kHost, 50);
  EXPECT_EQ(moved.bytes(), 50u);
  moved = Memory();
  EXPECT_EQ(CountCalls("cuMemFree"), 1);
  EXPECT_EQ(CountCalls("cuMemFreeHost"), 1);
  EXPECT_EQ(Allocate(Memory::Space::kDevice, 0).data(), nullptr);
}

TEST_P(GpuTest, MemoryOutlivesWhoMadeTheGpu) {
  Open();
  const Memory memory = Allocate(Memory::Space::kDevice, 100);
  gpu_.reset();
  EXPECT_EQ(control_->CountLeaks().contexts, 1);
}

TEST_P(GpuTest, KnowsTheDeviceOfAStream) {
  Open(2);
  int ordinal = -1;
  ASSERT_EQ(Gpu::DeviceOf(*driver_, gpu_->stream(), &ordinal).message, "");
  EXPECT_EQ(ordinal, 2);
  {
    const Gpu::Current current(*gpu_);
    ordinal = -1;
    ASSERT_EQ(Gpu::DeviceOf(*driver_, nullptr, &ordinal).message, "");
    EXPECT_EQ(ordinal, 2);
  }
  // No context is current here.
  EXPECT_EQ(Gpu::DeviceOf(*driver_, nullptr, &ordinal).message,
            "CUDA failed in cuStreamGetCtx: CUDA_ERROR_INVALID_CONTEXT, invalid device "
            "context");
}

// Calls everything, as far as it goes.
Status UseAll(const stand_in::StandIn& control,
              const std::shared_ptr<const Driver>& driver) {
  std::shared_ptr<Gpu> gpu;
  Status status = Gpu::Open(driver, 0, &gpu);
  if (!status.ok()) return status;
  int ordinal = 0;
  Event event = nullptr;
  Memory host, device;
  bool passed = false;
  status = Gpu::DeviceOf(*driver, gpu->stream(), &ordinal);
  if (status.ok()) {
    status = Memory::Allocate(gpu, Memory::Space::kHost, 10, &host);
  }
  if (status.ok()) {
    status = Memory::Allocate(gpu, Memory::Space::kDevice, 10, &device);
  }
  if (status.ok()) status = gpu->SetZero(device.data(), 10);
  if (status.ok()) {
    char* const bytes = static_cast<char*>(device.data());
    status = gpu->CopyOnDevice(bytes + 5, bytes, 5);
  }
  if (status.ok()) status = gpu->CopyToHost(host.data(), device.data(), 10);
  if (status.ok()) status = gpu->CopyToDevice(device.data(), host.data(), 10);
  if (status.ok()) status = gpu->Record(gpu->stream(), &event);
  if (status.ok()) status = gpu->MakeWait(gpu->stream(), event);
  while (status.ok() && !passed) status = gpu->Query(event, &passed);
  if (event != nullptr) gpu->Release(event);
  EXPECT_EQ(control->Synchronize(gpu->stream()), "");
  return status;
}

TEST_P(GpuTest, EveryErrorOfEveryCallIsSaidAndNothingIsLost) {
  for (const char* function :
       {"cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain",
        "cuCtxGetStreamPriorityRange", "cuStreamCreateWithPriority", "cuStreamGetCtx",
        "cuCtxGetDevice", "cuMemHostAlloc", "cuMemAlloc", "cuMemsetD8Async",
        "cuMemcpyDtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", "cuEventCreate",
        "cuEventRecord", "cuStreamWaitEvent", "cuEventQuery"}) {
    for (int code : {1, 2, 201, 700, 999}) {
      control_->Reset(GetParam() + code);
      EXPECT_EQ(Driver::Open(stand_in::kCudaLibrary, &driver_).message, "");
      control_->Inject({function, code});
      const Status status = UseAll(control_, driver_);
      EXPECT_EQ(status.code, Code::kInternal);
      EXPECT_EQ(
          status.message.rfind("CUDA failed in " + std::string(function) + ": ", 0), 0u)
          << status.message;
      EXPECT_EQ(control_->Violations(), std::vector<std::string>());
      EXPECT_EQ(control_->CountLeaks().sum(), 0) << function;
    }
  }
  EXPECT_EQ(UseAll(control_, driver_).message, "");
}

// A call without the GPU's context goes to another one, or to none.
TEST_P(GpuTest, WithoutItsContextNothingIsCalled) {
  Open();
  const Stream stream = NewStream();
  Event event = nullptr, timed = nullptr;
  ASSERT_EQ(gpu_->Record(stream, &event).message, "");
  ASSERT_EQ(gpu_->Record(stream, &timed, Timing::kOn).message, "");
  ASSERT_EQ(control_->Synchronize(stream), "");
  Memory memory = Allocate(Memory::Space::kDevice, 8);
  Memory taken;
  Stream idle = nullptr;
  std::chrono::nanoseconds elapsed;
  bool passed;
  char host[8];
  const std::vector<std::function<Status()>> calls = {
      [&] { return gpu_->Record(stream, &event); },
      [&] { return gpu_->MakeWait(stream, event); },
      [&] { return gpu_->Query(event, &passed); },
      [&] { return gpu_->Elapsed(timed, timed, &elapsed); },
      [&] { return gpu_->OpenIdleStream(&idle); },
      [&] { return gpu_->CopyToHost(host, memory.data(), 8); },
      [&] { return gpu_->CopyToDevice(memory.data(), host, 8); },
      [&] { return gpu_->CopyOnDevice(memory.data(), memory.data(), 8); },
      [&] { return gpu_->SetZero(memory.data(), 8); },
      [&] { return Memory::Allocate(gpu_, Memory::Space::kHost, 8, &taken); }};
  for (const std::function<Status()>& call : calls) {
    control_->Inject({"cuCtxPushCurrent", 999});
    const size_t before = control_->Calls().size();
    const std::string message = call().message;
    EXPECT_NE(message.find("cuCtxPushCurrent"), std::string::npos) << message;
    EXPECT_LE(control_->Calls().size(), before + 1);
  }
  gpu_->Release(event);
  gpu_->Release(timed, Timing::kOn);
  Destroy(stream);
}

TEST_P(GpuTest, AllocationsThatFailSayHowMuch) {
  Open();
  control_->Inject({"cuMemAlloc", 2});
  Memory memory;
  EXPECT_EQ(Memory::Allocate(gpu_, Memory::Space::kDevice, 12345, &memory).message,
            "CUDA failed in cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY, out of memory (12345 "
            "bytes, GPU 1)");
  EXPECT_EQ(memory.data(), nullptr);
}

INSTANTIATE_TEST_SUITE_P(Seeds, GpuTest, testing::Range<uint64_t>(1, 6));

}  // namespace
}  // namespace keras_hvd::cuda
