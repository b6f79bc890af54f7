// The custom calls of compiled programs; see xla_calls.h.
//
// Memory is what makes errors delicate here. After an error XLA calls nothing more of
// its program, neither the dones of requests that the engine is working on nor anything
// that tells of the end, and frees the buffers. So it gets to know an error only once
// the engine has let go of all that it could free: of every request of a compiled
// program that was under way when the error came, since loops and branches of the same
// program cannot be told from other programs; and what the program starts after that is
// not submitted any more. (An error of somebody else's custom call in the same program
// gives no such chance.)
#include "tf_ops/kernels/xla_calls.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "tf_ops/engine/c_api.h"
#include "tf_ops/kernels/completion.h"
#include "tf_ops/kernels/submitter.h"
#include "tf_ops/kernels/trace.h"
#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

namespace xla::ffi {
// In TensorFlow's library; its header asks for LLVM's, which no package has.
const XLA_FFI_Api* GetXlaFfiApi();
}  // namespace xla::ffi

namespace keras_hvd {
using DecodedRequest = CompiledRequest<xla::ffi::Span<const int64_t>>;
}  // namespace keras_hvd

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    ::keras_hvd::DecodedRequest, ::xla::ffi::StructMember<int32_t>("kind"),
    ::xla::ffi::StructMember<std::string_view>("name"),
    ::xla::ffi::StructMember<int64_t>("submitter"),
    ::xla::ffi::StructMember<int32_t>("process_set"),
    ::xla::ffi::StructMember<int32_t>("reduce_op"),
    ::xla::ffi::StructMember<int32_t>("root"),
    ::xla::ffi::StructMember<double>("prescale"),
    ::xla::ffi::StructMember<double>("postscale"),
    ::xla::ffi::StructMember<int64_t>("mark"),
    ::xla::ffi::StructMember<::xla::ffi::Span<const int64_t>>("rows"),
    ::xla::ffi::StructMember<int32_t>("slot"));

namespace keras_hvd {
namespace {

namespace ffi = xla::ffi;

using TokenBuffer = ffi::BufferR1<ffi::U64>;

khvd_dtype EngineType(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::U8:
      return KHVD_UINT8;
    case ffi::S8:
      return KHVD_INT8;
    case ffi::S32:
      return KHVD_INT32;
    case ffi::S64:
      return KHVD_INT64;
    case ffi::F16:
      return KHVD_FLOAT16;
    case ffi::BF16:
      return KHVD_BFLOAT16;
    case ffi::F32:
      return KHVD_FLOAT32;
    case ffi::F64:
      return KHVD_FLOAT64;
    case ffi::PRED:
      return KHVD_BOOL;
    default:  // which the engine refuses; the ops' type lists let nothing else through
      return static_cast<khvd_dtype>(-1);
  }
}

ffi::ErrorCode ErrorCode(int code) {
  switch (code) {
    case KHVD_INVALID_ARGUMENT:
      return ffi::ErrorCode::kInvalidArgument;
    case KHVD_RANK_FAILED:
      return ffi::ErrorCode::kAborted;
    case KHVD_NOT_INITIALIZED:
    case KHVD_SHUT_DOWN:
    case KHVD_FORKED:
      return ffi::ErrorCode::kFailedPrecondition;
    default:
      return ffi::ErrorCode::kInternal;
  }
}

// One request, from its start to its done.
struct Call {
  std::string name;
  uint64_t number = 0;
  uint64_t run = 0;    // one run of one chain of starts
  bool ended = false;  // the engine has let go of the buffers
  ffi::Error error;    // what it ended with
  std::optional<ffi::Promise> done;

  // Where other ranks decide how large a result is, which has the shape that it was
  // compiled with.
  struct Result {
    int64_t given_rows = 0;  // by this rank
    int64_t rows = 0;
    void* memory = nullptr;
  };
  std::vector<Result> results;
  int64_t* received_splits = nullptr;  // alltoall
  std::string rows_differ;
};

// An error that XLA is to get once `under_way` have ended.
struct Failure {
  uint64_t run;
  ffi::Promise promise;
  ffi::Error error;
  std::unordered_set<uint64_t> under_way;
};

// The requests of all programs that are running.
class Calls {
 public:
  static Calls& Get() {
    // Never destroyed: a collective may end while the process exits.
    static Calls* const calls = new Calls;
    return *calls;
  }

  // Submits the next request of a run, or the first where `*run` is 0, which it sets;
  // returns the request's number.
  uint64_t Start(uint64_t* run, std::unique_ptr<Call> call, khvd_request request);
  ffi::Future Done(uint64_t number);

 private:
  // Runs that failed are kept for starts that come late; XLA does not say when it has
  // ended a program, but of those that failed this long ago none is left.
  static constexpr size_t kFailedRuns = 1000;

  static void Ended(void* context, int code, const char* message);
  static void* Allocate(void* context, int32_t tensor, const int64_t* first_dims,
                        int32_t count);

  void End(Call* call, ffi::Error error);
  void Fail(std::unique_ptr<Call> call);
  void Deliver(Failure failure);

  std::mutex mutex_;
  // All below is guarded by mutex_.
  uint64_t last_call_ = 0;
  uint64_t last_run_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<Call>> calls_;
  std::vector<Failure> failures_;
  std::set<uint64_t> failed_runs_;
};

uint64_t Calls::Start(uint64_t* run, std::unique_ptr<Call> call, khvd_request request) {
  Call* const started = call.get();
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (*run == 0) *run = ++last_run_;
    number = started->number = ++last_call_;
    started->run = *run;
    if (failed_runs_.count(*run) != 0) return number;
    for (Failure& failure : failures_) {
      if (failure.run == *run) failure.under_way.insert(number);
    }
    calls_[number] = std::move(call);
  }
  request.done = &Calls::Ended;
  request.allocate = &Calls::Allocate;
  request.context = started;
  // Of two runs of a program at once nobody knows which the other ranks' first is.
  request.submitter = SubmitterInCall(request.submitter, *run);
  TraceStart(request.name);
  // Once the engine has it, the request may end before this returns.
  const int code = khvd_submit(&request);
  if (code != KHVD_OK) End(started, ffi::Error(ErrorCode(code), khvd_last_error()));
  return number;
}

ffi::Future Calls::Done(uint64_t number) {
  ffi::Promise promise;
  ffi::Future future(promise);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = calls_.find(number);
  if (found == calls_.end()) {
    promise.SetError(ffi::Error(ffi::ErrorCode::kCancelled,
                                "not submitted, for the program has failed"));
    return future;
  }
  Call* const call = found->second.get();
  if (call->ended && call->error.success()) {
    // Nobody waits for the future yet, so that nothing runs under the lock.
    promise.SetAvailable();
    calls_.erase(found);
    return future;
  }
  call->done = std::move(promise);
  if (call->ended) {
    std::unique_ptr<Call> failed = std::move(found->second);
    calls_.erase(found);
    Fail(std::move(failed));
  }
  return future;
}

void Calls::Ended(void* context, int code, const char* message) {
  auto* const call = static_cast<Call*>(context);
  TraceEnd(call->name);
  ffi::Error error;
  if (!call->rows_differ.empty()) {
    error = ffi::Error(ffi::ErrorCode::kInvalidArgument, call->rows_differ);
  } else if (code != KHVD_OK) {
    error = ffi::Error(ErrorCode(code), message);
  }
  Get().End(call, std::move(error));
}

void Calls::End(Call* call, ffi::Error error) {
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t number = call->number;
  call->ended = true;
  call->error = std::move(error);
  if (call->done) {
    std::unique_ptr<Call> ended = std::move(calls_.at(number));
    calls_.erase(number);
    if (ended->error.success()) {
      CompleteLater([done = *ended->done]() mutable { done.SetAvailable(); });
    } else {
      Fail(std::move(ended));
    }
  }
  for (size_t i = 0; i < failures_.size();) {
    failures_[i].under_way.erase(number);
    if (!failures_[i].under_way.empty()) {
      ++i;
      continue;
    }
    Failure failure = std::move(failures_[i]);
    failures_.erase(failures_.begin() + static_cast<std::ptrdiff_t>(i));
    Deliver(std::move(failure));
  }
}

// XLA waits for a call that ended with an error.
void Calls::Fail(std::unique_ptr<Call> call) {
  Failure failure = {call->run, *std::move(call->done), std::move(call->error), {}};
  for (const auto& [number, other] : calls_) {
    if (!other->ended) failure.under_way.insert(number);
  }
  if (failure.under_way.empty()) {
    Deliver(std::move(failure));
  } else {
    failures_.push_back(std::move(failure));
  }
}

void Calls::Deliver(Failure failure) {
  failed_runs_.insert(failure.run);
  if (failed_runs_.size() > kFailedRuns) failed_runs_.erase(failed_runs_.begin());
  // Of the run's other calls no done will come, or one that finds nothing. Those that
  // have one now have failed as well, and are on their way.
  for (auto it = calls_.begin(); it != calls_.end();) {
    it = it->second->run == failure.run ? calls_.erase(it) : std::next(it);
  }
  CompleteLater(
      [promise = failure.promise, error = std::move(failure.error)]() mutable {
        promise.SetError(std::move(error));
      });
}

// Why the rows that came are not those that the program was compiled for, or "".
std::string WrongRows(const Call& call, const Call::Result& result,
                      absl::Span<const int64_t> given) {
  int64_t sum = 0;
  bool differ = false;
  for (const int64_t rows : given) {
    sum += rows;
    differ |= rows != result.given_rows;
  }
  const std::string all = absl::StrJoin(given, ", ");
  if (call.received_splits != nullptr) {
    if (sum == result.rows) return "";
    return absl::StrCat(
        "alltoall '", call.name, "': the ranks gave this one ", all,
        " rows, but a program compiled by XLA has fixed shapes: here it must get as "
        "many as it gives, ",
        result.rows,
        " in all. Give other splits, or exchange outside of jit_compile=True");
  }
  if (!differ && sum == result.rows) return "";
  return absl::StrCat(
      "allgather '", call.name, "': the ranks gave ", all,
      " rows, but a program compiled by XLA has fixed shapes: here each must give ",
      result.given_rows, ", and there must be ", result.rows,
      " in all. Give as many rows on every rank, or gather outside of "
      "jit_compile=True");
}

void* Calls::Allocate(void* context, int32_t tensor, const int64_t* first_dims,
                      int32_t count) {
  auto* const call = static_cast<Call*>(context);
  const Call::Result& result = call->results[tensor];
  std::string wrong = WrongRows(*call, result, absl::MakeConstSpan(first_dims, count));
  if (!wrong.empty()) {
    call->rows_differ = std::move(wrong);
    return nullptr;
  }
  if (call->received_splits != nullptr) {
    std::copy(first_dims, first_dims + count, call->received_splits);
  }
  // An empty result has no memory, and null would mean that there is none to be had.
  static char empty;
  return result.memory == nullptr ? &empty : result.memory;
}

// Has the first dimensions of `tensors` be those of this rank, and notes what is to
// become of the results whose size other ranks decide.
void SetRows(const DecodedRequest& compiled, absl::Span<khvd_tensor> tensors,
             std::vector<std::vector<int64_t>>* shapes, Call* call) {
  const bool own_rows =
      compiled.kind == KHVD_ALLGATHER || compiled.kind == KHVD_ALLTOALL;
  for (size_t i = 0; i < compiled.rows.size(); ++i) {
    khvd_tensor& tensor = tensors[i];
    const int64_t rows = compiled.rows[i];
    if (own_rows) {
      call->results.push_back(
          {rows, tensor.shape[0], std::exchange(tensor.output, nullptr)});
    }
    shapes->emplace_back(tensor.shape, tensor.shape + tensor.rank).front() = rows;
    tensor.shape = shapes->back().data();
  }
}

ffi::Error Start(TokenBuffer last, ffi::RemainingArgs tensors,
                 ffi::Result<TokenBuffer> token, ffi::RemainingRets results,
                 DecodedRequest compiled) {
  const bool exchanges = compiled.kind == KHVD_ALLTOALL;
  absl::InlinedVector<khvd_tensor, 4> given;
  for (size_t i = 0; i < (exchanges ? 1 : tensors.size()); ++i) {
    const ffi::AnyBuffer input = *tensors.get<ffi::AnyBuffer>(i);
    ffi::Result<ffi::AnyBuffer> result = *results.get<ffi::AnyBuffer>(i);
    khvd_tensor tensor = {};
    tensor.dtype = EngineType(input.element_type());
    tensor.rank = static_cast<int32_t>(result->dimensions().size());
    tensor.shape = result->dimensions().begin();
    tensor.input = input.untyped_data();
    tensor.output = result->untyped_data();
    given.push_back(tensor);
  }
  auto call = std::make_unique<Call>();
  std::vector<std::vector<int64_t>> shapes;
  SetRows(compiled, absl::MakeSpan(given), &shapes, call.get());
  const int64_t mark[] = {0, compiled.mark};
  if (compiled.mark >= 0) given.push_back({KHVD_UINT8, 2, mark, nullptr, nullptr});
  const std::string name(compiled.name);
  call->name = name;
  khvd_request request = {};
  if (exchanges) {
    ffi::Result<ffi::AnyBuffer> received = *results.get<ffi::AnyBuffer>(1);
    call->received_splits = static_cast<int64_t*>(received->untyped_data());
    if (tensors.size() == 2) {
      const ffi::AnyBuffer splits = *tensors.get<ffi::AnyBuffer>(1);
      // None at all are not the same as even ones, and may have no memory.
      static const int64_t none = 0;
      request.split_count = static_cast<int32_t>(splits.element_count());
      request.splits = request.split_count == 0
                           ? &none
                           : static_cast<const int64_t*>(splits.untyped_data());
    }
  }
  request.struct_size = sizeof(request);
  request.kind = compiled.kind;
  request.name = name.c_str();
  request.submitter = static_cast<uint64_t>(compiled.submitter);
  request.process_set = compiled.process_set;
  request.reduce_op = compiled.reduce_op;
  request.root = compiled.root;
  request.prescale = compiled.prescale;
  request.postscale = compiled.postscale;
  request.count = static_cast<int32_t>(given.size());
  request.tensors = given.data();
  uint64_t run = last.typed_data()[0];
  // The two may be the same memory.
  token->typed_data()[compiled.slot] =
      Calls::Get().Start(&run, std::move(call), request);
  token->typed_data()[0] = run;
  return ffi::Error::Success();
}

ffi::Future Done(TokenBuffer token, ffi::RemainingArgs, ffi::RemainingRets,
                 int32_t slot) {
  return Calls::Get().Done(token.typed_data()[slot]);
}

XLA_FFI_DEFINE_HANDLER(kStart, Start,
                       ffi::Ffi::Bind()
                           .Arg<TokenBuffer>()
                           .RemainingArgs()
                           .Ret<TokenBuffer>()
                           .RemainingRets()
                           .Attrs<DecodedRequest>());
XLA_FFI_DEFINE_HANDLER(
    kDone, Done,
    ffi::Ffi::Bind().Arg<TokenBuffer>().RemainingArgs().RemainingRets().Attr<int32_t>(
        "slot"));

XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), kStartTarget, "Host", kStart);
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), kDoneTarget, "Host", kDone);

}  // namespace
}  // namespace keras_hvd
