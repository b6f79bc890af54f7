// Functions that the compiler's headers and our code use but older systems' C and C++
// libraries lack. Our libraries bring hidden copies of their own.
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

// glibc 2.32. Whether shared pointers may count without atomic instructions.
KHVD_HIDDEN char __libc_single_threaded = 0;

// glibc 2.32. Null if unknown: callers then use the number of the signal.
KHVD_HIDDEN const char* sigabbrev_np(int signal) {
  static auto* const system = TheSystems<const char*(int)>("sigabbrev_np");
  return system == nullptr ? nullptr : system(signal);
}

// glibc 2.30. Older versions cannot wait by the monotonic clock: if somebody sets the
// clock, a wait ends early or late.
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

// GCC 11's std::__throw_bad_array_new_length().
KHVD_HIDDEN void _ZSt28__throw_bad_array_new_lengthv() {
  throw std::bad_array_new_length();
}

// GCC 9's default constructors of string streams.
KHVD_HIDDEN void _ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev(
    void* self) {
  new (self) std::stringstream(std::ios_base::in | std::ios_base::out);
}

}  // extern "C"
