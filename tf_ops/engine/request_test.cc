// Requests of the C API as operations: descriptions made anew for a known name.
#include "tf_ops/engine/request.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace keras_hvd {
namespace {

constexpr int kSize = 2;

// An allreduce of two tensors, of which a test may change anything.
struct Asked {
  Asked() {
    for (khvd_tensor& tensor : tensors) {
      tensor.dtype = KHVD_FLOAT32;
      tensor.rank = 2;
      tensor.shape = shape;
      tensor.input = tensor.output = memory;
    }
    request.struct_size = sizeof(request);
    request.kind = KHVD_ALLREDUCE;
    request.name = "w";
    request.reduce_op = KHVD_SUM;
    request.count = 2;
    request.tensors = tensors;
    request.allocate = [](void*, int32_t, const int64_t*, int32_t) -> void* {
      return nullptr;
    };
  }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;

  std::shared_ptr<const Description> Describe(KnownDescriptions* known) const {
    std::unique_ptr<Operation> operation;
    const Status status = MakeOperation(request, kSize, {0, kSize}, known, &operation);
    EXPECT_EQ(status.message, "");
    return status.ok() ? operation->description : nullptr;
  }

  double memory[64] = {};
  int64_t shape[2] = {4, 2}, other_shape[2] = {4, 1};
  khvd_tensor tensors[2] = {};
  khvd_request request = {};
};

using Change = std::function<void(Asked*)>;

const std::vector<Change>& Changes() {
  static const auto* const changes = new std::vector<Change>{
      [](Asked*) {},
      [](Asked* asked) { asked->request.name = "v"; },
      [](Asked* asked) { asked->request.process_set = 1; },
      [](Asked* asked) { asked->request.reduce_op = KHVD_MAX; },
      [](Asked* asked) { asked->request.prescale = asked->request.postscale = 2; },
      [](Asked* asked) {
        asked->request.prescale = 1;
        asked->request.postscale = 2;
      },
      [](Asked* asked) { asked->request.on_gpu = 1; },
      [](Asked* asked) { asked->request.labels = "one\ntwo"; },
      [](Asked* asked) { asked->request.count = 1; },
      [](Asked* asked) { asked->tensors[1].dtype = KHVD_INT32; },
      [](Asked* asked) { asked->tensors[1].rank = 1; },
      [](Asked* asked) { asked->tensors[1].rank = 0; },
      [](Asked* asked) { asked->tensors[1].shape = asked->other_shape; },
      [](Asked* asked) { asked->shape[0] = 2; },
      [](Asked* asked) { asked->request.kind = KHVD_ALLGATHER; },
      [](Asked* asked) {
        asked->request.kind = KHVD_ALLGATHER;
        asked->tensors[0].shape = asked->other_shape;
      },
      [](Asked* asked) { asked->request.kind = KHVD_REDUCESCATTER; },
      [](Asked* asked) {
        asked->request.kind = KHVD_BROADCAST;
        asked->request.count = 1;
      },
      [](Asked* asked) {
        asked->request.kind = KHVD_BROADCAST;
        asked->request.count = 1;
        asked->request.root = 1;
      },
  };
  return *changes;
}

TEST(RequestTest, WhatChangesUnderANameIsDescribedAnew) {
  for (size_t first = 0; first < Changes().size(); ++first) {
    for (size_t second = 0; second < Changes().size(); ++second) {
      Asked before, after;
      Changes()[first](&before);
      Changes()[second](&after);
      KnownDescriptions known(16), nothing(0);
      before.Describe(&known);
      const auto described = after.Describe(&known);
      EXPECT_TRUE(*described == *after.Describe(&nothing)) << first << " " << second;
    }
  }
}

TEST(RequestTest, WhatIsMadeAgainIsNotDescribedAgain) {
  for (const Change& change : Changes()) {
    Asked asked;
    change(&asked);
    KnownDescriptions known(16);
    const auto first = asked.Describe(&known);
    EXPECT_EQ(asked.Describe(&known), first);
  }
}

TEST(RequestTest, NamesAreKnownUpToALimit) {
  KnownDescriptions known(3);
  Asked asked;
  const auto first = asked.Describe(&known);
  std::string name;
  for (int i = 0; i < 10; ++i) {
    name = "other " + std::to_string(i);
    asked.request.name = name.c_str();
    asked.Describe(&known);
  }
  EXPECT_EQ(known.Find("w"), nullptr);
  EXPECT_NE(known.Find("other 9"), nullptr);
}

}  // namespace
}  // namespace keras_hvd
