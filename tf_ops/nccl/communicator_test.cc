// Communicators: how they come and go, and what happens when a member or NCCL fails.
#include "tf_ops/nccl/communicator.h"

#include <pthread.h>
#include <stdlib.h>

#include <atomic>
#include <new>

#include "tf_ops/nccl/allgather.h"
#include "tf_ops/nccl/allreduce.h"
#include "tf_ops/nccl/alltoall.h"
#include "tf_ops/nccl/broadcast.h"
#include "tf_ops/nccl/reducescatter.h"
#include "tf_ops/nccl/testing.h"

namespace keras_hvd::nccl {
namespace {

constexpr DataType kFloat = DataType::kFloat32;

Status AllreduceOne(Rank* rank, const cuda::Memory& memory, double scale = 1) {
  const int64_t elements = memory.bytes() / Bytes(kFloat);
  return Allreduce(
      {{ReduceOp::kSum, scale, 1}, {{kFloat, elements, memory.data(), memory.data()}}},
      rank->communicator.get());
}

// Waits so many times, and no more.
KeepWaiting Patience(int polls) {
  return [polls](int64_t poll) { return KeepWaitingForEver(poll) && poll < polls; };
}

// So that nobody gives up before all have come this far.
void AwaitAll(int count, std::atomic<int>* arrived) {
  *arrived += 1;
  while (*arrived < count) sched_yield();
}

class CommunicatorTest : public testing::TestWithParam<int> {};

TEST_P(CommunicatorTest, MembersHaveTheirPlaces) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Libraries libraries(seed);
    RunRanks(libraries, GetParam(), [&](Rank* rank) {
      EXPECT_EQ(rank->communicator->count(), GetParam());
      EXPECT_EQ(rank->communicator->index(), rank->index());
      EXPECT_EQ(rank->communicator->stream(), rank->gpu->stream());
      EXPECT_TRUE(rank->communicator->usable());
      EXPECT_EQ(rank->communicator->AsyncError().message, "");
    });
    EXPECT_EQ(libraries.CountCalls("ncclCommAbort"), 0);
    // Of the communicator, and of its control.
    EXPECT_EQ(libraries.CountCalls("ncclCommFinalize"), 2 * GetParam());
  }
}

// Even and odd ranks, the greatest first, without the last one.
TEST_P(CommunicatorTest, SplitsIntoParts) {
  const int members = GetParam() - 1;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Libraries libraries(seed);
    RunRanks(libraries, GetParam(), [&](Rank* rank) {
      const cuda::Gpu::Current current(*rank->gpu);
      const int self = rank->index();
      std::unique_ptr<Communicator> part;
      if (self == members) {
        EXPECT_EQ(rank->communicator->Split(kNoColor, 0, 0, 0, &part).message, "");
        EXPECT_EQ(part, nullptr);
        return;
      }
      std::vector<char> expected;
      int index = 0;
      for (int member = members - 1; member >= 0; --member) {
        if (member % 2 != self % 2) continue;
        if (member == self) index = static_cast<int>(expected.size());
        expected.push_back(static_cast<char>(member));
      }
      const int count = static_cast<int>(expected.size());
      ASSERT_EQ(rank->communicator->Split(self % 2, -self, count, index, &part).message,
                "");
      std::swap(part, rank->communicator);
      const cuda::Memory input = rank->Input({static_cast<char>(self)});
      const cuda::Memory output = rank->Output(count);
      rank->Run([&] {
        return Allgather(
            {{{input.data(), output.data(), 1, std::vector<int64_t>(count, 1)}}},
            rank->communicator.get());
      });
      EXPECT_EQ(rank->Contents(output), expected);
      std::swap(part, rank->communicator);
      EXPECT_EQ(part->Finalize().message, "");
    });
  }
}

TEST_P(CommunicatorTest, InitIsGivenUpWithoutAMember) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Libraries libraries(seed);
    UniqueId id;
    ASSERT_EQ(Communicator::NewId(*libraries.nccl, &id).message, "");
    RunThreads(GetParam(), [&](int index) {
      Rank rank(libraries, index);
      const Status status = rank.Create(id, GetParam() + 1, Patience(20));
      EXPECT_EQ(status.code, Code::kRankFailed);
      EXPECT_EQ(status.message,
                "ncclCommInitRankConfig was given up: a member of the communicator has "
                "failed, or the job ends");
      EXPECT_EQ(rank.communicator, nullptr);
    });
    EXPECT_EQ(libraries.CountCalls("ncclCommAbort"), GetParam());
  }
}

TEST_P(CommunicatorTest, ASplitIsGivenUpWithoutAMember) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Libraries libraries(seed);
    UniqueId id;
    ASSERT_EQ(Communicator::NewId(*libraries.nccl, &id).message, "");
    std::atomic<bool> waiting = true;
    std::atomic<int> arrived = 0;
    RunThreads(GetParam() + 1, [&](int index) {
      Rank rank(libraries, index);
      ASSERT_EQ(
          rank.Create(id, GetParam() + 1,
                      [&](int64_t poll) { return KeepWaitingForEver(poll) && waiting; })
              .message,
          "");
      AwaitAll(GetParam() + 1, &arrived);
      if (index == GetParam()) {
        waiting = false;
        rank.communicator.reset();
        return;
      }
      std::unique_ptr<Communicator> part;
      const Status status =
          rank.communicator->Split(0, index, GetParam() + 1, index, &part);
      EXPECT_EQ(status.code, Code::kRankFailed) << status.message;
      EXPECT_EQ(part, nullptr);
      EXPECT_FALSE(rank.communicator->usable());
      rank.communicator.reset();
    });
  }
}

// NCCL may write the unfinished communicator as late as when its control is aborted.
TEST_P(CommunicatorTest, WhatIsLeftOfAnUnfinishedInitIsGivenBack) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    Libraries libraries(seed);
    UniqueId id;
    ASSERT_EQ(Communicator::NewId(*libraries.nccl, &id).message, "");
    // The last one does not split the control.
    stand_in::Injection injection = {"ncclCommSplit", 2};
    injection.rank = GetParam();
    libraries.control()->Inject(injection);
    RunThreads(GetParam() + 1, [&](int index) {
      Rank rank(libraries, index);
      const auto splits = [&] { return libraries.CountCalls("ncclCommSplit"); };
      const Status status = rank.Create(id, GetParam() + 1, [&](int64_t poll) {
        return KeepWaitingForEver(poll) && splits() <= GetParam();
      });
      EXPECT_FALSE(status.ok());
    });
    EXPECT_GE(libraries.CountCalls("ncclCommAbort"), 2 * GetParam() + 1);
  }
}

// A call of a thread that has nobody to wait for any more, in its group.
void ExpectGivenUp(const Status& status, Rank* rank, const cuda::Memory& memory) {
  EXPECT_EQ(status.message,
            "ncclGroupEnd was given up: a member of the communicator has failed, or "
            "the job ends");
  EXPECT_FALSE(rank->communicator->usable());
  EXPECT_EQ(AllreduceOne(rank, memory).message,
            "ncclGroupStart cannot be called: the communicator has failed");
  EXPECT_EQ(rank->communicator->Finalize().code, Code::kRankFailed);
  rank->communicator->Abort();
  EXPECT_EQ(rank->communicator->Finalize().message,
            "ncclCommFinalize cannot be called: the communicator was given back");
  EXPECT_EQ(rank->communicator->AsyncError().code, Code::kRankFailed);
}

// Runs ranks, the last of which leaves without a word where the others wait for it.
void RunWithoutTheLast(uint64_t seed, int count,
                       const std::function<void(const Libraries&, Rank*)>& before,
                       const std::function<void(Rank*)>& body) {
  Libraries libraries(seed);
  UniqueId id;
  ASSERT_EQ(Communicator::NewId(*libraries.nccl, &id).message, "");
  std::atomic<bool> waiting = true;
  std::atomic<int> arrived = 0;
  RunThreads(count, [&](int index) {
    Rank rank(libraries, index);
    const cuda::Gpu::Current current(*rank.gpu);
    ASSERT_EQ(
        rank.Create(id, count,
                    [&](int64_t poll) { return KeepWaitingForEver(poll) && waiting; })
            .message,
        "");
    before(libraries, &rank);
    AwaitAll(count, &arrived);
    if (index == count - 1) {
      waiting = false;
      rank.communicator.reset();
    } else {
      body(&rank);
    }
    rank.communicator.reset();
    EXPECT_EQ(libraries.control()->Synchronize(rank.gpu->stream()), "");
  });
}

// NCCL connects members when they first meet in a collective.
TEST_P(CommunicatorTest, AFirstUseIsGivenUpWithoutAMember) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    RunWithoutTheLast(
        seed, GetParam() + 1, [](const Libraries&, Rank*) {},
        [](Rank* rank) {
          const cuda::Memory memory = rank->Output(100);
          ExpectGivenUp(AllreduceOne(rank, memory, 0.5), rank, memory);
        });
  }
}

TEST_P(CommunicatorTest, ACallIntoAFullQueueIsGivenUp) {
  constexpr int kRoom = 3;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    const auto use_once = [](const Libraries& libraries, Rank* rank) {
      libraries.control()->LimitQueue(kRoom);
      const cuda::Memory memory = rank->Output(100);
      EXPECT_EQ(AllreduceOne(rank, memory).message, "");
      EXPECT_EQ(libraries.control()->Synchronize(rank->gpu->stream()), "");
    };
    RunWithoutTheLast(seed, GetParam() + 1, use_once, [](Rank* rank) {
      const cuda::Memory memory = rank->Output(100);
      for (int call = 0; call < kRoom; ++call) {
        ASSERT_EQ(AllreduceOne(rank, memory).message, "");
      }
      ExpectGivenUp(AllreduceOne(rank, memory), rank, memory);
      // Until the stream has run out, its work uses the memory.
      EXPECT_EQ(rank->libraries().control()->Synchronize(rank->gpu->stream()), "");
    });
  }
}

TEST_P(CommunicatorTest, AnEndIsGivenUpWithoutAMember) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    const auto use_once = [](const Libraries& libraries, Rank* rank) {
      const cuda::Memory memory = rank->Output(100);
      EXPECT_EQ(AllreduceOne(rank, memory).message, "");
      EXPECT_EQ(libraries.control()->Synchronize(rank->gpu->stream()), "");
    };
    RunWithoutTheLast(seed, GetParam() + 1, use_once, [](Rank* rank) {
      const cuda::Memory memory = rank->Output(100);
      ASSERT_EQ(AllreduceOne(rank, memory).message, "");
      EXPECT_EQ(rank->communicator->Finalize().message,
                "ncclCommFinalize was given up: a member of the communicator has "
                "failed, or the job ends");
      rank->communicator->Abort();
      EXPECT_EQ(rank->libraries().control()->Synchronize(rank->gpu->stream()), "");
    });
  }
}

// NCCL starts a thread for each group of a nonblocking communicator, and whoever asks
// whether it has ended joins that thread.
TEST_P(CommunicatorTest, NobodyAsksAfterAGroup) {
  Libraries libraries(1);
  std::atomic<int> arrived = 0;
  int polls = 0;
  RunRanks(libraries, GetParam(), [&](Rank* rank) {
    const cuda::Memory memory = rank->Output(100);
    AwaitAll(GetParam(), &arrived);
    if (rank->index() == 0) polls = libraries.CountCalls("ncclCommGetAsyncError");
    AwaitAll(2 * GetParam(), &arrived);
    for (int call = 0; call < 10; ++call) {
      rank->Run([&] { return AllreduceOne(rank, memory); });
    }
    AwaitAll(3 * GetParam(), &arrived);
    if (rank->index() == 0) {
      EXPECT_EQ(libraries.CountCalls("ncclGroupEnd"), 10 * GetParam());
      EXPECT_EQ(libraries.CountCalls("ncclCommGetAsyncError"), polls);
    }
    AwaitAll(4 * GetParam(), &arrived);
    EXPECT_EQ(libraries.control()->Synchronize(rank->caller), "");
  });
}

// By NCCL_COMM_BLOCKING=0, all communicators.
TEST_P(CommunicatorTest, CallsMayBeNonblocking) {
  ASSERT_EQ(setenv("NCCL_COMM_BLOCKING", "0", 1), 0);
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Libraries libraries(seed);
    RunRanks(libraries, GetParam(), [&](Rank* rank) {
      const cuda::Gpu::Current current(*rank->gpu);
      std::unique_ptr<Communicator> part;
      ASSERT_EQ(
          rank->communicator->Split(0, rank->index(), GetParam(), rank->index(), &part)
              .message,
          "");
      const cuda::Memory memory = rank->Output(100);
      for (int call = 0; call < 5; ++call) {
        rank->Run([&] { return AllreduceOne(rank, memory, 0.5); });
        std::swap(part, rank->communicator);
      }
      std::swap(part, rank->communicator);
      EXPECT_EQ(libraries.control()->Synchronize(rank->caller), "");
      EXPECT_EQ(part->Finalize().message, "");
    });
    RunWithoutTheLast(
        seed, GetParam() + 1, [](const Libraries&, Rank*) {},
        [](Rank* rank) {
          const cuda::Memory memory = rank->Output(100);
          rank->libraries().control()->HoldProgress(rank->index(), true);
          ExpectGivenUp(AllreduceOne(rank, memory), rank, memory);
        });
  }
  ASSERT_EQ(unsetenv("NCCL_COMM_BLOCKING"), 0);
}

// There is no memory while a group is being put together.
TEST_P(CommunicatorTest, WhatRaisesInAGroupEndsTheGroup) {
  Libraries libraries(1);
  UniqueId id;
  ASSERT_EQ(Communicator::NewId(*libraries.nccl, &id).message, "");
  RunThreads(GetParam(), [&](int index) {
    Rank rank(libraries, index);
    ASSERT_EQ(rank.Create(id, GetParam()).message, "");
    const cuda::Gpu::Current current(*rank.gpu);
    const Status status =
        rank.communicator->Group([]() -> Status { throw std::bad_alloc(); });
    EXPECT_EQ(status.message, "out of memory");
    EXPECT_FALSE(rank.communicator->usable());
    rank.communicator.reset();
  });
  EXPECT_EQ(libraries.CountCalls("ncclGroupStart"), GetParam());
  EXPECT_EQ(libraries.CountCalls("ncclGroupEnd"), GetParam());
}

// No room for the thread of the watch, which starts with the first group.
TEST(CommunicatorErrorTest, AWatchWithoutAThreadIsAnError) {
  Libraries libraries(1);
  UniqueId id;
  ASSERT_EQ(Communicator::NewId(*libraries.nccl, &id).message, "");
  Rank rank(libraries, 0);
  ASSERT_EQ(rank.Create(id, 1).message, "");
  const cuda::Gpu::Current current(*rank.gpu);
  const cuda::Memory memory = rank.Output(100);
  pthread_attr_t usual, none;
  ASSERT_EQ(pthread_getattr_default_np(&usual), 0);
  ASSERT_EQ(pthread_attr_init(&none), 0);
  // More than there are addresses.
  ASSERT_EQ(pthread_attr_setstacksize(&none, size_t{1} << 47), 0);
  ASSERT_EQ(pthread_setattr_default_np(&none), 0);
  const Status status = AllreduceOne(&rank, memory);
  ASSERT_EQ(pthread_setattr_default_np(&usual), 0);
  pthread_attr_destroy(&none);
  pthread_attr_destroy(&usual);
  EXPECT_NE(status.message.find("no room for another thread"), std::string::npos)
      << status.message;
  EXPECT_FALSE(rank.communicator->usable());
  rank.communicator.reset();
  EXPECT_EQ(libraries.CountCalls("ncclGroupStart"), 0);
}

// The others' collectives hang on the GPU until they abort them.
TEST_P(CommunicatorTest, AnAbortEndsWhatIsEnqueued) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Libraries libraries(seed);
    UniqueId id;
    ASSERT_EQ(Communicator::NewId(*libraries.nccl, &id).message, "");
    RunThreads(GetParam() + 1, [&](int index) {
      Rank rank(libraries, index);
      ASSERT_EQ(rank.Create(id, GetParam() + 1).message, "");
      const cuda::Memory memory = rank.Output(100);
      rank.Run([&] { return AllreduceOne(&rank, memory); });
      if (index < GetParam()) {
        rank.Run([&] { return AllreduceOne(&rank, memory); });
        EXPECT_EQ(rank.communicator->AsyncError().message, "");
      }
      rank.communicator->Abort();
      rank.communicator.reset();
      EXPECT_EQ(libraries.control()->Synchronize(rank.caller), "");
    });
  }
}

// ---- Errors of NCCL

// Every collective, even and uneven, a split, and the end.
Status UseAll(Rank* rank, const cuda::Memory& input, const cuda::Memory& output) {
  Communicator* const communicator = rank->communicator.get();
  const std::vector<int64_t> even = {3, 3}, uneven = {4, 1};
  const void* const from = input.data();
  void* const to = output.data();
  Status status =
      Allreduce({{ReduceOp::kSum, 0.5, 1}, {{kFloat, 4, from, to}}}, communicator);
  if (status.ok()) status = Broadcast({1, 10, from, to}, communicator);
  if (status.ok()) status = Allgather({{{from, to, 1, even}}}, communicator);
  if (status.ok()) status = Allgather({{{from, to, 1, uneven}}}, communicator);
  if (status.ok()) {
    status = Reducescatter({{}, {{kFloat, 4, 1, from, to}}}, communicator);
  }
  if (status.ok()) {
    status = Reducescatter({{}, {{kFloat, 5, 1, from, to}}}, communicator);
  }
  if (status.ok()) status = Alltoall({from, to, 1, even, even}, communicator);
  std::unique_ptr<Communicator> part;
  if (status.ok()) {
    status = communicator->Split(0, rank->index(), 2, rank->index(), &part);
  }
  if (status.ok()) status = part->Finalize();
  return status.ok() ? communicator->Finalize() : status;
}

// Two ranks, of which the first meets the error and the second waits until it hears of
// it. Returns the first one's end.
Status UseAllWithError(Libraries* libraries, const stand_in::Injection& injection) {
  UniqueId id;
  EXPECT_EQ(Communicator::NewId(*libraries->nccl, &id).message, "");
  libraries->control()->Inject(injection);
  std::atomic<bool> waiting = true;
  Status first;
  RunThreads(2, [&](int index) {
    Rank rank(*libraries, index);
    const cuda::Gpu::Current current(*rank.gpu);
    const cuda::Memory input = rank.Output(64), output = rank.Output(64);
    Status status = rank.Create(
        id, 2, [&](int64_t poll) { return KeepWaitingForEver(poll) && waiting; });
    if (status.ok()) status = UseAll(&rank, input, output);
    if (!status.ok()) waiting = false;
    rank.communicator.reset();
    EXPECT_EQ(libraries->control()->Synchronize(rank.gpu->stream()), "");
    if (index == 0) first = status;
  });
  return first;
}

const char* const kCalls[] = {"ncclCommInitRankConfig",
                              "ncclRedOpCreatePreMulSum",
                              "ncclGroupStart",
                              "ncclAllReduce",
                              "ncclGroupEnd",
                              "ncclBroadcast",
                              "ncclAllGather",
                              "ncclReduceScatter",
                              "ncclReduce",
                              "ncclSend",
                              "ncclRecv",
                              "ncclCommSplit",
                              "ncclCommFinalize",
                              "ncclCommGetAsyncError"};

TEST(CommunicatorErrorTest, EveryErrorOfEveryCallIsSaidAndNothingIsLost) {
  for (const char* function : kCalls) {
    for (int code = 1; code <= 6; ++code) {
      Libraries libraries(code);
      stand_in::Injection injection = {function, code};
      injection.rank = 0;
      const Status status = UseAllWithError(&libraries, injection);
      EXPECT_EQ(status.code, Code::kInternal) << function;
      EXPECT_EQ(
          status.message.rfind("NCCL failed in " + std::string(function) + ": ", 0), 0u)
          << status.message;
    }
  }
}

TEST(CommunicatorErrorTest, EveryErrorBehindACallIsSaidAndNothingIsLost) {
  for (const char* function : kCalls) {
    const std::string name = function;
    if (name == "ncclGroupStart") continue;  // of no communicator
    for (int code = 1; code <= 6; ++code) {
      Libraries libraries(code);
      stand_in::Injection injection = {function, code};
      injection.rank = 0;
      injection.asynchronous = true;
      const Status status = UseAllWithError(&libraries, injection);
      EXPECT_EQ(status.code, Code::kInternal) << function;
      EXPECT_EQ(status.message.rfind("NCCL failed in ", 0), 0u) << status.message;
      EXPECT_NE(status.message.find("injected into " + name), std::string::npos)
          << status.message;
    }
  }
}

TEST(CommunicatorErrorTest, WhatNobodyNeedsMayFail) {
  for (const char* function : {"ncclRedOpDestroy", "ncclCommAbort"}) {
    Libraries libraries(1);
    stand_in::Injection injection = {function, 3};
    injection.rank = 0;
    UniqueId id;
    ASSERT_EQ(Communicator::NewId(*libraries.nccl, &id).message, "");
    libraries.control()->Inject(injection);
    RunThreads(2, [&](int index) {
      Rank rank(libraries, index);
      ASSERT_EQ(rank.Create(id, 2).message, "");
      const cuda::Memory memory = rank.Output(100);
      rank.Run([&] { return AllreduceOne(&rank, memory, 0.5); });
      EXPECT_EQ(libraries.control()->Synchronize(rank.caller), "");
      rank.communicator.reset();
    });
  }
}

TEST(CommunicatorErrorTest, AnIdOrAnEndThatFailsIsSaid) {
  Libraries libraries(1);
  UniqueId id;
  libraries.control()->Inject({"ncclGetUniqueId", 2});
  EXPECT_EQ(Communicator::NewId(*libraries.nccl, &id).message,
            "NCCL failed in ncclGetUniqueId: unhandled system error. With "
            "NCCL_DEBUG=WARN in the environment it says more");
  ASSERT_EQ(Communicator::NewId(*libraries.nccl, &id).message, "");
  libraries.control()->Inject({"ncclCommDestroy", 1});
  {
    Rank rank(libraries, 0);
    ASSERT_EQ(rank.Create(id, 1).message, "");
    const Status status = rank.communicator->Finalize();
    EXPECT_EQ(status.message.rfind("NCCL failed in ncclCommDestroy: ", 0), 0u);
    rank.communicator.reset();
  }
  // It is lost: a call that has failed half-way must not be made again. Its control is
  // aborted.
  EXPECT_EQ(libraries.CountCalls("ncclCommAbort"), 1);
  EXPECT_EQ(libraries.control()->CountLeaks().communicators, 1);
  libraries.control()->Reset(1);
}

// Met after its group was enqueued, by whoever asks.
TEST(CommunicatorErrorTest, AnErrorOfACollectiveThatRuns) {
  Libraries libraries(1);
  RunRanks(libraries, 1, [&](Rank* rank) {
    libraries.control()->Inject({"ncclCommGetAsyncError", 6, 1, true});
    const Status status = rank->communicator->AsyncError();
    EXPECT_EQ(status.message,
              "NCCL failed in a collective that it had begun: remote process exited or "
              "there was a network error: injected into ncclCommGetAsyncError. With "
              "NCCL_DEBUG=WARN in the environment it says more");
    rank->communicator.reset();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, CommunicatorTest, testing::Range(1, 5));

}  // namespace
}  // namespace keras_hvd::nccl
