"""The interface of gradient compressors, and the compressor that changes nothing."""

from __future__ import annotations

from typing import Any


class Compressor:
    """Base class of compressors, which convert a tensor for a collective, and back.

    Subclass it for your own compressor. The elementwise reduction of compressed tensors
    must be meaningful.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns a smaller tensor, and the context that `decompress` needs."""
        raise NotImplementedError("a compressor has a static method compress")

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Converts the collective's result back to the original type."""
        raise NotImplementedError("a compressor has a static method decompress")


class NoneCompressor(Compressor):
    """Leaves tensors unchanged.

    Example:

    >>> travels, context = NoneCompressor.compress(1.5)
    >>> NoneCompressor.decompress(travels, context)
    1.5
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        """Returns the tensor unchanged, and None."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Returns the tensor unchanged."""
        return tensor


def require_compressor(function: str, compression: Any) -> None:
    """Raises a `TypeError` unless `compression` has the methods of `Compressor`.

    Example:

    >>> require_compressor("allreduce", NoneCompressor)
    >>> require_compressor("allreduce", "fp16")
    Traceback (most recent call last):
    TypeError: allreduce takes a compressor, such as keras_hvd.Compression.fp16, as ...
    """
    methods = ("compress", "decompress")
    if all(callable(getattr(compression, each, None)) for each in methods):
        return
    raise TypeError(
        f"{function} takes a compressor, such as keras_hvd.Compression.fp16, as "
        f"compression; got {compression!r}"
    )
