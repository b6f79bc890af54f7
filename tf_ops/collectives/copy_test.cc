// Copies of any length and alignment write every byte, and no other.
#include "tf_ops/collectives/copy.h"

#include <gtest/gtest.h>

#include <vector>

namespace keras_hvd {
namespace {

using CopyFunction = void (*)(char*, const char*, int64_t);

class CopyTest : public testing::TestWithParam<CopyFunction> {};

TEST_P(CopyTest, WritesWhatItShouldAndNothingElse) {
  std::vector<char> from(1000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7 + 1);
  for (int64_t offset : {0, 1, 15, 16, 63, 64, 65}) {
    for (int64_t bytes : {0, 1, 63, 64, 65, 127, 128, 129, 700}) {
      std::vector<char> to(1000, 'x');
      GetParam()(to.data() + offset, from.data() + 3, bytes);
      StoreFence();
      for (int64_t i = 0; i < 1000; ++i) {
        const bool inside = i >= offset && i < offset + bytes;
        ASSERT_EQ(to[i], inside ? from[3 + i - offset] : 'x')
            << bytes << " bytes to offset " << offset << ", at " << i;
      }
    }
  }
}

TEST_P(CopyTest, NoBytesNeedNoAddress) { GetParam()(nullptr, nullptr, 0); }

INSTANTIATE_TEST_SUITE_P(Kinds, CopyTest, testing::Values(CopyOrdinary, CopyStreaming));

}  // namespace
}  // namespace keras_hvd
