#include "tf_ops/cuda/profiler_ranges.h"

#include <stdlib.h>

#include "tf_ops/transport/dynamic_library.h"

namespace keras_hvd::cuda {
namespace {

// The profiler's library, which NVTX opens, in either version.
constexpr char kProfiler[] = "NVTX_INJECTION64_PATH";
constexpr char kDomain[] = "keras_hvd";
constexpr const char* kNames[] = {"libnvtx3interop.so.1", "libnvToolsExt.so.1"};

Status OpenLibrary(const std::string& path, DynamicLibrary* library) {
  if (!path.empty()) {
    return DynamicLibrary::Open(path, "there is no NVTX in " + path, library);
  }
  const std::string missing =
      std::string("there is neither ") + kNames[0] + " nor " + kNames[1] +
      " in the library path; pip install nvidia-nvtx-cu12 brings one";
  Status status;
  for (const char* name : kNames) {
    status = DynamicLibrary::Open(name, missing, library);
    // If a library exists but cannot be opened, report that one.
    if (status.ok() || status.message != missing) return status;
  }
  return status;
}

Status Find(const DynamicLibrary& library, nvtx::Functions* functions) {
  Status status = library.Find("nvtxDomainCreateA", &functions->create_domain);
  if (status.ok()) {
    status = library.Find("nvtxDomainDestroy", &functions->destroy_domain);
  }
  if (status.ok()) status = library.Find("nvtxDomainRangePushEx", &functions->push);
  if (status.ok()) status = library.Find("nvtxDomainRangePop", &functions->pop);
  return status;
}

}  // namespace

bool ProfilerRanges::AreWanted() {
  const char* const profiler = getenv(kProfiler);
  return profiler != nullptr && *profiler != '\0';
}

Status ProfilerRanges::Open(const std::string& path,
                            std::unique_ptr<ProfilerRanges>* ranges) {
  DynamicLibrary library;
  KHVD_RETURN_IF_ERROR(OpenLibrary(path, &library));
  nvtx::Functions functions;
  KHVD_RETURN_IF_ERROR(Find(library, &functions));
  ranges->reset(new ProfilerRanges(functions));
  return Status::Ok();
}

ProfilerRanges::ProfilerRanges(const nvtx::Functions& functions)
    : functions_(functions), domain_(functions_.create_domain(kDomain)) {}

ProfilerRanges::~ProfilerRanges() { functions_.destroy_domain(domain_); }

ProfilerRanges::Range::Range(const ProfilerRanges& ranges, const std::string& name,
                             int64_t bytes)
    : ranges_(ranges) {
  nvtx::Attributes attributes;
  attributes.payload = static_cast<uint64_t>(bytes);
  attributes.message = name.c_str();
  ranges_.functions_.push(ranges_.domain_, &attributes);
}

ProfilerRanges::Range::~Range() { ranges_.functions_.pop(ranges_.domain_); }

}  // namespace keras_hvd::cuda
