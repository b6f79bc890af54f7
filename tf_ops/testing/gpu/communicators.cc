// See communicators.h.
#include "tf_ops/testing/gpu/communicators.h"

#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <string_view>
#include <utility>
#include <vector>

namespace keras_hvd::stand_in {
namespace {

using nccl::Comm;
using nccl::Result;

constexpr int kMostPolls = 3;
constexpr std::chrono::milliseconds kPoll(1);

void CountLeaks(const Communicators& communicators, Leaks* leaks) {
  leaks->reduction_ops += communicators.leaked_ops;
  for (const nccl::CommState& communicator : communicators.all) {
    if (!communicator.live) continue;
    leaks->communicators += 1;
    leaks->reduction_ops += static_cast<int>(communicator.ops.size());
  }
}

void Clear(Communicators* communicators) {
  const uint64_t generation = communicators->generation;
  *communicators = {};
  communicators->generation = generation + 1;
}

}  // namespace

Communicators& All() {
  static Communicators* const communicators = [] {
    auto* const made = new Communicators();
    Machine::Get().reset_nccl = [made] { Clear(made); };
    Machine::Get().count_nccl = [made](Leaks* leaks) { CountLeaks(*made, leaks); };
    return made;
  }();
  return *communicators;
}

// ---- One of them

Comm NewCommunicator(std::shared_ptr<Clique> clique, int index,
                     const nccl::Config& config) {
  Communicators& all = All();
  const Comm communicator = &all.all.emplace_back();
  all.handles.insert(communicator);
  communicator->id = static_cast<int>(all.all.size());
  communicator->clique = std::move(clique);
  communicator->index = index;
  const char* const asked = getenv("NCCL_COMM_BLOCKING");
  communicator->blocking =
      asked == nullptr ? config.blocking != 0 : std::string_view(asked) != "0";
  communicator->shares = config.split_share == 1;
  communicator->clique->members[index] = communicator;
  return communicator;
}

std::shared_ptr<Clique> NewClique(int count) {
  auto clique = std::make_shared<Clique>();
  clique->id = ++All().cliques;
  clique->members.resize(count);
  return clique;
}

void SetError(Comm communicator, Result error, const std::string& text) {
  if (communicator->error != Result::kSuccess) return;
  communicator->error = error;
  communicator->error_text = text;
}

// ---- Work behind a call

void Advance(Comm communicator) {
  if (!communicator->in_progress) return;
  // The caller of a blocking one is inside the call, which ends as it would.
  if (communicator->error != Result::kSuccess && !communicator->blocking) return;
  if (Machine::Get().IsProgressHeld(communicator->index)) return;
  if (communicator->polls_left > 0) {
    communicator->polls_left -= 1;
    return;
  }
  if (!communicator->ready()) return;
  communicator->in_progress = false;
  communicator->abandon = nullptr;
  communicator->finish();
}

Result Begin(Comm communicator, std::function<bool()> ready,
             std::function<void()> finish, Machine::Lock* lock) {
  communicator->in_progress = true;
  communicator->ready = std::move(ready);
  communicator->finish = std::move(finish);
  communicator->polls_left = 0;
  if (communicator->blocking) {
    Machine::Get().WakeAll();
    const auto ended = [&] {
      Advance(communicator);
      return !communicator->in_progress || *communicator->aborted;
    };
    // Asks again and again: a stream may hold back work that nobody has asked for.
    while (!lock->AwaitUntil(Machine::Get().changed(),
                             std::chrono::steady_clock::now() + kPoll, ended)) {
    }
    if (!communicator->in_progress) return Result::kSuccess;
    communicator->in_progress = false;
    return Result::kInternalError;
  }
  communicator->polls_left =
      static_cast<int>(Machine::Get().Random() % (kMostPolls + 1));
  if (communicator->polls_left == 0) Advance(communicator);
  Machine::Get().WakeAll();
  return communicator->in_progress ? Result::kInProgress : Result::kSuccess;
}

// ---- Splitting, and the end

void FinishSplit(Comm parent, uint64_t number, Comm* part, const nccl::Config& config) {
  Clique& clique = *parent->clique;
  Clique::Split& split = clique.splits[number];
  const Clique::Choice own = split.choices[parent->index];
  if (own.color == nccl::kNoColor) return;
  std::vector<std::pair<int, int>> order;  // key and place in the parent
  for (int member = 0; member < parent->count(); ++member) {
    const Clique::Choice& choice = split.choices[member];
    if (choice.color == own.color) order.emplace_back(choice.key, member);
  }
  std::sort(order.begin(), order.end());
  std::shared_ptr<Clique>& made = split.parts[own.color];
  if (made == nullptr) made = NewClique(static_cast<int>(order.size()));
  const auto self =
      std::find(order.begin(), order.end(), std::make_pair(own.key, parent->index));
  *part = NewCommunicator(made, static_cast<int>(self - order.begin()), config);
  if (parent->shares) (*part)->aborted = parent->aborted;
}

void AbandonSplit(Comm parent, Comm* part, const nccl::Config& config) {
  *part = NewCommunicator(NewClique(parent->count()), parent->index, config);
  if (parent->shares) (*part)->aborted = parent->aborted;
  SetError(*part, Result::kInternalError, "of a split that was aborted");
}

bool AllHaveChosen(const Clique::Split& split) {
  return std::all_of(split.choices.begin(), split.choices.end(),
                     [](const Clique::Choice& choice) { return choice.made; });
}

bool Abort(Comm communicator) {
  bool anything = false;
  communicator->live = false;
  *communicator->aborted = true;
  if (communicator->in_progress && communicator->abandon) communicator->abandon();
  communicator->in_progress = false;
  communicator->ready = nullptr;
  communicator->finish = nullptr;
  communicator->abandon = nullptr;
  communicator->ops.clear();
  for (const nccl::CommState& other : All().all) {
    if (other.aborted != communicator->aborted) continue;
    anything |= !other.running.empty();
    for (const GroupItem* item : other.running) {
      const_cast<GroupItem*>(item)->Withdraw();
    }
  }
  Machine::Get().WakeAll();
  return anything;
}

}  // namespace keras_hvd::stand_in
