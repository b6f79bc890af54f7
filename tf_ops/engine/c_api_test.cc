// The C API: refused calls, and how a process joins, works, leaves, forks and dies.
#include "tf_ops/engine/c_api.h"

#include <gtest/gtest.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tf_ops/engine/c_api_testing.h"
#include "tf_ops/testing/descriptors.h"
#include "tf_ops/transport/rendezvous.h"

namespace {

using keras_hvd::CancelPipe;
using keras_hvd::Child;
using keras_hvd::ExpectInChildren;
using keras_hvd::JobName;
using keras_hvd::JobOptions;
using keras_hvd::LastErrorHas;
using keras_hvd::OpenDescriptors;

khvd_options Options(int rank, int size, const char* job) {
  khvd_options options = JobOptions(rank, size, job);
  options.exchange_bytes = 8 << 10;
  return options;
}

// An allreduce of one float, whose parts a test may change before it is used.
struct Request {
  Request() {
    tensor.dtype = KHVD_FLOAT32;
    tensor.rank = 1;
    tensor.shape = shape;
    tensor.input = &input;
    tensor.output = &output;
    request.struct_size = sizeof(request);
    request.kind = KHVD_ALLREDUCE;
    request.name = "x";
    request.reduce_op = KHVD_SUM;
    request.count = 1;
    request.tensors = &tensor;
  }
  int Run() { return khvd_run(&request); }

  float input = 1, output = 0;
  int64_t shape[2] = {1, 1};
  khvd_tensor tensor = {};
  khvd_request request = {};
};

void* NoMemory(void*, int32_t, const int64_t*, int32_t) { return nullptr; }

void ExpectInChild(const std::function<int()>& body) {
  ExpectInChildren(1, [&](int) { return body(); });
}

TEST(BeforeInitTest, EverythingSaysSo) {
  ExpectInChild([] {
    CHECK_HERE(khvd_is_initialized() == 0);
    CHECK_HERE(khvd_scattered_rows(0, 7) == -1);
    for (int value : {khvd_rank(), khvd_size(), khvd_local_rank(), khvd_local_size(),
                      khvd_cross_rank(), khvd_cross_size()}) {
      CHECK_HERE(value == -1);
    }
    CHECK_HERE(Request().Run() == KHVD_NOT_INITIALIZED);
    CHECK_HERE(LastErrorHas("keras_hvd is not initialized: call keras_hvd.init()"));
    khvd_counters counters = {};
    counters.struct_size = sizeof(counters);
    CHECK_HERE(khvd_get_counters(&counters) == KHVD_NOT_INITIALIZED);
    int32_t number = 0;
    CHECK_HERE(khvd_add_process_set(&number, 1, &number) == KHVD_NOT_INITIALIZED);
    CHECK_HERE(khvd_remove_process_set(1) == KHVD_NOT_INITIALIZED);
    CHECK_HERE(khvd_join(&number) == KHVD_NOT_INITIALIZED);
    khvd_pending* pending = nullptr;
    Request early;
    CHECK_HERE(khvd_begin(&early.request, &pending) == KHVD_NOT_INITIALIZED);
    CHECK_HERE(pending == nullptr);
    const uint8_t ended = 0;
    khvd_drive_until(&ended);
    CHECK_HERE(khvd_process_set_size(0) == -1 && khvd_process_set_rank(0) == -1);
    CHECK_HERE(strcmp(khvd_failure(), "") == 0);
    CHECK_HERE(khvd_shutdown() == KHVD_OK);
    CHECK_HERE(strlen(khvd_version()) > 0);
    return 0;
  });
}

TEST(InitTest, RefusesOptionsThatMakeNoSense) {
  ExpectInChild([] {
    const auto refused = [](const khvd_options& options, const char* part) {
      return khvd_init(&options) == KHVD_INVALID_ARGUMENT && LastErrorHas(part) &&
             khvd_is_initialized() == 0;
    };
    const khvd_options good = Options(0, 1, "");
    khvd_options options = good;
    options.struct_size -= 1;
    CHECK_HERE(refused(options, "built for another version"));
    options = good;
    options.rank = 1;
    CHECK_HERE(refused(options, "rank 1 of 1"));
    options = good;
    options.rank = -1;
    CHECK_HERE(refused(options, "rank -1 of 1"));
    options = good;
    options.size = 0;
    CHECK_HERE(refused(options, "rank 0 of 0"));
    options = good;
    options.local_rank = 3;
    CHECK_HERE(refused(options, "local 3 of 1"));
    options = good;
    options.cross_size = 0;
    CHECK_HERE(refused(options, "cross 0 of 0"));
    options = good;
    options.size = 2;
    CHECK_HERE(refused(options, "only 1 of 2 are on this one"));
    CHECK_HERE(refused(Options(0, 2, ""), "needs a name"));
    options = Options(0, 2, "");
    options.job = nullptr;
    CHECK_HERE(refused(options, "needs a name"));
    options = good;
    options.exchange_bytes = 8191;
    CHECK_HERE(refused(options, "KERAS_HVD_EXCHANGE_BYTES is 8191"));
    options = good;
    options.autotune_steps = -1;
    CHECK_HERE(refused(options, "autotune takes samples of 1 step or more"));
    options = good;
    options.autotune = 1;
    options.autotune_log = "/missing/log.csv";
    CHECK_HERE(refused(options, "log '/missing/log.csv' cannot be written"));
    CHECK_HERE(khvd_init(&good) == KHVD_OK);
    return 0;
  });
}

TEST(InitTest, TwiceIsOnceAndAfterShutdownItStartsAgain) {
  ExpectInChild([] {
    const khvd_options options = Options(0, 1, "");
    for (int round = 0; round < 3; ++round) {
      CHECK_HERE(khvd_init(&options) == KHVD_OK);
      CHECK_HERE(khvd_init(&options) == KHVD_OK);
      CHECK_HERE(khvd_is_initialized() == 1);
      CHECK_HERE(khvd_rank() == 0 && khvd_size() == 1);
      Request request;
      request.input = 4;
      CHECK_HERE(request.Run() == KHVD_OK);
      CHECK_HERE(request.output == 4);
      CHECK_HERE(khvd_shutdown() == KHVD_OK);
      CHECK_HERE(khvd_shutdown() == KHVD_OK);
      CHECK_HERE(khvd_is_initialized() == 0);
      CHECK_HERE(khvd_rank() == -1);
      CHECK_HERE(request.Run() == KHVD_SHUT_DOWN);
      CHECK_HERE(LastErrorHas("was shut down; call keras_hvd.init()"));
    }
    return 0;
  });
}

// The system has no room for a thread from now on, and again from `Restore` on.
class NoRoomForThreads {
 public:
  NoRoomForThreads() {
    pthread_attr_t attributes;
    pthread_getattr_default_np(&attributes);
    pthread_attr_getstacksize(&attributes, &usual_bytes_);
    pthread_attr_destroy(&attributes);
    // More than there are addresses.
    Set(size_t{1} << 47);
  }
  void Restore() { Set(usual_bytes_); }

 private:
  static void Set(size_t bytes) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    EXPECT_EQ(pthread_attr_setstacksize(&attributes, bytes), 0);
    EXPECT_EQ(pthread_setattr_default_np(&attributes), 0);
    pthread_attr_destroy(&attributes);
  }

  size_t usual_bytes_ = 0;
};

TEST(InitTest, WithoutRoomForItsThreadsIsAnErrorAndMayBeTriedAgain) {
  ExpectInChild([] {
    NoRoomForThreads none;
    const khvd_options options = Options(0, 1, "");
    CHECK_HERE(khvd_init(&options) == KHVD_INTERNAL);
    CHECK_HERE(LastErrorHas("rank 0 could not enter job"));
    CHECK_HERE(LastErrorHas("the system has no room for another thread"));
    CHECK_HERE(khvd_is_initialized() == 0);
    none.Restore();
    CHECK_HERE(khvd_init(&options) == KHVD_OK);
    CHECK_HERE(Request().Run() == KHVD_OK);
    return 0;
  });
}

TEST(TimelineTest, WithoutRoomForItsThreadIsAnErrorAndMayBeTriedAgain) {
  const std::string path = testing::TempDir() + "/timeline.json";
  ExpectInChild([&] {
    const khvd_options options = Options(0, 1, "");
    CHECK_HERE(khvd_init(&options) == KHVD_OK);
    NoRoomForThreads none;
    CHECK_HERE(khvd_start_timeline(path.c_str(), 0) == KHVD_INTERNAL);
    CHECK_HERE(LastErrorHas("the system has no room for another thread"));
    CHECK_HERE(Request().Run() == KHVD_OK);
    none.Restore();
    CHECK_HERE(khvd_start_timeline(path.c_str(), 0) == KHVD_OK);
    CHECK_HERE(Request().Run() == KHVD_OK);
    CHECK_HERE(khvd_stop_timeline() == KHVD_OK);
    return 0;
  });
}

TEST(InitTest, AMissingPeerIsAnErrorThatNamesIt) {
  ExpectInChild([] {
    const std::string job = JobName();
    khvd_options options = Options(0, 2, job.c_str());
    options.init_timeout = 0.2;
    CHECK_HERE(khvd_init(&options) == KHVD_RANK_FAILED);
    CHECK_HERE(LastErrorHas("rank 0 could not enter job '" + job + "': rank 1"));
    CHECK_HERE(khvd_is_initialized() == 0);
    return 0;
  });
}

TEST(CancelTest, AnInitThatMissesAPeerEndsAndMayBeTriedAgain) {
  const std::string job = JobName();
  const auto cancelled_init = [&](int rank) {
    const CancelPipe cancel;
    std::thread canceller([&] {
      poll(nullptr, 0, 20);
      cancel.Cancel();
    });
    khvd_options options = Options(rank, 2, job.c_str());
    options.cancel_fd = &cancel.fd();
    const int code = khvd_init(&options);
    canceller.join();
    return code;
  };
  ExpectInChild([&] {
    for (int rank : {0, 1, 0, 1}) {
      const auto before = OpenDescriptors();
      CHECK_HERE(cancelled_init(rank) == KHVD_RANK_FAILED);
      CHECK_HERE(LastErrorHas("rank " + std::to_string(rank) +
                              " could not enter job '" + job +
                              "': the start was cancelled before rank " +
                              std::to_string(1 - rank) + " had called init"));
      CHECK_HERE(khvd_is_initialized() == 0);
      CHECK_HERE(OpenDescriptors() == before);
    }
    const CancelPipe silent;
    khvd_options alone = Options(0, 1, "");
    alone.cancel_fd = &silent.fd();
    CHECK_HERE(khvd_init(&alone) == KHVD_OK);
    CHECK_HERE(Request().Run() == KHVD_OK);
    return 0;
  });
}

// Cancels the start of the job's rank 1 while that waits for rank 0's last word.
bool CancelWhenReady(const std::string& job, const CancelPipe& cancel) {
  keras_hvd::RendezvousOptions options;
  options.size = 2;
  options.job = job;
  options.exchange_bytes = 8 << 10;
  keras_hvd::Rendezvous root(options);
  std::shared_ptr<keras_hvd::Segment> segment;
  if (!root.Connect(&segment).ok()) return false;
  pollfd other = {root.connections()[1], POLLIN, 0};
  if (poll(&other, 1, 10000) != 1) return false;
  cancel.Cancel();
  other.events = 0;  // its end alone
  return poll(&other, 1, 10000) == 1;
}

// By then it shares memory, and has a thread that shows that it lives.
TEST(CancelTest, ARankThatIsReadyEndsAndMayTryAgain) {
  const std::string job = JobName(), next = JobName();
  const CancelPipe cancel, silent;
  ExpectInChildren(2, [&](int rank) {
    if (rank == 0) {
      CHECK_HERE(CancelWhenReady(job, cancel));
    } else {
      const auto before = OpenDescriptors();
      khvd_options options = Options(1, 2, job.c_str());
      options.cancel_fd = &cancel.fd();
      CHECK_HERE(khvd_init(&options) == KHVD_RANK_FAILED);
      CHECK_HERE(LastErrorHas("the start was cancelled before rank 0 had answered"));
      CHECK_HERE(OpenDescriptors() == before);
    }
    khvd_options options = Options(rank, 2, next.c_str());
    options.cancel_fd = &silent.fd();
    CHECK_HERE(khvd_init(&options) == KHVD_OK);
    Request request;
    CHECK_HERE(request.Run() == KHVD_OK && request.output == 2);
    return 0;
  });
}

// Ranks 0 and 1 share a host; rank 2 hears over its links that rank 0 does not start.
TEST(CancelTest, TheLinksToOtherHostsEnd) {
  const auto body = [] {
    const int32_t hosts[] = {0, 0, 1}, pids[] = {1, 2, 3};
    const char* const names[] = {"a", "a", "b"};
    khvd_link links[8] = {};
    const int count = khvd_links(0, 3, hosts, links, 8);
    CHECK_HERE(count > 0 && count <= 8);
    std::vector<int> far_ends;
    for (int i = 0; i < count; ++i) {
      int ends[2];
      CHECK_HERE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
      links[i].fd = ends[0];
      far_ends.push_back(ends[1]);
    }
    const CancelPipe cancel;
    cancel.Cancel();
    const std::string job = JobName();
    khvd_options options = Options(0, 3, job.c_str());
    options.local_size = options.cross_size = 2;
    options.hosts = hosts;
    options.host_names = names;
    options.pids = pids;
    options.links = links;
    options.link_count = count;
    options.cancel_fd = &cancel.fd();
    CHECK_HERE(khvd_init(&options) == KHVD_RANK_FAILED);
    CHECK_HERE(LastErrorHas("the start was cancelled before rank 1 had called init"));
    std::string heard;
    for (int far_end : far_ends) {
      char bytes[4096];
      ssize_t length;
      while ((length = read(far_end, bytes, sizeof(bytes))) > 0) {
        heard.append(bytes, length);
      }
      close(far_end);
    }
    CHECK_HERE(heard.find("rank 0 could not start: the start was cancelled") !=
               std::string::npos);
    return 0;
  };
  ExpectInChild([&] {
    const auto before = OpenDescriptors();
    const int line = body();
    if (line != 0) return line;
    CHECK_HERE(OpenDescriptors() == before);
    return 0;
  });
}

TEST(RequestTest, RefusesWhatMakesNoSense) {
  ExpectInChild([] {
    const khvd_options options = Options(0, 1, "");
    CHECK_HERE(khvd_init(&options) == KHVD_OK);
    const auto refused = [](Request* request, const char* part) {
      return request->Run() == KHVD_INVALID_ARGUMENT && LastErrorHas(part);
    };
    const auto fails = [&](const char* part, void (*change)(Request*)) {
      Request request;
      change(&request);
      return refused(&request, part);
    };
    CHECK_HERE(
        fails("another version", [](Request* r) { r->request.struct_size = 8; }));
    CHECK_HERE(fails("needs a name", [](Request* r) { r->request.name = nullptr; }));
    CHECK_HERE(fails("needs a name", [](Request* r) { r->request.name = ""; }));
    CHECK_HERE(fails("'x': there is no collective 9",
                     [](Request* r) { r->request.kind = 9; }));
    CHECK_HERE(fails("there is no process set 3",
                     [](Request* r) { r->request.process_set = 3; }));
    CHECK_HERE(fails("a barrier has no tensors",
                     [](Request* r) { r->request.kind = KHVD_BARRIER; }));
    CHECK_HERE(fails("needs a tensor", [](Request* r) { r->request.count = 0; }));
    CHECK_HERE(
        fails("needs a tensor", [](Request* r) { r->request.tensors = nullptr; }));
    CHECK_HERE(fails("one broadcast takes one tensor", [](Request* r) {
      r->request.kind = KHVD_BROADCAST;
      r->request.count = 2;
    }));
    for (int root : {-1, 1}) {
      Request request;
      request.request.kind = KHVD_BROADCAST;
      request.request.root = root;
      CHECK_HERE(refused(&request, "is not in 0..0"));
    }
    CHECK_HERE(fails("allgather needs `allocate`",
                     [](Request* r) { r->request.kind = KHVD_ALLGATHER; }));
    CHECK_HERE(fails("alltoall needs `allocate`",
                     [](Request* r) { r->request.kind = KHVD_ALLTOALL; }));
    CHECK_HERE(
        fails("there is no reduction 6", [](Request* r) { r->request.reduce_op = 6; }));
    CHECK_HERE(fails("reducescatter does not support Adasum", [](Request* r) {
      r->request.kind = KHVD_REDUCESCATTER;
      r->request.reduce_op = KHVD_ADASUM;
    }));
    CHECK_HERE(fails("Adasum takes floating types, not int32", [](Request* r) {
      r->request.reduce_op = KHVD_ADASUM;
      r->tensor.dtype = KHVD_INT32;
    }));
    CHECK_HERE(fails("there is no type 17", [](Request* r) { r->tensor.dtype = 17; }));
    CHECK_HERE(fails("Sum does not support int16 tensors",
                     [](Request* r) { r->tensor.dtype = KHVD_INT16; }));
    CHECK_HERE(fails("int64 tensors cannot be scaled by infinity", [](Request* r) {
      r->request.prescale = 1;
      r->request.postscale = -INFINITY;
      r->tensor.dtype = KHVD_INT64;
    }));
    CHECK_HERE(fails("a scale is not a number", [](Request* r) {
      r->request.prescale = NAN;
      r->request.postscale = 1;
    }));
    CHECK_HERE(fails("more bytes than 64 bits can count",
                     [](Request* r) { r->shape[0] = INT64_MAX / 2; }));
    CHECK_HERE(fails("needs a shape", [](Request* r) { r->tensor.shape = nullptr; }));
    CHECK_HERE(fails("a dimension is negative", [](Request* r) { r->shape[0] = -1; }));
    CHECK_HERE(fails("a scalar has none", [](Request* r) {
      r->request.kind = KHVD_ALLGATHER;
      r->request.allocate = NoMemory;
      r->tensor.rank = 0;
    }));
    CHECK_HERE(fails("a scalar has none", [](Request* r) {
      r->request.kind = KHVD_REDUCESCATTER;
      r->tensor.rank = 0;
    }));
    CHECK_HERE(fails("Sum and scales do not support bool tensors",
                     [](Request* r) { r->tensor.dtype = KHVD_BOOL; }));
    CHECK_HERE(Request().Run() == KHVD_OK);
    return 0;
  });
}

TEST(RequestTest, SplitsThatMakeNoSenseAreRefused) {
  ExpectInChild([] {
    const khvd_options options = Options(0, 1, "");
    CHECK_HERE(khvd_init(&options) == KHVD_OK);
    const auto fails = [](const char* part, const std::vector<int64_t>& splits) {
      Request request;
      request.request.kind = KHVD_ALLTOALL;
      request.request.allocate = NoMemory;
      request.request.splits = splits.data();
      request.request.split_count = static_cast<int32_t>(splits.size());
      return request.Run() == KHVD_INVALID_ARGUMENT && LastErrorHas(part);
    };
    CHECK_HERE(fails("one number for each rank, 1, and have 2", {1, 0}));
    CHECK_HERE(fails("a split is negative: -1", {-1}));
    CHECK_HERE(fails("the splits, 2, do not add up to the tensor's 1 rows", {2}));
    CHECK_HERE(fails("the splits, 0, do not add up", {0}));
    CHECK_HERE(fails("do not add up", {INT64_MAX}));
    return 0;
  });
}

TEST(RequestTest, ElementsWithoutDataAreRefused) {
  ExpectInChild([] {
    const khvd_options options = Options(0, 1, "");
    CHECK_HERE(khvd_init(&options) == KHVD_OK);
    Request no_input;
    no_input.tensor.input = nullptr;
    CHECK_HERE(no_input.Run() == KHVD_INVALID_ARGUMENT && LastErrorHas("no data"));
    Request no_output;
    no_output.tensor.output = nullptr;
    CHECK_HERE(no_output.Run() == KHVD_INVALID_ARGUMENT && LastErrorHas("no data"));
    Request empty;
    empty.shape[0] = 0;
    empty.tensor.input = empty.tensor.output = nullptr;
    CHECK_HERE(empty.Run() == KHVD_OK);
    khvd_counters counters = {};
    CHECK_HERE(khvd_get_counters(&counters) == KHVD_INVALID_ARGUMENT);
    return 0;
  });
}

TEST(InitTest, AJobsNameThatWouldBeCutIsRefused) {
  ExpectInChild([] {
    const std::string name(81, 'j');
    const khvd_options options = Options(0, 2, name.c_str());
    CHECK_HERE(khvd_init(&options) == KHVD_INVALID_ARGUMENT);
    CHECK_HERE(LastErrorHas("longer than 80 bytes"));
    return 0;
  });
}

TEST(RequestTest, ScalesOfZeroMeanOneOnlyTogether) {
  ExpectInChild([] {
    const khvd_options options = Options(0, 1, "");
    CHECK_HERE(khvd_init(&options) == KHVD_OK);
    Request request;
    request.input = 3;
    CHECK_HERE(request.Run() == KHVD_OK && request.output == 3);
    request.request.prescale = 2;
    request.request.postscale = 5;
    CHECK_HERE(request.Run() == KHVD_OK && request.output == 30);
    request.request.prescale = 0;
    CHECK_HERE(request.Run() == KHVD_OK && request.output == 0);
    return 0;
  });
}

TEST(RequestTest, DoneIsCalledOnceWithTheContext) {
  ExpectInChild([] {
    const khvd_options options = Options(0, 1, "");
    CHECK_HERE(khvd_init(&options) == KHVD_OK);
    struct Seen {
      std::atomic<int> calls{0}, code{-1}, length{-1};
    } seen;
    Request request;
    request.request.context = &seen;
    request.request.done = [](void* context, int code, const char* message) {
      Seen* seen = static_cast<Seen*>(context);
      seen->code = code;
      seen->length = static_cast<int>(strlen(message));
      seen->calls += 1;
    };
    CHECK_HERE(khvd_submit(&request.request) == KHVD_OK);
    // The next one of the name comes after it.
    Request next;
    CHECK_HERE(next.Run() == KHVD_OK);
    CHECK_HERE(seen.calls == 1 && seen.code == KHVD_OK && seen.length == 0);
    khvd_counters counters = {};
    counters.struct_size = sizeof(counters);
    CHECK_HERE(khvd_get_counters(&counters) == KHVD_OK);
    CHECK_HERE(counters.tensors == 2 && counters.bytes == 8 && counters.batches >= 1);
    CHECK_HERE(counters.lost_wakes == 0);
    return 0;
  });
}

TEST(RequestTest, NobodyToTellIsRefused) {
  ExpectInChild([] {
    const khvd_options options = Options(0, 1, "");
    CHECK_HERE(khvd_init(&options) == KHVD_OK);
    Request request;
    CHECK_HERE(khvd_submit(&request.request) == KHVD_INVALID_ARGUMENT);
    CHECK_HERE(LastErrorHas("'x': khvd_submit needs `done`"));
    return 0;
  });
}

TEST(RequestTest, TheErrorTextIsOfTheCallingThread) {
  ExpectInChild([] {
    CHECK_HERE(Request().Run() == KHVD_NOT_INITIALIZED);
    std::string text = "untouched";
    std::thread([&] { text = khvd_last_error(); }).join();
    CHECK_HERE(text == "");
    return 0;
  });
}

TEST(ForkTest, AForkedChildCannotUseTheEngineAndTheParentCan) {
  ExpectInChild([] {
    const khvd_options options = Options(0, 1, "");
    CHECK_HERE(khvd_init(&options) == KHVD_OK);
    const int child = fork();
    if (child == 0) {
      int wrong = 0;
      wrong += khvd_is_initialized() != 0;
      wrong += khvd_rank() != -1;
      wrong += Request().Run() != KHVD_FORKED;
      wrong += !LastErrorHas("this process was forked from a keras_hvd rank");
      wrong += khvd_init(&options) != KHVD_FORKED;
      wrong += khvd_shutdown() != KHVD_OK;
      _exit(wrong);
    }
    int status;
    CHECK_HERE(waitpid(child, &status, 0) == child);
    CHECK_HERE(status == 0);
    CHECK_HERE(Request().Run() == KHVD_OK);
    return 0;
  });
}

TEST(ForkTest, WhoForkedBeforeInitOrAfterShutdownMayInit) {
  ExpectInChild([] {
    const khvd_options options = Options(0, 1, "");
    for (int round = 0; round < 2; ++round) {
      const int child = fork();
      if (child == 0) {
        const bool joined = khvd_init(&options) == KHVD_OK;
        khvd_shutdown();
        _exit(joined ? 0 : 1);
      }
      int status;
      CHECK_HERE(waitpid(child, &status, 0) == child);
      CHECK_HERE(status == 0);
      CHECK_HERE(khvd_init(&options) == KHVD_OK);
      CHECK_HERE(khvd_shutdown() == KHVD_OK);
    }
    return 0;
  });
}

// ---- Several processes

// Runs `body(rank)` in a process for each rank, and gives how each ended.
std::vector<int> RunJob(int size, const std::function<int(int)>& body) {
  const std::string job = JobName();
  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < size; ++rank) {
    children.push_back(std::make_unique<Child>([&, rank](const Child::Link& parent) {
      const khvd_options options = Options(rank, size, job.c_str());
      if (khvd_init(&options) != KHVD_OK) return 2;
      const int line = body(rank);
      if (line != 0) {
        parent.Tell("rank " + std::to_string(rank) + ", line " + std::to_string(line) +
                    ": " + khvd_last_error());
      }
      khvd_shutdown();
      return line == 0 ? 0 : 1;
    }));
  }
  std::vector<int> ends;
  for (const auto& child : children) {
    EXPECT_EQ(child->Line(), "");
    ends.push_back(child->Reap());
  }
  return ends;
}

TEST(JobTest, ShutdownEndsWhatAnotherThreadWaitsFor) {
  const std::vector<int> ends = RunJob(2, [](int rank) {
    Request request;
    if (rank == 1) {
      request.request.name = "y";
      CHECK_HERE(request.Run() == KHVD_RANK_FAILED);
      return 0;
    }
    std::atomic<int> code{-1};
    std::thread caller([&] { code = request.Run(); });
    // An engine that has nothing to do does not sleep as often.
    khvd_counters counters = {};
    counters.struct_size = sizeof(counters);
    while (khvd_get_counters(&counters) == KHVD_OK && counters.sleeps < 5) {
      poll(nullptr, 0, 10);
    }
    CHECK_HERE(code == -1);
    CHECK_HERE(khvd_shutdown() == KHVD_OK);
    caller.join();
    CHECK_HERE(code == KHVD_SHUT_DOWN);
    return 0;
  });
  EXPECT_EQ(ends, (std::vector<int>{0, 0}));
}

TEST(JobTest, ARunInTwoHalvesWaitsInTheSecond) {
  const std::vector<int> ends = RunJob(2, [](int rank) {
    khvd_pending* pending[2] = {};
    Request wrong;
    wrong.request.name = "";
    CHECK_HERE(khvd_begin(&wrong.request, pending) == KHVD_INVALID_ARGUMENT);
    CHECK_HERE(pending[0] == nullptr);
    for (int i = 0; i < 100; ++i) {
      Request first, second;
      second.request.name = "y";
      // Each rank has begun both before it waits for either.
      const int other = (rank + i) % 2;
      CHECK_HERE(khvd_begin(&first.request, &pending[0]) == KHVD_OK);
      CHECK_HERE(khvd_begin(&second.request, &pending[1]) == KHVD_OK);
      CHECK_HERE(khvd_finish(pending[other]) == KHVD_OK);
      CHECK_HERE(khvd_finish(pending[1 - other]) == KHVD_OK);
      CHECK_HERE(first.output == 2 && second.output == 2);
    }
    Request mismatched;
    mismatched.request.reduce_op = rank == 0 ? KHVD_SUM : KHVD_MAX;
    CHECK_HERE(khvd_begin(&mismatched.request, &pending[0]) == KHVD_OK);
    CHECK_HERE(khvd_finish(pending[0]) == KHVD_MISMATCH && LastErrorHas("'x'"));
    Request alone;
    alone.request.name = rank == 0 ? "a" : "b";
    CHECK_HERE(khvd_begin(&alone.request, &pending[0]) == KHVD_OK);
    CHECK_HERE(khvd_shutdown() == KHVD_OK);
    const int end = khvd_finish(pending[0]);
    CHECK_HERE(end == KHVD_SHUT_DOWN || end == KHVD_RANK_FAILED);
    return 0;
  });
  EXPECT_EQ(ends, (std::vector<int>{0, 0}));
}

// A request whose end notes its thread.
struct Submitted : Request {
  Submitted() {
    request.context = this;
    request.done = [](void* context, int code, const char*) {
      auto* const self = static_cast<Submitted*>(context);
      self->code = code;
      self->thread = std::this_thread::get_id();
      __atomic_store_n(&self->ended, 1, __ATOMIC_RELEASE);
    };
  }
  bool HasEnded() const { return __atomic_load_n(&ended, __ATOMIC_ACQUIRE) != 0; }

  uint8_t ended = 0;
  int code = -1;
  std::thread::id thread;
};

TEST(JobTest, WhoWaitsForASubmittedRequestDrives) {
  const std::vector<int> ends = RunJob(2, [](int rank) {
    Request both;
    both.request.name = "both";
    both.input = 0;
    // The engine's thread may be quicker, but not always.
    for (int tries = 0; both.output < 2; ++tries) {
      CHECK_HERE(tries < 2000);
      Submitted request;
      CHECK_HERE(khvd_submit(&request.request) == KHVD_OK);
      khvd_drive_until(&request.ended);
      while (!request.HasEnded()) poll(nullptr, 0, 1);
      CHECK_HERE(request.code == KHVD_OK && request.output == 2);
      if (request.thread == std::this_thread::get_id()) both.input = 1;
      CHECK_HERE(both.Run() == KHVD_OK);
    }
    // A peer that does not come holds nobody in there.
    Submitted alone;
    alone.request.name = "alone";
    if (rank == 0) {
      CHECK_HERE(khvd_submit(&alone.request) == KHVD_OK);
      khvd_drive_until(&alone.ended);
      CHECK_HERE(!alone.HasEnded());
    }
    Request last;
    last.request.name = "last";
    CHECK_HERE(last.Run() == KHVD_OK);
    CHECK_HERE(khvd_shutdown() == KHVD_OK);
    CHECK_HERE(rank == 1 || alone.HasEnded());
    khvd_drive_until(&alone.ended);
    return 0;
  });
  EXPECT_EQ(ends, (std::vector<int>{0, 0}));
}

TEST(JobTest, RanksReduceGatherBroadcastAndMeet) {
  for (int size : {2, 4}) {
    const auto body = [size](int rank) {
      CHECK_HERE(khvd_rank() == rank && khvd_size() == size);
      Request sum;
      sum.input = static_cast<float>(rank + 1);
      CHECK_HERE(sum.Run() == KHVD_OK);
      CHECK_HERE(sum.output == size * (size + 1) / 2);

      Request broadcast;
      broadcast.request.kind = KHVD_BROADCAST;
      broadcast.request.root = 1;
      broadcast.input = static_cast<float>(rank);
      CHECK_HERE(broadcast.Run() == KHVD_OK);
      CHECK_HERE(broadcast.output == 1);

      std::vector<float> all;
      Request gather;
      gather.request.kind = KHVD_ALLGATHER;
      gather.request.context = &all;
      gather.request.allocate = [](void* context, int32_t tensor, const int64_t* rows,
                                   int32_t count) -> void* {
        if (tensor != 0) return nullptr;
        auto* all = static_cast<std::vector<float>*>(context);
        int64_t sum = 0;
        for (int32_t i = 0; i < count; ++i) sum += rows[i];
        all->resize(sum);
        return all->data();
      };
      gather.input = static_cast<float>(rank);
      CHECK_HERE(gather.Run() == KHVD_OK);
      CHECK_HERE(all.size() == static_cast<size_t>(size));
      for (int peer = 0; peer < size; ++peer) CHECK_HERE(all[peer] == peer);

      Request barrier;
      barrier.request.kind = KHVD_BARRIER;
      barrier.request.count = 0;
      CHECK_HERE(barrier.Run() == KHVD_OK);
      CHECK_HERE(khvd_shutdown() == KHVD_OK);
      return 0;
    };
    EXPECT_EQ(RunJob(size, body), std::vector<int>(size, 0));
  }
}

TEST(JobTest, SomeRanksReduceAmongThemselves) {
  const auto body = [](int rank) {
    const int32_t ends[] = {0, 2}, middle[] = {1};
    int32_t both = 0, one = 0;
    CHECK_HERE(khvd_add_process_set(ends, 2, &both) == KHVD_OK && both == 1);
    CHECK_HERE(khvd_add_process_set(middle, 1, &one) == KHVD_OK && one == 2);
    CHECK_HERE(khvd_process_set_size(0) == 3 && khvd_process_set_rank(0) == rank);
    CHECK_HERE(khvd_process_set_size(both) == 2 && khvd_process_set_size(one) == 1);
    CHECK_HERE(khvd_process_set_rank(both) == (rank == 1 ? -1 : rank / 2));
    CHECK_HERE(khvd_process_set_size(3) == -1);
    CHECK_HERE(LastErrorHas("there is no process set 3"));
    Request sum;
    sum.request.process_set = both;
    sum.input = static_cast<float>(rank + 1);
    if (rank == 1) {
      CHECK_HERE(sum.Run() == KHVD_INVALID_ARGUMENT);
      CHECK_HERE(LastErrorHas("rank 1 is not in process set 1 (ranks 0, 2)"));
    } else {
      CHECK_HERE(sum.Run() == KHVD_OK);
      CHECK_HERE(sum.output == 4);
    }
    CHECK_HERE(khvd_add_process_set(ends, 2, &both) == KHVD_MISMATCH);
    CHECK_HERE(LastErrorHas("process set 1 already has ranks 0, 2"));
    CHECK_HERE(khvd_remove_process_set(1) == KHVD_OK);
    CHECK_HERE(khvd_remove_process_set(1) == KHVD_INVALID_ARGUMENT);
    CHECK_HERE(khvd_remove_process_set(0) == KHVD_INVALID_ARGUMENT);
    CHECK_HERE(khvd_add_process_set(ends, 2, &both) == KHVD_OK && both == 3);
    return 0;
  };
  EXPECT_EQ(RunJob(3, body), std::vector<int>(3, 0));
}

// Ranks 0 and 1 have been in a job with two sets before they meet rank 2 again.
TEST(JobTest, NumbersOfSetsAreNotGivenAgainInLaterJobs) {
  const std::string pair = JobName(), all = JobName();
  const auto body = [&](int rank) {
    const int32_t first[] = {0}, second[] = {1}, ends[] = {0, 2};
    int32_t set = 0;
    CHECK_HERE(khvd_shutdown() == KHVD_OK);
    if (rank < 2) {
      const khvd_options options = Options(rank, 2, pair.c_str());
      CHECK_HERE(khvd_init(&options) == KHVD_OK);
      CHECK_HERE(khvd_add_process_set(first, 1, &set) == KHVD_OK && set == 1);
      CHECK_HERE(khvd_add_process_set(second, 1, &set) == KHVD_OK && set == 2);
      CHECK_HERE(khvd_shutdown() == KHVD_OK);
    }
    const khvd_options options = Options(rank, 3, all.c_str());
    CHECK_HERE(khvd_init(&options) == KHVD_OK);
    CHECK_HERE(khvd_add_process_set(ends, 2, &set) == KHVD_OK && set == 3);
    Request sum;
    sum.request.process_set = 2;
    CHECK_HERE(sum.Run() == KHVD_INVALID_ARGUMENT);
    CHECK_HERE(LastErrorHas(rank < 2 ? "belonged to an earlier job of this process"
                                     : "was not added, or has been removed"));
    CHECK_HERE(khvd_process_set_size(2) == -1);
    CHECK_HERE(rank == 2 ||
               LastErrorHas("there is no process set 2: it belonged to an"));
    sum.request.process_set = set;
    CHECK_HERE(rank == 1 || sum.Run() == KHVD_OK);
    CHECK_HERE(rank == 1 || sum.output == 2);
    return 0;
  };
  EXPECT_EQ(RunJob(3, body), std::vector<int>(3, 0));
}

TEST(JobTest, RanksThatHaveJoinedGiveZeros) {
  const auto body = [](int rank) {
    for (int step = 0; step <= rank; ++step) {
      Request sum;
      sum.input = 1;
      CHECK_HERE(sum.Run() == KHVD_OK);
      CHECK_HERE(sum.output == 3 - step);
    }
    int32_t last = -1;
    CHECK_HERE(khvd_join(&last) == KHVD_OK && last == 2);
    return 0;
  };
  EXPECT_EQ(RunJob(3, body), std::vector<int>(3, 0));
}

// A rank that dies in whatever way while the others go on reducing: all of them learn
// of it, and can say it again.
void ExpectDeathIsSeen(const std::function<void()>& die,
                       const std::vector<std::string>& texts) {
  const auto body = [&](int rank) {
    int done = 0;
    while ((rank != 1 || done < 20) && Request().Run() == KHVD_OK) ++done;
    if (rank == 1 && done == 20) die();
    // The last one may have ended there and not yet here.
    CHECK_HERE(done == 19 || done == 20);
    CHECK_HERE(LastErrorHas("allreduce 'x' failed on rank " + std::to_string(rank) +
                            ": rank 1 (pid "));
    bool known = false;
    for (const std::string& text : texts) known |= LastErrorHas(text);
    CHECK_HERE(known);
    const std::string failure = khvd_failure();
    CHECK_HERE(failure.find("rank 1 (pid ") == 0);
    CHECK_HERE(Request().Run() == KHVD_RANK_FAILED);
    CHECK_HERE(khvd_shutdown() == KHVD_OK);
    CHECK_HERE(khvd_failure() == failure);
    const std::string job = JobName();
    const khvd_options options = Options(0, 1, job.c_str());
    CHECK_HERE(khvd_init(&options) == KHVD_OK);
    CHECK_HERE(strcmp(khvd_failure(), "") == 0);
    return 0;
  };
  const std::vector<int> ends = RunJob(3, body);
  EXPECT_EQ(ends[0], 0);
  EXPECT_NE(ends[1], 0x100);  // it died in the intended way
  EXPECT_EQ(ends[2], 0);
}

constexpr char kSilent[] = "died without a word";

TEST(DeathTest, Killed) {
  ExpectDeathIsSeen([] { raise(SIGKILL); }, {kSilent, "was killed by SIGKILL"});
}
TEST(DeathTest, Crashed) {
  ExpectDeathIsSeen([] { raise(SIGABRT); }, {"crashed with SIGABRT"});
}
TEST(DeathTest, ExitedBesideTheEngine) {
  // The system call, which no sanitizer looks at.
  ExpectDeathIsSeen([] { syscall(SYS_exit_group, 0); },
                    {kSilent, "exited with code 0"});
}

TEST(DeathTest, OfARankThatHasJoined) {
  const auto body = [](int rank) {
    if (rank == 1) {
      std::thread joins([] {
        int32_t last = -1;
        khvd_join(&last);
      });
      // Its zeros are in some of rank 0's sums.
      khvd_counters counters = {};
      counters.struct_size = sizeof(counters);
      while (khvd_get_counters(&counters) == KHVD_OK && counters.batches < 20) {
        poll(nullptr, 0, 1);
      }
      raise(SIGKILL);
    }
    int32_t last = -1;
    if (rank == 2) {
      CHECK_HERE(khvd_join(&last) == KHVD_RANK_FAILED);
    } else {
      while (Request().Run() == KHVD_OK) {
      }
    }
    CHECK_HERE(LastErrorHas("rank 1 (pid "));
    CHECK_HERE(khvd_join(&last) == KHVD_RANK_FAILED);
    return 0;
  };
  const std::vector<int> ends = RunJob(3, body);
  EXPECT_EQ(ends[0], 0);
  EXPECT_EQ(ends[2], 0);
}

// As where a script has ended, and a thread of it goes on.
TEST(DeathTest, LeavingForAReason) {
  const auto body = [](int rank) {
    CHECK_HERE(Request().Run() == KHVD_OK);
    if (rank == 1) return khvd_leave("its script has failed") == KHVD_OK ? 0 : __LINE__;
    CHECK_HERE(Request().Run() == KHVD_RANK_FAILED);
    CHECK_HERE(LastErrorHas("rank 1 (pid "));
    CHECK_HERE(LastErrorHas(" has left the job: its script has failed"));
    return 0;
  };
  EXPECT_EQ(RunJob(2, body), std::vector<int>(2, 0));
}

// Leaving is no death: only requests that need the rank fail.
TEST(DeathTest, ShutDown) {
  const auto body = [](int rank) {
    for (int i = 0; i < 20; ++i) CHECK_HERE(Request().Run() == KHVD_OK);
    if (rank == 1) return khvd_shutdown() == KHVD_OK ? 0 : __LINE__;
    CHECK_HERE(Request().Run() == KHVD_RANK_FAILED);
    CHECK_HERE(LastErrorHas(" has left the job: its script ended or called shutdown"));
    // Rank 0 leaves over this, and rank 2 may see that first.
    CHECK_HERE(LastErrorHas("rank 1 (pid ") || (rank == 2 && LastErrorHas("rank 0 (")));
    CHECK_HERE(khvd_shutdown() == KHVD_OK);
    return 0;
  };
  EXPECT_EQ(RunJob(3, body), std::vector<int>(3, 0));
}

// A rank that is stopped, the coordinator included, answers nobody. Where that is asked
// for, it ends the job.
TEST(StopTest, AStoppedRankIsNamedAndEndsTheJobIfAsked) {
  for (int victim = 0; victim < 3; ++victim) {
    const std::string job = JobName();
    std::vector<std::unique_ptr<Child>> children;
    for (int rank = 0; rank < 3; ++rank) {
      const auto body = [&, rank]() -> int {
        khvd_options options = Options(rank, 3, job.c_str());
        options.stall_warning = 0.2;
        options.stall_abort = 1;
        CHECK_HERE(khvd_init(&options) == KHVD_OK);
        for (int i = 0; i < 5; ++i) CHECK_HERE(Request().Run() == KHVD_OK);
        if (rank == victim) raise(SIGSTOP);
        CHECK_HERE(Request().Run() == KHVD_RANK_FAILED);
        CHECK_HERE(LastErrorHas("rank " + std::to_string(victim) + " (pid "));
        CHECK_HERE(LastErrorHas("its process is stopped (kill -CONT)"));
        CHECK_HERE(LastErrorHas("The job was ended by KERAS_HVD_STALL_ABORT_SECONDS"));
        return 0;
      };
      children.push_back(std::make_unique<Child>([&](const Child::Link& parent) {
        const int line = body();
        khvd_shutdown();
        if (line == 0) return 0;
        parent.Tell("line " + std::to_string(line) + ": " + khvd_last_error());
        return 1;
      }));
    }
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      EXPECT_EQ(children[rank]->Line(), "") << "rank " << rank;
      EXPECT_EQ(children[rank]->Reap(), 0);
    }
  }
}

}  // namespace
