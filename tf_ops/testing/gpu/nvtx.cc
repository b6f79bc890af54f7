// The stand-in of NVTX: notes the ranges of each thread.
#include "tf_ops/testing/gpu/nvtx.h"

#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <type_traits>

#include "tf_ops/cuda/profiler_ranges.h"

namespace keras_hvd::cuda::nvtx {

struct DomainState {
  std::string name;
  bool live = true;
};

}  // namespace keras_hvd::cuda::nvtx

namespace keras_hvd::stand_in {
namespace {

using cuda::nvtx::Attributes;
using cuda::nvtx::Domain;
using cuda::nvtx::DomainState;

// As NVTX has it where a range is none.
constexpr int kNotTracked = -2;

class Recorder : public Nvtx {
 public:
  static Recorder& Get() {
    static Recorder* const recorder = new Recorder();
    return *recorder;
  }

  void Reset() override {
    std::lock_guard<std::mutex> lock(mutex_);
    domains_.clear();
    ranges_.clear();
    open_.clear();
    violations_.clear();
  }
  std::vector<Range> Ranges() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return ranges_;
  }
  std::vector<std::string> Violations() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return violations_;
  }
  int Domains() override {
    std::lock_guard<std::mutex> lock(mutex_);
    int live = 0;
    for (const DomainState& domain : domains_) live += domain.live;
    return live;
  }

  Domain Create(const char* name) {
    std::lock_guard<std::mutex> lock(mutex_);
    domains_.push_back({name});
    return &domains_.back();
  }
  void Destroy(Domain domain) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!IsLive(domain)) return Violate("the end of no domain");
    domain->live = false;
  }
  int Push(Domain domain, const Attributes& attributes) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!IsLive(domain)) Violate("a range of no domain");
    const bool known = attributes.version == 2 || attributes.version == 3;
    if (!known || attributes.size != 48) Violate("attributes of no version");
    if (attributes.message_type != 1) Violate("a range without a name");
    if (attributes.payload_type != 1) Violate("a range without its bytes");
    std::vector<size_t>& open = open_[{std::this_thread::get_id(), domain}];
    open.push_back(ranges_.size());
    ranges_.push_back({domain->name, attributes.message, attributes.payload});
    return static_cast<int>(open.size()) - 1;
  }
  int Pop(Domain domain) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<size_t>& open = open_[{std::this_thread::get_id(), domain}];
    if (open.empty()) {
      Violate("the end of no range of this thread");
      return kNotTracked;
    }
    ranges_[open.back()].ended = true;
    open.pop_back();
    return static_cast<int>(open.size());
  }

 private:
  bool IsLive(Domain domain) const {
    for (const DomainState& each : domains_) {
      if (&each == domain) return each.live;
    }
    return false;
  }
  void Violate(const std::string& what) { violations_.push_back(what); }

  std::mutex mutex_;
  std::deque<DomainState> domains_;
  std::vector<Range> ranges_;
  std::map<std::pair<std::thread::id, Domain>, std::vector<size_t>> open_;
  std::vector<std::string> violations_;
};

}  // namespace
}  // namespace keras_hvd::stand_in

using keras_hvd::cuda::nvtx::Attributes;
using keras_hvd::cuda::nvtx::Domain;
using keras_hvd::stand_in::Recorder;

extern "C" {

Domain nvtxDomainCreateA(const char* name) { return Recorder::Get().Create(name); }
void nvtxDomainDestroy(Domain domain) { Recorder::Get().Destroy(domain); }
int nvtxDomainRangePushEx(Domain domain, const Attributes* attributes) {
  return Recorder::Get().Push(domain, *attributes);
}
int nvtxDomainRangePop(Domain domain) { return Recorder::Get().Pop(domain); }

keras_hvd::stand_in::Nvtx* keras_hvd_nvtx_stand_in() { return &Recorder::Get(); }

}  // extern "C"

// They have the types that the engine gives them.
#define KERAS_HVD_SAME(function, member)            \
  static_assert(std::is_same_v<decltype(&function), \
                               decltype(keras_hvd::cuda::nvtx::Functions::member)>)
KERAS_HVD_SAME(nvtxDomainCreateA, create_domain);
KERAS_HVD_SAME(nvtxDomainDestroy, destroy_domain);
KERAS_HVD_SAME(nvtxDomainRangePushEx, push);
KERAS_HVD_SAME(nvtxDomainRangePop, pop);
#undef KERAS_HVD_SAME
