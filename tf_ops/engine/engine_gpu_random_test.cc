// The engine with tensors on GPUs, in random jobs, and with something that fails or
// leaves at a random moment: right results, or an error on every rank, in time; and
// nothing left.
//
// KERAS_HVD_GPU_SEEDS=17, or =100-500, runs these jobs instead of a few.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tf_ops/engine/engine_gpu_testing.h"
#include "tf_ops/engine/random_plan_testing.h"

namespace keras_hvd {
namespace {

using stand_in::Injection;
using stand_in::StandIn;
using Random = std::mt19937_64;

constexpr char kSeeds[] = "KERAS_HVD_GPU_SEEDS";
constexpr int kWindows = 40;
constexpr int kMostInWindow = 8;
// How much later than the first one the last rank may have its error: a rank that
// leaves waits for its peers for a few seconds.
constexpr std::chrono::seconds kInTime(20);

int Below(int end, Random* random) { return static_cast<int>((*random)() % end); }
bool OneIn(int count, Random* random) { return Below(count, random) == 0; }

// ---- Scenarios

// A collective of one process set.
struct Step {
  int set = 0;
  Plan plan;
  bool on_cpu = false;
  int without_memory = -1;  // a rank that has none for its result
};
using Window = std::vector<Step>;  // steps under way together

// The fault of some jobs.
struct Trouble {
  enum class Kind { kNone, kInjection, kLeaving, kDeath };
  Kind kind = Kind::kNone;
  Injection injection;
  int rank = 0;
  int window = 0;
};

struct Scenario {
  uint64_t seed = 0;
  int size = 0;
  Layout layout;
  int devices = 0;
  int without_nccl = -1;  // a rank
  bool checks = false;    // compares all results
  bool splits = false;    // sets are made where there is a communicator already
  int queue_limit = 0;    // groups that a GPU's queue has room for; 0: for all
  std::vector<std::vector<int>> sets;
  std::vector<Window> windows;
  Trouble trouble;
};

bool IsOnOneHost(const Scenario& scenario) {
  return scenario.layout.Of(0).hosts() == 1;
}

// One host, or any; a leader has one or two below it.
Layout RandomLayout(int size, Random* random) {
  Layout layout{std::vector<int>(size), 1 + Below(2, random)};
  const bool is_one = OneIn(2, random);
  for (int& host : layout.hosts) host = is_one ? 0 : Below(size, random);
  return layout;
}

// All ranks, and two sets, which share a rank where that is possible.
std::vector<std::vector<int>> RandomSets(int size, Random* random) {
  std::vector<int> all(size);
  std::iota(all.begin(), all.end(), 0);
  if (size == 2) return {all, {0}, {1}};
  std::vector<std::vector<int>> sets(3);
  while (sets[1] == sets[2] || sets[1] == all || sets[2] == all) {
    sets = {all, {}, {}};
    const int shared = Below(size, random);
    for (int rank = 0; rank < size; ++rank) {
      for (const int set : {1, 2}) {
        if (rank == shared || OneIn(2, random)) sets[set].push_back(rank);
      }
    }
  }
  return sets;
}

Step RandomStep(const Scenario& scenario, int number, Random* random) {
  Step step;
  step.set = Below(static_cast<int>(scenario.sets.size()), random);
  const std::vector<int>& members = scenario.sets[step.set];
  const int count = static_cast<int>(members.size());
  do {
    step.plan = IsOnOneHost(scenario)
                    ? RandomPlan(number, count, random, FillWithSmallNumbers)
                    : PlanForHosts(number, count, random);
  } while (IsRoundedByNccl(step.plan));
  const Kind kind = step.plan.asks.front().description.kind;
  step.on_cpu = kind == Kind::kBarrier || OneIn(8, random);
  const bool lacks_memory = HasOwnRows(kind) && !step.on_cpu && OneIn(20, random);
  if (lacks_memory) step.without_memory = members[Below(count, random)];
  step.plan.GiveTo(step.set, members);
  for (int index = 0; index < count; ++index) {
    step.plan.asks[index].has_memory = members[index] != step.without_memory;
  }
  return step;
}

Window RandomWindow(const Scenario& scenario, Random* random) {
  Window window;
  const int count = 1 + Below(kMostInWindow, random);
  for (int i = 0; i < count; ++i) {
    window.push_back(RandomStep(scenario, i, random));
  }
  return window;
}

// Functions that the engine calls, and those that it calls in a caller's thread.
Injection RandomInjection(int size, Random* random) {
  static const std::vector<std::string> kNccl = {
      "ncclGetUniqueId",  "ncclCommInitRankConfig",
      "ncclCommSplit",    "ncclCommFinalize",
      "ncclCommDestroy",  "ncclCommAbort",
      "ncclGroupStart",   "ncclCommGetAsyncError",
      "ncclGroupEnd",     "ncclRedOpCreatePreMulSum",
      "ncclRedOpDestroy", "ncclAllReduce",
      "ncclBroadcast",    "ncclReduce",
      "ncclAllGather",    "ncclReduceScatter",
      "ncclSend",         "ncclRecv"};
  static const std::vector<std::string> kCuda = {
      "cuDeviceGetCount",  "cuDeviceGet",
      "cuDeviceGetUuid",   "cuDevicePrimaryCtxRetain",
      "cuCtxPushCurrent",  "cuCtxPopCurrent",
      "cuCtxGetDevice",    "cuStreamCreateWithPriority",
      "cuStreamGetCtx",    "cuDevicePrimaryCtxRelease",
      "cuStreamWaitEvent", "cuCtxGetStreamPriorityRange",
      "cuEventCreate",     "cuEventRecord",
      "cuEventQuery",      "cuMemAlloc",
      "cuMemFree",         "cuMemHostAlloc",
      "cuMemFreeHost",     "cuMemcpyHtoDAsync",
      "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync",
      "cuMemsetD8Async",   "cuStreamDestroy",
      "cuEventDestroy"};
  Injection injection;
  const bool of_nccl = OneIn(2, random);
  const std::vector<std::string>& functions = of_nccl ? kNccl : kCuda;
  injection.function = functions[Below(static_cast<int>(functions.size()), random)];
  if (of_nccl) {
    injection.code = 1 + Below(6, random);
    injection.asynchronous = OneIn(3, random);
  } else {
    constexpr int32_t kCodes[] = {2, 700, 719, 999};
    injection.code = kCodes[Below(4, random)];
    injection.thread = OneIn(2, random) ? "keras_hvd" : "caller";
  }
  // Few calls of some, thousands of others.
  injection.call = 1 + Below(1 << Below(9, random), random);
  injection.rank = Below(size + 1, random) - 1;
  return injection;
}

Trouble RandomTrouble(int size, Random* random) {
  Trouble trouble;
  trouble.rank = Below(size, random);
  trouble.window = Below(kWindows, random);
  const int chance = Below(8, random);
  if (chance < 2) return trouble;
  if (chance < 6) {
    trouble.kind = Trouble::Kind::kInjection;
    trouble.injection = RandomInjection(size, random);
  } else {
    trouble.kind = chance == 6 ? Trouble::Kind::kLeaving : Trouble::Kind::kDeath;
  }
  return trouble;
}

Scenario RandomScenario(uint64_t seed) {
  Random random(seed);
  Scenario scenario;
  scenario.seed = seed;
  scenario.size = 2 + Below(3, &random);
  scenario.layout = RandomLayout(scenario.size, &random);
  scenario.devices = scenario.size;
  if (IsOnOneHost(scenario) && OneIn(8, &random)) scenario.devices = scenario.size - 1;
  if (OneIn(8, &random)) scenario.without_nccl = Below(scenario.size, &random);
  scenario.checks = OneIn(8, &random);
  scenario.splits = OneIn(2, &random);
  if (OneIn(3, &random)) scenario.queue_limit = 1 + Below(3, &random);
  scenario.sets = RandomSets(scenario.size, &random);
  for (int i = 0; i < kWindows; ++i) {
    scenario.windows.push_back(RandomWindow(scenario, &random));
  }
  scenario.trouble = RandomTrouble(scenario.size, &random);
  return scenario;
}

std::string Describe(const Scenario& scenario) {
  const Trouble& trouble = scenario.trouble;
  std::string text = "seed " + std::to_string(scenario.seed) + ": " +
                     std::to_string(scenario.size) + " ranks, " +
                     testing::PrintToString(scenario.layout);
  if (scenario.devices < scenario.size) text += " that share GPUs";
  if (scenario.queue_limit > 0) {
    text += ", room for " + std::to_string(scenario.queue_limit);
  }
  const std::string rank = "rank " + std::to_string(trouble.rank);
  const std::string window = " in window " + std::to_string(trouble.window);
  if (trouble.kind == Trouble::Kind::kLeaving) text += ", " + rank + " leaves" + window;
  if (trouble.kind == Trouble::Kind::kDeath) text += ", " + rank + " dies" + window;
  if (trouble.kind == Trouble::Kind::kInjection) {
    const Injection& injection = trouble.injection;
    text += ", call " + std::to_string(injection.call) + " of " + injection.function +
            " gives " + std::to_string(injection.code) +
            (injection.asynchronous ? " later" : "") + " (rank " +
            std::to_string(injection.rank) + ", thread '" + injection.thread + "')";
  }
  return text + ". Again: bazel test --test_env=KERAS_HVD_GPU_SEEDS=" +
         std::to_string(scenario.seed) + " //tf_ops/engine:engine_gpu_random_test";
}

// ---- One rank

class RandomRank {
 public:
  RandomRank(const Scenario& scenario, GpuJob* job, int rank)
      : scenario_(scenario),
        job_(*job),
        self_((*job)[rank]),
        rank_(rank),
        random_(scenario.seed * 100 + rank) {}

  // As a script does: it ends with its first error, and leaves.
  void Run() {
    if (scenario_.splits) Note(Connect());
    if (error_.ok()) Note(AddSets());
    for (int number = 0; error_.ok() && number < kWindows; ++number) {
      const bool ends =
          scenario_.trouble.rank == rank_ && scenario_.trouble.window == number;
      RunWindow(number, ends ? scenario_.trouble.kind : Trouble::Kind::kNone);
      if (ends && scenario_.trouble.kind == Trouble::Kind::kLeaving) return;
    }
    if (!error_.ok()) job_.Stop(rank_);
  }

  const Status& error() const { return error_; }
  Clock::time_point failed_at() const { return failed_at_; }

 private:
  struct Submitted {
    const Step* step = nullptr;
    int index = 0;  // this rank's place among the members
    GpuMode mode;
    size_t number = 0;
    Status status;
  };

  void Note(const Status& status) {
    if (status.ok() || !error_.ok()) return;
    error_ = status;
    failed_at_ = Clock::now();
  }

  Status Connect() {
    Buffer output;
    return self_.Run(Sum("connects", {1}), &output);
  }

  Status AddSets() {
    for (size_t set = 1; set < scenario_.sets.size(); ++set) {
      int32_t id = -1;
      const CallerThread caller;
      const Status status = self_.engine().AddProcessSet(scenario_.sets[set], &id);
      if (!status.ok()) return status;
      if (id != static_cast<int32_t>(set)) return Status::Internal("another set");
    }
    return Status::Ok();
  }

  void RunWindow(int number, Trouble::Kind trouble) {
    std::vector<Submitted> window = InOwnOrder(scenario_.windows[number]);
    const size_t leaves_after = Below(static_cast<int>(window.size()) + 1, &random_);
    for (size_t i = 0; i < window.size(); ++i) {
      if (trouble != Trouble::Kind::kNone && i == leaves_after) Go(trouble);
      Submit(&window[i]);
    }
    if (trouble != Trouble::Kind::kNone && leaves_after == window.size()) Go(trouble);
    std::shuffle(window.begin(), window.end(), random_);
    for (Submitted& each : window) End(&each);
    for (const Submitted& each : window) Check(each);
    for (const Submitted& each : window) {
      if (!each.step->on_cpu) self_.Free(each.number);
    }
  }

  void Go(Trouble::Kind trouble) {
    if (trouble == Trouble::Kind::kLeaving) {
      job_.Stop(rank_);
    } else if (trouble == Trouble::Kind::kDeath) {
      job_.state((rank_ + 1) % scenario_.size)
          .Fail(Code::kRankFailed, "rank " + std::to_string(rank_) + " died", rank_);
    }
  }

  std::vector<Submitted> InOwnOrder(const Window& window) {
    std::vector<Submitted> own;
    for (const Step& step : window) {
      const int index = step.plan.PlaceOf(rank_);
      if (index < 0) continue;
      Submitted& each = own.emplace_back();
      each.step = &step;
      each.index = index;
      each.mode = {OneIn(2, &random_), OneIn(2, &random_), OneIn(2, &random_)};
    }
    std::shuffle(own.begin(), own.end(), random_);
    return own;
  }

  void Submit(Submitted* each) {
    const Ask& ask = each->step->plan.asks[each->index];
    each->number =
        each->step->on_cpu ? self_.on_cpu().Submit(ask) : self_.Submit(ask, each->mode);
  }

  void End(Submitted* each) {
    if (each->step->on_cpu) {
      each->status = self_.on_cpu().End(each->number);
    } else {
      each->status = self_.End(each->number);
      if (each->status.ok() && each->mode.deferred) {
        each->status = self_.TryToAwait(each->number);
      }
    }
    const bool expected = each->step->without_memory == rank_ &&
                          Contains(each->status.message, "no memory for the result");
    if (!expected) Note(each->status);
  }

  // A result that is not there yet is the one of a job that has failed by then.
  void Check(const Submitted& each) {
    if (!each.status.ok()) return;
    const Buffer& output = each.step->on_cpu ? self_.on_cpu().Output(each.number)
                                             : self_.Output(each.number);
    const bool may_be_wrong = !each.step->on_cpu && job_.state(rank_).Failed();
    if (!may_be_wrong) {
      EXPECT_TRUE(HasResult(each.step->plan, each.index, output))
          << Details(each.step->plan.asks[each.index].description);
    }
  }

  const Scenario& scenario_;
  GpuJob& job_;
  GpuRank& self_;
  const int rank_;
  Random random_;
  Status error_;
  Clock::time_point failed_at_;
};

// ---- All ranks

// Functions that give something back, which is left when they fail.
int LeaksOf(const Scenario& scenario) {
  if (scenario.trouble.kind != Trouble::Kind::kInjection) return 0;
  for (const char* const function :
       {"cuMemFree", "cuMemFreeHost", "cuEventDestroy", "cuStreamDestroy",
        "cuDevicePrimaryCtxRelease", "cuCtxPushCurrent", "ncclCommDestroy",
        "ncclRedOpDestroy"}) {
    if (scenario.trouble.injection.function == function) return 1;
  }
  return 0;
}

// An error that says what has happened to the job, or to this rank's own call.
bool SaysWhy(const Status& error, const Status& failure) {
  if (!failure.ok() && Contains(error.message, failure.message)) return true;
  if (Contains(error.message, "CUDA failed in ")) return true;
  if (error.code == Code::kShutDown) return true;
  return error.code == Code::kRankFailed && Contains(error.message, "has left the job");
}

// Returns how many ranks got an error.
int RunScenario(const StandIn& libraries, const Scenario& scenario) {
  const std::string text = Describe(scenario);
  SCOPED_TRACE(text);
  // A job without an end says nothing else.
  if (getenv(kSeeds) != nullptr) fprintf(stderr, "%s\n", text.c_str());
  GpuJob job(
      libraries, scenario.layout, scenario.seed,
      [&](EngineOptions* options, int rank) {
        options->check = scenario.checks;
        if (rank != scenario.without_nccl) return;
        options->gpu_libraries.nccl = "/no/libnccl.so.2";
      },
      scenario.devices);
  job.AllowLeaks(LeaksOf(scenario));
  libraries->LimitQueue(scenario.queue_limit);
  const Trouble& trouble = scenario.trouble;
  if (trouble.kind == Trouble::Kind::kInjection) libraries->Inject(trouble.injection);
  std::deque<RandomRank> ranks;
  for (int rank = 0; rank < scenario.size; ++rank) {
    ranks.emplace_back(scenario, &job, rank);
  }
  job.ForEach([&](GpuRank&, int rank) {
    SCOPED_TRACE(text);
    ranks[rank].Run();
  });
  std::vector<Clock::time_point> failed_at;
  for (int rank = 0; rank < scenario.size; ++rank) {
    const Status& error = ranks[rank].error();
    if (error.ok()) continue;
    failed_at.push_back(ranks[rank].failed_at());
    EXPECT_TRUE(SaysWhy(error, job.state(rank).Failure())) << error.message;
    EXPECT_NE(trouble.kind, Trouble::Kind::kNone) << error.message;
  }
  if (!failed_at.empty()) {
    const auto [first, last] = std::minmax_element(failed_at.begin(), failed_at.end());
    EXPECT_LT(*last - *first, kInTime);
  }
  return static_cast<int>(failed_at.size());
}

// The first and the last one.
std::pair<uint64_t, uint64_t> Seeds() {
  const char* const asked = getenv(kSeeds);
  if (asked == nullptr) return {1, 24};
  char* end = nullptr;
  const uint64_t first = strtoull(asked, &end, 10);
  return {first, *end == '-' ? strtoull(end + 1, nullptr, 10) : first};
}

TEST(GpuRandomTest, RightResultsOrAnErrorOnEveryRank) {
  const StandIn libraries;
  const auto [first, last] = Seeds();
  int failed = 0;
  for (uint64_t seed = first; seed <= last; ++seed) {
    failed += RunScenario(libraries, RandomScenario(seed)) > 0 ? 1 : 0;
    if (HasFailure()) break;
  }
  // Some of the troubles come too late, or to nobody.
  EXPECT_GE(failed, static_cast<int>(last - first) / 4);
}

}  // namespace
}  // namespace keras_hvd
