"""Notebooks: the example trains, and cells show what becomes of the ranks."""

import json
import os
import re
from pathlib import Path

import pytest

pytest.importorskip("ipykernel")
manager = pytest.importorskip("jupyter_client.manager")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "notebook.ipynb"


def cells() -> list[dict]:
    return [
        each
        for each in json.loads(EXAMPLE.read_text())["cells"]
        if each["cell_type"] == "code"
    ]


@pytest.fixture
def kernel(khvdrun, tmp_path, monkeypatch):
    """A kernel without the user's settings, and a client of it."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    environment = {
        **os.environ,
        "IPYTHONDIR": str(tmp_path),
        "KERAS_HVD_TEST_MARK": khvdrun.mark,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    started, client = manager.start_new_kernel(cwd=tmp_path, env=environment)
    yield started, client
    client.stop_channels()
    started.shutdown_kernel(now=True)


@pytest.fixture
def shown(kernel):
    """What a cell shows: the text of its outputs, and of the error that it raises."""
    _, client = kernel

    def run(source: str, on_output=lambda text: None) -> str:
        texts = []

        def output(message: dict) -> None:
            content = message["content"]
            text = content.get("text") or "\n".join(content.get("traceback", ()))
            texts.append(re.sub(r"\x1b\[[\d;]*m", "", text))
            on_output(text)

        client.execute_interactive(source, output_hook=output, timeout=120)
        return "".join(texts)

    return run


def test_the_example_stores_no_results():
    assert [(each["outputs"], each["execution_count"]) for each in cells()] == [
        ([], None) for _ in cells()
    ]


def test_the_example_trains(shown):
    texts = [shown("".join(each["source"])) for each in cells()]
    assert "[0] Epoch 10/10" in texts[-2]
    assert "[1] " not in texts[-2]
    losses = re.search(
        r"Loss ([\d.]+) to ([\d.]+), test accuracy ([\d.]+)%\n", texts[-1]
    )
    first, last, accuracy = map(float, losses.groups())
    assert last < first / 4
    assert accuracy > 85


def test_an_error_shows_the_line_of_the_cell(shown):
    shown("""
class OwnError(Exception):
    pass

def check(number):
    if number == 1:
        raise OwnError("no data")

def fail():
    import keras_hvd
    keras_hvd.init()
    check(keras_hvd.rank())
    keras_hvd.barrier()
""")
    text = shown("import keras_hvd; keras_hvd.run(fail, np=2)")
    assert re.search(
        r"RankTraceback: on rank 1:\nTraceback \(most recent call last\):\n"
        r'  File ".*", line 11, in fail\n    check\(keras_hvd.rank\(\)\)\n'
        r'  File ".*", line 6, in check\n    raise OwnError\("no data"\)\n'
        r"OwnError: no data\n",
        text,
    )
    assert text.endswith("OwnError: no data")


def test_an_interrupt_ends_the_ranks_and_not_the_kernel(shown, kernel):
    started, _ = kernel
    shown("""
import os, time
import keras_hvd

def wait():
    keras_hvd.init()
    keras_hvd.barrier()
    print(f"process {os.getpid()};", flush=True)
    time.sleep(600)
""")
    at_work = []

    def interrupt_when_all_are(text: str) -> None:
        if found := re.findall(r"process (\d+);", text):
            at_work.extend(found)
            if len(at_work) == 2:
                started.interrupt_kernel()

    text = shown("keras_hvd.run(wait, np=2)", interrupt_when_all_are)
    assert text.rstrip().endswith("KeyboardInterrupt:")
    assert len(at_work) == 2
    assert not any(Path("/proc", each).exists() for each in at_work)
    assert shown("print(6 * 7)") == "42\n"
