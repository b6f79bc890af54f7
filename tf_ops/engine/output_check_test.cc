// A difference is named: the first in the batch, by its operation and its place there.
#include "tf_ops/engine/output_check.h"

#include "tf_ops/collectives/hashes.h"
#include "tf_ops/collectives/testing.h"

namespace keras_hvd {
namespace {

using Operations = std::vector<std::unique_ptr<Operation>>;

// Two operations of a batch, with 1 and 3 tensors of two floats, whose results begin at
// `results`, one behind the other.
Operations Batch(float* results) {
  Operations operations;
  for (int count : {1, 3}) {
    auto description = std::make_shared<Description>();
    description->name = count == 1 ? "single" : "group";
    description->tensors.assign(count, {DataType::kFloat32, {2}});
    operations.push_back(std::make_unique<Operation>());
    operations.back()->description = std::move(description);
    for (int i = 0; i < count; ++i, results += 2) {
      operations.back()->buffers.push_back({nullptr, results});
    }
  }
  return operations;
}

HashExchange ExchangeBy(Communicator* communicator) {
  return [communicator](const auto& own, auto* all) {
    return AllgatherHashes(own, communicator, all);
  };
}

// The difference that members 1, 3 and 4 of five ranks find, given the place that is
// `wrong` on 3.
std::string Difference(const std::vector<int>& wrong) {
  const std::vector<int> members = {1, 3, 4};
  Ranks ranks(5);
  std::vector<std::string> differences(5);
  ranks.Run(members, [&](int rank, Communicator* communicator) {
    std::vector<float> results(8, 1.5f);
    for (int place : wrong) results[place] += rank == 3 ? 1 : 0;
    EXPECT_TRUE(CompareOutputs(Batch(results.data()), members, ExchangeBy(communicator),
                               &differences[rank]));
  });
  EXPECT_EQ(differences[3], differences[1]);
  EXPECT_EQ(differences[4], differences[1]);
  return differences[1];
}

TEST(OutputCheckTest, EqualResultsAreNoDifference) { EXPECT_EQ(Difference({}), ""); }

TEST(OutputCheckTest, ADifferenceIsNamed) {
  const std::string text = Difference({5, 6});
  EXPECT_EQ(text.find("the result of tensor 2 of 3 of allreduce 'group' differs "
                      "between ranks (hashes: ranks 1, 4: "),
            0u)
      << text;
  EXPECT_NE(text.find("; rank 3: "), std::string::npos) << text;
}

TEST(OutputCheckTest, AnOperationOfOneTensorHasNoPlaces) {
  const std::string text = Difference({1, 7});
  EXPECT_EQ(text.find("the result of allreduce 'single' differs"), 0u) << text;
}

TEST(OutputCheckTest, WhoHasNoResultIsLeftOut) {
  const std::vector<int> members = {0, 1};
  Ranks ranks(2);
  ranks.Run([&](int rank, Communicator* communicator) {
    std::vector<float> results(8);
    Operations operations = Batch(results.data());
    operations[0]->out_of_memory = rank == 0;
    results[0] = rank;
    std::string difference = "none yet";
    EXPECT_TRUE(
        CompareOutputs(operations, members, ExchangeBy(communicator), &difference));
    EXPECT_EQ(difference, "");
  });
}

}  // namespace
}  // namespace keras_hvd
