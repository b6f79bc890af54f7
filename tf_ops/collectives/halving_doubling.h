// Halving and doubling: exchanges between hosts that give all of them the sum of their
// vectors, in a number of steps logarithmic in the number of hosts.
//
// Of 2^n hosts, each exchanges half of the parts that it still adds up with another
// host in every step. So it has the sum of one part after n steps. Another n steps
// bring the other sums, each step as many as all before. Other numbers of hosts are
// divided into blocks of powers of two, the largest first. Each block adds up its own
// hosts, its sums go to the block before it, and the results come back. A part's sum is
// made of the same pairs on every way (staged_reduction.h).
//
// See R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
// Operations in MPICH" (2005), for powers of two, and R. Rabenseifner, J. L. Träff,
// "More Efficient Reduction Algorithms for Non-Power-of-Two Number of Processors in
// Message-Passing Parallel Systems" (2004), for binary blocks.
#pragma once

#include <vector>

namespace keras_hvd {

// Parts from `begin` to before `end`.
struct PartRange {
  int begin = 0;
  int end = 0;

  bool empty() const { return begin == end; }
};

// A host's exchange with another one, in both directions at once, after the steps
// before.
struct ExchangeStep {
  int host;
  PartRange sends;
  PartRange receives;
  // Whether results travel; else sums, to which the receiver adds its own.
  bool results;
};

// The number of parts into which `hosts` hosts divide a vector.
int HalvingParts(int hosts);
// The steps of one of `hosts` hosts, in their order.
std::vector<ExchangeStep> HalvingSteps(int host, int hosts);

}  // namespace keras_hvd
