"""Credentials of MUNGE, by which a cluster's nodes know who a message is from.

Slurm's nodes have MUNGE. Its library is opened when it is first needed.
"""

from __future__ import annotations

import ctypes
import functools

from keras_hvd.exceptions import RendezvousError

_LIBRARY = "libmunge.so.2"
# Of munge.h.
_CIPHER_TYPE, _AES_128 = 0, 4
_UID_RESTRICTION = 9
_SUCCESS = 0
_NO_SERVER = 6  # EMUNGE_SOCKET


class UnavailableError(RendezvousError):
    """This host has no MUNGE, or it does not run."""


class CredentialError(Exception):
    """What is no credential, or one that is expired, replayed or for another user."""


def encode(content: bytes, uid: int) -> bytes:
    """A credential with this content, which only processes of that user can decode.

    Raises UnavailableError.
    """
    library = _library()
    context = library.munge_ctx_create()
    credential = ctypes.c_void_p()
    try:
        # A site's own choice may be none, and the content a secret.
        _check(library.munge_ctx_set(context, _CIPHER_TYPE, ctypes.c_int(_AES_128)))
        _check(library.munge_ctx_set(context, _UID_RESTRICTION, ctypes.c_uint(uid)))
        _check(
            library.munge_encode(
                ctypes.byref(credential), context, content, len(content)
            )
        )
        return ctypes.string_at(credential)
    except CredentialError as error:
        raise UnavailableError(f"MUNGE makes no credential: {error}") from None
    finally:
        _free(credential)
        library.munge_ctx_destroy(context)


def decode(credential: bytes) -> tuple[bytes, int]:
    """The content of a credential, and the user that made it.

    Raises CredentialError, UnavailableError.
    """
    content, length, uid = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint()
    outputs = map(ctypes.byref, (content, length, uid))
    try:
        # Up to its first 0, as the library does.
        _check(
            _library().munge_decode(ctypes.c_char_p(credential), None, *outputs, None)
        )
        return ctypes.string_at(content, length.value), uid.value
    finally:
        # An expired credential has content too.
        _free(content)


def _check(code: int) -> None:
    if code == _SUCCESS:
        return
    reason = _library().munge_strerror(code).decode()
    if code == _NO_SERVER:
        raise UnavailableError(f"{reason}: start munged on this host")
    raise CredentialError(reason)


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise UnavailableError(str(error)) from None
    library.munge_ctx_create.restype = ctypes.c_void_p
    library.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
    # The third argument's type depends on the second.
    library.munge_ctx_set.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.munge_encode.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int)
    ]
    library.munge_decode.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 5]
    library.munge_strerror.restype = ctypes.c_char_p
    return library


def _free(memory: ctypes.c_void_p) -> None:
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free(memory)
