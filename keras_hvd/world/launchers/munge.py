"""Credentials of MUNGE, by which a cluster's nodes know the sender of a message.

Slurm's nodes have MUNGE. Its library is opened when it is first needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import socket
from collections.abc import Iterator

from keras_hvd.exceptions import RendezvousError

_LIBRARY = "libmunge.so.2"

# From munge.h.
_CIPHER_TYPE, _AES128 = 0, 4
_UID_RESTRICTION = 9
_SUCCESS, _NO_SERVER = 0, 6


class UnavailableError(RendezvousError):
    """This host has no MUNGE, or it does not run."""


class CredentialError(Exception):
    """The content is no credential, or an expired, replayed or another user's one."""


def encode(content: bytes, uid: int) -> bytes:
    """A credential with this content, which only that user's processes can decode.

    Raises UnavailableError.
    """
    library = _library()
    credential = ctypes.c_void_p()
    try:
        with _context() as context:
            # Regardless of the cluster's default.
            library.munge_ctx_set(context, _CIPHER_TYPE, ctypes.c_int(_AES128))
            library.munge_ctx_set(context, _UID_RESTRICTION, ctypes.c_uint(uid))
            output = ctypes.byref(credential)
            code = library.munge_encode(output, context, content, len(content))
            _check(code, context)
        return ctypes.string_at(credential)
    except CredentialError as error:
        raise _unavailable(str(error)) from None
    finally:
        library.free(credential)


def decode(credential: bytes) -> tuple[bytes, int]:
    """The content of a credential, and the user who made it.

    Raises CredentialError, UnavailableError.
    """
    library = _library()
    content, length, uid = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint()
    outputs = [ctypes.byref(one) for one in (content, length, uid)]
    try:
        with _context() as context:
            code = library.munge_decode(credential, context, *outputs, None)
            _check(code, context)
        return ctypes.string_at(content, length.value), uid.value
    finally:
        # An expired credential has content too.
        library.free(content)


@contextlib.contextmanager
def _context() -> Iterator[int]:
    context = _library().munge_ctx_create()
    try:
        yield context
    finally:
        _library().munge_ctx_destroy(context)


def _check(code: int, context: int) -> None:
    if code == _SUCCESS:
        return
    reason = _library().munge_ctx_strerror(context) or _library().munge_strerror(code)
    if code == _NO_SERVER:
        raise _unavailable(f"{reason.decode()}: start munged")
    raise CredentialError(reason.decode())


def _unavailable(reason: str) -> UnavailableError:
    return UnavailableError(f"MUNGE cannot be used on {socket.gethostname()}: {reason}")


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise _unavailable(f"{error}: install MUNGE") from None
    pointer, number, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p
    library.munge_ctx_create.restype = pointer
    library.munge_ctx_destroy.argtypes = [pointer]
    # The third argument's type depends on the second.
    library.munge_ctx_set.argtypes = [pointer, number]
    library.munge_ctx_strerror.argtypes = [pointer]
    library.munge_ctx_strerror.restype = text
    library.munge_encode.argtypes = [pointer, pointer, text, number]
    library.munge_decode.argtypes = [text, *[pointer] * 5]
    library.munge_strerror.restype = text
    # The C library's: a library's handle also finds the symbols that it needs.
    library.free.argtypes = [pointer]
    library.free.restype = None
    return library
