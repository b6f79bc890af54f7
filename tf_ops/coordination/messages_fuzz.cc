// A fuzzer's input as messages: of ranks and of a host below to the coordinator, and of
// the coordinator to a rank. Decoded messages are decided upon and encoded, which must
// give messages that can be decoded.
//
// The first byte chooses the reader. Each message has one byte for its sender, two for
// its length, and that many bytes.
#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "tf_ops/coordination/coordinator.h"
#include "tf_ops/coordination/messages.h"

namespace keras_hvd {
namespace {

// Of them, 2 and 3 are on the host below.
constexpr int kRanks = 4;
constexpr int64_t kFusionBytes = 1 << 20;

class Input {
 public:
  Input(const uint8_t* data, size_t size)
      : rest_(reinterpret_cast<const char*>(data), size) {}

  bool empty() const { return rest_.empty(); }
  uint8_t Byte() {
    const std::string_view byte = Bytes(1);
    return byte.empty() ? 0 : static_cast<uint8_t>(byte[0]);
  }
  std::string_view Message() {
    const size_t low = Byte();
    return Bytes(low + (static_cast<size_t>(Byte()) << 8));
  }

 private:
  std::string_view Bytes(size_t count) {
    const std::string_view bytes = rest_.substr(0, count);
    rest_.remove_prefix(bytes.size());
    return bytes;
  }

  std::string_view rest_;
};

class CoordinatorsHost {
 public:
  CoordinatorsHost()
      : coordinator_(kRanks, kFusionBytes),
        merger_({0, 1, 2, 3}),
        below_(RankSet({2, 3}), &pool_),
        encoder_(/*cache_capacity=*/2, {0, 0, 1, 1}),
        decoder_(kRanks) {
    for (int rank = 0; rank < kRanks; ++rank) ranks_.emplace_back(&pool_);
    coordinator_.set_wants_times(true);
    merger_.AddProcessSet(0, {0, 1, 2, 3});
  }

  void ReadFromRank(int rank, std::string_view message) {
    Submission submission;
    if (!ranks_[rank].Decode(message, &submission).ok()) return;
    MergedSubmission merged;
    merged.description = std::move(submission.description);
    merged.duplicate = submission.duplicate;
    merged.ranks = RankSet({rank});
    if (submission.submitted.has_value()) merged.submitted = {*submission.submitted};
    if (submission.input.has_value()) merged.inputs = {std::move(*submission.input)};
    merger_.Submit(std::move(merged));
    Decide();
  }

  void ReadFromBelow(std::string_view message) {
    UpwardMessage found;
    if (!below_.Decode(message, Clock::time_point(), &found).ok()) return;
    if (const auto* departure = std::get_if<RankDeparture>(&found)) {
      merger_.Leave(*departure);
    } else if (const auto* run = std::get_if<SubmissionRun>(&found)) {
      merger_.Submit(*run);
    } else {
      merger_.Submit(std::move(std::get<MergedSubmission>(found)));
    }
    Decide();
  }

 private:
  void Decide() {
    for (Upward message; merger_.Next(&message);) {
      if (const auto* departure = std::get_if<RankDeparture>(&message)) {
        coordinator_.Leave(departure->rank, "its script ended");
      } else {
        coordinator_.Submit(std::get<MergedSubmission>(std::move(message)), /*now=*/1);
      }
    }
    Decision decision;
    while (coordinator_.Next(&decision)) {
      merger_.Note(decision);
      const std::string_view message = encoder_.Encode(decision);
      DecisionMessage decoded;
      if (!decoder_.Decode(message, &decoded).ok()) abort();
    }
    for (int rank = 0; rank < kRanks; ++rank) coordinator_.LastSubmission(rank);
    coordinator_.Stalls();
  }

  DescriptionPool pool_{kRanks};
  Coordinator coordinator_;
  SubmissionMerger merger_;
  std::vector<SubmissionDecoder> ranks_;
  MergedDecoder below_;
  DecisionEncoder encoder_;
  DecisionDecoder decoder_;
};

}  // namespace
}  // namespace keras_hvd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace keras_hvd;
  Input input(data, size);
  const bool is_rank = input.Byte() % 2 == 0;
  CoordinatorsHost host;
  DecisionDecoder rank(kRanks);
  while (!input.empty()) {
    const int sender = input.Byte() % (kRanks + 1);
    const std::string_view message = input.Message();
    if (is_rank) {
      DecisionMessage decision;
      // An error has a text, and nothing else has one.
      const Status status = rank.Decode(message, &decision);
      if (status.ok() != status.message.empty()) abort();
    } else if (sender == kRanks) {
      host.ReadFromBelow(message);
    } else {
      host.ReadFromRank(sender, message);
    }
  }
  return 0;
}
