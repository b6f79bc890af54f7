// An NCCL that moves nothing: every call succeeds at once, so that the time of a
// collective is the engine's own. With NULL_NCCL_MODE=thread, a group of communicators
// that do not block takes a thread that is started for it and joined by the
// communicator's next call, as in NCCL itself.
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { kSuccess = 0, kInvalidUsage = 5, kInProgress = 7 };
enum { kFloat32 = 7, kUnset = INT_MIN, kNoColor = -1 };
// The size of the tensor with which a benchmark checks its sums, which must come out
// right. Each rank gives its number, from 1 on.
enum { kChecked = 1024 };

typedef struct {
  char bytes[128];
} unique_id;

// The beginning of ncclConfig_t.
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking;
} config;

typedef struct {
  int size, rank, blocking;
  _Atomic int state;
  int has_thread;
  pthread_t thread;
} communicator;

// Of the calling thread: open groups, and the communicator that the group is of.
static _Thread_local int depth;
static _Thread_local communicator* in_group;

static int groups_take_threads(void) {
  const char* const mode = getenv("NULL_NCCL_MODE");
  return mode != NULL && strcmp(mode, "thread") == 0;
}

static void join(communicator* comm) {
  if (comm->has_thread) pthread_join(comm->thread, NULL);
  comm->has_thread = 0;
}

static void* run_group(void* context) {
  communicator* const comm = context;
  atomic_store_explicit(&comm->state, kSuccess, memory_order_release);
  return NULL;
}

static communicator* make(int size, int rank, int blocking, const config* given) {
  communicator* const made = calloc(1, sizeof(communicator));
  made->size = size;
  made->rank = rank;
  made->blocking =
      given == NULL || given->blocking == kUnset ? blocking : given->blocking;
  return made;
}

int ncclGetVersion(int* version) {
  *version = 23007;
  return kSuccess;
}

int ncclGetUniqueId(unique_id* id) {
  memset(id, 1, sizeof(*id));
  return kSuccess;
}

int ncclCommInitRankConfig(communicator** comm, int size, unique_id id, int rank,
                           const config* given) {
  *comm = make(size, rank, 1, given);
  return kSuccess;
}

// The members of a color are not known here: all are taken to have the same one.
int ncclCommSplit(communicator* parent, int color, int key, communicator** child,
                  const config* given) {
  join(parent);
  *child = color == kNoColor ? NULL : make(parent->size, key, parent->blocking, given);
  return kSuccess;
}

int ncclCommFinalize(communicator* comm) {
  join(comm);
  return kSuccess;
}

int ncclCommDestroy(communicator* comm) {
  join(comm);
  free(comm);
  return kSuccess;
}

int ncclCommAbort(communicator* comm) { return ncclCommDestroy(comm); }

int ncclCommGetAsyncError(communicator* comm, int* state) {
  *state = atomic_load_explicit(&comm->state, memory_order_acquire);
  if (*state == kSuccess) join(comm);
  return kSuccess;
}

const char* ncclGetErrorString(int result) {
  return result == kSuccess ? "no error" : "an error of the NCCL that moves nothing";
}

const char* ncclGetLastError(communicator* comm) { return ""; }

int ncclGroupStart(void) {
  ++depth;
  return kSuccess;
}

int ncclGroupEnd(void) {
  if (depth == 0) return kInvalidUsage;
  if (--depth > 0) return kSuccess;
  communicator* const comm = in_group;
  in_group = NULL;
  if (comm == NULL || comm->blocking || !groups_take_threads()) return kSuccess;
  comm->has_thread = 1;
  atomic_store_explicit(&comm->state, kInProgress, memory_order_relaxed);
  pthread_create(&comm->thread, NULL, run_group, comm);
  return kInProgress;
}

static int enqueue(communicator* comm) {
  join(comm);
  ncclGroupStart();
  in_group = comm;
  return ncclGroupEnd();
}

int ncclRedOpCreatePreMulSum(int* op, void* scalar, int type, int residence,
                             communicator* comm) {
  *op = 5;
  return kSuccess;
}

int ncclRedOpDestroy(int op, communicator* comm) { return kSuccess; }

int ncclAllReduce(const void* input, void* output, size_t count, int type, int op,
                  communicator* comm, void* stream) {
  if (type == kFloat32 && count == kChecked) {
    const float sum = (float)(comm->size * (comm->size + 1) / 2);
    for (size_t i = 0; i < count; ++i) {
      ((float*)output)[i] = sum * ((const float*)input)[i] / (float)(comm->rank + 1);
    }
  }
  return enqueue(comm);
}

int ncclBroadcast(const void* input, void* output, size_t count, int type, int root,
                  communicator* comm, void* stream) {
  return enqueue(comm);
}

int ncclReduce(const void* input, void* output, size_t count, int type, int op,
               int root, communicator* comm, void* stream) {
  return enqueue(comm);
}

int ncclAllGather(const void* input, void* output, size_t count, int type,
                  communicator* comm, void* stream) {
  return enqueue(comm);
}

int ncclReduceScatter(const void* input, void* output, size_t count, int type, int op,
                      communicator* comm, void* stream) {
  return enqueue(comm);
}

int ncclSend(const void* input, size_t count, int type, int peer, communicator* comm,
             void* stream) {
  return enqueue(comm);
}

int ncclRecv(void* output, size_t count, int type, int peer, communicator* comm,
             void* stream) {
  return enqueue(comm);
}
