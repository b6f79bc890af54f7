// The way in which the members of each process set move GPU tensors: over an NCCL
// communicator, or through host memory if one of them cannot use NCCL.
//
// A set gets its communicator when its first batch of such tensors runs. A set added
// later gets a split of the communicator of all ranks. All members see the same batches
// and sets in the same order, so they need not agree on when.
//
// If one member cannot make a communicator, none has it, and the set goes through host
// memory. Later sets with a member that saw this do so too. If it was to be a split of
// the communicator of all ranks, that one is unusable too, and all sets go through host
// memory.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tf_ops/collectives/joint_attempt.h"
#include "tf_ops/gpu/gpu_access.h"
#include "tf_ops/gpu/gpu_batch.h"
#include "tf_ops/gpu/nccl_backend.h"
#include "tf_ops/nccl/communicator.h"
#include "tf_ops/transport/job_state.h"

namespace keras_hvd {

class NcclCommunicators {
 public:
  // `give_up`: ends the job before it aborts the communicators' work. `say_stuck`: the
  // abort has not helped.
  NcclCommunicators(std::shared_ptr<JobState> job, std::shared_ptr<GpuAccess> access,
                    nccl::KeepWaiting keep_waiting, nccl::GiveUp give_up,
                    nccl::SayStuck say_stuck);

  // The backend of a batch's process set, valid as long as the set exists. Null: its
  // tensors go through host memory.
  Status Open(GpuBatch* batch, NcclBackend** backend);
  // Whether Open has nothing left to agree on.
  bool IsOpen(int32_t process_set) const { return backends_.count(process_set) != 0; }

  // The same without making any: null if there is none yet.
  const NcclBackend* Find(int32_t process_set) const;

  // Whether there is a communicator.
  bool any_open() const;

  // All ranks add or remove a set. `all`: a batch of all ranks, without operations. A
  // communicator that cannot be removed stays, to be aborted: that ends other sets'
  // work too.
  Status Add(int32_t process_set, const std::vector<int>& members, GpuBatch* all);
  Status Remove(int32_t process_set);

  // Errors that NCCL has met since.
  Status AsyncError() const;
  // Releases the communicators, as the other members do.
  Status Finalize();
  // The same at once, ending the communicators' work.
  void Abort();

 private:
  using Made = std::unique_ptr<nccl::Communicator>;

  Status OpenLibrary();
  Status Agree(GpuBatch* batch, bool* all_have_nccl, nccl::Capabilities* capabilities);
  Status Connect(GpuBatch* batch, Made* communicator);
  Status ShareId(GpuBatch* batch, nccl::UniqueId* id, bool* made);
  Status Split(const std::vector<int>& members, Made* part);
  Status TryTogether(GpuBatch* batch, const std::function<Status(Made*)>& make,
                     Made* communicator, bool* made);
  void DoWithoutNccl(const std::string& reason, bool says_so);
  void Warn(const std::string& reason);
  bool HasFailedElsewhere() const;

  const int rank_;
  const std::shared_ptr<JobState> job_;
  const std::shared_ptr<GpuAccess> access_;
  nccl::CallWatch watch_;
  std::shared_ptr<const nccl::Library> library_;
  std::map<int32_t, std::unique_ptr<NcclBackend>> backends_;
  const JointAttempt* attempt_ = nullptr;  // the current attempt to make a communicator
  const cuda::Gpu* attempts_on_ = nullptr;
  std::string failure_;  // of such an attempt; "": none
  bool warned_ = false;
  bool another_warns_ = false;  // of a set that this rank is in
};

}  // namespace keras_hvd
