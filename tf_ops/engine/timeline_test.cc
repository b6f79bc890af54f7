// The timeline of engines that are threads over one segment, and of its own calls: the
// content of the file, and no cost for others.
#include "tf_ops/timeline/timeline.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <future>
#include <map>
#include <set>

#include "tf_ops/backend/world.h"
#include "tf_ops/engine/engine.h"
#include "tf_ops/engine/timeline_testing.h"

namespace keras_hvd {
namespace {

// ---- Engines

class Job {
 public:
  explicit Job(int size, int64_t exchange_bytes = 64 << 10) {
    EXPECT_TRUE(Segment::CreateLocal(size, exchange_bytes, &segment_).ok());
    for (int rank = 0; rank < size; ++rank) {
      EngineOptions options;
      options.cores = 1;
      engines_.push_back(
          std::make_unique<Engine>(options, SharedMemoryWorld(segment_, rank)));
    }
  }

  Engine& engine(int rank) { return *engines_[rank]; }
  Segment& segment() { return *segment_; }

  // Makes a rank submit a request of float32, and gives its end.
  std::future<Status> Submit(int rank, const std::string& name, int64_t elements,
                             Kind kind = Kind::kAllreduce) {
    auto description = std::make_shared<Description>();
    description->name = name;
    description->kind = kind;
    auto data = std::make_shared<std::vector<float>>(elements * engines_.size(), 1);
    auto operation = std::make_unique<Operation>();
    if (kind != Kind::kBarrier) {
      description->tensors = {{DataType::kFloat32, {elements}}};
      operation->buffers.push_back({data->data(), data->data()});
    }
    auto gathered = std::make_shared<std::vector<float>>(data->size());
    if (kind == Kind::kAllgather) {
      description->tensors.front().shape = {-1};
      operation->rows = {elements};
      operation->allocate = [gathered](size_t, const std::vector<int64_t>&) {
        return gathered->data();
      };
    }
    operation->description = std::move(description);
    operation->submitter = 1;
    auto promise = std::make_shared<std::promise<Status>>();
    operation->done = [promise, data, gathered](const Status& status) {
      promise->set_value(status);
    };
    EXPECT_TRUE(engines_[rank]->Submit(std::move(operation)).ok());
    return promise->get_future();
  }

  void Run(const std::string& name, int64_t elements, Kind kind = Kind::kAllreduce) {
    std::vector<std::future<Status>> ends;
    for (size_t rank = 0; rank < engines_.size(); ++rank) {
      ends.push_back(Submit(static_cast<int>(rank), name, elements, kind));
    }
    for (std::future<Status>& end : ends) EXPECT_TRUE(end.get().ok());
  }

 private:
  std::shared_ptr<Segment> segment_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

TEST(Timeline, HasARowForEachTensorWithItsPhases) {
  const std::string path = Path("phases");
  Job job(3);
  ASSERT_TRUE(job.engine(0).StartTimeline(path, false).ok());
  job.Run("tiny", 3);
  job.Run("small", 1000);
  job.Run("large \"\n\xff\xc3\xa9", 30000);  // windows of 32 KiB: four
  job.Run("gathered", 5, Kind::kAllgather);
  job.Run("sent", 20000, Kind::kBroadcast);
  job.Run("met", 0, Kind::kBarrier);
  job.engine(0).StopTimeline();
  const std::vector<std::string> events = Events(path);
  ExpectNested(events);
  EXPECT_EQ(Named(events, "thread_name").size(), 6u);

  // Its result comes with the decision.
  EXPECT_EQ(Phases(events, "tiny"),
            std::multiset<std::string>({"NEGOTIATE_ALLREDUCE", "QUEUE",
                                        "SHARED_MEMORY_ALLREDUCE", "COPY_OUT"}));
  std::multiset<std::string> phases = Phases(events, "small");
  phases.erase("WAIT_FOR_RANKS");
  EXPECT_EQ(phases, std::multiset<std::string>({"NEGOTIATE_ALLREDUCE", "QUEUE",
                                                "SHARED_MEMORY_ALLREDUCE", "COPY_IN",
                                                "REDUCE"}));
  // Nothing of a name makes the file invalid.
  const std::vector<std::string> rows = Named(events, "thread_name");
  EXPECT_NE(rows[2].find("large \\\"\\u000a?\xc3\xa9\"}"), std::string::npos)
      << rows[2];
  EXPECT_EQ(Named(events, "REDUCE").size(), 1u + 4u);
  // Of the tiny one; of allgather: the other ranks.
  EXPECT_EQ(Named(events, "COPY_OUT").size() - 4, 1u + 2u);
  EXPECT_EQ(Phases(events, "gathered").count("SHARED_MEMORY_ALLGATHER"), 1u);
  EXPECT_EQ(Phases(events, "sent").count("COPY_IN"), 3u);
  EXPECT_EQ(Phases(events, "met").count("NEGOTIATE_BARRIER"), 1u);
  std::multiset<double> bytes;
  for (const std::string& event : events) {
    if (event.find("\"bytes\":") != std::string::npos)
      bytes.insert(Number(event, "bytes"));
  }
  // Of the allgather nobody knows them beforehand.
  EXPECT_EQ(bytes, std::multiset<double>({0, 0, 12, 4000, 80000, 120000}));
  EXPECT_TRUE(Named(events, "CYCLE_START").empty());
  EXPECT_TRUE(Named(events, "NOT_RECORDED").empty());
}

TEST(Timeline, OfTensorsThatTravelTogetherHasWhatEachWentThrough) {
  const std::string path = Path("fused");
  Job job(2);
  ASSERT_TRUE(job.engine(0).StartTimeline(path, false).ok());
  std::vector<std::future<Status>> ends;
  for (int rank = 0; rank < 2; ++rank) {
    for (const char* name : {"a", "b", "c"}) {
      ends.push_back(job.Submit(rank, name, 10000));
    }
  }
  for (std::future<Status>& end : ends) EXPECT_TRUE(end.get().ok());
  job.engine(0).StopTimeline();
  const std::vector<std::string> events = Events(path);
  ExpectNested(events);
  for (const char* name : {"a", "b", "c"}) {
    const std::multiset<std::string> phases = Phases(events, name);
    EXPECT_EQ(phases.count("NEGOTIATE_ALLREDUCE"), 1u);
    EXPECT_EQ(phases.count("QUEUE"), 1u);
    EXPECT_EQ(phases.count("SHARED_MEMORY_ALLREDUCE"), 1u);
    // 40 KB are in two windows of 32 KiB, or in three.
    EXPECT_GE(phases.count("COPY_IN"), 2u);
    EXPECT_LE(phases.count("COPY_IN"), 3u);
    EXPECT_EQ(phases.count("COPY_OUT"), phases.count("COPY_IN"));
  }
}

TEST(Timeline, SaysWhenEachRankSubmitted) {
  const std::string path = Path("ready");
  Job job(2);
  ASSERT_TRUE(job.engine(0).StartTimeline(path, true).ok());
  for (int first : {0, 1}) {
    const std::string name = "first " + std::to_string(first);
    std::future<Status> one = job.Submit(first, name, 1);
    std::future<Status> other = job.Submit(1 - first, name, 1);
    EXPECT_TRUE(one.get().ok() && other.get().ok());
  }
  job.engine(0).StopTimeline();
  const std::vector<std::string> events = Events(path);
  const std::vector<std::string> spans = Named(events, "NEGOTIATE_ALLREDUCE");
  ASSERT_EQ(spans.size(), 2u);
  for (int first : {0, 1}) {
    EXPECT_EQ(Number(spans[first], std::to_string(first)), 0) << spans[first];
    EXPECT_GT(Number(spans[first], std::to_string(1 - first)), 0) << spans[first];
  }
  EXPECT_EQ(Named(events, "CYCLE_START").size(), 2u);
}

TEST(Timeline, GivesRequestsOfOneNameThatOverlapRowsOfTheirOwn) {
  const std::string path = Path("queued");
  Job job(2);
  ASSERT_TRUE(job.engine(0).StartTimeline(path, false).ok());
  std::vector<std::future<Status>> ends;
  for (int rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < 3; ++i) ends.push_back(job.Submit(rank, "same", 1000));
  }
  for (std::future<Status>& end : ends) EXPECT_TRUE(end.get().ok());
  job.engine(0).StopTimeline();
  const std::vector<std::string> events = Events(path);
  ExpectNested(events);
  EXPECT_EQ(Named(events, "SHARED_MEMORY_ALLREDUCE").size(), 3u);
  EXPECT_EQ(Phases(events, "same #3").count("SHARED_MEMORY_ALLREDUCE"), 1u);
}

TEST(Timeline, IsWrittenByRank0AloneAndNobodyWaitsForAnother) {
  const std::string path = Path("other");
  Job job(2);
  ASSERT_TRUE(job.engine(1).StartTimeline(path, false).ok());
  job.Run("x", 10);
  job.engine(1).StopTimeline();
  EXPECT_NE(access(path.c_str(), F_OK), 0);
  EXPECT_EQ(job.segment().header().timeline_on.load(), 0u);
}

TEST(Timeline, CanBeTurnedOnAndOffInARunningJob) {
  Job job(2);
  for (int round = 0; round < 3; ++round) {
    const std::string path = Path("round" + std::to_string(round));
    job.Run("off", 10);
    ASSERT_TRUE(job.engine(0).StartTimeline(path, false).ok());
    const Status again = job.engine(0).StartTimeline("elsewhere", false);
    EXPECT_EQ(again.code, Code::kInvalidArgument);
    EXPECT_NE(again.message.find(path), std::string::npos);
    for (int i = 0; i <= round; ++i) job.Run("on", 10);
    job.engine(0).StopTimeline();
    job.engine(0).StopTimeline();
    const std::vector<std::string> events = Events(path);
    EXPECT_EQ(Named(events, "thread_name").size(), 1u);
    EXPECT_EQ(Named(events, "SHARED_MEMORY_ALLREDUCE").size(), round + 1u);
  }
}

// How often a recording has seen each tensor.
std::map<std::string, double> TimesOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  std::map<std::string, double> times;
  RecordingFile::Tensor tensor;
  for (size_t at = 4096;; at += sizeof(tensor)) {
    memcpy(&tensor, bytes.data() + at, sizeof(tensor));
    if (tensor.name[0] == '\0') return times;
    times[tensor.name] = tensor.times;
  }
}

TEST(Timeline, OfAPartOfAJobLeavesARecordingOfAllOfIt) {
  const std::string recording = Path("recording"), unused = Path("unused");
  {
    Job job(2);
    ASSERT_TRUE(job.engine(1).StartRecording(unused).ok());
    ASSERT_TRUE(job.engine(0).StartRecording(recording).ok());
    EXPECT_FALSE(job.engine(0).StartRecording(unused).ok());
    for (int round = 0; round < 3; ++round) {
      const std::string path = Path("part" + std::to_string(round));
      job.Run("off", 10);
      ASSERT_TRUE(job.engine(0).StartTimeline(path, false).ok());
      for (int i = 0; i <= round; ++i) job.Run("on", 10);
      job.engine(0).StopTimeline();
      const std::vector<std::string> events = Events(path);
      ExpectNested(events);
      EXPECT_EQ(Named(events, "thread_name").size(), 1u);
      EXPECT_EQ(Named(events, "SHARED_MEMORY_ALLREDUCE").size(), round + 1u);
      EXPECT_EQ(job.segment().header().timeline_on.load(), 1u);
    }
  }
  EXPECT_EQ(TimesOf(recording),
            (std::map<std::string, double>({{"off", 3}, {"on", 1 + 2 + 3}})));
  EXPECT_NE(access(unused.c_str(), F_OK), 0);
}

TEST(Timeline, IsEndedByTheEngine) {
  const std::string path = Path("ended");
  {
    Job job(1);
    ASSERT_TRUE(job.engine(0).StartTimeline(path, false).ok());
    job.Run("x", 10);
  }
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(text.substr(text.size() - 4), "}\n]\n");
}

// ---- Records without room

class TimelineCalls : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(Segment::CreateLocal(2, 8 << 10, &segment_).ok());
    timeline_ = std::make_unique<Timeline>(SharedMemoryWorld(segment_, 0).job);
    description_->name = "x";
    description_->tensors = {{DataType::kFloat32, {1}}};
  }

  void Decide(uint64_t batch) {
    const double now =
        std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
    Decision decision;
    decision.requests = {{description_, {{0, now}, {1, now}}}};
    timeline_->AddDecision(batch, decision, true);
  }

  std::shared_ptr<Segment> segment_;
  std::unique_ptr<Timeline> timeline_;
  std::shared_ptr<Description> description_ = std::make_shared<Description>();
};

TEST_F(TimelineCalls, CountsWhatItHasNoRoomFor) {
  const std::string path = Path("skipped");
  constexpr int kBatches = 100000;
  ASSERT_TRUE(timeline_->Start(path, false).ok());
  for (int batch = 1; batch <= kBatches; ++batch) {
    Decide(batch);
    PhaseRecorder* recorder = timeline_->BeginBatch(batch);
    if (recorder == nullptr) continue;
    recorder->Enter(CollectivePhase::kReduce, 0, 4);
    timeline_->EndBatch(true);
  }
  timeline_->Stop();
  const std::vector<std::string> events = Events(path);
  ExpectNested({events.begin(), events.begin() + 500});
  double skipped = 0;
  for (const std::string& event : Named(events, "NOT_RECORDED")) {
    skipped += Number(event, "requests");
    EXPECT_EQ(Number(event, "phases"), 0);
  }
  EXPECT_GT(skipped, 0);
  const size_t recorded = Named(events, "NEGOTIATE_ALLREDUCE").size();
  EXPECT_GT(recorded, 1000u);
  EXPECT_EQ(recorded + skipped, kBatches);
  // Each batch in the file is there from its beginning to its end.
  EXPECT_EQ(Named(events, "SHARED_MEMORY_ALLREDUCE").size(), recorded);
  EXPECT_EQ(Named(events, "REDUCE").size(), recorded);
}

TEST_F(TimelineCalls, LeavesOutABatchThatEndsAfterTheStop) {
  ASSERT_TRUE(timeline_->Start(Path("first"), false).ok());
  Decide(1);
  ASSERT_NE(timeline_->BeginBatch(1), nullptr);
  timeline_->Stop();
  timeline_->Enter(CollectivePhase::kReduce, 0, 4);
  timeline_->EndBatch(true);
  EXPECT_EQ(timeline_->BeginBatch(2), nullptr);
  ASSERT_TRUE(timeline_->Start(Path("second"), false).ok());
  Decide(3);
  ASSERT_NE(timeline_->BeginBatch(3), nullptr);
  timeline_->EndBatch(false);
  timeline_->Stop();
  EXPECT_TRUE(Named(Events(Path("first")), "SHARED_MEMORY_ALLREDUCE").empty());
  const std::vector<std::string> ends =
      Named(Events(Path("second")), "SHARED_MEMORY_ALLREDUCE");
  ASSERT_EQ(ends.size(), 1u);
  EXPECT_EQ(Number(ends.front(), "batch"), 3);
  EXPECT_NE(ends.front().find("\"failed\":true"), std::string::npos);
}

TEST_F(TimelineCalls, AStopWaitsForTheGpu) {
  const std::string path = Path("gpu");
  ASSERT_TRUE(timeline_->Start(path, false).ok());
  Decide(1);
  ASSERT_NE(timeline_->BeginBatch(1), nullptr);
  TimelineRecord phase = timeline_->BeginOnGpu();
  timeline_->EndBatch(true);
  auto stop = std::async(std::launch::async, [this] { timeline_->Stop(); });
  while (timeline_->on()) sched_yield();
  phase.number = static_cast<int32_t>(GpuPhase::kNccl);
  phase.times[0] = NowNanoseconds();
  phase.times[1] = phase.times[0] + 5000;
  phase.times[3] = 1500;
  phase.ranks[0] = 3;
  phase.description = description_;
  timeline_->AddOnGpu(phase);
  timeline_->EndOnGpu();
  stop.get();
  const std::vector<std::string> spans = Named(Events(path), "NCCL_ALLREDUCE");
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(Number(spans.front(), "batch"), 1);
  EXPECT_EQ(Number(spans.front(), "dur"), 5);
  EXPECT_EQ(Number(spans.front(), "within"), 1.5);
  EXPECT_EQ(Text(spans.front(), "tensors"), "x and 2 more");
}

TEST_F(TimelineCalls, LeavesOutWhatTheGpuEndsAfterTheStop) {
  ASSERT_TRUE(timeline_->Start(Path("before"), false).ok());
  Decide(1);
  ASSERT_NE(timeline_->BeginBatch(1), nullptr);
  TimelineRecord phase = timeline_->BeginOnGpu();
  phase.description = description_;
  timeline_->EndBatch(true);
  timeline_->Stop();
  ASSERT_TRUE(timeline_->Start(Path("after"), false).ok());
  Decide(2);
  timeline_->AddOnGpu(phase);
  timeline_->SkipOnGpu(phase);
  timeline_->EndOnGpu();
  timeline_->Stop();
  for (const char* name : {"before", "after"}) {
    const std::vector<std::string> events = Events(Path(name));
    EXPECT_EQ(Named(events, "NEGOTIATE_ALLREDUCE").size(), 1u);
    EXPECT_TRUE(Named(events, "WAIT_FOR_INPUTS").empty());
    EXPECT_TRUE(Named(events, "NOT_RECORDED").empty());
  }
}

TEST_F(TimelineCalls, SaysOnceForWhomARequestWaitsLong) {
  const std::string path = Path("stalled");
  ASSERT_TRUE(timeline_->Start(path, false).ok());
  const double now =
      std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  const std::vector<Stall> stalls = {{{0, "late"}, Kind::kAllreduce, now, {0}, {1}}};
  timeline_->AddStalls(stalls, now + 0.5);
  timeline_->AddStalls(stalls, now + 1.5);
  timeline_->AddStalls(stalls, now + 2.5);
  timeline_->Stop();
  const std::vector<std::string> events = Named(Events(path), "WAITING_FOR_RANK");
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(Number(events.front(), "rank"), 1);
  EXPECT_NEAR(Number(events.front(), "ts") - Number(events.front(), "since"), 1.5e6, 1);
}

}  // namespace
}  // namespace keras_hvd
