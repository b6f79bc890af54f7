// The C API of keras_hvd: one engine per process, without TensorFlow.
//
// TensorFlow's ops, the Python objects, the benchmarks and other frameworks all drive
// the engine through these functions. Structures start with their own size, so fields
// can be appended without breaking older callers. Set `struct_size = sizeof(...)` and
// leave unused fields zero.
#ifndef KERAS_HVD_TF_OPS_ENGINE_C_API_H_
#define KERAS_HVD_TF_OPS_ENGINE_C_API_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KHVD_EXPORT __attribute__((visibility("default")))

// Result of a call or of a collective. The values are part of the ABI.
typedef enum {
  KHVD_OK = 0,
  KHVD_INVALID_ARGUMENT = 1,  // this rank's request is wrong
  KHVD_NOT_INITIALIZED = 2,   // before khvd_init
  KHVD_RANK_FAILED = 3,       // a peer died, left, or the job was aborted
  KHVD_SHUT_DOWN = 4,         // after khvd_shutdown on this rank
  KHVD_FORKED = 5,            // in a child process forked from a rank
  KHVD_INTERNAL = 6,          // the operating system refused something, or a bug
  KHVD_MISMATCH = 7,          // the ranks' requests do not match
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
  KHVD_FLOAT8_E4M3FN = 12,  // no infinities
  // These types are only moved, never reduced.
  KHVD_INT16 = 13,
  KHVD_UINT16 = 14,
  KHVD_COMPLEX64 = 15,
  KHVD_COMPLEX128 = 16,
} khvd_dtype;

// The kinds of collectives, numbered from 0 in this order, which is part of the ABI,
// and the properties of each; 1 means yes:
//   tensors  it has tensors
//   group    it takes several tensors at once
//   reduces  it combines a tensor's elements of all ranks
//   rows     it moves rows, so a tensor needs a first dimension
//   own      first dimensions may differ between ranks; results are allocated when all
//            are known
//   parts    a member's result depends on its index among the members
// clang-format off
#define KHVD_KINDS(KIND) \
  /*                                            tensors group reduces rows own parts */ \
  KIND(ALLREDUCE,     Allreduce,     allreduce,       1,    1,      1,   0,  0,    0) \
  KIND(ALLGATHER,     Allgather,     allgather,       1,    1,      0,   1,  1,    0) \
  KIND(BROADCAST,     Broadcast,     broadcast,       1,    0,      0,   0,  0,    0) \
  KIND(BARRIER,       Barrier,       barrier,         0,    0,      0,   0,  0,    0) \
  KIND(REDUCESCATTER, Reducescatter, reducescatter,   1,    1,      1,   1,  0,    1) \
  KIND(ALLTOALL,      Alltoall,      alltoall,        1,    0,      0,   1,  1,    1) \
  /* the next one here */
// clang-format on

typedef enum {  // KHVD_ALLREDUCE and so on
#define KHVD_KIND(UPPER, Camel, lower, ...) KHVD_##UPPER,
  KHVD_KINDS(KHVD_KIND)
#undef KHVD_KIND
} khvd_kind;

// Average is Sum divided by the number of ranks; integer types round towards zero. bool
// takes Min (and), Max (or) and Product (and). Adasum is only for allreduce, for
// floating types, and for a power-of-two number of ranks.
typedef enum {
  KHVD_AVERAGE = 0,
  KHVD_SUM = 1,
  KHVD_MIN = 2,
  KHVD_MAX = 3,
  KHVD_PRODUCT = 4,
  KHVD_ADASUM = 5,
} khvd_reduce_op;

// The level of a line on standard error.
typedef enum {
  KHVD_LOG_DEFAULT = 0,  // same as KHVD_LOG_WARNING
  KHVD_LOG_TRACE = 1,    // each tensor
  KHVD_LOG_DEBUG = 2,    // each batch
  KHVD_LOG_INFO = 3,     // entering and leaving a job
  KHVD_LOG_WARNING = 4,  // the job goes on, but something is wrong
  KHVD_LOG_ERROR = 5,    // the job ends
  KHVD_LOG_FATAL = 6,    // the process ends
} khvd_log_level;

// The purpose of a connection to a rank on another host.
typedef enum {
  KHVD_LINK_CONTROL = 0,  // between two hosts' leaders
  KHVD_LINK_DATA = 1,     // for tensors
  KHVD_LINK_FAILURE = 2,  // for news of a failure to other hosts
} khvd_link_purpose;

// TLS over a connected socket: see khvd_tls_open.
typedef struct khvd_tls khvd_tls;

typedef struct {
  int32_t peer;     // the rank at the other end
  int32_t purpose;  // khvd_link_purpose
  int32_t fd;       // a connected stream socket
  khvd_tls* tls;    // over it, with the handshake complete; NULL: in the clear
} khvd_link;

// The MPI that carries tensors between hosts: functions of MPI's names, and handles as
// its C interface has them.
typedef struct {
  void* isend;
  void* issend;
  void* irecv;
  void* test;
  void* error_string;
  intptr_t communicator;     // of all ranks, in their order; nobody else may use it
  intptr_t byte;             // the type MPI_BYTE
  int32_t handles_are_ints;  // 1: integers of 32 bits; 0: pointers
  int32_t status_bytes;      // of an MPI_Status
} khvd_mpi;

typedef struct {
  size_t struct_size;
  int32_t rank, size;
  int32_t local_rank, local_size;
  int32_t cross_rank, cross_size;
  const char* job;           // names the job on this host; unique while it runs
  double init_timeout;       // seconds to wait for the other ranks; 0: 60
  double stall_warning;      // seconds until a stall is reported; 0: 60, < 0: never
  double stall_abort;        // seconds until a stall aborts the job; 0: never
  int64_t exchange_bytes;    // exchange memory per rank; 0: 4 MiB
  int64_t fusion_bytes;      // largest fused batch; 0: 64 MiB
  int32_t cores;             // cores this job may use; 0: ask the system
  int32_t check;             // 1: compare all results between ranks; rank 0 decides
  int64_t cache_capacity;    // names that travel as numbers; 0: 16384, < 0: none
  int32_t log_level;         // khvd_log_level: lower levels are not written
  int32_t log_timestamp;     // 1: lines start with the time
  int32_t autotune;          // 1: search for better settings; rank 0 decides
  const char* autotune_log;  // rank 0's file of findings; NULL or "": none
  int32_t autotune_warmup;   // discarded first samples; 0: 3, < 0: none
  int32_t autotune_steps;    // steps per sample; 0: 10
  int32_t autotune_samples;  // sample limit of the search; 0: no limit
  // The libraries for GPU tensors, opened with the first such tensor; NULL or "":
  // libcuda.so.1 and libnccl.so.2 on the library path.
  const char* cuda_library;
  const char* nccl_library;
  // The library for ranges in NVIDIA's profilers, opened only under a profiler; NULL or
  // "": libnvtx3interop.so.1 or libnvToolsExt.so.1 on the library path.
  const char* nvtx_library;
  int32_t disable_ranges;  // 1: no ranges for profilers
  // If the ranks are on several hosts, that is, do not all share memory; else NULL. For
  // each rank: a number of its host, the host's name, and its process.
  const int32_t* hosts;
  const char* const* host_names;
  const int32_t* pids;
  // The links that khvd_links lists, connected. Those for tensors may have several
  // connections, at both ends in the same order. khvd_init takes over the sockets and
  // their TLS, even if it fails.
  const khvd_link* links;
  int32_t link_count;
  int32_t host_timeout;  // seconds until a host that does not answer is gone; 0: 4
  // NULL: tensors travel over the links for them. Otherwise there are no such links.
  // Any thread calls these functions, one at a time, until khvd_shutdown.
  const khvd_mpi* mpi;
  // NULL, or a descriptor that ends the wait for other ranks at once: when it can be
  // read, or its other end is closed. khvd_init then returns KHVD_RANK_FAILED, and may
  // be called again. The caller closes the descriptor.
  const int32_t* cancel_fd;
} khvd_options;

// One tensor of a request: contiguous, row-major, in host memory or on a GPU.
typedef struct {
  int32_t dtype;         // khvd_dtype; an integer because it may be wrong
  int32_t rank;          // number of dimensions
  const int64_t* shape;  // `rank` sizes
  const void* input;
  // May equal `input`. NULL if `allocate` provides it. A reducescatter's output holds
  // only this rank's rows (khvd_scattered_rows) and must not be its input.
  void* output;
} khvd_tensor;

// Called once when a collective has ended, on a thread of the engine or on any thread
// inside khvd_run, khvd_finish, khvd_submit_and_drive or khvd_drive_until. It must not
// block and must not call these. `message` is "" on KHVD_OK, and valid only during the
// call.
typedef void (*khvd_done)(void* context, int code, const char* message);

// Called, like `done`, when an allgather or alltoall knows the first dimension of the
// result of tensor number `tensor`: the sum of `first_dims[0..count)`, the rows from
// each rank. Returns memory for the result, or NULL if there is none. The collective
// then fails on this rank alone.
typedef void* (*khvd_allocate)(void* context, int32_t tensor, const int64_t* first_dims,
                               int32_t count);

// A collective that every rank of the process set submits under the same name. A
// request with several tensors (allreduce, allgather, reducescatter) is a group: it
// runs as a whole or not at all.
typedef struct {
  size_t struct_size;
  int32_t kind;                // khvd_kind
  const char* name;            // matches the peers' requests by name; not ""
  uint64_t submitter;          // a name's requests may queue only within one submitter
  int32_t process_set;         // 0: all ranks
  int32_t reduce_op;           // khvd_reduce_op; allreduce, reducescatter
  int32_t root;                // broadcast: a rank of the job
  double prescale, postscale;  // for reductions; both 0 means both 1
  int32_t count;               // number of tensors; barrier: 0, others: at least 1
  const khvd_tensor* tensors;  // copied with their shapes, without the data
  khvd_done done;
  khvd_allocate allocate;  // allgather, alltoall
  void* context;           // handed to `done` and `allocate`
  // alltoall: how many rows go to each rank, copied; NULL: the same number to each
  const int64_t* splits;
  int32_t split_count;
  // 1: the tensors are on the GPU; the same value on every rank. `stream` is a CUstream
  // of the device's primary context. Work on it produces the inputs and frees the
  // outputs for writing, also those from `allocate`. The collective runs on its own
  // stream, after all work that is on `stream` when the request is submitted or memory
  // is allocated. `done` is called as soon as the collective is enqueued; no thread
  // waits for the GPU.
  int32_t on_gpu;
  void* stream;
  // NULL: work put on `stream` after `done` runs after the collective. Otherwise: where
  // to store a mark of the collective's end. The mark is there when `done` is called
  // with KHVD_OK, and must be passed to khvd_await_end once.
  void** end;
  // NULL, or a line for each tensor, and perhaps more, on which the ranks have to agree
  // as on shapes and types; copied. One of two lines may lack the other's first parts:
  // "dense/kernel" agrees with "model/dense/kernel".
  const char* labels;
} khvd_request;

// Enters the job. Returns when every rank of this host has, or with an error;
// khvd_last_error() then has the text.
KHVD_EXPORT int khvd_init(const khvd_options* options);
// The links that a rank needs, given each rank's host. Fills in at most `capacity` of
// them, with -1 as the socket, and returns how many there are.
KHVD_EXPORT int32_t khvd_links(int32_t rank, int32_t size, const int32_t* hosts,
                               khvd_link* links, int32_t capacity);
// Leaves the job; pending requests end with KHVD_SHUT_DOWN. Harmless if not
// initialized.
KHVD_EXPORT int khvd_shutdown(void);
// The same; ranks that still need this one hear that it "has left the job: `how`".
KHVD_EXPORT int khvd_leave(const char* how);
KHVD_EXPORT int khvd_is_initialized(void);
// Makes khvd_end_process end the process with this code: by MPI_Abort for an MPI whose
// mpirun does not mind the code; `mpi_abort` NULL: by itself.
KHVD_EXPORT void khvd_set_exit(int code,
                               int (*mpi_abort)(intptr_t communicator, int code),
                               intptr_t communicator);
// Ends the process if a code is set, without the libraries' exit handlers. For Python
// to call when it has ended, instead of functions that would wait for dead processes.
KHVD_EXPORT void khvd_end_process(void);

// Each returns -1 if not initialized.
KHVD_EXPORT int khvd_rank(void);
KHVD_EXPORT int khvd_size(void);
KHVD_EXPORT int khvd_local_rank(void);
KHVD_EXPORT int khvd_local_size(void);
KHVD_EXPORT int khvd_cross_rank(void);
KHVD_EXPORT int khvd_cross_size(void);
// Whether all hosts have the same number of ranks.
KHVD_EXPORT int khvd_is_homogeneous(void);

// Adds a process set of `ranks[0..count)`, ascending, and returns its number for use in
// requests; or removes a set. Every rank must call these, even outside the set, with
// the same ranks and in the same order. They return when all ranks have called. It is
// an error to add a set twice, or to remove one with requests that wait for a rank.
KHVD_EXPORT int khvd_add_process_set(const int32_t* ranks, int32_t count, int32_t* id);
KHVD_EXPORT int khvd_remove_process_set(int32_t id);
// The size of a set, and this rank's index in it, from 0. -1 if there is no such set or
// this rank is not in it.
KHVD_EXPORT int khvd_process_set_size(int32_t id);
KHVD_EXPORT int khvd_process_set_rank(int32_t id);

// Waits until every rank has joined, and returns the last one that did. Meanwhile this
// rank contributes zeros to allreduces of all ranks with Sum or Average, and counts in
// the average. Any other request that would wait for this rank fails on the ranks that
// submit it.
KHVD_EXPORT int khvd_join(int32_t* last);
// How many of `rows` rows a reducescatter gives this rank: an equal share, plus one for
// each of the first ranks if the rows do not divide evenly. 0 for a rank outside the
// set, -1 if there is no such set.
KHVD_EXPORT int64_t khvd_scattered_rows(int32_t process_set, int64_t rows);

// Passes a request to the engine and returns without waiting for the peers. On KHVD_OK,
// `done` is called exactly once, and the engine owns the tensors' data until then. On
// any other result it is never called, and khvd_last_error() has the text.
KHVD_EXPORT int khvd_submit(const khvd_request* request);
// Like khvd_submit, for a thread with nothing better to do: for a small request it does
// the engine's work while the peers are expected at any moment. It may call `done`
// before it returns.
KHVD_EXPORT int khvd_submit_and_drive(const khvd_request* request);
// Like khvd_submit, but waits for the end; `done` is not called. Meanwhile the calling
// thread does the engine's work if no other thread does.
KHVD_EXPORT int khvd_run(const khvd_request* request);

// khvd_run in two halves. khvd_begin returns without waiting for the peers. On KHVD_OK,
// the engine owns the tensors' data until khvd_finish has returned the request's result
// and freed `pending`.
typedef struct khvd_pending khvd_pending;
KHVD_EXPORT int khvd_begin(const khvd_request* request, khvd_pending** pending);
KHVD_EXPORT int khvd_finish(khvd_pending* pending);
// For a thread that is about to wait for the end of a request that it has submitted:
// does the engine's work, if no other thread does, until `done` has set `*ended`, which
// is 0 before, or until nothing is expected soon. Then the caller may have to wait in
// its own way. Both use `*ended` atomically. Harmless if not initialized.
KHVD_EXPORT void khvd_drive_until(const uint8_t* ended);

// Makes later work on `stream` run after the collective that `end` belongs to, and
// takes the mark back. Until then the engine owns the collective's buffers.
KHVD_EXPORT int khvd_await_end(void* end, void* stream);

// Whether GPU tensors can be reduced on the GPU, and by which libraries.
typedef struct {
  size_t struct_size;
  int32_t devices;       // devices that CUDA finds; 0: none, or no CUDA
  int32_t nccl_version;  // 22304 for 2.23.4; 0: no usable NCCL
  char text[512];        // readable: the libraries, or why they are unusable
} khvd_gpu_support;
// Takes libraries as in khvd_options. Works before khvd_init.
KHVD_EXPORT int khvd_get_gpu_support(const char* cuda_library, const char* nccl_library,
                                     khvd_gpu_support* support);

// TLS 1.3 between hosts, by OpenSSL's libssl, opened at run time. `library` is a path
// or a name on the library path; NULL or "": the usual names. It is opened once: later
// calls take the open one. Works before khvd_init.
//
// Looks for it. `text`, of `capacity` bytes, is readable: the one that was found.
KHVD_EXPORT int khvd_find_tls(const char* library, char* text, int32_t capacity);
// Begins TLS over a socket that does not block, which stays the caller's. Both ends
// give the same identity and key, of 32 bytes each, which must be new for each
// connection. Returns NULL if that is impossible; khvd_last_error() then has the text.
KHVD_EXPORT khvd_tls* khvd_tls_open(const char* library, int32_t fd, int32_t is_client,
                                    const unsigned char* identity,
                                    const unsigned char* key);
// Results of these three, besides a number of bytes. None of them waits.
enum {
  KHVD_TLS_ENDED = 0,         // the other end sends no more
  KHVD_TLS_WANTS_READ = -1,   // call it again when the socket can be read
  KHVD_TLS_WANTS_WRITE = -2,  // the same for writing, with the same bytes
  // For these, khvd_last_error() has the text.
  KHVD_TLS_REFUSED = -3,  // the bytes are not from a holder of the key
  KHVD_TLS_LOST = -4,     // the socket has failed, or ended without a word
};
// Returns 1 when the handshake is complete. Needed before the other two.
KHVD_EXPORT int64_t khvd_tls_handshake(khvd_tls* tls);
KHVD_EXPORT int64_t khvd_tls_read(khvd_tls* tls, void* data, int64_t bytes);
KHVD_EXPORT int64_t khvd_tls_write(khvd_tls* tls, const void* data, int64_t bytes);
// Ends it, unless khvd_init has taken it over, and leaves the socket open.
KHVD_EXPORT void khvd_tls_close(khvd_tls* tls);

// This thread's last error text; "" if none.
KHVD_EXPORT const char* khvd_last_error(void);

// The reason why the engine can no longer be used (a peer's death, an abort), or "" if
// it can. After khvd_shutdown, and until the next khvd_init: why it could not. Set
// before any collective on a GPU is aborted: if it is "" once a caller's stream has
// passed a collective, the results are right.
KHVD_EXPORT const char* khvd_failure(void);

// Records where the time of each tensor goes, as rank 0 sees it, in `path`, from now
// until khvd_stop_timeline or khvd_shutdown. Marks each round of decisions if
// `mark_cycles` is not 0. On other ranks both calls do nothing, so it does not matter
// which ranks make them when.
KHVD_EXPORT int khvd_start_timeline(const char* path, int32_t mark_cycles);
KHVD_EXPORT int khvd_stop_timeline(void);
// Adds up the same, for each step and each tensor, in the file `path` of fixed size,
// from now until khvd_shutdown. On other ranks it does nothing.
KHVD_EXPORT int khvd_start_recording(const char* path);

// Counters since khvd_init, for tests and diagnosis.
typedef struct {
  size_t struct_size;
  int64_t batches;     // batches executed
  int64_t tensors;     // requests completed
  int64_t bytes;       // bytes of their inputs
  int64_t sleeps;      // times the engine went to sleep
  int64_t lost_wakes;  // sleeps ended only by a timeout although work was due
  int64_t tcp_bytes;   // of tensors, sent to other hosts over links
  int64_t mpi_bytes;   // and by MPI
} khvd_counters;
KHVD_EXPORT int khvd_get_counters(khvd_counters* counters);

// Writes a line to standard error, like the engine's own, if the level is enabled.
KHVD_EXPORT void khvd_log(int level, const char* text);

KHVD_EXPORT const char* khvd_version(void);

#ifdef __cplusplus
}
#endif

#endif  // KERAS_HVD_TF_OPS_ENGINE_C_API_H_
