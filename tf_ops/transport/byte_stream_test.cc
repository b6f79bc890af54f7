// Streams of bytes: every message arrives whole and in order, however little fits.
#include "tf_ops/transport/byte_stream.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <random>
#include <thread>
#include <vector>

namespace keras_hvd {
namespace {

struct Stream {
  explicit Stream(uint64_t capacity) : memory(capacity) {}
  StreamWriter Writer() { return StreamWriter(memory.data(), memory.size(), &written); }
  StreamReader Reader(Progress* read) {
    return StreamReader(memory.data(), memory.size(), &written, read);
  }

  std::vector<char> memory;
  Progress written{};
  Progress reads[3]{};
};

std::string Message(size_t length, int seed) {
  std::mt19937 random(seed);
  std::string message(length, '\0');
  for (char& byte : message) byte = static_cast<char>(random());
  return message;
}

TEST(ByteStreamTest, GivesBackWhatWasWritten) {
  Stream stream(100);
  StreamWriter writer = stream.Writer();
  StreamReader reader = stream.Reader(&stream.reads[0]);
  std::string_view message;
  EXPECT_FALSE(reader.Fill());
  EXPECT_FALSE(reader.Next(&message));
  EXPECT_FALSE(reader.HasNews());
  writer.Append("first");
  writer.Append("");
  writer.Append("third");
  EXPECT_TRUE(writer.blocked());
  EXPECT_TRUE(writer.Flush(0));
  EXPECT_FALSE(writer.blocked());
  EXPECT_FALSE(writer.Flush(0));
  EXPECT_TRUE(reader.HasNews());
  EXPECT_TRUE(reader.Fill());
  EXPECT_FALSE(reader.HasNews());
  for (const char* expected : {"first", "", "third"}) {
    ASSERT_TRUE(reader.Next(&message));
    EXPECT_EQ(message, expected);
  }
  EXPECT_FALSE(reader.Next(&message));
}

TEST(ByteStreamTest, NeverRunsAheadOfTheSlowestReader) {
  Stream stream(64);
  StreamWriter writer = stream.Writer();
  writer.Append(std::string(200, 'x'));
  EXPECT_TRUE(writer.Flush(0));
  EXPECT_EQ(stream.written.value.load(), 64u);
  EXPECT_FALSE(writer.Flush(0));
  EXPECT_TRUE(writer.blocked());
  EXPECT_TRUE(writer.Flush(10));
  EXPECT_EQ(stream.written.value.load(), 74u);
  EXPECT_FALSE(writer.Flush(10));
}

TEST(ByteStreamTest, AMessageLongerThanTheMemoryPassesInPieces) {
  Stream stream(16);
  StreamWriter writer = stream.Writer();
  StreamReader reader = stream.Reader(&stream.reads[0]);
  const std::string sent = Message(1000, 1);
  writer.Append(sent);
  std::string_view received;
  int pieces = 0;
  while (writer.Flush(stream.reads[0].value.load())) {
    EXPECT_FALSE(reader.Next(&received));
    EXPECT_TRUE(reader.Fill());
    ++pieces;
  }
  EXPECT_EQ(pieces, (1004 + 15) / 16);
  ASSERT_TRUE(reader.Next(&received));
  EXPECT_EQ(received, sent);
}

// A writer and three readers of different speed, each on a thread of its own.
TEST(ByteStreamTest, EveryReaderGetsEverythingInOrder) {
  constexpr int kMessages = 3000;
  for (uint64_t capacity : {7, 64, 1000, 65536}) {
    Stream stream(capacity);
    std::mt19937 lengths(capacity);
    std::vector<std::string> messages(kMessages);
    for (int i = 0; i < kMessages; ++i) messages[i] = Message(lengths() % 60, i);
    std::vector<std::thread> threads;
    for (int r = 0; r < 3; ++r) {
      threads.emplace_back([&, r] {
        StreamReader reader = stream.Reader(&stream.reads[r]);
        std::mt19937 random(r);
        int received = 0;
        while (received < kMessages) {
          std::string_view message;
          if (random() % (1 + r) == 0) reader.Fill();
          if (!reader.HasNews()) sched_yield();
          while (received < kMessages && reader.Next(&message)) {
            ASSERT_EQ(message, messages[received]) << received;
            ++received;
          }
        }
      });
    }
    StreamWriter writer = stream.Writer();
    for (const std::string& message : messages) {
      writer.Append(message);
      const auto slowest = [&] {
        uint64_t position = UINT64_MAX;
        for (const Progress& read : stream.reads) {
          position = std::min(position, read.value.load(std::memory_order_acquire));
        }
        return position;
      };
      while (writer.blocked()) {
        if (!writer.Flush(slowest())) sched_yield();
      }
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace keras_hvd
