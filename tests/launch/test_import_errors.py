"""khvdrun's last line explains imports of keras_hvd and Horovod that fail in ranks."""

import os
import sys

import pytest

from keras_hvd.job import installed
from keras_hvd.launch.import_errors import explain
from keras_hvd.launch.options import Options

# A Python that ignores what is installed for it.
BARE = ("-S", "-E")
HIDES = "hides the package keras_hvd, since Python finds it first: give it another name"


@pytest.fixture
def last_line(khvdrun, tmp_path):
    """The last line of a job whose two ranks run a script of these lines and fail."""

    def last_line(*command, script="import keras_hvd as hvd; hvd.init()"):
        path = tmp_path / "train.py"
        path.write_text(script)
        ended = khvdrun.run("-np", 2, *command, path)
        assert ended.returncode == 1, ended.stderr
        return ended.stderr.splitlines()[-1]

    return last_line


def test_another_python_has_no_keras_hvd(last_line, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    python = tmp_path / "python3.99"
    python.symlink_to(os.path.realpath(sys.executable))
    assert last_line("python3.99", *BARE) == (
        f"khvdrun: 'python3.99' ({python}) has no keras_hvd. khvdrun's own Python has: "
        f"write {sys.executable} instead"
    )


def test_the_python_of_a_shell_script_has_no_keras_hvd(last_line):
    line = last_line("sh", "-c", f'{sys.executable} -S -E "$0"')
    assert line == (
        "khvdrun: the Python that 'sh' runs has no keras_hvd. khvdrun's own has: "
        f"{sys.executable}"
    )


def test_khvdruns_own_python_does_not_find_what_khvdrun_does(last_line):
    line = last_line(sys.executable, *BARE)
    assert line == (
        f"khvdrun: keras_hvd is not installed for '{sys.executable}': khvdrun has "
        f"found it in '{installed.PACKAGE.parent}'. Install it: "
        f"{installed.install_command()}"
    )


@pytest.mark.parametrize(
    ("hiding", "script"),
    [
        ("keras_hvd.py", "import keras_hvd as hvd; hvd.init()"),
        ("keras_hvd.py", "from keras_hvd import init"),
        ("keras_hvd.py", "import keras_hvd.callbacks"),
        ("keras_hvd/__init__.py", "import keras_hvd as hvd; hvd.init()"),
    ],
)
def test_a_file_beside_the_script_hides_keras_hvd(last_line, tmp_path, hiding, script):
    path = tmp_path / hiding
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert last_line(sys.executable, script=script) == f"khvdrun: '{path}' {HIDES}"


def test_a_folder_beside_the_script_hides_keras_hvd(last_line, tmp_path):
    folder = tmp_path / "keras_hvd"
    folder.mkdir()
    assert last_line(sys.executable, *BARE) == f"khvdrun: '{folder}' {HIDES}"


def test_a_script_hides_keras_hvd_by_its_own_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keras_hvd.py").touch()
    error = (
        "AttributeError: partially initialized module 'keras_hvd' has no attribute "
        "'init' (most likely due to a circular import)"
    )
    for command in (("python", "keras_hvd.py"), ("python", "-m", "keras_hvd")):
        (line,) = explain([error], Options(command=command))
        assert line == f"'keras_hvd.py' {HIDES}"


def test_an_old_script_imports_horovod(last_line):
    line = last_line(sys.executable, script="import horovod.tensorflow.keras as hvd")
    assert line == (
        "khvdrun: the script, or a library of it, imports Horovod, which is not "
        "installed: in a script for Keras, write import keras_hvd as hvd "
        "(docs/migrating.md)"
    )


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("import keras_hvd as hvd; hvd.innit()", id="a-misspelt-name"),
        pytest.param("import keras_hvd.no_such_module", id="a-misspelt-module"),
        pytest.param("import no_such_package", id="another-package"),
    ],
)
def test_other_errors_speak_for_themselves(last_line, script):
    line = last_line(sys.executable, script=script)
    assert line.endswith("failed first: it ended with exit code 1")
