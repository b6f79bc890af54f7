"""What all ranks would say alike, rank 0 shows; all else comes from every rank."""

import pathlib
import sys
import zipfile

import pytest

SAYING = pathlib.Path(__file__).parent / "ranks" / "saying.py"

# A part of each line of `SAYING`.
FROM_EVERY_RANK = [
    "print of the script",
    "the script's to TensorFlow's log",
    "the script's to absl's log",
    "to the script: Model:",
    "error of TensorFlow",
    "error of absl",
]
FROM_RANK_0 = [
    "warning of Python",
    "triggered tf.function retracing",
    "You are saving your model as an HDF5 file",
    "Total params",
    "Epoch 1: LearningRateScheduler",
    "Epoch 2: ReduceLROnPlateau",
    "Epoch 3: early stopping",
    "2/2",  # fit
    "1/1",  # evaluate, predict, and a bar of the script
]


def lines_of(rank: int, ended) -> list[str]:
    lines = (ended.stdout + ended.stderr).splitlines()
    prefix = f"[{rank}] "
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def said_in(lines: list[str], parts: list[str]) -> list[str]:
    return [part for part in parts if any(part in line for line in lines)]


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


@pytest.mark.parametrize("imports", ["first", "late"])
def test_rank_0_alone_shows_what_all_would_say(khvdrun, tmp_path, imports):
    # A script is told from the frameworks, whatever its folder is called.
    script = tmp_path / "keras" / "saying.py"
    script.parent.mkdir()
    script.write_text(SAYING.read_text())
    ended = khvdrun.run("-np", 2, sys.executable, script, imports)
    assert ended.returncode == 0, ended.stderr
    of_0, of_1 = lines_of(0, ended), lines_of(1, ended)
    assert said_in(of_0, FROM_EVERY_RANK + FROM_RANK_0) == FROM_EVERY_RANK + FROM_RANK_0
    assert said_in(of_1, FROM_EVERY_RANK) == FROM_EVERY_RANK
    rest = [line for line in of_1 if line and not said_in([line], FROM_EVERY_RANK)]
    assert rest == []


def test_all_output_shows_it_from_all_ranks(khvdrun):
    ended = khvdrun.run("-np", 2, "--all-output", sys.executable, SAYING)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        said = said_in(lines_of(rank, ended), FROM_EVERY_RANK + FROM_RANK_0)
        assert said == FROM_EVERY_RANK + FROM_RANK_0


def test_a_rank_that_fails_shows_the_warnings_before(khvdrun):
    """Those that only lose it show nothing but their errors."""
    program = (
        "import warnings, keras_hvd\n"
        "keras_hvd.init()\n"
        "warnings.warn('overflow')\n"
        "if keras_hvd.rank() == 1:\n"
        "    raise ValueError('no number')\n"
        "keras_hvd.broadcast_object(1, 0)\n"
    )
    ended = khvdrun.run("-np", 3, *python(program))
    of_1, of_2 = lines_of(1, ended), lines_of(2, ended)
    assert of_1[:2] == [
        "Warnings of this rank before its error:",
        "<string>:3: UserWarning: overflow",
    ]
    assert of_1[-1] == "ValueError: no number"
    assert not said_in(of_2, ["overflow"])
    assert said_in(of_2, ["RankFailedError"])


def test_so_does_a_function_of_run(khvdrun):
    program = (
        "import keras_hvd\n"
        "def fail():\n"
        "    import warnings\n"
        "    keras_hvd.init()\n"
        "    warnings.warn('overflow')\n"
        "    if keras_hvd.rank() == 1:\n"
        "        raise ValueError('no number')\n"
        "keras_hvd.run(fail, num_proc=2)\n"
    )
    # The outer job is of one process: the function's ranks are another's.
    ended = khvdrun.run("-np", 1, "--no-prefix", *python(program))
    shown = (ended.stdout + ended.stderr).splitlines()
    assert "[1] Warnings of this rank before its error:" in shown
    assert "[1] ValueError: no number" in shown


def test_warnings_can_still_be_recorded_and_made_errors(khvdrun):
    program = (
        "import warnings, keras_hvd\n"
        "keras_hvd.init()\n"
        "with warnings.catch_warnings(record=True) as recorded:\n"
        "    warnings.warn('one')\n"
        "print(len(recorded))\n"
        "warnings.simplefilter('error')\n"
        "try:\n"
        "    warnings.warn('one')\n"
        "except UserWarning:\n"
        "    print('raised')\n"
    )
    ended = khvdrun.run("-np", 2, *python(program))
    assert lines_of(0, ended) == lines_of(1, ended) == ["1", "raised"]


def test_the_first_rank_of_a_process_set_speaks_for_it(khvdrun):
    program = (
        "import warnings, keras_hvd\n"
        "both = keras_hvd.ProcessSet([1, 2])\n"
        "alone = keras_hvd.ProcessSet([2])\n"
        "keras_hvd.init(process_sets=[both, alone])\n"
        "warnings.warn('of a set')\n"
        "keras_hvd.remove_process_set(both)\n"
        "warnings.warn('of all')\n"
        "keras_hvd.shutdown()\n"
        "warnings.warn('after the job')\n"
    )
    ended = khvdrun.run("-np", 3, *python(program))
    parts = ["of a set", "of all", "after the job"]
    shown = [said_in(lines_of(rank, ended), parts) for rank in range(3)]
    assert shown == [parts, ["of a set", "after the job"], ["after the job"]]


def test_a_job_that_begins_where_warnings_are_caught(khvdrun):
    program = (
        "import warnings, keras_hvd\n"
        "with warnings.catch_warnings():\n"
        "    keras_hvd.init()\n"
        "keras_hvd.shutdown()\n"
        "keras_hvd.init()\n"
        "warnings.warn('of all')\n"
    )
    ended = khvdrun.run("-np", 2, *python(program))
    assert said_in(lines_of(0, ended), ["of all"]) == ["of all"]
    assert lines_of(1, ended) == []


def test_what_is_imported_from_one_archive_is_changed_once(khvdrun, tmp_path):
    """One loader has all of its modules, as with Spark's --py-files."""
    with zipfile.ZipFile(tmp_path / "keras.zip", "w") as archive:
        for name in ("__init__", "src/__init__", "src/utils/__init__", "src/other"):
            archive.writestr(f"keras/{name}.py", "")
        io_utils = "print_msg = print\nis_interactive_logging_enabled = bool\n"
        archive.writestr("keras/src/utils/io_utils.py", io_utils)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'keras.zip')!r})\n"
        "import keras_hvd; keras_hvd.init()\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('keras.src.utils.io_utils')\n"
        "from keras.src.utils import io_utils\n"
        "import keras.src.other\n"
        "io_utils.print_msg('said')\n"
    )
    ended = khvdrun.run("-np", 2, *python(program))
    assert ended.returncode == 0, ended.stderr
    assert lines_of(0, ended) == ["said"]
    assert lines_of(1, ended) == []


def test_a_warning_of_one_rank_is_shown_from_it(khvdrun):
    program = (
        "import keras_hvd\n"
        "from keras_hvd.job import log\n"
        "keras_hvd.init()\n"
        "log.warn('of all ranks')\n"
        "if keras_hvd.rank() == 1:\n"
        "    log.warn('of one', from_any_rank=True)\n"
    )
    ended = khvdrun.run("-np", 2, *python(program))
    assert lines_of(0, ended) == ["<string>:4: UserWarning: of all ranks"]
    assert lines_of(1, ended) == ["<string>:6: RankWarning: of one"]
