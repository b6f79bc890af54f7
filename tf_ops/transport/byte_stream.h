// A stream of bytes through shared memory: one writer, one or more readers.
//
// The writer's position only grows; the bytes lie at position modulo capacity. The
// writer may not run ahead of the slowest reader by more than the capacity. Messages of
// any length pass: what does not fit waits on the writer's side.
#ifndef KERAS_HVD_TF_OPS_TRANSPORT_BYTE_STREAM_H_
#define KERAS_HVD_TF_OPS_TRANSPORT_BYTE_STREAM_H_

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace keras_hvd {

// A counter with one writer, alone in its cache line.
struct alignas(64) Progress {
  std::atomic<uint64_t> value;
};

// The writing end.
class StreamWriter {
 public:
  StreamWriter(char* memory, uint64_t capacity, Progress* written)
      : memory_(memory), capacity_(capacity), written_(written) {}

  // Queues a message behind those that wait already.
  void Append(std::string_view message);
  // Publishes what fits, given the slowest reader's position. Returns true if anything
  // was published.
  bool Flush(uint64_t slowest_read);
  bool blocked() const { return sent_ < waiting_.size(); }

 private:
  char* memory_;
  uint64_t capacity_;
  Progress* written_;
  std::string waiting_;
  size_t sent_ = 0;  // bytes of waiting_ that are published
};

// A reading end.
class StreamReader {
 public:
  StreamReader(const char* memory, uint64_t capacity, const Progress* written,
               Progress* read)
      : memory_(memory), capacity_(capacity), written_(written), read_(read) {}

  // Takes what is there into the reader's own memory. Returns true if there was any.
  bool Fill();
  // Gives the next whole message, valid until the next call; false if there is none.
  bool Next(std::string_view* message);
  bool HasNews() const {
    return written_->value.load(std::memory_order_acquire) !=
           read_->value.load(std::memory_order_relaxed);
  }

 private:
  const char* memory_;
  uint64_t capacity_;
  const Progress* written_;
  Progress* read_;
  std::string buffer_;
  size_t taken_ = 0;  // bytes of buffer_ that Next has given out
};

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_TRANSPORT_BYTE_STREAM_H_
