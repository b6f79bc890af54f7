// One rank's view of the ranks that take part in a collective across several hosts.
//
// Ranks of one host meet in shared memory, as in any collective; those of different
// hosts have a connection for every two of them. Bytes travel without headers, since
// all members run the same collectives in the same order.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "tf_ops/collectives/communicator.h"
#include "tf_ops/transport/data_link.h"
#include "tf_ops/transport/job_state.h"
#include "tf_ops/transport/segment.h"
#include "tf_ops/transport/topology.h"

namespace keras_hvd {

class HostsCommunicator : private Waiter {
 public:
  // `links`: one to each rank on another host. The segment is this host's; all hosts
  // have the same amount of exchange memory.
  HostsCommunicator(const Topology& topology, std::shared_ptr<Segment> segment,
                    std::shared_ptr<JobState> job, DataLinks links, Waiter* waiter);

  // As those of Communicator. The members may all be on this host.
  bool Begin(const std::vector<int>& members, uint64_t sequence);
  bool BeginAgain() { return local_.BeginAgain(); }
  void End() { local_.End(); }

  int count() const { return static_cast<int>(members_.size()); }
  // This rank's index among the members.
  int index() const { return index_; }

  // The members on this host.
  Communicator& local() { return local_; }
  const Communicator& local() const { return local_; }
  bool NextRound() { return local_.NextRound(); }
  bool Regroup() { return local_.Regroup(); }

  // ---- The hosts of the members, from 0 in the order of their numbers

  int hosts() const { return static_cast<int>(members_of_.size()); }
  // This rank's host.
  int host() const { return host_of_[index_]; }
  // The host that comes `steps` after this one, in a circle.
  int host_after(int steps) const { return (host() + steps) % hosts(); }
  int host_of(int member) const { return host_of_[member]; }
  // The members on a host, ascending.
  const std::vector<int>& members_of(int host) const { return members_of_[host]; }
  // A member's place among those of its host.
  int place_of(int member) const { return place_of_[member]; }
  // A lane has a member on each host: lane n has the n-th. Members may be left over.
  int lanes() const { return lanes_; }
  // The member of `host` that exchanges data with `member`.
  int Counterpart(int member, int host) const {
    const std::vector<int>& there = members_of_[host];
    return there[place_of_[member] % there.size()];
  }

  // ---- Transfers to and from members on other hosts; see DataLink

  void BeginSend(int member, int64_t bytes) { LinkOf(member).BeginSend(bytes); }
  void BeginReceive(int member, int64_t bytes) { LinkOf(member).BeginReceive(bytes); }
  int64_t Send(int member, const void* data, int64_t bytes);
  int64_t Receive(int member, void* data, int64_t bytes);
  // As Send and Receive, but not before `received(awaited)` has come to `end`. Such
  // sends keep their order, and so do such receives.
  int64_t SendAfter(int awaited, int64_t end, int member, const void* data,
                    int64_t bytes);
  int64_t ReceiveAfter(int awaited, int64_t end, int member, void* data, int64_t bytes);
  // Moves the bytes that can be moved by now. If there are other hosts, all waits do so
  // too, those of `local` as well.
  void Progress();
  // Wait for all posted transfers, or for those to or from one member up to a return
  // value of Send or Receive. Return false if the job has failed.
  bool AwaitSent();
  bool AwaitReceived();
  bool AwaitSent(int member, int64_t end);
  bool AwaitReceived(int member, int64_t end);
  // The bytes that have come from a member, as Receive counts them.
  int64_t received(int member) const { return LinkOf(member).received(); }
  // Forgets all transfers; none is possible any more. For a job that has failed.
  void Abandon();

  // Memory of this rank alone, aligned to a cache line, until the next call.
  char* Scratch(int64_t bytes);

 private:
  bool Wait(const std::function<bool()>& ready, int awaited) override;
  bool Poll(const std::function<bool()>& ready, int awaited) override {
    return waiter_->Poll(ready, awaited);
  }
  bool Pause(int64_t times) override { return waiter_->Pause(times); }

  // A transfer that waits for its turn.
  template <typename Data>
  struct Held {
    int awaited;
    int64_t end;
    int member;
    Data* data;
    int64_t bytes;
  };
  template <typename Data>
  struct HeldTransfers {
    std::deque<Held<Data>> queue;
    std::vector<int64_t> bytes;  // by member
  };

  void Divide(const std::vector<int>& members);
  void Activate(int member);
  template <typename Data>
  int64_t Hold(const Held<Data>& held, HeldTransfers<Data>* transfers);
  template <typename Data>
  bool MayGo(const HeldTransfers<Data>& transfers) const;
  template <typename Data>
  bool AwaitAll(const HeldTransfers<Data>& held, bool (DataLink::*waits)() const);
  void PostReceives();
  void PostSends();
  void MoveOn(int member);
  DataLink& LinkOf(int member) const { return *links_[members_[member]]; }
  bool AwaitLink(int member, const std::function<bool()>& ready);
  bool IsPolled() const;
  void CheckPeers();
  void ReportClosed(int member);
  std::string WhyClosed(int rank) const;

  const Topology topology_;
  const std::shared_ptr<JobState> job_;
  const DataLinks links_;
  Waiter* const waiter_;
  Communicator local_;
  Clock::time_point next_check_;  // of the peers
  std::unique_ptr<char, decltype(&free)> scratch_{nullptr, free};
  int64_t scratch_bytes_ = 0;

  // Of the current collective.
  std::vector<int> members_;
  int index_ = 0;
  std::vector<int> host_of_, place_of_;  // by member
  std::vector<std::vector<int>> members_of_;
  std::vector<int> remote_;       // the members on other hosts
  std::vector<int> active_;       // those of them with transfers that may not be over
  std::vector<bool> is_active_;   // by member
  std::vector<int> local_ranks_;  // those of the members on this host
  int lanes_ = 0;
  int64_t moved_ = 0;  // bytes to and from members on other hosts
  int closed_ = -1;    // a member whose link has ended with transfers that are not over
  HeldTransfers<const void> held_sends_;
  HeldTransfers<void> held_receives_;
};

}  // namespace keras_hvd
