"""Parts of the processes that were started are jobs of their own: init(comm=...)."""

import json
import re
import sys
from pathlib import Path

import pytest

# TensorFlow takes long to import.
WITHOUT_TENSORFLOW = f"""
import os, sys
sys.path.append({str(Path(__file__).parent / "ranks")!r})
from allreduce_loop import allreduce
import keras_hvd
"""

PARTS = f"""
import json, os, sys
sys.path.append({str(Path(__file__).parent / "ranks")!r})
import mixed
import numpy as np
import keras_hvd
started_as = int(os.environ["KERAS_HVD_RANK"])
found = []
for parts in json.loads(sys.argv[1]):
    (own,) = [each for each in parts if started_as in each]
    keras_hvd.init(comm=own)
    # Each part has numbers of its own.
    mixed.run(mixed.Collective(
        mixed.ALLREDUCE, "a", np.dtype(np.int64), own, len(own), len(own), [1001]))
    order = keras_hvd.allgather_object(started_as)
    found.append([keras_hvd.rank(), keras_hvd.size(), keras_hvd.local_rank(),
                  keras_hvd.local_size(), order])
    keras_hvd.shutdown()
print(json.dumps([started_as, found]), flush=True)
"""


def test_parts_are_jobs_of_their_own(khvdrun):
    divisions = [
        [[0, 2], [1, 3]],
        # In another order, and one alone.
        [[3, 1, 0], [2]],
        [[3, 2, 1, 0]],
        [[0, 1, 2, 3]],
    ]
    ended = khvdrun.run(
        "-np", 4, "--no-prefix", sys.executable, "-c", PARTS, json.dumps(divisions)
    )
    assert ended.returncode == 0, ended.stderr
    found = dict(map(json.loads, ended.stdout.splitlines()))
    for rank in range(4):
        expected = []
        for parts in divisions:
            (own,) = [each for each in parts if rank in each]
            place = [own.index(rank), len(own)]
            expected.append([*place, *place, own])
        assert found[rank] == expected


JOIN = """
import ast, os, sys
import keras_hvd
lists = ast.literal_eval(sys.argv[1])
own = lists[int(os.environ["KERAS_HVD_RANK"])]
if own is not None:
    keras_hvd.init(comm=own)
    keras_hvd.barrier()
"""


@pytest.mark.parametrize(
    ("lists", "failing", "reason"),
    [
        pytest.param(
            [[0, 1], [1, 2], [2, 0]],
            {0, 1, 2},
            ": a rank is in one part, whose ranks all give the same list",
            id="overlap",
        ),
        pytest.param(
            [[0, 1, 2], [1, 0, 2], [0, 1, 2]],
            {0, 1, 2},
            "rank 1 gave comm=[1, 0, 2]",
            id="other-orders",
        ),
        pytest.param(
            [[1, 2], None, None],
            {0},
            "comm=[1, 2] lacks this process: this process was started as rank 0 of 3",
            id="not-in-it",
        ),
        pytest.param(
            [[0, 3], None, None],
            {0},
            "comm=[0, 3] has rank 3, but this process was started as rank 0 of 3",
            id="no-such-rank",
        ),
        pytest.param(
            [[0, 0, 1], None, None],
            {0},
            "comm=[0, 0, 1] has rank 0 twice",
            id="twice",
        ),
        pytest.param(
            [[0, 1], None, None],
            {0},
            "rank 0 waited 10 s, and of the ranks [0, 1] of its comm 1 did not come",
            id="missing",
        ),
    ],
)
def test_what_is_no_division_is_an_error(khvdrun, lists, failing, reason):
    ended = khvdrun.run(
        *("-np", 3, "--start-timeout", 10, "--term-after", 30),
        *(sys.executable, "-c", JOIN, repr(lists)),
    )
    assert ended.returncode == 1
    said = re.findall(r"^\[(\d)\] (\w+\.)*\w+Error: (.*)$", ended.stderr, re.MULTILINE)
    assert {int(rank) for rank, *_ in said} == failing, ended.stderr
    assert all(reason in text for *_, text in said), ended.stderr


def test_a_part_lives_on_when_another_one_fails(khvdrun, tmp_path):
    program = """
started_as = int(os.environ["KERAS_HVD_RANK"])
keras_hvd.init(comm=[0, 1] if started_as < 2 else [2, 3])
try:
    # Rank 1 may have its result, and be gone, before rank 0 has it.
    allreduce("first", 1)
    if started_as == 1:
        os._exit(3)
    for step in range(100):
        allreduce("a", 10)
    print(f"{started_as} is done")
except Exception as error:
    print(f"{started_as} raised: {error}")
"""
    ended = khvdrun.run(
        *("-np", 4, "--no-prefix", "--term-after", 30),
        *(sys.executable, "-c", WITHOUT_TENSORFLOW + program),
    )
    assert re.search(
        r"^0 raised: .*rank 1 \(pid \d+ on \S+\) exited with code 3", ended.stdout, re.M
    ), ended.stdout
    done = [line for line in ended.stdout.splitlines() if line.endswith("is done")]
    assert sorted(done) == ["2 is done", "3 is done"]
    assert "khvdrun: rank 1 (process" in ended.stderr


def test_each_part_has_files_of_its_own(khvdrun, tmp_path):
    program = """
started_as = int(os.environ["KERAS_HVD_RANK"])
keras_hvd.init(comm=[0, 2] if started_as % 2 == 0 else [1, 3])
allreduce("a", 10)
"""
    ended = khvdrun.run(
        *("-np", 4, "--timeline-filename", tmp_path / "job.json"),
        *(sys.executable, "-c", WITHOUT_TENSORFLOW + program),
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "job.rank-0.json",
        "job.rank-1.json",
    ]


FIT = """
import os, sys
import keras, numpy as np
import keras_hvd
keras.config.set_floatx("float64")
started_as = int(os.environ.get("KERAS_HVD_RANK", 0))
parts = eval(sys.argv[1])
for number, part in enumerate(parts):
    if started_as in part:
        break
keras_hvd.init(comm=part)
generator = np.random.default_rng(number)
x, y = generator.normal(size=(60, 5)), generator.normal(size=(60, 1))
rank, size = keras_hvd.rank(), keras_hvd.size()
keras.utils.set_random_seed(number)
model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(7, "tanh"),
                          keras.layers.Dense(1)])
model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
model.fit(x[rank::size], y[rank::size], batch_size=12 // size, shuffle=False, epochs=3,
          verbose=0, callbacks=[keras_hvd.callbacks.BroadcastGlobalVariables(0)])
np.savez(os.path.join(sys.argv[2], f"{number}-{rank}.npz"), *model.get_weights())
"""


def test_each_part_trains_as_one_process_does(khvdrun, tmp_path):
    np = pytest.importorskip("numpy")
    for name, parts in (("parts", [[0, 3], [2, 1]]), ("alone", [[1], [0]])):
        (tmp_path / name).mkdir()
        ranks = sum(map(len, parts))
        words = (sys.executable, "-c", FIT, repr(parts), tmp_path / name)
        assert khvdrun.run("-np", ranks, *words).returncode == 0
    for number in range(2):
        expected = np.load(tmp_path / "alone" / f"{number}-0.npz")
        for rank in range(2):
            found = np.load(tmp_path / "parts" / f"{number}-{rank}.npz")
            for each in expected.files:
                np.testing.assert_allclose(
                    found[each], expected[each], rtol=0, atol=1e-9
                )
