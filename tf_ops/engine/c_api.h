// The C API of keras_hvd: one engine per process, without TensorFlow.
//
// TensorFlow's ops, the Python objects, the benchmarks and other frameworks all
// drive the engine through these functions. Structures start with their own size,
// so that fields can be appended without breaking older callers: set
// `struct_size = sizeof(...)` and leave what you do not use zero.
#ifndef KERAS_HVD_TF_OPS_ENGINE_C_API_H_
#define KERAS_HVD_TF_OPS_ENGINE_C_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KHVD_EXPORT __attribute__((visibility("default")))

// Result of a call or of a collective. Values are part of the ABI.
typedef enum {
  KHVD_OK = 0,
  KHVD_INVALID_ARGUMENT = 1,  // this rank's request is wrong
  KHVD_NOT_INITIALIZED = 2,   // before khvd_init
  KHVD_RANK_FAILED = 3,       // a peer died, left, or the job was aborted
  KHVD_SHUT_DOWN = 4,         // after khvd_shutdown on this rank
  KHVD_FORKED = 5,            // in a child process forked from a rank
  KHVD_INTERNAL = 6,          // the operating system refused something, or a bug
  KHVD_MISMATCH = 7,          // the ranks' requests do not fit each other
} khvd_code;

typedef enum {
  KHVD_UINT8 = 0,
  KHVD_INT8 = 1,
  KHVD_INT32 = 2,
  KHVD_INT64 = 3,
  KHVD_FLOAT16 = 4,
  KHVD_BFLOAT16 = 5,
  KHVD_FLOAT32 = 6,
  KHVD_FLOAT64 = 7,
  KHVD_BOOL = 8,
  KHVD_UINT32 = 9,
  KHVD_UINT64 = 10,
  KHVD_FLOAT8_E5M2 = 11,
  KHVD_FLOAT8_E4M3FN = 12,  // without infinities
  // What follows is only moved: there is no reduction of it.
  KHVD_INT16 = 13,
  KHVD_UINT16 = 14,
  KHVD_COMPLEX64 = 15,
  KHVD_COMPLEX128 = 16,
} khvd_dtype;

// The kinds of collectives, numbered from 0 in this order, which is part of the ABI,
// and what each of them needs, 1 for yes:
//   tensors  it has any
//   group    it takes several at once
//   reduces  it combines a tensor's elements of all ranks
//   rows     it moves rows, so that a tensor needs a first dimension
//   own      the ranks' first dimensions may differ; results are allocated when all are
//            known
//   parts    what a member gets depends on its index among the members
// clang-format off
#define KHVD_KINDS(KIND) \
  /*                                            tensors group reduces rows own parts */ \
  KIND(ALLREDUCE,     Allreduce,     allreduce,       1,    1,      1,   0,  0,    0) \
  KIND(ALLGATHER,     Allgather,     allgather,       1,    1,      0,   1,  1,    0) \
  KIND(BROADCAST,     Broadcast,     broadcast,       1,    0,      0,   0,  0,    0) \
  KIND(BARRIER,       Barrier,       barrier,         0,    0,      0,   0,  0,    0) \
  KIND(REDUCESCATTER, Reducescatter, reducescatter,   1,    1,      1,   1,  0,    1) \
  KIND(ALLTOALL,      Alltoall,      alltoall,        1,    0,      0,   1,  1,    1)
// clang-format on

typedef enum {  // KHVD_ALLREDUCE and so on
#define KHVD_KIND(UPPER, Camel, lower, ...) KHVD_##UPPER,
  KHVD_KINDS(KHVD_KIND)
#undef KHVD_KIND
} khvd_kind;

// Average is Sum, divided by the number of ranks: for integer types towards zero.
// bool takes Min (and), Max (or) and Product (and). Adasum is an allreduce's alone, of
// floating types, of a number of ranks that is a power of two.
typedef enum {
  KHVD_AVERAGE = 0,
  KHVD_SUM = 1,
  KHVD_MIN = 2,
  KHVD_MAX = 3,
  KHVD_PRODUCT = 4,
  KHVD_ADASUM = 5,
} khvd_reduce_op;

// What a line on standard error is about.
typedef enum {
  KHVD_LOG_DEFAULT = 0,  // the same as KHVD_LOG_WARNING
  KHVD_LOG_TRACE = 1,    // each tensor
  KHVD_LOG_DEBUG = 2,    // each batch
  KHVD_LOG_INFO = 3,     // joining and leaving
  KHVD_LOG_WARNING = 4,  // what goes on, but not as it should
  KHVD_LOG_ERROR = 5,    // what ends the job
  KHVD_LOG_FATAL = 6,    // what ends the process
} khvd_log_level;

typedef struct {
  size_t struct_size;
  int32_t rank, size;
  int32_t local_rank, local_size;
  int32_t cross_rank, cross_size;
  const char* job;           // names the job on this host; unique while it runs
  double init_timeout;       // seconds to wait for the other ranks; 0: 60
  double stall_warning;      // seconds until a stall is reported; 0: 60, < 0: never
  double stall_abort;        // seconds until a stall aborts the job; 0: never
  int64_t exchange_bytes;    // exchange memory of a rank; 0: 4 MiB
  int64_t fusion_bytes;      // largest fused batch; 0: 64 MiB
  int32_t cores;             // cores this job may use; 0: asks the system
  int32_t check;             // 1: compare all results between ranks; as rank 0 says
  int64_t cache_capacity;    // names that travel as numbers; 0: 16384, < 0: none
  int32_t log_level;         // khvd_log_level: what is less is not written
  int32_t log_timestamp;     // 1: lines start with the time
  int32_t autotune;          // 1: look for better settings; as rank 0 says
  const char* autotune_log;  // rank 0's file of what it found; NULL or "": none
  int32_t autotune_warmup;   // samples that do not count; 0: 3, < 0: none
  int32_t autotune_steps;    // steps of a sample; 0: 10
  int32_t autotune_samples;  // the most samples of the search; 0: no limit
  // The libraries for tensors on GPUs, which are opened when there is one; NULL or "":
  // libcuda.so.1 and libnccl.so.2 of the library path.
  const char* cuda_library;
  const char* nccl_library;
  // The library for ranges in NVIDIA's profilers, which is opened under one; NULL or
  // "": libnvtx3interop.so.1 or libnvToolsExt.so.1 of the library path.
  const char* nvtx_library;
  int32_t disable_ranges;  // 1: profilers get none
} khvd_options;

// One tensor of a request, contiguous, row-major; in host memory, or on a GPU.
typedef struct {
  int32_t dtype;         // khvd_dtype; an integer, for it may be wrong
  int32_t rank;          // number of dimensions
  const int64_t* shape;  // `rank` sizes
  const void* input;
  // May be `input`; NULL where `allocate` gives it. A reducescatter's holds this rank's
  // rows only (khvd_scattered_rows) and is no input.
  void* output;
} khvd_tensor;

// Called once when a collective has ended, on the engine's thread or in any thread that
// is in khvd_run or khvd_submit_and_drive: it must not block and must not call
// khvd_run. `message` is "" on KHVD_OK and valid during the call only.
typedef void (*khvd_done)(void* context, int code, const char* message);

// Called, like `done`, when an allgather or alltoall knows the first dimension of the
// result of its tensor number `tensor`: the sum of `first_dims[0..count)`, the rows
// that come from each rank. Returns memory for the result, or NULL if there is none
// (the collective then fails on this rank alone).
typedef void* (*khvd_allocate)(void* context, int32_t tensor, const int64_t* first_dims,
                               int32_t count);

// A collective that every rank of the process set submits under the same name. A
// request with several tensors (allreduce, allgather, reducescatter) is a group: all of
// it, or nothing.
typedef struct {
  size_t struct_size;
  int32_t kind;                // khvd_kind
  const char* name;            // what matches it to the peers' requests; not ""
  uint64_t submitter;          // who asks: requests of one may queue, of two may not
  int32_t process_set;         // 0: all ranks
  int32_t reduce_op;           // khvd_reduce_op; allreduce, reducescatter
  int32_t root;                // broadcast; a rank of the job
  double prescale, postscale;  // where there is a reduction; both 0 means both 1
  int32_t count;               // number of tensors; barrier: 0, else at least 1
  const khvd_tensor* tensors;  // copied, shapes included; the data is not
  khvd_done done;
  khvd_allocate allocate;  // allgather, alltoall
  void* context;           // handed to `done` and `allocate`
  // alltoall: how many rows go to each rank, copied; NULL: as many to each
  const int64_t* splits;
  int32_t split_count;
  // 1: the tensors are on the GPU, the same on every rank. Then `stream`, a CUstream of
  // the device's primary context, is where the inputs come to be and the outputs are
  // free to be written, also those of `allocate`: the collective runs, on a stream of
  // its own, behind what is on `stream` when the request is submitted, or memory
  // allocated. `done` is called as soon as the collective is enqueued; nobody waits for
  // the GPU.
  int32_t on_gpu;
  void* stream;
  // NULL: what is put on `stream` after `done` runs behind the collective. Otherwise a
  // place for a mark of the collective's end, which is there when `done` is called with
  // KHVD_OK, and is handed to khvd_await_end, once.
  void** end;
} khvd_request;

// Joins the job and returns when every rank has, or with an error. On an error the
// text is in khvd_last_error().
KHVD_EXPORT int khvd_init(const khvd_options* options);
// Leaves the job; pending requests end with KHVD_SHUT_DOWN. Harmless when not
// initialized.
KHVD_EXPORT int khvd_shutdown(void);
KHVD_EXPORT int khvd_is_initialized(void);

// Each returns -1 when not initialized.
KHVD_EXPORT int khvd_rank(void);
KHVD_EXPORT int khvd_size(void);
KHVD_EXPORT int khvd_local_rank(void);
KHVD_EXPORT int khvd_local_size(void);
KHVD_EXPORT int khvd_cross_rank(void);
KHVD_EXPORT int khvd_cross_size(void);

// Makes a process set of `ranks[0..count)`, ascending, and gives its number, which
// requests name it by; or removes one. Every rank calls these, with the same ranks and
// in the same order, also those outside of the set; they return when all have. It is an
// error to add a set twice, and to remove one whose requests wait for a rank.
KHVD_EXPORT int khvd_add_process_set(const int32_t* ranks, int32_t count, int32_t* id);
KHVD_EXPORT int khvd_remove_process_set(int32_t id);
// The number of a set's ranks, and this rank's index among them, from 0. -1 if there is
// no such set, or this rank is not in it.
KHVD_EXPORT int khvd_process_set_size(int32_t id);
KHVD_EXPORT int khvd_process_set_rank(int32_t id);

// Waits until every rank has called it, and gives the last one. Meanwhile this rank
// takes part in allreduces of all ranks with Sum or Average: with zeros, counting as
// any other for the average. Whatever else would wait for it is an error on those that
// do.
KHVD_EXPORT int khvd_join(int32_t* last);
// How many of `rows` rows this rank gets of a reducescatter: as many as the others, and
// the first ranks one more where it does not divide. 0 for a rank outside of the set,
// -1 if there is no such set.
KHVD_EXPORT int64_t khvd_scattered_rows(int32_t process_set, int64_t rows);

// Hands a request to the engine and returns without waiting for the peers. On KHVD_OK
// `done` is called exactly once, and the tensors' data stays the engine's until then;
// on anything else it is never called, and khvd_last_error() has the text.
KHVD_EXPORT int khvd_submit(const khvd_request* request);
// The same for a thread that has nothing better to do: for a small request it does the
// engine's work for as long as the peers are expected at any moment. `done` may be
// called on it before this returns.
KHVD_EXPORT int khvd_submit_and_drive(const khvd_request* request);
// The same, and waits for its end; `done` is not called. Meanwhile the calling thread
// does the engine's work, if no other thread does.
KHVD_EXPORT int khvd_run(const khvd_request* request);

// Has what is put on `stream` from now on run behind a collective whose `end` this is,
// and takes the mark back. Until then the collective's buffers are the engine's.
KHVD_EXPORT int khvd_await_end(void* end, void* stream);

// Whether tensors on GPUs can be reduced there, and by what.
typedef struct {
  size_t struct_size;
  int32_t devices;       // that CUDA finds; 0: none, or no CUDA
  int32_t nccl_version;  // 22304 for 2.23.4; 0: there is none that can be used
  char text[512];        // for people: what was found, or why it cannot be used
} khvd_gpu_support;
// For libraries as in khvd_options; works before khvd_init.
KHVD_EXPORT int khvd_get_gpu_support(const char* cuda_library, const char* nccl_library,
                                     khvd_gpu_support* support);

// The text of this thread's last error; "" if there was none.
KHVD_EXPORT const char* khvd_last_error(void);

// Why the engine cannot be used any more (a peer's death, an abort), or "" if it can;
// after khvd_shutdown, and until the next khvd_init, why it could not. Known before any
// collective on a GPU is aborted: if it is "" when a caller's stream has passed one,
// its results are right.
KHVD_EXPORT const char* khvd_failure(void);

// Writes where the time of each tensor goes to `path`, from now on until
// khvd_stop_timeline or khvd_shutdown, as rank 0 sees it; with a mark at each round of
// decisions if `mark_cycles` is not 0. On other ranks both do nothing, so that it does
// not matter which ranks call them when.
KHVD_EXPORT int khvd_start_timeline(const char* path, int32_t mark_cycles);
KHVD_EXPORT int khvd_stop_timeline(void);

// Counters since khvd_init, for tests and diagnosis.
typedef struct {
  size_t struct_size;
  int64_t batches;     // batches executed
  int64_t tensors;     // requests completed
  int64_t bytes;       // bytes of their inputs
  int64_t sleeps;      // times the engine went to sleep
  int64_t lost_wakes;  // sleeps that only a time-out ended though work was due
} khvd_counters;
KHVD_EXPORT int khvd_get_counters(khvd_counters* counters);

// Writes a line to standard error, as the engine does its own, if the level is enabled.
KHVD_EXPORT void khvd_log(int level, const char* text);

KHVD_EXPORT const char* khvd_version(void);

#ifdef __cplusplus
}
#endif

#endif  // KERAS_HVD_TF_OPS_ENGINE_C_API_H_
