// The C API with tensors on a GPU, for those who have a stream and no TensorFlow: over
// the libraries that stand in for CUDA and NCCL, and in jobs of several processes.
#include <gtest/gtest.h>
#include <string.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tf_ops/engine/c_api.h"
#include "tf_ops/testing/child.h"
#include "tf_ops/testing/gpu/stand_in.h"

namespace {

using keras_hvd::Child;
using keras_hvd::stand_in::kCudaLibrary;
using keras_hvd::stand_in::kNcclLibrary;
using keras_hvd::stand_in::StandIn;
namespace cuda = keras_hvd::cuda;

constexpr char kNoLibrary[] = "/no/libnccl.so.2";

std::string JobName() {
  static std::random_device random;
  return "c-api-gpu-" + std::to_string(random()) + "-" + std::to_string(random());
}

int Init(int rank, int size, const char* job, const char* nccl) {
  khvd_options options = {};
  options.struct_size = sizeof(options);
  options.rank = options.local_rank = rank;
  options.size = options.local_size = size;
  options.cross_size = 1;
  options.job = job;
  options.cuda_library = kCudaLibrary;
  options.nccl_library = nccl;
  return khvd_init(&options);
}

// A stream, and memory on it, of a caller that uses the driver by itself.
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

  const StandIn& libraries() const { return libraries_; }
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

// A sum of one float, in place.
struct Request {
  explicit Request(const Caller& caller) {
    tensor.dtype = KHVD_FLOAT32;
    tensor.rank = 1;
    tensor.shape = &one;
    tensor.input = tensor.output = caller.memory();
    request.struct_size = sizeof(request);
    request.kind = KHVD_ALLREDUCE;
    request.name = "x";
    request.reduce_op = KHVD_SUM;
    request.count = 1;
    request.tensors = &tensor;
    request.on_gpu = 1;
    request.stream = caller.stream();
  }

  int64_t one = 1;
  khvd_tensor tensor = {};
  khvd_request request = {};
};

bool LastErrorHas(const std::string& part) {
  return std::string(khvd_last_error()).find(part) != std::string::npos;
}

// The body gives 0, or the line on which it found something wrong; each of `size` runs
// in a process of its own.
#define CHECK_HERE(condition) \
  if (!(condition)) return __LINE__

void ExpectInChildren(int size, const std::function<int(int rank)>& body) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < size; ++rank) {
    children.push_back(std::make_unique<Child>([&](const Child::Link& parent) {
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

TEST(GpuSupportTest, SaysWhatIsFoundAndWhatIsNot) {
  ExpectInChildren(1, [](int) {
    khvd_gpu_support support = {};
    CHECK_HERE(khvd_get_gpu_support("", "", &support) == KHVD_INVALID_ARGUMENT);
    support.struct_size = sizeof(support);
    CHECK_HERE(khvd_get_gpu_support(kCudaLibrary, kNcclLibrary, &support) == KHVD_OK);
    CHECK_HERE(support.devices > 0 && support.nccl_version == 22304);
    CHECK_HERE(strstr(support.text, "NCCL 2.23.4") != nullptr);
    CHECK_HERE(khvd_get_gpu_support(kCudaLibrary, kNoLibrary, &support) == KHVD_OK);
    CHECK_HERE(support.devices > 0 && support.nccl_version == 0);
    CHECK_HERE(strstr(support.text, kNoLibrary) != nullptr);
    CHECK_HERE(khvd_get_gpu_support("/no/libcuda.so.1", kNcclLibrary, &support) ==
               KHVD_OK);
    CHECK_HERE(support.devices == 0 && support.nccl_version == 22304);
    CHECK_HERE(strstr(support.text, "/no/libcuda.so.1\nNCCL 2.23.4") != nullptr);
    return 0;
  });
}

TEST(GpuRequestTest, RunsInTheOrderOfTheCallersStream) {
  ExpectInChildren(1, [](int) {
    CHECK_HERE(Init(0, 1, "", kNcclLibrary) == KHVD_OK);
    const Caller caller;
    for (int i = 0; i < 20; ++i) {
      Request request(caller);
      request.request.prescale = 0.5;
      request.request.postscale = 1;
      caller.Write(i);
      // Returns when it is enqueued.
      CHECK_HERE(khvd_run(&request.request) == KHVD_OK);
      CHECK_HERE(caller.Read() == i * 0.5f);
    }
    Request request(caller);
    void* end = nullptr;
    request.request.end = &end;
    caller.Write(7);
    CHECK_HERE(khvd_run(&request.request) == KHVD_OK && end != nullptr);
    CHECK_HERE(khvd_await_end(end, caller.stream()) == KHVD_OK);
    CHECK_HERE(caller.Read() == 7);
    return 0;
  });
}

TEST(GpuRequestTest, WhatCannotBeIsRefused) {
  ExpectInChildren(1, [](int) {
    CHECK_HERE(Init(0, 1, "", kNcclLibrary) == KHVD_OK);
    Request request{Caller()};
    request.request.stream = nullptr;  // and no context is current on this thread
    cuda::Context popped;
    StandIn().cuda().pop_context(&popped);
    CHECK_HERE(khvd_run(&request.request) != KHVD_OK);
    CHECK_HERE(LastErrorHas("allreduce 'x' failed on rank 0"));
    CHECK_HERE(LastErrorHas("cuStreamGetCtx"));
    return 0;
  });
}

TEST(GpuRequestTest, ProcessesWithoutNcclGoThroughHostMemory) {
  const std::string job = JobName();
  ExpectInChildren(3, [&](int rank) {
    CHECK_HERE(Init(rank, 3, job.c_str(), kNoLibrary) == KHVD_OK);
    const Caller caller;
    for (int i = 0; i < 50; ++i) {
      Request request(caller);
      caller.Write(rank + i);
      CHECK_HERE(khvd_run(&request.request) == KHVD_OK);
      CHECK_HERE(caller.Read() == 3 + 3 * i);
    }
    return 0;
  });
}

TEST(GpuRequestTest, TheDeathOfAProcessEndsWhatWaitsForIt) {
  const std::string job = JobName();
  const auto body = [&](int rank, const Child::Link& parent) {
    if (Init(rank, 2, job.c_str(), kNoLibrary) != KHVD_OK) return __LINE__;
    const Caller caller;
    Request request(caller);
    if (khvd_run(&request.request) != KHVD_OK) return __LINE__;
    parent.Tell("ready");
    if (rank == 1) parent.Await();
    const int code = khvd_run(&request.request);
    parent.Tell(code == KHVD_RANK_FAILED && LastErrorHas("SIGKILL") ? "ended"
                                                                    : "wrong");
    khvd_shutdown();
    return 0;
  };
  Child first([&](const Child::Link& parent) { return body(0, parent); });
  Child second([&](const Child::Link& parent) { return body(1, parent); });
  EXPECT_EQ(first.Line(), "ready");
  EXPECT_EQ(second.Line(), "ready");
  second.Kill(SIGKILL);
  EXPECT_EQ(first.Line(), "ended");
  EXPECT_EQ(first.Reap(), 0);
}

}  // namespace
