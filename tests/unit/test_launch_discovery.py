"""The script that tells which hosts there are: what is said where it does not."""

import os
import select

import pytest

from keras_hvd.exceptions import RendezvousError
from keras_hvd.launch import discovery
from keras_hvd.launch.discovery import Discovery
from keras_hvd.launch.hosts import HostSlots

# What scripts do, and what is said of it.
WRONG = {
    "exit 3": "its exit code was 3",
    "kill -9 $$": "it was killed by signal 9",
    "no-such-program 2>&-": "its exit code was 127",
    ":": "its answer names no host",
    "echo; echo '# none'": "its answer names no host",
    "echo a b": "its answer, line 1: 'b' is not slots=N",
    "echo a; echo b:0": "its answer, line 2: 'b:0' does not give a number of slots",
    "echo a:-1": "its answer, line 1: 'a:-1' does not give a number of slots",
    "echo a:many": "its answer, line 1: 'a:many' does not give a number of slots",
    r"printf '\377\033[2J'": r"\x1b[2J' is not the name of a host",
    "echo '$(reboot)'": "'$(reboot)' is not the name of a host",
}


@pytest.fixture
def ask():
    """Asks once, as khvdrun does in a job; gives the answer, and what is said of it."""

    def ask(asked: Discovery, stops: bool = False):
        asked.start()
        process = asked._started.pid
        if stops:
            asked.stop()
        else:
            while select.select([asked], [], [])[0] and asked.hear():
                pass
        return asked.end(os.waitpid(process, 0)[1])

    return ask


@pytest.mark.parametrize("script", WRONG)
def test_a_wrong_answer_is_explained(ask, script):
    found, said = ask(Discovery(script, 1))
    assert found is None
    assert WRONG[script] in said
    # Nothing that a terminal would obey.
    assert said.isprintable()


@pytest.mark.parametrize("script", ["sleep 1000", "yes"])
def test_one_that_does_not_end_is_not_waited_for(script):
    with pytest.raises(RendezvousError, match=r"after 0\.5 s it has not ended\."):
        Discovery(script, 1).wait_for(1, 0.5)


def test_too_few_slots_are_counted():
    with pytest.raises(RendezvousError) as raised:
        Discovery("echo a; echo b:1", 1).wait_for(3, 2)
    assert str(raised.value) == (
        "--host-discovery-script echo a; echo b:1: 3 slots are wanted, and after 2 s "
        "its hosts have 2 slots. It is to print a host in each line, as node0:4; "
        "--start-timeout gives it longer"
    )


def test_in_a_job_it_is_said_once(ask, tmp_path):
    script = tmp_path / "script"
    asked = Discovery(f". {script}", 2)
    script.write_text("exit 4")
    assert ask(asked) == (None, "its exit code was 4")
    assert ask(asked) == (None, "")
    script.write_text("echo a:b")
    assert "'a:b' does not give" in ask(asked)[1]
    script.write_text("echo a")
    assert ask(asked) == ([HostSlots("a", 2)], "")
    script.write_text("echo a:b")
    assert "'a:b' does not give" in ask(asked)[1]


def test_in_a_job_it_may_take_a_minute(ask):
    asked = Discovery("sleep 1000", 1)
    late = f"it has not ended within {discovery._MOST_SECONDS:g} s"
    assert ask(asked, stops=True) == (None, late)
    # It is asked again.
    assert asked.next_time is not None
