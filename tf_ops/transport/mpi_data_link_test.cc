// Transfers by MPI: messages that both ends cut alike, and memory that outlives them.
#include "tf_ops/transport/mpi_data_link.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "tf_ops/transport/mpi_testing.h"

namespace keras_hvd {
namespace {

using Buffer = std::vector<char>;

Buffer RandomBuffer(int64_t bytes) {
  std::mt19937_64 random(bytes);
  Buffer buffer(bytes);
  for (char& byte : buffer) byte = static_cast<char>(random());
  return buffer;
}

// Two ranks, of an MPI with handles of either kind.
class MpiDataLinkTest : public testing::TestWithParam<bool> {
 protected:
  MpiDataLinkTest() : a_(LinkOf(0)), b_(LinkOf(1)) {}

  std::unique_ptr<MpiDataLink> LinkOf(int rank) {
    const MpiOptions options =
        GetParam() ? mpi_.OptionsOf<int>(rank) : mpi_.OptionsOf<void*>(rank);
    return std::make_unique<MpiDataLink>(std::make_shared<Mpi>(options), 1 - rank);
  }

  void Complete() {
    for (int i = 0; i < 100000; ++i) {
      a_->Progress();
      b_->Progress();
      const bool waits = a_->sends() || a_->receives() || b_->sends() || b_->receives();
      if (!waits || a_->closed() || b_->closed()) return;
    }
    FAIL() << "it does not end";
  }

  MpiStandIn mpi_;
  std::unique_ptr<MpiDataLink> a_, b_;
};

INSTANTIATE_TEST_SUITE_P(, MpiDataLinkTest, testing::Bool(), [](const auto& info) {
  return info.param ? "Integers" : "Pointers";
});

TEST_P(MpiDataLinkTest, MovesAnySizesBothWays) {
  for (int64_t bytes :
       {int64_t{0}, int64_t{1}, int64_t{4096}, int64_t{4097}, Mpi::kMessageBytes,
        Mpi::kMessageBytes + 1, 20 * Mpi::kMessageBytes + 3}) {
    const Buffer to_b = RandomBuffer(bytes), to_a = RandomBuffer(bytes + 7);
    Buffer at_a(to_a.size()), at_b(to_b.size());
    const int64_t before = b_->received();
    a_->Send(to_b.data(), bytes);
    EXPECT_EQ(b_->Receive(at_b.data(), bytes), before + bytes);
    b_->Send(to_a.data(), bytes + 7);
    a_->Receive(at_a.data(), bytes + 7);
    Complete();
    EXPECT_EQ(at_a, to_a);
    EXPECT_EQ(at_b, to_b);
    EXPECT_EQ(b_->received(), before + bytes);
  }
  EXPECT_FALSE(a_->closed() || b_->closed());
}

TEST_P(MpiDataLinkTest, EitherEndMayPostAMessageInPieces) {
  const int64_t bytes = 3 * Mpi::kMessageBytes + 5;
  const Buffer sent = RandomBuffer(bytes);
  for (int64_t piece : {int64_t{1000}, Mpi::kMessageBytes - 1, bytes}) {
    for (bool sender_cuts : {false, true}) {
      Buffer received(bytes);
      const int64_t sent_at_once = sender_cuts ? piece : bytes;
      const int64_t received_at_once = sender_cuts ? bytes : piece;
      a_->BeginSend(bytes);
      b_->BeginReceive(bytes);
      for (int64_t from = 0; from < bytes; from += sent_at_once) {
        a_->Send(sent.data() + from, std::min(sent_at_once, bytes - from));
        a_->Progress();
      }
      for (int64_t from = 0; from < bytes; from += received_at_once) {
        const int64_t end = b_->Receive(received.data() + from,
                                        std::min(received_at_once, bytes - from));
        while (b_->received() < end) Complete();
      }
      Complete();
      EXPECT_EQ(received, sent);
    }
  }
}

TEST_P(MpiDataLinkTest, WhatComesForNoMemoryIsDropped) {
  const Buffer first = RandomBuffer(100000), second = RandomBuffer(10);
  Buffer received(10);
  a_->Send(first.data(), 100000);
  a_->Send(second.data(), 10);
  b_->Receive(nullptr, 100000);
  b_->Receive(received.data(), 10);
  Complete();
  EXPECT_EQ(received, second);
}

TEST_P(MpiDataLinkTest, ASenderIsHeldUpUntilTheReceiverCalls) {
  const Buffer sent = RandomBuffer(100000);
  Buffer received(100000);
  a_->Send(sent.data(), 100000);
  for (int i = 0; i < 100; ++i) a_->Progress();
  EXPECT_EQ(a_->sent(), 0);
  EXPECT_TRUE(a_->sends());
  b_->Receive(received.data(), 100000);
  Complete();
  EXPECT_EQ(received, sent);
}

// A small message behind others is complete only when the other end has it.
TEST_P(MpiDataLinkTest, TheLastMessageOfManyIsNotLeftBehind) {
  const Buffer sent = RandomBuffer(Mpi::kMessageBytes + 1);
  Buffer received(sent.size());
  a_->Send(sent.data(), sent.size());
  b_->Receive(received.data(), Mpi::kMessageBytes);
  for (int i = 0; i < 100; ++i) {
    b_->Progress();
    a_->Progress();
  }
  EXPECT_TRUE(a_->sends());
}

TEST_P(MpiDataLinkTest, SizesThatDifferAreAnError) {
  const Buffer sent(20);
  Buffer received(10);
  a_->Send(sent.data(), 20);
  b_->Receive(received.data(), 10);
  Complete();
  EXPECT_EQ(b_->why_closed(), "MPI_ERR_TRUNCATE: the sizes differ");
}

TEST_P(MpiDataLinkTest, AnErrorOfMpiClosesIt) {
  mpi_.Break();
  const Buffer sent(20);
  a_->Send(sent.data(), 20);
  EXPECT_FALSE(a_->Progress());
  EXPECT_EQ(a_->why_closed(), "MPI_ERR_OTHER: it is broken");
  EXPECT_FALSE(a_->is_unreachable());
}

// As a peer does that has not yet heard of the failure.
TEST_P(MpiDataLinkTest, WhatIsWrittenAfterAnAbandonReachesNoMemoryOfTheCaller) {
  const int64_t bytes = 2 * Mpi::kMessageBytes;
  const Buffer sent(bytes, 'x');
  auto received = std::make_unique<Buffer>(bytes, 'a');
  b_->Receive(received->data(), bytes);
  b_->Progress();
  b_->Abandon();
  EXPECT_EQ(b_->why_closed(), "it was abandoned");
  a_->Send(sent.data(), bytes);
  a_->Progress();
  mpi_.MoveAll();
  EXPECT_EQ(*received, Buffer(bytes, 'a'));
  // Nor any that is free.
  received.reset();
  b_.reset();
  for (int i = 0; i < 10; ++i) a_->Progress();
  mpi_.MoveAll();
}

TEST_P(MpiDataLinkTest, WhatIsSentMayBeFreedAfterAnAbandon) {
  const int64_t bytes = 2 * Mpi::kMessageBytes;
  auto sent = std::make_unique<Buffer>(bytes, 'x');
  Buffer received(bytes);
  a_->Send(sent->data(), bytes);
  a_->Progress();
  a_.reset();
  sent.reset();
  b_->Receive(received.data(), bytes);
  b_->Progress();
  mpi_.MoveAll();
  while (b_->receives()) b_->Progress();
  EXPECT_EQ(received, Buffer(bytes, 'x'));
}

}  // namespace
}  // namespace keras_hvd
