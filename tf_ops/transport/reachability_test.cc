// Reachability: a host that does not answer is told from a process that does not read.
#include "tf_ops/transport/reachability.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <string>

namespace keras_hvd {
namespace {

using std::chrono::seconds;

constexpr seconds kLimit(1);
constexpr seconds kForever(60);

// Moves this process to a network of its own, where it may drop packets.
bool EnterOwnNetwork() {
  if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return false;
  const int any = socket(AF_INET, SOCK_DGRAM, 0);
  ifreq loopback = {};
  strcpy(loopback.ifr_name, "lo");
  loopback.ifr_flags = IFF_UP;
  const bool is_up = ioctl(any, SIOCSIFFLAGS, &loopback) == 0;
  close(any);
  return is_up;
}

// Two sockets that are connected over TCP.
class ReachabilityTest : public testing::Test {
 protected:
  void SetUp() override {
    static const bool has_network = EnterOwnNetwork();
    if (!has_network) GTEST_SKIP() << "may not have a network of its own";
    Connect();
  }
  ~ReachabilityTest() override {
    close(here_);
    close(there_);
  }

  void Connect() {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(listener, any, length), 0);
    EXPECT_EQ(getsockname(listener, any, &length), 0);
    EXPECT_EQ(listen(listener, 1), 0);
    here_ = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(connect(here_, any, length), 0);
    there_ = accept(listener, nullptr, nullptr);
    EXPECT_GE(there_, 0);
    close(listener);
    EXPECT_EQ(fcntl(here_, F_SETFL, O_NONBLOCK), 0);
    reachability_.emplace(here_, kLimit);
  }

  // From now on the other end takes no packet in: its host seems to have vanished.
  void Vanish() {
    sock_filter nothing = {BPF_RET | BPF_K, 0, 0, 0};
    const sock_fprog filter = {1, &nothing};
    EXPECT_EQ(setsockopt(there_, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof(filter)),
              0);
  }
  void Send() { EXPECT_EQ(send(here_, "x", 1, MSG_NOSIGNAL), 1); }
  // Sends as much as the two kernels take; nobody reads it.
  void SendMuch() {
    const std::string much(1 << 20, 'x');
    pollfd room = {here_, POLLOUT, 0};
    while (poll(&room, 1, 200) == 1) {
      (void)!send(here_, much.data(), much.size(), MSG_NOSIGNAL);
    }
  }
  // Looks every now and then. Returns after how long the host was lost, or `time`.
  Clock::duration LostAfter(Clock::duration time) {
    const Clock::time_point start = Clock::now();
    while (Clock::now() - start < time) {
      if (reachability_->IsLost(Clock::now())) return Clock::now() - start;
      poll(nullptr, 0, 20);
    }
    return time;
  }

  int here_ = -1, there_ = -1;
  std::optional<Reachability> reachability_;
};

TEST_F(ReachabilityTest, AHostThatVanishesWithBytesOnTheWayIsLost) {
  Send();
  EXPECT_EQ(LostAfter(seconds(1)), seconds(1));
  EXPECT_FALSE(reachability_->awaits_answer());
  Vanish();
  Send();
  const Clock::duration after = LostAfter(kForever);
  EXPECT_GE(after, kLimit - Reachability::kInterval);
  EXPECT_LE(after, kLimit + 2 * Reachability::kInterval);
}

// As if the process there were stopped, for several times the limit.
TEST_F(ReachabilityTest, APeerThatDoesNotReadIsNotLost) {
  SendMuch();
  EXPECT_EQ(LostAfter(seconds(6)), seconds(6));
}

TEST_F(ReachabilityTest, AHostThatVanishesWhileItDidNotReadIsLost) {
  SendMuch();
  Vanish();
  EXPECT_LT(LostAfter(kForever), kForever);
}

// Bytes that were sent a moment ago may yet be answered, however long the link was
// idle.
TEST_F(ReachabilityTest, SilenceCountsFromTheFirstUnansweredByte) {
  Send();
  EXPECT_FALSE(reachability_->IsLost(Clock::now()));
  poll(nullptr, 0, 2000);
  Vanish();
  Send();
  // Long enough for the kernel to send it again.
  poll(nullptr, 0, 600);
  EXPECT_FALSE(reachability_->IsLost(Clock::now()));
  EXPECT_TRUE(reachability_->awaits_answer());
}

TEST_F(ReachabilityTest, TheKernelAsksWhileNothingIsOnTheWay) {
  reachability_->KeepAsking();
  Vanish();
  pollfd ended = {here_, POLLIN, 0};
  const Clock::time_point start = Clock::now();
  ASSERT_EQ(poll(&ended, 1, 60000), 1);
  EXPECT_LE(Clock::now() - start, kLimit + seconds(2));
  char byte;
  EXPECT_EQ(recv(here_, &byte, 1, 0), -1);
  EXPECT_TRUE(MeansUnreachable(errno));
}

TEST(ReachabilityOfOthersTest, ASocketThatIsNotTcpIsNeverLost) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  Reachability reachability(ends[0], seconds(0));
  EXPECT_FALSE(reachability.IsLost(Clock::now()));
  EXPECT_FALSE(reachability.IsLost(Clock::now() + kForever));
  close(ends[0]);
  close(ends[1]);
}

}  // namespace
}  // namespace keras_hvd
