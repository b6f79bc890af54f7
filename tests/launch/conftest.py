"""Runs khvdrun on small commands and checks that it leaves nothing behind."""

import contextlib
import os
import select
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import elastic_jobs
import network
import numpy as np
import pytest
from free_port import free_port
from sklearn.datasets import load_digits

EXAMPLES = Path(__file__).parents[2] / "examples"
KHVDRUN = (sys.executable, "-m", "keras_hvd.launch")

# Every process of a test carries this variable, even if its parent has changed.
_MARK = "KERAS_HVD_TEST_MARK"


# From this many kills on the run is a soak, with the long tests too.
_SOAK_KILLS = 50


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kills",
        type=int,
        default=5,
        help="at how many random moments to kill a rank (default: 5; make soak: 50)",
    )
    parser.addoption(
        "--seed",
        type=int,
        default=0,
        help="of all that is random in the tests under faults (default: 0)",
    )
    parser.addoption(
        "--faults",
        type=Path,
        help="folder with libraries of a build with faults (default: no faults)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kills = metafunc.config.getoption("--kills")
    under_fit = kills // 5
    if "kill" in metafunc.fixturenames:
        metafunc.parametrize("kill", range(kills - under_fit))
    if "fit_kill" in metafunc.fixturenames:
        metafunc.parametrize("fit_kill", range(under_fit))
    if "forming_kill" in metafunc.fixturenames:
        metafunc.parametrize("forming_kill", range(kills // 5))
    if "point_kill" in metafunc.fixturenames:
        metafunc.parametrize("point_kill", range(kills))


_DELAYS = pytest.StashKey[list[float]]()
_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def delays(request: pytest.FixtureRequest) -> list[float]:
    """For each kill, the seconds until the last survivor had raised."""
    return request.config.stash.setdefault(_DELAYS, [])


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> list[str]:
    """Lines to be printed at the end."""
    return request.config.stash.setdefault(_FIGURES, [])


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    delays = config.stash.get(_DELAYS, [])
    if delays:
        terminalreporter.write_line(
            f"{len(delays)} kills: every survivor had raised after "
            f"{max(delays):.3f} s, half the times after {statistics.median(delays):.3f}"
        )
    for line in config.stash.get(_FIGURES, []):
        terminalreporter.write_line(line)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of all random choices in a test."""
    return request.config.getoption("--seed")


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> Path | None:
    """The folder of the libraries with faults, if there are any."""
    return request.config.getoption("--faults")


@pytest.fixture
def is_soak(request: pytest.FixtureRequest) -> bool:
    """Whether this run may take long."""
    return request.config.getoption("--kills") >= _SOAK_KILLS


# A shell that runs pytest in the background, or nohup, makes it ignore these. khvdrun
# leaves ignored signals alone, and the tests are about signals that it handles.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        _default = signal.default_int_handler
        signal.signal(_number, _default if _number == signal.SIGINT else signal.SIG_DFL)


class Job(subprocess.Popen):
    """A running khvdrun; when its test fails or takes too long it is killed."""

    def __exit__(self, kind, value, traceback):
        if kind is not None:
            self.kill()
        super().__exit__(kind, value, traceback)


@dataclass
class Launcher:
    """Starts khvdrun with a mark in the environment of all its descendants."""

    mark: str

    def start(self, *arguments: object, on: network.Host | None = None, **popen) -> Job:
        environment = {**os.environ, **popen.pop("env", {}), _MARK: self.mark}
        popen = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            **popen,
        }
        before = popen.pop("before", ())
        command = [*KHVDRUN, *map(str, arguments)]
        if on is not None:
            command = on.command(command)
        return Job([*map(str, before), *command], env=environment, **popen)

    def run(
        self, *arguments: object, timeout: float = 200, input=None, **popen
    ) -> subprocess.CompletedProcess:
        if input is not None:
            popen["stdin"] = subprocess.PIPE
        with self.start(*arguments, **popen) as process:
            try:
                out, err = process.communicate(input, timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                pytest.fail(f"khvdrun did not end:\n{out}\n{err}")
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def processes(self) -> list[str]:
        """Command lines of the marked processes that run."""
        wanted = f"{_MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(f"{entry.name}: {command.decode()}")
        return found

    def wait_until_gone(self) -> None:
        """Waits for every process of the test to end."""
        for line in self.processes():
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(int(line.partition(":")[0]))
                ended, _, _ = select.select([descriptor], [], [], 20)
                os.close(descriptor)
                assert ended, f"still runs: {line}"


@pytest.fixture
def khvdrun() -> Iterator[Launcher]:
    """A `Launcher`; the test fails if a process of it outlives the test."""
    launcher = Launcher(uuid.uuid4().hex)
    shared_memory = set(os.listdir("/dev/shm"))
    yield launcher
    assert launcher.processes() == []
    assert left_since(shared_memory) == []


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[network.Host]]:
    """Three hosts for all tests of a module, unless it has its own."""
    if why := network.unavailable():
        pytest.skip(f"there can be no hosts: {why}")
    with network.connected(3) as found:
        yield found


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[network.Host]]:
    """Two hosts for all tests of a module."""
    if why := network.unavailable():
        pytest.skip(f"there can be no hosts: {why}")
    with network.connected(2) as hosts:
        yield hosts


@pytest.fixture
def by_ssh(hosts, tmp_path):
    """Real ssh to all `hosts` of a module; gives the variables that make it found."""
    if not network.has_ssh():
        pytest.skip("there is no sshd here")
    with network.ssh(hosts, tmp_path) as variables:
        yield variables


@pytest.fixture
def rendezvous() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def start(request, khvdrun, rendezvous):
    """Starts the khvdrun of a node, with the test module's secret if it has one."""
    secret = getattr(request.module, "SECRET", "a secret of any test")

    def start(number, count, *arguments, **variables):
        place = ("--nnodes", count, "--node-rank", number, "--rendezvous", rendezvous)
        variables = {"SECRET": secret, "HOST_KEY": f"host {number}", **variables}
        environment = {f"KERAS_HVD_{n}": v for n, v in variables.items()}
        return khvdrun.start(*place, *arguments, env=environment)

    return start


def left_since(before: set[str]) -> list[str]:
    """New files of /dev/shm that no process maps, though given time.

    This test's leftovers stay unmapped, since its processes have ended. Another test's
    job, which may run meanwhile, soon maps its own file or removes it.
    """
    deadline = time.monotonic() + 10
    while True:
        new = set(os.listdir("/dev/shm")) - before
        left = [name for name in new if not is_mapped(f"/dev/shm/{name}")]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def is_mapped(path: str) -> bool:
    """Whether a process that runs has mapped a file: it is then no test's leftover."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if path in maps.read_text():
                return True
    return False


@pytest.fixture(scope="session")
def one_process() -> list[np.ndarray]:
    """The weights of elastic_jobs.py after the training on one process."""
    return elastic_jobs.weights_of_one_process()


@pytest.fixture
def digits_like_mnist(tmp_path) -> Path:
    """Other digits, in MNIST's form: 28 pixels a side, and from 0 to 255.

    Keras' settings beside them make it compute in float64: in float32 the order of
    TensorFlow's own sums would show.
    """
    images, labels = load_digits(return_X_y=True)
    large = np.kron(images.reshape(-1, 8, 8), np.full((3, 3), 255 / 16))
    large = np.pad(large, ((0, 0), (2, 2), (2, 2))).astype("uint8")
    parts = {"x_train": large[:-400], "y_train": labels[:-400]}
    parts.update({"x_test": large[-400:], "y_test": labels[-400:]})
    np.savez(tmp_path / "digits.npz", **parts)
    (tmp_path / "keras.json").write_text('{"floatx": "float64"}')
    return tmp_path / "digits.npz"


@pytest.fixture
def train_mnist(
    digits_like_mnist, tmp_path, monkeypatch
) -> Callable[..., list[np.ndarray]]:
    """Trains the MNIST example for an epoch; returns its weights.

    Its arguments are a function from the script's command to a launcher's, and
    variables.
    """
    # The script leaves its model here, on all hosts.
    monkeypatch.chdir(tmp_path)
    script = [sys.executable, EXAMPLES / "mnist.py", "--data", digits_like_mnist]
    words = [*map(str, script), "--epochs", "1"]

    def train(
        launch: Callable[[Sequence[str]], Sequence[str]],
        variables: Mapping[str, str] | None = None,
    ) -> list[np.ndarray]:
        import keras

        (tmp_path / "mnist.keras").unlink(missing_ok=True)
        ended = subprocess.run(
            launch(words),
            env={
                **os.environ,
                **(variables or {}),
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "KERAS_HOME": str(tmp_path),
            },
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return keras.saving.load_model(tmp_path / "mnist.keras").get_weights()

    return train


@pytest.fixture(scope="session")
def mnist_weights() -> list[np.ndarray]:
    """The weights of `mnist_on_one_host`, from the first test that asks for them."""
    return []


@pytest.fixture
def mnist_on_one_host(train_mnist, mnist_weights) -> list[np.ndarray]:
    """The weights after a training of three ranks on one host."""
    if not mnist_weights:
        mnist_weights += train_mnist(lambda words: [*KHVDRUN, "-np", "3", *words])
    return mnist_weights
