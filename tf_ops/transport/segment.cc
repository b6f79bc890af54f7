#include "tf_ops/transport/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

namespace keras_hvd {
namespace {

constexpr int64_t kPage = 4096;

int64_t RoundUp(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

Status Refused(const char* call, int64_t bytes) {
  const int error = errno;
  std::string remedy = "Free memory, raise the container's limit";
  rlimit limit = {};
  if (error == EFBIG && getrlimit(RLIMIT_FSIZE, &limit) == 0) {
    remedy = "It counts as a file, and one may have " +
             std::to_string(limit.rlim_cur >> 10) +
             " KiB (RLIMIT_FSIZE; ulimit -f): raise that";
  }
  return Status::Internal("cannot get " + std::to_string(bytes >> 20) +
                          " MiB of shared memory: " + call + ": " + strerror(error) +
                          ". " + remedy + ", or lower KERAS_HVD_EXCHANGE_BYTES");
}

}  // namespace

int64_t Segment::Bytes(int size, int64_t exchange_bytes) {
  return RoundUp(sizeof(SegmentHeader)) + size * RoundUp(sizeof(RankBlock)) +
         size * static_cast<int64_t>(kSubmissionBytes) +
         static_cast<int64_t>(kDecisionBytes) + size * exchange_bytes;
}

Status Segment::CreateLocal(int size, int64_t exchange_bytes,
                            std::shared_ptr<Segment>* segment) {
  segment->reset(new Segment(size, RoundUp(exchange_bytes)));
  return (*segment)->MapMemory(MAP_ANONYMOUS);
}

Status Segment::CreateShared(int size, int64_t exchange_bytes,
                             std::shared_ptr<Segment>* segment) {
  segment->reset(new Segment(size, RoundUp(exchange_bytes)));
  Segment& made = **segment;
  const int64_t bytes = Bytes(size, made.exchange_bytes_);
  made.fd_ = memfd_create("keras_hvd", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made.fd_ < 0) return Refused("memfd_create", bytes);
  // Reserve now: touching pages that the system cannot supply would raise SIGBUS.
  const int error = posix_fallocate(made.fd_, 0, bytes);
  if (error != 0) {
    errno = error;
    return Refused("fallocate", bytes);
  }
  if (fcntl(made.fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Refused("fcntl(F_ADD_SEALS)", bytes);
  }
  return made.MapMemory(0);
}

Status Segment::Map(int fd, int size, int64_t exchange_bytes,
                    std::shared_ptr<Segment>* segment) {
  segment->reset(new Segment(size, RoundUp(exchange_bytes)));
  (*segment)->fd_ = fd;
  return (*segment)->MapMemory(0);
}

Status Segment::MapMemory(int flags) {
  const int64_t bytes = Bytes(size_, exchange_bytes_);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_POPULATE | flags, fd_, 0);
  if (memory == MAP_FAILED) return Refused("mmap", bytes);
  base_ = static_cast<char*>(memory);
  // A forked child must not be able to disturb the job.
  if (madvise(memory, bytes, MADV_DONTFORK) != 0) return Refused("madvise", bytes);
  return Status::Ok();
}

Segment::~Segment() {
  if (base_ != nullptr) munmap(base_, Bytes(size_, exchange_bytes_));
  if (fd_ >= 0) close(fd_);
}

RankBlock& Segment::block(int rank) {
  char* blocks = base_ + RoundUp(sizeof(SegmentHeader));
  return *reinterpret_cast<RankBlock*>(blocks + rank * RoundUp(sizeof(RankBlock)));
}

char* Segment::submissions(int rank) {
  return reinterpret_cast<char*>(&block(size_)) + rank * kSubmissionBytes;
}

char* Segment::decisions() { return submissions(size_); }

char* Segment::exchange(int rank) {
  return decisions() + kDecisionBytes + rank * exchange_bytes_;
}

}  // namespace keras_hvd
