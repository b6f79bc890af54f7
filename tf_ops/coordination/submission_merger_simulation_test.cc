// Each request ends in the same way whether the coordinator hears of the ranks'
// submissions one by one or merged by a tree of hosts, over thousands of random trees
// and schedules.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/coordination/coordinator_testing.h"
#include "tf_ops/coordination/messages.h"
#include "tf_ops/coordination/submission_merger.h"
#include "tf_ops/operation/inline_tensors.h"
#include "tf_ops/transport/topology.h"

namespace keras_hvd {
namespace {

using Key = std::pair<int32_t, std::string>;

Key NameOf(const Description& description) {
  return {description.process_set, description.name};
}

// Words of failures: for mistakes between the ranks, and for others.
constexpr std::array<const char*, 3> kMistakes = {"second op", "differ", "joined"};
constexpr std::array<const char*, 4> kOtherFailures = {
    "already has", "in use", "no process set", "not in process set"};

bool IsMistake(const std::string& end) {
  return std::count(kMistakes.begin(), kMistakes.end(), end) == 1;
}

std::string KindOfFailure(const Decision& failure) {
  if (failure.departed) return "departed";
  std::vector<const char*> kinds(kMistakes.begin(), kMistakes.end());
  kinds.insert(kinds.end(), kOtherFailures.begin(), kOtherFailures.end());
  for (const char* kind : kinds) {
    if (failure.text.find(kind) != std::string::npos) return kind;
  }
  ADD_FAILURE() << failure.text;
  return "";
}

// Whether a merger has to know of it, and ranks wait for it.
bool IsOfAgreement(const Decision& decision) {
  const std::string& name = decision.tensors[0].name;
  return name == Join().name || name == AddSet({}).name;
}

// A coordinator, and its answer to each request.
class Decider {
 public:
  explicit Decider(int size) : coordinator_(size, 0), requests_(size), ends_(size) {
    coordinator_.set_wants_times(true);
  }

  void AddProcessSet(int32_t id, const std::vector<int>& members) {
    coordinator_.AddProcessSet(id, members);
  }
  // `numbers`: of this request among those of each rank. Requests of one name come in
  // their order.
  void Submit(const std::vector<size_t>& numbers, MergedSubmission submission) {
    const Key key = NameOf(*submission.description);
    for (size_t i = 0; i < numbers.size(); ++i) {
      requests_[submission.ranks[i]][key].push_back(numbers[i]);
    }
    coordinator_.Submit(std::move(submission), 0);
  }
  void Leave(int rank) {
    coordinator_.Leave(rank, "it left");
    for (auto& [key, numbers] : requests_[rank]) {
      for (size_t number : numbers) End(rank, number, "left");
      numbers.clear();
    }
  }
  bool Next(Decision* decision) {
    if (!coordinator_.Next(decision)) return false;
    for (const TensorKey& tensor : decision->tensors) Note(tensor, *decision);
    return true;
  }
  // "" while it waits.
  std::string EndOf(int rank, size_t number) const {
    return number < ends_[rank].size() ? ends_[rank][number] : "";
  }

 private:
  void Note(const TensorKey& tensor, const Decision& decision) {
    std::vector<int> zeros;
    for (const Decision::Zeros& each : decision.zeros) {
      if (each.description->name == tensor.name) zeros = each.ranks;
    }
    std::string end;
    switch (decision.type) {
      case Decision::Type::kRun:
        end = "run by " + RankList(decision.ranks.list()) + ", zeros of " +
              RankList(zeros) + WhatRanksGave(decision);
        break;
      case Decision::Type::kFail: end = KindOfFailure(decision); break;
      case Decision::Type::kAgree:
        end = "agreement";
        // The rank that joins last depends on the schedule.
        if (decision.agreed == Kind::kJoin) break;
        end += " by all on set " + std::to_string(decision.answer);
        break;
    }
    for (int rank : decision.ranks) {
      if (std::count(zeros.begin(), zeros.end(), rank) == 1) continue;
      std::deque<size_t>& numbers = requests_[rank][{tensor.process_set, tensor.name}];
      ASSERT_FALSE(numbers.empty())
          << "rank " << rank << " waits for no " << tensor.name;
      End(rank, numbers.front(), end);
      numbers.pop_front();
    }
  }
  // Of the only tensor: batches have one.
  static std::string WhatRanksGave(const Decision& decision) {
    std::string text = ", submitted";
    for (const auto& [rank, since] : decision.requests.at(0).since) {
      text += " by " + std::to_string(rank) + " at " + std::to_string(since);
    }
    for (const Decision::Given& given : decision.given) {
      text += ", inputs";
      for (const std::string& input : given.inputs) {
        text += " " + (input.empty() ? "none" : std::to_string(input[0]));
      }
    }
    return text;
  }
  void End(int rank, size_t number, const std::string& end) {
    if (ends_[rank].size() <= number) ends_[rank].resize(number + 1);
    ends_[rank][number] = end;
  }

  Coordinator coordinator_;
  std::vector<std::map<Key, std::deque<size_t>>> requests_;  // that wait, by rank
  std::vector<std::vector<std::string>> ends_;               // by rank and number
};

// A job's features besides collectives that fit together.
struct Specials {
  bool differ = false;      // requests of one name
  bool duplicates = false;  // two ops of a rank have one name
  bool uneven = false;      // some ranks have fewer requests, of a name or at all
  bool joins = false;       // epochs end with joins, and are uneven
  bool sets = false;        // process sets come and go
  bool strangers = false;   // requests of sets that the rank is not in
  bool leaves = false;      // ranks do, at any time
  bool old = false;         // held submissions are passed on at any time
  bool mixed_times = false;
  bool late_sets = false;  // leaders hear of process sets late

  static Specials Random(std::mt19937_64* random) {
    Specials some;
    if ((*random)() % 4 == 0) return some;
    for (bool* each : {&some.differ, &some.duplicates, &some.uneven, &some.joins,
                       &some.sets, &some.strangers, &some.leaves, &some.old,
                       &some.mixed_times, &some.late_sets}) {
      *each = (*random)() % 3 == 0;
    }
    return some;
  }
  // Whether an agreement succeeds depends on when a departure is heard of, and with it
  // the state that the ranks' later requests meet.
  bool diverge() const { return leaves && (joins || sets); }
  // Whether leaders see all ranks come to a round, or know that they do not wait for
  // it.
  bool complete() const { return !uneven && !late_sets && !diverge(); }
  bool any() const {
    return differ || duplicates || uneven || joins || sets || strangers || leaves ||
           old || mixed_times || late_sets;
  }
};

// A job of random hosts and programs. Its ranks submit to their leaders, leaders to the
// leaders above, and decisions on agreements come back, all with random delays. Another
// coordinator is told at once of all that each rank does.
class Simulation {
 public:
  explicit Simulation(uint64_t seed)
      : random_(seed),
        specials_(Specials::Random(&random_)),
        size_(static_cast<int>(1 + Random(12))),
        pool_(size_),
        merged_(size_),
        flat_(size_),
        ranks_(size_) {
    sends_at_once_ = Chance(50);
    repeats_ = Chance(50);
    MakeHosts();
    MakeProcessSets();
    has_times_ = Chance(50);
    for (int64_t epochs = 1 + Random(specials_.sets || specials_.joins ? 4 : 1);
         epochs > 0; --epochs) {
      AddEpoch();
    }
    CutPrograms();
  }

  void Run() {
    while (!HasFatalFailure() && Step()) {
    }
    if (specials_.complete()) CheckAllArrived();
    if (!specials_.any()) CheckCounts();
    int64_t before;
    do {
      before = messages_;
      for (size_t host = 0; host < hosts_.size(); ++host) {
        for (int time = 0; time < 2; ++time) PassOnOld(host);
      }
      while (!HasFatalFailure() && Step()) {
      }
    } while (!HasFatalFailure() && messages_ > before);
    CheckAllArrived();
    CheckEnds();
  }

  // How many requests have ended how: the first word or words only.
  const std::map<std::string, int64_t>& ends() const { return ends_; }
  // How many requests came in runs.
  int64_t in_runs() const { return in_runs_; }

 private:
  struct Item {
    explicit Item(Shared what) : description(std::move(what)) {}

    Shared description;
    bool duplicate = false;
    std::string input;
    std::vector<Clock::time_point> submitted;  // one or none, in the rank's own time
  };
  struct Rank {
    std::vector<Item> program;
    size_t submitted = 0;            // how much of the program
    size_t leaves_after = SIZE_MAX;  // submissions
    bool left = false;
    std::optional<Kind> awaited;  // an agreement
    std::deque<size_t> to_leader;
    std::deque<size_t> decisions;              // by number
    std::map<Key, std::deque<size_t>> on_way;  // submitted, but not at the coordinator
    size_t arrived = 0;                        // how many are
  };
  struct Host {
    explicit Host(Topology its_topology) : topology(std::move(its_topology)) {}

    const Topology topology;
    Clock::time_point now;  // by its clock, all the time
    std::unique_ptr<SubmissionMerger> merger;
    std::unique_ptr<MergedEncoder> encoder;
    bool has_news = false;                   // for its parent, perhaps
    std::unique_ptr<MergedDecoder> decoder;  // of the host above, for this one
    std::deque<std::string> to_parent;
    int64_t messages = 0;
    std::deque<size_t> decisions;
    std::deque<std::pair<int32_t, std::vector<int>>> unknown_sets;
  };

  static bool HasFatalFailure() { return ::testing::Test::HasFatalFailure(); }
  int64_t Random(int64_t below) { return random_() % below; }
  bool Chance(int percent) { return Random(100) < percent; }
  bool Special(bool special, int percent) { return special && Chance(percent); }

  void MakeHosts() {
    std::vector<int> hosts;
    const int64_t count = 1 + Random(size_);
    const bool one_by_one = Chance(30);
    for (int rank = 0; rank < size_; ++rank) {
      hosts.push_back(one_by_one ? rank * count / size_ : Random(count));
    }
    const int fan_out = 1 + Random(3);
    const Topology root(0, hosts, fan_out);
    for (int host = 0; host < root.hosts(); ++host) {
      hosts_.emplace_back(Topology(root.leader_of(host), hosts, fan_out));
      Host& made = hosts_.back();
      made.now = Clock::time_point(std::chrono::hours(100 + Random(1000)));
      const std::vector<int> below = root.ranks_below(host);
      made.merger = std::make_unique<SubmissionMerger>(below);
      made.encoder = std::make_unique<MergedEncoder>(Chance(50) ? 5 : 100);
      made.decoder = std::make_unique<MergedDecoder>(below, &pool_);
    }
  }

  void MakeProcessSets() {
    for (int rank = 0; rank < size_; ++rank) sets_[0].push_back(rank);
    asked_for_ = {sets_[0]};
    for (int64_t count = Random(4); count > 0; --count) {
      const std::vector<int> members = SomeRanks();
      if (WereAskedFor(members)) continue;
      asked_for_.push_back(members);
      sets_[++last_set_] = members;
    }
    for (const auto& [id, members] : sets_) {
      merged_.AddProcessSet(id, members);
      flat_.AddProcessSet(id, members);
      for (Host& host : hosts_) {
        if (specials_.late_sets) {
          host.unknown_sets.emplace_back(id, members);
        } else {
          host.merger->AddProcessSet(id, members);
        }
      }
    }
  }

  std::vector<int> SomeRanks() {
    std::vector<int> ranks;
    for (int rank = 0; rank < size_; ++rank) {
      if (Chance(50)) ranks.push_back(rank);
    }
    if (ranks.empty()) ranks.push_back(Random(size_));
    return ranks;
  }

  bool WereAskedFor(const std::vector<int>& members) const {
    return std::count(asked_for_.begin(), asked_for_.end(), members) == 1;
  }

  // ---- Programs

  Description RandomDescription(const Key& key) {
    // Some travel within the messages, some are too large for that.
    const int64_t most = repeats_ ? 40000 : 400;
    Description description =
        Allreduce(key.second, 1 + Random(most), ReduceOp::kSum, key.first);
    if (Chance(20)) description.reduction.op = ReduceOp::kMax;
    if (Chance(10)) description.kind = Kind::kBroadcast;
    return description;
  }

  // Where the same requests come again and again, hosts tell each other runs of them.
  Shared UsualDescription(const Key& key) {
    if (!repeats_) return Share(RandomDescription(key));
    Shared& usual = usual_[key];
    if (usual == nullptr || Chance(10)) usual = Share(RandomDescription(key));
    return usual;
  }

  void AddEpoch() {
    if (Special(specials_.sets, 60)) AddProcessSet();
    const bool joins = specials_.joins && Chance(80);
    const bool uneven = joins || Special(specials_.uneven, 50);
    const int64_t most = Random(repeats_ ? 60 : 20);
    std::vector<int64_t> counts;
    for (int rank = 0; rank < size_; ++rank) {
      counts.push_back(!uneven || Chance(50) ? most : Random(most + 1));
    }
    std::map<Key, std::vector<Shared>> turns;
    std::vector<std::vector<Key>> keys(size_);
    const int64_t names = 1 + Random(8);
    for (int64_t i = 0; i < most; ++i) {
      const auto set = std::next(sets_.begin(), Chance(50) ? 0 : Random(sets_.size()));
      const Key key = {set->first, "n" + std::to_string(Random(names))};
      turns[key].push_back(UsualDescription(key));
      rounds_[key.first] += 1;
      for (int rank : set->second) {
        if (i < counts[rank]) keys[rank].push_back(key);
      }
    }
    for (int rank = 0; rank < size_; ++rank) {
      std::shuffle(keys[rank].begin(), keys[rank].end(), random_);
      AddRequests(rank, keys[rank], turns);
    }
    if (joins) OnAll(Join());
    if (Special(specials_.sets, 40)) RemoveProcessSet();
  }

  // A rank has its turns of one name in their order.
  void AddRequests(int rank, const std::vector<Key>& keys,
                   const std::map<Key, std::vector<Shared>>& turns) {
    std::map<Key, size_t> next;
    for (const Key& key : keys) {
      const Shared& usual = turns.at(key)[next[key]++];
      const bool differs = Special(specials_.differ, 5);
      Item item(differs ? Share(RandomDescription(key)) : usual);
      item.duplicate = Special(specials_.duplicates, 5);
      const bool inlined = TravelsInline(*item.description, sets_.at(key.first).size(),
                                         MostInlineBytes(ranks_.size(), 1));
      if (inlined && !item.duplicate) item.input = RandomInput(*item.description);
      ranks_[rank].program.push_back(item);
      if (Special(specials_.strangers, 5)) AddStranger(rank);
    }
  }

  std::string RandomInput(const Description& description) {
    return std::string((description.bytes() + 7) / 8 * 8, static_cast<char>(random_()));
  }

  // A request of a set that there never is, or that the rank is not in.
  void AddStranger(int rank) {
    const auto set = std::next(sets_.begin(), Random(sets_.size()));
    const bool is_member =
        std::count(set->second.begin(), set->second.end(), rank) == 1;
    ranks_[rank].program.emplace_back(
        Share(RandomDescription({is_member ? 1000 : set->first, "n0"})));
  }

  void OnAll(const Description& description) {
    const Shared shared = Share(description);
    for (Rank& rank : ranks_) rank.program.emplace_back(shared);
  }

  // No ranks are asked for twice, but for all of them, which is refused. So all know
  // which number the set will get, whatever becomes of the others.
  void AddProcessSet() {
    const std::vector<int> members = Chance(10) ? sets_.at(0) : SomeRanks();
    const bool refused = members == sets_.at(0);
    if (!refused && WereAskedFor(members)) return;
    OnAll(AddSet(members));
    if (refused) return;
    asked_for_.push_back(members);
    if (size_ > 1 && Special(specials_.differ, 20)) {
      ranks_[Random(size_)].program.back().description = Share(RemoveSet(members));
      return;
    }
    sets_[++last_set_] = members;
  }

  void RemoveProcessSet() {
    if (sets_.size() == 1) return;
    const auto set = std::next(sets_.begin(), 1 + Random(sets_.size() - 1));
    OnAll(RemoveSet(set->second));
    for (int rank : set->second) {
      if (!Special(specials_.strangers, 20)) continue;
      ranks_[rank].program.emplace_back(Share(RandomDescription({set->first, "n0"})));
    }
    sets_.erase(set);
  }

  void CutPrograms() {
    for (Rank& rank : ranks_) {
      if (Special(specials_.uneven, 10)) {
        rank.program.erase(rank.program.begin() + Random(rank.program.size() + 1),
                           rank.program.end());
      }
      if (Special(specials_.leaves, 20)) {
        rank.leaves_after = Random(rank.program.size() + 1);
      }
    }
  }

  // ---- The schedule

  // Lets something that can happen happen; false if nothing can.
  bool Step() {
    possible_.clear();
    for (int r = 0; r < size_; ++r) {
      const Rank& rank = ranks_[r];
      if (CanSubmit(rank)) possible_.emplace_back(&Simulation::SubmitOrLeave, r);
      if (!rank.to_leader.empty()) possible_.emplace_back(&Simulation::TellLeader, r);
      if (!rank.decisions.empty()) possible_.emplace_back(&Simulation::TellRank, r);
    }
    for (int h = 0; h < static_cast<int>(hosts_.size()); ++h) {
      const Host& host = hosts_[h];
      if (!host.to_parent.empty()) possible_.emplace_back(&Simulation::TellParent, h);
      if (!host.decisions.empty()) possible_.emplace_back(&Simulation::TellHost, h);
      if (!host.unknown_sets.empty()) {
        possible_.emplace_back(&Simulation::TellOfProcessSet, h);
      }
    }
    // Seldom, so that much goes up together.
    for (int h = 0; h < static_cast<int>(hosts_.size()); ++h) {
      const bool may = hosts_[h].has_news && (possible_.empty() || Chance(2));
      if (may) possible_.emplace_back(&Simulation::Send, h);
    }
    if (possible_.empty()) return false;
    if (Special(specials_.old, 5)) PassOnOld(Random(hosts_.size()));
    const auto [what, which] = possible_[Random(possible_.size())];
    (this->*what)(which);
    return true;
  }

  // Another thread may go on with the collectives of all ranks while one waits for a
  // set. Not while it has joined: the end of such a collective depends on the schedule.
  static bool CanSubmit(const Rank& rank) {
    if (rank.left) return false;
    if (rank.submitted == rank.leaves_after) return !rank.awaited.has_value();
    if (rank.submitted == rank.program.size()) return false;
    if (!rank.awaited.has_value()) return true;
    const Description& next = *rank.program[rank.submitted].description;
    return rank.awaited != Kind::kJoin && next.process_set == 0 &&
           !IsAgreement(next.kind);
  }

  void SubmitOrLeave(int r) {
    Rank& rank = ranks_[r];
    if (rank.submitted == rank.leaves_after) {
      rank.left = true;
      flat_.Leave(r);
    } else {
      Item& item = rank.program[rank.submitted];
      const Description& description = *item.description;
      if (IsAgreement(description.kind)) rank.awaited = description.kind;
      const bool has_time = specials_.mixed_times ? Chance(50) : has_times_;
      if (has_time) item.submitted = {Clock::time_point(std::chrono::seconds(++now_))};
      rank.on_way[NameOf(description)].push_back(rank.submitted);
      flat_.Submit({rank.submitted}, SubmissionOf(r, item, hosts_[0]));
    }
    rank.to_leader.push_back(rank.submitted++);
    Decision decision;
    while (flat_.Next(&decision)) {
    }
  }

  void TellLeader(int r) {
    Rank& rank = ranks_[r];
    const size_t number = rank.to_leader.front();
    rank.to_leader.pop_front();
    const int host = hosts_[0].topology.host_of(r);
    if (number == rank.leaves_after) return Tell(host, RankDeparture{r});
    const Item& item = rank.program[number];
    Tell(host, SubmissionOf(r, item, hosts_[host]));
  }

  // With times on the clock of a host.
  static MergedSubmission SubmissionOf(int r, const Item& item, const Host& host) {
    MergedSubmission submission;
    submission.description = item.description;
    submission.duplicate = item.duplicate;
    submission.ranks = {r};
    for (Clock::time_point time : item.submitted) {
      submission.submitted.push_back(OnClockOf(host, time));
    }
    if (!item.input.empty()) submission.inputs = {item.input};
    return submission;
  }

  // Times in the simulation count from a moment that lies before all clocks' `now`.
  static Clock::time_point OnClockOf(const Host& host, Clock::time_point time) {
    return host.now - std::chrono::hours(50) + time.time_since_epoch();
  }

  void TellParent(int h) {
    Host& host = hosts_[h];
    const int parent = host.topology.parent();
    UpwardMessage message;
    const Status status =
        host.decoder->Decode(host.to_parent.front(), hosts_[parent].now, &message);
    ASSERT_TRUE(status.ok()) << status.message;
    host.to_parent.pop_front();
    Tell(parent, std::move(message));
  }

  void Tell(int h, UpwardMessage message) {
    Host& host = hosts_[h];
    if (const auto* departure = std::get_if<RankDeparture>(&message)) {
      host.merger->Leave(*departure);
    } else if (const auto* run = std::get_if<SubmissionRun>(&message)) {
      in_runs_ += run->descriptions->size();
      host.merger->Submit(*run);
    } else {
      host.merger->Submit(std::get<MergedSubmission>(std::move(message)));
    }
    SendSometime(h);
  }

  void PassOnOld(int h) {
    hosts_[h].merger->PassOnOld();
    SendSometime(h);
  }

  void SendSometime(int h) {
    hosts_[h].has_news = true;
    if (sends_at_once_) Send(h);
  }

  void Send(int h) {
    Host& host = hosts_[h];
    host.has_news = false;
    std::vector<Upward> messages;
    for (Upward message; host.merger->Next(&message);) {
      messages.push_back(std::move(message));
    }
    host.messages += messages.size();
    messages_ += messages.size();
    if (h == 0) {
      for (const Upward& message : messages) TellCoordinator(message);
      return;
    }
    for (size_t next = 0; next < messages.size();) {
      host.to_parent.emplace_back(host.encoder->Encode(messages, &next, host.now));
    }
  }

  // All of the rank's submissions before an agreement or a departure have arrived
  // before, and those of one name are in their order.
  void TellCoordinator(const Upward& message) {
    if (const auto* departure = std::get_if<RankDeparture>(&message)) {
      ASSERT_EQ(ranks_[departure->rank].arrived, ranks_[departure->rank].leaves_after);
      merged_.Leave(departure->rank);
    } else {
      const auto& merged = std::get<MergedSubmission>(message);
      std::vector<size_t> numbers(merged.ranks.size());
      for (size_t i = 0; i < numbers.size(); ++i) NoteArrival(merged, i, &numbers[i]);
      if (HasFatalFailure()) return;
      merged_.Submit(numbers, merged);
    }
    Decision decision;
    while (merged_.Next(&decision)) {
      if (!IsOfAgreement(decision)) continue;
      hosts_[0].decisions.push_back(issued_.size());
      issued_.push_back(decision);
    }
  }

  // `*number`: the request's among those of the rank in this place.
  void NoteArrival(const MergedSubmission& merged, size_t i, size_t* number) {
    Rank& rank = ranks_[merged.ranks[i]];
    std::deque<size_t>& on_way = rank.on_way[NameOf(*merged.description)];
    ASSERT_FALSE(on_way.empty());
    *number = on_way.front();
    on_way.pop_front();
    const Item& item = rank.program[*number];
    ASSERT_TRUE(item.description->Matches(*merged.description));
    ASSERT_EQ(item.duplicate, merged.duplicate);
    ASSERT_EQ(item.input, merged.inputs.empty() ? "" : merged.inputs[i]);
    ASSERT_EQ(item.submitted.empty(), merged.submitted.empty());
    if (!item.submitted.empty()) {
      ASSERT_EQ(merged.submitted[i], OnClockOf(hosts_[0], item.submitted[0]));
    }
    if (IsAgreement(item.description->kind)) {
      ASSERT_EQ(rank.arrived, *number);
    }
    rank.arrived += 1;
  }

  void TellHost(int h) {
    Host& host = hosts_[h];
    const size_t number = host.decisions.front();
    host.decisions.pop_front();
    host.merger->Note(issued_[number]);
    SendSometime(h);
    for (int child : host.topology.children()) {
      hosts_[child].decisions.push_back(number);
    }
    for (int rank : host.topology.local_ranks()) {
      ranks_[rank].decisions.push_back(number);
    }
  }

  void TellOfProcessSet(int h) {
    Host& host = hosts_[h];
    const auto [id, members] = host.unknown_sets.front();
    host.unknown_sets.pop_front();
    host.merger->AddProcessSet(id, members);
  }

  void TellRank(int r) {
    Rank& rank = ranks_[r];
    const Decision& decision = issued_[rank.decisions.front()];
    rank.decisions.pop_front();
    const bool concerned =
        std::count(decision.ranks.begin(), decision.ranks.end(), r) == 1;
    if (concerned) rank.awaited.reset();
  }

  // ---- In the end

  void CheckAllArrived() {
    if (HasFatalFailure()) return;
    for (int rank = 0; rank < size_; ++rank) {
      const size_t submitted = ranks_[rank].submitted - (ranks_[rank].left ? 1 : 0);
      ASSERT_EQ(ranks_[rank].arrived, submitted) << "rank " << rank;
    }
  }

  // Each host has passed on one message for each round of each set with members below.
  void CheckCounts() {
    if (HasFatalFailure()) return;
    for (size_t h = 0; h < hosts_.size(); ++h) {
      const std::vector<int> below = hosts_[0].topology.ranks_below(h);
      int64_t wanted = 0;
      for (const auto& [id, members] : sets_) {
        const bool has_members =
            std::find_first_of(members.begin(), members.end(), below.begin(),
                               below.end()) != members.end();
        if (has_members) wanted += rounds_[id];
      }
      ASSERT_EQ(hosts_[h].messages, wanted) << "host " << h;
    }
  }

  void CheckEnds() {
    if (HasFatalFailure()) return;
    if (specials_.diverge()) return;
    for (int r = 0; r < size_; ++r) {
      for (size_t i = 0; i < ranks_[r].program.size(); ++i) {
        const std::string merged = merged_.EndOf(r, i);
        const std::string flat = flat_.EndOf(r, i);
        ends_[merged.substr(0, merged.find(" by "))] += 1;
        if (merged == flat) continue;
        const int32_t set = ranks_[r].program[i].description->process_set;
        const bool may_differ = MayDependOnMistakes(merged, flat) ||
                                MayDependOnDeparture(set, merged, flat);
        ASSERT_TRUE(may_differ)
            << "rank " << r << " request " << i << ": " << merged << "; " << flat;
      }
    }
  }

  // The mistake that is reported depends on the order of arrival.
  bool MayDependOnMistakes(const std::string& a, const std::string& b) const {
    const int kinds = (specials_.differ || specials_.uneven ? 1 : 0) +
                      (specials_.duplicates ? 1 : 0) + (specials_.joins ? 1 : 0);
    return kinds > 1 && IsMistake(a) && IsMistake(b);
  }

  // A request that needs a leaving rank runs, or fails for another reason, if that is
  // decided before the departure is heard of.
  bool MayDependOnDeparture(int32_t id, const std::string& a,
                            const std::string& b) const {
    const auto set = sets_.find(id);
    const bool somebody_left =
        set != sets_.end() && std::any_of(set->second.begin(), set->second.end(),
                                          [&](int rank) { return ranks_[rank].left; });
    const auto is_of_departure = [](const std::string& end) {
      return end == "departed" || end == "left";
    };
    return somebody_left && (is_of_departure(a) || is_of_departure(b)) && !a.empty() &&
           !b.empty();
  }

  std::mt19937_64 random_;
  const Specials specials_;
  const int size_;
  DescriptionPool pool_;
  std::deque<Host> hosts_;
  std::map<int32_t, std::vector<int>> sets_;
  std::vector<std::vector<int>> asked_for_;  // members of sets
  int32_t last_set_ = 0;
  std::map<int32_t, int64_t> rounds_;  // by process set
  bool has_times_ = false;
  bool sends_at_once_ = false;
  bool repeats_ = false;
  std::map<Key, Shared> usual_;
  int64_t in_runs_ = 0;
  Decider merged_;
  Decider flat_;
  std::vector<Rank> ranks_;
  std::vector<Decision> issued_;  // those of agreements
  std::vector<std::pair<void (Simulation::*)(int), int>> possible_;
  int64_t now_ = 0;
  int64_t messages_ = 0;
  std::map<std::string, int64_t> ends_;
};

TEST(SubmissionMergerSimulationTest, ThousandsOfRandomTrees) {
  std::map<std::string, int64_t> ends;
  int64_t in_runs = 0;
  for (uint64_t seed = 0; seed < 6000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Simulation simulation(seed);
    simulation.Run();
    if (HasFatalFailure()) return;
    for (const auto& [end, count] : simulation.ends()) ends[end] += count;
    in_runs += simulation.in_runs();
  }
  // The schedules do reach their cases.
  EXPECT_GT(ends["run"], 100000);
  EXPECT_GT(in_runs, 30000);
  EXPECT_GT(ends["departed"], 10000);
  EXPECT_GT(ends["agreement"], 10000);
  for (const char* mistake : kMistakes) EXPECT_GT(ends[mistake], 10000) << mistake;
  for (const char* failure : kOtherFailures) EXPECT_GT(ends[failure], 100) << failure;
}

}  // namespace
}  // namespace keras_hvd
