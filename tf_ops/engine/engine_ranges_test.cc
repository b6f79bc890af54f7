// Ranges for profilers around each collective of an engine, over the library that
// stands in for NVTX: their names, and that each of them ends.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <map>
#include <string>
#include <vector>

#include "tf_ops/engine/engine_gpu_testing.h"
#include "tf_ops/engine/engine_testing.h"
#include "tf_ops/testing/gpu/nvtx.h"

namespace keras_hvd {
namespace {

using stand_in::Nvtx;

class RangesTest : public testing::Test {
 protected:
  RangesTest() {
    EXPECT_NE(library_, nullptr);
    library_->Reset();
    setenv("NVTX_INJECTION64_PATH", "/opt/profiler/injection.so", 1);
  }
  ~RangesTest() override {
    unsetenv("NVTX_INJECTION64_PATH");
    EXPECT_EQ(library_->Violations(), std::vector<std::string>());
    EXPECT_EQ(library_->Domains(), 0);
    for (const Nvtx::Range& range : library_->Ranges()) {
      EXPECT_TRUE(range.ended) << range.name;
      EXPECT_EQ(range.domain, "keras_hvd");
    }
  }

  static EngineOptions Options(const std::string& library = stand_in::kNvtxLibrary) {
    EngineOptions options;
    options.nvtx_library = library;
    return options;
  }
  // How often there was a range of the name.
  std::map<std::string, int> Names() {
    std::map<std::string, int> names;
    for (const Nvtx::Range& range : library_->Ranges()) names[range.name] += 1;
    return names;
  }

  Nvtx* const library_ = stand_in::OpenNvtx();
};

TEST_F(RangesTest, AreAroundTheCollectivesOfEachRank) {
  {
    Job job(2, Options());
    job.ForEach([](Rank& self, int) {
      ASSERT_EQ(self.Run(Sum("grad/w", {1, 2, 3})).message, "");
      ASSERT_EQ(self.Run(Gather("rows", {1})).message, "");
      ASSERT_EQ(self.Run(Meet("all")).message, "");
    });
    EXPECT_EQ(library_->Domains(), 2);
  }
  const std::map<std::string, int> expected = {
      {"allreduce 'grad/w', 1 tensor, 12 bytes", 2},
      {"allgather 'rows', 1 tensor, 4 bytes", 2},
      {"barrier 'all'", 2}};
  EXPECT_EQ(Names(), expected);
  for (const Nvtx::Range& range : library_->Ranges()) {
    EXPECT_TRUE(range.payload == 12 || !Contains(range.name, "grad/w"));
  }
}

TEST_F(RangesTest, NameAllTensorsOfAGroup) {
  {
    Job job(1, Options());
    Ask ask = Sum("group", {1, 2, 3, 4});
    ask.description.tensors = {{DataType::kFloat32, {1}}, {DataType::kFloat32, {3}}};
    ASSERT_EQ(job[0].Run(ask).message, "");
  }
  EXPECT_EQ(Names().count("allreduce 'group', 2 tensors, 16 bytes"), 1u);
}

TEST_F(RangesTest, EndWhereACollectiveFails) {
  {
    Job job(2, Options());
    const size_t number = job[0].Submit(Sum("done", {1}));
    job[1].Submit(Sum("done", {1}));
    EXPECT_EQ(job[0].End(number).message, "");
    job[0].Submit(Sum("alone", {1}));
    job.state(0).Fail(Code::kRankFailed, "rank 1 died", 1);
  }
  EXPECT_GE(Names()["allreduce 'done', 1 tensor, 4 bytes"], 1);
}

TEST_F(RangesTest, AreAroundWhatIsEnqueuedOnAGpuAndEndWhereThatFails) {
  const stand_in::StandIn libraries;
  std::atomic<int> enqueued{0};
  {
    GpuJob job(libraries, 2, 1, [](EngineOptions* options, int) {
      options->nvtx_library = stand_in::kNvtxLibrary;
    });
    job.Connect();
    stand_in::Injection injection;
    injection.function = "ncclAllReduce";
    injection.code = 1;
    injection.member = 1;
    libraries->Inject(injection);
    job.ForEach([&](GpuRank& self, int rank) {
      // The other one's is on its stream before it is known, or never begins.
      Buffer output;
      const Status status = self.Run(Sum("fails", {1, 2}), &output);
      EXPECT_FALSE(rank == 1 && status.ok());
      enqueued += status.ok();
    });
  }
  EXPECT_EQ(Names()["allreduce 'connects', 1 tensor, 4 bytes"], 2);
  const int ranges = Names()["allreduce 'fails', 1 tensor, 8 bytes"];
  EXPECT_GE(ranges, 1 + enqueued);
  EXPECT_LE(ranges, 2);
}

TEST_F(RangesTest, ThereAreNoneWithoutAProfiler) {
  unsetenv("NVTX_INJECTION64_PATH");
  {
    // Nothing is said of this library: nobody opens it.
    CapturedErrors errors;
    Job job(1, Options("/none/libnvtx3interop.so.1"));
    ASSERT_EQ(job[0].Run(Sum("x", {1})).message, "");
    EXPECT_FALSE(Contains(errors.text(), "NVTX"));
  }
  Job job(1, Options());
  ASSERT_EQ(job[0].Run(Sum("x", {1})).message, "");
  EXPECT_TRUE(library_->Ranges().empty());
}

TEST_F(RangesTest, ThereAreNoneWhereTheyAreDisabled) {
  EngineOptions options = Options();
  options.ranges = false;
  Job job(1, options);
  ASSERT_EQ(job[0].Run(Sum("x", {1})).message, "");
  EXPECT_TRUE(library_->Ranges().empty());
  EXPECT_EQ(library_->Domains(), 0);
}

TEST_F(RangesTest, OneRankSaysWhyThereAreNoneAndAllWork) {
  const std::map<std::string, std::string> reasons = {
      {"/none/libnvtx3interop.so.1", "there is no NVTX in /none/libnvtx3interop.so.1"},
      {stand_in::kIncompleteNvtxLibrary, "there is no function nvtxDomainRangePop in"}};
  for (const auto& [library, reason] : reasons) {
    CapturedErrors errors;
    Job job(2, Options(library));
    job.ForEach(
        [](Rank& self, int) { ASSERT_EQ(self.Run(Sum("x", {1})).message, ""); });
    const std::string text = errors.text();
    EXPECT_EQ(Count(text, "the profiler gets no NVTX ranges: " + reason), 1u) << text;
  }
  EXPECT_TRUE(library_->Ranges().empty());
}

}  // namespace
}  // namespace keras_hvd
