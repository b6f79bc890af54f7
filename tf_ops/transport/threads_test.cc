// Threads that the system has no room for, and the errors then.
#include "tf_ops/transport/threads.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

namespace keras_hvd {
namespace {

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void Write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path) << text;
}

TEST(StartThreadTest, RunsTheBodyUnderTheName) {
  std::promise<void> ran, may_end;
  std::thread thread = StartThread("keras_hvd test", [&] {
    ran.set_value();
    may_end.get_future().wait();
  });
  ran.get_future().wait();
  char name[16];
  pthread_getname_np(thread.native_handle(), name, sizeof(name));
  EXPECT_STREQ(name, "keras_hvd test");
  may_end.set_value();
  thread.join();
}

class WhyNoThreadTest : public testing::Test {
 protected:
  std::string Why() const { return WhyNoThread(folder_ / "groups", folder_); }

  const std::filesystem::path folder_ =
      std::filesystem::path(testing::TempDir()) /
      testing::UnitTest::GetInstance()->current_test_info()->name();
};

TEST_F(WhyNoThreadTest, NamesTheFullGroupOfVersion1) {
  Write(folder_ / "groups", "9:name=systemd:/\n8:pids:/job/rank\n0::/\n");
  Write(folder_ / "pids/job/rank/pids.max", "max\n");
  Write(folder_ / "pids/job/rank/pids.current", "10\n");
  Write(folder_ / "pids/job/pids.max", "12\n");
  Write(folder_ / "pids/job/pids.current", "12\n");
  const std::string why = Why();
  EXPECT_TRUE(Contains(why, "the control group " + (folder_ / "pids/job").string() +
                                " has 12 processes and threads, and may have 12"))
      << why;
}

TEST_F(WhyNoThreadTest, NamesTheFullGroupOfVersion2AndNotOneWithRoom) {
  Write(folder_ / "groups", "0::/slice/job\n");
  Write(folder_ / "slice/pids.max", "100\n");
  Write(folder_ / "slice/pids.current", "99\n");
  Write(folder_ / "slice/job/pids.max", "7\n");
  Write(folder_ / "slice/job/pids.current", "8\n");
  const std::string why = Why();
  EXPECT_TRUE(Contains(why, (folder_ / "slice/job").string() + " has 8")) << why;
}

TEST_F(WhyNoThreadTest, WithoutSuchAGroupNamesTheOtherLimits) {
  Write(folder_ / "groups", "0::/\n");
  const std::string why = Why();
  EXPECT_TRUE(Contains(why, "ulimit -")) << why;
}

TEST(StatusOfTest, SaysWhichKindItIs) {
  const std::system_error again(
      std::make_error_code(std::errc::resource_unavailable_try_again));
  EXPECT_TRUE(Contains(StatusOf(again).message, "no room for another thread"));
  EXPECT_EQ(StatusOf(std::bad_alloc()).message, "out of memory");
  EXPECT_EQ(StatusOf(std::runtime_error("something else")).message, "something else");
  EXPECT_EQ(StatusOf(again).code, Code::kInternal);
}

}  // namespace
}  // namespace keras_hvd
