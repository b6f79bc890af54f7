"""khvdrun --membership and --join: a service that starts no rank, and hosts that join.

Hosts are network namespaces. The service is on the first of them.
"""

import json
import os
import signal
import sys

import pytest
from elastic_jobs import COUNTS, SCRIPT, check, check_weights

TRY_AGAIN = 75
SECRET = {"KERAS_HVD_SECRET": "the one of all hosts here"}
FOUR = "-np 4 --min-np 2"


@pytest.fixture
def serve(khvdrun, hosts):
    """Starts the service, with options."""

    def serve(options):
        place = f"{hosts[0].address}:29400"
        given = "--membership", place, *options.split()
        return khvdrun.start(*given, on=hosts[0], env=SECRET)

    return serve


@pytest.fixture
def join(khvdrun, hosts, tmp_path):
    """Starts the khvdrun of a host, with two slots."""

    def join(number, *words, options="", program=None, **env):
        place = f"--join {hosts[0].address}:29400 -np 2 {options}"
        program = program or (sys.executable, SCRIPT, tmp_path)
        variables = {**SECRET, **env}
        given = *place.split(), *program, *words
        return khvdrun.start(*given, on=hosts[number], env=variables)

    return join


def ended(tmp_path, *jobs):
    """What each khvdrun said, in their order, and what ranks have seen."""
    said = [job.communicate(timeout=200) for job in jobs]
    seen = [json.loads(each.read_text()) for each in tmp_path.glob("*.json")]
    return said, sorted(seen, key=lambda each: each["rank"])


def codes(*jobs):
    return [job.returncode for job in jobs]


def next_line(stream, wanted):
    """The rest of the next line that has this in it."""
    seen = ""
    for line in stream:
        seen += line
        if wanted in line:
            return line.partition(wanted)[2].strip()
    pytest.fail(f"no line has {wanted!r}: {seen}")


def test_a_rank_dies_and_the_others_go_on(serve, join, one_process, tmp_path):
    with serve(FOUR) as service, join(0, 3, "7") as first, join(1, 3, "7") as second:
        said, seen = ended(tmp_path, service, first, second)
    assert codes(service, first, second) == [0, 0, 0], said
    check(seen, one_process, [4, 3])
    assert "the job begins with 4 ranks" in said[0][1]
    assert "was killed by signal 9 (SIGKILL); 3 ranks are left" in said[0][1]


def test_a_host_joins_late_and_leaves(serve, join, tmp_path):
    """A signal to its khvdrun makes its ranks leave at a commit."""
    with (
        serve("--min-np 2 --max-np 4") as service,
        join(1, MEMBERS="4,2", **COUNTS) as first,
    ):
        assert next_line(first.stdout, "2 wait to be ") == "4"
        with join(2, MEMBERS="4,2", **COUNTS) as second:
            assert next_line(first.stdout, "4 wait to be ") == "2"
            second.send_signal(signal.SIGTERM)
            said, seen = ended(tmp_path, service, first, second)
    assert codes(service, first, second) == [0, 0, 0], said
    assert [each["sizes"][-2:] for each in seen] == [[4, 2]] * 2
    assert "Traceback" not in said[1][1] + said[2][1]
    assert "this host leaves the job, since khvdrun got SIGTERM" in said[2][1]


def test_the_others_go_on_without_a_host_that_is_cut_off(serve, join, hosts, tmp_path):
    """It ends alone, once no service comes within --elastic-timeout."""
    with (
        serve(f"{FOUR} --elastic-timeout 20") as service,
        join(1, MEMBERS="2", **COUNTS) as first,
    ):
        next_line(service.stderr, "host1 has joined, with 2 slots")
        with join(2, MEMBERS="2", **COUNTS) as second:
            next_line(first.stdout, "4 wait to be ")
            hosts[2].unplug()
            try:
                said, seen = ended(tmp_path, service, first, second)
            finally:
                hosts[2].plug_in()
    assert codes(service, first, second) == [0, 0, TRY_AGAIN], said
    assert "was lost with its host" in said[0][1]
    assert [each["sizes"] for each in seen] == [[4, 2]] * 2
    assert "is not there" in said[2][1]


def test_the_others_go_on_without_a_host_whose_khvdrun_is_killed(
    serve, join, khvdrun, tmp_path
):
    waits = {"MEMBERS": "2", **COUNTS}
    with serve(FOUR) as service, join(1, **waits) as first:
        next_line(service.stderr, "host1 has joined, with 2 slots")
        with join(2, **waits) as second:
            next_line(first.stdout, "4 wait to be ")
            second.kill()
            said, seen = ended(tmp_path, service, first)
    assert codes(service, first) == [0, 0], said
    assert [each["sizes"][-1] for each in seen] == [2, 2]
    khvdrun.wait_until_gone()


def test_a_service_is_killed_and_started_again(serve, join, one_process, tmp_path):
    """Ranks train on; a host joins, and one of them dies, under the second one."""
    options = "-np 2 --min-np 2 --max-np 4"
    with serve(options) as before, join(1, 1, "18", MEMBERS="2,4") as first:
        assert next_line(first.stdout, "2 wait to be ") == "4"
        before.kill()
        next_line(first.stderr, "is lost")
        with serve(options) as after:
            # Another host that came before this one would begin another job.
            goes_on = "the job goes on with this service, and "
            assert next_line(after.stderr, goes_on) == "2 ranks"
            with join(2, 1, "18", MEMBERS="2,4") as second:
                said, seen = ended(tmp_path, after, first, second)
    assert codes(after, first, second) == [0, 0, 0], said
    assert "3 ranks are left" in said[0][1]
    assert [each["sizes"][-2:] for each in seen] == [[4, 3]] * 3
    check_weights(seen, one_process)


def test_a_rank_dies_while_there_is_no_service(serve, join, khvdrun, tmp_path):
    options = "-np 2 --min-np 1 --max-np 4"
    waits = {"MEMBERS": "2,3", **COUNTS}
    with serve(options) as before, join(1, **waits) as first:
        assert next_line(first.stdout, "2 wait to be ") == "3"
        before.kill()
        next_line(first.stderr, "is lost")
        os.kill(ranks_of(khvdrun)[-1], signal.SIGKILL)
        with serve(options) as after:
            next_line(after.stderr, "was killed by signal 9 (SIGKILL); 1 rank is left")
            with join(2, **waits) as second:
                said, seen = ended(tmp_path, after, first, second)
    assert codes(after, first, second) == [0, 0, 0], said
    assert [each["sizes"][-1] for each in seen] == [3] * 3


def ranks_of(khvdrun):
    """Their processes."""
    named = [each for each in khvdrun.processes() if "keras_hvd.launch" not in each]
    return [int(each.partition(":")[0]) for each in named if str(SCRIPT) in each]


def test_another_job_is_served_at_the_address(serve, join, hosts):
    """A host that comes back too late is refused, and Ctrl-C ends the other job."""
    with serve("--min-np 2") as before, join(1, MEMBERS="3", **COUNTS) as first:
        next_line(first.stdout, "2 wait to be ")
        hosts[1].unplug()
        try:
            before.kill()
            before.wait()
            with serve("--min-np 2") as after, join(2, MEMBERS="3", **COUNTS) as second:
                next_line(second.stdout, "2 wait to be ")
                hosts[1].plug_in()
                refused = first.communicate(timeout=200)
                after.send_signal(signal.SIGINT)
                said = [job.communicate(timeout=200) for job in (after, second)]
        finally:
            hosts[1].plug_in()
    assert first.returncode == TRY_AGAIN
    assert "it serves another job" in refused[1]
    assert codes(after, second) == [128 + signal.SIGINT] * 2, said
    assert all("the job was ended by SIGINT" in err for _, err in said)


def test_all_end_with_the_code_of_the_rank_that_failed_first(serve, join):
    program = (sys.executable, "-c", "import sys; sys.exit(7)")
    with (
        serve(FOUR) as service,
        join(1, program=program) as first,
        join(2, program=program) as second,
    ):
        said = [job.communicate(timeout=200) for job in (service, first, second)]
    assert codes(service, first, second) == [7, 7, 7], said
    assert all("ended with exit code 7" in err for _, err in said)


HEEDS_NO_SIGTERM = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["KERAS_HVD_RANK"] == "1":
    sys.exit(7)
while True:
    signal.pause()
"""


def test_a_rank_that_heeds_no_signal_is_killed_when_the_job_fails(serve, join):
    options = "--term-after 0.1 --kill-after 0.1"
    program = (sys.executable, "-c", HEEDS_NO_SIGTERM)
    with (
        serve("--min-np 2") as service,
        join(1, options=options, program=program) as host,
    ):
        said = [job.communicate(timeout=200) for job in (service, host)]
    assert codes(service, host) == [7, 7], said


def test_no_service_comes_again(serve, join):
    with (
        serve("--min-np 2 --elastic-timeout 2") as service,
        join(1, MEMBERS="3", **COUNTS) as host,
    ):
        next_line(host.stdout, "2 wait to be ")
        service.kill()
        said = host.communicate(timeout=200)
    assert host.returncode == TRY_AGAIN
    assert "is not there: " in said[1] and "for 2 s" in said[1]


@pytest.mark.parametrize(
    "options, variables, why",
    [
        ("", {"KERAS_HVD_SECRET": "another one, also long"}, "another secret"),
        ("--tls", {}, "was started with TLS"),
    ],
)
def test_a_host_that_does_not_belong_is_refused(serve, join, options, variables, why):
    with serve("--min-np 2") as service:
        with join(1, options=options, **variables) as host:
            said = host.communicate(timeout=200)
        service.send_signal(signal.SIGINT)
    assert [host.returncode, service.returncode] == [TRY_AGAIN, 128 + signal.SIGINT]
    assert said[1].startswith("khvdrun: error: ") and why in said[1]
