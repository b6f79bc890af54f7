// Tensors that are divided into one part for each member of a collective, and how the
// parts travel to their members and back to all.
//
// A member's parts of all tensors form one line of bytes, so many small tensors travel
// like one large one.
#ifndef KERAS_HVD_TF_OPS_COLLECTIVES_PARTS_H_
#define KERAS_HVD_TF_OPS_COLLECTIVES_PARTS_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "tf_ops/collectives/communicator.h"

namespace keras_hvd {

// Where a member's part of `count` rows or elements begins. All members get equally
// many; the first ones get one more each if `count` does not divide evenly.
inline int64_t PartStart(int64_t count, int member, int members) {
  return count / members * member + std::min<int64_t>(member, count % members);
}

inline int64_t PartSize(int64_t count, int member, int members) {
  return PartStart(count, member + 1, members) - PartStart(count, member, members);
}

class Parts {
 public:
  // starts[tensor][member]: where the member's part begins in the tensor, in bytes. One
  // more entry is the end of the last part.
  explicit Parts(std::vector<std::vector<int64_t>> starts);

  int64_t start(size_t tensor, int member) const { return starts_[tensor][member]; }
  int64_t bytes(size_t tensor, int member) const {
    return starts_[tensor][member + 1] - starts_[tensor][member];
  }
  // The length of the longest member's line.
  int64_t longest_line() const { return longest_line_; }

  // Calls visit(tensor, offset within the part, position in the line, bytes) for each
  // stretch of a member's data in [begin, end) of its line.
  template <typename Visit>
  void ForEach(int member, int64_t begin, int64_t end, const Visit& visit) const {
    const std::vector<int64_t>& offsets = offsets_[member];
    size_t tensor =
        std::upper_bound(offsets.begin(), offsets.end(), begin) - offsets.begin() - 1;
    for (; tensor < starts_.size() && offsets[tensor] < end; ++tensor) {
      const int64_t from = std::max(begin, offsets[tensor]);
      const int64_t to = std::min(end, offsets[tensor] + bytes(tensor, member));
      if (from < to) visit(tensor, from - offsets[tensor], from, to - from);
    }
  }

 private:
  const std::vector<std::vector<int64_t>> starts_;
  std::vector<std::vector<int64_t>> offsets_;  // by member and tensor, plus the end
  int64_t longest_line_ = 0;
};

// Where one stretch of this member's part lies in all members' tensors.
using VisitStretch = std::function<void(size_t tensor, int64_t offset, int64_t bytes,
                                        const void* const* inputs)>;

// Gives every member its parts of all members' tensors, stretch by stretch. Parts begin
// at element boundaries. Starts in the current round, which must be unused, and uses
// later ones. Returns false if the job failed meanwhile.
bool Scatter(const Parts& parts, const std::vector<const void*>& tensors,
             Communicator* communicator, const VisitStretch& visit);

// Gives every member all members' parts. `own` are this member's parts; `tensors` are
// the destinations, null where there is no memory. A part that is already in place
// stays there. Rounds and result are as for Scatter.
bool Gather(const Parts& parts, const std::vector<const void*>& own,
            Communicator* communicator, const std::vector<void*>& tensors);

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_COLLECTIVES_PARTS_H_
