#include "tf_ops/backend/run_batch.h"

#include <algorithm>
#include <type_traits>

#include "tf_ops/collectives/adasum.h"
#include "tf_ops/collectives/allgather.h"
#include "tf_ops/collectives/allreduce.h"
#include "tf_ops/collectives/alltoall.h"
#include "tf_ops/collectives/barrier.h"
#include "tf_ops/collectives/broadcast.h"
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

template <typename Group>
bool RunAdasum(const AllreduceOptions& allreduce, Group* communicator) {
  const Reduction& reduction = allreduce.reduction;
  return Adasum({reduction.prescale, reduction.postscale, allreduce.tensors},
                communicator);
}

Communicator& LocalOf(Communicator* communicator) { return *communicator; }
Communicator& LocalOf(HostsCommunicator* hosts) { return hosts->local(); }

template <typename Group>
bool RunWithStores(AllreduceOptions* allreduce, Group* communicator) {
  StoreChoice& choice = LocalOf(communicator).store_choice();
  const StoreUse use = {AllreduceBytes(*allreduce), IsInPlace(*allreduce),
                        std::is_same_v<Group, HostsCommunicator>};
  allreduce->stores = choice.Choose(use);
  const Clock::time_point start = Clock::now();
  if (!Allreduce(*allreduce, communicator)) return false;
  choice.Learn(use, allreduce->stores, Seconds(Clock::now() - start));
  return true;
}

template <typename Group>
bool RunAllreduce(const Batch& batch, const Tuning& tuning, Group* communicator) {
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
  allreduce.window_bytes = tuning.window_bytes;
  allreduce.small_bytes = tuning.small_bytes;
  allreduce.halving_hosts = tuning.halving_hosts;
  return RunWithStores(&allreduce, communicator);
}

template <typename Group>
bool RunAllgather(Operation* operation, Group* communicator) {
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

template <typename Group>
bool RunAlltoall(Operation* operation, Group* communicator) {
  AlltoallOptions alltoall;
  alltoall.input = operation->buffers.front().input;
  alltoall.splits = operation->splits;
  alltoall.row_bytes = RowBytes(operation->description->tensors.front());
  alltoall.allocate = [operation](const std::vector<int64_t>& rows) {
    return AllocateResult(operation, 0, rows);
  };
  return Alltoall(alltoall, communicator);
}

template <typename Group>
bool RunBroadcast(const Operation& operation, const std::vector<int>& members,
                  Group* communicator) {
  BroadcastOptions broadcast;
  broadcast.root = IndexOf(members, operation.description->root);
  broadcast.bytes = operation.description->bytes();
  broadcast.input = operation.buffers.front().input;
  broadcast.output = operation.buffers.front().output;
  return Broadcast(broadcast, communicator);
}

template <typename Group>
bool RunReducescatter(const Operation& operation, Group* communicator) {
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

template <typename Group>
bool RunBatch(const Batch& batch, const Tuning& tuning, const std::vector<int>& members,
              Group* communicator) {
  switch (batch.front()->description->kind) {
    case Kind::kAllreduce: return RunAllreduce(batch, tuning, communicator);
    case Kind::kAllgather: return RunAllgather(batch.front().get(), communicator);
    case Kind::kBroadcast: return RunBroadcast(*batch.front(), members, communicator);
    case Kind::kBarrier: return Barrier(communicator);
    case Kind::kReducescatter: return RunReducescatter(*batch.front(), communicator);
    case Kind::kAlltoall: return RunAlltoall(batch.front().get(), communicator);
    case Kind::kAddProcessSet:
    case Kind::kRemoveProcessSet:
    case Kind::kJoin: break;  // decided as agreements, not as batches
  }
  return false;
}

template bool RunBatch(const Batch&, const Tuning&, const std::vector<int>&,
                       Communicator*);
template bool RunBatch(const Batch&, const Tuning&, const std::vector<int>&,
                       HostsCommunicator*);

}  // namespace keras_hvd
