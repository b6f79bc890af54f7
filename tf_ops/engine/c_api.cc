#include "tf_ops/engine/c_api.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tf_ops/coordination/autotune_log.h"
#include "tf_ops/engine/job_member.h"
#include "tf_ops/engine/process.h"
#include "tf_ops/engine/request.h"
#include "tf_ops/operation/log.h"
#include "tf_ops/transport/faults.h"
#include "tf_ops/transport/threads.h"
#include "tf_ops/transport/version.h"

struct khvd_pending {
  // A shutdown ends the request. Nothing of this may keep the member's connections open
  // then: peers see by their end that it has gone.
  std::weak_ptr<keras_hvd::JobMember> member;
  keras_hvd::Pending end;
};

namespace {

using keras_hvd::AutotuneOptions;
using keras_hvd::Code;
using keras_hvd::Engine;
using keras_hvd::JobMember;
using keras_hvd::Link;
using keras_hvd::LinkPurpose;
using keras_hvd::LogLevel;
using keras_hvd::Operation;
using keras_hvd::Status;
using keras_hvd::TlsSession;
using keras_hvd::Topology;

constexpr int64_t kDefaultExchangeBytes = 4 << 20;
constexpr int64_t kLeastExchangeBytes = 8 << 10;
// More makes nothing faster, and the system may hand it out until none is left.
constexpr int64_t kMostExchangeBytes = 1 << 30;
// The job name is part of a socket address, which has 107 bytes in all.
constexpr size_t kLongestJobName = 80;
constexpr int64_t kDefaultFusionBytes = 64 << 20;
constexpr double kDefaultTimeoutSeconds = 60;
constexpr int64_t kDefaultCacheCapacity = 16384;

std::mutex g_mutex;
// Guarded by g_mutex. Never freed: threads may still call in while the process ends and
// static objects are destroyed.
std::shared_ptr<JobMember>& Current() {
  static auto* member = new std::shared_ptr<JobMember>();
  return *member;
}
bool g_was_initialized = false;
constexpr int kNoExitCode = -1;
// Others hear of a failure within two seconds, and then report their own errors:
// MPI_Abort kills them.
constexpr auto kBeforeMpiAbort = std::chrono::seconds(2);
// The way in which khvd_end_process ends the process. Only Python's main thread uses
// it.
struct Exit {
  int code;
  int (*mpi_abort)(intptr_t communicator, int code);
  intptr_t communicator;
} g_exit = {kNoExitCode, nullptr, 0};
// The highest number of a process set that this process has known. Traced functions
// hold numbers, so a later job gives none of them again. Guarded by g_mutex.
int32_t g_last_process_set = 0;
// The failure of the job that this process has left.
std::string& PastFailure() {
  static auto* text = new std::string;
  return *text;
}

std::string& LastError() {
  thread_local std::string text;
  return text;
}

int Report(Status status) {
  if (!status.ok()) LastError() = std::move(status.message);
  return static_cast<int>(status.code);
}

// The value of a call, or `failed` if an exception ends it (no memory, no room for a
// thread), with its text as the last error. None may leave: the callers are C, Python's
// ctypes, and TensorFlow's kernels.
template <typename Value, typename Call>
Value OrFailed(Value failed, const Call& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    Report(keras_hvd::StatusOf(error));
    return failed;
  }
}

// Reports the status of a call.
template <typename Call>
int Guarded(const Call& call) {
  return OrFailed(KHVD_INTERNAL,
                  [&] { return static_cast<khvd_code>(Report(call())); });
}

Status Forked() {
  return {
      Code::kForked,
      "this process was forked from a keras_hvd rank and cannot take part in its job. "
      "Start workers with the 'spawn' or 'forkserver' method, or fork before "
      "keras_hvd.init()"};
}

Status GetMember(std::shared_ptr<JobMember>* member) {
  if (keras_hvd::IsForked()) return Forked();
  std::lock_guard<std::mutex> lock(g_mutex);
  *member = Current();
  if (*member != nullptr) return Status::Ok();
  if (g_was_initialized) {
    return {Code::kShutDown,
            "keras_hvd was shut down; call keras_hvd.init() to start again"};
  }
  return {Code::kNotInitialized, "keras_hvd is not initialized: call keras_hvd.init()"};
}

// Reports the status of a call with this process' membership in a job.
template <typename Call>
int WithMember(const Call& call) {
  return Guarded([&] {
    std::shared_ptr<JobMember> member;
    const Status status = GetMember(&member);
    return status.ok() ? call(*member) : status;
  });
}

template <typename Get>
int MemberValue(Get get) {
  int value = -1;
  WithMember([&](JobMember& member) {
    value = get(member.options());
    return Status::Ok();
  });
  return value;
}

bool GetMembers(int32_t process_set, std::vector<int>* ranks) {
  return KHVD_OK == WithMember([&](JobMember& member) {
           return member.engine().MembersOf(process_set, ranks);
         });
}

// ---- Requests

Status Prepare(const khvd_request& request, std::shared_ptr<JobMember>* member,
               std::unique_ptr<Operation>* operation) {
  KHVD_RETURN_IF_ERROR(GetMember(member));
  const keras_hvd::Topology& job = (*member)->options().topology;
  std::vector<int> ranks;
  // Members are looked up only where they matter: small allreduces take microseconds.
  if (keras_hvd::DependsOnMembers(request) &&
      !(*member)->engine().MembersOf(request.process_set, &ranks).ok()) {
    ranks.clear();
  }
  const Status made = keras_hvd::MakeOperation(
      request, job.size(), keras_hvd::MembershipIn(ranks, job.rank()),
      &(*member)->engine().known_descriptions(), operation);
  if (!made.ok() || !(*operation)->description->on_gpu) return made;
  const Status placed = (*member)->engine().SetStreamPoint(
      static_cast<keras_hvd::cuda::Stream>(request.stream), request.end,
      operation->get());
  if (placed.ok()) return placed;
  return {placed.code, keras_hvd::Title(*(*operation)->description) +
                           " failed on rank " + std::to_string(job.rank()) + ": " +
                           placed.message};
}

Status Submit(const khvd_request& request,
              Status (Engine::*submit)(std::unique_ptr<Operation>)) {
  if (request.done == nullptr)
    return keras_hvd::WrongRequest(request, "khvd_submit needs `done`");
  std::shared_ptr<JobMember> member;
  std::unique_ptr<Operation> operation;
  KHVD_RETURN_IF_ERROR(Prepare(request, &member, &operation));
  operation->done = [done = request.done,
                     context = request.context](const Status& status) {
    done(context, static_cast<int>(status.code), status.message.c_str());
  };
  return (member->engine().*submit)(std::move(operation));
}

Status Run(const khvd_request& request) {
  std::shared_ptr<JobMember> member;
  std::unique_ptr<Operation> operation;
  KHVD_RETURN_IF_ERROR(Prepare(request, &member, &operation));
  return member->engine().Run(std::move(operation));
}

Status Begin(const khvd_request& request, khvd_pending** pending) {
  auto made = std::make_unique<khvd_pending>();
  std::shared_ptr<JobMember> member;
  std::unique_ptr<Operation> operation;
  KHVD_RETURN_IF_ERROR(Prepare(request, &member, &operation));
  made->member = member;
  KHVD_RETURN_IF_ERROR(member->engine().Begin(std::move(operation), &made->end));
  *pending = made.release();
  return Status::Ok();
}

Status CheckOptions(const khvd_options& options) {
  if (options.struct_size < sizeof(khvd_options)) {
    return Status::InvalidArgument(
        "the caller of khvd_init was built for another version of keras_hvd");
  }
  const auto inside = [](int rank, int size) { return rank >= 0 && rank < size; };
  if (!inside(options.rank, options.size) ||
      !inside(options.local_rank, options.local_size) ||
      !inside(options.cross_rank, options.cross_size)) {
    return Status::InvalidArgument(
        "rank " + std::to_string(options.rank) + " of " + std::to_string(options.size) +
        " (local " + std::to_string(options.local_rank) + " of " +
        std::to_string(options.local_size) + ", cross " +
        std::to_string(options.cross_rank) + " of " +
        std::to_string(options.cross_size) + ") does not make sense");
  }
  if (options.hosts == nullptr && options.local_size != options.size) {
    return Status::InvalidArgument("all ranks must be on one host, but only " +
                                   std::to_string(options.local_size) + " of " +
                                   std::to_string(options.size) + " are on this one");
  }
  if (options.size > 1 && (options.job == nullptr || options.job[0] == '\0')) {
    return Status::InvalidArgument("a job of several ranks needs a name");
  }
  if (options.size > 1 && strlen(options.job) > kLongestJobName) {
    return Status::InvalidArgument("the job's name '" + std::string(options.job) +
                                   "' is longer than " +
                                   std::to_string(kLongestJobName) + " bytes");
  }
  const int64_t exchange = options.exchange_bytes;
  if (exchange != 0 &&
      (exchange < kLeastExchangeBytes || exchange > kMostExchangeBytes)) {
    return Status::InvalidArgument("KERAS_HVD_EXCHANGE_BYTES is " +
                                   std::to_string(exchange) + ", and must be " +
                                   std::to_string(kLeastExchangeBytes) + " to " +
                                   std::to_string(kMostExchangeBytes));
  }
  if (options.log_level < KHVD_LOG_DEFAULT || options.log_level > KHVD_LOG_FATAL) {
    return Status::InvalidArgument("there is no log level " +
                                   std::to_string(options.log_level));
  }
  if (options.autotune_steps < 0 || options.autotune_samples < 0) {
    return Status::InvalidArgument("autotune takes samples of 1 step or more, got " +
                                   std::to_string(options.autotune_samples) +
                                   " samples of " +
                                   std::to_string(options.autotune_steps) + " steps");
  }
  return Status::Ok();
}

// Only rank 0's log counts, but every rank reads it, so a mistake ends all ranks.
Status MakeAutotuneOptions(const khvd_options& options, AutotuneOptions* autotune) {
  autotune->on = options.autotune != 0;
  if (!autotune->on) return Status::Ok();
  if (options.autotune_warmup != 0) {
    autotune->warmup_samples = std::max(options.autotune_warmup, 0);
  }
  if (options.autotune_steps > 0) autotune->steps_per_sample = options.autotune_steps;
  autotune->most_samples = options.autotune_samples;
  autotune->tunes_fusion = options.fusion_bytes <= 0;
  autotune->log = options.autotune_log == nullptr ? "" : options.autotune_log;
  if (autotune->log.empty()) return Status::Ok();
  return keras_hvd::ReadAutotuneLog(options.size, autotune);
}

int64_t CacheCapacity(const khvd_options& options) {
  if (options.cache_capacity == 0) return kDefaultCacheCapacity;
  return std::max<int64_t>(options.cache_capacity, 0);
}

LogLevel LeastLogLevel(const khvd_options& options) {
  if (options.log_level == KHVD_LOG_DEFAULT) return LogLevel::kWarning;
  return static_cast<LogLevel>(options.log_level);
}

void LogMembership(const JobMember& member, const std::string& what) {
  if (!keras_hvd::LogEnabled(LogLevel::kInfo)) return;
  const keras_hvd::Topology& job = member.options().topology;
  std::string text = what + " job '" + member.options().job + "' of " +
                     std::to_string(job.size()) +
                     (job.size() == 1 ? " rank" : " ranks");
  if (job.hosts() > 1) text += " on " + std::to_string(job.hosts()) + " hosts";
  keras_hvd::Log(job.rank(), LogLevel::kInfo, text);
}

keras_hvd::GpuLibraries GpuLibrariesOf(const char* cuda, const char* nccl) {
  return {cuda == nullptr ? "" : cuda, nccl == nullptr ? "" : nccl};
}

Topology TopologyOf(int32_t rank, int32_t size, const int32_t* hosts) {
  if (hosts == nullptr) return Topology::OneHost(rank, size);
  return Topology(rank, {hosts, hosts + size});
}

TlsSession* SessionOf(khvd_tls* tls) { return reinterpret_cast<TlsSession*>(tls); }

// Keeps the text of a failure.
int64_t Report(const TlsSession& session, int64_t outcome) {
  const bool failed = outcome == TlsSession::kRefused || outcome == TlsSession::kLost;
  if (failed) LastError() = session.why_failed();
  return outcome;
}

// Finds the connections for each link that this rank needs.
Status TakeLinks(const khvd_options& options, keras_hvd::JobMemberOptions* member) {
  for (int rank = 0; rank < options.size; ++rank) {
    member->names.push_back({options.pids[rank], options.host_names[rank]});
  }
  for (const Link& needed : keras_hvd::LinksNeeded(member->topology)) {
    if (options.mpi != nullptr && needed.purpose == LinkPurpose::kData) continue;
    const size_t before = member->links.size();
    for (int32_t number = 0; number < options.link_count; ++number) {
      const khvd_link& link = options.links[number];
      if (link.peer != needed.peer) continue;
      if (link.purpose != static_cast<int32_t>(needed.purpose)) continue;
      member->links.push_back(
          {needed.peer, needed.purpose, link.fd, SessionOf(link.tls)});
    }
    if (member->links.size() == before) {
      return Status::InvalidArgument("there is no connection to rank " +
                                     std::to_string(needed.peer));
    }
  }
  return Status::Ok();
}

keras_hvd::MpiOptions MpiOptionsOf(const khvd_mpi& mpi) {
  return {mpi.isend,
          mpi.issend,
          mpi.irecv,
          mpi.test,
          mpi.error_string,
          mpi.communicator,
          mpi.byte,
          mpi.handles_are_ints != 0,
          static_cast<size_t>(mpi.status_bytes)};
}

// `*taken`: whether the links have an owner that closes them.
Status Init(const khvd_options& options, bool* taken) {
  if (keras_hvd::IsForked()) return Forked();
  KHVD_RETURN_IF_ERROR(CheckOptions(options));
  std::lock_guard<std::mutex> lock(g_mutex);
  if (Current() != nullptr) return Status::Ok();
  keras_hvd::SetLog(LeastLogLevel(options), options.log_timestamp != 0);
  keras_hvd::JobMemberOptions member;
  member.topology = TopologyOf(options.rank, options.size, options.hosts);
  member.job = options.job == nullptr ? "" : options.job;
  if (member.topology.hosts() > 1) KHVD_RETURN_IF_ERROR(TakeLinks(options, &member));
  member.rendezvous.exchange_bytes =
      options.exchange_bytes > 0 ? options.exchange_bytes : kDefaultExchangeBytes;
  member.rendezvous.timeout_seconds =
      options.init_timeout > 0 ? options.init_timeout : kDefaultTimeoutSeconds;
  if (options.cancel_fd != nullptr) member.rendezvous.cancel_fd = *options.cancel_fd;
  if (options.mpi != nullptr) member.mpi = MpiOptionsOf(*options.mpi);
  if (options.host_timeout > 0) {
    member.host_timeout = std::chrono::seconds(options.host_timeout);
  }
  member.engine.fusion_bytes =
      options.fusion_bytes > 0 ? options.fusion_bytes : kDefaultFusionBytes;
  member.engine.stall_warning_seconds =
      options.stall_warning != 0 ? options.stall_warning : kDefaultTimeoutSeconds;
  member.engine.stall_abort_seconds = options.stall_abort;
  member.engine.cores = options.cores;
  member.engine.check = options.check != 0;
  member.engine.cache_capacity = CacheCapacity(options);
  member.engine.gpu_libraries =
      GpuLibrariesOf(options.cuda_library, options.nccl_library);
  if (options.nvtx_library != nullptr) {
    member.engine.nvtx_library = options.nvtx_library;
  }
  member.engine.ranges = options.disable_ranges == 0;
  member.engine.last_earlier_set = g_last_process_set;
  KHVD_RETURN_IF_ERROR(MakeAutotuneOptions(options, &member.engine.autotune));
  member.local_rank = options.local_rank;
  member.local_size = options.local_size;
  member.cross_rank = options.cross_rank;
  member.cross_size = options.cross_size;
  *taken = true;
  keras_hvd::CountFaultPointsAnew();
  Status status = JobMember::Enter(member, &Current());
  if (status.ok()) {
    g_was_initialized = true;
    PastFailure().clear();
    LogMembership(*Current(), "joined");
    return status;
  }
  status.message = "rank " + std::to_string(options.rank) + " could not enter job '" +
                   member.job + "': " + status.message;
  return status;
}

}  // namespace

int khvd_init(const khvd_options* options) {
  bool taken = false;
  const int code = Guarded([&] { return Init(*options, &taken); });
  const bool has_links = options->struct_size >= sizeof(khvd_options) && !taken;
  for (int i = 0; has_links && i < options->link_count; ++i) {
    const khvd_link& link = options->links[i];
    keras_hvd::CloseLink({link.peer, {}, link.fd, SessionOf(link.tls)});
  }
  return code;
}

int32_t khvd_links(int32_t rank, int32_t size, const int32_t* hosts, khvd_link* links,
                   int32_t capacity) {
  return OrFailed(-1, [&] {
    const std::vector<Link> needed =
        keras_hvd::LinksNeeded(TopologyOf(rank, size, hosts));
    const int32_t count = static_cast<int32_t>(needed.size());
    for (int32_t i = 0; i < std::min(count, capacity); ++i) {
      links[i] = {needed[i].peer, static_cast<int32_t>(needed[i].purpose), -1, nullptr};
    }
    return count;
  });
}

int khvd_shutdown(void) { return khvd_leave(""); }

int khvd_leave(const char* how) {
  if (keras_hvd::IsForked()) return KHVD_OK;
  std::shared_ptr<JobMember> member;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    member.swap(Current());
  }
  // Stop here, not when the last reference goes: another thread may hold one while it
  // waits for its request to end.
  if (member == nullptr) return KHVD_OK;
  return Guarded([&] {
    member->Leave(how);
    LogMembership(*member, "left");
    std::lock_guard<std::mutex> lock(g_mutex);
    PastFailure() = member->failure().message;
    return Status::Ok();
  });
}

void khvd_set_exit(int code, int (*mpi_abort)(intptr_t communicator, int code),
                   intptr_t communicator) {
  g_exit = {code, mpi_abort, communicator};
}

void khvd_end_process(void) {
  if (g_exit.code == kNoExitCode) return;
  fflush(nullptr);
  if (g_exit.mpi_abort != nullptr) {
    std::this_thread::sleep_for(kBeforeMpiAbort);
    g_exit.mpi_abort(g_exit.communicator, g_exit.code);
  }
  _exit(g_exit.code);
}

int khvd_is_initialized(void) {
  if (keras_hvd::IsForked()) return 0;
  std::lock_guard<std::mutex> lock(g_mutex);
  return Current() != nullptr;
}

int khvd_rank(void) {
  return MemberValue([](const auto& options) { return options.topology.rank(); });
}
int khvd_size(void) {
  return MemberValue([](const auto& options) { return options.topology.size(); });
}
int khvd_local_rank(void) {
  return MemberValue([](const auto& options) { return options.local_rank; });
}
int khvd_local_size(void) {
  return MemberValue([](const auto& options) { return options.local_size; });
}
int khvd_cross_rank(void) {
  return MemberValue([](const auto& options) { return options.cross_rank; });
}
int khvd_cross_size(void) {
  return MemberValue([](const auto& options) { return options.cross_size; });
}

int khvd_is_homogeneous(void) {
  return MemberValue(
      [](const auto& options) { return options.topology.is_homogeneous() ? 1 : 0; });
}

int khvd_add_process_set(const int32_t* ranks, int32_t count, int32_t* id) {
  return WithMember([&](JobMember& member) {
    KHVD_RETURN_IF_ERROR(member.engine().AddProcessSet({ranks, ranks + count}, id));
    std::lock_guard<std::mutex> lock(g_mutex);
    g_last_process_set = std::max(g_last_process_set, *id);
    return Status::Ok();
  });
}

int khvd_remove_process_set(int32_t id) {
  return WithMember(
      [&](JobMember& member) { return member.engine().RemoveProcessSet(id); });
}

int khvd_process_set_size(int32_t id) {
  std::vector<int> ranks;
  return GetMembers(id, &ranks) ? static_cast<int>(ranks.size()) : -1;
}

int khvd_process_set_rank(int32_t id) {
  std::vector<int> ranks;
  return GetMembers(id, &ranks) ? keras_hvd::IndexOf(ranks, khvd_rank()) : -1;
}

int khvd_join(int32_t* last) {
  return WithMember([&](JobMember& member) { return member.engine().Join(last); });
}

int khvd_submit(const khvd_request* request) {
  return Guarded([&] { return Submit(*request, &Engine::Submit); });
}

int khvd_submit_and_drive(const khvd_request* request) {
  return Guarded([&] { return Submit(*request, &Engine::SubmitAndDrive); });
}

int64_t khvd_scattered_rows(int32_t process_set, int64_t rows) {
  std::vector<int> ranks;
  if (!GetMembers(process_set, &ranks)) return -1;
  return keras_hvd::ScatteredRows(keras_hvd::MembershipIn(ranks, khvd_rank()), rows);
}

int khvd_run(const khvd_request* request) {
  return Guarded([&] { return Run(*request); });
}

int khvd_begin(const khvd_request* request, khvd_pending** pending) {
  return Guarded([&] { return Begin(*request, pending); });
}

int khvd_finish(khvd_pending* pending) {
  return Guarded([&] {
    // The engine's thread, which may use `pending`, is the parent's.
    if (keras_hvd::IsForked()) return Forked();
    if (const std::shared_ptr<JobMember> member = pending->member.lock()) {
      member->engine().DriveUntil(pending->end.ended);
    }
    const Status status = pending->end.Await();
    delete pending;
    return status;
  });
}

void khvd_drive_until(const uint8_t* ended) {
  using Flag = std::atomic<bool>;
  static_assert(sizeof(Flag) == sizeof(*ended) && Flag::is_always_lock_free);
  WithMember([&](JobMember& member) {
    member.engine().DriveUntil(*reinterpret_cast<const Flag*>(ended));
    return Status::Ok();
  });
}

// The stream waits in any case, since work on it may be about to free the buffers.
int khvd_await_end(void* end, void* stream) {
  return Guarded([&] {
    const std::unique_ptr<keras_hvd::EndMark> mark(
        static_cast<keras_hvd::EndMark*>(end));
    KHVD_RETURN_IF_ERROR(mark->Await(static_cast<keras_hvd::cuda::Stream>(stream)));
    std::shared_ptr<JobMember> member;
    return GetMember(&member).ok() ? member->failure() : Status::Ok();
  });
}

int khvd_get_gpu_support(const char* cuda_library, const char* nccl_library,
                         khvd_gpu_support* support) {
  return Guarded([&] {
    if (support->struct_size < sizeof(khvd_gpu_support)) {
      return Status::InvalidArgument(
          "the caller of khvd_get_gpu_support was built for another version of "
          "keras_hvd");
    }
    const keras_hvd::GpuSupport found =
        keras_hvd::FindGpuSupport(GpuLibrariesOf(cuda_library, nccl_library));
    support->devices = found.devices;
    support->nccl_version = found.nccl_version;
    snprintf(support->text, sizeof(support->text), "%s", found.text.c_str());
    return Status::Ok();
  });
}

int khvd_find_tls(const char* library, char* text, int32_t capacity) {
  return Guarded([&] {
    std::string found;
    const Status status = keras_hvd::OpenTls(library == nullptr ? "" : library, &found);
    snprintf(text, capacity, "%s", found.c_str());
    return status;
  });
}

khvd_tls* khvd_tls_open(const char* library, int32_t fd, int32_t is_client,
                        const unsigned char* identity, const unsigned char* key) {
  TlsSession::Credentials credentials;
  std::copy_n(identity, credentials.identity.size(), credentials.identity.data());
  std::copy_n(key, credentials.key.size(), credentials.key.data());
  const TlsSession::Role role =
      is_client != 0 ? TlsSession::Role::kClient : TlsSession::Role::kServer;
  std::unique_ptr<TlsSession> session;
  Guarded([&] {
    return TlsSession::Open(library == nullptr ? "" : library, fd, role, credentials,
                            &session);
  });
  return reinterpret_cast<khvd_tls*>(session.release());
}

int64_t khvd_tls_handshake(khvd_tls* tls) {
  return OrFailed<int64_t>(KHVD_TLS_LOST, [&] {
    return Report(*SessionOf(tls), SessionOf(tls)->Handshake());
  });
}

int64_t khvd_tls_read(khvd_tls* tls, void* data, int64_t bytes) {
  const iovec piece = {data, static_cast<size_t>(bytes)};
  return OrFailed<int64_t>(KHVD_TLS_LOST, [&] {
    return Report(*SessionOf(tls), SessionOf(tls)->Read(&piece, 1));
  });
}

int64_t khvd_tls_write(khvd_tls* tls, const void* data, int64_t bytes) {
  const iovec piece = {const_cast<void*>(data), static_cast<size_t>(bytes)};
  return OrFailed<int64_t>(KHVD_TLS_LOST, [&] {
    return Report(*SessionOf(tls), SessionOf(tls)->Write(&piece, 1));
  });
}

void khvd_tls_close(khvd_tls* tls) {
  const std::unique_ptr<TlsSession> session(SessionOf(tls));
  session->EndWriting();
}

const char* khvd_last_error(void) { return LastError().c_str(); }

const char* khvd_failure(void) {
  if (keras_hvd::IsForked()) return "";
  thread_local std::string text;
  // Without memory for the text, the caller must not take this for no failure.
  return OrFailed("out of memory", [&] {
    std::shared_ptr<JobMember> member;
    if (GetMember(&member).ok()) {
      text = member->failure().message;
    } else {
      std::lock_guard<std::mutex> lock(g_mutex);
      text = PastFailure();
    }
    return text.c_str();
  });
}

int khvd_start_timeline(const char* path, int32_t mark_cycles) {
  return WithMember([&](JobMember& member) {
    if (path == nullptr || path[0] == '\0') {
      return Status::InvalidArgument("a timeline needs the name of a file");
    }
    return member.engine().StartTimeline(path, mark_cycles != 0);
  });
}

int khvd_start_recording(const char* path) {
  return WithMember(
      [&](JobMember& member) { return member.engine().StartRecording(path); });
}

int khvd_stop_timeline(void) {
  return WithMember([](JobMember& member) {
    member.engine().StopTimeline();
    return Status::Ok();
  });
}

int khvd_get_counters(khvd_counters* counters) {
  std::shared_ptr<JobMember> member;
  const int code = Guarded([&] {
    if (counters->struct_size >= sizeof(khvd_counters)) return GetMember(&member);
    return Status::InvalidArgument(
        "the caller of khvd_get_counters was built for another version of keras_hvd");
  });
  if (code != KHVD_OK) return code;
  const keras_hvd::EngineCounters& engine = member->engine().counters();
  counters->batches = engine.batches;
  counters->tensors = engine.tensors;
  counters->bytes = engine.bytes;
  counters->sleeps = engine.sleeps;
  counters->lost_wakes = engine.lost_wakes;
  counters->tcp_bytes = counters->mpi_bytes = 0;
  const std::shared_ptr<keras_hvd::CarriedBytes> carried = member->carried();
  if (carried != nullptr) {
    counters->tcp_bytes = carried->tcp;
    counters->mpi_bytes = carried->mpi;
  }
  return KHVD_OK;
}

void khvd_log(int level, const char* text) {
  if (level < KHVD_LOG_TRACE || level > KHVD_LOG_FATAL) level = KHVD_LOG_FATAL;
  Guarded([&] {
    std::shared_ptr<JobMember> member;
    const bool joined = GetMember(&member).ok();
    const int rank = joined ? member->options().topology.rank() : -1;
    keras_hvd::Log(rank, static_cast<LogLevel>(level), text);
    return Status::Ok();
  });
}

const char* khvd_version(void) { return keras_hvd::kVersion; }
