// See shared_memory_backend.h.
#include "tf_ops/backend/shared_memory_backend.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tf_ops/collectives/adasum.h"
#include "tf_ops/collectives/allgather.h"
#include "tf_ops/collectives/allgather_values.h"
#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/collectives/alltoall.h"
#include "tf_ops/collectives/barrier.h"
#include "tf_ops/collectives/broadcast.h"
#include "tf_ops/collectives/hashes.h"
#include "tf_ops/collectives/reducescatter.h"

namespace keras_hvd {
namespace {

int64_t AllreduceBytes(const AllreduceOptions& options) {
  int64_t bytes = 0;
  for (const AllreduceTensor& tensor : options.tensors) {
    bytes += tensor.elements * Bytes(tensor.dtype);
  }
  return bytes;
}

// Whether most of the result replaces its input.
bool IsInPlace(const AllreduceOptions& options) {
  int64_t balance = 0;
  for (const AllreduceTensor& tensor : options.tensors) {
    const int64_t bytes = tensor.elements * Bytes(tensor.dtype);
    balance += tensor.output == tensor.input ? bytes : -bytes;
  }
  return balance >= 0;
}

bool RunAdasum(const AllreduceOptions& allreduce, Communicator* communicator) {
  const Reduction& reduction = allreduce.reduction;
  return Adasum({reduction.prescale, reduction.postscale, allreduce.tensors},
                communicator);
}

bool RunAllreduce(const Batch& batch, const BatchSettings& settings,
                  StoreChoice* store_choice, Communicator* communicator) {
  AllreduceOptions allreduce;
  allreduce.reduction = batch.front()->description->reduction;
  for (const auto& operation : batch) {
    const std::vector<TensorDescription>& tensors = operation->description->tensors;
    for (size_t i = 0; i < tensors.size(); ++i) {
      allreduce.tensors.push_back({tensors[i].dtype, Elements(tensors[i]),
                                   operation->buffers[i].input,
                                   operation->buffers[i].output});
    }
  }
  if (allreduce.reduction.op == ReduceOp::kAdasum)
    return RunAdasum(allreduce, communicator);
  const bool in_place = IsInPlace(allreduce);
  allreduce.stores = settings.stores[in_place ? 1 : 0];
  allreduce.window_bytes = settings.tuning.window_bytes;
  allreduce.small_bytes = settings.tuning.small_bytes;
  const Clock::time_point start = Clock::now();
  if (!Allreduce(allreduce, communicator)) return false;
  if (store_choice != nullptr) {
    const std::chrono::duration<double> taken = Clock::now() - start;
    store_choice->Learn(AllreduceBytes(allreduce), in_place, allreduce.stores,
                        taken.count());
  }
  return true;
}

bool RunAllgather(Operation* operation, Communicator* communicator) {
  AllgatherOptions allgather;
  for (size_t i = 0; i < operation->buffers.size(); ++i) {
    AllgatherTensor& tensor = allgather.tensors.emplace_back();
    tensor.input = operation->buffers[i].input;
    tensor.rows = operation->rows[i];
    tensor.row_bytes = RowBytes(operation->description->tensors[i]);
    tensor.allocate = [operation, i](const std::vector<int64_t>& rows) {
      return AllocateResult(operation, i, rows);
    };
  }
  return Allgather(allgather, communicator);
}

bool RunAlltoall(Operation* operation, Communicator* communicator) {
  AlltoallOptions alltoall;
  alltoall.input = operation->buffers.front().input;
  alltoall.splits = operation->splits;
  alltoall.row_bytes = RowBytes(operation->description->tensors.front());
  alltoall.allocate = [operation](const std::vector<int64_t>& rows) {
    return AllocateResult(operation, 0, rows);
  };
  return Alltoall(alltoall, communicator);
}

bool RunBroadcast(const Operation& operation, const std::vector<int>& members,
                  Communicator* communicator) {
  BroadcastOptions broadcast;
  broadcast.root =
      std::lower_bound(members.begin(), members.end(), operation.description->root) -
      members.begin();
  broadcast.bytes = operation.description->bytes();
  broadcast.input = operation.buffers.front().input;
  broadcast.output = operation.buffers.front().output;
  return Broadcast(broadcast, communicator);
}

bool RunReducescatter(const Operation& operation, Communicator* communicator) {
  ReducescatterOptions reducescatter;
  reducescatter.reduction = operation.description->reduction;
  for (size_t i = 0; i < operation.buffers.size(); ++i) {
    const TensorDescription& tensor = operation.description->tensors[i];
    reducescatter.tensors.push_back(
        {tensor.dtype, tensor.shape.front(), RowBytes(tensor) / Bytes(tensor.dtype),
         operation.buffers[i].input, operation.buffers[i].output});
  }
  return Reducescatter(reducescatter, communicator);
}

}  // namespace

SharedMemoryBackend::SharedMemoryBackend(std::shared_ptr<Segment> segment, int rank,
                                         Waiter* waiter, StoreChoice* store_choice)
    : communicator_(std::move(segment), rank, waiter), store_choice_(store_choice) {}

bool SharedMemoryBackend::Begin(const std::vector<int>& members, uint64_t number) {
  members_ = members;
  return communicator_.Begin(members, number);
}

bool SharedMemoryBackend::BeginAgain() { return communicator_.BeginAgain(); }

void SharedMemoryBackend::End() { communicator_.End(); }

bool SharedMemoryBackend::AllgatherValues(const std::vector<int64_t>& own,
                                          std::vector<std::vector<int64_t>>* all) {
  return keras_hvd::AllgatherValues(own, &communicator_, all);
}

std::unique_ptr<JointAttempt> SharedMemoryBackend::Attempt() {
  return std::make_unique<CommunicatorAttempt>(&communicator_);
}

bool SharedMemoryBackend::AllgatherHashes(const std::vector<uint64_t>& own,
                                          std::vector<std::vector<uint64_t>>* all) {
  return keras_hvd::AllgatherHashes(own, &communicator_, all);
}

void SharedMemoryBackend::set_recorder(PhaseRecorder* recorder) {
  communicator_.set_recorder(recorder);
}

bool SharedMemoryBackend::Run(const Batch& batch, const BatchSettings& settings) {
  switch (batch.front()->description->kind) {
    case Kind::kAllreduce:
      return RunAllreduce(batch, settings, store_choice_, &communicator_);
    case Kind::kAllgather:
      return RunAllgather(batch.front().get(), &communicator_);
    case Kind::kBroadcast:
      return RunBroadcast(*batch.front(), members_, &communicator_);
    case Kind::kBarrier:
      return Barrier(&communicator_);
    case Kind::kReducescatter:
      return RunReducescatter(*batch.front(), &communicator_);
    case Kind::kAlltoall:
      return RunAlltoall(batch.front().get(), &communicator_);
    case Kind::kAddProcessSet:
    case Kind::kRemoveProcessSet:
    case Kind::kJoin:
      break;  // decided as agreements, not as batches
  }
  return false;
}

}  // namespace keras_hvd
