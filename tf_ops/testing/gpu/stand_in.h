// For tests of the GPU path without a GPU: libraries that stand in for CUDA's driver
// and NCCL, and a test's control of them.
//
// Ranks are threads of one process. Device memory is host memory. Each stream is a
// thread, and a seed decides which of them run at once and which hold their work back
// until somebody asks for the event behind it. So a missing wait gives wrong data, or a
// race that the thread sanitizer reports. Calls are recorded, and a wrong call is a
// violation: a test ends with none, and with nothing leaked.
//
// Environment variables set the initial state of a process that a test does not
// control: KERAS_HVD_STAND_IN_SEED, _DEVICES, _NCCL_VERSION and _COMPUTE_CAPABILITY.
// With _UNIFIED=1 the devices reach all of the process' memory, as some of NVIDIA's do.
#pragma once

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tf_ops/cuda/abi.h"
#include "tf_ops/nccl/abi.h"

namespace keras_hvd::stand_in {

// Where a test's libraries are, from the folder that Bazel runs it in.
inline constexpr const char* kCudaLibrary = "tf_ops/testing/gpu/libcuda.so.1";
inline constexpr const char* kNcclLibrary = "tf_ops/testing/gpu/libnccl.so.2";
// The same without cuEventQuery, and without ncclCommSplit.
inline constexpr const char* kIncompleteCudaLibrary =
    "tf_ops/testing/gpu/libcuda_incomplete.so.1";
inline constexpr const char* kIncompleteNcclLibrary =
    "tf_ops/testing/gpu/libnccl_incomplete.so.2";
// One of another version, of which no other function works.
inline constexpr const char* kAnotherNcclLibrary =
    "tf_ops/testing/gpu/libnccl_another.so.2";

// CUresult's codes that tests use.
inline constexpr cuda::Result kInvalidValue{1};
inline constexpr cuda::Result kOutOfMemory{2};
inline constexpr cuda::Result kNotInitialized{3};
inline constexpr cuda::Result kNoDevice{100};
inline constexpr cuda::Result kInvalidDevice{101};
inline constexpr cuda::Result kInvalidContext{201};
inline constexpr cuda::Result kInvalidHandle{400};
inline constexpr cuda::Result kIllegalAddress{700};

inline constexpr int kNcclVersion = 22304;
inline constexpr int kAnotherNcclVersion = 22809;
inline constexpr int kComputeCapability = 80;

// One call of a library's function.
struct Call {
  std::string function;
  std::string arguments;          // for people: "stream 3, event 7"
  std::string thread;             // its name
  int rank = -1;                  // as the thread has said
  cuda::Stream stream = nullptr;  // of those that have one
  nccl::Comm communicator = nullptr;
  int member = -1;           // this rank's place in the communicator
  bool has_context = false;  // on its thread
  int64_t times = 1;         // the same again and again, as polls are
};

// Objects that are still there, and should be given back.
struct Leaks {
  int streams = 0;
  int events = 0;
  int device_allocations = 0;
  int host_allocations = 0;
  int contexts = 0;  // retained and not released
  int communicators = 0;
  int reduction_ops = 0;

  int sum() const {
    return streams + events + device_allocations + host_allocations + contexts +
           communicators + reduction_ops;
  }
};

// The call that fails.
struct Injection {
  std::string function;
  int32_t code = 0;
  int call = 1;  // counted from now; 0: each one
  // The call itself does nothing unusual. NCCL: ncclCommGetAsyncError reports the code
  // from then on, and the communicator's collectives hang. CUDA: all calls of the
  // context fail with it from then on.
  bool asynchronous = false;
  int member = -1;          // NCCL: of this one of the communicator only
  int rank = -1;            // of threads that have said that they are this rank only
  std::string thread = {};  // of threads of this name only
};

class Control {
 public:
  virtual ~Control() = default;

  // As if the libraries were new. Nothing of theirs may be in use any more.
  virtual void Reset(uint64_t seed, int devices = 4) = 0;
  virtual void SetDevices(int devices) = 0;  // 0: cuInit fails with kNoDevice
  virtual void SetNcclVersion(int version) = 0;
  virtual void SetComputeCapability(int device, int capability) = 0;  // 90 for 9.0
  virtual void Inject(const Injection& injection) = 0;
  // The calling thread is a rank's: so it is called in `Call` and `Injection`.
  virtual void SetRank(int rank) = 0;

  // A kernel: runs in the stream's order, on the stream's thread. Null: the default
  // stream of the calling thread's context.
  virtual void Enqueue(cuda::Stream stream, std::function<void()> kernel) = 0;
  // Waits until all that is on the stream has run. Otherwise says why it does not.
  virtual std::string Synchronize(
      cuda::Stream stream,
      std::chrono::milliseconds limit = std::chrono::seconds(60)) = 0;
  // A GPU that hangs: nothing on the stream starts any more, until `on` is false.
  virtual void Hold(cuda::Stream stream, bool on) = 0;
  // The same for the collectives of this member of each communicator; an abort ends
  // them in any case.
  virtual void HoldCollectives(int member, bool on) = 0;
  // Nothing goes on behind the calls of this member of each communicator: calls in
  // progress stay so.
  virtual void HoldProgress(int member, bool on) = 0;
  // A blocking communicator's call waits while this many of its groups have not run. 0:
  // never.
  virtual void LimitQueue(int groups) = 0;
  // Aborts of collectives return this late: the GPU looks for an abort now and then.
  virtual void SlowAborts(std::chrono::milliseconds late) = 0;

  // Streams that wait for each other and will for ever, and for what; "" for none.
  virtual std::string Stuck() = 0;
  virtual std::vector<Call> Calls() = 0;
  virtual std::vector<std::string> Violations() = 0;
  virtual Leaks CountLeaks() = 0;
};

// The libraries, opened as the engine opens them; and their control.
class StandIn {
 public:
  explicit StandIn(const char* cuda_library = kCudaLibrary,
                   const char* nccl_library = kNcclLibrary) {
    void* const cuda_handle = Open(cuda_library);
    void* const nccl_handle = Open(nccl_library);
#define KERAS_HVD_FIND(member, symbol, result, parameters) \
  Find(cuda_handle, symbol, &cuda_.member);
    KERAS_HVD_CUDA_FUNCTIONS(KERAS_HVD_FIND)
#undef KERAS_HVD_FIND
#define KERAS_HVD_FIND(member, symbol, result, parameters) \
  Find(nccl_handle, symbol, &nccl_.member);
    KERAS_HVD_NCCL_FUNCTIONS(KERAS_HVD_FIND)
#undef KERAS_HVD_FIND
    Control* (*control)() = nullptr;
    Find(cuda_handle, "keras_hvd_gpu_stand_in", &control);
    control_ = control();
  }

  const cuda::Functions& cuda() const { return cuda_; }
  const nccl::Functions& nccl() const { return nccl_; }
  Control* operator->() const { return control_; }

 private:
  static void* Open(const char* library) {
    void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) Fail(dlerror());
    return handle;
  }

  template <typename Function>
  static void Find(void* handle, const char* symbol, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(handle, symbol));
    if (*function == nullptr) Fail(symbol);
  }

  static void Fail(const char* what) {
    fprintf(stderr, "GPU stand-in: %s\n", what);
    abort();
  }

  cuda::Functions cuda_;
  nccl::Functions nccl_;
  Control* control_ = nullptr;
};

}  // namespace keras_hvd::stand_in
