// Brings the ranks of a host together and sets up their shared memory.
//
// Rank 0 listens on an abstract unix socket named after the job and the user, which
// leaves no file behind. Every other rank connects, says who it is, and receives the
// shared memory's descriptor. The connections stay open: an end of file means a death.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tf_ops/transport/doorbell.h"
#include "tf_ops/transport/segment.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

struct RendezvousOptions {
  // Among the ranks of this host.
  int rank = 0;
  int size = 1;
  // Their numbers in the job, for messages; empty: the same.
  std::vector<int> names;
  std::string job;
  int64_t exchange_bytes = 0;
  double timeout_seconds = 60;
  // Once this can be read, or its other end is closed, no wait goes on; -1: none. The
  // caller closes it.
  int cancel_fd = -1;
};

class Rendezvous {
 public:
  explicit Rendezvous(RendezvousOptions options);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // Waits for the peers and returns the memory shared with them.
  Status Connect(std::shared_ptr<Segment>* segment);
  // Says that this rank is set up, and waits until all are.
  Status AwaitAll();

  // The connections, indexed by the rank at the other end, -1 where there is none. Rank
  // 0 has one to every other rank; the others have one to rank 0.
  const std::vector<int>& connections() const { return connections_; }

 private:
  Status Listen();
  Status AcceptAll();
  Status Greet(int connection);
  Status ShareSegment(std::shared_ptr<Segment>* segment);
  Status ConnectToRoot();
  Status ReceiveSegment(std::shared_ptr<Segment>* segment);
  Status AwaitReadyOfAll();
  std::vector<int> MissingRanks() const;
  int NameOf(int rank) const;
  std::string Name(int rank) const { return "rank " + std::to_string(NameOf(rank)); }
  Status Ended(int rank) const;
  // Tells the connected ranks that the job goes on, with the memory's descriptor or -1.
  Status Accept(int64_t exchange_bytes, int fd);
  // Tells the connected ranks why the job cannot start. Returns `status`.
  Status Refuse(Status status);

  RendezvousOptions options_;
  Clock::time_point deadline_;
  int listener_ = -1;
  std::vector<int> connections_;
};

}  // namespace keras_hvd
