// A fuzzer's input as a leader's bytes to the leader above it, or to one below it.
//
// The first byte chooses the listener, and whether the rest are frames or any bytes. A
// frame has one byte for its type, two for its length, and that many bytes.
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tf_ops/transport/hosts_job_state.h"

namespace keras_hvd {
namespace {

constexpr int64_t kExchangeBytes = 4096;
// The bytes that a socket takes at once, so that the listener can take them in.
constexpr size_t kPieceBytes = 4096;

// As a new segment would be, which takes the system longer than all the rest.
std::shared_ptr<Segment> NewMemory() {
  static const std::shared_ptr<Segment> segment = [] {
    std::shared_ptr<Segment> made;
    if (!Segment::CreateLocal(1, kExchangeBytes, &made).ok()) abort();
    return made;
  }();
  memset(static_cast<void*>(&segment->header()), 0, sizeof(SegmentHeader));
  memset(static_cast<void*>(&segment->block(0)), 0, sizeof(RankBlock));
  return segment;
}

// A leader that hears the input.
class Listener {
 public:
  explicit Listener(bool is_above) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) abort();
    speaker_ = ends[0];
    const int rank = is_above ? 0 : 1;
    std::vector<std::unique_ptr<ControlLink>> links;
    links.push_back(std::make_unique<ControlLink>(ends[1], 1 - rank));
    const std::vector<RankName> names = {{1, "one"}, {2, "other"}};
    state_ = std::make_unique<HostsJobState>(
        NewMemory(), Topology(rank, {0, 1}), names, std::move(links),
        std::vector<std::unique_ptr<ControlLink>>(), std::chrono::seconds(5));
  }
  ~Listener() { close(speaker_); }

  void Hear(std::string_view bytes) {
    while (!bytes.empty()) {
      const std::string_view piece = bytes.substr(0, kPieceBytes);
      // It no longer listens to a speaker of nonsense: its end is closed, or full.
      const int flags = MSG_NOSIGNAL | MSG_DONTWAIT;
      if (send(speaker_, piece.data(), piece.size(), flags) < 0) return;
      bytes.remove_prefix(piece.size());
      Poll();
    }
  }

 private:
  void Poll() {
    state_->Poll();
    for (auto& neighbor : state_->neighbors()) neighbor.inbox.clear();
    state_->PassOnDepartures();
    char answer[kPieceBytes];
    while (recv(speaker_, answer, sizeof(answer), MSG_DONTWAIT) > 0) continue;
  }

  int speaker_;
  std::unique_ptr<HostsJobState> state_;
};

// All are sent at the same time, as the sender's clock says.
std::string Frame(uint8_t type, std::string_view bytes) {
  std::string frame(16, '\0');
  frame[0] = static_cast<char>(bytes.size());
  frame[1] = static_cast<char>(bytes.size() >> 8);
  frame[4] = static_cast<char>(type);
  return frame.append(bytes);
}

}  // namespace
}  // namespace keras_hvd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace keras_hvd;
  if (size == 0) return 0;
  std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  Listener listener(/*is_above=*/data[0] % 2 == 0);
  if (data[0] / 2 % 2 == 1) {
    listener.Hear(rest);
    return 0;
  }
  while (rest.size() >= 3) {
    const size_t bytes =
        static_cast<uint8_t>(rest[1]) + (static_cast<uint8_t>(rest[2]) << 8);
    listener.Hear(Frame(rest[0], rest.substr(3, bytes)));
    rest.remove_prefix(std::min(rest.size(), 3 + bytes));
  }
  return 0;
}
