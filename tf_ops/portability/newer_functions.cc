// What the compiler's headers and our code take from the C and C++ libraries though
// older systems lack it: here it comes with our libraries, and is theirs alone.
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include <new>
#include <sstream>

#define KHVD_HIDDEN __attribute__((visibility("hidden")))

namespace {

template <typename Function>
Function* TheSystems(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

constexpr long kNanoseconds = 1'000'000'000;

timespec Now(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return now;
}

}  // namespace

extern "C" {

// glibc 2.32. Whether counters of shared pointers may do without atomic instructions.
KHVD_HIDDEN char __libc_single_threaded = 0;

// glibc 2.32. Of a signal without a name there is its number.
KHVD_HIDDEN const char* sigabbrev_np(int signal) {
  static auto* const system = TheSystems<const char*(int)>("sigabbrev_np");
  return system == nullptr ? nullptr : system(signal);
}

// glibc 2.30. Before, no wait is by a clock that nobody sets: a wait is over early or
// late where somebody does.
KHVD_HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition,
                                       pthread_mutex_t* mutex, clockid_t clock,
                                       const timespec* end) {
  using Wait = int(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static auto* const system = TheSystems<Wait>("pthread_cond_clockwait");
  if (system != nullptr) return system(condition, mutex, clock, end);
  const timespec from = Now(clock);
  timespec until = Now(CLOCK_REALTIME);
  until.tv_sec += end->tv_sec - from.tv_sec;
  until.tv_nsec += end->tv_nsec - from.tv_nsec;
  if (until.tv_nsec < 0) {
    until.tv_sec -= 1;
    until.tv_nsec += kNanoseconds;
  } else if (until.tv_nsec >= kNanoseconds) {
    until.tv_sec += 1;
    until.tv_nsec -= kNanoseconds;
  }
  return pthread_cond_timedwait(condition, mutex, &until);
}

// GCC 11's: std::__throw_bad_array_new_length().
KHVD_HIDDEN void _ZSt28__throw_bad_array_new_lengthv() {
  throw std::bad_array_new_length();
}

// GCC 9's: constructors of string streams without an argument.
KHVD_HIDDEN void _ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev(
    void* self) {
  new (self) std::stringstream(std::ios_base::in | std::ios_base::out);
}

}  // extern "C"
