// For tests of backends across hosts: ranks as threads, with a segment for each host
// and pairs of sockets, or an MPI, between every two ranks of different hosts.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tf_ops/backend/hosts_backend.h"
#include "tf_ops/collectives/testing.h"
#include "tf_ops/transport/job_state.h"
#include "tf_ops/transport/mpi_data_link.h"
#include "tf_ops/transport/mpi_testing.h"
#include "tf_ops/transport/socket_data_link.h"

namespace keras_hvd {

// Lets other threads run until the peer is ready or the job has failed.
class JobWaiter final : public Waiter {
 public:
  explicit JobWaiter(std::shared_ptr<JobState> job) : job_(std::move(job)) {}

  bool Wait(const std::function<bool()>& ready, int awaited) override {
    const Clock::time_point end = Clock::now() + std::chrono::seconds(60);
    for (int64_t times = 0; !ready(); ++times) {
      if (job_->Failed()) return false;
      if (times % 64 == 0 && Clock::now() > end) {
        job_->Fail(Code::kInternal, "rank " + std::to_string(job_->rank()) +
                                        " waits forever for rank " +
                                        std::to_string(awaited));
        ADD_FAILURE() << job_->Failure().message;
        return false;
      }
      sched_yield();
    }
    return true;
  }
  bool Poll(const std::function<bool()>& ready, int awaited) override {
    return Wait(ready, awaited);
  }
  bool Pause(int64_t) override {
    sched_yield();
    return !job_->Failed();
  }

 private:
  const std::shared_ptr<JobState> job_;
};

enum class Carrier { kSockets, kMpiWithInts, kMpiWithPointers };

struct HostsOptions {
  int64_t exchange_bytes = kTinyExchange;
  int socket_bytes = 0;  // of each socket's buffers; 0: the system's choice
  int connections = 1;   // of each link
  Carrier carrier = Carrier::kSockets;
};

// The ranks of a job; `hosts` says on which host each rank is.
class HostsJob {
 public:
  explicit HostsJob(const std::vector<int>& hosts, const HostsOptions& options = {})
      : size_(static_cast<int>(hosts.size())), topology_(0, hosts) {
    EXPECT_TRUE(Segment::CreateLocal(size_, 0, &job_segment_).ok());
    segments_.resize(topology_.hosts());
    for (int host = 0; host < topology_.hosts(); ++host) {
      const int ranks = static_cast<int>(topology_.ranks_of(host).size());
      EXPECT_TRUE(
          Segment::CreateLocal(ranks, options.exchange_bytes, &segments_[host]).ok());
    }
    std::vector<DataLinks> links(size_, DataLinks(size_));
    for (int a = 0; a < size_; ++a) {
      if (options.carrier != Carrier::kSockets) ConnectByMpi(options, a, &links[a]);
      for (int b = a + 1; b < size_; ++b) {
        if (hosts[a] == hosts[b] || options.carrier != Carrier::kSockets) continue;
        for (int number = 0; number < options.connections; ++number) {
          Connect(options, &links[a][b], &links[b][a]);
        }
      }
    }
    for (const DataLinks& of_rank : links) {
      links_.emplace_back(of_rank.begin(), of_rank.end());
    }
    for (int rank = 0; rank < size_; ++rank) {
      jobs_.push_back(std::make_shared<JobState>(job_segment_, rank));
      waiters_.push_back(std::make_unique<JobWaiter>(jobs_.back()));
      backends_.push_back(std::make_unique<HostsBackend>(
          Topology(rank, hosts), segments_[topology_.host_of(rank)], jobs_.back(),
          std::move(links[rank]), waiters_.back().get()));
    }
  }

  int size() const { return size_; }
  const Topology& topology() const { return topology_; }
  JobState& job(int rank) { return *jobs_[rank]; }
  CollectiveBackend& backend(int rank) { return *backends_[rank]; }
  RankBlock& block(int rank) {
    return segments_[topology_.host_of(rank)]->block(topology_.local_index(rank));
  }
  // The bytes that a rank has sent to another one so far.
  int64_t Sent(int rank, int peer) const { return links_[rank][peer].lock()->sent(); }
  // Ends a rank as its process's death would: its connections close.
  void Kill(int rank) { backends_[rank].reset(); }

  std::vector<int> all() const {
    std::vector<int> ranks(size_);
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  // Runs `body` on each of these ranks at once.
  void RunThreads(const std::vector<int>& ranks, const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank : ranks) threads.emplace_back([&, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  }

  // Runs `body` between Begin and End on every member.
  void Run(const std::vector<int>& members,
           const std::function<void(int rank, CollectiveBackend*)>& body) {
    ++sequence_;
    RunThreads(members, [&](int rank) {
      EXPECT_TRUE(backend(rank).Begin(members, sequence_));
      body(rank, &backend(rank));
      backend(rank).End();
    });
  }

 private:
  void ConnectByMpi(const HostsOptions& options, int rank, DataLinks* links) {
    const auto mpi = std::make_shared<Mpi>(options.carrier == Carrier::kMpiWithInts
                                               ? mpi_.OptionsOf<int>(rank)
                                               : mpi_.OptionsOf<void*>(rank));
    for (int peer = 0; peer < size_; ++peer) {
      if (topology_.host_of(peer) == topology_.host_of(rank)) continue;
      (*links)[peer] = std::make_shared<MpiDataLink>(mpi, peer);
    }
  }

  static void Connect(const HostsOptions& options, std::shared_ptr<DataLink>* a,
                      std::shared_ptr<DataLink>* b) {
    int sockets[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    for (int socket : sockets) {
      const int bytes = options.socket_bytes;
      if (bytes == 0) continue;
      setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
      setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof(bytes));
    }
    Add(sockets[0], a);
    Add(sockets[1], b);
  }

  static void Add(int socket, std::shared_ptr<DataLink>* link) {
    if (*link != nullptr) {
      return std::static_pointer_cast<SocketDataLink>(*link)->Add(socket);
    }
    *link = std::make_shared<SocketDataLink>(socket);
  }

  const int size_;
  const Topology topology_;
  MpiStandIn mpi_;
  std::shared_ptr<Segment> job_segment_;
  std::vector<std::shared_ptr<Segment>> segments_;  // by host
  std::vector<std::shared_ptr<JobState>> jobs_;
  std::vector<std::unique_ptr<JobWaiter>> waiters_;
  std::vector<std::unique_ptr<HostsBackend>> backends_;
  std::vector<std::vector<std::weak_ptr<DataLink>>> links_;  // which the backends own
  uint64_t sequence_ = 0;
};

}  // namespace keras_hvd
