// The two custom calls that a collective becomes in a program compiled by XLA.
//
// *Start* hands the request to the engine and returns. *Done* ends when the engine has
// ended the request, through a future: no thread of XLA waits for a peer. Between the
// two the engine works on XLA's buffers, so nothing is copied; done takes the buffers
// too, which keeps XLA from giving them to anything else in between.
//
//   start: token, tensors...                      -> token, results (not yet valid)...
//   done:  token, results..., what else must live -> token, results (the same memory)
//
// A token is two numbers, a value like any other to XLA, which names the request, so that
// one program can run many times at once and in loops. Zeros: no request yet.
#ifndef KERAS_HVD_TF_OPS_KERNELS_XLA_CALLS_H_
#define KERAS_HVD_TF_OPS_KERNELS_XLA_CALLS_H_

#include <cstdint>
#include <string_view>

namespace keras_hvd {

inline constexpr char kStartTarget[] = "keras_hvd_start";
inline constexpr char kDoneTarget[] = "keras_hvd_done";

// The attributes of a start: a request, as far as it is known at compile time.
struct CompiledRequest {
  int32_t kind;  // khvd_kind
  std::string_view name;
  int64_t submitter;
  int32_t process_set;
  int32_t reduce_op;  // khvd_reduce_op
  int32_t root;
  double prescale, postscale;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_KERNELS_XLA_CALLS_H_
