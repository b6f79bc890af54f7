// For tests of the engine with tensors on GPUs, over the libraries that stand in for
// CUDA and NCCL: ranks as threads, each with a stream on which its inputs come to be
// late, and its buffers are used for other things as soon as its results are read.
#pragma once

#include <gtest/gtest.h>
#include <pthread.h>

#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tf_ops/collectives/number.h"
#include "tf_ops/engine/engine_testing.h"
#include "tf_ops/engine/hosts_testing.h"
#include "tf_ops/testing/gpu/stand_in.h"

namespace keras_hvd {

// The device memory of a test's own.
class DeviceBuffer {
 public:
  DeviceBuffer(const stand_in::StandIn& libraries, cuda::Context context, size_t bytes)
      : cuda_(libraries.cuda()), context_(context) {
    if (bytes == 0) return;
    EXPECT_EQ(cuda_.push_context(context_), cuda::Result::kSuccess);
    EXPECT_EQ(cuda_.allocate(&address_, bytes), cuda::Result::kSuccess);
    EXPECT_EQ(cuda_.pop_context(&context), cuda::Result::kSuccess);
  }
  ~DeviceBuffer() {
    if (address_ == 0) return;
    cuda::Context popped;
    cuda_.push_context(context_);
    EXPECT_EQ(cuda_.free(address_), cuda::Result::kSuccess);
    cuda_.pop_context(&popped);
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  char* data() const { return reinterpret_cast<char*>(address_); }

 private:
  const cuda::Functions cuda_;
  const cuda::Context context_;
  cuda::Pointer address_ = 0;
};

// Names the thread of a rank's caller, for its calls of CUDA through the engine: the
// test's own calls are never meant to fail.
class CallerThread {
 public:
  CallerThread() {
    pthread_getname_np(pthread_self(), name_, sizeof(name_));
    pthread_setname_np(pthread_self(), "caller");
  }
  ~CallerThread() { pthread_setname_np(pthread_self(), name_); }
  CallerThread(const CallerThread&) = delete;
  CallerThread& operator=(const CallerThread&) = delete;

 private:
  char name_[16] = "";
};

// The options of a request.
struct GpuMode {
  bool in_place = false;
  bool deferred = false;  // the stream is told to wait later, by Await
  bool drives = false;    // the calling thread drives, if nobody else does
};

// One rank's own work on its GPU, and its requests to its engine.
class GpuRank {
 public:
  GpuRank(const stand_in::StandIn& libraries, Rank* rank, int number, int device)
      : libraries_(libraries), rank_(*rank), number_(number), device_(device) {
    libraries_->SetRank(number);
    const cuda::Functions& cuda = libraries_.cuda();
    EXPECT_EQ(cuda.init(0), cuda::Result::kSuccess);
    EXPECT_EQ(cuda.retain_primary_context(&context_, device), cuda::Result::kSuccess);
    cuda::Context popped;
    EXPECT_EQ(cuda.push_context(context_), cuda::Result::kSuccess);
    EXPECT_EQ(cuda.create_stream(&stream_, cuda::kStreamNonBlocking, 0),
              cuda::Result::kSuccess);
    EXPECT_EQ(cuda.pop_context(&popped), cuda::Result::kSuccess);
  }
  ~GpuRank() {
    Synchronize();
    requests_.clear();
    cuda::Context popped;
    libraries_.cuda().push_context(context_);
    libraries_.cuda().destroy_stream(stream_);
    libraries_.cuda().pop_context(&popped);
    libraries_.cuda().release_primary_context(device_);
  }

  cuda::Stream stream() const { return stream_; }
  Engine& engine() { return rank_.engine(); }
  // For tensors in host memory.
  Rank& on_cpu() { return rank_; }

  // Returns the request's number. Its input comes to be on the stream.
  size_t Submit(const Ask& ask, GpuMode mode = {}) {
    Request* const request = Add(ask, mode);
    auto operation = OperationFor(request);
    const CallerThread caller;
    Status status = engine().SetStreamPoint(
        stream_, mode.deferred ? &request->end : nullptr, operation.get());
    const auto submit = mode.drives ? &Engine::SubmitAndDrive : &Engine::Submit;
    if (status.ok()) status = (engine().*submit)(std::move(operation));
    if (!status.ok()) End(request, status);
    return request->number;
  }

  // Waits until it is enqueued, or has failed; not for its results.
  Status End(size_t number) {
    Request& request = At(number);
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, kForever, [&] { return request.ended; })) {
      ADD_FAILURE() << Title(request.ask.description) << " does not end";
      abort();
    }
    return request.status;
  }

  // Makes the stream wait for a deferred one that has ended well.
  void Await(size_t number) { EXPECT_EQ(TryToAwait(number).message, ""); }
  Status TryToAwait(size_t number) {
    Request& request = At(number);
    const std::unique_ptr<EndMark> mark(
        static_cast<EndMark*>(std::exchange(request.end, nullptr)));
    if (mark == nullptr) return Status::Internal("there is no mark of its end");
    Status status;
    {
      const CallerThread caller;
      status = mark->Await(stream_);
    }
    Use(&request);
    return status;
  }

  // The output of a request that has ended well, once the stream has come there.
  const Buffer& Output(size_t number) {
    Synchronize();
    return At(number).read;
  }

  // Gives back the memory of a request that has ended, once the stream has come there.
  void Free(size_t number) {
    Synchronize();
    Request& request = At(number);
    request.input.reset();
    request.output.reset();
  }

  void Synchronize() { EXPECT_EQ(libraries_->Synchronize(stream_), ""); }

  Status Run(const Ask& ask, Buffer* output, GpuMode mode = {}) {
    const size_t number = Submit(ask, mode);
    const Status status = End(number);
    if (!status.ok()) return status;
    if (mode.deferred) Await(number);
    *output = Output(number);
    return status;
  }
  // The same with tensors in host memory.
  Status RunOnCpu(const Ask& ask, Buffer* output) {
    size_t number;
    const Status status = rank_.Drive(ask, &number);
    if (status.ok()) *output = rank_.Output(number);
    return status;
  }

 private:
  struct Request {
    size_t number = 0;
    Ask ask;
    GpuMode mode;
    std::unique_ptr<DeviceBuffer> input, output;
    size_t output_bytes = 0;
    Buffer read;
    void* end = nullptr;
    bool ended = false;
    Status status;
  };

  Request* Add(const Ask& ask, GpuMode mode) {
    std::lock_guard<std::mutex> lock(mutex_);
    Request& request = requests_.emplace_back();
    request.number = requests_.size() - 1;
    request.ask = ask;
    request.ask.description.on_gpu = ask.description.kind != Kind::kBarrier;
    request.mode = mode;
    // Where the result is a part, it is none of the inputs.
    if (TraitsOf(ask.description.kind).gives_parts) request.mode.in_place = false;
    return &request;
  }

  Request& At(size_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return requests_[number];
  }

  std::unique_ptr<DeviceBuffer> NewBuffer(size_t bytes) {
    return std::make_unique<DeviceBuffer>(libraries_, context_, bytes);
  }

  std::unique_ptr<Operation> OperationFor(Request* request) {
    const Description& description = request->ask.description;
    auto operation = std::make_unique<Operation>();
    operation->description = std::make_shared<Description>(description);
    operation->submitter = request->ask.submitter;
    const Buffer& input = request->ask.input;
    request->input = NewBuffer(input.size());
    char* const to = request->input->data();
    libraries_->Enqueue(stream_, [to, &input] {
      if (!input.empty()) memcpy(to, input.data(), input.size());
    });
    char* output = to;
    if (HasOwnRows(description.kind)) {
      operation->rows = {request->ask.rows};
      operation->splits = request->ask.splits;
      output = nullptr;
    } else {
      request->output_bytes = input.size();
      if (!request->mode.in_place) {
        request->output = NewBuffer(input.size());
        output = request->output->data();
        // The memory's earlier content is in use up to here.
        Spoil(output, input.size());
      }
    }
    int64_t offset = 0;
    for (const TensorDescription& tensor : description.tensors) {
      operation->buffers.push_back({to + offset, output + offset});
      offset += Elements(tensor) * Bytes(tensor.dtype);
    }
    operation->allocate = [this, request](size_t,
                                          const std::vector<int64_t>& rows) -> void* {
      return Allocate(request, rows);
    };
    operation->done = [this, request](const Status& status) { End(request, status); };
    return operation;
  }

  void* Allocate(Request* request, const std::vector<int64_t>& rows) {
    request->ask.on_allocate();
    if (!request->ask.has_memory) return nullptr;
    const int64_t sum = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    request->output_bytes = sum * sizeof(int32_t);
    // In a thread of its own: calls of the engine's threads are the engine's.
    std::thread([&] {
      pthread_setname_np(pthread_self(), "test");
      request->output = NewBuffer(request->output_bytes);
    }).join();
    Spoil(request->output->data(), request->output_bytes);
    return request->output->data();
  }

  void End(Request* request, const Status& status) {
    // Often the engine's thread, which is this rank's too.
    libraries_->SetRank(number_);
    if (status.ok() && !request->mode.deferred) Use(request);
    // Nobody reads a failed result, but its memory is used for something else.
    if (!status.ok()) SpoilAll(request);
    request->ask.on_end();
    std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_FALSE(request->ended) << Title(request->ask.description);
    request->status = status;
    request->ended = true;
    changed_.notify_all();
  }

  // The work after a collective on its stream: reads the result, and uses the memory
  // for something else.
  void Use(Request* request) {
    const char* const from =
        request->output == nullptr ? request->input->data() : request->output->data();
    libraries_->Enqueue(stream_, [request, from] {
      request->read.assign(from, from + request->output_bytes);
    });
    SpoilAll(request);
  }

  void SpoilAll(Request* request) {
    Spoil(request->input->data(), request->ask.input.size());
    if (request->output != nullptr) {
      Spoil(request->output->data(), request->output_bytes);
    }
  }

  void Spoil(char* memory, size_t bytes) {
    if (bytes == 0) return;
    libraries_->Enqueue(stream_, [memory, bytes] { memset(memory, 0xEE, bytes); });
  }

  const stand_in::StandIn& libraries_;
  Rank& rank_;
  const int number_;
  const int device_;
  cuda::Context context_ = nullptr;
  cuda::Stream stream_ = nullptr;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> requests_;
};

// The functions of the libraries that were called.
inline std::set<std::string> FunctionsOf(const stand_in::StandIn& libraries) {
  std::set<std::string> functions;
  for (const stand_in::Call& call : libraries->Calls()) {
    functions.insert(call.function);
  }
  return functions;
}

// How often a function was called, with these arguments where they matter.
inline int64_t CountCalls(const stand_in::StandIn& libraries,
                          const std::string& function,
                          const std::string& arguments = "") {
  int64_t count = 0;
  for (const stand_in::Call& call : libraries->Calls()) {
    const bool counts = arguments.empty() || call.arguments == arguments;
    if (call.function == function && counts) count += call.times;
  }
  return count;
}

// A job of several ranks in this process, each with a GPU, on one host or several.
class GpuJob {
 public:
  using Change = std::function<void(EngineOptions*, int rank)>;

  GpuJob(
      const stand_in::StandIn& libraries, int size, uint64_t seed,
      const Change& change = [](EngineOptions*, int) {}, int devices = 0)
      : GpuJob(libraries, Layout{std::vector<int>(size)}, seed, change, devices) {}
  GpuJob(
      const stand_in::StandIn& libraries, const Layout& layout, uint64_t seed,
      const Change& change = [](EngineOptions*, int) {}, int devices = 0)
      : libraries_(libraries), hosts_(layout, kTinyExchange) {
    if (devices == 0) devices = layout.size();
    libraries_->Reset(seed, devices);
    for (int rank = 0; rank < layout.size(); ++rank) {
      EngineOptions options;
      options.local_rank = rank % devices;
      options.gpu_libraries = {stand_in::kCudaLibrary, stand_in::kNcclLibrary};
      change(&options, rank);
      ranks_.push_back(std::make_unique<Rank>(options, hosts_.WorldOf(rank)));
      on_gpu_.push_back(std::make_unique<GpuRank>(libraries_, ranks_[rank].get(), rank,
                                                  rank % devices));
    }
  }
  // Nothing is left, and nothing was wrong.
  ~GpuJob() {
    Leave();
    EXPECT_EQ(libraries_->Violations(), std::vector<std::string>());
    EXPECT_LE(libraries_->CountLeaks().sum(), allowed_leaks_);
    // The streams' threads end.
    libraries_->Reset(0);
  }

  // All ranks at once: a communicator ends on all of them.
  void Leave() {
    ForEach([this](GpuRank&, int rank) { Stop(rank); });
    on_gpu_.clear();
    for (const auto& rank : ranks_) rank->Leave();
  }

  // Allows for objects that a call made to fail does not give back.
  void AllowLeaks(int count) { allowed_leaks_ = count; }

  // One rank's engine ends.
  void Stop(int rank) { ranks_[rank]->Stop(); }

  int size() const { return static_cast<int>(ranks_.size()); }
  GpuRank& operator[](int rank) { return *on_gpu_[rank]; }
  // As the ranks of its host share it.
  JobState state(int rank = 0) { return hosts_.StateOf(rank); }

  // Makes the communicator of all ranks.
  void Connect() {
    ForEach([](GpuRank& self, int) {
      Buffer output;
      ASSERT_EQ(self.Run(Sum("connects", {1}), &output).message, "");
    });
  }

  // Runs `body(rank)` for all ranks at once.
  void ForEach(const std::function<void(GpuRank&, int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([&, rank] {
        libraries_->SetRank(rank);
        body(*on_gpu_[rank], rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  const stand_in::StandIn& libraries_;
  Hosts hosts_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::unique_ptr<GpuRank>> on_gpu_;
  int allowed_leaks_ = 0;
};

}  // namespace keras_hvd
