// NCCL beside another one that the whole process sees, as PyTorch's may be.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <memory>

#include "tf_ops/nccl/library.h"
#include "tf_ops/testing/gpu/stand_in.h"

namespace keras_hvd::nccl {
namespace {

bool IsMallocReplaced() {
  void* const libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
  return dlsym(libc, "malloc") != dlsym(RTLD_DEFAULT, "malloc");
}

// In one process, as libraries are not closed: each opens another one.
class TwoLibrariesTest : public testing::Test {
 protected:
  TwoLibrariesTest()
      : another_(dlopen(stand_in::kAnotherNcclLibrary, RTLD_NOW | RTLD_GLOBAL)) {
    EXPECT_NE(another_, nullptr) << dlerror();
  }

  void* const another_;
  std::shared_ptr<const Library> library_;
};

TEST_F(TwoLibrariesTest, TheOneThatIsThereIsOpenedToo) {
  ASSERT_EQ(Library::Open(stand_in::kAnotherNcclLibrary, &library_).message, "");
  EXPECT_EQ(library_->version(), stand_in::kAnotherNcclVersion);
}

TEST_F(TwoLibrariesTest, EachCallsItsOwnFunctions) {
  ASSERT_EQ(Library::Open(stand_in::kNcclLibrary, &library_).message, "");
  EXPECT_EQ(library_->version(), stand_in::kNcclVersion);
  // As under a sanitizer: then it must have the process's malloc, and all else with it.
  if (IsMallocReplaced()) return;
  UniqueId id = {};
  EXPECT_EQ((*library_)->unique_id(&id), Result::kSuccess);
}

}  // namespace
}  // namespace keras_hvd::nccl
