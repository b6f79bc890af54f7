// Times calls of a collective one by one, as a program in C would make them: with
// everything prepared, and no interpreter between two calls.
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "tf_ops/engine/c_api.h"

typedef int (*khvd_run_function)(const khvd_request* request);
typedef int (*khvd_submit_function)(const khvd_request* request);
// MPI's handles are pointers or integers, depending on the library. In the calling
// conventions of 64-bit systems both are passed like an intptr_t.
typedef int (*mpi_allreduce_function)(const void* input, void* output, int count,
                                      intptr_t datatype, intptr_t op, intptr_t comm);

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// Stores the seconds of each call; returns 0, or the code of the call that failed.
int time_khvd_run(khvd_run_function run, const khvd_request* request, int repeats,
                  double* seconds) {
  double before = now();
  for (int i = 0; i < repeats; ++i) {
    const int code = run(request);
    if (code != KHVD_OK) return code;
    const double after = now();
    seconds[i] = after - before;
    before = after;
  }
  return 0;
}

static void count_end(void* context, int code, const char* message) {
  (void)message;
  if (code == KHVD_OK) atomic_fetch_add((atomic_int*)context, 1);
}

// The same for `count` requests that are submitted together.
int time_khvd_submit(khvd_submit_function submit, khvd_request* requests, int count,
                     int repeats, double* seconds) {
  for (int i = 0; i < repeats; ++i) {
    atomic_int ended = 0;
    const double before = now();
    for (int j = 0; j < count; ++j) {
      requests[j].done = count_end;
      requests[j].context = &ended;
      const int code = submit(&requests[j]);
      if (code != KHVD_OK) return code;
    }
    while (atomic_load(&ended) < count) sched_yield();
    seconds[i] = now() - before;
  }
  return KHVD_OK;
}

int time_mpi_allreduce(mpi_allreduce_function allreduce, const void* in_place,
                       void* data, int count, intptr_t datatype, intptr_t op,
                       intptr_t comm, int repeats, double* seconds) {
  double before = now();
  for (int i = 0; i < repeats; ++i) {
    const int code = allreduce(in_place, data, count, datatype, op, comm);
    if (code != 0) return code;
    const double after = now();
    seconds[i] = after - before;
    before = after;
  }
  return 0;
}
