// Named time ranges of threads for NVIDIA's profilers (NVTX). NVTX is opened at run
// time, and only under a profiler.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tf_ops/transport/status.h"

namespace keras_hvd::cuda {

// The part of NVTX's interface that keras_hvd uses, declared here (versions 2, 3).
namespace nvtx {

using Domain = struct DomainState*;

// nvtxEventAttributes_t.
struct Attributes {
  uint16_t version = 2;
  uint16_t size = 48;
  uint32_t category = 0;
  int32_t color_type = 0;  // none
  uint32_t color = 0;
  int32_t payload_type = 1;  // uint64_t
  int32_t reserved = 0;
  uint64_t payload = 0;
  int32_t message_type = 1;  // const char*
  const char* message = nullptr;
};
static_assert(sizeof(Attributes) == 48);

struct Functions {
  Domain (*create_domain)(const char* name) = nullptr;
  void (*destroy_domain)(Domain domain) = nullptr;
  int (*push)(Domain domain, const Attributes* attributes) = nullptr;
  int (*pop)(Domain domain) = nullptr;
};

}  // namespace nvtx

// Any thread may call all of it.
class ProfilerRanges {
 public:
  // Whether this process was started by a profiler that could show them.
  static bool AreWanted();
  // `path`: the library, or "" for the system's: libnvtx3interop.so.1 (NVTX 3) or
  // libnvToolsExt.so.1 (NVTX 2). The status says why neither can be used.
  static Status Open(const std::string& path, std::unique_ptr<ProfilerRanges>* ranges);
  ~ProfilerRanges();
  ProfilerRanges(const ProfilerRanges&) = delete;
  ProfilerRanges& operator=(const ProfilerRanges&) = delete;

  // A range during its lifetime; one thread makes it and ends it.
  class Range {
   public:
    Range(const ProfilerRanges& ranges, const std::string& name, int64_t bytes);
    ~Range();
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;

   private:
    const ProfilerRanges& ranges_;
  };

 private:
  explicit ProfilerRanges(const nvtx::Functions& functions);

  const nvtx::Functions functions_;
  const nvtx::Domain domain_;
};

}  // namespace keras_hvd::cuda
