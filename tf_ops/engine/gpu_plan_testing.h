// For tests of the engine with tensors on GPUs: runs random collectives.
#pragma once

#include <random>
#include <utility>
#include <vector>

#include "tf_ops/engine/engine_gpu_testing.h"
#include "tf_ops/engine/random_plan_testing.h"

namespace keras_hvd {

// Of tensors: a barrier has nothing on a GPU.
inline std::vector<Plan> GpuPlans(int size, uint64_t seed, size_t count,
                                  const Fill& fill = FillWithBits) {
  std::mt19937_64 random(seed);
  std::vector<Plan> plans;
  while (plans.size() < count) {
    Plan plan = RandomPlan(static_cast<int>(plans.size()), size, &random, fill);
    const Kind kind = plan.asks.front().description.kind;
    if (kind != Kind::kBarrier) plans.push_back(std::move(plan));
  }
  return plans;
}

// Whether the member with an index got the right output.
using Check = bool (*)(const Plan& plan, size_t index, const Buffer& output);

// All under way together, by the member with this index; the CPU's results, bit for
// bit, or as told.
inline void RunAll(GpuRank* self, int index, const std::vector<Plan>& plans,
                   const Check is_right = HasResult) {
  std::vector<size_t> numbers;
  for (size_t i = 0; i < plans.size(); ++i) {
    numbers.push_back(self->Submit(plans[i].asks[index], {i % 2 == 0, i % 3 == 0}));
  }
  for (size_t i = 0; i < plans.size(); ++i) {
    ASSERT_EQ(self->End(numbers[i]).message, "");
    if (i % 3 == 0) self->Await(numbers[i]);
  }
  for (size_t i = 0; i < plans.size(); ++i) {
    EXPECT_TRUE(is_right(plans[i], index, self->Output(numbers[i])))
        << Details(plans[i].asks[index].description);
  }
}

}  // namespace keras_hvd
