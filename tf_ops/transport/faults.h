// Faults on purpose, for tests of what holds however the ranks get in each other's way:
// right before a store that other ranks act on, a rank is late, is killed or stops.
//
// Only `bazel build --config=faults` compiles them in; anywhere else BeforeStore is
// nothing. What happens is read once from the environment of the process:
//
// * KERAS_HVD_FAULT_DELAY_MICROSECONDS: the longest delay; most are far shorter.
// * KERAS_HVD_FAULT_SEED: of the delays.
// * KERAS_HVD_FAULT_KILL_AT: the store, counted from 1, before which SIGKILL comes.
// * KERAS_HVD_FAULT_STOP_AT: the same for SIGSTOP; somebody else sends SIGCONT.
#ifndef KERAS_HVD_TF_OPS_TRANSPORT_FAULTS_H_
#define KERAS_HVD_TF_OPS_TRANSPORT_FAULTS_H_

namespace keras_hvd {

#ifdef KERAS_HVD_FAULTS
inline constexpr bool kHasFaults = true;
void BeforeStore();
#else
inline constexpr bool kHasFaults = false;
inline void BeforeStore() {}
#endif

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TRANSPORT_FAULTS_H_
