#include "tf_ops/transport/hosts_channels.h"

#include <algorithm>
#include <utility>

namespace keras_hvd {
namespace {

using Neighbor = HostsJobState::Neighbor;

class NeighborSender final : public MessageSender {
 public:
  NeighborSender(std::shared_ptr<HostsJobState> job, std::vector<Neighbor*> receivers,
                 FrameType type)
      : job_(std::move(job)), receivers_(std::move(receivers)), type_(type) {}

  void Queue(std::string_view message) override {
    for (Neighbor* receiver : receivers_) receiver->link->Queue(type_, message);
  }
  bool Flush() override {
    bool sent = false;
    for (Neighbor* receiver : receivers_) sent |= receiver->link->Flush();
    return sent;
  }
  // Messages that find no room leave when the job's state is polled.
  bool CanFlush() const override { return false; }
  bool has_unsent() const override {
    return std::any_of(
        receivers_.begin(), receivers_.end(),
        [](const Neighbor* receiver) { return receiver->link->has_unsent(); });
  }
  // A leader that has left takes nothing more in, and nobody waits for it.
  void Drop(int) override {}

 private:
  const std::shared_ptr<HostsJobState> job_;
  const std::vector<Neighbor*> receivers_;
  const FrameType type_;
};

class NeighborReceiver final : public MessageReceiver {
 public:
  NeighborReceiver(std::shared_ptr<HostsJobState> job, Neighbor* sender)
      : job_(std::move(job)), inbox_(sender->inbox) {}

  bool HasNews() const override { return !inbox_.empty(); }
  bool Receive() override { return !inbox_.empty(); }
  bool Next(std::string_view* message) override {
    if (inbox_.empty()) return false;
    current_ = std::move(inbox_.front());
    inbox_.pop_front();
    *message = current_.bytes;
    return true;
  }
  Clock::time_point SentAt() const override { return current_.sent_at; }

 private:
  const std::shared_ptr<HostsJobState> job_;
  std::deque<Neighbor::Message>& inbox_;
  Neighbor::Message current_;
};

}  // namespace

std::vector<Neighbor*> HostsChannels::Neighbors(bool above) {
  std::vector<Neighbor*> found;
  for (Neighbor& neighbor : job_->neighbors()) {
    if (neighbor.is_above == above) found.push_back(&neighbor);
  }
  return found;
}

std::vector<std::unique_ptr<MessageReceiver>> HostsChannels::FromBelow() {
  std::vector<std::unique_ptr<MessageReceiver>> receivers;
  for (Neighbor* neighbor : Neighbors(/*above=*/false)) {
    receivers.push_back(std::make_unique<NeighborReceiver>(job_, neighbor));
  }
  return receivers;
}

std::unique_ptr<MessageSender> HostsChannels::ToBelow() {
  const std::vector<Neighbor*> below = Neighbors(/*above=*/false);
  if (below.empty()) return nullptr;
  return std::make_unique<NeighborSender>(job_, below, FrameType::kDecision);
}

std::unique_ptr<MessageSender> HostsChannels::ToAbove() {
  const std::vector<Neighbor*> above = Neighbors(/*above=*/true);
  if (above.empty()) return nullptr;
  return std::make_unique<NeighborSender>(job_, above, FrameType::kSubmission);
}

std::unique_ptr<MessageReceiver> HostsChannels::FromAbove() {
  const std::vector<Neighbor*> above = Neighbors(/*above=*/true);
  if (above.empty()) return nullptr;
  return std::make_unique<NeighborReceiver>(job_, above.front());
}

}  // namespace keras_hvd
