// The state of a job on several hosts: the state that the ranks of this one share, and
// on its leader, the leaders' messages to each other.
//
// Leaders are connected in a tree. News for all goes from the host where it happens to
// all others, along the tree.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tf_ops/transport/control_link.h"
#include "tf_ops/transport/failure_wave.h"
#include "tf_ops/transport/job_state.h"
#include "tf_ops/transport/reachability.h"

namespace keras_hvd {

// The name of a rank on another host in messages.
struct RankName {
  int pid = 0;
  std::string host;
};

class HostsJobState final : public JobState {
 public:
  // `names`: of all ranks. `links`: a leader's, to the leaders above and directly
  // below. `failure_links`: those for when the job fails. `host_timeout`: a host
  // without an answer for this long counts as gone.
  HostsJobState(std::shared_ptr<Segment> segment, Topology topology,
                std::vector<RankName> names,
                std::vector<std::unique_ptr<ControlLink>> links,
                std::vector<std::unique_ptr<ControlLink>> failure_links,
                std::chrono::seconds host_timeout);

  std::string Describe(int rank) const override;
  std::string Obstacle(int rank) const override;
  bool HasShutDown(int rank) const override;
  void ShutDown() override;
  std::string HowItLeft(int rank) const override;
  bool HasLeftBefore(int rank, uint64_t decision) const override;
  OperationHistory& History(int rank) override;
  bool HasHistory(int rank) const override;
  void AwaitAllKnow() override;
  bool ClaimFailureReport() override;
  void AskForSigns() override;
  bool IsSilent(int rank) const override;

  std::vector<int> Behind(uint64_t decisions) override;
  uint64_t AskedAbout() const override { return asked_about_; }
  void AnswerAbove() override;

  void TellOfBatch(BatchElsewhere batch) override;
  std::vector<BatchElsewhere> TakeBatches() override;

  bool PassOnDepartures() override;

  bool Poll() override;
  Clock::time_point NextPoll() const override;

  // Something has come over a link that is not looked at otherwise: one for failures.
  // Any thread may call it.
  void NoteFailureNews() { has_failure_news_.store(true); }

  // ---- For a leader's channels; see hosts_channels.h

  // A leader next to this one in the tree.
  struct Neighbor {
    struct Message {
      std::string bytes;
      Clock::time_point sent_at;  // by this host's clock
    };

    std::unique_ptr<ControlLink> link;
    Reachability reachability;
    bool is_above;
    std::deque<Message> inbox{};  // that nobody has taken yet
    Clock::time_point lost_at{};
    Clock::time_point asked_at = Clock::time_point::max();  // max: it has answered
    bool has_departed = false;
    bool is_lost = false;
    Clock::time_point next_question{};
    // How many decisions one below was asked about, and how many all from it on have
    // carried out, as it has said.
    uint64_t asked_about = 0, carried_out = 0;
    // Leaders, and how many decisions each has carried out; the ranks here do not know
    // of them yet, nor do those below.
    std::vector<std::pair<int32_t, uint64_t>> departed_above{};

    bool IsUnreachable() const {
      return link->is_unreachable() || reachability.is_lost();
    }
  };
  std::vector<Neighbor>& neighbors() { return neighbors_; }

 private:
  void TakeFrame(Neighbor* from, FrameType type, std::string_view bytes);
  void TakeSettings(Neighbor* from, std::string_view bytes);
  void TakeDeparture(Neighbor* from, std::string_view bytes);
  int HostsAbove(int rank) const;
  void GiveSign(Neighbor* asking);
  void TakeSign(Neighbor* from, std::string_view bytes);
  void TakeBatch(Neighbor* from, std::string_view bytes);
  void TakeCarriedOut(Neighbor* from, std::string_view bytes);
  void TellOfSettings();
  void NoteNonsense(Neighbor* from);
  void NoteLost(Neighbor* neighbor, Clock::time_point now);
  bool IsReported(const Neighbor& neighbor, Clock::time_point now) const;
  void AwaitOthers();
  // `above` too, or only below.
  void QueueForAll(FrameType type, std::string_view bytes, bool above);
  void QueueAbove(FrameType type, std::string_view bytes);
  void NoteSettings() override;

  const std::vector<RankName> names_;
  const int64_t exchange_bytes_;
  std::vector<Neighbor> neighbors_;
  FailureWave wave_;
  std::atomic<bool> has_failure_news_{false};
  std::atomic<bool> settings_changed_{false};
  uint64_t asked_about_ = 0;             // by the leader above, without an answer
  std::vector<BatchElsewhere> batches_;  // the coordinator's
  OperationHistory none_{};              // of a rank that has not told
  std::map<int, char> process_states_;   // of other hosts' ranks, as last told
};

}  // namespace keras_hvd
