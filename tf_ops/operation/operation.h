// A pending request: its description, its data, and its callback.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "tf_ops/operation/description.h"
#include "tf_ops/operation/stream_point.h"
#include "tf_ops/transport/doorbell.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

// The end of a request whose caller drives for a while. Either the caller or the engine
// calls `done`, whichever comes second.
struct Ending {
  std::atomic<bool> claimed{false};
  std::atomic<bool> ended{false};
  Status status;
  std::atomic<std::thread::id> caller;  // as long as it drives

  // Whether the calling thread is the request's caller, which thus puts nothing else on
  // its stream meanwhile.
  bool CallerDrives() const { return caller.load() == std::this_thread::get_id(); }
};

// The engine owns the buffers until `done` has been called.
struct Operation {
  struct Buffer {
    const void* input;
    void* output;
  };
  std::shared_ptr<const Description> description;
  uint64_t submitter = 0;
  std::vector<Buffer> buffers;
  std::vector<int64_t> rows;    // this rank's first dimensions if they may differ
  std::vector<int64_t> splits;  // alltoall: how many rows go to each member
  // If first dimensions may differ: allocates a tensor's result, or returns null.
  std::function<void*(size_t tensor, const std::vector<int64_t>& rows)> allocate;
  std::function<void(const Status&)> done;

  std::unique_ptr<StreamPoint> stream_point;  // for GPU tensors
  int32_t* answer = nullptr;  // for an agreement: set before `done` is called

  // For the engine's own use.
  struct alignas(64) Line {
    char bytes[64];
  };
  std::vector<Line> zeros;         // a joined rank's contribution
  std::shared_ptr<Ending> ending;  // if a caller may call `done` itself
  uint64_t log_number = 0;
  Clock::time_point submitted;
  bool out_of_memory = false;
  std::vector<int64_t> allocated_bytes;  // for the results

  // The size of this rank's tensors.
  int64_t input_bytes() const;
};

// Allocates the result of one of an operation's tensors, which has `rows` rows from
// each rank. Returns null if there is no memory, or none is needed.
void* AllocateResult(Operation* operation, size_t tensor,
                     const std::vector<int64_t>& rows);

// Operations of one kind and process set that run as one collective.
using Batch = std::vector<std::unique_ptr<Operation>>;

// The size of this rank's tensors.
int64_t InputBytes(const Batch& batch);

}  // namespace keras_hvd
