// Who exchanges which part of a vector with whom, so that all hosts have its sum after
// as many steps as the logarithm of their number.
//
// Of 2^n hosts, each exchanges half of what it still adds up with another one in every
// step, and so has the sum of one part after n steps; n more bring the others, each
// step as much as all before. Other numbers are divided into powers of two, the largest
// first: each of these adds up its own hosts, its sums go to the one before it, and the
// results come back. Whatever way a part takes, its sum is made of the same pairs
// (staged_reduction.h).
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

// What a host exchanges with another one at once, when the steps before are over.
struct ExchangeStep {
  int host;
  PartRange sends;
  PartRange receives;
  // What travels are results; else sums, to which the receiver adds its own.
  bool results;
};

// Into how many parts so many hosts divide what they add up.
int HalvingParts(int hosts);
// The steps of one of so many hosts, in their order.
std::vector<ExchangeStep> HalvingSteps(int host, int hosts);

}  // namespace keras_hvd
