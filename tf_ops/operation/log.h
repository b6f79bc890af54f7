// Lines for people, on standard error: which are written, and what they look like.
#ifndef KERAS_HVD_TF_OPS_OPERATION_LOG_H_
#define KERAS_HVD_TF_OPS_OPERATION_LOG_H_

#include <string>

namespace keras_hvd {

// What a line is about. The values are those of khvd_log_level in c_api.h.
enum class LogLevel {
  kTrace = 1,    // each tensor
  kDebug = 2,    // each batch
  kInfo = 3,     // joining and leaving
  kWarning = 4,  // what goes on, but not as it should
  kError = 5,    // what ends the job
  kFatal = 6,    // what ends the process
};

// What is less than `least` is not written from now on; lines start with the time, or
// do not. Until then nothing below a warning is written, and no time.
void SetLog(LogLevel least, bool timestamps);

// Whether a line of this level would be written, for those that cost something to make.
bool LogEnabled(LogLevel level);

// `rank` is negative in a process that is none.
void Log(int rank, LogLevel level, const std::string& text);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_OPERATION_LOG_H_
