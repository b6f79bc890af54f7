"""The native libraries: where they are, whether they fit, and their interfaces.

`libkeras_hvd.so` is the engine with its C API, and needs only the system.
`libkeras_hvd_ops_2.21.so` has the ops for TensorFlow 2.21; libraries for other minor
versions may be beside it. The structures below mirror tf_ops/engine/c_api.h.
"""

from __future__ import annotations

import ctypes
import fnmatch
import functools
import hashlib
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from keras_hvd import exceptions
from keras_hvd.job import installed
from keras_hvd.version import __version__

_FOLDER = pathlib.Path(__file__).resolve().parents[1] / "_native"
_ENGINE = "libkeras_hvd.so"
_OPS = "libkeras_hvd_ops_{minor}.so"
_ALL_OPS = "libkeras_hvd_ops*.so"
_BUILD_INFO = "build_info.json"
# The first TensorFlow that ops can be built for: bazel/find_tensorflow.py.
_OLDEST = "2.16"


def _numbers_of(names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(names.split())}


_REDUCED = (
    "uint8 int8 int32 int64 float16 bfloat16 float32 float64 bool uint32 uint64 "
    "float8_e5m2 float8_e4m3fn"
)
REDUCED_DTYPES = _numbers_of(_REDUCED)
"""khvd_dtype, by the names of NumPy and TensorFlow: types that can be reduced."""
DTYPES = _numbers_of(f"{_REDUCED} int16 uint16 complex64 complex128")
"""The same, with those that are only moved."""

ALLREDUCE, ALLGATHER, BROADCAST, BARRIER = range(4)
"""khvd_kind, as far as Python itself asks for them."""

Done = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
Allocate = ctypes.CFUNCTYPE(
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_int32,
)


_INT, _INT32, _INT64 = ctypes.c_int, ctypes.c_int32, ctypes.c_int64
_SIZE, _DOUBLE = ctypes.c_size_t, ctypes.c_double
_TEXT = ctypes.c_char_p
_ADDRESS = ctypes.c_void_p
_INT32S = ctypes.POINTER(_INT32)


def _of(kind: type, names: str) -> list[tuple[str, type]]:
    """Fields of one type that follow each other."""
    return [(name, kind) for name in names.split()]


class _Structure(ctypes.Structure):
    """A structure that refuses numbers out of range, which ctypes would truncate."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        kept = getattr(self, name)
        if isinstance(value, int) and isinstance(kept, int) and kept != value:
            raise OverflowError(f"{name} cannot be {value}: the engine has {kept}")


class _Sized(_Structure):
    """A structure that begins with its own size: later versions may be longer."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{"struct_size": ctypes.sizeof(self), **fields})


class Link(_Structure):
    """khvd_link: a connection with another rank."""

    _fields_ = [*_of(_INT32, "peer purpose fd"), ("tls", _ADDRESS)]


class Mpi(_Structure):
    """khvd_mpi: the functions and handles of the MPI that carries tensors."""

    _fields_ = [
        *_of(_ADDRESS, "isend issend irecv test error_string"),
        *_of(ctypes.c_ssize_t, "communicator byte"),
        *_of(_INT32, "handles_are_ints status_bytes"),
    ]


class Options(_Sized):
    """khvd_options: this process' place in the job, and the engine's settings."""

    _fields_ = [
        ("struct_size", _SIZE),
        *_of(_INT32, "rank size local_rank local_size cross_rank cross_size"),
        ("job", _TEXT),
        *_of(_DOUBLE, "init_timeout stall_warning stall_abort"),
        *_of(_INT64, "exchange_bytes fusion_bytes"),
        *_of(_INT32, "cores check"),
        ("cache_capacity", _INT64),
        *_of(_INT32, "log_level log_timestamp autotune"),
        ("autotune_log", _TEXT),
        *_of(_INT32, "autotune_warmup autotune_steps autotune_samples"),
        *_of(_TEXT, "cuda_library nccl_library nvtx_library"),
        ("disable_ranges", _INT32),
        ("hosts", _INT32S),
        ("host_names", ctypes.POINTER(_TEXT)),
        ("pids", _INT32S),
        ("links", ctypes.POINTER(Link)),
        *_of(_INT32, "link_count host_timeout"),
        ("mpi", ctypes.POINTER(Mpi)),
        ("cancel_fd", _INT32S),
    ]


class Tensor(_Structure):
    """khvd_tensor: one contiguous tensor, in host memory or on a GPU."""

    _fields_ = [
        ("dtype", _INT),
        ("rank", _INT32),
        ("shape", ctypes.POINTER(_INT64)),
        *_of(_ADDRESS, "input output"),
    ]


class Request(_Sized):
    """khvd_request: a collective that every rank submits under the same name."""

    _fields_ = [
        ("struct_size", _SIZE),
        ("kind", _INT),
        ("name", _TEXT),
        ("submitter", ctypes.c_uint64),
        ("process_set", _INT32),
        ("reduce_op", _INT),
        ("root", _INT32),
        *_of(_DOUBLE, "prescale postscale"),
        ("count", _INT32),
        ("tensors", ctypes.POINTER(Tensor)),
        ("done", Done),
        ("allocate", Allocate),
        ("context", _ADDRESS),
        ("splits", ctypes.POINTER(_INT64)),
        *_of(_INT32, "split_count on_gpu"),
        ("stream", _ADDRESS),
        ("end", ctypes.POINTER(_ADDRESS)),
        ("labels", _TEXT),
    ]


class Counters(_Sized):
    """khvd_counters: what the engine has done since `init`."""

    _fields_ = [
        ("struct_size", _SIZE),
        *_of(_INT64, "batches tensors bytes sleeps lost_wakes tcp_bytes mpi_bytes"),
    ]


class GpuSupport(_Sized):
    """khvd_gpu_support: the GPUs and the NCCL that the engine can use."""

    _fields_ = [
        ("struct_size", _SIZE),
        *_of(_INT32, "devices nccl_version"),
        ("text", ctypes.c_char * 512),
    ]


class _Int32(ctypes.c_int32):
    """A 32-bit argument that refuses numbers out of range."""

    @classmethod
    def from_param(cls, value: Any) -> ctypes.c_int32:
        number = ctypes.c_int32(value)
        if number.value != value:
            raise OverflowError(f"{value} does not fit into 32 bits")
        return number


_REQUEST = ctypes.POINTER(Request)

# name: (result, arguments...)
_FUNCTIONS: dict[str, tuple] = {
    "khvd_init": (_INT, ctypes.POINTER(Options)),
    "khvd_links": (_INT32, _Int32, _Int32, _INT32S, ctypes.POINTER(Link), _Int32),
    "khvd_shutdown": (_INT,),
    "khvd_leave": (_INT, _TEXT),
    "khvd_is_initialized": (_INT,),
    "khvd_set_exit": (None, _INT, _ADDRESS, ctypes.c_ssize_t),
    "khvd_end_process": (None,),
    "khvd_rank": (_INT,),
    "khvd_size": (_INT,),
    "khvd_local_rank": (_INT,),
    "khvd_local_size": (_INT,),
    "khvd_cross_rank": (_INT,),
    "khvd_cross_size": (_INT,),
    "khvd_is_homogeneous": (_INT,),
    "khvd_add_process_set": (_INT, _INT32S, _Int32, _INT32S),
    "khvd_remove_process_set": (_INT, _Int32),
    "khvd_process_set_size": (_INT, _Int32),
    "khvd_process_set_rank": (_INT, _Int32),
    "khvd_join": (_INT, _INT32S),
    "khvd_scattered_rows": (_INT64, _Int32, _INT64),
    "khvd_submit": (_INT, _REQUEST),
    "khvd_submit_and_drive": (_INT, _REQUEST),
    "khvd_run": (_INT, _REQUEST),
    "khvd_begin": (_INT, _REQUEST, ctypes.POINTER(_ADDRESS)),
    "khvd_finish": (_INT, _ADDRESS),
    "khvd_drive_until": (None, ctypes.POINTER(ctypes.c_uint8)),
    "khvd_await_end": (_INT, _ADDRESS, _ADDRESS),
    "khvd_get_gpu_support": (_INT, _TEXT, _TEXT, ctypes.POINTER(GpuSupport)),
    "khvd_find_tls": (_INT, _TEXT, _TEXT, _Int32),
    "khvd_tls_open": (_ADDRESS, _TEXT, _Int32, _Int32, _TEXT, _TEXT),
    "khvd_tls_handshake": (_INT64, _ADDRESS),
    "khvd_tls_read": (_INT64, _ADDRESS, _ADDRESS, _INT64),
    "khvd_tls_write": (_INT64, _ADDRESS, _TEXT, _INT64),
    "khvd_tls_close": (None, _ADDRESS),
    "khvd_start_timeline": (_INT, _TEXT, _Int32),
    "khvd_stop_timeline": (_INT,),
    "khvd_start_recording": (_INT, _TEXT),
    "khvd_last_error": (_TEXT,),
    "khvd_failure": (_TEXT,),
    "khvd_get_counters": (_INT, ctypes.POINTER(Counters)),
    "khvd_log": (None, _INT, _TEXT),
    "khvd_version": (_TEXT,),
}


@functools.cache
def engine() -> ctypes.CDLL:
    """The engine: the functions of tf_ops/engine/c_api.h, opened once.

    Raises LibraryError if it is not built, has another version, or another copy of it
    is already in this process.

    Example:

    >>> engine().khvd_version().decode() == __version__
    True
    """
    path = _library(_ENGINE)
    try:
        return open_engine(path)
    except OSError as error:
        raise _unusable(path, error, _install_again()) from error


def open_engine(path: str | pathlib.Path) -> ctypes.CDLL:
    """Opens an engine's library at any path: for tests of the C API alone."""
    library = ctypes.CDLL(str(path))
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def links(rank: int, hosts: Sequence[int]) -> list[tuple[int, int]]:
    """The links that a rank needs, as peers and purposes; `hosts` has each rank's host.

    Example:

    >>> links(0, [0, 0])
    []
    """
    of_ranks = (ctypes.c_int32 * len(hosts))(*hosts)
    count = engine().khvd_links(rank, len(hosts), of_ranks, None, 0)
    found = (Link * count)()
    engine().khvd_links(rank, len(hosts), of_ranks, found, count)
    return [(link.peer, link.purpose) for link in found]


def gpu_support(
    engine: ctypes.CDLL, cuda_library: bytes, nccl_library: bytes
) -> GpuSupport:
    r"""Returns an engine's support for tensors on GPUs on this machine.

    An empty path stands for the system's CUDA driver, or NCCL in the library path.

    Example:

    >>> gpu_support(engine(), b"/none/libcuda.so.1", b"/none/libnccl.so.2").text
    b'there is no CUDA driver in /none/libcuda.so.1\nthere is no NCCL in /none/...'
    """
    found = GpuSupport()
    code = engine.khvd_get_gpu_support(cuda_library, nccl_library, ctypes.byref(found))
    if code != 0:
        text = engine.khvd_last_error().decode(errors="replace")
        raise exceptions.from_code(code, text)
    return found


@functools.cache
def ops() -> ModuleType:
    """The module of TensorFlow ops, one function for each op.

    Raises LibraryError if TensorFlow is missing, there is no op library for its minor
    version, or another copy of keras_hvd's libraries is in this process.
    """
    tf = tensorflow()
    path = ops_library(tf.__version__)
    engine()
    try:
        return tf.load_op_library(str(path))
    except (tf.errors.OpError, RuntimeError) as error:
        raise _unusable(path, error, _mend_ops()) from error


def tensorflow() -> ModuleType:
    """Imports TensorFlow, or raises LibraryError if there is none or only remains."""
    try:
        module = importlib.import_module("tensorflow")
    except ModuleNotFoundError as error:
        if error.name != "tensorflow":
            raise
        raise exceptions.LibraryError(
            f"{sys.executable} has no TensorFlow. {_install_tensorflow()}"
        ) from error
    # Python accepts any folder of that name as a package.
    if not hasattr(module, "__version__"):
        folders = ", ".join(module.__path__)
        raise exceptions.LibraryError(
            f"{sys.executable} has no TensorFlow, only remains of one in {folders}. "
            f"Remove that folder. {_install_tensorflow()}"
        )
    return module


def ops_library(tensorflow: str) -> pathlib.Path:
    """Path of the op library for a version of TensorFlow, without opening it."""
    ops_info(tensorflow)
    return _library(_OPS.format(minor=_minor(tensorflow)))


def ops_info(tensorflow: str) -> dict[str, Any]:
    """Returns the TensorFlow against which the op library for a version was built.

    `tensorflow` is the version of the headers, `distribution` their package, and `xla`
    says whether XLA can compile collectives. Raises LibraryError if there is no op
    library.
    """
    built = build_info()["ops"]
    if _minor(tensorflow) in built:
        return built[_minor(tensorflow)]
    versions = ", ".join(each["tensorflow"] for each in built.values())
    text = (
        f"this is TensorFlow {tensorflow}, and the ops in {_FOLDER} were built for "
        f"{versions}: an op library serves one minor version. "
    )
    hidden = installed.how_to_use_the_hidden()
    if hidden:
        raise exceptions.LibraryError(f"{text}{hidden}")
    # Another package's files would go over those of this one. Nightly builds have other
    # versions.
    names = importlib.metadata.packages_distributions().get("tensorflow", [])
    known = [each for each in names if "nightly" not in each]
    text += _install_tensorflow(*known[:1])
    if _numbers(tensorflow) < _numbers(_OLDEST):
        raise exceptions.LibraryError(
            f"{text} (there are no ops for TensorFlow before {_OLDEST})"
        )
    raise exceptions.LibraryError(
        f"{text}; or build ops for this one, where there is Bazel, with: "
        f"{sys.executable} -m keras_hvd.build"
    )


@functools.cache
def build_info() -> dict[str, Any]:
    """Returns the origin of the libraries: `version`, `ops` (see `ops_info`), `sha256`.

    `ops` has an entry for each minor version of TensorFlow, `sha256` one for each
    library. Raises LibraryError if the libraries are not built, or belong to another
    version.
    """
    path = _FOLDER / _BUILD_INFO
    if not path.exists():
        raise exceptions.LibraryError(
            f"keras_hvd's native libraries are not built: there is no {path}. "
            f"{_install_again()}"
        )
    info = json.loads(path.read_text())
    if info["version"] != __version__:
        raise exceptions.LibraryError(
            f"this is keras_hvd {__version__}, and the native libraries in {_FOLDER} "
            f"are those of {info['version']}. {_install_again()}"
        )
    return info


def _library(name: str) -> pathlib.Path:
    """A library's path, if the library exists, is intact, and is the only copy."""
    # A checkout may have libraries from before hashes were written.
    wanted = build_info().get("sha256", {}).get(name)
    path = _FOLDER / name
    if not path.exists():
        raise exceptions.LibraryError(f"{path} is missing. {_install_again()}")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != wanted:
        raise exceptions.LibraryError(
            f"{path} was damaged or replaced after it was built: its {len(content)} "
            f"bytes do not have the SHA-256 in {_BUILD_INFO} beside it. "
            f"{_install_again()}"
        )
    # A second engine would not know the first one's ranks; a second op library makes
    # TensorFlow abort the process, because each op may be registered once.
    for other in _mapped_libraries():
        if other != str(_FOLDER / pathlib.Path(other).name):
            raise exceptions.LibraryError(
                f"this process has already loaded {other}, and {path} is a second copy "
                "of it: a process can use only one. Remove one of the two folders from "
                "sys.path, or uninstall that keras_hvd"
            )
    return path


def _mapped_libraries() -> set[str]:
    """Paths of the copies of our libraries that this process has mapped.

    The kernel appends " (deleted)" to a file that was replaced, so that file counts as
    another copy. Without /proc none is known.
    """
    try:
        maps = pathlib.Path("/proc/self/maps").read_bytes()
    except OSError:
        return set()
    text = maps.decode(errors="surrogateescape")
    columns = [line.split(maxsplit=5) for line in text.split("\n")]
    paths = {column[5] for column in columns if len(column) == 6}
    return {path for path in paths if _is_ours(path.removesuffix(" (deleted)"))}


def _is_ours(path: str) -> bool:
    name = path.rsplit("/", 1)[-1]
    return name == _ENGINE or fnmatch.fnmatchcase(name, _ALL_OPS)


def _install_tensorflow(name: str | None = None) -> str:
    *_, built_for = build_info()["ops"].values()
    package = f"{name or built_for['distribution']}=={built_for['tensorflow']}"
    return (
        "Install one that keras_hvd was built for with: "
        f"{sys.executable} -m pip install {package}"
    )


def _minor(version: str) -> str:
    """The minor version that an op library is for, such as 2.21 for 2.21.0."""
    return ".".join(version.split(".")[:2])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, _minor(version).split(".")))


def _unusable(
    path: pathlib.Path, error: Exception, remedy: str
) -> exceptions.LibraryError:
    return exceptions.LibraryError(f"{path} cannot be opened: {error}. {remedy}")


def _mend_ops() -> str:
    try:
        installed.require_one_version("tensorflow")
    except installed.Overwritten as overwritten:
        return str(overwritten)
    return _install_again()


def _install_again() -> str:
    return installed.how_to_use_the_hidden() or (
        f"Install keras_hvd again with: {installed.install_command()}"
    )
