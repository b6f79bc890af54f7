// The state of a job as the ranks of one host share it, in their segment. It is all
// that there is to know if there is no other host.
#pragma once

#include <memory>
#include <string>

#include "tf_ops/transport/job_state.h"
#include "tf_ops/transport/segment.h"
#include "tf_ops/transport/topology.h"

namespace keras_hvd {

class SharedJobState : public JobState {
 public:
  // The job has no other ranks than those that share the segment.
  SharedJobState(std::shared_ptr<Segment> segment, int rank);
  SharedJobState(std::shared_ptr<Segment> segment, Topology topology);

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
  std::string HowItLeft(int rank) const override;
  void SayHowItLeaves(const std::string& how) override;
  int DepartedAbove() const override;
  bool has_departed() const override;
  uint64_t CarriedOut(int rank) const override;
  bool HasLeftBefore(int rank, uint64_t decision) const override;
  void NoteCarriedOut() override;
  OperationHistory& History(int rank) override;

  Doorbell& bell() override { return self_.bell; }
  void RingLeader(uint32_t about = Doorbell::kEverything) override;
  void RingAll() override;

  bool compares_outputs() const override;
  void set_compares_outputs(bool compares) override;
  bool WantsTimes() const override;
  void set_timeline_on(bool on) override;
  void set_timeline_paused(bool paused) override;

  // Wakes everybody for a failure, which nobody may sleep through.
  void WakeAll();
  // Whether a rank of this host has died or left.
  bool HasGone(int rank) const;
  SegmentHeader& header() const { return header_; }

 protected:
  const Topology& topology() const { return topology_; }
  // Of a rank of this host, as ProcessState has it.
  char ProcessStateOf(int rank) const;

 private:
  // Of a rank of this host.
  RankBlock& block(int rank) const {
    return segment_->block(topology_.local_index(rank));
  }

  const Topology topology_;
  const std::shared_ptr<Segment> segment_;
  SegmentHeader& header_;
  RankBlock& self_;
};

}  // namespace keras_hvd
