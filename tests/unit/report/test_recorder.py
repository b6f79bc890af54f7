"""What a rank records is of one job, and a later job of the process begins without."""

import keras_hvd
from keras_hvd.recording import files, rank_records, recorder


def test_nothing_is_recorded_of_a_later_job_without_a_recording(tmp_path):
    rank_records.create(tmp_path / files.RANKS, 1)
    (tmp_path / files.SCALING).write_text("meet")
    keras_hvd.init()
    recorder.start(str(tmp_path), 0, 1, 0, [], None)
    assert recorder.current().folder == tmp_path
    assert recorder.scaling() == "meet"
    keras_hvd.shutdown()
    keras_hvd.init()
    assert recorder.current() is None
    # Or its gradients would not be reduced.
    assert recorder.scaling() == ""
    [record] = rank_records.read(tmp_path / files.RANKS)
    assert record.rank == 0
