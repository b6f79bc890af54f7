// Merges the submissions of several hosts' ranks on their way to the coordinator, at
// each host's leader.
//
// A pure state machine, as the coordinator is. The submissions of the leader's own
// ranks and the messages of the leaders below go in. Messages for the leader above come
// out, on the first host for the coordinator. A request that all ranks below have
// submitted equally goes up as one message, so the coordinator's host reads one from
// each host below it, and not one from each rank.
//
// A merged message stands for one submission of each of its ranks. Merging changes when
// the coordinator hears of them, never what it decides: the submissions of one rank
// under one name keep their order, and a rank's agreements and its departure come after
// all that it has submitted before. Held submissions may be passed on at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <variant>
#include <vector>

#include "tf_ops/coordination/coordinator.h"
#include "tf_ops/coordination/merged_submission.h"
#include "tf_ops/coordination/name_table.h"
#include "tf_ops/coordination/rank_set.h"

namespace keras_hvd {

// The rank has left the job, or is cut off, and has submitted everything before.
struct RankDeparture {
  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  int rank = 0;
  int64_t carried_out = kAll;  // of the coordinator's decisions, as far as is known
  // A leader between it and the coordinator that has left, and so has cut it off; -1:
  // the rank itself has left.
  int leader = -1;
  std::string how = "";  // it has left, to follow "has left the job: "; "": unknown
};
using Upward = std::variant<MergedSubmission, RankDeparture>;

class SubmissionMerger {
 public:
  // `ranks`: those of the leader's host and of all hosts below it, ascending. All that
  // is submitted here is theirs.
  explicit SubmissionMerger(RankSet ranks);

  // Set 0 must be added too. Call this before any rank below hears of the set: earlier
  // submissions belong to no round, and would be missed in the rounds that follow.
  void AddProcessSet(int32_t id, const std::vector<int>& members);
  void RemoveProcessSet(int32_t id);

  void Submit(MergedSubmission submission);
  // As if each of them were submitted.
  void Submit(const SubmissionRun& run);
  void Leave(const RankDeparture& departure);
  // A join of these ranks has ended, well or not. Others' ranks may be among them.
  void EndJoin(const std::vector<int>& ranks);
  // The coordinator has decided this, which may add or remove a process set or end a
  // join. Call this before any rank below hears of it.
  void Note(const Decision& decision);
  // Passes on the submissions held since before the last call, so the coordinator
  // learns who waits for whom. To be called every half second or so.
  void PassOnOld();
  // Whether some ranks lack requests that others have submitted.
  bool anything_waits() const { return waiting_ > 0; }

  // Takes the next message for the leader above, or the coordinator. Returns false if
  // there is none now.
  bool Next(Upward* message);

 private:
  // Submissions under one name, at most one of each rank.
  struct Round {
    MergedSubmission held;  // not passed on yet; its description is null if nothing is
    // Ranks of `held` in the order of its times or inputs, if it has any.
    std::vector<int> arrivals;
    std::shared_ptr<const RankBitmap> has;  // ranks whose submissions belong here
    bool passed_on = false;
    int64_t period = 0;  // in which it began: how often PassOnOld had been called
    int64_t number = 0;  // in the order of all that began
  };
  using Rounds = std::vector<Round>;

  void SubmitAgreement(MergedSubmission submission);
  const RankSet* SetThatHolds(int32_t process_set, const RankSet& ranks) const;
  void EraseIdleOfMany();
  void Add(MergedSubmission submission, const RankSet& set, Rounds* rounds);
  bool AddToHeld(const std::shared_ptr<const Description>& description,
                 const RankSet& ranks, const RankSet& set, Rounds* rounds);
  void Complete(size_t count, Rounds* rounds);
  size_t FirstRoundAfter(const RankSet& ranks, const Rounds& rounds);
  static void Hold(MergedSubmission submission, Round* round);
  void PassOn(size_t count, Rounds* rounds);
  void PassOn(Round* round);
  template <typename Condition>
  void PassOnThose(const Condition& condition);
  void PassOnAll();
  void ForgetAll();

  const RankSet ranks_;
  std::map<int32_t, RankSet> process_sets_;  // their members below
  // Rounds that some ranks have not come to. Those that have been passed on come first:
  // a rank's submissions keep their order.
  NameTable<Rounds> names_;
  size_t waiting_ = 0;  // how many rounds there are
  int64_t begun_ = 0;   // how many there have been
  RankUnions unions_;
  std::multiset<int> joins_;  // that have not ended, by rank
  bool somebody_left_ = false;
  int64_t period_ = 0;
  std::vector<Upward> passed_on_;
  size_t taken_ = 0;  // how many of them
};

}  // namespace keras_hvd
