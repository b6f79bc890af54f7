// Channels in shared memory: every message arrives whole and in order, however little
// fits.
#include "tf_ops/transport/shared_memory_channel.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace keras_hvd {
namespace {

// The memory of a channel to up to three receivers.
struct Ring {
  explicit Ring(uint64_t capacity, int receivers = 1) : memory(capacity) {
    std::vector<const SharedCounter*> read;
    for (int i = 0; i < receivers; ++i) read.push_back(&reads[i]);
    sender = std::make_unique<SharedMemorySender>(memory.data(), memory.size(), &state,
                                                  read);
  }
  SharedMemoryReceiver Receiver(int number = 0) {
    return SharedMemoryReceiver(memory.data(), memory.size(), &state, &reads[number],
                                &bell);
  }
  uint64_t written() const { return state.written.value.load(); }

  std::vector<char> memory;
  RingState state{};
  SharedCounter reads[3]{};
  Doorbell bell{};  // the sender's
  std::unique_ptr<SharedMemorySender> sender;
};

std::string Message(size_t length, int seed) {
  std::mt19937 random(seed);
  std::string message(length, '\0');
  for (char& byte : message) byte = static_cast<char>(random());
  return message;
}

TEST(SharedMemoryChannelTest, GivesBackWhatWasSent) {
  Ring ring(100);
  SharedMemoryReceiver receiver = ring.Receiver();
  std::string_view message;
  EXPECT_FALSE(receiver.Receive());
  EXPECT_FALSE(receiver.Next(&message));
  EXPECT_FALSE(receiver.HasNews());
  EXPECT_FALSE(ring.sender->Flush());
  ring.sender->Queue("first");
  ring.sender->Queue("");
  ring.sender->Queue("third");
  EXPECT_FALSE(receiver.HasNews());
  EXPECT_TRUE(ring.sender->Flush());
  EXPECT_FALSE(ring.sender->Flush());
  EXPECT_TRUE(receiver.HasNews());
  EXPECT_TRUE(receiver.Receive());
  EXPECT_FALSE(receiver.HasNews());
  for (const char* expected : {"first", "", "third"}) {
    ASSERT_TRUE(receiver.Next(&message));
    EXPECT_EQ(message, expected);
  }
  EXPECT_FALSE(receiver.Next(&message));
}

TEST(SharedMemoryChannelTest, NeverRunsAheadOfTheSlowestReceiver) {
  Ring ring(64, 2);
  ring.sender->Queue(std::string(200, 'x'));
  EXPECT_TRUE(ring.sender->Flush());
  EXPECT_EQ(ring.written(), 64u);
  EXPECT_FALSE(ring.sender->Flush());
  SharedMemoryReceiver quick = ring.Receiver(0);
  EXPECT_TRUE(quick.Receive());
  EXPECT_FALSE(ring.sender->Flush());
  ring.reads[1].value.store(10);
  EXPECT_TRUE(ring.sender->Flush());
  EXPECT_EQ(ring.written(), 74u);
}

TEST(SharedMemoryChannelTest, WhoHasLeftHoldsUpNobody) {
  Ring ring(64, 2);
  ring.sender->Queue(std::string(200, 'x'));
  EXPECT_TRUE(ring.sender->Flush());
  SharedMemoryReceiver stays = ring.Receiver(0);
  EXPECT_TRUE(stays.Receive());
  EXPECT_FALSE(ring.sender->Flush());
  ring.sender->Drop(1);
  EXPECT_TRUE(ring.sender->Flush());
  EXPECT_EQ(ring.written(), 128u);
  // Nobody is left to read it, so that nothing waits any more.
  ring.sender->Drop(0);
  EXPECT_TRUE(ring.sender->Flush());
  EXPECT_EQ(ring.written(), 204u);
  EXPECT_FALSE(ring.sender->CanFlush());
}

TEST(SharedMemoryChannelTest, WhoMakesRoomRingsForTheSenderThatWaits) {
  Ring ring(64);
  SharedMemoryReceiver receiver = ring.Receiver();
  const auto rings_for_sender = [&] {
    ring.bell.Announce();
    EXPECT_TRUE(receiver.Receive());
    const bool rung = ring.bell.Sleep(Clock::now());
    ring.bell.Cancel();
    return rung;
  };
  ring.sender->Queue(std::string(40, 'x'));
  EXPECT_TRUE(ring.sender->Flush());
  EXPECT_FALSE(ring.sender->CanFlush());
  EXPECT_FALSE(rings_for_sender());
  ring.sender->Queue(std::string(100, 'y'));
  EXPECT_TRUE(ring.sender->Flush());
  // It waits for room, and there is none as far as anyone has said.
  EXPECT_FALSE(ring.sender->CanFlush());
  EXPECT_TRUE(rings_for_sender());
  EXPECT_TRUE(ring.sender->CanFlush());
  EXPECT_TRUE(ring.sender->Flush());
  EXPECT_FALSE(ring.sender->CanFlush());
}

TEST(SharedMemoryChannelTest, AMessageLongerThanTheMemoryPassesInPieces) {
  Ring ring(16);
  SharedMemoryReceiver receiver = ring.Receiver();
  const std::string sent = Message(1000, 1);
  ring.sender->Queue(sent);
  std::string_view received;
  int pieces = 0;
  while (ring.sender->Flush()) {
    EXPECT_FALSE(receiver.Next(&received));
    EXPECT_TRUE(receiver.Receive());
    ++pieces;
  }
  EXPECT_EQ(pieces, (1004 + 15) / 16);
  ASSERT_TRUE(receiver.Next(&received));
  EXPECT_EQ(received, sent);
}

// A sender and three receivers of different speed, each on a thread of its own.
TEST(SharedMemoryChannelTest, EveryReceiverGetsEverythingInOrder) {
  constexpr int kMessages = 3000;
  for (uint64_t capacity : {7, 64, 1000, 65536}) {
    Ring ring(capacity, 3);
    std::mt19937 lengths(capacity);
    std::vector<std::string> messages(kMessages);
    for (int i = 0; i < kMessages; ++i) messages[i] = Message(lengths() % 60, i);
    std::vector<std::thread> threads;
    for (int r = 0; r < 3; ++r) {
      threads.emplace_back([&, r] {
        SharedMemoryReceiver receiver = ring.Receiver(r);
        std::mt19937 random(r);
        int received = 0;
        while (received < kMessages) {
          std::string_view message;
          if (random() % (1 + r) == 0) receiver.Receive();
          if (!receiver.HasNews()) sched_yield();
          while (received < kMessages && receiver.Next(&message)) {
            ASSERT_EQ(message, messages[received]) << received;
            ++received;
          }
        }
      });
    }
    uint64_t bytes = 0;
    for (const std::string& message : messages) {
      ring.sender->Queue(message);
      bytes += sizeof(uint32_t) + message.size();
      // As the driving thread does it: only when it is told that there may be room.
      ring.sender->Flush();
      while (ring.written() != bytes) {
        if (!ring.sender->CanFlush() || !ring.sender->Flush()) sched_yield();
      }
    }
    for (std::thread& thread : threads) thread.join();
  }
}

}  // namespace
}  // namespace keras_hvd
