#include "tf_ops/transport/faults.h"

#ifdef KERAS_HVD_FAULTS

#include <signal.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace keras_hvd {
namespace {

// A sleep takes at least this long.
constexpr uint64_t kShortestSleepNanoseconds = 60'000;

uint64_t Setting(const char* variable) {
  const char* text = getenv(variable);
  return text == nullptr ? 0 : strtoull(text, nullptr, 10);
}

struct Settings {
  uint64_t delay_nanoseconds = 1000 * Setting("KERAS_HVD_FAULT_DELAY_MICROSECONDS");
  uint64_t seed = Setting("KERAS_HVD_FAULT_SEED");
  uint64_t kill_at = Setting("KERAS_HVD_FAULT_KILL_AT");
  uint64_t stop_at = Setting("KERAS_HVD_FAULT_STOP_AT");
};

Settings& Current() {
  static Settings settings;
  return settings;
}

std::atomic<uint64_t> g_points{0};

// A well-mixed number for each place in each sequence (the finalizer of SplitMix64).
uint64_t Random(uint64_t seed, uint64_t place) {
  uint64_t value = (seed << 40) + place * 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// Each delay is as likely as one of half its length. Anything that could overtake the
// point, from a single load to a whole collective, therefore sometimes does.
void Delay(uint64_t longest, uint64_t random) {
  const uint64_t nanoseconds = longest >> (random % 16);
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::nanoseconds(nanoseconds);
  if (nanoseconds >= kShortestSleepNanoseconds) {
    return std::this_thread::sleep_until(end);
  }
  while (std::chrono::steady_clock::now() < end) {
  }
}

}  // namespace

void FaultPoint() {
  const Settings& settings = Current();
  const uint64_t number = g_points.fetch_add(1, std::memory_order_relaxed) + 1;
  if (number == settings.kill_at) raise(SIGKILL);
  if (number == settings.stop_at) raise(SIGSTOP);
  if (settings.delay_nanoseconds == 0) return;
  Delay(settings.delay_nanoseconds, Random(settings.seed, number));
}

void CountFaultPointsAnew() {
  Current() = Settings();
  g_points.store(0);
}

}  // namespace keras_hvd

#endif  // KERAS_HVD_FAULTS
