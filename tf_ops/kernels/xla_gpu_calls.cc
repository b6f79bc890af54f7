// The custom calls of compiled programs on a GPU; see xla_calls.h.
//
// XLA calls them from one thread, in program order, while the GPU is still busy with
// earlier work. *Start* hands the request over, after the work on the stream. *Done*
// does the engine's work, and then blocks the thread, until the collective is enqueued,
// which takes until the last rank has started it. It then makes the stream wait for the
// collective.
//
// Here a token is GPU memory without content: it only orders the calls. A done finds
// its start by a number compiled into both, among the starts of its own thread, which
// runs one program at a time.
//
// After an error XLA calls nothing more of its program, and frees the buffers. So a
// done that fails first waits for the ends of everything that its program has started.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "tf_ops/engine/c_api.h"
#include "tf_ops/kernels/completion.h"
#include "tf_ops/kernels/request_end.h"
#include "tf_ops/kernels/submitter.h"
#include "tf_ops/kernels/trace.h"
#include "tf_ops/kernels/xla_calls.h"
#include "tf_ops/kernels/xla_request.h"
#include "xla/ffi/api/c_api_internal.h"
#include "xla/stream_executor/stream.h"
#if __has_include("xla/stream_executor/device_address.h")
#include "xla/stream_executor/device_address.h"
#else
#include "xla/stream_executor/device_memory.h"
#endif

namespace keras_hvd {
namespace {

#if __has_include("xla/stream_executor/device_address.h")
using DeviceMemory = stream_executor::DeviceAddressBase;
#else
using DeviceMemory = stream_executor::DeviceMemoryBase;
#endif

// XLA's own object for a custom call's stream; copies need it.
struct XlaStream {};

// The interface differs between versions; only one of the two ways is compiled.
template <typename Get>
void* StreamBy(Get get, const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx) {
  if constexpr (std::is_invocable_v<Get, XLA_FFI_ExecutionContext*, void**>) {
    void* stream = nullptr;
    XLA_FFI_Error* const error = get(ctx, &stream);
    if (error == nullptr) return stream;
    xla::ffi::internal::DestroyError(api, error);
    return nullptr;
  } else {
    return get(ctx);
  }
}

}  // namespace
}  // namespace keras_hvd

template <>
struct xla::ffi::CtxDecoding<keras_hvd::XlaStream> {
  using Type = stream_executor::Stream*;

  static std::optional<Type> Decode(const XLA_FFI_Api* api,
                                    XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    void* const stream =
        keras_hvd::StreamBy(api->internal_api->XLA_FFI_INTERNAL_Stream_Get, api, ctx);
    if (stream != nullptr) return static_cast<Type>(stream);
    diagnostic.Emit("keras_hvd's collectives run on a GPU's stream, and there is none");
    return std::nullopt;
  }
};

namespace keras_hvd {
namespace {

namespace ffi = xla::ffi;

using stream_executor::Stream;

// One request, from its start to its done.
struct GpuCall {
  explicit GpuCall(std::string_view call_name) : name(call_name), results(call_name) {}

  RequestEnd& end() { return ended; }

  const std::string name;
  FixedResults results;
  std::vector<int64_t> received_splits;  // alltoall
  void* splits_memory = nullptr;         // where XLA wants them
  RequestEnd ended;
};
using OwnedCall = std::unique_ptr<GpuCall, DeleteOnceEnded>;

// The requests of the program that a thread runs, by number. A program that failed
// elsewhere may leave requests here. The next one with the same number discards them.
using Program = std::unordered_map<int64_t, OwnedCall>;
thread_local Program program;

uint64_t ThisThread() {
  thread_local const uint64_t number = NextSubmitter();
  return number;
}

void Ended(void* context, int code, const char* message) {
  auto* const call = static_cast<GpuCall*>(context);
  TraceEnd(call->name);
  const std::string& differ = call->results.rows_differ();
  std::function<void()> then = differ.empty()
                                   ? call->ended.Set(code, message)
                                   : call->ended.Set(KHVD_INVALID_ARGUMENT, differ);
  // Only a call that its program has left behind.
  if (then) CompleteLater(std::move(then));
}

void* Allocate(void* context, int32_t tensor, const int64_t* first_dims,
               int32_t count) {
  return static_cast<GpuCall*>(context)->results.Allocate(tensor, first_dims, count);
}

// Reads the splits of an alltoall. They are in GPU memory like all of a program's data,
// so this waits until everything on the stream has run.
absl::Status ReadSplits(ffi::RemainingArgs tensors, Stream* stream,
                        std::vector<int64_t>* splits) {
  const ffi::AnyBuffer given = *tensors.get<ffi::AnyBuffer>(1);
  splits->resize(given.element_count());
  if (splits->empty()) return absl::OkStatus();
  const uint64_t bytes = splits->size() * sizeof(int64_t);
  const absl::Status status =
      stream->Memcpy(splits->data(), DeviceMemory(given.untyped_data(), bytes), bytes);
  return status.ok() ? stream->BlockHostUntilDone() : status;
}

// Writes the number of rows from each rank, for later work on the stream.
absl::Status WriteReceivedSplits(const GpuCall& call, Stream* stream) {
  const uint64_t bytes = call.received_splits.size() * sizeof(int64_t);
  if (bytes == 0) return absl::OkStatus();
  DeviceMemory memory(call.splits_memory, bytes);
  return stream->Memcpy(&memory, call.received_splits.data(), bytes);
}

// Returns once nothing that this thread's program has started needs its buffers.
void EndProgram() {
  for (const auto& [number, call] : program) {
    call->ended.WaitUntilKnown();
    call->ended.Await();
  }
  program.clear();
}

// Makes the program fail.
ffi::Error Fail(ffi::ErrorCode code, std::string message) {
  EndProgram();
  return ffi::Error(code, std::move(message));
}

ffi::Error FailToCopy(const GpuCall& call, const absl::Status& status) {
  return Fail(ffi::ErrorCode::kInternal,
              absl::StrCat("alltoall '", call.name,
                           "': its splits could not be copied between GPU and host: ",
                           status.message()));
}

void Submit(GpuCall* call, khvd_request request) {
  call->ended.AddTo(&request);
  request.done = &Ended;
  request.allocate = &Allocate;
  request.submitter = SubmitterInCall(request.submitter, ThisThread());
  TraceStart(request.name);
  request.context = call;
  const int code = khvd_submit(&request);
  if (code != KHVD_OK) std::ignore = call->ended.Set(code, khvd_last_error());
}

ffi::Error Start(Stream* stream, TokenBuffer, ffi::RemainingArgs tensors,
                 ffi::Result<TokenBuffer>, ffi::RemainingRets results,
                 DecodedRequest compiled) {
  if (compiled.kind == kCheck) {
    const absl::Status outcome = Check(compiled);
    if (outcome.ok()) return ffi::Error::Success();
    return Fail(ffi::ErrorCode::kFailedPrecondition, std::string(outcome.message()));
  }
  auto call = std::make_unique<GpuCall>(compiled.name);
  ProgramRequest decoded(compiled, tensors, results, &call->results);
  khvd_request& request = decoded.request();
  // A barrier has no work on the GPU: it ends when the ranks' threads have reached it.
  if (request.count > 0) {
    request.on_gpu = 1;
    request.stream = stream->platform_specific_handle().stream;
  }
  std::vector<int64_t> splits;
  if (compiled.kind == KHVD_ALLTOALL) {
    ffi::Result<ffi::AnyBuffer> received = *results.get<ffi::AnyBuffer>(1);
    call->received_splits.resize(received->element_count());
    call->splits_memory = received->untyped_data();
    call->results.set_received_splits(call->received_splits.data());
    if (tensors.size() == 2) {
      const absl::Status status = ReadSplits(tensors, stream, &splits);
      if (!status.ok()) return FailToCopy(*call, status);
      // No splits at all differ from even ones.
      static const int64_t none = 0;
      request.splits = splits.empty() ? &none : splits.data();
      request.split_count = static_cast<int32_t>(splits.size());
    }
  }
  OwnedCall& place = program[compiled.submitter];
  Submit(call.get(), request);
  place.reset(call.release());
  return ffi::Error::Success();
}

ffi::Error Done(Stream* stream, TokenBuffer, ffi::RemainingArgs, ffi::RemainingRets,
                int64_t submitter) {
  const auto found = program.find(submitter);
  if (found == program.end()) {
    return Fail(ffi::ErrorCode::kInternal,
                absl::StrCat("keras_hvd: request ", submitter,
                             " of a compiled program was not started on the thread "
                             "that ends it. Please report this"));
  }
  const OwnedCall call = std::move(found->second);
  program.erase(found);
  call->ended.WaitUntilKnown();
  call->ended.Await();
  if (call->ended.code() != KHVD_OK) {
    return Fail(ErrorCode(call->ended.code()), call->ended.message());
  }
  const absl::Status status = WriteReceivedSplits(*call, stream);
  return status.ok() ? ffi::Error::Success() : FailToCopy(*call, status);
}

XLA_FFI_DEFINE_HANDLER(kGpuStart, Start,
                       ffi::Ffi::Bind()
                           .Ctx<XlaStream>()
                           .Arg<TokenBuffer>()
                           .RemainingArgs()
                           .Ret<TokenBuffer>()
                           .RemainingRets()
                           .Attrs<DecodedRequest>());
XLA_FFI_DEFINE_HANDLER(kGpuDone, Done,
                       ffi::Ffi::Bind()
                           .Ctx<XlaStream>()
                           .Arg<TokenBuffer>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<int64_t>("submitter"));

XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), kStartTarget, "CUDA", kGpuStart);
XLA_FFI_REGISTER_HANDLER(ffi::GetXlaFfiApi(), kDoneTarget, "CUDA", kGpuDone);

}  // namespace
}  // namespace keras_hvd
