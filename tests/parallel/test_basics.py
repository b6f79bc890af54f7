"""A rank's place in the job."""

import pytest

import keras_hvd
from keras_hvd import environment


def test_the_place_is_the_launchers(rank, size):
    world = environment.world()
    assert (rank, size) == (world.rank, world.size)
    assert keras_hvd.local_rank() == world.local_rank
    assert keras_hvd.local_size() == world.local_size
    if world.rendezvous is None:
        assert keras_hvd.cross_rank() == world.cross_rank
        assert keras_hvd.cross_size() == world.cross_size
    else:
        hosts = keras_hvd.allgather_object((world.host_key, world.local_rank))
        alike = [key for key, local_rank in hosts if local_rank == world.local_rank]
        assert keras_hvd.cross_rank() == alike.index(world.host_key)
        assert keras_hvd.cross_size() == len(alike)


def test_every_rank_is_there_once(rank, size):
    assert keras_hvd.allgather_object(rank) == list(range(size))


def test_init_again_does_nothing(rank, size):
    keras_hvd.init()
    keras_hvd.init(range(size))
    assert (keras_hvd.rank(), keras_hvd.size()) == (rank, size)


def test_init_of_other_ranks_than_all_on_one_of_them(rank, size):
    if rank == size - 1:
        with pytest.raises(ValueError, match=f"as rank {rank} of {size}"):
            keras_hvd.init([rank + 1])
    assert keras_hvd.allgather_object(rank) == list(range(size))
