// Sets of ranks that many requests have in common.
//
// In most steps all requests have come from the same few sets of ranks. So these sets
// are made once and shared, and the union of two of them is remembered. A request's
// cost does not depend on how many ranks have submitted it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <unordered_map>
#include <vector>

namespace keras_hvd {

// A bitmap of ranks, for comparisons of many at a time.
class RankBitmap {
 public:
  // `ranks` is ascending.
  explicit RankBitmap(const std::vector<int>& ranks);
  static RankBitmap Union(const RankBitmap& a, const RankBitmap& b);

  size_t count() const { return count_; }
  bool Has(int rank) const { return Word(rank / 64) >> rank % 64 & 1; }
  bool HasAnyOf(const RankBitmap& other) const;
  bool HasAllOf(const RankBitmap& other) const;
  // In ascending order.
  std::vector<int> List() const;

 private:
  RankBitmap() = default;

  size_t end() const { return first_ + words_.size(); }
  uint64_t Word(size_t place) const {
    return place < first_ || place >= end() ? 0 : words_[place - first_];
  }

  size_t first_ = 0;             // how many words without a rank are left out
  std::vector<uint64_t> words_;  // a bit for each rank
  size_t count_ = 0;
};

// An immutable list of ranks. Copies share it.
class RankSet {
 public:
  using value_type = int;
  using const_iterator = std::vector<int>::const_iterator;

  RankSet() = default;
  // Ascending.
  RankSet(std::vector<int> ranks);
  RankSet(std::initializer_list<int> ranks) : RankSet(std::vector<int>(ranks)) {}

  const std::vector<int>& list() const;
  // Null if there are none.
  const std::shared_ptr<const RankBitmap>& bitmap() const;
  bool Has(int rank) const;
  bool HasAllOf(const RankSet& others) const;

  size_t size() const { return list().size(); }
  bool empty() const { return shared_ == nullptr; }
  int operator[](size_t place) const { return list()[place]; }
  int front() const { return list().front(); }
  int back() const { return list().back(); }
  const_iterator begin() const { return list().begin(); }
  const_iterator end() const { return list().end(); }

  // The two are usually copies of one list.
  friend bool operator==(const RankSet& a, const RankSet& b) {
    return a.shared_ == b.shared_ || a.list() == b.list();
  }
  friend bool operator!=(const RankSet& a, const RankSet& b) { return !(a == b); }

  // Does not look at the ranks either.
  struct Hash {
    size_t operator()(const RankSet& ranks) const {
      return ranks.shared_ == nullptr ? 0 : ranks.shared_->hash;
    }
  };

 private:
  struct Shared {
    std::vector<int> list;
    std::shared_ptr<const RankBitmap> bitmap;
    size_t hash;  // of the list
  };
  std::shared_ptr<const Shared> shared_;  // null if there are none
};

// Remembers unions of bitmaps, so that ranks that come in the same order each time are
// only added once.
class RankUnions {
 public:
  // The union of both, valid until the next call; null if they have a rank in common.
  // `a` is null for no ranks.
  const std::shared_ptr<const RankBitmap>& Of(
      const std::shared_ptr<const RankBitmap>& a,
      const std::shared_ptr<const RankBitmap>& b);

 private:
  // The two are kept, so that none has the address of another.
  struct Pair {
    std::shared_ptr<const RankBitmap> a, b;

    bool operator==(const Pair& other) const { return a == other.a && b == other.b; }
  };
  struct PairHash {
    size_t operator()(const Pair& pair) const {
      const std::hash<std::shared_ptr<const RankBitmap>> hash;
      return hash(pair.a) * 31 + hash(pair.b);
    }
  };
  using Union = std::shared_ptr<const RankBitmap>;  // null: they overlap

  std::unordered_map<Pair, Union, PairHash> unions_;
  const std::pair<const Pair, Union>* last_ = nullptr;  // the one found last
};

}  // namespace keras_hvd
