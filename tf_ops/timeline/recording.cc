#include "tf_ops/timeline/recording.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "tf_ops/collectives/phase_recorder.h"

namespace keras_hvd {
namespace {

// How much later than a step its events may become known.
constexpr int64_t kSettled = 500'000'000;
// Names that a program invents as it runs must not fill the memory.
constexpr size_t kMostNames = 16384;

bool Moves(int32_t phase) {
  return phase != static_cast<int32_t>(CollectivePhase::kNone) &&
         phase != static_cast<int32_t>(CollectivePhase::kWait);
}

// Whether keras_hvd's callbacks have named it. Rank 0 computes nothing beside it.
bool IsOfCallbacks(const TensorKey& key) {
  return key.name.compare(0, 10, "keras_hvd/") == 0;
}

}  // namespace

// ---- CoveredTime

void CoveredTime::Add(int64_t begin, int64_t end) {
  begin = std::max(begin, taken_);
  if (begin < end) spans_.emplace_back(begin, end);
}

void CoveredTime::Sort() {
  spans_.erase(spans_.begin(), spans_.begin() + static_cast<ptrdiff_t>(next_));
  sorted_ -= std::min(sorted_, next_);
  next_ = 0;
  if (sorted_ == spans_.size()) return;
  const auto added = spans_.begin() + static_cast<ptrdiff_t>(sorted_);
  std::sort(added, spans_.end());
  std::inplace_merge(spans_.begin(), added, spans_.end());
  size_t kept = 0;
  for (const auto& span : spans_) {
    if (kept > 0 && span.first <= spans_[kept - 1].second) {
      spans_[kept - 1].second = std::max(spans_[kept - 1].second, span.second);
    } else {
      spans_[kept++] = span;
    }
  }
  spans_.resize(kept);
  sorted_ = kept;
}

int64_t CoveredTime::Take(int64_t to) {
  int64_t covered = 0;
  for (; next_ < spans_.size() && spans_[next_].first < to; ++next_) {
    const int64_t begin = std::max(spans_[next_].first, taken_);
    const int64_t end = std::min(spans_[next_].second, to);
    covered += std::max<int64_t>(end - begin, 0);
    if (spans_[next_].second > to) break;
  }
  taken_ = std::max(taken_, to);
  return covered;
}

// ---- Recording

Recording::Recording(RecordingFile* file, const JobState* job, int64_t start)
    : file_(*file),
      job_(*job),
      start_(start),
      waits_(job->size()),
      waited_for_(job->size()) {}

void Recording::Add(const TimelineRecord& record) {
  switch (record.type) {
    case TimelineRecord::Type::kDecision:
      // One that does not run here has no end.
      if (!batches_.empty() && !batches_.rbegin()->second.runs_here) {
        batches_.erase(std::prev(batches_.end()));
      }
      batches_[record.batch].decided = record.times[0];
      batches_[record.batch].runs_here = record.number != 0;
      newest_ = std::max(newest_, record.times[0]);
      return;
    case TimelineRecord::Type::kArrivals: return AddArrivals(record);
    case TimelineRecord::Type::kRequest: return AddRequest(record);
    case TimelineRecord::Type::kBegin:
      // Batches run in the order of their numbers, so the end of an earlier one was
      // lost.
      batches_.erase(batches_.begin(), batches_.lower_bound(record.batch));
      if (batches_.count(record.batch) > 0) {
        batches_[record.batch].began = record.times[0];
      }
      return;
    case TimelineRecord::Type::kPhase:
      if (!Moves(record.number)) return;
      moving_.Add(record.times[0], record.times[1]);
      return busy_.Add(record.times[0], record.times[1]);
    case TimelineRecord::Type::kEnd: return End(record);
    case TimelineRecord::Type::kMissing: return AddMissing(record);
    case TimelineRecord::Type::kGpuPhase:
      newest_ = std::max(newest_, record.times[1]);
      if (record.number == static_cast<int32_t>(GpuPhase::kWaitForInputs)) return;
      moving_.Add(record.times[0], record.times[1]);
      return busy_.Add(record.times[0], record.times[1]);
    case TimelineRecord::Type::kBatchElsewhere:
    case TimelineRecord::Type::kCycle: return;
  }
}

void Recording::AddArrivals(const TimelineRecord& record) {
  for (int i = 0; i < record.number; ++i) {
    arrivals_.emplace_back(record.times[i], record.ranks[i]);
  }
}

void Recording::AddRequest(const TimelineRecord& record) {
  std::vector<std::pair<int64_t, int>> arrivals = std::move(arrivals_);
  arrivals_.clear();
  std::sort(arrivals.begin(), arrivals.end());
  const auto batch = batches_.find(record.batch);
  if (batch == batches_.end() || arrivals.empty()) return;
  const TensorKey key = KeyOf(*record.description);
  const int64_t first = arrivals.front().first, last = arrivals.back().first;
  NoteStep(key, first);
  EndStall(key, first, last);
  AddWaits(arrivals);
  if (!batch->second.runs_here) return;
  const auto is_own = [](const auto& arrival) {
    return arrival.second == JobState::kCoordinator;
  };
  const auto own = std::find_if(arrivals.begin(), arrivals.end(), is_own);
  // Rank 0 may have joined before, and give zeros.
  const int64_t since = own == arrivals.end() ? batch->second.decided : own->first;
  if (!IsOfCallbacks(key)) {
    steps_.back().last_own = std::max(steps_.back().last_own, since);
  }
  // Those of an allgather are not known.
  const int64_t bytes = std::max<int64_t>(record.description->bytes(), 0);
  batch->second.requests.push_back({Find(key), bytes, first, last, since});
}

void Recording::AddWaits(const std::vector<std::pair<int64_t, int>>& arrivals) {
  const auto& [last, rank] = arrivals.back();
  for (const auto& [since, waiting] : arrivals) waits_[waiting].Add(since, last);
  if (arrivals.size() > 1) waited_for_[rank].Add(arrivals.end()[-2].first, last);
}

void Recording::NoteStep(const TensorKey& key, int64_t first) {
  if (IsOfCallbacks(key) && !steps_.empty()) return;
  const bool is_new = names_.insert(key).second;
  if (is_new && names_.size() <= kMostNames && !steps_.empty()) return;
  names_ = {key};
  const int64_t begin = steps_.empty() ? first : std::max(first, steps_.back().begin);
  steps_.push_back({begin});
}

void Recording::End(const TimelineRecord& record) {
  const int64_t end = record.times[0];
  newest_ = std::max(newest_, end);
  const auto batch = batches_.find(record.batch);
  if (batch == batches_.end()) return;
  for (const Request& request : batch->second.requests) {
    RecordingFile::Tensor& tensor = *request.tensor;
    tensor.times += 1;
    tensor.bytes += static_cast<double>(request.bytes);
    tensor.negotiating += 1e-9 * static_cast<double>(request.last - request.first);
    tensor.queued += 1e-9 * static_cast<double>(batch->second.began - request.last);
    tensor.running += 1e-9 * static_cast<double>(end - batch->second.began);
    busy_.Add(request.own, end);
    bytes_.emplace_back(end, request.bytes);
  }
  batches_.erase(batch);
}

RecordingFile::Tensor* Recording::Find(const TensorKey& key) {
  const auto known = tensors_.find(key);
  if (known != tensors_.end()) return known->second;
  std::string name = key.name;
  if (key.process_set != 0) {
    name += " (process set " + std::to_string(key.process_set) + ")";
  }
  RecordingFile::Tensor* const added = file_.AddTensor(name);
  if (tensors_.size() < RecordingFile::kTensors) tensors_.emplace(key, added);
  return added;
}

// ---- Stalls

// The ranks that a request waits for come one after the other.
void Recording::AddMissing(const TimelineRecord& record) {
  const TensorKey key = KeyOf(*record.description);
  const auto known = stalls_.find(key);
  const bool is_more = known != stalls_.end() && known->second.since == record.times[0];
  Stalled stalled;
  if (is_more) {
    stalled = known->second;
    stalled.text += " and " + job_.Describe(record.number);
  } else {
    stalled.event = file_.AddEvent();
    stalled.since = record.times[0];
    stalled.text = Quoted(key.name) + " waited for " + job_.Describe(record.number);
  }
  if (stalled.event == nullptr) return;
  stalled.event->time = Seconds(stalled.since);
  file_.Write(stalled.text, stalled.event->text, RecordingFile::Event::kLongestText);
  stalls_[key] = std::move(stalled);
}

void Recording::EndStall(const TensorKey& key, int64_t first, int64_t last) {
  if (stalls_.empty()) return;
  const auto known = stalls_.find(key);
  if (known == stalls_.end()) return;
  if (known->second.since == first) {
    char seconds[32];
    snprintf(seconds, sizeof(seconds), ", for %.1f s",
             1e-9 * static_cast<double>(last - first));
    file_.Write(known->second.text + seconds, known->second.event->text,
                RecordingFile::Event::kLongestText);
  }
  stalls_.erase(known);
}

// ---- Steps

void Recording::Flush(int64_t now, bool has_all, int64_t left_out) {
  file_.header().recorded.store(now - start_);
  file_.header().left_out.store(left_out);
  int64_t settled = (has_all ? now : newest_) - kSettled;
  for (const auto& [number, batch] : batches_) {
    for (const Request& request : batch.requests)
      settled = std::min(settled, request.own);
  }
  AddSteps(settled);
}

void Recording::Close() {
  AddSteps(INT64_MAX);
  if (steps_.empty()) return;
  Sort();
  AddStep(steps_.front(), std::max(newest_, steps_.front().begin));
  steps_.clear();
}

void Recording::AddSteps(int64_t until) {
  if (steps_.size() < 2 || steps_[1].begin > until) return;
  Sort();
  for (; steps_.size() > 1 && steps_[1].begin <= until; steps_.pop_front()) {
    AddStep(steps_[0], steps_[1].begin);
  }
}

void Recording::Sort() {
  moving_.Sort();
  busy_.Sort();
  for (CoveredTime& time : waits_) time.Sort();
  for (CoveredTime& time : waited_for_) time.Sort();
}

void Recording::AddStep(const Step& step, int64_t end) {
  const auto seconds = [](int64_t time) { return 1e-9 * static_cast<double>(time); };
  RecordingFile::Step added;
  RecordingFile::Stretch& sums = added.sums;
  sums.begin = Seconds(step.begin);
  sums.end = Seconds(end);
  sums.steps = 1;
  const int64_t exposed_from = std::clamp(step.last_own, step.begin, end);
  const int64_t moving = moving_.Take(exposed_from);
  const int64_t exposed_moving = moving_.Take(end);
  const int64_t busy = busy_.Take(exposed_from);
  const int64_t exposed_busy = busy_.Take(end);
  sums.moving = seconds(moving + exposed_moving);
  sums.waiting = seconds(busy + exposed_busy) - sums.moving;
  sums.exposed_moving = seconds(exposed_moving);
  sums.exposed_waiting = seconds(exposed_busy) - sums.exposed_moving;
  for (; !bytes_.empty() && bytes_.front().first <= end; bytes_.pop_front()) {
    sums.bytes += static_cast<double>(bytes_.front().second);
  }
  for (CoveredTime& time : waits_) added.waits.push_back(seconds(time.Take(end)));
  for (CoveredTime& time : waited_for_) {
    added.waited_for.push_back(seconds(time.Take(end)));
  }
  file_.AddStep(added);
}

}  // namespace keras_hvd
