// The least time of an allreduce in shared memory on a machine: the direct scheme,
// bare. No engine, no coordination, no sleeping; ranks that spin, and memory.
//
// A tensor is cut into chunks of one slot, a chunk into one part for each rank. Every
// rank publishes in its slot the parts that its peers reduce, sums its own part out of
// all ranks' memory, publishes that sum in its slot, and copies its peers' sums. Each
// rank has two slots and uses them in turn: publishing in one needs no wait for ranks
// that still read the other.
#include <immintrin.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { kMostRanks = 64, kLine = 64, kFloatsOfLine = 16 };

// Which stores bypass the cache.
enum { kOrdinary = 0, kStreamResult = 1, kStreamAll = 2 };
enum { kSse2 = 0, kAvx2 = 1, kAvx512 = 2 };

// Written by one rank, read by all: the numbers of the last chunk for which it
// published its input, and of the last one of which it reduced its part.
typedef struct {
  _Alignas(kLine) _Atomic int64_t published;
  _Alignas(kLine) _Atomic int64_t reduced;
} flags;

typedef struct {
  flags* flags;  // of all ranks
  char* slots;   // of all ranks, two each
  int64_t slot_bytes;
  int rank, size;
  int spins;      // looks at a flag before the core is given away
  int64_t chunk;  // number of the last chunk; as all flags before a call
} exchange;

typedef void (*copy_function)(float* to, const float* from, int64_t count);
// Writes the sum of `size` sources to two places.
typedef void (*sum_function)(float* result, float* slot, const float* const* sources,
                             int size, int64_t count);

// Defines copies and sums with one kind of vector. Both begin at multiples of a cache
// line, as every part does; the rest at the end is shorter than a vector.
#define DEFINE_KERNELS(NAME, TARGET, VECTOR, LANES, LOAD, ADD, STORE, STREAM)    \
  __attribute__((target(TARGET))) static void copy_##NAME(                       \
      float* to, const float* from, int64_t count) {                             \
    int64_t i = 0;                                                               \
    for (; i + LANES <= count; i += LANES) STORE(to + i, LOAD(from + i));        \
    for (; i < count; ++i) to[i] = from[i];                                      \
  }                                                                              \
  __attribute__((target(TARGET))) static void stream_##NAME(                     \
      float* to, const float* from, int64_t count) {                             \
    int64_t i = 0;                                                               \
    for (; i + LANES <= count; i += LANES) STREAM(to + i, LOAD(from + i));       \
    for (; i < count; ++i) to[i] = from[i];                                      \
  }                                                                              \
  DEFINE_SUM(sum_##NAME, TARGET, VECTOR, LANES, LOAD, ADD, STORE, STORE)         \
  DEFINE_SUM(sum_stream_result_##NAME, TARGET, VECTOR, LANES, LOAD, ADD, STREAM, \
             STORE)                                                              \
  DEFINE_SUM(sum_stream_all_##NAME, TARGET, VECTOR, LANES, LOAD, ADD, STREAM, STREAM)

#define DEFINE_SUM(FUNCTION, TARGET, VECTOR, LANES, LOAD, ADD, STORE_RESULT,        \
                   STORE_SLOT)                                                      \
  __attribute__((target(TARGET))) static void FUNCTION(float* result, float* slot,  \
                                                       const float* const* sources, \
                                                       int size, int64_t count) {   \
    int64_t i = 0;                                                                  \
    for (; i + LANES <= count; i += LANES) {                                        \
      VECTOR sum = LOAD(sources[0] + i);                                            \
      for (int j = 1; j < size; ++j) sum = ADD(sum, LOAD(sources[j] + i));          \
      STORE_RESULT(result + i, sum);                                                \
      STORE_SLOT(slot + i, sum);                                                    \
    }                                                                               \
    for (; i < count; ++i) {                                                        \
      float sum = sources[0][i];                                                    \
      for (int j = 1; j < size; ++j) sum += sources[j][i];                          \
      result[i] = slot[i] = sum;                                                    \
    }                                                                               \
  }

DEFINE_KERNELS(sse2, "sse2", __m128, 4, _mm_loadu_ps, _mm_add_ps, _mm_storeu_ps,
               _mm_stream_ps)
DEFINE_KERNELS(avx2, "avx2", __m256, 8, _mm256_loadu_ps, _mm256_add_ps,
               _mm256_storeu_ps, _mm256_stream_ps)
DEFINE_KERNELS(avx512, "avx512f", __m512, 16, _mm512_loadu_ps, _mm512_add_ps,
               _mm512_storeu_ps, _mm512_stream_ps)

static const copy_function kCopies[3][2] = {
    {copy_sse2, stream_sse2}, {copy_avx2, stream_avx2}, {copy_avx512, stream_avx512}};
static const sum_function kSums[3][3] = {
    {sum_sse2, sum_stream_result_sse2, sum_stream_all_sse2},
    {sum_avx2, sum_stream_result_avx2, sum_stream_all_avx2},
    {sum_avx512, sum_stream_result_avx512, sum_stream_all_avx512}};

static int widest_vector(void) {
  if (__builtin_cpu_supports("avx512f")) return kAvx512;
  return __builtin_cpu_supports("avx2") ? kAvx2 : kSse2;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void wait_for(const exchange* e, _Atomic int64_t* word) {
  for (int i = 0; atomic_load_explicit(word, memory_order_acquire) < e->chunk; ++i) {
    if (e->spins == 0 || i < e->spins) {
      _mm_pause();
    } else {
      sched_yield();
      i = 0;
    }
  }
}

static void publish(_Atomic int64_t* word, int64_t value) {
  _mm_sfence();  // a release does not order streaming stores
  atomic_store_explicit(word, value, memory_order_release);
}

static float* slot_of(const exchange* e, int rank, int64_t chunk) {
  return (float*)(e->slots + (2 * rank + (chunk & 1)) * e->slot_bytes);
}

// Where a rank's part of `count` elements begins.
static int64_t part(const exchange* e, int rank, int64_t count) {
  const int64_t lines = (count + kFloatsOfLine - 1) / kFloatsOfLine;
  const int64_t first = lines * rank / e->size * kFloatsOfLine;
  return first < count ? first : count;
}

// Publishes the parts of a chunk that the peers reduce.
static void publish_input(const exchange* e, copy_function copy, int64_t chunk,
                          const float* data, int64_t count) {
  float* slot = slot_of(e, e->rank, chunk);
  for (int i = 1; i < e->size; ++i) {
    const int peer = (e->rank + i) % e->size;
    const int64_t first = part(e, peer, count);
    copy(slot + first, data + first, part(e, peer + 1, count) - first);
  }
  publish(&e->flags[e->rank].published, chunk);
}

// Sums this rank's part of the current chunk, in the order of the ranks.
static void reduce(const exchange* e, sum_function sum, float* data, int64_t count) {
  const int64_t first = part(e, e->rank, count);
  const float* sources[kMostRanks];
  for (int i = 0; i < e->size; ++i) {
    if (i != e->rank) wait_for(e, &e->flags[i].published);
    sources[i] = (i == e->rank ? data : slot_of(e, i, e->chunk)) + first;
  }
  sum(data + first, slot_of(e, e->rank, e->chunk) + first, sources, e->size,
      part(e, e->rank + 1, count) - first);
  publish(&e->flags[e->rank].reduced, e->chunk);
}

static void copy_results(const exchange* e, copy_function copy, float* data,
                         int64_t count) {
  for (int i = 1; i < e->size; ++i) {
    const int peer = (e->rank + i) % e->size;
    const int64_t first = part(e, peer, count);
    copy(data + first, slot_of(e, peer, e->chunk) + first,
         part(e, peer + 1, count) - first);
  }
}

static int64_t at_most(int64_t count, int64_t most) {
  return count < most ? count : most;
}

static void allreduce(exchange* e, int kind, float* data, int64_t count) {
  const int vector = widest_vector();
  const copy_function to_slot = kCopies[vector][kind == kStreamAll];
  const copy_function to_result = kCopies[vector][kind != kOrdinary];
  const int64_t most = e->slot_bytes / (int64_t)sizeof(float);

  publish_input(e, to_slot, e->chunk + 1, data, at_most(count, most));
  for (int64_t done = 0; done < count; done += most) {
    ++e->chunk;
    const int64_t here = at_most(count - done, most);
    reduce(e, kSums[vector][kind], data + done, here);
    // Peers that have reduced this chunk have copied the one before, so that its slot
    // is free for the next one's input.
    for (int i = 0; i < e->size; ++i) {
      if (i != e->rank) wait_for(e, &e->flags[i].reduced);
    }
    const int64_t next = done + most;
    if (next < count) {
      publish_input(e, to_slot, e->chunk + 1, data + next, at_most(count - next, most));
    }
    copy_results(e, to_result, data + done, here);
  }
}

// The bytes of shared memory that `size` ranks need, zeroed before the first call.
int64_t probe_memory(int size, int64_t slot_bytes) {
  return size * ((int64_t)sizeof(flags) + 2 * slot_bytes);
}

const char* probe_vectors(void) {
  static const char* const kNames[] = {"SSE2", "AVX2", "AVX-512"};
  return kNames[widest_vector()];
}

// Reduces `data` in place `repeats` times and stores the seconds of each. `memory` must
// be used with one slot size only; `data` begins at a multiple of a cache line.
void time_probe(void* memory, int rank, int size, int64_t slot_bytes, int spins,
                int kind, float* data, int64_t count, int repeats, double* seconds) {
  exchange e = {.flags = memory,
                .slots = (char*)memory + size * sizeof(flags),
                .slot_bytes = slot_bytes,
                .rank = rank,
                .size = size,
                .spins = spins};
  e.chunk = atomic_load_explicit(&e.flags[rank].reduced, memory_order_relaxed);
  double before = now();
  for (int i = 0; i < repeats; ++i) {
    allreduce(&e, kind, data, count);
    const double after = now();
    seconds[i] = after - before;
    before = after;
  }
}
