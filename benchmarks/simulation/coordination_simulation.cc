// See coordination_simulation.h.
#include "benchmarks/simulation/coordination_simulation.h"

#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <queue>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "tf_ops/coordination/coordinator.h"
#include "tf_ops/coordination/messages.h"
#include "tf_ops/coordination/submission_merger.h"
#include "tf_ops/operation/inline_tensors.h"
#include "tf_ops/operation/operation.h"
#include "tf_ops/transport/topology.h"

namespace keras_hvd {
namespace {

constexpr size_t kCacheCapacity = 1024;  // the engine's default
constexpr int kStepsBefore = 2;          // everything is new in the first
// The cost of a piece of work is the median of its last samples, so that other work of
// the machine does not count.
constexpr size_t kSamples = 9;

double CpuSeconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void Require(const Status& status) {
  if (status.ok()) return;
  fprintf(stderr, "simulation: %s\n", status.message.c_str());
  abort();
}

// Messages that travel together.
class Bytes {
 public:
  bool empty() const { return ends_.empty(); }
  void Clear() {
    data_.clear();
    ends_.clear();
  }
  void Add(std::string_view message) {
    data_ += message;
    ends_.push_back(data_.size());
  }
  // Calls `read` for each.
  template <typename Read>
  void ForEach(const Read& read) const {
    size_t begin = 0;
    for (size_t end : ends_) {
      read(std::string_view(data_).substr(begin, end - begin));
      begin = end;
    }
  }

 private:
  std::string data_;
  std::vector<size_t> ends_;
};

// The memory of what was sent last, unless it is still on its way.
std::shared_ptr<Bytes> Empty(std::shared_ptr<Bytes>* sent) {
  if (sent->use_count() > 1) *sent = std::make_shared<Bytes>();
  (*sent)->Clear();
  return *sent;
}

struct Samples {
  std::array<double, kSamples> seconds;
  size_t count = 0;

  double Add(double now) {
    seconds[count++ % kSamples] = now;
    std::array<double, kSamples> sorted = seconds;
    const size_t many = std::min(count, kSamples);
    std::nth_element(sorted.begin(), sorted.begin() + many / 2, sorted.begin() + many);
    return sorted[many / 2];
  }
};

// One rank's side: its requests, and the decisions that end them.
struct RankNode {
  explicit RankNode(int size) : decoder(size) {}

  SubmissionEncoder encoder{kCacheCapacity};
  DecisionDecoder decoder;
  DecisionMessage decision;  // the last one read
  // The requests that it may submit, and whether it has.
  std::unordered_map<TensorKey, std::pair<const Operation*, bool>, TensorKeyHash>
      requests;
  std::shared_ptr<Bytes> sent = std::make_shared<Bytes>();
};

// The leader of a host, and on the first one the coordinator.
struct LeaderNode {
  LeaderNode(const Topology& topology, int size)
      : parent(topology.parent()),
        children(topology.children()),
        ranks(topology.local_ranks()),
        pool(size),
        decoder(size) {
    for (int rank : ranks) {
      ranks_alone.push_back({rank});
      from_ranks.emplace_back(&pool);
    }
    for (int child : children) {
      from_below.emplace_back(topology.ranks_below(child), &pool);
    }
    if (topology.hosts() == 1) return;
    std::vector<int> all(size);
    for (int rank = 0; rank < size; ++rank) all[rank] = rank;
    merger = std::make_unique<SubmissionMerger>(topology.ranks_below(topology.host()));
    merger->AddProcessSet(0, all);
  }

  const int parent;
  const std::vector<int> children;
  const std::vector<int> ranks;
  std::vector<RankSet> ranks_alone;
  DescriptionPool pool;
  std::vector<SubmissionDecoder> from_ranks;
  std::vector<MergedDecoder> from_below;
  std::unique_ptr<SubmissionMerger> merger;  // null if there is one host
  MergedEncoder encoder{kCacheCapacity};
  DecisionDecoder decoder;
  DecisionMessage decision;  // the last one read
  std::vector<Upward> upward;
  std::shared_ptr<Bytes> sent = std::make_shared<Bytes>();
};

class Simulation {
 public:
  Simulation(const SimulationOptions& options,
             const std::vector<std::shared_ptr<const Description>>& requests)
      : options_(options),
        coordinator_(options.ranks, options.fusion_bytes),
        decision_encoder_(kCacheCapacity, HostOfRanks(options)),
        host_of_(HostOfRanks(options)),
        most_inline_bytes_(MostInlineBytes(options.ranks, host_of_.back() + 1)),
        data_(most_inline_bytes_) {
    for (int rank = 0; rank < options.ranks; ++rank) {
      ranks_.emplace_back(options.ranks);
      const Topology topology(rank, host_of_);
      if (topology.is_leader()) leaders_.emplace_back(topology, options.ranks);
    }
    for (const auto& request : requests) {
      operations_.emplace_back();
      operations_.back().description = request;
      operations_.back().buffers.resize(request->tensors.size(),
                                        {data_.data(), data_.data()});
    }
    for (RankNode& rank : ranks_) {
      for (const Operation& operation : operations_) {
        rank.requests[KeyOf(*operation.description)] = {&operation, false};
      }
    }
    last_of_node_.resize(options.ranks);
    last_of_core_.resize(options.cores);
    waiting_.resize(options.ranks);
    samples_.resize(options.ranks);
  }

  SimulationResult Run() {
    SimulationResult result;
    result.hosts = static_cast<int>(leaders_.size());
    for (int step = 0; step < kStepsBefore + options_.steps; ++step) {
      result.messages = result.decisions = result.tensors_ended = 0;
      result_ = &result;
      const SimulatedStep simulated = RunStep();
      if (step >= kStepsBefore) result.steps.push_back(simulated);
    }
    return result;
  }

 private:
  enum class What { kSubmit, kFromRank, kFromBelow, kFromAbove, kFromLeader };
  using Parts = std::array<double, kParts>;

  // A node's work on what comes to it.
  struct Event {
    What what;
    int node;  // a rank; leaders are the lowest of their hosts
    int from;  // which rank of the host, or which host below
    std::shared_ptr<const Bytes> bytes;
    double time;     // when it can begin, as far as is known; then, when it ends
    int cause = -1;  // the event that it begins after; none before the step
    bool is_done = false;
    Parts parts{};  // since the end of `cause`
  };

  static std::vector<int> HostOfRanks(const SimulationOptions& options) {
    std::vector<int> hosts;
    for (int rank = 0; rank < options.ranks; ++rank) {
      hosts.push_back(rank / options.ranks_per_host);
    }
    return hosts;
  }

  // ---- Events

  SimulatedStep RunStep() {
    work_.fill(0);
    events_.clear();  // and with it what was on its way
    std::fill(last_of_node_.begin(), last_of_node_.end(), -1);
    std::fill(last_of_core_.begin(), last_of_core_.end(), -1);
    for (int rank = 0; rank < options_.ranks; ++rank) {
      Add({What::kSubmit, rank, 0, nullptr, 0});
    }
    int last = 0;
    while (!queue_.empty()) {
      const auto [time, number] = queue_.top();
      queue_.pop();
      if (events_[number].is_done || MustWait(number, time)) continue;
      for (int each : TakeArrived(number)) {
        Handle(each);
        if (EndOf(each) > EndOf(last)) last = each;
      }
    }
    SimulatedStep step;
    step.work = work_;
    step.seconds = events_[last].time;
    for (int number = last; number >= 0; number = events_[number].cause) {
      for (size_t i = 0; i < kParts; ++i) {
        step.critical[i] += events_[number].parts[i];
      }
    }
    return step;
  }

  void Add(Event event) {
    const int number = static_cast<int>(events_.size());
    queue_.emplace(event.time, number);
    events_.push_back(std::move(event));
  }

  // Whether the event's node, or all cores, are busy. It then waits, with others.
  bool MustWait(int number, double time) {
    Event& event = events_[number];
    const int on_node = last_of_node_[event.node];
    const auto core = FirstFreeCore();
    const int on_core = core == last_of_core_.end() ? -1 : *core;
    const int busy = EndOf(on_node) >= EndOf(on_core) ? on_node : on_core;
    if (EndOf(busy) <= time) return false;
    std::vector<int>& waiting = waiting_[event.node];
    const bool is_first = waiting.empty() || waiting.front() == number;
    if (waiting.empty() || !is_first) waiting.push_back(number);
    event.time = EndOf(busy);
    event.cause = busy;
    event.parts = {};
    // The first one stands for all.
    if (is_first) queue_.emplace(event.time, number);
    return true;
  }

  // All messages that a node finds when it looks.
  std::vector<int> TakeArrived(int number) {
    std::vector<int> arrived = std::move(waiting_[events_[number].node]);
    waiting_[events_[number].node].clear();
    if (arrived.empty() || arrived.front() != number) arrived.push_back(number);
    return arrived;
  }

  std::vector<int>::iterator FirstFreeCore() {
    return std::min_element(last_of_core_.begin(), last_of_core_.end(),
                            [this](int a, int b) { return EndOf(a) < EndOf(b); });
  }
  double EndOf(int number) const { return number < 0 ? 0 : events_[number].time; }

  void Handle(int number) {
    // Sending adds events.
    Event event = std::move(events_[number]);
    const int before = last_of_node_[event.node];
    if (EndOf(before) > event.time) {
      event.time = EndOf(before);
      event.cause = before;
      event.parts = {};
    }
    sent_.clear();
    began_ = CpuSeconds();
    Work(&event);
    for (const Event& each : sent_) {
      const bool hop = each.what == What::kFromBelow || each.what == What::kFromAbove;
      if (hop) Pass(&event, Part::kConnection, options_.connection_seconds);
    }
    for (Event& each : sent_) Send(event, number, std::move(each));
    event.is_done = true;
    last_of_node_[event.node] = number;
    if (!last_of_core_.empty()) *FirstFreeCore() = number;
    events_[number] = std::move(event);
  }

  void Send(const Event& from, int number, Event to) {
    const bool hop = to.what == What::kFromBelow || to.what == What::kFromAbove;
    const double seconds = hop                    ? options_.hop_seconds
                           : to.node == from.node ? 0
                                                  : options_.local_seconds;
    to.time = from.time + seconds;
    to.cause = number;
    to.parts[static_cast<size_t>(hop ? Part::kHop : Part::kLocal)] = seconds;
    result_->messages += 1;
    Add(std::move(to));
  }

  static void Pass(Event* event, Part part, double seconds) {
    event->time += seconds;
    event->parts[static_cast<size_t>(part)] += seconds;
  }

  // Counts the time since the last call as this part of the work.
  void Measure(Event* event, Part part) {
    const double now = CpuSeconds();
    const auto piece = std::make_tuple(event->what, event->from, part);
    const double seconds = samples_[event->node][piece].Add(now - began_);
    Pass(event, part, seconds);
    work_[static_cast<size_t>(part)] += seconds;
    began_ = CpuSeconds();
  }

  // ---- Work

  void Work(Event* event) {
    if (event->what == What::kFromBelow || event->what == What::kFromAbove) {
      Pass(event, Part::kConnection, options_.connection_seconds);
    }
    switch (event->what) {
      case What::kSubmit: return Submit(event);
      case What::kFromRank:
      case What::kFromBelow: return Lead(event);
      case What::kFromAbove: return PassDown(event);
      case What::kFromLeader: return Finish(event);
    }
  }

  void Submit(Event* event) {
    RankNode& rank = ranks_[event->node];
    for (auto& [key, request] : rank.requests) request.second = true;
    began_ = CpuSeconds();
    const std::shared_ptr<Bytes> bytes = Empty(&rank.sent);
    for (const Operation& operation : operations_) {
      const Description& description = *operation.description;
      const bool inlined =
          TravelsInline(description, ranks_.size(), most_inline_bytes_);
      bytes->Add(
          rank.encoder.Encode(description, false, {}, inlined ? &operation : nullptr));
    }
    const int host = host_of_[event->node];
    const int leader = leaders_[host].ranks.front();
    Measure(event, Part::kSubmit);
    sent_.push_back({What::kFromRank, leader, event->node - leader, bytes, 0});
  }

  void Lead(Event* event) {
    const int host = host_of_[event->node];
    LeaderNode& leader = leaders_[host];
    if (event->what == What::kFromRank) {
      ReadRank(*event, &leader);
      Measure(event, Part::kRanks);
    } else {
      ReadBelow(*event, &leader);
      Measure(event, Part::kBelow);
    }
    const std::shared_ptr<Bytes> bytes = Empty(&leader.sent);
    if (leader.parent < 0) {
      Decide(leader.merger.get(), bytes.get());
      Measure(event, Part::kDecide);
      if (!bytes->empty()) SendDown(leader, bytes);
      return;
    }
    PassUp(&leader, bytes.get());
    Measure(event, Part::kPassUp);
    if (bytes->empty()) return;
    const LeaderNode& parent = leaders_[leader.parent];
    const auto place = std::find(parent.children.begin(), parent.children.end(), host) -
                       parent.children.begin();
    sent_.push_back(
        {What::kFromBelow, parent.ranks.front(), static_cast<int>(place), bytes, 0});
  }

  void ReadRank(const Event& event, LeaderNode* leader) {
    event.bytes->ForEach([&](std::string_view message) {
      Submission submission;
      Require(leader->from_ranks[event.from].Decode(message, &submission));
      MergedSubmission merged;
      merged.description = std::move(submission.description);
      merged.ranks = leader->ranks_alone[event.from];
      if (submission.input.has_value()) merged.inputs = {std::move(*submission.input)};
      if (leader->merger == nullptr) {
        coordinator_.Submit(std::move(merged), 0);
      } else {
        leader->merger->Submit(std::move(merged));
      }
    });
  }

  void ReadBelow(const Event& event, LeaderNode* leader) {
    event.bytes->ForEach([&](std::string_view message) {
      UpwardMessage decoded;
      Require(leader->from_below[event.from].Decode(message, Clock::time_point(),
                                                    &decoded));
      if (const auto* run = std::get_if<SubmissionRun>(&decoded)) {
        leader->merger->Submit(*run);
      } else {
        leader->merger->Submit(std::move(std::get<MergedSubmission>(decoded)));
      }
    });
  }

  static void PassUp(LeaderNode* leader, Bytes* bytes) {
    std::vector<Upward>& messages = leader->upward;
    messages.clear();
    for (Upward message; leader->merger->Next(&message);) {
      messages.push_back(std::move(message));
    }
    for (size_t next = 0; next < messages.size();) {
      bytes->Add(leader->encoder.Encode(messages, &next, Clock::time_point()));
    }
  }

  void Decide(SubmissionMerger* merger, Bytes* bytes) {
    if (merger != nullptr) {
      for (Upward message; merger->Next(&message);) {
        coordinator_.Submit(std::move(std::get<MergedSubmission>(message)), 0);
      }
    }
    Decision decision;
    for (; coordinator_.Next(&decision); result_->decisions += 1) {
      bytes->Add(decision_encoder_.Encode(decision));
    }
  }

  void PassDown(Event* event) {
    LeaderNode& leader = leaders_[host_of_[event->node]];
    event->bytes->ForEach([&](std::string_view message) {
      Require(leader.decoder.Decode(message, &leader.decision));
    });
    Measure(event, Part::kPassDown);
    SendDown(leader, event->bytes);
  }

  // First to the leaders with the longer way.
  void SendDown(const LeaderNode& leader, const std::shared_ptr<const Bytes>& bytes) {
    for (int child : leader.children) {
      sent_.push_back({What::kFromAbove, leaders_[child].ranks.front(), 0, bytes, 0});
    }
    for (int rank : leader.ranks) {
      sent_.push_back({What::kFromLeader, rank, 0, bytes, 0});
    }
  }

  void Finish(Event* event) {
    RankNode& rank = ranks_[event->node];
    event->bytes->ForEach([&](std::string_view message) {
      Require(rank.decoder.Decode(message, &rank.decision));
      auto& run = std::get<RunMessage>(rank.decision);
      for (const TensorKey& tensor : run.tensors) {
        auto& [operation, is_pending] = rank.requests.at(tensor);
        if (!is_pending)
          Require(Status::Internal("rank " + std::to_string(event->node) + " runs '" +
                                   tensor.name + "' again"));
        if (run.results.has_value()) UnpackResults(&*run.results, *operation);
        is_pending = false;
        result_->tensors_ended += 1;
      }
    });
    Measure(event, Part::kFinish);
  }

  const SimulationOptions options_;
  Coordinator coordinator_;
  DecisionEncoder decision_encoder_;
  const std::vector<int> host_of_;
  const int64_t most_inline_bytes_;
  std::vector<char> data_;  // of all tensors that travel inline
  std::deque<Operation> operations_;
  std::deque<RankNode> ranks_;
  std::deque<LeaderNode> leaders_;

  std::vector<Event> events_;
  using Queued = std::pair<double, int>;  // when, and which
  std::priority_queue<Queued, std::vector<Queued>, std::greater<Queued>> queue_;
  std::vector<int> last_of_node_;  // events; -1 if there is none yet
  std::vector<int> last_of_core_;
  std::vector<std::vector<int>>
      waiting_;              // events that have come while nodes were busy
  std::vector<Event> sent_;  // by the event that is handled
  double began_ = 0;         // of the current measurement
  Parts work_{};             // of all nodes, in this step
  std::vector<std::map<std::tuple<What, int, Part>, Samples>> samples_;  // by node
  SimulationResult* result_ = nullptr;
};

Description Gradient(const std::string& name, std::vector<int64_t> shape) {
  Description description;
  description.name = "DistributedOptimizer/" + name;
  description.reduction.op = ReduceOp::kAverage;
  description.tensors = {{DataType::kFloat32, std::move(shape)}};
  return description;
}

}  // namespace

const char* Text(Part part) {
  switch (part) {
    case Part::kSubmit: return "ranks encode";
    case Part::kRanks: return "leaders read ranks";
    case Part::kBelow: return "leaders read leaders";
    case Part::kPassUp: return "leaders pass up";
    case Part::kDecide: return "coordinator decides";
    case Part::kPassDown: return "leaders pass down";
    case Part::kFinish: return "ranks decode";
    case Part::kConnection: return "connections";
    case Part::kHop: return "between hosts";
    case Part::kLocal: return "within hosts";
  }
  return "";
}

std::vector<std::shared_ptr<const Description>> ResNetGradients() {
  std::vector<Description> gradients;
  const auto add_layer = [&](const std::string& name, std::vector<int64_t> kernel) {
    const int64_t channels = kernel.back();
    gradients.push_back(Gradient(name + "_conv/kernel", std::move(kernel)));
    gradients.push_back(Gradient(name + "_bn/gamma", {channels}));
    gradients.push_back(Gradient(name + "_bn/beta", {channels}));
  };
  add_layer("conv1", {7, 7, 3, 64});
  int64_t inputs = 64;
  const std::array<int, 4> blocks = {3, 4, 6, 3};
  for (int stage = 0; stage < 4; ++stage) {
    const int64_t filters = int64_t{64} << stage;
    for (int block = 1; block <= blocks[stage]; ++block) {
      const std::string name =
          "conv" + std::to_string(stage + 2) + "_block" + std::to_string(block);
      if (block == 1) add_layer(name + "_0", {1, 1, inputs, 4 * filters});
      add_layer(name + "_1", {1, 1, inputs, filters});
      add_layer(name + "_2", {3, 3, filters, filters});
      add_layer(name + "_3", {1, 1, filters, 4 * filters});
      inputs = 4 * filters;
    }
  }
  gradients.push_back(Gradient("predictions/kernel", {2048, 1000}));
  gradients.push_back(Gradient("predictions/bias", {1000}));
  // Backprop computes the last ones first.
  std::vector<std::shared_ptr<const Description>> shared;
  for (auto it = gradients.rbegin(); it != gradients.rend(); ++it) {
    shared.push_back(std::make_shared<const Description>(std::move(*it)));
  }
  return shared;
}

SimulationResult Simulate(
    const SimulationOptions& options,
    const std::vector<std::shared_ptr<const Description>>& requests) {
  // With a second thread, reference counts become atomic, as they are in an engine.
  std::thread([] {}).join();
  return Simulation(options, requests).Run();
}

}  // namespace keras_hvd
