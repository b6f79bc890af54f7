// Rank 0's side of the coordination: feeds the coordinator with what the ranks submit,
// and hands its decisions to them.
//
// Both ways are streams of bytes through shared memory. Each is compressed by a
// dictionary that its writer keeps and its reader follows: what is sent as a text the
// first time is a number from then on. Since a dictionary lives in the order of its own
// stream, nothing has to be agreed on to change it.
#ifndef KERAS_HVD_TF_OPS_ENGINE_COORDINATION_H_
#define KERAS_HVD_TF_OPS_ENGINE_COORDINATION_H_

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tf_ops/collectives/store_choice.h"
#include "tf_ops/engine/autotune.h"
#include "tf_ops/engine/coordinator.h"
#include "tf_ops/engine/timeline.h"
#include "tf_ops/transport/segment.h"

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

// What begins a message of a rank's submissions.
enum class SubmissionMessage : int64_t {
  kDefine = 0,           // number, description
  kSubmit = 1,           // number
  kSubmitDuplicate = 2,  // number: the rank has the name under way in another op
  kTime = 3,             // nanoseconds: when the next request was submitted
  kSubmitInput = 4,      // number, what the rank gives; see inline_tensors.h
};

// What begins a message of the decisions.
enum class DecisionMessage : int64_t {
  kDefine = 0,  // number, process set, name
  kRun = 1,     // stores (out of place, in place), numbers of the tensors
  kFail = 2,    // number, departed, count, ranks, text
  kZeros = 3,   // count, ranks, description: they have it, zeros, for the next kRun
  kAgree = 4,   // number, kind, answer, members
  kTune = 5,    // window bytes, small bytes, spin in microseconds: from here on
  kResult = 6,  // count, numbers of the tensors, their results
};

class Coordination {
 public:
  Coordination(std::shared_ptr<Segment> segment, int64_t fusion_bytes,
               size_t cache_capacity, Timeline* timeline);

  // How long an allreduce of so many bytes took with these stores.
  void Learn(int64_t bytes, bool in_place, Stores stores, double seconds) {
    store_choice_.Learn(bytes, in_place, stores, seconds);
  }

  // Has the job look for better settings; before anything is decided.
  void StartAutotune(const AutotuneOptions& options, const Tuning& defaults);
  bool tunes() const { return autotune_ != nullptr && !autotune_->done(); }
  // While it tunes: rank 0 has come to the last kTune; it has run a batch.
  void NoteTuned() { autotune_->Begin(); }
  void NoteRun(const std::vector<TensorKey>& tensors, int64_t bytes);

  // Does what there is to do without waiting. Returns true if there was anything.
  bool Progress();
  // Whether there is something to do for Progress: submissions to read, or other
  // things.
  bool HasSubmissions() const;
  bool HasNews();
  // Reports requests that wait for longer than `warning` seconds, each once, and fails
  // the job over one that waits for longer than `abort` (0: never).
  void CheckStalls(double warning, double abort);
  bool anything_waits() const { return anything_waits_; }

 private:
  struct Reader {
    StreamReader stream;
    std::vector<std::shared_ptr<const Description>> dictionary;
    double time = 0;  // of the next request, in seconds; 0: not given
  };

  bool ReadSubmissions(int rank);
  void HandleSubmission(int rank, std::string_view message);
  std::shared_ptr<const Description> Intern(std::string_view encoded);
  bool NoteDepartures();
  void WriteDecision(const Decision& decision);
  void WriteZeros(const Decision::Zeros& zeros);
  void EncodeRun(const Decision& decision, const std::vector<int64_t>& numbers,
                 std::string* message);
  void WriteTuning();
  void WriteAutotuneLog();
  int64_t NumberFor(const TensorKey& key);
  bool Flush();
  std::string StallText(const Stall& stall, double seconds);

  const std::shared_ptr<Segment> segment_;
  Timeline& timeline_;
  Coordinator coordinator_;
  std::vector<Reader> readers_;
  std::unordered_map<std::string, std::shared_ptr<const Description>> interned_;
  std::vector<bool> departed_;
  uint64_t batches_ = 0;  // and new process sets, decided; ranks count them alike
  StreamWriter decisions_;
  StoreChoice store_choice_;
  std::unique_ptr<Autotune> autotune_;  // null: off
  std::string autotune_log_;            // its file; "": none, or it has failed
  NumberTable<TensorKey, TensorKeyHash> numbers_;
  std::unordered_map<TensorKey, double, TensorKeyHash> warned_;
  bool anything_waits_ = false;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_COORDINATION_H_
