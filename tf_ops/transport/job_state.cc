#include "tf_ops/transport/job_state.h"

#include <linux/futex.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tf_ops/transport/faults.h"
#include "tf_ops/transport/liveness.h"

namespace keras_hvd {

JobState::JobState(std::shared_ptr<Segment> segment, int rank)
    : JobState(segment, Topology::OneHost(rank, segment->size())) {}

JobState::JobState(std::shared_ptr<Segment> segment, Topology topology)
    : topology_(std::move(topology)),
      segment_(std::move(segment)),
      header_(segment_->header()),
      self_(block(rank())) {}

// ---- Failure

bool JobState::Failed() const {
  return header_.failure_code.load(std::memory_order_acquire) != 0;
}

Status JobState::Failure() const {
  const uint32_t code = header_.failure_code.load(std::memory_order_acquire);
  if (code == 0) return Status::Ok();
  return {static_cast<Code>(code), header_.failure_text};
}

bool JobState::Fail(Code code, const std::string& text, int dead) {
  const uint32_t self = rank() + 1;
  uint32_t owner = 0;
  if (!header_.failure_claimed.compare_exchange_strong(owner, self)) {
    // If a reporter died before it published, the rank that saw its death takes over.
    const bool orphaned = owner == static_cast<uint32_t>(dead + 1) && !Failed();
    if (!orphaned || !header_.failure_claimed.compare_exchange_strong(owner, self)) {
      return false;
    }
  }
  FaultPoint();
  const size_t length = std::min(text.size(), SegmentHeader::kFailureBytes - 1);
  memcpy(header_.failure_text, text.data(), length);
  header_.failure_text[length] = '\0';
  FaultPoint();
  header_.failure_code.store(static_cast<uint32_t>(code), std::memory_order_release);
  WakeAll();
  return true;
}

bool JobState::ClaimFailureReport() { return header_.report_claimed.exchange(1) == 0; }

bool JobState::ClaimGpuWarning() {
  return header_.gpu_warning_claimed.exchange(1) == 0;
}

bool JobState::ClaimStallReport(uint64_t batch) {
  return header_.stall_reported.exchange(batch) != batch;
}

// ---- The ranks

std::string JobState::Describe(int rank) const {
  const RankBlock& of_rank = block(rank);
  return "rank " + std::to_string(rank) + " (pid " +
         std::to_string(of_rank.pid.load(std::memory_order_relaxed)) + " on " +
         of_rank.host + ")";
}

std::string JobState::Obstacle(int rank) const {
  return ObstacleOf(ProcessStateOf(rank));
}

char JobState::ProcessStateOf(int rank) const {
  return ProcessState(block(rank).pid.load());
}

bool JobState::HasShutDown(int rank) const {
  return block(rank).departure.load() == static_cast<uint32_t>(Departure::kShutDown);
}

bool JobState::HasGone(int rank) const {
  const RankBlock& of_rank = block(rank);
  return of_rank.departure.load() != 0 || (of_rank.life.load() & FUTEX_OWNER_DIED) != 0;
}

void JobState::ShutDown() {
  FaultPoint();
  self_.departure.store(static_cast<uint32_t>(Departure::kShutDown));
  RingAll();
}

std::string JobState::HowItLeft(int rank) const {
  const char* how = block(rank).how_it_left;
  return how[0] == '\0' ? kUsualWayToLeave : how;
}

void JobState::SayHowItLeaves(const std::string& how) {
  how.copy(self_.how_it_left, RankBlock::kHowBytes - 1);
}

int JobState::DepartedAbove() const {
  const int leader = topology_.leader();
  if (rank() != leader && HasShutDown(leader)) return leader;
  return static_cast<int>(header_.departed_above.load()) - 1;
}

bool JobState::has_departed() const { return self_.departure.load() != 0; }

uint64_t JobState::CarriedOut(int rank) const {
  return block(rank).decisions_carried_out.value.load();
}

bool JobState::HasLeftBefore(int rank, uint64_t decision) const {
  return HasShutDown(rank) && CarriedOut(rank) < decision;
}

void JobState::NoteCarriedOut() {
  std::atomic<uint64_t>& count = self_.decisions_carried_out.value;
  count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

OperationHistory& JobState::History(int rank) { return block(rank).history; }

// ---- Waking

void JobState::RingLeader(uint32_t about) {
  block(topology_.leader()).bell.Ring(about);
}

void JobState::RingAll() {
  for (int rank : topology_.local_ranks()) block(rank).bell.Ring();
}

void JobState::WakeAll() {
  for (int rank : topology_.local_ranks()) {
    FaultPoint();
    block(rank).bell.Wake();
  }
}

// ---- The coordinator's settings for all

bool JobState::compares_outputs() const {
  return header_.check.load(std::memory_order_relaxed) != 0;
}

bool JobState::WantsTimes() const {
  return header_.timeline_on.load(std::memory_order_relaxed) != 0 &&
         header_.timeline_paused.load(std::memory_order_relaxed) == 0;
}

void JobState::Set(std::atomic<uint32_t>* setting, bool on) {
  setting->store(on);
  NoteSettings();
}

}  // namespace keras_hvd
