#include "tf_ops/transport/link_watch.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <utility>

#include "tf_ops/transport/threads.h"

namespace keras_hvd {
namespace {

// How many events to take at once; the others follow.
constexpr int kMostEvents = 64;

bool Register(int poll, int descriptor, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.fd = descriptor;
  return epoll_ctl(poll, EPOLL_CTL_ADD, descriptor, &event) == 0;
}

}  // namespace

LinkWatch::LinkWatch(const std::vector<int>& sockets,
                     const std::vector<int>& quiet_sockets, Doorbell* bell,
                     std::function<void()> on_quiet_news)
    : bell_(*bell),
      on_quiet_news_(std::move(on_quiet_news)),
      sockets_(epoll_create1(EPOLL_CLOEXEC)),
      watch_(epoll_create1(EPOLL_CLOEXEC)),
      stop_(eventfd(0, EFD_CLOEXEC)) {
  // Fails on descriptors that could not be made, too.
  bool ok =
      Register(watch_, sockets_, EPOLLONESHOT) && Register(watch_, stop_, EPOLLIN);
  for (int socket : sockets) {
    ok = ok && Register(sockets_, socket, EPOLLIN | EPOLLOUT | EPOLLET);
  }
  for (int socket : quiet_sockets) {
    ok = ok && Register(watch_, socket, EPOLLIN | EPOLLET);
  }
  if (!ok) {
    status_ = Status::Internal(
        std::string("cannot watch the connections to other hosts: ") + strerror(errno) +
        ". See ulimit -n and /proc/sys/fs/epoll/max_user_watches");
    return;
  }
  try {
    thread_ = StartThread("keras_hvd links", [this] { Loop(); });
  } catch (const std::exception& error) {
    status_ = StatusOf(error);
  }
}

LinkWatch::~LinkWatch() {
  const uint64_t one = 1;
  if (thread_.joinable()) {
    (void)!write(stop_, &one, sizeof(one));
    thread_.join();
  }
  for (int descriptor : {stop_, watch_, sockets_}) {
    if (descriptor >= 0) close(descriptor);
  }
}

void LinkWatch::Arm() {
  epoll_event events[kMostEvents];
  while (epoll_wait(sockets_, events, kMostEvents, 0) == kMostEvents) {
  }
  epoll_event event = {};
  // Once: it must not ring again before the engine has looked.
  event.events = EPOLLIN | EPOLLONESHOT;
  event.data.fd = sockets_;
  epoll_ctl(watch_, EPOLL_CTL_MOD, sockets_, &event);
  armed_ = true;
}

void LinkWatch::Disarm() {
  if (!armed_) return;
  armed_ = false;
  epoll_event event = {};
  event.events = EPOLLONESHOT;
  event.data.fd = sockets_;
  epoll_ctl(watch_, EPOLL_CTL_MOD, sockets_, &event);
}

void LinkWatch::Loop() {
  while (true) {
    epoll_event event;
    if (epoll_wait(watch_, &event, 1, -1) <= 0) continue;
    if (event.data.fd == stop_) return;
    if (event.data.fd != sockets_) on_quiet_news_();
    bell_.Ring();
  }
}

}  // namespace keras_hvd
