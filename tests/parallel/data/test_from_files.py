"""from_files: files are divided between the ranks, and each sample is read once."""

import os

import numpy as np
import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.data import from_files


def epoch(dataset):
    return [int(each) for batch in dataset.batch(100) for each in batch.numpy()]


def of_all_ranks(numbers):
    return [number for part in keras_hvd.allgather_object(numbers) for number in part]


def test_every_sample_once_in_each_epoch(folder, size):
    def epochs(seed):
        dataset = from_files(
            str(folder / "*.tfrecord"), "tfrecord", seed=seed, shuffle=100
        )
        return [epoch(dataset) for _ in range(3)]

    first = epochs(seed=7)
    for mine in first:
        assert sorted(of_all_ranks(mine)) == list(range(10_000))
    assert len({tuple(mine) for mine in first}) == 3
    assert len({len(mine) for mine in first}) == 1
    assert epochs(seed=7) == first
    assert epochs(seed=8)[0] != first[0]


def test_each_file_is_read_by_one_rank_and_they_are_balanced(folder, samples, size):
    mine = epoch(from_files(str(folder / "*.tfrecord"), "tfrecord"))
    files = np.unique(np.searchsorted(np.cumsum(samples), mine, side="right"))
    assert sorted(of_all_ranks([int(file) for file in files])) == list(range(7))
    parts = [len(part) for part in keras_hvd.allgather_object(mine)]
    assert max(parts) <= max(samples[0], 1.1 * sum(samples) / size)


def test_without_shuffle_samples_come_in_order(folder):
    dataset = from_files(f"{folder}/*.tfrecord", "tfrecord", shuffle=0, interleave=1)
    mine = epoch(dataset)
    assert mine == sorted(mine)
    assert epoch(dataset) == mine


def test_with_fewer_files_than_ranks_each_keeps_its_samples(folder, rank, size):
    files = [str(folder / f"{file}.tfrecord") for file in (5, 6)]
    if size > 2 and rank == 0:
        with pytest.warns(UserWarning, match=f"2 files for {size} ranks"):
            dataset = from_files(files, "tfrecord")
    else:
        dataset = from_files(files, "tfrecord")
    for _ in range(2):
        mine = epoch(dataset)
        assert sorted(of_all_ranks(mine)) == list(range(9500, 10_000))
        if size > 2:
            assert abs(len(mine) - 500 / size) <= 1


def test_even_gives_all_ranks_the_same_number_of_batches(folder, size):
    files = str(folder / "*.tfrecord")
    least = min(keras_hvd.allgather_object(len(epoch(from_files(files, "tfrecord")))))
    dataset = from_files(files, "tfrecord", even=64)
    left_out = []
    for _ in range(2):
        mine = epoch(dataset)
        assert len(mine) == least // 64 * 64
        everyones = of_all_ranks(mine)
        assert len(set(everyones)) == len(everyones)
        left_out.append(set(range(10_000)) - set(everyones))
    assert left_out[0] != left_out[1]
    with pytest.raises(ValueError, match="even=5000: .* less than a batch"):
        from_files(
            [str(folder / f"{file}.tfrecord") for file in range(3, 7)],
            "tfrecord",
            even=5000,
        )


def test_what_has_been_divided_is_not_divided_again(folder, size):
    files = from_files(str(folder / "*.tfrecord"), "tfrecord").map(tf.strings.to_number)
    for dataset in (
        keras_hvd.data.distribute(files, 12 * size, mode="off").unbatch(),
        keras_hvd.data.shard(files.shuffle(10)),
    ):
        assert sorted(of_all_ranks(epoch(dataset))) == list(range(10_000))


def test_what_is_wrong_on_rank_0_is_an_error_on_all(folder):
    with pytest.raises(ValueError, match="no file matches '.*none'"):
        from_files(str(folder / "none"), "tfrecord")
    with pytest.raises(ValueError, match=r"0.tfrecord' is there twice"):
        from_files([str(folder / "*.tfrecord"), str(folder / "0.*")], "tfrecord")
    with pytest.raises(ValueError, match="is a folder"):
        from_files(str(folder), "tfrecord")


@pytest.mark.usefixtures("several_ranks")
def test_arguments_that_differ_are_an_error_on_all(folder, rank, size):
    pattern = str(folder / "*.tfrecord")
    last = size - 1
    with pytest.raises(
        keras_hvd.MismatchError, match=f"seed is 0 on rank 0, 1 on rank {last}"
    ):
        from_files(pattern, "tfrecord", seed=int(rank == last))
    with pytest.raises(
        keras_hvd.MismatchError, match="reader is 'tfrecord' on rank 0, 'text'"
    ):
        from_files(pattern, "tfrecord" if rank < last else "text")


@pytest.mark.usefixtures("several_ranks")
def test_a_rank_that_sees_other_files_is_an_error_on_all(folder, rank, size, tmp_path):
    """Relative names, which mean something else in another folder."""
    before = os.getcwd()
    here = folder
    if rank == size - 1:
        here = tmp_path
        for file in folder.glob("*.tfrecord"):
            (tmp_path / file.name).write_bytes(file.read_bytes() + b"more")
    os.chdir(here)
    try:
        with pytest.raises(
            keras_hvd.MismatchError,
            match=f"rank {size - 1} does not see the files of rank 0: .*bytes there",
        ):
            from_files("*.tfrecord", "tfrecord")
        for file in tmp_path.iterdir():
            file.unlink()
        with pytest.raises(keras_hvd.MismatchError, match="No such file"):
            from_files("*.tfrecord", "tfrecord")
    finally:
        os.chdir(before)
