// The coordinator's promises, over thousands of random schedules with mistakes and
// departures.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tf_ops/coordination/coordinator_testing.h"

namespace keras_hvd {
namespace {

// A job of random size, sets, names and mistakes, whose messages travel with random
// delays: each rank's submissions to the coordinator in order, the decisions to each
// rank in order, nothing else in any order. Every decision is checked against what the
// ranks have really submitted.
class Simulation {
 public:
  explicit Simulation(uint64_t seed) : random_(seed) {
    size_ = 1 + Random(6);
    fusion_bytes_ = Random(3) == 0 ? 0 : 64 << Random(6);
    coordinator_ = std::make_unique<Coordinator>(size_, fusion_bytes_);
    ranks_.resize(size_);
    MakeProcessSets();
    MakePrograms();
  }

  void Run() {
    while (!HasFatalFailure() && Step()) {
    }
    if (!HasFatalFailure()) CheckEnd();
  }

  int64_t completed() const { return completed_; }
  int64_t fused() const { return fused_; }
  int64_t failed() const { return failed_; }
  int64_t grouped() const { return grouped_; }
  int64_t broken_off() const { return job_failed_; }

 private:
  using Key = std::pair<int32_t, std::string>;

  // The requests of one name, in order; `ranks` says what each member gives.
  struct Given {
    Shared description;
    bool duplicate = false;
  };
  struct Turn {
    std::map<int, Given> given;
    std::set<int> arrived;  // members whose submission the coordinator has seen
  };
  struct Request {
    Key key;
    size_t turn;
  };
  struct Rank {
    std::vector<Request> program;
    size_t submitted = 0;                // how much of the program
    size_t leaves_after = SIZE_MAX;      // submissions
    bool left = false;                   // the rank itself
    bool known_left = false;             // the coordinator knows
    std::deque<Request> to_coordinator;  // on their way
    std::deque<size_t> decisions;        // on their way, by number
    std::map<Key, std::deque<size_t>> pending;
    std::map<std::pair<Key, size_t>, int> ended;
    std::vector<size_t> batches;  // executed, by number
    bool in_batch = false;
  };
  struct Issued {
    Decision decision;
    std::map<std::string, std::vector<size_t>> turns;
    std::vector<std::pair<Key, size_t>> requests;  // once a member has begun it
    std::set<int> begun;
  };

  static bool HasFatalFailure() { return ::testing::Test::HasFatalFailure(); }
  int64_t Random(int64_t below) { return random_() % below; }
  bool Chance(int percent) { return Random(100) < percent; }

  void MakeProcessSets() {
    sets_[0].resize(size_);
    for (int rank = 0; rank < size_; ++rank) sets_[0][rank] = rank;
    const int count = Random(4);
    for (int id = 1; id <= count; ++id) {
      std::vector<int> members;
      for (int rank = 0; rank < size_; ++rank) {
        if (Chance(50)) members.push_back(rank);
      }
      if (!members.empty()) sets_[id * 3] = members;
    }
    // Disjoint halves as well.
    if (size_ > 1 && Chance(50)) {
      const int cut = 1 + Random(size_ - 1);
      sets_[100].assign(sets_[0].begin(), sets_[0].begin() + cut);
      sets_[101].assign(sets_[0].begin() + cut, sets_[0].end());
    }
    for (const auto& [id, members] : sets_) {
      if (id != 0) coordinator_->AddProcessSet(id, members);
    }
  }

  Description RandomDescription(int32_t set, const std::string& name) {
    Description description = Allreduce(name, 1 + Random(40), ReduceOp::kSum, set);
    if (Chance(20)) description.reduction.op = ReduceOp::kAverage;
    if (Chance(10)) description.reduction.postscale = 0.5;
    if (Chance(30)) description.tensors[0].dtype = DataType::kFloat64;
    if (Chance(10)) description.tensors.push_back({DataType::kInt8, {3}});
    if (Chance(25)) {
      description.kind = static_cast<Kind>(1 + Random(3));
      description.reduction = {};
      description.tensors.resize(1);
      if (description.kind == Kind::kBarrier) description.tensors.clear();
      if (description.kind == Kind::kBroadcast) description.root = sets_[set].back();
    }
    return description;
  }

  void MakePrograms() {
    const int mistakes = Random(2) == 0 ? 0 : 5;
    const bool same_order = Chance(25);
    const int names = 1 + Random(6);
    const int requests = 1 + Random(60);
    for (int i = 0; i < requests; ++i) {
      const auto set = std::next(sets_.begin(), Random(sets_.size()));
      const Key key = {set->first, "n" + std::to_string(Random(names))};
      const Shared description = Share(RandomDescription(key.first, key.second));
      Turn turn;
      for (int rank : set->second) {
        Given given = {description, Chance(mistakes)};
        if (Chance(mistakes)) {
          given.description = Share(RandomDescription(key.first, key.second));
        } else if (Chance(50)) {
          given.description = Share(*description);  // equal, but another object
        }
        turn.given[rank] = given;
        ranks_[rank].program.push_back({key, turns_[key].size()});
      }
      turns_[key].push_back(std::move(turn));
    }
    for (Rank& rank : ranks_) {
      if (!same_order) Shuffle(&rank.program);
      // Some never come to the end of their program, some leave before it.
      if (Chance(mistakes)) rank.program.resize(Random(rank.program.size() + 1));
      if (Chance(3 * mistakes)) rank.leaves_after = Random(rank.program.size() + 1);
    }
  }

  // A random order, but for the turns of one name.
  void Shuffle(std::vector<Request>* program) {
    std::shuffle(program->begin(), program->end(), random_);
    std::map<Key, size_t> turns;
    for (Request& request : *program) request.turn = turns[request.key]++;
  }

  // Lets something that can happen happen; false if nothing can.
  bool Step() {
    std::vector<std::pair<int, int>> possible;
    for (int r = 0; r < size_; ++r) {
      const Rank& rank = ranks_[r];
      // As the engine, a rank does not leave in the middle of a collective.
      const bool leaves = rank.submitted == rank.leaves_after && !rank.in_batch;
      const bool submits =
          leaves || rank.submitted < std::min(rank.program.size(), rank.leaves_after);
      if (!rank.left && submits) possible.emplace_back(0, r);
      const bool tells = !rank.to_coordinator.empty() || rank.left != rank.known_left;
      if (tells) possible.emplace_back(1, r);
      if (!rank.left && !rank.decisions.empty() && CanExecute(r)) {
        possible.emplace_back(2, r);
      }
    }
    if (job_failed_ || possible.empty()) return false;
    const auto [what, rank] = possible[Random(possible.size())];
    if (what == 0) SubmitOrLeave(rank);
    if (what == 1) TellCoordinator(rank);
    if (what == 2) Execute(rank);
    return true;
  }

  void SubmitOrLeave(int r) {
    Rank& rank = ranks_[r];
    if (rank.submitted == rank.leaves_after) {
      rank.left = true;
      rank.decisions.clear();
      for (const auto& [key, turns] : rank.pending) {
        for (size_t turn : turns) rank.ended[{key, turn}] += 1;
      }
      rank.pending.clear();
      return;
    }
    const Request request = rank.program[rank.submitted++];
    rank.pending[request.key].push_back(request.turn);
    rank.to_coordinator.push_back(request);
  }

  void TellCoordinator(int r) {
    Rank& rank = ranks_[r];
    now_ += 1;
    if (rank.to_coordinator.empty()) {
      rank.known_left = true;
      coordinator_->Leave(r, "rank " + std::to_string(r) + " left");
    } else {
      SubmitWithOthers(r);
    }
    // Sometimes more comes in before decisions are taken, so that some can be fused.
    // Not around a departure, so that the requests that must not run any more are
    // known.
    const bool somebody_leaves =
        std::any_of(ranks_.begin(), ranks_.end(),
                    [](const Rank& rank) { return rank.leaves_after != SIZE_MAX; });
    if (somebody_leaves || Chance(40)) TakeDecisions();
  }

  // The next request of other ranks may come along in one submission, if it is equal.
  // It may be of different turns.
  void SubmitWithOthers(int r) {
    const Key key = ranks_[r].to_coordinator.front().key;
    const Given& given = NextGiven(r);
    MergedSubmission submission;
    submission.description = given.description;
    submission.duplicate = given.duplicate;
    std::vector<int> together;
    const bool alone = given.duplicate || Chance(30);
    for (int other = 0; other < size_; ++other) {
      const bool comes =
          other == r ||
          (!alone && Chance(70) && HasNext(other, key) && !NextGiven(other).duplicate &&
           NextGiven(other).description->Matches(*given.description));
      if (comes) together.push_back(other);
    }
    grouped_ += together.size() > 1 ? 1 : 0;
    for (int other : together) {
      const Request request = ranks_[other].to_coordinator.front();
      ranks_[other].to_coordinator.pop_front();
      turns_[key][request.turn].arrived.insert(other);
    }
    submission.ranks = std::move(together);
    coordinator_->Submit(std::move(submission), now_);
  }
  bool HasNext(int r, const Key& key) const {
    const Rank& rank = ranks_[r];
    return !rank.to_coordinator.empty() && rank.to_coordinator.front().key == key;
  }
  const Given& NextGiven(int r) {
    const Request& request = ranks_[r].to_coordinator.front();
    return turns_[request.key][request.turn].given.at(r);
  }

  void TakeDecisions() {
    Decision decision;
    while (!HasFatalFailure() && coordinator_->Next(&decision)) {
      CheckDecision(decision);
      const size_t number = issued_.size();
      issued_.push_back({decision, {}, {}, {}});
      for (Rank& rank : ranks_) {
        if (!rank.left) rank.decisions.push_back(number);
      }
    }
  }

  void CheckDecision(const Decision& decision) {
    ASSERT_FALSE(decision.tensors.empty());
    const int32_t set = decision.tensors[0].process_set;
    if (decision.type == Decision::Type::kFail) {
      ASSERT_EQ(decision.tensors.size(), 1u);
      ASSERT_FALSE(decision.ranks.empty());
      ASSERT_NE(decision.text, "");
      return;
    }
    ASSERT_EQ(decision.ranks.list(), sets_.at(set));
    for (int rank : decision.ranks) ASSERT_FALSE(ranks_[rank].known_left);
    int64_t bytes = 0;
    const Description* first = nullptr;
    std::map<Key, size_t> next = decided_;
    for (const TensorKey& tensor : decision.tensors) {
      ASSERT_EQ(tensor.process_set, set);
      const Key key = {tensor.process_set, tensor.name};
      // The turn follows from the decisions: those of one name end in order, and a
      // decision to run ends one on every member.
      const size_t turn = NextTurnOfAll(key, &next);
      ASSERT_LT(turn, turns_[key].size());
      const Turn& taken = turns_[key][turn];
      ASSERT_EQ(taken.arrived.size(), taken.given.size());
      ASSERT_EQ(WhatIsWrong(taken), false);
      const Description& description = *taken.given.begin()->second.description;
      bytes += description.bytes();
      if (first == nullptr) first = &description;
      if (decision.tensors.size() == 1) break;
      ASSERT_EQ(description.kind, Kind::kAllreduce);
      ASSERT_TRUE(description.reduction == first->reduction);
      fused_ += 1;
    }
    if (decision.tensors.size() > 1) {
      ASSERT_LE(bytes, fusion_bytes_);
    }
    decided_ = next;
  }

  // The first turn of a name, from `next` on, that is not bound to fail.
  size_t NextTurnOfAll(const Key& key, std::map<Key, size_t>* next) {
    size_t& turn = (*next)[key];
    while (turn < turns_[key].size() && WhatIsWrong(turns_[key][turn])) ++turn;
    return turn++;
  }

  // Whether the members' requests of this turn that have arrived do not fit together.
  static bool WhatIsWrong(const Turn& turn) {
    const Description* first = nullptr;
    for (int rank : turn.arrived) {
      const Given& given = turn.given.at(rank);
      if (first == nullptr) first = given.description.get();
      if (given.duplicate || !given.description->Matches(*first)) return true;
    }
    return false;
  }

  // Whether the rank's next decision can be carried out: the end of a collective needs
  // all its members, as the real one's does.
  bool CanExecute(int r) {
    const Rank& rank = ranks_[r];
    if (!rank.in_batch) return true;
    const Issued& issued = issued_[rank.decisions.front()];
    return std::all_of(issued.decision.ranks.begin(), issued.decision.ranks.end(),
                       [&](int member) {
                         return issued.begun.count(member) == 1 || ranks_[member].left;
                       });
  }

  void Execute(int r) {
    Rank& rank = ranks_[r];
    Issued& issued = issued_[rank.decisions.front()];
    const RankSet& concerned = issued.decision.ranks;
    if (std::find(concerned.begin(), concerned.end(), r) == concerned.end()) {
      rank.decisions.pop_front();
      return;
    }
    if (issued.decision.type == Decision::Type::kFail) {
      rank.decisions.pop_front();
      return Fail(r, issued.decision);
    }
    if (!rank.in_batch) return Begin(r, &issued);
    // A member that left in the middle: the engine ends the job.
    if (issued.begun.size() < concerned.size()) {
      job_failed_ = true;
      return;
    }
    rank.batches.push_back(rank.decisions.front());
    rank.decisions.pop_front();
    rank.in_batch = false;
    for (const auto& request : issued.requests) rank.ended[request] += 1;
    completed_ += issued.requests.size();
  }

  void Begin(int r, Issued* issued) {
    std::vector<std::pair<Key, size_t>> requests;
    for (const TensorKey& tensor : issued->decision.tensors) {
      const Key key = {tensor.process_set, tensor.name};
      std::deque<size_t>& pending = ranks_[r].pending[key];
      ASSERT_FALSE(pending.empty()) << "told to run what it has not submitted";
      requests.emplace_back(key, pending.front());
      pending.pop_front();
    }
    // All members run the same requests, not only the same names.
    if (issued->begun.empty()) issued->requests = requests;
    ASSERT_EQ(requests, issued->requests);
    for (const auto& [key, turn] : requests) {
      ASSERT_FALSE(WhatIsWrong(turns_[key][turn]));
    }
    issued->begun.insert(r);
    ranks_[r].in_batch = true;
  }

  void Fail(int r, const Decision& decision) {
    const Key key = {decision.tensors[0].process_set, decision.tensors[0].name};
    std::deque<size_t>& pending = ranks_[r].pending[key];
    ASSERT_FALSE(pending.empty()) << "told to end what it has not submitted";
    const size_t turn = pending.front();
    pending.pop_front();
    ranks_[r].ended[{key, turn}] += 1;
    failed_ += 1;
    if (!decision.departed) {
      ASSERT_TRUE(WhatIsWrong(turns_[key][turn])) << decision.text;
      return;
    }
    const std::vector<int>& members = sets_.at(key.first);
    ASSERT_TRUE(std::any_of(members.begin(), members.end(),
                            [&](int member) { return ranks_[member].known_left; }));
  }

  void CheckEnd() {
    TakeDecisions();
    // Those decisions have to reach the ranks as well.
    while (!HasFatalFailure() && Step()) {
    }
    if (HasFatalFailure()) return;
    CheckOrder();
    for (int r = 0; r < size_; ++r) {
      for (const auto& [request, times] : ranks_[r].ended) ASSERT_EQ(times, 1);
    }
    if (job_failed_) return;
    std::set<std::tuple<Key, int>> waiting;
    for (int r = 0; r < size_; ++r) {
      const Rank& rank = ranks_[r];
      ASSERT_TRUE(rank.left || rank.decisions.empty()) << "rank " << r << " hangs";
      size_t pending = 0;
      for (const auto& [key, turns] : rank.pending) {
        pending += turns.size();
        if (turns.empty()) continue;
        CheckMayWait(key, turns_[key][turns.front()]);
        waiting.emplace(key, r);
      }
      ASSERT_EQ(rank.ended.size() + pending, rank.submitted);
    }
    CheckStalls(waiting);
  }

  // A name's first request may wait for a member that is there and has not submitted
  // it; the others wait behind it.
  void CheckMayWait(const Key& key, const Turn& turn) {
    ASSERT_FALSE(WhatIsWrong(turn));
    const std::vector<int>& members = sets_.at(key.first);
    ASSERT_LT(turn.arrived.size(), members.size());
    for (int member : members) ASSERT_FALSE(ranks_[member].left);
  }

  void CheckStalls(const std::set<std::tuple<Key, int>>& waiting) {
    std::set<std::tuple<Key, int>> listed;
    for (const Stall& stall : coordinator_->Stalls()) {
      for (int rank : stall.waiting) {
        listed.emplace(Key(stall.key.process_set, stall.key.name), rank);
      }
      ASSERT_FALSE(stall.missing.empty());
    }
    ASSERT_EQ(listed, waiting);
  }

  // Any two ranks ran the batches that they share in the same order; a name's requests
  // ran in their order on each.
  void CheckOrder() {
    for (const Rank& a : ranks_) {
      ASSERT_TRUE(std::is_sorted(a.batches.begin(), a.batches.end()));
      std::map<Key, size_t> last;
      for (size_t batch : a.batches) {
        for (const auto& [key, turn] : issued_[batch].requests) {
          ASSERT_GE(turn, last[key]);
          last[key] = turn + 1;
        }
      }
    }
  }

  std::mt19937_64 random_;
  int size_ = 0;
  int64_t fusion_bytes_ = 0;
  std::unique_ptr<Coordinator> coordinator_;
  std::map<int32_t, std::vector<int>> sets_;
  std::map<Key, std::vector<Turn>> turns_;
  std::map<Key, size_t> decided_;  // turns that were decided to run or are past
  std::vector<Rank> ranks_;
  std::vector<Issued> issued_;
  double now_ = 0;
  bool job_failed_ = false;
  int64_t completed_ = 0, fused_ = 0, failed_ = 0, grouped_ = 0;
};

TEST(SimulationTest, ThousandsOfRandomSchedules) {
  int64_t completed = 0, fused = 0, failed = 0, grouped = 0, broken_off = 0;
  for (uint64_t seed = 0; seed < 8000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Simulation simulation(seed);
    simulation.Run();
    if (HasFatalFailure()) return;
    completed += simulation.completed();
    fused += simulation.fused();
    failed += simulation.failed();
    grouped += simulation.grouped();
    broken_off += simulation.broken_off();
  }
  // The schedules do reach their cases.
  EXPECT_GT(completed, 100000);
  EXPECT_GT(fused, 10000);
  EXPECT_GT(failed, 10000);
  EXPECT_GT(grouped, 10000);
  EXPECT_GT(broken_off, 10);
  EXPECT_LT(broken_off, 4000);
}

}  // namespace
}  // namespace keras_hvd
