// The state of a job whose ranks share a segment.
#ifndef KERAS_HVD_TF_OPS_TRANSPORT_SHARED_JOB_STATE_H_
#define KERAS_HVD_TF_OPS_TRANSPORT_SHARED_JOB_STATE_H_

#include <memory>
#include <string>

#include "tf_ops/transport/job_state.h"
#include "tf_ops/transport/segment.h"

namespace keras_hvd {

class SharedJobState final : public JobState {
 public:
  SharedJobState(std::shared_ptr<Segment> segment, int rank);

  bool Failed() const override;
  Status Failure() const override;
  bool Fail(Code code, const std::string& text, int dead = -1) override;

  bool ClaimFailureReport() override;
  bool ClaimGpuWarning() override;
  bool ClaimStallReport(uint64_t batch) override;

  std::string Describe(int rank) const override;
  std::string Obstacle(int rank) const override;
  bool HasShutDown(int rank) const override;
  void ShutDown() override;
  bool has_departed() const override;
  uint64_t CarriedOut(int rank) const override;
  void NoteCarriedOut() override;
  OperationHistory& History(int rank) override;

  Doorbell& bell() override { return self_.bell; }
  void RingCoordinator(uint32_t about = Doorbell::kEverything) override;
  void RingAll() override;

  bool compares_outputs() const override;
  void set_compares_outputs(bool compares) override;
  bool WantsTimes() const override;
  void set_timeline_on(bool on) override;
  void set_timeline_paused(bool paused) override;

  // Wakes everybody for a failure, which nobody may sleep through.
  void WakeAll();

 private:
  const std::shared_ptr<Segment> segment_;
  SegmentHeader& header_;
  RankBlock& self_;
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TRANSPORT_SHARED_JOB_STATE_H_
