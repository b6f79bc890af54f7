// The functions of NCCL, on the pretended machine.
#include <algorithm>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>

#include "tf_ops/testing/gpu/communicators.h"
#include "tf_ops/testing/gpu/reduce.h"

namespace keras_hvd::stand_in {
namespace {

using cuda::Stream;
using nccl::Comm;
using nccl::Config;
using nccl::Op;
using nccl::Residence;
using nccl::Result;
using nccl::Type;
using nccl::UniqueId;
using Lock = Machine::Lock;

constexpr unsigned int kMagic = 0xcafebeef;

const char* const kErrorTexts[] = {"no error",
                                   "unhandled cuda error",
                                   "unhandled system error",
                                   "internal error",
                                   "invalid argument",
                                   "invalid usage",
                                   "remote process exited or there was a network error",
                                   "NCCL operation in progress"};

// The calling thread's calls since ncclGroupStart.
struct Group {
  explicit Group(uint64_t generation) : generation(generation) {}

  uint64_t generation;
  int depth = 0;
  Result error = Result::kSuccess;
  std::vector<Request> requests;
};

Group& ThisGroup() {
  thread_local Group group(0);
  if (group.generation != All().generation) group = Group(All().generation);
  return group;
}

// One call of a function: recorded, and perhaps made to fail.
class Entry {
 public:
  // `member`: of a communicator that there is not yet.
  explicit Entry(const char* function, const std::string& arguments = "",
                 Comm communicator = nullptr, Stream stream = nullptr, int member = -1)
      : function_(function), known_(All().handles.count(communicator) > 0) {
    Call call;
    call.function = function;
    call.arguments = arguments;
    call.communicator = communicator;
    call.stream = stream;
    call.member = member;
    call.has_context = !Machine::Get().contexts_of_thread().empty();
    if (known_) {
      call.member = communicator->index;
      call.arguments = Name(communicator) + (arguments.empty() ? "" : ", ") + arguments;
    }
    int32_t code = 0;
    if (!Machine::Get().Enter(call, &code, &asynchronous_)) return;
    injected_ = Result{code};
    if (!asynchronous_) result_ = injected_;
  }

  // Of functions of a communicator that is ready for them.
  bool RequireReady(Comm communicator) {
    if (failed() || !RequireLive(communicator)) return false;
    if (communicator->error != Result::kSuccess) {
      result_ = communicator->error;
    } else if (communicator->in_progress) {
      Fail(Result::kInvalidUsage, Text("of ", Name(communicator), " in progress"));
    } else if (communicator->finalized) {
      Fail(Result::kInvalidUsage, Text("of ", Name(communicator), ", finalized"));
    }
    return !failed();
  }

  bool RequireLive(Comm communicator) {
    if (known_ && communicator->live) return true;
    Fail(Result::kInvalidArgument,
         known_ ? "of a communicator that has been given back" : "of no communicator");
    return false;
  }

  bool RequireNoGroup() {
    if (ThisGroup().depth == 0) return true;
    Fail(Result::kInvalidUsage, "in a group, which this stand-in does not do");
    return false;
  }

  bool failed() const { return result_ != Result::kSuccess; }
  Result result() const { return result_; }

  // The communicator meets the error that was asked for, after the call.
  void SetAsynchronousError(Comm communicator) const {
    if (!asynchronous_) return;
    SetError(communicator, injected_, Text("injected into ", function_));
  }

  // Wrong use: an error, and a violation.
  Result Fail(Result result, const std::string& why) {
    Machine::Get().Violate(Text(function_, " ", why));
    result_ = result;
    return result;
  }

 private:
  const char* const function_;
  const bool known_;
  bool asynchronous_ = false;
  Result injected_ = Result::kSuccess;
  Result result_ = Result::kSuccess;
};

bool IsValid(const Config& config) {
  return config.magic == kMagic && config.size >= offsetof(Config, split_share) &&
         config.version >= static_cast<unsigned int>(nccl::kOldestVersion);
}

// Whether a blocking communicator may go on within a call. When it is first used for a
// collective its members meet, and a GPU's queue may be full.
bool CanEnqueue(Comm communicator, bool meets, int* polls) {
  if (!communicator->blocking) return true;
  if (meets && !std::exchange(communicator->connected, true)) Machine::Get().WakeAll();
  const size_t limit = Machine::Get().queue_limit();
  if (limit > 0 && communicator->running.size() >= limit) {
    for (const GroupItem* item : communicator->running) {
      Machine::Get().Demand(item->place(), polls);
    }
    return false;
  }
  return !meets || communicator->clique->all_connected();
}

bool Meets(const std::vector<Request>& requests) {
  return std::any_of(requests.begin(), requests.end(),
                     [](const Request& request) { return !request.is_message(); });
}

bool HasContext() { return !Machine::Get().contexts_of_thread().empty(); }

// Puts a communicator's calls of one group on their stream.
void Enqueue(Comm communicator, std::vector<Request> requests) {
  const Stream stream = requests.front().stream;
  for (const Request& request : requests) {
    if (request.made != nullptr) request.made->waiting -= 1;
    if (request.stream == stream) continue;
    Machine::Get().Violate(
        Text("a group of ", Name(communicator), " is on several streams"));
  }
  if (!Machine::Get().IsLive(stream)) {
    Machine::Get().Violate(
        Text("a group of ", Name(communicator), " is put on a destroyed stream"));
    return;
  }
  Machine::Get().Put(stream,
                     std::make_unique<GroupItem>(communicator, std::move(requests)));
}

Result EndGroup(Entry* entry, Lock* lock) {
  Group& group = ThisGroup();
  const std::vector<Request> requests = std::move(group.requests);
  const Result error = entry->failed() ? entry->result() : group.error;
  group = Group(group.generation);
  std::vector<Comm> communicators;
  std::map<Comm, std::vector<Request>> by_communicator;
  for (const Request& request : requests) {
    if (!request.communicator->live) continue;  // aborted meanwhile
    std::vector<Request>& of_it = by_communicator[request.communicator];
    if (of_it.empty()) communicators.push_back(request.communicator);
    of_it.push_back(request);
  }
  Result result = error;
  for (const Comm communicator : communicators) {
    entry->SetAsynchronousError(communicator);
    if (error != Result::kSuccess) {
      SetError(communicator, error, "a group has failed");
      continue;
    }
    const Result begun = Begin(
        communicator,
        [communicator, meets = Meets(by_communicator[communicator]),
         polls = 0]() mutable { return CanEnqueue(communicator, meets, &polls); },
        [communicator, of_it = by_communicator[communicator]] {
          Enqueue(communicator, of_it);
        },
        lock);
    if (begun != Result::kSuccess) result = begun;
  }
  return result;
}

// The error of a call; "" if none.
std::string Wrong(const Request& request) {
  const Comm communicator = request.communicator;
  if (static_cast<uint32_t>(request.type) > static_cast<uint32_t>(Type::kFloat8e5m2)) {
    return "of an unknown type";
  }
  if (request.peer < 0 || request.peer >= communicator->count()) {
    return Text("with the root or peer ", request.peer);
  }
  if (request.stream == nullptr) return "on no stream";
  if (request.op >= kFirstMadeOp && request.made == nullptr) {
    return "with an op that is not there";
  }
  if (request.made != nullptr && request.made->type != request.type) {
    return "with an op of another type";
  }
  std::string problem = Problem(request.input, request.input_bytes());
  if (problem.empty()) problem = Problem(request.output, request.output_bytes());
  return problem.empty() ? "" : "is given " + problem;
}

// Whether this version has the type, and reduces it on the calling thread's device.
bool Has(Type type, bool reduces) {
  if (type < Type::kFloat8e4m3) return true;
  if (Machine::Get().nccl_version() < nccl::kFloat8Version) return false;
  const std::vector<cuda::Context>& contexts = Machine::Get().contexts_of_thread();
  return !reduces || (!contexts.empty() &&
                      Machine::Get().compute_capability(contexts.back()->device) >=
                          nccl::kFloat8Capability);
}

bool Reduces(Request::Kind kind) {
  return kind == Request::Kind::kAllReduce || kind == Request::Kind::kReduce ||
         kind == Request::Kind::kReduceScatter;
}

Result Add(Request request) {
  Lock lock(Machine::Get());
  const char* const function = Name(request.kind);
  const Comm communicator = request.communicator;
  Entry entry(function,
              Text(request.count, " elements of type ", static_cast<int>(request.type),
                   ", op ", request.op, ", root or peer ", request.peer),
              communicator, request.stream);
  Group& group = ThisGroup();
  if (!entry.RequireReady(communicator)) {
    if (group.depth > 0) group.error = entry.result();
    return entry.result();
  }
  const std::vector<cuda::Context>& contexts = Machine::Get().contexts_of_thread();
  request.stream = Machine::Get().Resolve(request.stream,
                                          contexts.empty() ? nullptr : contexts.back());
  const auto made = communicator->ops.find(request.op);
  if (made != communicator->ops.end()) request.made = made->second;
  const std::string wrong = Wrong(request);
  const bool has_type = Has(request.type, Reduces(request.kind));
  if (!wrong.empty() || !has_type) {
    if (wrong.empty()) {
      group.error = Result::kInvalidArgument;
    } else {
      group.error = entry.Fail(Result::kInvalidArgument, wrong);
    }
    const Result error = group.error;
    if (group.depth == 0) group.error = Result::kSuccess;
    return error;
  }
  if (request.made != nullptr) request.made->waiting += 1;
  group.requests.push_back(request);
  if (group.depth == 0) return EndGroup(&entry, &lock);
  entry.SetAsynchronousError(communicator);
  return Result::kSuccess;
}

}  // namespace
}  // namespace keras_hvd::stand_in

using namespace keras_hvd::stand_in;  // NOLINT: the functions have C's names

extern "C" {

// ---- The library

Result ncclGetVersion(int* version) {
  Lock lock(Machine::Get());
  Entry entry("ncclGetVersion");
  if (entry.failed()) return entry.result();
  *version = Machine::Get().nccl_version();
  return Result::kSuccess;
}

const char* ncclGetErrorString(Result result) {
  const auto code = static_cast<uint32_t>(result);
  return code < std::size(kErrorTexts) ? kErrorTexts[code] : "unknown result code";
}

const char* ncclGetLastError(Comm communicator) {
  Lock lock(Machine::Get());
  if (All().handles.count(communicator) == 0) return "";
  return communicator->error_text.c_str();
}

// ---- Communicators

Result ncclGetUniqueId(UniqueId* id) {
  Lock lock(Machine::Get());
  Entry entry("ncclGetUniqueId");
  if (entry.failed()) return entry.result();
  // As NCCL does, by the name that it exports. Is this another library's function?
  if (ncclGetErrorString(Result::kSuccess) != kErrorTexts[0]) {
    return Result::kInvalidArgument;
  }
  const std::string text = Text("stand-in ", ++All().ids, " ", Machine::Get().Random());
  *id = {};
  memcpy(id->bytes, text.data(), text.size());
  All().by_id[std::string(id->bytes, sizeof(id->bytes))] = NewClique(0);
  return Result::kSuccess;
}

Result ncclCommInitRankConfig(Comm* made, int count, UniqueId id, int rank,
                              Config* config) {
  Lock lock(Machine::Get());
  Entry entry("ncclCommInitRankConfig", Text("member ", rank, " of ", count), nullptr,
              nullptr, rank);
  if (entry.failed() || !entry.RequireNoGroup()) return entry.result();
  *made = nullptr;
  const auto found = All().by_id.find(std::string(id.bytes, sizeof(id.bytes)));
  if (found == All().by_id.end()) {
    return entry.Fail(Result::kInvalidArgument, "with an unknown id");
  }
  if (config != nullptr && !IsValid(*config)) {
    return entry.Fail(Result::kInvalidArgument, "with an invalid configuration");
  }
  if (!HasContext()) {
    return entry.Fail(Result::kUnhandledCudaError, "without a current context");
  }
  const std::shared_ptr<Clique> clique = found->second;
  if (clique->members.empty()) clique->members.resize(std::max(count, 0));
  if (static_cast<int>(clique->members.size()) != count || rank < 0 || rank >= count ||
      clique->members[rank] != nullptr) {
    return entry.Fail(Result::kInvalidArgument,
                      Text("as member ", rank, " of ", count,
                           ", which is no member's or another's place"));
  }
  const Comm communicator =
      NewCommunicator(clique, rank, config == nullptr ? Config() : *config);
  *made = communicator;
  entry.SetAsynchronousError(communicator);
  return Begin(communicator, [clique] { return clique->full(); }, [] {}, &lock);
}

Result ncclCommSplit(Comm parent, int color, int key, Comm* part, Config* config) {
  Lock lock(Machine::Get());
  Entry entry("ncclCommSplit", Text("color ", color, ", key ", key), parent);
  if (!entry.RequireReady(parent) || !entry.RequireNoGroup()) return entry.result();
  if (config != nullptr && !IsValid(*config)) {
    return entry.Fail(Result::kInvalidArgument, "with an invalid configuration");
  }
  if (color < keras_hvd::nccl::kNoColor) {
    return entry.Fail(Result::kInvalidArgument, Text("with the color ", color));
  }
  *part = nullptr;
  const uint64_t number = parent->splits++;
  Clique::Split& split = parent->clique->splits[number];
  split.choices.resize(parent->count());
  split.choices[parent->index] = {true, color, key};
  Config own = config == nullptr ? Config() : *config;
  if (config == nullptr) own.blocking = parent->blocking;
  entry.SetAsynchronousError(parent);
  if (color != keras_hvd::nccl::kNoColor) {
    parent->abandon = [=] { AbandonSplit(parent, part, own); };
  }
  // As in NCCL, the parent is in progress, and the part is not there before the end.
  return Begin(
      parent, [&split] { return AllHaveChosen(split); },
      [=] { FinishSplit(parent, number, part, own); }, &lock);
}

Result ncclCommFinalize(Comm communicator) {
  Lock lock(Machine::Get());
  Entry entry("ncclCommFinalize", "", communicator);
  if (!entry.RequireReady(communicator)) return entry.result();
  entry.SetAsynchronousError(communicator);
  return Begin(
      communicator,
      [communicator, polls = 0]() mutable {
        for (const GroupItem* item : communicator->running) {
          Machine::Get().Demand(item->place(), &polls);
        }
        return communicator->running.empty();
      },
      [communicator] { communicator->finalized = true; }, &lock);
}

Result ncclCommDestroy(Comm communicator) {
  Lock lock(Machine::Get());
  Entry entry("ncclCommDestroy", "", communicator);
  if (entry.failed() || !entry.RequireLive(communicator)) return entry.result();
  if (communicator->in_progress) {
    return entry.Fail(Result::kInvalidUsage,
                      Text("of ", Name(communicator), " in progress"));
  }
  if (communicator->error != Result::kSuccess) return communicator->error;
  if (!communicator->running.empty()) {
    return entry.Fail(Result::kInvalidUsage,
                      Text("of ", Name(communicator), ", whose work has not run"));
  }
  All().leaked_ops += static_cast<int>(communicator->ops.size());
  communicator->live = false;
  return Result::kSuccess;
}

// Also when it is made to fail: nothing else could end the enqueued work.
Result ncclCommAbort(Comm communicator) {
  Lock lock(Machine::Get());
  Entry entry("ncclCommAbort", "", communicator);
  if (!entry.RequireLive(communicator)) return entry.result();
  if (Abort(communicator)) {
    lock.Without(
        [late = Machine::Get().abort_delay()] { std::this_thread::sleep_for(late); });
  }
  return entry.result();
}

Result ncclCommGetAsyncError(Comm communicator, Result* error) {
  Lock lock(Machine::Get());
  Entry entry("ncclCommGetAsyncError", "", communicator);
  if (entry.failed() || !entry.RequireLive(communicator)) return entry.result();
  entry.SetAsynchronousError(communicator);
  if (!communicator->blocking) Advance(communicator);
  *error = communicator->error;
  if (*error == Result::kSuccess && communicator->in_progress &&
      !communicator->blocking) {
    *error = Result::kInProgress;
  }
  return Result::kSuccess;
}

// ---- Groups and ops

Result ncclGroupStart() {
  Lock lock(Machine::Get());
  Entry entry("ncclGroupStart");
  if (entry.failed()) return entry.result();
  ThisGroup().depth += 1;
  return Result::kSuccess;
}

Result ncclGroupEnd() {
  Lock lock(Machine::Get());
  Entry entry("ncclGroupEnd");
  Group& group = ThisGroup();
  if (group.depth == 0) return entry.Fail(Result::kInvalidUsage, "of no group");
  if (group.depth == 1) return EndGroup(&entry, &lock);
  group.depth -= 1;
  if (entry.failed()) group.error = entry.result();
  return entry.result();
}

Result ncclRedOpCreatePreMulSum(Op* op, void* scale, Type type, Residence residence,
                                Comm communicator) {
  Lock lock(Machine::Get());
  Entry entry("ncclRedOpCreatePreMulSum", Text("type ", static_cast<int>(type)),
              communicator);
  if (!entry.RequireReady(communicator)) return entry.result();
  if (!Has(type, true)) return Result::kInvalidArgument;
  auto made = std::make_shared<MadeOp>();
  made->type = type;
  if (residence == Residence::kHostImmediate) {
    const char* const bytes = static_cast<const char*>(scale);
    made->scale.assign(bytes, bytes + Bytes(type));
  } else {
    const std::string problem = Problem(scale, Bytes(type));
    if (!problem.empty()) {
      return entry.Fail(Result::kInvalidArgument, "is given " + problem);
    }
    made->device_scale = scale;
  }
  *op = ++All().last_op;
  communicator->ops[*op] = made;
  entry.SetAsynchronousError(communicator);
  return Result::kSuccess;
}

Result ncclRedOpDestroy(Op op, Comm communicator) {
  Lock lock(Machine::Get());
  Entry entry("ncclRedOpDestroy", Text("op ", op), communicator);
  if (!entry.RequireReady(communicator)) return entry.result();
  const auto found = communicator->ops.find(op);
  if (found == communicator->ops.end()) {
    return entry.Fail(Result::kInvalidArgument, "of an op that is not there");
  }
  const bool waiting = found->second->waiting > 0;
  communicator->ops.erase(found);
  entry.SetAsynchronousError(communicator);
  if (!waiting) return Result::kSuccess;
  return entry.Fail(Result::kInvalidUsage, "before its group has been enqueued");
}

// ---- Collectives

Result ncclAllReduce(const void* input, void* output, size_t count, Type type, Op op,
                     Comm communicator, Stream stream) {
  return Add({Request::Kind::kAllReduce, input, output, count, type, op, nullptr, 0,
              communicator, stream});
}

Result ncclBroadcast(const void* input, void* output, size_t count, Type type, int root,
                     Comm communicator, Stream stream) {
  return Add({Request::Kind::kBroadcast, input, output, count, type, 0, nullptr, root,
              communicator, stream});
}

Result ncclReduce(const void* input, void* output, size_t count, Type type, Op op,
                  int root, Comm communicator, Stream stream) {
  return Add({Request::Kind::kReduce, input, output, count, type, op, nullptr, root,
              communicator, stream});
}

Result ncclAllGather(const void* input, void* output, size_t count, Type type,
                     Comm communicator, Stream stream) {
  return Add({Request::Kind::kAllGather, input, output, count, type, 0, nullptr, 0,
              communicator, stream});
}

Result ncclReduceScatter(const void* input, void* output, size_t count, Type type,
                         Op op, Comm communicator, Stream stream) {
  return Add({Request::Kind::kReduceScatter, input, output, count, type, op, nullptr, 0,
              communicator, stream});
}

Result ncclSend(const void* input, size_t count, Type type, int peer, Comm communicator,
                Stream stream) {
  return Add({Request::Kind::kSend, input, nullptr, count, type, 0, nullptr, peer,
              communicator, stream});
}

Result ncclRecv(void* output, size_t count, Type type, int peer, Comm communicator,
                Stream stream) {
  return Add({Request::Kind::kReceive, nullptr, output, count, type, 0, nullptr, peer,
              communicator, stream});
}

}  // extern "C"

// They have the types that the engine gives them.
#define KERAS_HVD_SAME(function, member)            \
  static_assert(std::is_same_v<decltype(&function), \
                               decltype(keras_hvd::nccl::Functions::member)>)
KERAS_HVD_SAME(ncclGetVersion, version);
KERAS_HVD_SAME(ncclGetUniqueId, unique_id);
KERAS_HVD_SAME(ncclCommInitRankConfig, init_rank);
KERAS_HVD_SAME(ncclCommSplit, split);
KERAS_HVD_SAME(ncclCommFinalize, finalize);
KERAS_HVD_SAME(ncclCommDestroy, destroy);
KERAS_HVD_SAME(ncclCommAbort, abort);
KERAS_HVD_SAME(ncclCommGetAsyncError, async_error);
KERAS_HVD_SAME(ncclGetErrorString, error_text);
KERAS_HVD_SAME(ncclGetLastError, last_error);
KERAS_HVD_SAME(ncclGroupStart, group_start);
KERAS_HVD_SAME(ncclGroupEnd, group_end);
KERAS_HVD_SAME(ncclRedOpCreatePreMulSum, make_scaled_sum);
KERAS_HVD_SAME(ncclRedOpDestroy, destroy_op);
KERAS_HVD_SAME(ncclAllReduce, all_reduce);
KERAS_HVD_SAME(ncclBroadcast, broadcast);
KERAS_HVD_SAME(ncclReduce, reduce);
KERAS_HVD_SAME(ncclAllGather, all_gather);
KERAS_HVD_SAME(ncclReduceScatter, reduce_scatter);
KERAS_HVD_SAME(ncclSend, send);
KERAS_HVD_SAME(ncclRecv, receive);
#undef KERAS_HVD_SAME
