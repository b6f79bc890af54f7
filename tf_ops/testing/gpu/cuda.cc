// The functions of CUDA's driver, on the pretended machine.
#include <cstring>
#include <type_traits>

#include "tf_ops/testing/gpu/machine.h"

namespace keras_hvd::stand_in {
namespace {

using cuda::Context;
using cuda::Event;
using cuda::Pointer;
using cuda::Result;
using cuda::Stream;
using Lock = Machine::Lock;

constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;

struct ErrorName {
  int32_t code;
  const char* name;
  const char* text;
};
constexpr ErrorName kErrors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorName* FindError(Result result) {
  for (const ErrorName& error : kErrors) {
    if (error.code == static_cast<int32_t>(result)) return &error;
  }
  return nullptr;
}

std::string Name(Stream stream) {
  if (stream == nullptr) return "the default stream";
  if (!Machine::Get().IsLive(stream)) return "no stream";
  return Text("stream ", stream->id);
}

std::string Name(Event event) {
  if (!Machine::Get().IsLive(event)) return "no event";
  return Text("event ", event->id);
}

// One call of a function: recorded, and perhaps made to fail.
class Entry {
 public:
  enum Needs { kNothing, kInit, kContext };

  Entry(const char* function, Needs needs, const std::string& arguments = "",
        Stream stream = nullptr)
      : function_(function), machine_(Machine::Get()) {
    Call call;
    call.function = function;
    call.arguments = arguments;
    call.stream = stream;
    int32_t code = 0;
    bool asynchronous = false;
    if (machine_.Enter(call, &code, &asynchronous)) {
      if (asynchronous) {
        machine_.sticky_error = code;
      } else {
        result_ = Result{code};
        return;
      }
    } else if (needs == kContext && machine_.sticky_error != 0) {
      result_ = Result{machine_.sticky_error};
      return;
    }
    if (needs != kNothing && !machine_.initialized) {
      Fail(kNotInitialized, "before cuInit");
    } else if (needs == kContext && context() == nullptr) {
      Fail(kInvalidContext, "without a current context");
    }
  }

  bool failed() const { return result_ != Result::kSuccess; }
  Result result() const { return result_; }

  Context context() const {
    const std::vector<Context>& contexts = machine_.contexts_of_thread();
    return contexts.empty() ? nullptr : contexts.back();
  }

  // Wrong use: an error, and a violation.
  Result Fail(Result result, const std::string& why) {
    machine_.Violate(Text(function_, " ", why));
    result_ = result;
    return result;
  }

 private:
  const char* const function_;
  Machine& machine_;
  Result result_ = Result::kSuccess;
};

class Recording : public Item {
 public:
  Recording(std::shared_ptr<Record> record, int event)
      : record_(std::move(record)), event_(event) {}
  std::string text() const override { return Text("the record of event ", event_); }
  void Placed(const Place& place) override { record_->place = place; }
  void Start() override { Publish(record_.get()); }
  void Ended() override {
    record_->done = true;
    record_->time = std::chrono::steady_clock::now();
  }

 private:
  const std::shared_ptr<Record> record_;
  const int event_;
};

class Waiting : public Item {
 public:
  Waiting(std::shared_ptr<Record> record, int event)
      : record_(std::move(record)), event_(event) {}
  std::string text() const override { return Text("a wait for event ", event_); }
  bool CanStart() override { return record_->done; }
  void Start() override { Observe(record_.get()); }
  void AddNeeds(std::vector<Place>* needs) const override {
    if (!record_->done) needs->push_back(record_->place);
  }

 private:
  const std::shared_ptr<Record> record_;
  const int event_;
};

// A part of memory that an item uses when it runs.
struct Range {
  void* memory = nullptr;
  size_t bytes = 0;
  bool on_host = false;
};

// Copies, or sets bytes where there is no source. Memory that has been freed since is
// not touched: there may be none any more.
class Writing : public Item {
 public:
  Writing(const char* function, const Range& to, const Range& from, int value)
      : function_(function), to_(to), from_(from), value_(value) {}
  std::string text() const override { return function_; }
  bool CanStart() override {
    usable_ = IsUsable(to_, "to ") && IsUsable(from_, "from ");
    return true;
  }
  void Start() override {
    if (!usable_ || to_.bytes == 0) return;
    if (from_.memory == nullptr) {
      memset(to_.memory, value_, to_.bytes);
    } else {
      memmove(to_.memory, from_.memory, to_.bytes);
    }
  }

 private:
  bool IsUsable(const Range& range, const char* direction) {
    const std::string problem =
        Machine::Get().Problem(range.memory, range.bytes, range.on_host);
    if (problem.empty()) return true;
    if (!reported_) {
      Machine::Get().Violate(
          Text(function_, ", when it runs, is ", direction, problem));
    }
    reported_ = true;
    return false;
  }

  const char* const function_;
  const Range to_, from_;
  const int value_;
  bool usable_ = false;
  bool reported_ = false;
};

Result PutWriting(const char* function, const Range& to, const Range& from, int value,
                  Stream stream) {
  Lock lock(Machine::Get());
  Machine& machine = Machine::Get();
  Entry entry(function, Entry::kContext, Text(to.bytes, " bytes, ", Name(stream)),
              stream);
  if (entry.failed()) return entry.result();
  const Stream resolved = machine.Resolve(stream, entry.context());
  if (resolved == nullptr) return entry.Fail(kInvalidHandle, "on no stream");
  if (resolved->context != entry.context()) {
    return entry.Fail(kInvalidHandle, "on a stream of another context");
  }
  for (const Range& range : {to, from}) {
    const std::string problem =
        machine.Problem(range.memory, range.bytes, range.on_host);
    if (!problem.empty()) return entry.Fail(kInvalidValue, "is given " + problem);
  }
  machine.Put(resolved, std::make_unique<Writing>(function, to, from, value));
  return Result::kSuccess;
}

Range OnDevice(Pointer memory, size_t bytes) {
  return {reinterpret_cast<void*>(memory), bytes, false};
}
Range OnHost(const void* memory, size_t bytes) {
  return {const_cast<void*>(memory), bytes, true};
}

Result AllocateMemory(const char* function, size_t bytes, bool on_host, void** memory) {
  Lock lock(Machine::Get());
  Entry entry(function, Entry::kContext, Text(bytes, " bytes"));
  if (entry.failed()) return entry.result();
  if (bytes == 0) return entry.Fail(kInvalidValue, "of 0 bytes");
  *memory = Machine::Get().Allocate(bytes, on_host);
  return *memory == nullptr ? kOutOfMemory : Result::kSuccess;
}

Result FreeMemory(const char* function, void* memory, bool on_host) {
  Lock lock(Machine::Get());
  Entry entry(function, Entry::kContext);
  if (entry.failed()) return entry.result();
  if (memory == nullptr) return Result::kSuccess;
  if (Machine::Get().Free(memory, on_host)) return Result::kSuccess;
  return entry.Fail(kInvalidValue, "of what is not allocated");
}

}  // namespace
}  // namespace keras_hvd::stand_in

using namespace keras_hvd::stand_in;  // NOLINT: the functions have C's names

extern "C" {

// ---- Devices and contexts

Result cuInit(unsigned int flags) {
  Lock lock(Machine::Get());
  Entry entry("cuInit", Entry::kNothing);
  if (entry.failed()) return entry.result();
  if (flags != 0) return entry.Fail(kInvalidValue, "with flags");
  if (Machine::Get().devices() == 0) return kNoDevice;
  Machine::Get().initialized = true;
  return Result::kSuccess;
}

Result cuDriverGetVersion(int* version) {
  Lock lock(Machine::Get());
  Entry entry("cuDriverGetVersion", Entry::kNothing);
  if (entry.failed()) return entry.result();
  *version = 12040;
  return Result::kSuccess;
}

Result cuDeviceGetCount(int* count) {
  Lock lock(Machine::Get());
  Entry entry("cuDeviceGetCount", Entry::kInit);
  if (entry.failed()) return entry.result();
  *count = Machine::Get().devices();
  return Result::kSuccess;
}

Result cuDeviceGet(keras_hvd::cuda::Device* device, int ordinal) {
  Lock lock(Machine::Get());
  Entry entry("cuDeviceGet", Entry::kInit, Text("device ", ordinal));
  if (entry.failed()) return entry.result();
  if (ordinal < 0 || ordinal >= Machine::Get().devices()) return kInvalidDevice;
  *device = ordinal;
  return Result::kSuccess;
}

Result cuDeviceGetUuid_v2(keras_hvd::cuda::Uuid* uuid, keras_hvd::cuda::Device device) {
  Lock lock(Machine::Get());
  Entry entry("cuDeviceGetUuid", Entry::kInit, Text("device ", device));
  if (entry.failed()) return entry.result();
  if (device < 0 || device >= Machine::Get().devices()) return kInvalidDevice;
  memset(uuid->bytes, 1 + device, sizeof(uuid->bytes));
  return Result::kSuccess;
}

Result cuDeviceGetAttribute(int* value, int attribute, keras_hvd::cuda::Device device) {
  Lock lock(Machine::Get());
  Entry entry("cuDeviceGetAttribute", Entry::kInit,
              Text("attribute ", attribute, " of device ", device));
  if (entry.failed()) return entry.result();
  if (device < 0 || device >= Machine::Get().devices()) return kInvalidDevice;
  const int capability = Machine::Get().compute_capability(device);
  if (attribute == keras_hvd::cuda::kCapabilityMajor) {
    *value = capability / 10;
  } else if (attribute == keras_hvd::cuda::kCapabilityMinor) {
    *value = capability % 10;
  } else {
    return entry.Fail(kInvalidValue, "that the stand-in has not");
  }
  return Result::kSuccess;
}

Result cuDevicePrimaryCtxRetain(Context* context, keras_hvd::cuda::Device device) {
  Lock lock(Machine::Get());
  Entry entry("cuDevicePrimaryCtxRetain", Entry::kInit, Text("device ", device));
  if (entry.failed()) return entry.result();
  if (device < 0 || device >= Machine::Get().devices()) return kInvalidDevice;
  *context = Machine::Get().context(device);
  (*context)->retained += 1;
  return Result::kSuccess;
}

Result cuDevicePrimaryCtxRelease_v2(keras_hvd::cuda::Device device) {
  Lock lock(Machine::Get());
  Entry entry("cuDevicePrimaryCtxRelease", Entry::kInit, Text("device ", device));
  if (entry.failed()) return entry.result();
  if (device < 0 || device >= Machine::Get().devices()) return kInvalidDevice;
  const Context context = Machine::Get().context(device);
  if (context->retained == 0) {
    return entry.Fail(kInvalidContext, "more often than it was retained");
  }
  context->retained -= 1;
  return Result::kSuccess;
}

Result cuCtxPushCurrent_v2(Context context) {
  Lock lock(Machine::Get());
  Entry entry("cuCtxPushCurrent", Entry::kInit);
  if (entry.failed()) return entry.result();
  if (context == nullptr || context->retained == 0) {
    return entry.Fail(kInvalidContext, "of a context that is not retained");
  }
  Machine::Get().contexts_of_thread().push_back(context);
  return Result::kSuccess;
}

Result cuCtxPopCurrent_v2(Context* context) {
  Lock lock(Machine::Get());
  Entry entry("cuCtxPopCurrent", Entry::kInit);
  if (entry.failed()) return entry.result();
  std::vector<Context>& contexts = Machine::Get().contexts_of_thread();
  if (contexts.empty()) return entry.Fail(kInvalidContext, "of no context");
  if (context != nullptr) *context = contexts.back();
  contexts.pop_back();
  return Result::kSuccess;
}

Result cuCtxGetDevice(keras_hvd::cuda::Device* device) {
  Lock lock(Machine::Get());
  Entry entry("cuCtxGetDevice", Entry::kContext);
  if (entry.failed()) return entry.result();
  *device = entry.context()->device;
  return Result::kSuccess;
}

// ---- Streams

Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  Lock lock(Machine::Get());
  Entry entry("cuCtxGetStreamPriorityRange", Entry::kContext);
  if (entry.failed()) return entry.result();
  if (least != nullptr) *least = kLeastPriority;
  if (greatest != nullptr) *greatest = kGreatestPriority;
  return Result::kSuccess;
}

Result cuStreamCreateWithPriority(Stream* stream, unsigned int flags, int priority) {
  Lock lock(Machine::Get());
  Entry entry("cuStreamCreateWithPriority", Entry::kContext,
              Text("flags ", flags, ", priority ", priority));
  if (entry.failed()) return entry.result();
  if (flags > keras_hvd::cuda::kStreamNonBlocking) {
    return entry.Fail(kInvalidValue, "with unknown flags");
  }
  *stream = Machine::Get().NewStream(entry.context());
  return Result::kSuccess;
}

Result cuStreamDestroy_v2(Stream stream) {
  Lock lock(Machine::Get());
  Entry entry("cuStreamDestroy", Entry::kContext, Name(stream), stream);
  if (entry.failed()) return entry.result();
  if (stream == nullptr || !Machine::Get().IsLive(stream)) {
    return entry.Fail(kInvalidHandle, "of no stream");
  }
  Machine::Get().DestroyStream(stream);
  return Result::kSuccess;
}

// Unlike the others it may do without a current context.
Result cuStreamGetCtx(Stream stream, Context* context) {
  Lock lock(Machine::Get());
  Entry entry("cuStreamGetCtx", Entry::kInit, Name(stream), stream);
  if (entry.failed()) return entry.result();
  if (stream == nullptr) {
    *context = entry.context();
    return *context == nullptr ? kInvalidContext : Result::kSuccess;
  }
  if (!Machine::Get().IsLive(stream)) return entry.Fail(kInvalidHandle, "of no stream");
  *context = stream->context;
  return Result::kSuccess;
}

Result cuStreamWaitEvent(Stream stream, Event event, unsigned int flags) {
  Lock lock(Machine::Get());
  Machine& machine = Machine::Get();
  Entry entry("cuStreamWaitEvent", Entry::kContext,
              Text(Name(stream), ", ", Name(event)), stream);
  if (entry.failed()) return entry.result();
  const Stream resolved = machine.Resolve(stream, entry.context());
  if (resolved == nullptr) return entry.Fail(kInvalidHandle, "on no stream");
  if (!machine.IsLive(event)) return entry.Fail(kInvalidHandle, "for no event");
  if (flags != 0) return entry.Fail(kInvalidValue, "with flags");
  if (event->latest == nullptr || event->latest->place.stream == resolved) {
    return Result::kSuccess;
  }
  machine.Put(resolved, std::make_unique<Waiting>(event->latest, event->id));
  return Result::kSuccess;
}

// ---- Events

Result cuEventCreate(Event* event, unsigned int flags) {
  Lock lock(Machine::Get());
  Entry entry("cuEventCreate", Entry::kContext, Text("flags ", flags));
  if (entry.failed()) return entry.result();
  const bool timed = (flags & keras_hvd::cuda::kEventDisableTiming) == 0;
  *event = Machine::Get().NewEvent(entry.context(), timed);
  return Result::kSuccess;
}

Result cuEventRecord(Event event, Stream stream) {
  Lock lock(Machine::Get());
  Machine& machine = Machine::Get();
  Entry entry("cuEventRecord", Entry::kContext, Text(Name(event), ", ", Name(stream)),
              stream);
  if (entry.failed()) return entry.result();
  const Stream resolved = machine.Resolve(stream, entry.context());
  if (resolved == nullptr) return entry.Fail(kInvalidHandle, "on no stream");
  if (!machine.IsLive(event)) return entry.Fail(kInvalidHandle, "of no event");
  if (event->context != resolved->context) {
    return entry.Fail(kInvalidHandle, "on a stream of another context");
  }
  event->latest = std::make_shared<Record>();
  machine.Put(resolved, std::make_unique<Recording>(event->latest, event->id));
  return Result::kSuccess;
}

Result cuEventQuery(Event event) {
  Lock lock(Machine::Get());
  Machine& machine = Machine::Get();
  Entry entry("cuEventQuery", Entry::kInit, Name(event));
  if (entry.failed()) return entry.result();
  if (machine.sticky_error != 0) return Result{machine.sticky_error};
  if (!machine.IsLive(event)) return entry.Fail(kInvalidHandle, "of no event");
  Record* const record = event->latest.get();
  if (record == nullptr) return Result::kSuccess;
  if (!record->done) {
    machine.Demand(record->place, &record->polls);
    return Result::kNotReady;
  }
  Observe(record);
  return Result::kSuccess;
}

Result cuEventElapsedTime(float* milliseconds, Event start, Event end) {
  Lock lock(Machine::Get());
  Machine& machine = Machine::Get();
  Entry entry("cuEventElapsedTime", Entry::kContext,
              Text(Name(start), ", ", Name(end)));
  if (entry.failed()) return entry.result();
  for (const Event event : {start, end}) {
    if (!machine.IsLive(event)) return entry.Fail(kInvalidHandle, "of no event");
    if (!event->timed) return entry.Fail(kInvalidHandle, "of an event without timing");
    if (event->latest == nullptr) {
      return entry.Fail(kInvalidHandle, "of an event that was not recorded");
    }
  }
  if (!start->latest->done || !end->latest->done) return Result::kNotReady;
  *milliseconds =
      std::chrono::duration<float, std::milli>(end->latest->time - start->latest->time)
          .count();
  return Result::kSuccess;
}

Result cuEventDestroy_v2(Event event) {
  Lock lock(Machine::Get());
  Entry entry("cuEventDestroy", Entry::kContext, Name(event));
  if (entry.failed()) return entry.result();
  if (!Machine::Get().IsLive(event)) return entry.Fail(kInvalidHandle, "of no event");
  event->live = false;
  return Result::kSuccess;
}

// ---- Memory

Result cuMemAlloc_v2(Pointer* memory, size_t bytes) {
  void* allocated = nullptr;
  const Result result = AllocateMemory("cuMemAlloc", bytes, false, &allocated);
  if (result == Result::kSuccess) *memory = keras_hvd::cuda::Address(allocated);
  return result;
}

Result cuMemFree_v2(Pointer memory) {
  return FreeMemory("cuMemFree", reinterpret_cast<void*>(memory), false);
}

Result cuMemHostAlloc(void** memory, size_t bytes, unsigned int) {
  return AllocateMemory("cuMemHostAlloc", bytes, true, memory);
}

Result cuMemFreeHost(void* memory) { return FreeMemory("cuMemFreeHost", memory, true); }

Result cuMemcpyHtoDAsync_v2(Pointer to, const void* from, size_t bytes, Stream stream) {
  return PutWriting("cuMemcpyHtoDAsync", OnDevice(to, bytes), OnHost(from, bytes), 0,
                    stream);
}

Result cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t bytes, Stream stream) {
  return PutWriting("cuMemcpyDtoHAsync", OnHost(to, bytes), OnDevice(from, bytes), 0,
                    stream);
}

Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, Stream stream) {
  return PutWriting("cuMemcpyDtoDAsync", OnDevice(to, bytes), OnDevice(from, bytes), 0,
                    stream);
}

Result cuMemsetD8Async(Pointer memory, unsigned char value, size_t bytes,
                       Stream stream) {
  return PutWriting("cuMemsetD8Async", OnDevice(memory, bytes), {}, value, stream);
}

// ---- Errors

Result cuGetErrorName(Result result, const char** name) {
  const ErrorName* const error = FindError(result);
  *name = error == nullptr ? nullptr : error->name;
  return error == nullptr ? kInvalidValue : Result::kSuccess;
}

Result cuGetErrorString(Result result, const char** text) {
  const ErrorName* const error = FindError(result);
  *text = error == nullptr ? nullptr : error->text;
  return error == nullptr ? kInvalidValue : Result::kSuccess;
}

}  // extern "C"

// They have the types that the engine gives them.
#define KERAS_HVD_SAME(function, member)            \
  static_assert(std::is_same_v<decltype(&function), \
                               decltype(keras_hvd::cuda::Functions::member)>)
KERAS_HVD_SAME(cuInit, init);
KERAS_HVD_SAME(cuDriverGetVersion, driver_version);
KERAS_HVD_SAME(cuDeviceGetCount, device_count);
KERAS_HVD_SAME(cuDeviceGet, device);
KERAS_HVD_SAME(cuDeviceGetUuid_v2, device_uuid);
KERAS_HVD_SAME(cuDeviceGetAttribute, device_attribute);
KERAS_HVD_SAME(cuDevicePrimaryCtxRetain, retain_primary_context);
KERAS_HVD_SAME(cuDevicePrimaryCtxRelease_v2, release_primary_context);
KERAS_HVD_SAME(cuCtxPushCurrent_v2, push_context);
KERAS_HVD_SAME(cuCtxPopCurrent_v2, pop_context);
KERAS_HVD_SAME(cuCtxGetDevice, context_device);
KERAS_HVD_SAME(cuCtxGetStreamPriorityRange, stream_priorities);
KERAS_HVD_SAME(cuStreamCreateWithPriority, create_stream);
KERAS_HVD_SAME(cuStreamDestroy_v2, destroy_stream);
KERAS_HVD_SAME(cuStreamGetCtx, stream_context);
KERAS_HVD_SAME(cuStreamWaitEvent, stream_wait_event);
KERAS_HVD_SAME(cuEventCreate, create_event);
KERAS_HVD_SAME(cuEventRecord, record_event);
KERAS_HVD_SAME(cuEventQuery, query_event);
KERAS_HVD_SAME(cuEventElapsedTime, elapsed_time);
KERAS_HVD_SAME(cuEventDestroy_v2, destroy_event);
KERAS_HVD_SAME(cuMemAlloc_v2, allocate);
KERAS_HVD_SAME(cuMemFree_v2, free);
KERAS_HVD_SAME(cuMemHostAlloc, allocate_host);
KERAS_HVD_SAME(cuMemFreeHost, free_host);
KERAS_HVD_SAME(cuMemcpyHtoDAsync_v2, copy_to_device);
KERAS_HVD_SAME(cuMemcpyDtoHAsync_v2, copy_to_host);
KERAS_HVD_SAME(cuMemcpyDtoDAsync_v2, copy_on_device);
KERAS_HVD_SAME(cuMemsetD8Async, set_bytes);
KERAS_HVD_SAME(cuGetErrorName, error_name);
KERAS_HVD_SAME(cuGetErrorString, error_text);
#undef KERAS_HVD_SAME
