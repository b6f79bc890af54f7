// GPUs of several hosts: all hosts know of a failure before a communicator is aborted.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/engine/engine_gpu_testing.h"
#include "tf_ops/engine/hosts_testing.h"

namespace keras_hvd {
namespace {

// The ranks of a job on several hosts, each with a GPU, as threads of this process.
class HostsGpuJob {
 public:
  HostsGpuJob(const stand_in::StandIn& libraries, const Layout& layout, uint64_t seed)
      : libraries_(libraries), layout_(layout), hosts_(layout, kTinyExchange) {
    libraries_->Reset(seed, layout.size());
    EngineOptions options;
    options.gpu_libraries = {stand_in::kCudaLibrary, stand_in::kNcclLibrary};
    for (int rank = 0; rank < layout.size(); ++rank) {
      options.local_rank = rank;
      ranks_.push_back(std::make_unique<Rank>(options, hosts_.WorldOf(rank)));
      on_gpu_.push_back(
          std::make_unique<GpuRank>(libraries_, ranks_[rank].get(), rank, rank));
    }
  }
  ~HostsGpuJob() {
    ForEach([this](GpuRank&, int rank) { ranks_[rank]->Stop(); });
    on_gpu_.clear();
    for (const auto& rank : ranks_) rank->Leave();
    EXPECT_EQ(libraries_->Violations(), std::vector<std::string>());
    libraries_->Reset(0);
  }

  void ForEach(const std::function<void(GpuRank&, int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < layout_.size(); ++rank) {
      threads.emplace_back([&, rank] {
        libraries_->SetRank(rank);
        body(*on_gpu_[rank], rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  bool AllHaveFailed() {
    for (int host = 0; host < layout_.Of(0).hosts(); ++host) {
      if (hosts_.segment(host)->header().failure_code.load() == 0) return false;
    }
    return true;
  }
  void Fail(int rank, const std::string& text) {
    const Topology topology = layout_.Of(rank);
    SharedJobState(hosts_.segment(topology.host()), topology)
        .Fail(Code::kRankFailed, text);
  }

 private:
  const stand_in::StandIn& libraries_;
  const Layout layout_;
  Hosts hosts_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::unique_ptr<GpuRank>> on_gpu_;
};

class GpuHostsTest : public testing::TestWithParam<Layout> {};

TEST_P(GpuHostsTest, NoStreamGoesOnBeforeAllHostsKnowOfTheFailure) {
  const stand_in::StandIn libraries;
  const int size = GetParam().size();
  for (int failing = 0; failing < size; ++failing) {
    HostsGpuJob job(libraries, GetParam(), failing + 1);
    job.ForEach([](GpuRank& self, int) {
      Buffer output;
      ASSERT_EQ(self.Run(Sum("connects", {1}), &output).message, "");
    });
    // All others wait on their streams for this one.
    libraries->HoldCollectives((failing + 1) % size, true);
    std::atomic<int> went_on{0}, before_all_knew{0};
    job.ForEach([&](GpuRank& self, int) {
      const size_t number = self.Submit(Sum("w", std::vector<float>(100, 1)));
      ASSERT_TRUE(self.End(number).ok());
      libraries->Enqueue(self.stream(), [&] {
        went_on += 1;
        if (!job.AllHaveFailed()) before_all_knew += 1;
      });
    });
    const Clock::time_point failed = Clock::now();
    job.Fail(failing, "made to fail");
    job.ForEach([](GpuRank& self, int) { self.Synchronize(); });
    EXPECT_LT(Clock::now() - failed, std::chrono::seconds(2));
    EXPECT_EQ(went_on, size);
    EXPECT_EQ(before_all_knew, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, GpuHostsTest,
                         testing::Values(Layout{{0, 1}}, Layout{{0, 0, 1, 1}},
                                         Layout{{0, 1, 2, 3}, 1},
                                         Layout{{0, 1, 2}, 2}));

}  // namespace
}  // namespace keras_hvd
