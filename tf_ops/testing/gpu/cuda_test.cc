// The stand-in of CUDA's driver: contexts, streams, events and memory, and wrong use.
#include <cstring>

#include "tf_ops/testing/gpu/testing.h"

namespace keras_hvd::stand_in {
namespace {

using cuda::Result;

TEST(CudaStandIn, LibrariesOfOtherVersionsLackAFunction) {
  void* const cuda = dlopen(kIncompleteCudaLibrary, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(cuda, nullptr) << dlerror();
  EXPECT_EQ(dlsym(cuda, "cuEventQuery"), nullptr);
  EXPECT_NE(dlsym(cuda, "cuEventRecord"), nullptr);
  void* const nccl = dlopen(kIncompleteNcclLibrary, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(nccl, nullptr) << dlerror();
  EXPECT_EQ(dlsym(nccl, "ncclCommSplit"), nullptr);
  EXPECT_NE(dlsym(nccl, "ncclAllReduce"), nullptr);
}

TEST(CudaStandIn, NoDevices) {
  Libraries()->Reset(1, 0);
  EXPECT_EQ(Cuda().init(0), kNoDevice);
  Libraries()->SetDevices(3);
  Expect(Cuda().init(0));
  int count = 0;
  Expect(Cuda().device_count(&count));
  EXPECT_EQ(count, 3);
}

TEST(CudaStandIn, NcclHasTheVersionThatItIsGiven) {
  Libraries()->Reset(1, 1);
  int version = 0;
  Expect(Nccl().version(&version));
  EXPECT_EQ(version, kNcclVersion);
  Libraries()->SetNcclVersion(21800);
  Expect(Nccl().version(&version));
  EXPECT_EQ(version, 21800);
}

TEST(CudaStandIn, CallsNeedAContext) {
  Libraries()->Reset(1, 1);
  Expect(Cuda().init(0));
  cuda::Context context = nullptr;
  cuda::Pointer memory = 0;
  EXPECT_EQ(Cuda().stream_context(nullptr, &context), kInvalidContext);
  EXPECT_TRUE(Libraries()->Violations().empty());  // that was a question
  EXPECT_EQ(Cuda().allocate(&memory, 8), kInvalidContext);
  EXPECT_TRUE(HasViolation("cuMemAlloc without a current context"));
  Rank rank(0, 0);
  Expect(Cuda().stream_context(nullptr, &context));
  cuda::Context of_stream = nullptr;
  Expect(Cuda().stream_context(rank.compute, &of_stream));
  EXPECT_EQ(context, of_stream);
}

TEST(CudaStandIn, WhatIsDestroyedIsAnError) {
  Libraries()->Reset(1, 1);
  Rank rank(0, 0);
  cuda::Event event = nullptr;
  Expect(Cuda().create_event(&event, cuda::kEventDefault));
  EXPECT_EQ(Libraries()->CountLeaks().events, 1);
  Expect(Cuda().destroy_event(event));
  EXPECT_EQ(Libraries()->CountLeaks().events, 0);
  EXPECT_EQ(Cuda().record_event(event, rank.compute), kInvalidHandle);
  EXPECT_EQ(Cuda().destroy_event(event), kInvalidHandle);
  void* const memory = rank.NewBytes(8);
  rank.Free(memory);
  EXPECT_EQ(Cuda().free(cuda::Address(memory)), kInvalidValue);
  EXPECT_EQ(Cuda().set_bytes(cuda::Address(memory), 0, 8, rank.compute), kInvalidValue);
  EXPECT_TRUE(HasViolation("device memory that has been freed"));
}

TEST(CudaStandIn, AWaitIsForTheLatestRecord) {
  for (int seed = 0; seed < 10; ++seed) {
    Libraries()->Reset(seed, 1);
    {
      Rank rank(0, 0);
      int* const value = rank.New<int>(1);
      *value = 0;
      cuda::Event event = nullptr;
      Expect(Cuda().create_event(&event, cuda::kEventDisableTiming));
      // Never recorded: nothing to wait for.
      Expect(Cuda().stream_wait_event(rank.collectives, event, 0));
      Expect(Cuda().query_event(event));
      Libraries()->Enqueue(rank.compute, [=] { *value += 1; });
      Expect(Cuda().record_event(event, rank.compute));
      Libraries()->Enqueue(rank.compute, [=] { *value += 1; });
      Expect(Cuda().record_event(event, rank.compute));
      Expect(Cuda().stream_wait_event(rank.collectives, event, 0));
      int seen = -1;
      Libraries()->Enqueue(rank.collectives, [=, &seen] { seen = *value; });
      EXPECT_EQ(Libraries()->Synchronize(rank.collectives), "");
      EXPECT_EQ(seen, 2);
      Expect(Cuda().destroy_event(event));
    }
    ExpectClean();
  }
}

TEST(CudaStandIn, CopiesBothWaysAndSetsBytes) {
  Libraries()->Reset(4, 1);
  {
    Rank rank(0, 0);
    void* host = nullptr;
    Expect(Cuda().allocate_host(&host, 8, 0));
    void* const device = rank.NewBytes(8);
    memcpy(host, "content", 8);
    const cuda::Pointer address = cuda::Address(device);
    Expect(Cuda().copy_to_device(address, host, 8, rank.compute));
    Expect(Cuda().set_bytes(address, '-', 3, rank.compute));
    Expect(Cuda().copy_to_host(host, address, 8, rank.compute));
    rank.AwaitStream(rank.compute);
    EXPECT_STREQ(static_cast<const char*>(host), "---tent");
    EXPECT_EQ(Libraries()->CountLeaks().host_allocations, 1);
    Expect(Cuda().free_host(host));
  }
  ExpectClean();
}

TEST(CudaStandIn, MeasuresBetweenTimedEvents) {
  Libraries()->Reset(1, 1);
  Rank rank(0, 0);
  cuda::Event events[2] = {};
  float milliseconds = -1;
  for (cuda::Event& event : events) {
    Expect(Cuda().create_event(&event, cuda::kEventDefault));
    Expect(Cuda().record_event(event, rank.compute));
  }
  rank.Await(events[1]);
  Expect(Cuda().elapsed_time(&milliseconds, events[0], events[1]));
  EXPECT_GE(milliseconds, 0);
  EXPECT_EQ(Cuda().elapsed_time(&milliseconds, rank.Record(rank.compute), events[1]),
            kInvalidHandle);
  EXPECT_TRUE(HasViolation("of an event without timing"));
  for (cuda::Event event : events) Expect(Cuda().destroy_event(event));
}

TEST(CudaStandIn, MeasuresNothingBeforeBothEventsHaveCome) {
  Libraries()->Reset(1, 1);
  {
    Rank rank(0, 0);
    cuda::Event events[2] = {};
    for (cuda::Event& event : events) {
      Expect(Cuda().create_event(&event, cuda::kEventDefault));
    }
    Expect(Cuda().record_event(events[0], rank.compute));
    rank.Await(events[0]);
    Libraries()->Hold(rank.compute, true);
    Expect(Cuda().record_event(events[1], rank.compute));
    float milliseconds = -1;
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(Cuda().elapsed_time(&milliseconds, events[i], events[1 - i]),
                cuda::Result::kNotReady);
    }
    Libraries()->Hold(rank.compute, false);
    rank.Await(events[1]);
    Expect(Cuda().elapsed_time(&milliseconds, events[0], events[1]));
    EXPECT_GT(milliseconds, 0);
    for (cuda::Event event : events) Expect(Cuda().destroy_event(event));
  }
  ExpectClean();
}

TEST(CudaStandIn, AnEventThatWasNotRecordedMeasuresNothing) {
  Libraries()->Reset(1, 1);
  Rank rank(0, 0);
  cuda::Event event = nullptr;
  Expect(Cuda().create_event(&event, cuda::kEventDefault));
  float milliseconds = -1;
  EXPECT_EQ(Cuda().elapsed_time(&milliseconds, event, event), kInvalidHandle);
  EXPECT_TRUE(HasViolation("of an event that was not recorded"));
  Expect(Cuda().destroy_event(event));
}

TEST(CudaStandIn, AHeldStreamDoesNotGoOn) {
  Libraries()->Reset(1, 1);
  Rank rank(0, 0);
  bool ran = false;
  Libraries()->Hold(rank.compute, true);
  Libraries()->Enqueue(rank.compute, [&] { ran = true; });
  const std::string why =
      Libraries()->Synchronize(rank.compute, std::chrono::milliseconds(20));
  EXPECT_TRUE(Contains(why, "does not get beyond a kernel")) << why;
  Libraries()->Hold(rank.compute, false);
  EXPECT_EQ(Libraries()->Synchronize(rank.compute), "");
  EXPECT_TRUE(ran);
}

TEST(CudaStandIn, CallsAreRecorded) {
  Libraries()->Reset(1, 1);
  Rank rank(3, 0);
  const cuda::Event event = rank.Record(rank.compute);
  for (int i = 0; i < 3; ++i) Cuda().query_event(event);
  const std::vector<Call> calls = Libraries()->Calls();
  EXPECT_EQ(calls.front().function, "cuInit");
  EXPECT_EQ(calls.back().function, "cuEventQuery");
  EXPECT_EQ(calls.back().times, 3);
  const Call& record = calls[calls.size() - 2];
  EXPECT_EQ(record.function, "cuEventRecord");
  EXPECT_EQ(record.stream, rank.compute);
  EXPECT_EQ(record.rank, 3);
  EXPECT_EQ(record.arguments, "event 1, stream 1");
}

TEST(CudaStandIn, InjectedErrors) {
  Libraries()->Reset(1, 1);
  Rank rank(0, 0);
  Libraries()->Inject({"cuMemAlloc", static_cast<int>(kOutOfMemory), 2});
  cuda::Pointer memory[3] = {};
  Expect(Cuda().allocate(&memory[0], 8));
  EXPECT_EQ(Cuda().allocate(&memory[1], 8), kOutOfMemory);
  Expect(Cuda().allocate(&memory[2], 8));
  for (int i : {0, 2}) Expect(Cuda().free(memory[i]));
  EXPECT_EQ(Libraries()->CountLeaks().device_allocations, 0);
}

}  // namespace
}  // namespace keras_hvd::stand_in
