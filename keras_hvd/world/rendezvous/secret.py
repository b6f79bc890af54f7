"""The secret that the processes of a job on several hosts share.

Any process that knows it can join the job, so it is in no message, log or error.
"""

from __future__ import annotations

import errno
import hmac
import os
import stat
from collections.abc import Mapping, MutableMapping

from keras_hvd.exceptions import RendezvousError
from keras_hvd.job import settings

VARIABLE = "KERAS_HVD_SECRET"
FILE_VARIABLE = "KERAS_HVD_SECRET_FILE"

_LEAST_BYTES = 16
_MOST_BYTES = 4096

HOW = (
    f"set {VARIABLE} to the same random text on all hosts, such as `openssl rand -hex "
    f"32` prints, or {FILE_VARIABLE} to a file with such a text, with mode 0600, in a "
    "folder that the hosts share"
)

_ROOT = 0

_IN_A_POD = (
    "Give a Secret's volume of Kubernetes `defaultMode: 0400`, and the pod of a user "
    "other than root a `securityContext` with `fsGroup`"
)

# The secret that `take` removed from the environment.
_taken: Secret | None = None


class Secret:
    """A secret, which does not show in its own representation.

    Example:

    >>> Secret(b"no more than an example")
    Secret(...)
    >>> Secret(b"too short")
    Traceback (most recent call last):
    keras_hvd.exceptions.RendezvousError: the secret has 9 bytes, and needs 16 or ...
    """

    def __init__(self, content: bytes, source: str = "the secret", job_id: str = ""):
        if len(content) < _LEAST_BYTES:
            raise RendezvousError(
                f"{source} has {len(content)} bytes, and needs {_LEAST_BYTES} or more: "
                f"{HOW}"
            )
        self._content = content
        self._job_id = job_id

    def __repr__(self) -> str:
        return "Secret(...)"

    def key(self, job: str) -> bytes:
        """The key for proofs and messages of one job."""
        text = b"keras_hvd rendezvous\0" + job.encode()
        if self._job_id:
            text += b"\0" + os.fsencode(self._job_id)
        return hmac.digest(self._content, text, "sha256")


def read(variables: Mapping[str, str]) -> Secret:
    """Reads the secret from a variable, or from the file that a variable names.

    Raises RendezvousError if there is none, or it is not one that others cannot know.

    Example:

    >>> read({"KERAS_HVD_SECRET": "no more than an example"})
    Secret(...)
    """
    text, path = variables.get(VARIABLE, ""), variables.get(FILE_VARIABLE, "")
    if text and path:
        raise RendezvousError(
            f"both {VARIABLE} and {FILE_VARIABLE} are set: unset one of them"
        )
    job_id = settings.job_id(variables)
    if path:
        return Secret(_read_file(path).strip(), f"{FILE_VARIABLE}={path!r}", job_id)
    if text:
        return Secret(os.fsencode(text).strip(), VARIABLE, job_id)
    raise RendezvousError(
        f"a job on several hosts needs a secret, so that nobody else joins it: {HOW}"
    )


def is_set(variables: Mapping[str, str]) -> bool:
    """Whether the user has set a secret, even if `take` removed it.

    Example:

    >>> is_set({"KERAS_HVD_SECRET_FILE": "secret"})
    True
    """
    return _taken is not None or _is_named(variables)


def take(variables: MutableMapping[str, str]) -> Secret:
    """Reads the secret and removes it from `variables`.

    So programs that this process starts do not inherit it. Later calls return the same
    secret, unless another one is set.

    Example:

    >>> variables = {"KERAS_HVD_SECRET": "no more than an example"}
    >>> take(variables), variables
    (Secret(...), {})
    """
    global _taken
    if _taken is None or _is_named(variables):
        _taken = read(variables)
        variables.pop(VARIABLE, None)
    return _taken


def _is_named(variables: Mapping[str, str]) -> bool:
    return bool(variables.get(VARIABLE) or variables.get(FILE_VARIABLE))


def _read_file(path: str) -> bytes:
    name = f"{FILE_VARIABLE}={path!r}"
    try:
        # A pipe without a writer must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        hint = f". {_IN_A_POD}" if error.errno == errno.EACCES else ""
        raise RendezvousError(
            f"{name} cannot be read: {error.strerror}{hint}"
        ) from None
    try:
        _require_private(name, path, os.fstat(descriptor))
        content = os.read(descriptor, _MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _MOST_BYTES:
        raise RendezvousError(f"{name} is larger than {_MOST_BYTES} bytes")
    return content


def _require_private(name: str, path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise RendezvousError(f"{name} is not a regular file")
    if status.st_uid not in (os.geteuid(), _ROOT):
        raise RendezvousError(
            f"{name} belongs to user {status.st_uid}, and this process to user "
            f"{os.geteuid()}: it must be the user's own file, or root's"
        )
    others = stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
    # Kubernetes gives Secrets to root, and to a group of the process.
    groups = {os.getegid(), *os.getgroups()}
    is_for_our_group = status.st_uid == _ROOT and status.st_gid in groups
    if others and not (others == stat.S_IRGRP and is_for_our_group):
        mode = stat.S_IMODE(status.st_mode)
        raise RendezvousError(
            f"{name} has mode {mode:04o}, so other users may know the secret: make a "
            f"new one, with `chmod 600 {path}`. {_IN_A_POD}"
        )
