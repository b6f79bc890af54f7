// Checks requests of the C API and makes them operations of the engine.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tf_ops/engine/c_api.h"
#include "tf_ops/operation/known_descriptions.h"
#include "tf_ops/operation/operation.h"
#include "tf_ops/transport/status.h"

namespace keras_hvd {

// This rank among the ranks that take part. `members` is 0 if it takes no part. The
// engine then refuses the request in its own words.
struct Membership {
  int index = 0;
  int members = 0;
};
// `ranks`: those that take part, in ascending order.
Membership MembershipIn(const std::vector<int>& ranks, int rank);

// How many of `rows` rows a reducescatter gives this rank.
int64_t ScatteredRows(const Membership& membership, int64_t rows);

// The error of a request that is wrong in itself, whatever the peers ask.
Status WrongRequest(const khvd_request& request, const std::string& text);

// Whether MakeOperation needs the membership for this request.
bool DependsOnMembers(const khvd_request& request);

// Checks a request in a job of `size` ranks and makes an operation of it, without
// `done` and its stream point.
Status MakeOperation(const khvd_request& request, int size,
                     const Membership& membership, KnownDescriptions* known,
                     std::unique_ptr<Operation>* made);

}  // namespace keras_hvd
