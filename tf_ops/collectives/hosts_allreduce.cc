// See allreduce.h.
//
// The direct scheme (see allreduce.cc), with a step between the hosts. A window has one
// slice for each lane, and a slice has one part for each host. The members of a host
//   1. copy the slices into their exchange memories, and publish;
//   2. each lane reduces its slice, and sends each host's part of it to the same lane
//      there;
//   3. each lane reduces its host's part of what all hosts have sent, and sends the
//      result to the other hosts;
//   4. each lane publishes its slice when it has all results, and all copy it out.
// While one step waits for the network, the next windows are already in the steps
// before, so that the network always has something to send. Small tensors skip the
// second exchange: every host reduces all of a slice.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/collectives/allreduce_line.h"
#include "tf_ops/collectives/copy.h"
#include "tf_ops/collectives/hosts_parts.h"
#include "tf_ops/collectives/staged_reduction.h"

namespace keras_hvd {
namespace {

// The network gets something to do after each piece of this size.
constexpr int64_t kPieceBytes = 128 << 10;
// A tensor is cut into several windows, so that its steps overlap. Parts of this size
// are still in the cache when they are reduced, and long enough that two hosts, each of
// which sends before it receives, seldom wait for each other.
constexpr int64_t kMostPartBytes = 512 << 10;
// What several others send to a lane at once has to wait in the switch, which drops
// what it cannot hold. The sender notices only after a timeout. So hosts send in turns:
// in the n-th of a window, each to the n-th after it. So much is under way to each;
// many short turns keep hosts in step, and a few long ones do not.
constexpr int64_t kMostIncomingBytes = 384 << 10;
constexpr int64_t kMostTurnBytes = kMostIncomingBytes / 8;
// Between hosts a second wait costs more than it does in shared memory, and more than
// the time for so many bytes, in multiples of what is small there.
constexpr int64_t kSmallBetweenHosts = 8;
constexpr int64_t kMoreForSmall = 2;

class HostsReducer {
 public:
  HostsReducer(const AllreduceOptions& options, HostsCommunicator* hosts)
      : options_(options),
        hosts_(*hosts),
        local_(hosts->local()),
        line_(options.tensors),
        stages_(options.reduction, hosts_.count(), hosts_.hosts()),
        lane_(local_.index()),
        alone_(local_.count() == 1),
        moves_inputs_(alone_ && stages_.keeps_inputs()),
        small_(line_.bytes() <= MostSmallBytes(options.small_bytes)),
        window_bytes_(
            small_ ? line_.bytes()
                   : std::min({options.window_bytes, MostWindowBytes(),
                               hosts_.lanes() * hosts_.hosts() * MostPartBytes()})),
        windows_(line_.bytes() == 0 ? 0 : (line_.bytes() - 1) / window_bytes_ + 1) {
    const Window first = WindowAt(0);
    const int64_t slice = first.Slice(hosts_.lanes());
    slice_bytes_ = slice;
    part_bytes_ = small_ ? slice : Window{0, slice}.Slice(hosts_.hosts());
    scratch_ = hosts_.Scratch(kSumsInFlight * slice_bytes_ +
                              kInFlight * hosts_.hosts() * part_bytes_);
    turns_at_once_ = hosts_.hosts() <= 2
                         ? std::numeric_limits<int64_t>::max()
                         : std::max<int64_t>(1, kMostIncomingBytes /
                                                    std::max(part_bytes_, kCacheLine));
    inputs_.resize(std::max(local_.count(), hosts_.hosts()));
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

  // How far a link has come when it has brought the sums, sent the results, and brought
  // the results of a window.
  struct Ends {
    int64_t sums = 0, sent = 0, results = 0;
  };
  // Where a turn's bytes come from, and how far that link has then come.
  struct Turn {
    int from;
    int64_t end;
  };
  Ends& EndsOf(int64_t number, int host) { return ends_[number % kInFlight][host]; }

  // Half of an exchange memory's half holds what is copied in, half the results.
  int64_t MostWindowBytes() const {
    return local_.window_bytes() / 2 / kCacheLine * kCacheLine;
  }

  int64_t MostPartBytes() const {
    return hosts_.hosts() <= 2 ? kMostPartBytes : kMostTurnBytes;
  }

  // What every host sends to every other, instead of two exchanges of parts. Of two
  // hosts, each sends as much either way; of more, (hosts - 2) / hosts of it in vain to
  // each other one.
  int64_t MostSmallBytes(int64_t small_bytes) const {
    const int64_t hosts = hosts_.hosts();
    const int64_t most = std::min(small_bytes, MostWindowBytes());
    if (hosts <= 2) return std::min(kSmallBetweenHosts * most, MostWindowBytes());
    return std::min(kMoreForSmall * most * hosts / ((hosts - 1) * (hosts - 2)),
                    MostWindowBytes());
  }

  bool is_lane() const { return lane_ < hosts_.lanes(); }
  bool IsWindow(int64_t number) const { return number >= 0 && number < windows_; }
  Window WindowAt(int64_t number) const {
    const int64_t begin = number * window_bytes_;
    return {begin, std::min(line_.bytes(), begin + window_bytes_)};
  }
  Window SliceAt(int64_t number) const {
    return WindowAt(number).Part(lane_, hosts_.lanes());
  }
  // What a host reduces of this lane's slice.
  Window PartAt(int64_t number, int host) const {
    const Window slice = SliceAt(number);
    return small_ ? slice : slice.Part(host, hosts_.hosts());
  }
  int PeerOn(int host) const { return hosts_.members_of(host)[lane_]; }

  // ---- Steps

  // Each window begins a round. Whoever publishes it has finished the steps before,
  // and so no longer uses what the window before the last but one has left.
  bool ReduceHost(int64_t number) {
    if (number > 0) {
      ++round_;
      if (!hosts_.NextRound()) return false;
    }
    const Window window = WindowAt(number);
    if (is_lane()) ReceiveSums(number);
    Enter(CollectivePhase::kCopyIn, window);
    for (int lane = 0; lane < hosts_.lanes(); ++lane) {
      if (lane != lane_) CopyIn(window, window.Part(lane, hosts_.lanes()));
    }
    local_.Publish();
    if (!local_.AwaitAllPublished()) return false;
    Enter(CollectivePhase::kReduce, window);
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
    // The results of small tensors may take the place of what is being sent.
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
    if (alone_) return true;
    const int ago = AgoOf(number);
    local_.PublishReduced(ago);
    if (!local_.AwaitAllReduced(ago)) return false;
    const Window window = WindowAt(number);
    Enter(CollectivePhase::kCopyOut, window);
    for (int step = 0; step < hosts_.lanes(); ++step) {
      const int lane = (lane_ + step) % hosts_.lanes();
      CopyOut(number, lane, window.Part(lane, hosts_.lanes()));
    }
    return true;
  }

  // ---- Rounds

  int AgoOf(int64_t number) const { return static_cast<int>(round_ - number); }

  // ---- Places

  // This host's sum, in this lane's memory or in its input.
  char* Sum(int64_t number, int64_t position) const {
    return scratch_ + number % kSumsInFlight * slice_bytes_ + position -
           SliceAt(number).begin;
  }
  const char* SumOf(int64_t number, const AllreduceTensor& tensor, int64_t offset,
                    int64_t position) const {
    return moves_inputs_ ? Input(tensor, offset) : Sum(number, position);
  }
  // Another host's sum.
  char* Received(int64_t number, int host, int64_t position) const {
    return scratch_ + kSumsInFlight * slice_bytes_ +
           (number % kInFlight * hosts_.hosts() + host) * part_bytes_ + position -
           PartAt(number, hosts_.host()).begin;
  }
  // The result of a lane, where the lane's host finds it.
  char* Shared(int64_t number, int lane, int64_t position) const {
    return local_.ExchangeMemory(lane, AgoOf(number)) + MostWindowBytes() + position -
           WindowAt(number).Part(lane, hosts_.lanes()).begin;
  }
  char* ResultOf(int64_t number, const AllreduceTensor& tensor, int64_t offset,
                 int64_t position) const {
    return alone_ ? Output(tensor, offset) : Shared(number, lane_, position);
  }

  // ---- Between this rank and its host

  void CopyIn(const Window& window, const Window& part) {
    char* const to = local_.ExchangeMemory(lane_) - window.begin;
    ForEachPiece(part, [&](const AllreduceTensor& tensor, int64_t offset,
                           int64_t position, int64_t bytes) {
      CopyOrdinary(to + position, Input(tensor, offset), bytes);
    });
  }

  void CopyOut(int64_t number, int lane, const Window& part) {
    ForEachPiece(part, [&](const AllreduceTensor& tensor, int64_t offset,
                           int64_t position, int64_t bytes) {
      CopyOrdinary(Output(tensor, offset), Shared(number, lane, position), bytes);
    });
  }

  void ReduceOwn(int64_t number, const Window& part) {
    const int64_t begin = WindowAt(number).begin;
    ForEachPiece(part, [&](const AllreduceTensor& tensor, int64_t offset,
                           int64_t position, int64_t bytes) {
      for (int member = 0; member < local_.count(); ++member) {
        inputs_[member] = local_.ExchangeMemory(member) + position - begin;
      }
      inputs_[lane_] = Input(tensor, offset);
      Reduce(stages_.OfHost(tensor.dtype), tensor.dtype, inputs_.data(), local_.count(),
             bytes / Bytes(tensor.dtype), Sum(number, position));
    });
  }

  // ---- Between hosts

  void ReceiveSums(int64_t number) {
    const Window part = PartAt(number, hosts_.host());
    for (int host = 0; host < hosts_.hosts(); ++host) {
      if (host == hosts_.host()) continue;
      line_.ForEach(
          part.begin, part.end,
          [&](const AllreduceTensor&, int64_t, int64_t position, int64_t bytes) {
            EndsOf(number, host).sums =
                hosts_.Receive(PeerOn(host), Received(number, host, position), bytes);
          });
    }
  }

  // Each host's part leaves as soon as it is reduced; this host's is the last.
  void SendSums(int64_t number) {
    const bool reduces = !moves_inputs_;
    if (reduces && small_) ReduceOwn(number, SliceAt(number));
    for (int step = 1; step <= hosts_.hosts(); ++step) {
      const int host = hosts_.host_after(step);
      const Window part = PartAt(number, host);
      if (reduces && !small_) ReduceOwn(number, part);
      if (host == hosts_.host()) continue;
      line_.ForEach(part.begin, part.end,
                    [&](const AllreduceTensor& tensor, int64_t offset, int64_t position,
                        int64_t bytes) {
                      SendInTurn(host, SumOf(number, tensor, offset, position), bytes);
                    });
      const int from = hosts_.host_after(hosts_.hosts() - step);
      EndTurn(from, EndsOf(number, from).sums);
      hosts_.Progress();
    }
  }

  void ReduceSums(int64_t number) {
    ForEachPiece(PartAt(number, hosts_.host()),
                 [&](const AllreduceTensor& tensor, int64_t offset, int64_t position,
                     int64_t bytes) {
                   for (int host = 0; host < hosts_.hosts(); ++host) {
                     inputs_[host] = Received(number, host, position);
                   }
                   inputs_[hosts_.host()] = SumOf(number, tensor, offset, position);
                   Reduce(stages_.OfHosts(tensor.dtype), tensor.dtype, inputs_.data(),
                          hosts_.hosts(), bytes / Bytes(tensor.dtype),
                          ResultOf(number, tensor, offset, position));
                 });
  }

  void ExchangeResults(int64_t number) {
    const auto for_each = [&](int host, const auto& visit) {
      const Window part = PartAt(number, host);
      line_.ForEach(part.begin, part.end,
                    [&](const AllreduceTensor& tensor, int64_t offset, int64_t position,
                        int64_t bytes) {
                      visit(ResultOf(number, tensor, offset, position), bytes);
                    });
    };
    for (int step = 1; step < hosts_.hosts(); ++step) {
      const int host = hosts_.host_after(step);
      for_each(host, [&](char* result, int64_t bytes) {
        EndsOf(number, host).results = hosts_.Receive(PeerOn(host), result, bytes);
      });
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

  // A turn has begun when an earlier one has brought what it brings.
  int64_t SendInTurn(int host, const void* data, int64_t bytes) {
    const int64_t awaited = static_cast<int64_t>(turns_.size()) - turns_at_once_;
    if (awaited < 0) return hosts_.Send(PeerOn(host), data, bytes);
    const Turn& turn = turns_[awaited];
    return hosts_.SendAfter(PeerOn(turn.from), turn.end, PeerOn(host), data, bytes);
  }
  void EndTurn(int from, int64_t end) { turns_.push_back({from, end}); }

  // ---- All

  template <typename Visit>
  void ForEachPiece(const Window& part, const Visit& visit) {
    line_.ForEach(part.begin, part.end,
                  [&](const AllreduceTensor& tensor, int64_t offset, int64_t position,
                      int64_t bytes) {
                    for (int64_t done = 0; done < bytes; done += kPieceBytes) {
                      const int64_t piece = std::min(kPieceBytes, bytes - done);
                      visit(tensor, offset + done, position + done, piece);
                      if (piece == kPieceBytes) hosts_.Progress();
                    }
                  });
  }

  void Enter(CollectivePhase phase, const Window& window) {
    local_.Enter(phase, window.begin, window.end);
  }

  const AllreduceOptions& options_;
  HostsCommunicator& hosts_;
  Communicator& local_;
  const Line line_;
  const StagedReduction stages_;
  const int lane_;           // this rank's place on its host
  const bool alone_;         // on its host
  const bool moves_inputs_;  // what leaves this host is this rank's input
  const bool small_;
  const int64_t window_bytes_;
  const int64_t windows_;
  int64_t slice_bytes_ = 0, part_bytes_ = 0;  // the largest
  char* scratch_ = nullptr;
  int64_t round_ = 0;
  std::vector<const void*> inputs_;
  std::array<std::vector<Ends>, kInFlight> ends_;  // by host
  std::vector<Turn> turns_;
  int64_t turns_at_once_ = 0;
};

// For what cannot be reduced in stages: all members' elements travel to one of them.
bool AllreduceWhole(const AllreduceOptions& options, HostsCommunicator* hosts) {
  const int members = hosts->count();
  std::vector<std::vector<int64_t>> starts;
  std::vector<const void*> inputs, own;
  std::vector<void*> outputs;
  for (const AllreduceTensor& tensor : options.tensors) {
    std::vector<int64_t>& parts = starts.emplace_back();
    for (int member = 0; member <= members; ++member) {
      parts.push_back(PartStart(tensor.elements, member, members) *
                      Bytes(tensor.dtype));
    }
    inputs.push_back(tensor.input);
    outputs.push_back(tensor.output);
    own.push_back(Output(tensor, parts[hosts->index()]));
  }
  const Parts parts(starts);
  const bool scattered = Scatter(
      parts, inputs, hosts,
      [&](size_t number, int64_t offset, int64_t bytes, const void* const* stretches) {
        const AllreduceTensor& tensor = options.tensors[number];
        Reduce(options.reduction, tensor.dtype, stretches, members,
               bytes / Bytes(tensor.dtype),
               Output(tensor, starts[number][hosts->index()] + offset));
      });
  return scattered && hosts->NextRound() && Gather(parts, own, hosts, outputs);
}

}  // namespace

bool Allreduce(const AllreduceOptions& options, HostsCommunicator* hosts) {
  const StandardFloatingPoint floating_point;
  const StagedReduction stages(options.reduction, hosts->count(), hosts->hosts());
  AllreduceOptions staged = options, whole = options;
  staged.tensors.clear();
  whole.tensors.clear();
  for (const AllreduceTensor& tensor : options.tensors) {
    const bool has_stages = stages.Suits(tensor.dtype);
    (has_stages ? staged : whole).tensors.push_back(tensor);
  }
  if (!HostsReducer(staged, hosts).Run()) return false;
  return whole.tensors.empty() || (hosts->local().Regroup() && hosts->NextRound() &&
                                   AllreduceWhole(whole, hosts));
}

}  // namespace keras_hvd
