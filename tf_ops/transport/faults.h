// Deliberate faults, for tests of invariants that must hold however the ranks
// interleave: a rank is delayed, killed or stopped right before a store that other
// ranks act on, before it sends bytes to another host, and after it has got some.
//
// Only `bazel build --config=faults` compiles them in; otherwise FaultPoint does
// nothing. The process reads its settings from the environment at its first point, and
// again as it enters a job, from where points are counted anew:
//
// * KERAS_HVD_FAULT_DELAY_MICROSECONDS: the longest delay; most are far shorter.
// * KERAS_HVD_FAULT_SEED: the seed of the delays.
// * KERAS_HVD_FAULT_KILL_AT: the point, counted from 1, at which SIGKILL comes.
// * KERAS_HVD_FAULT_STOP_AT: the same for SIGSTOP; somebody else sends SIGCONT.
#pragma once

namespace keras_hvd {

#ifdef KERAS_HVD_FAULTS
inline constexpr bool kHasFaults = true;
void FaultPoint();
// While no other thread is at a point.
void CountFaultPointsAnew();
#else
inline constexpr bool kHasFaults = false;
inline void FaultPoint() {}
inline void CountFaultPointsAnew() {}
#endif

}  // namespace keras_hvd
