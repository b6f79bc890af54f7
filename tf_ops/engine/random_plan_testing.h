// For tests of the engine: random collectives, their right results on each rank, and
// ranks that ask for them.
#pragma once

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "tf_ops/collectives/numbers_testing.h"
#include "tf_ops/collectives/parts.h"
#include "tf_ops/collectives/reduce.h"
#include "tf_ops/engine/engine_testing.h"

namespace keras_hvd {

// A request of each member, and its right result.
struct Plan {
  std::vector<int> members;  // ranks, in their order
  std::vector<Ask> asks;
  std::vector<Buffer> expected;

  // The rank's place among the members, or -1.
  int PlaceOf(int rank) const {
    const auto found = std::lower_bound(members.begin(), members.end(), rank);
    const bool is_member = found != members.end() && *found == rank;
    return is_member ? static_cast<int>(found - members.begin()) : -1;
  }
  // Makes it one of a process set.
  void GiveTo(int32_t process_set, const std::vector<int>& ranks) {
    members = ranks;
    for (Ask& ask : asks) {
      ask.description.process_set = process_set;
      ask.description.root = ranks[ask.description.root];
    }
  }
};

inline std::vector<int64_t> RandomSplits(int64_t rows, int size) {
  std::vector<int64_t> splits(size, rows / size / 2);
  splits[rows % size] += rows - size * splits[0];
  return splits;
}

// Makes each rank's right result of a reducescatter of int32[rows, 3], at the front of
// memory for all of it.
inline void KeepOwnRows(Plan* plan) {
  const int size = static_cast<int>(plan->asks.size());
  const int64_t row_bytes = 3 * sizeof(int32_t);
  for (int rank = 0; rank < size; ++rank) {
    Buffer& expected = plan->expected[rank];
    const int64_t rows = static_cast<int64_t>(expected.size()) / row_bytes;
    const auto at = [&](int of) {
      return expected.begin() + PartStart(rows, of, size) * row_bytes;
    };
    Buffer own(at(rank), at(rank + 1));
    own.resize(expected.size());
    expected = own;
  }
}

// Makes each rank's right result of an alltoall of int32[rows].
inline void ExchangeRows(Plan* plan) {
  for (const Ask& ask : plan->asks) {
    auto from = ask.input.begin();
    for (size_t peer = 0; peer < plan->asks.size(); ++peer) {
      const auto end = from + ask.splits[peer] * sizeof(int32_t);
      plan->expected[peer].insert(plan->expected[peer].end(), from, end);
      from = end;
    }
  }
}

// Fills elements of a type.
using Fill = std::function<void(DataType dtype, Buffer* elements, std::mt19937_64*)>;

// Never NaN, of which a product may keep the one or the other.
inline void FillWithBits(DataType, Buffer* elements, std::mt19937_64* random) {
  for (char& byte : *elements) byte = static_cast<char>((*random)() & 0xBF);
}

// Numbers whose sums have the same bits in any order, with any rounding.
inline void FillWithSmallNumbers(DataType dtype, Buffer* elements,
                                 std::mt19937_64* random) {
  std::vector<double> numbers(elements->size() / Bytes(dtype));
  for (double& number : numbers) number = static_cast<double>((*random)() % 4);
  *elements = Encoded(dtype, numbers);
}

// Any type but truth values, which have no sums.
inline DataType RandomNumberType(std::mt19937_64* random) {
  const int drawn = static_cast<int>((*random)() % (kReducedDataTypes - 1));
  return static_cast<DataType>(drawn < static_cast<int>(DataType::kBool) ? drawn
                                                                         : drawn + 1);
}

inline Plan RandomPlan(int number, int size, std::mt19937_64* random,
                       const Fill& fill = FillWithBits) {
  Plan plan;
  plan.members.resize(size);
  std::iota(plan.members.begin(), plan.members.end(), 0);
  Description description;
  description.name = "request" + std::to_string(number);
  description.kind = static_cast<Kind>((*random)() % kKinds);
  std::vector<int64_t> rows(size);
  if (description.kind == Kind::kAllreduce) {
    const DataType dtype = RandomNumberType(random);
    const ReduceOp op = static_cast<ReduceOp>((*random)() % kElementReduceOps);
    description.reduction = {op, (*random)() % 2 == 0 ? 1.0 : 0.5, 1};
    const int tensors = 1 + (*random)() % 3;
    for (int i = 0; i < tensors; ++i) {
      const int64_t most = (*random)() % 8 == 0 ? 9000 : 50;
      description.tensors.push_back(
          {dtype, {static_cast<int64_t>((*random)() % most)}});
    }
  } else if (description.kind == Kind::kAllgather) {
    description.tensors = {{DataType::kInt32, {-1}}};
    for (int64_t& count : rows) count = (*random)() % 3000;
  } else if (description.kind == Kind::kBroadcast) {
    description.root = (*random)() % size;
    description.tensors = {
        {DataType::kInt8, {static_cast<int64_t>((*random)() % 20000)}}};
  } else if (description.kind == Kind::kReducescatter) {
    description.tensors = {
        {DataType::kInt32, {static_cast<int64_t>((*random)() % 2000), 3}}};
  } else if (description.kind == Kind::kAlltoall) {
    description.tensors = {{DataType::kInt32, {-1}}};
    for (int64_t& count : rows) count = (*random)() % 3000;
  }
  for (int rank = 0; rank < size; ++rank) {
    Ask ask;
    ask.description = description;
    ask.rows = rows[rank];
    if (description.kind == Kind::kAlltoall) ask.splits = RandomSplits(ask.rows, size);
    const bool own_rows = HasOwnRows(description.kind);
    ask.input.resize(own_rows ? rows[rank] * sizeof(int32_t) : description.bytes());
    if (!ask.input.empty()) {
      fill(description.tensors.front().dtype, &ask.input, random);
    }
    plan.asks.push_back(std::move(ask));
  }
  Buffer expected;
  if (description.kind == Kind::kAllgather) {
    for (const Ask& ask : plan.asks) {
      expected.insert(expected.end(), ask.input.begin(), ask.input.end());
    }
  } else if (description.kind == Kind::kBroadcast) {
    expected = plan.asks[description.root].input;
  } else if (Reduces(description.kind)) {
    expected.resize(description.bytes());
    std::vector<const void*> inputs;
    for (const Ask& ask : plan.asks) inputs.push_back(ask.input.data());
    // All tensors of a group have one type here: they are one line of elements.
    const DataType dtype = description.tensors[0].dtype;
    Reduce(description.reduction, dtype, inputs.data(), size,
           static_cast<int64_t>(expected.size()) / Bytes(dtype), expected.data());
  }
  plan.expected.assign(size, expected);
  if (description.kind == Kind::kReducescatter) KeepOwnRows(&plan);
  if (description.kind == Kind::kAlltoall) ExchangeRows(&plan);
  return plan;
}

// A collective that has the same bits on one host and on several: none of narrow
// floats, which are rounded as they leave a host.
inline Plan PlanForHosts(int number, int size, std::mt19937_64* random) {
  while (true) {
    const Plan plan = RandomPlan(number, size, random, FillWithSmallNumbers);
    const Description& description = plan.asks.front().description;
    if (description.kind != Kind::kAllreduce) return plan;
    const DataType dtype = description.tensors.front().dtype;
    if (!IsFloating(dtype) || Bytes(dtype) >= 4) return plan;
  }
}

// Thirds differ in their last bits between NCCL and the CPU.
inline bool IsRoundedByNccl(const Plan& plan) {
  return plan.asks.front().description.reduction.op == ReduceOp::kAverage &&
         plan.asks.size() == 3;
}

// Whether a member got its right result: of a reducescatter's memory only its own rows
// are its result.
inline bool HasResult(const Plan& plan, size_t index, const Buffer& output) {
  const Description& description = plan.asks[index].description;
  const Buffer& expected = plan.expected[index];
  if (description.kind != Kind::kReducescatter) return output == expected;
  const int64_t rows = description.tensors.front().shape.front();
  const int64_t own =
      PartSize(rows, static_cast<int>(index), static_cast<int>(plan.asks.size())) * 3 *
      sizeof(int32_t);
  return output.size() == expected.size() &&
         std::equal(output.begin(), output.begin() + own, expected.begin());
}

// Asks for the collectives that the rank is a member of, all under way together and in
// an order of its own, and ends with the results, bit for bit.
inline void RunAll(Rank* self, int rank, const std::vector<Plan>& plans,
                   unsigned seed = 0) {
  std::vector<std::pair<const Plan*, size_t>> own;  // and its request's number
  for (const Plan& plan : plans) {
    if (plan.PlaceOf(rank) >= 0) own.emplace_back(&plan, 0);
  }
  std::shuffle(own.begin(), own.end(), std::mt19937(seed + rank));
  for (auto& [plan, number] : own) {
    number = self->Submit(plan->asks[plan->PlaceOf(rank)]);
  }
  self->EndAll();
  for (const auto& [plan, number] : own) {
    const int place = plan->PlaceOf(rank);
    ASSERT_EQ(self->End(number).message, "");
    ASSERT_TRUE(self->Output(number) == plan->expected[place])
        << Details(plan->asks[place].description) << " on rank " << rank;
  }
}

}  // namespace keras_hvd
