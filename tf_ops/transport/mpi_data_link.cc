#include "tf_ops/transport/mpi_data_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace keras_hvd {

// How many messages are on their way in one direction: enough to keep a network busy.
constexpr size_t kMostMessages = 8;

MpiDataLink::MpiDataLink(std::shared_ptr<Mpi> mpi, int peer)
    : DataLink(kHostTimeout), mpi_(std::move(mpi)), peer_(peer) {}

MpiDataLink::~MpiDataLink() { Abandon(); }

int64_t MpiDataLink::Send(const void* data, int64_t bytes) {
  sending_.Post(static_cast<char*>(const_cast<void*>(data)), bytes);
  return sent_.posted += bytes;
}

int64_t MpiDataLink::Receive(void* data, int64_t bytes) {
  receiving_.Post(static_cast<char*>(data), bytes);
  return received_.posted += bytes;
}

// Receives begin first, so that messages find their places when they come.
bool MpiDataLink::Move() {
  bool moved = false;
  for (const auto step : {&MpiDataLink::BeginReceives, &MpiDataLink::BeginSends,
                          &MpiDataLink::EndSends, &MpiDataLink::EndReceives}) {
    moved = (this->*step)() || moved;
  }
  return moved;
}

bool MpiDataLink::BeginReceives() {
  bool begun = false;
  while (const int64_t bytes = closed() ? 0 : receiving_.NextBytes()) {
    receiving_.messages.push_back(mpi_->NewMessage(bytes));
    receiving_.Advance(bytes);
    begun = Note(mpi_->Receive(receiving_.messages.back().get(), peer_));
  }
  return begun;
}

bool MpiDataLink::BeginSends() {
  bool begun = false;
  while (!closed() && !sending_.pieces.empty()) {
    if (filling_ == nullptr) {
      const int64_t bytes = sending_.NextBytes();
      if (bytes == 0) break;
      filling_ = mpi_->NewMessage(bytes);
      sending_.Advance(bytes);
    }
    sending_.Copy(filling_.get(), true);
    if (filling_->used < filling_->bytes) break;
    // MPI may call a small one complete that it still has in its own memory, and takes
    // it on only when it is called again, which this rank may not do for long.
    const bool is_synchronous = !sending_.messages.empty();
    sending_.messages.push_back(std::move(filling_));
    begun = Note(mpi_->Send(sending_.messages.back().get(), peer_, is_synchronous));
  }
  return begun;
}

bool MpiDataLink::EndSends() {
  bool ended = false;
  while (!sending_.messages.empty() && IsComplete(sending_.messages.front().get())) {
    sent_.moved += sending_.messages.front()->bytes;
    mpi_->Recycle(std::move(sending_.messages.front()));
    sending_.messages.pop_front();
    ended = true;
  }
  return ended;
}

bool MpiDataLink::EndReceives() {
  bool moved = false;
  while (received_.waits() && !receiving_.messages.empty()) {
    MpiMessage* const message = receiving_.messages.front().get();
    if (!IsComplete(message)) break;
    received_.moved += receiving_.Copy(message, false);
    moved = true;
    if (message->used < message->bytes) break;
    mpi_->Recycle(std::move(receiving_.messages.front()));
    receiving_.messages.pop_front();
  }
  return moved;
}

bool MpiDataLink::IsComplete(MpiMessage* message) {
  if (message->is_complete) return true;
  return !closed() && Note(mpi_->Test(message)) && message->is_complete;
}

// Returns whether there was none.
bool MpiDataLink::Note(const std::string& error) {
  if (error.empty()) return true;
  why_closed_ = error;
  return false;
}

void MpiDataLink::Abandon() {
  for (Stream* stream : {&sending_, &receiving_}) {
    for (std::unique_ptr<MpiMessage>& message : stream->messages) {
      Mpi::Keep(std::move(message));
    }
    *stream = {};
  }
  filling_.reset();
  if (!closed()) why_closed_ = "it was abandoned";
}

void MpiDataLink::Stream::Begin(int64_t bytes) {
  if (bytes > 0) begun.push_back(bytes);
  unposted = bytes;
}

void MpiDataLink::Stream::Post(char* data, int64_t bytes) {
  if (bytes == 0) return;
  if (unposted == 0) Begin(bytes);
  unposted -= bytes;
  pieces.push_back({data, static_cast<size_t>(bytes)});
}

int64_t MpiDataLink::Stream::NextBytes() const {
  if (begun.empty() || messages.size() >= kMostMessages) return 0;
  return std::min(begun.front(), Mpi::kMessageBytes);
}

void MpiDataLink::Stream::Advance(int64_t bytes) {
  begun.front() -= bytes;
  if (begun.front() == 0) begun.pop_front();
}

int64_t MpiDataLink::Stream::Copy(MpiMessage* message, bool is_sent) {
  const int64_t before = message->used;
  while (message->used < message->bytes && !pieces.empty()) {
    iovec& piece = pieces.front();
    const int64_t bytes =
        std::min<int64_t>(piece.iov_len, message->bytes - message->used);
    char* const place = message->memory.get() + message->used;
    if (is_sent) {
      memcpy(place, piece.iov_base, bytes);
    } else if (piece.iov_base != nullptr) {
      memcpy(piece.iov_base, place, bytes);
    }
    if (piece.iov_base != nullptr) {
      piece.iov_base = static_cast<char*>(piece.iov_base) + bytes;
    }
    piece.iov_len -= bytes;
    message->used += bytes;
    if (piece.iov_len == 0) pieces.pop_front();
  }
  return message->used - before;
}

}  // namespace keras_hvd
