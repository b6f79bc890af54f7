// The shared memory, and its seals.
#include "tf_ops/transport/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "tf_ops/testing/child.h"

namespace keras_hvd {
namespace {

constexpr int64_t kExchange = 8 << 10;

TEST(SegmentTest, IsSealedAgainstEveryChangeOfItsSize) {
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateShared(3, kExchange, &segment).ok());
  const int fd = segment->fd();
  for (int64_t size : {int64_t{0}, int64_t{4096}, int64_t{1} << 30}) {
    EXPECT_EQ(ftruncate(fd, size), -1);
    EXPECT_EQ(errno, EPERM);
  }
  EXPECT_EQ(posix_fallocate(fd, 0, int64_t{1} << 30), EPERM);
  EXPECT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
}

TEST(SegmentTest, AnotherMappingSeesTheSame) {
  std::shared_ptr<Segment> made, mapped;
  ASSERT_TRUE(Segment::CreateShared(3, kExchange, &made).ok());
  ASSERT_TRUE(Segment::Map(dup(made->fd()), 3, kExchange, &mapped).ok());
  for (int rank = 0; rank < 3; ++rank) {
    made->block(rank).pid.store(100 + rank);
    made->submissions(rank)[Segment::kSubmissionBytes - 1] = static_cast<char>(rank);
    made->exchange(rank)[kExchange - 1] = static_cast<char>(10 + rank);
  }
  made->decisions()[Segment::kDecisionBytes - 1] = 'd';
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(mapped->block(rank).pid.load(), 100 + rank);
    EXPECT_EQ(mapped->submissions(rank)[Segment::kSubmissionBytes - 1], rank);
    EXPECT_EQ(mapped->exchange(rank)[kExchange - 1], 10 + rank);
  }
  EXPECT_EQ(mapped->decisions()[Segment::kDecisionBytes - 1], 'd');
}

// Nothing overlaps, nothing begins within a cache line of something else.
TEST(SegmentTest, PartsLieApart) {
  for (int size : {1, 2, 5}) {
    std::shared_ptr<Segment> segment;
    ASSERT_TRUE(Segment::CreateLocal(size, 5000, &segment).ok());
    EXPECT_EQ(segment->exchange_bytes(), 8192);
    std::vector<std::pair<char*, size_t>> parts = {
        {reinterpret_cast<char*>(&segment->header()), sizeof(SegmentHeader)}};
    for (int rank = 0; rank < size; ++rank) {
      parts.emplace_back(reinterpret_cast<char*>(&segment->block(rank)),
                         sizeof(RankBlock));
    }
    for (int rank = 0; rank < size; ++rank) {
      parts.emplace_back(segment->submissions(rank), Segment::kSubmissionBytes);
    }
    parts.emplace_back(segment->decisions(), Segment::kDecisionBytes);
    for (int rank = 0; rank < size; ++rank) {
      parts.emplace_back(segment->exchange(rank), segment->exchange_bytes());
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(parts[i].first) % 64, 0u);
      const char* free = i == 0 ? nullptr : parts[i - 1].first + parts[i - 1].second;
      EXPECT_GE(parts[i].first, free);
      // All of it is there, and zero.
      for (size_t at = 0; at < parts[i].second; ++at) ASSERT_EQ(parts[i].first[at], 0);
      memset(parts[i].first, 0, parts[i].second);
    }
  }
}

TEST(SegmentTest, TooMuchMemoryIsRefusedWithAdvice) {
  // A limit of one MiB in a child: without any, the system gives until it has no more.
  Child child([](const Child::Link& parent) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {1 << 20, 1 << 20};
    setrlimit(RLIMIT_FSIZE, &limit);
    std::shared_ptr<Segment> segment;
    const Status status = Segment::CreateShared(2, 8 << 20, &segment);
    parent.Tell(status.message);
    return static_cast<int>(status.code);
  });
  const std::string text = child.Line();
  EXPECT_NE(text.find("cannot get 17 MiB of shared memory: fallocate: File too large"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("one may have 1024 KiB (RLIMIT_FSIZE; ulimit -f): raise that, or "
                      "lower KERAS_HVD_EXCHANGE_BYTES"),
            std::string::npos)
      << text;
  EXPECT_EQ(WEXITSTATUS(child.Reap()), static_cast<int>(Code::kInternal));
}

TEST(SegmentTest, AForkedChildDoesNotHaveIt) {
  std::shared_ptr<Segment> segment;
  ASSERT_TRUE(Segment::CreateShared(1, kExchange, &segment).ok());
  Child child([&](const Child::Link&) {
    // mincore fails with ENOMEM where nothing is mapped.
    unsigned char resident;
    void* page = &segment->header();
    return mincore(page, 4096, &resident) == -1 && errno == ENOMEM ? 0 : 1;
  });
  EXPECT_EQ(child.Reap(), 0);
}

TEST(SegmentTest, NothingIsLeftBehind) {
  const auto mappings = [] {
    std::ifstream maps("/proc/self/maps");
    std::string line;
    int count = 0;
    while (std::getline(maps, line)) {
      count += line.find("memfd:keras_hvd") != std::string::npos;
    }
    return count;
  };
  {
    std::shared_ptr<Segment> segment;
    ASSERT_TRUE(Segment::CreateShared(2, kExchange, &segment).ok());
    EXPECT_GT(mappings(), 0);
  }
  EXPECT_EQ(mappings(), 0);
}

}  // namespace
}  // namespace keras_hvd
