// One NCCL communicator, which never blocks its caller forever.
//
// It is nonblocking: work that NCCL does not do at once continues in NCCL's own thread.
// The caller polls until the work is done, or until its `KeepWaiting` says that it
// never will be because a member has died. Then, and after any error, only Abort is
// possible.
//
// A communicator's calls come from one thread, with the GPU's context current.
#ifndef KERAS_HVD_TF_OPS_NCCL_COMMUNICATOR_H_
#define KERAS_HVD_TF_OPS_NCCL_COMMUNICATOR_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "tf_ops/cuda/abi.h"
#include "tf_ops/nccl/library.h"

namespace keras_hvd::nccl {

// Called repeatedly during a wait, with the number of polls so far, to let others run.
// Returning false ends the wait.
using KeepWaiting = std::function<bool(int64_t polls)>;

class Communicator {
 public:
  // One member makes the id, and all others need it to find that member.
  static Status NewId(const Library& library, UniqueId* id);
  // Returns when all `count` members have called it. Its collectives run on `stream`.
  // On failure, `*communicator` is the unfinished communicator, to be aborted. Until
  // the abort, the other members see no errors because of this one.
  static Status Create(std::shared_ptr<const Library> library, const UniqueId& id,
                       int count, int index, cuda::Stream stream,
                       KeepWaiting keep_waiting,
                       std::unique_ptr<Communicator>* communicator);
  // Makes a communicator of some of this one's members, all of which call it: those
  // with the same `color`, in the order of `key`. kNoColor gets null. On failure, this
  // communicator is unusable, and the unfinished part ends with it.
  Status Split(int color, int key, int count, int index,
               std::unique_ptr<Communicator>* part);
  // Aborts unless it was finalized.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Library& library() const { return *library_; }
  Comm comm() const { return comm_; }
  int count() const { return count_; }
  int index() const { return index_; }  // this rank's place among the members
  cuda::Stream stream() const { return stream_; }
  // The library's Check, for a function called with this communicator.
  Status Check(Result result, const char* name) const {
    return library_->Check(result, name, comm_);
  }

  // Whether it can do more than Abort.
  bool usable() const { return comm_ != nullptr && !failed_; }

  // Enqueues together all that `calls` requests from NCCL. The first error ends it.
  Status Group(const std::function<Status()>& calls);
  // Whether enqueued work has failed since.
  Status AsyncError() const;
  // Releases it. All members do, and everything they enqueued has run.
  Status Finalize();
  // Releases it at once. Enqueued work ends with undefined results.
  void Abort();

 private:
  Communicator(std::shared_ptr<const Library> library, int count, int index,
               cuda::Stream stream, KeepWaiting keep_waiting);
  Status Unusable(const char* name) const;
  // Waits until the communicator is no longer in progress.
  Status Await(Result result, const char* name);
  Status Poll(const char* name, Result* state) const;

  const std::shared_ptr<const Library> library_;
  const int count_;
  const int index_;
  const cuda::Stream stream_;
  const KeepWaiting keep_waiting_;
  Comm comm_ = nullptr;
  bool failed_ = false;
  // An unfinished split: until it ends, NCCL writes its `comm_` from a thread of its
  // own, even if nobody waits for it any more.
  std::unique_ptr<Communicator> splitting_;
};

}  // namespace keras_hvd::nccl

#endif  // KERAS_HVD_TF_OPS_NCCL_COMMUNICATOR_H_
