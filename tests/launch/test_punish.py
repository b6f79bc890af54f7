"""A job is broken on purpose, and it is told whether it goes on."""

import sys
from pathlib import Path

import network
import pytest

SCRIPT = Path(__file__).parent / "ranks" / "punished.py"
OPTIONS = "-np 4 --min-np 2 --blacklist-cooldown-range 0 0"


@pytest.fixture
def punish(khvdrun, tmp_path):
    """Starts it with the options of both; the job may end once it has survived."""
    file = tmp_path / "ends"

    def punish(own, options, how="survives", on=None, is_interrupted=False):
        before = [sys.executable, "-m", "keras_hvd.elastic.punish", *own.split(), "--"]
        program = sys.executable, SCRIPT, file, how
        words = *options.split(), *program
        with khvdrun.start(*words, before=before, on=on) as started:
            said = []
            for line in started.stderr:
                said.append(line)
                if line == "punish: the job has survived, and may end\n":
                    file.touch()
                elif line.startswith("punish: event 1, ") and is_interrupted:
                    started.terminate()
            return started.wait(60), "".join(said)

    return punish


def test_a_job_on_one_host_survives(punish):
    code, said = punish("--events 8 --seed 1 --every 0.1", OPTIONS)
    assert code == 0, said
    assert "punish: event 8, " in said
    assert "punish: every rank that ended was killed, and no process is left\n" in said
    assert "descriptors" in said


def test_a_job_on_hosts_that_leave_and_return_survives(punish, two_hosts, tmp_path):
    listed = tmp_path / "listed"
    listed.write_text("".join(f"{host.address}:2\n" for host in two_hosts))
    agent = network.agent(two_hosts, tmp_path / "agent")
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    options = f"{OPTIONS} --host-discovery-script {script} --launch-agent {agent}"
    # Of more kinds, which ones come would depend on how fast ranks come back.
    kinds = "--only kill,leave,return"
    own = f"--events 8 --seed 2 --every 0.1 {kinds} --hosts-file {listed}"
    code, said = punish(own, options, on=two_hosts[0])
    assert code == 0, said
    assert ":2 leaves (seed 2)" in said
    assert ":2 returns (seed 2)" in said


def test_a_job_that_ends_is_told(punish):
    code, said = punish("--events 8 --seed 3 --only kill", OPTIONS, "ends")
    assert code == 1
    assert "punish: failed after event " in said
    assert "is killed: the job's exit code is 3\n" in said
    assert " of 8 events (seed 3)\n" in said


def test_a_training_that_is_too_short_is_told(punish):
    code, said = punish("--events 99 --only stop --every 0.1", OPTIONS, "is short")
    assert code == 1
    assert " events: let it take longer\n" in said


def test_a_job_that_hangs_is_told_and_ended(punish):
    own = "--events 8 --seed 4 --only kill --limit 2"
    code, said = punish(own, OPTIONS, "hangs")
    assert code == 1
    assert "punish: failed after event " in said
    assert " for 2 s\n" in said


def test_the_job_ends_with_what_punishes_it(punish):
    code, said = punish("--events 8 --only stop", OPTIONS, is_interrupted=True)
    assert code == 1
    assert said.endswith(" stops: it was interrupted\n")
