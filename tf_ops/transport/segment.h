// The memory shared by the ranks of one host, and its layout. Ranks are numbered here
// by their index among those of the host.
//
// It is one sealed memfd that the host's leader makes and hands to the others. It has
// no name, in /dev/shm or elsewhere, so nothing is left behind however a rank ends.
#pragma once

#include <sched.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "tf_ops/transport/doorbell.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

// A counter with one writer, alone in its cache line.
struct alignas(64) SharedCounter {
  std::atomic<uint64_t> value;
};

// The position of a channel's sender; see shared_memory_channel.h.
struct RingState {
  SharedCounter written;
  // The sender waits for room. A receiver that makes room clears this and rings. Sender
  // and receivers all write it.
  alignas(64) std::atomic<uint32_t> sender_waits;
};

// The way in which a rank has ended, as far as the rank itself could record it.
enum class Departure : uint32_t {
  kNone = 0,
  kShutDown = 1,  // khvd_shutdown, or the end of its process
  kCrashed = 2,   // a fatal signal; `signal` says which
};

// The stores that a rank's collectives take; see collectives/store_choice.h.
using StoreTable = std::array<std::atomic<uint8_t>, 128>;

// One entry of the record of a rank's latest operations. Only that rank writes it. A
// reader may see a half-changed entry, which is good enough for a report.
struct OperationRecord {
  static constexpr int kNameWords = 12;
  std::atomic<uint64_t> time_ns;
  std::atomic<uint32_t> phase;
  std::atomic<uint32_t> kind;
  std::atomic<uint64_t> name[kNameWords];
};

// A rank's latest operations; entry n is at n modulo kRecords.
struct OperationHistory {
  static constexpr int kRecords = 64;
  std::atomic<uint64_t> written;
  OperationRecord records[kRecords];
};

// The words of a rank that the others read. Only the rank itself writes each word, with
// these exceptions: the doorbell, `life` (where the kernel records the owner's death),
// and the parts of the submissions that their reader writes.
struct RankBlock {
  Doorbell bell;

  // Progress of the collectives; see collectives/communicator.h.
  SharedCounter published;
  SharedCounter reduced;
  SharedCounter finished;
  alignas(64) StoreTable stores;

  // Submissions: written by the rank, read by its host's leader.
  RingState submissions;
  SharedCounter submissions_read;
  // How far the rank has read the coordinator's decisions, which the leader passes on.
  SharedCounter decisions_read;
  // How many of them it has carried out. The number stops growing when the rank leaves.
  SharedCounter decisions_carried_out;

  alignas(64) std::atomic<uint32_t> life;
  std::atomic<uint32_t> departure;
  std::atomic<uint32_t> signal;
  std::atomic<int32_t> pid;
  char host[64];
  // How it has left, to follow "has left the job: "; "": as a rank usually does.
  // Published by `departure`.
  static constexpr size_t kHowBytes = 512;
  char how_it_left[kHowBytes];
  cpu_set_t cpus;

  alignas(64) OperationHistory history;
};

struct SegmentHeader {
  static constexpr size_t kFailureBytes = 1024;

  // The rank that found the first failure describes it for all. It claims this by
  // compare-and-swap with its rank + 1, writes the text, then publishes it through
  // `failure_code`.
  alignas(64) std::atomic<uint32_t> failure_claimed;
  std::atomic<uint32_t> failure_code;
  char failure_text[kFailureBytes];

  // The first rank to set this reports a failure for all.
  std::atomic<uint32_t> report_claimed;
  // The same for the warning about GPU tensors that go through host memory.
  std::atomic<uint32_t> gpu_warning_claimed;

  // Settings that the coordinator makes for all; see job_state.h.
  std::atomic<uint32_t> check;
  std::atomic<uint32_t> timeline_on;
  std::atomic<uint32_t> timeline_paused;

  // One more than the rank that speaks for this host about the failure, to other hosts,
  // and whether all of them know of it; see failure_wave.h.
  std::atomic<uint32_t> speaker;
  std::atomic<uint32_t> all_know;

  // One more than the rank of a leader above this host's that has left; see
  // JobState::DepartedAbove.
  std::atomic<uint32_t> departed_above;
  // Of each leader above that has left, one more than the decisions that it has carried
  // out. The next one above comes first. A tree of all hosts that there can be is no
  // higher.
  static constexpr int kMostAbove = 12;
  std::atomic<uint64_t> carried_out_above[kMostAbove];

  // The last batch with a reported stall, so that one rank reports for all.
  alignas(64) std::atomic<uint64_t> stall_reported;
  RingState decisions;
};

class Segment {
 public:
  // Memory of this process alone: a world of one rank, or ranks that are threads.
  static Status CreateLocal(int size, int64_t exchange_bytes,
                            std::shared_ptr<Segment>* segment);
  // Sealed memory that other processes can map through `fd()`.
  static Status CreateShared(int size, int64_t exchange_bytes,
                             std::shared_ptr<Segment>* segment);
  // Maps memory that another process made. Always closes `fd`.
  static Status Map(int fd, int size, int64_t exchange_bytes,
                    std::shared_ptr<Segment>* segment);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int size() const { return size_; }
  int fd() const { return fd_; }
  int64_t exchange_bytes() const { return exchange_bytes_; }

  SegmentHeader& header() { return *reinterpret_cast<SegmentHeader*>(base_); }
  RankBlock& block(int rank);
  char* submissions(int rank);
  char* decisions();
  char* exchange(int rank);

  static constexpr uint64_t kSubmissionBytes = 256 << 10;
  static constexpr uint64_t kDecisionBytes = 512 << 10;

 private:
  Segment(int size, int64_t exchange_bytes)
      : size_(size), exchange_bytes_(exchange_bytes) {}
  static int64_t Bytes(int size, int64_t exchange_bytes);
  Status MapMemory(int flags);

  int size_;
  int64_t exchange_bytes_;
  int fd_ = -1;
  char* base_ = nullptr;
};

}  // namespace keras_hvd
