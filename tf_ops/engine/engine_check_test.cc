// The consistency mode: results that differ between ranks are an error.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "tf_ops/engine/engine_testing.h"

namespace keras_hvd {
namespace {

// Faulty memory: bytes written to its last page also change the one before.
class FaultyMemory {
 public:
  FaultyMemory() {
    const int file = memfd_create("faulty", MFD_CLOEXEC);
    EXPECT_EQ(ftruncate(file, 2 * kPage), 0);
    const auto map = [&](void* where, int64_t pages, int64_t page, int flags) {
      void* memory = mmap(where, pages * kPage, PROT_READ | PROT_WRITE,
                          MAP_SHARED | flags, file, page * kPage);
      EXPECT_NE(memory, MAP_FAILED);
      return static_cast<char*>(memory);
    };
    // The third page lies beyond the file until it becomes the second one again.
    data_ = map(nullptr, 3, 0, 0);
    map(data_ + 2 * kPage, 1, 1, MAP_FIXED);
    close(file);
  }
  ~FaultyMemory() { munmap(data_, 3 * kPage); }

  // 4 KiB on x86-64, and up to 64 KiB on aarch64.
  static inline const int64_t kPage = sysconf(_SC_PAGESIZE);
  char* data() const { return data_; }

 private:
  char* data_;
};

// The request of each rank: results of three pages.
Ask CheckedAsk(Kind kind, int rank) {
  const int64_t elements = FaultyMemory::kPage / 4;
  std::vector<int32_t> values(3 * elements);
  for (size_t i = 0; i < values.size(); ++i) values[i] = rank * 10000 + i;
  if (kind == Kind::kAllgather) {
    values.resize(elements);
    return Gather("x", values);
  }
  Ask ask;
  ask.description.name = "x";
  ask.description.kind = kind;
  ask.input = AsBytes(values);
  if (kind == Kind::kBroadcast) {
    ask.description.tensors = {{DataType::kInt32, {3 * elements}}};
  } else {
    ask.description.tensors.assign(3, {DataType::kInt32, {elements}});
  }
  return ask;
}

TEST(CheckTest, ADifferentResultOfAnyCollectiveEndsTheJobAndIsNamed) {
  for (Kind kind : {Kind::kAllreduce, Kind::kAllgather, Kind::kBroadcast}) {
    EngineOptions options;
    options.check = true;
    Job job(3, options);
    CapturedErrors errors;
    job.ForEach([&](Rank& self, int rank) {
      EXPECT_TRUE(self.Run(CheckedAsk(kind, rank)).ok());
      const FaultyMemory memory;
      Ask ask = CheckedAsk(kind, rank);
      if (rank == 1) ask.output = memory.data();
      // A program that gets the error may end before anyone says more.
      ask.on_end = [&] { EXPECT_NE(job.segment().header().report_claimed.load(), 0u); };
      const Status status = self.Run(std::move(ask));
      EXPECT_EQ(status.code, Code::kInternal);
      const std::string title = std::string(Name(kind)) + " 'x'";
      const std::string place = kind == Kind::kAllreduce ? "tensor 2 of 3 of " : "";
      EXPECT_TRUE(
          Contains(status.message, title + " failed on rank " + std::to_string(rank) +
                                       ": the result of " + place + title +
                                       " differs between ranks (hashes: ranks 0, 2: "))
          << status.message;
      EXPECT_TRUE(Contains(status.message, "; rank 1: ")) << status.message;
      EXPECT_EQ(self.Run(Meet("later")).code, Code::kInternal);
    });
    EXPECT_EQ(Count(errors.text(), "What each rank did last:"), 1u) << errors.text();
  }
}

TEST(CheckTest, RankZeroDecidesForAll) {
  for (bool checks : {false, true}) {
    Job job(2, {}, /*start=*/false);
    for (int rank = 0; rank < 2; ++rank) {
      job.Start(rank, [&](EngineOptions* options) {
        options->check = (rank == 0) == checks;
      });
    }
    job.ForEach([&](Rank& self, int rank) {
      EXPECT_TRUE(self.Run(Sum("x", {1, 2})).ok());
      const FaultyMemory memory;
      Ask ask = CheckedAsk(Kind::kAllreduce, rank);
      if (rank == 1) ask.output = memory.data();
      EXPECT_EQ(self.Run(std::move(ask)).ok(), !checks);
    });
  }
}

TEST(CheckTest, ARankWithoutMemoryForItsResultIsNoDifference) {
  EngineOptions options;
  options.check = true;
  Job job(3, options);
  job.ForEach([](Rank& self, int rank) {
    Ask ask = Gather("x", std::vector<int32_t>(5000, rank));
    ask.has_memory = rank != 1;
    EXPECT_EQ(self.Run(std::move(ask)).ok(), rank != 1);
    EXPECT_TRUE(self.Run(Meet("and on it goes")).ok());
  });
}

}  // namespace
}  // namespace keras_hvd
