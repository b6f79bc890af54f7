// Ranks that find each other: as processes and as threads, complete and not.
#include "tf_ops/transport/rendezvous.h"

#include <gtest/gtest.h>
#include <linux/sockios.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "tf_ops/testing/child.h"
#include "tf_ops/testing/descriptors.h"
#include "tf_ops/transport/version.h"

namespace keras_hvd {
namespace {

constexpr int64_t kExchange = 8 << 10;

// A name that no other test, and no other run of this one, has. (Sandboxes share their
// sockets' names and repeat their process numbers.)
std::string JobName() {
  static std::random_device random;
  return "test-" + std::to_string(random()) + "-" + std::to_string(random());
}

RendezvousOptions Options(const std::string& job, int rank, int size,
                          double timeout = 30) {
  RendezvousOptions options;
  options.rank = rank;
  options.size = size;
  options.job = job;
  options.exchange_bytes = kExchange;
  options.timeout_seconds = timeout;
  return options;
}

// Joins as one rank, and gives the first error.
Status Join(const RendezvousOptions& options) {
  Rendezvous rendezvous(options);
  std::shared_ptr<Segment> segment;
  Status status = rendezvous.Connect(&segment);
  return status.ok() ? rendezvous.AwaitAll() : status;
}

// Joins as several ranks at once; the results, by their order.
std::vector<Status> JoinAll(const std::vector<RendezvousOptions>& all) {
  std::vector<Status> results(all.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < all.size(); ++i) {
    threads.emplace_back([&, i] { results[i] = Join(all[i]); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Where the job's rank 0 listens.
socklen_t AddressOf(const std::string& job, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  const std::string name = "keras_hvd/" + std::to_string(getuid()) + "/" + job;
  memcpy(address->sun_path + 1, name.data(), name.size());
  return offsetof(sockaddr_un, sun_path) + 1 + name.size();
}

// A socket to the job's rank 0, once that listens, that has not said anything yet.
int Dial(const std::string& job) {
  sockaddr_un address;
  const socklen_t length = AddressOf(job, &address);
  const int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  while (connect(connection, reinterpret_cast<sockaddr*>(&address), length) != 0) {
    if (errno != ECONNREFUSED) return -1;
    poll(nullptr, 0, 1);
  }
  return connection;
}

// A rank's greeting, as the other side reads it.
struct Greeting {
  char magic[8] = {'k', 'e', 'r', 'a', 's', 'h', 'v', 'd'};
  char version[32] = {};
  int32_t rank = 1;
  int32_t size = 2;
};

// Connects as a rank and greets.
int Come(const std::string& job, int rank, int size) {
  const int connection = Dial(job);
  Greeting greeting;
  greeting.rank = rank;
  greeting.size = size;
  strcpy(greeting.version, kVersion);
  EXPECT_EQ(send(connection, &greeting, sizeof(greeting), 0),
            static_cast<ssize_t>(sizeof(greeting)));
  return connection;
}

TEST(RendezvousTest, AWorldOfOneNeedsNobody) {
  EXPECT_TRUE(Join(Options("", 0, 1)).ok());
}

TEST(RendezvousTest, ATimeoutMayBeLongerThanTheClockCounts) {
  for (double timeout : {1e10, 1e300}) {
    const std::string job = JobName();
    std::vector<RendezvousOptions> all = {Options(job, 0, 2), Options(job, 1, 2)};
    for (RendezvousOptions& options : all) options.timeout_seconds = timeout;
    for (const Status& status : JoinAll(all))
      EXPECT_TRUE(status.ok()) << status.message;
  }
}

TEST(RendezvousTest, ProcessesComeToShareMemory) {
  for (int size : {2, 4}) {
    const std::string job = JobName();
    const auto join = [&](int rank) {
      Rendezvous rendezvous(Options(job, rank, size));
      std::shared_ptr<Segment> segment;
      if (!rendezvous.Connect(&segment).ok()) return 1;
      segment->block(rank).pid.store(getpid());
      segment->exchange(rank)[kExchange - 1] = static_cast<char>(rank);
      if (!rendezvous.AwaitAll().ok()) return 2;
      // All have written before anybody comes here.
      for (int peer = 0; peer < size; ++peer) {
        if (segment->block(peer).pid.load() == 0) return 3;
        if (segment->exchange(peer)[kExchange - 1] != peer) return 4;
      }
      int connections = 0;
      for (int connection : rendezvous.connections()) connections += connection >= 0;
      return connections == (rank == 0 ? size - 1 : 1) ? 0 : 5;
    };
    std::vector<std::unique_ptr<Child>> children;
    for (int rank = 1; rank < size; ++rank) {
      children.push_back(std::make_unique<Child>(
          [&, rank](const Child::Link&) { return join(rank); }));
    }
    EXPECT_EQ(join(0), 0);
    for (const auto& child : children) EXPECT_EQ(child->Reap(), 0);
  }
}

TEST(RendezvousTest, TheMemoryIsAsLargeAsRankZeroSays) {
  const std::string job = JobName();
  RendezvousOptions root = Options(job, 0, 2), other = Options(job, 1, 2);
  other.exchange_bytes = 1 << 20;
  std::shared_ptr<Segment> segment;
  std::thread peer([&] {
    std::shared_ptr<Segment> mapped;
    Rendezvous rendezvous(other);
    EXPECT_TRUE(rendezvous.Connect(&mapped).ok());
    EXPECT_EQ(mapped->exchange_bytes(), kExchange);
    EXPECT_TRUE(rendezvous.AwaitAll().ok());
  });
  EXPECT_TRUE(Join(root).ok());
  peer.join();
}

TEST(RendezvousTest, AMissingRankIsNamedOnEveryRank) {
  const std::string job = JobName();
  const Clock::time_point begin = Clock::now();
  const std::vector<Status> results =
      JoinAll({Options(job, 0, 4, 1), Options(job, 2, 4, 1)});
  EXPECT_LT(Clock::now() - begin, std::chrono::seconds(10));
  for (const Status& status : results) {
    EXPECT_EQ(status.code, Code::kRankFailed);
    EXPECT_EQ(status.message,
              "ranks 1, 3 of job '" + job +
                  "' did not call init within 1 s. Every rank must; if they are only "
                  "slow to start, raise --start-timeout "
                  "(KERAS_HVD_INIT_TIMEOUT_SECONDS)");
  }
}

TEST(RendezvousTest, AMissingRankZeroIsNamed) {
  const std::string job = JobName();
  for (const Status& status :
       JoinAll({Options(job, 1, 3, 0.3), Options(job, 2, 3, 0.3)})) {
    EXPECT_EQ(status.code, Code::kRankFailed);
    EXPECT_TRUE(
        Contains(status.message, "rank 0 of job '" + job + "' did not call init"))
        << status.message;
  }
}

TEST(RendezvousTest, DifferentSizesAreRefusedOnEveryRank) {
  const std::string job = JobName();
  for (const Status& status : JoinAll({Options(job, 0, 2), Options(job, 1, 3)})) {
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(Contains(status.message,
                         "rank 1 was started as one of 3 ranks, rank 0 as one of 2"))
        << status.message;
  }
}

TEST(RendezvousTest, ARankThatDoesNotExistIsRefused) {
  const std::string job = JobName();
  RendezvousOptions beyond = Options(job, 1, 2);
  beyond.rank = 2;
  for (const Status& status : JoinAll({Options(job, 0, 2), beyond})) {
    EXPECT_TRUE(Contains(status.message, "rank 2 does not exist in a job of 2 ranks"))
        << status.message;
  }
}

TEST(RendezvousTest, ARankThatWasStartedTwiceIsRefused) {
  const std::string job = JobName();
  for (const Status& status :
       JoinAll({Options(job, 0, 3), Options(job, 1, 3), Options(job, 1, 3)})) {
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(Contains(status.message, "rank 1 was started twice")) << status.message;
  }
}

TEST(RendezvousTest, AnotherVersionIsRefusedAndBothAreNamed) {
  const std::string job = JobName();
  Status root;
  std::thread thread([&] { root = Join(Options(job, 0, 2)); });
  const int connection = Dial(job);
  Greeting greeting;
  strcpy(greeting.version, "99.1");
  EXPECT_EQ(send(connection, &greeting, sizeof(greeting), 0),
            static_cast<ssize_t>(sizeof(greeting)));
  thread.join();
  EXPECT_EQ(root.code, Code::kInvalidArgument);
  EXPECT_EQ(root.message,
            std::string("rank 1 runs keras_hvd 99.1, rank 0 runs ") + kVersion);
  // The other one is told the same.
  char answer[4096];
  const ssize_t length = recv(connection, answer, sizeof(answer), 0);
  ASSERT_GT(length, 0);
  EXPECT_TRUE(Contains(std::string(answer, length), root.message));
  close(connection);
}

TEST(RendezvousTest, StrangersAreTurnedAwayAndTheJobStarts) {
  const std::string job = JobName();
  Status root;
  std::thread thread([&] { root = Join(Options(job, 0, 2)); });
  const int talker = Dial(job), quitter = Dial(job);
  EXPECT_EQ(send(talker, "GET / HTTP/1.1", 14, 0), 14);
  close(quitter);
  EXPECT_TRUE(Join(Options(job, 1, 2)).ok());
  thread.join();
  EXPECT_TRUE(root.ok()) << root.message;
  char answer;
  EXPECT_EQ(recv(talker, &answer, 1, 0), 0) << "the stranger is still connected";
  close(talker);
}

TEST(RendezvousTest, ASilentStrangerHoldsNothingUpForLong) {
  const std::string job = JobName();
  Status root;
  std::thread thread([&] { root = Join(Options(job, 0, 2)); });
  const int silent = Dial(job);
  EXPECT_TRUE(Join(Options(job, 1, 2)).ok());
  thread.join();
  EXPECT_TRUE(root.ok()) << root.message;
  close(silent);
}

TEST(RendezvousTest, TheSameJobCannotStartTwiceAtOnce) {
  const std::string job = JobName();
  Status first;
  std::thread thread([&] { first = Join(Options(job, 0, 2)); });
  const int connection = Dial(job);  // the first one listens
  const Status second = Join(Options(job, 0, 2));
  EXPECT_EQ(second.code, Code::kInternal);
  EXPECT_TRUE(Contains(second.message, "a job named '" + job + "' is already running"))
      << second.message;
  close(connection);
  EXPECT_TRUE(Join(Options(job, 1, 2)).ok());
  thread.join();
  EXPECT_TRUE(first.ok()) << first.message;
}

TEST(RendezvousTest, AJobsNameIsFreeOnceItHasStarted) {
  const std::string job = JobName();
  for (int round = 0; round < 3; ++round) {
    for (const Status& status : JoinAll({Options(job, 0, 2), Options(job, 1, 2)})) {
      EXPECT_TRUE(status.ok()) << status.message;
    }
  }
}

// A rank that dies after it has connected is noticed without waiting for the time-out,
// and the others are told. (One that comes later finds nobody.)
TEST(RendezvousTest, ARankThatDiesOnTheWayIsNamedAtOnce) {
  const std::string job = JobName();
  Status root;
  std::thread thread([&] { root = Join(Options(job, 0, 4)); });
  const int other = Come(job, 2, 4);
  close(Come(job, 1, 4));
  thread.join();
  EXPECT_EQ(root.code, Code::kRankFailed);
  EXPECT_EQ(root.message, "rank 1 ended while the job started");
  char answer[4096];
  const ssize_t length = recv(other, answer, sizeof(answer), 0);
  ASSERT_GT(length, 0);
  EXPECT_TRUE(Contains(std::string(answer, length), root.message));
  close(other);
}

// A cancelled start ends long before its time-out, and leaves nothing open.
class CancelledRendezvousTest : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_LT(Clock::now() - begin_, std::chrono::seconds(10));
    EXPECT_EQ(OpenDescriptors(), open_before_);
  }

  const std::set<int> open_before_ = OpenDescriptors();
  const Clock::time_point begin_ = Clock::now();
};

RendezvousOptions Cancellable(RendezvousOptions options, const CancelPipe& cancel) {
  options.cancel_fd = cancel.fd();
  return options;
}

void ExpectCancelled(const Status& status, const std::string& missing) {
  EXPECT_EQ(status.code, Code::kRankFailed);
  EXPECT_EQ(status.message, "the start was cancelled before " + missing);
}

// A listening socket at the address of the job's rank 0.
int ListenAsRoot(const std::string& job) {
  sockaddr_un address;
  const socklen_t length = AddressOf(job, &address);
  const int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(listen(listener, 0), 0);
  return listener;
}

TEST_F(CancelledRendezvousTest, ARootThatMissesRanksTellsThoseThatCame) {
  for (bool hangs_up : {false, true}) {
    const std::string job = JobName();
    CancelPipe cancel;
    Status root;
    std::thread thread([&] { root = Join(Cancellable(Options(job, 0, 4), cancel)); });
    const int other = Come(job, 2, 4);
    int unread = 1;
    while (unread > 0 && ioctl(other, SIOCOUTQ, &unread) == 0) poll(nullptr, 0, 1);
    hangs_up ? cancel.HangUp() : cancel.Cancel();
    thread.join();
    ExpectCancelled(root, "ranks 1, 3 had called init");
    char answer[4096];
    const ssize_t length = recv(other, answer, sizeof(answer), 0);
    ASSERT_GT(length, 0);
    EXPECT_TRUE(Contains(std::string(answer, length), root.message));
    close(other);
  }
}

TEST_F(CancelledRendezvousTest, ARootThatListensToASilentStranger) {
  const std::string job = JobName();
  CancelPipe cancel;
  Status root;
  std::thread thread([&] { root = Join(Cancellable(Options(job, 0, 2), cancel)); });
  const int silent = Dial(job);
  poll(nullptr, 0, 50);
  const Clock::time_point cancelled = Clock::now();
  cancel.Cancel();
  thread.join();
  EXPECT_LT(Clock::now() - cancelled, std::chrono::seconds(1));
  ExpectCancelled(root, "rank 1 had called init");
  close(silent);
}

TEST_F(CancelledRendezvousTest, ARootWhoseRankIsNotReady) {
  const std::string job = JobName();
  CancelPipe cancel;
  Rendezvous root(Cancellable(Options(job, 0, 2), cancel)), other(Options(job, 1, 2));
  std::shared_ptr<Segment> of_root, of_other;
  std::thread thread([&] { EXPECT_TRUE(other.Connect(&of_other).ok()); });
  EXPECT_TRUE(root.Connect(&of_root).ok());
  thread.join();
  std::thread canceller([&] {
    poll(nullptr, 0, 50);
    cancel.Cancel();
  });
  ExpectCancelled(root.AwaitAll(), "rank 1 had finished init");
  canceller.join();
  ExpectCancelled(other.AwaitAll(), "rank 1 had finished init");
}

TEST_F(CancelledRendezvousTest, ARankWithoutARoot) {
  for (bool hangs_up : {false, true}) {
    CancelPipe cancel;
    std::thread canceller([&] {
      poll(nullptr, 0, 50);
      hangs_up ? cancel.HangUp() : cancel.Cancel();
    });
    ExpectCancelled(Join(Cancellable(Options(JobName(), 1, 2), cancel)),
                    "rank 0 had called init");
    canceller.join();
  }
}

TEST_F(CancelledRendezvousTest, ARankWhoseRootAcceptsNobody) {
  const std::string job = JobName();
  const int listener = ListenAsRoot(job);
  // The only place in its queue.
  const int other = Dial(job);
  CancelPipe cancel;
  std::thread canceller([&] {
    poll(nullptr, 0, 50);
    cancel.Cancel();
  });
  ExpectCancelled(Join(Cancellable(Options(job, 1, 2), cancel)),
                  "rank 0 had called init");
  canceller.join();
  close(other);
  close(listener);
}

TEST_F(CancelledRendezvousTest, ARankWhoseRootWaitsForOthers) {
  const std::string job = JobName();
  const int listener = ListenAsRoot(job);
  CancelPipe cancel;
  Status rank;
  std::thread thread([&] { rank = Join(Cancellable(Options(job, 1, 3), cancel)); });
  const int connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  Greeting greeting;
  EXPECT_EQ(recv(connection, &greeting, sizeof(greeting), 0),
            static_cast<ssize_t>(sizeof(greeting)));
  cancel.Cancel();
  thread.join();
  ExpectCancelled(rank, "rank 0 had answered");
  EXPECT_EQ(recv(connection, &greeting, sizeof(greeting), 0), 0);
  close(connection);
  close(listener);
}

TEST_F(CancelledRendezvousTest, ARankThatIsReady) {
  const std::string job = JobName();
  CancelPipe cancel;
  Status rank;
  std::thread thread([&] { rank = Join(Cancellable(Options(job, 1, 2), cancel)); });
  Rendezvous root(Options(job, 0, 2));
  std::shared_ptr<Segment> segment;
  EXPECT_TRUE(root.Connect(&segment).ok());
  pollfd ready = {root.connections()[1], POLLIN, 0};
  EXPECT_EQ(poll(&ready, 1, 10000), 1);
  cancel.Cancel();
  thread.join();
  ExpectCancelled(rank, "rank 0 had answered");
  EXPECT_EQ(root.AwaitAll().message, "rank 1 ended while the job started");
}

TEST_F(CancelledRendezvousTest, ADescriptorThatSaysNothingCancelsNothing) {
  const std::string job = JobName();
  const CancelPipe silent, other_silent;
  for (int rank : {0, 1}) {
    const Status late = Join(Cancellable(Options(job, rank, 2, 0.2), silent));
    EXPECT_TRUE(Contains(late.message, "did not call init within")) << late.message;
  }
  Status first;
  std::thread thread([&] { first = Join(Cancellable(Options(job, 1, 2), silent)); });
  poll(nullptr, 0, 100);
  const Status root = Join(Cancellable(Options(job, 0, 2), other_silent));
  thread.join();
  EXPECT_TRUE(root.ok()) << root.message;
  EXPECT_TRUE(first.ok()) << first.message;
}

TEST_F(CancelledRendezvousTest, TheJobCanStartAgain) {
  const std::string job = JobName();
  for (int round = 0; round < 3; ++round) {
    CancelPipe cancel;
    cancel.Cancel();
    ExpectCancelled(Join(Cancellable(Options(job, 0, 2), cancel)),
                    "rank 1 had called init");
    ExpectCancelled(Join(Cancellable(Options(job, 1, 2), cancel)),
                    "rank 0 had called init");
    CancelPipe silent, other_silent;
    for (const Status& status :
         JoinAll({Cancellable(Options(job, 0, 2), silent),
                  Cancellable(Options(job, 1, 2), other_silent)})) {
      EXPECT_TRUE(status.ok()) << status.message;
    }
  }
}

}  // namespace
}  // namespace keras_hvd
