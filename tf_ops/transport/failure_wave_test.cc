// The hosts come to know of a failure, each at its own pace, on a clock that the tests
// move: no test waits.
#include "tf_ops/transport/failure_wave.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/transport/links.h"

namespace keras_hvd {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kExchange = 4096;

// The only rank of a host.
class Host {
 public:
  Host(const Topology& topology, const std::vector<Link>& links)
      : rank_(topology.rank()) {
    EXPECT_TRUE(Segment::CreateLocal(1, kExchange, &segment_).ok());
    job_ = std::make_unique<JobState>(segment_, topology);
    std::vector<ControlLink*> control;
    std::vector<std::unique_ptr<ControlLink>> own;
    for (const Link& link : links) {
      auto made = std::make_unique<ControlLink>(link.socket, link.peer);
      if (link.purpose == LinkPurpose::kControl) {
        control.push_back(made.get());
        control_.push_back(std::move(made));
      } else {
        own.push_back(std::move(made));
      }
    }
    wave_ =
        std::make_unique<FailureWave>(topology, job_.get(), control, std::move(own));
    // Something that a report can tell.
    OperationHistory& history = job_->History(rank_);
    history.records[0].name[0].store(100 + rank_);
    history.written.store(1);
  }

  void Fail() { job_->Fail(Code::kRankFailed, "rank 7 has gone"); }
  // One turn of its driving thread. Returns whether anything had come.
  bool Run(Clock::time_point now) {
    bool progressed = wave_->Receive();
    for (const auto& link : control_) {
      progressed |= link->Receive();
      FrameType type;
      std::string_view bytes;
      while (link->Next(&type, &bytes)) wave_->Take(link.get(), type, bytes);
    }
    if (job_->Failed()) wave_->Continue(now);
    return progressed;
  }

  std::string failure() const { return job_->Failure().message; }
  bool AllKnow(Clock::time_point now) const { return wave_->AllKnow(now); }
  bool Reports() const { return wave_->Reports(); }
  // Whether a report here would tell of a rank of another host.
  bool KnowsWhatDid(int rank) const {
    const OperationHistory* const history = wave_->FindHistory(rank);
    return history != nullptr &&
           history->records[0].name[0].load() == static_cast<uint64_t>(100 + rank);
  }

 private:
  const int rank_;
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<JobState> job_;
  std::vector<std::unique_ptr<ControlLink>> control_;
  std::unique_ptr<FailureWave> wave_;
};

class FailureWaveTest : public testing::Test {
 protected:
  void Make(int hosts, int fan_out) {
    std::vector<int> numbers(hosts);
    for (int host = 0; host < hosts; ++host) numbers[host] = host;
    std::vector<std::vector<Link>> links(hosts);
    for (int rank = 0; rank < hosts; ++rank) {
      for (Link link : LinksNeeded(Topology(rank, numbers, fan_out))) {
        if (link.purpose == LinkPurpose::kData || link.peer < rank) continue;
        int ends[2];
        ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
        links[rank].push_back({link.peer, link.purpose, ends[0]});
        links[link.peer].push_back({rank, link.purpose, ends[1]});
      }
    }
    for (int rank = 0; rank < hosts; ++rank) {
      hosts_.push_back(
          std::make_unique<Host>(Topology(rank, numbers, fan_out), links[rank]));
    }
  }
  // Runs all that are there, and are not stopped, until none has anything to do.
  void RunAt(milliseconds since, const std::vector<int>& stopped = {}) {
    now_ = start_ + since;
    // Frames that are sent in one turn may come in the next one.
    for (int quiet = 0; quiet < 2; ++quiet) {
      bool progressed = false;
      for (size_t host = 0; host < hosts_.size(); ++host) {
        bool runs = hosts_[host] != nullptr;
        for (int each : stopped) runs = runs && each != static_cast<int>(host);
        if (runs) progressed |= hosts_[host]->Run(now_);
      }
      if (progressed) quiet = -1;
    }
  }
  std::vector<int> Reporting() const {
    std::vector<int> reporting;
    for (size_t host = 0; host < hosts_.size(); ++host) {
      if (hosts_[host] != nullptr && hosts_[host]->Reports()) {
        reporting.push_back(static_cast<int>(host));
      }
    }
    return reporting;
  }
  Host& host(int number) { return *hosts_[number]; }

  std::vector<std::unique_ptr<Host>> hosts_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point now_;
};

using Hosts = std::vector<int>;

TEST_F(FailureWaveTest, AllKnowAtOnceAndHost0Reports) {
  for (int fan_out : {1, 2, 8}) {
    for (int failing = 0; failing < 6; ++failing) {
      SCOPED_TRACE(std::to_string(fan_out) + ", " + std::to_string(failing));
      hosts_.clear();
      Make(6, fan_out);
      host(failing).Fail();
      RunAt(milliseconds(0));
      EXPECT_EQ(Reporting(), Hosts{0});
      for (int other = 0; other < 6; ++other) {
        EXPECT_EQ(host(other).failure(), "rank 7 has gone");
        EXPECT_TRUE(host(other).AllKnow(now_));
        EXPECT_TRUE(other == 0 || host(0).KnowsWhatDid(other)) << other;
      }
    }
  }
}

TEST_F(FailureWaveTest, ASilentHostBelowIsWaitedForATime) {
  Make(3, 8);
  host(1).Fail();
  RunAt(milliseconds(0), {2});
  EXPECT_EQ(Reporting(), Hosts{});
  EXPECT_FALSE(host(1).AllKnow(now_));
  RunAt(milliseconds(1000), {2});
  EXPECT_EQ(Reporting(), Hosts{0});
  EXPECT_TRUE(host(1).AllKnow(now_));
  EXPECT_TRUE(host(0).KnowsWhatDid(1));
  EXPECT_FALSE(host(0).KnowsWhatDid(2));
}

TEST_F(FailureWaveTest, ASilentHost0IsPassedOver) {
  Make(4, 8);
  host(3).Fail();
  RunAt(milliseconds(0), {0});
  RunAt(milliseconds(1399), {0});
  EXPECT_EQ(Reporting(), Hosts{});
  // The others turn to host 1, which has time to hear of them.
  RunAt(milliseconds(1400), {0});
  EXPECT_EQ(Reporting(), Hosts{1});
  for (int other : {1, 2, 3}) EXPECT_TRUE(host(other).AllKnow(now_)) << other;
  for (int other : {2, 3}) EXPECT_TRUE(host(1).KnowsWhatDid(other)) << other;
  // When it goes on, it is told, and does not report once more.
  RunAt(milliseconds(5000));
  EXPECT_EQ(host(0).failure(), "rank 7 has gone");
  EXPECT_EQ(Reporting(), Hosts{1});
}

TEST_F(FailureWaveTest, ALostHost0IsNotWaitedFor) {
  Make(4, 8);
  hosts_[0].reset();
  host(2).Fail();
  RunAt(milliseconds(0));
  EXPECT_EQ(Reporting(), Hosts{1});
  for (int other : {2, 3}) EXPECT_TRUE(host(1).KnowsWhatDid(other)) << other;
}

TEST_F(FailureWaveTest, ALostHostInTheMiddleIsNotWaitedForButThoseBelowItAre) {
  Make(4, 1);  // each below the one before
  hosts_[2].reset();
  host(1).Fail();
  RunAt(milliseconds(0), {3});
  EXPECT_EQ(Reporting(), Hosts{});
  RunAt(milliseconds(1));
  EXPECT_EQ(Reporting(), Hosts{0});
  EXPECT_TRUE(host(0).KnowsWhatDid(1));
  EXPECT_TRUE(host(0).KnowsWhatDid(3));
}

TEST_F(FailureWaveTest, NobodyWaitsForLongerThanItsPatience) {
  Make(2, 8);
  host(1).Fail();
  RunAt(milliseconds(0), {0});
  EXPECT_FALSE(host(1).AllKnow(start_ + FailureWave::kPatience - milliseconds(1)));
  EXPECT_TRUE(host(1).AllKnow(start_ + FailureWave::kPatience));
}

TEST_F(FailureWaveTest, WhatIsMalformedIsPassedOver) {
  Make(2, 8);
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
  ControlLink from_1(ends[0], 1), other_end(ends[1], 0);
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateLocal(1, kExchange, &segment).ok());
  const Topology topology(0, {0, 1});
  JobState job(segment, topology);
  FailureWave wave(topology, &job, {&from_1}, {});
  for (const std::string& bytes : {std::string("abc"), FailureFrame({Code::kOk, "no"}),
                                   FailureFrame({static_cast<Code>(99), "no"})}) {
    wave.Take(&from_1, FrameType::kFailure, bytes);
    EXPECT_FALSE(job.Failed());
  }
  wave.Take(&from_1, FrameType::kKnown, std::string(1000, '\xff'));
  wave.Take(&from_1, FrameType::kFailure, FailureFrame({Code::kInternal, "yes"}));
  EXPECT_EQ(job.Failure().message, "yes");
}

}  // namespace
}  // namespace keras_hvd
