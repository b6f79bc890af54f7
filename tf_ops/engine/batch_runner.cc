// See batch_runner.h.
#include "tf_ops/engine/batch_runner.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>
#include <utility>

#include "tf_ops/collectives/adasum.h"
#include "tf_ops/collectives/allgather.h"
#include "tf_ops/collectives/alltoall.h"
#include "tf_ops/collectives/barrier.h"
#include "tf_ops/collectives/broadcast.h"
#include "tf_ops/collectives/reducescatter.h"
#include "tf_ops/engine/output_check.h"

namespace keras_hvd {
namespace {

// Memory for the result of one of an operation's tensors, which gets `rows`.
void* AllocateResult(Operation* operation, size_t tensor,
                     const std::vector<int64_t>& rows) {
  void* memory = operation->allocate(tensor, rows);
  const int64_t sum = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  operation->out_of_memory |= memory == nullptr && sum > 0;
  operation->buffers[tensor].output = memory;
  operation->allocated_bytes.push_back(
      sum * RowBytes(operation->description->tensors[tensor]));
  return memory;
}

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

}  // namespace

BatchRunner::BatchRunner(std::shared_ptr<Segment> segment, int rank, Waiter* waiter,
                         Timeline* timeline, Coordination* coordination)
    : segment_(std::move(segment)),
      rank_(rank),
      timeline_(*timeline),
      coordination_(coordination),
      communicator_(segment_, rank, waiter) {}

bool BatchRunner::Run(const Batch& batch, const std::vector<int>& members,
                      uint64_t number, const BatchSettings& settings) {
  PhaseRecorder* const recorder = timeline_.BeginBatch(number);
  communicator_.set_recorder(recorder);
  const bool ok = RunCollective(batch, members, number, settings);
  if (recorder != nullptr) timeline_.EndBatch(ok);
  return ok;
}

bool BatchRunner::RunCollective(const Batch& batch, const std::vector<int>& members,
                                uint64_t number, const BatchSettings& settings) {
  if (!communicator_.Begin(members, number)) return false;
  bool ok = false;
  switch (batch.front()->description->kind) {
    case Kind::kAllreduce:
      ok = RunAllreduce(batch, settings);
      break;
    case Kind::kAllgather:
      ok = RunAllgather(batch.front().get());
      break;
    case Kind::kBroadcast:
      ok = RunBroadcast(*batch.front(), members);
      break;
    case Kind::kBarrier:
      ok = Barrier(&communicator_);
      break;
    case Kind::kReducescatter:
      ok = RunReducescatter(*batch.front());
      break;
    case Kind::kAlltoall:
      ok = RunAlltoall(batch.front().get());
      break;
    case Kind::kAddProcessSet:
    case Kind::kRemoveProcessSet:
    case Kind::kJoin:
      break;  // decided as agreements, not as batches
  }
  if (ok && segment_->header().check.load(std::memory_order_relaxed) != 0) {
    ok = CheckOutputs(batch, members);
  }
  if (ok) communicator_.End();
  return ok;
}

// The consistency mode: all members find the same difference; one says so for all.
bool BatchRunner::CheckOutputs(const Batch& batch, const std::vector<int>& members) {
  if (members.size() == 1 || batch.front()->buffers.empty()) return true;
  // Of these each member gets something else.
  const Kind kind = batch.front()->description->kind;
  if (kind == Kind::kReducescatter || kind == Kind::kAlltoall) return true;
  std::string difference;
  if (!CompareOutputs(batch, members, &communicator_, &difference)) return false;
  if (difference.empty()) return true;
  segment_->Fail(rank_, Code::kInternal, difference);
  return false;
}

bool BatchRunner::RunAllreduce(const Batch& batch, const BatchSettings& settings) {
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
  if (allreduce.reduction.op == ReduceOp::kAdasum) return RunAdasum(allreduce);
  const bool in_place = IsInPlace(allreduce);
  allreduce.stores = settings.stores[in_place ? 1 : 0];
  allreduce.window_bytes = settings.tuning.window_bytes;
  allreduce.small_bytes = settings.tuning.small_bytes;
  const Clock::time_point start = Clock::now();
  if (!Allreduce(allreduce, &communicator_)) return false;
  if (coordination_ != nullptr) {
    const std::chrono::duration<double> taken = Clock::now() - start;
    coordination_->Learn(AllreduceBytes(allreduce), in_place, allreduce.stores,
                         taken.count());
  }
  return true;
}

bool BatchRunner::RunAdasum(const AllreduceOptions& allreduce) {
  const Reduction& reduction = allreduce.reduction;
  return Adasum({reduction.prescale, reduction.postscale, allreduce.tensors},
                &communicator_);
}

bool BatchRunner::RunAllgather(Operation* operation) {
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
  return Allgather(allgather, &communicator_);
}

bool BatchRunner::RunAlltoall(Operation* operation) {
  AlltoallOptions alltoall;
  alltoall.input = operation->buffers.front().input;
  alltoall.splits = operation->splits;
  alltoall.row_bytes = RowBytes(operation->description->tensors.front());
  alltoall.allocate = [operation](const std::vector<int64_t>& rows) {
    return AllocateResult(operation, 0, rows);
  };
  return Alltoall(alltoall, &communicator_);
}

bool BatchRunner::RunBroadcast(const Operation& operation,
                               const std::vector<int>& members) {
  BroadcastOptions broadcast;
  broadcast.root =
      std::lower_bound(members.begin(), members.end(), operation.description->root) -
      members.begin();
  broadcast.bytes = operation.description->bytes();
  broadcast.input = operation.buffers.front().input;
  broadcast.output = operation.buffers.front().output;
  return Broadcast(broadcast, &communicator_);
}

bool BatchRunner::RunReducescatter(const Operation& operation) {
  ReducescatterOptions reducescatter;
  reducescatter.reduction = operation.description->reduction;
  for (size_t i = 0; i < operation.buffers.size(); ++i) {
    const TensorDescription& tensor = operation.description->tensors[i];
    reducescatter.tensors.push_back(
        {tensor.dtype, tensor.shape.front(), RowBytes(tensor) / Bytes(tensor.dtype),
         operation.buffers[i].input, operation.buffers[i].output});
  }
  return Reducescatter(reducescatter, &communicator_);
}

}  // namespace keras_hvd
