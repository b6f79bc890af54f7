"""khvdrun --nnodes MIN:MAX: hosts join a job, leave it and vanish.

Hosts are network namespaces. Each has a khvdrun of its own, with the same command.
"""

import json
import signal
import sys

import pytest
from elastic_jobs import COUNTS, SCRIPT, check

TRY_AGAIN = 75
TWO = "--nnodes 2:3 -np 2 --min-np 2"
SECRET = {"KERAS_HVD_SECRET": "the one of all hosts here"}


@pytest.fixture
def start(khvdrun, hosts, tmp_path):
    """Starts the khvdrun of a host, by its number."""

    def start(
        number, options, *words, program=None, on=None, at=None, before=(), **env
    ):
        place = at or f"{hosts[0].address}:29400"
        meet = f"--rendezvous {place} --node-rank {number}"
        program = program or (sys.executable, SCRIPT, tmp_path)
        given = *options.split(), *meet.split(), *program, *words
        return khvdrun.start(
            *given,
            on=hosts[number if on is None else on],
            before=before,
            env={**SECRET, **env},
        )

    return start


def ended(jobs, tmp_path):
    """What each khvdrun said, in their order, and what ranks have seen."""
    said = [job.communicate(timeout=200) for job in jobs]
    seen = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
    return said, sorted(seen, key=lambda each: each["rank"])


def next_line(job, beginning):
    for line in job.stdout:
        if line.startswith(f"[0] {beginning}"):
            return line.removeprefix(f"[0] {beginning}").strip()
    pytest.fail(f"no line begins with {beginning!r}: {job.stderr.read()}")


def test_a_rank_of_another_host_dies(start, one_process, tmp_path):
    with start(0, TWO, 3, "7") as first, start(1, TWO) as second:
        said, seen = ended([first, second], tmp_path)
    assert [first.returncode, second.returncode] == [0, 0], said
    check(seen, one_process, [4, 3])
    assert "rank 3 (on node1@" in said[0][1]


def test_a_host_joins_and_leaves(start, tmp_path):
    """A signal to its khvdrun makes its ranks leave at a commit."""
    options = "--nnodes 1:2 -np 2"
    with start(0, options, MEMBERS="4,2", **COUNTS) as first:
        assert next_line(first, "2 wait to be ") == "4"
        with start(1, options) as second:
            assert next_line(first, "4 wait to be ") == "2"
            second.send_signal(signal.SIGTERM)
            said, seen = ended([first, second], tmp_path)
    assert [first.returncode, second.returncode] == [0, 0], said
    # One of its ranks may be there sooner than the other.
    assert [each["sizes"][-2:] for each in seen] == [[4, 2]] * 2
    assert "Traceback" not in said[0][1]
    assert said[1][1].count("\n") == 1
    assert "this host leaves the job, since khvdrun got SIGTERM" in said[1][1]


def test_a_hangup_that_is_ignored_stays_so(start, tmp_path):
    """A khvdrun that nohup has started stays when its terminal goes."""
    options = "--nnodes 1:2 -np 2"
    with start(0, options, MEMBERS="4,2", **COUNTS) as first:
        assert next_line(first, "2 wait to be ") == "4"
        with start(1, options, before=["nohup"]) as second:
            assert next_line(first, "4 wait to be ") == "2"
            second.send_signal(signal.SIGHUP)
            second.send_signal(signal.SIGTERM)
            said, _ = ended([first, second], tmp_path)
    assert [first.returncode, second.returncode] == [0, 0], said
    assert "this host leaves the job, since khvdrun got SIGTERM" in said[1][1]
    assert "SIGHUP" not in said[1][1]


def test_hosts_meet_at_addresses_of_ipv6(start, hosts, tmp_path):
    """Rank 0 dies, and the others meet at another one's address."""
    for number, host in enumerate(hosts[:2]):
        own = f"fd00:87::{number + 1}/64"
        host.run("ip", "address", "add", own, "dev", "cable", "nodad")
    at = "[fd00:87::1]:29400"
    with (
        start(0, TWO, 0, "7", at=at, **COUNTS) as first,
        start(1, TWO, at=at) as second,
    ):
        said, seen = ended([first, second], tmp_path)
    assert [first.returncode, second.returncode] == [0, 0], said
    assert [each["sizes"] for each in seen] == [[4, 3]] * 3


def test_the_others_go_on_without_a_host_whose_khvdrun_is_killed(start, tmp_path):
    options = "--nnodes 2:3 -np 2 --min-np 2"
    with start(0, options, MEMBERS="2", **COUNTS) as first, start(1, options) as second:
        assert next_line(first, "4 wait to be ") == "2"
        second.kill()
        said, seen = ended([first], tmp_path)
    assert first.returncode == 0, said
    assert [each["sizes"] for each in seen] == [[4, 2]] * 2


def test_a_host_that_vanishes_ends_alone(start, khvdrun, hosts, tmp_path):
    options = f"{TWO} --elastic-timeout 60"
    with start(0, options, MEMBERS="2", **COUNTS) as first, start(1, options) as second:
        next_line(first, "4 wait to be ")
        hosts[1].unplug()
        try:
            said, seen = ended([first, second], tmp_path)
        finally:
            hosts[1].plug_in()
    khvdrun.wait_until_gone()
    assert [first.returncode, second.returncode] == [0, TRY_AGAIN], said
    assert [each["sizes"] for each in seen] == [[4, 2]] * 2
    assert "node 0 at 10.87.0.1:29400 is gone" in said[1][1]


def test_all_ends_with_the_first_khvdrun(start, khvdrun, tmp_path):
    with start(0, TWO, MEMBERS="2", **COUNTS) as first, start(1, TWO) as second:
        next_line(first, "4 wait to be ")
        first.kill()
        second.communicate(timeout=200)
    assert second.returncode == 128 + signal.SIGKILL
    khvdrun.wait_until_gone()


def test_the_job_ends_for_all_hosts_as_it_ends_for_the_first(start):
    program = (sys.executable, "-c", "import sys; sys.exit(7)")
    with start(0, TWO, program=program) as first, start(1, TWO) as second:
        said = [job.communicate(timeout=200) for job in (first, second)]
    assert [first.returncode, second.returncode] == [7, 7], said


def test_hosts_meet_with_tls_and_a_secret_of_a_file(start, tmp_path):
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    file.write_text("the one of all hosts in a file")
    known = {"KERAS_HVD_SECRET_FILE": str(file), "KERAS_HVD_SECRET": ""}
    options = f"--tls {TWO}"
    with (
        start(0, options, 3, "7", **COUNTS, **known) as first,
        start(1, options, **known) as second,
    ):
        said, seen = ended([first, second], tmp_path)
    assert [first.returncode, second.returncode] == [0, 0], said
    assert [each["sizes"] for each in seen] == [[4, 3]] * 3


def test_a_host_that_does_not_come_is_said(start):
    with start(0, f"--start-timeout 1 {TWO}") as first:
        _, err = first.communicate(timeout=200)
    assert first.returncode == TRY_AGAIN
    assert "waited 1 s, and 1 of 2 hosts are there" in err


@pytest.mark.parametrize(
    "options, variables, why",
    [
        (TWO, {"KERAS_HVD_SECRET": "another one, also long"}, "another secret"),
        (f"--tls {TWO}", {}, "was started with TLS"),
    ],
)
def test_a_host_that_does_not_belong_is_refused(start, options, variables, why):
    # Another host at that place might be the right one, until then.
    patience = "--start-timeout 10"
    with (
        start(0, TWO) as first,
        start(1, f"{patience} {options}", **variables) as second,
    ):
        _, err = second.communicate(timeout=200)
        first.terminate()
    assert second.returncode == TRY_AGAIN
    assert err.startswith("khvdrun: error: ") and why in err


def test_one_of_two_hosts_with_one_number_is_told(start):
    """The one that came second, whichever that is: the first's number is its own."""
    options = "--start-timeout 20 --nnodes 3:4 -np 2"
    with (
        start(0, options),
        start(1, options, on=1) as one,
        start(1, options, on=2) as other,
    ):
        said = [job.communicate(timeout=200)[1] for job in (one, other)]
    assert [one.returncode, other.returncode] == [TRY_AGAIN, TRY_AGAIN]
    told = ["a host with --node-rank 1 is in the job" in each for each in said]
    assert sorted(told) == [False, True], said


LAST_LINES = """
import os, subprocess, sys
if os.environ["KERAS_HVD_RANK"] == "1":
    subprocess.Popen(["sleep", "1000"])
    sys.stdout.write("x" * 300_000 + "\\nthe last line\\n")
"""


def test_all_output_arrives_and_nothing_is_left(start, khvdrun):
    """Also where a rank leaves processes behind."""
    options = "--nnodes 2:3 -np 1"
    program = (sys.executable, "-c", LAST_LINES)
    with start(0, options, program=program) as first, start(1, options) as second:
        out, err = first.communicate(timeout=200)
        second.wait(timeout=100)
    assert [first.returncode, second.returncode] == [0, 0], err
    assert "[1] the last line\n" in out
    khvdrun.wait_until_gone()
