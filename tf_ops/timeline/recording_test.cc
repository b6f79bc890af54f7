// Recordings: their sums are those of a straightforward computation, in any order of
// the events, and their files stay small and readable.
#include "tf_ops/timeline/recording.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "tf_ops/collectives/phase_recorder.h"
#include "tf_ops/testing/child.h"
#include "tf_ops/transport/job_state.h"
#include "tf_ops/transport/segment.h"

namespace keras_hvd {
namespace {

using Spans = std::vector<std::pair<int64_t, int64_t>>;

constexpr int64_t kMillisecond = 1'000'000;

std::string Path(const std::string& name) {
  return testing::TempDir() + "/" + std::to_string(getpid()) + "-" + name;
}

// Reads a file as another program would.
class Reader {
 public:
  explicit Reader(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    bytes_ = text.str();
  }

  const RecordingFile::Header& header() const {
    return *reinterpret_cast<const RecordingFile::Header*>(bytes_.data());
  }
  bool is_whole() const {
    return bytes_.size() > 4096 && memcmp(bytes_.data(), "khvdrec1", 8) == 0;
  }
  size_t bytes() const { return bytes_.size(); }
  int64_t stretches() const { return header().tables[header().active].stretches; }
  // Of a stretch; of all for -1.
  std::vector<double> Row(int64_t stretch) const {
    const int64_t at =
        stretch < 0 ? 0 : 1 + header().active * RecordingFile::kStretches + stretch;
    std::vector<double> row(numbers());
    memcpy(row.data(), bytes_.data() + totals_at() + at * numbers() * sizeof(double),
           numbers() * sizeof(double));
    return row;
  }
  RecordingFile::Tensor Tensor(int64_t number) const {
    RecordingFile::Tensor tensor;
    memcpy(&tensor, bytes_.data() + 4096 + number * sizeof(tensor), sizeof(tensor));
    return tensor;
  }
  std::string Event(int64_t number) const {
    RecordingFile::Event event;
    const size_t events_at =
        4096 + RecordingFile::kTensors * sizeof(RecordingFile::Tensor);
    memcpy(&event, bytes_.data() + events_at + number * sizeof(event), sizeof(event));
    return event.text;
  }
  // The sums of the stretches.
  std::vector<double> Sums() const {
    std::vector<double> sums(numbers());
    for (int64_t i = 0; i < stretches(); ++i) {
      const std::vector<double> row = Row(i);
      for (size_t j = 0; j < sums.size(); ++j) sums[j] += row[j];
    }
    return sums;
  }
  size_t numbers() const { return 8 + 2 * header().columns; }

 private:
  size_t totals_at() const {
    return 4096 + RecordingFile::kTensors * sizeof(RecordingFile::Tensor) +
           RecordingFile::kEvents * sizeof(RecordingFile::Event);
  }
  std::string bytes_;
};

// Records of a job, as the driving thread adds them.
class Job {
 public:
  explicit Job(int size) : size_(size) {
    EXPECT_TRUE(Segment::CreateLocal(size, 4096, &segment_).ok());
    state_ = std::make_unique<JobState>(segment_, 0);
  }

  void Open(const std::string& path) {
    ASSERT_TRUE(file_.Open(path, size_, 0).ok());
    recording_ = std::make_unique<Recording>(&file_, state_.get(), 0);
  }
  Recording& recording() { return *recording_; }
  RecordingFile& file() { return file_; }

  // A batch of one request, which the ranks submitted at these times.
  void Run(const std::string& name, const std::vector<int64_t>& arrivals,
           int64_t decided, int64_t begin, int64_t end, const Spans& copies) {
    batch_ += 1;
    Add(TimelineRecord::Type::kDecision, 1, {decided});
    for (int rank = 0; rank < size_; ++rank) {
      TimelineRecord record;
      record.type = TimelineRecord::Type::kArrivals;
      record.batch = batch_;
      record.number = 1;
      record.ranks[0] = rank;
      record.times[0] = arrivals[rank];
      recording_->Add(record);
    }
    TimelineRecord request;
    request.type = TimelineRecord::Type::kRequest;
    request.batch = batch_;
    auto description = std::make_shared<Description>();
    description->name = name;
    description->tensors = {{DataType::kFloat32, {25}}};
    request.description = description;
    recording_->Add(request);
    Add(TimelineRecord::Type::kBegin, 0, {begin});
    for (const auto& [from, to] : copies) {
      Add(TimelineRecord::Type::kPhase, static_cast<int>(CollectivePhase::kCopyIn),
          {from, to});
    }
    Add(TimelineRecord::Type::kEnd, 1, {end});
  }
  void Missing(const std::string& name, int rank, int64_t since) {
    TimelineRecord record;
    record.type = TimelineRecord::Type::kMissing;
    record.number = rank;
    record.times[0] = since;
    auto description = std::make_shared<Description>();
    description->name = name;
    record.description = description;
    recording_->Add(record);
  }

 private:
  void Add(TimelineRecord::Type type, int number, const std::vector<int64_t>& times) {
    TimelineRecord record;
    record.type = type;
    record.batch = batch_;
    record.number = number;
    std::copy(times.begin(), times.end(), record.times);
    recording_->Add(record);
  }

  const int size_;
  uint64_t batch_ = 0;
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<JobState> state_;
  RecordingFile file_;
  std::unique_ptr<Recording> recording_;
};

// In ticks of a millisecond: in how many within [from, to) there is one of the spans,
// but none of `without`.
int64_t Ticks(const Spans& spans, const Spans& without, int64_t from, int64_t to) {
  const auto covers = [](const Spans& some, int64_t tick) {
    return std::any_of(some.begin(), some.end(), [tick](const auto& span) {
      return span.first <= tick * kMillisecond && tick * kMillisecond < span.second;
    });
  };
  int64_t ticks = 0;
  for (int64_t tick = from / kMillisecond; tick < to / kMillisecond; ++tick) {
    ticks += covers(spans, tick) && !covers(without, tick) ? 1 : 0;
  }
  return ticks;
}

TEST(Recording, HasTheSumsOfAStraightforwardComputation) {
  constexpr int kSize = 3, kSteps = 40;
  const std::string path = Path("random");
  Job job(kSize);
  job.Open(path);
  std::mt19937 random(7);
  const auto some = [&random](int most) {
    return static_cast<int64_t>(random() % most) * kMillisecond;
  };
  Spans moving, busy;
  std::vector<Spans> waits(kSize), waited_for(kSize);
  std::vector<int64_t> begins, last_own;
  std::vector<double> negotiating(3), queued(3), running(3);
  int64_t now = 0, free = 0;
  for (int step = 0; step < kSteps; ++step) {
    for (int tensor = 0; tensor < 3; ++tensor) {
      std::vector<int64_t> arrivals(kSize);
      for (int64_t& arrival : arrivals) arrival = now + some(9);
      const int64_t first = *std::min_element(arrivals.begin(), arrivals.end());
      const auto last = std::max_element(arrivals.begin(), arrivals.end());
      if (tensor == 0) {
        begins.push_back(first);
        last_own.push_back(0);
      }
      last_own.back() = std::max(last_own.back(), arrivals[0]);
      const int64_t begin = std::max(*last + some(4), free);
      const Spans copies = {
          {begin + some(3), begin + 3 * kMillisecond},
          {begin + 4 * kMillisecond, begin + 4 * kMillisecond + some(3)}};
      const int64_t end = free = begin + 7 * kMillisecond;
      job.Run("tensor " + std::to_string(tensor), arrivals, *last, begin, end, copies);
      moving.insert(moving.end(), copies.begin(), copies.end());
      busy.emplace_back(arrivals[0], end);
      std::vector<int64_t> sorted = arrivals;
      std::sort(sorted.begin(), sorted.end());
      for (int rank = 0; rank < kSize; ++rank)
        waits[rank].emplace_back(arrivals[rank], *last);
      // Of several ranks that come last, the highest counts, which waited for no time.
      waited_for[last - arrivals.begin()].emplace_back(sorted[kSize - 2], *last);
      negotiating[tensor] += 1e-9 * (*last - first);
      queued[tensor] += 1e-9 * (begin - *last);
      running[tensor] += 1e-9 * (end - begin);
      now += some(6);
    }
    now = std::max(now, free - some(20)) + 9 * kMillisecond;
    job.recording().Flush(now, false, 5);
  }
  job.recording().Close();
  begins.push_back(free);

  const Reader file(path);
  ASSERT_TRUE(file.is_whole());
  ASSERT_EQ(file.stretches(), kSteps);
  for (int step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(step);
    const int64_t from = begins[step], to = begins[step + 1];
    const int64_t exposed = std::min(std::max(last_own[step], from), to);
    const std::vector<double> row = file.Row(step);
    EXPECT_DOUBLE_EQ(row[0], 1e-9 * from);
    EXPECT_DOUBLE_EQ(row[1], 1e-9 * to);
    EXPECT_EQ(row[2], 1);
    EXPECT_NEAR(row[4] * 1e3, Ticks(moving, {}, from, to), 1e-6);
    EXPECT_NEAR(row[5] * 1e3, Ticks(busy, moving, from, to), 1e-6);
    EXPECT_NEAR(row[6] * 1e3, Ticks(moving, {}, exposed, to), 1e-6);
    EXPECT_NEAR(row[7] * 1e3, Ticks(busy, moving, exposed, to), 1e-6);
    for (int rank = 0; rank < kSize; ++rank) {
      EXPECT_NEAR(row[8 + rank] * 1e3, Ticks(waits[rank], {}, from, to), 1e-6);
      EXPECT_NEAR(row[8 + kSize + rank] * 1e3, Ticks(waited_for[rank], {}, from, to),
                  1e-6);
    }
  }
  EXPECT_EQ(file.Sums()[3], kSteps * 3 * 100);
  EXPECT_EQ(file.header().left_out, 5);
  ASSERT_EQ(file.header().tensors, 3);
  for (int tensor = 0; tensor < 3; ++tensor) {
    const RecordingFile::Tensor sums = file.Tensor(tensor);
    EXPECT_EQ(sums.name, "tensor " + std::to_string(tensor));
    EXPECT_EQ(sums.times, kSteps);
    EXPECT_EQ(sums.bytes, kSteps * 100);
    EXPECT_NEAR(sums.negotiating, negotiating[tensor], 1e-9);
    EXPECT_NEAR(sums.queued, queued[tensor], 1e-9);
    EXPECT_NEAR(sums.running, running[tensor], 1e-9);
  }
}

// A step of a job: two ranks, of which the second comes a millisecond later.
void RunStep(int64_t step, Job* job) {
  const int64_t now = step * 10 * kMillisecond;
  const int64_t begin = now + 2 * kMillisecond, end = now + 5 * kMillisecond;
  job->Run("gradients", {now, now + kMillisecond}, begin, begin, end, {{begin, end}});
}

// Rank 0 computes for 3 ms, waits for 5 for the gradients, and for 1 for a callback's
// request. The first epoch ends with another one.
TEST(Recording, CountsAsWaitedWhatAStepWaitsBeforeItsCallbacks) {
  constexpr int kSteps = 6;
  const std::string path = Path("callbacks");
  Job job(2);
  job.Open(path);
  for (int step = 0; step < kSteps; ++step) {
    const auto at = [step](int64_t tick) { return (10 * step + tick) * kMillisecond; };
    job.Run("gradients", {at(3), at(8)}, at(8), at(8), at(8), {});
    job.Run("keras_hvd/stop_training", {at(8), at(9)}, at(9), at(9), at(9), {});
    if (step == 2) job.Run("keras_hvd/logs", {at(9), at(9)}, at(9), at(9), at(9), {});
  }
  job.recording().Close();
  const Reader file(path);
  ASSERT_EQ(file.stretches(), kSteps);
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(file.Row(step)[5], 6e-3, 1e-9) << step;
    EXPECT_NEAR(file.Row(step)[7], 6e-3, 1e-9) << step;
  }
}

TEST(Recording, OfManyStepsStaysSmallAndKeepsItsSums) {
  constexpr int kSteps = 100000;
  const std::string path = Path("long");
  Job job(2);
  job.Open(path);
  for (int step = 0; step < kSteps; ++step) {
    RunStep(step, &job);
    if (step % 10 == 0) job.recording().Flush(step * 10 * kMillisecond, false, 0);
  }
  job.recording().Close();
  const Reader file(path);
  EXPECT_LT(file.bytes(), 1u << 20);
  const int64_t of_each = file.header().tables[file.header().active].steps;
  EXPECT_EQ(of_each, 64);
  ASSERT_EQ(file.stretches(), (kSteps + of_each - 1) / of_each);
  const std::vector<double> sums = file.Sums(), totals = file.Row(-1);
  EXPECT_EQ(sums[2], kSteps);
  EXPECT_EQ(sums[3], 100.0 * kSteps);
  EXPECT_NEAR(sums[4], 3e-3 * kSteps, 1e-6);
  EXPECT_NEAR(sums[5], 2e-3 * kSteps, 1e-6);
  EXPECT_NEAR(sums[8], 1e-3 * kSteps, 1e-6);
  EXPECT_EQ(sums[9], 0);
  EXPECT_NEAR(sums[11], 1e-3 * kSteps, 1e-6);
  for (size_t i = 2; i < totals.size(); ++i) EXPECT_NEAR(totals[i], sums[i], 1e-6);
  double reached = 0;
  for (int64_t i = 0; i < file.stretches(); ++i) {
    EXPECT_EQ(file.Row(i)[0], reached);
    reached = file.Row(i)[1];
  }
}

TEST(Recording, HasAStepHalfASecondAfterItsEndThoughNothingFollows) {
  const std::string path = Path("settled");
  Job job(2);
  job.Open(path);
  for (int step = 0; step < 3; ++step) RunStep(step, &job);
  job.recording().Flush(500 * kMillisecond, true, 0);
  EXPECT_EQ(Reader(path).stretches(), 0);
  job.recording().Flush(511 * kMillisecond, true, 0);
  EXPECT_EQ(Reader(path).stretches(), 1);
  job.recording().Flush(520 * kMillisecond, true, 0);
  // Nobody knows yet where the third one ends.
  job.recording().Flush(9999 * kMillisecond, true, 0);
  EXPECT_EQ(Reader(path).stretches(), 2);
}

TEST(Recording, OfManyRanksHasAColumnForSomeOfThem) {
  constexpr int kSize = 1000;
  const std::string path = Path("wide");
  RecordingFile file;
  ASSERT_TRUE(file.Open(path, kSize, 0).ok());
  RecordingFile::Step step;
  step.sums.steps = 1;
  step.waits.resize(kSize);
  step.waited_for.resize(kSize);
  step.waits[4] = 3;
  step.waits[7] = 5;
  step.waited_for[999] = 8;
  file.AddStep(step);
  const Reader reader(path);
  ASSERT_EQ(reader.header().columns, 250);
  EXPECT_EQ(reader.Row(0)[8 + 1], 5);
  EXPECT_EQ(reader.Row(0)[8 + 250 + 249], 8);
}

TEST(Recording, HasNoMoreTensorsAndEventsThanFit) {
  const std::string path = Path("names");
  RecordingFile file;
  ASSERT_TRUE(file.Open(path, 2, 0).ok());
  for (int i = 0; i < 2000; ++i) {
    file.AddTensor("tensor " + std::to_string(i))->times += 1;
    file.AddEvent();
  }
  const Reader reader(path);
  ASSERT_EQ(reader.header().tensors, RecordingFile::kTensors);
  EXPECT_STREQ(reader.Tensor(1023).name, "(all other tensors)");
  EXPECT_EQ(reader.Tensor(1023).times, 2000 - 1023);
  EXPECT_EQ(reader.header().events, RecordingFile::kEvents);
  EXPECT_EQ(reader.header().events_left_out, 2000 - RecordingFile::kEvents);
}

TEST(Recording, SaysWhoWasWaitedForAndHowLong) {
  const std::string path = Path("stalls");
  Job job(3);
  job.Open(path);
  const int64_t since = kMillisecond, end = 2500 * kMillisecond;
  job.Missing("late", 1, since);
  job.Missing("late", 2, since);
  job.Missing("never", 2, since);
  job.Run("late", {since, end, end}, end, end, end + kMillisecond, {});
  const Reader file(path);
  ASSERT_EQ(file.header().events, 2);
  EXPECT_EQ(file.Event(0).find("'late' waited for rank 1 "), 0u) << file.Event(0);
  EXPECT_NE(file.Event(0).find(" and rank 2 "), std::string::npos) << file.Event(0);
  EXPECT_NE(file.Event(0).find(", for 2.5 s"), std::string::npos) << file.Event(0);
  EXPECT_EQ(file.Event(1).find("'never' waited for rank 2 "), 0u) << file.Event(1);
}

TEST(Recording, IsReadableWheneverItsProcessIsKilled) {
  const std::string path = Path("killed");
  for (int kill = 0; kill < 10; ++kill) {
    Child child([&](const Child::Link& link) {
      RecordingFile file;
      if (!file.Open(path, 2, 0).ok()) return 1;
      RecordingFile::Step step;
      step.waits = step.waited_for = {1, 2};
      step.sums.steps = 1;
      for (int64_t i = 0; i < 100'000'000; ++i) {
        step.sums.begin = static_cast<double>(i);
        step.sums.end = static_cast<double>(i + 1);
        file.AddStep(step);
        // Somewhere after this it is killed.
        if (i == 3000 * kill) link.Tell("go");
      }
      return 0;
    });
    ASSERT_EQ(child.Line(), "go");
    child.Kill(SIGKILL);
    ASSERT_EQ(child.Reap(), SIGKILL);
    const Reader file(path);
    ASSERT_TRUE(file.is_whole());
    const std::vector<double> last = file.Row(file.stretches() - 1);
    // But for the one that was being added.
    EXPECT_NEAR(file.Sums()[2], last[1], 1);
    EXPECT_GE(last[1], 3000 * kill);
    EXPECT_EQ(file.Row(0)[0], 0);
  }
}

TEST(Recording, SaysWhatCannotBeOpened) {
  RecordingFile file;
  const Status status = file.Open(Path("no-folder") + "/file", 2, 0);
  EXPECT_EQ(status.code, Code::kInvalidArgument);
  EXPECT_NE(status.message.find("No such file or directory"), std::string::npos);
}

}  // namespace
}  // namespace keras_hvd
