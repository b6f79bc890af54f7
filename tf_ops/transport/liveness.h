// Notices and reports the death of a rank.
//
// There are three ways, fastest first. (1) Each rank's watch thread holds a robust
// futex. When the thread dies, the kernel marks the futex and wakes its waiter at once,
// before it releases the process's memory. Each rank waits for the next one's futex, in
// a ring. (2) The rendezvous' unix sockets reach end of file, which helps if the rank
// that should have noticed is itself stopped. (3) A crashing rank marks itself dead
// before its core is dumped, which may take long.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/transport/job_state.h"
#include "tf_ops/transport/segment.h"

namespace keras_hvd {

class Liveness {
 public:
  // Starts to hold this rank's life, so the others of its host can watch it. Raises
  // std::system_error without room for a thread, as Watch does.
  Liveness(std::shared_ptr<Segment> segment, int rank);
  Liveness(std::shared_ptr<Segment> segment, const Topology& topology);
  // Ends the watch. This rank then counts as departed, not as dead.
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  // Starts to watch the others. All of them must hold their lives. `connections` are
  // the rendezvous' sockets by rank; the caller keeps ownership.
  void Watch(const std::vector<int>& connections);

  // Marks a crashing rank, before all else. Makes only async-signal-safe calls.
  static void MarkCrashed(RankBlock* block, int signal);

 private:
  void HoldLife();
  void WatchSuccessors();
  void WatchConnections(std::vector<int> connections);
  bool AwaitDeath(int peer);
  void OpenProcess(int peer);
  void Report(int peer);
  std::string HowItEnded(int peer);

  const std::shared_ptr<Segment> segment_;
  const int index_;               // this rank's among those of the host, as all here
  const std::vector<int> ranks_;  // by index
  JobState job_;
  std::atomic<bool> stopping_{false};
  std::atomic<uint32_t> holding_{0};   // futex: the life is held
  std::atomic<uint32_t> watching_{0};  // futex: Watch was called, or the watch ends
  std::atomic<bool> holder_ended_{false};
  std::thread life_thread_;
  std::thread socket_thread_;
  std::vector<int> processes_;  // pidfds by rank, used only to learn how a rank ended
  std::vector<std::string> programs_;  // what they ran when the watch began
  int wake_socket_ = -1;               // eventfd that ends WatchConnections
};

// The state letter of a process from /proc ('T' stopped, 'D' uninterruptible, ...), or
// 0 if there is no such process.
char ProcessState(int pid);
// Why a process in this state is not running, to end a sentence about it; "" if it is.
std::string ObstacleOf(char process_state);

// "SIGKILL", or "signal 99".
std::string SignalName(int signal);

}  // namespace keras_hvd
