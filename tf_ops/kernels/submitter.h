// Numbers that tell one op's requests from another's.
#ifndef KERAS_HVD_TF_OPS_KERNELS_SUBMITTER_H_
#define KERAS_HVD_TF_OPS_KERNELS_SUBMITTER_H_

#include <cstdint>

namespace keras_hvd {

// A number that no other op of this process has. Requests of one op may queue under one
// name, those of two may not.
uint64_t NextSubmitter();

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_KERNELS_SUBMITTER_H_
