// Reads a leader's input: submissions and departures of the ranks of its host, and of
// the ranks below it as the leaders of their hosts pass them on.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "tf_ops/backend/world.h"
#include "tf_ops/coordination/messages.h"
#include "tf_ops/coordination/submission_merger.h"

namespace keras_hvd {

class SubmissionReader {
 public:
  // Receives the submissions and departures read. A rank that leaves submits nothing
  // more.
  struct Listener {
    std::function<void(MergedSubmission)> submit;
    std::function<void(const SubmissionRun&)> submit_run;  // from other hosts only
    std::function<void(const RankDeparture&)> leave;
  };

  SubmissionReader(const World& world, Listener listener);

  // Reads the messages that have come. Returns true if there were any.
  bool Read();
  // Whether Read would find submissions of the host's ranks.
  bool HasSubmissions() const;
  // Whether Read would find anything else.
  bool HasNews() const;

 private:
  struct Submitter {
    int rank;
    RankSet ranks;  // this one alone
    std::unique_ptr<MessageReceiver> channel;
    SubmissionDecoder decoder;
    bool departed = false;
  };
  struct LeaderBelow {
    int rank;
    std::unique_ptr<MessageReceiver> channel;
    MergedDecoder decoder;
  };

  bool NoteDepartures();
  void HandleSubmissions(Submitter* from);
  void HandleSubmission(Submitter* from, std::string_view message);
  void HandleMessages(LeaderBelow* from);
  void Refuse(int rank, const Status& status);

  const std::shared_ptr<JobState> job_;
  const Listener listener_;
  DescriptionPool descriptions_;
  std::vector<Submitter> submitters_;  // by local index
  std::vector<LeaderBelow> below_;
};

}  // namespace keras_hvd
