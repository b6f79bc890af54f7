#include "tf_ops/transport/hosts_job_state.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>

#include "tf_ops/transport/liveness.h"

namespace keras_hvd {
namespace {

// How long a leader that leaves waits until the leaders next to it know.
constexpr std::chrono::milliseconds kFarewell(500);

// How long an engine may take to say that it runs, and how often it is asked.
constexpr std::chrono::seconds kSignOfLife(2);
constexpr std::chrono::milliseconds kBetweenQuestions(500);

// How long to sleep at most while the hosts tell each other of a failure.
constexpr std::chrono::milliseconds kMoment(2);

// The coordinator's settings for all, as they travel.
struct Settings {
  int64_t exchange_bytes;
  uint32_t check, timeline_on, timeline_paused;
  uint32_t zeros = 0;
};

// A leader that has left, and how many decisions it has carried out, as it travels.
struct LeaderDeparture {
  int32_t leader;
  uint32_t zeros;
  uint64_t carried_out;
};

// Whether a rank's process runs, as it travels.
struct RankState {
  int32_t rank, process_state;
};

// A batch that a leader has carried out, as it travels, before the name. It has ages,
// since hosts' clocks differ.
struct BatchAccount {
  int32_t rank, kind, requests;
  uint32_t zeros;
  int64_t age_ns, duration_ns;
};
constexpr size_t kLongestName = 256;
// More than a coordinator gets between two looks, but no more than it can keep.
constexpr size_t kMostBatches = 4096;
// A time that is longer is nonsense.
constexpr int64_t kLongestNanoseconds = int64_t{1} << 53;

template <typename Value>
std::string AsBytes(const Value& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Takes a value off the front of a frame. Returns false if there is none.
template <typename Value>
bool Take(std::string_view* bytes, Value* value) {
  if (bytes->size() < sizeof(*value)) return false;
  memcpy(value, bytes->data(), sizeof(*value));
  bytes->remove_prefix(sizeof(*value));
  return true;
}

std::vector<ControlLink*> Borrow(
    const std::vector<std::unique_ptr<ControlLink>>& links) {
  std::vector<ControlLink*> borrowed;
  for (const auto& link : links) borrowed.push_back(link.get());
  return borrowed;
}

}  // namespace

HostsJobState::HostsJobState(std::shared_ptr<Segment> segment, Topology topology,
                             std::vector<RankName> names,
                             std::vector<std::unique_ptr<ControlLink>> links,
                             std::vector<std::unique_ptr<ControlLink>> failure_links,
                             std::chrono::seconds host_timeout)
    : JobState(segment, topology),
      names_(std::move(names)),
      exchange_bytes_(segment->exchange_bytes()),
      wave_(topology, this, Borrow(links), std::move(failure_links)) {
  for (auto& link : links) {
    const int host = topology.host_of(link->peer());
    Reachability reachability(link->socket(), host_timeout);
    reachability.KeepAsking();
    neighbors_.push_back({std::move(link), reachability, host == topology.parent()});
  }
}

// ---- The ranks

std::string HostsJobState::Describe(int rank) const {
  if (topology().is_local(rank)) return JobState::Describe(rank);
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(names_[rank].pid) +
         " on " + names_[rank].host + ")";
}

std::string HostsJobState::Obstacle(int rank) const {
  if (topology().is_local(rank)) return JobState::Obstacle(rank);
  const auto told = process_states_.find(rank);
  return told == process_states_.end() ? "" : ObstacleOf(told->second);
}

// Other hosts' leaders say for whom something waits; see CoordinatorService.
bool HostsJobState::HasShutDown(int rank) const {
  return topology().is_local(rank) && JobState::HasShutDown(rank);
}

bool HostsJobState::HasLeftBefore(int rank, uint64_t decision) const {
  if (topology().is_local(rank)) return JobState::HasLeftBefore(rank, decision);
  // The coordinator sees to ranks that are not above.
  const int above = HostsAbove(rank);
  if (above >= SegmentHeader::kMostAbove) return false;
  const uint64_t one_more = header().carried_out_above[above].load();
  return one_more > 0 && one_more <= decision;
}

// How many hosts are in the tree between this one and that of a leader above; many if
// the rank is no such leader.
int HostsJobState::HostsAbove(int rank) const {
  int above = 0;
  for (int host = topology().parent(); host >= 0; host = topology().parent_of(host)) {
    if (topology().leader_of(host) == rank) return above;
    ++above;
  }
  return std::numeric_limits<int>::max();
}

OperationHistory& HostsJobState::History(int rank) {
  if (topology().is_local(rank)) return JobState::History(rank);
  OperationHistory* const told = wave_.FindHistory(rank);
  return told == nullptr ? none_ : *told;
}

bool HostsJobState::HasHistory(int rank) const {
  return topology().is_local(rank) || wave_.FindHistory(rank) != nullptr;
}

std::string HostsJobState::HowItLeft(int rank) const {
  if (!topology().is_local(rank)) return kUsualWayToLeave;
  return JobState::HowItLeft(rank);
}

void HostsJobState::ShutDown() {
  JobState::ShutDown();
  const Clock::time_point deadline = Clock::now() + kFarewell;
  const LeaderDeparture departure = {rank(), 0, CarriedOut(rank())};
  QueueForAll(FrameType::kDeparture, AsBytes(departure), /*above=*/true);
  for (Neighbor& neighbor : neighbors_) neighbor.link->Finish(deadline);
  for (Neighbor& neighbor : neighbors_) neighbor.link->AwaitEnd(deadline);
}

void HostsJobState::AskForSigns() {
  const Clock::time_point now = Clock::now();
  for (Neighbor& neighbor : neighbors_) {
    const bool waits_for_answer = neighbor.asked_at != Clock::time_point::max();
    if (waits_for_answer || now < neighbor.next_question) continue;
    neighbor.asked_at = now;
    neighbor.next_question = now + kBetweenQuestions;
    neighbor.link->Queue(FrameType::kQuestion, "");
  }
}

bool HostsJobState::IsSilent(int rank) const {
  return std::any_of(neighbors_.begin(), neighbors_.end(), [&](const Neighbor& each) {
    return each.link->peer() == rank && each.asked_at < Clock::now() - kSignOfLife;
  });
}

void HostsJobState::GiveSign(Neighbor* asking) {
  std::string bytes;
  for (const int rank : topology().local_ranks()) {
    bytes += AsBytes(RankState{rank, ProcessStateOf(rank)});
  }
  asking->link->Queue(FrameType::kSign, bytes);
  if (asking->is_above) AskForSigns();
}

// Signs from below are for the coordinator, which reports the ranks that keep all
// waiting.
void HostsJobState::TakeSign(Neighbor* from, std::string_view bytes) {
  from->asked_at = Clock::time_point::max();
  std::string_view left = bytes;
  for (RankState told; Take(&left, &told);) {
    const bool is_elsewhere =
        told.rank >= 0 && told.rank < size() && !topology().is_local(told.rank);
    if (!is_elsewhere) return NoteNonsense(from);
    process_states_[told.rank] = static_cast<char>(told.process_state);
  }
  if (!from->is_above) QueueAbove(FrameType::kSign, bytes);
}

// ---- The coordinator's settings for all

void HostsJobState::NoteSettings() {
  settings_changed_.store(true);
  bell().Ring();
}

void HostsJobState::TellOfSettings() {
  if (!settings_changed_.exchange(false)) return;
  const SegmentHeader& now = header();
  const Settings settings = {exchange_bytes_, now.check.load(), now.timeline_on.load(),
                             now.timeline_paused.load()};
  QueueForAll(FrameType::kSettings, AsBytes(settings), /*above=*/false);
}

void HostsJobState::TakeSettings(Neighbor* from, std::string_view bytes) {
  Settings settings;
  if (!Take(&bytes, &settings) || !from->is_above) return NoteNonsense(from);
  // All hosts move tensors in windows of the same size.
  if (settings.exchange_bytes != exchange_bytes_) {
    Fail(Code::kInvalidArgument,
         "KERAS_HVD_EXCHANGE_BYTES must be the same on all hosts. It is " +
             std::to_string(settings.exchange_bytes) + " on " + names_[0].host +
             ", where rank 0 runs, and " + std::to_string(exchange_bytes_) + " on " +
             names_[rank()].host);
    return;
  }
  header().check.store(settings.check);
  header().timeline_on.store(settings.timeline_on);
  header().timeline_paused.store(settings.timeline_paused);
  QueueForAll(FrameType::kSettings, AsBytes(settings), /*above=*/false);
}

// ---- Batches that the hosts have carried out

void HostsJobState::TellOfBatch(BatchElsewhere batch) {
  if (!topology().is_leader() || !WantsTimes()) return;
  const BatchAccount account = {rank(),
                                batch.kind,
                                batch.requests,
                                0,
                                Nanoseconds(Clock::now() - batch.end),
                                Nanoseconds(batch.end - batch.begin)};
  QueueAbove(FrameType::kBatch, AsBytes(account) + batch.name.substr(0, kLongestName));
}

void HostsJobState::TakeBatch(Neighbor* from, std::string_view bytes) {
  BatchAccount account;
  const bool is_account =
      !from->is_above && Take(&bytes, &account) && account.rank >= 0 &&
      account.rank < size() && !topology().is_local(account.rank) &&
      account.requests > 0 && account.age_ns >= 0 &&
      account.age_ns < kLongestNanoseconds && account.duration_ns >= 0 &&
      account.duration_ns < kLongestNanoseconds && bytes.size() <= kLongestName;
  if (!is_account) return NoteNonsense(from);
  const std::chrono::nanoseconds age(account.age_ns), duration(account.duration_ns);
  const Clock::time_point end = from->link->sent_at() - age;
  if (!is_coordinator()) {
    account.age_ns = Nanoseconds(Clock::now() - end);
    return QueueAbove(FrameType::kBatch, AsBytes(account) + std::string(bytes));
  }
  if (batches_.size() >= kMostBatches) return;
  BatchElsewhere& batch = batches_.emplace_back();
  batch.rank = account.rank;
  batch.kind = account.kind;
  batch.requests = account.requests;
  batch.name = bytes;
  batch.end = end;
  batch.begin = end - duration;
}

std::vector<BatchElsewhere> HostsJobState::TakeBatches() {
  return std::exchange(batches_, {});
}

// ---- Before a leader leaves

std::vector<int> HostsJobState::Behind(uint64_t decisions) {
  std::vector<int> behind;
  for (int rank : topology().local_ranks()) {
    if (!HasShutDown(rank) && CarriedOut(rank) < decisions) behind.push_back(rank);
  }
  for (Neighbor& below : neighbors_) {
    if (below.is_above) continue;
    if (std::exchange(below.asked_about, decisions) != decisions) {
      below.link->Queue(FrameType::kCarriedOut, AsBytes(decisions));
    }
    // One that leaves has waited for those below it.
    if (below.carried_out >= decisions || below.has_departed) continue;
    behind.push_back(below.link->peer());
  }
  return behind;
}

void HostsJobState::AnswerAbove() {
  QueueAbove(FrameType::kCarriedOut, AsBytes(std::exchange(asked_about_, 0)));
}

void HostsJobState::TakeCarriedOut(Neighbor* from, std::string_view bytes) {
  uint64_t decisions;
  if (!Take(&bytes, &decisions)) return NoteNonsense(from);
  (from->is_above ? asked_about_ : from->carried_out) = decisions;
}

// ---- Failure

// The others of a host that has lost its leader say how it ended.
bool HostsJobState::IsReported(const Neighbor& neighbor, Clock::time_point now) const {
  const int host = topology().host_of(neighbor.link->peer());
  return !neighbor.IsUnreachable() && !neighbor.link->has_refused() &&
         wave_.HasOthers(host) && now < neighbor.lost_at + FailureWave::kSuccession;
}

void HostsJobState::NoteLost(Neighbor* neighbor, Clock::time_point now) {
  if (!std::exchange(neighbor->is_lost, true)) {
    neighbor->lost_at = now;
    const int host = topology().host_of(neighbor->link->peer());
    if (neighbor->IsUnreachable()) wave_.NoteUnreachable(host);
  }
  if (neighbor->has_departed || has_departed() || Failed()) return;
  if (IsReported(*neighbor, now)) return;
  const int leader = neighbor->link->peer();
  // The same text on all hosts that notice.
  std::string text = Describe(leader);
  if (neighbor->IsUnreachable()) {
    const auto limit = neighbor->reachability.limit().count();
    text += " cannot be reached: nothing has come from its host for " +
            std::to_string(limit) +
            " s. See whether that host runs, and whether the network to it works";
  } else if (neighbor->link->has_refused()) {
    text +=
        " has sent " + Describe(rank()) +
        " something else than keras_hvd's messages: " + neighbor->link->why_closed();
  } else {
    text += " has gone without a word: its connections to other hosts have ended";
  }
  Fail(Code::kRankFailed, text, leader);
}

void HostsJobState::NoteNonsense(Neighbor* from) {
  from->is_lost = true;
  Fail(Code::kInternal, Describe(from->link->peer()) + " has sent " + Describe(rank()) +
                            " something else than keras_hvd's messages");
}

// Passes the time until other ranks have something to say.
void HostsJobState::AwaitOthers() {
  bell().Announce();
  if (!Poll()) bell().Sleep(Clock::now() + kMoment);
  bell().Cancel();
}

void HostsJobState::AwaitAllKnow() {
  while (Failed() && !wave_.AllKnow(Clock::now())) AwaitOthers();
}

// The rank that speaks for the topmost host reports.
bool HostsJobState::ClaimFailureReport() {
  while (Failed() && wave_.IsTop() && !wave_.AllKnow(Clock::now())) AwaitOthers();
  return wave_.Reports() && JobState::ClaimFailureReport();
}

// ---- Neighbors

void HostsJobState::QueueForAll(FrameType type, std::string_view bytes, bool above) {
  for (Neighbor& neighbor : neighbors_) {
    if (!neighbor.is_above || above) neighbor.link->Queue(type, bytes);
  }
}

void HostsJobState::QueueAbove(FrameType type, std::string_view bytes) {
  for (Neighbor& neighbor : neighbors_) {
    if (neighbor.is_above) neighbor.link->Queue(type, bytes);
  }
}

bool HostsJobState::Poll() {
  bool progressed = false;
  const Clock::time_point now = Clock::now();
  TellOfSettings();
  for (Neighbor& neighbor : neighbors_) {
    progressed |= neighbor.link->Receive();
    FrameType type;
    std::string_view bytes;
    while (neighbor.link->Next(&type, &bytes)) TakeFrame(&neighbor, type, bytes);
    const bool closed = !neighbor.link->why_closed().empty();
    if (closed || neighbor.reachability.IsLost(now)) NoteLost(&neighbor, now);
  }
  if (has_failure_news_.exchange(false) || Failed()) progressed |= wave_.Receive();
  if (Failed()) wave_.Continue(now);
  for (Neighbor& neighbor : neighbors_) neighbor.link->Flush();
  return progressed;
}

Clock::time_point HostsJobState::NextPoll() const {
  const Clock::time_point now = Clock::now();
  if (Failed()) {
    return wave_.AllKnow(now) ? Clock::time_point::max() : now + kMoment;
  }
  Clock::time_point next = Clock::time_point::max();
  // Nobody rings when a rank has carried out a decision.
  if (asked_about_ > 0) next = now + kMoment;
  for (const Neighbor& neighbor : neighbors_) {
    if (neighbor.is_lost) {
      // Until somebody has said why, or the next Poll does.
      const bool is_expected = neighbor.has_departed || has_departed();
      if (!is_expected) next = std::min(next, now + kMoment);
    } else if (neighbor.reachability.awaits_answer()) {
      // The kernel does not ask while bytes are on their way.
      next = std::min(next, now + Reachability::kInterval);
    }
  }
  return next;
}

void HostsJobState::TakeFrame(Neighbor* from, FrameType type, std::string_view bytes) {
  switch (type) {
    case FrameType::kSubmission:
    case FrameType::kDecision:
      if (from->is_above != (type == FrameType::kDecision)) return NoteNonsense(from);
      from->inbox.push_back({std::string(bytes), from->link->sent_at()});
      return;
    case FrameType::kFailure:
    case FrameType::kKnown:
    case FrameType::kAllKnow: return wave_.Take(from->link.get(), type, bytes);
    case FrameType::kQuestion: return GiveSign(from);
    case FrameType::kSign: return TakeSign(from, bytes);
    case FrameType::kSettings: return TakeSettings(from, bytes);
    case FrameType::kDeparture: return TakeDeparture(from, bytes);
    case FrameType::kBatch: return TakeBatch(from, bytes);
    case FrameType::kCarriedOut: return TakeCarriedOut(from, bytes);
  }
}

// A leader above that leaves cuts off all hosts below. One below has told already, in
// its submissions, of whom it cuts off.
void HostsJobState::TakeDeparture(Neighbor* from, std::string_view bytes) {
  LeaderDeparture departure;
  const bool is_one = Take(&bytes, &departure) && departure.leader >= 0 &&
                      departure.leader < size() &&
                      !topology().is_local(departure.leader);
  if (!is_one) return NoteNonsense(from);
  if (departure.leader == from->link->peer()) {
    from->has_departed = true;
    from->link->Finish(Clock::now());
  }
  if (!from->is_above) return;
  from->departed_above.emplace_back(departure.leader, departure.carried_out);
}

bool HostsJobState::PassOnDepartures() {
  const auto above = std::find_if(neighbors_.begin(), neighbors_.end(),
                                  [](const Neighbor& each) { return each.is_above; });
  if (above == neighbors_.end()) return false;
  // Ranks that wait for an earlier decision must get it first.
  if (above->departed_above.empty() || !above->inbox.empty()) return false;
  for (const auto& [leader, carried_out] : above->departed_above) {
    const LeaderDeparture departure = {leader, 0, carried_out};
    const int hosts_above = HostsAbove(leader);
    if (hosts_above < SegmentHeader::kMostAbove) {
      header().carried_out_above[hosts_above].store(carried_out + 1);
    }
    header().departed_above.store(leader + 1);
    QueueForAll(FrameType::kDeparture, AsBytes(departure), /*above=*/false);
  }
  above->departed_above.clear();
  RingAll();
  return true;
}

}  // namespace keras_hvd
