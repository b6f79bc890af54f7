"""khvdrun's words about a killed rank, by the kernel's log or else its counts."""

import os
import socket

import pytest

from keras_hvd.job import cores
from keras_hvd.launch import memory


@pytest.fixture
def log(monkeypatch):
    """Stands for the kernel's log, of which each read takes a record."""
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reader.setblocking(False)
    monkeypatch.setattr(memory, "_open_kernel_log", reader.fileno)
    with reader, writer:
        yield writer


def test_believes_the_log(log):
    watch = memory.OutOfMemoryWatch()
    assert watch.killed(7) is None
    log.send(b"4,1,9,-;Out of memory: Killed process 7 (python) total-vm:1kB\n")
    log.send(b"6,2,9,-;oom_reaper: reaped process 7 (python)\n")
    assert watch.killed(7) == "by the kernel because memory ran out"
    log.send(b"4,3,9,-;Out of memory: Killed process 70 (python) total-vm:1kB\n")
    assert watch.killed(7) is None


def test_reads_the_log_from_where_the_job_starts(tmp_path, monkeypatch):
    file = tmp_path / "kmsg"
    file.write_text("4,1,9,-;Out of memory: Killed process 7 (python)\n")
    own = os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr(memory, "_FIRST_PROCESS_NAMESPACE", own)
    monkeypatch.setattr(memory, "_KERNEL_LOG", file)
    opened = memory._open_kernel_log()
    assert os.lseek(opened, 0, os.SEEK_CUR) == file.stat().st_size
    os.close(opened)


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """Files that stand for the kernel's counters, of the group and of the machine."""
    group, machine = tmp_path / "memory.events", tmp_path / "vmstat"
    above = tmp_path / "above"
    above.write_text("oom_kill 8\n")
    group.write_text("oom 1\noom_kill 1\n")
    machine.write_text("pgfault 5\noom_kill 3\n")
    monkeypatch.setattr(memory, "_open_kernel_log", lambda: None)
    monkeypatch.setattr(memory, "_VMSTAT", machine)
    monkeypatch.setattr(
        cores,
        "cgroup_files",
        lambda controller, name: [group, above] if name == "memory.events" else [],
    )
    return group, machine, above


def test_knows_nothing_while_nothing_was_counted(counters):
    assert memory.OutOfMemoryWatch().killed(1) is None


def test_trusts_the_control_group(counters):
    watch = memory.OutOfMemoryWatch()
    counters[0].write_text("oom 2\noom_kill 2\n")
    assert watch.killed(1) == (
        "by the kernel because the control group's memory ran out"
    )


def test_suspects_the_machine(counters):
    watch = memory.OutOfMemoryWatch()
    counters[1].write_text("pgfault 5\noom_kill 4\n")
    assert watch.killed(1).startswith("probably by the kernel")


def test_what_was_killed_beside_the_group_is_none_of_its_ranks(counters):
    watch = memory.OutOfMemoryWatch()
    counters[2].write_text("oom_kill 9\n")
    assert watch.killed(1) is None
