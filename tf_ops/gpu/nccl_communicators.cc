#include "tf_ops/gpu/nccl_communicators.h"

#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tf_ops/nccl/allreduce.h"
#include "tf_ops/operation/log.h"
#include "tf_ops/transport/threads.h"

namespace keras_hvd {
namespace {

constexpr int32_t kAllRanks = 0;
constexpr int64_t kIdWords = sizeof(nccl::UniqueId) / sizeof(int64_t);

// From this version on, several ranks may share a GPU.
constexpr int64_t kSharingVersion = 23000;

int32_t ProcessSetOf(const GpuBatch& batch) {
  return batch.operations.front()->description->process_set;
}

Status UseOnce(nccl::Communicator* communicator, void* number) {
  return nccl::Allreduce({{ReduceOp::kSum}, {{DataType::kFloat32, 1, number, number}}},
                         communicator);
}

// The values that the members of a set tell each other.
struct Member {
  int64_t version;  // of NCCL; 0: cannot use it
  int64_t may_share;
  int64_t compute_capability;
  cuda::Uuid gpu;
};
constexpr int64_t kMemberWords = sizeof(Member) / sizeof(int64_t);

Status GatherMembers(GpuBatch* batch, const nccl::Library* library,
                     std::vector<Member>* members) {
  Member own = {};
  if (library != nullptr) own.version = library->version();
  const char* const asked = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  own.may_share = asked != nullptr && strcmp(asked, "1") == 0;
  own.compute_capability = batch->gpu->compute_capability();
  own.gpu = batch->gpu->uuid();
  std::vector<int64_t> words(kMemberWords);
  memcpy(words.data(), &own, sizeof(own));
  std::vector<std::vector<int64_t>> all;
  KHVD_RETURN_IF_ERROR(batch->AllgatherValues(words, &all));
  members->resize(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    memcpy(&(*members)[i], all[i].data(), sizeof(Member));
  }
  return Status::Ok();
}

nccl::Capabilities CapabilitiesOf(const std::vector<Member>& members) {
  int64_t version = members.front().version;
  int64_t capability = members.front().compute_capability;
  for (const Member& member : members) {
    version = std::min(version, member.version);
    capability = std::min(capability, member.compute_capability);
  }
  return {static_cast<int>(version), static_cast<int>(capability)};
}

// The first other member with the same GPU as this one, or -1.
int FindSharing(const std::vector<Member>& members, int index) {
  for (size_t i = 0; i < members.size(); ++i) {
    const bool same =
        memcmp(&members[i].gpu, &members[index].gpu, sizeof(cuda::Uuid)) == 0;
    if (same && static_cast<int>(i) != index) return static_cast<int>(i);
  }
  return -1;
}

// The first member that cannot use NCCL, or not with the first one's or those that
// share its GPU; or -1.
int FirstWithout(const std::vector<Member>& members) {
  for (size_t i = 0; i < members.size(); ++i) {
    const Member& member = members[i];
    const bool can_share = member.version >= kSharingVersion && member.may_share != 0;
    if (member.version == 0 || member.version != members.front().version) {
      return static_cast<int>(i);
    }
    if (!can_share && FindSharing(members, static_cast<int>(i)) >= 0) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

}  // namespace

NcclCommunicators::NcclCommunicators(std::shared_ptr<JobState> job,
                                     std::shared_ptr<GpuAccess> access,
                                     nccl::KeepWaiting keep_waiting,
                                     nccl::GiveUp give_up, nccl::SayStuck say_stuck)
    : rank_(job->rank()),
      job_(std::move(job)),
      access_(std::move(access)),
      watch_(
          [this, keep_waiting = std::move(keep_waiting)](int64_t polls) {
            return !HasFailedElsewhere() && keep_waiting(polls);
          },
          [this, give_up = std::move(give_up)](const nccl::AbortCall& abort) {
            if (!HasFailedElsewhere()) return give_up(abort);
            // Nothing but the attempt ends. On the watch's thread no GPU is current.
            const cuda::Gpu::Current current(*attempts_on_);
            abort();
          },
          std::move(say_stuck)) {}

Status NcclCommunicators::Open(GpuBatch* batch, NcclBackend** backend) {
  const int32_t process_set = ProcessSetOf(*batch);
  const auto found = backends_.find(process_set);
  if (found != backends_.end()) {
    *backend = found->second.get();
    return Status::Ok();
  }
  bool all_have_nccl;
  nccl::Capabilities capabilities;
  Made communicator;
  KHVD_RETURN_IF_ERROR(Agree(batch, &all_have_nccl, &capabilities));
  if (all_have_nccl) KHVD_RETURN_IF_ERROR(Connect(batch, &communicator));
  std::unique_ptr<NcclBackend>& opened = backends_[process_set];
  if (communicator != nullptr) {
    opened = std::make_unique<NcclBackend>(
        std::move(communicator), static_cast<int>(batch->members.size()), capabilities);
  }
  *backend = opened.get();
  return Status::Ok();
}

const NcclBackend* NcclCommunicators::Find(int32_t process_set) const {
  const auto found = backends_.find(process_set);
  return found == backends_.end() ? nullptr : found->second.get();
}

// If one member cannot use NCCL, none does. The same holds if two have different
// versions, or share a GPU, except in newer versions of NCCL, which allow it on
// request.
Status NcclCommunicators::Agree(GpuBatch* batch, bool* all_have_nccl,
                                nccl::Capabilities* capabilities) {
  std::string reason;
  if (!failure_.empty()) {
    reason = failure_;
  } else if (library_ == nullptr) {
    reason = OpenLibrary().message;
  }
  std::vector<Member> members;
  const nccl::Library* const usable = reason.empty() ? library_.get() : nullptr;
  KHVD_RETURN_IF_ERROR(GatherMembers(batch, usable, &members));
  const Member& own = members[batch->index];
  const int sharing = FindSharing(members, batch->index);
  const int first = FirstWithout(members);
  *all_have_nccl = first < 0;
  *capabilities = CapabilitiesOf(members);
  another_warns_ |= first >= 0 && first != batch->index;
  if (first != batch->index) return Status::Ok();
  if (own.version == 0) {
    Warn("this rank cannot use NCCL: " + reason);
  } else if (own.version != members.front().version) {
    Warn("this rank has " + library_->text() + " and " +
         job_->Describe(batch->members.front()) + " has " +
         nccl::VersionText(static_cast<int>(members.front().version)) +
         "; all need the same: install the same nvidia-nccl, or name one in "
         "KERAS_HVD_NCCL_LIBRARY");
  } else {
    Warn("this rank shares the GPU of rank " + std::to_string(batch->members[sharing]) +
         ", which needs NCCL 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE=1; this is " +
         library_->text());
  }
  return Status::Ok();
}

Status NcclCommunicators::OpenLibrary() {
  const char* const blocking = getenv("NCCL_COMM_BLOCKING");
  if (blocking != nullptr && strcmp(blocking, "1") == 0) {
    return Status::InvalidArgument(
        "NCCL_COMM_BLOCKING=1 makes NCCL wait forever for a dead rank; unset it");
  }
  return access_->OpenNccl(&library_);
}

// The first member of the first set with a reason warns for all. If sets meet at the
// same time, one on each host may. The others' reasons are logged for users who want
// every detail.
void NcclCommunicators::Warn(const std::string& reason) {
  if (std::exchange(warned_, true)) return;
  const bool first = !another_warns_ && job_->ClaimGpuWarning();
  Log(rank_, first ? LogLevel::kWarning : LogLevel::kInfo,
      "collectives of tensors on GPUs go through host memory, which is slow: " +
          reason);
}

// Leaves no communicator if one of the members cannot make it.
Status NcclCommunicators::Connect(GpuBatch* batch, Made* communicator) {
  nccl::UniqueId id = {};
  bool made;
  const Status status = ShareId(batch, &id, &made);
  if (!status.ok() || !made) return status;
  const auto create = [&](Made* created) {
    return nccl::Communicator::Create(
        library_, id, static_cast<int>(batch->members.size()), batch->index,
        batch->gpu->stream(), &watch_, created);
  };
  return TryTogether(batch, create, communicator, &made);
}

// The first member makes the id for all; `*made` tells whether it succeeded.
Status NcclCommunicators::ShareId(GpuBatch* batch, nccl::UniqueId* id, bool* made) {
  std::vector<int64_t> words(1 + kIdWords);
  Status own;
  if (batch->index == 0) own = nccl::Communicator::NewId(*library_, id);
  words.front() = own.ok();
  memcpy(words.data() + 1, id->bytes, sizeof(id->bytes));
  std::vector<std::vector<int64_t>> all;
  KHVD_RETURN_IF_ERROR(batch->AllgatherValues(words, &all));
  *made = all.front().front() != 0;
  memcpy(id->bytes, all.front().data() + 1, sizeof(id->bytes));
  if (!*made) DoWithoutNccl(own.message, batch->index == 0);
  return Status::Ok();
}

// All members make a communicator and use it once, or none has one. From 2.22 on, NCCL
// connects members only on first use, and fails only then if, say, it may not share
// memory.
Status NcclCommunicators::TryTogether(GpuBatch* batch,
                                      const std::function<Status(Made*)>& make,
                                      Made* communicator, bool* made) {
  char* number = nullptr;
  KHVD_RETURN_IF_ERROR(
      batch->TakeMemory(cuda::Memory::Space::kDevice, sizeof(float), &number));
  CollectiveBackend* const backend = batch->host.Begin();
  if (backend == nullptr) return GivenUp();
  const std::unique_ptr<JointAttempt> attempt = backend->Attempt();
  attempts_on_ = batch->gpu.get();
  attempt_ = attempt.get();
  // Aborted only after all have reported errors, if nothing blocks: others might take
  // the abort for one.
  Made created;
  Status status;
  try {
    status = make(&created);
    if (status.ok() && created != nullptr) status = UseOnce(created.get(), number);
    if (status.ok() && created != nullptr) status = created->AsyncError();
  } catch (const std::exception& error) {
    status = StatusOf(error);
  }
  attempt_ = nullptr;
  auto outcome = JointAttempt::Outcome::kSucceeded;
  if (!status.ok() && attempt->HasFailedElsewhere()) {
    // Also if NCCL has told first: of the abort of a member that has left.
    outcome = JointAttempt::Outcome::kLeft;
  } else if (status.code == Code::kRankFailed) {
    return status;  // the job ends
  } else if (!status.ok()) {
    outcome = JointAttempt::Outcome::kFailed;
  }
  int failed;
  if (!attempt->Conclude(outcome, &failed)) return GivenUp();
  *made = failed < 0;
  if (*made) {
    *communicator = std::move(created);
  } else {
    DoWithoutNccl(status.message, failed == batch->index);
  }
  return Status::Ok();
}

// Applies from now on. Sets that have a communicator keep it.
void NcclCommunicators::DoWithoutNccl(const std::string& reason, bool says_so) {
  failure_ = "a communicator could not be made before";
  another_warns_ |= !says_so;
  if (!says_so) return;
  failure_ = job_->Describe(rank_) +
             " could not make a communicator with the others: " + reason;
  Warn(failure_);
}

bool NcclCommunicators::HasFailedElsewhere() const {
  return attempt_ != nullptr && attempt_->HasFailedElsewhere();
}

Status NcclCommunicators::Add(int32_t process_set, const std::vector<int>& members,
                              GpuBatch* all) {
  const auto whole = backends_.find(kAllRanks);
  if (whole == backends_.end() || whole->second == nullptr) return Status::Ok();
  // Its last collective may have been on a caller's stream.
  whole->second->communicator().set_stream(all->stream);
  Made part;
  bool made;
  const auto split = [&](Made* created) { return Split(members, created); };
  KHVD_RETURN_IF_ERROR(TryTogether(all, split, &part, &made));
  if (!made) {
    // Nothing is under way on any rank: each awaited that before it tried.
    for (auto each = backends_.rbegin(); each != backends_.rend(); ++each) {
      each->second.reset();
    }
    return Status::Ok();
  }
  if (part != nullptr) {
    backends_[process_set] =
        std::make_unique<NcclBackend>(std::move(part), static_cast<int>(members.size()),
                                      whole->second->capabilities());
  }
  return Status::Ok();
}

// Null on a rank that is not a member.
Status NcclCommunicators::Split(const std::vector<int>& members, Made* part) {
  const int index = IndexOf(members, rank_), key = std::max(index, 0);
  return backends_.at(kAllRanks)->communicator().Split(
      index >= 0 ? 0 : nccl::kNoColor, key, static_cast<int>(members.size()), key,
      part);
}

Status NcclCommunicators::Remove(int32_t process_set) {
  const auto found = backends_.find(process_set);
  if (found == backends_.end()) return Status::Ok();
  std::unique_ptr<NcclBackend> backend = std::move(found->second);
  backends_.erase(found);
  const Status status =
      backend == nullptr ? Status::Ok() : backend->communicator().Finalize();
  if (!status.ok()) backends_[process_set] = std::move(backend);
  return status;
}

Status NcclCommunicators::AsyncError() const {
  for (const auto& [process_set, backend] : backends_) {
    if (backend == nullptr) continue;
    KHVD_RETURN_IF_ERROR(backend->communicator().AsyncError());
  }
  return Status::Ok();
}

Status NcclCommunicators::Finalize() {
  // The parts first: they may use resources of the whole communicator.
  while (!backends_.empty()) {
    KHVD_RETURN_IF_ERROR(Remove(backends_.rbegin()->first));
  }
  return Status::Ok();
}

bool NcclCommunicators::any_open() const {
  return std::any_of(backends_.begin(), backends_.end(),
                     [](const auto& each) { return each.second != nullptr; });
}

void NcclCommunicators::Abort() {
  while (!backends_.empty()) {
    const auto last = std::prev(backends_.end());
    if (last->second != nullptr) last->second->communicator().Abort();
    backends_.erase(last);
  }
}

}  // namespace keras_hvd
