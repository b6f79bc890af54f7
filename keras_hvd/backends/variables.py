"""Variables under names that all ranks share, and variables local to a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import keras


def identity(variable: Any) -> int:
    """A variable's id, the same for a Keras variable and the framework's in it.

    >>> variable = keras.Variable([1.0])
    >>> identity(variable) == identity(variable.value)
    True
    """
    return id(variable._value if isinstance(variable, keras.Variable) else variable)


def is_variable(value: Any) -> bool:
    """Whether something is a variable, of Keras or of the framework.

    >>> is_variable(keras.Variable(1.0)), is_variable(keras.ops.ones(1))
    (True, False)
    """
    if isinstance(value, keras.Variable):
        return True
    return keras.ops.is_tensor(value) and hasattr(value, "assign")


def path(variable: Any) -> str:
    """A variable's name on all ranks; tensors, which share no name, get a fixed one.

    >>> path(keras.Variable(1.0, name="w")), path(keras.ops.ones(1))
    ('w', 'tensor')
    """
    found = getattr(variable, "path", None)
    return found or (variable.name if is_variable(variable) else "tensor")


def leaves_of(value: Any, depth: int = 3) -> Iterator[Any]:
    """The leaves of nested lists and dicts, which may contain themselves.

    >>> list(leaves_of([1, {"a": [2]}]))
    [1, 2]
    """
    if isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            if depth:
                yield from leaves_of(each, depth - 1)
    else:
        yield value


@dataclasses.dataclass(frozen=True, eq=False)
class LocalVariables:
    """Variables whose gradients stay on their rank.

    They are given as variables, as layers (which may create theirs later), or as paths,
    for copies of the named variables.
    """

    variables: tuple[Any, ...] = ()
    layers: tuple[keras.layers.Layer, ...] = ()
    local_paths: frozenset[str] = frozenset()

    @classmethod
    def of(cls, variable: Any) -> LocalVariables:
        """One variable; anything else raises TypeError.

        >>> LocalVariables.of(keras.Variable(1.0, name="bias")).paths()
        {'bias'}
        """
        if not is_variable(variable):
            raise TypeError(f"a local variable must be a variable; got {variable!r}")
        return cls(variables=(variable,))

    def among(self, variables: Iterable[Any]) -> set[int]:
        """The `identity` of each local variable in `variables`.

        >>> local, shared = keras.Variable(1.0), keras.Variable(1.0)
        >>> LocalVariables.of(local).among([shared, local]) == {identity(local)}
        True
        """
        mine = set(map(identity, self._all()))
        return {
            identity(each)
            for each in variables
            if identity(each) in mine or path(each) in self.local_paths
        }

    def paths(self) -> set[str]:
        """The variables' paths, which also identify their copies."""
        return {*self.local_paths, *map(path, self._all())}

    def _all(self) -> list[Any]:
        of_layers = [each for layer in self.layers for each in layer.trainable_weights]
        return [*self.variables, *of_layers]


def local_layers_of(kind: str, local_layers: Any) -> LocalVariables:
    """The variables of the layers given to a `Partial...` function.

    Raises ValueError if something is not a Keras layer.

    Example:

    >>> layer = keras.layers.Dense(1, name="head")
    >>> variables = local_layers_of("PartialDistributedOptimizer", layer)
    >>> layer.build((None, 1))
    >>> sorted(variables.paths())
    ['head/bias', 'head/kernel']
    """
    if local_layers is None:
        local_layers = ()
    if not isinstance(local_layers, (list, tuple, set)):
        local_layers = (local_layers,)
    for each in local_layers:
        if not isinstance(each, keras.layers.Layer):
            raise ValueError(
                f"{kind}: local_layers must be Keras layers; got {type(each).__name__}"
            )
    return LocalVariables(layers=tuple(local_layers))
