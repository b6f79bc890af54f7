#include "tf_ops/collectives/halving_doubling.h"

#include <cstddef>

namespace keras_hvd {
namespace {

// Hosts next to each other, as many as a power of two.
struct Block {
  int first;
  int hosts;

  // The parts that its n-th host has when the block's sums are made. The lowest bit of
  // n says which half of all parts, the next one which half of that.
  PartRange PartsOf(int number, int parts) const {
    PartRange range{0, parts};
    for (int bit = 1; bit < hosts; bit *= 2) range = Half(range, number & bit);
    return range;
  }

  static PartRange Half(const PartRange& range, bool second) {
    const int middle = (range.begin + range.end) / 2;
    return second ? PartRange{middle, range.end} : PartRange{range.begin, middle};
  }
};

std::vector<Block> BlocksOf(int hosts) {
  std::vector<Block> blocks;
  for (int first = 0; first < hosts;) {
    const int size = HalvingParts(hosts - first);
    blocks.push_back({first, size});
    first += size;
  }
  return blocks;
}

class Steps {
 public:
  Steps(int host, int hosts) : parts_(HalvingParts(hosts)) {
    const std::vector<Block> blocks = BlocksOf(hosts);
    size_t block = 0;
    while (host >= blocks[block].first + blocks[block].hosts) ++block;
    own_ = blocks[block];
    number_ = host - own_.first;
    const bool has_next = block + 1 < blocks.size();
    AddHalving();
    if (has_next) ReceiveFrom(blocks[block + 1]);
    if (block > 0) ExchangeWith(blocks[block - 1]);
    if (has_next) SendTo(blocks[block + 1]);
    AddDoubling();
  }

  std::vector<ExchangeStep> steps;

 private:
  PartRange own() const { return own_.PartsOf(number_, parts_); }

  void AddHalving() {
    PartRange range{0, parts_};
    for (int bit = 1; bit < own_.hosts; bit *= 2) {
      const bool second = number_ & bit;
      steps.push_back({own_.first + (number_ ^ bit), Block::Half(range, !second),
                       Block::Half(range, second), false});
      range = Block::Half(range, second);
    }
  }

  // The same backwards.
  void AddDoubling() {
    int bits = 0;
    while (1 << bits < own_.hosts) ++bits;
    for (int i = bits - 1; i >= 0; --i) {
      const ExchangeStep halving = steps[i];
      steps.push_back({halving.host, halving.receives, halving.sends, true});
    }
  }

  // The host of a smaller block that has this host's parts, among others.
  int HostOf(const Block& smaller) const {
    return smaller.first + number_ % smaller.hosts;
  }
  void ReceiveFrom(const Block& smaller) {
    steps.push_back({HostOf(smaller), {}, own(), false});
  }
  void SendTo(const Block& smaller) {
    steps.push_back({HostOf(smaller), own(), {}, true});
  }

  void ExchangeWith(const Block& larger) {
    for (const bool results : {false, true}) {
      for (int number = number_; number < larger.hosts; number += own_.hosts) {
        const PartRange parts = larger.PartsOf(number, parts_);
        steps.push_back({larger.first + number, results ? PartRange{} : parts,
                         results ? parts : PartRange{}, results});
      }
    }
  }

  const int parts_;
  Block own_{};
  int number_ = 0;  // within its block
};

}  // namespace

int HalvingParts(int hosts) {
  int parts = 1;
  while (2 * parts <= hosts) parts *= 2;
  return parts;
}

std::vector<ExchangeStep> HalvingSteps(int host, int hosts) {
  return Steps(host, hosts).steps;
}

}  // namespace keras_hvd
