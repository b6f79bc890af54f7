// For tests of the engine: engines of several ranks as threads over one segment, which
// are asked for collectives and say how each ended.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/collectives/testing.h"
#include "tf_ops/engine/engine.h"
#include "tf_ops/transport/job_state.h"

namespace keras_hvd {

// Long enough for any machine; a test that waits for it has failed.
inline constexpr std::chrono::seconds kForever(60);
// Inputs so large that the engine's thread runs them in any case.
inline const std::vector<float> kManyValues(50000, 1);
inline const std::vector<int32_t> kManyRows(50000);

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

// A request to submit, without the engine's own fields.
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

inline Ask Sum(const std::string& name, const std::vector<float>& values,
               ReduceOp op = ReduceOp::kSum) {
  Ask ask;
  ask.description.name = name;
  ask.description.reduction.op = op;
  ask.description.tensors = {
      {DataType::kFloat32, {static_cast<int64_t>(values.size())}}};
  ask.input = AsBytes(values);
  return ask;
}

inline Ask Gather(const std::string& name, const std::vector<int32_t>& values) {
  Ask ask;
  ask.description.name = name;
  ask.description.kind = Kind::kAllgather;
  ask.description.tensors = {{DataType::kInt32, {-1}}};
  ask.input = AsBytes(values);
  ask.rows = static_cast<int64_t>(values.size());
  return ask;
}

inline Ask Meet(const std::string& name) {
  Ask ask;
  ask.description.name = name;
  ask.description.kind = Kind::kBarrier;
  return ask;
}

// One rank: its engine, and all its requests.
class Rank {
 public:
  Rank(const EngineOptions& options, const World& world)
      : engine_(std::make_unique<Engine>(options, world)) {}
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
    change(&options);
    ranks_[rank] = std::make_unique<Rank>(options, SharedMemoryWorld(segment_, rank));
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  Rank& operator[](int rank) { return *ranks_[rank]; }
  Segment& segment() { return *segment_; }
  // As a rank sees it.
  JobState state(int rank = 0) { return JobState(segment_, rank); }

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

inline bool Contains(const std::string& text, const std::string& part) {
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

inline size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos;
       at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

// ---- Process sets

inline Ask In(int32_t process_set, Ask ask) {
  ask.description.process_set = process_set;
  return ask;
}

// All ranks add the sets, in their order; those get the numbers from 1.
inline void AddSets(Job* job, const std::vector<std::vector<int>>& sets) {
  job->ForEach([&](Rank& self, int) {
    for (size_t i = 0; i < sets.size(); ++i) {
      int32_t id = 0;
      EXPECT_EQ(self.engine().AddProcessSet(sets[i], &id).message, "");
      EXPECT_EQ(id, static_cast<int32_t>(i + 1));
    }
  });
}

}  // namespace keras_hvd
