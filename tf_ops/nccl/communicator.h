// One communicator of NCCL, which never keeps its caller for ever.
//
// It is nonblocking: what NCCL has not done at once goes on in a thread of its own, and
// is asked for until it is done, or until the caller's `KeepWaiting` says that it will
// not be, for a member has died. Then, and after any error, there is only Abort.
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

// Called again and again during a wait, with how often it was, to let others run
// meanwhile; false ends the wait.
using KeepWaiting = std::function<bool(int64_t polls)>;

class Communicator {
 public:
  // What one member makes and all others need to find it.
  static Status NewId(const Library& library, UniqueId* id);
  // Returns when all `count` members have called it. Its collectives run on `stream`.
  // Where it fails, `*communicator` is what there is of it, for Abort: until then the
  // others do not meet errors of theirs for this one's.
  static Status Create(std::shared_ptr<const Library> library, const UniqueId& id,
                       int count, int index, cuda::Stream stream,
                       KeepWaiting keep_waiting,
                       std::unique_ptr<Communicator>* communicator);
  // Of some of this one's members, all of which call it: those with the same `color`,
  // in the order of `key`. kNoColor gets null. Where it fails, this one is of no use
  // any more, and what there is of the part ends with it.
  Status Split(int color, int key, int count, int index,
               std::unique_ptr<Communicator>* part);
  // Aborts what was not finalized.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const Library& library() const { return *library_; }
  Comm comm() const { return comm_; }
  int count() const { return count_; }
  int index() const { return index_; }  // this rank's place among the members
  cuda::Stream stream() const { return stream_; }
  // As the library's, of a function that was called with this communicator.
  Status Check(Result result, const char* name) const {
    return library_->Check(result, name, comm_);
  }

  // Whether there is more to do with it than Abort.
  bool usable() const { return comm_ != nullptr && !failed_; }

  // What `calls` asks NCCL for is enqueued together. Its first error ends the group.
  Status Group(const std::function<Status()>& calls);
  // Whether what was enqueued has met an error since.
  Status AsyncError() const;
  // Gives it back; all members do, and what they enqueued has run.
  Status Finalize();
  // Gives it back at once. What was enqueued ends, with whatever results.
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
  // The part of a split that has not ended: until then NCCL writes its `comm_`, from a
  // thread of its own, and does so too where nobody waits for it any more.
  std::unique_ptr<Communicator> splitting_;
};

}  // namespace keras_hvd::nccl

#endif  // KERAS_HVD_TF_OPS_NCCL_COMMUNICATOR_H_
