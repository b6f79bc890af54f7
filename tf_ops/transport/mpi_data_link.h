// A data link over MPI.
//
// Bytes travel in messages of the link's own memory, and not straight from and to the
// callers'. After a failure nobody can know until when MPI, or a peer that writes into
// this process' memory, uses the memory given to it. So that memory is kept for good,
// and the callers' may go at once. A message stays in the processor's cache between the
// copy and MPI's own.
//
// MPI needs the size of a message at both ends: both cut the begun transfers alike.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "tf_ops/transport/data_link.h"
#include "tf_ops/transport/mpi.h"

namespace keras_hvd {

class MpiDataLink final : public DataLink {
 public:
  // `mpi` is this rank's. `peer`: the rank at the other end.
  MpiDataLink(std::shared_ptr<Mpi> mpi, int peer);
  ~MpiDataLink() override;

  void BeginSend(int64_t bytes) override { sending_.Begin(bytes); }
  void BeginReceive(int64_t bytes) override { receiving_.Begin(bytes); }
  int64_t Send(const void* data, int64_t bytes) override;
  int64_t Receive(void* data, int64_t bytes) override;
  bool wakes() const override { return false; }
  // MPI does not tell of lost hosts, but the engine's own connections do.
  void CheckPeer(Clock::time_point) override {}
  void Abandon() override;

 private:
  // One direction.
  struct Stream {
    std::deque<iovec> pieces;                          // posted, and not yet copied
    std::deque<std::unique_ptr<MpiMessage>> messages;  // given to MPI, in their order
    std::deque<int64_t> begun;  // the bytes of each that are not yet in messages
    int64_t unposted = 0;       // of the last one begun

    void Begin(int64_t bytes);
    void Post(char* data, int64_t bytes);
    // The size of the next message; 0: none may begin now.
    int64_t NextBytes() const;
    void Advance(int64_t bytes);
    // Copies between the first pieces and a message, as much as possible.
    int64_t Copy(MpiMessage* message, bool is_sent);
  };

  bool Move() override;
  bool BeginReceives();
  bool BeginSends();
  bool EndSends();
  bool EndReceives();
  bool IsComplete(MpiMessage* message);
  bool Note(const std::string& error);

  const std::shared_ptr<Mpi> mpi_;
  const int peer_;
  Stream sending_, receiving_;
  std::unique_ptr<MpiMessage> filling_;  // the next one to send
};

}  // namespace keras_hvd
