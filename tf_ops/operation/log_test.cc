// The lines that are written, and their form.
#include "tf_ops/operation/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <string>

namespace keras_hvd {
namespace {

// The text that `body` writes to standard error.
std::string Written(const std::function<void()>& body) {
  FILE* file = tmpfile();
  const int saved = dup(STDERR_FILENO);
  dup2(fileno(file), STDERR_FILENO);
  body();
  dup2(saved, STDERR_FILENO);
  close(saved);
  rewind(file);
  char text[4096];
  const size_t length = fread(text, 1, sizeof(text), file);
  fclose(file);
  return std::string(text, length);
}

std::string AllLevels() {
  return Written([] {
    Log(1, LogLevel::kTrace, "t");
    Log(1, LogLevel::kDebug, "d");
    Log(1, LogLevel::kInfo, "i");
    Log(1, LogLevel::kWarning, "w");
    Log(1, LogLevel::kError, "e");
    Log(1, LogLevel::kFatal, "f");
  });
}

class LogTest : public testing::Test {
 protected:
  ~LogTest() override { SetLog(LogLevel::kWarning, false); }
};

TEST_F(LogTest, WritesWarningsAndWorseUnlessTold) {
  EXPECT_EQ(AllLevels(),
            "keras_hvd [rank 1] warning: w\n"
            "keras_hvd [rank 1] error: e\n"
            "keras_hvd [rank 1] fatal: f\n");
  EXPECT_FALSE(LogEnabled(LogLevel::kInfo));
}

TEST_F(LogTest, WritesFromALevelOn) {
  SetLog(LogLevel::kTrace, false);
  EXPECT_EQ(AllLevels(),
            "keras_hvd [rank 1] trace: t\n"
            "keras_hvd [rank 1] debug: d\n"
            "keras_hvd [rank 1] info: i\n"
            "keras_hvd [rank 1] warning: w\n"
            "keras_hvd [rank 1] error: e\n"
            "keras_hvd [rank 1] fatal: f\n");
  SetLog(LogLevel::kFatal, false);
  EXPECT_EQ(AllLevels(), "keras_hvd [rank 1] fatal: f\n");
}

TEST_F(LogTest, NamesNoRankWhereThereIsNone) {
  EXPECT_EQ(Written([] { Log(-1, LogLevel::kError, "e"); }), "keras_hvd error: e\n");
}

TEST_F(LogTest, StartsWithTheTimeIfTold) {
  SetLog(LogLevel::kError, true);
  EXPECT_THAT(
      Written([] { Log(0, LogLevel::kError, "e"); }),
      testing::MatchesRegex("[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}"
                            "[.][0-9]{6} keras_hvd .rank 0. error: e\n"));
}

}  // namespace
}  // namespace keras_hvd
