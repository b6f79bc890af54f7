// The communicators of the NCCL stand-in, and their members' work on their streams.
//
// A clique is the common part of the members' communicators. The n-th collective of
// each member meets the n-th of the others, the n-th message from one to another meets
// its n-th receive. Each member reads its input and writes its output on its own
// stream.
//
// All of it with the machine's lock, if nothing else is said.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tf_ops/testing/gpu/machine.h"

namespace keras_hvd::stand_in {

class GroupItem;

// An op that a member made: a sum of its inputs, each times a scale.
struct MadeOp {
  nccl::Type type = nccl::Type::kFloat32;
  std::vector<char> scale;
  const void* device_scale = nullptr;  // read when the collective runs
  int waiting = 0;                     // the calls with it that are not enqueued yet
};

// One call of a collective, a send or a receive.
struct Request {
  enum class Kind {
    kAllReduce,
    kBroadcast,
    kReduce,
    kAllGather,
    kReduceScatter,
    kSend,
    kReceive,
  };
  Kind kind = Kind::kAllReduce;
  const void* input = nullptr;
  void* output = nullptr;
  size_t count = 0;
  nccl::Type type = nccl::Type::kFloat32;
  nccl::Op op = nccl::kSum;
  std::shared_ptr<MadeOp> made;  // `op`, if it was made
  int peer = 0;                  // or the root
  nccl::Comm communicator = nullptr;
  cuda::Stream stream = nullptr;

  bool is_message() const { return kind == Kind::kSend || kind == Kind::kReceive; }
  size_t input_bytes() const;  // 0: this member gives nothing
  size_t output_bytes() const;
};

// A member's part of a meeting.
struct Contribution {
  std::string signature;  // must be the others'
  Place place;
  bool posted = false;
  std::vector<char> data;
  std::vector<char> scale;
};

// The meeting of the same call of all members that take part. A message's parts are its
// sender and its receiver.
struct Meeting {
  explicit Meeting(int size) : parts(size), running(size) {}
  std::vector<std::shared_ptr<Contribution>> parts;
  int running;  // of its parts, those that have not ended
  bool complete = false;
  bool failed = false;
};

struct Clique {
  struct Choice {
    bool made = false;
    int color = 0;
    int key = 0;
  };
  struct Split {
    std::vector<Choice> choices;
    std::map<int, std::shared_ptr<Clique>> parts;  // by color
  };

  int id = 0;
  std::vector<nccl::Comm> members;  // null: has not come yet
  std::map<uint64_t, std::shared_ptr<Meeting>> collectives;
  std::map<std::tuple<int, int, uint64_t>, std::shared_ptr<Meeting>> messages;
  std::map<uint64_t, Split> splits;

  bool full() const;
  bool all_connected() const;
  // The members' communicators are of no use any more.
  void Fail(nccl::Result error, const std::string& text);
};

}  // namespace keras_hvd::stand_in

namespace keras_hvd::nccl {

struct CommState {
  int id = 0;
  std::shared_ptr<stand_in::Clique> clique;
  int index = 0;
  bool blocking = false;
  bool shares = false;     // its flag for aborts with its parts
  bool connected = false;  // it has been used, as the other members may wait for
  bool live = true;
  std::shared_ptr<bool> aborted = std::make_shared<bool>(false);
  bool finalized = false;
  Result error = Result::kSuccess;
  std::string error_text;

  // The work in progress: ends at the poll after `polls_left`, if it is ready.
  bool in_progress = false;
  int polls_left = 0;
  std::function<bool()> ready;
  std::function<void()> finish;
  std::function<void()> abandon;  // called by an abort

  uint64_t collectives = 0;
  uint64_t splits = 0;
  std::map<int, uint64_t> sent, received;  // by peer
  std::map<Op, std::shared_ptr<stand_in::MadeOp>> ops;
  std::set<const stand_in::GroupItem*> running;

  int count() const { return static_cast<int>(clique->members.size()); }
};

}  // namespace keras_hvd::nccl

namespace keras_hvd::stand_in {

// The calls of one group of one communicator, on their stream.
class GroupItem : public Item {
 public:
  GroupItem(nccl::Comm communicator, std::vector<Request> requests);
  std::string text() const override;
  bool CanStart() override;
  bool CanFinish() override;
  void Start() override;
  void Finish() override;
  void Ended() override;
  void AddNeeds(std::vector<Place>* needs) const override;
  void Placed(const Place& place) override;

  const Place& place() const { return place_; }
  // Calls that the others have not met yet, they never will.
  void Withdraw();

 private:
  struct Part {
    Request request;
    std::shared_ptr<Meeting> meeting;
    int slot = 0;
    std::shared_ptr<Contribution> contribution;
  };

  void Join(const Request& request, int position, int collectives);
  void CheckOverlaps() const;
  void Post();
  bool UseMemory();
  void Write(const Part& part) const;
  void WriteGarbage(const Part& part) const;

  const nccl::Comm communicator_;
  std::vector<Part> parts_;
  Place place_;
  bool posted_ = false;
  bool usable_ = true;
  bool garbage_ = false;
  uint64_t random_ = 0;
};

std::string Name(nccl::Comm communicator);
const char* Name(Request::Kind kind);
// "" if a collective may use the memory now; otherwise the memory's state.
std::string Problem(const void* memory, size_t bytes);

}  // namespace keras_hvd::stand_in
