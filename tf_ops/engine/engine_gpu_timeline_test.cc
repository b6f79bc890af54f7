// The timeline of batches on GPUs: its rows of their phases, its times, and that it
// costs nothing without a timeline.
#include <gtest/gtest.h>
#include <sched.h>

#include <array>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "tf_ops/engine/engine_gpu_testing.h"
#include "tf_ops/engine/timeline_testing.h"

namespace keras_hvd {
namespace {

using stand_in::StandIn;

int64_t CountTimedEvents(const StandIn& libraries) {
  return CountCalls(libraries, "cuEventCreate", "flags 0");
}

// One that NCCL does not reduce as the CPU does, and that is more than a copy.
Ask ThroughHost(const std::string& name) {
  Ask ask = Sum(name, {1, 2, 3});
  ask.description.reduction = {ReduceOp::kMin, 2, 1};
  return ask;
}

// Begins a timeline, and knows when that was.
class Timed {
 public:
  Timed(GpuJob* job, const std::string& name) : job_(*job), path_(Path(name)) {
    begin_ = NowNanoseconds();
    EXPECT_EQ(job_[0].engine().StartTimeline(path_, false).message, "");
    end_ = NowNanoseconds();
  }
  std::vector<std::string> Stop() {
    job_[0].engine().StopTimeline();
    const std::vector<std::string> events = Events(path_);
    ExpectNested(events);
    return events;
  }
  // Microseconds in the file: at the latest and at the earliest that this may be.
  double Latest(int64_t time) const { return static_cast<double>(time - begin_) / 1e3; }
  double Earliest(int64_t time) const { return static_cast<double>(time - end_) / 1e3; }

 private:
  GpuJob& job_;
  const std::string path_;
  int64_t begin_, end_;
};

double EndOf(const std::string& span) {
  return Number(span, "ts") + Number(span, "dur");
}

// The clock may not get its reference while other programs have the cores: runs until
// the span has been recorded.
std::vector<std::string> RecordUntil(
    GpuJob* job, const std::string& span,
    const std::function<Ask(const std::string&)>& make) {
  for (int round = 0;; ++round) {
    const std::string name = "round " + std::to_string(round);
    Timed recording(job, name);
    job->ForEach([&](GpuRank& self, int) {
      Buffer output;
      ASSERT_EQ(self.Run(make(name), &output).message, "");
    });
    const std::vector<std::string> events = recording.Stop();
    if (!Named(events, span).empty() || round == 50) return events;
  }
}

// The phase that moves tensors on the GPUs.
std::string Moving(int size, const std::string& kind) {
  return size == 1 ? "COPY_ON_GPU" : "NCCL_" + kind;
}

class GpuTimelineTest : public testing::TestWithParam<int> {};

TEST_P(GpuTimelineTest, ShowsWhenCollectivesRanAndForWhatTheyWaited) {
  const std::string name = Moving(GetParam(), "ALLREDUCE");
  const StandIn libraries;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    GpuJob job(libraries, GetParam(), seed);
    job.Connect();
    const std::vector<std::string> events = RecordUntil(
        &job, name, [](const std::string& name) { return Sum(name, {1, 2}); });
    const std::vector<std::string> waits = Named(events, "WAIT_FOR_INPUTS");
    const std::vector<std::string> runs = Named(events, name);
    ASSERT_EQ(waits.size(), 1u);
    ASSERT_EQ(runs.size(), 1u);
    for (const std::string& span : {waits.front(), runs.front()}) {
      EXPECT_EQ(Number(span, "pid"), 1);
      EXPECT_EQ(Text(span, "tensors").rfind("round", 0), 0u);
      EXPECT_GT(Number(span, "within"), 0);
    }
    EXPECT_GE(Number(waits.front(), "enqueued"), 0);
    EXPECT_GE(Number(runs.front(), "ts"), EndOf(waits.front()) - 2e-3);
    const std::vector<std::string> enqueuing = Named(events, "ENQUEUE_ALLREDUCE");
    ASSERT_EQ(enqueuing.size(), 1u);
    EXPECT_EQ(Number(enqueuing.front(), "batch"), Number(runs.front(), "batch"));
    EXPECT_TRUE(Named(events, "SHARED_MEMORY_ALLREDUCE").empty());
  }
}

TEST_P(GpuTimelineTest, CountsAsMovingInARecording) {
  const StandIn libraries;
  const std::string path = Path("moving");
  double moving = 0;
  // The clock may lack its reference for a while.
  for (int round = 0; moving == 0 && round < 50; ++round) {
    {
      GpuJob job(libraries, GetParam(), 1);
      job.Connect();
      ASSERT_EQ(job[0].engine().StartRecording(path).message, "");
      job.ForEach([&](GpuRank& self, int) {
        Buffer output;
        ASSERT_EQ(self.Run(Sum("x", {1, 2}), &output).message, "");
      });
    }
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    RecordingFile::Stretch totals;
    memcpy(&totals,
           bytes.data() + 4096 +
               RecordingFile::kTensors * sizeof(RecordingFile::Tensor) +
               RecordingFile::kEvents * sizeof(RecordingFile::Event),
           sizeof(totals));
    EXPECT_EQ(totals.steps, 1);
    moving = totals.moving;
  }
  EXPECT_GT(moving, 0);
}

TEST_P(GpuTimelineTest, PlacesThemOnTheHostsClock) {
  const StandIn libraries;
  GpuJob job(libraries, GetParam(), 1);
  job.Connect();
  std::vector<std::string> waits, runs;
  for (int round = 0; runs.empty() && round < 50; ++round) {
    Timed recording(&job, "placed");
    libraries->Hold(job[0].stream(), true);
    std::vector<size_t> numbers(job.size());
    job.ForEach([&](GpuRank& self, int rank) {
      numbers[rank] = self.Submit(Sum("held", {1}));
      ASSERT_EQ(self.End(numbers[rank]).message, "");
    });
    const int64_t released = NowNanoseconds();
    libraries->Hold(job[0].stream(), false);
    job.ForEach([&](GpuRank& self, int rank) { self.Output(numbers[rank]); });
    const int64_t read = NowNanoseconds();
    const std::vector<std::string> events = recording.Stop();
    waits = Named(events, "WAIT_FOR_INPUTS");
    runs = Named(events, Moving(job.size(), "ALLREDUCE"));
    if (runs.empty()) continue;
    // Of float's digits some microseconds are lost.
    const double exact = Number(runs.front(), "within") + 4;
    EXPECT_GE(EndOf(waits.front()), recording.Earliest(released) - exact);
    EXPECT_GE(Number(runs.front(), "ts"), recording.Earliest(released) - exact);
    EXPECT_LE(EndOf(runs.front()), recording.Latest(read) + exact);
  }
  EXPECT_EQ(runs.size(), 1u);
}

TEST_P(GpuTimelineTest, ShowsTheWayThroughHostMemory) {
  const StandIn libraries;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    GpuJob job(libraries, GetParam(), seed);
    const std::vector<std::string> events =
        RecordUntil(&job, "COPY_TO_GPU", ThroughHost);
    double reached = 0;
    for (const char* phase : {"WAIT_FOR_INPUTS", "COPY_TO_HOST",
                              "SHARED_MEMORY_ALLREDUCE", "COPY_TO_GPU"}) {
      const std::vector<std::string> spans = Named(events, phase);
      ASSERT_EQ(spans.size(), 1u) << phase;
      EXPECT_EQ(Number(spans.front(), "pid"), 1) << phase;
      // Written in thousandths.
      EXPECT_GE(Number(spans.front(), "ts"), reached - 2e-3) << phase;
      reached = EndOf(spans.front());
    }
    EXPECT_TRUE(Named(events, "NCCL_ALLREDUCE").empty());
  }
}

TEST_P(GpuTimelineTest, EachKindHasItsName) {
  const StandIn libraries;
  GpuJob job(libraries, GetParam(), 2);
  const int size = GetParam();
  const auto gather = [](const std::string& name) { return Gather(name, {1, 2}); };
  const auto exchange = [size](const std::string& name) {
    Ask ask = Gather(name, std::vector<int32_t>(size));
    ask.description.kind = Kind::kAlltoall;
    ask.splits = std::vector<int64_t>(size, 1);
    return ask;
  };
  const auto scatter = [size](const std::string& name) {
    Ask ask = Sum(name, std::vector<float>(size, 1));
    ask.description.kind = Kind::kReducescatter;
    return ask;
  };
  const auto broadcast = [](const std::string& name) {
    Ask ask = Sum(name, {1, 2});
    ask.description.kind = Kind::kBroadcast;
    return ask;
  };
  const std::vector<std::pair<std::string, std::function<Ask(const std::string&)>>>
      kinds = {{"ALLGATHER", gather},
               {"ALLTOALL", exchange},
               {"REDUCESCATTER", scatter},
               {"BROADCAST", broadcast}};
  for (const auto& [kind, make] : kinds) {
    const std::string name = Moving(size, kind);
    EXPECT_EQ(Named(RecordUntil(&job, name, make), name).size(), 1u) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, GpuTimelineTest, testing::Values(1, 2));

// ---- Costs

TEST(GpuTimeline, NothingIsTimedWithoutIt) {
  const StandIn libraries;
  GpuJob job(libraries, 2, 1);
  const auto run = [&] {
    job.ForEach([](GpuRank& self, int) {
      Buffer output;
      ASSERT_EQ(self.Run(Sum("x", {1}), &output).message, "");
      ASSERT_EQ(self.Run(ThroughHost("y"), &output).message, "");
    });
  };
  run();
  // A rank's own stream, and the collectives'.
  EXPECT_EQ(CountCalls(libraries, "cuStreamCreateWithPriority"), 4);
  EXPECT_EQ(CountTimedEvents(libraries), 0);
  Timed recording(&job, "on");
  run();
  recording.Stop();
  EXPECT_EQ(CountCalls(libraries, "cuStreamCreateWithPriority"), 5);
  EXPECT_GT(CountTimedEvents(libraries), 0);
  const int64_t timed = CountTimedEvents(libraries);
  const int64_t read = CountCalls(libraries, "cuEventElapsedTime");
  run();
  EXPECT_EQ(CountTimedEvents(libraries), timed);
  EXPECT_EQ(CountCalls(libraries, "cuEventElapsedTime"), read);
}

// Events are read when they have come: the driver is never asked too early.
TEST(GpuTimeline, TimedEventsAreUsedAgain) {
  const StandIn libraries;
  GpuJob job(libraries, 1, 1);
  Timed recording(&job, "many");
  for (int i = 0; i < 200; ++i) {
    Buffer output;
    ASSERT_EQ(job[0].Run(Sum("x", {1}), &output).message, "");
  }
  const std::vector<std::string> events = recording.Stop();
  EXPECT_LE(Named(events, "COPY_ON_GPU").size(), 200u);
  // Four for each that had passed and had not been looked at for 100 ms.
  const int64_t recorded = CountCalls(libraries, "cuEventRecord");
  EXPECT_GT(recorded, 4 * 200);
  EXPECT_LE(CountTimedEvents(libraries), 4 * 200 + 8);
}

// ---- Failures

TEST(GpuTimeline, AnAbortLeavesAValidFileAndNoEvent) {
  const StandIn libraries;
  for (const bool through_host : {false, true}) {
    GpuJob job(libraries, 2, 1);
    job.Connect();
    Timed recording(&job, "aborted");
    libraries->HoldCollectives(1, true);
    std::array<size_t, 2> staged = {};
    job.ForEach([&](GpuRank& self, int) {
      ASSERT_TRUE(self.End(self.Submit(Sum("grad/w", {1, 2}))).ok());
    });
    if (through_host) {
      // It waits for the one before on the stream.
      job.ForEach([&](GpuRank& self, int rank) {
        staged[rank] = self.Submit(ThroughHost("grad/v"));
      });
      while (CountCalls(libraries, "cuMemcpyDtoHAsync") < 2) sched_yield();
    }
    job.state(0).Fail(Code::kRankFailed, "rank 1 died", 1);
    if (through_host) {
      job.ForEach([&](GpuRank& self, int rank) {
        EXPECT_EQ(self.End(staged[rank]).code, Code::kRankFailed);
      });
    }
    job.ForEach([](GpuRank& self, int) { self.Synchronize(); });
    job.ForEach([](GpuRank& self, int) {
      Buffer output;
      EXPECT_EQ(self.Run(Sum("later", {1}), &output).code, Code::kRankFailed);
    });
    const std::vector<std::string> events = recording.Stop();
    EXPECT_EQ(Named(events, "ENQUEUE_ALLREDUCE").size(), through_host ? 2u : 1u);
    EXPECT_TRUE(Named(events, "NCCL_ALLREDUCE").empty());
    libraries->HoldCollectives(1, false);
  }
}

// Whatever fails, the job goes on or ends, the file is valid, and nothing is left.
TEST(GpuTimeline, EachErrorOfTheDriversLeavesAValidFileAndNoEvent) {
  const StandIn libraries;
  int lost = 0;
  for (const std::string function :
       {"cuEventCreate", "cuEventRecord", "cuEventElapsedTime", "cuEventQuery",
        "cuStreamCreateWithPriority"}) {
    for (int call = 1; call <= 6; ++call) {
      GpuJob job(libraries, 1, 1);
      job.Connect();
      Timed recording(&job, "error");
      stand_in::Injection injection;
      injection.function = function;
      injection.code = static_cast<int32_t>(stand_in::kInvalidHandle);
      injection.call = call;
      libraries->Inject(injection);
      bool ok = true;
      for (int i = 0; ok && i < 3; ++i) {
        Buffer output;
        const size_t number = job[0].Submit(i == 1 ? ThroughHost("h") : Sum("x", {1}));
        ok = job[0].End(number).ok();
        if (ok) job[0].Synchronize();
      }
      const std::vector<std::string> events = recording.Stop();
      lost += static_cast<int>(Named(events, "NOT_RECORDED").size());
      EXPECT_TRUE(ok || function != "cuEventElapsedTime");
    }
  }
  EXPECT_GT(lost, 0);
}

}  // namespace
}  // namespace keras_hvd
