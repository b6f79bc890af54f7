#include "tf_ops/transport/liveness.h"

#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "tf_ops/transport/held_futex.h"
#include "tf_ops/transport/threads.h"

namespace keras_hvd {
namespace {

// The kernel's struct pidfd_info (Linux 6.13) up to the exit code, which Linux 6.15 and
// later fill in once the process has been reaped.
struct ProcessInfo {
  uint64_t mask;
  uint64_t cgroup;
  uint32_t ids[11];
  int32_t exit_code;
};
constexpr uint64_t kInfoExit = 1 << 3;
constexpr unsigned long kGetInfo = _IOWR(0xFF, 11, ProcessInfo);

// How long to wait for a dead rank's parent to reap it. Only then does the kernel say
// for sure how it ended. The wait is short because everybody waits for the failure
// meanwhile.
constexpr int kReapMilliseconds = 5;
// How often, while it seems to run still. Threads that wait for a core delay an exec.
constexpr int kReapTries = 40;

// Describes a status from waitpid.
std::string HowItEndedText(int status) {
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    return "was killed by " + SignalName(signal) +
           (signal == SIGKILL ? " (by a user, or by the kernel because memory ran out)"
                              : "");
  }
  return "exited with code " + std::to_string(WEXITSTATUS(status)) +
         " without leaving the job";
}

// The part of /proc/PID/stat after the command's name, which is in parentheses and may
// itself contain some.
std::string ProcessFields(int pid) {
  FILE* file = fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "r");
  if (file == nullptr) return "";
  char line[1024];
  const size_t length = fread(line, 1, sizeof(line), file);
  fclose(file);
  const std::string text(line, length);
  const size_t end = text.rfind(')');
  return end == std::string::npos ? "" : text.substr(end + 1);
}

// The status that waitpid will give for a process, from the last field. The kernel
// shows it as soon as the process begins to end, before the possibly slow release of
// its memory. Returns 0 also if it is not shown.
int StatusOf(int pid) {
  const std::string fields = ProcessFields(pid);
  const size_t last = fields.find_last_of(' ');
  return last == std::string::npos ? 0 : atoi(fields.c_str() + last);
}

// The program that a process runs, unless it ends; else "".
std::string ProgramOf(int pid) {
  constexpr unsigned kExiting = 4;  // PF_EXITING, among the flags of the kernel
  char state;
  unsigned flags;
  const std::string fields = ProcessFields(pid);
  if (sscanf(fields.c_str(), " %c %*d %*d %*d %*d %*d %u", &state, &flags) != 2)
    return "";
  // One that waits for a disk may not have heard of its end.
  if ((flags & kExiting) != 0 || strchr("DZX", state) != nullptr) return "";
  std::ifstream file("/proc/" + std::to_string(pid) + "/comm");
  std::string program;
  std::getline(file, program);
  return program;
}

}  // namespace

std::string SignalName(int signal) {
  const char* name = sigabbrev_np(signal);
  return name == nullptr ? "signal " + std::to_string(signal)
                         : "SIG" + std::string(name);
}

char ProcessState(int pid) {
  const std::string fields = ProcessFields(pid);
  return fields.size() < 2 ? 0 : fields[1];
}

std::string ObstacleOf(char process_state) {
  switch (process_state) {
    case 'T':
    case 't': return "; its process is stopped (kill -CONT)";
    case 'D': return "; its process waits for the disk or the network";
  }
  return "";
}

Liveness::Liveness(std::shared_ptr<Segment> segment, int rank)
    : Liveness(segment, Topology::OneHost(rank, segment->size())) {}

Liveness::Liveness(std::shared_ptr<Segment> segment, const Topology& topology)
    : segment_(std::move(segment)),
      index_(topology.local_index(topology.rank())),
      ranks_(topology.local_ranks()),
      job_(segment_, topology),
      processes_(segment_->size(), -1),
      programs_(segment_->size()) {
  // First: without it, nothing is left that the destructor would have to end.
  life_thread_ = StartThread("keras_hvd life", [this] { HoldLife(); });
  wake_socket_ = eventfd(0, EFD_CLOEXEC);
  while (holding_.load(std::memory_order_acquire) == 0) {
    FutexWait(&holding_, 0, Clock::time_point::max());
  }
}

Liveness::~Liveness() {
  stopping_.store(true);
  watching_.store(1);
  FutexWake(&watching_);
  const uint64_t one = 1;
  (void)!write(wake_socket_, &one, sizeof(one));
  if (socket_thread_.joinable()) socket_thread_.join();
  // The watcher may be about to sleep on another rank's word, which must not change for
  // this. So wake it repeatedly until it has seen that it should stop.
  while (!holder_ended_.load()) {
    for (int peer = 0; peer < segment_->size(); ++peer) {
      FutexWake(&segment_->block(peer).life);
    }
    sched_yield();
  }
  life_thread_.join();
  for (int process : processes_) {
    if (process >= 0) close(process);
  }
  close(wake_socket_);
}

void Liveness::Watch(const std::vector<int>& connections) {
  for (int peer = 0; peer < segment_->size(); ++peer) {
    if (peer != index_) OpenProcess(peer);
  }
  socket_thread_ = StartThread("keras_hvd peers",
                               [this, connections] { WatchConnections(connections); });
  watching_.store(1);
  FutexWake(&watching_);
}

void Liveness::OpenProcess(int peer) {
  // Fails in another pid namespace or on an old kernel; reports then say less.
  const int pid = segment_->block(peer).pid.load();
  processes_[peer] = syscall(SYS_pidfd_open, pid, 0);
  programs_[peer] = ProgramOf(pid);
}

void Liveness::HoldLife() {
  {
    const HeldFutex life(&segment_->block(index_).life);
    holding_.store(1, std::memory_order_release);
    FutexWake(&holding_);
    while (watching_.load() == 0) FutexWait(&watching_, 0, Clock::time_point::max());
    WatchSuccessors();
  }
  holder_ended_.store(true);
}

void Liveness::WatchSuccessors() {
  const int size = segment_->size();
  for (int step = 1; step < size; ++step) {
    const int peer = (index_ + step) % size;
    if (AwaitDeath(peer)) Report(peer);
    if (stopping_.load()) return;
  }
}

// Returns true if the peer died, false if it left cleanly or this rank stops.
bool Liveness::AwaitDeath(int peer) {
  std::atomic<uint32_t>& life = segment_->block(peer).life;
  while (!stopping_.load()) {
    const uint32_t word = life.load(std::memory_order_acquire);
    if ((word & FUTEX_OWNER_DIED) != 0) return true;
    if (word == 0) return false;
    FutexWait(&life, word, Clock::time_point::max());
  }
  return false;
}

void Liveness::WatchConnections(std::vector<int> connections) {
  while (!stopping_.load()) {
    std::vector<pollfd> waiting = {{wake_socket_, POLLIN, 0}};
    for (int connection : connections) waiting.push_back({connection, POLLIN, 0});
    if (poll(waiting.data(), waiting.size(), -1) < 0) continue;
    for (size_t peer = 0; peer < connections.size(); ++peer) {
      if (connections[peer] < 0 || waiting[peer + 1].revents == 0) continue;
      connections[peer] = -1;
      const uint32_t life = segment_->block(peer).life.load(std::memory_order_acquire);
      if (life != 0) Report(peer);
    }
  }
}

void Liveness::MarkCrashed(RankBlock* block, int signal) {
  block->signal.store(signal);
  block->departure.store(static_cast<uint32_t>(Departure::kCrashed));
  block->life.fetch_or(FUTEX_OWNER_DIED);
  FutexWake(&block->life);
}

void Liveness::Report(int peer) {
  // The dead rank may have been about to report another one's death.
  if (job_.Failed()) return job_.WakeAll();
  job_.Fail(Code::kRankFailed, job_.Describe(ranks_[peer]) + " " + HowItEnded(peer),
            ranks_[peer]);
}

std::string Liveness::HowItEnded(int peer) {
  const RankBlock& block = segment_->block(peer);
  if (block.departure.load() == static_cast<uint32_t>(Departure::kCrashed)) {
    return "crashed with " + SignalName(block.signal.load());
  }
  const std::string silent = "died without a word (SIGKILL, out of memory, or _exit)";
  if (processes_[peer] < 0) return silent;
  const int status = StatusOf(block.pid.load());
  if (status != 0) return HowItEndedText(status);
  pollfd reaped = {processes_[peer], 0, 0};
  for (int tries = kReapTries; poll(&reaped, 1, kReapMilliseconds) == 0;) {
    // Threads end where their process goes on with another program, too, and before it
    // does. It may be the same program again.
    const std::string program = ProgramOf(block.pid.load());
    if (program.empty()) break;
    if (program != programs_[peer] || --tries == 0)
      return "called exec: its process runs '" + program + "' now";
  }
  // It may have begun to end meanwhile.
  const int later_status = StatusOf(block.pid.load());
  if (later_status != 0) return HowItEndedText(later_status);
  ProcessInfo info = {};
  info.mask = kInfoExit;
  if (ioctl(processes_[peer], kGetInfo, &info) != 0 || (info.mask & kInfoExit) == 0) {
    return silent;
  }
  return HowItEndedText(info.exit_code);
}

}  // namespace keras_hvd
