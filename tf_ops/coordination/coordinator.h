// Decides in which order the ranks run their collectives, and which run together.
//
// A pure state machine: the ranks' submissions go in, decisions come out. It has no
// clock, does no I/O and starts no thread. Its caller passes in times as values. One
// coordinator decides for all ranks of a job, and every rank carries out exactly its
// decisions, in their order. If each rank decided by its own view, they would come to
// different orders, and wait for each other for ever.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tf_ops/coordination/merged_submission.h"
#include "tf_ops/coordination/name_table.h"
#include "tf_ops/coordination/rank_set.h"
#include "tf_ops/operation/description.h"

namespace keras_hvd {

struct Decision {
  enum class Type : int32_t {
    kRun = 0,   // all members of the set run these as one collective
    kFail = 1,  // `ranks` end the oldest request of this name with `text`
    // All ranks have requested the same, and end that request: `members` are now
    // process set `answer`, or no longer are; or all have joined, `answer` last.
    kAgree = 2,
  };
  // A tensor to which `ranks` contribute zeros because they have joined.
  struct Zeros {
    std::shared_ptr<const Description> description;
    std::vector<int> ranks;
  };
  Type type = Type::kRun;
  std::vector<TensorKey> tensors;  // of one process set; exactly one for kFail
  RankSet ranks;                   // for kRun: the members of the set
  std::shared_ptr<const Description> first;  // for kRun: of the first tensor
  std::vector<Zeros> zeros;                  // for kRun: for some of its tensors
  // The members' inputs for a tensor, sent with their submissions, in rank order; ""
  // for a member that contributes zeros.
  struct Given {
    std::shared_ptr<const Description> description;
    std::vector<std::string> inputs;
  };
  std::vector<Given> given;  // for kRun: for every tensor, or for none
  bool departed = false;     // for kFail: because a rank has left, not by a mismatch
  std::string text;
  Kind agreed = Kind::kJoin;  // for kAgree
  int32_t answer = 0;         // for kAgree
  std::vector<int> members;   // for kAgree on a process set

  // For kRun: when each rank submitted each tensor. Filled only while wanted.
  struct Request {
    std::shared_ptr<const Description> description;
    std::vector<std::pair<int, double>> since;  // rank, seconds
  };
  std::vector<Request> requests;
};

// A request that some ranks wait for while others have not submitted it.
struct Stall {
  TensorKey key;
  Kind kind;
  double since;              // when the first rank submitted it
  std::vector<int> waiting;  // ranks that have submitted it
  std::vector<int> missing;  // ranks that have not
  // For a join, which does not stall while others submit something: when the first rank
  // joined, whether others have submitted more since, and whether any of that took
  // zeros from the joined ranks.
  double joined = 0;
  bool others_go_on = false;
  bool gave_zeros = false;
};

class Coordinator {
 public:
  // Fuses batches up to `fusion_bytes`. Process set 0 holds all ranks. Other sets come
  // and go by agreements, which are requests of set 0.
  Coordinator(int size, int64_t fusion_bytes);

  // `ranks` is ascending. Every rank must know of the set before it uses it.
  void AddProcessSet(int32_t id, RankSet ranks);

  // Takes effect with the next decision.
  void set_fusion_bytes(int64_t bytes) { fusion_bytes_ = bytes; }

  // Whether decisions must say when each rank submitted the requests in question.
  void set_wants_times(bool wants_times) { wants_times_ = wants_times; }

  // Ranks have submitted a request, at time `now` in seconds if they do not say when.
  // Requests that a rank has of one name are served in the order of submission. A
  // duplicate fails on all ranks. Inputs are passed on to the decision. The coordinator
  // does not look at them.
  void Submit(MergedSubmission submission, double now);
  // Rank `rank` has left the job and will submit nothing more. Its waiting requests
  // have ended on its side.
  void Leave(int rank, const std::string& how);

  // Takes the next decision. Returns false if there is none now.
  bool Next(Decision* decision);

  // Requests that wait for ranks, oldest first.
  std::vector<Stall> Stalls() const;
  // The rank's last submission, as in "allreduce 'grad/v'"; "" if none yet.
  std::string LastSubmission(int rank) const;

 private:
  // Whether members that have not come to the name yet get the failure too.
  enum class Owe { kNo, kYes };

  // Requests that were submitted together.
  struct Group {
    MergedSubmission submission;
    double now;
    uint64_t order;

    // When the rank in this place submitted its request.
    double since(size_t place) const;
  };
  // Requests of one name that are, or would be, one collective: at most one of each
  // member.
  struct Round {
    std::vector<Group> groups;
    std::shared_ptr<const RankBitmap> has;  // the ranks of all groups
    size_t first = 0;                       // the group that has the lowest rank
    bool wrong = false;                     // they cannot be one collective

    const std::shared_ptr<const Description>& description() const {
      return groups[first].submission.description;
    }
    void Add(Group group);
  };
  // A failure that ranks will get when they come to the name.
  struct Owed {
    std::string text;
    std::vector<bool> by_rank;
    size_t count = 0;  // of ranks
  };
  struct Entry {
    // Requests that members have submitted but not yet run. A member with a request in
    // a round has one in each round before it.
    std::deque<Round> rounds;
    std::vector<Owed> owed;
    std::vector<Group> spare;  // memory for the groups of a round
  };
  // A rank, and its part of a round.
  struct Head {
    int rank;
    const Group* group;
    size_t place;  // of the rank in the group
  };
  // Something settled but not yet handed out: a request that every member has submitted
  // or joined before, or a decision to pass on unchanged.
  struct PendingDecision {
    TensorKey key;
    std::shared_ptr<const Description> description;  // null for a decision
    RankSet members;
    std::vector<int> joined;          // contribute zeros
    std::vector<std::string> inputs;  // of all members, or empty
    Decision decision;
    std::vector<std::pair<int, double>> since;  // if wanted
  };
  struct Last {
    std::shared_ptr<const Description> description;
    uint64_t order = 0;
  };

  void NoteLast(const MergedSubmission& submission);
  MergedSubmission FailStrangers(const MergedSubmission& submission,
                                 const RankSet& members);
  MergedSubmission PayOwed(MergedSubmission submission, std::vector<Owed>* owed);
  bool AddToRounds(MergedSubmission submission, double now, Entry* entry);
  void RemoveFromRounds(int rank, std::deque<Round>* rounds);
  void Settle(Entry* entry, const RankSet& members);
  static std::vector<Head> Heads(const Round& round);
  static std::vector<std::string> TakeInputs(const RankSet& members, Round* round);
  std::vector<std::pair<int, double>> Times(const Round& round) const;
  void FailFirst(Entry* entry, const RankSet& members, const std::string& text, Owe owe,
                 bool departed = false);
  void Fail(const Description& description, RankSet ranks, const std::string& text);
  const std::string* HowSomebodyLeft(const RankSet& members) const;
  static std::string WhatIsWrong(const Round& round);
  std::vector<int> JoinedBefore(const Round& round, const RankSet& members) const;
  void Join(int rank);
  void Agree(Entry* entry, const RankSet& members);
  std::string AgreeOnAdding(const Round& round, Decision* decision);
  std::string AgreeOnRemoving(const Description& description, Decision* decision);
  std::string WhatWaits(int32_t process_set) const;
  static void Take(PendingDecision* pending, Decision* decision);

  int64_t fusion_bytes_;
  std::map<int32_t, RankSet> process_sets_;
  int32_t last_process_set_ = 0;
  std::vector<bool> joined_;
  int joined_count_ = 0;
  NameTable<Entry> entries_;
  RankUnions unions_;
  // One queue for both, to keep the order of the events of one name.
  std::deque<PendingDecision> pending_decisions_;
  // Ranks that have left, and how. First one first: the others may have left because
  // of it.
  std::vector<std::pair<int, std::string>> departures_;
  // The last submission of each rank is the later one of those noted for it alone and
  // for the sets that contain it.
  std::vector<Last> last_of_rank_;
  std::unordered_map<RankSet, Last, RankSet::Hash> last_of_set_;
  uint64_t submissions_ = 0;
  double last_submission_ = 0;  // time of the last submission
  double last_of_others_ = 0;   // and of the last one that is no join
  bool gave_zeros_ = false;     // since the first of those that have joined now
  bool wants_times_ = false;
};

}  // namespace keras_hvd
