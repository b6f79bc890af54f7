// For tests of the engine with tensors on GPUs: runs random collectives.
#ifndef KERAS_HVD_TF_OPS_ENGINE_GPU_PLAN_TESTING_H_
#define KERAS_HVD_TF_OPS_ENGINE_GPU_PLAN_TESTING_H_

#include <vector>

#include "tf_ops/engine/engine_gpu_testing.h"
#include "tf_ops/engine/random_plan_testing.h"

namespace keras_hvd {

// All under way together, by the member with this index; the CPU's results, bit for
// bit.
inline void RunAll(GpuRank* self, int index, const std::vector<Plan>& plans) {
  std::vector<size_t> numbers;
  for (size_t i = 0; i < plans.size(); ++i) {
    numbers.push_back(self->Submit(plans[i].asks[index], {i % 2 == 0, i % 3 == 0}));
  }
  for (size_t i = 0; i < plans.size(); ++i) {
    ASSERT_EQ(self->End(numbers[i]).message, "");
    if (i % 3 == 0) self->Await(numbers[i]);
  }
  for (size_t i = 0; i < plans.size(); ++i) {
    EXPECT_TRUE(HasResult(plans[i], index, self->Output(numbers[i])))
        << Details(plans[i].asks[index].description);
  }
}

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_GPU_PLAN_TESTING_H_
