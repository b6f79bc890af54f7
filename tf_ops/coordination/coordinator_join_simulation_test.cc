// The coordinator's promises to ranks with uneven data, which join, over thousands of
// random schedules.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/coordination/coordinator_testing.h"

namespace keras_hvd {
namespace {

using ::testing::IsEmpty;

// A job without mistakes of its own, whose ranks have uneven data. In each epoch rank r
// submits the first n_r steps of one list, in an order of its own, without waiting for
// any; then it joins. Steps are reductions of all ranks or collectives of process sets,
// which come and go between epochs. The end of each step follows from n alone: it fails
// if zeros would make it wrong and somebody lacks it.
class JoinSimulation {
 public:
  explicit JoinSimulation(uint64_t seed) : random_(seed) {
    size_ = 1 + Random(5);
    coordinator_ = std::make_unique<Coordinator>(size_, Random(2) * 200);
    ranks_.resize(size_);
    const int64_t epochs = 1 + Random(4);
    for (int64_t epoch = 0; epoch < epochs; ++epoch) AddEpoch();
    if (Chance(10)) leaver_ = Random(size_);
  }

  void Run() {
    size_t before;
    do {
      while (!::testing::Test::HasFatalFailure() && Step()) {
      }
      before = issued_.size();
      TakeDecisions();
    } while (!::testing::Test::HasFatalFailure() && issued_.size() > before);
    if (!::testing::Test::HasFatalFailure()) CheckEnd();
  }

  int64_t zeros() const { return zeros_; }
  int64_t failed() const { return failed_; }
  int64_t grouped() const { return grouped_; }

 private:
  enum class End { kNone, kOk, kFailed };
  struct Item {
    Shared description;
    bool fails = false;
    int32_t answer = 0;  // of a set that is added or removed
    End end = End::kNone;
  };
  struct Rank {
    std::vector<Item> program;
    size_t next = 0;
    bool waits = false;  // for an agreement
    bool left = false, known_left = false;
    std::deque<size_t> to_coordinator;
    std::deque<size_t> decisions;
    std::map<std::pair<int32_t, std::string>, std::deque<size_t>> pending;
    bool in_batch = false;
  };
  struct Issued {
    Decision decision;
    std::set<int> begun;
  };

  int64_t Random(int64_t below) { return random_() % below; }
  bool Chance(int percent) { return Random(100) < percent; }

  void OnAll(const Description& description, bool fails, int32_t answer = 0) {
    for (Rank& rank : ranks_) {
      rank.program.push_back({Share(description), fails, answer});
    }
  }

  void AddEpoch() {
    if (Chance(60)) {
      std::vector<int> members;
      for (int rank = 0; rank < size_; ++rank) {
        if (Chance(50)) members.push_back(rank);
      }
      if (members.empty()) members.push_back(Random(size_));
      const bool known = static_cast<int>(members.size()) == size_ ||
                         std::any_of(sets_.begin(), sets_.end(), [&](const auto& set) {
                           return set.second == members;
                         });
      OnAll(AddSet(members), known, last_set_ + 1);
      if (!known) sets_[++last_set_] = members;
    }
    std::vector<int64_t> counts;
    const int64_t most = Random(12);
    for (int rank = 0; rank < size_; ++rank) {
      counts.push_back(Chance(30) ? most : Random(most + 1));
    }
    std::vector<std::vector<Item>> programs(size_);
    for (int64_t step = 0; step < most; ++step) {
      AddStep("s" + std::to_string(step), step, counts, &programs);
    }
    for (int rank = 0; rank < size_; ++rank) {
      std::shuffle(programs[rank].begin(), programs[rank].end(), random_);
      for (Item& item : programs[rank]) ranks_[rank].program.push_back(item);
    }
    OnAll(Join(), false);
    if (!sets_.empty() && Chance(40)) {
      const auto set = std::next(sets_.begin(), Random(sets_.size()));
      OnAll(RemoveSet(set->second), false, set->first);
      sets_.erase(set);
    }
  }

  void AddStep(const std::string& name, int64_t step,
               const std::vector<int64_t>& counts,
               std::vector<std::vector<Item>>* programs) {
    Description description = Allreduce(name, 1 + Random(30));
    std::vector<int> members;
    for (int rank = 0; rank < size_; ++rank) members.push_back(rank);
    bool wrong = Chance(20);
    if (wrong) description.reduction.op = ReduceOp::kMax;
    if (!sets_.empty() && Chance(30)) {
      const auto set = std::next(sets_.begin(), Random(sets_.size()));
      description.process_set = set->first;
      members = set->second;
      wrong = true;
    }
    const bool lacked = std::any_of(members.begin(), members.end(),
                                    [&](int rank) { return counts[rank] <= step; });
    const Shared shared = Share(description);
    for (int rank : members) {
      if (counts[rank] > step) (*programs)[rank].push_back({shared, wrong && lacked});
    }
  }

  bool Step() {
    std::vector<std::pair<int, int>> possible;
    for (int r = 0; r < size_; ++r) {
      const Rank& rank = ranks_[r];
      const bool leaves = leaver_ == r && !rank.in_batch && Chance(2);
      if (!rank.left && leaves) possible.emplace_back(3, r);
      const bool submits = !rank.waits && rank.next < rank.program.size();
      if (!rank.left && submits) possible.emplace_back(0, r);
      const bool tells = !rank.to_coordinator.empty() || rank.left != rank.known_left;
      if (tells) possible.emplace_back(1, r);
      if (!rank.left && !rank.decisions.empty() && CanExecute(r)) {
        possible.emplace_back(2, r);
      }
    }
    if (broken_off_ || possible.empty()) return false;
    const auto [what, r] = possible[Random(possible.size())];
    if (what == 0) Submit(r);
    if (what == 1) TellCoordinator(r);
    if (what == 2) Execute(r);
    if (what == 3) ranks_[r].left = true;
    return true;
  }

  void Submit(int r) {
    Rank& rank = ranks_[r];
    const Description& description = *rank.program[rank.next].description;
    rank.pending[{description.process_set, description.name}].push_back(rank.next);
    rank.waits = IsAgreement(description.kind);
    rank.to_coordinator.push_back(rank.next++);
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
    if (Chance(50)) TakeDecisions();
  }

  // The next request of other ranks may come along in one submission, if it is equal.
  void SubmitWithOthers(int r) {
    const Shared description = NextDescription(r);
    const bool alone = Chance(30);
    std::vector<int> together;
    for (int other = 0; other < size_; ++other) {
      const bool comes =
          other == r || (!alone && Chance(70) && HasNext(other, *description));
      if (comes) together.push_back(other);
    }
    grouped_ += together.size() > 1 ? 1 : 0;
    for (int other : together) ranks_[other].to_coordinator.pop_front();
    if (description->kind == Kind::kJoin) last_to_join_ = together.back();
    MergedSubmission submission;
    submission.description = description;
    submission.ranks = std::move(together);
    coordinator_->Submit(std::move(submission), now_);
  }
  bool HasNext(int r, const Description& description) const {
    if (ranks_[r].to_coordinator.empty()) return false;
    const Description& next = *NextDescription(r);
    return KeyOf(next) == KeyOf(description) && next.Matches(description);
  }
  Shared NextDescription(int r) const {
    return ranks_[r].program[ranks_[r].to_coordinator.front()].description;
  }

  void TakeDecisions() {
    Decision decision;
    while (coordinator_->Next(&decision)) {
      if (decision.type == Decision::Type::kAgree && decision.agreed == Kind::kJoin) {
        ASSERT_EQ(decision.answer, last_to_join_);
      }
      issued_.push_back({decision, {}});
      for (Rank& rank : ranks_) rank.decisions.push_back(issued_.size() - 1);
    }
  }

  bool CanExecute(int r) {
    if (!ranks_[r].in_batch) return true;
    const Issued& issued = issued_[ranks_[r].decisions.front()];
    return std::all_of(issued.decision.ranks.begin(), issued.decision.ranks.end(),
                       [&](int member) {
                         return issued.begun.count(member) == 1 || ranks_[member].left;
                       });
  }

  void Execute(int r) {
    Rank& rank = ranks_[r];
    Issued& issued = issued_[rank.decisions.front()];
    const Decision& decision = issued.decision;
    const auto& concerned = decision.ranks;
    if (std::find(concerned.begin(), concerned.end(), r) == concerned.end()) {
      rank.decisions.pop_front();
      return;
    }
    if (decision.type == Decision::Type::kRun && !rank.in_batch) {
      rank.in_batch = true;
      issued.begun.insert(r);
      return;
    }
    if (decision.type == Decision::Type::kRun &&
        issued.begun.size() < concerned.size()) {
      broken_off_ = true;  // a member has left in the middle
      return;
    }
    rank.in_batch = false;
    rank.decisions.pop_front();
    for (const TensorKey& key : decision.tensors) EndOne(r, key, decision);
  }

  void EndOne(int r, const TensorKey& key, const Decision& decision) {
    Rank& rank = ranks_[r];
    std::deque<size_t>& pending = rank.pending[{key.process_set, key.name}];
    const auto zeros = std::find_if(
        decision.zeros.begin(), decision.zeros.end(),
        [&](const auto& zeros) { return zeros.description->name == key.name; });
    if (zeros != decision.zeros.end() &&
        std::count(zeros->ranks.begin(), zeros->ranks.end(), r) == 1) {
      ASSERT_EQ(key.process_set, 0);
      ASSERT_TRUE(pending.empty()) << "zeros for what the rank has";
      ASSERT_TRUE(rank.waits) << "zeros of a rank that has not joined";
      zeros_ += 1;
      return;
    }
    ASSERT_FALSE(pending.empty()) << "rank " << r << " has no '" << key.name << "'";
    Item& item = rank.program[pending.front()];
    pending.pop_front();
    ASSERT_EQ(item.end, End::kNone);
    const bool ok = decision.type != Decision::Type::kFail;
    item.end = ok ? End::kOk : End::kFailed;
    failed_ += ok ? 0 : 1;
    // After a departure sets that were to come never did.
    const bool departed = leaver_ >= 0 && ranks_[leaver_].known_left;
    ASSERT_TRUE(departed || ok != item.fails) << decision.text;
    ASSERT_TRUE(departed || !decision.departed);
    if (zeros != decision.zeros.end()) {
      ASSERT_TRUE(zeros->description->Matches(*item.description));
    }
    if (!IsAgreement(item.description->kind)) return;
    rank.waits = false;
    if (ok && item.description->kind != Kind::kJoin) {
      ASSERT_EQ(decision.agreed, item.description->kind);
      ASSERT_EQ(decision.answer, item.answer);
      ASSERT_EQ(decision.members, item.description->members);
    }
  }

  void CheckEnd() {
    if (broken_off_) return;
    for (int r = 0; r < size_; ++r) {
      const Rank& rank = ranks_[r];
      if (rank.left) continue;
      ASSERT_EQ(rank.next, rank.program.size()) << "rank " << r << " hangs";
      for (const Item& item : rank.program) {
        // After a departure no rank says any more that it lacks a set's collective.
        const bool may_wait = leaver_ >= 0 && item.description->process_set != 0;
        ASSERT_TRUE(may_wait || item.end != End::kNone) << item.description->name;
      }
    }
    if (leaver_ < 0) {
      ASSERT_THAT(coordinator_->Stalls(), IsEmpty());
    }
  }

  std::mt19937_64 random_;
  int size_ = 0;
  std::unique_ptr<Coordinator> coordinator_;
  std::vector<Rank> ranks_;
  std::vector<Issued> issued_;
  std::map<int32_t, std::vector<int>> sets_;
  int32_t last_set_ = 0;
  int leaver_ = -1;
  int last_to_join_ = -1;
  double now_ = 0;
  bool broken_off_ = false;
  int64_t zeros_ = 0, failed_ = 0, grouped_ = 0;
};

TEST(SimulationTest, RandomSchedulesWithSetsAndJoins) {
  int64_t zeros = 0, failed = 0, grouped = 0;
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    JoinSimulation simulation(seed);
    simulation.Run();
    if (HasFatalFailure()) return;
    zeros += simulation.zeros();
    failed += simulation.failed();
    grouped += simulation.grouped();
  }
  EXPECT_GT(zeros, 20000);
  EXPECT_GT(failed, 5000);
  EXPECT_GT(grouped, 5000);
}

}  // namespace
}  // namespace keras_hvd
