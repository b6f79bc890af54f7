// The time of a step's coordination in a job of any size, on a virtual network.
//
// A discrete event simulation of ranks and their hosts' leaders, which do their work
// for real: the encoders, decoders, mergers and the coordinator are the engine's own.
// The CPU time of each piece of work is measured, and passes in the simulation. Each
// rank is one processor, which does one piece of work at a time. Rank 0 is also the
// coordinator, and a host's lowest rank its leader.
//
// Left out are sleeping and waking, the system calls of a connection (unless they are
// given as a cost), and the collectives themselves.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tf_ops/operation/description.h"

namespace keras_hvd {

struct SimulationOptions {
  int ranks = 8;
  int ranks_per_host = 8;
  int steps = 9;               // that count; two come before them
  double hop_seconds = 10e-6;  // a message between hosts
  double local_seconds = 1e-6;
  // CPU time of a node for each message that it sends to or gets from another host.
  double connection_seconds = 0;
  int cores = 0;  // that all ranks share; 0: each has its own
  int64_t fusion_bytes = 64 << 20;
};

// A node's work, or its reason to wait.
enum class Part {
  kSubmit,    // a rank encodes its requests
  kRanks,     // a leader decodes and merges what a rank of its host submits
  kBelow,     // a leader does the same with what a leader below passes on
  kPassUp,    // a leader encodes what it passes on
  kDecide,    // the coordinator decides, and encodes the decisions
  kPassDown,  // a leader reads the decisions that it passes on
  kFinish,    // a rank decodes the decisions, and finds its requests
  kConnection,
  kHop,
  kLocal,
};
inline constexpr size_t kParts = 10;
// As in "a leader decodes what ranks submit".
const char* Text(Part part);

struct SimulatedStep {
  double seconds = 0;
  // The parts of the longest sequence of work and messages.
  std::array<double, kParts> critical{};
  std::array<double, kParts> work{};  // of all nodes
};

struct SimulationResult {
  std::vector<SimulatedStep> steps;
  int hosts = 0;
  // Of one step.
  int64_t messages = 0;       // between nodes, each of them all that is sent at a time
  int64_t decisions = 0;      // of the coordinator
  int64_t tensors_ended = 0;  // on all ranks
};

// The gradients of ResNet-50: 161 allreduces.
std::vector<std::shared_ptr<const Description>> ResNetGradients();

SimulationResult Simulate(
    const SimulationOptions& options,
    const std::vector<std::shared_ptr<const Description>>& requests);

}  // namespace keras_hvd
