// Allreduce: every member gets the reduction of all members' tensors.
#pragma once

#include <vector>

#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/copy.h"
#include "tf_ops/collectives/hosts_communicator.h"
#include "tf_ops/collectives/reduce.h"

namespace keras_hvd {

// One of the tensors that are reduced together. `output` may be `input`.
struct AllreduceTensor {
  DataType dtype;
  int64_t elements;
  const void* input;
  void* output;
};

// Fused tensors lie next to each other, and each starts at a cache line: the space that
// a tensor of this many bytes takes.
inline int64_t PaddedBytes(int64_t bytes) {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

// Up to this size, reading everything from everybody is cheaper than a second wait.
inline constexpr int64_t kAllreduceSmallBytes = 16 << 10;
// Smaller windows rewrite exchange memory lines that are still in the cache of the core
// that read them. Larger ones no longer fit into the own core's cache.
inline constexpr int64_t kAllreduceWindowBytes = 1 << 20;

// From this many hosts on, they exchange tensors that fit into a window by halving and
// doubling. With fewer, the few steps of a direct exchange save more time than its
// messages cost.
inline constexpr int64_t kHalvingHosts = 12;
// Two have the same messages either way.
inline constexpr int64_t kLeastHalvingHosts = 3;
// More hosts than any job has.
inline constexpr int64_t kNeverHalving = 1 << 20;

struct AllreduceOptions {
  Reduction reduction;
  // The same types and sizes in the same order on every member.
  std::vector<AllreduceTensor> tensors;
  Stores stores = Stores::kOrdinary;
  // Equal on all members. The first two are no more than the exchange memory, and a
  // window has whole cache lines.
  int64_t small_bytes = kAllreduceSmallBytes;
  int64_t window_bytes = kAllreduceWindowBytes;
  int64_t halving_hosts = kHalvingHosts;
};

// Returns false if the job failed meanwhile; the outputs are then undefined. Across
// hosts, elements are reduced in stages: see staged_reduction.h.
bool Allreduce(const AllreduceOptions& options, Communicator* communicator);
bool Allreduce(const AllreduceOptions& options, HostsCommunicator* hosts);

}  // namespace keras_hvd
