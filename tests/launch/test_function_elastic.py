"""keras_hvd.run(min_np=): the results of the ranks that a job has at its end."""

import atexit
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

import keras_hvd
from keras_hvd.launch import function
from keras_hvd.launch.function import RankTraceback
from keras_hvd.world import renewal

STEPS = 12


def counting(deeds=(), members=0, end=None):
    """A function that counts in steps; returns where its rank is then.

    `deeds` has pairs of a rank, as it was started, or with "new" if that was later, and
    a function that it calls at step 5. At step 8 all wait until there are as many ranks
    as `members`. At the end they call `end`, and return what that does.
    """
    deeds = dict(deeds)

    # It goes to the ranks by value, unlike functions of this module.
    def count():
        told = renewal.of(os.environ)
        own = f"{told.number}new" if told.is_new else told.number
        keras_hvd.init()
        state = keras_hvd.elastic.ObjectState(step=0)

        @keras_hvd.elastic.run
        def train(state):
            while state.step < STEPS:
                if state.step == 5 and own in deeds:
                    deeds[own]()
                while state.step == 8 and members > keras_hvd.size():
                    keras_hvd.allgather_object(None)
                    state.check_host_updates()
                keras_hvd.allgather_object(state.step)
                state.step += 1
                state.commit()

        train(state)
        place = told.number, keras_hvd.rank(), keras_hvd.size()
        return end() if end else place

    return count


def dying():
    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    return die


def failing(text="a mistake of this rank alone"):
    def fail():
        raise LookupError(text)

    return fail


def test_an_error_after_which_the_job_went_on_is_not_raised():
    """What ended it is."""

    def die_later():
        if keras_hvd.size() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        keras_hvd.allgather_object(None)

    deeds = [(0, die_later), (1, failing())]
    with pytest.raises(keras_hvd.RankFailedError, match="rank 0"):
        keras_hvd.run(counting(deeds), np=2, min_np=1)


def test_ranks_that_fail_give_no_result(capfd):
    deeds = [(0, dying()), (2, failing())]
    found = keras_hvd.run(counting(deeds), np=4, min_np=2)
    # The second one may fail before the others have begun without the first.
    assert found == [(1, 0, 2), (3, 1, 2)]
    err = capfd.readouterr().err
    # Or the second one has failed before it.
    assert re.search(r"was killed by signal 9 \(SIGKILL\); [23] ranks are left\n", err)
    assert "[2] Traceback (most recent call last):\n" in err
    assert "[2] LookupError: a mistake of this rank alone\n" in err


def test_one_that_is_started_again_gives_its_result(capfd):
    again = {"np": 3, "min_np": 2, "cooldown_range": (0, 0)}
    found = keras_hvd.run(counting([(1, dying())], members=3), **again)
    assert found == [(0, 0, 3), (2, 1, 3), (1, 2, 3)]


def test_ranks_that_come_give_results():
    found = keras_hvd.run(counting(members=3), np=1, min_np=1, max_np=3)
    assert [each[1:] for each in found] == [(0, 3), (1, 3), (2, 3)]


def test_a_model_is_trained_on_without_one():
    def train(epochs):
        import keras
        import numpy as np

        number = renewal.of(os.environ).number
        keras_hvd.init()

        class Die(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if (number, epoch) == (1, 2):
                    os.kill(os.getpid(), signal.SIGKILL)

        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
        history = keras_hvd.elastic.fit(
            *(model, lambda: keras_hvd.data.part(np.ones((96, 3)), np.zeros(96))),
            epochs=epochs,
            verbose=0,
            callbacks=[keras_hvd.callbacks.MetricAverage(), Die()],
        )
        return keras_hvd.size(), history.history["loss"], model.get_weights()[1]

    first, second = keras_hvd.run(train, args=(4,), np=3, min_np=2)
    assert first == second
    size, losses, _ = first
    assert (size, len(losses)) == (2, 4)


def test_the_error_after_which_too_few_are_left_is_raised():
    """Not an earlier one, nor those of the ranks that cannot go on without it."""
    deeds = [(2, dying()), (1, failing())]
    with pytest.raises(LookupError, match="of this rank alone") as raised:
        keras_hvd.run(counting(deeds), np=3, min_np=2)
    cause = raised.value.__cause__
    assert isinstance(cause, RankTraceback)
    assert cause.rank == 1
    assert str(cause).endswith("\nLookupError: a mistake of this rank alone")


def test_too_few_are_left_after_a_kill():
    reason = "the job does not go on: rank 1 has ended, and 2 are fewer than --min-np 3"
    with pytest.raises(keras_hvd.RankFailedError, match=reason):
        keras_hvd.run(counting([(1, dying())]), np=3, min_np=3)


def test_an_error_that_the_job_survived_is_not_raised_later():
    def die_later():
        if keras_hvd.size() < 3:
            os.kill(os.getpid(), signal.SIGKILL)

    deeds = [(0, failing()), (1, die_later)]
    reason = "rank 1 has ended, and 1 are fewer than --min-np 2"
    with pytest.raises(keras_hvd.RankFailedError, match=reason):
        keras_hvd.run(counting(deeds), np=3, min_np=2)


def test_nobody_is_left():
    with pytest.raises(keras_hvd.RankFailedError, match="rank 0 on .* ended before"):
        keras_hvd.run(counting([(0, dying())]), np=1, min_np=1)


def test_an_error_on_all_ranks_is_raised():
    with pytest.raises(LookupError, match="of all"):
        keras_hvd.run(failing("of all"), np=2, min_np=1)


def test_a_result_that_cannot_be_pickled_is_an_error():
    def generate():
        return (number for number in range(3))

    with pytest.raises(TypeError, match="the result cannot be pickled: .*generator"):
        keras_hvd.run(counting(end=generate), np=2, min_np=2)


def test_says_so_if_the_call_cannot_be_pickled(capfd):
    with pytest.raises(TypeError, match="run: the function, .*cannot be pickled"):
        keras_hvd.run(counting(end=select.poll().poll), np=2, min_np=2)
    assert capfd.readouterr() == ("", "")


def test_the_function_may_change_the_environment():
    """Which tells the places of those that have come later."""

    def change():
        os.environ.clear()
        return keras_hvd.rank()

    count = counting([(0, dying())], members=3, end=change)
    found = keras_hvd.run(count, np=3, min_np=2, cooldown_range=(0, 0))
    assert found == [0, 1, 2]


def test_a_result_counts_although_its_rank_fails_later():
    def fail_later():
        atexit.register(os._exit, 3)
        return keras_hvd.rank()

    assert keras_hvd.run(counting(end=fail_later), np=2, min_np=2) == [0, 1]


def test_one_that_returned_in_an_earlier_job_gives_no_result():
    count = counting()

    def return_early():
        if renewal.of(os.environ).number == 0:
            keras_hvd.init()
            return "early"
        return count()

    found = keras_hvd.run(return_early, np=3, min_np=2)
    assert found == [(1, 0, 2), (2, 1, 2)]


def test_what_is_exited_with_is_an_error():
    with pytest.raises(RuntimeError, match=r"the function exited: SystemExit\("):
        keras_hvd.run(counting(end=sys.exit), np=2, min_np=1)


def test_passes_options_on(tmp_path, capfd):
    deeds = [(1, dying())]
    with pytest.raises(keras_hvd.RankFailedError, match="--reset-limit 0 is reached"):
        keras_hvd.run(
            counting(deeds),
            num_proc=2,
            min_num_proc=1,
            reset_limit=0,
            elastic_timeout=5,
            network_interface="no0",
            output_filename=str(tmp_path),
        )
    assert (tmp_path / "rank.1" / "stderr").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_np": 3}, "--min-np 3 is more than -np 2"),
        ({"min_np": 0}, "min_np: '0' is not a number of processes: give 1 or more"),
        ({"min_np": -1}, "min_np: '-1' is not a number of processes: give 1 or more"),
        ({"min_np": 1, "max_np": 1}, "--max-np 1 is less than -np 2"),
        ({"min_np": 1, "max_np": "many"}, "max_np: 'many' is not a number of"),
        ({"min_np": 1, "min_num_proc": 1}, "min_num_proc and min_np mean the same"),
        ({"min_np": 1, "slots": 0}, "slots: '0' is not a whole number from 1"),
        ({"min_np": 1, "slots": -2}, "slots: '-2' is not a whole number from 1"),
        ({"min_np": 1, "reset_limit": -1}, "reset_limit: '-1' is not a whole number"),
        ({"min_np": 1, "cooldown_range": 5}, "cooldown_range: give 2 values, not 5"),
        ({"min_np": 1, "cooldown_range": (1, -2)}, "cooldown_range: '-2' is not a num"),
        ({"min_np": 1, "cooldown_range": (9, 5)}, "the first number of seconds is mor"),
        ({"min_np": 1, "elastic_timeout": -1}, "elastic_timeout: '-1' is not a number"),
        ({"max_np": 3}, "--max-np is for jobs that go on .*: say with --min-np how"),
        ({"slots": 2}, "--slots is for jobs that go on .*: say with --min-np how"),
        ({"min_np": 1, "hosts": "a:0"}, "'a:0' does not give a number of slots, 1 or"),
        ({"min_np": 1, "hosts": "a"}, "-np 2 asks for more processes than the 1 slots"),
        ({"min_np": 1, "mpi_args": "-x A"}, "no mpirun runs underneath"),
        (
            {"min_np": 1, "hosts": "a:2", "host_discovery_script": "hosts"},
            "--host-discovery-script tells which hosts there are: give no -H",
        ),
    ],
)
def test_refuses_wrong_arguments_before_anything_starts(arguments, message, capfd):
    with pytest.raises(ValueError, match=message):
        keras_hvd.run(print, ("never",), np=2, **arguments)
    assert capfd.readouterr() == ("", "")


def test_without_hosts_there_is_no_job(capfd):
    with pytest.raises(keras_hvd.RankFailedError, match="ranks 0, 1, without a word"):
        keras_hvd.run(
            *(print, ("never",)),
            np=2,
            min_np=1,
            host_discovery_script="exit 3",
            start_timeout=5,
        )
    assert "its exit code was 3" in capfd.readouterr().err


WAITING = """
    import os, signal
    import keras_hvd, keras_hvd.launch.function

    def wait():
        keras_hvd.init()
        print(os.getpid())
        while True:
            signal.pause()

    keras_hvd.launch.function._PATIENCE_SECONDS = 60
    try:
        keras_hvd.run(wait, np=2, min_np=1)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    """


@pytest.fixture
def waiting(khvdrun, tmp_path):
    """A script whose ranks wait for ever, and what tells that they have ended."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(WAITING))
    environment = {**os.environ, "KERAS_HVD_TEST_MARK": khvdrun.mark}
    with contextlib.ExitStack() as opened:
        process = opened.enter_context(
            subprocess.Popen(
                [sys.executable, script],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        opened.callback(process.kill)
        lines = [process.stdout.readline() for _ in range(2)]
        ends = [os.pidfd_open(int(line.partition("] ")[2])) for line in lines]
        for end in ends:
            opened.callback(os.close, end)
        yield process, ends


def test_ctrl_c_ends_all(waiting):
    process, ends = waiting
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n"
    # No rank is left by the time that `run` has raised.
    assert select.select(ends, [], [], 0)[0] == ends
    assert process.wait(30) == 0


def test_the_job_dies_with_its_caller(khvdrun, waiting):
    process, ends = waiting
    process.kill()
    khvdrun.wait_until_gone()
    assert select.select(ends, [], [], 0)[0] == ends


def test_an_error_begins_with_somebody_where_nobody_is_known_to_have_ended():
    """As if all ranks came, and the last that ended was one that came later."""
    exchange = SimpleNamespace(lost={}, hosts={0: "a", 1: "b"}, is_late=False)
    said = str(function._failure([], 1, exchange))
    assert said.startswith("a rank ended before the function had returned; khvdrun ")
