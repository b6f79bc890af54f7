#include "tf_ops/transport/rendezvous.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "tf_ops/transport/topology.h"
#include "tf_ops/transport/version.h"

namespace keras_hvd {
namespace {

constexpr char kMagic[8] = {'k', 'e', 'r', 'a', 's', 'h', 'v', 'd'};

// The greeting of a rank that connects.
struct Hello {
  char magic[8];
  char version[32];
  int32_t rank;
  int32_t size;
};

// The answer of rank 0, given twice: with the memory's descriptor, and when all are
// ready.
struct Answer {
  int32_t ok;
  int64_t exchange_bytes;
  char text[512];
};

// Practically forever; the clock overflows after about three hundred years.
constexpr double kLongestTimeoutSeconds = 1e9;

// A rank sends this when it has mapped the memory.
constexpr char kReady = 'R';

Status SystemError(const std::string& what) {
  return Status::Internal(what + ": " + strerror(errno));
}

void CopyText(const std::string& text, char* to, size_t bytes) {
  const size_t length = std::min(text.size(), bytes - 1);
  memcpy(to, text.data(), length);
  to[length] = '\0';
}

// The address starts with a zero byte: the abstract namespace, which leaves no files.
socklen_t Address(const std::string& job, sockaddr_un* address) {
  memset(address, 0, sizeof(*address));
  address->sun_family = AF_UNIX;
  const std::string name = "keras_hvd/" + std::to_string(getuid()) + "/" + job;
  const size_t length = std::min(name.size(), sizeof(address->sun_path) - 1);
  memcpy(address->sun_path + 1, name.data(), length);
  return offsetof(sockaddr_un, sun_path) + 1 + length;
}

int MillisecondsUntil(Clock::time_point deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, INT_MAX));
}

enum class Awaited { kInput, kCancel, kDeadline, kError };

// Waits for either descriptor; -1 stands for none.
Awaited AwaitInput(int descriptor, int cancel_fd, Clock::time_point deadline) {
  pollfd waiting[] = {{descriptor, POLLIN, 0}, {cancel_fd, POLLIN, 0}};
  const int events = TEMP_FAILURE_RETRY(poll(waiting, 2, MillisecondsUntil(deadline)));
  if (events < 0) return Awaited::kError;
  if (events == 0) return Awaited::kDeadline;
  // A peer's input may say more about why the job does not start.
  return waiting[0].revents != 0 ? Awaited::kInput : Awaited::kCancel;
}

// `missing`: what the cancelled wait was for.
Status Cancelled(const std::string& missing) {
  return Status::RankFailed("the start was cancelled before " + missing);
}

bool SendAnswer(int connection, const Answer& answer, int fd) {
  iovec data = {const_cast<Answer*>(&answer), sizeof(answer)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  return sendmsg(connection, &message, MSG_NOSIGNAL) == sizeof(answer);
}

// Waits for the answer of `leader`. `fd` gets the descriptor that came along, or -1.
Status ReceiveAnswer(int connection, int cancel_fd, const std::string& leader,
                     Clock::time_point deadline, Answer* answer, int* fd) {
  *fd = -1;
  const Awaited awaited = AwaitInput(connection, cancel_fd, deadline);
  if (awaited == Awaited::kError) return SystemError("poll");
  if (awaited == Awaited::kCancel) return Cancelled(leader + " had answered");
  if (awaited == Awaited::kDeadline) {
    return Status::RankFailed(leader +
                              " did not answer in time while the job started. See what "
                              "it does; if it is only "
                              "slow, raise --start-timeout "
                              "(KERAS_HVD_INIT_TIMEOUT_SECONDS)");
  }
  iovec data = {answer, sizeof(*answer)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (recvmsg(connection, &message, MSG_CMSG_CLOEXEC) != sizeof(*answer)) {
    return Status::RankFailed(leader + " ended while the job started");
  }
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    memcpy(fd, CMSG_DATA(header), sizeof(int));
  }
  if (!answer->ok) return Status::RankFailed(answer->text);
  return Status::Ok();
}

}  // namespace

Rendezvous::Rendezvous(RendezvousOptions options)
    : options_(std::move(options)), connections_(options_.size, -1) {
  deadline_ = Clock::now() +
              std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(
                  std::min(options_.timeout_seconds, kLongestTimeoutSeconds)));
}

Rendezvous::~Rendezvous() {
  if (listener_ >= 0) close(listener_);
  for (int connection : connections_) {
    if (connection >= 0) close(connection);
  }
}

Status Rendezvous::Connect(std::shared_ptr<Segment>* segment) {
  if (options_.size == 1) {
    return Segment::CreateLocal(1, options_.exchange_bytes, segment);
  }
  if (options_.rank != 0) {
    Status status = ConnectToRoot();
    return status.ok() ? ReceiveSegment(segment) : status;
  }
  Status status = Listen();
  if (status.ok()) status = AcceptAll();
  if (status.ok()) status = ShareSegment(segment);
  return status.ok() ? status : Refuse(std::move(status));
}

Status Rendezvous::Listen() {
  listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (listener_ < 0) return SystemError("socket");
  sockaddr_un address;
  const socklen_t length = Address(options_.job, &address);
  if (bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0) {
    if (errno != EADDRINUSE) return SystemError("bind");
    return Status::Internal("a job named '" + options_.job +
                            "' is already running on this host, or two processes both "
                            "say that they are its rank 0");
  }
  if (listen(listener_, options_.size + 16) != 0) return SystemError("listen");
  return Status::Ok();
}

std::vector<int> Rendezvous::MissingRanks() const {
  std::vector<int> missing;
  for (int rank = 1; rank < options_.size; ++rank) {
    if (connections_[rank] < 0) missing.push_back(NameOf(rank));
  }
  return missing;
}

Status Rendezvous::Ended(int rank) const {
  return Status::RankFailed(Name(rank) + " ended while the job started");
}

int Rendezvous::NameOf(int rank) const {
  return options_.names.empty() ? rank : options_.names[rank];
}

Status Rendezvous::AcceptAll() {
  std::vector<int> missing;
  while (!(missing = MissingRanks()).empty()) {
    std::vector<pollfd> waiting = {{listener_, POLLIN, 0}};
    for (int connection : connections_) waiting.push_back({connection, POLLIN, 0});
    waiting.push_back({options_.cancel_fd, POLLIN, 0});
    const int events =
        poll(waiting.data(), waiting.size(), MillisecondsUntil(deadline_));
    if (events < 0 && errno == EINTR) continue;
    if (events < 0) return SystemError("poll");
    if (events == 0) {
      return Status::RankFailed(
          RankList(missing) + " of job '" + options_.job +
          "' did not call init within " +
          std::to_string(static_cast<int>(options_.timeout_seconds)) +
          " s. Every rank must; if they are only slow to start, raise "
          "--start-timeout (KERAS_HVD_INIT_TIMEOUT_SECONDS)");
    }
    for (int rank = 1; rank < options_.size; ++rank) {
      // A rank sends nothing between its greeting and our answer, so it has ended.
      if (connections_[rank] >= 0 && waiting[rank + 1].revents != 0) return Ended(rank);
    }
    if (waiting.back().revents != 0) {
      return Cancelled(RankList(missing) + " had called init");
    }
    if (waiting[0].revents == 0) continue;
    const int connection = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (connection < 0) return SystemError("accept");
    KHVD_RETURN_IF_ERROR(Greet(connection));
  }
  return Status::Ok();
}

Status Rendezvous::Greet(int connection) {
  ucred peer = {};
  socklen_t length = sizeof(peer);
  Hello hello = {};
  const auto patience = std::min(deadline_, Clock::now() + std::chrono::seconds(2));
  // Strangers (another user or another program) are rejected, and the wait continues.
  const bool ours =
      getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 &&
      peer.uid == getuid() &&
      AwaitInput(connection, options_.cancel_fd, patience) == Awaited::kInput &&
      recv(connection, &hello, sizeof(hello), 0) == sizeof(hello) &&
      memcmp(hello.magic, kMagic, sizeof(kMagic)) == 0;
  if (!ours) {
    close(connection);
    return Status::Ok();
  }
  std::string wrong;
  if (strncmp(hello.version, kVersion, sizeof(hello.version)) != 0) {
    hello.version[sizeof(hello.version) - 1] = '\0';
    wrong =
        "runs keras_hvd " + std::string(hello.version) + ", rank 0 runs " + kVersion;
  } else if (hello.size != options_.size) {
    wrong = "was started as one of " + std::to_string(hello.size) +
            " ranks, rank 0 as one of " + std::to_string(options_.size);
  } else if (hello.rank < 1 || hello.rank >= options_.size) {
    wrong = "does not exist in a job of " + std::to_string(options_.size) + " ranks";
  } else if (connections_[hello.rank] >= 0) {
    wrong = "was started twice";
  }
  if (wrong.empty()) {
    connections_[hello.rank] = connection;
    return Status::Ok();
  }
  Status status =
      Status::InvalidArgument("rank " + std::to_string(hello.rank) + " " + wrong);
  Answer answer = {};
  CopyText(status.message, answer.text, sizeof(answer.text));
  SendAnswer(connection, answer, -1);
  close(connection);
  return status;
}

Status Rendezvous::ShareSegment(std::shared_ptr<Segment>* segment) {
  KHVD_RETURN_IF_ERROR(
      Segment::CreateShared(options_.size, options_.exchange_bytes, segment));
  return Accept((*segment)->exchange_bytes(), (*segment)->fd());
}

Status Rendezvous::Accept(int64_t exchange_bytes, int fd) {
  const Answer answer = {1, exchange_bytes, ""};
  for (int rank = 1; rank < options_.size; ++rank) {
    if (!SendAnswer(connections_[rank], answer, fd)) return Ended(rank);
  }
  return Status::Ok();
}

Status Rendezvous::ConnectToRoot() {
  sockaddr_un address;
  const socklen_t length = Address(options_.job, &address);
  // Nothing announces that rank 0 has begun to listen, so retry at growing intervals.
  std::chrono::milliseconds pause(1);
  while (true) {
    // Blocking, connect() would wait without a limit for a rank 0 that accepts nobody.
    const int connection =
        socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (connection < 0) return SystemError("socket");
    if (connect(connection, reinterpret_cast<sockaddr*>(&address), length) == 0) {
      connections_[0] = connection;
      break;
    }
    const int error = errno;
    close(connection);
    if (error != ECONNREFUSED && error != EAGAIN && error != EINTR) {
      errno = error;
      return SystemError("connect");
    }
    if (Clock::now() > deadline_) {
      return Status::RankFailed(
          Name(0) + " of job '" + options_.job + "' did not call init within " +
          std::to_string(static_cast<int>(options_.timeout_seconds)) +
          " s. Every rank must, on this host and in the same network namespace; if "
          "it is only slow to start, raise --start-timeout "
          "(KERAS_HVD_INIT_TIMEOUT_SECONDS)");
    }
    if (AwaitInput(-1, options_.cancel_fd, Clock::now() + pause) == Awaited::kCancel) {
      return Cancelled(Name(0) + " had called init");
    }
    pause = std::min(pause * 2, std::chrono::milliseconds(20));
  }
  ucred peer = {};
  socklen_t peer_length = sizeof(peer);
  if (getsockopt(connections_[0], SOL_SOCKET, SO_PEERCRED, &peer, &peer_length) != 0 ||
      peer.uid != getuid()) {
    return Status::Internal("the job's socket belongs to another user");
  }
  Hello hello = {};
  memcpy(hello.magic, kMagic, sizeof(kMagic));
  CopyText(kVersion, hello.version, sizeof(hello.version));
  hello.rank = options_.rank;
  hello.size = options_.size;
  // A failure shows in the answer, which may say why rank 0 hung up.
  (void)!send(connections_[0], &hello, sizeof(hello), MSG_NOSIGNAL);
  return Status::Ok();
}

Status Rendezvous::ReceiveSegment(std::shared_ptr<Segment>* segment) {
  Answer answer;
  int fd;
  // Rank 0 enforces the deadline and reports who is missing. This rank must only not
  // give up first.
  const auto deadline = deadline_ + std::chrono::seconds(5);
  Status status = ReceiveAnswer(connections_[0], options_.cancel_fd, Name(0), deadline,
                                &answer, &fd);
  if (!status.ok()) {
    if (fd >= 0) close(fd);
    return status;
  }
  if (fd < 0) return Status::Internal(Name(0) + " sent no shared memory");
  return Segment::Map(fd, options_.size, answer.exchange_bytes, segment);
}

Status Rendezvous::AwaitAll() {
  if (options_.size == 1) return Status::Ok();
  if (options_.rank != 0) {
    if (send(connections_[0], &kReady, 1, MSG_NOSIGNAL) != 1) return Ended(0);
    Answer answer;
    int fd;
    return ReceiveAnswer(connections_[0], options_.cancel_fd, Name(0),
                         deadline_ + std::chrono::seconds(5), &answer, &fd);
  }
  Status status = AwaitReadyOfAll();
  if (!status.ok()) return Refuse(std::move(status));
  KHVD_RETURN_IF_ERROR(Accept(0, -1));
  // From now on, a second job of the same name finds nobody listening.
  close(listener_);
  listener_ = -1;
  return Status::Ok();
}

Status Rendezvous::AwaitReadyOfAll() {
  for (int rank = 1; rank < options_.size; ++rank) {
    char word = 0;
    const Awaited awaited =
        AwaitInput(connections_[rank], options_.cancel_fd, deadline_);
    if (awaited == Awaited::kCancel) {
      return Cancelled(Name(rank) + " had finished init");
    }
    if (awaited == Awaited::kDeadline) {
      return Status::RankFailed(Name(rank) + " did not finish init in time");
    }
    if (recv(connections_[rank], &word, 1, 0) != 1 || word != kReady) {
      return Ended(rank);
    }
  }
  return Status::Ok();
}

Status Rendezvous::Refuse(Status status) {
  Answer answer = {};
  CopyText(status.message, answer.text, sizeof(answer.text));
  for (int connection : connections_) {
    if (connection >= 0) SendAnswer(connection, answer, -1);
  }
  return status;
}

}  // namespace keras_hvd
