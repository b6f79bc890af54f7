// NCCL as it is opened, and the errors where it cannot be used.
#include "tf_ops/nccl/library.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include "tf_ops/testing/gpu/stand_in.h"

namespace keras_hvd::nccl {
namespace {

class LibraryTest : public testing::Test {
 protected:
  LibraryTest() { control_->Reset(1); }
  ~LibraryTest() override {
    EXPECT_EQ(control_->Violations(), std::vector<std::string>());
  }

  Status Open(const std::string& path = stand_in::kNcclLibrary) {
    return Library::Open(path, &library_);
  }

  const stand_in::StandIn control_;
  std::shared_ptr<const Library> library_;
};

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(LibraryTest, SaysWhatItIs) {
  ASSERT_EQ(Open().message, "");
  EXPECT_EQ(library_->version(), stand_in::kNcclVersion);
  EXPECT_EQ(library_->text().rfind("NCCL 2.23.4 (", 0), 0u) << library_->text();
  EXPECT_TRUE(Contains(library_->text(), "libnccl.so.2)"));
}

TEST_F(LibraryTest, IsNotThere) {
  EXPECT_EQ(Open("/nowhere/libnccl.so.2").message,
            "there is no NCCL in /nowhere/libnccl.so.2");
  EXPECT_EQ(library_, nullptr);
}

TEST_F(LibraryTest, IsTooOld) {
  control_->SetNcclVersion(21806);
  Status status = Open();
  EXPECT_EQ(status.message.rfind("NCCL 2.18.6 (", 0), 0u) << status.message;
  EXPECT_TRUE(Contains(status.message,
                       "libnccl.so.2) is too old: keras_hvd needs 2.19.0 or later"))
      << status.message;
  // Its version was written with fewer digits then.
  control_->SetNcclVersion(2708);
  status = Open();
  EXPECT_EQ(status.message.rfind("NCCL 2.7.8 (", 0), 0u) << status.message;
  EXPECT_EQ(library_, nullptr);
  control_->SetNcclVersion(21900);
  EXPECT_EQ(Open().message, "");
}

TEST_F(LibraryTest, LacksAFunction) {
  const Status status = Open(stand_in::kIncompleteNcclLibrary);
  EXPECT_EQ(status.message.rfind("there is no function ncclCommSplit in ", 0), 0u)
      << status.message;
  EXPECT_TRUE(Contains(status.message, "libnccl_incomplete.so.2"));
  EXPECT_EQ(library_, nullptr);
}

TEST_F(LibraryTest, DoesNotSayItsVersion) {
  control_->Inject({"ncclGetVersion", 3});
  const Status status = Open();
  EXPECT_EQ(status.message.rfind("ncclGetVersion of ", 0), 0u) << status.message;
  EXPECT_TRUE(Contains(status.message, " failed: error 3"));
}

TEST_F(LibraryTest, ErrorsAreInItsWords) {
  ASSERT_EQ(Open().message, "");
  EXPECT_EQ(library_->Check(Result::kSystemError, "ncclAllReduce", nullptr).message,
            "NCCL failed in ncclAllReduce: unhandled system error. With "
            "NCCL_DEBUG=WARN in the environment it says more");
  EXPECT_TRUE(library_->Check(Result::kSuccess, "ncclAllReduce", nullptr).ok());
  EXPECT_TRUE(library_->Check(Result::kInProgress, "ncclAllReduce", nullptr).ok());
}

// Everything that can be tried without a GPU.
TEST(RealLibraryTest, IsOpenedAndMakesAnId) {
  const char* path = getenv("KERAS_HVD_NCCL_LIBRARY");
  if (path == nullptr) {
    GTEST_SKIP() << "no NCCL is named in KERAS_HVD_NCCL_LIBRARY (bazel test "
                    "--test_env=KERAS_HVD_NCCL_LIBRARY=...)";
  }
  std::shared_ptr<const Library> library;
  ASSERT_EQ(Library::Open(path, &library).message, "");
  EXPECT_GE(library->version(), kOldestVersion);
  UniqueId id = {};
  EXPECT_EQ(
      library->Check((*library)->unique_id(&id), "ncclGetUniqueId", nullptr).message,
      "");
  printf("opened %s\n", library->text().c_str());
}

}  // namespace
}  // namespace keras_hvd::nccl
