"""keras_hvd.run: the results of the ranks, and no leftovers."""

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

import keras_hvd
from keras_hvd.job import cores
from keras_hvd.launch.function import RankTraceback

# Functions here are nested: those of a module go to the ranks by its name, and a test's
# module has none that they could import.


def python(khvdrun, *arguments: object, **popen) -> subprocess.Popen:
    """Starts a program that the `khvdrun` fixture looks after."""
    environment = {**os.environ, "KERAS_HVD_TEST_MARK": khvdrun.mark}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


def script(folder, text: str):
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_returns_what_each_rank_returned_in_their_order(capfd):
    def place(first, second=0):
        keras_hvd.init()
        print("at work")
        return keras_hvd.rank(), keras_hvd.size(), first, second

    results = keras_hvd.run(place, ("a",), {"second": [1]}, num_proc=3)
    assert results == [(rank, 3, "a", [1]) for rank in range(3)]
    written = capfd.readouterr()
    lines = sorted(written.out.splitlines())
    assert lines == [f"[{rank}] at work" for rank in range(3)]
    note = cores.crowded(3)
    assert written.err == (f"khvdrun: note: {note}\n" if note else "")


def test_a_process_set_of_another_job_is_of_none(capfd):
    """Though this job has a set of the same number."""

    def add(ranks, before=None):
        keras_hvd.init()
        added = keras_hvd.add_process_set(ranks)
        same = keras_hvd.broadcast_object(added)
        assert same.process_set_id == added.process_set_id == 1
        return added, before and before.process_set_id

    [(added, _), _] = keras_hvd.run(add, ([0],), np=2)
    found = keras_hvd.run(add, ([1], added), np=2)
    assert [of_before for _, of_before in found] == [None, None]


def test_ranks_have_the_callers_copy_of_the_package(tmp_path):
    shutil.copytree(
        Path(keras_hvd.__file__).parent,
        tmp_path / "keras_hvd",
        ignore=shutil.ignore_patterns("_native", "__pycache__"),
    )
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import keras_hvd; "
        "print(*keras_hvd.run(lambda: sys.modules['keras_hvd'].__file__))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        env={name: os.environ[name] for name in os.environ if name != "PYTHONPATH"},
        cwd="/",
        capture_output=True,
        text=True,
    )
    found = ended.stdout.strip()
    assert found == str(tmp_path / "keras_hvd" / "__init__.py"), ended.stderr


def test_one_rank_unless_told():
    assert keras_hvd.run(os.getpid) != [os.getpid()]
    assert len(keras_hvd.run(os.getpid)) == 1
    assert len(keras_hvd.run(os.getpid, np=2)) == 2


def test_large_results():
    def fill(count):
        return np.full(count, 7, np.uint8)

    (result,) = keras_hvd.run(fill, (100 << 20,))
    assert result.nbytes == 100 << 20
    assert (result == 7).all()


def test_raises_what_a_rank_raised(capfd):
    def fail_on_rank_1(kind):
        keras_hvd.init()
        if keras_hvd.rank() == 1:
            raise kind("no data")
        keras_hvd.allgather_object("never")

    with pytest.raises(FileNotFoundError, match="no data") as raised:
        keras_hvd.run(fail_on_rank_1, (FileNotFoundError,), np=2)
    cause = raised.value.__cause__
    assert isinstance(cause, RankTraceback)
    assert cause.rank == 1
    assert str(cause).startswith("on rank 1:\nTraceback (most recent call last):\n")
    assert 'raise kind("no data")' in str(cause)
    assert str(cause).endswith("FileNotFoundError: no data")
    assert re.search(r"khvdrun: rank 1 .* failed first", capfd.readouterr().err)


def test_describes_an_exception_that_cannot_be_pickled():
    class Stubborn(Exception):
        def __init__(self, code, text):
            super().__init__(f"{text} ({code})")

    def fail():
        raise Stubborn(3, "no way")

    with pytest.raises(RuntimeError, match=r"Stubborn: no way \(3\)") as raised:
        keras_hvd.run(fail)
    assert raised.value.__cause__.rank == 0


def test_describes_an_exception_that_only_the_rank_knows(tmp_path):
    (tmp_path / "module_of_ranks.py").write_text("class Odd(Exception): pass")

    def fail():
        sys.path.insert(0, str(tmp_path))
        from module_of_ranks import Odd

        raise Odd("not known here")

    with pytest.raises(RuntimeError, match="module_of_ranks.Odd: not known") as raised:
        keras_hvd.run(fail)
    assert 'raise Odd("not known here")' in str(raised.value.__cause__)


def test_describes_an_exception_without_text():
    class Mute(Exception):
        def __str__(self):
            raise ValueError

        def __reduce__(self):
            raise TypeError

    def fail():
        raise Mute

    with pytest.raises(RuntimeError, match=r"Mute: <exception str\(\) failed>"):
        keras_hvd.run(fail)


def test_says_so_if_the_call_cannot_be_pickled(capfd):
    lock = threading.Lock()
    for refused in ({"func": lambda: lock}, {"func": print, "args": (lock,)}):
        with pytest.raises(TypeError, match="run: the function, .*cannot be pickled"):
            keras_hvd.run(**refused)
    with pytest.raises(TypeError, match="func must be a function to call, got 3"):
        keras_hvd.run(3)
    assert capfd.readouterr() == ("", "")


def test_says_so_if_a_result_cannot_be_pickled():
    def generate():
        return (number for number in range(3))

    with pytest.raises(TypeError, match="the result cannot be pickled: .*generator"):
        keras_hvd.run(generate)


def test_an_exit_is_an_error_too():
    with pytest.raises(RuntimeError, match=r"the function exited: SystemExit\(3\)"):
        keras_hvd.run(sys.exit, (3,))


def test_names_the_ranks_that_ended_without_a_word():
    def leave():
        keras_hvd.init()
        if keras_hvd.rank() == 1:
            os._exit(0)

    with pytest.raises(keras_hvd.RankFailedError, match="rank 1 ended before the func"):
        keras_hvd.run(leave, np=2)


def test_says_which_rank_was_killed():
    def die():
        keras_hvd.init()
        if keras_hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        keras_hvd.allgather_object("never")

    with pytest.raises(keras_hvd.RankFailedError, match="rank 1 .*killed by SIGKILL"):
        keras_hvd.run(die, np=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_proc": 0}, "'0' is not a number of processes"),
        ({"np": 2, "num_proc": 2}, "num_proc and np mean the same"),
        ({"np": 2, "hosts": "localhost:1"}, "more processes than the 1 slots"),
        ({"mpi_args": "-x A"}, "no mpirun runs underneath"),
        ({"executable": "/no/python"}, "no such file: '/no/python'"),
    ],
)
def test_refuses_wrong_arguments_before_anything_starts(arguments, message, capfd):
    with pytest.raises(ValueError, match=message):
        keras_hvd.run(print, ("never",), **arguments)
    assert capfd.readouterr() == ("", "")


def test_passes_options_on(tmp_path, capfd):
    def greet():
        print("hello")

    keras_hvd.run(
        greet,
        np=2,
        hosts="localhost:2",
        use_gloo=True,
        verbose=True,
        output_filename=str(tmp_path),
        prefix_output_with_timestamp=True,
    )
    written = capfd.readouterr()
    lines = written.out.splitlines()
    assert [line.rpartition("] ")[2] for line in lines] == ["hello", "hello"]
    assert all(line[:2] == "20" for line in lines)
    assert "without effect here: --gloo" in written.err
    assert "rank 1 ended with exit code 0" in written.err
    assert (tmp_path / "rank.1" / "stdout").read_text() == "hello\n"


SCRIPT = """
    import dataclasses, os, sys
    import keras_hvd

    @dataclasses.dataclass
    class Place:
        rank: int

    class OwnError(Exception):
        pass

    FACTOR = 10

    def place():
        return Place(FACTOR * int(os.environ["KERAS_HVD_RANK"]))

    def fail():
        raise OwnError("own")

    def change():
        rank = os.environ["HOROVOD_RANK"], os.environ["HOROVOD_CROSS_SIZE"]
        os.environ.clear()
        return rank

    print(keras_hvd.run(place, np=2) == [Place(0), Place(10)])
    print(keras_hvd.run(change, np=2) == [("0", "1"), ("1", "1")])
    try:
        keras_hvd.run(fail, np=2)
    except OwnError as error:
        print(error)
    """


@pytest.mark.parametrize("is_file", [True, False])
def test_takes_functions_and_classes_of_a_script_or_a_session(
    khvdrun, tmp_path, is_file
):
    # Read from standard input, it has no source to import, like a notebook's cells.
    source = textwrap.dedent(SCRIPT)
    arguments = [script(tmp_path, SCRIPT)] if is_file else ["-"]
    with python(khvdrun, *arguments, stdin=subprocess.PIPE) as process:
        out, err = process.communicate(None if is_file else source)
    assert process.returncode == 0, err
    assert out == "True\nTrue\nown\n"


def test_shows_output_where_a_notebook_shows_its_own(khvdrun, tmp_path):
    program = """
        import io, sys
        import keras_hvd

        def speak():
            print("out")
            print("err", file=sys.stderr)

        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        keras_hvd.run(speak, np=2)
        shown = sys.stdout.getvalue(), sys.stderr.getvalue()
        sys.stdout = sys.stderr = None
        keras_hvd.run(speak)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        print([sorted(text.splitlines()) for text in shown])
        """
    with python(khvdrun, script(tmp_path, program)) as process:
        out, err = process.communicate()
    assert out == "[['[0] out', '[1] out'], ['[0] err', '[1] err']]\n"
    assert err == ""


def test_finds_the_modules_that_the_caller_finds(khvdrun, tmp_path):
    (tmp_path / "beside.py").write_text("def answer():\n    return 42\n")
    program = f"""
        import sys
        sys.path.append({str(tmp_path)!r})
        import beside, keras_hvd
        print(keras_hvd.run(beside.answer, np=2))
        """
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    with python(khvdrun, script(folder, program)) as process:
        out, err = process.communicate()
    assert (out, err) == ("[42, 42]\n", "")


WAITING = """
    import os, signal, sys
    import keras_hvd, keras_hvd.launch.function

    def wait(ranks):
        if ranks == "ignore":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if ranks == "hear":
            signal.signal(signal.SIGINT, lambda *_: print("heard"))
        print(os.getpid())
        while True:
            signal.pause()

    ranks = sys.argv[1]
    # Those that ignore the first interrupt are killed after it.
    keras_hvd.launch.function._PATIENCE_SECONDS = 3 if ranks == "ignore" else 60
    try:
        keras_hvd.run(wait, (ranks,), np=2)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    if ranks == "hear":
        input()
    """


@pytest.fixture
def waiting(khvdrun, tmp_path):
    """Starts a script whose ranks wait for ever; gives it, and for each rank a
    descriptor that becomes readable when the rank has ended.
    """

    def start(ranks: str):
        program = script(tmp_path, WAITING)
        process = python(khvdrun, program, ranks, stdin=subprocess.PIPE)
        lines = [process.stdout.readline() for _ in range(2)]
        ends = [os.pidfd_open(int(line.partition("] ")[2])) for line in lines]
        opened.extend(ends)
        return process, ends

    opened: list[int] = []
    yield start
    for end in opened:
        os.close(end)


@pytest.mark.parametrize("ranks", ["listen", "ignore"])
def test_ctrl_c_ends_all(waiting, ranks):
    process, ends = waiting(ranks)
    with process:
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        # No rank is left by the time that `run` has raised.
        assert select.select(ends, [], [], 0)[0] == ends
        stderr = process.stderr.read()
    assert process.returncode == 0
    assert stderr == "khvdrun: the job was ended by SIGINT\n"


def test_a_second_ctrl_c_is_not_waited_for(waiting):
    """A user who presses it twice is in a hurry, also in a notebook, which lives on."""
    process, ends = waiting("hear")
    with process:
        process.send_signal(signal.SIGINT)
        heard = sorted(process.stdout.readline() for _ in range(2))
        assert heard == ["[0] heard\n", "[1] heard\n"]
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        for end in ends:
            assert select.select([end], [], [], 30)[0]
        process.communicate("\n")
    assert process.returncode == 0


def test_the_job_dies_with_its_caller(khvdrun, waiting):
    process, ends = waiting("ignore")
    with process:
        process.kill()
        khvdrun.wait_until_gone()
        assert select.select(ends, [], [], 0)[0] == ends


def test_an_interrupt_ends_the_job_where_interrupts_are_ignored(khvdrun, tmp_path):
    """As in the background of a shell, where SIGTERM ends this program."""
    program = """
        import os, signal, time
        import keras_hvd, keras_hvd.launch.function

        def wait():
            print(os.getpid(), flush=True)
            while True:
                signal.pause()

        def interrupt(number, frame):
            global told_at
            told_at = time.monotonic()
            raise KeyboardInterrupt

        keras_hvd.launch.function._PATIENCE_SECONDS = 60
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, interrupt)
        try:
            keras_hvd.run(wait, np=2)
        except KeyboardInterrupt:
            print("interrupted", time.monotonic() - told_at < 30)
        """
    with python(khvdrun, script(tmp_path, program)) as process:
        ranks = [process.stdout.readline() for _ in range(2)]
        process.terminate()
        out, _ = process.communicate()
    assert out.endswith("interrupted True\n")
    for line in ranks:
        assert not os.path.exists(f"/proc/{line.partition('] ')[2].strip()}")
