#include "tf_ops/transport/mpi.h"

#include <mutex>
#include <utility>

namespace keras_hvd {
namespace {

// The communicator is this job's alone, and messages between two ranks keep their
// order.
constexpr int kTag = 0;
// As many as two busy peers have on their way. The memory of more messages is freed.
constexpr size_t kMostFree = 32;
// More than any MPI's MPI_MAX_ERROR_STRING.
constexpr size_t kMostErrorText = 4096;

template <typename Handle>
Handle HandleOf(intptr_t value) {
  if constexpr (std::is_pointer_v<Handle>) {
    return reinterpret_cast<Handle>(value);
  } else {
    return static_cast<Handle>(value);
  }
}

}  // namespace

Mpi::Mpi(const MpiOptions& options)
    : options_(options), status_(options.status_bytes / sizeof(uint64_t) + 1) {}

std::unique_ptr<MpiMessage> Mpi::NewMessage(int64_t bytes) {
  std::unique_ptr<MpiMessage> message;
  if (free_.empty()) {
    message = std::make_unique<MpiMessage>();
    // Without zeros, which nobody needs.
    message->memory.reset(new char[kMessageBytes]);
  } else {
    message = std::move(free_.back());
    free_.pop_back();
  }
  message->bytes = bytes;
  message->used = 0;
  message->is_complete = false;
  return message;
}

std::string Mpi::Send(MpiMessage* message, int peer, bool is_synchronous) {
  return Begin(is_synchronous ? options_.issend : options_.isend, message, peer);
}

std::string Mpi::Receive(MpiMessage* message, int peer) {
  return Begin(options_.irecv, message, peer);
}

std::string Mpi::Test(MpiMessage* message) {
  int is_complete = 0;
  const auto test = reinterpret_cast<int (*)(void*, int*, void*)>(options_.test);
  const int code = test(message->request, &is_complete, status_.data());
  message->is_complete = is_complete != 0;
  return Describe(code);
}

void Mpi::Recycle(std::unique_ptr<MpiMessage> message) {
  if (free_.size() < kMostFree) free_.push_back(std::move(message));
}

void Mpi::Keep(std::unique_ptr<MpiMessage> message) {
  static std::mutex mutex;
  // Never destroyed.
  static auto* const kept = new std::vector<std::unique_ptr<MpiMessage>>;
  std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(message));
}

// MPI_Isend, MPI_Issend and MPI_Irecv have the same arguments.
template <typename Handle>
int Mpi::Begin(void* function, MpiMessage* message, int peer) const {
  using Function = int (*)(void* data, int count, Handle type, int peer, int tag,
                           Handle communicator, void* request);
  return reinterpret_cast<Function>(function)(
      message->memory.get(), static_cast<int>(message->bytes),
      HandleOf<Handle>(options_.byte), peer, kTag,
      HandleOf<Handle>(options_.communicator), message->request);
}

std::string Mpi::Begin(void* function, MpiMessage* message, int peer) const {
  return Describe(options_.handles_are_ints ? Begin<int>(function, message, peer)
                                            : Begin<void*>(function, message, peer));
}

std::string Mpi::Describe(int code) const {
  if (code == 0) return "";
  std::vector<char> text(kMostErrorText);
  int length = 0;
  reinterpret_cast<int (*)(int, char*, int*)>(options_.error_string)(code, text.data(),
                                                                     &length);
  if (length == 0) return "MPI's error " + std::to_string(code);
  return std::string(text.data(), length);
}

}  // namespace keras_hvd
