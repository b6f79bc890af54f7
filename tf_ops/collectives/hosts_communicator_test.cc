// Waits between hosts, and their work meanwhile.
#include "tf_ops/collectives/hosts_communicator.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tf_ops/transport/job_state.h"
#include "tf_ops/transport/socket_data_link.h"

namespace keras_hvd {
namespace {

constexpr int64_t kPiece = 32 << 10;
constexpr int kPieces = 50;

// Gives up after a few looks, as a spin does. At every other one a piece arrives.
class ImpatientWaiter final : public Waiter {
 public:
  explicit ImpatientWaiter(DataLink* peer) : peer_(*peer) {}

  bool Wait(const std::function<bool()>& ready, int) override {
    for (int looks = 0; looks < 8; ++looks) {
      if (ready()) return true;
      if (looks % 2 == 1 && arrived_++ < pieces_) peer_.Send(piece_.data(), kPiece);
      peer_.Progress();
    }
    return ready();
  }
  bool Poll(const std::function<bool()>& ready, int awaited) override {
    return Wait(ready, awaited);
  }
  bool Pause(int64_t) override { return true; }

  void set_pieces(int pieces) { pieces_ = pieces; }

 private:
  DataLink& peer_;
  const std::vector<char> piece_ = std::vector<char>(kPiece);
  int pieces_ = kPieces;
  int arrived_ = 0;
};

class HostsCommunicatorTest : public testing::Test {
 protected:
  HostsCommunicatorTest() {
    int sockets[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
    const auto link = std::make_shared<SocketDataLink>(sockets[0]);
    peer_ = std::make_unique<SocketDataLink>(sockets[1]);
    waiter_ = std::make_unique<ImpatientWaiter>(peer_.get());
    std::shared_ptr<Segment> job_segment, segment;
    EXPECT_TRUE(Segment::CreateLocal(2, 0, &job_segment).ok());
    EXPECT_TRUE(Segment::CreateLocal(1, 8 << 10, &segment).ok());
    hosts_ = std::make_unique<HostsCommunicator>(
        Topology(0, {0, 1}), segment, std::make_shared<JobState>(job_segment, 0),
        DataLinks{nullptr, link}, waiter_.get());
    EXPECT_TRUE(hosts_->Begin({0, 1}, 1));
  }

  std::unique_ptr<DataLink> peer_;
  std::unique_ptr<ImpatientWaiter> waiter_;
  std::unique_ptr<HostsCommunicator> hosts_;
};

TEST_F(HostsCommunicatorTest, AWaitBeginsAnewWhileBytesFlow) {
  std::vector<char> received(kPieces * kPiece);
  hosts_->Receive(1, received.data(), received.size());
  EXPECT_TRUE(hosts_->AwaitReceived());
}

TEST_F(HostsCommunicatorTest, AWaitEndsOnceNoneCome) {
  std::vector<char> received(kPieces * kPiece);
  hosts_->Receive(1, received.data(), received.size());
  waiter_->set_pieces(kPieces / 2);
  EXPECT_FALSE(hosts_->AwaitReceived());
}

TEST_F(HostsCommunicatorTest, ASendWaitsForWhatItIsToFollow) {
  const std::vector<char> first(kPiece, 1), second(kPiece, 2);
  std::vector<char> come(2 * kPiece), sent(2 * kPiece);
  const int64_t half = hosts_->Receive(1, come.data(), kPiece);
  const int64_t whole = hosts_->Receive(1, come.data() + kPiece, kPiece);
  EXPECT_EQ(hosts_->SendAfter(1, half, 1, first.data(), kPiece), kPiece);
  EXPECT_EQ(hosts_->SendAfter(1, whole, 1, second.data(), kPiece), 2 * kPiece);
  peer_->Receive(sent.data(), 2 * kPiece);
  const auto exchange = [&] {
    for (int times = 0; times < 4; ++times) {
      hosts_->Progress();
      peer_->Progress();
    }
    return peer_->received();
  };
  EXPECT_EQ(exchange(), 0);
  peer_->Send(first.data(), kPiece);
  EXPECT_EQ(exchange(), kPiece);
  peer_->Send(first.data(), kPiece);
  EXPECT_EQ(exchange(), 2 * kPiece);
  EXPECT_EQ(sent[0], 1);
  EXPECT_EQ(sent[kPiece], 2);
  EXPECT_TRUE(hosts_->AwaitSent());
}

TEST_F(HostsCommunicatorTest, AReceiveWaitsForWhatItIsToFollow) {
  const std::vector<char> first(kPiece, 1), second(kPiece, 2);
  std::vector<char> come(2 * kPiece);
  const int64_t half = hosts_->Receive(1, come.data(), kPiece / 2);
  EXPECT_EQ(hosts_->ReceiveAfter(1, half, 1, come.data() + half, kPiece - half),
            kPiece);
  EXPECT_EQ(hosts_->ReceiveAfter(1, kPiece, 1, come.data() + kPiece, kPiece),
            2 * kPiece);
  peer_->Send(first.data(), kPiece);
  peer_->Send(second.data(), kPiece);
  peer_->Progress();
  // All bytes are there, so nothing more comes to announce them.
  hosts_->Progress();
  EXPECT_EQ(hosts_->received(1), 2 * kPiece);
  EXPECT_TRUE(hosts_->AwaitReceived());
  EXPECT_EQ(come[kPiece - 1], 1);
  EXPECT_EQ(come[kPiece], 2);
}

TEST_F(HostsCommunicatorTest, WhatWaitsForItsTurnIsNotSentYet) {
  std::vector<char> come(kPiece), sent(kPiece);
  const int64_t end = hosts_->Receive(1, come.data(), kPiece);
  hosts_->SendAfter(1, end, 1, sent.data(), kPiece);
  peer_->Receive(sent.data(), kPiece);
  EXPECT_TRUE(hosts_->AwaitSent());  // by then the other end's piece has come
  EXPECT_EQ(hosts_->received(1), end);
}

// Looks again and again, for some seconds at most.
class PatientWaiter final : public Waiter {
 public:
  bool Wait(const std::function<bool()>& ready, int) override {
    const Clock::time_point end = Clock::now() + std::chrono::seconds(10);
    while (!ready()) {
      if (Clock::now() > end) return false;
      sched_yield();
    }
    return true;
  }
  bool Poll(const std::function<bool()>& ready, int awaited) override {
    return Wait(ready, awaited);
  }
  bool Pause(int64_t) override { return true; }
};

TEST(HostsCommunicatorOfThreeTest, AnEndIsNoticedWhereAnotherHostIsAwaited) {
  int near[2], far[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, near), 0);
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, far), 0);
  const auto to_near = std::make_shared<SocketDataLink>(near[0]);
  const auto to_far = std::make_shared<SocketDataLink>(far[0]);
  SocketDataLink of_far(far[1]);
  std::shared_ptr<Segment> job_segment, segment;
  ASSERT_TRUE(Segment::CreateLocal(3, 0, &job_segment).ok());
  ASSERT_TRUE(Segment::CreateLocal(1, 8 << 10, &segment).ok());
  const auto job = std::make_shared<JobState>(job_segment, 0);
  PatientWaiter waiter;
  HostsCommunicator hosts(Topology(0, {0, 1, 2}), segment, job,
                          DataLinks{nullptr, to_near, to_far}, &waiter);
  ASSERT_TRUE(hosts.Begin({0, 1, 2}, 1));
  // The far one's bytes that have come would be taken after those of the near one.
  std::vector<char> come(2 * kPiece);
  const int64_t first = hosts.Receive(1, come.data(), kPiece);
  const int64_t second = hosts.ReceiveAfter(1, first, 2, come.data() + kPiece, kPiece);
  of_far.Send(come.data(), kPiece);
  of_far.Progress();
  close(near[1]);
  EXPECT_FALSE(hosts.AwaitReceived(2, second));
  EXPECT_NE(job->Failure().message.find("the connection to rank 1"), std::string::npos)
      << job->Failure().message;
}

}  // namespace
}  // namespace keras_hvd
