// For tests of collectives: ranks as threads over memory of one process.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>

#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/dtype.h"

namespace keras_hvd {

// The least exchange memory: two windows of 4 KiB, so that little data needs many.
inline constexpr int64_t kTinyExchange = 8 << 10;

// Lets other threads run until the peer is ready.
class YieldingWaiter : public Waiter {
 public:
  bool Wait(const std::function<bool()>& ready, int) override {
    while (!ready()) sched_yield();
    return true;
  }
  bool Poll(const std::function<bool()>& ready, int awaited) override {
    return Wait(ready, awaited);
  }
  bool Pause(int64_t) override {
    sched_yield();
    return true;
  }
};

// Ranks that run collectives one after another, each on a thread of its own.
class Ranks {
 public:
  explicit Ranks(int size, int64_t exchange_bytes = kTinyExchange) : size_(size) {
    EXPECT_TRUE(Segment::CreateLocal(size, exchange_bytes, &segment_).ok());
    for (int rank = 0; rank < size; ++rank) {
      communicators_.push_back(std::make_unique<Communicator>(
          segment_, Topology::OneHost(rank, size), &waiter_));
    }
  }

  int size() const { return size_; }

  // Runs `body(rank, communicator)` between Begin and End on every member.
  void Run(const std::vector<int>& members,
           const std::function<void(int, Communicator*)>& body) {
    sequence_ += 1;
    std::vector<std::thread> threads;
    for (int rank : members) {
      threads.emplace_back([&, rank] {
        Communicator* communicator = communicators_[rank].get();
        EXPECT_TRUE(communicator->Begin(members, sequence_));
        body(rank, communicator);
        communicator->End();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  void Run(const std::function<void(int, Communicator*)>& body) {
    std::vector<int> all(size_);
    std::iota(all.begin(), all.end(), 0);
    Run(all, body);
  }

 private:
  const int size_;
  YieldingWaiter waiter_;
  std::shared_ptr<Segment> segment_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
  uint64_t sequence_ = 0;
};

// Bytes that differ between ranks and places.
inline std::vector<char> RandomBytes(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<char> bytes(count);
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

// Any type but truth values, which have no sums.
inline DataType RandomNumberType(std::mt19937* random) {
  const int drawn = static_cast<int>((*random)() % (kReducedDataTypes - 1));
  return static_cast<DataType>(drawn < static_cast<int>(DataType::kBool) ? drawn
                                                                         : drawn + 1);
}

// Numbers of which sums and products of a few are exact in every type.
template <typename T>
std::vector<T> SmallNumbers(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<T> numbers(count);
  for (T& number : numbers) number = static_cast<T>(random() % 4);
  return numbers;
}

}  // namespace keras_hvd
