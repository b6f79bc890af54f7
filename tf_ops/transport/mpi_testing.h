// For tests: an MPI whose ranks are in this process. As with a real one, small messages
// are complete for the sender at once, nothing moves but within calls, and a peer
// writes into the receiver's memory whenever it calls.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "tf_ops/transport/mpi.h"

namespace keras_hvd {

class MpiStandIn {
 public:
  // Messages of up to this size do not wait for the receiver, unless synchronous.
  static constexpr int kEagerBytes = 4096;

  MpiStandIn() = default;
  MpiStandIn(const MpiStandIn&) = delete;
  MpiStandIn& operator=(const MpiStandIn&) = delete;

  // `Handle`: the type of its handles, `int` or `void*`. It must outlive the ranks'
  // use.
  template <typename Handle>
  MpiOptions OptionsOf(int rank) {
    MpiOptions options;
    options.isend = Address(&Begin<Handle, false, false>);
    options.issend = Address(&Begin<Handle, false, true>);
    options.irecv = Address(&Begin<Handle, true, false>);
    options.test = Address(&Test<Handle>);
    options.error_string = Address(&ErrorString);
    options.byte = kByte;
    options.handles_are_ints = !std::is_pointer_v<Handle>;
    options.status_bytes = kStatusBytes;
    std::lock_guard<std::mutex> lock(Mutex());
    Ends().push_back({this, rank});
    options.communicator = static_cast<intptr_t>(Ends().size()) - 1;
    return options;
  }

  // From now on every call fails.
  void Break() {
    std::lock_guard<std::mutex> lock(Mutex());
    broken_ = true;
  }
  // Moves the bytes that all ranks have to send, as their calls would do.
  void MoveAll() {
    std::lock_guard<std::mutex> lock(Mutex());
    for (auto& [ranks, queue] : queues_) queue.Move(nullptr);
  }

 private:
  static constexpr int kByte = 7;
  static constexpr size_t kStatusBytes = 24;
  static constexpr int kSizesDiffer = 15, kBroken = 16;

  struct End {
    MpiStandIn* mpi;
    int rank;
  };
  struct Request {
    MpiStandIn* mpi = nullptr;
    char* data = nullptr;
    int bytes = 0;
    std::vector<char> copy;  // of a small message
    bool is_complete = false;
    int code = 0;
  };
  using Shared = std::shared_ptr<Request>;
  struct Queue {
    std::deque<Shared> sent, received;
    std::vector<std::pair<Shared, Shared>> met;  // and not yet moved

    // Moves the bytes that move when the owner of a request looks at it; null: all. A
    // large message moves when its sender calls, as in a real MPI.
    void Move(const Request* tested) {
      for (auto pair = met.begin(); pair != met.end();) {
        const bool is_small = !pair->first->copy.empty();
        const Request* const mover = (is_small ? pair->second : pair->first).get();
        if (tested != nullptr && tested != mover) {
          ++pair;
          continue;
        }
        Copy(pair->first.get(), pair->second.get());
        pair = met.erase(pair);
      }
    }
  };

  // Handles are numbers in these.
  static std::mutex& Mutex() {
    static auto* const mutex = new std::mutex;
    return *mutex;
  }
  static std::deque<End>& Ends() {
    static auto* const ends = new std::deque<End>;
    return *ends;
  }
  static std::map<intptr_t, Shared>& Requests() {
    static auto* const requests = new std::map<intptr_t, Shared>;
    return *requests;
  }

  static intptr_t& last() {
    static intptr_t number = 0;
    return number;
  }

  template <typename Function>
  static void* Address(Function function) {
    return reinterpret_cast<void*>(function);
  }
  template <typename Handle>
  static intptr_t NumberOf(Handle handle) {
    if constexpr (std::is_pointer_v<Handle>) return reinterpret_cast<intptr_t>(handle);
    if constexpr (!std::is_pointer_v<Handle>) return handle;
  }
  template <typename Handle>
  static Handle HandleOf(intptr_t number) {
    if constexpr (std::is_pointer_v<Handle>) return reinterpret_cast<Handle>(number);
    if constexpr (!std::is_pointer_v<Handle>) return static_cast<Handle>(number);
  }

  template <typename Handle, bool receives, bool is_synchronous>
  static int Begin(void* data, int bytes, Handle type, int peer, int tag,
                   Handle communicator, Handle* handle) {
    std::lock_guard<std::mutex> lock(Mutex());
    const End& end = Ends()[NumberOf(communicator)];
    if (end.mpi->broken_ || NumberOf(type) != kByte || tag != 0) return kBroken;
    const auto request = std::make_shared<Request>();
    request->mpi = end.mpi;
    request->data = static_cast<char*>(data);
    request->bytes = bytes;
    Queue& queue = end.mpi->queues_[receives ? std::make_pair(peer, end.rank)
                                             : std::make_pair(end.rank, peer)];
    (receives ? queue.received : queue.sent).push_back(request);
    if (!receives && !is_synchronous && bytes <= kEagerBytes) {
      request->copy.assign(request->data, request->data + bytes);
      request->data = request->copy.data();
      request->is_complete = true;
    }
    while (!queue.sent.empty() && !queue.received.empty()) {
      queue.met.emplace_back(queue.sent.front(), queue.received.front());
      queue.sent.pop_front();
      queue.received.pop_front();
    }
    Requests()[++last()] = request;
    *handle = HandleOf<Handle>(last());
    return 0;
  }

  template <typename Handle>
  static int Test(Handle* handle, int* flag, void* status) {
    std::lock_guard<std::mutex> lock(Mutex());
    const auto found = Requests().find(NumberOf(*handle));
    const Shared request = found->second;
    if (request->mpi->broken_) return kBroken;
    for (auto& [ranks, queue] : request->mpi->queues_) queue.Move(request.get());
    memset(status, 0, kStatusBytes);
    *flag = request->is_complete;
    if (!request->is_complete) return 0;
    Requests().erase(found);
    *handle = HandleOf<Handle>(0);
    return request->code;
  }

  static int ErrorString(int code, char* text, int* length) {
    strcpy(text, code == kBroken ? "MPI_ERR_OTHER: it is broken"
                                 : "MPI_ERR_TRUNCATE: the sizes differ");
    *length = static_cast<int>(strlen(text));
    return 0;
  }

  static void Copy(Request* sent, Request* received) {
    if (sent->bytes != received->bytes) {
      received->code = kSizesDiffer;
    } else {
      memcpy(received->data, sent->data, sent->bytes);
    }
    sent->is_complete = received->is_complete = true;
  }

  std::map<std::pair<int, int>, Queue> queues_;  // by sender and receiver
  bool broken_ = false;
};

}  // namespace keras_hvd
