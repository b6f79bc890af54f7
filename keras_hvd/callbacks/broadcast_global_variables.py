"""BroadcastGlobalVariables: all ranks start from one rank's state."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_hvd.backends.automatic_names import without_number
from keras_hvd.backends.current import framework
from keras_hvd.backends.global_generator import global_generator
from keras_hvd.backends.labels import are_alike, labels_of, place_in_program, take_place
from keras_hvd.backends.sync_batch_normalization import SyncBatchNormalization
from keras_hvd.backends.variables import LocalVariables, identity, leaves_of
from keras_hvd.callbacks.coordination import DistributedCallback
from keras_hvd.callbacks.model_parts import layers_of, weights_of
from keras_hvd.job import basics, log
from keras_hvd.job.objects import allgather_object
from keras_hvd.job.process_sets import number_of
from keras_hvd.optimizer.distributed_class import (
    before_first_update,
    is_distributed,
    reduces_with,
    shared_settings,
)
from keras_hvd.optimizer.nested_optimizers import (
    model_leaf_optimizers,
    model_optimizers,
)


class BroadcastGlobalVariables(DistributedCallback):
    """Gives all ranks one rank's weights and optimizer state before the first step.

    It runs after every callback's `on_train_begin`, so the state that
    `BackupAndRestore` restored on that rank, including its epoch, reaches all ranks.
    Variables that do not exist yet (a model without input shape) are broadcast when
    they are created, before the first step; or at once if some rank has them, for
    example because it alone has loaded the model. In eager mode, and if a plain
    optimizer takes a tape's gradients, they are broadcast after that step, with a
    warning. Dropout and other random layers continue with that rank's seed plus their
    own rank, so ranks draw different numbers and runs can be repeated.

    On more than one rank, every callback of keras_hvd also: checks that the model's
    optimizer is distributed, and that all ranks make the same number of steps in each
    epoch; lets only rank 0 print progress bars and write files (`ModelCheckpoint`,
    `BackupAndRestore`, `CSVLogger`, `TensorBoard`, ...), except in callbacks with an
    attribute `every_rank = True`; after each epoch, before validation, averages the
    moving statistics of BatchNormalization, combines other weights that layers assign
    by their `aggregation`, and warns of those that differ without one; stops all ranks
    when `stop_training` is set on one; gives all ranks the weights that a callback of
    one has restored at the end of training.

    Args:
        root_rank: the rank that sends its state.
        device: without effect; as in Horovod.
        local_variables: variables that stay different on each rank, with the
            optimizer's state for them. Their shapes may differ between ranks.
            `register_local_var` adds more.

    Raises:
        TypeError: something in `local_variables` is not a variable.
        ValueError: the job has no rank `root_rank`, or it differs between ranks (when
            training begins).
        RuntimeError: the optimizer is not distributed, or the ranks' models,
            vocabularies, bins or optimizers differ (when training begins); or callbacks
            change weights on some ranks only, or differently (before the next epoch).

    Example:

    >>> import keras, keras_hvd, numpy as np
    >>> keras_hvd.init()
    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    >>> history = model.fit(np.ones((4, 1)), np.zeros(4), verbose=0,
    ...     callbacks=[keras_hvd.callbacks.BroadcastGlobalVariables(0)])
    """

    def __init__(
        self,
        root_rank: int = 0,
        device: str = "",
        local_variables: Iterable[Any] | None = None,
    ):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self._local: list[LocalVariables] = []
        for variable in local_variables or ():
            self.register_local_var(variable)
        self._sent: set[int] = set()
        # Whether the model may still create variables.
        self._waits = False
        self._has_stepped = False

    def register_local_var(self, var: Any) -> None:
        """Lets each rank keep its own values of a variable.

        Args:
            var: a Keras variable or a `tf.Variable`.

        Raises:
            TypeError: it is something else.
        """
        self._local.append(LocalVariables.of(var))

    def on_ranks_ready(self) -> None:
        self._sent = set()
        model = self.model
        states = self._states()
        if _build_as_elsewhere(model, states):
            states = self._states()
        _require_alike(states)
        self._require_root()
        _take_places(model, [state["places"] for state in states])
        root = states[self.root_rank]
        model._initial_epoch = root["initial_epoch"]
        _continue_seeds(model, root["seeds"])
        optimizers = model_optimizers(model)
        for i, optimizer in enumerate(optimizers):
            # A checkpoint on only some ranks builds only their optimizers.
            if any(state["optimizers"][i]["built"] for state in states):
                _build(optimizer, model)
        self._broadcast()
        self._broadcast_when_created()

    def _states(self) -> list[dict[str, Any]]:
        shared = self._shared(weights_of(self.model))
        state = {**_state(self.model, shared), "root_rank": repr(self.root_rank)}
        return allgather_object(state, name="keras_hvd/model_state")

    def _require_root(self):
        if self.root_rank not in range(basics.size()):
            raise ValueError(
                f"BroadcastGlobalVariables(root_rank={self.root_rank!r}): the ranks of "
                f"this job are 0 to {basics.size() - 1}"
            )

    def on_train_batch_end(self, batch, logs=None):
        # In a tf.function, only the first step creates variables.
        if self._waits and (self.model.run_eagerly or not self._has_stepped):
            self._broadcast_late()
        self._has_stepped = True

    def on_epoch_end(self, epoch, logs=None):
        if self._waits:
            # Validation may have created some.
            self._broadcast_late()

    def _broadcast_when_created(self):
        model = self.model
        # Under a keras_hvd.Strategy they are created with equal values.
        self._waits = (
            not _is_built(model) and framework.current_strategy.of_model(model) is None
        )
        self._has_stepped = False
        if model.run_eagerly:
            return
        # A plain optimizer with a tape does not tell when it creates them.
        for optimizer in filter(is_distributed, model_optimizers(model)):
            if not optimizer.built:
                before_first_update(optimizer, self._broadcast)

    def _broadcast_late(self) -> None:
        """Broadcasts variables that steps have created, with a warning."""
        weights = self._shared(weights_of(self.model))
        new = [each.path for each in weights if identity(each) not in self._sent]
        if new and self._broadcast() and basics.rank() == 0:
            log.warn(
                f"model {self.model.name!r} made {_some(new)} while it ran, with "
                "different values on each rank, so its first step was not shared; all "
                f"have rank {self.root_rank}'s values now. To share that step, build "
                "the model before fit(): call it, or each model inside it, on a batch",
                stacklevel=2,
            )
        self._waits = not _is_built(self.model)

    def locals_among(self, variables: list[keras.Variable]) -> set[int]:
        return {each for local in self._local for each in local.among(variables)}

    def _shared(self, variables: list[keras.Variable]) -> list[keras.Variable]:
        local = self.locals_among(variables)
        return [each for each in variables if identity(each) not in local]

    def _shared_state(
        self, optimizer: keras.optimizers.Optimizer
    ) -> list[keras.Variable]:
        """An optimizer's variables, without its state of local variables."""
        weights = self.model.trainable_weights
        shared = set(map(identity, self._shared(weights)))
        if len(shared) == len(weights):
            return list(optimizer.variables)
        found = []
        for each in optimizer.variables:
            # The longest match: "dense_kernel_" is also a prefix of
            # "dense_kernel_scale_".
            of = [w for w in weights if each.name.startswith(_slot_prefix(w))]
            of.sort(key=lambda weight: len(weight.path))
            if not of or identity(of[-1]) in shared:
                found.append(each)
        return found

    def _broadcast(self) -> bool:
        """Broadcasts new variables, once all of them are initialized."""
        variables = self._shared(weights_of(self.model))
        for optimizer in model_optimizers(self.model):
            variables.extend(self._shared_state(optimizer))
        if not all(map(framework.has_value, variables)):
            return False
        new = [each for each in variables if identity(each) not in self._sent]
        if new:
            framework.broadcast_variables(new, self.root_rank)
            _take_statistics(self.model)
        self._sent.update(map(identity, new))
        return True


def _take_statistics(model: keras.Model) -> None:
    """Makes adapted layers, which hold copies, use their variables' present values."""
    for layer in layers_of(model):
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()


def _slot_prefix(variable: keras.Variable) -> str:
    """The prefix of Keras' names for an optimizer's state of a variable."""
    return variable.path.replace("/", "_") + "_"


def _state(model: keras.Model, shared: list[keras.Variable]) -> dict[str, Any]:
    """A rank's state, to compare before variables are broadcast."""
    return {
        "backend": keras.backend.backend(),
        "built": _is_built(model),
        "shapes": keras.saving.serialize_keras_object(model.get_build_config()),
        "variables": _described(shared),
        "optimizers": [
            {
                "name": without_number(each.name),
                "built": bool(each.built),
                "settings": shared_settings(each),
            }
            for each in model_optimizers(model)
        ],
        "places": [place_in_program(*each) for each in named_in_program(model)],
        "adapted": _adapted(model),
        "initial_epoch": model._initial_epoch,
        "seeds": [each.state.numpy() for each in _seed_generators(model)],
    }


def named_in_program(model: keras.Model) -> list[tuple[Any, int]]:
    """The objects whose names their collectives use, each with its process set."""
    distributed = filter(is_distributed, model_leaf_optimizers(model))
    named = [(each, reduces_with(each)) for each in distributed]
    named += [
        (each, reduces_with(each.inner_optimizer))
        for each in model_optimizers(model)
        if isinstance(each, keras.optimizers.LossScaleOptimizer)
        and is_distributed(each.inner_optimizer)
    ]
    named += [
        (each, each.process_set)
        for each in layers_of(model)
        if isinstance(each, SyncBatchNormalization)
    ]
    return [(each, number_of(within, "fit")) for each, within in named]


def _take_places(model: keras.Model, of_ranks: list[list[int | None]]) -> None:
    """Gives objects that only this rank has made anew, or loaded, the others' names."""
    for (named, process_set), places in zip(
        named_in_program(model), zip(*of_ranks, strict=False), strict=False
    ):
        taken = [each for each in places if each is not None]
        if taken and place_in_program(named, process_set) is None:
            take_place(named, process_set, taken[0])


def _adapted(model: keras.Model) -> list[tuple[str, int]]:
    """Layers that number values of data, with a checksum of their numbers."""
    found = []
    for layer in layers_of(model):
        if hasattr(layer, "get_vocabulary"):
            content = layer.get_vocabulary()
        elif isinstance(layer, keras.layers.Discretization):
            content = layer.bin_boundaries
        else:
            continue
        found.append((layer.name, zlib.crc32(repr(content).encode())))
    return found


def _described(variables: list[keras.Variable]) -> list[tuple[str, str]]:
    """Each variable's label, and its type and shape."""
    labels = labels_of([each.path for each in variables])
    return [
        (label, f"{each.dtype}[{', '.join(map(str, each.shape))}]")
        for label, each in zip(labels, variables, strict=True)
    ]


def _is_built(model: keras.Model) -> bool:
    return all(layer.built for layer in layers_of(model))


def _build_as_elsewhere(model: keras.Model, states: list[dict[str, Any]]) -> bool:
    """Builds the model for the inputs of a rank that has built it, such as by loading.

    Returns whether only some ranks had built it.
    """
    shapes = [state["shapes"] for state in states if state["built"]]
    if (
        len(shapes) in (0, len(states))
        or framework.current_strategy.of_model(model) is not None
    ):
        return False
    if not _is_built(model):
        # As Keras does when it loads a model.
        model.build_from_config(keras.saving.deserialize_keras_object(shapes[0]))
        model.built = True
    return True


def _require_alike(states: list[dict[str, Any]]) -> None:
    """Raises, on every rank, if the ranks' models differ: they would hang later."""
    first = states[0]
    for rank, other in enumerate(states):
        if other["backend"] != first["backend"]:
            raise RuntimeError(
                f"Keras runs on {first['backend']} on rank 0, and on "
                f"{other['backend']} on rank {rank}: set the environment variable "
                "KERAS_BACKEND to the same on all ranks"
            )
        if other["root_rank"] != first["root_rank"]:
            raise ValueError(
                f"BroadcastGlobalVariables: root_rank is {first['root_rank']} on rank "
                f"0, and {other['root_rank']} on rank {rank}"
            )
        if other["built"] != first["built"]:
            built, not_built = (0, rank) if first["built"] else (rank, 0)
            raise RuntimeError(
                f"the model has its variables on rank {built}, but not on rank "
                f"{not_built}: build it on all ranks (model.build(input_shape)) or on "
                "none"
            )
        _require_same("variables", rank, first["variables"], other["variables"])
        _require_same(
            "optimizers",
            rank,
            [(each["name"], "") for each in first["optimizers"]],
            [(each["name"], "") for each in other["optimizers"]],
        )
        for here, there in zip(first["optimizers"], other["optimizers"]):
            _require_same_settings(rank, here, there)
        for (name, here), (_, there) in zip(first["adapted"], other["adapted"]):
            if here != there:
                raise RuntimeError(
                    f"layer {name!r} is adapted to other data on rank 0 than on rank "
                    f"{rank}, and numbers the same values differently: adapt it to the "
                    "same data on all ranks"
                )
        if len(first["seeds"]) != len(other["seeds"]):
            raise RuntimeError(
                f"the model has {len(first['seeds']) - 1} random layers on rank 0, and "
                f"{len(other['seeds']) - 1} on rank {rank}"
            )


def _require_same_settings(
    rank: int, first: dict[str, Any], other: dict[str, Any]
) -> None:
    """Raises if an optimizer's settings differ between rank 0 and `rank`."""
    here, there = first["settings"], other["settings"]
    differing = [name for name in here if name in there and here[name] != there[name]]
    if not differing:
        return
    of_first, of_other = (
        ", ".join(f"{name}={settings[name]}" for name in differing)
        for settings in (here, there)
    )
    raise RuntimeError(
        f"DistributedOptimizer {first['name']!r} has {of_first} on rank 0, and "
        f"{of_other} on rank {rank}: give it the same arguments on all ranks"
    )


def _require_same(
    what: str, rank: int, first: list[tuple[str, str]], other: list[tuple[str, str]]
) -> None:
    """Raises if labels, or their values, differ between rank 0 and `rank`."""
    differing = [
        pair
        for pair in itertools.zip_longest(first, other)
        if None in pair or not _are_same(*pair)
    ]
    if not differing:
        return
    here, there = (
        [": ".join(filter(None, each)) for each in of_rank if each is not None]
        for of_rank in zip(*differing, strict=True)
    )
    raise RuntimeError(
        f"the model's {what} differ between ranks: rank 0 has {_some(here)}, rank "
        f"{rank} has {_some(there)}. All ranks must create the same layers and "
        "optimizers, in the same order, and give them the same names, if any."
    )


def _are_same(first: tuple[str, str], other: tuple[str, str]) -> bool:
    return are_alike(first[0], other[0]) and first[1] == other[1]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) or "none"
    return f"{shown}, ... ({len(names)} in all)" if len(names) > 3 else shown


def _build(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(model.trainable_variables)


def _continue_seeds(model: keras.Model, seeds: list[np.ndarray]) -> None:
    for generator, seed in zip(_seed_generators(model), seeds):
        framework.random_numbers.continue_with_rank(generator, seed, basics.rank())


def _seed_generators(model: keras.Model) -> list[Any]:
    """Keras' global generator, and those in layers, of Keras and of the framework."""
    generators: list[Any] = [global_generator()]
    for layer in layers_of(model):
        own = [
            each
            for each in leaves_of(list(vars(layer).values()))
            if isinstance(each, framework.Generator)
        ]
        for each in [*getattr(layer, "_seed_generators", ()), *own]:
            if not any(each is known for known in generators):
                generators.append(each)
    return generators
