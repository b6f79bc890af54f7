// Times allreduces on a GPU, as a program in C would make them: the engine's requests,
// and bare NCCL's calls. Both are made several in a row, on one stream. For each row
// the host's time until the last one is enqueued is taken, and the time until the
// stream has run out. Or they are made behind the parts of some work, and events record
// when each had run.
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "tf_ops/engine/c_api.h"

typedef int (*khvd_submit_function)(const khvd_request* request);
typedef int (*khvd_await_end_function)(void* end, void* stream);
typedef int (*record_function)(void* event, void* stream);
typedef int (*query_function)(void* event);
typedef int (*wait_function)(void* stream, void* event, unsigned flags);
typedef int (*fill_function)(uint64_t to, unsigned char value, size_t bytes,
                             void* stream);
typedef int (*nccl_group_function)(void);
typedef int (*nccl_allreduce_function)(const void* input, void* output, size_t count,
                                       int type, int op, void* communicator,
                                       void* stream);

// The arguments of bare NCCL: `count` tensors of float32, in place, by Sum.
typedef struct {
  nccl_group_function start, end;
  nccl_allreduce_function allreduce;
  void* communicator;
  int32_t count;
  void* const* tensors;
  const int64_t* elements;
} nccl_calls;

// The mark by which the end of a stream is known.
typedef struct {
  record_function record;
  query_function query;
  void* event;
} stream_end;

// A stream that is busy with one part of its work after the other, as in backprop, and
// another one for the reductions behind each part.
typedef struct {
  record_function record;
  wait_function wait;
  fill_function fill;
  void *stream, *behind;
  uint64_t memory;  // each part sets all of it
  size_t bytes;
  int32_t parts;
  void* start;             // an event, in front of all
  void* const* computed;   // events, behind each part
  void* const* reduced;    // events, behind each part's reduction
  _Atomic int32_t* codes;  // for the engine's part: kEnqueuing, or its code
} busy_work;

enum { kNcclFloat32 = 7, kNcclSum = 0, kEnqueuing = -1, kCudaNotReady = 600 };

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void enqueued(void* context, int code, const char* message) {
  (void)message;
  atomic_store_explicit((_Atomic int*)context, code, memory_order_release);
}

static int submit_and_wait(khvd_submit_function submit, khvd_request* request) {
  _Atomic int state = kEnqueuing;
  request->context = &state;
  request->done = enqueued;
  const int code = submit(request);
  if (code != KHVD_OK) return code;
  int result;
  do {
    result = atomic_load_explicit(&state, memory_order_acquire);
    if (result == kEnqueuing) sched_yield();
  } while (result == kEnqueuing);
  return result;
}

// Enqueues a group; returns 0, or the code of the call that failed.
int enqueue_nccl(const nccl_calls* calls, void* stream) {
  int code = calls->start();
  for (int32_t i = 0; code == 0 && i < calls->count; ++i) {
    code = calls->allreduce(calls->tensors[i], calls->tensors[i],
                            (size_t)calls->elements[i], kNcclFloat32, kNcclSum,
                            calls->communicator, stream);
  }
  const int ended = calls->end();
  return code != 0 ? code : ended;
}

static int run_out(const stream_end* end, void* stream) {
  int code = end->record(end->event, stream);
  if (code != 0) return code;
  while ((code = end->query(end->event)) == kCudaNotReady) sched_yield();
  return code;
}

// Stores the seconds of each row; returns 0, or the code of the call that failed.
int time_khvd_on_gpu(khvd_submit_function submit, khvd_request* request,
                     const stream_end* end, int repeats, int in_a_row, double* host,
                     double* whole) {
  for (int i = 0; i < repeats; ++i) {
    const double before = now();
    for (int call = 0; call < in_a_row; ++call) {
      const int code = submit_and_wait(submit, request);
      if (code != KHVD_OK) return code;
    }
    host[i] = now() - before;
    const int code = run_out(end, request->stream);
    if (code != 0) return code;
    whole[i] = now() - before;
  }
  return 0;
}

int time_nccl(const nccl_calls* calls, void* stream, const stream_end* end, int repeats,
              int in_a_row, double* host, double* whole) {
  for (int i = 0; i < repeats; ++i) {
    const double before = now();
    for (int call = 0; call < in_a_row; ++call) {
      const int code = enqueue_nccl(calls, stream);
      if (code != 0) return code;
    }
    host[i] = now() - before;
    const int code = run_out(end, stream);
    if (code != 0) return code;
    whole[i] = now() - before;
  }
  return 0;
}

static int start_work(const busy_work* work) {
  return work->record(work->start, work->stream);
}

static int compute(const busy_work* work, int32_t part) {
  const int code =
      work->fill(work->memory, (unsigned char)part, work->bytes, work->stream);
  return code != 0 ? code : work->record(work->computed[part], work->stream);
}

// The work alone. Like the next two it returns when all is enqueued: 0, or the code of
// the call that failed.
int run_work(const busy_work* work) {
  int code = start_work(work);
  for (int32_t part = 0; code == 0 && part < work->parts; ++part) {
    code = compute(work, part);
  }
  return code;
}

// The same, with one group behind each part.
int run_work_and_nccl(const busy_work* work, const nccl_calls* calls) {
  int code = start_work(work);
  for (int32_t part = 0; code == 0 && part < work->parts; ++part) {
    code = compute(work, part);
    if (code == 0) code = work->wait(work->behind, work->computed[part], 0);
    if (code == 0) code = enqueue_nccl(&calls[part], work->behind);
    if (code == 0) code = work->record(work->reduced[part], work->behind);
  }
  return code;
}

static int submit_behind(const busy_work* work, khvd_submit_function submit,
                         khvd_request* request, int32_t part) {
  const int code = compute(work, part);
  if (code != 0) return code;
  atomic_store_explicit(&work->codes[part], kEnqueuing, memory_order_relaxed);
  request->context = (void*)&work->codes[part];
  request->done = enqueued;
  return submit(request);
}

static int record_reduced(const busy_work* work, khvd_await_end_function await_end,
                          const khvd_request* request, int32_t part) {
  const int code = await_end(*request->end, work->behind);
  return code != 0 ? code : work->record(work->reduced[part], work->behind);
}

// The same with one request behind each part, which has a mark of its end. The mark is
// put on the other stream as soon as it is there, and not when all parts are submitted.
int run_work_and_khvd(const busy_work* work, khvd_submit_function submit,
                      khvd_await_end_function await_end,
                      khvd_request* const* requests) {
  int code = start_work(work);
  int32_t submitted = 0, recorded = 0;
  while (code == 0 && recorded < work->parts) {
    if (submitted < work->parts) {
      code = submit_behind(work, submit, requests[submitted], submitted);
      if (code == 0) ++submitted;
    } else {
      sched_yield();
    }
    while (code == 0 && recorded < submitted) {
      code = atomic_load_explicit(&work->codes[recorded], memory_order_acquire);
      if (code != KHVD_OK) break;
      code = record_reduced(work, await_end, requests[recorded], recorded);
      ++recorded;
    }
    if (code == kEnqueuing) code = 0;
  }
  return code;
}
