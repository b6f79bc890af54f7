// The version of the engine. All ranks of a job must run the same one.
#ifndef KERAS_HVD_TF_OPS_TRANSPORT_VERSION_H_
#define KERAS_HVD_TF_OPS_TRANSPORT_VERSION_H_

namespace keras_hvd {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TRANSPORT_VERSION_H_
