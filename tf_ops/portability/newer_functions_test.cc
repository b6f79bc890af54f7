// The stand-ins for newer functions, as on a system that has none of them: their dlsym
// finds nothing here.
#include <gtest/gtest.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

#include <cerrno>
#include <csignal>
#include <sstream>
#include <thread>

// The function that the linker's --wrap gives to callers of dlsym.
extern "C" void* __wrap_dlsym(void*, const char*) { return nullptr; }

extern "C" void DefaultStream(void* self) __asm__(
    "_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
extern "C" void ThrowBadLength() __asm__("_ZSt28__throw_bad_array_new_lengthv");

namespace {

constexpr long kNanoseconds = 1'000'000'000;

timespec Now(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return now;
}

timespec After(timespec time, long nanoseconds) {
  const long sum = time.tv_nsec + nanoseconds;
  time.tv_sec += sum / kNanoseconds;
  time.tv_nsec = sum % kNanoseconds;
  return time;
}

bool IsBefore(const timespec& a, const timespec& b) {
  return a.tv_sec != b.tv_sec ? a.tv_sec < b.tv_sec : a.tv_nsec < b.tv_nsec;
}

struct Condition {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
};

TEST(ClockWaitTest, EndsWithTheTimeOfAnyClock) {
  Condition waited;
  pthread_mutex_lock(&waited.mutex);
  for (const clockid_t clock : {CLOCK_MONOTONIC, CLOCK_REALTIME}) {
    // Some of these lie in another second than their beginning does, on either clock.
    for (int i = 0; i < 40; ++i) {
      const timespec end = After(Now(clock), 1 + 30'000'000 * (i % 3) / 2);
      ASSERT_EQ(pthread_cond_clockwait(&waited.condition, &waited.mutex, clock, &end),
                ETIMEDOUT);
      // The two clocks are read one after the other.
      EXPECT_FALSE(IsBefore(After(Now(clock), 1'000'000), end));
    }
  }
  pthread_mutex_unlock(&waited.mutex);
}

TEST(ClockWaitTest, AnEndInThePastIsNoWait) {
  Condition waited;
  pthread_mutex_lock(&waited.mutex);
  const timespec past = {0, kNanoseconds - 1};
  EXPECT_EQ(
      pthread_cond_clockwait(&waited.condition, &waited.mutex, CLOCK_MONOTONIC, &past),
      ETIMEDOUT);
  pthread_mutex_unlock(&waited.mutex);
}

TEST(ClockWaitTest, EndsWithASignal) {
  Condition waited;
  bool is_ready = false;
  pthread_mutex_lock(&waited.mutex);
  std::thread other([&] {
    pthread_mutex_lock(&waited.mutex);
    is_ready = true;
    pthread_cond_signal(&waited.condition);
    pthread_mutex_unlock(&waited.mutex);
  });
  timespec end = Now(CLOCK_MONOTONIC);
  end.tv_sec += 60;
  int result = 0;
  while (!is_ready && result == 0) {
    result =
        pthread_cond_clockwait(&waited.condition, &waited.mutex, CLOCK_MONOTONIC, &end);
  }
  pthread_mutex_unlock(&waited.mutex);
  other.join();
  EXPECT_EQ(result, 0);
}

TEST(SignalNameTest, IsUnknown) { EXPECT_EQ(sigabbrev_np(SIGTERM), nullptr); }

TEST(StringStreamTest, ReadsAndWrites) {
  alignas(std::stringstream) char memory[sizeof(std::stringstream)];
  DefaultStream(memory);
  auto& stream = *reinterpret_cast<std::stringstream*>(memory);
  int number = 0;
  stream << 42 << " rest";
  stream >> number;
  EXPECT_EQ(number, 42);
  EXPECT_EQ(stream.str(), "42 rest");
  stream.~basic_stringstream();
}

TEST(BadLengthTest, IsThrown) {
  EXPECT_THROW(ThrowBadLength(), std::bad_array_new_length);
}

}  // namespace
