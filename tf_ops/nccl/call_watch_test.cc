// The watch of calls: when it takes part, and how it ends them.
#include "tf_ops/nccl/call_watch.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>

namespace keras_hvd::nccl {
namespace {

constexpr std::chrono::microseconds kShort(100);
// Longer than a thread that was woken waits for a core.
constexpr std::chrono::milliseconds kAbortPatience(500);

const SayStuck kNotStuck = [] { ADD_FAILURE() << "nothing is stuck"; };

// A call that returns once it may, or has been aborted.
class Blocking {
 public:
  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return ends_; });
  }
  void End() {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ends_ = false;
};

TEST(CallWatchTest, ACallThatReturnsIsLeftAlone) {
  CallWatch watch(
      [](int64_t) {
        ADD_FAILURE() << "nobody waits";
        return true;
      },
      [](const AbortCall&) { ADD_FAILURE() << "nobody gives up"; }, kNotStuck);
  int made = 0;
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(watch.Run([] { ADD_FAILURE() << "is aborted"; }, [&] { ++made; }));
  }
  EXPECT_EQ(made, 1000);
}

TEST(CallWatchTest, ActsForACallThatTakesLong) {
  const std::thread::id caller = std::this_thread::get_id();
  Blocking blocking;
  int64_t polls = 0;  // of the caller's state: without a lock of its own
  CallWatch watch(
      [&](int64_t poll) {
        EXPECT_NE(std::this_thread::get_id(), caller);
        EXPECT_EQ(poll, polls);
        if (++polls == 5) blocking.End();
        return true;
      },
      [](const AbortCall&) { ADD_FAILURE() << "nobody gives up"; }, kNotStuck, kShort);
  EXPECT_TRUE(watch.Run([] {}, [&] { blocking.Run(); }));
  EXPECT_GE(polls, 5);
}

TEST(CallWatchTest, GivesUpWhatHasNobodyToWaitFor) {
  int given_up = 0;
  CallWatch watch([](int64_t poll) { return poll < 3; },
                  [&](const AbortCall& abort) {
                    ++given_up;
                    abort();
                  },
                  kNotStuck, kShort);
  for (int i = 1; i <= 3; ++i) {
    Blocking blocking;
    EXPECT_FALSE(watch.Run([&] { blocking.End(); }, [&] { blocking.Run(); }));
    EXPECT_EQ(given_up, i);
    // It holds for that call only.
    EXPECT_TRUE(watch.Run([] {}, [] {}));
  }
}

// An abort that shows late is not repeated.
TEST(CallWatchTest, AbortsOnce) {
  Blocking blocking;
  std::atomic<int> aborts{0};
  CallWatch watch([](int64_t) { return false; },
                  [](const AbortCall& abort) { abort(); }, kNotStuck, kShort);
  std::thread later([&] {
    while (aborts.load() == 0) std::this_thread::yield();
    const auto end = std::chrono::steady_clock::now() + 20 * kShort;
    while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
    blocking.End();
  });
  EXPECT_FALSE(watch.Run([&] { ++aborts; }, [&] { blocking.Run(); }));
  later.join();
  EXPECT_EQ(aborts.load(), 1);
}

// An abort may not help. Its caller waits on, and somebody must be told.
TEST(CallWatchTest, SaysOnceThatACallDoesNotEndByItsAbort) {
  for (int i = 0; i < 3; ++i) {
    Blocking blocking;
    int said = 0;
    const auto aborted = std::make_shared<std::chrono::steady_clock::time_point>();
    CallWatch watch(
        [](int64_t) { return false; }, [](const AbortCall& abort) { abort(); },
        [&] {
          EXPECT_GE(std::chrono::steady_clock::now() - *aborted, kAbortPatience);
          ++said;
          // Not at once: it would be said again.
          std::thread([&] {
            std::this_thread::sleep_for(2 * kAbortPatience);
            blocking.End();
          }).detach();
        },
        kShort, kAbortPatience);
    for (int call = 0; call < 2; ++call) {
      Blocking soon;
      EXPECT_FALSE(watch.Run([&] { soon.End(); }, [&] { soon.Run(); }));
    }
    EXPECT_FALSE(watch.Run([&] { *aborted = std::chrono::steady_clock::now(); },
                           [&] { blocking.Run(); }));
    EXPECT_EQ(said, 1);
  }
}

// A call that raises is over: nobody may act for it, nor look at how to abort it.
TEST(CallWatchTest, ACallThatRaisesIsOver) {
  std::atomic<int> acted{0};
  CallWatch watch(
      [&](int64_t) {
        ++acted;
        // A call that waits for a core is not given up.
        return true;
      },
      [](const AbortCall&) { ADD_FAILURE() << "nobody gives up"; }, kNotStuck, kShort);
  for (int i = 0; i < 10; ++i) {
    const auto raise = [] { throw std::bad_alloc(); };
    EXPECT_THROW(watch.Run([] { ADD_FAILURE() << "is aborted"; }, raise),
                 std::bad_alloc);
    const int before = acted.load();
    std::this_thread::sleep_for(5 * kShort);
    EXPECT_EQ(acted.load(), before);
    EXPECT_TRUE(watch.Run([] {}, [] {}));
  }
}

// Calls as long as its patience, and pauses: the thread that comes second must not use
// the state while the first one does.
TEST(CallWatchTest, HandsTheCallersStateOverAndBack) {
  int64_t state = 0;
  int acted = 0;
  CallWatch watch(
      [&](int64_t) {
        ++acted;
        ++state;
        return acted % 7 != 0;
      },
      [&](const AbortCall& abort) {
        ++state;
        abort();
      },
      kNotStuck, kShort);
  std::mt19937 random(1);
  int calls = 0, ended = 0;
  const auto spin = [&](int most, const std::atomic<bool>& stop) {
    const auto end =
        std::chrono::steady_clock::now() + std::chrono::microseconds(random() % most);
    while (!stop.load() && std::chrono::steady_clock::now() < end) {
    }
  };
  while (acted < 2000 || calls < 2000) {
    std::atomic<bool> aborted{false};
    ++state;
    const bool returned =
        watch.Run([&] { aborted.store(true); }, [&] { spin(400, aborted); });
    ++state;
    EXPECT_EQ(returned, !aborted.load());
    ended += !returned;
    ++calls;
    const std::atomic<bool> never{false};
    if (calls % 100 == 0) spin(1000, never);
  }
  EXPECT_GT(ended, 0);
}

// Rests after a while without calls, and is woken by the next one.
TEST(CallWatchTest, WakesUpAfterAPause) {
  for (int i = 0; i < 20; ++i) {
    Blocking blocking;
    CallWatch watch([&](int64_t) { return false; },
                    [](const AbortCall& abort) { abort(); }, kNotStuck, kShort);
    EXPECT_TRUE(watch.Run([] {}, [] {}));
    const auto end = std::chrono::steady_clock::now() + 5 * kShort;
    while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
    EXPECT_FALSE(watch.Run([&] { blocking.End(); }, [&] { blocking.Run(); }));
  }
}

}  // namespace
}  // namespace keras_hvd::nccl
