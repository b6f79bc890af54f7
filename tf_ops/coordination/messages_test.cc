// Messages: decoding gives back the encoded one, and a malformed one is an error.
#include "tf_ops/coordination/messages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/coordination/coordinator_testing.h"
#include "tf_ops/operation/inline_tensors.h"

namespace keras_hvd {
namespace {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Gt;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Le;
using ::testing::Not;
using ::testing::SizeIs;

constexpr int kSize = 4;
const std::vector<int> kOneHost(8);

// Something else in every field.
Description Everything() {
  Description description;
  description.process_set = 3;
  description.name = "grad/w\xc3\xa4";
  description.kind = Kind::kAllgather;
  description.reduction = {ReduceOp::kMax, 0.5, -2};
  description.root = 2;
  description.tensors = {{DataType::kBfloat16, {-1, 7, 0}},
                         {DataType::kComplex128, {}},
                         {DataType::kUint8, {-1}}};
  description.members = {0, 1, 3};
  description.on_gpu = true;
  description.labels = "dense/kernel\ndense/bias";
  return description;
}

void ExpectEqual(const Description& found, const Description& wanted) {
  EXPECT_TRUE(found == wanted);
  EXPECT_EQ(found.process_set, wanted.process_set);
  EXPECT_EQ(found.name, wanted.name);
  EXPECT_EQ(found.labels, wanted.labels);
}

Description Agreement(Kind kind) {
  Description description;
  description.kind = kind;
  description.members = {1, 2};
  return description;
}

std::string Fields(std::initializer_list<int64_t> integers) {
  std::string message;
  for (int64_t integer : integers) {
    message.append(reinterpret_cast<const char*>(&integer), sizeof(integer));
  }
  return message;
}

void SetField(std::string* message, size_t field, int64_t value) {
  memcpy(message->data() + field * sizeof(value), &value, sizeof(value));
}

// ---- Submissions

class SubmissionTest : public ::testing::Test {
 protected:
  std::string Encode(const Description& description) {
    return std::string(encoder_.Encode(description, false, {}, nullptr));
  }
  Submission Decode(std::string_view message) {
    Submission submission;
    const Status status = decoder_.Decode(message, &submission);
    EXPECT_TRUE(status.ok()) << status.message;
    return submission;
  }
  std::string ErrorOf(std::string_view message) {
    Submission submission;
    SubmissionDecoder decoder(&pool_);
    const Status status = decoder.Decode(message, &submission);
    EXPECT_EQ(status.code, Code::kInternal);
    return status.message;
  }

  SubmissionEncoder encoder_{16};
  DescriptionPool pool_{kSize};
  SubmissionDecoder decoder_{&pool_};
};

TEST_F(SubmissionTest, HasEveryFieldOfItsDescription) {
  const Submission submission = Decode(Encode(Everything()));
  ExpectEqual(*submission.description, Everything());
  EXPECT_FALSE(submission.duplicate);
  EXPECT_FALSE(submission.submitted.has_value());
  EXPECT_FALSE(submission.input.has_value());
}

TEST_F(SubmissionTest, IsShortTheSecondTime) {
  Decode(Encode(Everything()));
  const std::string again = Encode(Everything());
  EXPECT_THAT(again, SizeIs(16));
  ExpectEqual(*Decode(again).description, Everything());
}

TEST_F(SubmissionTest, SaysWhatElseItIs) {
  const Clock::time_point now = Clock::now();
  const Submission submission =
      Decode(encoder_.Encode(Everything(), /*duplicate=*/true, now, nullptr));
  EXPECT_TRUE(submission.duplicate);
  EXPECT_EQ(submission.submitted, now);
}

TEST_F(SubmissionTest, HasWhatTheRankGives) {
  const std::vector<float> input = {1, 2, 3};
  Operation operation;
  operation.description = Share(Allreduce("a", 3));
  operation.buffers = {{input.data(), nullptr}};
  const Submission submission =
      Decode(encoder_.Encode(*operation.description, false, {}, &operation));
  ASSERT_TRUE(submission.input.has_value());
  EXPECT_THAT(*submission.input, SizeIs(16));
  EXPECT_EQ(memcmp(submission.input->data(), input.data(), 12), 0);
}

TEST_F(SubmissionTest, NumbersAreGivenAnewWhereThereAreFew) {
  SubmissionEncoder encoder(3);
  for (int i = 0; i < 50; ++i) {
    const Description description = Allreduce("tensor " + std::to_string(i * i % 11));
    const Submission submission =
        Decode(encoder.Encode(description, false, {}, nullptr));
    EXPECT_EQ(submission.description->name, description.name);
  }
}

TEST_F(SubmissionTest, EqualOnesOfSeveralRanksAreOneObject) {
  SubmissionEncoder others{16};
  SubmissionDecoder of_others(&pool_);
  Submission submission;
  ASSERT_TRUE(
      of_others.Decode(others.Encode(Everything(), false, {}, nullptr), &submission)
          .ok());
  EXPECT_EQ(Decode(Encode(Everything())).description, submission.description);
}

TEST_F(SubmissionTest, WhatIsCutShortIsAnError) {
  const std::vector<float> input = {1, 2, 3};
  Operation operation;
  operation.description = Share(Allreduce("a", 3));
  operation.buffers = {{input.data(), nullptr}};
  for (const std::string& message :
       {Encode(Everything()), std::string(encoder_.Encode(*operation.description, true,
                                                          Clock::now(), &operation))}) {
    for (size_t length = 0; length < message.size(); ++length) {
      EXPECT_NE(ErrorOf(message.substr(0, length)), "") << length;
    }
    EXPECT_NE(ErrorOf(message + "12345678"), "");
  }
}

TEST_F(SubmissionTest, ErrorsSayWhatIsWrong) {
  // Flags and number of the description, its length, process set, "a", kind and so on.
  const std::string good = Encode(Allreduce("a"));
  const auto with = [&](size_t field, int64_t value) {
    std::string message = good;
    SetField(&message, field, value);
    return ErrorOf(message);
  };
  EXPECT_THAT(ErrorOf(""), HasSubstr("ends within flags"));
  EXPECT_THAT(with(0, 16), HasSubstr("flags = 16, which is not in 0..15"));
  EXPECT_THAT(with(1, 1), HasSubstr("description = 1, which is not in 0..0"));
  EXPECT_THAT(with(1, -1), HasSubstr("description = -1"));
  EXPECT_THAT(ErrorOf(Fields({0, 0})), HasSubstr("description = 0"));
  EXPECT_THAT(with(2, 1 << 30), HasSubstr("description = 1073741824"));
  EXPECT_THAT(with(3, -1), HasSubstr("process set = -1"));
  EXPECT_THAT(with(4, INT64_MAX), HasSubstr("name = 9223372036854775807"));
  EXPECT_THAT(with(6, 50), HasSubstr("kind = 50, which does not exist"));
  EXPECT_THAT(with(7, kReduceOps), HasSubstr("operation = 6"));
  EXPECT_THAT(with(10, kSize), HasSubstr("root = 4, which is not in 0..3"));
  EXPECT_THAT(with(11, 2), HasSubstr("place = 2"));
  EXPECT_THAT(with(12, 1000), HasSubstr("number of tensors = 1000"));
  EXPECT_THAT(with(13, kDataTypes), HasSubstr("type = 17"));
  EXPECT_THAT(with(15, -1), HasSubstr("dimension = -1"));
  EXPECT_THAT(with(15, INT64_MAX), HasSubstr("the tensors have too many bytes"));
}

TEST_F(SubmissionTest, EmptyTensorsMayHaveAnyOtherDimension) {
  constexpr int64_t kLarge = int64_t{1} << 40;
  Description empty = Allreduce("empty");
  empty.tensors = {{DataType::kFloat32, {kLarge, kLarge, 0}},
                   {DataType::kFloat32, {0, kLarge, kLarge}}};
  EXPECT_EQ(Decode(Encode(empty)).description->bytes(), 0);
  // Of an allgather each rank knows its rows alone.
  Description gather = Everything();
  gather.tensors = {{DataType::kFloat32, {-1, kLarge, kLarge}}};
  ExpectEqual(*Decode(Encode(gather)).description, gather);
}

TEST_F(SubmissionTest, TensorsTogetherHaveBytesThatCanBeCounted) {
  Description description = Allreduce("a", 2);
  description.tensors.assign(4, {DataType::kUint8, {int64_t{1} << 62}});
  description.tensors.push_back({DataType::kUint8, {8}});
  EXPECT_THAT(ErrorOf(Encode(description)), HasSubstr("too many bytes"));
  EXPECT_FALSE(FitsInline(Allreduce("a", 4), 8));
}

TEST_F(SubmissionTest, MembersAreRanksInTheirOrder) {
  const auto error = [&](std::vector<int> members) {
    Description description = Agreement(Kind::kAddProcessSet);
    description.members = std::move(members);
    return ErrorOf(SubmissionEncoder(1).Encode(description, false, {}, nullptr));
  };
  EXPECT_THAT(error({2, 1}), HasSubstr("members = 1, which is not in 3..3"));
  EXPECT_THAT(error({1, 1}), HasSubstr("members = 1"));
  EXPECT_THAT(error({0, kSize}), HasSubstr("members = 4"));
}

TEST_F(SubmissionTest, AddsASetAboveTheRanksEarlierOnes) {
  Description add = Agreement(Kind::kAddProcessSet);
  add.last_earlier_set = 9;
  EXPECT_EQ(Decode(Encode(add)).description->last_earlier_set, 9);
  add.last_earlier_set = -1;
  EXPECT_THAT(ErrorOf(SubmissionEncoder(1).Encode(add, false, {}, nullptr)),
              HasSubstr("last earlier set = -1"));
}

TEST_F(SubmissionTest, OnlySmallTensorsThatAreReducedTravelAlong) {
  const auto error = [&](const Description& description, size_t bytes) {
    std::string message(SubmissionEncoder(1).Encode(description, false, {}, nullptr));
    SetField(&message, 0, 1 | 8);
    return ErrorOf(message + std::string(bytes, 'x'));
  };
  EXPECT_THAT(error(Allreduce("a", 2), 16),
              HasSubstr("the tensors of allreduce 'a' do not "
                        "travel along, or not in 16 bytes"));
  EXPECT_NE(error(Broadcast("a"), 40), "");
  EXPECT_NE(error(Allreduce("a", 5000), 20000), "");
}

// ---- Merged submissions

class MergedTest : public ::testing::Test {
 protected:
  static MergedSubmission Merged(std::vector<int> ranks = {1, 3}) {
    MergedSubmission merged;
    merged.description = Share(Everything());
    merged.ranks = std::move(ranks);
    return merged;
  }
  // Of ranks 1 and 3, with all that there may be.
  static MergedSubmission Full() {
    MergedSubmission merged = Merged();
    merged.description = Share(Allreduce("a", 3));
    merged.submitted = {kThere - milliseconds(70), kThere - milliseconds(20)};
    merged.inputs = {std::string(16, 'x'), std::string(16, 'y')};
    return merged;
  }
  static MergedSubmission Duplicate() {
    MergedSubmission merged = Merged({3});
    merged.duplicate = true;
    return merged;
  }

  static std::string EncodeBy(MergedEncoder* encoder, const Upward& upward) {
    size_t next = 0;
    return std::string(encoder->Encode({upward}, &next, kThere));
  }
  std::string Encode(const Upward& upward) { return EncodeBy(&encoder_, upward); }
  template <typename Message = MergedSubmission>
  Message Decode(std::string_view message) {
    UpwardMessage decoded;
    const Status status = decoder_.Decode(message, kHere, &decoded);
    EXPECT_TRUE(status.ok()) << status.message;
    return std::get<Message>(decoded);
  }
  // The messages that these become.
  std::vector<std::string> EncodeAll(const std::vector<Upward>& upward) {
    std::vector<std::string> messages;
    for (size_t next = 0; next < upward.size();) {
      messages.emplace_back(encoder_.Encode(upward, &next, kThere));
    }
    return messages;
  }
  std::string ErrorOf(std::string_view message) {
    UpwardMessage decoded;
    const Status status =
        MergedDecoder(kBelow, &pool_).Decode(message, kHere, &decoded);
    EXPECT_EQ(status.code, Code::kInternal);
    return status.message;
  }
  std::string ErrorOf(const Upward& upward) {
    MergedEncoder encoder(16);
    return ErrorOf(EncodeBy(&encoder, upward));
  }

  using milliseconds = std::chrono::milliseconds;
  // The clocks of two hosts at the same moment.
  static constexpr Clock::time_point kThere{std::chrono::hours(3)};
  static constexpr Clock::time_point kHere{std::chrono::hours(500)};
  // The ranks of the sender and of the hosts below it.
  const RankSet kBelow = {1, 3};

  MergedEncoder encoder_{16};
  DescriptionPool pool_{kSize};
  MergedDecoder decoder_{kBelow, &pool_};
};

TEST_F(MergedTest, HasItsDescriptionAndItsRanks) {
  const MergedSubmission merged = Decode(Encode(Merged()));
  ExpectEqual(*merged.description, Everything());
  EXPECT_FALSE(merged.duplicate);
  EXPECT_THAT(merged.ranks, ElementsAre(1, 3));
  EXPECT_THAT(merged.submitted, IsEmpty());
  EXPECT_THAT(merged.inputs, IsEmpty());
}

TEST_F(MergedTest, IsShortTheSecondTime) {
  const MergedSubmission merged = Merged();
  Decode(Encode(merged));
  const std::string again = Encode(merged);
  EXPECT_THAT(again, SizeIs(24));
  ExpectEqual(*Decode(again).description, Everything());
  EXPECT_THAT(Decode(again).ranks, ElementsAre(1, 3));
}

std::vector<std::string> NamesOf(const SubmissionRun& run) {
  std::vector<std::string> names;
  for (const auto& description : *run.descriptions) names.push_back(description->name);
  return names;
}

TEST_F(MergedTest, KnownRequestsOfTheSameRanksAreOneMessage) {
  std::vector<Upward> upward;
  for (const char* name : {"a", "b", "c", "d"}) {
    MergedSubmission merged = Merged();
    merged.description = Share(Allreduce(name));
    upward.push_back(merged);
  }
  for (const std::string& message : EncodeAll(upward)) Decode(message);
  EXPECT_THAT(EncodeAll(upward), ElementsAre(SizeIs(5 * 8)));
  std::swap(upward[0], upward[2]);  // c, b, a, d
  const std::vector<std::string> messages = EncodeAll(upward);
  EXPECT_THAT(messages, ElementsAre(SizeIs((3 + 4 * 2) * 8)));
  const auto run = Decode<SubmissionRun>(messages[0]);
  EXPECT_THAT(NamesOf(run), ElementsAre("c", "b", "a", "d"));
  EXPECT_THAT(run.ranks, ElementsAre(1, 3));
  // A reader that keeps something for each list need not do so anew.
  EXPECT_EQ(Decode<SubmissionRun>(messages[0]).descriptions, run.descriptions);
}

TEST_F(MergedTest, NumbersOfARunMeanWhatTheyMeanNow) {
  const auto of_name = [this](const char* name) {
    MergedSubmission merged = Merged();
    merged.description = Share(Allreduce(name));
    return Upward(merged);
  };
  MergedEncoder encoder(2);
  const auto tell = [&](const Upward& upward) { Decode(EncodeBy(&encoder, upward)); };
  const auto run_of = [&](const Upward& a, const Upward& b) {
    size_t next = 0;
    return std::string(encoder.Encode({a, b}, &next, kThere));
  };
  const Upward a = of_name("a"), b = of_name("b"), c = of_name("c"), d = of_name("d");
  for (const Upward& each : {a, b}) tell(each);
  const std::string first = run_of(a, b);
  EXPECT_THAT(NamesOf(Decode<SubmissionRun>(first)), ElementsAre("a", "b"));
  for (const Upward& each : {c, d}) tell(each);
  const std::string second = run_of(c, d);
  ASSERT_EQ(first, second);
  EXPECT_THAT(NamesOf(Decode<SubmissionRun>(second)), ElementsAre("c", "d"));
}

TEST_F(MergedTest, WhatIsUnusualIsAMessageOfItsOwn) {
  const Upward usual = Merged();
  const Upward of_one = Merged({3});
  MergedSubmission duplicate = Duplicate();
  duplicate.description = std::get<MergedSubmission>(usual).description;
  MergedSubmission timed = std::get<MergedSubmission>(usual);
  timed.submitted = {kThere, kThere};
  const Upward with_inputs = Full();
  MergedSubmission join = Merged();
  join.description = Share(Join());
  MergedSubmission of_set = Merged();
  of_set.description = Share(Allreduce("a", 3, ReduceOp::kSum, /*process_set=*/1));
  for (const Upward& each :
       {usual, of_one, with_inputs, Upward(join), Upward(of_set)}) {
    Decode(Encode(each));
  }
  for (const Upward& unusual :
       {of_one, Upward(duplicate), Upward(timed), with_inputs, Upward(join),
        Upward(of_set), Upward(Merged()), Upward(RankDeparture{1})}) {
    const auto messages = EncodeAll({usual, usual, unusual, usual, usual});
    ASSERT_THAT(messages, SizeIs(3));
    EXPECT_THAT(NamesOf(Decode<SubmissionRun>(messages[0])), SizeIs(2));
    const auto* merged = std::get_if<MergedSubmission>(&unusual);
    if (merged == nullptr) {
      EXPECT_EQ(Decode<RankDeparture>(messages[1]).rank, 1);
    }
    EXPECT_THAT(NamesOf(Decode<SubmissionRun>(messages[2])), SizeIs(2));
    if (merged == nullptr) continue;
    const auto there = Decode(messages[1]);
    EXPECT_EQ(there.ranks, merged->ranks);
    EXPECT_EQ(there.duplicate, merged->duplicate);
    EXPECT_EQ(there.inputs, merged->inputs);
    EXPECT_EQ(there.submitted.size(), merged->submitted.size());
  }
}

TEST_F(MergedTest, RunsHaveALimit) {
  const Upward usual = Merged();
  Decode(Encode(usual));
  const auto messages = EncodeAll(std::vector<Upward>(10000, usual));
  EXPECT_THAT(messages, SizeIs(3));
  size_t decoded = 0;
  for (const std::string& message : messages) {
    decoded += Decode<SubmissionRun>(message).descriptions->size();
  }
  EXPECT_EQ(decoded, 10000u);
}

TEST_F(MergedTest, ErrorsSayWhatIsWrongWithARun) {
  Decode(Encode(Merged()));
  MergedSubmission join = Merged();
  join.description = Share(Join());
  Decode(Encode(join));
  MergedSubmission of_set = Merged();
  of_set.description = Share(Allreduce("a", 3, ReduceOp::kSum, /*process_set=*/1));
  Decode(Encode(of_set));
  const auto error = [&](std::initializer_list<int64_t> fields) {
    UpwardMessage decoded;
    return decoder_.Decode(Fields(fields), kHere, &decoded).message;
  };
  EXPECT_EQ(error({33, 0, 1, 0, 0}), "");
  EXPECT_THAT(error({33, 1, 1, 0, 0}), HasSubstr("ranks = 1, which is not in 0..0"));
  EXPECT_THAT(error({33, 0, 1, 3, 3}), HasSubstr("first description = 3"));
  EXPECT_THAT(error({33, 0, 1, 0, 3}), HasSubstr("last description = 3"));
  EXPECT_THAT(error({33, 0, 0}), HasSubstr("it is of no request"));
  EXPECT_THAT(error({33, 0, 1, 1, 1}), HasSubstr("join() is not part of a run"));
  EXPECT_THAT(error({33, 0, 2, 0, 0, 2, 2}), HasSubstr("'a' is not part of a run"));
  EXPECT_THAT(error({33, 0, 2, 0, 0}), HasSubstr("number of sequences = 2"));
  EXPECT_THAT(error({33, 0, 1, 0, 0, 0}), HasSubstr("8 bytes follow its end"));
  std::string many = Fields({33, 0, 4097});
  for (int i = 0; i < 4097; ++i) many += Fields({0, 0});
  UpwardMessage decoded;
  EXPECT_THAT(decoder_.Decode(many, kHere, &decoded).message,
              HasSubstr("it is of more than 4096 requests"));
}

TEST_F(MergedTest, SaysWhatElseItIs) {
  const MergedSubmission merged = Decode(Encode(Duplicate()));
  EXPECT_TRUE(merged.duplicate);
  EXPECT_THAT(merged.ranks, ElementsAre(3));
}

TEST_F(MergedTest, TimesFollowTheClockOfTheReader) {
  EXPECT_THAT(Decode(Encode(Full())).submitted,
              ElementsAre(kHere - milliseconds(70), kHere - milliseconds(20)));
}

TEST_F(MergedTest, WhatIsYoungerThanTheMessageHasItsAge) {
  MergedSubmission merged = Merged({1});
  merged.submitted = {kThere + milliseconds(1)};
  EXPECT_THAT(Decode(Encode(merged)).submitted, ElementsAre(kHere));
}

TEST_F(MergedTest, HasWhatEachRankGives) {
  EXPECT_EQ(Decode(Encode(Full())).inputs, Full().inputs);
}

TEST_F(MergedTest, MayBeADeparture) {
  for (const int leader : {-1, 1}) {
    const auto departure = Decode<RankDeparture>(
        Encode(RankDeparture{3, 5, leader, "its script has failed"}));
    EXPECT_EQ(departure.how, "its script has failed");
    EXPECT_EQ(departure.rank, 3);
    EXPECT_EQ(departure.carried_out, 5);
    EXPECT_EQ(departure.leader, leader);
  }
}

// Descriptions without a number live no longer than their message, so others get their
// addresses.
TEST_F(MergedTest, NumbersAreGivenAnewWhereThereAreFew) {
  MergedEncoder encoder(3);
  std::weak_ptr<const Description> first;
  for (int i = 0; i < 50; ++i) {
    MergedSubmission merged = Merged();
    merged.description = Share(Allreduce("tensor " + std::to_string(i * i % 11)));
    if (i == 0) first = merged.description;
    const MergedSubmission decoded = Decode(EncodeBy(&encoder, merged));
    EXPECT_EQ(decoded.description->name, merged.description->name);
  }
  EXPECT_TRUE(first.expired());
}

TEST_F(MergedTest, ThereMayBeManyListsOfRanks) {
  std::vector<int> below;
  for (int rank = 0; rank < 12; ++rank) below.push_back(rank);
  MergedDecoder decoder(below, &pool_);
  MergedSubmission merged = Merged();
  const auto bytes_with = [&](const std::vector<int>& ranks) {
    merged.ranks = ranks;
    UpwardMessage decoded;
    const std::string message = Encode(merged);
    EXPECT_TRUE(decoder.Decode(message, kHere, &decoded).ok());
    EXPECT_EQ(std::get<MergedSubmission>(decoded).ranks, ranks);
    return message.size();
  };
  bytes_with({0});
  EXPECT_EQ(bytes_with({0}), 24u);
  for (int list = 1; list < 1 << 12; ++list) {
    std::vector<int> ranks;
    for (int rank : below) {
      if ((list >> rank & 1) != 0) ranks.push_back(rank);
    }
    bytes_with(ranks);
  }
  // Not all of them are kept.
  EXPECT_GT(bytes_with({0}), 24u);
}

TEST_F(MergedTest, EqualOnesOfThisHostAreTheSameObject) {
  SubmissionEncoder encoder{16};
  SubmissionDecoder decoder(&pool_);
  Submission submission;
  ASSERT_TRUE(
      decoder.Decode(encoder.Encode(Everything(), false, {}, nullptr), &submission)
          .ok());
  EXPECT_EQ(Decode(Encode(Merged())).description, submission.description);
}

TEST_F(MergedTest, WhatIsCutShortIsAnError) {
  for (const Upward& upward : {Upward(Merged()), Upward(Duplicate()), Upward(Full()),
                               Upward(RankDeparture{3})}) {
    MergedEncoder encoder(16);
    const std::string message = EncodeBy(&encoder, upward);
    for (size_t length = 0; length < message.size(); ++length) {
      EXPECT_NE(ErrorOf(message.substr(0, length)), "") << length;
    }
    EXPECT_NE(ErrorOf(message + "12345678"), "");
  }
}

TEST_F(MergedTest, ErrorsSayWhatIsWrong) {
  MergedSubmission barrier = Full();
  barrier.description = Share(Barrier("b"));
  const std::string good = Encode(Full());
  // At its end: the number of the ranks, their list, two times, two inputs with their
  // sizes.
  const size_t fields = good.size() / 8;
  const auto with = [&](size_t field, int64_t value) {
    std::string message = good;
    SetField(&message, field, value);
    return ErrorOf(message);
  };
  EXPECT_THAT(ErrorOf(""), HasSubstr("ends within flags"));
  EXPECT_THAT(with(0, 34), HasSubstr("flags = 34, which is not in 0..33"));
  EXPECT_THAT(with(1, 1), HasSubstr("description = 1, which is not in 0..0"));
  EXPECT_THAT(with(4, -1), HasSubstr("name = -1"));
  EXPECT_THAT(with(fields - 12, 1), HasSubstr("ranks = 1, which is not in 0..0"));
  EXPECT_THAT(with(fields - 11, 1 << 30), HasSubstr("ranks = 1073741824"));
  EXPECT_THAT(with(fields - 8, -1), HasSubstr("age = -1"));
  EXPECT_THAT(with(fields - 8, INT64_MAX), HasSubstr("age = 9223372036854775807"));
  EXPECT_THAT(with(fields - 3, 8),
              HasSubstr("the tensors of allreduce 'a' do not travel along, or not in 8 "
                        "bytes"));
  EXPECT_THAT(with(fields - 3, 800), HasSubstr("input = 800"));
  EXPECT_THAT(ErrorOf(Upward(barrier)), HasSubstr("the tensors of barrier 'b'"));
  EXPECT_THAT(ErrorOf(Fields({0, 0, 0})), HasSubstr("description = 0"));
  EXPECT_THAT(ErrorOf(Fields({32, 4})), HasSubstr("rank = 4, which is not in 0..3"));
}

TEST_F(MergedTest, RanksAreThoseBelowTheSenderInTheirOrder) {
  const auto error = [&](std::vector<int> ranks) {
    return ErrorOf(Upward(Merged(std::move(ranks))));
  };
  EXPECT_THAT(error({3, 1}), HasSubstr("ranks = 1, which is not in 4..3"));
  EXPECT_THAT(error({1, 1}), HasSubstr("ranks = 1"));
  EXPECT_THAT(error({1, 4}), HasSubstr("ranks = 4"));
  EXPECT_THAT(error({1, 2}), HasSubstr("rank 2 is not below the host"));
  EXPECT_THAT(error({}), HasSubstr("it is of no rank"));
  for (const RankDeparture& departure : {RankDeparture{2}, RankDeparture{3, 0, 2}}) {
    EXPECT_THAT(ErrorOf(Upward(departure)), HasSubstr("rank 2 is not below the host"));
  }
}

TEST_F(MergedTest, ADuplicateIsOfOneRank) {
  MergedSubmission merged = Merged();
  merged.duplicate = true;
  EXPECT_THAT(ErrorOf(Upward(merged)), HasSubstr("of one rank, not of ranks 1, 3"));
}

// ---- Decisions

class DecisionTest : public ::testing::Test {
 protected:
  template <typename Message>
  Message Decode(const Decision& decision) {
    DecisionMessage message;
    encoded_ = encoder_.Encode(decision);
    const Status status = decoder_.Decode(encoded_, &message);
    EXPECT_TRUE(status.ok()) << status.message;
    return std::get<Message>(message);
  }
  std::string ErrorOf(std::string_view message) {
    DecisionMessage decision;
    const Status status = DecisionDecoder(kSize).Decode(message, &decision);
    EXPECT_EQ(status.code, Code::kInternal);
    return status.message;
  }

  static Decision Run() {
    Decision decision;
    decision.tensors = {{0, "a"}, {0, "grad/b"}};
    decision.ranks = {0, 1, 2, 3};
    return decision;
  }
  static Decision Zeros() {
    Decision decision = Run();
    decision.zeros = {{Share(Allreduce("grad/b")), {1, 3}}};
    return decision;
  }
  static Decision Result() {
    Decision decision = Run();
    decision.tensors.pop_back();
    const float ones[2] = {1, 1};
    const std::string input(reinterpret_cast<const char*>(ones), sizeof(ones));
    decision.given = {{Share(Allreduce("a", 2)), {input, "", input, input}}};
    return decision;
  }
  static Decision Fail() {
    Decision decision;
    decision.type = Decision::Type::kFail;
    decision.tensors = {{2, "a"}};
    decision.ranks = {1, 2};
    decision.departed = true;
    decision.text = "rank 3 has left";
    return decision;
  }
  static Decision Agree() {
    Decision decision;
    decision.type = Decision::Type::kAgree;
    decision.tensors = {{0, ""}};
    decision.agreed = Kind::kAddProcessSet;
    decision.answer = 5;
    decision.members = {0, 2};
    return decision;
  }

  DecisionEncoder encoder_{16, kOneHost};
  DecisionDecoder decoder_{kSize};
  std::string encoded_;
};

TEST_F(DecisionTest, Runs) {
  for (int i = 0; i < 2; ++i) {
    const RunMessage run = Decode<RunMessage>(Zeros());
    EXPECT_EQ(run.tensors, Zeros().tensors);
    ASSERT_THAT(run.zeros, SizeIs(1));
    EXPECT_THAT(run.zeros[0].ranks, ElementsAre(1, 3));
    ExpectEqual(*run.zeros[0].description, Allreduce("grad/b"));
    EXPECT_FALSE(run.results.has_value());
  }
}

TEST_F(DecisionTest, HasResults) {
  const RunMessage run = Decode<RunMessage>(Result());
  ASSERT_TRUE(run.results.has_value());
  const float threes[2] = {3, 3};
  EXPECT_EQ(*run.results,
            std::string_view(reinterpret_cast<const char*>(threes), sizeof(threes)));
}

TEST_F(DecisionTest, Fails) {
  const FailMessage fail = Decode<FailMessage>(Fail());
  EXPECT_EQ(fail.tensor, Fail().tensors[0]);
  EXPECT_THAT(fail.ranks, ElementsAre(1, 2));
  EXPECT_TRUE(fail.departed);
  EXPECT_EQ(fail.text, "rank 3 has left");
}

TEST_F(DecisionTest, Agrees) {
  const AgreeMessage agree = Decode<AgreeMessage>(Agree());
  EXPECT_EQ(agree.tensor, Agree().tensors[0]);
  EXPECT_EQ(agree.kind, Kind::kAddProcessSet);
  EXPECT_EQ(agree.answer, 5);
  EXPECT_THAT(agree.members, ElementsAre(0, 2));
}

TEST_F(DecisionTest, Tunes) {
  Tuning tuning;
  tuning.window_bytes = 64;
  tuning.small_bytes = 2;
  tuning.spin_microseconds = 3;
  tuning.halving_hosts = 4;
  DecisionMessage message;
  ASSERT_TRUE(decoder_.Decode(encoder_.Encode(tuning), &message).ok());
  EXPECT_EQ(std::get<TuneMessage>(message).tuning, tuning);
}

TEST_F(DecisionTest, ATuningThatNoRankCanUseIsAnError) {
  Tuning tuning;
  tuning.window_bytes = 64;
  tuning.small_bytes = int64_t{1} << 61;  // 8 times that does not fit
  EXPECT_THAT(ErrorOf(std::string(encoder_.Encode(tuning))), HasSubstr("small_bytes="));
}

TEST_F(DecisionTest, TensorsAreNumbersTheSecondTime) {
  Decode<RunMessage>(Run());
  const size_t first = encoded_.size();
  Decode<RunMessage>(Run());
  EXPECT_EQ(encoded_.size(), first - (8 + 8 + 8) - (8 + 8 + 8));
}

TEST_F(DecisionTest, OneHasMoreTensorsThanThereAreNumbers) {
  DecisionEncoder encoder(2, kOneHost);
  for (int i = 0; i < 10; ++i) {
    Decision decision = Run();
    for (int j = 0; j < i; ++j) decision.tensors.push_back({j, std::to_string(i * j)});
    DecisionMessage message;
    ASSERT_TRUE(decoder_.Decode(encoder.Encode(decision), &message).ok());
    EXPECT_EQ(std::get<RunMessage>(message).tensors, decision.tensors);
  }
}

TEST_F(DecisionTest, WhatIsCutShortIsAnError) {
  for (const Decision& decision : {Run(), Zeros(), Fail(), Agree()}) {
    const std::string message(DecisionEncoder(16, kOneHost).Encode(decision));
    for (size_t length = 0; length < message.size(); ++length) {
      EXPECT_NE(ErrorOf(message.substr(0, length)), "") << length;
    }
    EXPECT_NE(ErrorOf(message + "12345678"), "");
  }
}

TEST_F(DecisionTest, ErrorsSayWhatIsWrong) {
  EXPECT_THAT(ErrorOf(Fields({4})), HasSubstr("type = 4, which is not in 0..3"));
  EXPECT_THAT(ErrorOf(Fields({0, 0, 0, 0, 0, 0, 0})), HasSubstr("number of tensors"));
  EXPECT_THAT(ErrorOf(Fields({0, 1, 0, 0, 0, 0, 0, 0})),
              HasSubstr("tensor 0 has not been defined"));
  EXPECT_THAT(ErrorOf(Fields({3, 0, 0, 0})), HasSubstr("window = 0"));
  EXPECT_THAT(ErrorOf(Fields({3, 65, 0, 0, 12})), HasSubstr("window_bytes=65"));
  EXPECT_THAT(ErrorOf(Fields({3, 64, 0, 1001, 12})),
              HasSubstr("spin_microseconds=1001"));
  std::string message(encoder_.Encode(Agree()));
  SetField(&message, 7, 0);
  EXPECT_THAT(ErrorOf(message.substr(0, message.size() - 16)),
              HasSubstr("the process set has no members"));
}

TEST_F(DecisionTest, AgreementsAreOnWhatThereMayBe) {
  const auto error = [&](Kind kind, int32_t answer) {
    Decision decision = Agree();
    decision.agreed = kind;
    decision.answer = answer;
    return ErrorOf(DecisionEncoder(1, kOneHost).Encode(decision));
  };
  EXPECT_THAT(error(Kind::kAllreduce, 1), HasSubstr("nobody agrees on a collective"));
  EXPECT_THAT(error(Kind::kAddProcessSet, 0), HasSubstr("process set = 0"));
  EXPECT_THAT(error(Kind::kRemoveProcessSet, 0), HasSubstr("process set = 0"));
  EXPECT_THAT(error(Kind::kJoin, kSize), HasSubstr("last rank = 4"));
}

TEST_F(DecisionTest, ZerosAreForAllreducesOfTheBatch) {
  const auto error = [&](const Description& description) {
    Decision decision = Zeros();
    decision.zeros = {{Share(description), {1}}};
    return ErrorOf(DecisionEncoder(16, kOneHost).Encode(decision));
  };
  EXPECT_THAT(error(Allreduce("c")), HasSubstr("zeros are for allreduce 'c'"));
  EXPECT_THAT(error(Broadcast("a")), HasSubstr("zeros are for broadcast 'a'"));
  EXPECT_NE(error(Allreduce("a", 10, ReduceOp::kMax)), "");
}

// ---- Bytes that nobody has written

// A field of it, or a few, have another value.
std::string Changed(std::string_view message, std::mt19937* random) {
  static constexpr int64_t kLarge[] = {INT64_MIN, INT64_MAX, int64_t{1} << 62,
                                       int64_t{1} << 32, -1};
  std::string changed(message);
  for (int changes = (*random)() % 3; changes >= 0; --changes) {
    const size_t field = (*random)() % (changed.size() / 8);
    const bool large = (*random)() % 8 == 0;
    SetField(&changed, field,
             large ? kLarge[(*random)() % std::size(kLarge)]
                   : static_cast<int64_t>((*random)() % 12) - 1);
  }
  return changed;
}

TEST_F(SubmissionTest, RandomOnesAreErrorsOrHaveNothingOutOfRange) {
  std::mt19937 random(4711);
  Description several = Allreduce("a", 2);
  several.tensors.push_back({DataType::kUint8, {3, 5}});
  int accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    SubmissionEncoder encoder(4);
    const Description& description = i % 2 == 0 ? Everything() : several;
    DescriptionPool pool(kSize);
    Submission submission;
    const std::string message =
        Changed(encoder.Encode(description, false, {}, nullptr), &random);
    if (!SubmissionDecoder(&pool).Decode(message, &submission).ok()) continue;
    ++accepted;
    const Description& found = *submission.description;
    EXPECT_TRUE(found.root >= 0 && found.root < kSize);
    for (int member : found.members) EXPECT_TRUE(member >= 0 && member < kSize);
    EXPECT_NE(Details(found), "");
    if (!HasOwnRows(found.kind)) {
      EXPECT_GE(found.bytes(), 0);
    }
  }
  EXPECT_GT(accepted, 1000);
}

TEST_F(MergedTest, RandomOnesAreErrorsOrHaveNothingOutOfRange) {
  std::mt19937 random(4711);
  const std::vector<Upward> messages = {Merged(), Duplicate(), Full(),
                                        RankDeparture{3}};
  std::vector<int> accepted(messages.size());
  for (int i = 0; i < 40000; ++i) {
    const size_t which = i % messages.size();
    MergedEncoder encoder(4);
    const std::string message = Changed(EncodeBy(&encoder, messages[which]), &random);
    DescriptionPool pool(kSize);
    UpwardMessage decoded;
    if (!MergedDecoder(kBelow, &pool).Decode(message, kHere, &decoded).ok()) continue;
    ++accepted[which];
    if (const auto* departure = std::get_if<RankDeparture>(&decoded)) {
      EXPECT_THAT(kBelow, Contains(departure->rank));
      EXPECT_TRUE(departure->leader == -1 || kBelow.Has(departure->leader));
      continue;
    }
    const auto& merged = std::get<MergedSubmission>(decoded);
    EXPECT_THAT(merged.ranks, AnyOf(ElementsAre(1), ElementsAre(3), ElementsAre(1, 3)));
    EXPECT_TRUE(!merged.duplicate || merged.ranks.size() == 1);
    const auto none_or_all = AnyOf(IsEmpty(), SizeIs(merged.ranks.size()));
    EXPECT_THAT(merged.submitted, none_or_all);
    EXPECT_THAT(merged.submitted, Each(Le(kHere)));
    EXPECT_THAT(merged.inputs, none_or_all);
    for (const std::string& input : merged.inputs) {
      EXPECT_TRUE(FitsInline(*merged.description, input.size()));
    }
  }
  EXPECT_THAT(accepted, Each(Gt(100)));
}

TEST_F(DecisionTest, RandomOnesAreErrorsOrHaveNothingOutOfRange) {
  std::mt19937 random(4711);
  std::vector<std::string> messages;
  for (const Decision& decision : {Run(), Zeros(), Result(), Fail(), Agree()}) {
    messages.emplace_back(DecisionEncoder(16, kOneHost).Encode(decision));
  }
  messages.emplace_back(DecisionEncoder(16, kOneHost).Encode(Tuning()));
  std::vector<int> accepted(messages.size());
  for (int i = 0; i < 30000; ++i) {
    const size_t which = i % messages.size();
    const std::string message = Changed(messages[which], &random);
    DecisionMessage decision;
    if (!DecisionDecoder(kSize).Decode(message, &decision).ok()) continue;
    ++accepted[which];
    std::vector<int> ranks;
    if (const auto* run = std::get_if<RunMessage>(&decision)) {
      EXPECT_THAT(run->tensors, Not(IsEmpty()));
      for (const Decision::Zeros& zeros : run->zeros) {
        EXPECT_TRUE(TakesZeros(*zeros.description));
        EXPECT_GE(zeros.description->bytes(), 0);
        ranks.insert(ranks.end(), zeros.ranks.begin(), zeros.ranks.end());
      }
    } else if (const auto* agree = std::get_if<AgreeMessage>(&decision)) {
      EXPECT_TRUE(IsAgreement(agree->kind));
      ranks = agree->members;
    } else if (const auto* tune = std::get_if<TuneMessage>(&decision)) {
      EXPECT_TRUE(IsPossible(tune->tuning));
    } else {
      ranks = std::get<FailMessage>(decision).ranks;
    }
    for (int rank : ranks) EXPECT_TRUE(rank >= 0 && rank < kSize);
  }
  EXPECT_THAT(accepted, Each(Gt(100)));
}

}  // namespace
}  // namespace keras_hvd
