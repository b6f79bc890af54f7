// Log lines for people, on standard error.
#pragma once

#include <string>

namespace keras_hvd {

// The level of a line. The values equal khvd_log_level in c_api.h.
enum class LogLevel {
  kTrace = 1,    // each tensor
  kDebug = 2,    // each batch
  kInfo = 3,     // entering and leaving a job
  kWarning = 4,  // the job goes on, but something is wrong
  kError = 5,    // the job ends
  kFatal = 6,    // the process ends
};

// From now on, lines below `least` are not written, and lines start with the time if
// `timestamps`. The defaults are warnings and no time.
void SetLog(LogLevel least, bool timestamps);

// Whether a line of this level would be written; check before composing costly ones.
bool LogEnabled(LogLevel level);

// `rank` is negative in a process that is no rank.
void Log(int rank, LogLevel level, const std::string& text);

}  // namespace keras_hvd
