// The limits of control groups on a job's cores.
#include "tf_ops/transport/cores.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cmath>
#include <filesystem>
#include <fstream>

namespace keras_hvd {
namespace {

// A tree of control groups as Linux shows it.
class CoresTest : public testing::Test {
 protected:
  CoresTest() {
    std::string pattern = testing::TempDir() + "/cores.XXXXXX";
    root_ = mkdtemp(pattern.data());
  }
  ~CoresTest() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  double Quota(const std::string& groups) {
    Write("/groups", groups);
    return QuotaCores(root_ + "/groups", root_ + "/mount");
  }

 private:
  std::string root_;
};

TEST_F(CoresTest, WithoutLimitsAreAllThatThereAre) {
  EXPECT_TRUE(std::isinf(Quota("0::/\n")));
  Write("/mount/job/cpu.max", "max 100000\n");
  EXPECT_TRUE(std::isinf(Quota("0::/job\n")));
}

TEST_F(CoresTest, AreWhatTheOwnGroupAllows) {
  Write("/mount/user/job/cpu.max", "150000 100000\n");
  EXPECT_EQ(Quota("0::/user/job\n"), 1.5);
}

TEST_F(CoresTest, AreNoMoreThanAGroupAboveAllows) {
  Write("/mount/user/cpu.max", "200000 100000\n");
  Write("/mount/user/job/cpu.max", "800000 100000\n");
  EXPECT_EQ(Quota("0::/user/job\n"), 2);
}

TEST_F(CoresTest, AreWhatTheRootAllowsWhereTheGroupIsHidden) {
  Write("/mount/cpu.max", "300000 100000\n");
  EXPECT_EQ(Quota("0::/hidden/job\n"), 3);
}

TEST_F(CoresTest, ComeFromVersionOneOfControlGroups) {
  Write("/mount/cpu,cpuacct/job/cpu.cfs_quota_us", "50000\n");
  Write("/mount/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  Write("/mount/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  Write("/mount/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(Quota("4:memory:/job\n3:cpu,cpuacct:/job\n0::/\n"), 0.5);
}

}  // namespace
}  // namespace keras_hvd
