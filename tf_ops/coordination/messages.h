// What ranks tell each other about their requests, and how it is written: nobody else
// encodes or decodes messages.
//
// A rank's submissions go to the coordinator, its decisions to all ranks. Each way is a
// stream of messages that a dictionary compresses, which its encoder keeps and its
// decoder follows: what is sent as a text the first time is a number from then on.
// Since a dictionary lives in the order of its own stream, nothing has to be agreed on
// to change it.
//
// Decoders believe nothing: what is malformed is an error that says what is wrong. Who
// has sent it, their callers know.
#ifndef KERAS_HVD_TF_OPS_COORDINATION_MESSAGES_H_
#define KERAS_HVD_TF_OPS_COORDINATION_MESSAGES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "tf_ops/collectives/store_choice.h"
#include "tf_ops/coordination/autotune.h"
#include "tf_ops/coordination/coordinator.h"
#include "tf_ops/operation/description.h"
#include "tf_ops/operation/operation.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

// The writing side of a dictionary: numbers for keys, from 0. Started again, it gives
// numbers a new meaning by defining them anew.
template <typename Key, typename Hash = std::hash<Key>>
class NumberTable {
 public:
  // `most` keys have numbers at a time, or as many as one message has, if those are
  // more.
  explicit NumberTable(size_t most) : most_(most) {}

  // Makes room for the keys of one message, which must not change meaning before it is
  // read: starts again if they might not fit.
  void Reserve(size_t keys) {
    if (numbers_.size() + keys > most_) numbers_.clear();
  }
  // Returns the key's number; `*is_new` says that the reader does not know it yet.
  int64_t Number(const Key& key, bool* is_new) {
    const auto [it, inserted] = numbers_.try_emplace(key, numbers_.size());
    *is_new = inserted;
    return it->second;
  }

 private:
  const size_t most_;
  std::unordered_map<Key, int64_t, Hash> numbers_;
};

// ---- From a rank to the coordinator

// A request that the rank has submitted.
struct Submission {
  std::shared_ptr<const Description> description;
  bool duplicate = false;  // the rank has the name under way in another op
  std::optional<Clock::time_point> submitted;  // where the coordinator wants to know
  std::optional<std::string> input;  // what the rank gives; see inline_tensors.h
};

class SubmissionEncoder {
 public:
  // So many descriptions travel as numbers.
  explicit SubmissionEncoder(size_t cache_capacity) : numbers_(cache_capacity) {}

  // `inlined`: whose tensors travel along, if they do. What it returns is valid until
  // the next call.
  std::string_view Encode(const Description& description, bool duplicate,
                          std::optional<Clock::time_point> submitted,
                          const Operation* inlined);

 private:
  NumberTable<std::string> numbers_;
  std::string description_;
  std::string message_;
};

// Makes equal descriptions of several ranks one object, so that they compare by
// address.
class DescriptionPool {
 public:
  // `size`: of the job.
  explicit DescriptionPool(int size) : size_(size) {}

  Status Decode(std::string_view encoded,
                std::shared_ptr<const Description>* description);

 private:
  const int size_;
  std::unordered_map<std::string, std::shared_ptr<const Description>> pool_;
};

// Of one rank's stream.
class SubmissionDecoder {
 public:
  // `pool` is that of all ranks.
  explicit SubmissionDecoder(DescriptionPool* pool) : pool_(*pool) {}

  Status Decode(std::string_view message, Submission* submission);

 private:
  DescriptionPool& pool_;
  std::vector<std::shared_ptr<const Description>> dictionary_;
};

// ---- From the coordinator to all ranks

// The members of a process set run the tensors together, as one collective.
struct RunMessage {
  std::vector<TensorKey> tensors;
  std::array<Stores, 2> stores{};           // out of and in place
  std::vector<Decision::Zeros> zeros;       // of some of the tensors
  std::optional<std::string_view> results;  // in the message; see inline_tensors.h
};
// These ranks end the oldest request of this name with `text`.
struct FailMessage {
  TensorKey tensor;
  std::vector<int> ranks;
  bool departed = false;  // since a rank has left
  std::string text;
};
// All ranks end this request, for which they have all asked.
struct AgreeMessage {
  TensorKey tensor;
  Kind kind = Kind::kJoin;
  int32_t answer = 0;
  std::vector<int> members;
};
// From here on collectives run with this.
struct TuneMessage {
  Tuning tuning;  // without `fusion_bytes`, which the coordinator alone needs
};
using DecisionMessage =
    std::variant<RunMessage, FailMessage, AgreeMessage, TuneMessage>;

class DecisionEncoder {
 public:
  // So many tensors travel as numbers.
  explicit DecisionEncoder(size_t cache_capacity) : numbers_(cache_capacity) {}

  // What they return is valid until the next call. `stores`: for what the decision is
  // to run.
  std::string_view Encode(const Decision& decision,
                          const std::array<Stores, 2>& stores);
  std::string_view Encode(const Tuning& tuning);

 private:
  void AddTensor(const TensorKey& key);

  NumberTable<TensorKey, TensorKeyHash> numbers_;
  std::string message_;
};

class DecisionDecoder {
 public:
  // `size`: of the job.
  explicit DecisionDecoder(int size) : size_(size) {}

  Status Decode(std::string_view message, DecisionMessage* decision);

 private:
  const int size_;
  std::vector<TensorKey> dictionary_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COORDINATION_MESSAGES_H_
