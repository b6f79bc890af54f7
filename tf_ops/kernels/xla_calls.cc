// The custom calls of compiled programs on the CPU; see xla_calls.h.
//
// Memory makes errors delicate. After an error XLA calls nothing more of its program,
// neither the dones of requests that the engine is working on nor anything that
// announces the end, and frees the buffers. So XLA learns of an error only once the
// engine has released everything that XLA could free: every request of a compiled
// program that was under way when the error came, since loops and branches of one
// program cannot be told from other programs. Later starts of the program are not
// submitted. (An error in another library's custom call in the same program gives no
// such chance.)
#include "tf_ops/kernels/xla_calls.h"

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

#include "tf_ops/kernels/completion.h"
#include "tf_ops/kernels/submitter.h"
#include "tf_ops/kernels/trace.h"
#include "tf_ops/kernels/xla_request.h"

namespace keras_hvd {
namespace {

namespace ffi = xla::ffi;

// One request, from its start to its done.
struct Call {
  explicit Call(std::string_view call_name) : name(call_name), results(call_name) {}

  const std::string name;
  uint64_t number = 0;
  uint64_t run = 0;    // identifies one run of one chain of starts
  bool ended = false;  // the engine has released the buffers
  ffi::Error error;    // the error it ended with
  std::optional<ffi::Promise> done;
  FixedResults results;
};

// An error that XLA gets once `under_way` have ended.
struct Failure {
  uint64_t run;
  ffi::Promise promise;
  ffi::Error error;
  std::unordered_set<uint64_t> under_way;
};

// The requests of all running programs.
class Calls {
 public:
  static Calls& Get() {
    // Never destroyed: a collective may end while the process exits.
    static Calls* const calls = new Calls;
    return *calls;
  }

  // Submits the next request of a run. If `*run` is 0, starts a run and sets it.
  // Returns the request's number.
  uint64_t Start(uint64_t* run, std::unique_ptr<Call> call, khvd_request request);
  // The same for a check.
  uint64_t StartCheck(uint64_t* run, std::unique_ptr<Call> call,
                      const absl::Status& outcome);
  ffi::Future Done(uint64_t number);

 private:
  // Failed runs are kept for late starts. XLA does not say when it has ended a program,
  // but a program that failed this many failures ago no longer runs.
  static constexpr size_t kFailedRuns = 1000;

  static void Ended(void* context, int code, const char* message);
  static void* Allocate(void* context, int32_t tensor, const int64_t* first_dims,
                        int32_t count);

  Call* Add(uint64_t* run, std::unique_ptr<Call> call, uint64_t* number);
  void End(Call* call, ffi::Error error);
  void Fail(std::unique_ptr<Call> call);
  void Deliver(Failure failure);

  std::mutex mutex_;
  // mutex_ guards everything below.
  uint64_t last_call_ = 0;
  uint64_t last_run_ = 0;
  std::unordered_map<uint64_t, std::unique_ptr<Call>> calls_;
  std::vector<Failure> failures_;
  std::set<uint64_t> failed_runs_;
};

// Numbers a call. Returns null if its run has failed, which forgets it.
Call* Calls::Add(uint64_t* run, std::unique_ptr<Call> call, uint64_t* number) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (*run == 0) *run = ++last_run_;
  *number = call->number = ++last_call_;
  call->run = *run;
  if (failed_runs_.count(*run) != 0) return nullptr;
  for (Failure& failure : failures_) {
    if (failure.run == *run) failure.under_way.insert(*number);
  }
  return (calls_[*number] = std::move(call)).get();
}

uint64_t Calls::StartCheck(uint64_t* run, std::unique_ptr<Call> call,
                           const absl::Status& outcome) {
  uint64_t number;
  Call* const started = Add(run, std::move(call), &number);
  if (started == nullptr) return number;
  ffi::Error error;
  if (!outcome.ok()) {
    error =
        ffi::Error(ffi::ErrorCode::kFailedPrecondition, std::string(outcome.message()));
  }
  End(started, std::move(error));
  return number;
}

uint64_t Calls::Start(uint64_t* run, std::unique_ptr<Call> call, khvd_request request) {
  uint64_t number;
  Call* const started = Add(run, std::move(call), &number);
  if (started == nullptr) return number;
  request.done = &Calls::Ended;
  request.allocate = &Calls::Allocate;
  request.context = started;
  // If a program runs twice at once, nobody knows which run is the other ranks' first.
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
    // Nobody waits for the future yet, so no continuation runs under the lock.
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
  if (const std::string& differ = call->results.rows_differ(); !differ.empty()) {
    error = ffi::Error(ffi::ErrorCode::kInvalidArgument, differ);
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
  // The run's other calls get no done, or one that finds nothing. Those that already
  // have one have failed as well and will end by themselves.
  for (auto it = calls_.begin(); it != calls_.end();) {
    it = it->second->run == failure.run ? calls_.erase(it) : std::next(it);
  }
  CompleteLater(
      [promise = failure.promise, error = std::move(failure.error)]() mutable {
        promise.SetError(std::move(error));
      });
}

void* Calls::Allocate(void* context, int32_t tensor, const int64_t* first_dims,
                      int32_t count) {
  return static_cast<Call*>(context)->results.Allocate(tensor, first_dims, count);
}

// For an alltoall: reads the splits from their tensor; received ones go to theirs.
void AddSplits(ffi::RemainingArgs tensors, ffi::RemainingRets results,
               FixedResults* fixed, khvd_request* request) {
  ffi::Result<ffi::AnyBuffer> received = *results.get<ffi::AnyBuffer>(1);
  fixed->set_received_splits(static_cast<int64_t*>(received->untyped_data()));
  if (tensors.size() < 2) return;
  const ffi::AnyBuffer splits = *tensors.get<ffi::AnyBuffer>(1);
  // No splits at all differ from even ones, and may have no memory.
  static const int64_t none = 0;
  request->split_count = static_cast<int32_t>(splits.element_count());
  request->splits = request->split_count == 0
                        ? &none
                        : static_cast<const int64_t*>(splits.untyped_data());
}

ffi::Error Start(TokenBuffer last, ffi::RemainingArgs tensors,
                 ffi::Result<TokenBuffer> token, ffi::RemainingRets results,
                 DecodedRequest compiled) {
  auto call = std::make_unique<Call>(compiled.name);
  uint64_t run = last.typed_data()[0];
  if (compiled.kind == kCheck) {
    token->typed_data()[compiled.slot] =
        Calls::Get().StartCheck(&run, std::move(call), Check(compiled));
    token->typed_data()[0] = run;
    return ffi::Error::Success();
  }
  ProgramRequest program(compiled, tensors, results, &call->results);
  if (compiled.kind == KHVD_ALLTOALL) {
    AddSplits(tensors, results, &call->results, &program.request());
  }
  // Last and token may be the same memory.
  token->typed_data()[compiled.slot] =
      Calls::Get().Start(&run, std::move(call), program.request());
  token->typed_data()[0] = run;
  return ffi::Error::Success();
}

ffi::Future Done(TokenBuffer token, ffi::RemainingArgs, ffi::RemainingRets,
                 int32_t slot) {
  return Calls::Get().Done(token.typed_data()[slot]);
}

ffi::Error WholeStep(ffi::RemainingArgs tensors, ffi::RemainingRets results) {
  ffi::Result<ffi::AnyBuffer> zero = *results.get<ffi::AnyBuffer>(tensors.size());
  *static_cast<int32_t*>(zero->untyped_data()) = 0;
  return ffi::Error::Success();
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

XLA_FFI_DEFINE_HANDLER(kWholeStep, WholeStep,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets());

XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), kStartTarget, "Host", kStart);
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), kDoneTarget, "Host", kDone);
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), kWholeStepTarget, "Host", kWholeStep);

}  // namespace
}  // namespace keras_hvd
