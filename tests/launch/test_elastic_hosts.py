"""khvdrun --min-np on several hosts: ranks go and come, and so do hosts.

Hosts are network namespaces here, which khvdrun reaches from the first of them, by an
agent of the tests or by ssh.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import network
import pytest
from elastic_jobs import COUNTS, SCRIPT, check, check_weights

from keras_hvd.job import cores
from keras_hvd.report import timelines

AGAIN = "--blacklist-cooldown-range 0 0"


@pytest.fixture
def start(khvdrun, hosts, tmp_path):
    """Starts khvdrun on the first host; H0, H1 and H2 in options are their addresses.

    Without a program, it runs the script of deaths.
    """
    agent = network.agent(hosts, tmp_path / "agent")

    def start(options, *words, program=None, agent=f"--launch-agent {agent}", **env):
        options = f"{options} {agent}"
        for number, host in enumerate(hosts):
            options = options.replace(f"H{number}", host.address)
        program = program or (sys.executable, SCRIPT, tmp_path)
        given = *options.split(), *program, *words
        return khvdrun.start(*given, on=hosts[0], env=env)

    return start


@pytest.fixture
def train(start, tmp_path):
    """Runs it to its end; returns how that was, and what ranks saw."""

    def train(*words, **env):
        with start(*words, **env) as job:
            return end(job, tmp_path)

    return train


def end(job, folder):
    out, err = job.communicate(timeout=200)
    seen = [json.loads(each.read_text()) for each in folder.glob("*.json")]
    ended = subprocess.CompletedProcess(job.args, job.returncode, out, err)
    return ended, sorted(seen, key=lambda each: each["rank"])


def next_line(job, beginning):
    """The rest of the next line of rank 0 that begins so."""
    for line in job.stdout:
        if line.startswith(f"[0] {beginning}"):
            return line.removeprefix(f"[0] {beginning}").strip()
    pytest.fail(f"no line begins with {beginning!r}: {job.stderr.read()}")


def script_of(file, does="cat"):
    """A script that prints a file's lines, or does what they say."""
    script = file.with_name("script")
    script.write_text(f"#!/bin/sh\n{does} {file}\n")
    script.chmod(0o755)
    return script


def replace(file, *lines):
    """Gives a file other lines, at once."""
    new = file.with_name("new")
    new.write_text("\n".join(lines))
    new.rename(file)


def started_as(seen):
    return [each["started as"] for each in seen]


def test_the_others_go_on(train, one_process):
    """Without rank 0, whose host all others have met."""
    ended, seen = train("-np 4 --min-np 2 -H H1:2,H0:1,H2:1", 0, "7")
    assert ended.returncode == 0, ended.stderr
    check(seen, one_process, [4, 3])
    assert "was killed by signal 9 (SIGKILL); 3 ranks are left\n" in ended.stderr
    assert "rank 0 (on 10.87.0.2) " in ended.stderr


def test_the_others_go_on_if_the_next_rank_0_dies_as_it_joins(train):
    """They are told another place while they wait for it at its address."""
    options = "-np 4 --min-np 2 --start-timeout 300 -H H0:2,H1:2"
    ended, seen = train(options, 0, "5", 1, "5?", **COUNTS)
    assert ended.returncode == 0, ended.stderr
    assert started_as(seen) == [2, 3]
    assert {each["step"] for each in seen} == {20}


def test_one_that_died_is_started_again_on_its_host(train, one_process):
    options = f"-np 4 --min-np 2 {AGAIN} -H H1:2,H0:1,H2:1"
    ended, seen = train(options, 0, "5", MEMBERS="4")
    assert ended.returncode == 0, ended.stderr
    assert started_as(seen) == [1, 2, 3, 0]
    check_weights(seen, one_process)
    assert "those that were started as 1, 2, 3, 0; rank 0 is new\n" in ended.stderr


def test_a_free_slot_of_another_host_takes_the_place_of_one_that_died(train):
    options = "-np 3 --min-np 2 -H H1:2,H2:2"
    ended, seen = train(options, 1, "5", MEMBERS="3", **COUNTS)
    assert ended.returncode == 0, ended.stderr
    assert started_as(seen) == [0, 2, 3]
    # Each host's cores are shared by its own slots.
    assert {each["threads"] for each in seen} == {str(max(1, cores.available() // 2))}


def test_a_host_on_which_no_rank_is_left_is_left_out(train):
    """A free slot of another host takes the place at once."""
    options = "-np 2 --min-np 1 -H H0:1,H1:1,H2:1 --blacklist-cooldown-range 600 600"
    ended, seen = train(options, 1, "5", MEMBERS="2", **COUNTS)
    assert ended.returncode == 0, ended.stderr
    assert started_as(seen) == [0, 2]
    left_out = "no rank is left on 10.87.0.2, which is left out for 600 s\n"
    assert f"1 rank is left; {left_out}" in ended.stderr


def test_there_is_no_report_of_a_job_whose_rank_0_is_elsewhere(start, tmp_path):
    """The others' are there, and a timeline of each, also of that one."""
    told = f"--report {tmp_path}/report.html --timeline-filename {tmp_path}/timeline"
    options = f"-np 3 --min-np 2 -H H0:2,H1:1 {told} {AGAIN}"
    # None comes after that: it might join before the last step.
    ends = 0, "5", 1, "17", "1new", "never"
    with start(options, *ends, MEMBERS="3", **COUNTS) as job:
        ended, seen = end(job, tmp_path)
    assert ended.returncode == 0, ended.stderr
    # Rank 2, of the other host, is the first of those that are left at last.
    assert started_as(seen)[0] == 2
    assert [each.name for each in sorted(tmp_path.glob("report*"))] == [
        *("report.2.html", "report.3.html", "report.html")
    ]
    assert timelines.read([tmp_path / "timeline.4"]).size == 2
    assert "; there is none of 4, where rank 0 was on another host" in ended.stderr


def test_all_free_slots_are_used_up_to_the_most(train):
    options = "-np 2 --min-np 2 --max-np 4 -H H0:2,H2:4"
    ended, seen = train(options, MEMBERS="4", **COUNTS)
    assert ended.returncode == 0, ended.stderr
    assert sorted(started_as(seen)) == [0, 1, 2, 3]


def test_a_job_on_one_host_grows_too(khvdrun, tmp_path):
    program = sys.executable, SCRIPT, tmp_path
    ended = khvdrun.run(
        *("-np", 1, "--min-np", 1, "--max-np", 3, *program),
        env={**COUNTS, "MEMBERS": "3"},
    )
    assert ended.returncode == 0, ended.stderr
    assert len([*tmp_path.glob("*.json")]) == 3


def test_hosts_that_a_script_lists_come_and_leave(start, hosts, tmp_path):
    """Their ranks leave at a commit, so nothing is trained again."""
    listed = tmp_path / "listed"
    first, second = f"{hosts[0].address}:2", hosts[1].address
    listed.write_text(first)
    script = script_of(listed)
    options = f"-np 2 --min-np 2 --max-np 8 --slots 1 --host-discovery-script {script}"
    with start(options, MEMBERS="3,2", **COUNTS) as job:
        assert next_line(job, "2 wait to be ") == "3"
        replace(listed, first, second)
        assert next_line(job, "3 wait to be ") == "2"
        replace(listed, first)
        ended, seen = end(job, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [each["sizes"] for each in seen] == [[2, 3, 2]] * 2
    assert "rank 2 leaves: 10.87.0.2 is not listed any more\n" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "is killed" not in ended.stderr


def test_all_hosts_can_be_replaced(start, hosts, tmp_path):
    """The last rank that has the state leaves once others have it."""
    listed = tmp_path / "listed"
    listed.write_text(f"{hosts[0].address}:2")
    options = f"-np 2 --min-np 2 --host-discovery-script {script_of(listed)}"
    with start(options, ON="host1", **COUNTS) as job:
        next_line(job, "waits to be on host1")
        replace(listed, f"{hosts[1].address}:2")
        ended, seen = end(job, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert sorted(started_as(seen)) == [2, 3]
    assert {each["began at"][0] for each in seen} == {15}
    assert "is killed" not in ended.stderr


def test_a_host_that_comes_back_is_used_again(start, hosts, tmp_path):
    listed = tmp_path / "listed"
    one, two = f"{hosts[0].address}:1", f"{hosts[1].address}:1"
    listed.write_text(f"{one}\n{two}")
    script = f"--host-discovery-script {script_of(listed)}"
    with start(f"-np 2 --min-np 1 {script}", MEMBERS="1,2", **COUNTS) as job:
        assert next_line(job, "2 wait to be ") == "1"
        replace(listed, one)
        assert next_line(job, "1 wait to be ") == "2"
        replace(listed, one, two)
        ended, seen = end(job, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert started_as(seen) == [0, 1]


def test_the_last_list_of_a_script_holds(start, hosts, tmp_path):
    """It is said once why there is no other, and again if that changes."""
    answer = tmp_path / "answer"
    answer.write_text(f"echo {hosts[0].address}:2")
    script = script_of(answer, ".")
    options = f"-np 2 --min-np 1 --max-np 3 --host-discovery-script {script}"
    with start(options, MEMBERS="3", **COUNTS) as job:
        next_line(job, "2 wait")
        for line in "echo a:b", "exit 3", "echo":
            replace(answer, line)
            assert any("The last list holds" in said for said in job.stderr)
        replace(answer, f"echo {hosts[0].address}:3")
        ended, seen = end(job, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert len(seen) == 3


def test_too_few_slots_are_not_waited_for_in_vain(start):
    script = "--host-discovery-script false"
    with start(f"-np 2 --min-np 2 --start-timeout 5 {script}") as job:
        _, err = job.communicate(timeout=100)
    assert job.returncode == 2
    assert "2 slots are wanted, and after 5 s its exit code was 1" in err


def test_ssh_starts_the_ranks(train, by_ssh, one_process, tmp_path):
    """In khvdrun's folder, where ssh itself does not begin."""
    options = "-np 3 --min-np 2 -H H1:1,H0:1,H2:1"
    program = os.path.relpath(sys.executable), os.path.relpath(SCRIPT), tmp_path
    ended, seen = train(options, 1, "5", program=program, agent="", **by_ssh)
    assert ended.returncode == 0, ended.stderr
    check(seen, one_process, [3, 2])


def test_the_others_go_on_without_a_host_that_vanishes(
    start, khvdrun, by_ssh, hosts, tmp_path
):
    options = "-np 3 --min-np 2 --elastic-timeout 60 -H H0:1,H1:1,H2:1"
    with start(options, agent="", MEMBERS="2", **COUNTS, **by_ssh) as job:
        next_line(job, "3 wait to be 2")
        hosts[1].unplug()
        try:
            ended, seen = end(job, tmp_path)
        finally:
            hosts[1].plug_in()
    khvdrun.wait_until_gone()
    assert ended.returncode == 0, ended.stderr
    assert started_as(seen) == [0, 2]
    assert "khvdrun: 10.87.0.2 is not connected any more" in ended.stderr


def test_a_host_that_cannot_be_reached_is_said(start, by_ssh):
    options = "-np 2 --min-np 2 -H H0:1,10.87.0.99:1"
    with start(options, agent="", **COUNTS, **by_ssh) as job:
        _, err = job.communicate(timeout=60)
    assert job.returncode == 255
    assert "connect to host 10.87.0.99" in err
    assert "khvdrun: 10.87.0.99 starts no rank\n" in err


ENDING = """
import signal, sys
import keras_hvd
def end(number, frame):
    print(f"ends by {number}", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
keras_hvd.init()
if keras_hvd.rank() == 1 and len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
print("runs", flush=True)
signal.pause()
"""


def test_ranks_of_other_hosts_get_signals(start):
    program = sys.executable, "-c", ENDING
    with start("-np 2 --min-np 2 -H H1:1,H2:1", program=program) as job:
        next_line(job, "runs")
        # The second one may not run so far.
        os.kill(job.pid, signal.SIGTERM)
        out, err = job.communicate(timeout=100)
    assert "[0] ends by 15" in out
    assert job.returncode == 7, err


def test_exit_codes_come_from_other_hosts(start):
    program = sys.executable, "-c", ENDING, "5"
    with start("-np 2 --min-np 2 -H H1:1,H2:1", program=program) as job:
        _, err = job.communicate(timeout=100)
    assert job.returncode == 5, err


def test_nothing_is_left_when_khvdrun_is_killed(start, khvdrun):
    program = sys.executable, "-c", ENDING
    with start("-np 2 --min-np 2 -H H1:1,H2:1", program=program) as job:
        next_line(job, "runs")
        job.kill()
    khvdrun.wait_until_gone()


def test_a_command_that_a_host_lacks_is_said(start):
    program = ("no-such-command",)
    with start("-np 2 --min-np 2 -H H1:1,H2:1", program=program) as job:
        _, err = job.communicate(timeout=100)
    assert job.returncode == 127
    assert "cannot execute 'no-such-command' in " in err


def test_a_signal_ends_ranks_whose_host_is_not_reached_so_far(start, khvdrun, tmp_path):
    waits = tmp_path / "waits"
    waits.write_text("#!/bin/sh\nexec sleep 1000\n")
    waits.chmod(0o755)
    options, agent = "-np 2 --min-np 2 -H H1:1,H2:1", f"--launch-agent {waits}"
    with start(options, program=["true"], agent=agent) as job:
        while sum("sleep 1000" in each for each in khvdrun.processes()) < 2:
            time.sleep(0.1)
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=20)
    assert job.returncode == 128 + signal.SIGINT
    assert err == "khvdrun: the job was ended by SIGINT\n"


WITHOUT_END = "while True: print('x' * 1000)"


def test_ranks_of_other_hosts_see_that_nobody_reads(start):
    """As ranks of this host do."""
    program = sys.executable, "-c", WITHOUT_END
    with start("-np 2 --min-np 2 -H H1:1,H2:1", program=program) as job:
        job.stdout.readline()
        job.stdout.close()
        err = job.stderr.read()
    assert job.returncode == 1
    assert "BrokenPipeError" in err


def are_blocked(program) -> int:
    """How many processes run a program, and wait for room in a pipe."""
    command = "\0".join(program).encode() + b"\0"
    blocked = 0
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_it = (each / "cmdline").read_bytes() == command
            blocked += is_it and "pipe_write" in (each / "wchan").read_text()
    return blocked


def test_output_waits_for_its_reader(start):
    """It is complete, and meanwhile the ranks are there."""
    program = sys.executable, "-c", "print(('x' * 99 + '\\n') * 100_000)"
    with start("-np 2 --min-np 2 -H H1:1,H2:1", program=program) as job:
        limit = time.monotonic() + 60
        while are_blocked(program) < 2:
            assert time.monotonic() < limit, "the ranks do not wait for their reader"
            time.sleep(0.1)
        out, err = job.communicate(timeout=100)
    assert (job.returncode, err) == (0, "")
    assert out.count("x" * 99 + "\n") == 200_000
