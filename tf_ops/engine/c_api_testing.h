// For tests of the C API: jobs of processes, which are forked from the test.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tf_ops/engine/c_api.h"
#include "tf_ops/testing/child.h"

namespace keras_hvd {

// Sandboxes share their sockets' names and repeat their process numbers.
inline std::string JobName() {
  static std::random_device random;
  return "test-" + std::to_string(random()) + "-" + std::to_string(random());
}

// Of a rank of one host.
inline khvd_options JobOptions(int rank, int size, const char* job) {
  khvd_options options = {};
  options.struct_size = sizeof(options);
  options.rank = options.local_rank = rank;
  options.size = options.local_size = size;
  options.cross_size = 1;
  options.job = job;
  return options;
}

inline bool LastErrorHas(const std::string& part) {
  return std::string(khvd_last_error()).find(part) != std::string::npos;
}

// Each of `size` runs in a process of its own: the engine stays there. The body gives
// 0, or the line on which it found something wrong.
#define CHECK_HERE(condition) \
  if (!(condition)) return __LINE__

inline void ExpectInChildren(int size, const std::function<int(int rank)>& body) {
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < size; ++rank) {
    children.push_back(std::make_unique<Child>([&](const Child::Link& parent) {
      const int line = body(rank);
      if (line != 0) {
        parent.Tell("line " + std::to_string(line) + ": " + khvd_last_error());
      }
      khvd_shutdown();  // a thread sanitizer asks for threads that are left
      return line == 0 ? 0 : 1;
    }));
  }
  for (const auto& child : children) {
    EXPECT_EQ(child->Line(), "");
    EXPECT_EQ(child->Reap(), 0);
  }
}

}  // namespace keras_hvd
