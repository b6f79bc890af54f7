// For tests of the engine: a world of processes that share no memory, only a pair of
// sockets between every two of them for messages, and one for tensors.
//
// Every collective is an exchange of all its bytes between all members, of which each
// then takes or reduces what it needs. It has no Adasum.
#ifndef KERAS_HVD_TF_OPS_ENGINE_SOCKET_WORLD_TESTING_H_
#define KERAS_HVD_TF_OPS_ENGINE_SOCKET_WORLD_TESTING_H_

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tf_ops/backend/world.h"
#include "tf_ops/collectives/parts.h"
#include "tf_ops/collectives/reduce.h"

namespace keras_hvd {

// One end for each peer; -1 for the rank itself.
struct SocketEnds {
  std::vector<int> messages, tensors;
};

// The sockets of all ranks, made before they are forked.
class SocketMesh {
 public:
  explicit SocketMesh(int size) : ends_(size) {
    for (SocketEnds& each : ends_) {
      each.messages.assign(size, -1);
      each.tensors.assign(size, -1);
    }
    for (int a = 0; a < size; ++a) {
      for (int b = a + 1; b < size; ++b) {
        Connect(&ends_[a].messages[b], &ends_[b].messages[a]);
        Connect(&ends_[a].tensors[b], &ends_[b].tensors[a]);
      }
    }
  }

  // Those of a rank, in its process; closes those of the others.
  SocketEnds Take(int rank) {
    for (size_t other = 0; other < ends_.size(); ++other) {
      if (static_cast<int>(other) == rank) continue;
      for (int end : ends_[other].messages) close(end);
      for (int end : ends_[other].tensors) close(end);
    }
    return ends_[rank];
  }

 private:
  static void Connect(int* a, int* b) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) != 0) abort();
    *a = ends[0];
    *b = ends[1];
  }

  std::vector<SocketEnds> ends_;
};

// A connected socket that never blocks: what does not fit waits here.
class Socket {
 public:
  explicit Socket(int end) : end_(end) {}
  ~Socket() { close(end_); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int end() const { return end_; }
  bool closed() const { return closed_; }
  bool has_unsent() const { return !unsent_.empty() && !closed_; }

  void Queue(std::string_view bytes) { unsent_.append(bytes); }
  void Send() {
    while (has_unsent()) {
      const ssize_t sent = send(end_, unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
      if (sent > 0) {
        unsent_.erase(0, sent);
      } else if (errno != EINTR) {
        closed_ |= errno != EAGAIN;
        return;
      }
    }
  }
  void Receive() {
    char bytes[1 << 16];
    while (!closed_) {
      const ssize_t count = recv(end_, bytes, sizeof(bytes), 0);
      if (count > 0) {
        received_.append(bytes, count);
      } else if (count == 0 || errno != EINTR) {
        closed_ = count == 0 || errno != EAGAIN;
        return;
      }
    }
  }
  // Takes a whole frame, of a type and any bytes; false if there is none.
  bool TakeFrame(char* type, std::string* bytes) {
    uint64_t length;
    if (received_.size() < 1 + sizeof(length)) return false;
    memcpy(&length, received_.data() + 1, sizeof(length));
    if (received_.size() - 1 - sizeof(length) < length) return false;
    *type = received_[0];
    *bytes = received_.substr(1 + sizeof(length), length);
    received_.erase(0, 1 + sizeof(length) + length);
    return true;
  }
  void QueueFrame(char type, std::string_view bytes) {
    const uint64_t length = bytes.size();
    unsent_.push_back(type);
    unsent_.append(reinterpret_cast<const char*>(&length), sizeof(length));
    unsent_.append(bytes);
  }

 private:
  const int end_;
  bool closed_ = false;
  std::string unsent_, received_;
};

// Messages that have come and that nobody has taken yet.
class Inbox {
 public:
  void Put(std::string message) {
    std::lock_guard<std::mutex> lock(mutex_);
    messages_.push_back(std::move(message));
  }
  bool Take(std::deque<std::string>* to) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (messages_.empty()) return false;
    to->insert(to->end(), messages_.begin(), messages_.end());
    messages_.clear();
    return true;
  }
  bool empty() {
    std::lock_guard<std::mutex> lock(mutex_);
    return messages_.empty();
  }

 private:
  std::mutex mutex_;
  std::deque<std::string> messages_;
};

// The state of the job as a rank hears of it. A thread sends and receives, and rings.
class SocketJob final : public JobState {
 public:
  SocketJob(int rank, const std::vector<int>& ends)
      : JobState(rank, static_cast<int>(ends.size())),
        submissions_(ends.size()),
        shut_down_(ends.size()),
        wake_(eventfd(0, EFD_NONBLOCK)) {
    for (int end : ends) {
      sockets_.push_back(end < 0 ? nullptr : std::make_unique<Socket>(end));
    }
    thread_ = std::thread([this] { Loop(); });
  }
  ~SocketJob() override {
    stopping_.store(true);
    Wake();
    thread_.join();
    close(wake_);
  }

  // ---- Messages

  void SendMessage(int to, std::string_view message) {
    if (to == rank()) {
      Deliver(to, std::string(message));
    } else {
      Send(to, 'm', message);
    }
  }
  Inbox& submissions(int from) { return submissions_[from]; }
  Inbox& decisions() { return decisions_; }

  // ---- The state

  bool Failed() const override { return failed_.load(); }
  Status Failure() const override { return Failed() ? failure_ : Status::Ok(); }
  bool Fail(Code code, const std::string& text, int dead) override {
    if (Failed()) return false;
    // First: once this rank knows, it may leave, and others must not hear only that.
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank() && peer != dead) {
        Send(peer, 'f', static_cast<char>(code) + text);
      }
    }
    return NoteFailure(code, text);
  }
  bool ClaimFailureReport() override { return !reported_.exchange(true); }
  bool ClaimGpuWarning() override { return true; }
  bool ClaimStallReport(uint64_t) override { return true; }

  std::string Describe(int rank) const override {
    return "rank " + std::to_string(rank) + " behind a socket";
  }
  std::string Obstacle(int) const override { return ""; }
  bool HasShutDown(int rank) const override { return shut_down_[rank].load(); }
  void ShutDown() override {
    shut_down_[rank()].store(true);
    for (int peer = 0; peer < size(); ++peer) {
      if (peer != rank()) Send(peer, 's', "");
    }
    bell_.Ring();
  }
  bool has_departed() const override { return shut_down_[rank()].load(); }
  uint64_t CarriedOut(int) const override { return carried_out_.load(); }
  bool HasLeftBefore(int, uint64_t) const override { return false; }
  void NoteCarriedOut() override { ++carried_out_; }
  OperationHistory& History(int rank) override {
    return rank == this->rank() ? own_history_ : no_history_;
  }

  Doorbell& bell() override { return bell_; }
  // Whoever is sent something is rung for by its own thread.
  void RingLeader(uint32_t about) override {
    if (rank() == 0) bell_.Ring(about);
  }
  int DepartedAbove() const override { return HasShutDown(0) ? 0 : -1; }
  void RingAll() override { bell_.Ring(); }

  bool compares_outputs() const override { return compares_.load(); }
  void set_compares_outputs(bool compares) override {
    compares_.store(compares);
    for (int peer = 1; peer < size(); ++peer) Send(peer, 'c', compares ? "1" : "");
  }
  bool WantsTimes() const override { return false; }
  void set_timeline_on(bool) override {}
  void set_timeline_paused(bool) override {}

 private:
  bool NoteFailure(Code code, const std::string& text) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (failed_.load()) return false;
      failure_ = {code, text};
      failed_.store(true);
    }
    bell_.Wake();
    return true;
  }

  void Send(int to, char type, std::string_view bytes) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      sockets_[to]->QueueFrame(type, bytes);
      sockets_[to]->Send();
      if (!sockets_[to]->has_unsent()) return;
    }
    Wake();
  }

  void Deliver(int from, std::string message) {
    // The coordinator gets submissions, all others get decisions.
    (rank() == 0 ? submissions_[from] : decisions_).Put(std::move(message));
  }

  void Wake() {
    const uint64_t one = 1;
    (void)!write(wake_, &one, sizeof(one));
  }

  void Loop() {
    while (true) {
      std::vector<pollfd> waiting = {{wake_, POLLIN, 0}};
      {
        std::lock_guard<std::mutex> lock(mutex_);
        bool unsent = false;
        for (const auto& socket : sockets_) {
          if (socket == nullptr || socket->closed()) continue;
          const bool more = socket->has_unsent();
          unsent |= more;
          const int events = POLLIN | (more ? POLLOUT : 0);
          waiting.push_back({socket->end(), static_cast<short>(events), 0});
        }
        if (stopping_.load() && !unsent) return;
      }
      poll(waiting.data(), waiting.size(), -1);
      uint64_t count;
      (void)!read(wake_, &count, sizeof(count));
      for (int peer = 0; peer < size(); ++peer) Serve(peer);
      bell_.Ring();
    }
  }

  void Serve(int peer) {
    std::vector<std::pair<char, std::string>> frames;
    bool died;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      Socket* const socket = sockets_[peer].get();
      if (socket == nullptr || socket->closed()) return;
      socket->Send();
      socket->Receive();
      char type;
      std::string bytes;
      while (socket->TakeFrame(&type, &bytes)) frames.emplace_back(type, bytes);
      died = socket->closed();
    }
    for (auto& [type, bytes] : frames) {
      if (type == 'm') Deliver(peer, std::move(bytes));
      if (type == 's') shut_down_[peer].store(true);
      if (type == 'c') compares_.store(!bytes.empty());
      if (type == 'f') NoteFailure(static_cast<Code>(bytes[0]), bytes.substr(1));
    }
    if (died && !shut_down_[peer].load() && !stopping_.load()) {
      Fail(Code::kRankFailed, Describe(peer) + " has gone without a word", peer);
    }
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Socket>> sockets_;  // guarded by mutex_
  Status failure_;                                // set once, before failed_
  std::atomic<bool> failed_{false}, reported_{false}, compares_{false};
  std::vector<Inbox> submissions_;
  Inbox decisions_;
  std::vector<std::atomic<bool>> shut_down_;
  std::atomic<uint64_t> carried_out_{0};
  OperationHistory own_history_{}, no_history_{};
  Doorbell bell_{};
  const int wake_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

class SocketSender final : public MessageSender {
 public:
  using Deliver = std::function<void(int receiver, std::string_view message)>;
  SocketSender(int receivers, Deliver deliver)
      : takes_(receivers, true), deliver_(std::move(deliver)) {}

  void Queue(std::string_view message) override { queued_.emplace_back(message); }
  bool Flush() override {
    const bool sends = !queued_.empty();
    for (const std::string& message : queued_) {
      for (size_t i = 0; i < takes_.size(); ++i) {
        if (takes_[i]) deliver_(static_cast<int>(i), message);
      }
    }
    queued_.clear();
    return sends;
  }
  // Messages without room are the job's thread's.
  bool CanFlush() const override { return false; }
  bool has_unsent() const override { return !queued_.empty(); }
  void Drop(int receiver) override { takes_[receiver] = false; }

 private:
  std::vector<bool> takes_;
  const Deliver deliver_;
  std::vector<std::string> queued_;
};

class InboxReceiver final : public MessageReceiver {
 public:
  InboxReceiver(std::shared_ptr<SocketJob> job, Inbox* inbox)
      : job_(std::move(job)), inbox_(*inbox) {}

  bool HasNews() const override { return !inbox_.empty(); }
  bool Receive() override { return inbox_.Take(&taken_); }
  bool Next(std::string_view* message) override {
    if (taken_.empty()) return false;
    current_ = std::move(taken_.front());
    taken_.pop_front();
    *message = current_;
    return true;
  }

 private:
  const std::shared_ptr<SocketJob> job_;
  Inbox& inbox_;
  std::deque<std::string> taken_;
  std::string current_;
};

class SocketChannels final : public Channels {
 public:
  explicit SocketChannels(std::shared_ptr<SocketJob> job) : job_(std::move(job)) {}

  std::unique_ptr<MessageSender> ToLeader() override {
    return std::make_unique<SocketSender>(
        1,
        [job = job_](int, std::string_view message) { job->SendMessage(0, message); });
  }
  std::unique_ptr<MessageReceiver> FromLeader() override {
    return std::make_unique<InboxReceiver>(job_, &job_->decisions());
  }
  std::vector<std::unique_ptr<MessageReceiver>> FromRanks() override {
    std::vector<std::unique_ptr<MessageReceiver>> receivers;
    for (int rank = 0; rank < job_->size(); ++rank) {
      receivers.push_back(
          std::make_unique<InboxReceiver>(job_, &job_->submissions(rank)));
    }
    return receivers;
  }
  std::unique_ptr<MessageSender> ToRanks() override {
    return std::make_unique<SocketSender>(
        job_->size(), [job = job_](int receiver, std::string_view message) {
          if (receiver == 0) {
            job->decisions().Put(std::string(message));
          } else {
            job->SendMessage(receiver, message);
          }
        });
  }

 private:
  const std::shared_ptr<SocketJob> job_;
};

class SocketBackend final : public CollectiveBackend {
 public:
  SocketBackend(int rank, const std::vector<int>& ends, Waiter* waiter)
      : rank_(rank), waiter_(*waiter) {
    for (int end : ends) {
      sockets_.push_back(end < 0 ? nullptr : std::make_unique<Socket>(end));
    }
  }

  bool Begin(const std::vector<int>& members, uint64_t) override {
    members_ = members;
    index_ = static_cast<int>(std::lower_bound(members.begin(), members.end(), rank_) -
                              members.begin());
    return true;
  }
  bool BeginAgain() override { return true; }
  void End() override {}

  bool Run(const Batch& batch, const Tuning&) override {
    for (const auto& operation : batch) {
      if (!Run(operation.get())) return false;
    }
    return true;
  }
  bool AllgatherValues(const std::vector<int64_t>& own,
                       std::vector<std::vector<int64_t>>* all) override {
    return ExchangeNumbers(own, all);
  }
  bool AllgatherHashes(const std::vector<uint64_t>& own,
                       std::vector<std::vector<uint64_t>>* all) override {
    return ExchangeNumbers(own, all);
  }
  // Only GPUs' communicators are tried so.
  std::unique_ptr<JointAttempt> Attempt() override { return nullptr; }
  int64_t window_bytes() const override { return 1 << 20; }
  void set_recorder(PhaseRecorder*) override {}

 private:
  int count() const { return static_cast<int>(members_.size()); }

  // Gives each member its bytes, and takes those of each.
  bool Trade(const std::vector<std::string>& to, std::vector<std::string>* from) {
    from->assign(count(), "");
    (*from)[index_] = to[index_];
    std::vector<bool> has(count());
    has[index_] = true;
    for (int i = 0; i < count(); ++i) {
      if (i != index_) sockets_[members_[i]]->QueueFrame('t', to[i]);
    }
    for (int64_t polls = 0;; ++polls) {
      bool all = true;
      for (int i = 0; i < count(); ++i) {
        if (i == index_) continue;
        Socket& socket = *sockets_[members_[i]];
        socket.Send();
        socket.Receive();
        char type;
        if (!has[i]) has[i] = socket.TakeFrame(&type, &(*from)[i]);
        all &= has[i] && !socket.has_unsent();
      }
      if (all) return true;
      if (!waiter_.Pause(polls)) return false;
    }
  }
  bool TradeSame(const std::string& own, std::vector<std::string>* from) {
    return Trade(std::vector<std::string>(count(), own), from);
  }

  template <typename T>
  bool ExchangeNumbers(const std::vector<T>& own, std::vector<std::vector<T>>* all) {
    std::vector<std::string> from;
    const char* const bytes = reinterpret_cast<const char*>(own.data());
    if (!TradeSame(std::string(bytes, own.size() * sizeof(T)), &from)) return false;
    all->assign(count(), std::vector<T>(own.size()));
    for (int i = 0; i < count(); ++i) {
      if (!own.empty()) memcpy((*all)[i].data(), from[i].data(), from[i].size());
    }
    return true;
  }

  bool Run(Operation* operation) {
    const Kind kind = operation->description->kind;
    if (kind == Kind::kAlltoall) return Alltoall(operation);
    std::string own;
    for (size_t i = 0; i < operation->buffers.size(); ++i) {
      const bool sends =
          kind != Kind::kBroadcast || members_[index_] == operation->description->root;
      if (sends) own.append(Input(*operation, i));
    }
    std::vector<std::vector<int64_t>> rows;
    if (HasOwnRows(kind) && !ExchangeNumbers(operation->rows, &rows)) return false;
    std::vector<std::string> from;
    if (!TradeSame(own, &from)) return false;
    std::vector<size_t> taken(count());
    for (size_t i = 0; i < operation->buffers.size(); ++i) {
      Finish(operation, i, rows, from, &taken);
    }
    return true;
  }

  static std::string_view Input(const Operation& operation, size_t tensor) {
    const TensorDescription& description = operation.description->tensors[tensor];
    const int64_t bytes = operation.rows.empty()
                              ? Elements(description) * Bytes(description.dtype)
                              : operation.rows[tensor] * RowBytes(description);
    return {static_cast<const char*>(operation.buffers[tensor].input),
            static_cast<size_t>(bytes)};
  }

  void Finish(Operation* operation, size_t tensor,
              const std::vector<std::vector<int64_t>>& rows,
              const std::vector<std::string>& from, std::vector<size_t>* taken) {
    const Description& whole = *operation->description;
    const TensorDescription& description = whole.tensors[tensor];
    const size_t bytes = Elements(description) * Bytes(description.dtype);
    std::vector<std::string_view> inputs;
    std::vector<int64_t> counts;
    for (int i = 0; i < count(); ++i) {
      if (!rows.empty()) counts.push_back(rows[i][tensor]);
      const size_t own = rows.empty() ? bytes : counts[i] * RowBytes(description);
      inputs.push_back(std::string_view(from[i]).substr((*taken)[i], own));
      (*taken)[i] += own;
    }
    if (whole.kind == Kind::kAllgather) {
      return Concatenate(inputs, AllocateResult(operation, tensor, counts));
    }
    char* const output = static_cast<char*>(operation->buffers[tensor].output);
    if (whole.kind == Kind::kBroadcast) {
      const auto root = std::lower_bound(members_.begin(), members_.end(), whole.root);
      return Concatenate({inputs[root - members_.begin()]}, output);
    }
    size_t begin = 0, end = bytes;
    if (whole.kind == Kind::kReducescatter) {
      const int64_t own_rows = description.shape.front();
      begin = PartStart(own_rows, index_, count()) * RowBytes(description);
      end = PartStart(own_rows, index_ + 1, count()) * RowBytes(description);
    }
    ReduceBytes(whole.reduction, description.dtype, inputs, begin, end, output);
  }

  static void Concatenate(const std::vector<std::string_view>& parts, void* output) {
    char* to = static_cast<char*>(output);
    for (std::string_view part : parts) {
      if (to == nullptr || part.empty()) continue;
      memcpy(to, part.data(), part.size());
      to += part.size();
    }
  }

  static void ReduceBytes(const Reduction& reduction, DataType dtype,
                          const std::vector<std::string_view>& inputs, size_t begin,
                          size_t end, char* output) {
    if (begin == end) return;
    // Where elements are aligned.
    std::vector<std::vector<std::max_align_t>> aligned;
    std::vector<const void*> pointers;
    for (std::string_view input : inputs) {
      aligned.emplace_back((end - begin) / sizeof(std::max_align_t) + 1);
      memcpy(aligned.back().data(), input.data() + begin, end - begin);
      pointers.push_back(aligned.back().data());
    }
    Reduce(reduction, dtype, pointers.data(), static_cast<int>(pointers.size()),
           (end - begin) / Bytes(dtype), output);
  }

  bool Alltoall(Operation* operation) {
    const int64_t row_bytes = RowBytes(operation->description->tensors.front());
    std::string_view left = Input(*operation, 0);
    std::vector<std::string> to, from;
    for (int64_t split : operation->splits) {
      to.emplace_back(left.substr(0, split * row_bytes));
      left.remove_prefix(split * row_bytes);
    }
    if (!Trade(to, &from)) return false;
    std::vector<int64_t> rows;
    for (const std::string& part : from) rows.push_back(part.size() / row_bytes);
    Concatenate({from.begin(), from.end()}, AllocateResult(operation, 0, rows));
    return true;
  }

  const int rank_;
  Waiter& waiter_;
  std::vector<std::unique_ptr<Socket>> sockets_;
  std::vector<int> members_;
  int index_ = 0;
};

inline World SocketWorld(const SocketEnds& ends, int rank) {
  auto job = std::make_shared<SocketJob>(rank, ends.messages);
  // All are led by the coordinator itself.
  return {Topology::OneHost(rank, job->size()),
          job,
          std::make_shared<SocketChannels>(job),
          [ends, rank](Waiter* waiter) {
            return std::make_unique<SocketBackend>(rank, ends.tensors, waiter);
          },
          nullptr,
          nullptr};
}

}  // namespace keras_hvd

#endif  // KERAS_HVD_TF_OPS_ENGINE_SOCKET_WORLD_TESTING_H_
