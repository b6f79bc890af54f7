// Tensors that are divided into one part for each member of a collective, and how the
// parts travel to their members and back to all.
//
// A member's parts of all tensors form one line of bytes, so many small tensors travel
// like one large one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "tf_ops/collectives/communicator.h"

namespace keras_hvd {

// Where a member's part of `count` rows or elements begins. All members get equally
// many. The first ones get one more each if `count` does not divide evenly.
inline int64_t PartStart(int64_t count, int member, int members) {
  return count / members * member + std::min<int64_t>(member, count % members);
}

inline int64_t PartSize(int64_t count, int member, int members) {
  return PartStart(count, member + 1, members) - PartStart(count, member, members);
}

// Where the members' parts of `count` rows or elements of `bytes` bytes begin, and the
// end of the last one, in bytes.
std::vector<int64_t> PartStarts(int64_t count, int64_t bytes, int members);

class Parts {
 public:
  // A member's part of a tensor.
  struct Part {
    size_t tensor;
    int64_t start;  // in bytes, like the size
    int64_t bytes;
  };

  // starts[tensor][member]: where the member's part begins in the tensor, in bytes. One
  // more entry is the end of the last part.
  explicit Parts(const std::vector<std::vector<int64_t>>& starts);
  // lines[member]: any parts, in the order of the member's line.
  explicit Parts(std::vector<std::vector<Part>> lines);

  // In the order of a member's line.
  const std::vector<Part>& of(int member) const { return lines_[member]; }
  // Where a part begins in its member's line.
  int64_t position(int member, size_t number) const {
    return positions_[member][number];
  }
  // The length of the longest member's line.
  int64_t longest_line() const { return longest_line_; }

  // Calls visit(number of the part, offset within it, position in the line, bytes) for
  // each stretch of a member's data in [begin, end) of its line.
  template <typename Visit>
  void ForEach(int member, int64_t begin, int64_t end, const Visit& visit) const {
    const std::vector<Part>& line = lines_[member];
    const std::vector<int64_t>& positions = positions_[member];
    size_t number = std::upper_bound(positions.begin(), positions.end(), begin) -
                    positions.begin() - 1;
    for (; number < line.size() && positions[number] < end; ++number) {
      const int64_t from = std::max(begin, positions[number]);
      const int64_t to = std::min(end, positions[number] + line[number].bytes);
      if (from < to) visit(number, from - positions[number], from, to - from);
    }
  }

 private:
  const std::vector<std::vector<Part>> lines_;
  std::vector<std::vector<int64_t>> positions_;  // by member and part, plus the end
  int64_t longest_line_ = 0;
};

// Visits a stretch of this member's part `number`, as it lies in all members' tensors.
using VisitStretch = std::function<void(size_t number, int64_t offset, int64_t bytes,
                                        const void* const* inputs)>;

// Gives every member its parts of all members' tensors, stretch by stretch. Parts begin
// at element boundaries. Starts in the current round, which must be unused, and uses
// later ones. Returns false if the job failed meanwhile.
bool Scatter(const Parts& parts, const std::vector<const void*>& tensors,
             Communicator* communicator, const VisitStretch& visit);

// Gives every member all members' parts. `own` are this member's parts by number;
// `tensors` are the destinations, null where there is no memory. A part that is already
// in place stays there. Rounds and result are as for Scatter.
bool Gather(const Parts& parts, const std::vector<const void*>& own,
            Communicator* communicator, const std::vector<void*>& tensors);

// Gives every member all members' lines. `fill(exchange, begin, end)` brings this
// member's stretch [begin, end) of its line to exchange[begin..end) and into its own
// tensors; it returns false if the job failed meanwhile. Otherwise as Gather.
using FillExchange = std::function<bool(char* exchange, int64_t begin, int64_t end)>;
bool GatherLines(const Parts& parts, Communicator* communicator,
                 const std::vector<void*>& tensors, const FillExchange& fill);

// Copies this member's parts to their places.
void PlaceOwnParts(const std::vector<Parts::Part>& parts,
                   const std::vector<const void*>& own,
                   const std::vector<void*>& tensors);

}  // namespace keras_hvd
