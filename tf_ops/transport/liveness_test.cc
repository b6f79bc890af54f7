// Deaths that are noticed: real processes that are killed, crash, exit, leave and stop.
#include "tf_ops/transport/liveness.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <array>

#include "tf_ops/testing/child.h"

namespace keras_hvd {
namespace {

constexpr int64_t kExchange = 8 << 10;
constexpr std::chrono::seconds kForever(30);

// A child's fate once all watch: "leave" in good order, "crash" as the signal handler
// does and then stay, "fault", "exit" with code 0, or wait to be killed.
using Fate = std::string;

// A job of which this process is one rank and its children are the others.
class World {
 public:
  World(int self, std::vector<Fate> fates)
      : self_(self), size_(static_cast<int>(fates.size())), children_(size_) {
    EXPECT_TRUE(Segment::CreateShared(size_, kExchange, &segment_).ok());
    for (int rank = 1; rank < size_; ++rank) {
      int* ends = sockets_[rank].data();
      EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
    }
    for (int rank = 0; rank < size_; ++rank) {
      if (rank == self) continue;
      children_[rank] = std::make_unique<Child>([&, rank](const Child::Link& parent) {
        return RunChild(rank, fates[rank], parent);
      });
    }
    connections_ = OwnConnections(self);
    Introduce(segment_.get(), self);
    for (const auto& child : children_) {
      if (child == nullptr) continue;
      EXPECT_EQ(child->Line(), "lives");
    }
    liveness_ = std::make_unique<Liveness>(segment_, self);
    // Only when all hold their lives does anybody watch.
    for (const auto& child : children_) {
      if (child != nullptr) child->Go();
    }
    liveness_->Watch(connections_);
    for (const auto& child : children_) {
      if (child == nullptr) continue;
      EXPECT_EQ(child->Line(), "watches");
    }
  }
  ~World() {
    liveness_.reset();
    for (int connection : connections_) {
      if (connection >= 0) close(connection);
    }
  }

  Child& child(int rank) { return *children_[rank]; }
  Segment& segment() { return *segment_; }
  JobState state() { return JobState(segment_, self_); }

  // Waits for the failure, as an engine does.
  std::string AwaitFailure() {
    Doorbell& bell = segment_->block(self_).bell;
    const Clock::time_point deadline = Clock::now() + kForever;
    while (!state().Failed() && Clock::now() < deadline) {
      bell.Announce();
      if (state().Failed()) break;
      bell.Sleep(deadline);
    }
    return state().Failure().message;
  }

  std::string Who(int rank) {
    return "rank " + std::to_string(rank) + " (pid " +
           std::to_string(segment_->block(rank).pid.load()) + " on here) ";
  }

 private:
  static void Introduce(Segment* segment, int rank) {
    segment->block(rank).pid.store(getpid());
    strcpy(segment->block(rank).host, "here");
  }

  // Keeps this rank's ends of the star of sockets, and closes the others.
  std::vector<int> OwnConnections(int self) {
    std::vector<int> own(size_, -1);
    for (int rank = 1; rank < size_; ++rank) {
      const auto [at_root, at_rank] = sockets_[rank];
      if (self == 0) {
        own[rank] = at_root;
      } else {
        close(at_root);
      }
      if (self == rank) {
        own[0] = at_rank;
      } else {
        close(at_rank);
      }
    }
    return own;
  }

  int RunChild(int rank, const Fate& fate, const Child::Link& parent) {
    const std::vector<int> connections = OwnConnections(rank);
    std::shared_ptr<Segment> segment;
    if (!Segment::Map(dup(segment_->fd()), size_, kExchange, &segment).ok()) return 1;
    Introduce(segment.get(), rank);
    auto liveness = std::make_unique<Liveness>(segment, rank);
    parent.Tell("lives");
    parent.Await();
    liveness->Watch(connections);
    parent.Tell("watches");
    parent.Await();
    if (fate == "leave") {
      liveness.reset();
      parent.Tell("left");
      parent.Await();
    }
    if (fate == "crash") {
      Liveness::MarkCrashed(&segment->block(rank), SIGSEGV);
      parent.Await();  // the core dump takes long
    }
    if (fate == "fault") {
      signal(SIGSEGV, SIG_DFL);
      raise(SIGSEGV);
    }
    if (fate == "exit") _exit(0);
    if (fate == "exec") execlp("sleep", "sleep", "1000", nullptr);
    while (true) pause();
  }

  const int self_;
  const int size_;
  std::shared_ptr<Segment> segment_;
  std::array<std::array<int, 2>, 8> sockets_;
  std::vector<std::unique_ptr<Child>> children_;
  std::vector<int> connections_;
  std::unique_ptr<Liveness> liveness_;
};

constexpr char kSilent[] = "died without a word (SIGKILL, out of memory, or _exit)";

// Not every kernel says how a process ended before its parent has reaped it.
void ExpectText(World* world, int rank, const std::string& told) {
  const std::string text = world->AwaitFailure();
  EXPECT_EQ(world->state().Failure().code, Code::kRankFailed);
  EXPECT_TRUE(text == world->Who(rank) + kSilent || text == world->Who(rank) + told)
      << text;
}

constexpr char kKilled[] =
    "was killed by SIGKILL (by a user, or by the kernel because memory ran out)";

TEST(LivenessTest, AKilledRankIsNoticedByWhomeverAndWhicheverItIs) {
  for (int self = 0; self < 3; ++self) {
    for (int victim = 0; victim < 3; ++victim) {
      if (victim == self) continue;
      World world(self, {"wait", "wait", "wait"});
      EXPECT_FALSE(world.state().Failed());
      const Clock::time_point begin = Clock::now();
      world.child(victim).Kill(SIGKILL);
      ExpectText(&world, victim, kKilled);
      EXPECT_LT(Clock::now() - begin, std::chrono::seconds(2));
    }
  }
}

TEST(LivenessTest, AFaultIsNoticed) {
  World world(0, {"", "fault"});
  world.child(1).Go();
  ExpectText(&world, 1, "was killed by SIGSEGV");
  EXPECT_EQ(WTERMSIG(world.child(1).Reap()), SIGSEGV);
}

TEST(LivenessTest, ACrashIsNoticedBeforeTheProcessHasEnded) {
  World world(0, {"", "crash"});
  world.child(1).Go();
  EXPECT_EQ(world.AwaitFailure(), world.Who(1) + "crashed with SIGSEGV");
  EXPECT_NE(ProcessState(world.child(1).pid()), 0);
  EXPECT_NE(ProcessState(world.child(1).pid()), 'Z');
}

TEST(LivenessTest, ExitWithoutLeavingIsNoticed) {
  World world(0, {"", "exit"});
  world.child(1).Go();
  ExpectText(&world, 1, "exited with code 0 without leaving the job");
  EXPECT_EQ(world.child(1).Reap(), 0);
}

TEST(LivenessTest, ARankThatBecomesAnotherProgramIsNoticed) {
  World world(0, {"", "exec"});
  world.child(1).Go();
  EXPECT_EQ(world.AwaitFailure(),
            world.Who(1) + "called exec: its process runs 'sleep' now");
}

TEST(LivenessTest, LeavingInGoodOrderIsNoFailureAndTheWatchGoesOn) {
  World world(0, {"", "leave", "wait"});
  world.child(1).Go();
  EXPECT_EQ(world.child(1).Line(), "left");
  world.child(1).Kill(SIGKILL);
  world.child(1).Reap();
  // Were that a failure, it would come before the next one.
  world.child(2).Kill(SIGKILL);
  ExpectText(&world, 2, kKilled);
}

TEST(LivenessTest, AStoppedWatcherDoesNotHideADeath) {
  World world(0, {"", "wait", "wait"});
  // Rank 1 watches rank 2.
  world.child(1).Kill(SIGSTOP);
  int status;
  ASSERT_EQ(waitpid(world.child(1).pid(), &status, WUNTRACED), world.child(1).pid());
  ASSERT_TRUE(WIFSTOPPED(status));
  EXPECT_EQ(ProcessState(world.child(1).pid()), 'T');
  EXPECT_FALSE(world.state().Failed());
  world.child(2).Kill(SIGKILL);
  ExpectText(&world, 2, kKilled);
}

// From Linux 6.15 on, and if the dead rank's parent is quick enough.
bool KernelTellsHowProcessesEnded() {
  utsname system;
  int major = 0, minor = 0;
  uname(&system);
  sscanf(system.release, "%d.%d", &major, &minor);
  return major > 6 || (major == 6 && minor >= 15);
}

TEST(LivenessTest, HowAKilledRankEndedIsSaidBeforeItIsReaped) {
  bool killed = false;
  for (int round = 0; round < 50 && !killed; ++round) {
    World world(0, {"", "wait"});
    world.child(1).Kill(SIGKILL);
    killed = world.AwaitFailure() == world.Who(1) + kKilled;
  }
  EXPECT_TRUE(killed);
}

TEST(LivenessTest, HowAReapedRankEndedIsSaid) {
  if (!KernelTellsHowProcessesEnded()) GTEST_SKIP();
  // Children that nobody waits for are reaped as they end.
  signal(SIGCHLD, SIG_IGN);
  bool killed = false, exited = false;
  for (int round = 0; round < 50 && !(killed && exited); ++round) {
    World world(0, {"", round % 2 == 0 ? "wait" : "exit"});
    if (round % 2 == 0) {
      world.child(1).Kill(SIGKILL);
    } else {
      world.child(1).Go();
    }
    const std::string text = world.AwaitFailure();
    killed |= text == world.Who(1) + kKilled;
    exited |= text == world.Who(1) + "exited with code 0 without leaving the job";
  }
  signal(SIGCHLD, SIG_DFL);
  EXPECT_TRUE(killed);
  EXPECT_TRUE(exited);
}

// As threads of one process, which all leave, in any order.
TEST(LivenessTest, RanksThatLeaveAreNoFailure) {
  for (int round = 0; round < 50; ++round) {
    std::shared_ptr<Segment> segment;
    ASSERT_TRUE(Segment::CreateLocal(4, kExchange, &segment).ok());
    std::vector<std::unique_ptr<Liveness>> ranks;
    for (int rank = 0; rank < 4; ++rank) {
      segment->block(rank).pid.store(getpid());
      ranks.push_back(std::make_unique<Liveness>(segment, rank));
    }
    for (const auto& rank : ranks) rank->Watch(std::vector<int>(4, -1));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 4; ++rank) {
      threads.emplace_back([&, rank] { ranks[(rank + round) % 4].reset(); });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_TRUE(JobState(segment, 0).Failure().ok())
        << JobState(segment, 0).Failure().message;
  }
}

TEST(LivenessTest, ARankThatNeverWatchedMayEnd) {
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateLocal(2, kExchange, &segment).ok());
  Liveness first(segment, 0), second(segment, 1);
}

TEST(NamesTest, OfSignalsProcessesAndRanks) {
  EXPECT_EQ(SignalName(SIGKILL), "SIGKILL");
  EXPECT_EQ(SignalName(99), "signal 99");
  EXPECT_EQ(ProcessState(getpid()), 'R');
  EXPECT_EQ(ProcessState(1 << 30), 0);
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateLocal(1, kExchange, &segment).ok());
  segment->block(0).pid.store(4242);
  strcpy(segment->block(0).host, "host7");
  EXPECT_EQ(JobState(segment, 0).Describe(0), "rank 0 (pid 4242 on host7)");
}

}  // namespace
}  // namespace keras_hvd
