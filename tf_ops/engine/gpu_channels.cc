// See gpu_channels.h.
#include "tf_ops/engine/gpu_channels.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tf_ops/engine/log.h"

namespace keras_hvd {
namespace {

constexpr int32_t kAllRanks = 0;
constexpr int64_t kIdWords = sizeof(nccl::UniqueId) / sizeof(int64_t);

int32_t ProcessSetOf(const GpuBatch& batch) {
  return batch.operations.front()->description->process_set;
}

}  // namespace

GpuChannels::GpuChannels(int rank, std::shared_ptr<GpuAccess> access,
                         nccl::KeepWaiting keep_waiting)
    : rank_(rank), access_(std::move(access)), keep_waiting_(std::move(keep_waiting)) {}

Status GpuChannels::Open(GpuBatch* batch, nccl::Communicator** communicator) {
  const int32_t process_set = ProcessSetOf(*batch);
  const auto found = channels_.find(process_set);
  if (found != channels_.end()) {
    *communicator = found->second.get();
    return Status::Ok();
  }
  bool all_have_nccl;
  Status status = Agree(batch, &all_have_nccl);
  Channel channel;
  if (status.ok() && all_have_nccl) status = Connect(batch, &channel);
  if (!status.ok()) return status;
  *communicator = channel.get();
  channels_[process_set] = std::move(channel);
  return Status::Ok();
}

// A member that cannot use NCCL has all of them do without it.
Status GpuChannels::Agree(GpuBatch* batch, bool* all_have_nccl) {
  std::string reason;
  if (library_ == nullptr) reason = access_->OpenNccl(&library_).message;
  const int64_t version = library_ == nullptr ? 0 : library_->version();
  std::vector<std::vector<int64_t>> versions;
  const Status status = batch->Exchange({version}, &versions);
  if (!status.ok()) return status;
  *all_have_nccl = std::all_of(versions.begin(), versions.end(),
                               [](const auto& of) { return of.front() != 0; });
  if (!*all_have_nccl) Warn(*batch, versions, reason);
  return status;
}

// The first one that has a reason says it, for all.
void GpuChannels::Warn(const GpuBatch& batch,
                       const std::vector<std::vector<int64_t>>& versions,
                       const std::string& reason) {
  const auto without = std::find_if(versions.begin(), versions.end(),
                                    [](const auto& of) { return of.front() == 0; });
  const auto first = static_cast<int>(without - versions.begin());
  if (first != batch.index || std::exchange(warned_, true)) return;
  Log(rank_, LogLevel::kWarning,
      "collectives of tensors on GPUs go through host memory, which is slow, for this "
      "rank cannot use NCCL: " +
          reason);
}

Status GpuChannels::Connect(GpuBatch* batch, Channel* channel) {
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
      batch->gpu->stream(), keep_waiting_, channel);
}

Status GpuChannels::Add(int32_t process_set, const std::vector<int>& members) {
  const auto all = channels_.find(kAllRanks);
  if (all == channels_.end()) return Status::Ok();
  if (all->second == nullptr) return Status::Ok();
  const auto place = std::lower_bound(members.begin(), members.end(), rank_);
  const bool included = place != members.end() && *place == rank_;
  const int index = included ? static_cast<int>(place - members.begin()) : 0;
  Channel part;
  const Status status =
      all->second->Split(included ? 0 : nccl::kNoColor, index,
                         static_cast<int>(members.size()), index, &part);
  if (status.ok() && included) channels_[process_set] = std::move(part);
  return status;
}

Status GpuChannels::Remove(int32_t process_set) {
  const auto found = channels_.find(process_set);
  if (found == channels_.end()) return Status::Ok();
  const Channel channel = std::move(found->second);
  channels_.erase(found);
  return channel == nullptr ? Status::Ok() : channel->Finalize();
}

Status GpuChannels::AsyncError() const {
  for (const auto& [process_set, channel] : channels_) {
    if (channel == nullptr) continue;
    const Status status = channel->AsyncError();
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
    if (last->second != nullptr) last->second->Abort();
    channels_.erase(last);
  }
}

}  // namespace keras_hvd
