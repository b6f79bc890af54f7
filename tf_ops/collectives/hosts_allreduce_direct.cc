// See hosts_reducer.h.
//
// The direct scheme (see allreduce.cc), with a step between the hosts. A window has one
// slice for each lane, and a slice has one part for each host. The members of a host
//   1. copy the slices into their exchange memories, and publish;
//   2. each lane reduces its slice, and sends each host's part of it to the same lane
//      there;
//   3. each lane reduces all hosts' sums of its host's part, and sends the result to
//      the other hosts;
//   4. each lane publishes its slice when it has all results, and all copy it out.
// While one step waits for the network, the next windows are already in the steps
// before, so that the network always has something to send. Small tensors skip the
// second exchange: every host reduces all of a slice.
#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "tf_ops/collectives/hosts_reducer.h"

namespace keras_hvd {
namespace {

// A tensor is cut into several windows, so that its steps overlap. Parts of this size
// are still in the cache when they are reduced, and long enough that two hosts, each of
// which sends before it receives, seldom wait for each other.
constexpr int64_t kMostPartBytes = 512 << 10;
// Hosts send in turns, so that no more than kMostIncomingBytes come to a lane. In the
// n-th turn of a window, each sends to the n-th host after it. Many short turns keep
// hosts in step, a few long ones do not.
constexpr int64_t kMostTurnBytes = kMostIncomingBytes / 8;
// At most this many links are asked again and again for bytes.
constexpr int64_t kReceivedAtOnce = 8;
// Between hosts a second wait costs more than it does in shared memory, and more than
// the time for this many times the bytes that are small there.
constexpr int64_t kSmallBetweenHosts = 8;
constexpr int64_t kMoreForSmall = 2;

class DirectReducer : HostsReducer {
 public:
  DirectReducer(const AllreduceOptions& options, HostsCommunicator* hosts)
      : HostsReducer(options, hosts),
        moves_inputs_(alone_ && stages_.keeps_inputs()),
        small_(line_.bytes() <= MostSmallBytes(options.small_bytes)) {
    SetWindowBytes(small_
                       ? line_.bytes()
                       : std::min({options.window_bytes, MostWindowBytes(),
                                   hosts_.lanes() * hosts_.hosts() * MostPartBytes()}));
    part_bytes_ = small_ ? slice_bytes_ : Window{0, slice_bytes_}.Slice(hosts_.hosts());
    scratch_ = hosts_.Scratch(kSumsInFlight * slice_bytes_ +
                              kInFlight * hosts_.hosts() * part_bytes_);
    turns_at_once_ = hosts_.hosts() <= 2
                         ? std::numeric_limits<int64_t>::max()
                         : std::max<int64_t>(1, kMostIncomingBytes /
                                                    std::max(part_bytes_, kCacheLine));
    ends_.fill(std::vector<Ends>(hosts_.hosts()));
  }

  bool Run() {
    for (int64_t step = 0; step < windows_ + 2; ++step) {
      if (step < windows_ && !ReduceHost(step)) return false;
      if (step == windows_ && !LeaveWindows()) return false;
      if (IsWindow(step - 1) && !ReduceHosts(step - 1)) return false;
      if (IsWindow(step - 2) && !Finish(step - 2)) return false;
    }
    return hosts_.AwaitSent();
  }

 private:
  // A lane's own sums of a window are sent until the results have come, two windows
  // later. All else has been used by the time of the next window but one.
  static constexpr int64_t kSumsInFlight = 3;
  static constexpr int64_t kInFlight = 2;

  // A link's positions after it has brought the sums, sent the results, and brought the
  // results of a window.
  struct Ends {
    int64_t sums = 0, sent = 0, results = 0;
  };
  // The host that a turn's bytes come from, and the position of its link after them.
  struct Turn {
    int from;
    int64_t end;
  };
  Ends& EndsOf(int64_t number, int host) { return ends_[number % kInFlight][host]; }

  int64_t MostPartBytes() const {
    return hosts_.hosts() <= 2 ? kMostPartBytes : kMostTurnBytes;
  }

  // The bytes that every host sends to every other, instead of two exchanges of parts.
  // Of two hosts, each sends as much either way. Of more, each sends (hosts - 2) /
  // hosts of the bytes in vain to each other one.
  int64_t MostSmallBytes(int64_t small_bytes) const {
    const int64_t hosts = hosts_.hosts();
    const int64_t most = std::min(small_bytes, MostWindowBytes());
    if (hosts <= 2) return std::min(kSmallBetweenHosts * most, MostWindowBytes());
    return std::min(kMoreForSmall * most * hosts / ((hosts - 1) * (hosts - 2)),
                    MostWindowBytes());
  }

  bool IsWindow(int64_t number) const { return number >= 0 && number < windows_; }
  // A host's part of this lane's slice.
  Window PartAt(int64_t number, int host) const {
    const Window slice = SliceAt(number);
    return small_ ? slice : slice.Part(host, hosts_.hosts());
  }

  // ---- Steps

  // Each window begins a round. A member that publishes it has finished the steps
  // before, and so no longer uses the data of the window before the last but one.
  bool ReduceHost(int64_t number) {
    if (!EnterWindow(number)) return false;
    if (is_lane()) ReceiveSums(number);
    if (!ShareInputs(number)) return false;
    if (is_lane()) SendSums(number);
    return true;
  }

  // The last window's result takes the place of an earlier one's, which some member may
  // still be copying.
  bool LeaveWindows() {
    if (windows_ <= kInFlight) return true;
    ++round_;
    return local_.Regroup();
  }

  bool ReduceHosts(int64_t number) {
    if (!is_lane()) return true;
    for (int host = 0; host < hosts_.hosts(); ++host) {
      if (host == hosts_.host()) continue;
      const Ends& ends = EndsOf(number, host);
      if (!hosts_.AwaitReceived(PeerOn(host), ends.sums)) return false;
      // The results take the place of those of the window before the last.
      if (!alone_ && !hosts_.AwaitSent(PeerOn(host), ends.sent)) return false;
    }
    // The results of small tensors may take the place of bytes that are being sent.
    if (small_ && !hosts_.AwaitSent()) return false;
    Enter(CollectivePhase::kReduce, WindowAt(number));
    ReduceSums(number);
    if (!small_) ExchangeResults(number);
    return true;
  }

  bool Finish(int64_t number) {
    if (is_lane() && !small_) {
      for (int host = 0; host < hosts_.hosts(); ++host) {
        if (host == hosts_.host()) continue;
        const int64_t end = EndsOf(number, host).results;
        if (!hosts_.AwaitReceived(PeerOn(host), end)) return false;
      }
    }
    return ShareResults(number);
  }

  // ---- Places

  // This host's sum, in this lane's memory or in its input.
  char* Sum(int64_t number, int64_t position) const {
    return scratch_ + number % kSumsInFlight * slice_bytes_ + position -
           SliceAt(number).begin;
  }
  const char* SumOf(int64_t number, const Stretch& stretch) const {
    return moves_inputs_ ? stretch.input() : Sum(number, stretch.position);
  }
  // Another host's sum.
  char* Received(int64_t number, int host, int64_t position) const {
    return scratch_ + kSumsInFlight * slice_bytes_ +
           (number % kInFlight * hosts_.hosts() + host) * part_bytes_ + position -
           PartAt(number, hosts_.host()).begin;
  }

  // ---- Between hosts

  void ReceiveSums(int64_t number) {
    const Window part = PartAt(number, hosts_.host());
    for (int step = 1; step < hosts_.hosts(); ++step) {
      const int host = hosts_.host_after(hosts_.hosts() - step);
      int64_t& end = EndsOf(number, host).sums;
      line_.ForEach(part.begin, part.end, [&](const Stretch& stretch) {
        end = ReceiveInTurn(host, Received(number, host, stretch.position),
                            stretch.bytes);
      });
      received_turns_.push_back({host, end});
    }
  }

  // Each host's part leaves as soon as it is reduced; this host's is the last.
  void SendSums(int64_t number) {
    const bool reduces = !moves_inputs_;
    const auto reduce = [&](const Window& part) {
      ReduceOwn(number, part, Sum(number, 0),
                [&](DataType dtype) { return stages_.OfHost(dtype); });
    };
    if (reduces && small_) reduce(SliceAt(number));
    for (int step = 1; step <= hosts_.hosts(); ++step) {
      const int host = hosts_.host_after(step);
      const Window part = PartAt(number, host);
      if (reduces && !small_) reduce(part);
      if (host == hosts_.host()) continue;
      line_.ForEach(part.begin, part.end, [&](const Stretch& stretch) {
        SendInTurn(host, SumOf(number, stretch), stretch.bytes);
      });
      const int from = hosts_.host_after(hosts_.hosts() - step);
      EndTurn(from, EndsOf(number, from).sums);
      hosts_.Progress();
    }
  }

  void ReduceSums(int64_t number) {
    ForEachPiece(PartAt(number, hosts_.host()), [&](const Stretch& piece) {
      for (int host = 0; host < hosts_.hosts(); ++host) {
        inputs_[host] = Received(number, host, piece.position);
      }
      inputs_[hosts_.host()] = SumOf(number, piece);
      stages_.ReduceHosts(piece.tensor.dtype, inputs_.data(), hosts_.hosts(),
                          piece.elements(), ResultOf(number, piece));
    });
  }

  void ExchangeResults(int64_t number) {
    const auto for_each = [&](int host, const auto& visit) {
      const Window part = PartAt(number, host);
      line_.ForEach(part.begin, part.end, [&](const Stretch& stretch) {
        visit(ResultOf(number, stretch), stretch.bytes);
      });
    };
    for (int step = 1; step < hosts_.hosts(); ++step) {
      const int host = hosts_.host_after(hosts_.hosts() - step);
      int64_t& end = EndsOf(number, host).results;
      for_each(host, [&](char* result, int64_t bytes) {
        end = ReceiveInTurn(host, result, bytes);
      });
      received_turns_.push_back({host, end});
    }
    for (int step = 1; step < hosts_.hosts(); ++step) {
      const int host = hosts_.host_after(step);
      for_each(hosts_.host(), [&](char* result, int64_t bytes) {
        EndsOf(number, host).sent = SendInTurn(host, result, bytes);
      });
      const int from = hosts_.host_after(hosts_.hosts() - step);
      EndTurn(from, EndsOf(number, from).results);
    }
    hosts_.Progress();
  }

  // A turn begins once the bytes of an earlier one have come.
  int64_t SendInTurn(int host, const void* data, int64_t bytes) {
    const int64_t awaited = static_cast<int64_t>(turns_.size()) - turns_at_once_;
    if (awaited < 0) return hosts_.Send(PeerOn(host), data, bytes);
    const Turn& turn = turns_[awaited];
    return hosts_.SendAfter(PeerOn(turn.from), turn.end, PeerOn(host), data, bytes);
  }
  void EndTurn(int from, int64_t end) { turns_.push_back({from, end}); }

  // Bytes of a later turn can wait in the system, and need not be asked for.
  int64_t ReceiveInTurn(int host, void* data, int64_t bytes) {
    const int64_t awaited =
        static_cast<int64_t>(received_turns_.size()) - kReceivedAtOnce;
    if (awaited < 0) return hosts_.Receive(PeerOn(host), data, bytes);
    const Turn& turn = received_turns_[awaited];
    return hosts_.ReceiveAfter(PeerOn(turn.from), turn.end, PeerOn(host), data, bytes);
  }

  const bool moves_inputs_;  // this rank's input leaves the host as it is
  const bool small_;
  int64_t part_bytes_ = 0;  // the largest
  char* scratch_ = nullptr;
  std::array<std::vector<Ends>, kInFlight> ends_;  // by host
  std::vector<Turn> turns_, received_turns_;
  int64_t turns_at_once_ = 0;
};

}  // namespace

bool AllreduceDirectly(const AllreduceOptions& options, HostsCommunicator* hosts) {
  return DirectReducer(options, hosts).Run();
}

}  // namespace keras_hvd
