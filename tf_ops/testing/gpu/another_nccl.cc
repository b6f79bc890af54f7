// An NCCL of another version, of which nothing else works: a caller of its functions in
// place of the stand-in's fails.
#include <string_view>

#include "tf_ops/testing/gpu/stand_in.h"

namespace keras_hvd::nccl {
namespace {

template <typename Answer>
Answer AnswerOf(std::string_view, int*) {
  return {};
}

template <>
Result AnswerOf(std::string_view symbol, int* version) {
  if (symbol != "ncclGetVersion") return Result::kInvalidArgument;
  *version = stand_in::kAnotherNcclVersion;
  return Result::kSuccess;
}

}  // namespace

// Of the parameters only ncclGetVersion's is read.
#define KERAS_HVD_DEFINE(member, symbol, result, parameters)  \
  extern "C" result another_##member(int* first) asm(symbol); \
  extern "C" result another_##member(int* first) {            \
    return AnswerOf<result>(symbol, first);                   \
  }
KERAS_HVD_NCCL_FUNCTIONS(KERAS_HVD_DEFINE)
#undef KERAS_HVD_DEFINE

}  // namespace keras_hvd::nccl
