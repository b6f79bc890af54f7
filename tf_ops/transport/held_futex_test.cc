// The kernel's handling of a futex that a thread holds, and of the thread's list.
#include "tf_ops/transport/held_futex.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>
#include <thread>

namespace keras_hvd {
namespace {

robust_list_head* ListOfThisThread() {
  robust_list_head* head = nullptr;
  size_t size;
  EXPECT_EQ(syscall(SYS_get_robust_list, 0, &head, &size), 0);
  return head;
}

TEST(HeldFutexTest, IsThisThreadsUntilItIsGivenBack) {
  std::atomic<uint32_t> word{0};
  {
    const HeldFutex held(&word);
    EXPECT_EQ(word.load() & FUTEX_TID_MASK, static_cast<uint32_t>(gettid()));
  }
  EXPECT_EQ(word.load(), 0u);
}

TEST(HeldFutexTest, AThreadThatEndsWithItLeavesAMark) {
  std::atomic<uint32_t> word{0};
  // As where a process is killed, nothing releases it.
  alignas(HeldFutex) char memory[sizeof(HeldFutex)];
  std::thread([&] { new (memory) HeldFutex(&word); }).join();
  EXPECT_NE(word.load() & FUTEX_OWNER_DIED, 0u);
}

TEST(HeldFutexTest, TheKernelForgetsTheListThatIsGone) {
  robust_list_head* const before = ListOfThisThread();
  std::atomic<uint32_t> word{0};
  {
    const HeldFutex held(&word);
    EXPECT_NE(ListOfThisThread(), before);
  }
  EXPECT_EQ(ListOfThisThread(), before);
}

}  // namespace
}  // namespace keras_hvd
