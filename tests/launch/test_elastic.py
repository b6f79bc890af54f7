"""khvdrun --min-np: what is left of a job goes on, and its weights are right."""

import json
import re
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest
from elastic_jobs import COUNTS, SCRIPT, check, check_weights


@pytest.fixture
def train(khvdrun, tmp_path):
    """Runs the script on four ranks; returns how khvdrun ended, and what ranks saw."""

    def run(*words, minimum=2, script=SCRIPT, **variables):
        options = [each for each in words if str(each).startswith("--")]
        if AGAIN[0] in options:
            options, words = [*words[:3], *options[1:]], words[3:]
        values = [each for each in words if each not in options]
        ended = khvdrun.run(
            *("-np", 4, "--min-np", minimum, *options),
            *(sys.executable, script, tmp_path, *values),
            timeout=200,
            env=variables,
        )
        seen = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
        return ended, sorted(seen, key=lambda each: each["rank"])

    return run


def test_the_others_go_on(train, one_process, tmp_path):
    """Without the one whom all would have met."""
    ended, seen = train(0, "7")
    assert ended.returncode == 0, ended.stderr
    check(seen, one_process, [4, 3])
    assert "rank 0 (process " in ended.stderr
    assert "was killed by signal 9 (SIGKILL); 3 ranks are left\n" in ended.stderr
    assert "the job goes on with 3 of 4 ranks after " in ended.stderr
    # The state is whole, and may be saved.
    saved = keras.saving.load_model(tmp_path / "model.keras").get_weights()
    np.testing.assert_allclose(saved[0], one_process[0], rtol=0, atol=1e-9)


def test_one_rank_after_another_fails_by_mistakes_and_kills(train, one_process):
    ended, seen = train(1, "3!", 0, "9")
    assert ended.returncode == 0, ended.stderr
    check(seen, one_process, [4, 3, 2])
    assert "ValueError: a mistake of this rank alone" in ended.stderr


def test_two_die_at_once(train, one_process):
    ended, seen = train(0, "5", 2, "5")
    assert ended.returncode == 0, ended.stderr
    # The second may die before all have begun with the job of three.
    assert [each["sizes"][-1] for each in seen] == [2, 2]
    check_weights(seen, one_process)


def test_another_one_dies_while_they_join(train, one_process):
    """They do not wait for it until the time for joining is over."""
    ended, seen = train(1, "5", 2, "5?")
    assert ended.returncode == 0, ended.stderr
    check(seen, one_process, [4, 2])
    (seconds,) = re.findall(r"goes on with 2 of 4 ranks after (\S+) s", ended.stderr)
    assert float(seconds) < 50


def test_one_that_is_stopped_is_killed(train, one_process):
    ended, seen = train(3, "6-", "--elastic-timeout=15")
    assert ended.returncode == 0, ended.stderr
    check(seen, one_process, [4, 2])
    assert (
        "has not left the job that failed for 15 s (--elastic-timeout)" in ended.stderr
    )


AGAIN = "--blacklist-cooldown-range", "0", "0"


def test_one_that_died_is_started_again_and_joins(train, one_process):
    ended, seen = train(*AGAIN, 1, "5", MEMBERS="4")
    assert ended.returncode == 0, ended.stderr
    assert [each["started as"] for each in seen] == [0, 2, 3, 1]
    assert [each["sizes"] for each in seen] == [[4, 3, 4]] * 3 + [[4]]
    check_weights(seen, one_process)
    assert "3 ranks are left; it is started again after 0 s\n" in ended.stderr
    assert "those that were started as 0, 2, 3, 1; rank 1 is new\n" in ended.stderr


def test_those_that_are_too_few_wait_for_it(train, one_process):
    """Without the one whom all would have met."""
    ended, seen = train(*AGAIN, 0, "5", minimum=4)
    assert ended.returncode == 0, ended.stderr
    assert [each["sizes"] for each in seen] == [[4, 4]] * 3 + [[4]]
    check_weights(seen, one_process)
    assert "3 ranks wait for others, at most 600 s (--elastic-timeout)" in ended.stderr


def test_one_that_joined_may_die_as_any_other(train, one_process):
    ended, seen = train(*AGAIN, 2, "5", "2new", "17", 3, "17!", MEMBERS="4")
    assert ended.returncode == 0, ended.stderr
    assert [each["started as"] for each in seen][:2] == [0, 1]
    check_weights(seen, one_process)


def test_one_that_has_not_joined_by_the_end_is_killed(train, one_process):
    ended, seen = train(*AGAIN, 3, "5", "3new", "never")
    assert ended.returncode == 0, ended.stderr
    check(seen, one_process, [4, 3])
    assert "had not joined, since the training ends: it is killed" in ended.stderr


def test_one_that_ends_at_each_start_is_given_up(train):
    ended, seen = train(*AGAIN, 3, "5", "3new", "start", minimum=4, **COUNTS)
    assert ended.returncode == 128 + signal.SIGKILL
    assert seen == []
    failed = "ended with exit code 3 before it had joined; it is "
    assert ended.stderr.count(failed + "started again after 0 s") == 2
    assert failed + "not started again, after 3 such ends" in ended.stderr
    assert "the job does not go on: 3 are fewer than --min-np 4" in ended.stderr


def test_nobody_is_waited_for_in_vain(khvdrun, tmp_path):
    options = ("--min-np", 4, AGAIN[0], 600, 600, "--elastic-timeout=5")
    words = (sys.executable, SCRIPT, tmp_path, 3, "5")
    ended = khvdrun.run("-np", 4, *options, *words, env=COUNTS)
    assert ended.returncode == 128 + signal.SIGKILL
    assert "does not go on: 3 are fewer than --min-np 4, for 5 s" in ended.stderr


def test_one_that_is_stopped_as_it_joins_is_killed(train):
    """The others do not wait until the time for joining is over."""
    words = *AGAIN, 3, "5", "3new", "once", "--elastic-timeout=15"
    ended, seen = train(*words, MEMBERS="4", **COUNTS)
    assert ended.returncode == 0, ended.stderr
    assert [each["sizes"] for each in seen] == [[4, 3, 3, 4]] * 3 + [[4]]
    assert ended.stderr.count(" does not join the others: it is killed\n") == 1


def test_one_that_dies_as_soon_as_it_has_joined_is_waited_for(train, one_process):
    """What the others say of that job, which came too late, counts no more.

    Nor does its failure: they have made no step in it, and save the model.
    """
    words = *AGAIN, 3, "5", "3new", "joined"
    ended, seen = train(*words, minimum=4, MEMBERS="4")
    assert ended.returncode == 0, ended.stderr
    check_weights(seen, one_process)
    assert {each["sizes"][-1] for each in seen} == {4}
    assert {size for each in seen for size in each["sizes"]} == {4}
    assert "goes on with 4 of 4 ranks" in ended.stderr


def test_one_with_another_state_fails_alone(train):
    ended, seen = train(*AGAIN, 1, "5", "1new", "other", MEMBERS="4", **COUNTS)
    assert ended.returncode == 0, ended.stderr
    assert [each["sizes"] for each in seen] == [[4, 3, 3, 4]] * 3 + [[4]]
    assert (
        "ValueError: the state of rank 3 differs from rank 0's: value of a rank here "
        "is nothing there"
    ) in ended.stderr


def test_training_does_not_begin_anew_when_all_are_gone_that_had_its_state(
    khvdrun, tmp_path
):
    """The only one dies when another one has joined, before it has sent its state."""
    options = "-np", 1, "--min-np", 1, "--max-np", 2
    program = sys.executable, SCRIPT, tmp_path, 0, "0^"
    ended = khvdrun.run(*options, *program, env={**COUNTS, "MEMBERS": "2"})
    assert ended.returncode == 1
    assert [*tmp_path.glob("*.json")] == []
    assert "the ranks that had the state of this training have died" in ended.stderr


def test_the_limit_counts_changes(train):
    """Of two that end, the first one is replaced, and the second one is to blame."""
    ended, seen = train(
        *(*AGAIN, 3, "5", 2, "17", "--reset-limit=2"), MEMBERS="4", **COUNTS
    )
    assert ended.returncode == 128 + signal.SIGKILL
    assert seen == []
    assert ended.stderr.count("khvdrun: the job goes on with ") == 2
    assert "rank 2 has ended, and --reset-limit 2 is reached" in ended.stderr
    assert "khvdrun: rank 2 (process " in ended.stderr.splitlines()[-1]
    assert "failed first: it was killed by signal 9" in ended.stderr.splitlines()[-1]


def test_none_is_started_again_once_the_limit_is_reached(train):
    ended, seen = train(*AGAIN, 3, "5", "3new", "never", "--reset-limit=1", **COUNTS)
    assert ended.returncode == 0, ended.stderr
    assert [each["sizes"] for each in seen] == [[4, 3]] * 3
    assert "since --reset-limit 1 is reached" in ended.stderr


TWO_FUNCTIONS = """
import os, signal
import keras_hvd
keras_hvd.init()

@keras_hvd.elastic.run
def first(state):
    state.step += 1

@keras_hvd.elastic.run
def second(state):
    if keras_hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    keras_hvd.barrier()

state = keras_hvd.elastic.ObjectState(step=0)
first(state)
second(state)
"""


def test_one_that_comes_in_a_second_function_is_refused(train, tmp_path):
    """It would train what the others have trained, while they train something else."""
    script = tmp_path / "script.py"
    script.write_text(TWO_FUNCTIONS)
    ended, _ = train(*AGAIN, script=script, minimum=4)
    assert ended.returncode == 128 + signal.SIGKILL
    why = "rank 1 calls function 1 of elastic.run, and the others call function 2"
    assert ended.stderr.count(f"RankFailedError: the job does not go on: {why}") == 3
    assert "the job does not go on: 3 are fewer than --min-np 4" in ended.stderr


def test_an_interrupt_ends_those_that_wait_for_others(khvdrun, tmp_path):
    options = ("--min-np", 4, AGAIN[0], 600, 600)
    words = (sys.executable, SCRIPT, tmp_path, 3, "6")
    with khvdrun.start("-np", 4, *options, *words, env=COUNTS) as running:
        for line in running.stderr:
            if "3 ranks wait for others" in line:
                break
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize(
    "words, why",
    [
        ((2, "4"), "3 are fewer than --min-np 4"),
        ((2, "4", "--reset-limit=0"), "--reset-limit 0 is reached"),
    ],
)
def test_too_few_are_the_end(train, words, why):
    minimum = 2 if "--reset-limit=0" in words else 4
    ended, seen = train(*words, minimum=minimum, **COUNTS)
    assert ended.returncode == 128 + signal.SIGKILL
    assert seen == []
    assert f"the job does not go on: rank 2 has ended, and {why}" in ended.stderr
    assert ended.stderr.rstrip().endswith("it was killed by signal 9 (SIGKILL)")


NOT_ELASTIC = """
import os, signal
import tensorflow as tf
import keras_hvd
keras_hvd.init()
if keras_hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
keras_hvd.allreduce(tf.ones(3))
"""


def test_a_script_that_does_not_go_on_ends(train, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(NOT_ELASTIC)
    ended, _ = train(script=script)
    assert ended.returncode == 128 + signal.SIGKILL
    assert "was killed by signal 9 (SIGKILL)" in ended.stderr.splitlines()[-1]


def test_an_interrupt_ends_it(khvdrun, tmp_path):
    words = (sys.executable, SCRIPT, tmp_path, 3, "6-")
    with khvdrun.start("-np", 4, "--min-np", 2, *words, env=COUNTS) as running:
        for line in running.stderr:
            if "3 ranks are left" in line:
                break
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize(
    "options, why",
    [
        (("--min-np", "5"), "--min-np 5 is more than -np 4"),
        (("--min-np", "0"), "'0' is not a number of processes"),
        (("--min-np", "2", "-H", "a:4", "--status", "0"), "name this host first"),
        (("--min-np", "2", "--max-np", "3"), "--max-np 3 is less than -np 4"),
        (("--min-np", "2", "--mpi-args=-x A"), "no mpirun runs underneath"),
        (
            ("--min-np", "2", "-H", "a:4", "--host-discovery-script", "b"),
            "give no -H or --hostfile as well",
        ),
        (("--min-np", "2", "-H", "a:3"), "more processes than the 3 slots given"),
    ],
)
def test_what_is_refused(khvdrun, options, why):
    ended: subprocess.CompletedProcess = khvdrun.run("-np", 4, *options, "true")
    assert ended.returncode == 2
    assert why in ended.stderr
