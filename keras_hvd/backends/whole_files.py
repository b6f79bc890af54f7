"""Files that are whole, whichever rank has written them last.

Ranks that save to one path at once would write into each other's file. So each rank
writes into a folder of its own, and then moves the files to their place. A reader finds
the files of one rank, old or new.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from keras.src.utils import file_utils

from keras_hvd.job import native

_PREFIX = ".saving-on-rank-"

# These name other files, and so take their places last.
_CONTENTS = (".index", ".json", ".pb", ".xml")


@contextlib.contextmanager
def staged(path: str | os.PathLike) -> Iterator[str]:
    """A path for a file or folder that takes the place of `path` at the end.

    A folder keeps its files of other names. Nothing is left after an error.

    Example:

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     target = os.path.join(folder, "notes.txt")
    ...     with staged(target) as own:
    ...         with open(own, "w") as file:
    ...             _ = file.write("whole")
    ...         before = os.path.exists(target)
    ...     before, open(target).read()
    (False, 'whole')
    """
    # A link stays, and its target is replaced.
    target = os.path.realpath(path)
    root = _existing(os.path.dirname(target))
    folder = None if _is_written_in_place(path, target) else _new_folder(target, root)
    if folder is None:
        yield os.fspath(path)
        return
    own = os.path.join(folder, os.path.relpath(target, root))
    try:
        yield own
        _move(folder, root)
    except OSError as error:
        # The user knows this path only.
        if error.filename == own:
            error.filename = os.fspath(path)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save_whole(
    plain: Callable[..., Any],
    argument: str,
    path: str | os.PathLike,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, str]:
    """Calls a function that saves to `path`, its second argument: the file is whole.

    Returns its result, and the path that it was given instead.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     place = os.path.join(folder, "place")
    ...     result, own = save_whole(
    ...         shutil.copyfile, "dst", place, (__file__, place), {})
    ...     os.path.exists(place), own == place
    (True, False)
    """
    with staged(path) as own:
        if argument in kwargs:
            return plain(*args, **{**kwargs, argument: own}), own
        return plain(args[0], own, *args[2:], **kwargs), own


def share_backups(callback: Any, may_be_shared: Callable[[Any], bool]) -> None:
    """Lets several ranks keep a backup of Keras in one folder.

    `callback` is the class, and `may_be_shared` says whether others save to a path.
    """
    save, end = callback._save_model, callback.on_train_end

    @functools.wraps(save)
    def save_in_folder(self: Any) -> None:
        path = self._training_metadata_path
        if not may_be_shared(path) or file_utils.is_remote_path(path):
            return save(self)
        os.makedirs(self.backup_dir, exist_ok=True)
        there: set[str] = set()
        try:
            there |= {*os.listdir(self.backup_dir)}
            with staged(path) as own:
                # With double_checkpoint, it is copied first.
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(path, own)
                self._training_metadata_path = own
                save(self)
        except FileNotFoundError:
            # Another rank's training has ended, and its backup goes file by file.
            if _has_all(self.backup_dir, there):
                raise
        finally:
            self._training_metadata_path = path

    @functools.wraps(end)
    def end_beside_others(self: Any, logs: Any = None) -> None:
        try:
            end(self, logs)
        except OSError as error:
            # Others delete it too, or still write to it and delete it later.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise

    callback._save_model = save_in_folder
    callback.on_train_end = end_beside_others


def _has_all(folder: str, names: set[str]) -> bool:
    """Whether a folder, which others may delete meanwhile, has all of these files."""
    with contextlib.suppress(FileNotFoundError):
        return names <= {*os.listdir(folder)}
    return False


def _is_written_in_place(path: str | os.PathLike, target: str) -> bool:
    """Whether a path is no local file or folder, or already one of `staged`."""
    if file_utils.is_remote_path(os.fspath(path)) or _PREFIX in target:
        return True
    return os.path.exists(target) and not (
        os.path.isfile(target) or os.path.isdir(target)
    )


def _existing(folder: str) -> str:
    """The folder, or the nearest one above it that exists."""
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return folder


def _new_folder(target: str, root: str) -> str | None:
    """A new folder on the target's disk; None if rank 0 has to do without."""
    if os.path.isfile(target) and not os.access(target, os.W_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), target)
    rank = native.engine().khvd_rank()
    # An existing folder may be a disk of its own.
    place = target if os.path.isdir(target) else root
    try:
        return tempfile.mkdtemp(prefix=f"{_PREFIX}{rank}-", dir=place)
    except PermissionError as error:
        if rank == 0 and os.path.isfile(target):
            return None
        if rank == 0:
            error.filename = target
            raise
        raise PermissionError(
            error.errno,
            f"rank {rank} may not create files in {place}, and does not write into "
            "what other ranks may be writing: save under `if keras_hvd.rank() == 0:`",
            target,
        ) from None


def _move(folder: str, root: str) -> None:
    """Moves all files in `folder` to the same places under `root`."""
    if _moved_at_once(folder, root):
        return
    files = [
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, _, names in os.walk(folder)
        for name in names
    ]
    if len(files) == 1 and os.path.dirname(files[0]) == "":
        _replace(os.path.join(folder, files[0]), os.path.join(root, files[0]))
        return
    with _alone(root):
        for parent, _, _ in os.walk(folder):
            below = os.path.relpath(parent, folder)
            os.makedirs(os.path.join(root, below), exist_ok=True)
        for file in sorted(files, key=lambda file: file.endswith(_CONTENTS)):
            _replace(os.path.join(folder, file), os.path.join(root, file))


def _moved_at_once(folder: str, root: str) -> bool:
    """Moves a whole new folder, unless another rank's is there first."""
    [first, *others] = os.listdir(folder) or [""]
    new, place = os.path.join(folder, first), os.path.join(root, first)
    if others or not first or not os.path.isdir(new) or os.path.lexists(place):
        return False
    try:
        os.rename(new, place)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        raise
    return True


@contextlib.contextmanager
def _alone(folder: str) -> Iterator[None]:
    """Keeps the other ranks from moving their files to this folder meanwhile.

    Otherwise, the files of a set could be of several ranks. A network file system may
    have no locks: then each file is whole, and ranks with equal weights write equal
    ones.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(file: str, place: str) -> None:
    """Moves a file, which takes over the rights of the one that it replaces."""
    with contextlib.suppress(FileNotFoundError):
        before = os.stat(place)
        with contextlib.suppress(PermissionError):
            os.chown(file, before.st_uid, before.st_gid)
        os.chmod(file, before.st_mode & 0o7777)
    os.replace(file, place)
