// See batch_runner.h.
#include "tf_ops/engine/batch_runner.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "tf_ops/collectives/adasum.h"
#include "tf_ops/collectives/allgather.h"
#include "tf_ops/collectives/alltoall.h"
#include "tf_ops/collectives/barrier.h"
#include "tf_ops/collectives/broadcast.h"
#include "tf_ops/collectives/reducescatter.h"
#include "tf_ops/engine/inline_tensors.h"
#include "tf_ops/engine/log.h"
#include "tf_ops/engine/output_check.h"

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

std::unique_ptr<const cuda::ProfilerRanges> OpenRanges(const EngineOptions& options) {
  std::unique_ptr<cuda::ProfilerRanges> ranges;
  if (!options.ranges || !cuda::ProfilerRanges::AreWanted()) return ranges;
  const Status status = cuda::ProfilerRanges::Open(options.nvtx_library, &ranges);
  if (!status.ok() && options.rank == 0) {
    Log(options.rank, LogLevel::kWarning,
        "the profiler gets no NVTX ranges: " + status.message);
  }
  return ranges;
}

// What profilers show: "allreduce 'a' and 2 more, 3 tensors, 12 bytes".
std::string RangeName(const Batch& batch) {
  size_t tensors = 0;
  for (const auto& operation : batch) tensors += operation->description->tensors.size();
  std::string name = Title(*batch.front()->description);
  if (batch.size() > 1) name += " and " + std::to_string(batch.size() - 1) + " more";
  if (tensors == 0) return name;
  return name + ", " + std::to_string(tensors) +
         (tensors == 1 ? " tensor, " : " tensors, ") +
         std::to_string(InputBytes(batch)) + " bytes";
}

}  // namespace

// Host memory's part in a batch of tensors on GPUs, which often has none.
class BatchRunner::Host : public HostCollectives {
 public:
  Host(BatchRunner* runner, const std::vector<int>& members, uint64_t number,
       const BatchSettings& settings)
      : runner_(*runner), members_(members), number_(number), settings_(settings) {}

  Communicator* Begin() override {
    Communicator& communicator = runner_.communicator_;
    const bool ok = std::exchange(begun_, true) ? communicator.BeginAgain()
                                                : communicator.Begin(members_, number_);
    return ok ? &communicator : nullptr;
  }
  bool Run(const Batch& batch) override {
    return runner_.RunCollective(batch, members_, settings_);
  }
  bool compares() const override { return runner_.checks(); }
  bool Compare(const Batch& batch) override {
    return runner_.CheckOutputs(batch, members_);
  }
  void End() {
    if (begun_) runner_.communicator_.End();
  }

 private:
  BatchRunner& runner_;
  const std::vector<int>& members_;
  const uint64_t number_;
  const BatchSettings& settings_;
  bool begun_ = false;
};

BatchRunner::BatchRunner(const EngineOptions& options, const World& world,
                         std::shared_ptr<GpuAccess> gpu, Waiter* waiter,
                         Timeline* timeline, Coordination* coordination)
    : job_(world.job),
      rank_(options.rank),
      ranges_(OpenRanges(options)),
      timeline_(*timeline),
      coordination_(coordination),
      communicator_(world.segment, rank_, waiter),
      gpu_(options, job_, std::move(gpu), waiter, timeline) {}

bool BatchRunner::Run(const Batch& batch, const std::vector<int>& members,
                      uint64_t number, const BatchSettings& settings,
                      const std::optional<std::string_view>& results) {
  std::optional<cuda::ProfilerRanges::Range> range;
  if (ranges_ != nullptr) range.emplace(*ranges_, RangeName(batch), InputBytes(batch));
  PhaseRecorder* const recorder = timeline_.BeginBatch(number);
  communicator_.set_recorder(recorder);
  const bool ok = results.has_value() ? TakeResults(batch, members, number, *results)
                                      : RunAnywhere(batch, members, number, settings,
                                                    recorder != nullptr);
  if (recorder != nullptr) timeline_.EndBatch(ok);
  return ok;
}

bool BatchRunner::AddProcessSet(int32_t id, const std::vector<int>& members,
                                const std::vector<int>& all, uint64_t number,
                                const BatchSettings& settings) {
  communicator_.set_recorder(nullptr);
  Host host(this, all, number, settings);
  const bool ok = gpu_.AddProcessSet(id, members, all, &host);
  if (ok) host.End();
  return ok;
}

bool BatchRunner::RunAnywhere(const Batch& batch, const std::vector<int>& members,
                              uint64_t number, const BatchSettings& settings,
                              bool recorded) {
  if (batch.front()->description->on_gpu) {
    Host host(this, members, number, settings);
    const bool ok = gpu_.Run(batch, members, &host, recorded);
    if (ok) host.End();
    return ok;
  }
  if (!communicator_.Begin(members, number)) return false;
  const bool ok = RunCollective(batch, members, settings) &&
                  (!checks() || CheckOutputs(batch, members));
  if (ok) communicator_.End();
  return ok;
}

bool BatchRunner::TakeResults(const Batch& batch, const std::vector<int>& members,
                              uint64_t number, std::string_view results) {
  communicator_.Enter(CollectivePhase::kCopyOut);
  const bool fit = std::all_of(batch.begin(), batch.end(), [&](const auto& operation) {
    return TravelsInline(*operation->description, members.size()) &&
           UnpackResults(&results, *operation);
  });
  if (!fit || !results.empty()) {
    job_->Fail(Code::kInternal,
               job_->Describe(0) + " has sent rank " + std::to_string(rank_) +
                   " something else than the result of " +
                   Title(*batch.front()->description) + ". This is a bug in keras_hvd");
    return false;
  }
  if (!checks()) return true;
  if (!communicator_.Begin(members, number)) return false;
  const bool ok = CheckOutputs(batch, members);
  if (ok) communicator_.End();
  return ok;
}

bool BatchRunner::RunCollective(const Batch& batch, const std::vector<int>& members,
                                const BatchSettings& settings) {
  switch (batch.front()->description->kind) {
    case Kind::kAllreduce:
      return RunAllreduce(batch, settings);
    case Kind::kAllgather:
      return RunAllgather(batch.front().get());
    case Kind::kBroadcast:
      return RunBroadcast(*batch.front(), members);
    case Kind::kBarrier:
      return Barrier(&communicator_);
    case Kind::kReducescatter:
      return RunReducescatter(*batch.front());
    case Kind::kAlltoall:
      return RunAlltoall(batch.front().get());
    case Kind::kAddProcessSet:
    case Kind::kRemoveProcessSet:
    case Kind::kJoin:
      break;  // decided as agreements, not as batches
  }
  return false;
}

bool BatchRunner::checks() const { return job_->compares_outputs(); }

// The consistency mode: all members find the same difference; one says so for all.
bool BatchRunner::CheckOutputs(const Batch& batch, const std::vector<int>& members) {
  if (members.size() == 1 || batch.front()->buffers.empty()) return true;
  // Of these each member gets something else.
  const Kind kind = batch.front()->description->kind;
  if (kind == Kind::kReducescatter || kind == Kind::kAlltoall) return true;
  std::string difference;
  if (!CompareOutputs(batch, members, &communicator_, &difference)) return false;
  if (difference.empty()) return true;
  job_->Fail(Code::kInternal, difference);
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
