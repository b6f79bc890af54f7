// Wakes a rank's engine when something comes over one of its connections.
//
// An engine sleeps on its doorbell, which a socket cannot ring. So a thread sleeps on
// the sockets in its place, and rings. It does so only while the engine sleeps: an
// engine that is awake reads its sockets itself, and a thread that woke up for each
// message would take the time away from it.
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "tf_ops/transport/doorbell.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

class LinkWatch {
 public:
  // `quiet_sockets` are those over which hardly anything ever comes. Nobody else looks
  // at them: this calls `on_quiet_news` and rings whenever something does, armed or
  // not. `status` says whether the system had room for this. Without room it never
  // rings.
  LinkWatch(const std::vector<int>& sockets, const std::vector<int>& quiet_sockets,
            Doorbell* bell, std::function<void()> on_quiet_news);
  ~LinkWatch();
  LinkWatch(const LinkWatch&) = delete;
  LinkWatch& operator=(const LinkWatch&) = delete;

  const Status& status() const { return status_; }

  // From now on rings once for any event on a socket. The caller must look at all of
  // them after this: earlier events do not ring.
  void Arm();
  // No longer rings. One ring may be under way.
  void Disarm();

 private:
  void Loop();

  Doorbell& bell_;
  const std::function<void()> on_quiet_news_;
  const int sockets_;  // epoll: the events on them since it was last asked
  const int watch_;    // epoll: `sockets_` while armed, quiet sockets, and `stop_`
  const int stop_;     // eventfd
  Status status_;
  bool armed_ = false;
  std::thread thread_;
};

}  // namespace keras_hvd
