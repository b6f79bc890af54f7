// See communicator.h.
#include "tf_ops/nccl/communicator.h"

#include <utility>

namespace keras_hvd::nccl {
Communicator::Communicator(std::shared_ptr<const Library> library, int count, int index,
                           cuda::Stream stream, KeepWaiting keep_waiting)
    : library_(std::move(library)),
      count_(count),
      index_(index),
      stream_(stream),
      keep_waiting_(std::move(keep_waiting)) {}

Communicator::~Communicator() { Abort(); }

Status Communicator::NewId(const Library& library, UniqueId* id) {
  return library.Check(library->unique_id(id), "ncclGetUniqueId", nullptr);
}

Status Communicator::Create(std::shared_ptr<const Library> library, const UniqueId& id,
                            int count, int index, cuda::Stream stream,
                            KeepWaiting keep_waiting,
                            std::unique_ptr<Communicator>* communicator) {
  communicator->reset(new Communicator(std::move(library), count, index, stream,
                                       std::move(keep_waiting)));
  Communicator& created = **communicator;
  Config config;
  config.blocking = 0;
  const Result result =
      created.library()->init_rank(&created.comm_, count, id, index, &config);
  return created.Await(result, "ncclCommInitRankConfig");
}

Status Communicator::Split(int color, int key, int count, int index,
                           std::unique_ptr<Communicator>* part) {
  part->reset();
  if (!usable()) return Unusable("ncclCommSplit");
  splitting_.reset(new Communicator(library_, count, index, stream_, keep_waiting_));
  const Result result =
      library()->split(comm_, color, key, &splitting_->comm_, nullptr);
  Status status = Await(result, "ncclCommSplit");
  if (status.ok() && color != kNoColor) {
    status = splitting_->Await(Result::kSuccess, "ncclCommSplit");
  }
  failed_ = !status.ok();
  if (!status.ok()) return status;
  if (color != kNoColor) *part = std::move(splitting_);
  splitting_.reset();
  return status;
}

Status Communicator::Group(const std::function<Status()>& calls) {
  if (!usable()) return Unusable("ncclGroupStart");
  Status status = Check(library()->group_start(), "ncclGroupStart");
  if (status.ok()) {
    status = calls();
    // If the group were not ended, this thread's later calls would belong to it.
    const Result result = library()->group_end();
    if (status.ok()) return Await(result, "ncclGroupEnd");
  }
  failed_ = true;
  return status;
}

Status Communicator::AsyncError() const {
  if (!usable()) return Unusable("ncclCommGetAsyncError");
  Result state = Result::kSuccess;
  const Result result = library()->async_error(comm_, &state);
  Status status = Check(result, "ncclCommGetAsyncError");
  if (!status.ok()) return status;
  return Check(state, "a collective that it had begun");
}

Status Communicator::Finalize() {
  if (!usable()) return Unusable("ncclCommFinalize");
  Status status = Await(library()->finalize(comm_), "ncclCommFinalize");
  if (!status.ok()) return status;
  const Comm comm = std::exchange(comm_, nullptr);
  return library().Check(library()->destroy(comm), "ncclCommDestroy", nullptr);
}

// The result of an abort does not matter: there is nothing left to do.
void Communicator::Abort() {
  if (comm_ != nullptr) library()->abort(std::exchange(comm_, nullptr));
  splitting_.reset();
}

Status Communicator::Unusable(const char* name) const {
  return Status::RankFailed(std::string(name) + " cannot be called: the communicator " +
                            (comm_ == nullptr ? "was given back" : "has failed"));
}

Status Communicator::Await(Result result, const char* name) {
  Status status = Check(result, name);
  Result state = Result::kInProgress;
  // Polls after a success too: some versions report success too early.
  for (int64_t polls = 0; status.ok() && state == Result::kInProgress; ++polls) {
    status = Poll(name, &state);
    if (!status.ok() || state != Result::kInProgress || keep_waiting_(polls)) continue;
    status = Status::RankFailed(std::string(name) +
                                " was given up: a member of the communicator has "
                                "failed, or the job ends");
  }
  failed_ = !status.ok();
  return status;
}

Status Communicator::Poll(const char* name, Result* state) const {
  if (comm_ == nullptr) {
    return Status::Internal("NCCL gave no communicator in " + std::string(name));
  }
  const Result result = library()->async_error(comm_, state);
  Status status = Check(result, "ncclCommGetAsyncError");
  return status.ok() ? Check(*state, name) : status;
}

}  // namespace keras_hvd::nccl
