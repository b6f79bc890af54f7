// All communicators of the process in the NCCL stand-in: how they are made, split and
// aborted, and the work behind a call that has returned.
//
// All of it with the machine's lock.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "tf_ops/testing/gpu/clique.h"

namespace keras_hvd::stand_in {

inline constexpr nccl::Op kFirstMadeOp = 5;

// All communicators of the process.
struct Communicators {
  std::deque<nccl::CommState> all;  // the destroyed ones too
  std::set<const void*> handles;
  std::map<std::string, std::shared_ptr<Clique>> by_id;
  int cliques = 0;
  nccl::Op last_op = kFirstMadeOp - 1;
  int leaked_ops = 0;
  uint64_t ids = 0;
  uint64_t generation = 1;
};

Communicators& All();

std::shared_ptr<Clique> NewClique(int count);
nccl::Comm NewCommunicator(std::shared_ptr<Clique> clique, int index,
                           const nccl::Config& config);
// Its first error stays.
void SetError(nccl::Comm communicator, nccl::Result error, const std::string& text);

// Goes on behind a nonblocking communicator's call, and within that of a blocking one,
// which an abort ends with an error.
nccl::Result Begin(nccl::Comm communicator, std::function<bool()> ready,
                   std::function<void()> finish, Machine::Lock* lock);
// Ends the work in progress, if it can.
void Advance(nccl::Comm communicator);

bool AllHaveChosen(const Clique::Split& split);
void FinishSplit(nccl::Comm parent, uint64_t number, nccl::Comm* part,
                 const nccl::Config& config);
// Gives up a split that has not ended when its parent is aborted. As in NCCL, this
// leaves a part that cannot be used, and has to be given back.
void AbandonSplit(nccl::Comm parent, nccl::Comm* part, const nccl::Config& config);
// Ends the work and the waits of this one and of those that share its flag. Returns
// whether they had anything on a GPU.
bool Abort(nccl::Comm communicator);

}  // namespace keras_hvd::stand_in
