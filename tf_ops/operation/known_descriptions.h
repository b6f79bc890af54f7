// Descriptions of earlier requests: a request that is made again needs no new one, with
// its allocations for each tensor.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "tf_ops/operation/description.h"

namespace keras_hvd {

// Any thread may call all of it.
class KnownDescriptions {
 public:
  // `capacity`: the most descriptions kept.
  explicit KnownDescriptions(size_t capacity) : capacity_(capacity) {}

  // The last one of this name; null if there is none.
  std::shared_ptr<const Description> Find(const std::string& name) const {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : found->second;
  }
  void Add(std::shared_ptr<const Description> description) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (by_name_.size() >= capacity_) by_name_.clear();
    if (capacity_ == 0) return;
    const std::string& name = description->name;
    by_name_[name] = std::move(description);
  }

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const Description>> by_name_;
};

}  // namespace keras_hvd
