"""What khvdrun says of a killed rank when the kernel's log cannot be read."""

import pytest

from keras_hvd.launch import cores, memory


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """Files that stand for the kernel's counters, of the group and of the machine."""
    group, machine = tmp_path / "memory.events", tmp_path / "vmstat"
    group.write_text("oom 1\noom_kill 1\n")
    machine.write_text("pgfault 5\noom_kill 3\n")
    monkeypatch.setattr(memory, "_open_kernel_log", lambda: None)
    monkeypatch.setattr(memory, "_VMSTAT", machine)
    monkeypatch.setattr(
        cores,
        "cgroup_files",
        lambda controller, name: [group] if name == "memory.events" else [],
    )
    return group, machine


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
