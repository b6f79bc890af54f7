#include "tf_ops/testing/gpu/clique.h"

#include <algorithm>
#include <cstring>

#include "tf_ops/testing/gpu/reduce.h"

namespace keras_hvd::stand_in {
namespace {

using Kind = Request::Kind;

bool Overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  const char* const from = static_cast<const char*>(a);
  const char* const other = static_cast<const char*>(b);
  return a_bytes > 0 && b_bytes > 0 && from < other + b_bytes && other < from + a_bytes;
}

// Where a member's own elements are in a buffer with those of all.
const char* InPlace(const Request& request) {
  const size_t own = request.communicator->index * request.count * Bytes(request.type);
  const char* const input = static_cast<const char*>(request.input);
  if (request.kind == Kind::kAllGather) return input - own;
  if (request.kind == Kind::kReduceScatter) return input + own;
  return input;
}

std::string Signature(const Request& request, int position, int collectives) {
  std::string text = std::to_string(request.count) + " " + Name(request.type);
  if (request.is_message()) return text;
  text = std::string(Name(request.kind)) + " of " + text;
  const bool has_root =
      request.kind == Kind::kBroadcast || request.kind == Kind::kReduce;
  if (has_root) text += ", root " + std::to_string(request.peer);
  if (request.made != nullptr) {
    text += ", scaled sum";
  } else if (request.kind != Kind::kBroadcast && request.kind != Kind::kAllGather) {
    text += ", op " + std::to_string(request.op);
  }
  return text + ", number " + std::to_string(position + 1) + " of " +
         std::to_string(collectives) + " in its group";
}

template <typename Map>
void EraseMeeting(Map* map, const std::shared_ptr<Meeting>& meeting) {
  for (auto each = map->begin(); each != map->end(); ++each) {
    if (each->second != meeting) continue;
    map->erase(each);
    return;
  }
}

}  // namespace

std::string Name(nccl::Comm communicator) {
  return "communicator " + std::to_string(communicator->clique->id) + " (member " +
         std::to_string(communicator->index) + ")";
}

const char* Name(Kind kind) {
  constexpr const char* kNames[] = {"ncclAllReduce", "ncclBroadcast",     "ncclReduce",
                                    "ncclAllGather", "ncclReduceScatter", "ncclSend",
                                    "ncclRecv"};
  return kNames[static_cast<int>(kind)];
}

std::string Problem(const void* memory, size_t bytes) {
  const Machine& machine = Machine::Get();
  const std::string problem = machine.Problem(memory, bytes, false);
  return problem.empty() || machine.Problem(memory, bytes, true).empty() ? "" : problem;
}

size_t Request::input_bytes() const {
  const size_t bytes = count * Bytes(type);
  if (kind == Kind::kReceive) return 0;
  if (kind == Kind::kBroadcast && communicator->index != peer) return 0;
  return kind == Kind::kReduceScatter ? bytes * communicator->count() : bytes;
}

size_t Request::output_bytes() const {
  const size_t bytes = count * Bytes(type);
  if (kind == Kind::kSend) return 0;
  if (kind == Kind::kReduce && communicator->index != peer) return 0;
  return kind == Kind::kAllGather ? bytes * communicator->count() : bytes;
}

bool Clique::full() const {
  return std::all_of(members.begin(), members.end(),
                     [](nccl::Comm member) { return member != nullptr; });
}

bool Clique::all_connected() const {
  return std::all_of(members.begin(), members.end(), [](nccl::Comm member) {
    return member != nullptr && member->connected;
  });
}

void Clique::Fail(nccl::Result error, const std::string& text) {
  for (const nccl::Comm member : members) {
    if (member == nullptr || member->error != nccl::Result::kSuccess) continue;
    member->error = error;
    member->error_text = text;
  }
}

// ---- A group on its stream

GroupItem::GroupItem(nccl::Comm communicator, std::vector<Request> requests)
    : communicator_(communicator), random_(Machine::Get().Random()) {
  const int collectives = static_cast<int>(
      std::count_if(requests.begin(), requests.end(),
                    [](const Request& request) { return !request.is_message(); }));
  int position = 0;
  for (const Request& request : requests) {
    Join(request, position, collectives);
    if (!request.is_message()) position += 1;
  }
  CheckOverlaps();
  communicator_->running.insert(this);
}

void GroupItem::Join(const Request& request, int position, int collectives) {
  Clique& clique = *communicator_->clique;
  Part part;
  part.request = request;
  std::shared_ptr<Meeting>* meeting = nullptr;
  if (request.is_message()) {
    const bool sends = request.kind == Kind::kSend;
    const int self = communicator_->index;
    auto& counts = sends ? communicator_->sent : communicator_->received;
    const uint64_t number = counts[request.peer]++;
    meeting = sends ? &clique.messages[{self, request.peer, number}]
                    : &clique.messages[{request.peer, self, number}];
    part.slot = sends ? 0 : 1;
  } else {
    meeting = &clique.collectives[communicator_->collectives++];
    part.slot = communicator_->index;
  }
  if (*meeting == nullptr) {
    *meeting =
        std::make_shared<Meeting>(request.is_message() ? 2 : communicator_->count());
  }
  part.meeting = *meeting;
  part.contribution = std::make_shared<Contribution>();
  part.contribution->signature = Signature(request, position, collectives);
  part.meeting->parts[part.slot] = part.contribution;
  parts_.push_back(std::move(part));
}

// Calls of one group run in no order: none may write memory that another uses. One
// call's own memory may be the same, but not in part.
void GroupItem::CheckOverlaps() const {
  for (const Part& part : parts_) {
    const Request& request = part.request;
    for (const Part& other : parts_) {
      const Request& with = other.request;
      const bool same = &part == &other;
      const bool written = !same && Overlap(request.output, request.output_bytes(),
                                            with.output, with.output_bytes());
      const bool read = Overlap(request.output, request.output_bytes(), with.input,
                                with.input_bytes()) &&
                        !(same && InPlace(request) == request.output);
      if (!written && !read) continue;
      Machine::Get().Violate(
          std::string(Name(request.kind)) + " of " + Name(communicator_) +
          " writes what " +
          (same ? "it reads itself"
                : std::string("a ") + Name(with.kind) + " of its group uses"));
      return;
    }
  }
}

std::string GroupItem::text() const {
  std::string text = Name(communicator_) + ":";
  constexpr size_t kShown = 3;
  for (size_t i = 0; i < std::min(parts_.size(), kShown); ++i) {
    const Request& request = parts_[i].request;
    text += std::string(i == 0 ? " " : "; ") + Name(request.kind) + " of " +
            std::to_string(request.count) + " " + Name(request.type);
  }
  return parts_.size() > kShown ? text + "; ..." : text;
}

void GroupItem::Placed(const Place& place) {
  place_ = place;
  for (Part& part : parts_) part.contribution->place = place;
}

void GroupItem::AddNeeds(std::vector<Place>* needs) const {
  if (garbage_ || *communicator_->aborted) return;
  for (const Part& part : parts_) {
    if (part.meeting->complete) continue;
    for (const std::shared_ptr<Contribution>& other : part.meeting->parts) {
      if (other == nullptr || other->posted || other == part.contribution) continue;
      needs->push_back(other->place);
    }
  }
}

// Whether all its memory is still there. Freed memory is used too late.
bool GroupItem::UseMemory() {
  if (!usable_) return false;
  for (const Part& part : parts_) {
    const Request& request = part.request;
    for (const std::string& problem :
         {posted_ ? "" : Problem(request.input, request.input_bytes()),
          Problem(request.output, request.output_bytes())}) {
      if (problem.empty()) continue;
      const std::string text =
          std::string(Name(request.kind)) + ", when it runs, uses " + problem;
      Machine::Get().Violate(text);
      communicator_->clique->Fail(nccl::Result::kUnhandledCudaError, text);
      usable_ = false;
      return false;
    }
  }
  return true;
}

bool GroupItem::CanStart() {
  UseMemory();
  return true;
}

void GroupItem::Start() {
  if (!usable_) return;
  for (Part& part : parts_) {
    const Request& request = part.request;
    Contribution& contribution = *part.contribution;
    const char* const input = static_cast<const char*>(request.input);
    contribution.data.assign(input, input + request.input_bytes());
    if (request.made != nullptr) {
      const char* const scale = static_cast<const char*>(request.made->device_scale);
      contribution.scale = request.made->scale;
      if (scale != nullptr)
        contribution.scale.assign(scale, scale + Bytes(request.type));
    }
    Publish(&contribution);
  }
}

bool GroupItem::CanFinish() {
  if (*communicator_->aborted) {
    garbage_ = true;
    UseMemory();
    return true;
  }
  if (!posted_) {
    const bool hangs = communicator_->error != nccl::Result::kSuccess ||
                       Machine::Get().IsHeld(communicator_->index);
    if (hangs) return false;
    Post();
  }
  const bool complete = std::all_of(parts_.begin(), parts_.end(), [](const Part& part) {
    return part.meeting->complete;
  });
  return complete && UseMemory();
}

void GroupItem::Post() {
  posted_ = true;
  for (Part& part : parts_) {
    Meeting& meeting = *part.meeting;
    part.contribution->posted = true;
    meeting.complete = true;
    for (const std::shared_ptr<Contribution>& other : meeting.parts) {
      if (other == nullptr || !other->posted) {
        meeting.complete = false;
        continue;
      }
      if (other->signature == part.contribution->signature || meeting.failed) continue;
      meeting.failed = true;
      const std::string text = "members of communicator " +
                               std::to_string(communicator_->clique->id) +
                               " differ: " + part.contribution->signature +
                               " on member " + std::to_string(communicator_->index) +
                               ", " + other->signature + " on another";
      Machine::Get().Violate(text);
      communicator_->clique->Fail(nccl::Result::kInvalidUsage, text);
    }
    if (meeting.failed) meeting.complete = false;
  }
  Machine::Get().WakeAll();
}

void GroupItem::Withdraw() {
  for (Part& part : parts_) {
    if (!part.meeting->complete) part.meeting->parts[part.slot] = nullptr;
  }
}

void GroupItem::Finish() {
  if (!usable_) return;
  for (const Part& part : parts_) {
    if (garbage_) {
      WriteGarbage(part);
    } else {
      Write(part);
    }
  }
}

void GroupItem::WriteGarbage(const Part& part) const {
  if (part.request.output_bytes() == 0) return;
  std::mt19937_64 random(random_);
  char* const output = static_cast<char*>(part.request.output);
  for (size_t i = 0; i < part.request.output_bytes(); ++i) {
    output[i] = static_cast<char>(random());
  }
}

void GroupItem::Write(const Part& part) const {
  const Request& request = part.request;
  if (request.output_bytes() == 0) return;
  char* const output = static_cast<char*>(request.output);
  const size_t bytes = request.count * Bytes(request.type);
  const auto& parts = part.meeting->parts;
  if (request.kind == Kind::kBroadcast || request.kind == Kind::kReceive) {
    Contribution& source = *parts[request.is_message() ? 0 : request.peer];
    Observe(&source);
    memcpy(output, source.data.data(), bytes);
    return;
  }
  std::vector<ReduceInput> inputs;
  for (const std::shared_ptr<Contribution>& source : parts) {
    Observe(source.get());
    inputs.push_back(
        {source->data.data(), source->scale.empty() ? nullptr : source->scale.data()});
  }
  if (request.kind == Kind::kAllGather) {
    for (size_t member = 0; member < inputs.size(); ++member) {
      memcpy(output + member * bytes, inputs[member].data, bytes);
    }
    return;
  }
  const size_t from =
      request.kind == Kind::kReduceScatter ? communicator_->index * request.count : 0;
  const nccl::Op op = request.made != nullptr ? nccl::kSum : request.op;
  Reduce(request.type, op, inputs, from, request.count, output);
}

void GroupItem::Ended() {
  communicator_->running.erase(this);
  Clique& clique = *communicator_->clique;
  for (Part& part : parts_) {
    part.meeting->running -= 1;
    if (part.meeting->running > 0) continue;
    if (part.request.is_message()) {
      EraseMeeting(&clique.messages, part.meeting);
    } else {
      EraseMeeting(&clique.collectives, part.meeting);
    }
  }
}

}  // namespace keras_hvd::stand_in
