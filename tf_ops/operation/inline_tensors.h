// Small tensors travel within the coordination messages: a rank's input with its
// submission, the result with the decision. The ranks then meet once, instead of again
// to exchange the data after the decision.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tf_ops/operation/description.h"
#include "tf_ops/operation/operation.h"

namespace keras_hvd {

// The most bytes of a request that travel inline, given the job's ranks and hosts.
int64_t MostInlineBytes(int ranks, int hosts);
// Whether the tensors of a request travel inline if `members` ranks take part.
bool TravelsInline(const Description& description, size_t members, int64_t most_bytes);
// Whether `bytes` bytes can be a rank's input in a submission, in any job.
bool FitsInline(const Description& description, size_t bytes);

// Appends a rank's input to a message: its tensors, each aligned to 8 bytes.
void AppendInputs(const Operation& operation, std::string* message);
// Appends the result of the members' inputs, in the same layout. The inputs are in rank
// order; "" stands for zeros. `hosts`: the numbers of the members' hosts. The message's
// size must be a multiple of 8 bytes before.
void AppendResults(const Description& description,
                   const std::vector<std::string>& inputs,
                   const std::vector<int>& hosts, std::string* message);
// Moves the result from the front of `from` to the operation's outputs. Returns false
// if `from` is too short.
bool UnpackResults(std::string_view* from, const Operation& operation);

}  // namespace keras_hvd
