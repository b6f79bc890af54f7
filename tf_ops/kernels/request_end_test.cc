// Ends of requests on a GPU whose caller waits, or has gone: over the libraries that
// stand in for CUDA and NCCL, in one process.
#include "tf_ops/kernels/request_end.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "tf_ops/engine/c_api.h"
#include "tf_ops/testing/child.h"
#include "tf_ops/testing/gpu/stand_in.h"

namespace keras_hvd {
namespace {

using stand_in::kCudaLibrary;
using stand_in::kNcclLibrary;
using stand_in::StandIn;

// A stream, and a float on it.
class Caller {
 public:
  Caller() {
    libraries_.cuda().init(0);
    libraries_.cuda().retain_primary_context(&context_, 0);
    libraries_.cuda().push_context(context_);
    libraries_.cuda().create_stream(&stream_, cuda::kStreamNonBlocking, 0);
    libraries_.cuda().allocate(&memory_, sizeof(float));
  }
  ~Caller() {
    libraries_.cuda().free(memory_);
    libraries_.cuda().destroy_stream(stream_);
    libraries_.cuda().release_primary_context(0);
  }

  void* stream() const { return stream_; }
  float* memory() const { return reinterpret_cast<float*>(memory_); }
  void Write(float value) const {
    libraries_->Enqueue(stream_, [at = memory(), value] { *at = value; });
  }
  float Read() const {
    float value = -1;
    libraries_->Enqueue(stream_, [at = memory(), &value] { value = *at; });
    return libraries_->Synchronize(stream_).empty() ? value : -2;
  }

 private:
  const StandIn libraries_;
  cuda::Context context_ = nullptr;
  cuda::Stream stream_ = nullptr;
  cuda::Pointer memory_ = 0;
};

// What stays of the calls of this process.
struct Seen {
  std::thread::id thread;             // of the last end
  std::function<void()> for_another;  // what the last end left to another thread
  std::atomic<int> ends{0}, deleted{0};
} seen;

// Half of a float, in place, as a kernel starts it.
class Call {
 public:
  explicit Call(const Caller& caller, const char* name = "x") {
    const int64_t one = 1;
    khvd_tensor tensor = {KHVD_FLOAT32, 1, &one, caller.memory(), caller.memory()};
    khvd_request request = {};
    request.struct_size = sizeof(request);
    request.name = name;
    request.reduce_op = KHVD_SUM;
    request.prescale = 0.5;
    request.postscale = 1;
    request.count = 1;
    request.tensors = &tensor;
    request.on_gpu = 1;
    request.stream = caller.stream();
    request.context = this;
    request.done = [](void* context, int code, const char* message) {
      seen.thread = std::this_thread::get_id();
      seen.for_another = static_cast<Call*>(context)->end_.Set(code, message);
      seen.ends += 1;
    };
    end_.AddTo(&request);
    submitted_ = khvd_submit(&request);
  }
  ~Call() { seen.deleted += 1; }

  int submitted() const { return submitted_; }
  RequestEnd& end() { return end_; }

 private:
  int submitted_;
  RequestEnd end_;
};
using OwnedCall = std::unique_ptr<Call, DeleteOnceEnded>;

int Meet() {
  khvd_request request = {};
  request.struct_size = sizeof(request);
  request.kind = KHVD_BARRIER;
  request.name = "meet";
  return khvd_run(&request);
}

#define CHECK_HERE(condition) \
  if (!(condition)) return __LINE__

void ExpectInChildren(int size, const std::function<int(int rank)>& body) {
  static std::random_device random;
  const std::string job = "request-end-" + std::to_string(random());
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < size; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank](const Child::Link& parent) {
      khvd_options options = {};
      options.struct_size = sizeof(options);
      options.rank = options.local_rank = rank;
      options.size = options.local_size = size;
      options.cross_size = 1;
      options.job = job.c_str();
      options.cuda_library = kCudaLibrary;
      options.nccl_library = kNcclLibrary;
      if (khvd_init(&options) != KHVD_OK) return 2;
      const int line = body(rank);
      if (line != 0) {
        parent.Tell("line " + std::to_string(line) + ": " + khvd_last_error());
      }
      khvd_shutdown();
      return line == 0 ? 0 : 1;
    }));
  }
  for (const auto& child : children) {
    EXPECT_EQ(child->Line(), "");
    EXPECT_EQ(child->Reap(), 0);
  }
}

TEST(RequestEndTest, WhoWaitsDrivesAndNeedsNoOtherThread) {
  ExpectInChildren(1, [](int) {
    const Caller caller;
    int driven = 0;
    // The engine's thread may be quicker, but not always.
    for (int i = 0; driven < 10; ++i) {
      CHECK_HERE(i < 2000);
      caller.Write(i);
      const OwnedCall call(new Call(caller));
      CHECK_HERE(call->submitted() == KHVD_OK);
      call->end().WaitUntilKnown();
      call->end().Await();
      CHECK_HERE(call->end().code() == KHVD_OK);
      CHECK_HERE(caller.Read() == i * 0.5f);
      // Who has ended it goes on for a moment.
      while (seen.ends <= i) std::this_thread::yield();
      CHECK_HERE(!seen.for_another && seen.deleted == i);
      if (seen.thread == std::this_thread::get_id()) driven += 1;
    }
    return 0;
  });
}

TEST(RequestEndTest, WhatNobodyWaitsForLivesUntilItHasEnded) {
  ExpectInChildren(2, [](int rank) {
    const Caller caller;
    caller.Write(1);
    OwnedCall call;
    // No other rank has it, so it ends with the job.
    if (rank == 0) {
      call.reset(new Call(caller));
      CHECK_HERE(call->submitted() == KHVD_OK);
      CHECK_HERE(!call->end().Drive());
      call.reset();
      CHECK_HERE(seen.deleted == 0);
    }
    CHECK_HERE(Meet() == KHVD_OK);
    if (rank == 1) return 0;
    CHECK_HERE(khvd_shutdown() == KHVD_OK);
    CHECK_HERE(seen.ends == 1 && seen.deleted == 0);
    CHECK_HERE(seen.for_another != nullptr);
    seen.for_another();
    CHECK_HERE(seen.deleted == 1);
    return 0;
  });
}

TEST(RequestEndTest, AWaitEndsWithTheJob) {
  ExpectInChildren(2, [](int rank) {
    const Caller caller;
    const OwnedCall call(new Call(caller, rank == 0 ? "a" : "b"));
    std::thread leaving([] {
      poll(nullptr, 0, 50);
      khvd_shutdown();
    });
    call->end().WaitUntilKnown();
    leaving.join();
    const int code = call->end().code();
    CHECK_HERE(code == KHVD_SHUT_DOWN || code == KHVD_RANK_FAILED);
    CHECK_HERE(!call->end().message().empty());
    return 0;
  });
}

}  // namespace
}  // namespace keras_hvd
