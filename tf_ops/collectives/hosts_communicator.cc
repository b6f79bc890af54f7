// See hosts_communicator.h.
#include "tf_ops/collectives/hosts_communicator.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <utility>

namespace keras_hvd {
namespace {

// How long a rank whose connection has ended waits to hear the reason: the host at the
// other end knows better why a rank has gone.
constexpr std::chrono::seconds kPatience(1);

constexpr int64_t kLine = 64;

// Where so many bytes come while a waiter spins, the next soon follow: sleeping until
// each is there would take longer than the bytes themselves.
constexpr int64_t kWorthSpinning = 32 << 10;

}  // namespace

HostsCommunicator::HostsCommunicator(const Topology& topology,
                                     std::shared_ptr<Segment> segment,
                                     std::shared_ptr<JobState> job, DataLinks links,
                                     Waiter* waiter)
    : topology_(topology),
      job_(std::move(job)),
      links_(std::move(links)),
      waiter_(waiter),
      local_(std::move(segment), topology, this) {}

bool HostsCommunicator::Begin(const std::vector<int>& members, uint64_t sequence) {
  if (members != members_) Divide(members);
  return local_.Begin(local_ranks_, sequence);
}

void HostsCommunicator::Divide(const std::vector<int>& members) {
  members_ = members;
  held_bytes_.assign(count(), 0);
  std::vector<std::vector<int>> by_number(topology_.hosts());
  for (int member = 0; member < count(); ++member) {
    by_number[topology_.host_of(members[member])].push_back(member);
  }
  members_of_.clear();
  host_of_.assign(count(), 0);
  place_of_.assign(count(), 0);
  remote_.clear();
  local_ranks_.clear();
  lanes_ = count();
  for (std::vector<int>& of_host : by_number) {
    if (of_host.empty()) continue;
    for (size_t place = 0; place < of_host.size(); ++place) {
      const int member = of_host[place];
      host_of_[member] = hosts();
      place_of_[member] = static_cast<int>(place);
      const int rank = members[member];
      if (rank == topology_.rank()) index_ = member;
      if (topology_.is_local(rank)) {
        local_ranks_.push_back(rank);
      } else {
        remote_.push_back(member);
      }
    }
    lanes_ = std::min(lanes_, static_cast<int>(of_host.size()));
    members_of_.push_back(std::move(of_host));
  }
}

int64_t HostsCommunicator::Send(int member, const void* data, int64_t bytes) {
  return LinkOf(member).Send(data, bytes);
}

int64_t HostsCommunicator::Receive(int member, void* data, int64_t bytes) {
  return LinkOf(member).Receive(data, bytes);
}

int64_t HostsCommunicator::SendAfter(int awaited, int64_t end, int member,
                                     const void* data, int64_t bytes) {
  if (held_.empty() && received(awaited) >= end) return Send(member, data, bytes);
  held_.push_back({awaited, end, member, data, bytes});
  held_bytes_[member] += bytes;
  return LinkOf(member).to_send() + held_bytes_[member];
}

void HostsCommunicator::Progress() {
  for (int member : remote_) LinkOf(member).Progress();
  const auto may_go = [this] {
    return !held_.empty() && received(held_.front().awaited) >= held_.front().end;
  };
  while (may_go()) {
    const int member = held_.front().member;
    // All pieces of a turn, before any is sent.
    for (; may_go() && held_.front().member == member; held_.pop_front()) {
      const Held& next = held_.front();
      Send(member, next.data, next.bytes);
      held_bytes_[member] -= next.bytes;
    }
    LinkOf(member).Progress();
  }
}

bool HostsCommunicator::AwaitSent() {
  for (int member : remote_) {
    const auto ready = [&] { return held_.empty() && !LinkOf(member).sends(); };
    if (!AwaitLink(member, ready)) return false;
  }
  return true;
}

bool HostsCommunicator::AwaitReceived() {
  for (int member : remote_) {
    const auto ready = [&link = LinkOf(member)] { return !link.receives(); };
    if (!AwaitLink(member, ready)) return false;
  }
  return true;
}

bool HostsCommunicator::AwaitSent(int member, int64_t end) {
  return AwaitLink(member,
                   [&link = LinkOf(member), end] { return link.sent() >= end; });
}

bool HostsCommunicator::AwaitReceived(int member, int64_t end) {
  return AwaitLink(member,
                   [&link = LinkOf(member), end] { return link.received() >= end; });
}

bool HostsCommunicator::AwaitLink(int member, const std::function<bool()>& ready) {
  if (ready()) return true;
  const DataLink& link = LinkOf(member);
  const auto ended = [&] { return ready() || link.closed(); };
  local_.Enter(CollectivePhase::kExchange);
  const bool ok = Wait(ended, members_[member]);
  local_.Enter(CollectivePhase::kNone);
  if (!ok || ready()) return ok;
  ReportClosed(member);
  return false;
}

// A host that has vanished says nothing of it.
void HostsCommunicator::CheckPeers() {
  const Clock::time_point now = Clock::now();
  if (now < next_check_) return;
  next_check_ = now + Reachability::kInterval;
  for (int member : remote_) LinkOf(member).CheckPeer(now);
}

void HostsCommunicator::ReportClosed(int member) {
  const int rank = members_[member];
  const Clock::time_point end = Clock::now() + kPatience;
  const auto ready = [&] { return job_->Failed() || Clock::now() >= end; };
  if (Wait(ready, rank) && !job_->Failed()) {
    job_->Fail(Code::kRankFailed, WhyClosed(rank));
  }
  Abandon();
}

std::string HostsCommunicator::WhyClosed(int rank) const {
  const DataLink& link = *links_[rank];
  if (!link.is_unreachable()) {
    return "the connection to " + job_->Describe(rank) +
           " has ended: " + link.why_closed();
  }
  // Both ends say the same.
  const int one = topology_.leader(),
            other = topology_.leader_of(topology_.host_of(rank));
  return "the hosts of " + job_->Describe(std::min(one, other)) + " and " +
         job_->Describe(std::max(one, other)) +
         " do not reach each other, though both reach others: nothing has come from "
         "one "
         "to the other for " +
         std::to_string(link.limit().count()) +
         " s. See whether the network between "
         "these two works";
}

void HostsCommunicator::Abandon() {
  held_.clear();
  for (int member : remote_) LinkOf(member).Abandon();
}

// A rank that waits for one of its host may have in its hands what that one waits for.
// While bytes flow the waiter begins anew, and so spins.
bool HostsCommunicator::Wait(const std::function<bool()>& ready, int awaited) {
  int64_t before = 0;
  const auto flows_or_ready = [&] {
    if (ready()) return true;
    Progress();
    CheckPeers();
    return Moved() - before >= kWorthSpinning || ready();
  };
  const auto wait = IsPolled() ? &Waiter::Poll : &Waiter::Wait;
  while (!ready()) {
    before = Moved();
    if ((waiter_->*wait)(flows_or_ready, awaited)) continue;
    Abandon();
    return false;
  }
  return true;
}

int64_t HostsCommunicator::Moved() const {
  int64_t moved = 0;
  for (int member : remote_) moved += LinkOf(member).sent() + LinkOf(member).received();
  return moved;
}

// Whether something is on its way that wakes nobody when it comes.
bool HostsCommunicator::IsPolled() const {
  return std::any_of(remote_.begin(), remote_.end(), [this](int member) {
    const DataLink& link = LinkOf(member);
    return !link.wakes() && (link.sends() || link.receives());
  });
}

char* HostsCommunicator::Scratch(int64_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_bytes_ = (bytes + kLine - 1) / kLine * kLine;
    scratch_.reset(static_cast<char*>(aligned_alloc(kLine, scratch_bytes_)));
    if (scratch_ == nullptr) throw std::bad_alloc();
  }
  return scratch_.get();
}

}  // namespace keras_hvd
