// A test's view of the library that stands in for NVTX: the ranges that have been begun
// and ended there, and their errors.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <string>
#include <vector>

namespace keras_hvd::stand_in {

inline constexpr const char* kNvtxLibrary = "tf_ops/testing/gpu/libnvtx3interop.so.1";
// The same without nvtxDomainRangePop.
inline constexpr const char* kIncompleteNvtxLibrary =
    "tf_ops/testing/gpu/libnvtx3interop_incomplete.so.1";

class Nvtx {
 public:
  struct Range {
    std::string domain;
    std::string name;
    uint64_t payload = 0;
    bool ended = false;
  };

  virtual ~Nvtx() = default;
  virtual void Reset() = 0;
  // In the order of their beginnings.
  virtual std::vector<Range> Ranges() = 0;
  // Wrong attributes, or an end on a thread that has begun nothing.
  virtual std::vector<std::string> Violations() = 0;
  // Those that were created and not destroyed.
  virtual int Domains() = 0;
};

// The control of the library, opened as the engine opens it; null if there is none.
inline Nvtx* OpenNvtx() {
  void* const library = dlopen(kNvtxLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  const auto control =
      reinterpret_cast<Nvtx* (*)()>(dlsym(library, "keras_hvd_nvtx_stand_in"));
  return control == nullptr ? nullptr : control();
}

}  // namespace keras_hvd::stand_in
