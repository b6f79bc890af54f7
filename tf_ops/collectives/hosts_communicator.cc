#include "tf_ops/collectives/hosts_communicator.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <string>
#include <utility>

#include "tf_ops/collectives/processor.h"

namespace keras_hvd {

// How long a rank whose connection has ended waits to hear the reason: the host at the
// other end knows better why a rank has gone.
constexpr std::chrono::seconds kPatience(1);

// If this many bytes come while a waiter spins, the next soon follow. Sleeping until
// each is there would take longer than the bytes themselves.
constexpr int64_t kWorthSpinning = 32 << 10;

HostsCommunicator::HostsCommunicator(const Topology& topology,
                                     std::shared_ptr<Segment> segment,
                                     std::shared_ptr<JobState> job, DataLinks links,
                                     Waiter* waiter)
    : topology_(topology),
      job_(std::move(job)),
      links_(std::move(links)),
      waiter_(waiter),
      // Where there are no connections, nothing has to move while a rank waits.
      local_(std::move(segment), topology, topology.hosts() > 1 ? this : waiter) {}

bool HostsCommunicator::Begin(const std::vector<int>& members, uint64_t sequence) {
  if (members != members_) Divide(members);
  closed_ = -1;
  return local_.Begin(local_ranks_, sequence);
}

void HostsCommunicator::Divide(const std::vector<int>& members) {
  members_ = members;
  held_sends_.bytes.assign(count(), 0);
  held_receives_.bytes.assign(count(), 0);
  active_.clear();
  is_active_.assign(count(), false);
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
  Activate(member);
  return LinkOf(member).Send(data, bytes);
}

int64_t HostsCommunicator::Receive(int member, void* data, int64_t bytes) {
  Activate(member);
  return LinkOf(member).Receive(data, bytes);
}

void HostsCommunicator::Activate(int member) {
  if (is_active_[member]) return;
  is_active_[member] = true;
  active_.push_back(member);
}

int64_t HostsCommunicator::SendAfter(int awaited, int64_t end, int member,
                                     const void* data, int64_t bytes) {
  if (held_sends_.queue.empty() && received(awaited) >= end) {
    return Send(member, data, bytes);
  }
  return LinkOf(member).to_send() +
         Hold({awaited, end, member, data, bytes}, &held_sends_);
}

int64_t HostsCommunicator::ReceiveAfter(int awaited, int64_t end, int member,
                                        void* data, int64_t bytes) {
  if (held_receives_.queue.empty() && received(awaited) >= end) {
    return Receive(member, data, bytes);
  }
  return LinkOf(member).to_receive() +
         Hold({awaited, end, member, data, bytes}, &held_receives_);
}

// Returns how many bytes are held for the same member.
template <typename Data>
int64_t HostsCommunicator::Hold(const Held<Data>& held,
                                HeldTransfers<Data>* transfers) {
  transfers->queue.push_back(held);
  return transfers->bytes[held.member] += held.bytes;
}

template <typename Data>
bool HostsCommunicator::MayGo(const HeldTransfers<Data>& transfers) const {
  return !transfers.queue.empty() &&
         received(transfers.queue.front().awaited) >= transfers.queue.front().end;
}

// Of thousands of links, few have anything to do.
void HostsCommunicator::Progress() {
  size_t left = 0;
  for (size_t i = 0; i < active_.size(); ++i) {
    const int member = active_[i];
    MoveOn(member);
    const DataLink& link = LinkOf(member);
    is_active_[member] = link.sends() || link.receives();
    if (is_active_[member]) active_[left++] = member;
  }
  active_.resize(left);
  while (MayGo(held_receives_) || MayGo(held_sends_)) {
    PostReceives();
    PostSends();
  }
}

void HostsCommunicator::PostSends() {
  while (MayGo(held_sends_)) {
    const int member = held_sends_.queue.front().member;
    // All pieces of a turn, before any is sent.
    for (; MayGo(held_sends_) && held_sends_.queue.front().member == member;
         held_sends_.queue.pop_front()) {
      const Held<const void>& next = held_sends_.queue.front();
      Send(member, next.data, next.bytes);
      held_sends_.bytes[member] -= next.bytes;
    }
    MoveOn(member);
  }
}

// The bytes that have come before may be all that a link brings, so nothing would
// announce them later.
void HostsCommunicator::PostReceives() {
  for (; MayGo(held_receives_); held_receives_.queue.pop_front()) {
    const Held<void>& next = held_receives_.queue.front();
    Receive(next.member, next.data, next.bytes);
    held_receives_.bytes[next.member] -= next.bytes;
    MoveOn(next.member);
  }
}

void HostsCommunicator::MoveOn(int member) {
  DataLink& link = LinkOf(member);
  const int64_t before = link.sent() + link.received();
  link.Progress();
  moved_ += link.sent() + link.received() - before;
  if (link.closed()) closed_ = member;
}

bool HostsCommunicator::AwaitSent() { return AwaitAll(held_sends_, &DataLink::sends); }

bool HostsCommunicator::AwaitReceived() {
  return AwaitAll(held_receives_, &DataLink::receives);
}

template <typename Data>
bool HostsCommunicator::AwaitAll(const HeldTransfers<Data>& held,
                                 bool (DataLink::*waits)() const) {
  const auto all_begun = [&held] { return held.queue.empty(); };
  if (!all_begun() && !AwaitLink(held.queue.back().member, all_begun)) return false;
  for (int member : std::vector<int>(active_)) {
    const auto ready = [&link = LinkOf(member), waits] { return !(link.*waits)(); };
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

// The awaited bytes may never be posted because of another link that has ended.
bool HostsCommunicator::AwaitLink(int member, const std::function<bool()>& ready) {
  if (ready()) return true;
  const DataLink& link = LinkOf(member);
  const auto ended = [&] { return ready() || link.closed() || closed_ >= 0; };
  local_.Enter(CollectivePhase::kExchange);
  const bool ok = Wait(ended, members_[member]);
  local_.Enter(CollectivePhase::kNone);
  if (!ok || ready()) return ok;
  ReportClosed(link.closed() ? member : closed_);
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
  held_sends_.queue.clear();
  held_receives_.queue.clear();
  active_.clear();
  is_active_.assign(count(), false);
  for (int member : remote_) LinkOf(member).Abandon();
}

// A rank that waits for another of its host may hold the bytes that the other waits
// for. While bytes flow the waiter begins anew, and so spins.
bool HostsCommunicator::Wait(const std::function<bool()>& ready, int awaited) {
  int64_t before = 0;
  const auto flows_or_ready = [&] {
    if (ready()) return true;
    const int64_t last = moved_;
    Progress();
    CheckPeers();
    // Ranks of another host may share this one's core, which nobody here can know.
    if (moved_ == last) sched_yield();
    return moved_ - before >= kWorthSpinning || ready();
  };
  const auto wait = IsPolled() ? &Waiter::Poll : &Waiter::Wait;
  while (!ready()) {
    before = moved_;
    if ((waiter_->*wait)(flows_or_ready, awaited)) continue;
    Abandon();
    return false;
  }
  return true;
}

// Whether something is on its way that wakes nobody when it comes.
bool HostsCommunicator::IsPolled() const {
  return std::any_of(active_.begin(), active_.end(), [this](int member) {
    const DataLink& link = LinkOf(member);
    return !link.wakes() && (link.sends() || link.receives());
  });
}

char* HostsCommunicator::Scratch(int64_t bytes) {
  if (bytes > scratch_bytes_) {
    scratch_bytes_ = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    scratch_.reset(static_cast<char*>(aligned_alloc(kCacheLine, scratch_bytes_)));
    if (scratch_ == nullptr) throw std::bad_alloc();
  }
  return scratch_.get();
}

}  // namespace keras_hvd
