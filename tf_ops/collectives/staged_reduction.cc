#include "tf_ops/collectives/staged_reduction.h"

#include <algorithm>
#include <map>
#include <memory>

namespace keras_hvd {
namespace {

// Takes hosts in pairs, a piece at a time that stays in the cache.
class Pairs {
 public:
  static constexpr int64_t kPieceBytes = 4 << 10;

  Pairs(const StagedReduction& stages, DataType dtype, const void* const* inputs,
        int64_t elements)
      : stages_(stages), dtype_(dtype), inputs_(inputs), elements_(elements) {}

  // Writes the result of `hosts` hosts for the elements from `offset` on.
  void Reduce(int64_t offset, int hosts, void* result) {
    offset_ = offset * Bytes(dtype_);
    const int first = FirstOf(hosts);
    const void* const pair[] = {Sum(0, first, 0), Sum(first, hosts, 1)};
    keras_hvd::Reduce(stages_.OfLastPair(), dtype_, pair, 2, elements_, result);
  }

 private:
  // The number of hosts in the first sum.
  static int FirstOf(int hosts) {
    int first = 1;
    while (2 * first < hosts) first *= 2;
    return first;
  }

  // The sum of the hosts in [begin, end). It is in a place from `place` on, if
  // anywhere.
  const void* Sum(int begin, int end, int place) {
    if (end - begin == 1) return Scaled(begin, place);
    const int middle = begin + FirstOf(end - begin);
    const void* const pair[] = {Sum(begin, middle, place), Sum(middle, end, place + 1)};
    keras_hvd::Reduce(stages_.OfPair(), dtype_, pair, 2, elements_, places_[place]);
    return places_[place];
  }

  const void* Scaled(int host, int place) {
    const void* const input = static_cast<const char*>(inputs_[host]) + offset_;
    const double scale = stages_.BeforePairs();
    if (scale == 1) return input;
    keras_hvd::Reduce({ReduceOp::kSum, scale}, dtype_, &input, 1, elements_,
                      places_[place]);
    return places_[place];
  }

  const StagedReduction& stages_;
  const DataType dtype_;
  const void* const* const inputs_;
  const int64_t elements_;
  int64_t offset_ = 0;
  // One for each power of two that hosts may have.
  alignas(64) char places_[16][kPieceBytes];
};

}  // namespace

Reduction StagedReduction::OfHost(DataType dtype) const {
  if (one_each_) return {};
  return {averages() ? ReduceOp::kSum : whole_.op, whole_.prescale,
          DividesEarly(dtype) ? 1.0 / members_ : 1};
}

Reduction StagedReduction::OfHosts(DataType dtype) const {
  if (one_each_) return whole_;
  const bool divides = averages() && !DividesEarly(dtype);
  return {averages() ? ReduceOp::kSum : whole_.op, 1,
          divides ? whole_.postscale / members_ : whole_.postscale};
}

Reduction StagedReduction::OfLastPair() const {
  Reduction last = OfPair();
  last.postscale = averages() ? whole_.postscale / members_ : whole_.postscale;
  return last;
}

void StagedReduction::ReduceHosts(DataType dtype, const void* const* inputs, int hosts,
                                  int64_t elements, void* result) const {
  // With up to three hosts, both orders are the same.
  if (hosts <= 3 || !PairsHosts(dtype)) {
    return Reduce(OfHosts(dtype), dtype, inputs, hosts, elements, result);
  }
  const int64_t most = Pairs::kPieceBytes / Bytes(dtype);
  for (int64_t done = 0; done < elements; done += most) {
    Pairs(*this, dtype, inputs, std::min(most, elements - done))
        .Reduce(done, hosts, static_cast<char*>(result) + done * Bytes(dtype));
  }
}

void ReduceInStages(const Reduction& whole, DataType dtype,
                    const std::vector<const void*>& inputs,
                    const std::vector<int>& hosts, int64_t elements, void* result) {
  const bool is_one_host = std::all_of(hosts.begin(), hosts.end(),
                                       [&](int host) { return host == hosts[0]; });
  if (is_one_host) {
    return Reduce(whole, dtype, inputs.data(), static_cast<int>(inputs.size()),
                  elements, result);
  }
  std::map<int, std::vector<const void*>> of_hosts;
  for (size_t i = 0; i < inputs.size(); ++i) of_hosts[hosts[i]].push_back(inputs[i]);
  const StagedReduction stages(whole, static_cast<int>(inputs.size()),
                               static_cast<int>(of_hosts.size()));
  if (!stages.Suits(dtype)) {
    return Reduce(whole, dtype, inputs.data(), static_cast<int>(inputs.size()),
                  elements, result);
  }
  const int64_t bytes = elements * Bytes(dtype);
  std::vector<std::unique_ptr<char[]>> sums;
  std::vector<const void*> left;
  for (const auto& [host, of_host] : of_hosts) {
    sums.emplace_back(new char[bytes]);
    left.push_back(sums.back().get());
    Reduce(stages.OfHost(dtype), dtype, of_host.data(),
           static_cast<int>(of_host.size()), elements, sums.back().get());
  }
  stages.ReduceHosts(dtype, left.data(), static_cast<int>(left.size()), elements,
                     result);
}

}  // namespace keras_hvd
