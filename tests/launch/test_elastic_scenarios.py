"""What jobs that change must stand, as users of Horovod's elastic jobs know it.

The scripts need no framework.
"""

import json
import sys

import pytest

AGAIN = "--blacklist-cooldown-range", "0", "0"
BEGIN = """
import json, os, signal, sys
from pathlib import Path
import keras_hvd
from keras_hvd.world.renewal import of

folder, told = Path(sys.argv[1]), of(os.environ)
number, is_new = told.number, told.is_new

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def say(**seen):
    name = f"{keras_hvd.rank()}.json"
    (folder / name).write_text(json.dumps({"number": number, **seen}))

"""


@pytest.fixture
def run(khvdrun, tmp_path):
    """Runs a script on four ranks; returns how khvdrun ended, and what ranks said."""

    def run(script, *options, minimum=2, ranks=4):
        options = ("-np", ranks, "--min-np", minimum, *options)
        command = sys.executable, "-c", BEGIN + script, tmp_path
        ended = khvdrun.run(*options, *command)
        said = [
            json.loads(each.read_text()) for each in sorted(tmp_path.glob("*.json"))
        ]
        return ended, said

    return run


EARLY = """
keras_hvd.init()
place = keras_hvd.rank(), keras_hvd.size(), keras_hvd.local_rank()
try:
    given = keras_hvd.broadcast_object(number)
except keras_hvd.NotInitializedError as error:
    given = str(error)

@keras_hvd.elastic.run
def train(state):
    if state.step == 0:
        state.step = 1
        state.commit()
        if number == 1:
            die()
        keras_hvd.allgather_object(None)
    while keras_hvd.size() < int(sys.argv[2]):
        keras_hvd.allgather_object(None)
        state.check_host_updates()
    say(place=place, given=given, there=keras_hvd.broadcast_object(number))

train(keras_hvd.elastic.ObjectState(step=0))
"""


@pytest.fixture
def run_early(run):
    return lambda size, *options: run(f"sys.argv[2:] = ['{size}']\n{EARLY}", *options)


def test_a_rank_that_comes_learns_its_place_before_and_gets_nothing_wrong(run_early):
    """What it has made of a rank 0 of one would be another's file, log or GPU."""
    ended, said = run_early(4, *AGAIN)
    assert ended.returncode == 0, ended.stderr
    assert [each["number"] for each in said] == [0, 2, 3, 1]
    # Its local rank is that of its slot, and of its GPU.
    assert [each["place"] for each in said] == [
        [0, 4, 0],
        [2, 4, 2],
        [3, 4, 3],
        [3, 4, 1],
    ]
    for each in said:
        assert each["given"].startswith(
            "keras_hvd.broadcast_object() comes before the function of elastic.run"
        )
        assert each["there"] == 0


def test_ranks_that_are_all_there_may_talk_before(run_early):
    ended, said = run_early(3)
    assert ended.returncode == 0, ended.stderr
    assert [each["given"] for each in said] == [0, 0, 0]


SETS = """
keras_hvd.init(process_sets=[keras_hvd.ProcessSet([0, 1])])
"""


def test_process_sets_at_the_start_are_refused_by_all(run):
    """A rank that comes could not add them, and would end."""
    ended, _ = run(SETS, *AGAIN)
    assert ended.returncode == 1
    assert "add_process_set() comes before the function of elastic.run" in ended.stderr


RESET = """
keras_hvd.init()
state = keras_hvd.elastic.ObjectState(step=0)
resets = []

def reset():
    resets.append(len(keras_hvd.allgather_object(number)))

@keras_hvd.elastic.run
def train(state):
    if state.step == 0:
        state.step = 1
        state.commit()
        if number == 1:
            die()
        keras_hvd.allgather_object(None)
    while keras_hvd.size() < 4:
        keras_hvd.allgather_object(None)
        state.check_host_updates()
    say(resets=resets)

state.register_reset_callbacks([reset])
train(state)
"""


def test_reset_callbacks_run_on_all_ranks_of_a_later_job(run):
    """So a collective in one, such as in a `fit`, waits for nobody in vain."""
    ended, said = run(RESET, *AGAIN)
    assert ended.returncode == 0, ended.stderr
    assert [each["resets"] for each in said] == [[3, 4]] * 3 + [[4]]


def test_a_reset_callback_that_raises_ends_the_job(run):
    """It would raise in each later job too."""
    script = RESET.replace(
        "    resets.append", "    raise ValueError('no rate')\n    #"
    )
    ended, said = run(script, *AGAIN)
    assert ended.returncode == 1
    assert said == []
    assert "ValueError: no rate" in ended.stderr
    assert "failed first: it ended with exit code 1" in ended.stderr.splitlines()[-1]


IN_SYNC = """
keras_hvd.init()

class Count(keras_hvd.elastic.ObjectState):
    def broadcast(self, root_rank):
        if self.step and number == 2:
            die()
        super().broadcast(root_rank)

@keras_hvd.elastic.run
def train(state):
    while state.step < 4:
        if (state.step, number) == (2, 1):
            die()
        keras_hvd.allgather_object(None)
        state.step += 1
        state.commit()
    say(step=state.step, size=keras_hvd.size())

train(Count(step=0))
"""


def test_a_death_while_states_are_synchronized_is_one_like_others(run):
    """The job that has just begun is followed by another one."""
    ended, said = run(IN_SYNC)
    assert ended.returncode == 0, ended.stderr
    assert said == [{"number": n, "step": 4, "size": 2} for n in (0, 3)]


ALL_RAISE = """
keras_hvd.init()

@keras_hvd.elastic.run
def train(state):
    keras_hvd.allgather_object(None)
    raise ValueError("on all ranks")

train(keras_hvd.elastic.ObjectState())
"""


@pytest.mark.parametrize("options", [(), AGAIN])
def test_an_error_on_all_ranks_ends_the_job(run, options):
    ended, _ = run(ALL_RAISE, *options)
    assert ended.returncode == 1
    assert "ValueError: on all ranks" in ended.stderr
    assert "failed first: it ended with exit code 1" in ended.stderr.splitlines()[-1]


TWICE = """
keras_hvd.init()
(folder / "starts").open("a").write("+")

@keras_hvd.elastic.run
def train(state):
    starts = (folder / "starts").read_text()
    while (starts, keras_hvd.size()) != ("++++", 2):
        if (number, keras_hvd.size()) == (1, 2):
            die()
        keras_hvd.allgather_object(None)
        state.check_host_updates()
    say()

train(keras_hvd.elastic.ObjectState())
"""


def test_a_rank_that_dies_again_is_waited_for_twice_as_long(run):
    cooldown = "--blacklist-cooldown-range", "0.1", "10"
    ended, said = run(TWICE, *cooldown, minimum=1, ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert [each["number"] for each in said] == [0, 1]
    assert "is started again after 0.1 s" in ended.stderr
    assert "is started again after 0.2 s" in ended.stderr


LISTED = """
import time
keras_hvd.init()
listed = folder / "listed"

def wait_for(state, size, hosts):
    if keras_hvd.rank() == 0:
        (folder / "new").write_text(hosts)
        (folder / "new").rename(listed)
    while keras_hvd.size() != size:
        keras_hvd.allgather_object(None)
        state.check_host_updates()

@keras_hvd.elastic.run
def train(state):
    state.sizes = [*state.sizes, keras_hvd.size()]
    if state.step == 0:
        wait_for(state, 3, "localhost:3")
        state.step = 1
        state.commit()
    if state.step == 1:
        wait_for(state, 2, "localhost:2")
        state.step = 2
        state.commit()
    say(sizes=state.sizes)

train(keras_hvd.elastic.ObjectState(sizes=[], step=0))
"""


def test_slots_of_this_host_come_and_leave(run, tmp_path):
    (tmp_path / "listed").write_text("localhost:2")
    script = f"cat {tmp_path}/listed"
    options = "--max-np", 4, "--host-discovery-script", script
    ended, said = run(LISTED, *options, ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert [each["sizes"] for each in said] == [[2, 3, 2]] * 2
    assert "rank 2 leaves: localhost is not listed any more" in ended.stderr
