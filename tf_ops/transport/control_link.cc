#include "tf_ops/transport/control_link.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

namespace keras_hvd {
namespace {

// In front of each frame's bytes: their number, the type, and the time by the sender's
// clock.
struct Header {
  uint32_t bytes;
  uint8_t type;
  uint8_t zeros[3];
  int64_t clock_ns;
};

// The types are numbered from 1.
constexpr uint8_t kTypes = static_cast<uint8_t>(FrameType::kCarriedOut);
// More than any frame has.
constexpr uint32_t kMostBytes = 1 << 30;
constexpr size_t kReadBytes = 64 << 10;
// Other links must have their turn.
constexpr size_t kMostReadAtOnce = 1 << 20;
// No clock shows more: 73 years.
constexpr int64_t kMostNanoseconds = int64_t{1} << 61;
// How often to ask the kernel how long a message takes.
constexpr std::chrono::seconds kBetweenMeasurements(1);

}  // namespace

ControlLink::ControlLink(int socket, int peer, std::unique_ptr<TlsSession> tls)
    : connection_(socket, std::move(tls)), peer_(peer) {}

void ControlLink::Close(const std::string& why) {
  if (!why_closed_.empty()) return;
  why_closed_ = why;
  unsent_.clear();
  sent_ = 0;
}

// The other end sees that this one has ended it.
void ControlLink::Refuse(const std::string& what) {
  has_refused_ = why_closed_.empty();
  Close("it sent a frame " + what + ", which does not exist");
  taken_ = received_.size();
  connection_.EndSending();
}

// ---- Sending

void ControlLink::Queue(FrameType type, std::string_view bytes) {
  if (bytes.size() > kMostBytes) {
    return Close("a frame of " + std::to_string(bytes.size()) +
                 " bytes was to be sent");
  }
  if (!why_closed_.empty()) return;
  const Header header = {static_cast<uint32_t>(bytes.size()),
                         static_cast<uint8_t>(type),
                         {},
                         NowNanoseconds()};
  unsent_.append(reinterpret_cast<const char*>(&header), sizeof(header));
  unsent_.append(bytes);
}

bool ControlLink::Flush() {
  bool progressed = false;
  while (has_unsent()) {
    const iovec left = {unsent_.data() + sent_, unsent_.size() - sent_};
    const int64_t bytes = connection_.Send(&left, 1);
    if (bytes == 0) break;
    sent_ += bytes;
    progressed = true;
  }
  if (!connection_.why_closed().empty()) Close(connection_.why_closed());
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
  connection_.EndSending();
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
    pollfd waiting = {socket(), events, 0};
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
    const iovec room = {received_.data() + had, kReadBytes};
    const size_t bytes = connection_.Receive(&room, 1);
    received_.resize(had + bytes);
    read += bytes;
    if (bytes < kReadBytes) break;
  }
  if (!connection_.why_closed().empty()) Close(connection_.why_closed());
  if (read > 0) NoteRead(Clock::now());
  return read > 0;
}

void ControlLink::NoteRead(Clock::time_point now) {
  read_at_ = now;
  if (now < measured_ + kBetweenMeasurements) return;
  measured_ = now;
  delay_ = connection_.OneWayDelay();
}

bool ControlLink::Next(FrameType* type, std::string_view* bytes) {
  Header header;
  const size_t left = received_.size() - taken_;
  if (left < sizeof(header)) return false;
  memcpy(&header, received_.data() + taken_, sizeof(header));
  if (header.type < 1 || header.type > kTypes || header.bytes > kMostBytes) {
    Refuse("of type " + std::to_string(header.type) + " and " +
           std::to_string(header.bytes) + " bytes");
    return false;
  }
  if (header.clock_ns < 0 || header.clock_ns > kMostNanoseconds) {
    Refuse("of the time " + std::to_string(header.clock_ns) + " ns");
    return false;
  }
  if (left - sizeof(header) < header.bytes) return false;
  // Those of several cores may differ a little.
  told_ = std::max(told_, Clock::time_point(std::chrono::nanoseconds(header.clock_ns)));
  sent_at_ = clock_.Note(told_, read_at_, delay_);
  *type = static_cast<FrameType>(header.type);
  *bytes = std::string_view(received_).substr(taken_ + sizeof(header), header.bytes);
  taken_ += sizeof(header) + header.bytes;
  return true;
}

}  // namespace keras_hvd
