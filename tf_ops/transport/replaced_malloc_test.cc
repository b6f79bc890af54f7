// A library beside others with the same functions, in a program whose malloc is not the
// C library's.
#include <gtest/gtest.h>

#include "tf_ops/transport/dynamic_library.h"

// Sanitizers have replaced them already.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern "C" {
void* __libc_malloc(size_t bytes);
void* malloc(size_t bytes) { return __libc_malloc(bytes); }
}
#endif

namespace keras_hvd {
namespace {

TEST(ReplacedMallocTest, ALibraryIsOpenedBesideOthersOnlyWhereItIsOpenAlready) {
  DynamicLibrary library;
  const Status status =
      DynamicLibrary::OpenBesideOthers("libutil.so.1", "missing", "dlopen", &library);
  EXPECT_EQ(status.message.rfind("libutil.so.1 cannot be opened beside ", 0), 0u)
      << status.message;
  EXPECT_EQ(
      DynamicLibrary::OpenBesideOthers("libutil.so.1", "missing", "nowhere", &library)
          .message,
      "");
  EXPECT_EQ(
      DynamicLibrary::OpenBesideOthers("libutil.so.1", "missing", "dlopen", &library)
          .message,
      "");
}

}  // namespace
}  // namespace keras_hvd
