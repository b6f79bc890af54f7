// One NCCL communicator, which never blocks its caller forever.
//
// Its calls block, and a CallWatch ends those that would never return: it aborts the
// communicator's `Control`. That is a second communicator of the same members, which
// only exists for this: communicators split from it share the flag that ends all waits
// of NCCL, on the host and on the GPU. Aborting the communicator itself would free
// memory that a thread inside it uses.
//
// The control is nonblocking, so it is made, split and released by polling. After a
// call was given up, and after any error, only Abort is possible.
//
// A communicator's calls come from one thread, with the GPU's context current.
#pragma once

#include <functional>
#include <memory>

#include "tf_ops/cuda/abi.h"
#include "tf_ops/nccl/call_watch.h"
#include "tf_ops/nccl/library.h"

namespace keras_hvd::nccl {

class Communicator {
 public:
  // One member makes the id, and all others need it to find that member.
  static Status NewId(const Library& library, UniqueId* id);
  // Returns when all `count` members have called it. Its collectives run on `stream`.
  // On failure, `*communicator` is the unfinished communicator, to be aborted. Until
  // the abort, the other members see no errors because of this one.
  static Status Create(std::shared_ptr<const Library> library, const UniqueId& id,
                       int count, int index, cuda::Stream stream, CallWatch* watch,
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
  // Where its collectives run from now on, and those of its parts at first.
  void set_stream(cuda::Stream stream) { stream_ = stream; }
  // The library's Check, for a function called with this communicator.
  Status Check(Result result, const char* name) const {
    return library_->Check(result, name, comm_);
  }

  // Within a Group: calls one of NCCL's functions, called `name`.
  template <typename Function, typename... Arguments>
  Status Enqueue(const char* name, Function Functions::* function,
                 Arguments... arguments) const {
    const Functions* const functions = library_->operator->();
    return Check((functions->*function)(arguments..., comm_, stream_), name);
  }
  // Whether it can do more than Abort.
  bool usable() const { return comm_ != nullptr && !failed_; }

  // Enqueues together all that `calls` requests from NCCL. The first error ends it.
  Status Group(const std::function<Status()>& calls);
  // Whether enqueued work has failed since.
  Status AsyncError() const;
  // Releases it. All members do, those of a part before the whole, and everything they
  // enqueued has run.
  Status Finalize();
  // Releases it at once. Enqueued work ends with undefined results, also that of
  // communicators with the same control.
  void Abort();

 private:
  class Control;

  Communicator(std::shared_ptr<const Library> library, int count, int index,
               cuda::Stream stream, std::shared_ptr<Control> control, bool is_whole);
  Status Unusable(const char* name) const;
  Status SplitFromControl(int color, int key, Communicator* part);
  // Makes a call that may block, called `name`.
  template <typename Call>
  Status Guarded(const char* name, const Call& call);
  Status Await(Result result, const char* name);
  void AbortOwn();

  const std::shared_ptr<const Library> library_;
  const int count_;
  const int index_;
  cuda::Stream stream_;
  const std::shared_ptr<Control> control_;
  const bool is_whole_;  // not a part
  Comm comm_ = nullptr;
  bool failed_ = false;
  // An unfinished split: until it ends, NCCL writes its `comm_` from a thread of its
  // own, even if nobody waits for it any more.
  std::unique_ptr<Communicator> splitting_;
};

}  // namespace keras_hvd::nccl
