// Random collectives of all types through the C API, of all ranks and of process sets:
// ranks are processes, and each makes the common requests in an order of its own, from
// several threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/collectives/numbers_testing.h"
#include "tf_ops/engine/c_api_testing.h"
#include "tf_ops/operation/kind.h"

namespace {

using keras_hvd::Bytes;
using keras_hvd::Child;
using keras_hvd::DataType;
using keras_hvd::Decoded;
using keras_hvd::Encoded;
using keras_hvd::KindTraits;
using keras_hvd::Tolerance;
using Numbers = std::vector<double>;
using Buffer = std::vector<char>;

constexpr int kSteps = 1000;
constexpr int kMostElements = 6000;  // several rounds of the exchange memory

struct ProcessSet {
  int32_t id;
  std::vector<int> members;

  // The rank's place among the members, or -1.
  int PlaceOf(int rank) const {
    const auto found = std::find(members.begin(), members.end(), rank);
    return found == members.end() ? -1 : static_cast<int>(found - members.begin());
  }
};

// A collective that all ranks of a set ask for, and this rank's part of it. Ranks are
// counted among those of the set.
class Collective {
 public:
  Collective(uint64_t seed, const std::string& name, int rank, const ProcessSet& set)
      : seed_(seed),
        name_(name),
        rank_(set.PlaceOf(rank)),
        ranks_(static_cast<int>(set.members.size())) {
    const int ranks = ranks_;
    std::mt19937_64 random(seed);
    request_.struct_size = sizeof(request_);
    request_.kind = static_cast<int32_t>(random() % keras_hvd::kKinds);
    request_.name = name_.c_str();
    request_.submitter = 1;
    root_ = static_cast<int>(random() % ranks);
    request_.root = set.members[root_];
    request_.process_set = set.id;
    request_.reduce_op = static_cast<int32_t>(random() % KHVD_ADASUM);
    if (request_.kind == KHVD_ALLREDUCE && (ranks & (ranks - 1)) == 0 &&
        random() % 4 == 0) {
      request_.reduce_op = KHVD_ADASUM;
    }
    if (traits().has_tensors) request_.count = 1;
    if (traits().takes_group) request_.count += random() % 3;
    // Of an allgather one for each tensor and rank, of an alltoall for each two ranks.
    for (int i = 0; i < ranks * std::max(ranks, request_.count); ++i) {
      sizes_.push_back(random() % (1 << random() % 13) % kMostElements);
    }
    for (int tensor = 0; tensor < request_.count; ++tensor) {
      AddTensor(tensor, DrawType(&random));
    }
    if (request_.kind == KHVD_ALLTOALL) {
      request_.splits = SplitsOf(rank_);
      request_.split_count = ranks;
    }
    request_.tensors = tensors_.data();
    request_.context = this;
    request_.allocate = Allocate;
    request_.done = Done;
  }
  Collective(const Collective&) = delete;

  // Asks in one of three ways; gives the error, or "".
  std::string Run(uint64_t way) {
    if (way % 3 == 0) return ErrorOf(khvd_run(&request_));
    const int code =
        way % 3 == 1 ? khvd_submit(&request_) : khvd_submit_and_drive(&request_);
    if (code != KHVD_OK) return ErrorOf(code);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return ended_; });
    return error_;
  }

  bool IsRight() const {
    for (int tensor = 0; tensor < request_.count; ++tensor) {
      const DataType dtype = TypeOf(tensor);
      const Numbers expected = Expected(tensor);
      const Buffer& output = outputs_[tensor];
      if (!Rounds(dtype)) {
        if (output != Encoded(dtype, expected)) return false;
        continue;
      }
      const Numbers numbers = Decoded(dtype, output);
      if (numbers.size() != expected.size()) return false;
      for (size_t i = 0; i < numbers.size(); ++i) {
        const double most = Tolerance(dtype) * (1 + std::fabs(expected[i]));
        // Written so that a NaN is wrong.
        if (!(std::fabs(numbers[i] - expected[i]) <= most)) return false;
      }
    }
    return true;
  }

 private:
  static std::string ErrorOf(int code) {
    return code == KHVD_OK ? "" : khvd_last_error();
  }

  DataType TypeOf(int32_t tensor) const {
    return static_cast<DataType>(tensors_[tensor].dtype);
  }

  const KindTraits& traits() const {
    return keras_hvd::TraitsOf(static_cast<keras_hvd::Kind>(request_.kind));
  }

  bool Reduces() const { return traits().reduces; }

  bool Rounds(DataType dtype) const {
    return Reduces() && IsFloating(dtype) &&
           (request_.reduce_op == KHVD_AVERAGE || request_.reduce_op == KHVD_ADASUM);
  }

  // One that the operation has a meaning for.
  DataType DrawType(std::mt19937_64* random) const {
    const bool sums =
        request_.reduce_op == KHVD_SUM || request_.reduce_op == KHVD_AVERAGE;
    while (true) {
      const DataType dtype = static_cast<DataType>((*random)() % keras_hvd::kDataTypes);
      if (!Reduces()) return dtype;
      if (!IsReduced(dtype)) continue;
      if (request_.reduce_op == KHVD_ADASUM && !IsFloating(dtype)) continue;
      if (!sums || dtype != DataType::kBool) return dtype;
    }
  }

  // A value of a rank's tensor, which every rank can tell: small numbers, of which sums
  // and products are exact in every type, or wrap around in the same way.
  double Value(int rank, int tensor, int64_t place) const {
    uint64_t mixed =
        seed_ * 0x9e3779b97f4a7c15 + rank * 1000003 + tensor * 10007 + place;
    mixed = (mixed ^ (mixed >> 29)) * 0xbf58476d1ce4e5b9;
    const DataType dtype = TypeOf(tensor);
    if (dtype == DataType::kBool) return static_cast<double>(mixed >> 63);
    if (IsFloat8(dtype)) {
      return static_cast<double>(mixed >> 61) - 4;  // which they have
    }
    const bool is_unsigned = dtype == DataType::kUint8 || dtype == DataType::kUint16 ||
                             dtype == DataType::kUint32 || dtype == DataType::kUint64;
    const double lowest = is_unsigned ? 0 : -20;
    if (request_.reduce_op != KHVD_PRODUCT) {
      return static_cast<double>(mixed >> 58) + lowest;
    }
    return static_cast<double>(mixed >> 61) + std::max(lowest, -4.0);
  }

  int64_t Rows(int rank, int tensor) const {
    if (request_.kind == KHVD_ALLGATHER) return sizes_[tensor * ranks_ + rank];
    if (request_.kind == KHVD_ALLTOALL) {
      return std::accumulate(SplitsOf(rank), SplitsOf(rank) + ranks_, int64_t{0});
    }
    return sizes_[tensor];
  }

  const int64_t* SplitsOf(int rank) const { return sizes_.data() + rank * ranks_; }

  Numbers Input(int rank, int tensor) const {
    Numbers input(Rows(rank, tensor));
    for (size_t i = 0; i < input.size(); ++i) input[i] = Value(rank, tensor, i);
    return input;
  }

  Numbers Expected(int tensor) const {
    std::vector<Numbers> inputs;
    for (int rank = 0; rank < ranks_; ++rank) inputs.push_back(Input(rank, tensor));
    switch (request_.kind) {
      case KHVD_BROADCAST: return inputs[root_];
      case KHVD_ALLGATHER: return Joined(inputs);
      case KHVD_ALLTOALL: return Received(inputs);
      case KHVD_REDUCESCATTER: return OwnRows(Reduced(inputs, TypeOf(tensor)));
      default:
        return request_.reduce_op == KHVD_ADASUM ? Adasum(inputs)
                                                 : Reduced(inputs, TypeOf(tensor));
    }
  }

  static Numbers Joined(const std::vector<Numbers>& inputs) {
    Numbers joined;
    for (const auto& input : inputs) {
      joined.insert(joined.end(), input.begin(), input.end());
    }
    return joined;
  }

  Numbers Received(const std::vector<Numbers>& inputs) const {
    Numbers received;
    for (int rank = 0; rank < ranks_; ++rank) {
      const int64_t* splits = SplitsOf(rank);
      const auto start =
          inputs[rank].begin() + std::accumulate(splits, splits + rank_, int64_t{0});
      received.insert(received.end(), start, start + splits[rank_]);
    }
    return received;
  }

  Numbers OwnRows(const Numbers& all) const {
    const int64_t count = static_cast<int64_t>(all.size());
    const auto start = [&](int64_t rank) {
      return all.begin() + count / ranks_ * rank + std::min(rank, count % ranks_);
    };
    return {start(rank_), start(rank_ + 1)};
  }

  Numbers Reduced(const std::vector<Numbers>& inputs, DataType dtype) const {
    Numbers result = inputs[0];
    for (size_t i = 0; i < result.size(); ++i) {
      for (int rank = 1; rank < ranks_; ++rank) {
        result[i] = Combined(result[i], inputs[rank][i]);
      }
      if (request_.reduce_op != KHVD_AVERAGE) continue;
      result[i] /= ranks_;
      if (!IsFloating(dtype)) result[i] = std::trunc(result[i]);
    }
    return result;
  }

  double Combined(double a, double b) const {
    switch (request_.reduce_op) {
      case KHVD_MIN: return std::fmin(a, b);
      case KHVD_MAX: return std::fmax(a, b);
      case KHVD_PRODUCT: return a * b;
      default: return a + b;
    }
  }

  static Numbers Adasum(std::vector<Numbers> vectors) {
    if (vectors.size() == 1) return vectors.front();
    const auto half = vectors.begin() + vectors.size() / 2;
    const Numbers a = Adasum({vectors.begin(), half});
    const Numbers b = Adasum({half, vectors.end()});
    const auto dot = [](const Numbers& x, const Numbers& y) {
      return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
    };
    const double of_a = dot(a, a) > 0 ? 1 - dot(a, b) / (2 * dot(a, a)) : 1;
    const double of_b = dot(b, b) > 0 ? 1 - dot(a, b) / (2 * dot(b, b)) : 1;
    Numbers sum(a.size());
    for (size_t i = 0; i < a.size(); ++i) sum[i] = of_a * a[i] + of_b * b[i];
    return sum;
  }

  void AddTensor(int tensor, DataType dtype) {
    khvd_tensor& added = tensors_.emplace_back();
    added.dtype = static_cast<int32_t>(dtype);
    const int64_t rows = Rows(rank_, tensor);
    inputs_.push_back(Encoded(dtype, Input(rank_, tensor)));
    int64_t output_rows = rows;
    if (request_.kind == KHVD_REDUCESCATTER) {
      output_rows = khvd_scattered_rows(request_.process_set, rows);
    }
    outputs_.emplace_back(output_rows * Bytes(dtype));
    shapes_.push_back(std::make_unique<int64_t>(rows));
    added.rank = 1;
    added.shape = shapes_.back().get();
    added.input = inputs_.back().data();
    added.output = outputs_.back().data();
  }

  static void* Allocate(void* context, int32_t tensor, const int64_t* rows,
                        int32_t count) {
    Collective& self = *static_cast<Collective*>(context);
    Buffer& output = self.outputs_[tensor];
    output.resize(std::accumulate(rows, rows + count, int64_t{0}) *
                  Bytes(self.TypeOf(tensor)));
    return output.data();
  }

  static void Done(void* context, int, const char* message) {
    Collective& self = *static_cast<Collective*>(context);
    std::lock_guard<std::mutex> lock(self.mutex_);
    self.ended_ = true;
    self.error_ = message;
    // Under the lock: the waiting thread may take this away at once.
    self.changed_.notify_one();
  }

  const uint64_t seed_;
  const std::string name_;
  const int rank_, ranks_;
  int root_ = 0;
  std::vector<int64_t> sizes_;
  std::vector<Buffer> inputs_, outputs_;
  std::vector<std::unique_ptr<int64_t>> shapes_;
  std::vector<khvd_tensor> tensors_;
  khvd_request request_ = {};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::string error_;
};

// Asks for a step's collectives, each from a thread of its own.
std::string RunStep(uint64_t seed, int step, int rank,
                    const std::vector<ProcessSet>& sets) {
  std::mt19937_64 random(seed * kSteps + step), own(random() + rank);
  std::vector<int> names(12);
  for (size_t i = 0; i < names.size(); ++i) names[i] = static_cast<int>(i);
  std::shuffle(names.begin(), names.end(), random);
  names.resize(1 + random() % 4);
  const uint64_t step_seed = random();
  const auto set_of = [&](int name) -> const ProcessSet& {
    return sets[(step_seed + name) % sets.size()];
  };
  std::shuffle(names.begin(), names.end(), own);

  std::mutex mutex;
  std::string wrong;
  std::vector<std::thread> threads;
  for (int name : names) {
    if (set_of(name).PlaceOf(rank) < 0) continue;
    threads.emplace_back([&, name, way = own()] {
      Collective collective(step_seed + name, std::to_string(name), rank, set_of(name));
      std::string error = collective.Run(way);
      if (error.empty() && collective.IsRight()) return;
      if (error.empty()) error = std::to_string(name) + " has a wrong result";
      std::lock_guard<std::mutex> lock(mutex);
      wrong = "step " + std::to_string(step) + ": " + error;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return wrong;
}

// Returns the error of a rank, or "".
std::string RunRank(int rank, int ranks, const std::string& job) {
  khvd_options options = keras_hvd::JobOptions(rank, ranks, job.c_str());
  options.exchange_bytes = 8 << 10;
  options.check = ranks % 2;  // the consistency mode as well
  if (khvd_init(&options) != KHVD_OK) return khvd_last_error();
  // All ranks, each one but one, and the halves.
  std::vector<ProcessSet> sets(1);
  for (int member = 0; member < ranks; ++member) sets[0].members.push_back(member);
  if (ranks > 2) {
    for (int without = 0; without < ranks; ++without) {
      sets.push_back(sets[0]);
      std::vector<int>& members = sets.back().members;
      members.erase(members.begin() + without);
    }
  }
  if (ranks > 3) {
    sets.push_back({0, {0, 1}});
    sets.push_back({0, {2, 3}});
  }
  for (size_t i = 1; i < sets.size(); ++i) {
    const std::vector<int32_t> members(sets[i].members.begin(), sets[i].members.end());
    const int code = khvd_add_process_set(
        members.data(), static_cast<int32_t>(members.size()), &sets[i].id);
    if (code != KHVD_OK) return khvd_last_error();
  }
  for (int step = 0; step < kSteps; ++step) {
    const std::string wrong = RunStep(ranks, step, rank, sets);
    if (!wrong.empty()) return wrong;
  }
  // Rank 0 decides for all: it stays until the others are done without it.
  khvd_request last = {};
  last.struct_size = sizeof(last);
  last.name = "last";
  last.kind = KHVD_BARRIER;
  if (khvd_run(&last) != KHVD_OK) return khvd_last_error();
  khvd_counters counters = {};
  counters.struct_size = sizeof(counters);
  khvd_get_counters(&counters);
  khvd_shutdown();
  if (counters.lost_wakes == 0) return "";
  return std::to_string(counters.lost_wakes) + " wakes were lost";
}

class MixedTest : public testing::TestWithParam<int> {};

TEST_P(MixedTest, EveryRankGetsWhatItAskedFor) {
  const std::string job = keras_hvd::JobName();
  std::vector<std::unique_ptr<Child>> ranks;
  for (int rank = 0; rank < GetParam(); ++rank) {
    ranks.push_back(std::make_unique<Child>([&, rank](const Child::Link& parent) {
      const std::string wrong = RunRank(rank, GetParam(), job);
      if (!wrong.empty()) parent.Tell(wrong);
      return wrong.empty() ? 0 : 1;
    }));
  }
  for (const auto& rank : ranks) {
    EXPECT_EQ(rank->Line(), "");
    EXPECT_EQ(rank->Reap(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, MixedTest, testing::Values(2, 3, 4));

}  // namespace
