#include "tf_ops/collectives/barrier.h"

#include "tf_ops/collectives/allgather_values.h"

namespace keras_hvd {

bool Barrier(Communicator* communicator) {
  communicator->Publish();
  return communicator->AwaitAllPublished();
}

// A member that has a value from every member knows that all have entered.
bool Barrier(HostsCommunicator* hosts) {
  std::vector<std::vector<uint8_t>> all;
  return AllgatherValues(std::vector<uint8_t>{1}, hosts, &all);
}

}  // namespace keras_hvd
