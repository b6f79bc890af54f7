// The direct scheme over shared memory. The tensors, each padded to whole cache lines,
// form one line of bytes, which is processed in windows. A window has one slice for
// each member. Each member
//   1. copies the slices that others reduce into its exchange memory, and publishes;
//   2. reduces its own slice from its tensors and the others' exchange memories into
//      its exchange memory and its output, and publishes that;
//   3. copies the other slices' results from the others' exchange memories.
// So each byte is written twice and read twice, whatever the number of members. Small
// tensors skip the second publication: every member reduces all of them.
#include "tf_ops/collectives/allreduce.h"

#include <algorithm>

#include "tf_ops/collectives/allreduce_line.h"

namespace keras_hvd {
namespace {

// If a slice cannot be written to both places in one pass, each piece of this size is
// copied to the second place while it is in the first-level cache.
constexpr int64_t kPieceBytes = 4 << 10;

class Reducer {
 public:
  Reducer(const AllreduceOptions& options, Communicator* communicator)
      : options_(options),
        communicator_(*communicator),
        line_(options.tensors),
        window_bytes_(std::min(options.window_bytes, communicator->window_bytes())),
        inputs_(communicator->count()),
        copy_to_output_(options.stores == Stores::kOrdinary ? CopyOrdinary
                                                            : CopyStreaming),
        copy_to_exchange_(options.stores == Stores::kStreaming ? CopyStreaming
                                                               : CopyOrdinary) {}

  bool Run() {
    if (communicator_.count() == 1) {
      ReduceAlone();
      return true;
    }
    if (line_.bytes() <= std::min(options_.small_bytes, communicator_.window_bytes())) {
      return ReduceSmall();
    }
    const bool ok = ReduceWindows();
    if (options_.stores != Stores::kOrdinary) StoreFence();
    return ok;
  }

 private:
  // Publish a window's input before copying the last window's results, so the others
  // find it when they need it.
  bool ReduceWindows() {
    PublishInput(WindowAt(0));
    for (int64_t begin = 0; begin < line_.bytes(); begin += window_bytes_) {
      const Window window = WindowAt(begin);
      if (!ReduceWindow(window)) return false;
      const bool last = window.end == line_.bytes();
      if (!last) {
        // A member that has reduced this window has read all results of the previous
        // one.
        if (!communicator_.NextRound()) return false;
        PublishInput(WindowAt(window.end));
      }
      CopyResults(window, last ? 0 : 1);
    }
    return true;
  }

  Window WindowAt(int64_t begin) const {
    return {begin, std::min(line_.bytes(), begin + window_bytes_)};
  }

  void Enter(CollectivePhase phase, const Window& window) {
    communicator_.Enter(phase, window.begin, window.end);
  }

  void ReduceAlone() {
    communicator_.Enter(CollectivePhase::kReduce);
    for (const AllreduceTensor& tensor : options_.tensors) {
      Reduce(options_.reduction, tensor.dtype, &tensor.input, 1, tensor.elements,
             tensor.output);
    }
  }

  bool ReduceSmall() {
    const Window window = {0, line_.bytes()};
    Enter(CollectivePhase::kCopyIn, window);
    CopyIn(window, window);
    communicator_.Publish();
    if (!communicator_.AwaitAllPublished()) return false;
    Enter(CollectivePhase::kReduce, window);
    line_.ForEach(0, line_.bytes(), [&](const Stretch& stretch) {
      ReduceStretch(stretch.tensor, stretch.position, stretch.bytes, stretch.output());
    });
    return true;
  }

  // Publishes the slices that the others reduce.
  void PublishInput(const Window& window) {
    const int members = communicator_.count();
    Enter(CollectivePhase::kCopyIn, window);
    for (int member = 0; member < members; ++member) {
      if (member != communicator_.index()) CopyIn(window, window.Part(member, members));
    }
    if (options_.stores == Stores::kStreaming) StoreFence();
    communicator_.Publish();
  }

  bool ReduceWindow(const Window& window) {
    Enter(CollectivePhase::kNone, window);
    if (!communicator_.AwaitAllPublished()) return false;
    Enter(CollectivePhase::kReduce, window);
    ReduceOwnSlice(window, window.Part(communicator_.index(), communicator_.count()));
    if (options_.stores == Stores::kStreaming) StoreFence();
    communicator_.PublishReduced();
    return communicator_.AwaitAllReduced();
  }

  // Copies the others' results, in this round or the one `ago` before.
  void CopyResults(const Window& window, int ago) {
    const int members = communicator_.count();
    Enter(CollectivePhase::kCopyOut, window);
    for (int step = 1; step < members; ++step) {
      const int member = (communicator_.index() + step) % members;
      CopyOut(window, window.Part(member, members), member, ago);
    }
  }

  void CopyIn(const Window& window, const Window& part) {
    char* to = communicator_.ExchangeMemory(communicator_.index()) - window.begin;
    line_.ForEach(part.begin, part.end, [&](const Stretch& stretch) {
      copy_to_exchange_(to + stretch.position, stretch.input(), stretch.bytes);
    });
  }

  void CopyOut(const Window& window, const Window& part, int member, int ago) {
    const char* from = communicator_.ExchangeMemory(member, ago) - window.begin;
    line_.ForEach(part.begin, part.end, [&](const Stretch& stretch) {
      copy_to_output_(stretch.output(), from + stretch.position, stretch.bytes);
    });
  }

  void ReduceOwnSlice(const Window& window, const Window& part) {
    char* exchange = communicator_.ExchangeMemory(communicator_.index());
    line_.ForEach(part.begin, part.end, [&](const Stretch& whole) {
      const int64_t window_offset = whole.position - window.begin;
      own_input_ = whole.input();
      if (ReduceInOnePass(whole, window_offset, exchange + window_offset)) return;
      for (int64_t done = 0; done < whole.bytes; done += kPieceBytes) {
        const int64_t piece = std::min(kPieceBytes, whole.bytes - done);
        own_input_ = whole.input() + done;
        ReducePiece(whole.tensor, window_offset + done, piece,
                    exchange + window_offset + done, whole.output() + done);
      }
    });
    own_input_ = nullptr;
  }

  bool ReduceInOnePass(const Stretch& stretch, int64_t window_offset, char* exchange) {
    FindInputs(window_offset);
    return ReduceToBoth(options_.reduction, stretch.tensor.dtype, inputs_.data(),
                        communicator_.count(), stretch.elements(), options_.stores,
                        exchange, stretch.output());
  }

  void ReducePiece(const AllreduceTensor& tensor, int64_t window_offset, int64_t bytes,
                   char* exchange, char* output) {
    if (options_.stores != Stores::kStreaming) {
      ReduceStretch(tensor, window_offset, bytes, exchange);
      return copy_to_output_(output, exchange, bytes);
    }
    alignas(kCacheLine) char reduced[kPieceBytes];
    ReduceStretch(tensor, window_offset, bytes, reduced);
    CopyStreaming(exchange, reduced, bytes);
    CopyStreaming(output, reduced, bytes);
  }

  // Finds the inputs at `window_offset` of the members' exchange memories. This rank's
  // own input is there as well, or at `own_input_`.
  void FindInputs(int64_t window_offset) {
    for (int member = 0; member < communicator_.count(); ++member) {
      inputs_[member] = communicator_.ExchangeMemory(member) + window_offset;
    }
    if (own_input_ != nullptr) inputs_[communicator_.index()] = own_input_;
  }

  void ReduceStretch(const AllreduceTensor& tensor, int64_t window_offset,
                     int64_t bytes, char* result) {
    FindInputs(window_offset);
    Reduce(options_.reduction, tensor.dtype, inputs_.data(), communicator_.count(),
           bytes / Bytes(tensor.dtype), result);
  }

  const AllreduceOptions& options_;
  Communicator& communicator_;
  Line line_;
  const int64_t window_bytes_;
  std::vector<const void*> inputs_;
  const char* own_input_ = nullptr;
  void (*const copy_to_output_)(char*, const char*, int64_t);
  void (*const copy_to_exchange_)(char*, const char*, int64_t);
};

}  // namespace

bool Allreduce(const AllreduceOptions& options, Communicator* communicator) {
  const StandardFloatingPoint floating_point;
  return Reducer(options, communicator).Run();
}

}  // namespace keras_hvd
