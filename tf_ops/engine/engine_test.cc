// Engines of several ranks, as threads over one segment: what is asked for comes about,
// whatever the order, and every request ends exactly once, whatever goes wrong.
#include "tf_ops/engine/engine.h"

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <fstream>
#include <random>
#include <set>
#include <tuple>

#include "tf_ops/collectives/parts.h"
#include "tf_ops/engine/autotune_log.h"

namespace keras_hvd {
namespace {

// Long enough for any machine; a test that waits for it has failed.
constexpr std::chrono::seconds kForever(60);
// Two windows of 4 KiB, so that little data needs many.
constexpr int64_t kTinyExchange = 8 << 10;
// Inputs so large that the engine's thread runs them in any case.
const std::vector<float> kManyValues(50000, 1);
const std::vector<int32_t> kManyRows(50000);

using Buffer = std::vector<char>;

template <typename Condition>
bool Eventually(const Condition& condition) {
  const Clock::time_point deadline = Clock::now() + kForever;
  while (!condition()) {
    if (Clock::now() > deadline) return false;
    poll(nullptr, 0, 1);
  }
  return true;
}

template <typename T>
Buffer AsBytes(const std::vector<T>& values) {
  Buffer bytes(values.size() * sizeof(T));
  if (!bytes.empty()) memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

template <typename T>
std::vector<T> FromBytes(const Buffer& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!bytes.empty()) memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// What to submit, without the engine's own fields.
struct Ask {
  Description description;
  Buffer input;
  int64_t rows = 0;
  std::vector<int64_t> splits;
  uint64_t submitter = 1;
  bool has_memory = true;
  char* output = nullptr;  // where the results go, if it matters
  std::function<void()> on_allocate = [] {};
  std::function<void()> on_end = [] {};
};

Ask Sum(const std::string& name, const std::vector<float>& values,
        ReduceOp op = ReduceOp::kSum) {
  Ask ask;
  ask.description.name = name;
  ask.description.reduction.op = op;
  ask.description.tensors = {
      {DataType::kFloat32, {static_cast<int64_t>(values.size())}}};
  ask.input = AsBytes(values);
  return ask;
}

Ask Gather(const std::string& name, const std::vector<int32_t>& values) {
  Ask ask;
  ask.description.name = name;
  ask.description.kind = Kind::kAllgather;
  ask.description.tensors = {{DataType::kInt32, {-1}}};
  ask.input = AsBytes(values);
  ask.rows = static_cast<int64_t>(values.size());
  return ask;
}

Ask Meet(const std::string& name) {
  Ask ask;
  ask.description.name = name;
  ask.description.kind = Kind::kBarrier;
  return ask;
}

// One rank: its engine, and all that it was asked for.
class Rank {
 public:
  Rank(const EngineOptions& options, std::shared_ptr<Segment> segment)
      : engine_(std::make_unique<Engine>(options, std::move(segment))) {}
  ~Rank() { Leave(); }

  // Returns the request's number.
  size_t Submit(Ask ask) {
    const size_t number = Add(std::move(ask));
    std::unique_ptr<Operation> operation = OperationFor(number);
    // One way and the other, which must make no difference to the results.
    const Status refused = number % 2 == 0
                               ? engine_->SubmitAndDrive(std::move(operation))
                               : engine_->Submit(std::move(operation));
    if (!refused.ok()) {
      std::lock_guard<std::mutex> lock(mutex_);
      requests_[number].status = refused;
      requests_[number].refused = true;
    }
    return number;
  }

  // The same, and the calling thread drives until the end; gives the number in `*at`.
  Status Drive(Ask ask, size_t* at = nullptr) {
    const size_t number = Add(std::move(ask));
    const Status status = engine_->Run(OperationFor(number));
    std::lock_guard<std::mutex> lock(mutex_);
    requests_[number].status = status;
    requests_[number].ends += 1;
    if (at != nullptr) *at = number;
    return status;
  }

  // Waits for the end of a request.
  void AwaitEnd(size_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    const Request& request = requests_[number];
    if (!changed_.wait_for(lock, kForever,
                           [&] { return request.ends > 0 || request.refused; })) {
      ADD_FAILURE() << Title(request.ask.description) << " does not end";
      abort();  // its buffers are the engine's for as long as it runs
    }
  }

  // The same, and gives it.
  Status End(size_t number) {
    AwaitEnd(number);
    std::lock_guard<std::mutex> lock(mutex_);
    return requests_[number].status;
  }

  Status Run(Ask ask) { return End(Submit(std::move(ask))); }

  void Stop() { engine_->Stop(); }

  const Buffer& Output(size_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return requests_[number].output;
  }

  // Waits for the end of all; each must have come to it exactly once.
  void EndAll() {
    for (size_t i = 0; i < requests_.size(); ++i) AwaitEnd(i);
    CheckEnds();
  }

  void CheckEnds() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Request& request : requests_) {
      EXPECT_EQ(request.ends, request.refused ? 0 : 1)
          << Title(request.ask.description);
    }
  }

  // How many came to an end other than a result.
  size_t failed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::count_if(requests_.begin(), requests_.end(),
                         [](const Request& request) {
                           return request.ends > 0 && !request.status.ok();
                         });
  }

  // Waits until a request is under way.
  bool AwaitPending() {
    return Eventually([&] {
      std::lock_guard<std::mutex> lock(mutex_);
      return !requests_.empty();
    });
  }

  // Waits until the engine sleeps until it is rung: its other sleeps are shorter.
  bool AwaitRest() {
    return Eventually([&] {
      const int64_t sleeps = counters().sleeps;
      poll(nullptr, 0, 1500);
      return counters().sleeps == sleeps;
    });
  }

  size_t ended() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::count_if(requests_.begin(), requests_.end(),
                         [](const Request& request) { return request.ends > 0; });
  }

  void Leave() {
    if (engine_ == nullptr) return;
    EXPECT_EQ(engine_->counters().lost_wakes, 0);
    engine_.reset();
  }

  Engine& engine() { return *engine_; }
  const EngineCounters& counters() const { return engine_->counters(); }

 private:
  struct Request {
    Ask ask;
    Buffer output;
    Status status;
    int ends = 0;
    bool refused = false;
  };

  size_t Add(Ask ask) {
    std::lock_guard<std::mutex> lock(mutex_);
    requests_.emplace_back().ask = std::move(ask);
    return requests_.size() - 1;
  }

  Request* AtNumber(size_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return &requests_[number];
  }

  std::unique_ptr<Operation> OperationFor(size_t number) {
    Request* const request = AtNumber(number);
    const Description& description = request->ask.description;
    auto operation = std::make_unique<Operation>();
    operation->description = std::make_shared<Description>(description);
    operation->submitter = request->ask.submitter;
    if (HasOwnRows(description.kind)) {
      operation->rows = {request->ask.rows};
      operation->splits = request->ask.splits;
    } else {
      request->output.resize(description.bytes());
    }
    int64_t offset = 0;
    char* output = request->ask.output;
    if (output == nullptr) output = request->output.data();
    for (const TensorDescription& tensor : description.tensors) {
      operation->buffers.push_back(
          {request->ask.input.data() + offset, output + offset});
      offset += Elements(tensor) * Bytes(tensor.dtype);
    }
    operation->allocate = [request](size_t, const std::vector<int64_t>& rows) -> void* {
      request->ask.on_allocate();
      if (!request->ask.has_memory) return nullptr;
      if (request->ask.output != nullptr) return request->ask.output;
      int64_t sum = 0;
      for (int64_t count : rows) sum += count;
      request->output.resize(sum * sizeof(int32_t));
      return request->output.data();
    };
    operation->done = [this, request](const Status& status) {
      request->ask.on_end();
      std::lock_guard<std::mutex> lock(mutex_);
      request->status = status;
      request->ends += 1;
      changed_.notify_all();
    };
    return operation;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> requests_;
  std::unique_ptr<Engine> engine_;
};

// A job of several ranks in this process.
class Job {
 public:
  explicit Job(int size, EngineOptions options = {}, bool start = true,
               int64_t exchange_bytes = kTinyExchange)
      : options_(options), ranks_(size) {
    EXPECT_TRUE(Segment::CreateLocal(size, exchange_bytes, &segment_).ok());
    for (int rank = 0; rank < size; ++rank) {
      segment_->block(rank).pid.store(getpid());
      strcpy(segment_->block(rank).host, "here");
      if (start) Start(rank);
    }
  }

  void Start(
      int rank,
      const std::function<void(EngineOptions*)>& change = [](EngineOptions*) {}) {
    EngineOptions options = options_;
    options.rank = rank;
    change(&options);
    ranks_[rank] = std::make_unique<Rank>(options, segment_);
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& operator[](int rank) { return *ranks_[rank]; }
  Segment& segment() { return *segment_; }

  // Runs `body(rank)` for all ranks at once.
  void ForEach(const std::function<void(Rank&, int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([&, rank] { body(*ranks_[rank], rank); });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  const EngineOptions options_;
  std::shared_ptr<Segment> segment_;
  std::vector<std::unique_ptr<Rank>> ranks_;
};

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Standard error of this process, which a test reads.
class CapturedErrors {
 public:
  CapturedErrors() : saved_(dup(STDERR_FILENO)) {
    EXPECT_EQ(pipe2(pipe_, O_CLOEXEC), 0);
    dup2(pipe_[1], STDERR_FILENO);
  }
  ~CapturedErrors() {
    dup2(saved_, STDERR_FILENO);
    for (int descriptor : {saved_, pipe_[0], pipe_[1]}) close(descriptor);
  }

  // Reads until `part` has come.
  bool AwaitText(const std::string& part) {
    const Clock::time_point deadline = Clock::now() + kForever;
    while (!Contains(text_, part)) {
      if (Clock::now() > deadline) return false;
      Read(1000);
    }
    return true;
  }
  const std::string& text() {
    while (Read(0)) {
    }
    return text_;
  }

 private:
  bool Read(int milliseconds) {
    pollfd waiting = {pipe_[0], POLLIN, 0};
    if (poll(&waiting, 1, milliseconds) != 1) return false;
    char buffer[4096];
    const ssize_t count = read(pipe_[0], buffer, sizeof(buffer));
    if (count > 0) text_.append(buffer, count);
    return count > 0;
  }

  int saved_;
  int pipe_[2];
  std::string text_;
};

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos;
       at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

// ---- What is asked for comes about

// A request of each rank, and what each must get.
struct Plan {
  std::vector<Ask> asks;
  std::vector<Buffer> expected;
};

std::vector<int64_t> RandomSplits(int64_t rows, int size) {
  std::vector<int64_t> splits(size, rows / size / 2);
  splits[rows % size] += rows - size * splits[0];
  return splits;
}

// What each rank must get of a reducescatter of int32[rows, 3], at the front of memory
// for all of it.
void KeepOwnRows(Plan* plan) {
  const int size = static_cast<int>(plan->asks.size());
  const int64_t row_bytes = 3 * sizeof(int32_t);
  for (int rank = 0; rank < size; ++rank) {
    Buffer& expected = plan->expected[rank];
    const int64_t rows = static_cast<int64_t>(expected.size()) / row_bytes;
    const auto at = [&](int of) {
      return expected.begin() + PartStart(rows, of, size) * row_bytes;
    };
    Buffer own(at(rank), at(rank + 1));
    own.resize(expected.size());
    expected = own;
  }
}

// What each rank must get of an alltoall of int32[rows].
void ExchangeRows(Plan* plan) {
  for (const Ask& ask : plan->asks) {
    auto from = ask.input.begin();
    for (size_t peer = 0; peer < plan->asks.size(); ++peer) {
      const auto end = from + ask.splits[peer] * sizeof(int32_t);
      plan->expected[peer].insert(plan->expected[peer].end(), from, end);
      from = end;
    }
  }
}

Plan RandomPlan(int number, int size, std::mt19937_64* random) {
  Plan plan;
  Description description;
  description.name = "request" + std::to_string(number);
  description.kind = static_cast<Kind>((*random)() % kKinds);
  std::vector<int64_t> rows(size);
  if (description.kind == Kind::kAllreduce) {
    const DataType dtype = static_cast<DataType>((*random)() % 8);
    const ReduceOp op = static_cast<ReduceOp>((*random)() % kElementReduceOps);
    description.reduction = {op, (*random)() % 2 == 0 ? 1.0 : 0.5, 1};
    const int tensors = 1 + (*random)() % 3;
    for (int i = 0; i < tensors; ++i) {
      const int64_t most = (*random)() % 8 == 0 ? 9000 : 50;
      description.tensors.push_back(
          {dtype, {static_cast<int64_t>((*random)() % most)}});
    }
  } else if (description.kind == Kind::kAllgather) {
    description.tensors = {{DataType::kInt32, {-1}}};
    for (int64_t& count : rows) count = (*random)() % 3000;
  } else if (description.kind == Kind::kBroadcast) {
    description.root = (*random)() % size;
    description.tensors = {
        {DataType::kInt8, {static_cast<int64_t>((*random)() % 20000)}}};
  } else if (description.kind == Kind::kReducescatter) {
    description.tensors = {
        {DataType::kInt32, {static_cast<int64_t>((*random)() % 2000), 3}}};
  } else if (description.kind == Kind::kAlltoall) {
    description.tensors = {{DataType::kInt32, {-1}}};
    for (int64_t& count : rows) count = (*random)() % 3000;
  }
  for (int rank = 0; rank < size; ++rank) {
    Ask ask;
    ask.description = description;
    ask.rows = rows[rank];
    if (description.kind == Kind::kAlltoall) ask.splits = RandomSplits(ask.rows, size);
    const bool own_rows = HasOwnRows(description.kind);
    ask.input.resize(own_rows ? rows[rank] * sizeof(int32_t) : description.bytes());
    // Never NaN, of which a product may keep the one or the other.
    for (char& byte : ask.input) byte = static_cast<char>((*random)() & 0xBF);
    plan.asks.push_back(std::move(ask));
  }
  Buffer expected;
  if (description.kind == Kind::kAllgather) {
    for (const Ask& ask : plan.asks) {
      expected.insert(expected.end(), ask.input.begin(), ask.input.end());
    }
  } else if (description.kind == Kind::kBroadcast) {
    expected = plan.asks[description.root].input;
  } else if (Reduces(description.kind)) {
    expected.resize(description.bytes());
    std::vector<const void*> inputs;
    for (const Ask& ask : plan.asks) inputs.push_back(ask.input.data());
    // All tensors of a group have one type here: they are one line of elements.
    const DataType dtype = description.tensors[0].dtype;
    Reduce(description.reduction, dtype, inputs.data(), size,
           static_cast<int64_t>(expected.size()) / Bytes(dtype), expected.data());
  }
  plan.expected.assign(size, expected);
  if (description.kind == Kind::kReducescatter) KeepOwnRows(&plan);
  if (description.kind == Kind::kAlltoall) ExchangeRows(&plan);
  return plan;
}

class RanksTest : public testing::TestWithParam<int> {};

TEST_P(RanksTest, MixedCollectivesInAnotherOrderOnEachRank) {
  const int size = GetParam();
  std::mt19937_64 random(size);
  std::vector<Plan> plans;
  for (int i = 0; i < 150; ++i) plans.push_back(RandomPlan(i, size, &random));
  for (int run = 0; run < 3; ++run) {
    EngineOptions options;
    options.cores = run == 0 ? size : 1;  // with spinning and without
    options.fusion_bytes = run == 1 ? 4000 : 64 << 20;
    options.check = run == 2;
    options.cache_capacity = run == 0 ? 16384 : 4 * (run - 1);
    Job job(size, options);
    job.ForEach([&](Rank& self, int rank) {
      std::vector<size_t> order(plans.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), std::mt19937(run * 10 + rank));
      std::vector<size_t> numbers(plans.size());
      for (size_t i : order) numbers[i] = self.Submit(plans[i].asks[rank]);
      self.EndAll();
      for (size_t i = 0; i < plans.size(); ++i) {
        ASSERT_EQ(self.End(numbers[i]).message, "");
        ASSERT_TRUE(self.Output(numbers[i]) == plans[i].expected[rank])
            << Details(plans[i].asks[rank].description) << " on rank " << rank;
      }
      EXPECT_EQ(self.counters().tensors, static_cast<int64_t>(plans.size()));
    });
  }
}

// Sums whose value depends on the order of addition, fused and sliced as it happens.
TEST_P(RanksTest, SameBitsInEveryRunAndOnEveryRank) {
  const int size = GetParam();
  std::set<std::vector<Buffer>> results;
  for (int run = 0; run < 4; ++run) {
    Job job(size);
    std::vector<std::vector<Buffer>> outputs(size, std::vector<Buffer>(100));
    job.ForEach([&](Rank& self, int rank) {
      std::mt19937 random(rank), order_of_run(run * 100 + rank);
      std::vector<std::vector<float>> inputs(100);
      for (auto& input : inputs) {
        input.resize(1 + random() % 700);
        for (float& value : input) {
          value = std::ldexp(static_cast<float>(random()), random() % 64);
        }
      }
      // The same sizes on all ranks.
      std::mt19937 sizes(7);
      for (auto& input : inputs) input.resize(1 + sizes() % 700, 1.5f);
      std::vector<size_t> order(inputs.size()), numbers(inputs.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), order_of_run);
      for (size_t i : order) {
        numbers[i] = self.Submit(Sum("t" + std::to_string(i), inputs[i]));
      }
      for (size_t i = 0; i < numbers.size(); ++i) {
        ASSERT_TRUE(self.End(numbers[i]).ok());
        outputs[rank][i] = self.Output(numbers[i]);
      }
    });
    results.insert(outputs.begin(), outputs.end());
  }
  EXPECT_EQ(results.size(), 1u);
}

TEST_P(RanksTest, OneNameIsServedInOrder) {
  Job job(GetParam());
  job.ForEach([&](Rank& self, int) {
    for (int i = 0; i < 200; ++i) self.Submit(Sum("x", {static_cast<float>(i)}));
    for (int i = 0; i < 200; ++i) {
      ASSERT_TRUE(self.End(i).ok());
      ASSERT_EQ(FromBytes<float>(self.Output(i))[0], i * GetParam());
    }
  });
}

TEST_P(RanksTest, ManyThreadsMaySubmit) {
  Job job(GetParam());
  job.ForEach([&](Rank& self, int) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&self, thread] {
        for (int i = 0; i < 50; ++i) {
          const std::string name = std::to_string(thread) + "/" + std::to_string(i);
          const size_t number = self.Submit(Sum(name, {1, 2, 3}));
          ASSERT_TRUE(self.End(number).ok());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    self.CheckEnds();
  });
}

// As a graph does it: the end of one request starts the next.
TEST_P(RanksTest, CallersThatWaitDriveBesideThreadsThatSubmit) {
  EngineOptions options;
  options.cores = GetParam() % 2 == 0 ? GetParam() : 1;  // with spinning and without
  Job job(GetParam(), options);
  const float size = GetParam();
  job.ForEach([&](Rank& self, int) {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&, thread] {
        const std::vector<float> input =
            thread % 2 == 0 ? std::vector<float>{1, 1, 1} : kManyValues;
        const std::vector<float> expected(input.size(), size);
        for (int i = 0; i < 50; ++i) {
          Ask ask = Sum(std::to_string(thread), input);
          size_t number;
          if (thread < 2) {
            ASSERT_TRUE(self.Drive(std::move(ask), &number).ok());
          } else {
            number = self.Submit(std::move(ask));
            ASSERT_TRUE(self.End(number).ok());
          }
          ASSERT_EQ(FromBytes<float>(self.Output(number)), expected);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    self.CheckEnds();
  });
}

TEST_P(RanksTest, DoneMaySubmit) {
  constexpr int kLinks = 200;
  Job job(GetParam());
  job.ForEach([&](Rank& self, int) {
    std::atomic<int> links{0};
    std::function<void()> next = [&] {
      if (++links > kLinks) return;
      Ask ask = Sum("link" + std::to_string(links), {1});
      ask.on_end = next;
      self.Submit(std::move(ask));
    };
    next();
    ASSERT_TRUE(Eventually([&] { return self.ended() == kLinks; }));
    self.CheckEnds();
  });
}

TEST_P(RanksTest, WhatIsReadyTogetherIsFused) {
  Job job(GetParam());
  // Rank 0 decides nothing until everything is there.
  std::atomic<bool> closed{false}, complete{false};
  Ask gate = Sum("gate", kManyValues);
  gate.on_end = [&] {
    closed = true;
    EXPECT_TRUE(Eventually([&] { return complete.load(); }));
  };
  job[0].Submit(gate);
  for (int rank = 1; rank < job.size(); ++rank)
    job[rank].Submit(Sum("gate", kManyValues));
  ASSERT_TRUE(Eventually([&] { return closed.load(); }));
  for (int rank = 0; rank < job.size(); ++rank) {
    for (int i = 0; i < 300; ++i) job[rank].Submit(Sum(std::to_string(i), {1, 2}));
  }
  complete = true;
  job.ForEach([](Rank& self, int) {
    self.EndAll();
    EXPECT_EQ(self.counters().batches, 2);
    EXPECT_EQ(self.counters().tensors, 301);
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, RanksTest, testing::Range(1, 6));

TEST(EngineTest, AllgathersBytesAreCounted) {
  Job job(2);
  job.ForEach([](Rank& self, int rank) {
    EXPECT_TRUE(self.Run(Gather("x", std::vector<int32_t>(3 + rank, 1))).ok());
    EXPECT_EQ(self.counters().bytes, (3 + rank) * 4);
  });
}

TEST(EngineTest, WithoutMemoryAnAllgatherFailsOnThatRankAlone) {
  Job job(3);
  job.ForEach([](Rank& self, int rank) {
    Ask ask = Gather("x", std::vector<int32_t>(5000, rank));
    ask.has_memory = rank != 1;
    const Status status = self.Run(std::move(ask));
    EXPECT_EQ(status.code, rank == 1 ? Code::kInternal : Code::kOk);
    if (rank == 1) {
      EXPECT_EQ(status.message,
                "allgather 'x': there is no memory for the result on rank 1");
    }
    EXPECT_TRUE(self.Run(Meet("and on it goes")).ok());
  });
}

// ---- Streams that overflow, dictionaries that start again

std::string LongName(int number) {
  return std::to_string(number) + "/" + std::string(2000, 'n');
}

TEST(OverflowTest, SubmissionsThatDoNotFitWaitAndResume) {
  constexpr int kRequests = 1000;  // 2 MB of names; the stream has 256 KiB
  Job job(3, {}, /*start=*/false);
  for (int rank : {1, 2}) {
    job.Start(rank);
    for (int i = 0; i < kRequests; ++i) job[rank].Submit(Sum(LongName(i), {1.0f}));
    RankBlock& block = job.segment().block(rank);
    ASSERT_TRUE(Eventually([&] { return block.submissions_blocked.load() == 1; }));
  }
  job.Start(0);
  for (int i = kRequests; i-- > 0;) job[0].Submit(Sum(LongName(i), {1.0f}));
  job.ForEach([](Rank& self, int) {
    self.EndAll();
    for (int i = 0; i < kRequests; ++i) {
      ASSERT_TRUE(self.End(i).ok());
      ASSERT_EQ(FromBytes<float>(self.Output(i))[0], 3.0f);
    }
  });
}

TEST(OverflowTest, DecisionsThatDoNotFitWaitForTheSlowestReader) {
  constexpr int kRequests = 500;
  Job job(3, {}, /*start=*/false);
  job.Start(0);
  job.Start(1);
  for (int rank : {0, 1}) {
    for (int i = 0; i < kRequests; ++i) {
      // They differ, which is a failure at once.
      job[rank].Submit(Sum(LongName(i), std::vector<float>(1 + rank)));
    }
  }
  ASSERT_TRUE(
      Eventually([&] { return job.segment().header().decisions_blocked.load() == 1; }));
  EXPECT_LT(job[1].ended(), static_cast<size_t>(kRequests));
  job.Start(2);
  for (int rank : {0, 1}) {
    job[rank].EndAll();
    for (int i = 0; i < kRequests; ++i) {
      const Status status = job[rank].End(i);
      EXPECT_EQ(status.code, Code::kInvalidArgument);
      EXPECT_TRUE(Contains(status.message, "differs between ranks"));
    }
  }
  job.ForEach([](Rank& self, int) { EXPECT_TRUE(self.Run(Meet("end")).ok()); });
}

// More names than the dictionaries of either direction keep.
TEST(OverflowTest, DictionariesStartAgain) {
  Job job(2);
  job.ForEach([](Rank& self, int rank) {
    for (int i = 0; i < 20000; ++i) self.Submit(Sum(std::to_string(i), {1.0f + rank}));
    self.EndAll();
    // Names of before and new ones.
    for (int i = 0; i < 20000; i += 1000) {
      const size_t number = self.Submit(Sum(std::to_string(i), {2.0f + rank}));
      ASSERT_TRUE(self.End(number).ok());
      ASSERT_EQ(FromBytes<float>(self.Output(number))[0], 5.0f);
    }
    ASSERT_EQ(FromBytes<float>(self.Output(19999))[0], 3.0f);
  });
}

// ---- Autotuning

EngineOptions Autotuned() {
  EngineOptions options;
  options.autotune.on = true;
  options.autotune.steps_per_sample = 1;
  options.autotune.least_seconds = 0;
  return options;
}

// Windows and small tensors that differed between ranks would give wrong results, or
// none.
TEST(AutotuneEngineTest, AllRanksChangeTheirSettingsBetweenTheSameBatches) {
  constexpr int kSteps = 300;
  constexpr int kTensors = 4;
  Job job(3, Autotuned(), true, 1 << 20);
  job.ForEach([](Rank& self, int rank) {
    std::mt19937_64 sizes(0);  // the same on all ranks
    for (int step = 0; step < kSteps; ++step) {
      std::vector<size_t> numbers(kTensors), elements(kTensors);
      for (size_t& count : elements) count = 1 + sizes() % (sizes() % 2 ? 20000 : 999);
      for (int i = 0; i < kTensors; ++i) {
        // In another order on each rank.
        const int tensor = (i + rank) % kTensors;
        const float value = static_cast<float>(step + tensor + rank);
        numbers[tensor] = self.Submit(
            Sum(std::to_string(tensor), std::vector<float>(elements[tensor], value)));
      }
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        ASSERT_TRUE(self.End(numbers[tensor]).ok());
        const float sum = static_cast<float>(3 * (step + tensor) + 0 + 1 + 2);
        ASSERT_EQ(FromBytes<float>(self.Output(numbers[tensor])),
                  std::vector<float>(elements[tensor], sum));
      }
    }
    ASSERT_TRUE(self.Run(Meet("end")).ok());
  });
  const int64_t tunings = job[0].counters().tunings;
  EXPECT_GT(tunings, 20);
  for (int rank = 1; rank < job.size(); ++rank) {
    // One more may have been decided after the last batch.
    EXPECT_LE(std::abs(job[rank].counters().tunings - tunings), 1);
  }
}

TEST(AutotuneEngineTest, KeepsALogAndStartsFromIt) {
  EngineOptions options = Autotuned();
  options.autotune.log = testing::TempDir() + "/engine_test_autotune.csv";
  options.autotune.most_samples = 6;
  remove(options.autotune.log.c_str());
  const auto run = [&] {
    Job job(2, options);
    job.ForEach([](Rank& self, int) {
      for (int step = 0; step < 100; ++step) {
        ASSERT_TRUE(self.Run(Sum("x", std::vector<float>(5000, 1))).ok());
      }
    });
    std::ifstream file(options.autotune.log);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string first = run();
  EXPECT_TRUE(Contains(first, "keras_hvd autotune 1: ranks=2 state=result\n")) << first;
  EXPECT_TRUE(Contains(first, ",search\n")) << first;
  ASSERT_TRUE(ReadAutotuneLog(2, &options.autotune).ok());
  const std::string second = run();
  EXPECT_TRUE(Contains(second, " state=result\n")) << second;
  EXPECT_FALSE(Contains(second, ",search\n")) << second;
}

TEST(AutotuneEngineTest, AJobGoesOnWithoutTheFile) {
  EngineOptions options = Autotuned();
  options.autotune.log = testing::TempDir() + "/missing/log.csv";
  CapturedErrors errors;
  Job job(2, options);
  job.ForEach([](Rank& self, int) {
    for (int step = 0; step < 30; ++step) {
      ASSERT_TRUE(self.Run(Sum("x", {1})).ok());
    }
  });
  EXPECT_EQ(Count(errors.text(), "missing/log.csv' cannot be written"), 1u);
}

TEST(AutotuneEngineTest, OneRankHasNothingToTune) {
  Job job(1, Autotuned());
  for (int step = 0; step < 30; ++step) {
    ASSERT_TRUE(job[0].Run(Sum("x", {1})).ok());
  }
  EXPECT_EQ(job[0].counters().tunings, 0);
}

// ---- Mistakes

TEST(MistakeTest, AMismatchFailsOnEveryRankAndNowhereElse) {
  Job job(3);
  job.ForEach([](Rank& self, int rank) {
    const size_t good = self.Submit(Sum("good", {1, 2}));
    const Status status =
        self.Run(Sum("grad/w", std::vector<float>(rank == 2 ? 4 : 3)));
    EXPECT_EQ(status.code, Code::kInvalidArgument);
    EXPECT_TRUE(Contains(status.message, "allreduce 'grad/w' failed on rank " +
                                             std::to_string(rank) +
                                             ": 'grad/w' differs between ranks ("))
        << status.message;
    EXPECT_TRUE(self.End(good).ok());
    EXPECT_TRUE(self.Run(Sum("grad/w", {1, 2, 3})).ok());
    self.CheckEnds();
  });
}

TEST(MistakeTest, ANameUnderWayInAnotherOpFailsOnEveryRank) {
  Job job(2);
  const size_t first = job[0].Submit(Sum("x", {1}));
  Ask other = Sum("x", {1});
  other.submitter = 2;
  const size_t second = job[0].Submit(other);
  EXPECT_TRUE(job[1].Run(Sum("x", {2})).ok());
  EXPECT_TRUE(job[0].End(first).ok());
  EXPECT_EQ(FromBytes<float>(job[0].Output(first))[0], 3.0f);
  for (const Status& status : {job[0].End(second), job[1].Run(Sum("x", {2}))}) {
    EXPECT_EQ(status.code, Code::kInvalidArgument);
    EXPECT_TRUE(Contains(status.message, "submitted on rank 0 by a second op"))
        << status.message;
  }
  job.ForEach([](Rank& self, int) { EXPECT_TRUE(self.Run(Sum("x", {2})).ok()); });
}

// ---- Departures

TEST(DepartureTest, OfAnyRankEndsWhatWaitsForIt) {
  for (int leaver : {0, 1, 2}) {
    Job job(3);
    job.ForEach([&](Rank& self, int) { ASSERT_TRUE(self.Run(Sum("a", {1})).ok()); });
    std::vector<size_t> numbers(3);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != leaver) numbers[rank] = job[rank].Submit(Sum("x", {1}));
    }
    const size_t own = job[leaver].Submit(Sum("y", {1}));
    job[leaver].Leave();
    EXPECT_EQ(job[leaver].End(own).code, Code::kShutDown);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == leaver) continue;
      const std::string who = "rank " + std::to_string(leaver) + " (pid " +
                              std::to_string(getpid()) + " on here) has left the job";
      for (const Status& status :
           {job[rank].End(numbers[rank]), job[rank].Run(Sum("y", {1})),
            job[rank].Run(Meet("z"))}) {
        EXPECT_EQ(status.code, Code::kRankFailed);
        EXPECT_TRUE(Contains(status.message, who)) << status.message;
      }
      job[rank].CheckEnds();
    }
  }
}

// The coordinator is gone while the others have nothing to do, and sleep until rung.
TEST(DepartureTest, OfTheCoordinatorIsSeenByALaterRequest) {
  Job job(2);
  job.ForEach([&](Rank& self, int) { ASSERT_TRUE(self.Run(Sum("a", {1})).ok()); });
  job[0].Leave();
  ASSERT_TRUE(job[1].AwaitRest());
  const Status status = job[1].Run(Sum("x", {1}));
  EXPECT_EQ(status.code, Code::kRankFailed);
  EXPECT_TRUE(Contains(status.message, "rank 0")) << status.message;
}

TEST(DepartureTest, AllMayLeaveAtOnceAfterTheirLastCollective) {
  for (int round = 0; round < 100; ++round) {
    Job job(4);
    job.ForEach([&](Rank& self, int) {
      EXPECT_TRUE(self.Run(Sum("last", std::vector<float>(3000, 1))).ok());
      self.Leave();
    });
    EXPECT_TRUE(job.segment().Failure().ok()) << job.segment().Failure().message;
  }
}

// A rank that shuts down while a peer holds up their collective waits for a while, then
// goes; the peer learns of it.
TEST(DepartureTest, InTheMiddleOfACollective) {
  Job job(2);
  std::atomic<bool> held{false}, gone{false};
  Ask ask = Gather("x", kManyRows);
  ask.on_allocate = [&] {
    held = true;
    EXPECT_TRUE(Eventually([&] { return gone.load(); }));
  };
  const size_t number = job[0].Submit(ask);
  const size_t other = job[1].Submit(Gather("x", kManyRows));
  ASSERT_TRUE(Eventually([&] { return held.load(); }));
  job[1].Leave();
  gone = true;
  EXPECT_EQ(job[1].End(other).code, Code::kShutDown);
  const Status status = job[0].End(number);
  EXPECT_EQ(status.code, Code::kRankFailed);
  EXPECT_TRUE(Contains(status.message, "left the job in the middle of allgather 'x'"))
      << status.message;
}

// ---- Process sets

Ask In(int32_t process_set, Ask ask) {
  ask.description.process_set = process_set;
  return ask;
}

// All ranks add the sets, in their order; those get the numbers from 1.
void AddSets(Job* job, const std::vector<std::vector<int>>& sets) {
  job->ForEach([&](Rank& self, int) {
    for (size_t i = 0; i < sets.size(); ++i) {
      int32_t id = 0;
      EXPECT_EQ(self.engine().AddProcessSet(sets[i], &id).message, "");
      EXPECT_EQ(id, static_cast<int32_t>(i + 1));
    }
  });
}

TEST(ProcessSetTest, OverlappingOnesInAnotherOrderOnEachRank) {
  constexpr int kSize = 4;
  const std::vector<std::vector<int>> sets = {{0, 1}, {2, 3}, {1, 2}, {0, 2, 3}, {3}};
  std::mt19937_64 random(7);
  for (const bool spin : {false, true}) {
    EngineOptions options;
    options.cores = spin ? kSize : 1;
    options.check = spin;
    Job job(kSize, options);
    AddSets(&job, sets);
    std::vector<Plan> plans;
    std::vector<std::vector<int>> members;
    for (int i = 0; i < 300; ++i) {
      const size_t set = random() % (sets.size() + 1);
      members.push_back(set == 0 ? std::vector<int>{0, 1, 2, 3} : sets[set - 1]);
      plans.push_back(RandomPlan(i, static_cast<int>(members[i].size()), &random));
      for (Ask& ask : plans[i].asks) {
        ask.description.process_set = static_cast<int32_t>(set);
        ask.description.root = members[i][ask.description.root];
      }
    }
    job.ForEach([&](Rank& self, int rank) {
      std::vector<size_t> order(plans.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::shuffle(order.begin(), order.end(), std::mt19937(rank));
      std::vector<std::tuple<size_t, size_t, size_t>> submitted;
      for (size_t i : order) {
        const auto found = std::find(members[i].begin(), members[i].end(), rank);
        if (found == members[i].end()) continue;
        const size_t place = found - members[i].begin();
        submitted.emplace_back(i, place, self.Submit(plans[i].asks[place]));
      }
      self.EndAll();
      for (const auto& [i, place, number] : submitted) {
        ASSERT_EQ(self.End(number).message, "");
        ASSERT_TRUE(self.Output(number) == plans[i].expected[place])
            << Details(plans[i].asks[place].description) << " on rank " << rank;
      }
    });
  }
}

// Rank 3 comes to its set's collective only when the other set has run a thousand.
TEST(ProcessSetTest, DisjointOnesDoNotWaitForEachOther) {
  for (const bool large : {false, true}) {
    Job job(4);
    AddSets(&job, {{0, 1}, {2, 3}});
    const std::vector<float> values = large ? kManyValues : std::vector<float>{1};
    std::atomic<int> ended{0};
    job.ForEach([&](Rank& self, int rank) {
      if (rank == 3) {
        EXPECT_TRUE(Eventually([&] { return ended.load() == 2; }));
      }
      const int32_t set = rank < 2 ? 1 : 2;
      const int times = rank >= 2 ? 1 : large ? 100 : 1000;
      for (int i = 0; i < times; ++i) {
        ASSERT_TRUE(self.Run(In(set, Sum("x", values))).ok());
      }
      ended += 1;
    });
  }
}

// The same while rank 2 is in the middle of its collective, and for sets that rank 0,
// which decides, is not in.
TEST(ProcessSetTest, OneThatIsHeldUpInTheMiddleHoldsUpNoOther) {
  Job job(5);
  AddSets(&job, {{1, 2}, {3, 4}});
  std::atomic<bool> held{false}, done{false};
  job.ForEach([&](Rank& self, int rank) {
    if (rank == 0) return;
    if (rank < 3) {
      Ask ask = In(1, Gather("x", kManyRows));
      ask.on_allocate = [&] {
        held = true;
        EXPECT_TRUE(Eventually([&] { return done.load(); }));
      };
      EXPECT_TRUE(self.Run(ask).ok());
      return;
    }
    EXPECT_TRUE(Eventually([&] { return held.load(); }));
    for (int i = 0; i < 300; ++i) {
      ASSERT_TRUE(self.Run(In(2, Sum("x", {1}))).ok());
    }
    done = true;
  });
  EXPECT_EQ(job[0].counters().lost_wakes, 0);
}

TEST(ProcessSetTest, ARankOutsideOfItFailsAtOnceAndHoldsUpNobody) {
  Job job(3);
  AddSets(&job, {{0, 2}});
  const Status outside = job[1].Run(In(1, Sum("x", {1})));
  EXPECT_EQ(outside.code, Code::kInvalidArgument);
  EXPECT_EQ(outside.message,
            "allreduce 'x' failed: rank 1 is not in process set 1 (ranks 0, 2)");
  const Status unknown = job[1].Run(In(9, Sum("x", {1})));
  EXPECT_EQ(unknown.message,
            "allreduce 'x' failed on rank 1: there is no process set 9: it was not "
            "added, or has been removed");
  Ask broadcast = In(1, Sum("b", {1}));
  broadcast.description.kind = Kind::kBroadcast;
  broadcast.description.root = 1;
  EXPECT_EQ(job[0].Run(broadcast).message,
            "broadcast 'b' failed on rank 0: root_rank 1 is not in process set 1 "
            "(ranks 0, 2)");
  job.ForEach([&](Rank& self, int rank) {
    if (rank != 1) {
      EXPECT_TRUE(self.Run(In(1, Sum("x", {1}))).ok());
    }
    EXPECT_TRUE(self.Run(Sum("x", {1})).ok());
  });
}

TEST(ProcessSetTest, MembersThatDisagreeAreNamedByTheirRanksInTheJob) {
  Job job(4);
  AddSets(&job, {{1, 3}});
  job.ForEach([&](Rank& self, int rank) {
    if (rank % 2 == 0) return;
    const std::vector<float> values(rank);
    const Status status = self.Run(In(1, Sum("x", values)));
    EXPECT_EQ(status.code, Code::kInvalidArgument);
    EXPECT_TRUE(Contains(status.message,
                         "rank 1: allreduce Sum of float32[1]; rank 3: "
                         "allreduce Sum of float32[3]"))
        << status.message;
  });
}

TEST(ProcessSetTest, IsRemovedByAll) {
  Job job(3);
  for (int32_t round = 1; round < 4; ++round) {
    job.ForEach([&](Rank& self, int rank) {
      int32_t id = 0;
      EXPECT_TRUE(self.engine().AddProcessSet({1, 2}, &id).ok());
      EXPECT_EQ(id, round);
      std::vector<int> members;
      EXPECT_TRUE(self.engine().MembersOf(id, &members).ok());
      EXPECT_EQ(members, (std::vector<int>{1, 2}));
      if (rank > 0) {
        EXPECT_TRUE(self.Run(In(id, Sum("x", {1}))).ok());
      }
      EXPECT_EQ(self.engine().RemoveProcessSet(id).message, "");
      EXPECT_EQ(self.engine().MembersOf(id, &members).code, Code::kInvalidArgument);
      EXPECT_EQ(self.Run(In(id, Sum("x", {1}))).code, Code::kInvalidArgument);
      EXPECT_EQ(self.engine().RemoveProcessSet(id).code, Code::kInvalidArgument);
      EXPECT_EQ(self.engine().RemoveProcessSet(0).code, Code::kInvalidArgument);
    });
  }
}

TEST(ProcessSetTest, RanksThatAddDifferentOnesHearWhatEachGave) {
  Job job(2);
  job.ForEach([&](Rank& self, int rank) {
    int32_t id = 0;
    const Status status = self.engine().AddProcessSet({rank}, &id);
    EXPECT_EQ(status.code, Code::kInvalidArgument);
    EXPECT_EQ(status.message,
              "add_process_set() failed on rank " + std::to_string(rank) +
                  ": the ranks' calls differ (rank 0: add_process_set of rank 0; rank "
                  "1: add_process_set of rank 1). Every rank must add and remove the "
                  "same process sets in the same order");
    for (const std::vector<int>& wrong :
         std::vector<std::vector<int>>{{}, {0, 0}, {1, 0}, {2}, {-1}}) {
      EXPECT_EQ(self.engine().AddProcessSet(wrong, &id).code, Code::kInvalidArgument);
    }
    EXPECT_TRUE(self.engine().AddProcessSet({1}, &id).ok());
    EXPECT_EQ(id, 1);
  });
}

TEST(ProcessSetTest, GoesOnWhenARankOutsideOfItLeaves) {
  Job job(3);
  AddSets(&job, {{0, 2}, {1, 2}});
  job[1].Leave();
  job.ForEach([&](Rank& self, int rank) {
    if (rank == 1) return;
    EXPECT_TRUE(self.Run(In(1, Sum("x", {1}))).ok());
    EXPECT_EQ(self.Run(Sum("x", {1})).code, Code::kRankFailed);
    int32_t id = 0;
    EXPECT_EQ(self.engine().AddProcessSet({0}, &id).code, Code::kRankFailed);
  });
  EXPECT_EQ(job[2].Run(In(2, Sum("x", {1}))).code, Code::kRankFailed);
}

TEST(ProcessSetTest, AStallNamesItsMembersOnly) {
  EngineOptions options;
  options.stall_warning_seconds = 0.01;
  Job job(4, options);
  AddSets(&job, {{1, 3}});
  CapturedErrors errors;
  job[3].Submit(In(1, Sum("x", {1})));
  ASSERT_TRUE(errors.AwaitText("which not every rank of process set 1 has reached"));
  EXPECT_TRUE(job[1].Run(In(1, Sum("x", {1}))).ok());
  job[3].EndAll();
  const std::string text = errors.text();
  EXPECT_TRUE(Contains(text, "rank 3 waited ")) << text;
  EXPECT_TRUE(Contains(text, "\n  rank 1 (pid ")) << text;
  EXPECT_FALSE(Contains(text, "\n  rank 0 (pid ")) << text;
  EXPECT_FALSE(Contains(text, "\n  rank 2 (pid ")) << text;
}

// ---- Joins

TEST_P(RanksTest, AJoinedRankGivesZerosUntilAllHaveJoined) {
  const int size = GetParam();
  for (const bool together : {false, true}) {
    EngineOptions options;
    options.check = together;
    Job job(size, options);
    std::vector<int32_t> last(size);
    job.ForEach([&](Rank& self, int rank) {
      for (int epoch = 0; epoch < 3; ++epoch) {
        // The rank that has most data is another one in each epoch.
        const auto steps_of = [&](int r) { return 5 + 7 * ((r + epoch) % size); };
        std::vector<size_t> numbers;
        for (int step = 0; step < steps_of(rank); ++step) {
          const std::string name = "step " + std::to_string(step);
          const ReduceOp op = step % 2 == 0 ? ReduceOp::kSum : ReduceOp::kAverage;
          const std::vector<float> values(step % 5 == 0 ? 3000 : 3, rank + 1);
          numbers.push_back(self.Submit(Sum(name, values, op)));
          if (!together) self.AwaitEnd(numbers.back());
        }
        int32_t joined = -1;
        EXPECT_EQ(self.engine().Join(&joined).message, "");
        last[rank] = joined;
        for (size_t step = 0; step < numbers.size(); ++step) {
          EXPECT_EQ(self.End(numbers[step]).message, "");
          float sum = 0;
          for (int r = 0; r < size; ++r) {
            if (steps_of(r) > static_cast<int>(step)) sum += r + 1;
          }
          if (step % 2 == 1) sum /= size;
          for (float value : FromBytes<float>(self.Output(numbers[step]))) {
            ASSERT_FLOAT_EQ(value, sum);
          }
        }
        ASSERT_TRUE(self.Run(Meet("epoch")).ok());
        EXPECT_EQ(last, std::vector<int32_t>(size, last[rank]));
        const int most = (2 * size - 1 - epoch % size) % size;
        if (!together) {
          EXPECT_EQ(joined, most);
        }
        ASSERT_TRUE(self.Run(Meet("compared")).ok());
      }
    });
  }
}

TEST(JoinTest, WhatNeedsTheRankFailsOnThoseThatWaitForIt) {
  Job job(3);
  AddSets(&job, {{0, 1}, {0, 2}});
  job.ForEach([&](Rank& self, int rank) {
    if (rank != 1) {
      Ask broadcast = Sum("x", {1});
      broadcast.description.kind = Kind::kBroadcast;
      for (const Ask& ask :
           {Sum("x", {1}, ReduceOp::kMax), Gather("x", {1}), broadcast, Meet("x")}) {
        const Status status = self.Run(ask);
        EXPECT_EQ(status.code, Code::kInvalidArgument);
        EXPECT_TRUE(Contains(status.message, "rank 1 has joined")) << status.message;
      }
      // The others' own go on.
      EXPECT_TRUE(self.Run(In(2, Sum("x", {1}, ReduceOp::kMax))).ok());
    }
    if (rank == 0) {
      const Status status = self.Run(In(1, Sum("x", {1})));
      EXPECT_TRUE(Contains(status.message, "rank 1 has joined")) << status.message;
      EXPECT_TRUE(Contains(status.message, "in process set 1")) << status.message;
    }
    int32_t last = -1;
    EXPECT_TRUE(self.engine().Join(&last).ok());
    EXPECT_TRUE(self.Run(Sum("x", {1}, ReduceOp::kMax)).ok());
  });
}

TEST(JoinTest, ASecondThreadCannotJoin) {
  Job job(2);
  std::thread first([&] {
    int32_t last = -1;
    EXPECT_TRUE(job[1].engine().Join(&last).ok());
    EXPECT_EQ(last, 0);
  });
  // Rank 0's sum ends only once rank 1 has joined.
  EXPECT_TRUE(job[0].Run(Sum("x", {1})).ok());
  int32_t last = -1;
  EXPECT_EQ(job[1].engine().Join(&last).code, Code::kInvalidArgument);
  EXPECT_TRUE(job[0].engine().Join(&last).ok());
  first.join();
}

TEST(JoinTest, EndsWithAnErrorWhenARankLeaves) {
  for (const int leaver : {0, 2}) {
    Job job(3);
    job.ForEach([&](Rank& self, int rank) {
      if (rank == leaver) return self.Leave();
      int32_t last = -1;
      const Status status = self.engine().Join(&last);
      EXPECT_EQ(status.code, Code::kRankFailed);
      EXPECT_TRUE(Contains(status.message, "rank " + std::to_string(leaver)))
          << status.message;
    });
  }
}

TEST(JoinTest, AJoinedRankMayLeave) {
  Job job(2);
  std::thread joined([&] {
    int32_t last = -1;
    EXPECT_EQ(job[1].engine().Join(&last).code, Code::kShutDown);
  });
  EXPECT_TRUE(job[0].Run(Sum("x", {1})).ok());
  job[1].Stop();
  joined.join();
  EXPECT_EQ(job[0].Run(Sum("x", {1})).code, Code::kRankFailed);
}

// ---- Callers that drive

// Runs `body` on a thread that waits for the end of `ask` meanwhile.
Status WhileDriving(Rank& rank, Ask ask, const std::function<void()>& body) {
  Status status;
  std::thread caller([&] { status = rank.Drive(std::move(ask)); });
  EXPECT_TRUE(rank.AwaitPending());
  body();
  caller.join();
  return status;
}

TEST(DrivingTest, ACallerGetsItsResultThoughThePeersComeMuchLater) {
  for (int caller : {0, 1}) {
    Job job(2);
    const Status status = WhileDriving(job[caller], Sum("x", {1}), [&] {
      const int64_t sleeps = job[caller].counters().sleeps;
      EXPECT_TRUE(Eventually([&] { return job[caller].counters().sleeps > sleeps; }));
      EXPECT_TRUE(job[1 - caller].Run(Sum("x", {1})).ok());
    });
    EXPECT_TRUE(status.ok()) << status.message;
  }
}

TEST(DrivingTest, ACallerHearsOfAFailure) {
  for (int caller : {0, 1}) {
    Job job(2);
    const Status status = WhileDriving(job[caller], Sum("x", {1}), [&] {
      EXPECT_TRUE(job.segment().Fail(0, Code::kRankFailed, "rank 1 fell over"));
    });
    EXPECT_EQ(status.code, Code::kRankFailed);
    EXPECT_TRUE(Contains(status.message, "rank 1 fell over")) << status.message;
  }
}

TEST(DrivingTest, ACallerHearsOfADeparture) {
  for (int caller : {0, 1}) {
    Job job(2);
    const Status status =
        WhileDriving(job[caller], Sum("x", {1}), [&] { job[1 - caller].Leave(); });
    EXPECT_EQ(status.code, Code::kRankFailed);
    EXPECT_TRUE(Contains(status.message, "has left the job")) << status.message;
  }
}

TEST(DrivingTest, AnEngineThatStopsEndsWhatItsCallersWaitFor) {
  for (int caller : {0, 1}) {
    Job job(2);
    const Status status =
        WhileDriving(job[caller], Sum("x", {1}), [&] { job[caller].Stop(); });
    EXPECT_EQ(status.code, Code::kShutDown);
    EXPECT_EQ(job[caller].Drive(Sum("y", {1})).code, Code::kShutDown);
  }
}

TEST(DrivingTest, ASmallRequestMayEndOnTheThreadThatSubmitsIt) {
  Job job(1);
  int here = 0;
  for (int i = 0; i < 100; ++i) {
    Ask ask = Sum("x", {1});
    ask.on_end = [&, caller = std::this_thread::get_id()] {
      here += std::this_thread::get_id() == caller;
    };
    EXPECT_TRUE(job[0].Run(std::move(ask)).ok());
  }
  // But for those that only submit, and those at which the engine's thread looked.
  EXPECT_GT(here, 20);
}

// ---- Failures

TEST(FailureTest, EndsEverythingExactlyOnce) {
  std::mt19937 random(3);
  size_t failed = 0;
  for (int round = 0; round < 60; ++round) {
    Job job(3);
    const int at = random() % 150;
    job.ForEach([&](Rank& self, int rank) {
      for (int i = 0; i < 200; ++i) {
        Ask ask = Sum(std::to_string(i), std::vector<float>(i % 7 == 0 ? 4000 : 5));
        if (i == at && rank == round % 3) {
          ask.on_end = [&] {
            EXPECT_TRUE(job.segment().Fail(1, Code::kRankFailed, "rank 2 fell over"));
          };
        }
        self.Submit(ask);
      }
      // One that never runs: no other rank submits it.
      const Status status = self.Run(Meet("without " + std::to_string(rank)));
      EXPECT_EQ(status.code, Code::kRankFailed);
      EXPECT_TRUE(Contains(status.message, "rank 2 fell over")) << status.message;
      EXPECT_TRUE(Contains(status.message, "The job cannot go on")) << status.message;
      self.EndAll();
      const Status later = self.Run(Meet("later"));
      EXPECT_EQ(later.code, Code::kRankFailed);
      EXPECT_TRUE(Contains(later.message, "barrier 'later' failed on rank " +
                                              std::to_string(rank) +
                                              ": rank 2 fell over"));
    });
    for (int rank = 0; rank < 3; ++rank) failed += job[rank].failed();
  }
  // More than those that could not run anyway.
  EXPECT_GT(failed, 3u * 60);
}

// Shutting down just after a failure, when no timed sleep helps a wake that is missed.
TEST(FailureTest, ThenShutdownAtAnyMoment) {
  for (int round = 0; round < 300; ++round) {
    Job job(2);
    job.segment().Fail(0, Code::kRankFailed, "enough");
    if (round % 3 != 0) continue;
    EXPECT_FALSE(job[0].Run(Meet("x")).ok());
  }
}

// ---- The consistency mode

// Faulty memory: what is written to its last page also changes the one before.
class FaultyMemory {
 public:
  FaultyMemory() {
    const int file = memfd_create("faulty", MFD_CLOEXEC);
    EXPECT_EQ(ftruncate(file, 2 * kPage), 0);
    const auto map = [&](void* where, int64_t pages, int64_t page, int flags) {
      void* memory = mmap(where, pages * kPage, PROT_READ | PROT_WRITE,
                          MAP_SHARED | flags, file, page * kPage);
      EXPECT_NE(memory, MAP_FAILED);
      return static_cast<char*>(memory);
    };
    // The third page lies beyond the file until it becomes the second one again.
    data_ = map(nullptr, 3, 0, 0);
    map(data_ + 2 * kPage, 1, 1, MAP_FIXED);
    close(file);
  }
  ~FaultyMemory() { munmap(data_, 3 * kPage); }

  static constexpr int64_t kPage = 4096;
  char* data() const { return data_; }

 private:
  char* data_;
};

// What each rank submits: results of three pages.
Ask CheckedAsk(Kind kind, int rank) {
  constexpr int64_t kElements = FaultyMemory::kPage / 4;
  std::vector<int32_t> values(3 * kElements);
  for (size_t i = 0; i < values.size(); ++i) values[i] = rank * 10000 + i;
  if (kind == Kind::kAllgather) {
    values.resize(kElements);
    return Gather("x", values);
  }
  Ask ask;
  ask.description.name = "x";
  ask.description.kind = kind;
  ask.input = AsBytes(values);
  if (kind == Kind::kBroadcast) {
    ask.description.tensors = {{DataType::kInt32, {3 * kElements}}};
  } else {
    ask.description.tensors.assign(3, {DataType::kInt32, {kElements}});
  }
  return ask;
}

TEST(CheckTest, ADifferentResultOfAnyCollectiveEndsTheJobAndIsNamed) {
  for (Kind kind : {Kind::kAllreduce, Kind::kAllgather, Kind::kBroadcast}) {
    EngineOptions options;
    options.check = true;
    Job job(3, options);
    CapturedErrors errors;
    job.ForEach([&](Rank& self, int rank) {
      EXPECT_TRUE(self.Run(CheckedAsk(kind, rank)).ok());
      const FaultyMemory memory;
      Ask ask = CheckedAsk(kind, rank);
      if (rank == 1) ask.output = memory.data();
      const Status status = self.Run(std::move(ask));
      EXPECT_EQ(status.code, Code::kInternal);
      const std::string title = std::string(Name(kind)) + " 'x'";
      const std::string place = kind == Kind::kAllreduce ? "tensor 2 of 3 of " : "";
      EXPECT_TRUE(
          Contains(status.message, title + " failed on rank " + std::to_string(rank) +
                                       ": the result of " + place + title +
                                       " differs between ranks (hashes: ranks 0, 2: "))
          << status.message;
      EXPECT_TRUE(Contains(status.message, "; rank 1: ")) << status.message;
      EXPECT_EQ(self.Run(Meet("later")).code, Code::kInternal);
    });
    EXPECT_EQ(Count(errors.text(), "What each rank did last:"), 1u) << errors.text();
  }
}

TEST(CheckTest, RankZeroDecidesForAll) {
  for (bool checks : {false, true}) {
    Job job(2, {}, /*start=*/false);
    for (int rank = 0; rank < 2; ++rank) {
      job.Start(rank, [&](EngineOptions* options) {
        options->check = (rank == 0) == checks;
      });
    }
    job.ForEach([&](Rank& self, int rank) {
      EXPECT_TRUE(self.Run(Sum("x", {1, 2})).ok());
      const FaultyMemory memory;
      Ask ask = CheckedAsk(Kind::kAllreduce, rank);
      if (rank == 1) ask.output = memory.data();
      EXPECT_EQ(self.Run(std::move(ask)).ok(), !checks);
    });
  }
}

TEST(CheckTest, ARankWithoutMemoryForItsResultIsNoDifference) {
  EngineOptions options;
  options.check = true;
  Job job(3, options);
  job.ForEach([](Rank& self, int rank) {
    Ask ask = Gather("x", std::vector<int32_t>(5000, rank));
    ask.has_memory = rank != 1;
    EXPECT_EQ(self.Run(std::move(ask)).ok(), rank != 1);
    EXPECT_TRUE(self.Run(Meet("and on it goes")).ok());
  });
}

// ---- Stalls

TEST(StallTest, IsReportedOnceWithWhoIsWhere) {
  EngineOptions options;
  options.stall_warning_seconds = 0.01;
  Job job(3, options);
  job.ForEach([](Rank& self, int) { ASSERT_TRUE(self.Run(Sum("a", {1})).ok()); });
  CapturedErrors errors;
  for (int rank : {0, 2}) job[rank].Submit(Sum("grad/w", {1}));
  ASSERT_TRUE(errors.AwaitText("its last was allreduce 'a'"));
  // A second stall is looked for in the same round as the first: were it reported
  // again, that would have come first.
  for (int rank : {0, 2}) job[rank].Submit(Sum("grad/v", {1}));
  ASSERT_TRUE(errors.AwaitText("allreduce 'grad/v', which not every rank has reached"));
  for (const char* name : {"grad/w", "grad/v"}) {
    EXPECT_TRUE(job[1].Run(Sum(name, {1})).ok());
  }
  for (int rank : {0, 2}) job[rank].EndAll();
  const std::string text = errors.text();
  EXPECT_EQ(Count(text, "keras_hvd [rank 0] warning: "), 2u) << text;
  EXPECT_EQ(Count(text, "s for allreduce 'grad/w', which not every rank"), 1u) << text;
  EXPECT_EQ(Count(text, "\n  rank 1 (pid " + std::to_string(getpid()) +
                            " on here) has not; its last was allreduce 'a'"),
            2u)
      << text;
}

TEST(StallTest, AbortsTheJobIfAsked) {
  EngineOptions options;
  options.stall_warning_seconds = -1;
  options.stall_abort_seconds = 0.05;
  Job job(2, options);
  CapturedErrors errors;
  const Status status = job[1].Run(Sum("x", {1}));
  EXPECT_EQ(status.code, Code::kRankFailed);
  EXPECT_TRUE(Contains(status.message, "rank 1 waited"));
  EXPECT_TRUE(Contains(status.message, "rank 0 (pid " + std::to_string(getpid()) +
                                           " on here) has not; it has submitted "
                                           "nothing yet"))
      << status.message;
  EXPECT_TRUE(Contains(status.message, "KERAS_HVD_STALL_ABORT_SECONDS"));
  EXPECT_EQ(job[0].Run(Meet("y")).code, Code::kRankFailed);
  EXPECT_EQ(Count(errors.text(), "What each rank did last:"), 1u) << errors.text();
}

TEST(StallTest, InTheMiddleOfACollectiveNamesTheRankThatHoldsItUp) {
  EngineOptions options;
  options.stall_warning_seconds = 0.01;
  options.stall_abort_seconds = 1;
  Job job(2, options);
  CapturedErrors errors;
  std::atomic<bool> released{false};
  Ask ask = Gather("x", kManyRows);
  ask.on_allocate = [&] { EXPECT_TRUE(Eventually([&] { return released.load(); })); };
  const size_t number = job[0].Submit(ask);
  const Status status = job[1].Run(Gather("x", kManyRows));
  released = true;
  EXPECT_EQ(status.code, Code::kRankFailed);
  EXPECT_TRUE(Contains(status.message, "has not answered for 1 s in allgather 'x'"))
      << status.message;
  EXPECT_EQ(job[0].End(number).code, Code::kRankFailed);
  EXPECT_EQ(Count(errors.text(), "warning: rank 0 "), 1u) << errors.text();
}

TEST(StallTest, ARequestThatIsUnderWayAgainAndAgainDoesNotStall) {
  EngineOptions options;
  options.stall_warning_seconds = -1;
  options.stall_abort_seconds = 1;
  Job job(2, options);
  // For two seconds there is always one more of the name than both have submitted.
  const Clock::time_point end = Clock::now() + std::chrono::seconds(2);
  size_t number = job[0].Submit(Sum("x", {1}));
  while (Clock::now() < end) {
    const size_t next = job[0].Submit(Sum("x", {1}));
    ASSERT_TRUE(job[1].Run(Sum("x", {1})).ok());
    ASSERT_TRUE(job[0].End(number).ok());
    number = next;
  }
  ASSERT_TRUE(job[1].Run(Sum("x", {1})).ok());
}

// ---- Rest

// Nanoseconds that this process' engine threads have run.
int64_t EngineNanoseconds() {
  int64_t sum = 0;
  DIR* tasks = opendir("/proc/self/task");
  while (const dirent* task = readdir(tasks)) {
    const std::string path = std::string("/proc/self/task/") + task->d_name;
    std::string name;
    int64_t nanoseconds = 0;
    std::ifstream(path + "/comm") >> name;
    if (name != "keras_hvd") continue;
    if (!(std::ifstream(path + "/schedstat") >> nanoseconds)) ADD_FAILURE();
    sum += nanoseconds;
  }
  closedir(tasks);
  return sum;
}

TEST(IdleTest, AnIdleEngineUsesNoTime) {
  Job job(3);
  job.ForEach([](Rank& self, int) { ASSERT_TRUE(self.Run(Sum("a", {1})).ok()); });
  for (int rank = 0; rank < 3; ++rank) ASSERT_TRUE(job[rank].AwaitRest());
  const int64_t before = EngineNanoseconds();
  EXPECT_GT(before, 0);
  poll(nullptr, 0, 2000);  // the time that is measured
  EXPECT_EQ(EngineNanoseconds(), before);
  // And it wakes up.
  job.ForEach([](Rank& self, int) { ASSERT_TRUE(self.Run(Sum("a", {1})).ok()); });
}

}  // namespace
}  // namespace keras_hvd
