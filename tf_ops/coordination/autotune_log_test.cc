// The file that autotuning leaves: whole, readable, and never in place of another.
#include "tf_ops/coordination/autotune_log.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <iterator>

namespace keras_hvd {
namespace {

using Known = AutotuneOptions::Known;

std::string Contents(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

class AutotuneLogTest : public testing::Test {
 protected:
  AutotuneLogTest() {
    options_.log = testing::TempDir() + "/autotune_log_test.csv";
    options_.steps_per_sample = 1;
    options_.least_seconds = 0;
    remove(options_.log.c_str());
  }

  void Write(const std::string& text) { std::ofstream(options_.log) << text; }

  // Takes samples that depend on the size of the window alone.
  void Take(Autotune* autotune, int samples) {
    autotune->Begin();
    for (double now = 0; samples > 0 && !autotune->done();) {
      const Tuning before = autotune->tuning();
      now += static_cast<double>(before.window_bytes);
      if (autotune->Add({{0, "a"}}, 1 << 30, now)) samples -= 1;
      if (autotune->tuning() != before) autotune->Begin();
    }
  }

  AutotuneOptions options_;
};

TEST_F(AutotuneLogTest, NoFileSaysNothing) {
  EXPECT_TRUE(ReadAutotuneLog(2, &options_).ok());
  EXPECT_EQ(options_.known, Known::kNothing);
}

TEST_F(AutotuneLogTest, AnEmptyFileSaysNothing) {
  Write("");
  EXPECT_TRUE(ReadAutotuneLog(2, &options_).ok());
  EXPECT_EQ(options_.known, Known::kNothing);
}

TEST_F(AutotuneLogTest, TheBestOfAnUnfinishedSearchIsTakenUp) {
  Autotune autotune(options_, Tuning());
  Take(&autotune, 18);
  ASSERT_FALSE(autotune.done());
  ASSERT_NE(autotune.best(), Tuning());
  ASSERT_TRUE(WriteAutotuneLog(options_.log, 2, autotune).ok());
  EXPECT_TRUE(ReadAutotuneLog(2, &options_).ok());
  EXPECT_EQ(options_.known, Known::kBest);
  EXPECT_EQ(options_.start, autotune.best());
}

TEST_F(AutotuneLogTest, AResultIsTakenUpByAsManyRanks) {
  Autotune autotune(options_, Tuning());
  Take(&autotune, 1000);
  ASSERT_TRUE(autotune.done());
  ASSERT_TRUE(WriteAutotuneLog(options_.log, 2, autotune).ok());
  const std::string text = Contents(options_.log);
  const std::string wanted =
      "keras_hvd autotune 2: ranks=2 state=result\n"
      "fusion_bytes,window_bytes,small_bytes,spin_microseconds,halving_hosts,"
      "bytes_per_second,stage\n"
      "67108864,131072,16384,50,12,,best\n"
      "67108864,1048576,16384,50,12,1024,warmup\n";
  EXPECT_EQ(text.substr(0, wanted.size()), wanted);
  EXPECT_NE(text.find("67108864,131072,16384,50,12,8192,final\n"), std::string::npos);
  EXPECT_NE(access((options_.log + ".part").c_str(), F_OK), 0);

  EXPECT_TRUE(ReadAutotuneLog(3, &options_).ok());
  EXPECT_EQ(options_.known, Known::kNothing);
  EXPECT_TRUE(ReadAutotuneLog(2, &options_).ok());
  EXPECT_EQ(options_.known, Known::kResult);
  EXPECT_EQ(options_.start, autotune.best());

  // A job that only begins to compare it leaves it as it was.
  Autotune next(options_, Tuning());
  Take(&next, 5);
  ASSERT_FALSE(next.done());
  ASSERT_TRUE(WriteAutotuneLog(options_.log, 2, next).ok());
  options_.known = Known::kNothing;
  EXPECT_TRUE(ReadAutotuneLog(2, &options_).ok());
  EXPECT_EQ(options_.known, Known::kResult);
  EXPECT_EQ(options_.start, autotune.best());
}

TEST_F(AutotuneLogTest, ThatOfAnEarlierVersionMeansNothing) {
  Write(
      "keras_hvd autotune 1: ranks=2 state=result\n"
      "fusion_bytes,window_bytes,small_bytes,spin_microseconds,bytes_per_second,stage\n"
      "67108864,131072,16384,50,,best\n");
  EXPECT_TRUE(ReadAutotuneLog(2, &options_).ok());
  EXPECT_EQ(options_.known, Known::kNothing);
}

TEST_F(AutotuneLogTest, SomethingElseIsAnErrorAndStaysAsItIs) {
  const std::string head = "keras_hvd autotune 2: ranks=2 state=result\n";
  const std::string columns =
      "fusion_bytes,window_bytes,small_bytes,spin_microseconds,halving_hosts,"
      "bytes_per_second,stage\n";
  for (const std::string& text : {
           std::string("\n"),
           std::string("import keras_hvd\n"),
           head,
           head + columns,
           head + columns + "1,1024,1024,50,12,,\n",
           head + columns + "1,1024,1024,50,12,,best,\n",
           head + columns + "0,1024,1024,50,12,,best\n",
           head + columns + "1,0,1024,50,12,,best\n",
           head + columns + "1,1000,1024,50,12,,best\n",
           head + columns + "1,1024,-1,50,12,,best\n",
           head + columns + "1,1024,1024,9999999,12,,best\n",
           head + columns + "1,1024,1024,50,2,,best\n",
           "keras_hvd autotune 2: ranks=2 state=other\n" + columns +
               "1,1024,1024,50,12,,best\n",
       }) {
    Write(text);
    const Status status = ReadAutotuneLog(2, &options_);
    EXPECT_EQ(status.code, Code::kInvalidArgument) << text;
    EXPECT_NE(status.message.find(options_.log + "' exists but is not"),
              std::string::npos);
    EXPECT_EQ(Contents(options_.log), text);
  }
}

TEST_F(AutotuneLogTest, AFolderThatIsNotThereIsAnError) {
  options_.log = testing::TempDir() + "/missing/log.csv";
  const Status read = ReadAutotuneLog(2, &options_);
  EXPECT_EQ(read.code, Code::kInvalidArgument);
  EXPECT_NE(read.message.find("cannot be written: No such file"), std::string::npos);
  const Status written =
      WriteAutotuneLog(options_.log, 2, Autotune(options_, Tuning()));
  EXPECT_EQ(written.code, Code::kInvalidArgument);
}

TEST_F(AutotuneLogTest, LeavesNothingBehindThatCannotTakeItsPlace) {
  options_.log = testing::TempDir() + "/folder.csv";
  mkdir(options_.log.c_str(), 0777);
  const Status written =
      WriteAutotuneLog(options_.log, 2, Autotune(options_, Tuning()));
  EXPECT_EQ(written.code, Code::kInvalidArgument);
  EXPECT_NE(written.message.find("cannot be written: Is a directory"),
            std::string::npos);
  EXPECT_FALSE(std::ifstream(options_.log + ".part").is_open());
}

}  // namespace
}  // namespace keras_hvd
