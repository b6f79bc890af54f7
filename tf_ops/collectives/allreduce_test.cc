// Allreduce over ranks, sizes, types and groups.
#include "tf_ops/collectives/allreduce.h"

#include "tf_ops/collectives/testing.h"

namespace keras_hvd {
namespace {

// Leaves no NaN, whose payload may differ from one loop to another.
void ClearHighestExponentBits(DataType dtype, std::vector<char>* bytes) {
  const size_t step = Bytes(dtype);
  for (size_t i = step - 1; i < bytes->size(); i += step) (*bytes)[i] &= ~0x40;
}

// One tensor of each size, reduced as one group; checked against Reduce itself, which
// has tests of its own, on the whole tensors.
void CheckGroup(Ranks* ranks, const Reduction& reduction,
                const std::vector<std::pair<DataType, int64_t>>& group, bool in_place,
                const AllreduceOptions& settings = {}, bool mixes_stores = false) {
  const int size = ranks->size();
  std::vector<std::vector<std::vector<char>>> inputs(size), outputs(size);
  for (int rank = 0; rank < size; ++rank) {
    for (const auto& [dtype, elements] : group) {
      std::vector<char> bytes =
          RandomBytes(elements * Bytes(dtype), rank * 7919 + elements);
      if (dtype == DataType::kBool) {
        for (char& byte : bytes) byte &= 1;
      }
      if (IsFloating(dtype)) ClearHighestExponentBits(dtype, &bytes);
      outputs[rank].push_back(in_place ? bytes : std::vector<char>(bytes.size()));
      inputs[rank].push_back(std::move(bytes));
    }
  }
  ranks->Run([&](int rank, Communicator* communicator) {
    AllreduceOptions options = settings;
    options.reduction = reduction;
    if (mixes_stores) options.stores = static_cast<Stores>(rank % kStoresKinds);
    for (size_t i = 0; i < group.size(); ++i) {
      const void* input = in_place ? outputs[rank][i].data() : inputs[rank][i].data();
      options.tensors.push_back(
          {group[i].first, group[i].second, input, outputs[rank][i].data()});
    }
    EXPECT_TRUE(Allreduce(options, communicator));
  });
  for (size_t i = 0; i < group.size(); ++i) {
    const auto [dtype, elements] = group[i];
    std::vector<const void*> pointers;
    for (int rank = 0; rank < size; ++rank) pointers.push_back(inputs[rank][i].data());
    std::vector<char> expected(elements * Bytes(dtype));
    Reduce(reduction, dtype, pointers.data(), size, elements, expected.data());
    for (int rank = 0; rank < size; ++rank) {
      ASSERT_TRUE(outputs[rank][i] == expected)
          << Name(reduction.op) << " of " << elements << " " << Name(dtype)
          << " on rank " << rank << " of " << size;
    }
  }
}

class AllreduceTest : public testing::TestWithParam<int> {};

// Sizes around the cache line, the limit of small tensors, and one and several windows
// of 4 KiB.
const std::vector<int64_t> kSizes = {0,    1,    3,    15,   16,   17,    1023,  1024,
                                     1025, 2047, 4095, 4096, 4097, 10007, 40000, 65537};

TEST_P(AllreduceTest, AllSizes) {
  Ranks ranks(GetParam());
  for (int64_t elements : kSizes) {
    CheckGroup(&ranks, {ReduceOp::kSum}, {{DataType::kInt32, elements}}, false);
    CheckGroup(&ranks, {ReduceOp::kSum}, {{DataType::kInt32, elements}}, true);
  }
}

TEST_P(AllreduceTest, EveryKindOfStores) {
  Ranks ranks(GetParam());
  for (int kind = 0; kind < kStoresKinds; ++kind) {
    for (int64_t elements : kSizes) {
      for (bool in_place : {false, true}) {
        for (DataType dtype : {DataType::kInt32, DataType::kFloat32}) {
          AllreduceOptions settings;
          settings.stores = static_cast<Stores>(kind);
          CheckGroup(&ranks, {ReduceOp::kAverage},
                     {{DataType::kInt8, 5}, {dtype, elements}}, in_place, settings);
        }
      }
    }
  }
}

// Members do not wait to agree on them.
TEST_P(AllreduceTest, AnotherKindOfStoresOnEachRank) {
  Ranks ranks(GetParam());
  for (int64_t elements : kSizes) {
    for (bool in_place : {false, true}) {
      CheckGroup(&ranks, {ReduceOp::kAverage},
                 {{DataType::kInt8, 5}, {DataType::kFloat32, elements}}, in_place, {},
                 /*mixes_stores=*/true);
    }
  }
}

TEST_P(AllreduceTest, SmallTensorsInLargeExchangeMemory) {
  Ranks ranks(GetParam(), 1 << 20);
  for (int64_t elements : kSizes) {
    CheckGroup(&ranks, {ReduceOp::kSum}, {{DataType::kInt64, elements}}, false);
  }
}

// As autotuning changes them, from one collective to the next.
TEST_P(AllreduceTest, WindowsAndSmallTensorsOfAllSizes) {
  Ranks ranks(GetParam(), 1 << 20);
  AllreduceOptions settings;
  for (int64_t small : {int64_t{0}, int64_t{2} << 10, int64_t{64} << 10, INT64_MAX}) {
    for (int64_t window : {kCacheLine, int64_t{3000} * kCacheLine, int64_t{4} << 20}) {
      settings.small_bytes = small;
      settings.window_bytes = window;
      for (int64_t elements : {1, 1025, 10007, 40000, 200000}) {
        if (elements * 4 > 2000 * window) continue;
        CheckGroup(&ranks, {ReduceOp::kSum}, {{DataType::kInt32, elements}}, false,
                   settings);
      }
    }
  }
}

TEST_P(AllreduceTest, AllTypesAndReductions) {
  Ranks ranks(GetParam());
  for (int dtype = 0; dtype < kReducedDataTypes; ++dtype) {
    for (int op = 0; op < kElementReduceOps; ++op) {
      for (double scale : {1.0, 0.5}) {
        const Reduction reduction = {static_cast<ReduceOp>(op), scale, 1 / scale};
        if (!Supports(reduction, static_cast<DataType>(dtype))) continue;
        CheckGroup(&ranks, reduction, {{static_cast<DataType>(dtype), 3001}}, false);
        CheckGroup(&ranks, reduction, {{static_cast<DataType>(dtype), 77}}, true);
      }
    }
  }
}

TEST_P(AllreduceTest, GroupsOfMixedTypesAndSizes) {
  Ranks ranks(GetParam());
  std::mt19937 random(GetParam());
  for (int round = 0; round < 20; ++round) {
    std::vector<std::pair<DataType, int64_t>> group;
    for (unsigned i = 0; i < 1 + random() % 30; ++i) {
      group.emplace_back(RandomNumberType(&random),
                         random() % 3 == 0 ? random() % 5000 : random() % 40);
    }
    CheckGroup(&ranks, {ReduceOp::kAverage}, group, round % 2 == 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, AllreduceTest, testing::Range(1, 6));

// Groups of ranks that overlap use the same exchange memories one after another.
TEST(AllreduceSets, OverlappingSetsFollowEachOther) {
  Ranks ranks(4);
  const std::vector<std::vector<int>> sets = {
      {0, 1}, {1, 2, 3}, {0, 3}, {0, 1, 2, 3}, {2}};
  for (int round = 0; round < 40; ++round) {
    const std::vector<int>& members = sets[round % sets.size()];
    std::vector<std::vector<float>> data(4);
    for (int rank : members) data[rank].assign(3000, static_cast<float>(rank + round));
    ranks.Run(members, [&](int rank, Communicator* communicator) {
      const AllreduceOptions options = {
          {ReduceOp::kMax},
          {{DataType::kFloat32, 3000, data[rank].data(), data[rank].data()}}};
      EXPECT_TRUE(Allreduce(options, communicator));
    });
    for (int rank : members) {
      for (float value : data[rank]) ASSERT_EQ(value, members.back() + round);
    }
  }
}

}  // namespace
}  // namespace keras_hvd
