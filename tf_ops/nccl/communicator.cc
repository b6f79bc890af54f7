#include "tf_ops/nccl/communicator.h"

#include <mutex>
#include <utility>

#include "tf_ops/transport/threads.h"

namespace keras_hvd::nccl {
namespace {

Status GivenUp(const char* name) {
  return Status::RankFailed(std::string(name) +
                            " was given up: a member of the communicator has failed, "
                            "or the job ends");
}

Config ConfigOf(bool blocking) {
  Config config;
  config.blocking = blocking ? 1 : 0;
  // Parts of it get its flag for aborts with its resources.
  config.split_share = 1;
  return config;
}

}  // namespace

class Communicator::Control {
 public:
  Control(std::shared_ptr<const Library> library, CallWatch* watch)
      : library_(std::move(library)), watch_(*watch) {}

  // Waits until a nonblocking communicator is no longer in progress.
  Status Await(const Comm& waiting, Result result, const char* name) const {
    Status status = library_->Check(result, name, waiting);
    Result state = Result::kInProgress;
    // Polls after a success too: some versions report success too early.
    for (int64_t polls = 0; status.ok() && state == Result::kInProgress; ++polls) {
      status = Poll(waiting, name, &state);
      if (!status.ok() || state != Result::kInProgress) continue;
      if (!watch_.KeepsWaiting(polls)) status = GivenUp(name);
    }
    return status;
  }

  // The result of an abort does not matter: there is nothing left to do. On any thread.
  void Abort() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (comm != nullptr) (*library_)->abort(std::exchange(comm, nullptr));
  }

  CallWatch& watch() const { return watch_; }
  const AbortCall& abort() const { return abort_; }

  Comm comm = nullptr;

 private:
  Status Poll(const Comm& waiting, const char* name, Result* state) const {
    if (waiting == nullptr) {
      return Status::Internal("NCCL gave no communicator in " + std::string(name));
    }
    const Result result = (*library_)->async_error(waiting, state);
    Status status = library_->Check(result, "ncclCommGetAsyncError", waiting);
    return status.ok() ? library_->Check(*state, name, waiting) : status;
  }

  const std::shared_ptr<const Library> library_;
  CallWatch& watch_;
  const AbortCall abort_ = [this] { Abort(); };
  std::mutex mutex_;
};

Communicator::Communicator(std::shared_ptr<const Library> library, int count, int index,
                           cuda::Stream stream, std::shared_ptr<Control> control,
                           bool is_whole)
    : library_(std::move(library)),
      count_(count),
      index_(index),
      stream_(stream),
      control_(std::move(control)),
      is_whole_(is_whole) {}

Communicator::~Communicator() { Abort(); }

Status Communicator::NewId(const Library& library, UniqueId* id) {
  return library.Check(library->unique_id(id), "ncclGetUniqueId", nullptr);
}

Status Communicator::Create(std::shared_ptr<const Library> library, const UniqueId& id,
                            int count, int index, cuda::Stream stream, CallWatch* watch,
                            std::unique_ptr<Communicator>* communicator) {
  const auto control = std::make_shared<Control>(library, watch);
  communicator->reset(
      new Communicator(std::move(library), count, index, stream, control, true));
  Communicator& created = **communicator;
  Config config = ConfigOf(false);
  const Result result =
      created.library()->init_rank(&control->comm, count, id, index, &config);
  Status status = control->Await(control->comm, result, "ncclCommInitRankConfig");
  if (status.ok()) status = created.SplitFromControl(0, index, &created);
  created.failed_ = !status.ok();
  return status;
}

Status Communicator::Split(int color, int key, int count, int index,
                           std::unique_ptr<Communicator>* part) {
  part->reset();
  if (!usable()) return Unusable("ncclCommSplit");
  splitting_.reset(new Communicator(library_, count, index, stream_, control_, false));
  const Status status = SplitFromControl(color, key, splitting_.get());
  failed_ = !status.ok();
  if (!status.ok()) return status;
  if (color != kNoColor) *part = std::move(splitting_);
  splitting_.reset();
  return status;
}

Status Communicator::SplitFromControl(int color, int key, Communicator* part) {
  Config config = ConfigOf(true);
  const Result result =
      library()->split(control_->comm, color, key, &part->comm_, &config);
  Status status = control_->Await(control_->comm, result, "ncclCommSplit");
  if (!status.ok() || color == kNoColor) return status;
  return control_->Await(part->comm_, Result::kSuccess, "ncclCommSplit");
}

template <typename Call>
Status Communicator::Guarded(const char* name, const Call& call) {
  Status status;
  try {
    const bool returned =
        control_->watch().Run(control_->abort(), [&] { status = call(); });
    if (!returned) status = GivenUp(name);
  } catch (const std::exception& error) {
    status = StatusOf(error);
  }
  failed_ = !status.ok();
  return status;
}

Status Communicator::Group(const std::function<Status()>& calls) {
  if (!usable()) return Unusable("ncclGroupStart");
  Result ended = Result::kSuccess;
  Status status = Guarded("ncclGroupEnd", [&] {
    KHVD_RETURN_IF_ERROR(Check(library()->group_start(), "ncclGroupStart"));
    Status begun;
    try {
      begun = calls();
    } catch (const std::exception& error) {
      begun = StatusOf(error);
    }
    // If the group were not ended, this thread's later calls would belong to it.
    ended = library()->group_end();
    return begun.ok() ? Check(ended, "ncclGroupEnd") : begun;
  });
  return status.ok() ? Await(ended, "ncclGroupEnd") : status;
}

Status Communicator::AsyncError() const {
  if (!usable()) return Unusable("ncclCommGetAsyncError");
  Result state = Result::kSuccess;
  const Result result = library()->async_error(comm_, &state);
  KHVD_RETURN_IF_ERROR(Check(result, "ncclCommGetAsyncError"));
  return Check(state, "a collective that it had begun");
}

Status Communicator::Finalize() {
  if (!usable()) return Unusable("ncclCommFinalize");
  Result result = Result::kSuccess;
  Status status = Guarded("ncclCommFinalize", [&] {
    result = library()->finalize(comm_);
    return Check(result, "ncclCommFinalize");
  });
  if (status.ok()) status = control_->Await(comm_, result, "ncclCommFinalize");
  if (!status.ok()) return status;
  const Comm comm = std::exchange(comm_, nullptr);
  status = library().Check(library()->destroy(comm), "ncclCommDestroy", nullptr);
  if (!status.ok() || !is_whole_) return status;
  KHVD_RETURN_IF_ERROR(control_->Await(
      control_->comm, library()->finalize(control_->comm), "ncclCommFinalize"));
  return library().Check(library()->destroy(std::exchange(control_->comm, nullptr)),
                         "ncclCommDestroy", nullptr);
}

void Communicator::Abort() {
  AbortOwn();
  // An unfinished part may be released only after its control has ended.
  if (is_whole_) {
    control_->Abort();
    AbortOwn();
  }
  splitting_.reset();
}

void Communicator::AbortOwn() {
  if (comm_ != nullptr) library()->abort(std::exchange(comm_, nullptr));
}

Status Communicator::Unusable(const char* name) const {
  return Status::RankFailed(std::string(name) + " cannot be called: the communicator " +
                            (comm_ == nullptr ? "was given back" : "has failed"));
}

// The user may have made all communicators nonblocking, by NCCL_COMM_BLOCKING=0.
Status Communicator::Await(Result result, const char* name) {
  if (result != Result::kInProgress) return Status::Ok();
  const Status status = control_->Await(comm_, result, name);
  failed_ = !status.ok();
  return status;
}

}  // namespace keras_hvd::nccl
