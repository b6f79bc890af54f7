// Decides in which order, and which together, the ranks run their collectives.
//
// A pure state machine: what the ranks submit goes in, decisions come out. It knows no
// clock, does no I/O and starts no thread; times are values that its caller hands in.
// One coordinator decides for all ranks of a job, and every rank carries out exactly
// its decisions, in their order: ranks that each decided for themselves by what they
// had seen would come to different orders, and wait for each other for ever.
#ifndef KERAS_HVD_TF_OPS_COORDINATION_COORDINATOR_H_
#define KERAS_HVD_TF_OPS_COORDINATION_COORDINATOR_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tf_ops/operation/description.h"

namespace keras_hvd {

// A request is known by its process set and its name.
struct TensorKey {
  int32_t process_set = 0;
  std::string name;

  bool operator==(const TensorKey& other) const {
    return process_set == other.process_set && name == other.name;
  }
};

struct TensorKeyHash {
  size_t operator()(const TensorKey& key) const {
    return std::hash<std::string>()(key.name) * 31 + key.process_set;
  }
};

struct Decision {
  enum class Type : int32_t {
    kRun = 0,   // all members of the set run these together, as one collective
    kFail = 1,  // `ranks` end the oldest request of this name with `text`
    // All ranks have asked for the same, and end that request: `members` are process
    // set `answer` now, or no longer; or all have joined, `answer` last.
    kAgree = 2,
  };
  // Of a tensor that ranks have joined before: they take part with zeros.
  struct Zeros {
    std::shared_ptr<const Description> description;
    std::vector<int> ranks;
  };
  Type type = Type::kRun;
  std::vector<TensorKey> tensors;  // of one process set; for kFail exactly one
  std::vector<int> ranks;          // for kRun the members of the set
  int64_t bytes = 0;               // kRun of allreduces: of all their tensors
  std::vector<Zeros> zeros;        // kRun: of some of its tensors
  // What the members gave of a tensor with their submissions, in the order of ranks; ""
  // where one gives zeros.
  struct Given {
    std::shared_ptr<const Description> description;
    std::vector<std::string> inputs;
  };
  std::vector<Given> given;  // kRun: of each tensor, or of none
  bool departed = false;     // kFail because a rank has left, not by a mismatch
  std::string text;
  Kind agreed = Kind::kJoin;  // kAgree
  int32_t answer = 0;         // kAgree
  std::vector<int> members;   // kAgree on a process set

  // kRun: of each tensor, who submitted it when. Only while that is wanted.
  struct Request {
    std::shared_ptr<const Description> description;
    std::vector<std::pair<int, double>> since;  // rank, seconds
  };
  std::vector<Request> requests;
};

// A request that some ranks wait for and others have not submitted.
struct Stall {
  TensorKey key;
  Kind kind;
  double since;              // when the first rank submitted it
  std::vector<int> waiting;  // ranks that have submitted it
  std::vector<int> missing;  // ranks that have not
};

class Coordinator {
 public:
  // Batches are fused up to `fusion_bytes`. Process set 0 holds all ranks; others come
  // and go by agreements, which are requests of set 0.
  Coordinator(int size, int64_t fusion_bytes);

  // `ranks` ascending. Every rank must have been told of the set before it uses it.
  void AddProcessSet(int32_t id, std::vector<int> ranks);

  // From the next decision on.
  void set_fusion_bytes(int64_t bytes) { fusion_bytes_ = bytes; }

  // Whether decisions are to say when each rank submitted what they are about.
  void set_wants_times(bool wants_times) { wants_times_ = wants_times; }

  // Rank `rank` has submitted a request, at time `now` in seconds. Its requests of one
  // name are served in the order of their submission. `duplicate` says that another op
  // of the rank has the name under way: this request then fails on all ranks.
  // `input`, where there is one, is for the decision: nobody looks at it here.
  void Submit(int rank, std::shared_ptr<const Description> description, double now,
              bool duplicate = false, std::optional<std::string> input = {});
  // Rank `rank` has left the job and will submit nothing more. What it still had
  // waiting has ended on its side.
  void Leave(int rank, const std::string& how);

  // Takes the next decision; false if there is none now.
  bool Next(Decision* decision);

  // What is waiting for ranks, the oldest first.
  std::vector<Stall> Stalls() const;
  // "allreduce 'grad/v'": what a rank submitted last, or "" if nothing yet.
  std::string LastSubmission(int rank) const;

 private:
  using Members = std::vector<int>;
  // Whether members that have not come yet get a failure as well.
  enum class Owe { kNo, kYes };

  struct Request {
    std::shared_ptr<const Description> description;
    bool duplicate;
    double since;
    uint64_t order;
    std::optional<std::string> input;
  };
  struct Entry {
    // What each member has submitted and not yet run, by its place in the set.
    std::vector<std::deque<Request>> waiting;
    // Failures that a member has still to meet when it comes to this name.
    std::vector<std::deque<std::string>> owed;

    // What a member waits for first, or null.
    const Request* head() const;
    // How many members wait for something.
    size_t arrived() const;
  };
  // What has been settled and not yet been handed out: a request that all members have
  // submitted or have joined before, or a decision as it is.
  struct Settled {
    TensorKey key;
    std::shared_ptr<const Description> description;  // null for a decision as it is
    std::shared_ptr<const Members> members;
    std::vector<int> joined;          // give zeros
    std::vector<std::string> inputs;  // of all members, or none
    Decision decision;
    std::vector<std::pair<int, double>> since;  // if wanted
  };

  Entry& FindEntry(const TensorKey& key, const std::vector<int>& members);
  void Settle(const TensorKey& key, Entry* entry,
              const std::shared_ptr<const Members>& members);
  static std::vector<std::string> TakeHeads(Entry* entry);
  std::vector<std::pair<int, double>> Times(const Entry& entry,
                                            const std::vector<int>& members) const;
  void FailHeads(const TensorKey& key, Entry* entry, const std::vector<int>& members,
                 const std::string& text, Owe owe, bool departed = false);
  void FailOne(const TensorKey& key, int rank, const std::string& text);
  bool FailIfSomebodyLeft(const TensorKey& key, Entry* entry,
                          const std::vector<int>& members);
  std::string WhatIsWrong(const TensorKey& key, const Entry& entry,
                          const std::vector<int>& members) const;
  std::vector<int> JoinedBefore(const Entry& entry, const std::vector<int>& members,
                                const Description& head) const;
  void Join(int rank);
  void Agree(const TensorKey& key, Entry* entry, const std::vector<int>& members);
  std::string AgreeOnAdding(const Description& description, Decision* decision);
  std::string AgreeOnRemoving(const Description& description, Decision* decision);
  std::string WhatWaits(int32_t process_set) const;
  void ForgetIdleEntries();
  static void Take(Settled* settled, Decision* decision);

  int64_t fusion_bytes_;
  std::map<int32_t, std::shared_ptr<const Members>> process_sets_;
  int32_t last_process_set_ = 0;
  std::vector<bool> joined_;
  int joined_count_ = 0;
  std::unordered_map<TensorKey, Entry, TensorKeyHash> entries_;
  // One queue for both, so that what concerns one name keeps its order.
  std::deque<Settled> settled_;
  // Ranks that have left and how, the first one first: the others may have left over
  // it.
  std::vector<std::pair<int, std::string>> departures_;
  std::vector<std::shared_ptr<const Description>> last_submissions_;
  uint64_t submissions_ = 0;
  double last_submission_ = 0;  // when it came
  bool wants_times_ = false;
  size_t most_entries_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COORDINATION_COORDINATOR_H_
