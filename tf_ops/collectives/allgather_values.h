// Short lists of numbers that every member gives to all others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "tf_ops/collectives/communicator.h"
#include "tf_ops/collectives/hosts_parts.h"

namespace keras_hvd {

// Gives every member all members' numbers. `own` has the same length on every member,
// and `all[member]` has that length and order. Starts in the current round, which must
// be unused. Returns false if the job failed meanwhile.
template <typename T>
bool AllgatherValues(const std::vector<T>& own, Communicator* communicator,
                     std::vector<std::vector<T>>* all) {
  static_assert(std::is_arithmetic_v<T>);
  all->assign(communicator->count(), {});
  const int64_t window = communicator->window_bytes() / sizeof(T);
  const int64_t count = static_cast<int64_t>(own.size());
  for (int64_t begin = 0; begin < count; begin += window) {
    if (begin > 0 && !communicator->NextRound()) return false;
    const int64_t part = std::min(window, count - begin);
    memcpy(communicator->ExchangeMemory(communicator->index()), own.data() + begin,
           part * sizeof(T));
    communicator->Publish();
    if (!communicator->AwaitAllPublished()) return false;
    for (int member = 0; member < communicator->count(); ++member) {
      const T* from = reinterpret_cast<const T*>(communicator->ExchangeMemory(member));
      (*all)[member].insert((*all)[member].end(), from, from + part);
    }
  }
  return true;
}

// The same for members on several hosts.
template <typename T>
bool AllgatherValues(const std::vector<T>& own, HostsCommunicator* hosts,
                     std::vector<std::vector<T>>* all) {
  static_assert(std::is_arithmetic_v<T>);
  std::vector<T> values(hosts->count() * own.size());
  std::vector<int64_t> starts;
  for (int member = 0; member <= hosts->count(); ++member) {
    starts.push_back(member * own.size() * sizeof(T));
  }
  const Parts parts({std::move(starts)});
  if (!Gather(parts, {own.data()}, hosts, {values.data()})) return false;
  all->clear();
  for (auto from = values.begin(); from != values.end(); from += own.size()) {
    all->emplace_back(from, from + own.size());
  }
  all->resize(hosts->count());
  return true;
}

}  // namespace keras_hvd
