"""One job for all parallel tests: `khvdrun -np N python -m pytest -x tests/parallel`.

Every rank runs every test, in the same order. Rank 0 reports as usual, and the others
report only failures. Tests that N ranks show no better than other numbers of ranks are
left out; `--all-tests` runs them too. With KERAS_BACKEND=torch, on which nothing here
imports TensorFlow, those files run that do not name it.
"""

import ctypes
import functools
import os
import pathlib
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_hvd
from keras_hvd.job import native

# The numbers of ranks on which the tests of a folder or file run; the longest path
# counts. One rank: no other to talk to. Two: everything. Three: uneven shares. Four, on
# two cores: more ranks than cores; two process sets of several; a power of 2.
_NUMBERS_OF_RANKS = {
    ".": {1, 2, 3},
    "collectives/test_adasum.py": {1, 2, 3, 4},
    "collectives/test_allreduce.py": {1, 2, 3, 4},
    "collectives/test_arguments.py": {1, 2},
    "collectives/test_gradients.py": {1, 2, 3},
    "collectives/test_sessions.py": {1, 2},
    "collectives/test_types.py": {2, 3},
    "data": {2, 3},
    "elastic": {2, 3},
    "keras": {2},
    "keras/test_gradient_tape.py": {1, 2, 3},
    "keras/test_keras_tuner.py": {1, 2},
    "keras/test_optimizer.py": {1, 2, 4},
    "keras/test_process_sets.py": {3, 4},
    "keras/test_repeated_rows.py": {1, 2, 3},
    "keras/test_weights.py": {2, 3},
    "test_process_sets.py": {1, 2, 3, 4},
    "strategy": {2, 3},
    "strategy/test_fit.py": {1, 2},
    "strategy/test_float64.py": {1, 2, 3},
    "strategy/test_keras_callbacks.py": {2},
    "strategy/test_own_steps.py": {2},
    "strategy/test_saving.py": {2},
    "strategy/test_tensorflow_tests.py": {1, 2, 3},
    "test_guides.py": {2},
    "test_worlds.py": {2, 3},
    "test_xla.py": {1, 2, 3},
}
_FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-tests",
        action="store_true",
        help="run also what other numbers of ranks show as well (make soak does)",
    )


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if keras.backend.backend() == "tensorflow" or collection_path.is_dir():
        return None
    names_it = re.search(r"\btensorflow\b", collection_path.read_text())
    return True if names_it else None


def pytest_collection_modifyitems(config: pytest.Config, items: list) -> None:
    size = keras_hvd.size()
    if config.getoption("--all-tests") or size > 4:
        return
    kept, left_out = [], []
    for item in items:
        (kept if size in _numbers_of_ranks(item) else left_out).append(item)
    if left_out and not kept:
        numbers = sorted(set().union(*map(_numbers_of_ranks, left_out)))
        raise pytest.UsageError(
            f"all of these tests are left out in a job of size {size}, which shows no "
            f"more than others: use khvdrun -np {' or '.join(map(str, numbers))}, or "
            "add --all-tests"
        )
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


def _numbers_of_ranks(item: pytest.Item) -> set[int]:
    path = item.path.relative_to(_FOLDER)
    numbers = next(
        _NUMBERS_OF_RANKS[str(each)]
        for each in (path, *path.parents)
        if str(each) in _NUMBERS_OF_RANKS
    )
    if not item.get_closest_marker("needs_xla"):
        return numbers
    # A compiled program is the same for any number of ranks, but for constants in it.
    return numbers & {1, 2} or {min(numbers)}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_xla: compiles a collective")
    # A test that fails on one rank leaves the others waiting; not for ever. To free an
    # iterator of tf.data may take a minute: its autotuning thread sleeps as long, and
    # TensorFlow 2.21 does not always wake it.
    os.environ.setdefault("KERAS_HVD_STALL_ABORT_SECONDS", "150")
    keras_hvd.init()
    if keras_hvd.rank() != 0:
        config.option.verbose = -2


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    # Where a test has lost the job, its error is what counts.
    if keras_hvd.is_initialized() and keras_hvd.rank() != 0 and not report.failed:
        return report.outcome, "", ""
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.get_closest_marker("needs_xla"):
        return
    import tensorflow as tf

    if not native.ops_info(tf.__version__)["xla"]:
        pytest.skip("this TensorFlow cannot compile collectives")


@pytest.fixture(scope="session")
def rank() -> int:
    """This process' rank."""
    return keras_hvd.rank()


@pytest.fixture(scope="session")
def size() -> int:
    """The number of ranks."""
    return keras_hvd.size()


@pytest.fixture(scope="session")
def several_ranks(size: int) -> None:
    """Skips a test that says something about several ranks only."""
    if size == 1:
        pytest.skip("needs at least 2 ranks")


@pytest.fixture
def on_tensorflow() -> None:
    """Skips a test of what Keras or keras_hvd has on TensorFlow alone."""
    if keras.backend.backend() != "tensorflow":
        pytest.skip("TensorFlow alone has this")


@pytest.fixture(
    params=["eager", "graph", pytest.param("xla", marks=pytest.mark.needs_xla)]
)
def way(request: pytest.FixtureRequest) -> str:
    """How a function runs."""
    return request.param


@pytest.fixture
def run(way: str) -> Callable[[Callable], Callable]:
    """Makes a function run eagerly, as a graph, or compiled."""
    import tensorflow as tf

    if way == "eager":
        return lambda function: function
    compiles = True if way == "xla" else None
    return functools.partial(tf.function, autograph=False, jit_compile=compiles)


@pytest.fixture(scope="session")
def counters() -> Callable[[], native.Counters]:
    """Reads the engine's counters."""

    def read() -> native.Counters:
        result = native.Counters(struct_size=ctypes.sizeof(native.Counters))
        assert native.engine().khvd_get_counters(ctypes.byref(result)) == 0
        return result

    return read


@pytest.fixture(scope="session", autouse=True)
def no_lost_wakes(counters: Callable[[], native.Counters]) -> Iterator[None]:
    """No thread, in all the tests, slept until a time-out though there was work."""
    yield
    assert counters().lost_wakes == 0


@pytest.fixture(scope="session")
def values() -> Callable[..., np.ndarray]:
    """A rank's input: arrays that each rank can compute for all of them.

    Integers are of the type's whole range, but for int64, four of which can be added.
    """

    import tensorflow as tf

    def array(dtype: tf.DType, shape: tuple[int, ...], rank: int) -> np.ndarray:
        seed = zlib.crc32(f"{dtype.name} {shape} {rank}".encode())
        generator = np.random.default_rng(seed)
        if dtype == tf.bool:
            return generator.integers(0, 2, shape).astype(np.bool_)
        if dtype.is_integer:
            limits = np.iinfo(dtype.as_numpy_dtype)
            low, high = limits.min, limits.max
            if dtype == tf.int64:
                low, high = -(2**60), 2**60
            return generator.integers(low, high, shape, dtype.as_numpy_dtype, True)
        numbers = np.asarray(generator.standard_normal(shape))
        if dtype.is_complex:
            numbers = numbers + 1j * generator.standard_normal(shape)
        return numbers.astype(dtype.as_numpy_dtype)

    return array


@pytest.fixture(scope="session")
def equal_on_all_ranks() -> Callable[[list[np.ndarray]], bool]:
    """Whether all ranks call it with the same bits."""

    def equal(arrays: list[np.ndarray]) -> bool:
        digest = [zlib.crc32(np.ascontiguousarray(array)) for array in arrays]
        return all(other == digest for other in keras_hvd.allgather_object(digest))

    return equal


@pytest.fixture
def in_second_job(rank: int, size: int) -> Callable[..., subprocess.CompletedProcess]:
    """Runs this rank's part of a second job, the same way on every rank."""

    def run(
        script: Path, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess:
        job = keras_hvd.broadcast_object(f"second-{os.urandom(8).hex()}", 0)
        place = {
            "KERAS_HVD_RANK": str(rank),
            "KERAS_HVD_SIZE": str(size),
            "KERAS_HVD_LOCAL_RANK": str(rank),
            "KERAS_HVD_LOCAL_SIZE": str(size),
            "KERAS_HVD_JOB": job,
        }
        done = subprocess.run(
            [sys.executable, script, *arguments],
            env={**os.environ, **place, **environment},
            capture_output=True,
            text=True,
        )
        keras_hvd.barrier()
        return done

    return run


@pytest.fixture(scope="session")
def images() -> tuple[np.ndarray, np.ndarray]:
    """MNIST where it is at hand (KERAS_HVD_TEST_MNIST=file.npz, or where Keras keeps
    its downloads); else scikit-learn's digits in the same size."""
    home = pathlib.Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser()
    places = [
        os.environ.get("KERAS_HVD_TEST_MNIST", ""),
        home / "datasets" / "mnist.npz",
    ]
    for place in places:
        if place and pathlib.Path(place).exists():
            with np.load(place) as data:
                x, y = data["x_train"][:4000] / 255, data["y_train"][:4000]
                break
    else:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        x = np.kron(x.reshape(-1, 8, 8) / 16, np.ones((3, 3)))
        x = np.pad(x, ((0, 0), (2, 2), (2, 2)))
    return x[..., None].astype("float32"), y.astype("int64")


def largest_difference(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    return max(
        float(np.abs(one - other).max())
        for one, other in zip(some, others, strict=True)
    )


@pytest.fixture(scope="session")
def difference() -> Callable[[list[np.ndarray], list[np.ndarray]], float]:
    """The largest difference between two models' weights."""
    return largest_difference


@pytest.fixture
def raises_on_all_ranks() -> Callable[..., None]:
    """Asserts that every rank got an error that says something."""

    def check(error: BaseException, *parts: str) -> None:
        assert all(keras_hvd.allgather_object(all(p in str(error) for p in parts))), (
            str(error)
        )

    return check
