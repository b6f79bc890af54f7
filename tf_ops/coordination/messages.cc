// A message is a sequence of fields, each a multiple of 8 bytes: integers, texts with
// their length in front, lists with their count in front.
#include "tf_ops/coordination/messages.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "tf_ops/operation/inline_tensors.h"

namespace keras_hvd {
namespace {

constexpr size_t kMostPooled = 16384;
constexpr size_t kFieldBytes = sizeof(int64_t);
constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
constexpr int64_t kAnyInt32 = std::numeric_limits<int32_t>::max();

enum class DecisionType : int64_t { kRun = 0, kFail = 1, kAgree = 2, kTune = 3 };

// The fields of a submission's message besides the number of its description.
constexpr int64_t kDefines = 1;
constexpr int64_t kDuplicate = 2;
constexpr int64_t kHasTime = 4;
constexpr int64_t kHasInput = 8;
constexpr int64_t kAllFlags = 15;
// Further ones of a merged submission. With kDeparts it is no submission, but names a
// rank that has left.
constexpr int64_t kDefinesRanks = 16;
constexpr int64_t kDeparts = 32;
// Or it is a run of known descriptions.
constexpr int64_t kIsRun = 33;

// In nanoseconds: a time that can still be subtracted from a later one.
constexpr int64_t kLongestAge = kAny / 2;

// The most requests in a run, so no message asks for much more memory than it has.
constexpr size_t kLongestRun = 4096;

// The most runs remembered for each host below.
constexpr size_t kMostRuns = 16;

// All names of a step usually have one list of ranks.
constexpr size_t kMostRankLists = 256;

// ---- Writing

void AddInteger(int64_t value, std::string* to) {
  to->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void AddNumber(double value, std::string* to) {
  to->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void AddText(std::string_view text, std::string* to) {
  AddInteger(static_cast<int64_t>(text.size()), to);
  to->append(text);
  to->append((kFieldBytes - text.size() % kFieldBytes) % kFieldBytes, '\0');
}

template <typename List>
void AddList(const List& integers, std::string* to) {
  AddInteger(static_cast<int64_t>(integers.size()), to);
  for (int64_t integer : integers) AddInteger(integer, to);
}

void AddDescription(const Description& description, std::string* to) {
  AddInteger(description.process_set, to);
  AddText(description.name, to);
  AddInteger(static_cast<int64_t>(description.kind), to);
  AddInteger(static_cast<int64_t>(description.reduction.op), to);
  AddNumber(description.reduction.prescale, to);
  AddNumber(description.reduction.postscale, to);
  AddInteger(description.root, to);
  AddInteger(description.on_gpu ? 1 : 0, to);
  AddInteger(static_cast<int64_t>(description.tensors.size()), to);
  for (const TensorDescription& tensor : description.tensors) {
    AddInteger(static_cast<int64_t>(tensor.dtype), to);
    AddList(tensor.shape, to);
  }
  AddList(description.members, to);
  AddText(description.labels, to);
  if (description.kind == Kind::kAddProcessSet) {
    AddInteger(description.last_earlier_set, to);
  }
}

// ---- Reading

// Takes fields off the front of a message. After the first wrong field, all others are
// 0 or empty, so callers check for an error only once, at the end.
class Fields {
 public:
  explicit Fields(std::string_view message) : rest_(message) {}

  const Status& status() const { return status_; }
  std::string_view rest() const { return rest_; }

  int64_t Integer(const char* what, int64_t least, int64_t most) {
    int64_t value = 0;
    if (!Take(what, &value)) return 0;
    if (value >= least && value <= most) return value;
    Refuse(std::string(what) + " = " + std::to_string(value) + ", which is not in " +
           std::to_string(least) + ".." + std::to_string(most));
    return 0;
  }

  double Number(const char* what) {
    double value = 0;
    Take(what, &value);
    return value;
  }

  std::string_view Text(const char* what) {
    const int64_t length = Integer(what, 0, static_cast<int64_t>(rest_.size()));
    const size_t padded = (length + kFieldBytes - 1) / kFieldBytes * kFieldBytes;
    if (padded > rest_.size()) {
      EndsIn(what);
      return {};
    }
    const std::string_view text = rest_.substr(0, length);
    rest_.remove_prefix(padded);
    return text;
  }

  // The number of elements that follow, each of at least `fields` fields.
  int64_t Count(const char* what, size_t fields = 1) {
    return Integer(what, 0, rest_.size() / kFieldBytes / fields);
  }

  // Ascending.
  std::vector<int> Ranks(const char* what, int size) {
    std::vector<int> ranks(Count(what));
    int64_t least = 0;
    for (int& rank : ranks) {
      rank = static_cast<int>(Integer(what, least, size - 1));
      least = rank + 1;
    }
    return ranks;
  }

  Kind ReadKind() {
    const int64_t kind = Integer("kind", 0, static_cast<int64_t>(Kind::kJoin));
    if (kind >= kKinds && kind < static_cast<int64_t>(Kind::kAddProcessSet)) {
      Refuse("kind = " + std::to_string(kind) + ", which does not exist");
      return Kind::kAllreduce;
    }
    return static_cast<Kind>(kind);
  }

  Description ReadDescription(int size) {
    Description description;
    description.process_set = Integer("process set", 0, kAnyInt32);
    description.name = Text("name");
    description.kind = ReadKind();
    description.reduction.op =
        static_cast<ReduceOp>(Integer("operation", 0, kReduceOps - 1));
    description.reduction.prescale = Number("prescale factor");
    description.reduction.postscale = Number("postscale factor");
    description.root = Integer("root", 0, size - 1);
    description.on_gpu = Integer("place", 0, 1) == 1;
    description.tensors.resize(Count("number of tensors", 2));
    int64_t bytes = 0;
    for (TensorDescription& tensor : description.tensors) {
      tensor = ReadTensor(HasOwnRows(description.kind), &bytes);
    }
    description.members = Ranks("members", size);
    description.labels = Text("labels");
    if (description.kind == Kind::kAddProcessSet) {
      description.last_earlier_set = Integer("last earlier set", 0, kAnyInt32);
    }
    return description;
  }

  // Must be called at the end of every message.
  Status End() {
    if (status_.ok() && !rest_.empty()) {
      Refuse(std::to_string(rest_.size()) + " bytes follow its end");
    }
    return status_;
  }

  void Refuse(const std::string& text) {
    if (status_.ok()) status_ = Status::Internal(text);
    rest_ = {};
  }

 private:
  template <typename Value>
  bool Take(const char* what, Value* value) {
    static_assert(sizeof(Value) == kFieldBytes);
    if (rest_.size() < kFieldBytes) {
      EndsIn(what);
      return false;
    }
    memcpy(value, rest_.data(), kFieldBytes);
    rest_.remove_prefix(kFieldBytes);
    return true;
  }

  void EndsIn(const char* what) { Refuse(std::string("it ends within ") + what); }

  // `own_rows`: the first dimension may differ between ranks, so the tensor has none.
  // Adds the tensor's size to `total`; refuses a total that would overflow.
  TensorDescription ReadTensor(bool own_rows, int64_t* total) {
    TensorDescription tensor;
    tensor.dtype = static_cast<DataType>(Integer("type", 0, kDataTypes - 1));
    tensor.shape.resize(Count("number of dimensions"));
    int64_t bytes = Bytes(tensor.dtype);
    bool countable = true;
    bool empty = false;
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      const bool none = own_rows && i == 0;
      const int64_t dimension =
          none ? Integer("dimension", -1, -1) : Integer("dimension", 0, kAny);
      tensor.shape[i] = dimension;
      empty |= dimension == 0;
      countable &= !__builtin_mul_overflow(bytes, dimension, &bytes);
    }
    // If ranks have rows of their own, only each rank knows its size.
    if (own_rows || empty) return tensor;
    countable &= !__builtin_add_overflow(*total, bytes, total);
    // Packing may add bytes for alignment.
    if (!countable || *total > kAny / 2) Refuse("the tensors have too many bytes");
    return tensor;
  }

  std::string_view rest_;
  Status status_;
};

// Reads the number of something in a dictionary, and the thing itself if it is new.
// Returns null after a wrong field.
template <typename Value, typename Read>
const Value* ReadNumbered(const char* what, bool is_new, std::vector<Value>* dictionary,
                          Fields* from, const Read& read) {
  const int64_t known = static_cast<int64_t>(dictionary->size());
  const int64_t number = from->Integer(what, 0, is_new ? known : known - 1);
  if (is_new && from->status().ok()) {
    Value value = read();
    if (!from->status().ok()) return nullptr;
    if (number == known) dictionary->emplace_back();
    (*dictionary)[number] = std::move(value);
  }
  return from->status().ok() ? &(*dictionary)[number] : nullptr;
}

// Null after a wrong field.
std::shared_ptr<const Description> ReadNumberedDescription(
    bool is_new, DescriptionPool* pool,
    std::vector<std::shared_ptr<const Description>>* dictionary, Fields* from) {
  const auto* numbered = ReadNumbered("description", is_new, dictionary, from, [&] {
    std::shared_ptr<const Description> description;
    const std::string_view encoded = from->Text("description");
    if (!from->status().ok()) return description;
    const Status status = pool->Decode(encoded, &description);
    if (!status.ok()) from->Refuse(status.message);
    return description;
  });
  return numbered == nullptr ? nullptr : *numbered;
}

// Refuses an input that the request cannot have.
void CheckInput(const Description& description, size_t bytes, Fields* from) {
  if (FitsInline(description, bytes)) return;
  from->Refuse("the tensors of " + Title(description) +
               " do not travel along, or not in " + std::to_string(bytes) + " bytes");
}

}  // namespace

// ---- From a rank to its leader

size_t SubmissionEncoder::NameHash::operator()(const Description* description) const {
  return std::hash<std::string>()(description->name) * 31 + description->process_set;
}

bool SubmissionEncoder::IsEqual::operator()(const Description* a,
                                            const Description* b) const {
  return *a == *b;
}

std::string_view SubmissionEncoder::Encode(const Description& description,
                                           bool duplicate,
                                           std::optional<Clock::time_point> submitted,
                                           const Operation* inlined) {
  auto known = numbers_.find(&description);
  const bool is_new = known == numbers_.end();
  if (is_new) {
    if (numbers_.size() >= most_) {
      numbers_.clear();
      known_.clear();
    }
    known_.push_back(description);
    known = numbers_.emplace(&known_.back(), known_.size() - 1).first;
  }
  message_.clear();
  AddInteger((is_new ? kDefines : 0) | (duplicate ? kDuplicate : 0) |
                 (submitted.has_value() ? kHasTime : 0) |
                 (inlined != nullptr ? kHasInput : 0),
             &message_);
  AddInteger(known->second, &message_);
  if (is_new) {
    description_.clear();
    AddDescription(description, &description_);
    AddText(description_, &message_);
  }
  if (submitted.has_value()) {
    AddInteger(Nanoseconds(submitted->time_since_epoch()), &message_);
  }
  if (inlined != nullptr) AppendInputs(*inlined, &message_);
  return message_;
}

Status DescriptionPool::Decode(std::string_view encoded,
                               std::shared_ptr<const Description>* description) {
  std::string key(encoded);
  const auto known = pool_.find(key);
  if (known != pool_.end()) {
    *description = known->second;
    return Status::Ok();
  }
  Fields fields(encoded);
  auto decoded = std::make_shared<Description>(fields.ReadDescription(size_));
  KHVD_RETURN_IF_ERROR(fields.End());
  if (pool_.size() >= kMostPooled) pool_.clear();
  pool_.emplace(std::move(key), decoded);
  *description = std::move(decoded);
  return Status::Ok();
}

Status SubmissionDecoder::Decode(std::string_view message, Submission* submission) {
  *submission = {};
  Fields fields(message);
  const int64_t flags = fields.Integer("flags", 0, kAllFlags);
  submission->description =
      ReadNumberedDescription((flags & kDefines) != 0, &pool_, &dictionary_, &fields);
  submission->duplicate = (flags & kDuplicate) != 0;
  if ((flags & kHasTime) != 0) {
    submission->submitted.emplace(
        std::chrono::nanoseconds(fields.Integer("time", 0, kAny)));
  }
  if ((flags & kHasInput) == 0) return fields.End();
  if (!fields.status().ok()) return fields.status();
  const std::string_view input = fields.rest();
  CheckInput(*submission->description, input.size(), &fields);
  submission->input.emplace(input);
  return fields.status();
}

// ---- From a leader to the leader above

MergedEncoder::MergedEncoder(size_t cache_capacity)
    : descriptions_(cache_capacity), rank_lists_(kMostRankLists) {}

std::string_view MergedEncoder::Encode(const std::vector<Upward>& upward, size_t* next,
                                       Clock::time_point now) {
  message_.clear();
  const size_t length = FindRun(upward, *next);
  const Upward& first = upward[*next];
  *next += std::max<size_t>(length, 1);
  if (const auto* departure = std::get_if<RankDeparture>(&first)) {
    AddInteger(kDeparts, &message_);
    AddInteger(departure->rank, &message_);
    AddInteger(departure->carried_out, &message_);
    AddInteger(departure->leader + 1, &message_);
    AddText(departure->how, &message_);
    return message_;
  }
  const auto& merged = std::get<MergedSubmission>(first);
  if (length < 2) {
    AddSubmission(merged, now);
    return message_;
  }
  AddInteger(kIsRun, &message_);
  AddInteger(rank_lists_.Find(merged.ranks), &message_);
  AddInteger(static_cast<int64_t>(run_.size()), &message_);
  for (const auto& [begin, end] : run_) {
    AddInteger(begin, &message_);
    AddInteger(end, &message_);
  }
  return message_;
}

// How many messages from the first one on are a run, whose numbers are then in `run_`.
size_t MergedEncoder::FindRun(const std::vector<Upward>& upward, size_t first) {
  run_.clear();
  const MergedSubmission* first_one = nullptr;
  size_t place = first;
  for (; place < upward.size() && place - first < kLongestRun; ++place) {
    const auto* merged = std::get_if<MergedSubmission>(&upward[place]);
    if (merged == nullptr || !merged->is_plain()) break;
    if (IsAgreement(merged->description->kind)) break;
    const bool fits = first_one == nullptr
                          ? rank_lists_.Find(merged->ranks) >= 0
                          : merged->ranks == first_one->ranks &&
                                merged->description->process_set ==
                                    first_one->description->process_set;
    if (!fits) break;
    if (first_one == nullptr) first_one = merged;
    const int64_t number = descriptions_.Find(merged->description);
    if (number < 0) break;
    if (!run_.empty() && run_.back().second + 1 == number) {
      run_.back().second = number;
    } else {
      run_.emplace_back(number, number);
    }
  }
  return place - first;
}

void MergedEncoder::AddSubmission(const MergedSubmission& merged,
                                  Clock::time_point now) {
  descriptions_.Reserve(1);
  rank_lists_.Reserve(1);
  bool is_new, has_new_ranks;
  const int64_t description = descriptions_.Number(merged.description, &is_new);
  const int64_t ranks = rank_lists_.Number(merged.ranks, &has_new_ranks);
  AddInteger((is_new ? kDefines : 0) | (merged.duplicate ? kDuplicate : 0) |
                 (merged.submitted.empty() ? 0 : kHasTime) |
                 (merged.inputs.empty() ? 0 : kHasInput) |
                 (has_new_ranks ? kDefinesRanks : 0),
             &message_);
  AddInteger(description, &message_);
  if (is_new) {
    description_.clear();
    AddDescription(*merged.description, &description_);
    AddText(description_, &message_);
  }
  AddInteger(ranks, &message_);
  if (has_new_ranks) AddList(merged.ranks.list(), &message_);
  for (Clock::time_point time : merged.submitted) {
    AddInteger(std::max<int64_t>(Nanoseconds(now - time), 0), &message_);
  }
  for (const std::string& input : merged.inputs) AddText(input, &message_);
}

namespace {

// A leader speaks for the ranks below it only.
void CheckRank(int rank, const RankSet& below, Fields* from) {
  if (below.Has(rank)) return;
  from->Refuse("rank " + std::to_string(rank) + " is not below the host");
}

RankSet ReadRanks(bool is_new, const RankSet& below, std::vector<RankSet>* rank_lists,
                  Fields* from) {
  const RankSet* numbered = ReadNumbered("ranks", is_new, rank_lists, from, [&] {
    std::vector<int> ranks = from->Ranks("ranks", below.back() + 1);
    for (int rank : ranks) CheckRank(rank, below, from);
    if (ranks.empty()) from->Refuse("it is of no rank");
    // The usual ones are one object.
    return ranks == below.list() ? below : RankSet(std::move(ranks));
  });
  return numbered == nullptr ? RankSet() : *numbered;
}

// As MergedEncoder writes it, but no longer than MergedEncoder would.
void ReadRun(const Descriptions& dictionary, Fields* from, Descriptions* run) {
  const int64_t known = static_cast<int64_t>(dictionary.size());
  for (int64_t left = from->Count("number of sequences", 2); left > 0; --left) {
    const int64_t first = from->Integer("first description", 0, known - 1);
    const int64_t last = from->Integer("last description", first, known - 1);
    if (last - first >= static_cast<int64_t>(kLongestRun - run->size())) {
      from->Refuse("it is of more than " + std::to_string(kLongestRun) + " requests");
    }
    if (!from->status().ok()) return;
    run->insert(run->end(), dictionary.begin() + first, dictionary.begin() + last + 1);
  }
  if (run->empty()) return from->Refuse("it is of no request");
  for (const auto& description : *run) {
    const int32_t process_set = run->front()->process_set;
    if (IsAgreement(description->kind) || description->process_set != process_set) {
      return from->Refuse(Title(*description) + " is not part of a run");
    }
  }
}

}  // namespace

Status MergedDecoder::DecodeRun(std::string_view sequences,
                                std::shared_ptr<const Descriptions>* descriptions) {
  std::string key(sequences);
  const auto known = runs_.find(key);
  if (known != runs_.end()) {
    *descriptions = known->second;
    return Status::Ok();
  }
  Fields fields(sequences);
  auto read = std::make_shared<Descriptions>();
  ReadRun(dictionary_, &fields, read.get());
  KHVD_RETURN_IF_ERROR(fields.End());
  if (runs_.size() >= kMostRuns) runs_.clear();
  runs_.emplace(std::move(key), read);
  *descriptions = std::move(read);
  return Status::Ok();
}

Status MergedDecoder::Decode(std::string_view message, Clock::time_point now,
                             UpwardMessage* decoded) {
  Fields fields(message);
  const int64_t flags = fields.Integer("flags", 0, kIsRun);
  if (flags == kDeparts) {
    const int rank = fields.Integer("rank", 0, below_.back());
    CheckRank(rank, below_, &fields);
    const int64_t carried_out = fields.Integer("decisions", 0, kAny);
    const int leader = fields.Integer("leader", 0, below_.back() + 1) - 1;
    if (leader >= 0) CheckRank(leader, below_, &fields);
    *decoded =
        RankDeparture{rank, carried_out, leader, std::string(fields.Text("how"))};
    return fields.End();
  }
  if (flags == kIsRun) {
    auto& run = decoded->emplace<SubmissionRun>();
    run.ranks = ReadRanks(/*is_new=*/false, below_, &rank_lists_, &fields);
    if (!fields.status().ok()) return fields.status();
    return DecodeRun(fields.rest(), &run.descriptions);
  }
  // The numbers in a run may mean something else from now on.
  if ((flags & kDefines) != 0) runs_.clear();
  auto& merged = decoded->emplace<MergedSubmission>();
  merged.description =
      ReadNumberedDescription((flags & kDefines) != 0, &pool_, &dictionary_, &fields);
  merged.duplicate = (flags & kDuplicate) != 0;
  merged.ranks = ReadRanks((flags & kDefinesRanks) != 0, below_, &rank_lists_, &fields);
  if (merged.duplicate && merged.ranks.size() > 1) {
    fields.Refuse("a second call is of one rank, not of " +
                  RankList(merged.ranks.list()));
  }
  const size_t count = merged.ranks.size();
  for (size_t i = 0; i < count && (flags & kHasTime) != 0; ++i) {
    merged.submitted.push_back(
        now - std::chrono::nanoseconds(fields.Integer("age", 0, kLongestAge)));
  }
  for (size_t i = 0; i < count && (flags & kHasInput) != 0; ++i) {
    const std::string& input = merged.inputs.emplace_back(fields.Text("input"));
    if (!fields.status().ok()) break;
    CheckInput(*merged.description, input.size(), &fields);
  }
  return fields.End();
}

// ---- From the coordinator to all ranks

void DecisionEncoder::AddTensor(const TensorKey& key) {
  bool is_new;
  const int64_t number = numbers_.Number(key, &is_new);
  AddInteger(number, &message_);
  AddInteger(is_new ? 1 : 0, &message_);
  if (!is_new) return;
  AddInteger(key.process_set, &message_);
  AddText(key.name, &message_);
}

DecisionEncoder::DecisionEncoder(size_t cache_capacity, std::vector<int> hosts)
    : numbers_(cache_capacity) {
  const bool is_one_host = std::all_of(hosts.begin(), hosts.end(),
                                       [&](int host) { return host == hosts[0]; });
  if (!is_one_host) hosts_ = std::move(hosts);
}

std::vector<int> DecisionEncoder::HostsOf(const std::vector<int>& ranks) const {
  std::vector<int> hosts;
  if (hosts_.empty()) return hosts;
  hosts.reserve(ranks.size());
  for (int rank : ranks) hosts.push_back(hosts_[rank]);
  return hosts;
}

std::string_view DecisionEncoder::Encode(const Decision& decision) {
  message_.clear();
  numbers_.Reserve(decision.tensors.size());
  switch (decision.type) {
    case Decision::Type::kRun:
      AddInteger(static_cast<int64_t>(DecisionType::kRun), &message_);
      AddInteger(static_cast<int64_t>(decision.tensors.size()), &message_);
      for (const TensorKey& key : decision.tensors) AddTensor(key);
      AddInteger(static_cast<int64_t>(decision.zeros.size()), &message_);
      for (const Decision::Zeros& zeros : decision.zeros) {
        AddList(zeros.ranks, &message_);
        AddDescription(*zeros.description, &message_);
      }
      AddInteger(decision.given.empty() ? 0 : 1, &message_);
      for (const Decision::Given& given : decision.given) {
        AppendResults(*given.description, given.inputs, HostsOf(decision.ranks.list()),
                      &message_);
      }
      break;
    case Decision::Type::kFail:
      AddInteger(static_cast<int64_t>(DecisionType::kFail), &message_);
      AddTensor(decision.tensors.front());
      AddList(decision.ranks.list(), &message_);
      AddInteger(decision.departed ? 1 : 0, &message_);
      AddText(decision.text, &message_);
      break;
    case Decision::Type::kAgree:
      AddInteger(static_cast<int64_t>(DecisionType::kAgree), &message_);
      AddTensor(decision.tensors.front());
      AddInteger(static_cast<int64_t>(decision.agreed), &message_);
      AddInteger(decision.answer, &message_);
      AddList(decision.members, &message_);
      break;
  }
  return message_;
}

std::string_view DecisionEncoder::Encode(const Tuning& tuning) {
  message_.clear();
  AddInteger(static_cast<int64_t>(DecisionType::kTune), &message_);
  AddInteger(tuning.window_bytes, &message_);
  AddInteger(tuning.small_bytes, &message_);
  AddInteger(tuning.spin_microseconds, &message_);
  AddInteger(tuning.halving_hosts, &message_);
  return message_;
}

namespace {

// Null after a wrong field; otherwise valid until the next call.
const TensorKey* ReadTensor(std::vector<TensorKey>* dictionary, Fields* from) {
  const int64_t known = static_cast<int64_t>(dictionary->size());
  const int64_t number = from->Integer("tensor", 0, known);
  const bool is_new = from->Integer("definition", 0, 1) == 1;
  if (is_new) {
    TensorKey key;
    key.process_set = from->Integer("process set", 0, kAnyInt32);
    key.name = from->Text("name");
    if (!from->status().ok()) return nullptr;
    if (number == known) dictionary->emplace_back();
    (*dictionary)[number] = std::move(key);
  } else if (number == known) {
    from->Refuse("tensor " + std::to_string(number) + " has not been defined");
  }
  return from->status().ok() ? &(*dictionary)[number] : nullptr;
}

TensorKey ReadOneTensor(std::vector<TensorKey>* dictionary, Fields* from) {
  const TensorKey* tensor = ReadTensor(dictionary, from);
  return tensor == nullptr ? TensorKey() : *tensor;
}

bool Has(const std::vector<TensorKey>& tensors, const Description& description) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const TensorKey& key) {
    return key.process_set == description.process_set && key.name == description.name;
  });
}

// Uses the memory that the last one's names had.
void ReadRun(int size, std::vector<TensorKey>* dictionary, Fields* from,
             RunMessage* to) {
  RunMessage& run = *to;
  const int64_t most = from->rest().size() / (2 * kFieldBytes);
  const int64_t count = from->Integer("number of tensors", 1, most);
  run.tensors.resize(count);
  for (TensorKey& each : run.tensors) {
    const TensorKey* tensor = ReadTensor(dictionary, from);
    if (tensor == nullptr) return;
    each = *tensor;
  }
  run.zeros.clear();
  run.zeros.resize(from->Count("number of zeros"));
  for (Decision::Zeros& zeros : run.zeros) {
    zeros.ranks = from->Ranks("ranks of zeros", size);
    auto description = std::make_shared<Description>(from->ReadDescription(size));
    if (!TakesZeros(*description) || !Has(run.tensors, *description)) {
      from->Refuse("zeros are for " + Title(*description));
    }
    zeros.description = std::move(description);
  }
  run.results.reset();
  if (from->Integer("results", 0, 1) == 1) run.results = from->rest();
}

}  // namespace

Status DecisionDecoder::Decode(std::string_view message, DecisionMessage* decision) {
  Fields fields(message);
  switch (static_cast<DecisionType>(fields.Integer("type", 0, 3))) {
    case DecisionType::kRun: {
      if (!std::holds_alternative<RunMessage>(*decision))
        decision->emplace<RunMessage>();
      auto& run = std::get<RunMessage>(*decision);
      ReadRun(size_, &dictionary_, &fields, &run);
      return run.results.has_value() ? fields.status() : fields.End();
    }
    case DecisionType::kFail: {
      FailMessage fail;
      fail.tensor = ReadOneTensor(&dictionary_, &fields);
      fail.ranks = fields.Ranks("ranks", size_);
      fail.departed = fields.Integer("departure", 0, 1) == 1;
      fail.text = fields.Text("text");
      *decision = std::move(fail);
      break;
    }
    case DecisionType::kAgree: {
      AgreeMessage agree;
      agree.tensor = ReadOneTensor(&dictionary_, &fields);
      agree.kind = fields.ReadKind();
      if (!IsAgreement(agree.kind)) fields.Refuse("nobody agrees on a collective");
      // The rank that joined last, or a process set. Set 0 never changes.
      const bool is_rank = agree.kind == Kind::kJoin;
      agree.answer = is_rank ? fields.Integer("last rank", 0, size_ - 1)
                             : fields.Integer("process set", 1, kAnyInt32);
      agree.members = fields.Ranks("members", size_);
      if (agree.kind == Kind::kAddProcessSet && agree.members.empty()) {
        fields.Refuse("the process set has no members");
      }
      *decision = std::move(agree);
      break;
    }
    case DecisionType::kTune: {
      TuneMessage tune;
      tune.tuning.window_bytes = fields.Integer("window", 1, kAny);
      tune.tuning.small_bytes = fields.Integer("small size", 0, kAny);
      tune.tuning.spin_microseconds = fields.Integer("spinning", 0, kAny);
      tune.tuning.halving_hosts = fields.Integer("hosts", 0, kAny);
      if (!IsPossible(tune.tuning)) fields.Refuse(Describe(tune.tuning));
      *decision = tune;
      break;
    }
  }
  return fields.End();
}

}  // namespace keras_hvd
