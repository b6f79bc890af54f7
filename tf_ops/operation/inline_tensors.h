// Small tensors travel within the messages of the coordination: what a rank gives with
// its submission, the result with the decision. So the ranks meet once, where they
// would meet again to exchange what has been decided.
#ifndef KERAS_HVD_TF_OPS_OPERATION_INLINE_TENSORS_H_
#define KERAS_HVD_TF_OPS_OPERATION_INLINE_TENSORS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tf_ops/operation/description.h"
#include "tf_ops/operation/operation.h"

namespace keras_hvd {

// Up to here copying them into and out of messages costs less than to meet again.
inline constexpr int64_t kMostInlineBytes = 1 << 10;

// Whether the tensors of a request of so many ranks travel so.
bool TravelsInline(const Description& description, size_t members);
// Whether so many bytes may be what a rank gives with a submission.
bool FitsInline(const Description& description, size_t bytes);

// Adds what a rank gives to a message: its tensors, each from a multiple of 8 bytes.
void AppendInputs(const Operation& operation, std::string* message);
// Adds the result, laid out alike, of what the members gave, in the order of their
// ranks; "" stands for zeros. What the message has already is of multiples of 8 bytes.
void AppendResults(const Description& description,
                   const std::vector<std::string>& inputs, std::string* message);
// Takes the result from the front of `from` to where the operation wants it; false if
// there is less.
bool UnpackResults(std::string_view* from, const Operation& operation);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_OPERATION_INLINE_TENSORS_H_
