// Ranges for profilers, and the errors where NVTX cannot be used.
#include "tf_ops/cuda/profiler_ranges.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include "tf_ops/testing/gpu/nvtx.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#define NVTX_NO_IMPL
#include <nvtx3/nvToolsExt.h>

#include <cstddef>
#endif

namespace keras_hvd::cuda {
namespace {

// Whether NVTX's attributes are as declared, where its headers are found.
#if __has_include(<nvtx3/nvToolsExt.h>)
TEST(ProfilerRanges, AreGivenToNvtxAsItsHeadersHaveIt) {
  using Real = nvtxEventAttributes_t;
  using nvtx::Attributes;
  static_assert(sizeof(Attributes) == sizeof(Real));
  static_assert(offsetof(Attributes, version) == offsetof(Real, version));
  static_assert(offsetof(Attributes, size) == offsetof(Real, size));
  static_assert(offsetof(Attributes, category) == offsetof(Real, category));
  static_assert(offsetof(Attributes, color_type) == offsetof(Real, colorType));
  static_assert(offsetof(Attributes, color) == offsetof(Real, color));
  static_assert(offsetof(Attributes, payload_type) == offsetof(Real, payloadType));
  static_assert(offsetof(Attributes, payload) == offsetof(Real, payload));
  static_assert(offsetof(Attributes, message_type) == offsetof(Real, messageType));
  static_assert(offsetof(Attributes, message) == offsetof(Real, message));
  const Attributes attributes;
  EXPECT_EQ(attributes.size, NVTX_EVENT_ATTRIB_STRUCT_SIZE);
  EXPECT_LE(attributes.version, NVTX_VERSION);
  EXPECT_EQ(attributes.color_type, NVTX_COLOR_UNKNOWN);
  EXPECT_EQ(attributes.payload_type, NVTX_PAYLOAD_TYPE_UNSIGNED_INT64);
  EXPECT_EQ(attributes.message_type, NVTX_MESSAGE_TYPE_ASCII);
}
#else
TEST(ProfilerRanges, AreGivenToNvtxAsItsHeadersHaveIt) {
  GTEST_SKIP() << "no NVTX headers are here to check against: install "
                  "nvidia-nvtx-cu12, or name their folder in KERAS_HVD_NVTX_INCLUDE";
}
#endif

TEST(ProfilerRanges, AreWantedUnderAProfilerOnly) {
  unsetenv("NVTX_INJECTION64_PATH");
  EXPECT_FALSE(ProfilerRanges::AreWanted());
  setenv("NVTX_INJECTION64_PATH", "", 1);
  EXPECT_FALSE(ProfilerRanges::AreWanted());
  setenv("NVTX_INJECTION64_PATH", "/opt/profiler/injection.so", 1);
  EXPECT_TRUE(ProfilerRanges::AreWanted());
  unsetenv("NVTX_INJECTION64_PATH");
}

TEST(ProfilerRanges, AreInsideOfEachOtherWithTheirNamesAndBytes) {
  stand_in::Nvtx* const library = stand_in::OpenNvtx();
  ASSERT_NE(library, nullptr);
  library->Reset();
  {
    std::unique_ptr<ProfilerRanges> ranges;
    ASSERT_EQ(ProfilerRanges::Open(stand_in::kNvtxLibrary, &ranges).message, "");
    EXPECT_EQ(library->Domains(), 1);
    const ProfilerRanges::Range outer(*ranges, "outer", 12);
    {
      const ProfilerRanges::Range inner(*ranges, "inner", int64_t{1} << 40);
      EXPECT_FALSE(library->Ranges().back().ended);
    }
    EXPECT_TRUE(library->Ranges().back().ended);
    EXPECT_FALSE(library->Ranges().front().ended);
  }
  const std::vector<stand_in::Nvtx::Range> ranges = library->Ranges();
  ASSERT_EQ(ranges.size(), 2u);
  EXPECT_EQ(ranges[0].domain, "keras_hvd");
  EXPECT_EQ(ranges[0].name, "outer");
  EXPECT_EQ(ranges[0].payload, 12u);
  EXPECT_TRUE(ranges[0].ended);
  EXPECT_EQ(ranges[1].name, "inner");
  EXPECT_EQ(ranges[1].payload, uint64_t{1} << 40);
  EXPECT_EQ(library->Domains(), 0);
  EXPECT_EQ(library->Violations(), std::vector<std::string>());
}

TEST(ProfilerRanges, SaysWhyThereAreNone) {
  std::unique_ptr<ProfilerRanges> ranges;
  EXPECT_EQ(ProfilerRanges::Open("/none/libnvtx3interop.so.1", &ranges).message,
            "there is no NVTX in /none/libnvtx3interop.so.1");
  const Status incomplete =
      ProfilerRanges::Open(stand_in::kIncompleteNvtxLibrary, &ranges);
  EXPECT_NE(incomplete.message.find("there is no function nvtxDomainRangePop in "),
            std::string::npos);
  EXPECT_EQ(ranges, nullptr);
}

}  // namespace
}  // namespace keras_hvd::cuda
