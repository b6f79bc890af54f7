// Notices that nothing comes back any more over a TCP connection: the host at the other
// end has vanished, or the network between.
//
// A process there that is stopped or busy, even for hours, is another matter: its
// kernel acknowledges the bytes that come, and says that it has no room for more. So
// this asks the kernel for the bytes that it has sent without an answer. While nothing
// is on its way, the kernel itself asks the other one from time to time, at no cost to
// this process.
#pragma once

#include <chrono>

#include "tf_ops/transport/doorbell.h"

namespace keras_hvd {

// A host without an answer for this long counts as gone, unless told otherwise.
inline constexpr std::chrono::seconds kHostTimeout(4);

// Only one thread may use it at a time.
class Reachability {
 public:
  // How often to look, while an answer is awaited.
  static constexpr std::chrono::milliseconds kInterval{500};

  // The socket stays the caller's. Of one that is not TCP's this knows nothing.
  Reachability(int socket, std::chrono::seconds limit)
      : socket_(socket), limit_(limit) {}

  std::chrono::seconds limit() const { return limit_; }

  // Makes the kernel ask while nothing is on its way. After the limit without an answer
  // the connection ends, with an error that MeansUnreachable.
  void KeepAsking();
  // Whether there was no answer for as long as the limit. Call it from time to time
  // while something is on its way; it looks once in an interval.
  bool IsLost(Clock::time_point now);
  // The last result of IsLost.
  bool is_lost() const { return is_lost_; }
  // Whether something was on its way when it last looked.
  bool awaits_answer() const { return awaits_answer_; }

 private:
  void Look(Clock::time_point now);

  const int socket_;
  const std::chrono::seconds limit_;
  Clock::time_point looked_ = Clock::time_point::min();
  Clock::time_point silent_since_;
  bool asks_kernel_ = false;
  bool awaits_answer_ = false;
  bool is_lost_ = false;
};

// Whether a system call's error says that the other host does not answer.
bool MeansUnreachable(int error);

}  // namespace keras_hvd
