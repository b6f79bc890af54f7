// Decides in which order, and which together, the ranks run their collectives.
//
// A pure state machine: what the ranks submit goes in, decisions come out. It knows no
// clock, does no I/O and starts no thread; times are values that its caller hands in.
// One coordinator decides for all ranks of a job, and every rank carries out exactly
// its decisions, in their order: ranks that each decided for themselves by what they
// had seen would come to different orders, and wait for each other for ever.
#ifndef KERAS_HVD_TF_OPS_ENGINE_COORDINATOR_H_
#define KERAS_HVD_TF_OPS_ENGINE_COORDINATOR_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tf_ops/engine/description.h"

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
  };
  Type type = Type::kRun;
  std::vector<TensorKey> tensors;  // of one process set; for kFail exactly one
  std::vector<int> ranks;          // for kRun the members of the set
  int64_t bytes = 0;               // kRun of allreduces: of all their tensors
  bool departed = false;           // kFail because a rank has left, not by a mismatch
  std::string text;
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
  // Batches are fused up to `fusion_bytes`. Process set 0 holds all ranks.
  Coordinator(int size, int64_t fusion_bytes);

  // `ranks` ascending. Every rank must have been told of the set before it uses it.
  void AddProcessSet(int32_t id, std::vector<int> ranks);

  // Rank `rank` has submitted a request, at time `now` in seconds. Its requests of one
  // name are served in the order of their submission. `duplicate` says that another op
  // of the rank has the name under way: this request then fails on all ranks.
  void Submit(int rank, std::shared_ptr<const Description> description, double now,
              bool duplicate = false);
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
  struct Request {
    std::shared_ptr<const Description> description;
    bool duplicate;
    double since;
    uint64_t order;
  };
  struct Entry {
    // What each member has submitted and not yet run, by its place in the set.
    std::vector<std::deque<Request>> waiting;
    // Failures that a member has still to meet when it comes to this name.
    std::vector<std::deque<std::string>> owed;
  };
  // What has been settled and not yet been handed out: a failure, or a request that all
  // members have submitted.
  struct Settled {
    TensorKey key;
    std::shared_ptr<const Description> description;  // null for a failure
    Decision failure;
  };

  Entry& FindEntry(const TensorKey& key, const std::vector<int>& members);
  void Settle(const TensorKey& key, Entry* entry, const std::vector<int>& members);
  void FailHeads(const TensorKey& key, Entry* entry, const std::vector<int>& members,
                 const std::string& text, bool owe);
  void FailOne(const TensorKey& key, int rank, const std::string& text);
  bool FailIfSomebodyLeft(const TensorKey& key, Entry* entry,
                          const std::vector<int>& members);
  std::string WhatIsWrong(const TensorKey& key, const Entry& entry,
                          const std::vector<int>& members) const;
  void ForgetIdleEntries();
  static bool Fusable(const Description& first, const Description& other);

  const int64_t fusion_bytes_;
  std::map<int32_t, std::vector<int>> process_sets_;
  std::unordered_map<TensorKey, Entry, TensorKeyHash> entries_;
  // One queue for both, so that what concerns one name keeps its order.
  std::deque<Settled> settled_;
  // Ranks that have left and how, the first one first: the others may have left over
  // it.
  std::vector<std::pair<int, std::string>> departures_;
  std::vector<std::shared_ptr<const Description>> last_submissions_;
  uint64_t submissions_ = 0;
  size_t most_entries_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_COORDINATOR_H_
