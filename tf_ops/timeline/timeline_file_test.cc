// Timeline files: whole at every moment, whatever ends the process that writes them.
#include "tf_ops/timeline/timeline_file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <random>
#include <sstream>
#include <string>

#include "tf_ops/testing/child.h"

namespace keras_hvd {
namespace {

constexpr size_t kPage = TimelineFile::kPageBytes;

std::string Path(const std::string& name) {
  return testing::TempDir() + "/" + std::to_string(getpid()) + "-" + name;
}

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// The event of this number: some are as long as an event can be.
std::string Event(int number) {
  std::mt19937 random(number);
  const size_t most = number % 7 == 0 ? TimelineFile::kLongestEvent - 2 : 200;
  const size_t length = number % 7 == 0 ? most : 10 + random() % most;
  std::string event = "{" + std::to_string(number) + ":";
  event.resize(std::max(event.size(), length), 'x');
  return event + "}";
}

// Counts the events between the brackets, which must be whole events from 0 on, in
// their order and each within a page of the file. Returns -1 if there is anything else.
int CountWholeEvents(const std::string& text, bool is_ended) {
  std::string rest = "[";
  size_t at = 1;
  if (text.substr(0, 1) != "[") return -1;
  for (int number = 0;; ++number) {
    size_t begin = at;
    while (begin < text.size() && text[begin] == ' ') ++begin;
    if (begin == text.size()) return is_ended ? -1 : number;
    if (text.compare(begin, text.npos, "\n]\n") == 0) return is_ended ? number : -1;
    const std::string event = (number == 0 ? "\n" : ",\n") + Event(number);
    if (text.compare(begin, event.size(), event) != 0) return -1;
    at = begin + event.size();
    if (begin / kPage != (at - 1) / kPage) return -1;
  }
}

TEST(TimelineFile, IsWholeAfterEachFlushAndEndsWithABracket) {
  const std::string path = Path("whole");
  TimelineFile file;
  ASSERT_TRUE(file.Open(path).ok());
  for (int number = 0; number < 100; ++number) {
    file.Add(Event(number));
    file.Flush();
    ASSERT_EQ(CountWholeEvents(Read(path), false), number + 1);
  }
  file.Close();
  EXPECT_EQ(CountWholeEvents(Read(path), true), 100);
  EXPECT_TRUE(file.failure().ok());
}

TEST(TimelineFile, OverwritesWhatWasThere) {
  const std::string path = Path("overwritten");
  std::ofstream(path) << std::string(100000, 'o');
  TimelineFile file;
  ASSERT_TRUE(file.Open(path).ok());
  file.Close();
  EXPECT_EQ(Read(path), "[\n]\n");
}

TEST(TimelineFile, SaysWhatCannotBeOpened) {
  const std::string missing = Path("no-folder") + "/file";
  const Status status = TimelineFile().Open(missing);
  EXPECT_EQ(status.code, Code::kInvalidArgument);
  EXPECT_EQ(status.message, "the timeline '" + missing +
                                "' cannot be written: No such file or directory");
  EXPECT_NE(TimelineFile().Open(testing::TempDir()).message.find("Is a directory"),
            std::string::npos);
}

TEST(TimelineFile, DoesNotWaitForAReaderOfAPipe) {
  const std::string path = Path("pipe");
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_FALSE(TimelineFile().Open(path).ok());
}

TEST(TimelineFile, EndsWithAWholeEventWhereThereIsNoMoreRoom) {
  const std::string path = Path("full");
  Child child([&](const Child::Link&) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {10000, 10000};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return 1;
    TimelineFile file;
    if (!file.Open(path).ok()) return 2;
    for (int number = 0; number < 100; ++number) {
      file.Add(Event(number));
      file.Flush();
    }
    file.Close();
    const bool is_named = file.failure().message.find(path) != std::string::npos;
    return file.failure().code == Code::kInternal && is_named ? 0 : 3;
  });
  EXPECT_EQ(child.Reap(), 0);
  EXPECT_GT(CountWholeEvents(Read(path), false), 0);
}

TEST(TimelineFile, IsWholeWheneverItsProcessIsKilled) {
  const std::string path = Path("killed");
  int most = 0;
  for (int kill = 0; kill < 30; ++kill) {
    Child child([&](const Child::Link& link) {
      TimelineFile file;
      if (!file.Open(path).ok()) return 1;
      for (int number = 0; number < 5'000'000; ++number) {
        file.Add(Event(number));
        file.Flush();
        // Somewhere after this it is killed.
        if (number == 50 * kill) link.Tell("go");
      }
      return 0;
    });
    ASSERT_EQ(child.Line(), "go");
    child.Kill(SIGKILL);
    ASSERT_EQ(child.Reap(), SIGKILL);
    const int events = CountWholeEvents(Read(path), false);
    ASSERT_GT(events, 50 * kill);
    most = std::max(most, events);
  }
  EXPECT_LT(most, 5'000'000);
}

}  // namespace
}  // namespace keras_hvd
