// The few functions of an MPI that carry tensors. Python has opened that MPI, and gives
// their addresses and the handles. No header of an MPI is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace keras_hvd {

// As khvd_mpi in c_api.h.
struct MpiOptions {
  void* isend = nullptr;
  void* issend = nullptr;
  void* irecv = nullptr;
  void* test = nullptr;
  void* error_string = nullptr;
  intptr_t communicator = 0;      // of this job's ranks alone, in their order
  intptr_t byte = 0;              // the type
  bool handles_are_ints = false;  // instead of pointers
  size_t status_bytes = 0;
};

// A message on its way. Its memory belongs to the MPI until it is complete.
struct MpiMessage {
  std::unique_ptr<char[]> memory;
  int64_t bytes = 0;
  int64_t used = 0;  // bytes filled to be sent, or taken out of those that came
  bool is_complete = false;
  uint64_t request[2] = {0, 0};  // a handle, of whatever size
};

// One rank's. Only one thread may use it at a time. All calls return at once.
class Mpi {
 public:
  // The most bytes of one message: as many as an allreduce sends at once. For each the
  // two ends have to agree, which takes a round trip, and Open MPI moves only the bytes
  // beyond 192 KiB straight to their place.
  static constexpr int64_t kMessageBytes = 512 << 10;

  explicit Mpi(const MpiOptions& options);

  std::unique_ptr<MpiMessage> NewMessage(int64_t bytes);
  // Begins to send or to receive a message. A synchronous one is complete when the
  // other end has it. Each of these three returns "", or why it has failed.
  std::string Send(MpiMessage* message, int peer, bool is_synchronous);
  std::string Receive(MpiMessage* message, int peer);
  // Looks whether it is complete.
  std::string Test(MpiMessage* message);
  // Takes a message back; nothing of it is on its way.
  void Recycle(std::unique_ptr<MpiMessage> message);
  // Takes back one that may be on its way forever. The MPI, or a peer, may use its
  // memory as long as the process lives.
  static void Keep(std::unique_ptr<MpiMessage> message);

 private:
  template <typename Handle>
  int Begin(void* function, MpiMessage* message, int peer) const;
  std::string Begin(void* function, MpiMessage* message, int peer) const;
  std::string Describe(int code) const;

  const MpiOptions options_;
  std::vector<uint64_t> status_;
  std::vector<std::unique_ptr<MpiMessage>> free_;
};

}  // namespace keras_hvd
