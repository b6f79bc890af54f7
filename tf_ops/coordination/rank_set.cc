#include "tf_ops/coordination/rank_set.h"

#include <algorithm>
#include <functional>
#include <string_view>
#include <utility>

namespace keras_hvd {

// The most unions remembered.
constexpr size_t kMostUnions = 512;

RankBitmap::RankBitmap(const std::vector<int>& ranks) : count_(ranks.size()) {
  if (ranks.empty()) return;
  first_ = ranks.front() / 64;
  words_.resize(ranks.back() / 64 + 1 - first_);
  for (int rank : ranks) words_[rank / 64 - first_] |= uint64_t{1} << rank % 64;
}

RankBitmap RankBitmap::Union(const RankBitmap& a, const RankBitmap& b) {
  RankBitmap both;
  both.first_ = std::min(a.first_, b.first_);
  both.words_.resize(std::max(a.end(), b.end()) - both.first_);
  for (size_t i = 0; i < both.words_.size(); ++i) {
    both.words_[i] = a.Word(both.first_ + i) | b.Word(both.first_ + i);
    both.count_ += __builtin_popcountll(both.words_[i]);
  }
  return both;
}

bool RankBitmap::HasAnyOf(const RankBitmap& other) const {
  const size_t last = std::min(end(), other.end());
  for (size_t i = std::max(first_, other.first_); i < last; ++i) {
    if ((words_[i - first_] & other.words_[i - other.first_]) != 0) return true;
  }
  return false;
}

bool RankBitmap::HasAllOf(const RankBitmap& other) const {
  // All ranks of a job, for one.
  const bool is_full = count_ == words_.size() * 64;
  if (is_full) return first_ <= other.first_ && other.end() <= end();
  for (size_t i = other.first_; i < other.end(); ++i) {
    if ((other.words_[i - other.first_] & ~Word(i)) != 0) return false;
  }
  return true;
}

std::vector<int> RankBitmap::List() const {
  std::vector<int> ranks;
  ranks.reserve(count_);
  for (size_t i = first_; i < end(); ++i) {
    for (uint64_t rest = words_[i - first_]; rest != 0; rest &= rest - 1) {
      ranks.push_back(static_cast<int>(i * 64) + __builtin_ctzll(rest));
    }
  }
  return ranks;
}

RankSet::RankSet(std::vector<int> ranks) {
  if (ranks.empty()) return;
  auto bitmap = std::make_shared<const RankBitmap>(ranks);
  const size_t hash = std::hash<std::string_view>()(
      {reinterpret_cast<const char*>(ranks.data()), ranks.size() * sizeof(int)});
  shared_ =
      std::make_shared<const Shared>(Shared{std::move(ranks), std::move(bitmap), hash});
}

const std::vector<int>& RankSet::list() const {
  static const std::vector<int> none;
  return shared_ == nullptr ? none : shared_->list;
}

const std::shared_ptr<const RankBitmap>& RankSet::bitmap() const {
  static const std::shared_ptr<const RankBitmap> none;
  return shared_ == nullptr ? none : shared_->bitmap;
}

bool RankSet::Has(int rank) const {
  return shared_ != nullptr && shared_->bitmap->Has(rank);
}

bool RankSet::HasAllOf(const RankSet& others) const {
  if (others.empty() || shared_ == others.shared_) return true;
  return shared_ != nullptr && shared_->bitmap->HasAllOf(*others.shared_->bitmap);
}

const std::shared_ptr<const RankBitmap>& RankUnions::Of(
    const std::shared_ptr<const RankBitmap>& a,
    const std::shared_ptr<const RankBitmap>& b) {
  if (a == nullptr) return b;
  if (last_ != nullptr && last_->first.a == a && last_->first.b == b) {
    return last_->second;
  }
  const auto known = unions_.find({a, b});
  if (known != unions_.end()) {
    last_ = &*known;
    return known->second;
  }
  if (unions_.size() >= kMostUnions) unions_.clear();
  Union both;
  if (!a->HasAnyOf(*b)) {
    both = std::make_shared<const RankBitmap>(RankBitmap::Union(*a, *b));
  }
  last_ = &*unions_.emplace(Pair{a, b}, std::move(both)).first;
  return last_->second;
}

}  // namespace keras_hvd
