"""A timeline of a running job, turned on and off, is a file that viewers take."""

import json
import time
from collections import defaultdict

import pytest
import tensorflow as tf

import keras_hvd
from keras_hvd.timeline import summary

# The time that the last rank computes longer than the others.
LATE_SECONDS = 0.1


@pytest.fixture
def path(tmp_path_factory, rank):
    """A file of rank 0's, which all ranks know."""
    folder = tmp_path_factory.mktemp("timeline") if rank == 0 else None
    return keras_hvd.broadcast_object(folder, 0) / "timeline.json"


def rows(path):
    """For each tensor the names of its spans, in the order of their beginnings."""
    events = json.loads(path.read_text())
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    spans = defaultdict(list)
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        if event["ph"] == "X":
            spans[names[event["tid"]]].append(event["name"])
    return spans


def test_it_has_a_row_for_each_tensor_with_its_phases(path, rank, size):
    keras_hvd.allreduce(tf.ones(3), name="before")
    keras_hvd.barrier()
    keras_hvd.start_timeline(path)
    # Rank 0 has started it.
    keras_hvd.barrier()
    keras_hvd.allreduce(tf.ones([1 << 20]), name="a")
    keras_hvd.allgather(tf.ones([rank + 1]), name="b")
    tf.function(lambda: keras_hvd.broadcast(tf.ones(5), 0, name="c"))()
    keras_hvd.stop_timeline()
    keras_hvd.allreduce(tf.ones(3), name="after")
    if rank != 0:
        return
    found = rows(path)
    assert not [name for name in found if "before" in name or "after" in name]
    for tensor, kind in {"a": "ALLREDUCE", "b": "ALLGATHER", "c": "BROADCAST"}.items():
        (spans,) = [spans for name, spans in found.items() if name.endswith(tensor)]
        assert spans[:3] == [f"NEGOTIATE_{kind}", "QUEUE", f"SHARED_MEMORY_{kind}"]
        assert set(spans[3:]) <= {
            *("COPY_IN", "WAIT_FOR_RANKS", "EXCHANGE", "REDUCE", "COPY_OUT")
        }
        if tensor == "a":
            assert "REDUCE" in spans
            if keras_hvd.local_size() > 1:
                assert {"COPY_IN", "COPY_OUT"} <= set(spans)


def test_the_summary_names_the_rank_that_came_last(path, rank, size, several_ranks):
    # Another rank that has no core for as long comes last itself.
    for _ in range(5):
        come_late(path, rank, size)
        is_right = False
        if rank == 0:
            with open(path) as lines:
                found = summary.read(lines)
            waits = {other: spans.covered() for other, spans in found.waits.items()}
            is_right = max(waits, key=waits.get) == size - 1
        if keras_hvd.broadcast_object(is_right, 0):
            break
    if rank != 0:
        return
    assert found.size == size
    assert max(waits, key=waits.get) == size - 1
    assert waits[size - 1] > 5 * LATE_SECONDS * 1e6 / 2
    assert f"waited most for rank {size - 1}" in summary.text(found)


def come_late(path, rank, size):
    """Records a timeline in which the last rank comes late."""
    keras_hvd.start_timeline(path, mark_cycles=True)
    keras_hvd.barrier()
    for _ in range(5):
        keras_hvd.barrier()
        if rank == size - 1:
            time.sleep(LATE_SECONDS)
        keras_hvd.allreduce(tf.ones(10), name="late")
    keras_hvd.stop_timeline()


def test_only_some_ranks_may_start_and_stop_it(path, rank, size):
    if rank == size - 1:
        keras_hvd.start_timeline(path)
    keras_hvd.allreduce(1.0)
    keras_hvd.barrier()
    if rank == size - 1:
        keras_hvd.stop_timeline()
    keras_hvd.barrier()
    assert path.exists() == (size == 1)


def test_what_is_wrong_raises_on_rank_0_and_stops_nobody(path, rank):
    wrong = path.parent / "missing" / "timeline.json"
    if rank == 0:
        with pytest.raises(TypeError, match="not int"):
            keras_hvd.start_timeline(3)
        with pytest.raises(ValueError, match="missing/timeline.json' cannot be"):
            keras_hvd.start_timeline(wrong)
        keras_hvd.start_timeline(path)
        with pytest.raises(keras_hvd.MismatchError, match="is being written to"):
            keras_hvd.start_timeline(path.with_suffix(".other"))
        keras_hvd.stop_timeline()
        assert not path.with_suffix(".other").exists()
    assert keras_hvd.allreduce(1.0) == 1.0
