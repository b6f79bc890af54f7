#include "tf_ops/engine/batch_runner.h"

#include <algorithm>
#include <string>
#include <utility>

#include "tf_ops/engine/output_check.h"
#include "tf_ops/operation/inline_tensors.h"
#include "tf_ops/operation/log.h"

namespace keras_hvd {
namespace {

std::unique_ptr<const cuda::ProfilerRanges> OpenRanges(const EngineOptions& options,
                                                       int rank) {
  std::unique_ptr<cuda::ProfilerRanges> ranges;
  if (!options.ranges || !cuda::ProfilerRanges::AreWanted()) return ranges;
  const Status status = cuda::ProfilerRanges::Open(options.nvtx_library, &ranges);
  if (!status.ok() && rank == JobState::kCoordinator) {
    Log(rank, LogLevel::kWarning,
        "the profiler gets no NVTX ranges: " + status.message);
  }
  return ranges;
}

// A batch's name in profilers: "allreduce 'a' and 2 more, 3 tensors, 12 bytes".
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

// The host-memory part of a batch of GPU tensors. Often there is none.
class BatchRunner::Host : public HostCollectives {
 public:
  Host(BatchRunner* runner, const std::vector<int>& members, uint64_t number,
       const Tuning& tuning)
      : runner_(*runner), members_(members), number_(number), tuning_(tuning) {}

  CollectiveBackend* Begin() override {
    CollectiveBackend& backend = *runner_.backend_;
    const bool ok = std::exchange(begun_, true) ? backend.BeginAgain()
                                                : backend.Begin(members_, number_);
    return ok ? &backend : nullptr;
  }
  bool Run(const Batch& batch) override {
    return runner_.backend_->Run(batch, tuning_);
  }
  bool compares() const override { return runner_.checks(); }
  bool Compare(const Batch& batch) override {
    return runner_.CheckOutputs(batch, members_);
  }
  void End() {
    if (begun_) runner_.backend_->End();
  }

 private:
  BatchRunner& runner_;
  const std::vector<int>& members_;
  const uint64_t number_;
  const Tuning& tuning_;
  bool begun_ = false;
};

BatchRunner::BatchRunner(const EngineOptions& options, const World& world,
                         std::shared_ptr<GpuAccess> gpu, Waiter* waiter,
                         Timeline* timeline)
    : job_(world.job),
      rank_(job_->rank()),
      most_inline_bytes_(MostInlineBytes(job_->size(), world.topology.hosts())),
      ranges_(OpenRanges(options, rank_)),
      timeline_(*timeline),
      backend_(world.make_backend(waiter)),
      gpu_(options.stall_warning_seconds, options.stall_abort_seconds, job_,
           std::move(gpu), waiter, timeline) {}

bool BatchRunner::Run(const Batch& batch, const std::vector<int>& members,
                      uint64_t number, const Tuning& tuning,
                      const std::optional<std::string_view>& results) {
  std::optional<cuda::ProfilerRanges::Range> range;
  if (ranges_ != nullptr) range.emplace(*ranges_, RangeName(batch), InputBytes(batch));
  PhaseRecorder* const recorder = timeline_.BeginBatch(number);
  backend_->set_recorder(recorder);
  const Clock::time_point began = Clock::now();
  const bool ok =
      results.has_value()
          ? TakeResults(batch, members, number, *results, recorder)
          : RunAnywhere(batch, members, number, tuning, recorder != nullptr);
  if (recorder != nullptr) timeline_.EndBatch(ok);
  const Description& first = *batch.front()->description;
  // A GPU has only begun with it.
  if (ok && !first.on_gpu && job_->WantsTimes()) {
    job_->TellOfBatch({rank_, static_cast<int32_t>(first.kind),
                       static_cast<int32_t>(batch.size()), first.name, began,
                       Clock::now()});
  }
  return ok;
}

bool BatchRunner::AddProcessSet(int32_t id, const std::vector<int>& members,
                                const std::vector<int>& all, uint64_t number,
                                const Tuning& tuning) {
  backend_->set_recorder(nullptr);
  Host host(this, all, number, tuning);
  const bool ok = gpu_.AddProcessSet(id, members, all, &host);
  if (ok) host.End();
  return ok;
}

bool BatchRunner::RunAnywhere(const Batch& batch, const std::vector<int>& members,
                              uint64_t number, const Tuning& tuning, bool recorded) {
  if (batch.front()->description->on_gpu) {
    Host host(this, members, number, tuning);
    const bool ok = gpu_.Run(batch, members, &host, recorded);
    if (ok) host.End();
    return ok;
  }
  if (!backend_->Begin(members, number)) return false;
  const bool ok =
      backend_->Run(batch, tuning) && (!checks() || CheckOutputs(batch, members));
  if (ok) backend_->End();
  return ok;
}

bool BatchRunner::TakeResults(const Batch& batch, const std::vector<int>& members,
                              uint64_t number, std::string_view results,
                              PhaseRecorder* recorder) {
  if (recorder != nullptr) recorder->Enter(CollectivePhase::kCopyOut, 0, INT64_MAX);
  const bool fit = std::all_of(batch.begin(), batch.end(), [&](const auto& operation) {
    return TravelsInline(*operation->description, members.size(), most_inline_bytes_) &&
           UnpackResults(&results, *operation);
  });
  if (!fit || !results.empty()) {
    job_->Fail(Code::kInternal,
               job_->Describe(JobState::kCoordinator) + " has sent rank " +
                   std::to_string(rank_) + " something else than the result of " +
                   Title(*batch.front()->description) + ". This is a bug in keras_hvd");
    return false;
  }
  if (!checks()) return true;
  if (!backend_->Begin(members, number)) return false;
  const bool ok = CheckOutputs(batch, members);
  if (ok) backend_->End();
  return ok;
}

bool BatchRunner::checks() const { return job_->compares_outputs(); }

// The consistency mode. All members find the same difference. One reports it for all.
bool BatchRunner::CheckOutputs(const Batch& batch, const std::vector<int>& members) {
  if (members.size() == 1 || batch.front()->buffers.empty()) return true;
  // Each member gets a different result from these kinds.
  if (TraitsOf(batch.front()->description->kind).gives_parts) return true;
  std::string difference;
  const auto exchange = [this](const auto& own, auto* all) {
    return backend_->AllgatherHashes(own, all);
  };
  if (!CompareOutputs(batch, members, exchange, &difference)) return false;
  if (difference.empty()) return true;
  job_->Fail(Code::kInternal, difference);
  return false;
}

}  // namespace keras_hvd
