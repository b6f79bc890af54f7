// A request under way: what it is about, where its data lie, and what is called at its
// end.
#ifndef KERAS_HVD_TF_OPS_OPERATION_OPERATION_H_
#define KERAS_HVD_TF_OPS_OPERATION_OPERATION_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tf_ops/operation/description.h"
#include "tf_ops/operation/stream_point.h"
#include "tf_ops/transport/doorbell.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

// The end of a request whose caller drives for a while, and of which one of the two,
// caller or engine, calls `done`: whoever comes second.
struct Ending {
  std::atomic<bool> claimed{false};
  std::atomic<bool> ended{false};
  Status status;
};

// The buffers stay the engine's until `done` has been called.
struct Operation {
  struct Buffer {
    const void* input;
    void* output;
  };
  std::shared_ptr<const Description> description;
  uint64_t submitter = 0;
  std::vector<Buffer> buffers;
  std::vector<int64_t> rows;    // this rank's first dimensions, where they may differ
  std::vector<int64_t> splits;  // alltoall: how many rows go to each member
  // Where first dimensions may differ: memory for a tensor's result, or null.
  std::function<void*(size_t tensor, const std::vector<int64_t>& rows)> allocate;
  std::function<void(const Status&)> done;

  std::unique_ptr<StreamPoint> stream_point;  // of tensors on a GPU
  int32_t* answer = nullptr;  // of an agreement: set before `done` is called

  // The engine's own notes.
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> zeros;         // what a rank that has joined takes part with
  std::shared_ptr<Ending> ending;  // where a caller may see to `done` itself
  uint64_t log_number = 0;
  Clock::time_point submitted;
  bool out_of_memory = false;
  std::vector<int64_t> allocated_bytes;  // of the results

  // Of this rank's tensors.
  int64_t input_bytes() const;
};

// Memory for the result of one of an operation's tensors, which gets `rows`; null if
// there is none, or none is needed.
void* AllocateResult(Operation* operation, size_t tensor,
                     const std::vector<int64_t>& rows);

// What runs together, as one collective: operations of one kind and process set.
using Batch = std::vector<std::unique_ptr<Operation>>;

// Of this rank's tensors.
int64_t InputBytes(const Batch& batch);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_OPERATION_OPERATION_H_
