// For tests of the stand-ins themselves: ranks that use the libraries' functions bare.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>

#include <functional>
#include <set>
#include <thread>
#include <vector>

#include "tf_ops/testing/gpu/stand_in.h"

namespace keras_hvd::stand_in {

using Texts = std::vector<std::string>;

inline const StandIn& Libraries() {
  static const StandIn* const libraries = new StandIn();
  return *libraries;
}
inline const cuda::Functions& Cuda() { return Libraries().cuda(); }
inline const nccl::Functions& Nccl() { return Libraries().nccl(); }

inline void Expect(cuda::Result result) { EXPECT_EQ(result, cuda::Result::kSuccess); }
inline void Expect(nccl::Result result) { EXPECT_EQ(result, nccl::Result::kSuccess); }

// The same where the call may go on behind it.
inline void ExpectBegun(nccl::Result result) {
  if (result != nccl::Result::kInProgress) Expect(result);
}

inline bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// One rank: a GPU's context, a stream for kernels and one for collectives.
class Rank {
 public:
  explicit Rank(int rank, int device) : rank_(rank), device_(device) {
    Libraries()->SetRank(rank);
    Expect(Cuda().init(0));
    Expect(Cuda().retain_primary_context(&context_, device));
    Expect(Cuda().push_context(context_));
    for (cuda::Stream* stream : {&compute, &collectives}) {
      Expect(Cuda().create_stream(stream, cuda::kStreamNonBlocking, 0));
    }
  }
  ~Rank() {
    for (cuda::Event event : events_) Expect(Cuda().destroy_event(event));
    for (void* memory : memory_) Expect(Cuda().free(cuda::Address(memory)));
    for (cuda::Stream stream : {compute, collectives}) {
      Expect(Cuda().destroy_stream(stream));
    }
    Expect(Cuda().pop_context(&context_));
    Expect(Cuda().release_primary_context(device_));
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  int rank() const { return rank_; }

  void* NewBytes(size_t bytes) {
    cuda::Pointer memory = 0;
    Expect(Cuda().allocate(&memory, bytes));
    memory_.insert(reinterpret_cast<void*>(memory));
    return reinterpret_cast<void*>(memory);
  }
  template <typename T>
  T* New(size_t count) {
    return static_cast<T*>(NewBytes(count * sizeof(T)));
  }
  template <typename T>
  T* NewWith(const std::vector<T>& values) {
    T* const memory = New<T>(values.size());
    std::copy(values.begin(), values.end(), memory);
    return memory;
  }
  void Free(void* memory) {
    memory_.erase(memory);
    Expect(Cuda().free(cuda::Address(memory)));
  }

  cuda::Event Record(cuda::Stream stream) {
    cuda::Event event = nullptr;
    Expect(Cuda().create_event(&event, cuda::kEventDisableTiming));
    Expect(Cuda().record_event(event, stream));
    events_.push_back(event);
    return event;
  }
  // Later work on `later` runs behind the present work on `earlier`.
  void Order(cuda::Stream earlier, cuda::Stream later) {
    Expect(Cuda().stream_wait_event(later, Record(earlier), 0));
  }
  void Await(cuda::Event event) {
    while (Cuda().query_event(event) == cuda::Result::kNotReady) sched_yield();
    Expect(Cuda().query_event(event));
  }
  void AwaitStream(cuda::Stream stream) { Await(Record(stream)); }

  cuda::Stream compute = nullptr;
  cuda::Stream collectives = nullptr;

 private:
  const int rank_;
  const int device_;
  cuda::Context context_ = nullptr;
  std::set<void*> memory_;
  std::vector<cuda::Event> events_;
};

// Waits for the work in progress, and returns its result.
inline nccl::Result End(nccl::Comm communicator) {
  nccl::Result error = nccl::Result::kInProgress;
  while (error == nccl::Result::kInProgress) {
    Expect(Nccl().async_error(communicator, &error));
    sched_yield();
  }
  return error;
}

inline nccl::UniqueId NewId() {
  nccl::UniqueId id;
  Expect(Nccl().unique_id(&id));
  return id;
}

inline nccl::Config NonBlocking() {
  nccl::Config config;
  config.blocking = 0;
  return config;
}

// A nonblocking communicator.
inline nccl::Comm Begin(const nccl::UniqueId& id, int count, int index) {
  nccl::Config config = NonBlocking();
  nccl::Comm communicator = nullptr;
  ExpectBegun(Nccl().init_rank(&communicator, count, id, index, &config));
  return communicator;
}

inline nccl::Comm Join(const nccl::UniqueId& id, int count, int index) {
  const nccl::Comm communicator = Begin(id, count, index);
  Expect(End(communicator));
  return communicator;
}

inline void Leave(nccl::Comm communicator) {
  ExpectBegun(Nccl().finalize(communicator));
  Expect(End(communicator));
  Expect(Nccl().destroy(communicator));
}

// One group of calls.
inline void Group(nccl::Comm communicator, const std::function<void()>& calls) {
  Expect(Nccl().group_start());
  calls();
  ExpectBegun(Nccl().group_end());
  Expect(End(communicator));
}

inline void ForEachRank(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&body, rank] { body(rank); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Ranks with a GPU each, or all with one, and a communicator of all of them.
inline void RunRanks(int size, uint64_t seed, int devices,
                     const std::function<void(Rank&, nccl::Comm)>& body) {
  Libraries()->Reset(seed, devices);
  const nccl::UniqueId id = NewId();
  ForEachRank(size, [&](int index) {
    Rank rank(index, index % devices);
    const nccl::Comm communicator = Join(id, size, index);
    body(rank, communicator);
  });
}

inline void ExpectClean() {
  EXPECT_EQ(Libraries()->Violations(), Texts());
  EXPECT_EQ(Libraries()->CountLeaks().sum(), 0);
}

inline bool HasViolation(const std::string& part) {
  for (const std::string& violation : Libraries()->Violations()) {
    if (Contains(violation, part)) return true;
  }
  return false;
}

}  // namespace keras_hvd::stand_in
