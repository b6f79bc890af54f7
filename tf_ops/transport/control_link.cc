// See control_link.h.
#include "tf_ops/transport/control_link.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>

#include "tf_ops/transport/reachability.h"

namespace keras_hvd {
namespace {

// In front of each frame's bytes: how many there are, and the type.
struct Header {
  uint32_t bytes;
  uint8_t type;
  uint8_t zeros[3];
};

// The types are numbered from 1.
constexpr uint8_t kTypes = static_cast<uint8_t>(FrameType::kSign);
// More than any frame has.
constexpr uint32_t kMostBytes = 1 << 30;
constexpr size_t kReadBytes = 64 << 10;
// Other links must have their turn.
constexpr size_t kMostReadAtOnce = 1 << 20;

}  // namespace

ControlLink::ControlLink(int socket, int peer) : socket_(socket), peer_(peer) {
  fcntl(socket_, F_SETFL, fcntl(socket_, F_GETFL) | O_NONBLOCK);
  // Fails for a unix socket, which delays nothing.
  const int on = 1;
  setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

ControlLink::~ControlLink() { close(socket_); }

void ControlLink::Close(const std::string& why) {
  if (!why_closed_.empty()) return;
  why_closed_ = why;
  unsent_.clear();
  sent_ = 0;
}

void ControlLink::CloseFor(int error) {
  is_unreachable_ = MeansUnreachable(error);
  Close(strerror(error));
}

// ---- Sending

void ControlLink::Queue(FrameType type, std::string_view bytes) {
  if (bytes.size() > kMostBytes) {
    return Close("a frame of " + std::to_string(bytes.size()) +
                 " bytes was to be sent");
  }
  if (!why_closed_.empty()) return;
  const Header header = {
      static_cast<uint32_t>(bytes.size()), static_cast<uint8_t>(type), {}};
  unsent_.append(reinterpret_cast<const char*>(&header), sizeof(header));
  unsent_.append(bytes);
}

bool ControlLink::Flush() {
  bool progressed = false;
  while (has_unsent()) {
    const ssize_t count =
        send(socket_, unsent_.data() + sent_, unsent_.size() - sent_, MSG_NOSIGNAL);
    if (count >= 0) {
      sent_ += count;
      progressed = true;
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      CloseFor(errno);
    }
  }
  // Moving the rest to the front for each piece would take quadratic time.
  if (sent_ == unsent_.size() || sent_ > unsent_.size() / 2) {
    unsent_.erase(0, sent_);
    sent_ = 0;
  }
  return progressed;
}

void ControlLink::Finish(Clock::time_point deadline) {
  Flush();
  while (has_unsent() && Await(POLLOUT, deadline)) Flush();
  shutdown(socket_, SHUT_WR);
}

void ControlLink::AwaitEnd(Clock::time_point deadline) {
  while (why_closed_.empty() && Await(POLLIN, deadline)) {
    Receive();
    taken_ = received_.size();
  }
}

bool ControlLink::Await(short events, Clock::time_point deadline) const {
  while (Clock::now() < deadline) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd waiting = {socket_, events, 0};
    const int count = poll(&waiting, 1, static_cast<int>(left.count()));
    if (count > 0) return true;
    if (count < 0 && errno != EINTR) return false;
  }
  return false;
}

// ---- Receiving

bool ControlLink::Receive() {
  received_.erase(0, taken_);
  taken_ = 0;
  size_t read = 0;
  while (why_closed_.empty() && read < kMostReadAtOnce) {
    const size_t had = received_.size();
    received_.resize(had + kReadBytes);
    const ssize_t count = recv(socket_, received_.data() + had, kReadBytes, 0);
    const int error = errno;
    received_.resize(had + (count > 0 ? count : 0));
    if (count > 0) {
      read += count;
      if (count < static_cast<ssize_t>(kReadBytes)) break;
    } else if (count == 0) {
      Close("it was closed");
    } else if (error == EAGAIN) {
      break;
    } else if (error != EINTR) {
      CloseFor(error);
    }
  }
  return read > 0;
}

bool ControlLink::Next(FrameType* type, std::string_view* bytes) {
  Header header;
  const size_t left = received_.size() - taken_;
  if (left < sizeof(header)) return false;
  memcpy(&header, received_.data() + taken_, sizeof(header));
  if (header.type < 1 || header.type > kTypes || header.bytes > kMostBytes) {
    Close("it sent a frame of type " + std::to_string(header.type) + " and " +
          std::to_string(header.bytes) + " bytes, which does not exist");
    taken_ = received_.size();
    return false;
  }
  if (left - sizeof(header) < header.bytes) return false;
  *type = static_cast<FrameType>(header.type);
  *bytes = std::string_view(received_).substr(taken_ + sizeof(header), header.bytes);
  taken_ += sizeof(header) + header.bytes;
  return true;
}

}  // namespace keras_hvd
