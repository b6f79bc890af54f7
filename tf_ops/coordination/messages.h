// The messages of ranks about their requests, and their encoding. No other file encodes
// or decodes messages.
//
// Submissions go from each rank to the leader of its host, merged ones from there from
// leader to leader up to the coordinator, decisions from there to all ranks. Each is a
// stream of messages, compressed by dictionaries: a key that is sent as text the first
// time is a number from then on. The encoder keeps a dictionary and the decoder follows
// it. A dictionary depends only on the order of its own stream, so it can change
// without any agreement.
//
// Decoders trust nothing: a malformed message is an error that says what is wrong.
// Their callers know who sent it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "tf_ops/coordination/autotune.h"
#include "tf_ops/coordination/coordinator.h"
#include "tf_ops/coordination/rank_set.h"
#include "tf_ops/coordination/submission_merger.h"
#include "tf_ops/operation/description.h"
#include "tf_ops/operation/operation.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

// The writing side of a dictionary: numbers for keys, from 0. After a restart it
// redefines the numbers one by one.
template <typename Key, typename Hash = std::hash<Key>>
class NumberTable {
 public:
  // Up to `most` keys have numbers at a time, or all keys of one message if those are
  // more.
  explicit NumberTable(size_t most) : most_(most) {}

  // Makes room for the keys of one message, whose numbers must not change meaning
  // before it is read: restarts if the keys might not fit.
  void Reserve(size_t keys) {
    if (numbers_.size() + keys > most_) numbers_.clear();
  }
  // Returns the key's number. `*is_new` says that the reader does not know it yet.
  int64_t Number(const Key& key, bool* is_new) {
    const auto [it, inserted] = numbers_.try_emplace(key, numbers_.size());
    *is_new = inserted;
    return it->second;
  }
  // The key's number; -1 if the reader does not know it.
  int64_t Find(const Key& key) const {
    const auto known = numbers_.find(key);
    return known == numbers_.end() ? -1 : known->second;
  }

 private:
  const size_t most_;
  std::unordered_map<Key, int64_t, Hash> numbers_;
};

// ---- From a rank to its leader

// A request that the rank has submitted.
struct Submission {
  std::shared_ptr<const Description> description;
  bool duplicate = false;  // another op of the rank has the name under way
  std::optional<Clock::time_point> submitted;  // if the coordinator wants to know
  std::optional<std::string> input;            // the rank's input; see inline_tensors.h
};

class SubmissionEncoder {
 public:
  // `cache_capacity`: how many descriptions travel as numbers.
  explicit SubmissionEncoder(size_t cache_capacity) : most_(cache_capacity) {}

  // `inlined`: the operation if its tensors travel along, or null. The result is valid
  // until the next call.
  std::string_view Encode(const Description& description, bool duplicate,
                          std::optional<Clock::time_point> submitted,
                          const Operation* inlined);

 private:
  struct NameHash {
    size_t operator()(const Description* description) const;
  };
  struct IsEqual {
    bool operator()(const Description* a, const Description* b) const;
  };

  const size_t most_;
  std::deque<Description> known_;  // by number
  std::unordered_map<const Description*, int64_t, NameHash, IsEqual> numbers_;
  std::string description_;
  std::string message_;
};

// Makes equal descriptions of several ranks one object, so they can usually be compared
// by address.
class DescriptionPool {
 public:
  // `size`: the number of ranks in the job.
  explicit DescriptionPool(int size) : size_(size) {}

  Status Decode(std::string_view encoded,
                std::shared_ptr<const Description>* description);

 private:
  const int size_;
  std::unordered_map<std::string, std::shared_ptr<const Description>> pool_;
};

// Decodes one rank's stream.
class SubmissionDecoder {
 public:
  // `pool` is shared by all decoders.
  explicit SubmissionDecoder(DescriptionPool* pool) : pool_(*pool) {}

  Status Decode(std::string_view message, Submission* submission);

 private:
  DescriptionPool& pool_;
  std::vector<std::shared_ptr<const Description>> dictionary_;
};

// ---- From a leader to the leader above

using UpwardMessage = std::variant<MergedSubmission, SubmissionRun, RankDeparture>;

class MergedEncoder {
 public:
  // `cache_capacity`: how many descriptions travel as numbers.
  explicit MergedEncoder(size_t cache_capacity);

  // Encodes the message at `*next`, together with those after it that make a run of
  // known descriptions with it. `*next` is then behind them. `now`: by this host's
  // clock, as the submissions' times are. They travel as ages, since hosts' clocks
  // differ. The result is valid until the next call.
  std::string_view Encode(const std::vector<Upward>& upward, size_t* next,
                          Clock::time_point now);

 private:
  size_t FindRun(const std::vector<Upward>& upward, size_t first);
  void AddSubmission(const MergedSubmission& merged, Clock::time_point now);

  // Keeps its descriptions alive, so none has the address of another.
  NumberTable<std::shared_ptr<const Description>> descriptions_;
  NumberTable<RankSet, RankSet::Hash> rank_lists_;
  // Numbers of the descriptions of a run, as the first and the last of those in
  // sequence.
  std::vector<std::pair<int64_t, int64_t>> run_;
  std::string description_;
  std::string message_;
};

// Decodes the stream of one host.
class MergedDecoder {
 public:
  // `below`: the ranks for which the host may speak, ascending. `pool` is shared by all
  // decoders.
  MergedDecoder(RankSet below, DescriptionPool* pool)
      : below_(std::move(below)), pool_(*pool) {}

  // `now`: by this host's clock, as the decoded times are.
  Status Decode(std::string_view message, Clock::time_point now,
                UpwardMessage* decoded);

 private:
  Status DecodeRun(std::string_view sequences,
                   std::shared_ptr<const Descriptions>* descriptions);

  const RankSet below_;
  DescriptionPool& pool_;
  std::vector<std::shared_ptr<const Description>> dictionary_;
  std::vector<RankSet> rank_lists_;
  // Runs that have come since the dictionary changed, by their encoding: the same ones
  // come in each step.
  std::unordered_map<std::string, std::shared_ptr<const Descriptions>> runs_;
};

// ---- From the coordinator to all ranks

// The members of a process set run the tensors together, as one collective.
struct RunMessage {
  std::vector<TensorKey> tensors;
  std::vector<Decision::Zeros> zeros;       // for some of the tensors
  std::optional<std::string_view> results;  // within the message; see inline_tensors.h
};
// These ranks end the oldest request of this name with `text`.
struct FailMessage {
  TensorKey tensor;
  std::vector<int> ranks;
  bool departed = false;  // because a rank has left
  std::string text;
};
// All ranks end this request, which they have all made.
struct AgreeMessage {
  TensorKey tensor;
  Kind kind = Kind::kJoin;
  int32_t answer = 0;
  std::vector<int> members;
};
// Later collectives run with these settings.
struct TuneMessage {
  Tuning tuning;  // without `fusion_bytes`, which only the coordinator needs
};
using DecisionMessage =
    std::variant<RunMessage, FailMessage, AgreeMessage, TuneMessage>;

class DecisionEncoder {
 public:
  // `cache_capacity`: how many tensors travel as numbers. `hosts`: the number of each
  // rank's host.
  DecisionEncoder(size_t cache_capacity, std::vector<int> hosts);

  // The results are valid until the next call.
  std::string_view Encode(const Decision& decision);
  std::string_view Encode(const Tuning& tuning);

 private:
  void AddTensor(const TensorKey& key);
  std::vector<int> HostsOf(const std::vector<int>& ranks) const;

  NumberTable<TensorKey, TensorKeyHash> numbers_;
  std::vector<int> hosts_;  // none if all ranks are on one
  std::string message_;
};

class DecisionDecoder {
 public:
  // `size`: the number of ranks in the job.
  explicit DecisionDecoder(int size) : size_(size) {}

  Status Decode(std::string_view message, DecisionMessage* decision);

 private:
  const int size_;
  std::vector<TensorKey> dictionary_;
};

}  // namespace keras_hvd
