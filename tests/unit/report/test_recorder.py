"""A rank's recording is of one job; a later job of the process begins without."""

import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.backends.gradient_reduction import GradientReduction
from keras_hvd.backends.tensorflow.gradients import reduction
from keras_hvd.recording import files, rank_records, recorder


@pytest.fixture
def folder(tmp_path):
    """The recording of a job of `khvdrun --scaling` whose ranks only meet."""
    rank_records.create(tmp_path / files.RANKS, 1)
    (tmp_path / files.SCALING).write_text("meet")
    keras_hvd.init()
    recorder.start(str(tmp_path), 0, 1, 0, [], None)
    return tmp_path


def test_nothing_is_recorded_of_a_later_job_without_a_recording(folder):
    assert recorder.current().folder == folder
    assert recorder.scaling() == "meet"
    keras_hvd.shutdown()
    keras_hvd.init()
    assert recorder.current() is None
    # Or its gradients would not be reduced.
    assert recorder.scaling() == ""
    [record] = rank_records.read(folder / files.RANKS)
    assert record.rank == 0


def test_gradients_are_reduced_in_a_later_job(folder):
    how = GradientReduction(sparse_as_dense=True)
    weight = tf.Variable([[1.0], [2.0]])

    def reduced():
        row, place = tf.constant([[3.0]]), tf.constant([1])
        slices = tf.IndexedSlices(row, place, dense_shape=tf.constant([2, 1]))
        [result] = reduction.reduce(how, "here", [slices], [weight])
        return result

    assert isinstance(reduced(), tf.IndexedSlices)
    keras_hvd.shutdown()
    keras_hvd.init()
    assert reduced().numpy().tolist() == [[0.0], [3.0]]
