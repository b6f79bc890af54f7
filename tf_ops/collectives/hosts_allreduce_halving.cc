// See hosts_reducer.h.
//
// A lane adds up its host's slice, and then exchanges parts of it with the lanes of few
// other hosts, one after the other: first sums, then results (halving_doubling.h). That
// takes far fewer messages than a part for each host does. A late lane gets no more
// than its slice at once.
#include <algorithm>
#include <utility>
#include <vector>

#include "tf_ops/collectives/halving_doubling.h"
#include "tf_ops/collectives/hosts_reducer.h"

namespace keras_hvd {
namespace {

class HalvingReducer : HostsReducer {
 public:
  HalvingReducer(const AllreduceOptions& options, HostsCommunicator* hosts)
      : HostsReducer(options, hosts),
        moves_inputs_(alone_ && stages_.keeps_inputs() && stages_.BeforePairs() == 1),
        parts_(HalvingParts(hosts_.hosts())),
        steps_(HalvingSteps(hosts_.host(), hosts_.hosts())) {
    SetWindowBytes(std::min(line_.bytes(), MostWindowBytes()));
    int64_t parts = 0;
    for (const ExchangeStep& step : steps_) {
      if (step.results) continue;
      last_sum_ = &step;
      parts += step.receives.end - step.receives.begin;
    }
    receives_.resize(steps_.size());
    scratch_ =
        hosts_.Scratch(slice_bytes_ + parts * Window{0, slice_bytes_}.Slice(parts_));
  }

  bool Run() {
    for (int64_t number = 0; number < windows_; ++number) {
      if (!ReduceHost(number) || !Exchange(number) || !ShareResults(number)) {
        return false;
      }
    }
    return hosts_.AwaitSent();
  }

 private:
  // The place of a step's incoming bytes, each element at `place` plus its position,
  // and the bytes that its link has received before and after them.
  struct Receives {
    char* place;
    int64_t begin, end;
  };

  // ---- Steps

  bool ReduceHost(int64_t number) {
    if (!EnterWindow(number) || !ShareInputs(number)) return false;
    if (!is_lane() || moves_inputs_) return true;
    // The last window's sums may still be on their way.
    if (!hosts_.AwaitSent()) return false;
    ReduceOwn(number, SliceAt(number), Sum(number, 0),
              [&](DataType dtype) { return stages_.OfHostForPairs(dtype); });
    return true;
  }

  bool Exchange(int64_t number) {
    if (!is_lane()) return true;
    PostReceives(number);
    has_added_ = false;
    for (size_t i = 0; i < steps_.size(); ++i) {
      const ExchangeStep& step = steps_[i];
      Send(number, step, receives_[i]);
      if (step.receives.empty()) continue;
      const bool ok = step.results
                          ? hosts_.AwaitReceived(PeerOn(step.host), receives_[i].end)
                          : AddReceived(number, step, receives_[i]);
      if (!ok) return false;
    }
    return true;
  }

  // All at once: bytes that come early need not wait in the system, which would hold up
  // their sender.
  void PostReceives(int64_t number) {
    int64_t used = slice_bytes_;
    for (size_t i = 0; i < steps_.size(); ++i) {
      const ExchangeStep& step = steps_[i];
      const Window range = Range(number, step.receives);
      Receives& receives = receives_[i];
      receives = {scratch_ + used - range.begin, -1, 0};
      if (!step.results) used += range.end - range.begin;
      ForEachPiece(range, [&](const Stretch& piece) {
        char* const to =
            step.results ? ResultOf(number, piece) : receives.place + piece.position;
        receives.end = hosts_.Receive(PeerOn(step.host), to, piece.bytes);
        if (receives.begin < 0) receives.begin = receives.end - piece.bytes;
      });
    }
  }

  // A lane is at most kMostIncomingBytes ahead of a peer that sends as much.
  void Send(int64_t number, const ExchangeStep& step, const Receives& receives) {
    const int peer = PeerOn(step.host);
    int64_t awaited = receives.begin - kMostIncomingBytes;
    ForEachPiece(Range(number, step.sends), [&](const Stretch& piece) {
      const char* const from =
          step.results ? ResultOf(number, piece) : SumOf(number, piece);
      hosts_.SendAfter(peer, std::min(awaited, receives.end), peer, from, piece.bytes);
      awaited += piece.bytes;
    });
  }

  bool AddReceived(int64_t number, const ExchangeStep& step, const Receives& receives) {
    int64_t end = receives.begin;
    bool ok = true;
    ForEachPiece(Range(number, step.receives), [&](const Stretch& piece) {
      end += piece.bytes;
      ok = ok && hosts_.AwaitReceived(PeerOn(step.host), end);
      if (ok) Add(number, step, receives, piece);
    });
    has_added_ = true;
    return ok;
  }

  void Add(int64_t number, const ExchangeStep& step, const Receives& receives,
           const Stretch& piece) {
    Enter(CollectivePhase::kReduce, WindowAt(number));
    const void* pair[] = {SumOf(number, piece), receives.place + piece.position};
    // The first of the pair is the sum of the first hosts.
    if (step.host < hosts_.host()) std::swap(pair[0], pair[1]);
    const bool is_last = &step == last_sum_;
    Reduce(is_last ? stages_.OfLastPair() : stages_.OfPair(), piece.tensor.dtype, pair,
           2, piece.elements(),
           is_last ? ResultOf(number, piece) : Sum(number, piece.position));
  }

  // ---- Places

  Window Range(int64_t number, const PartRange& parts) const {
    if (parts.empty()) return {0, 0};
    const Window slice = SliceAt(number);
    return {slice.Part(parts.begin, parts_).begin,
            slice.Part(parts.end - 1, parts_).end};
  }

  // The sum of some hosts, this one among them. At first it may be this rank's input.
  char* Sum(int64_t number, int64_t position) const {
    return scratch_ + position - SliceAt(number).begin;
  }
  const char* SumOf(int64_t number, const Stretch& stretch) const {
    return moves_inputs_ && !has_added_ ? stretch.input()
                                        : Sum(number, stretch.position);
  }

  const bool moves_inputs_;  // the first sums are this rank's input
  const int parts_;
  const std::vector<ExchangeStep> steps_;
  const ExchangeStep* last_sum_ = nullptr;  // its sum is a result
  std::vector<Receives> receives_;          // by step
  char* scratch_ = nullptr;
  bool has_added_ = false;
};

}  // namespace

bool SuitHalving(const AllreduceOptions& options, const HostsCommunicator& hosts) {
  const StagedReduction stages(options.reduction, hosts.count(), hosts.hosts());
  return hosts.hosts() >= options.halving_hosts &&
         Line(options.tensors).bytes() <= options.window_bytes &&
         std::all_of(options.tensors.begin(), options.tensors.end(),
                     [&](const AllreduceTensor& tensor) {
                       return stages.PairsHosts(tensor.dtype);
                     });
}

bool AllreduceByHalving(const AllreduceOptions& options, HostsCommunicator* hosts) {
  return HalvingReducer(options, hosts).Run();
}

}  // namespace keras_hvd
