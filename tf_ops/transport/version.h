// The version of the engine. All ranks of a job must run the same one.
#pragma once

namespace keras_hvd {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace keras_hvd
