"""A rank's place in the job."""

import keras_hvd
from keras_hvd import environment


def test_the_place_is_the_launchers(rank, size):
    world = environment.world()
    assert (rank, size) == (world.rank, world.size)
    assert keras_hvd.local_rank() == world.local_rank
    assert keras_hvd.local_size() == world.local_size
    assert keras_hvd.cross_rank() == world.cross_rank
    assert keras_hvd.cross_size() == world.cross_size


def test_every_rank_is_there_once(rank, size):
    assert keras_hvd.allgather_object(rank) == list(range(size))


def test_init_again_does_nothing(rank, size):
    keras_hvd.init()
    assert (keras_hvd.rank(), keras_hvd.size()) == (rank, size)
