#include "tf_ops/backend/run_batch.h"

#include <type_traits>

#include "tf_ops/collectives/adasum.h"
#include "tf_ops/collectives/allgather.h"
#include "tf_ops/collectives/alltoall.h"
#include "tf_ops/collectives/barrier.h"
#include "tf_ops/collectives/broadcast.h"

namespace keras_hvd {
namespace {

StoreUse UseOf(const AllreduceOptions& options, bool between_hosts) {
  int64_t bytes = 0, in_place = 0;
  for (const AllreduceTensor& tensor : options.tensors) {
    const int64_t size = tensor.elements * Bytes(tensor.dtype);
    bytes += size;
    if (tensor.output == tensor.input) in_place += size;
  }
  const bool is_mostly_in_place = 2 * in_place >= bytes;
  return {bytes, is_mostly_in_place, between_hosts};
}

Communicator& LocalOf(Communicator* communicator) { return *communicator; }
Communicator& LocalOf(HostsCommunicator* hosts) { return hosts->local(); }

template <typename Group>
bool RunWithStores(AllreduceOptions* allreduce, Group* communicator) {
  StoreChoice& choice = LocalOf(communicator).store_choice();
  const StoreUse use = UseOf(*allreduce, std::is_same_v<Group, HostsCommunicator>);
  allreduce->stores = choice.Choose(use);
  const Clock::time_point start = Clock::now();
  if (!Allreduce(*allreduce, communicator)) return false;
  choice.Learn(use, allreduce->stores, Seconds(Clock::now() - start));
  return true;
}

template <typename Group>
bool RunAllreduce(const Batch& batch, const Tuning& tuning, Group* communicator) {
  const Reduction& reduction = batch.front()->description->reduction;
  AllreduceOptions allreduce = {reduction, {}};
  for (const auto& operation : batch) AddTensors(*operation, &allreduce.tensors);
  if (reduction.op == ReduceOp::kAdasum) {
    return Adasum({reduction.prescale, reduction.postscale, allreduce.tensors},
                  communicator);
  }
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

}  // namespace

void AddTensors(const Operation& operation, std::vector<AllreduceTensor>* tensors) {
  for (size_t i = 0; i < operation.buffers.size(); ++i) {
    const TensorDescription& tensor = operation.description->tensors[i];
    const auto [input, output] = operation.buffers[i];
    tensors->push_back({tensor.dtype, Elements(tensor), input, output});
  }
}

BroadcastOptions BroadcastOf(const Operation& operation,
                             const std::vector<int>& members) {
  const Description& description = *operation.description;
  const auto [input, output] = operation.buffers.front();
  return {IndexOf(members, description.root), description.bytes(), input, output};
}

ReducescatterOptions ReducescatterOf(const Operation& operation) {
  ReducescatterOptions options = {operation.description->reduction, {}};
  for (size_t i = 0; i < operation.buffers.size(); ++i) {
    const TensorDescription& tensor = operation.description->tensors[i];
    const auto [input, output] = operation.buffers[i];
    options.tensors.push_back({tensor.dtype, tensor.shape.front(),
                               RowBytes(tensor) / Bytes(tensor.dtype), input, output});
  }
  return options;
}

template <typename Group>
bool RunBatch(const Batch& batch, const Tuning& tuning, const std::vector<int>& members,
              Group* communicator) {
  switch (batch.front()->description->kind) {
    case Kind::kAllreduce: return RunAllreduce(batch, tuning, communicator);
    case Kind::kAllgather: return RunAllgather(batch.front().get(), communicator);
    case Kind::kBroadcast:
      return Broadcast(BroadcastOf(*batch.front(), members), communicator);
    case Kind::kBarrier: return Barrier(communicator);
    case Kind::kReducescatter:
      return Reducescatter(ReducescatterOf(*batch.front()), communicator);
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
