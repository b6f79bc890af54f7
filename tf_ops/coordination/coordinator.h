// Decides in which order the ranks run their collectives, and which run together.
//
// A pure state machine: the ranks' submissions go in, decisions come out. It has no
// clock, does no I/O and starts no thread; its caller passes in times as values. One
// coordinator decides for all ranks of a job, and every rank carries out exactly its
// decisions, in their order. If each rank decided by what it had seen, they would come
// to different orders, and wait for each other for ever.
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

// A process set and a name identify a request.
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
  std::vector<int> ranks;          // for kRun: the members of the set
  int64_t bytes = 0;               // for kRun of allreduces: size of all their tensors
  std::vector<Zeros> zeros;        // for kRun: for some of its tensors
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
};

class Coordinator {
 public:
  // Fuses batches up to `fusion_bytes`. Process set 0 holds all ranks. Other sets come
  // and go by agreements, which are requests of set 0.
  Coordinator(int size, int64_t fusion_bytes);

  // `ranks` is ascending. Every rank must have been told of the set before it uses it.
  void AddProcessSet(int32_t id, std::vector<int> ranks);

  // Takes effect with the next decision.
  void set_fusion_bytes(int64_t bytes) { fusion_bytes_ = bytes; }

  // Whether decisions must say when each rank submitted the requests in question.
  void set_wants_times(bool wants_times) { wants_times_ = wants_times; }

  // Rank `rank` has submitted a request, at time `now` in seconds. Its requests of one
  // name are served in the order of submission. `duplicate` means that another op of
  // the rank has the name under way; the request then fails on all ranks. `input`, if
  // any, is passed on to the decision; the coordinator does not look at it.
  void Submit(int rank, std::shared_ptr<const Description> description, double now,
              bool duplicate = false, std::optional<std::string> input = {});
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
  using Members = std::vector<int>;
  // Whether members that have not come to the name yet get the failure too.
  enum class Owe { kNo, kYes };

  struct Request {
    std::shared_ptr<const Description> description;
    bool duplicate;
    double since;
    uint64_t order;
    std::optional<std::string> input;
  };
  struct Entry {
    // What each member has submitted but not yet run, by its index in the set.
    std::vector<std::deque<Request>> waiting;
    // Failures that each member will get when it comes to this name.
    std::vector<std::deque<std::string>> owed;

    // A member's first waiting request, or null.
    const Request* head() const;
    // How many members have a waiting request.
    size_t arrived() const;
  };
  // Something settled but not yet handed out: a request that every member has submitted
  // or joined before, or a decision to pass on unchanged.
  struct Settled {
    TensorKey key;
    std::shared_ptr<const Description> description;  // null for a decision
    std::shared_ptr<const Members> members;
    std::vector<int> joined;          // contribute zeros
    std::vector<std::string> inputs;  // of all members, or empty
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
  // One queue for both, to keep the order of what concerns one name.
  std::deque<Settled> settled_;
  // Ranks that have left, and how. First one first: the others may have left because of
  // it.
  std::vector<std::pair<int, std::string>> departures_;
  std::vector<std::shared_ptr<const Description>> last_submissions_;
  uint64_t submissions_ = 0;
  double last_submission_ = 0;  // time of the last submission
  bool wants_times_ = false;
  size_t most_entries_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COORDINATION_COORDINATOR_H_
