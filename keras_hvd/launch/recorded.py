"""The recording of a job: the folder for its ranks, and the report at the job's end."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from keras_hvd.launch.options import Options
from keras_hvd.launch.status import Listener
from keras_hvd.world.rendezvous.nodes import NodeRanks


def prepare(folder: Path, options: Options) -> None:
    """Writes the files that the ranks need into the folder of their recording."""
    # Imported only for a recording: it takes NumPy.
    from keras_hvd.recording import files, rank_records

    rank_records.create(folder / files.RANKS, options.ranks)
    (folder / files.COMMAND).write_text(shlex.join(options.command))
    (folder / files.HOST).write_text(socket.gethostname())


class Recorded:
    """A recording on this host, made for `khvdrun --report` or `--status`.

    The folder of a report is beside it, so that it can be found if `khvdrun` is killed.
    If the ranks go on in another job, that has a folder within it.

    Args:
        options: those of `khvdrun`.
        report: the file for the report; None for none.

    Raises:
        OSError: the folder cannot be made, or the port of `--status` is taken.
    """

    def __init__(self, options: Options, report: Path | None):
        self._options = options
        self._report = report
        port = options.status_port
        self.listener = None if port is None else Listener(port)
        """The listener for `--status`; None without that option."""
        if self._report is None:
            self.folder = Path(tempfile.mkdtemp(prefix="khvdrun-status-"))
        else:
            name = f"{self._report.name}.recording-"
            self.folder = Path(tempfile.mkdtemp(prefix=name, dir=self._report.parent))
        try:
            prepare(self.folder, options)
        except OSError:
            self._remove()
            raise
        self.of_now = self.folder
        """The part of it for the job in which the ranks are."""

    @property
    def variables(self) -> dict[str, str]:
        """The additions to the ranks' environment."""
        return {"KERAS_HVD_REPORT": str(self.folder)}

    def folder_of(self, job: str, ranks: int) -> Path:
        """The folder for another job in which so many ranks may go on.

        It is made when it is first asked for. Without room there is none, and so no
        recording of that job.
        """
        folder = self._folder_of(job)
        with contextlib.suppress(OSError):
            folder.mkdir()
            prepare(folder, dataclasses.replace(self._options, ranks=ranks))
        return folder

    def note_generation(self, job: str, number: int) -> None:
        """Notes that ranks go on in a job, the `number`th one of all in which they do.

        It was not called off, as others may have been that have a folder.
        """
        from keras_hvd.recording import files

        self.of_now = self._folder_of(job)
        with contextlib.suppress(OSError):
            (self.of_now / files.GENERATION).write_text(str(number))

    def _folder_of(self, job: str) -> Path:
        return self.folder / job.rpartition(".")[2]

    def finish(self, ended: str, events: Iterable[tuple[float, str, str]]) -> str:
        """Writes the report, if there is to be one, and removes the recording.

        Args:
            ended: how the job ended, as a clause after "The job"; "" if no rank was
                started.
            events: when what kind of thing was said, and the text (`time.time`).

        Returns:
            A line about the report; "" for none.
        """
        if self._report is None or not ended:
            self._remove()
            return ""
        from keras_hvd.report import generations, recording

        try:
            end = time.time(), "end", f"the job {ended}"
            found = generations.read(self.folder)
            found.end(ended, [*events, end])
            line = found.write(str(self._report))
        except recording.NotARecordingError:
            self._remove()
            return (
                "no report: rank 0 did not come as far as keras_hvd.init(), or has "
                "said why it records nothing"
            )
        # Whatever the error, the job's own end must be reported.
        except Exception as error:  # noqa: BLE001
            return (
                f"the report cannot be written to {str(self._report)!r} "
                f"({type(error).__name__}: {error})"
            )
        self._remove()
        return line

    def left(self) -> str:
        """Tells where the recording is if it has not become a report; "" if it is gone.

        A recording for `--status` alone is removed.
        """
        if self._report is None:
            self._remove()
        if not self.folder.exists():
            return ""
        return (
            f"the recording is in {str(self.folder)!r}: python -m keras_hvd.report "
            f"{shlex.quote(str(self.folder))} makes the report"
        )

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def wanted(options: Options, ranks: NodeRanks) -> Recorded | None:
    """The recording of this host, if any: only rank 0's host makes a report.

    Raises OSError as `Recorded` does.
    """
    report = options.report if ranks.first_rank == 0 else None
    if report is None and options.status_port is None:
        return None
    return Recorded(options, report)


def what_failed(error: OSError, options: Options) -> str:
    """Explains why there can be no recording.

    Args:
        error: the error of `wanted`.
        options: the options given to it.

    Example:

    >>> options = Options(check_build=False, status_port=9100)
    >>> what_failed(OSError(errno.EADDRINUSE, "in use"), options)
    '--status: port 9100 is taken: 0 takes any'
    """
    if error.errno == errno.EADDRINUSE:
        return f"--status: port {options.status_port} is taken: 0 takes any"
    if error.errno == errno.EACCES and error.filename is None:
        return f"--status: port {options.status_port}: {error.strerror}"
    return f"the job cannot be recorded: {error}"
