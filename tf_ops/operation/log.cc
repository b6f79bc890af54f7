#include "tf_ops/operation/log.h"

#include <sys/time.h>

#include <atomic>
#include <cstdio>
#include <ctime>

namespace keras_hvd {
namespace {

std::atomic<LogLevel> g_least{LogLevel::kWarning};
std::atomic<bool> g_timestamps{false};

const char* Name(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace: return "trace";
    case LogLevel::kDebug: return "debug";
    case LogLevel::kInfo: return "info";
    case LogLevel::kWarning: return "warning";
    case LogLevel::kError: return "error";
    case LogLevel::kFatal: break;
  }
  return "fatal";
}

// Local time with microseconds and a trailing space: "2026-11-21 19:34:36.123456 ".
std::string Timestamp() {
  timeval now;
  gettimeofday(&now, nullptr);
  tm local;
  localtime_r(&now.tv_sec, &local);
  char seconds[32];
  strftime(seconds, sizeof(seconds), "%Y-%m-%d %H:%M:%S", &local);
  char text[48];
  snprintf(text, sizeof(text), "%s.%06ld ", seconds, static_cast<long>(now.tv_usec));
  return text;
}

}  // namespace

void SetLog(LogLevel least, bool timestamps) {
  g_least.store(least, std::memory_order_relaxed);
  g_timestamps.store(timestamps, std::memory_order_relaxed);
}

bool LogEnabled(LogLevel level) {
  return level >= g_least.load(std::memory_order_relaxed);
}

void Log(int rank, LogLevel level, const std::string& text) {
  if (!LogEnabled(level)) return;
  const std::string time =
      g_timestamps.load(std::memory_order_relaxed) ? Timestamp() : "";
  const std::string who = rank < 0 ? "" : " [rank " + std::to_string(rank) + "]";
  fprintf(stderr, "%skeras_hvd%s %s: %s\n", time.c_str(), who.c_str(), Name(level),
          text.c_str());
  fflush(stderr);
}

}  // namespace keras_hvd
