// Tells all hosts that the job has failed, and that all of them know.
//
// One rank speaks for each host: its leader, or if that has gone or does not speak, the
// first other rank. The failure itself goes to all hosts next to this one at once. Then
// each host tells the one above in the tree when all below it know, with the ranks'
// last operations. The topmost one reports the failure, and tells all that all know.
//
// If a host is lost, those below it turn to the one above it, or to host 1 if that was
// the coordinator's. Nobody waits for a lost host, nor for long for a silent one, which
// is then passed over as if it were lost.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tf_ops/transport/control_link.h"
#include "tf_ops/transport/job_state.h"
#include "tf_ops/transport/topology.h"

namespace keras_hvd {

// The bytes of a frame of FrameType::kFailure.
std::string FailureFrame(const Status& failure);

// Only the driving thread uses this class.
class FailureWave {
 public:
  // How long to wait for another rank of a host to speak in the place of its leader.
  static constexpr std::chrono::milliseconds kSuccession{500};
  // How long any rank waits until all know, from when it knows.
  static constexpr std::chrono::milliseconds kPatience{2000};

  // `control`: a leader's links to the leaders next to it, which stay the caller's.
  // `links`: those of LinkPurpose::kFailure.
  FailureWave(const Topology& topology, JobState* job,
              const std::vector<ControlLink*>& control,
              std::vector<std::unique_ptr<ControlLink>> links);

  // Takes in the frames that have come over its own links. Returns true if there were
  // any.
  bool Receive();
  // Takes a frame that has come over a control link.
  void Take(ControlLink* from, FrameType type, std::string_view bytes);
  // Goes on with its part once the job has failed.
  void Continue(Clock::time_point now);

  // A host cannot be reached any more, over whatever link.
  void NoteUnreachable(int host);
  // Whether another rank than its leader could tell what has become of a host.
  bool HasOthers(int host) const;

  // Whether all ranks that can be reached know of the failure.
  bool AllKnow(Clock::time_point now) const;
  // Whether this rank speaks for the topmost host, as far as it knows, and whether it
  // has heard all that it can report.
  bool IsTop() { return speaks_ && Above() < 0; }
  bool Reports() const { return is_topmost_; }
  // The last operations of a rank of another host, if they are known; else null.
  OperationHistory* FindHistory(int rank) const;

 private:
  // Another host.
  struct Contact {
    std::vector<ControlLink*> links;  // the first one is that of its leader
    ControlLink* voice = nullptr;     // to the rank that speaks for it; null: nobody
    Clock::time_point silent_since;   // when it had no voice any more
    bool was_told = false;            // of the failure
    bool has_spoken = false;          // of it
    bool has_accounts = false;        // of this host and those below
    bool knows = false;               // and so do all below it
    bool is_lost = false;
  };

  Contact* Find(int host);
  Contact* ContactOf(const ControlLink* link);
  bool TakeVoice(Clock::time_point now);
  void SetVoice(Contact* contact, ControlLink* voice);
  void CheckContact(int host, Clock::time_point now);
  void TellOfFailure(Clock::time_point now);
  int Above();
  bool IsPassedOver(const Contact& contact) const;
  bool IsAbove(const ControlLink* link) const;
  bool HaveAnswered(int above, Clock::time_point now);
  std::vector<int> Below();
  void NoteAllKnow();
  void Send(Contact* contact, FrameType type, std::string_view bytes);
  std::string Accounts();
  void TakeAccounts(std::string_view bytes);

  const Topology topology_;
  JobState& job_;
  const std::vector<std::unique_ptr<ControlLink>> own_links_;
  std::map<int, Contact> contacts_;                             // by host
  std::map<int, std::unique_ptr<OperationHistory>> histories_;  // by rank
  Clock::time_point now_;                                       // of the last Continue
  Clock::time_point known_since_ = Clock::time_point::max();
  bool speaks_ = false;
  bool is_topmost_ = false;   // the hosts below have answered, and there is none above
  bool told_others_ = false;  // ranks of silent hosts that are not their leaders
};

}  // namespace keras_hvd
