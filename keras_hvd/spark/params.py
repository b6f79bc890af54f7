"""Params of pyspark.ml, made of the arguments of a class."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

from pyspark.ml.param import Param, Params

# Horovod's own names of getters and setters, where they differ from the argument's.
_TITLES = {
    "inmemory_cache_all": "InMemoryCacheAll",
    "shuffle_buffer_size": "ShufflingBufferSize",
    "train_reader_num_workers": "TrainReaderNumWorker",
    "val_reader_num_workers": "ValReaderNumWorker",
}

_ARGUMENT = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


class Arguments(Params):
    """A class whose params are its arguments, which its docstring describes.

    Each has a getter and a setter.
    """

    without_effect: tuple[str, ...] = ()
    """Arguments that the constructor takes besides."""

    _defaults: dict[str, Any]
    _input_kwargs: dict[str, Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        docs = dict(_ARGUMENT.findall(inspect.getdoc(cls) or ""))
        cls._defaults = dict.fromkeys(cls.without_effect)
        for each in inspect.signature(cls.__init__).parameters.values():
            if each.default is not each.empty:
                cls._defaults[each.name] = each.default
        for name in cls._defaults:
            title = _TITLES.get(name) or name.title().replace("_", "")
            doc = " ".join(docs.get(name, "without effect").split())
            param: Param[Any] = Param(Params._dummy(), name, doc)
            setattr(cls, name, param)
            setattr(cls, f"get{title}", functools.partialmethod(cls.getOrDefault, name))
            setattr(cls, f"set{title}", functools.partialmethod(cls._set_one, name))

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**self._defaults)
        self.setParams(**self._input_kwargs)

    def setParams(self, **values: Any) -> Any:
        """Sets several arguments. Raises TypeError if there is no such argument."""
        unknown = [name for name in values if name not in self._defaults]
        if unknown:
            raise TypeError(f"{type(self).__name__} has no argument {unknown[0]!r}")
        return self._set(**values)

    def values(self) -> dict[str, Any]:
        """The arguments by their names."""
        return {name: self.getOrDefault(name) for name in self._defaults}

    def _set_one(self, name: str, value: Any) -> Any:
        return self._set(**{name: value})
