// Ends of requests on a GPU whose caller waits, or has gone: over the libraries that
// stand in for CUDA and NCCL, in one process.
#include "tf_ops/kernels/request_end.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "tf_ops/engine/c_api_testing.h"
#include "tf_ops/testing/gpu/caller.h"

namespace keras_hvd {
namespace {

using stand_in::Caller;

// The traces of this process' calls.
struct Seen {
  std::thread::id thread;             // of the last end
  std::function<void()> for_another;  // left to another thread by the last end
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

// Ranks of one job.
void ExpectInRanks(int size, const std::function<int(int rank)>& body) {
  const std::string job = JobName();
  ExpectInChildren(size, [&](int rank) {
    khvd_options options = JobOptions(rank, size, job.c_str());
    options.cuda_library = stand_in::kCudaLibrary;
    options.nccl_library = stand_in::kNcclLibrary;
    CHECK_HERE(khvd_init(&options) == KHVD_OK);
    return body(rank);
  });
}

TEST(RequestEndTest, WhoWaitsDrivesAndNeedsNoOtherThread) {
  ExpectInRanks(1, [](int) {
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
      // The thread that has ended it goes on for a moment.
      while (seen.ends <= i) std::this_thread::yield();
      CHECK_HERE(!seen.for_another && seen.deleted == i);
      if (seen.thread == std::this_thread::get_id()) driven += 1;
    }
    return 0;
  });
}

TEST(RequestEndTest, WhatNobodyWaitsForLivesUntilItHasEnded) {
  ExpectInRanks(2, [](int rank) {
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
  ExpectInRanks(2, [](int rank) {
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
