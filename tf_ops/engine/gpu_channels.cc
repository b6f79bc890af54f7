// See gpu_channels.h.
#include "tf_ops/engine/gpu_channels.h"

#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tf_ops/engine/log.h"

namespace keras_hvd {
namespace {

constexpr int32_t kAllRanks = 0;
constexpr int64_t kIdWords = sizeof(nccl::UniqueId) / sizeof(int64_t);

// From here on several ranks may share a GPU.
constexpr int64_t kSharingVersion = 23000;

int32_t ProcessSetOf(const GpuBatch& batch) {
  return batch.operations.front()->description->process_set;
}

// What the members of a set tell each other.
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
  const Status status = batch->Exchange(words, &all);
  if (!status.ok()) return status;
  members->resize(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    memcpy(&(*members)[i], all[i].data(), sizeof(Member));
  }
  return status;
}

nccl::Equipment EquipmentOf(const std::vector<Member>& members) {
  int64_t version = members.front().version;
  int64_t capability = members.front().compute_capability;
  for (const Member& member : members) {
    version = std::min(version, member.version);
    capability = std::min(capability, member.compute_capability);
  }
  return {static_cast<int>(version), static_cast<int>(capability)};
}

// The first other member that has the GPU of this one; -1: none.
int FindSharing(const std::vector<Member>& members, int index) {
  for (size_t i = 0; i < members.size(); ++i) {
    const bool same =
        memcmp(&members[i].gpu, &members[index].gpu, sizeof(cuda::Uuid)) == 0;
    if (same && static_cast<int>(i) != index) return static_cast<int>(i);
  }
  return -1;
}

// The first member that cannot use NCCL, or not with those that have its GPU; -1: none.
int FirstWithout(const std::vector<Member>& members) {
  for (size_t i = 0; i < members.size(); ++i) {
    const Member& member = members[i];
    const bool can_share = member.version >= kSharingVersion && member.may_share != 0;
    if (member.version == 0) return static_cast<int>(i);
    if (!can_share && FindSharing(members, static_cast<int>(i)) >= 0) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

}  // namespace

GpuChannels::GpuChannels(int rank, std::shared_ptr<GpuAccess> access,
                         nccl::KeepWaiting keep_waiting)
    : rank_(rank), access_(std::move(access)), keep_waiting_(std::move(keep_waiting)) {}

Status GpuChannels::Open(GpuBatch* batch, const GpuChannel** channel) {
  const int32_t process_set = ProcessSetOf(*batch);
  const auto found = channels_.find(process_set);
  if (found != channels_.end()) {
    *channel = &found->second;
    return Status::Ok();
  }
  bool all_have_nccl;
  GpuChannel opened;
  Status status = Agree(batch, &all_have_nccl, &opened.equipment);
  if (status.ok() && all_have_nccl) status = Connect(batch, &opened.communicator);
  if (!status.ok()) return status;
  *channel = &(channels_[process_set] = std::move(opened));
  return Status::Ok();
}

// A member that cannot use NCCL has all of them do without it; so do two that share a
// GPU, which NCCL allows in newer versions, where it is asked to.
Status GpuChannels::Agree(GpuBatch* batch, bool* all_have_nccl,
                          nccl::Equipment* equipment) {
  std::string reason;
  if (library_ == nullptr) reason = OpenLibrary().message;
  std::vector<Member> members;
  const Status status = GatherMembers(batch, library_.get(), &members);
  if (!status.ok()) return status;
  const Member& own = members[batch->index];
  const int sharing = FindSharing(members, batch->index);
  const int first = FirstWithout(members);
  *all_have_nccl = first < 0;
  *equipment = EquipmentOf(members);
  if (first != batch->index) return status;
  if (own.version == 0) {
    Warn("this rank cannot use NCCL: " + reason);
  } else {
    Warn("this rank has the GPU of rank " + std::to_string(batch->members[sharing]) +
         ", for which NCCL must be 2.30 or later, and NCCL_MULTI_RANK_GPU_ENABLE=1 be "
         "set; here it is " +
         library_->text());
  }
  return status;
}

Status GpuChannels::OpenLibrary() {
  const char* const blocking = getenv("NCCL_COMM_BLOCKING");
  if (blocking != nullptr && strcmp(blocking, "1") == 0) {
    return Status::InvalidArgument(
        "NCCL_COMM_BLOCKING=1 has it wait for ever for a rank that has died; unset it");
  }
  return access_->OpenNccl(&library_);
}

// Said by the first member that has a reason, for all.
void GpuChannels::Warn(const std::string& reason) {
  if (std::exchange(warned_, true)) return;
  Log(rank_, LogLevel::kWarning,
      "collectives of tensors on GPUs go through host memory, which is slow, for " +
          reason);
}

Status GpuChannels::Connect(GpuBatch* batch,
                            std::unique_ptr<nccl::Communicator>* communicator) {
  nccl::UniqueId id = {};
  if (batch->index == 0) {
    const Status made = nccl::Communicator::NewId(*library_, &id);
    if (!made.ok()) return made;
  }
  std::vector<int64_t> words(kIdWords);
  memcpy(words.data(), id.bytes, sizeof(id.bytes));
  std::vector<std::vector<int64_t>> ids;
  const Status status = batch->Exchange(words, &ids);
  if (!status.ok()) return status;
  memcpy(id.bytes, ids.front().data(), sizeof(id.bytes));
  return nccl::Communicator::Create(
      library_, id, static_cast<int>(batch->members.size()), batch->index,
      batch->gpu->stream(), keep_waiting_, communicator);
}

Status GpuChannels::Add(int32_t process_set, const std::vector<int>& members) {
  const auto all = channels_.find(kAllRanks);
  if (all == channels_.end()) return Status::Ok();
  if (all->second.communicator == nullptr) return Status::Ok();
  const auto place = std::lower_bound(members.begin(), members.end(), rank_);
  const bool included = place != members.end() && *place == rank_;
  const int index = included ? static_cast<int>(place - members.begin()) : 0;
  GpuChannel part;
  part.equipment = all->second.equipment;
  const Status status = all->second.communicator->Split(
      included ? 0 : nccl::kNoColor, index, static_cast<int>(members.size()), index,
      &part.communicator);
  if (status.ok() && included) channels_[process_set] = std::move(part);
  return status;
}

Status GpuChannels::Remove(int32_t process_set) {
  const auto found = channels_.find(process_set);
  if (found == channels_.end()) return Status::Ok();
  const GpuChannel channel = std::move(found->second);
  channels_.erase(found);
  return channel.communicator == nullptr ? Status::Ok()
                                         : channel.communicator->Finalize();
}

Status GpuChannels::AsyncError() const {
  for (const auto& [process_set, channel] : channels_) {
    if (channel.communicator == nullptr) continue;
    const Status status = channel.communicator->AsyncError();
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

Status GpuChannels::Finalize() {
  // The parts first: they may use what the whole one has.
  while (!channels_.empty()) {
    const Status status = Remove(channels_.rbegin()->first);
    if (!status.ok()) return status;
  }
  return Status::Ok();
}

void GpuChannels::Abort() {
  while (!channels_.empty()) {
    const auto last = std::prev(channels_.end());
    if (last->second.communicator != nullptr) last->second.communicator->Abort();
    channels_.erase(last);
  }
}

}  // namespace keras_hvd
