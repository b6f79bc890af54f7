// For tests of the coordinator: submissions of ranks, and its decisions.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/coordination/coordinator.h"

namespace keras_hvd {

using Shared = std::shared_ptr<const Description>;

inline constexpr int64_t kFusionBytes = 1000;

inline Description Allreduce(const std::string& name, int64_t floats = 10,
                             ReduceOp op = ReduceOp::kSum, int32_t process_set = 0) {
  Description description;
  description.process_set = process_set;
  description.name = name;
  description.reduction.op = op;
  description.tensors = {{DataType::kFloat32, {floats}}};
  return description;
}

inline Description Broadcast(const std::string& name, int32_t root = 0) {
  Description description = Allreduce(name);
  description.kind = Kind::kBroadcast;
  description.root = root;
  return description;
}

inline Description Barrier(const std::string& name) {
  Description description;
  description.name = name;
  description.kind = Kind::kBarrier;
  return description;
}

inline Shared Share(Description description) {
  return std::make_shared<const Description>(std::move(description));
}

// A rank's own submission, as on one host.
inline void Submit(Coordinator* coordinator, int rank, Shared description, double now,
                   bool duplicate = false) {
  MergedSubmission submission;
  submission.description = std::move(description);
  submission.duplicate = duplicate;
  submission.ranks = {rank};
  coordinator->Submit(std::move(submission), now);
}

inline void SubmitOnAll(Coordinator* coordinator, int size,
                        const Description& description) {
  for (int rank = 0; rank < size; ++rank) {
    Submit(coordinator, rank, Share(description), 0);
  }
}

inline std::vector<Decision> TakeAll(Coordinator* coordinator) {
  std::vector<Decision> decisions;
  Decision decision;
  while (coordinator->Next(&decision)) decisions.push_back(decision);
  return decisions;
}

inline std::vector<std::string> Names(const Decision& decision) {
  std::vector<std::string> names;
  for (const TensorKey& key : decision.tensors) names.push_back(key.name);
  return names;
}

inline Description AddSet(std::vector<int> members) {
  Description description;
  description.kind = Kind::kAddProcessSet;
  description.name = "sets";
  description.members = std::move(members);
  return description;
}

inline Description RemoveSet(std::vector<int> members) {
  Description description = AddSet(std::move(members));
  description.kind = Kind::kRemoveProcessSet;
  return description;
}

inline Description Join() {
  Description description;
  description.kind = Kind::kJoin;
  description.name = "join";
  return description;
}

}  // namespace keras_hvd
