// The stand-in of NCCL: its collectives, communicators, and how they fail.
#include <atomic>

#include "tf_ops/testing/gpu/testing.h"

namespace keras_hvd::stand_in {
namespace {

using nccl::Comm;
using nccl::Result;
using nccl::Type;

constexpr int kSeeds = 10;

template <typename T>
std::vector<T> Read(const T* memory, size_t count) {
  return {memory, memory + count};
}

// A stream's work without a kernel behind it, ordered and awaited.
template <typename T>
std::vector<T> Outcome(Rank& rank, const T* output, size_t count) {
  rank.AwaitStream(rank.collectives);
  return Read(output, count);
}

// ---- Collectives

TEST(NcclStandIn, Reduces) {
  struct Case {
    nccl::Op op;
    std::vector<float> expected;
  };
  const std::vector<Case> cases = {
      {nccl::kSum, {6, 0, 9}},  {nccl::kProduct, {6, 0, 27}}, {nccl::kMax, {3, 2, 3}},
      {nccl::kMin, {1, -2, 3}}, {nccl::kAverage, {2, 0, 3}},
  };
  for (const Case& each : cases) {
    RunRanks(3, each.op, 1, [&](Rank& rank, Comm communicator) {
      const float one = static_cast<float>(rank.rank());
      float* const input = rank.NewWith<float>({one + 1, 2 * one - 2, 3});
      float* const output = rank.New<float>(3);
      for (float* to : {output, input}) {  // the second time in place
        ExpectBegun(Nccl().all_reduce(input, to, 3, Type::kFloat32, each.op,
                                      communicator, rank.collectives));
        Expect(End(communicator));
        const std::vector<float> result = Outcome(rank, to, 3);
        for (int i = 0; i < 3; ++i) EXPECT_FLOAT_EQ(result[i], each.expected[i]);
      }
      Leave(communicator);
    });
    ExpectClean();
  }
}

template <typename T>
void ExpectSum(Type type) {
  RunRanks(2, 1, 2, [&](Rank& rank, Comm communicator) {
    T* const memory =
        rank.NewWith<T>({static_cast<T>(rank.rank() + 1), static_cast<T>(5)});
    ExpectBegun(Nccl().all_reduce(memory, memory, 2, type, nccl::kSum, communicator,
                                  rank.collectives));
    Expect(End(communicator));
    EXPECT_EQ(Outcome(rank, memory, 2), (std::vector<T>{3, 10}));
    Leave(communicator);
  });
  ExpectClean();
}

TEST(NcclStandIn, ReducesAllTypes) {
  ExpectSum<int8_t>(Type::kInt8);
  ExpectSum<uint8_t>(Type::kUint8);
  ExpectSum<int32_t>(Type::kInt32);
  ExpectSum<uint32_t>(Type::kUint32);
  ExpectSum<int64_t>(Type::kInt64);
  ExpectSum<uint64_t>(Type::kUint64);
  ExpectSum<double>(Type::kFloat64);
}

TEST(NcclStandIn, ReducesNumbersOf16Bits) {
  RunRanks(2, 1, 2, [&](Rank& rank, Comm communicator) {
    uint16_t* const half = rank.NewWith<uint16_t>({0x3C00});   // 1
    uint16_t* const brain = rank.NewWith<uint16_t>({0x3F80});  // 1
    Group(communicator, [&] {
      Expect(Nccl().all_reduce(half, half, 1, Type::kFloat16, nccl::kSum, communicator,
                               rank.collectives));
      Expect(Nccl().all_reduce(brain, brain, 1, Type::kBfloat16, nccl::kSum,
                               communicator, rank.collectives));
    });
    EXPECT_EQ(Outcome(rank, half, 1)[0], 0x4000);
    EXPECT_EQ(brain[0], 0x4000);
    Leave(communicator);
  });
  ExpectClean();
}

TEST(NcclStandIn, Scales) {
  RunRanks(2, 1, 2, [&](Rank& rank, Comm communicator) {
    float* const memory = rank.NewWith<float>({1, 2});
    float scale = 0.25f;
    nccl::Op op = 0;
    Expect(Nccl().make_scaled_sum(&op, &scale, Type::kFloat32,
                                  nccl::Residence::kHostImmediate, communicator));
    scale = 7;  // it has been read
    ExpectBegun(Nccl().all_reduce(memory, memory, 2, Type::kFloat32, op, communicator,
                                  rank.collectives));
    Expect(End(communicator));
    Expect(Nccl().destroy_op(op, communicator));
    EXPECT_EQ(Outcome(rank, memory, 2), (std::vector<float>{0.5f, 1}));
    Leave(communicator);
  });
  ExpectClean();
}

TEST(NcclStandIn, GroupsCallsOfAllKinds) {
  constexpr int kRanks = 3;
  for (int seed = 0; seed < kSeeds; ++seed) {
    RunRanks(kRanks, seed, 1 + seed % kRanks, [&](Rank& rank, Comm communicator) {
      const int self = rank.rank();
      const std::vector<int32_t> own = {self, self + 10, self + 20};
      int32_t* const input = rank.NewWith<int32_t>(own);
      int32_t* const root = rank.New<int32_t>(3);
      int32_t* const reduced = rank.NewWith<int32_t>({-1, -1, -1});
      int32_t* const gathered = rank.New<int32_t>(9);
      int32_t* const scattered = rank.New<int32_t>(1);
      int32_t* const exchanged = rank.New<int32_t>(kRanks);
      const cuda::Stream stream = rank.collectives;
      const Type type = Type::kInt32;
      Group(communicator, [&] {
        Expect(Nccl().broadcast(input, root, 3, type, 1, communicator, stream));
        Expect(Nccl().reduce(input, reduced, 3, type, nccl::kSum, 2, communicator,
                             stream));
        Expect(Nccl().all_gather(input, gathered, 3, type, communicator, stream));
        Expect(Nccl().reduce_scatter(input, scattered, 1, type, nccl::kSum,
                                     communicator, stream));
        for (int peer = 0; peer < kRanks; ++peer) {
          Expect(Nccl().send(input + peer, 1, type, peer, communicator, stream));
          Expect(Nccl().receive(exchanged + peer, 1, type, peer, communicator, stream));
        }
      });
      using Values = std::vector<int32_t>;
      EXPECT_EQ(Outcome(rank, root, 3), (Values{1, 11, 21}));
      EXPECT_EQ(Read(reduced, 3), (self == 2 ? Values{3, 33, 63} : Values{-1, -1, -1}));
      EXPECT_EQ(Read(gathered, 9), (Values{0, 10, 20, 1, 11, 21, 2, 12, 22}));
      EXPECT_EQ(scattered[0], 3 + 30 * self);
      EXPECT_EQ(Read(exchanged, 3), (Values{10 * self, 10 * self + 1, 10 * self + 2}));
      Leave(communicator);
    });
    ExpectClean();
  }
}

// ---- Communicators

TEST(NcclStandIn, RefusesCallsInProgress) {
  Libraries()->Reset(1, 1);
  Rank rank(0, 0);
  const Comm communicator = Begin(NewId(), 2, 0);  // the other one does not come
  for (int i = 0; i < 20; ++i) {
    Result error = Result::kSuccess;
    Expect(Nccl().async_error(communicator, &error));
    EXPECT_EQ(error, Result::kInProgress);
  }
  EXPECT_EQ(Nccl().finalize(communicator), Result::kInvalidUsage);
  EXPECT_EQ(Nccl().destroy(communicator), Result::kInvalidUsage);
  EXPECT_TRUE(HasViolation("in progress"));
  Expect(Nccl().abort(communicator));
  Result error = Result::kSuccess;
  EXPECT_EQ(Nccl().async_error(communicator, &error), Result::kInvalidArgument);
  EXPECT_TRUE(HasViolation("has been given back"));
}

TEST(NcclStandIn, TakesPollsToFinish) {
  std::set<int64_t> polls;
  for (int seed = 0; seed < kSeeds; ++seed) {
    Libraries()->Reset(seed, 1);
    Rank rank(0, 0);
    const Comm communicator = Join(NewId(), 1, 0);
    for (const Call& call : Libraries()->Calls()) {
      if (call.function == "ncclCommGetAsyncError") polls.insert(call.times);
    }
    Leave(communicator);
  }
  EXPECT_GT(polls.size(), 1u);
}

TEST(NcclStandIn, SplitsByColorAndKey) {
  constexpr int kRanks = 4;
  for (int seed = 0; seed < kSeeds; ++seed) {
    RunRanks(kRanks, seed, 2, [&](Rank& rank, Comm communicator) {
      const int self = rank.rank();
      nccl::Config config = NonBlocking();
      Comm part = nullptr;
      const int color = self == 3 ? nccl::kNoColor : 5;
      ExpectBegun(Nccl().split(communicator, color, -self, &part, &config));
      Expect(End(communicator));
      if (self == 3) {
        EXPECT_EQ(part, nullptr);
      } else {
        Expect(End(part));
        int32_t* const own = rank.NewWith<int32_t>({self});
        int32_t* const all = rank.New<int32_t>(3);
        ExpectBegun(
            Nccl().all_gather(own, all, 1, Type::kInt32, part, rank.collectives));
        Expect(End(part));
        EXPECT_EQ(Outcome(rank, all, 3), (std::vector<int32_t>{2, 1, 0}));
        Leave(part);
      }
      Leave(communicator);
    });
    ExpectClean();
  }
}

TEST(NcclStandIn, LeakedOpsAndCommunicatorsAreCounted) {
  Libraries()->Reset(1, 1);
  Rank rank(0, 0);
  const Comm communicator = Join(NewId(), 1, 0);
  float scale = 1;
  nccl::Op op = 0;
  Expect(Nccl().make_scaled_sum(&op, &scale, Type::kFloat32,
                                nccl::Residence::kHostImmediate, communicator));
  EXPECT_EQ(Libraries()->CountLeaks().communicators, 1);
  EXPECT_EQ(Libraries()->CountLeaks().reduction_ops, 1);
  Leave(communicator);
  EXPECT_EQ(Libraries()->CountLeaks().communicators, 0);
  EXPECT_EQ(Libraries()->CountLeaks().reduction_ops, 1);
}

TEST(NcclStandIn, OpsLiveUntilTheirGroupIsEnqueued) {
  Libraries()->Reset(1, 1);
  Rank rank(0, 0);
  const Comm communicator = Join(NewId(), 1, 0);
  float* const memory = rank.NewWith<float>({1});
  float scale = 2;
  nccl::Op op = 0;
  Expect(Nccl().group_start());
  Expect(Nccl().make_scaled_sum(&op, &scale, Type::kFloat32,
                                nccl::Residence::kHostImmediate, communicator));
  Expect(Nccl().all_reduce(memory, memory, 1, Type::kFloat32, op, communicator,
                           rank.collectives));
  EXPECT_EQ(Nccl().destroy_op(op, communicator), Result::kInvalidUsage);
  EXPECT_TRUE(HasViolation("before its group has been enqueued"));
  ExpectBegun(Nccl().group_end());
  Expect(End(communicator));
  rank.AwaitStream(rank.collectives);
  Leave(communicator);
}

// ---- Failures

TEST(NcclStandIn, MembersThatDifferAreFound) {
  RunRanks(2, 1, 1, [&](Rank& rank, Comm communicator) {
    float* const memory = rank.New<float>(4);
    ExpectBegun(Nccl().all_reduce(memory, memory, 3 + rank.rank(), Type::kFloat32,
                                  nccl::kSum, communicator, rank.collectives));
    End(communicator);
    const cuda::Event end = rank.Record(rank.collectives);
    Result error = Result::kSuccess;
    while (error == Result::kSuccess || error == Result::kInProgress) {
      EXPECT_EQ(Cuda().query_event(end), cuda::Result::kNotReady);
      Expect(Nccl().async_error(communicator, &error));
      sched_yield();
    }
    EXPECT_EQ(error, Result::kInvalidUsage);
    EXPECT_TRUE(Contains(Nccl().last_error(communicator), "4 float32"));
    EXPECT_TRUE(HasViolation("3 float32"));
    Expect(Nccl().abort(communicator));
    rank.Await(end);
  });
}

TEST(NcclStandIn, AbortEndsWhatIsEnqueued) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    RunRanks(2, seed, 1, [&](Rank& rank, Comm communicator) {
      float* const memory = rank.NewWith<float>({1, 2});
      if (rank.rank() == 0) {  // the other does not come
        ExpectBegun(Nccl().all_reduce(memory, memory, 2, Type::kFloat32, nccl::kSum,
                                      communicator, rank.collectives));
        Expect(End(communicator));
        const cuda::Event end = rank.Record(rank.collectives);
        for (int i = 0; i < 20; ++i) {
          EXPECT_EQ(Cuda().query_event(end), cuda::Result::kNotReady);
        }
        Expect(Nccl().abort(communicator));
        rank.Await(end);
        EXPECT_NE(Read(memory, 2), (std::vector<float>{1, 2}));
      } else {
        Expect(Nccl().abort(communicator));
      }
    });
    ExpectClean();
  }
}

TEST(NcclStandIn, AbortEndsAGroupInTheMaking) {
  Libraries()->Reset(1, 1);
  {
    Rank rank(0, 0);
    const Comm communicator = Join(NewId(), 1, 0);
    float* const memory = rank.NewWith<float>({1});
    Expect(Nccl().group_start());
    Expect(Nccl().all_reduce(memory, memory, 1, Type::kFloat32, nccl::kSum,
                             communicator, rank.collectives));
    Expect(Nccl().abort(communicator));
    Expect(Nccl().group_end());
    rank.AwaitStream(rank.collectives);
    EXPECT_EQ(memory[0], 1);
  }
  ExpectClean();
}

TEST(NcclStandIn, AHeldMemberHangsUntilTheAbort) {
  Libraries()->Reset(1, 1);
  Libraries()->HoldCollectives(1, true);
  const nccl::UniqueId id = NewId();
  ForEachRank(2, [&](int index) {
    Rank rank(index, 0);
    const Comm communicator = Join(id, 2, index);
    float* const memory = rank.NewWith<float>({1});
    ExpectBegun(Nccl().all_reduce(memory, memory, 1, Type::kFloat32, nccl::kSum,
                                  communicator, rank.collectives));
    Expect(End(communicator));
    const std::string why =
        Libraries()->Synchronize(rank.collectives, std::chrono::milliseconds(50));
    EXPECT_TRUE(Contains(why, "ncclAllReduce")) << why;
    Expect(Nccl().abort(communicator));
    rank.AwaitStream(rank.collectives);
  });
  ExpectClean();
}

// Both orders on streams of their own are right; on one stream each they wait for each
// other for ever.
TEST(NcclStandIn, CommunicatorsInSeveralOrdersAreStuck) {
  Libraries()->Reset(1, 2);
  const nccl::UniqueId ids[] = {NewId(), NewId()};
  std::atomic<int> enqueued{0};
  std::atomic<int> checked{0};
  ForEachRank(2, [&](int index) {
    Rank rank(index, index);
    const Comm communicators[] = {Join(ids[0], 2, index), Join(ids[1], 2, index)};
    float* const memory = rank.NewWith<float>({1});
    for (int i = 0; i < 2; ++i) {
      const Comm communicator = communicators[(i + index) % 2];
      ExpectBegun(Nccl().all_reduce(memory, memory, 1, Type::kFloat32, nccl::kSum,
                                    communicator, rank.collectives));
      Expect(End(communicator));
    }
    enqueued += 1;
    while (enqueued < 2) sched_yield();
    const std::string stuck = Libraries()->Stuck();
    EXPECT_TRUE(Contains(stuck, "communicator 1")) << stuck;
    EXPECT_TRUE(Contains(stuck, "communicator 2")) << stuck;
    EXPECT_EQ(Libraries()->Synchronize(rank.collectives), stuck);
    checked += 1;
    while (checked < 2) sched_yield();
    for (const Comm communicator : communicators) Expect(Nccl().abort(communicator));
    rank.AwaitStream(rank.collectives);
  });
  ExpectClean();
  EXPECT_EQ(Libraries()->Stuck(), "");
}

// ---- Errors on purpose

// One rank that uses each function, up to the first error; gives back what it can.
Result UseAll() {
  const nccl::Functions& nccl = Nccl();
  Rank rank(0, 0);
  const cuda::Stream stream = rank.collectives;
  float* const memory = rank.New<float>(8);
  int version = 0;
  nccl::UniqueId id;
  Comm communicator = nullptr;
  Comm part = nullptr;
  nccl::Op op = 0;
  float scale = 1;
  nccl::Config config = NonBlocking();
  const auto end = [&](Comm of) {
    Result error = Result::kInProgress;
    while (error == Result::kInProgress) {
      const Result asked = nccl.async_error(of, &error);
      if (asked != Result::kSuccess) return asked;
    }
    return error;
  };
  const std::vector<std::function<Result()>> steps = {
      [&] { return nccl.version(&version); },
      [&] { return nccl.unique_id(&id); },
      [&] { return nccl.init_rank(&communicator, 1, id, 0, &config); },
      [&] { return end(communicator); },
      [&] { return nccl.split(communicator, 0, 0, &part, &config); },
      [&] { return end(communicator); },
      [&] { return nccl.group_start(); },
      [&] {
        return nccl.make_scaled_sum(&op, &scale, Type::kFloat32,
                                    nccl::Residence::kHostImmediate, communicator);
      },
      [&] {
        return nccl.all_reduce(memory, memory, 1, Type::kFloat32, op, communicator,
                               stream);
      },
      [&] {
        return nccl.broadcast(memory + 1, memory + 1, 1, Type::kFloat32, 0,
                              communicator, stream);
      },
      [&] {
        return nccl.reduce(memory + 2, memory + 2, 1, Type::kFloat32, nccl::kMax, 0,
                           communicator, stream);
      },
      [&] {
        return nccl.all_gather(memory + 3, memory + 3, 1, Type::kFloat32, communicator,
                               stream);
      },
      [&] {
        return nccl.reduce_scatter(memory + 4, memory + 4, 1, Type::kFloat32,
                                   nccl::kMin, communicator, stream);
      },
      [&] { return nccl.send(memory + 5, 1, Type::kFloat32, 0, communicator, stream); },
      [&] {
        return nccl.receive(memory + 6, 1, Type::kFloat32, 0, communicator, stream);
      },
      [&] { return nccl.group_end(); },
      [&] { return end(communicator); },
      [&] { return nccl.destroy_op(op, communicator); },
      [&] {
        const Result finalized = nccl.finalize(communicator);
        return finalized == Result::kInProgress ? end(communicator) : finalized;
      },
      [&] { return nccl.destroy(communicator); },
      [&] {
        communicator = nullptr;
        return nccl.abort(part);
      },
  };
  Result result = Result::kSuccess;
  for (const auto& step : steps) {
    result = step();
    if (result != Result::kSuccess && result != Result::kInProgress) break;
    result = Result::kSuccess;
  }
  for (Comm left : {communicator, part}) {
    if (left != nullptr) nccl.abort(left);  // perhaps for the second time
  }
  nccl.group_end();  // perhaps of no group
  rank.AwaitStream(stream);
  return result;
}

TEST(NcclStandIn, EachFunctionFailsWithEachError) {
  std::vector<std::string> functions = {
#define KERAS_HVD_NAME(member, symbol, result, parameters) symbol,
      KERAS_HVD_NCCL_FUNCTIONS(KERAS_HVD_NAME)
#undef KERAS_HVD_NAME
  };
  for (const std::string& function : functions) {
    if (function == "ncclGetErrorString" || function == "ncclGetLastError") continue;
    for (int code = 1; code <= 6; ++code) {
      Libraries()->Reset(code, 1);
      Libraries()->Inject({function, code});
      EXPECT_EQ(UseAll(), Result{code}) << function;
      const Leaks leaks = Libraries()->CountLeaks();
      EXPECT_EQ(leaks.streams + leaks.device_allocations + leaks.communicators, 0)
          << function;
    }
  }
}

TEST(NcclStandIn, AnAsynchronousErrorComesLater) {
  Libraries()->Reset(3, 1);
  Rank rank(0, 0);
  const Comm communicator = Join(NewId(), 1, 0);
  float* const memory = rank.NewWith<float>({1});
  Injection injection;
  injection.function = "ncclAllReduce";
  injection.code = static_cast<int>(Result::kRemoteError);
  injection.call = 2;
  injection.asynchronous = true;
  Libraries()->Inject(injection);
  for (int call = 1; call <= 2; ++call) {
    ExpectBegun(Nccl().all_reduce(memory, memory, 1, Type::kFloat32, nccl::kSum,
                                  communicator, rank.collectives));
    EXPECT_EQ(End(communicator), call == 1 ? Result::kSuccess : Result::kRemoteError);
  }
  EXPECT_EQ(Nccl().finalize(communicator), Result::kRemoteError);
  Expect(Nccl().abort(communicator));
  rank.AwaitStream(rank.collectives);
}

}  // namespace
}  // namespace keras_hvd::stand_in
