#include "tf_ops/collectives/hashes.h"

#include <cstring>

namespace keras_hvd {
namespace {

// Both steps are invertible, so two different values stay different.
uint64_t Mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15;
  return hash ^ (hash >> 32);
}

}  // namespace

uint64_t Hash(const void* data, int64_t bytes) {
  const char* from = static_cast<const char*>(data);
  uint64_t hash = Mix(1, bytes);
  uint64_t word;
  int64_t done = 0;
  for (; done + 8 <= bytes; done += 8) {
    memcpy(&word, from + done, 8);
    hash = Mix(hash, word);
  }
  if (done < bytes) {
    word = 0;
    memcpy(&word, from + done, bytes - done);
    hash = Mix(hash, word);
  }
  return hash == kNoResult ? 1 : hash;
}

}  // namespace keras_hvd
