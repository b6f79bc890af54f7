// A number of this process's job, as an op's value, and the check that it is still the
// one that a trace or a compiled program has taken.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tensorflow {
class OpKernelConstruction;
}  // namespace tensorflow

namespace keras_hvd {

// The number that KerasHvdJobValue returns.
struct JobValue {
  std::string quantity;
  int32_t process_set = 0;
};

absl::Status ReadJobValue(tensorflow::OpKernelConstruction* ctx, JobValue* value);
absl::StatusOr<int32_t> ValueOf(const JobValue& which);

// A number that was fixed when something was traced or compiled.
struct FixedValue {
  JobValue which;
  int32_t value = 0;
  std::string place;  // of the process, in the job of that time
};

absl::Status ReadFixedValue(tensorflow::OpKernelConstruction* ctx, FixedValue* value);

// This process' place in its job: "rank 0 of 2".
std::string PlaceInJob();

// Returns an error, with advice, if the value is another one in this job. Outside a job
// there is nobody to disagree with. `op` begins the error.
absl::Status RequireSame(std::string_view op, const FixedValue& fixed);

}  // namespace keras_hvd
