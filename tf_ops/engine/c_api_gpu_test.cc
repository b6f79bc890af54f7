// The C API with tensors on a GPU, for callers that have a stream and no TensorFlow:
// over the libraries that stand in for CUDA and NCCL, and in jobs of several processes.
#include <gtest/gtest.h>
#include <string.h>

#include <string>

#include "tf_ops/engine/c_api_testing.h"
#include "tf_ops/testing/gpu/caller.h"

namespace {

using keras_hvd::Child;
using keras_hvd::ExpectInChildren;
using keras_hvd::JobName;
using keras_hvd::JobOptions;
using keras_hvd::LastErrorHas;
using keras_hvd::stand_in::Caller;
using keras_hvd::stand_in::kCudaLibrary;
using keras_hvd::stand_in::kNcclLibrary;
using keras_hvd::stand_in::StandIn;
namespace cuda = keras_hvd::cuda;

constexpr char kNoLibrary[] = "/no/libnccl.so.2";

int Init(int rank, int size, const char* job, const char* nccl) {
  khvd_options options = JobOptions(rank, size, job);
  options.cuda_library = kCudaLibrary;
  options.nccl_library = nccl;
  return khvd_init(&options);
}

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
