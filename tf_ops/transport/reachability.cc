#include "tf_ops/transport/reachability.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>

namespace keras_hvd {

// The kernel takes no longer intervals.
constexpr std::chrono::seconds kMostAsked(32767);

void Reachability::KeepAsking() {
  if (asks_kernel_) return;
  asks_kernel_ = true;
  // Together they take as long as the limit, or 2 s at least: the kernel counts in
  // seconds.
  const int limit = static_cast<int>(std::min(limit_, kMostAsked).count());
  const int idle = std::max(1, limit * 2 / 5);
  const int interval = std::max(1, (limit - idle) / 3);
  const int probes = std::clamp((limit - idle) / interval, 1, 3);
  const int on = 1;
  setsockopt(socket_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(socket_, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
  setsockopt(socket_, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof(interval));
  setsockopt(socket_, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
}

bool Reachability::IsLost(Clock::time_point now) {
  if (!is_lost_ &&
      (looked_ == Clock::time_point::min() || now - looked_ >= kInterval)) {
    Look(now);
  }
  return is_lost_;
}

void Reachability::Look(Clock::time_point now) {
  tcp_info info = {};
  socklen_t length = sizeof(info);
  const bool is_tcp = getsockopt(socket_, IPPROTO_TCP, TCP_INFO, &info, &length) == 0;
  // After a long time without a look, it is unknown since when there is no answer.
  const bool looked_lately =
      looked_ != Clock::time_point::min() && now - looked_ < 4 * kInterval;
  if (!awaits_answer_ || !looked_lately) {
    silent_since_ = looked_lately ? looked_ : now;
  }
  looked_ = now;
  // A full window at the other end is asked about by probes instead of data.
  awaits_answer_ = is_tcp && (info.tcpi_unacked > 0 || info.tcpi_probes > 0);
  if (!awaits_answer_) return;
  silent_since_ =
      std::max(silent_since_, now - std::chrono::milliseconds(info.tcpi_last_ack_recv));
  // Probes come ever less often, so a single one may have been lost long ago.
  const bool asked_again = info.tcpi_retransmits > 0 || info.tcpi_probes > 1;
  is_lost_ = asked_again && now - silent_since_ >= limit_;
}

bool MeansUnreachable(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
         error == EHOSTDOWN || error == ENETDOWN;
}

}  // namespace keras_hvd
