// See barrier.h.
#include "tf_ops/collectives/barrier.h"

namespace keras_hvd {

bool Barrier(Communicator* communicator) {
  communicator->Publish();
  return communicator->AwaitAllPublished();
}

}  // namespace keras_hvd
