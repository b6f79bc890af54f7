// Faults happen where they were asked for in a build with them, and nowhere else.
#include "tf_ops/transport/faults.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <chrono>
#include <new>

#include "tf_ops/testing/child.h"
#include "tf_ops/transport/doorbell.h"
#include "tf_ops/transport/liveness.h"

namespace keras_hvd {
namespace {

// A child that says before which of four stores it is.
int Count(const Child::Link& parent) {
  for (int store = 1; store <= 4; ++store) {
    parent.Tell(std::to_string(store));
    FaultPoint();
  }
  return 0;
}

// Reads lines until there are no more; gives the last.
std::string LastLine(const Child& child) {
  std::string last, line;
  while ((line = child.Line()) != "") last = line;
  return last;
}

TEST(FaultsTest, AKillComesBeforeItsStore) {
  Child child([](const Child::Link& parent) {
    setenv("KERAS_HVD_FAULT_KILL_AT", "3", 1);
    return Count(parent);
  });
  EXPECT_EQ(LastLine(child), kHasFaults ? "3" : "4");
  const int status = child.Reap();
  EXPECT_EQ(WIFSIGNALED(status) ? WTERMSIG(status) : 0, kHasFaults ? SIGKILL : 0);
}

TEST(FaultsTest, PointsAreCountedAnew) {
  Child child([](const Child::Link& parent) {
    FaultPoint();
    setenv("KERAS_HVD_FAULT_KILL_AT", "2", 1);
    CountFaultPointsAnew();
    return Count(parent);
  });
  EXPECT_EQ(LastLine(child), kHasFaults ? "2" : "4");
  child.Reap();
}

TEST(FaultsTest, AStopComesBeforeItsStoreAndGoesOn) {
  Child child([](const Child::Link& parent) {
    setenv("KERAS_HVD_FAULT_STOP_AT", "2", 1);
    return Count(parent);
  });
  EXPECT_EQ(child.Line(), "1");
  EXPECT_EQ(child.Line(), "2");
  if (kHasFaults) {
    int status = 0;
    ASSERT_EQ(waitpid(child.pid(), &status, WUNTRACED), child.pid());
    ASSERT_TRUE(WIFSTOPPED(status));
    child.Kill(SIGCONT);
  }
  EXPECT_EQ(LastLine(child), "4");
  EXPECT_EQ(child.Reap(), 0);
}

TEST(FaultsTest, DelaysAreThereWithFaultsOnly) {
  Child child([](const Child::Link&) {
    setenv("KERAS_HVD_FAULT_DELAY_MICROSECONDS", "20000", 1);
    const auto start = std::chrono::steady_clock::now();
    int stores = 0;
    for (; stores < 1000; ++stores) {
      FaultPoint();
      if (std::chrono::steady_clock::now() - start > std::chrono::seconds(1)) break;
    }
    return stores < 1000;
  });
  EXPECT_EQ(WEXITSTATUS(child.Reap()), kHasFaults);
}

// A rank that a dying one was about to wake is woken by the rank that sees its death.
TEST(FaultsTest, WhoWasNotWokenByADyingRankIsWokenByItsFailure) {
  if (!kHasFaults) GTEST_SKIP() << "needs --config=faults";
  void* shared =
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  Doorbell* bell = new (shared) Doorbell{};
  Child sleeper([&](const Child::Link& parent) {
    bell->Announce(Doorbell::kNews);
    parent.Tell("announced");
    return bell->Sleep(Clock::time_point::max(), Doorbell::kNews) ? 0 : 1;
  });
  // Its first store takes the announcement down, its second would be the wake.
  Child ringer([&](const Child::Link& parent) {
    setenv("KERAS_HVD_FAULT_KILL_AT", "2", 1);
    parent.Await();
    bell->Ring(Doorbell::kNews);
    return 0;
  });
  EXPECT_EQ(sleeper.Line(), "announced");
  // Asleep: in the kernel, which compares the announcement.
  while (ProcessState(sleeper.pid()) != 'S') sched_yield();
  ringer.Go();
  EXPECT_TRUE(WIFSIGNALED(ringer.Reap()));
  bell->Wake();
  EXPECT_EQ(sleeper.Reap(), 0);
  munmap(shared, 4096);
}

}  // namespace
}  // namespace keras_hvd
