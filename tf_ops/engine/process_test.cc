// A process whose worlds overlap: an old one that somebody still holds, and the next
// one.
#include "tf_ops/engine/process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "tf_ops/engine/job_member.h"
#include "tf_ops/testing/child.h"

namespace keras_hvd {
namespace {

// Each test runs in a process of its own: a process remembers its worlds.
void ExpectInChild(const std::function<int()>& body) {
  Child child([&](const Child::Link&) { return body(); });
  EXPECT_EQ(child.Reap(), 0);
}

// Runs `body` in a child of this process, as a fork() of the user's.
bool HoldsInFork(const std::function<bool()>& body) {
  const int pid = fork();
  if (pid == 0) _exit(body() ? 0 : 1);
  int status = -1;
  waitpid(pid, &status, 0);
  return status == 0;
}

std::shared_ptr<JobMember> EnterAlone(const std::string& job) {
  JobMemberOptions options;
  options.job = job;
  options.rendezvous.exchange_bytes = 8 << 10;
  std::shared_ptr<JobMember> member;
  const Status status = JobMember::Enter(options, &member);
  EXPECT_TRUE(status.ok()) << status.message;
  return member;
}

bool IsOpen(int descriptor) { return fcntl(descriptor, F_GETFD) != -1; }

TEST(ProcessTest, AnOldWorldThatEndsLateLeavesTheHandlersToTheNextOne) {
  ExpectInChild([] {
    std::shared_ptr<JobMember> old = EnterAlone("old");
    old->engine().Stop();
    std::shared_ptr<JobMember> next = EnterAlone("next");
    old.reset();
    // A forked child is known by the handlers having a world.
    return HoldsInFork(IsForked) ? 0 : 1;
  });
}

TEST(ProcessTest, AForkedChildClosesTheConnectionsOfTheLastWorldOnly) {
  ExpectInChild([] {
    int of_old[2], of_next[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, of_old) != 0) return 1;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, of_next) != 0) return 2;
    auto old = std::make_unique<RankBlock>();
    auto next = std::make_unique<RankBlock>();
    EnterWorld(old.get(), {of_old[0], of_old[1]});
    EnterWorld(next.get(), {of_next[0]});
    LeaveWorld(old.get());
    // By now the old descriptors may be somebody else's files.
    const bool right = HoldsInFork(
        [&] { return IsOpen(of_old[0]) && IsOpen(of_old[1]) && !IsOpen(of_next[0]); });
    LeaveWorld(next.get());
    const bool left = HoldsInFork([&] { return IsOpen(of_next[0]) && !IsForked(); });
    return (right ? 0 : 3) + (left ? 0 : 10);
  });
}

}  // namespace
}  // namespace keras_hvd
