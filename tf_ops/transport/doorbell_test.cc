// Doorbells: no wake is lost.
#include "tf_ops/transport/doorbell.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <vector>

namespace keras_hvd {
namespace {

// Long enough for any machine; a wait that takes as long was not woken.
constexpr std::chrono::seconds kForever(30);

TEST(DoorbellTest, ARingBeforeTheAnnouncementIsNotKept) {
  Doorbell bell{};
  bell.Ring();
  bell.Announce();
  EXPECT_FALSE(bell.Sleep(Clock::now() + std::chrono::milliseconds(20)));
}

TEST(DoorbellTest, ARingBetweenAnnouncementAndSleepIsSeen) {
  Doorbell bell{};
  bell.Announce();
  bell.Ring();
  EXPECT_TRUE(bell.Sleep(Clock::time_point::max()));
}

TEST(DoorbellTest, SleepsUntilTheDeadline) {
  Doorbell bell{};
  const Clock::time_point deadline = Clock::now() + std::chrono::milliseconds(50);
  bell.Announce();
  EXPECT_FALSE(bell.Sleep(deadline));
  EXPECT_GE(Clock::now(), deadline);
  // A deadline in the past is one as well.
  bell.Announce();
  EXPECT_FALSE(bell.Sleep(deadline));
}

TEST(DoorbellTest, ACancelledAnnouncementIsNone) {
  Doorbell bell{};
  bell.Announce();
  bell.Cancel();
  EXPECT_TRUE(bell.Sleep(Clock::time_point::max()));
}

TEST(DoorbellTest, WhatTheSleeperDoesNotListenToDoesNotWakeIt) {
  Doorbell bell{};
  const auto soon = [] { return Clock::now() + std::chrono::milliseconds(20); };
  bell.Announce(Doorbell::kNews);
  bell.Ring(Doorbell::kProgress);
  bell.Ring(Doorbell::kSubmission);
  EXPECT_FALSE(bell.Sleep(soon(), Doorbell::kNews));

  for (uint32_t about : {Doorbell::kProgress, Doorbell::kNews, Doorbell::kEverything}) {
    const uint32_t listening = Doorbell::kProgress | Doorbell::kNews;
    bell.Announce(listening);
    bell.Ring(Doorbell::kSubmission);
    bell.Ring(about);
    EXPECT_TRUE(bell.Sleep(Clock::time_point::max(), listening)) << about;
  }
}

// Waits, as the engine does, until `*word` is no longer `old`. False if that took for
// ever.
bool AwaitChange(Doorbell* bell, const std::atomic<int>& word, int old) {
  while (word.load(std::memory_order_acquire) == old) {
    bell->Announce();
    if (word.load(std::memory_order_acquire) != old) {
      bell->Cancel();
      return true;
    }
    if (!bell->Sleep(Clock::now() + kForever)) return false;
  }
  return true;
}

// As many exchanges as a few seconds give, a million at most. Every one is a chance to
// lose a wake, and a lost one is a wait for ever.
TEST(DoorbellTest, NoWakeIsLostInPingPong) {
  constexpr int kExchanges = 1000000, kEnd = -1;
  const Clock::time_point end = Clock::now() + std::chrono::seconds(4);
  Doorbell bells[2] = {};
  std::atomic<int> ping{0}, pong{0};
  bool peer_lost = false;
  std::thread peer([&] {
    for (int i = 0; !peer_lost && ping.load() != kEnd; ++i) {
      peer_lost = !AwaitChange(&bells[1], ping, i);
      pong.store(i + 1, std::memory_order_release);
      bells[0].Ring();
    }
  });
  int i = 0;
  bool lost = false;
  while (!lost && i < kExchanges && (i <= 1000 || Clock::now() < end)) {
    ping.store(i + 1, std::memory_order_release);
    bells[1].Ring();
    lost = !AwaitChange(&bells[0], pong, i++);
  }
  ping.store(kEnd);
  bells[1].Ring();
  peer.join();
  EXPECT_FALSE(lost || peer_lost) << "after " << i << " exchanges";
  EXPECT_GT(i, 1000);
}

// Several ringers and one sleeper, which follows their count.
TEST(DoorbellTest, NoWakeIsLostWithManyRingers) {
  constexpr int kRingers = 3, kRings = 30000;
  Doorbell bell{};
  std::atomic<int> given{0};
  std::vector<std::thread> ringers;
  for (int ringer = 0; ringer < kRingers; ++ringer) {
    ringers.emplace_back([&, ringer] {
      std::mt19937 random(ringer);
      for (int i = 0; i < kRings; ++i) {
        given.fetch_add(1, std::memory_order_release);
        bell.Ring();
        if (random() % 8 == 0) std::this_thread::yield();
      }
    });
  }
  int seen = 0, lost = 0;
  while (seen < kRingers * kRings && lost == 0) {
    const int before = seen;
    seen = given.load(std::memory_order_acquire);
    if (seen != before) continue;
    bell.Announce();
    if (given.load(std::memory_order_acquire) != seen) {
      bell.Cancel();
      continue;
    }
    lost += !bell.Sleep(Clock::now() + kForever);
  }
  EXPECT_EQ(lost, 0);
  for (std::thread& ringer : ringers) ringer.join();
}

}  // namespace
}  // namespace keras_hvd
