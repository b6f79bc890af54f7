// The work within a host, which all ways to allreduce over several hosts share.
//
// A window of the line of tensors has one slice for each lane. The members of a host
// copy the slices into their exchange memories; each lane reduces its slice there, and
// publishes it again when the lanes of all hosts have made the result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/collectives/allreduce_line.h"
#include "tf_ops/collectives/copy.h"
#include "tf_ops/collectives/staged_reduction.h"

namespace keras_hvd {

// Whether AllreduceByHalving can reduce these, and should.
bool SuitHalving(const AllreduceOptions& options, const HostsCommunicator& hosts);
// Each lane sends each other host's lane its part, and gets the results from there.
bool AllreduceDirectly(const AllreduceOptions& options, HostsCommunicator* hosts);
// As halving_doubling.h has it.
bool AllreduceByHalving(const AllreduceOptions& options, HostsCommunicator* hosts);

// Bytes for a lane have to wait in the switch, which drops those that it cannot hold.
// The sender notices only after a timeout. At most this many may be under way to each
// lane.
inline constexpr int64_t kMostIncomingBytes = 384 << 10;

class HostsReducer {
 protected:
  // The network gets something to do after each piece of this size.
  static constexpr int64_t kPieceBytes = 128 << 10;

  HostsReducer(const AllreduceOptions& options, HostsCommunicator* hosts)
      : options_(options),
        hosts_(*hosts),
        local_(hosts->local()),
        line_(options.tensors),
        stages_(options.reduction, hosts_.count(), hosts_.hosts()),
        lane_(local_.index()),
        alone_(local_.count() == 1),
        copy_in_(options.stores == Stores::kStreaming ? CopyStreaming : CopyOrdinary),
        copy_out_(options.stores == Stores::kOrdinary ? CopyOrdinary : CopyStreaming),
        inputs_(std::max(local_.count(), hosts_.hosts())) {}

  void SetWindowBytes(int64_t bytes) {
    window_bytes_ = bytes;
    windows_ = line_.bytes() == 0 ? 0 : (line_.bytes() - 1) / bytes + 1;
    slice_bytes_ = WindowAt(0).Slice(hosts_.lanes());
  }

  // One half of an exchange memory's half holds the inputs, the other one the results.
  int64_t MostWindowBytes() const {
    return local_.window_bytes() / 2 / kCacheLine * kCacheLine;
  }

  bool is_lane() const { return lane_ < hosts_.lanes(); }
  Window WindowAt(int64_t number) const {
    const int64_t begin = number * window_bytes_;
    return {begin, std::min(line_.bytes(), begin + window_bytes_)};
  }
  Window SliceAt(int64_t number) const {
    return WindowAt(number).Part(lane_, hosts_.lanes());
  }
  int PeerOn(int host) const { return hosts_.members_of(host)[lane_]; }

  // ---- Rounds, one for each window

  bool EnterWindow(int64_t number) {
    if (number == 0) return true;
    ++round_;
    return hosts_.NextRound();
  }
  int AgoOf(int64_t number) const { return static_cast<int>(round_ - number); }

  // ---- Between this rank and its host

  bool ShareInputs(int64_t number) {
    const Window window = WindowAt(number);
    Enter(CollectivePhase::kCopyIn, window);
    for (int lane = 0; lane < hosts_.lanes(); ++lane) {
      if (lane != lane_) CopyIn(window, window.Part(lane, hosts_.lanes()));
    }
    if (options_.stores == Stores::kStreaming) StoreFence();
    local_.Publish();
    if (!local_.AwaitAllPublished()) return false;
    Enter(CollectivePhase::kReduce, window);
    return true;
  }

  // This host's sum of a part of a window, each element at `to` plus its position.
  template <typename ReductionOf>
  void ReduceOwn(int64_t number, const Window& part, char* to,
                 const ReductionOf& reduction_of) {
    const int64_t begin = WindowAt(number).begin;
    ForEachPiece(part, [&](const Stretch& piece) {
      for (int member = 0; member < local_.count(); ++member) {
        inputs_[member] = local_.ExchangeMemory(member) + piece.position - begin;
      }
      inputs_[lane_] = piece.input();
      const DataType dtype = piece.tensor.dtype;
      Reduce(reduction_of(dtype), dtype, inputs_.data(), local_.count(),
             piece.elements(), to + piece.position);
    });
  }

  // Where this lane's results go: to the others of its host, if there are any.
  char* ResultOf(int64_t number, const Stretch& stretch) const {
    return alone_ ? stretch.output() : Shared(number, lane_, stretch.position);
  }

  bool ShareResults(int64_t number) {
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
    if (options_.stores != Stores::kOrdinary) StoreFence();
    return true;
  }

  // ---- All

  template <typename Visit>
  void ForEachPiece(const Window& part, const Visit& visit) {
    line_.ForEach(part.begin, part.end, [&](const Stretch& whole) {
      for (int64_t done = 0; done < whole.bytes; done += kPieceBytes) {
        const int64_t bytes = std::min(kPieceBytes, whole.bytes - done);
        visit(Stretch{whole.tensor, whole.offset + done, whole.position + done, bytes});
        if (bytes == kPieceBytes) hosts_.Progress();
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
  const int lane_;    // this rank's place on its host
  const bool alone_;  // on its host
  void (*const copy_in_)(char* to, const char* from, int64_t bytes);
  void (*const copy_out_)(char* to, const char* from, int64_t bytes);
  int64_t window_bytes_ = 0;
  int64_t windows_ = 0;
  int64_t slice_bytes_ = 0;  // the largest
  int64_t round_ = 0;
  std::vector<const void*> inputs_;

 private:
  // The result of a lane, where the lane's host finds it.
  char* Shared(int64_t number, int lane, int64_t position) const {
    return local_.ExchangeMemory(lane, AgoOf(number)) + MostWindowBytes() + position -
           WindowAt(number).Part(lane, hosts_.lanes()).begin;
  }

  void CopyIn(const Window& window, const Window& part) {
    char* const to = local_.ExchangeMemory(lane_) - window.begin;
    ForEachPiece(part, [&](const Stretch& piece) {
      copy_in_(to + piece.position, piece.input(), piece.bytes);
    });
  }

  void CopyOut(int64_t number, int lane, const Window& part) {
    ForEachPiece(part, [&](const Stretch& piece) {
      copy_out_(piece.output(), Shared(number, lane, piece.position), piece.bytes);
    });
  }
};

}  // namespace keras_hvd
