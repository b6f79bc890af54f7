// See broadcast.h.
//
// Each lane carries a portion of the tensor. The root sends every portion itself. It
// goes to the other hosts at once if it is small, and otherwise from each host to the
// next, so that no rank sends anything twice. Members beyond the lanes get all of it
// from the others of their host.
#include "tf_ops/collectives/broadcast.h"
#include "tf_ops/collectives/copy.h"
#include "tf_ops/collectives/parts.h"

namespace keras_hvd {
namespace {

// Up to this size the time that each host on the way adds is longer than the time that
// the root takes to send to one more.
constexpr int64_t kDirectBytes = 64 << 10;

class Broadcaster {
 public:
  Broadcaster(const BroadcastOptions& options, HostsCommunicator* hosts)
      : options_(options),
        hosts_(*hosts),
        direct_(options.bytes <= kDirectBytes),
        step_((hosts_.host() - hosts_.host_of(options.root) + hosts_.hosts()) %
              hosts_.hosts()) {}

  bool Run() {
    return (step_ == 0 ? RunOnRootsHost() : RunElsewhere()) && hosts_.AwaitSent();
  }

 private:
  bool RunOnRootsHost() {
    if (hosts_.index() == options_.root) {
      const int last = direct_ ? hosts_.hosts() - 1 : 1;
      for (int step = 1; step <= last; ++step) {
        const std::vector<int>& there = hosts_.members_of(hosts_.host_after(step));
        for (int lane = 0; lane < hosts_.lanes(); ++lane) {
          hosts_.Send(there[lane],
                      static_cast<const char*>(options_.input) + Start(lane),
                      Start(lane + 1) - Start(lane));
        }
      }
    }
    BroadcastOptions here = options_;
    here.root = hosts_.place_of(options_.root);
    return Broadcast(here, &hosts_.local());
  }

  bool RunElsewhere() {
    Communicator& local = hosts_.local();
    std::vector<std::vector<Parts::Part>> lines(local.count());
    for (int lane = 0; lane < hosts_.lanes(); ++lane) {
      lines[lane].push_back({0, Start(lane), Start(lane + 1) - Start(lane)});
    }
    const Parts portions(std::move(lines));
    return GatherLines(
        portions, &local, {options_.output},
        [&](char* exchange, int64_t begin, int64_t end) {
          bool ok = true;
          portions.ForEach(
              local.index(), begin, end,
              [&](size_t, int64_t offset, int64_t position, int64_t bytes) {
                if (offset == 0) BeginPass(portions.of(local.index()).front().bytes);
                char* const output =
                    static_cast<char*>(options_.output) + Start(local.index()) + offset;
                ok = Pass(output, bytes);
                if (local.count() > 1) CopyOrdinary(exchange + position, output, bytes);
              });
          return ok;
        });
  }

  void BeginPass(int64_t bytes) {
    hosts_.BeginReceive(Before(), bytes);
    if (!is_last()) hosts_.BeginSend(OfLane(1), bytes);
  }

  // Gets a stretch and gives it to the next host.
  bool Pass(char* output, int64_t bytes) {
    hosts_.Receive(Before(), output, bytes);
    if (!hosts_.AwaitReceived()) return false;
    if (!is_last()) hosts_.Send(OfLane(1), output, bytes);
    hosts_.Progress();
    return true;
  }

  // The member that this rank gets its lane's portion from.
  int Before() const {
    const bool from_root = direct_ || step_ == 1;
    return from_root ? options_.root : OfLane(hosts_.hosts() - 1);
  }
  bool is_last() const { return direct_ || step_ == hosts_.hosts() - 1; }

  // The member of this rank's lane on the host that comes `steps` after this one.
  int OfLane(int steps) const {
    return hosts_.members_of(hosts_.host_after(steps))[hosts_.place_of(hosts_.index())];
  }

  int64_t Start(int lane) const {
    return PartStart(options_.bytes, lane, hosts_.lanes());
  }

  const BroadcastOptions& options_;
  HostsCommunicator& hosts_;
  const bool direct_;
  const int step_;  // how many hosts after the root's
};

}  // namespace

bool Broadcast(const BroadcastOptions& options, HostsCommunicator* hosts) {
  return Broadcaster(options, hosts).Run();
}

}  // namespace keras_hvd
