// Values for the names of requests.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tf_ops/coordination/merged_submission.h"
#include "tf_ops/operation/description.h"

namespace keras_hvd {

// A process set and a name identify a request.
struct TensorKey {
  int32_t process_set = 0;
  std::string name;

  bool operator==(const TensorKey& other) const {
    return process_set == other.process_set && name == other.name;
  }
};

struct TensorKeyHash {
  size_t operator()(const TensorKey& key) const {
    return std::hash<std::string>()(key.name) * 31 + key.process_set;
  }
};

inline TensorKey KeyOf(const Description& description) {
  return {description.process_set, description.name};
}

// Values by process set and name. A description that has been used before is found by
// its address, which costs less than to look at its name.
template <typename Value>
class NameTable {
 public:
  // Makes it if there is none. Others stay where they are.
  Value& Of(const std::shared_ptr<const Description>& description) {
    const auto known = by_address_.find(description);
    if (known != by_address_.end()) return *known->second;
    Value& value = values_[KeyOf(*description)];
    if (by_address_.size() >= kMostAddresses) by_address_.clear();
    by_address_.emplace(description, &value);
    return value;
  }

  // The values of these, in their order; valid until any are erased. A list that has
  // been used before is found by its address too.
  const std::vector<Value*>& Of(const std::shared_ptr<const Descriptions>& list) {
    const auto known = by_list_.find(list);
    if (known != by_list_.end()) return known->second;
    if (by_list_.size() >= kMostLists) by_list_.clear();
    std::vector<Value*>& values = by_list_[list];
    values.reserve(list->size());
    for (const auto& description : *list) values.push_back(&Of(description));
    return values;
  }

  template <typename Condition>
  void EraseIf(const Condition& condition) {
    by_address_.clear();
    by_list_.clear();
    for (auto it = values_.begin(); it != values_.end();) {
      it = condition(it->first, it->second) ? values_.erase(it) : std::next(it);
    }
  }

  // Erases idle names once there are many: those that a program invents as it runs must
  // not fill the memory.
  template <typename Condition>
  void EraseIdleOfMany(const Condition& is_idle) {
    if (values_.size() < most_) return;
    EraseIf([&](const TensorKey&, const Value& value) { return is_idle(value); });
    most_ = std::max(kKept, 2 * values_.size());
  }

  auto begin() { return values_.begin(); }
  auto end() { return values_.end(); }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }

 private:
  // With fewer names than this, none is dropped.
  static constexpr size_t kKept = 4096;
  static constexpr size_t kMostAddresses = 2 * kKept;
  static constexpr size_t kMostLists = 64;

  std::unordered_map<TensorKey, Value, TensorKeyHash> values_;
  // Keeps its descriptions alive, so none has the address of another.
  std::unordered_map<std::shared_ptr<const Description>, Value*> by_address_;
  std::unordered_map<std::shared_ptr<const Descriptions>, std::vector<Value*>> by_list_;
  size_t most_ = kKept;
};

}  // namespace keras_hvd
