// Shows collectives in TensorFlow's profiler: an event at the start, on the thread that
// submits it, and one at the end. In between the collective is under way, whatever else
// these threads do. Does nothing unless a profiler runs.
#pragma once

#include <string_view>

#include "absl/strings/str_cat.h"
#include "tsl/profiler/lib/traceme.h"

namespace keras_hvd {

inline void TraceStart(std::string_view name) {
  tsl::profiler::TraceMe::InstantActivity(
      [name] { return absl::StrCat("keras_hvd starts ", name); });
}

inline void TraceEnd(std::string_view name) {
  tsl::profiler::TraceMe::InstantActivity(
      [name] { return absl::StrCat("keras_hvd ended ", name); });
}

}  // namespace keras_hvd
