// See allgather.h.
#include "tf_ops/collectives/allgather.h"

#include <algorithm>
#include <cstring>

namespace keras_hvd {
namespace {

// An empty tensor may have no address, which memcpy does not take even for no bytes.
void Copy(char* to, const char* from, int64_t bytes) {
  if (bytes > 0) memcpy(to, from, bytes);
}

// The members' first dimensions travel in a round of their own: the result cannot be
// allocated before they are known.
bool ExchangeRows(int64_t own, Communicator* communicator, std::vector<int64_t>* rows) {
  memcpy(communicator->Exchange(communicator->index()), &own, sizeof(own));
  communicator->Publish();
  if (!communicator->AwaitAllPublished()) return false;
  rows->resize(communicator->count());
  for (int member = 0; member < communicator->count(); ++member) {
    memcpy(&(*rows)[member], communicator->Exchange(member), sizeof(int64_t));
  }
  return true;
}

}  // namespace

bool Allgather(const AllgatherOptions& options, Communicator* communicator) {
  std::vector<int64_t> rows;
  if (!ExchangeRows(options.rows, communicator, &rows)) return false;
  char* result = static_cast<char*>(options.allocate(rows));

  const int self = communicator->index();
  const int64_t window = communicator->exchange_bytes();
  const int64_t longest =
      *std::max_element(rows.begin(), rows.end()) * options.row_bytes;
  for (int64_t begin = 0; begin < longest; begin += window) {
    if (!communicator->NextRound()) return false;
    const auto part = [&](int member) {
      return std::clamp<int64_t>(rows[member] * options.row_bytes - begin, 0, window);
    };
    const char* own = static_cast<const char*>(options.input) + begin;
    if (communicator->count() > 1) Copy(communicator->Exchange(self), own, part(self));
    communicator->Publish();
    int64_t start = 0;
    for (int member = 0; member < communicator->count(); ++member) {
      if (!communicator->AwaitPublished(member)) return false;
      const char* from = member == self ? own : communicator->Exchange(member);
      if (result != nullptr) Copy(result + start + begin, from, part(member));
      start += rows[member] * options.row_bytes;
    }
  }
  return true;
}

}  // namespace keras_hvd
