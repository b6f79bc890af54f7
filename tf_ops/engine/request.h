// Requests of the C API: checked, and made operations of the engine.
#ifndef KERAS_HVD_TF_OPS_ENGINE_REQUEST_H_
#define KERAS_HVD_TF_OPS_ENGINE_REQUEST_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tf_ops/engine/c_api.h"
#include "tf_ops/operation/operation.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

// This rank among the ranks that take part; without members where it takes no part,
// which the engine refuses in its own words.
struct Membership {
  int index = 0;
  int members = 0;
};
// `ranks`: those that take part, ascending.
Membership MembershipIn(const std::vector<int>& ranks, int rank);

// How many of so many rows a reducescatter leaves to this rank.
int64_t ScatteredRows(const Membership& membership, int64_t rows);

// The error of a request that is wrong in itself.
Status WrongRequest(const khvd_request& request, const std::string& text);

// Whether the rest needs to know which ranks take part.
bool DependsOnMembers(const khvd_request& request);

// Checks a request of a job of so many ranks, and makes an operation of it, but for
// `done` and its point on a stream.
Status MakeOperation(const khvd_request& request, int size,
                     const Membership& membership, std::unique_ptr<Operation>* made);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_REQUEST_H_
