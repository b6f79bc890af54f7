"""The whole diagnosis: the checks, their order, and their output."""

import functools
import platform
import signal
import time
from collections.abc import Callable, Sequence

from keras_hvd.launch.diagnosis import (
    limits,
    machine,
    measurement,
    network,
    optional,
    shared_memory,
    software,
)
from keras_hvd.launch.diagnosis.findings import Finding, Verdict, count, find
from keras_hvd.launch.options import Options
from keras_hvd.version import __version__

_Look = tuple[str, Callable[[], Finding]]


def run(options: Options) -> int:
    """Checks, measures, and prints a line for each finding.

    Returns 0 if a job of `options.ranks` ranks would run, 1 if not, and 130 after
    Ctrl-C.
    """
    try:
        return _diagnose(options)
    except KeyboardInterrupt:
        print("\ninterrupted", flush=True)
        return 128 + signal.SIGINT


def _diagnose(options: Options) -> int:
    started = time.monotonic()
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    job = f"a job of {_size(options)}"
    print(f"keras_hvd {__version__} on {system}: {job}")
    findings: list[Finding] = []
    for title, looks in _sections(options).items():
        findings += _show(title, looks)
    if _fails(findings):
        print("\nmeasured:\n  nothing, because of the failure above")
    else:
        findings += _measure(options)
    findings += _show("optional", _OPTIONAL)
    return _conclude(findings, options, time.monotonic() - started)


def _sections(options: Options) -> dict[str, list[_Look]]:
    ranks, bind_to = options.ranks, options.bind_to
    call = functools.partial
    sections: dict[str, list[_Look]] = {
        "software": [
            ("engine", software.engine),
            ("TensorFlow", software.tensorflow),
            ("Keras", software.keras),
        ],
        "cores": [
            ("cores", call(machine.available, ranks)),
            ("physical cores", call(machine.threads, ranks)),
            ("binding", call(machine.binding, ranks, bind_to)),
            ("memory nodes", call(machine.memory_nodes, bind_to)),
            ("other load", machine.other_load),
            ("other jobs", shared_memory.other_ranks),
        ],
        "memory and limits": [
            ("memory", call(limits.memory, ranks)),
            ("/dev/shm", shared_memory.folder),
            ("leftovers", shared_memory.leftovers),
            ("open files", call(limits.open_files, ranks)),
            ("threads", call(limits.processes, ranks)),
        ],
    }
    if options.node is not None:
        sections["network"] = [("interface", call(network.interface, options.node))]
    return sections


_OPTIONAL = (("MPI", optional.mpi), ("GPUs", optional.gpus), ("NCCL", optional.nccl))


def _show(title: str, looks: Sequence[_Look]) -> list[Finding]:
    print(f"\n{title}:", flush=True)
    findings = []
    for name, look in looks:
        findings.append(find(name, look))
        print(findings[-1], flush=True)
    return findings


def _measure(options: Options) -> list[Finding]:
    looks = (
        ("wake-up", measurement.wake_up),
        ("new memory", functools.partial(measurement.new_memory, options)),
    )
    shown = _show("measured", looks)
    figures = measurement.run(options)
    found = (
        [figures]
        if isinstance(figures, Finding)
        else measurement.judge(figures, options)
    )
    for finding in found:
        print(finding, flush=True)
    return shown + found


def _size(options: Options) -> str:
    ranks = count(options.ranks, "rank")
    if options.node is None:
        return ranks
    return f"{ranks} on this host, node {options.node.number} of {options.node.count}"


def _conclude(findings: Sequence[Finding], options: Options, seconds: float) -> int:
    warnings = sum(finding.verdict is Verdict.WARNING for finding in findings)
    fails = _fails(findings)
    what = f"a job of {_size(options)} {'does not run' if fails else 'runs'}"
    print(
        f"\n{what}; {count(warnings, 'warning')}; diagnosed in {seconds:.0f} s",
        flush=True,
    )
    return 1 if fails else 0


def _fails(findings: Sequence[Finding]) -> bool:
    return any(finding.verdict is Verdict.FAILURE for finding in findings)
