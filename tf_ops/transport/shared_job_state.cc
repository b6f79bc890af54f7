// See shared_job_state.h.
#include "tf_ops/transport/shared_job_state.h"

#include <linux/futex.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tf_ops/transport/faults.h"
#include "tf_ops/transport/liveness.h"

namespace keras_hvd {

SharedJobState::SharedJobState(std::shared_ptr<Segment> segment, int rank)
    : SharedJobState(segment, Topology::OneHost(rank, segment->size())) {}

SharedJobState::SharedJobState(std::shared_ptr<Segment> segment, Topology topology)
    : JobState(topology.rank(), topology.size()),
      topology_(std::move(topology)),
      segment_(std::move(segment)),
      header_(segment_->header()),
      self_(block(rank())) {}

// ---- Failure

bool SharedJobState::Failed() const {
  return header_.failure_code.load(std::memory_order_acquire) != 0;
}

Status SharedJobState::Failure() const {
  const uint32_t code = header_.failure_code.load(std::memory_order_acquire);
  if (code == 0) return Status::Ok();
  return {static_cast<Code>(code), header_.failure_text};
}

bool SharedJobState::Fail(Code code, const std::string& text, int dead) {
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

bool SharedJobState::ClaimFailureReport() {
  return header_.report_claimed.exchange(1) == 0;
}

bool SharedJobState::ClaimGpuWarning() {
  return header_.gpu_warning_claimed.exchange(1) == 0;
}

bool SharedJobState::ClaimStallReport(uint64_t batch) {
  return header_.stall_reported.exchange(batch) != batch;
}

// ---- The ranks

std::string SharedJobState::Describe(int rank) const {
  const RankBlock& of_rank = block(rank);
  return "rank " + std::to_string(rank) + " (pid " +
         std::to_string(of_rank.pid.load(std::memory_order_relaxed)) + " on " +
         of_rank.host + ")";
}

std::string SharedJobState::Obstacle(int rank) const {
  return ObstacleOf(ProcessStateOf(rank));
}

char SharedJobState::ProcessStateOf(int rank) const {
  return ProcessState(block(rank).pid.load());
}

bool SharedJobState::HasShutDown(int rank) const {
  return block(rank).departure.load() == static_cast<uint32_t>(Departure::kShutDown);
}

bool SharedJobState::HasGone(int rank) const {
  const RankBlock& of_rank = block(rank);
  return of_rank.departure.load() != 0 || (of_rank.life.load() & FUTEX_OWNER_DIED) != 0;
}

void SharedJobState::ShutDown() {
  FaultPoint();
  self_.departure.store(static_cast<uint32_t>(Departure::kShutDown));
  RingAll();
}

std::string SharedJobState::HowItLeft(int rank) const {
  const char* how = block(rank).how_it_left;
  return how[0] == '\0' ? kUsualWayToLeave : how;
}

void SharedJobState::SayHowItLeaves(const std::string& how) {
  how.copy(self_.how_it_left, RankBlock::kHowBytes - 1);
}

int SharedJobState::DepartedAbove() const {
  const int leader = topology_.leader();
  if (rank() != leader && HasShutDown(leader)) return leader;
  return static_cast<int>(header_.departed_above.load()) - 1;
}

bool SharedJobState::has_departed() const { return self_.departure.load() != 0; }

uint64_t SharedJobState::CarriedOut(int rank) const {
  return block(rank).decisions_carried_out.value.load();
}

bool SharedJobState::HasLeftBefore(int rank, uint64_t decision) const {
  return HasShutDown(rank) && CarriedOut(rank) < decision;
}

void SharedJobState::NoteCarriedOut() {
  std::atomic<uint64_t>& count = self_.decisions_carried_out.value;
  count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

OperationHistory& SharedJobState::History(int rank) { return block(rank).history; }

// ---- Waking

void SharedJobState::RingLeader(uint32_t about) {
  block(topology_.leader()).bell.Ring(about);
}

void SharedJobState::RingAll() {
  for (int rank : topology_.local_ranks()) block(rank).bell.Ring();
}

void SharedJobState::WakeAll() {
  for (int rank : topology_.local_ranks()) {
    FaultPoint();
    block(rank).bell.Wake();
  }
}

// ---- What the coordinator says for all

bool SharedJobState::compares_outputs() const {
  return header_.check.load(std::memory_order_relaxed) != 0;
}

void SharedJobState::set_compares_outputs(bool compares) {
  header_.check.store(compares);
}

bool SharedJobState::WantsTimes() const {
  return header_.timeline_on.load(std::memory_order_relaxed) != 0 &&
         header_.timeline_paused.load(std::memory_order_relaxed) == 0;
}

void SharedJobState::set_timeline_on(bool on) { header_.timeline_on.store(on); }

void SharedJobState::set_timeline_paused(bool paused) {
  header_.timeline_paused.store(paused);
}

}  // namespace keras_hvd
