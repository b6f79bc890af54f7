"""The ranks' output for the user: prefixes, progress bars, files, slow readers."""

import fcntl
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import termios

import pytest


def sh(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script)


def python(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


def read_until(descriptor: int, wanted: bytes) -> bytes:
    """Reads until `wanted` has arrived, or fails after a while."""
    seen = b""
    while wanted not in seen:
        readable, _, _ = select.select([descriptor], [], [], 30)
        assert readable, f"{wanted!r} did not come, but {seen!r}"
        data = os.read(descriptor, 65536)
        assert data, f"ended before {wanted!r}: {seen!r}"
        seen += data
    return seen


def test_marks_every_line_and_keeps_the_streams_apart(khvdrun):
    script = "echo out $KERAS_HVD_RANK; echo; echo err $KERAS_HVD_RANK >&2"
    ended = khvdrun.run("-np", 3, *sh(script))
    assert ended.returncode == 0
    for rank in range(3):
        mine = f"[{rank}] "
        out = [line for line in ended.stdout.splitlines() if line.startswith(mine)]
        err = [line for line in ended.stderr.splitlines() if line.startswith(mine)]
        assert out == [f"{mine}out {rank}", mine]
        assert err == [f"{mine}err {rank}"]
    assert len(ended.stdout.splitlines()) == 6
    assert len(ended.stderr.splitlines()) == 3


def test_adds_nothing_without_prefix(khvdrun):
    ended = khvdrun.run(
        *("-np", 1, "--no-prefix", "--live-output"),
        *sh(r"printf 'a\n\rb\bc\n\n'"),
        text=False,
    )
    assert ended.stdout == b"a\n\rb\bc\n\n"


def test_ends_a_last_line_that_has_no_end(khvdrun):
    ended = khvdrun.run("-np", 2, *sh("printf x$KERAS_HVD_RANK"))
    assert sorted(ended.stdout.splitlines()) == ["[0] x0", "[1] x1"]


def test_never_mixes_two_ranks_in_a_line(khvdrun):
    program = (
        "import os, sys\n"
        "rank = os.environ['KERAS_HVD_RANK']\n"
        "for i in range(2000):\n"
        "    sys.stdout.write(rank * 40)\n"
        "    sys.stdout.flush()\n"
        "    sys.stdout.write(rank * 40 + '\\n')\n"
    )
    lines = khvdrun.run("-np", 4, *python(program)).stdout.splitlines()
    whole = [f"[{rank}] {str(rank) * 80}" for rank in range(4)]
    for rank in (1, 2, 3):
        assert lines.count(whole[rank]) == 2000
    # A line that rank 0 has begun is cut off, and goes on, when another comes.
    ours = [line.removeprefix("[0] ") for line in lines if line.startswith("[0] ")]
    assert "".join(ours) == "0" * 80 * 2000
    assert len(lines) == 3 * 2000 + len(ours)


def test_shows_what_rank_0_has_begun_at_once(khvdrun):
    script = "printf begun; read go; echo ,ended"
    with khvdrun.start(
        *("-np", 1, *sh(script)), text=False, stdin=subprocess.PIPE
    ) as job:
        assert read_until(job.stdout.fileno(), b"begun") == b"[0] begun"
        job.stdin.write(b"go\n")
        job.stdin.flush()
        assert job.stdout.read() == b",ended\n"


def test_shows_other_ranks_line_by_line(khvdrun, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = (
        "[ $KERAS_HVD_RANK = 0 ] && exit; "
        f"printf begun; echo begun >&2; read go < {gate}; echo ,ended"
    )
    with khvdrun.start("-np", 2, *sh(script), text=False) as job:
        read_until(job.stderr.fileno(), b"[1] begun")
        assert select.select([job.stdout], [], [], 0)[0] == []
        gate.write_text("go\n")
        assert job.stdout.read() == b"[1] begun,ended\n"


# The output of Keras' progress bar: backspaces over the last state, then the next.
PROGRESS_BAR = (
    "import sys\n"
    "for i in range(1, 4):\n"
    "    bar = f'{i}/3 ' + '=' * i\n"
    "    sys.stdout.write('\\b' * 8 + '\\r' + bar)\n"
    "    sys.stdout.flush()\n"
    "sys.stdout.write('\\n')\n"
)


def test_rewrites_the_progress_bar_of_rank_0_with_its_prefix(khvdrun):
    ended = khvdrun.run("-np", 1, "--live-output", *python(PROGRESS_BAR), text=False)
    assert ended.stdout == (
        b"\r[0] 1/3 =" + b"\b" * 8 + b"\r[0] 2/3 ==" + b"\b" * 8 + b"\r[0] 3/3 ===\n"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_shows_the_last_state_of_progress_bars_in_a_pipe(khvdrun, rank):
    program = (
        f"import os\nif os.environ['KERAS_HVD_RANK'] == '{rank}':\n"
        f" exec({PROGRESS_BAR!r})"
    )
    ended = khvdrun.run("-np", 2, *python(program), text=False)
    assert ended.stdout == b"[%d] 3/3 ===\n" % rank


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (r"one\r\ntwo\r\n", "[0] one\n[0] two\n"),
        (r"begun\rfirst\rlast\nnext\n", "[0] begun\n[0] last\n[0] next\n"),
        (r"\r\033[1mbold\033[0m\n", "[0] bold\n"),
        (r"\033[1mbold\033[0m\n", "[0] \033[1mbold\033[0m\n"),
        (r"\rno end", "[0] no end\n"),
        (r"\rfirst\r", "[0] first\n"),
        (r"\n\r\n", "[0] \n[0] \n"),
    ],
)
def test_shows_once_the_lines_that_rank_0_rewrites_in_a_pipe(khvdrun, written, shown):
    # In one piece, and byte by byte.
    whole = khvdrun.run("-np", 1, *sh(f"printf '{written}'"), text=False)
    assert whole.stdout.decode() == shown
    single = (
        "import os, sys\nfor byte in sys.argv[1].encode().decode('unicode_escape'):\n"
        " os.write(1, byte.encode())"
    )
    written = written.replace("\\033", "\\x1b")
    pieces = khvdrun.run("-np", 1, *python(single), written, text=False)
    assert pieces.stdout.decode() == shown


def test_a_training_is_two_lines_an_epoch_in_a_file(khvdrun, tmp_path):
    program = (
        "import keras, numpy as np, keras_hvd\n"
        "keras_hvd.init()\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])\n"
        "optimizer = keras_hvd.DistributedOptimizer(keras.optimizers.SGD())\n"
        "model.compile(optimizer, 'mse')\n"
        "broadcast = keras_hvd.callbacks.BroadcastGlobalVariables(0)\n"
        "x = np.ones((640, 4))\n"
        "model.fit(x, x[:, :1], batch_size=1, epochs=2, callbacks=[broadcast])\n"
        "raise ValueError('the end')\n"
    )
    with (tmp_path / "log").open("w+") as log:
        # On older processors TensorFlow says nothing of oneDNN by itself.
        started = {"env": {"TF_ENABLE_ONEDNN_OPTS": "1"}, "stdout": log}
        ended = khvdrun.run("-np", 2, *python(program), **started)
        log.seek(0)
        lines = log.read().splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["[0]"] * 4, lines
    assert [line.split()[1] for line in lines] == ["Epoch", "640/640"] * 2
    assert "\x1b" not in "".join(lines)
    # TensorFlow tells of its start once, and not again in the last lines.
    starts = [line for line in ended.stderr.splitlines() if "oneDNN" in line]
    assert starts and all(line.startswith("[0] ") for line in starts)
    own = [line for line in ended.stderr.splitlines() if line.startswith("khvdrun:")]
    assert own[1].endswith("stderr ended with:")
    assert own[2] == "khvdrun:     Traceback (most recent call last):"


def test_keeps_every_byte_of_every_rank_in_files(khvdrun, tmp_path):
    logs = tmp_path / "a" / "logs"
    script = r"printf 'out %s\r\bx' $KERAS_HVD_RANK; echo err $KERAS_HVD_RANK >&2"
    ended = khvdrun.run("-np", 2, "--output-filename", logs, *sh(script))
    assert "[1] err 1" in ended.stderr
    for rank in (0, 1):
        mine = logs / f"rank.{rank}"
        assert (mine / "stdout").read_bytes() == b"out %d\r\bx" % rank
        assert (mine / "stderr").read_bytes() == b"err %d\n" % rank


def test_goes_on_without_a_file_that_cannot_grow(khvdrun, tmp_path):
    (tmp_path / "rank.0").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    ended = khvdrun.run("-np", 1, "--output-filename", tmp_path, *sh("echo a; echo b"))
    assert ended.returncode == 0
    assert ended.stdout.splitlines()[-2:] == ["[0] a", "[0] b"]
    assert "stdout is cut off here: No space left on device" in ended.stdout


def test_says_which_file_it_cannot_make(khvdrun, tmp_path):
    (tmp_path / "rank.1").write_text("in the way")
    ended = khvdrun.run("-np", 2, "--output-filename", tmp_path, "sleep", 1000)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"khvdrun: error: --output-filename: cannot write '{tmp_path}/rank.1': "
        "File exists\n"
    )


def test_breaks_a_line_without_end(khvdrun):
    program = (
        "import os, sys\n"
        "rank = int(os.environ['KERAS_HVD_RANK'])\n"
        "sys.stdout.write('x' * 1_000_000 * rank)"
    )
    lines = khvdrun.run("-np", 2, *python(program)).stdout.splitlines()
    assert len(lines) > 1
    assert all(line.startswith("[1] x") for line in lines)
    assert sum(line.count("x") for line in lines) == 1_000_000


def test_waits_for_a_slow_reader_and_stays_responsive(khvdrun):
    program = "import sys\nfor i in range(200_000): print('x' * 60)"
    with khvdrun.start("-np", 2, *python(program)) as job:
        # The output is not read, so the ranks wait. The second Ctrl-C must still work.
        read_until(job.stdout.fileno(), b"[0] x")
        job.send_signal(signal.SIGTERM)
        rest = job.stdout.read()
    assert job.returncode == 128 + signal.SIGTERM
    assert len(rest.splitlines()) < 2 * 200_000


def test_loses_nothing_to_a_slow_reader(khvdrun):
    program = "for i in range(100_000): print(i)"
    with khvdrun.start("-np", 2, *python(program)) as job:
        select.select([job.stderr], [], [], 1)
        lines = job.stdout.read().splitlines()
    assert lines.count("[0] 99999") == lines.count("[1] 99999") == 1
    assert len(lines) == 200_000


def test_lets_ranks_see_that_nobody_reads(khvdrun):
    # As in `khvdrun ... | head -1`: the shell's exit code for SIGPIPE is 141.
    with khvdrun.start("-np", 2, "yes") as job:
        read_until(job.stdout.fileno(), b"\n")
        job.stdout.close()
        last = job.stderr.read().splitlines()[-1]
    assert job.returncode in (1, 128 + signal.SIGPIPE)
    assert "failed first" in last


def test_gives_standard_input_to_rank_0_alone(khvdrun):
    ended = khvdrun.run("-np", 3, "cat", input="one\ntwo\n")
    assert ended.stdout == "[0] one\n[0] two\n"


class Terminal:
    """A terminal of 80 columns that khvdrun runs on."""

    def __init__(self):
        self.master, self.slave = pty.openpty()
        self.resize(80)

    def resize(self, columns: int) -> None:
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, size)


@pytest.fixture
def terminal():
    opened = Terminal()
    yield opened
    os.close(opened.master)
    os.close(opened.slave)


def test_gives_rank_0_a_terminal_when_it_is_shown_on_one(khvdrun, terminal):
    program = (
        "import os, sys\n"
        "print([os.isatty(fd) for fd in range(3)], os.environ['KERAS_HVD_RANK'],\n"
        "      os.isatty(1) and os.get_terminal_size(1).columns, end='|\\n')"
    )
    with khvdrun.start(
        *("-np", 2, *python(program)),
        stdout=terminal.slave,
        stderr=subprocess.DEVNULL,
    ):
        seen = read_until(terminal.master, b"0 76|\r\n")
        seen += b"" if b"1 False|" in seen else read_until(terminal.master, b"|\r\n")
    assert b"[0] [False, True, False] 0 76|\r\n" in seen
    assert b"[1] [False, False, False] 1 False|\r\n" in seen


# Some bars go back to the beginning of their line at once, others when they go on.
@pytest.mark.parametrize("end", ["", "\r"], ids=["", "goes back"])
def test_puts_other_ranks_lines_above_the_progress_bar(
    khvdrun, terminal, tmp_path, end
):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = (
        f"if [ $KERAS_HVD_RANK = 1 ]; then read go < {gate}; echo line; exit; fi; "
        f"printf '\\r1/2{end}'; read go; printf '\\b\\b\\b\\r2/2\\n'"
    )
    with khvdrun.start(
        *("-np", 2, *sh(script)),
        stdin=subprocess.PIPE,
        stdout=terminal.slave,
        stderr=terminal.slave,
    ) as job:
        shown = b"[0] 1/2" + end.encode()
        assert read_until(terminal.master, shown) == b"\r" + shown
        gate.write_text("go\n")
        redrawn = read_until(terminal.master, shown)
        assert redrawn == b"\r\x1b[K[1] line\r\n" + shown
        job.stdin.write("go\n")
        job.stdin.flush()
        rewritten = read_until(terminal.master, b"\n")
    back = b"" if end else b"\b\b\b"
    assert rewritten == back + b"\r[0] 2/2\r\n"


def test_tells_rank_0_when_the_terminal_changes_its_size(khvdrun, terminal):
    program = (
        "import os\n"
        "while True:\n"
        "    print(os.get_terminal_size(1).columns)\n"
        "    input()\n"
    )
    with khvdrun.start(
        *("-np", 1, *python(program)), stdin=subprocess.PIPE, stdout=terminal.slave
    ) as job:
        assert read_until(terminal.master, b"\n") == b"[0] 76\r\n"
        terminal.resize(100)
        job.send_signal(signal.SIGWINCH)
        seen = b""
        while seen != b"[0] 96\r\n":
            job.stdin.write("\n")
            job.stdin.flush()
            seen = read_until(terminal.master, b"\n")
            assert seen in (b"[0] 76\r\n", b"[0] 96\r\n")
        job.terminate()


@pytest.mark.parametrize("joins", [False, True])
def test_says_that_no_rank_has_joined(joins, khvdrun):
    program = "import tensorflow as tf, keras_hvd; print(tf.__version__, flush=True)"
    if joins:
        program += "; keras_hvd.init()"
    ended = khvdrun.run("-np", 2, *python(program))
    assert ended.returncode == 0
    said = (
        "khvdrun: warning: no rank called keras_hvd.init(): these were 2 separate "
        "trainings"
    )
    assert ended.stderr.splitlines().count(said) == (0 if joins else 1)


def test_says_nothing_of_commands_that_train_nothing(khvdrun):
    ended = khvdrun.run("-np", 2, *python("print(1)"))
    assert ended.returncode == 0
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("ranks", "joins"), [(2, True), (1, True), (2, False)], ids=str
)
def test_notes_once_that_ranks_of_a_job_share_cores(ranks, joins, khvdrun):
    program = "import keras_hvd" + ("; keras_hvd.init()" if joins else "")
    (core, *_) = os.sched_getaffinity(0)
    ended = khvdrun.run(
        *("-np", ranks, *python(program)),
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    note = (
        f"khvdrun: note: 2 ranks take turns on the 1 core that {socket.gethostname()} "
        "gives them: with -np 1 each has one\n"
    )
    assert ended.returncode == 0
    assert ended.stderr == (note if joins and ranks > 1 else "")
