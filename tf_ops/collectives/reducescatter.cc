#include "tf_ops/collectives/reducescatter.h"

#include <algorithm>
#include <utility>

#include "tf_ops/collectives/hosts_parts.h"
#include "tf_ops/collectives/staged_reduction.h"

namespace keras_hvd {
namespace {

// The parts of the tensors, one of each tensor for each member.
Parts PartsOf(const ReducescatterOptions& options, int members) {
  std::vector<std::vector<int64_t>> starts;
  for (const ReducescatterTensor& tensor : options.tensors) {
    starts.push_back(
        PartStarts(tensor.rows, tensor.row_elements * Bytes(tensor.dtype), members));
  }
  return Parts(starts);
}

std::vector<const void*> InputsOf(const ReducescatterOptions& options) {
  std::vector<const void*> inputs;
  for (const ReducescatterTensor& tensor : options.tensors) {
    inputs.push_back(tensor.input);
  }
  return inputs;
}

template <typename Group>
bool ReducescatterAmong(const ReducescatterOptions& options, Group* communicator) {
  const int members = communicator->count();
  return Scatter(
      PartsOf(options, members), InputsOf(options), communicator,
      [&](size_t number, int64_t offset, int64_t bytes, const void* const* stretches) {
        const ReducescatterTensor& tensor = options.tensors[number];
        Reduce(options.reduction, tensor.dtype, stretches, members,
               bytes / Bytes(tensor.dtype), static_cast<char*>(tensor.output) + offset);
      });
}

// Reduces in stages, a window of all members' parts at a time. On each host a member's
// counterpart reduces the member's parts, and sends it the result.
class StagedReducescatter {
 public:
  StagedReducescatter(const ReducescatterOptions& options, HostsCommunicator* hosts)
      : options_(options),
        hosts_(*hosts),
        stages_(options.reduction, hosts_.count(), hosts_.hosts()),
        moves_inputs_(hosts_.local().count() == 1 && stages_.keeps_inputs()),
        parts_(PartsOf(options, hosts_.count())),
        inputs_(InputsOf(options)),
        window_bytes_(std::max<int64_t>(kReceivedBytes / hosts_.hosts(), 1) *
                      kAlignment) {}

  bool Run() {
    for (int64_t begin = 0; begin < parts_.longest_line(); begin += window_bytes_) {
      if (begin > 0 && !hosts_.NextRound()) return false;
      const Parts sums = SumsAt(begin);
      const int64_t sum_bytes = (sums.longest_line() / kAlignment + 1) * kAlignment;
      sums_ = hosts_.Scratch(sum_bytes + hosts_.hosts() * window_bytes_);
      received_ = sums_ + sum_bytes;
      if (!ReduceHost(sums) || !Exchange(sums)) return false;
      ReduceHosts(sums);
      if (!hosts_.AwaitSent()) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kAlignment = 64;
  // The bytes received at once, in units of the alignment.
  static constexpr int64_t kReceivedBytes = (1 << 20) / kAlignment;

  // The parts that each member of this host reduces, its own first.
  Parts SumsAt(int64_t begin) {
    std::vector<std::vector<Parts::Part>> lines;
    for (int member : hosts_.members_of(hosts_.host())) {
      std::vector<Parts::Part>& line = lines.emplace_back();
      AddPartsOf(member, begin, &line);
      if (member == hosts_.index()) owners_.assign(line.size(), member);
      for (int step = 1; step < hosts_.hosts(); ++step) {
        for (int owner : hosts_.members_of(hosts_.host_after(step))) {
          if (hosts_.Counterpart(owner, hosts_.host()) != member) continue;
          AddPartsOf(owner, begin, &line);
          if (member == hosts_.index()) owners_.resize(line.size(), owner);
        }
      }
    }
    return Parts(std::move(lines));
  }

  void AddPartsOf(int owner, int64_t begin, std::vector<Parts::Part>* line) const {
    parts_.ForEach(owner, begin, begin + window_bytes_,
                   [&](size_t tensor, int64_t offset, int64_t, int64_t bytes) {
                     const int64_t start = parts_.of(owner)[tensor].start;
                     line->push_back({tensor, start + offset, bytes});
                   });
  }

  bool ReduceHost(const Parts& sums) {
    if (moves_inputs_) return true;
    Communicator& local = hosts_.local();
    return Scatter(sums, inputs_, &local,
                   [&](size_t number, int64_t offset, int64_t bytes,
                       const void* const* stretches) {
                     const DataType dtype = TypeOf(sums, number);
                     Reduce(stages_.OfHost(dtype), dtype, stretches, local.count(),
                            bytes / Bytes(dtype),
                            sums_ + sums.position(local.index(), number) + offset);
                   });
  }

  // The address of this host's contribution to a part.
  const char* SumOf(const Parts& sums, size_t number) const {
    const int place = hosts_.local().index();
    if (!moves_inputs_) return sums_ + sums.position(place, number);
    const Parts::Part& part = sums.of(place)[number];
    return static_cast<const char*>(inputs_[part.tensor]) + part.start;
  }

  bool Exchange(const Parts& sums) {
    const std::vector<Parts::Part>& line = sums.of(hosts_.local().index());
    for (size_t number = 0; number < line.size(); ++number) {
      const int owner = owners_[number];
      if (owner != hosts_.index()) {
        hosts_.Send(owner, SumOf(sums, number), line[number].bytes);
        continue;
      }
      for (int step = 1; step < hosts_.hosts(); ++step) {
        const int host = hosts_.host_after(step);
        hosts_.Receive(hosts_.Counterpart(owner, host),
                       ReceivedFrom(host, sums, number), line[number].bytes);
      }
    }
    return hosts_.AwaitReceived();
  }

  char* ReceivedFrom(int host, const Parts& sums, size_t number) const {
    return received_ + host * window_bytes_ +
           sums.position(hosts_.local().index(), number);
  }

  void ReduceHosts(const Parts& sums) {
    hosts_.local().Enter(CollectivePhase::kReduce);
    const int self = hosts_.index();
    std::vector<const void*> inputs(hosts_.hosts());
    for (size_t number = 0; number < owners_.size() && owners_[number] == self;
         ++number) {
      const Parts::Part& part = sums.of(hosts_.local().index())[number];
      for (int host = 0; host < hosts_.hosts(); ++host) {
        inputs[host] = ReceivedFrom(host, sums, number);
      }
      inputs[hosts_.host()] = SumOf(sums, number);
      const ReducescatterTensor& tensor = options_.tensors[part.tensor];
      const int64_t offset = part.start - parts_.of(self)[part.tensor].start;
      stages_.ReduceHosts(tensor.dtype, inputs.data(), hosts_.hosts(),
                          part.bytes / Bytes(tensor.dtype),
                          static_cast<char*>(tensor.output) + offset);
    }
  }

  DataType TypeOf(const Parts& sums, size_t number) const {
    return options_.tensors[sums.of(hosts_.local().index())[number].tensor].dtype;
  }

  const ReducescatterOptions& options_;
  HostsCommunicator& hosts_;
  const StagedReduction stages_;
  const bool moves_inputs_;  // this rank's input leaves the host as it is
  const Parts parts_;
  const std::vector<const void*> inputs_;
  const int64_t window_bytes_;

  // Of the current window.
  std::vector<int> owners_;  // of the parts that this rank reduces, by number
  char* sums_ = nullptr;
  char* received_ = nullptr;
};

}  // namespace

bool Reducescatter(const ReducescatterOptions& options, Communicator* communicator) {
  const StandardFloatingPoint floating_point;
  return ReducescatterAmong(options, communicator);
}

bool Reducescatter(const ReducescatterOptions& options, HostsCommunicator* hosts) {
  const StandardFloatingPoint floating_point;
  const StagedReduction stages(options.reduction, hosts->count(), hosts->hosts());
  ReducescatterOptions staged, whole;
  staged.reduction = whole.reduction = options.reduction;
  for (const ReducescatterTensor& tensor : options.tensors) {
    const bool has_stages = stages.Suits(tensor.dtype);
    (has_stages ? staged : whole).tensors.push_back(tensor);
  }
  if (!staged.tensors.empty() && !StagedReducescatter(staged, hosts).Run()) {
    return false;
  }
  return whole.tensors.empty() ||
         (hosts->NextRound() && ReducescatterAmong(whole, hosts));
}

}  // namespace keras_hvd
