// The custom calls of programs compiled by XLA. A collective becomes two.
//
// *Start* hands the request to the engine and returns. *Done* ends, through a future,
// when the engine has ended the request, so no XLA thread waits for a peer. In between,
// the engine works on XLA's buffers, and nothing is copied. Done takes the buffers too,
// which keeps XLA from giving them to anything else in between.
//
//   start: token, tensors...                 -> token, results (not yet valid)...
//   done:  token, results..., tensors...     -> results (the same memory)...
//
// In an alltoall, the splits follow its tensor; the received splits follow its result.
//
// A tensor is passed as a list of its elements, or as its result's memory if it is
// reduced in place. The result has its shape.
//
// A token is a list of numbers, an ordinary value to XLA, so one program can run many
// times at once and in loops. It holds the run's number (0 before its first start),
// then those of requests. A start takes the token of the start before it, which alone
// orders the two, and puts its number into its slot, where done finds it. A done
// without results returns its token.
//
// A start may also stand for a check that the job is like the one that the program was
// compiled in. It is a request that ends at once and never reaches the engine. So its
// error waits, as that of any other request, until XLA can free the program's buffers.
//
// *Whole step* takes a step's gradients once all are there, and returns the same
// memory, and a 0 that XLA does not know. CPUs only.
//
// On a GPU a token has no numbers, and done ends differently: see xla_gpu_calls.cc.
#pragma once

#include <cstdint>
#include <string_view>

#include "tf_ops/engine/c_api.h"

namespace keras_hvd {

inline constexpr char kStartTarget[] = "keras_hvd_start";
inline constexpr char kDoneTarget[] = "keras_hvd_done";
inline constexpr char kWholeStepTarget[] = "keras_hvd_whole_step";

// The kind of a start that is a check.
inline constexpr int32_t kCheck = -1;

// The attributes of a start: a request, as far as it is known at compile time. `Rows`
// is a list of numbers.
template <typename Rows>
struct CompiledRequest {
  int32_t kind = KHVD_ALLREDUCE;  // khvd_kind
  std::string_view name;
  int64_t submitter = 0;
  int32_t process_set = 0;
  int32_t reduce_op = KHVD_AVERAGE;  // khvd_reduce_op
  int32_t root = 0;
  double prescale = 1;
  double postscale = 1;
  std::string_view labels;  // see khvd_request
  // The first dimensions of the tensors, if they differ from those of the results.
  Rows rows;
  int32_t slot = 1;  // of the request's number in the token
  // Of a check: see FixedValue.
  std::string_view quantity;
  int32_t value = 0;
  std::string_view place;
};

}  // namespace keras_hvd
