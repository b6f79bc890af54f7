"""Keeps weights equal on ranks that train together, and finds those that differ.

Layers assign weights that no gradient reaches, such as moving statistics, each rank by
its own data. Callbacks may change weights on some ranks only. Ranks compare checksums
of their weights, which take about 15 ms for 100 MB in host memory.
"""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras

from keras_hvd.backends.current import framework
from keras_hvd.backends.reduce_op import Average, Sum
from keras_hvd.backends.sync_batch_normalization import SyncBatchNormalization
from keras_hvd.backends.variables import identity
from keras_hvd.callbacks.model_parts import layers_of, weights_of
from keras_hvd.callbacks.writers import SILENT_WRITERS, WRITERS
from keras_hvd.job import basics, log
from keras_hvd.job.objects import allgather_object
from keras_hvd.job.process_sets import ProcessSet, global_process_set
from keras_hvd.optimizer.distributed_class import (
    is_distributed,
    local_variables,
    reduces_with,
)
from keras_hvd.optimizer.nested_optimizers import (
    model_leaf_optimizers,
    model_optimizers,
)

# Of BatchNormalization.
_STATISTICS = (
    "moving_mean",
    "moving_variance",
    "moving_stddev",
    "renorm_mean",
    "renorm_stddev",
)

# Callbacks of Keras that change neither weights nor learning rates.
_HARMLESS = {
    *WRITERS,
    *SILENT_WRITERS,
    keras.callbacks.Callback,
    keras.callbacks.History,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.TerminateOnNaN,
}
_SET_LEARNING_RATES = {
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
}

# Types whose values cannot be added up.
_NOT_NUMBERS = ("bool", "string")


def average_statistics(model: keras.Model) -> None:
    """Gives BatchNormalization the mean of the ranks' moving statistics.

    Example:

    >>> import keras_hvd
    >>> keras_hvd.init()
    >>> layer = keras.layers.BatchNormalization()
    >>> model = keras.Sequential([keras.Input((1,)), layer])
    >>> model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    >>> average_statistics(model)
    >>> layer.moving_variance.numpy()
    array([1.], dtype=float32)
    """
    variables = _moving_statistics(model)
    process_set = _trained_by(model) or global_process_set
    if not variables or not process_set.included():
        return
    _average(variables, process_set, "moving_statistics")


def _moving_statistics(model: keras.Model) -> list[keras.Variable]:
    """The statistics that differ between ranks, and should not."""
    optimizers = model_optimizers(model)
    return [
        variable
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and not isinstance(layer, SyncBatchNormalization)
        and layer.built
        and layer.trainable
        and not local_variables(optimizers, layer.trainable_weights)
        # Some exist only in newer versions of Keras, with renorm=True.
        for variable in (getattr(layer, name, None) for name in _STATISTICS)
        if variable is not None
    ]


@dataclasses.dataclass(frozen=True)
class Checksums:
    """A rank's checksums: `of_weights` is compared if the other fields are equal."""

    ranks: tuple[int, ...]
    """The ranks that train the model; none if the optimizers differ in that."""
    structure: int
    of_weights: list[int | None]
    """None for a weight that is meant to differ."""


class SharedWeights:
    """A model's weights during one `fit`.

    Args:
        model: the model that is trained.
        callbacks: those of `fit`.
        locals_among: gives the `identity` of variables that callbacks know as local.
    """

    def __init__(
        self,
        model: keras.Model,
        callbacks: list[keras.callbacks.Callback],
        locals_among: Callable[[list[keras.Variable]], set[int]],
    ):
        self._model = model
        self._callbacks = list(callbacks)
        self._locals_among = locals_among
        self._suspects: list[list[str]] = []
        self._watches = False
        self._warned = False
        # Checksums of the ranks that train with this one, by rank.
        self._after_steps: dict[int, Checksums] = {}
        self._before_end: Checksums | None = None
        # By the `identity` of weights.
        self._before_steps: dict[int, Any] = {}

    def suspects(self) -> tuple[list[str], bool]:
        """This rank's callbacks that may make ranks differ; whether in the weights."""
        found = [each for each in self._callbacks if type(each) not in _HARMLESS]
        found = [each for each in found if not _is_ours(each)]
        names = sorted(type(each).__name__ for each in found)
        return names, any(map(_may_change_weights, found))

    def begin(self, suspects: Sequence[tuple[list[str], bool]]) -> None:
        """Training begins, with each rank's `suspects`."""
        self._suspects = [names for names, _ in suspects]
        self._watches = any(changes for _, changes in suspects)
        self._warned = False
        self._after_steps = {}

    # --- steps ---------------------------------------------------------------------

    def before_steps(self, epoch: int) -> None:
        """Raises, on every rank, if callbacks have changed some ranks' weights.

        Runs after all callbacks' `on_epoch_begin`.
        """
        if self._watches and self._after_steps:
            of_ranks = allgather_object(self.checksums(), name="keras_hvd/weights")
            now = self._comparable(of_ranks)
            self._require_unchanged(now, f"after epoch {epoch}")
        self._before_steps = {
            identity(weight): keras.ops.copy(weight.value)
            for weight in weights_of(self._model)
            if _aggregation(weight) == "sum"
        }

    def after_steps(self, checksums: list[Checksums], epoch: int) -> None:
        """Combines weights that layers have assigned, and warns of others that differ.

        Runs before validation and all callbacks' `on_epoch_end`, with each rank's
        `checksums`.
        """
        self._after_steps = of_ranks = self._comparable(checksums)
        differing = _differing(of_ranks)
        # A Strategy has combined them at their assignment.
        if (
            framework.current_strategy.of_model(self._model) is None
            and len(of_ranks) > 1
        ):
            combined = self._combine(differing)
            differing = [place for place in differing if place not in combined]
        if differing and not self._warned:
            self._warned = True
            log.warn(self._difference(differing, epoch), stacklevel=3)

    def _combine(self, differing: list[int]) -> set[int]:
        """Makes weights equal that have an aggregation, and returns their places."""
        process_set = _trained_by(self._model) or global_process_set
        weights = weights_of(self._model)
        places: dict[str, list[int]] = collections.defaultdict(list)
        checksums = self._after_steps[basics.rank()].of_weights
        for place, weight in enumerate(weights):
            aggregation = _aggregation(weight)
            # Equal parts of a sum have to be added up, too.
            if checksums[place] is None:
                continue
            if aggregation == "sum" or place in differing:
                places[aggregation].append(place)
        if places["mean"]:
            means = [weights[place] for place in places["mean"]]
            _average(means, process_set, "means")
        if places["sum"]:
            self._add_up(places["sum"], process_set)
        if places["only_first_replica"]:
            firsts = [weights[place] for place in places["only_first_replica"]]
            framework.broadcast_variables(firsts, process_set.ranks[0], process_set)
        return {*places["mean"], *places["sum"], *places["only_first_replica"]}

    def _add_up(self, places: list[int], process_set: ProcessSet) -> None:
        """Adds up the ranks' additions since the epoch's first step."""
        every = weights_of(self._model)
        weights = [every[place] for place in places]
        parts = [keras.ops.copy(weight.value) for weight in weights]
        if process_set.rank() != 0:
            # The value before counts once. A weight that was made in a step is taken to
            # have been 0 before.
            parts = [
                part
                - self._before_steps.get(identity(weight), keras.ops.zeros_like(part))
                for weight, part in zip(weights, parts, strict=True)
            ]
        sums = framework.grouped_allreduce(
            parts, op=Sum, name="keras_hvd/sums", process_set=process_set
        )
        for weight, total in zip(weights, sums, strict=True):
            weight.assign(total)

    def _difference(self, differing: list[int], epoch: int) -> str:
        weights = weights_of(self._model)
        trainable = [weights[place].trainable for place in differing]
        remedies = []
        if any(trainable):
            remedies.append(
                "Ranks must start with the same weights, which "
                "BroadcastGlobalVariables(0) gives them, and change them alike. "
            )
        if not all(trainable):
            remedies.append(
                "For a weight that its layer assigns, give add_weight() "
                'aggregation="mean", "sum" or "only_first_replica". '
            )
        own = "name it in BroadcastGlobalVariables(local_variables=...)"
        if framework.current_strategy.of_model(self._model) is not None:
            own = 'make it keras.Variable(..., synchronization="on_read")'
        return (
            f"weights of model {self._model.name!r} differ between ranks after epoch "
            f"{epoch + 1}: {self._named(differing, self._after_steps)}. "
            f"{''.join(remedies)}If each rank is to have its own, {own}"
            f"{self.about_callbacks()}"
        )

    # --- callbacks -----------------------------------------------------------------

    def before_end(self) -> None:
        """Runs before all other callbacks' `on_train_end`."""
        self._before_end = None
        if self._watches:
            self._before_end = self.checksums(of_statistics=True)

    def after_end(self) -> None:
        """Gives all ranks the weights that callbacks of one have restored at the end.

        Runs after all other callbacks' `on_train_end`. Raises, on every rank, if
        callbacks have changed the same weight differently.
        """
        before_end = self._before_end
        if before_end is None:
            return
        now = self.checksums(of_statistics=True)
        both = allgather_object((before_end, now), name="keras_hvd/end")
        before = self._comparable([each[0] for each in both])
        after = self._comparable([each[1] for each in both])
        if not _alike(before, after):
            return
        self._require_unchanged(before, "in the last epoch")
        differed = _differing(before)
        roots: dict[int, list[int]] = collections.defaultdict(list)
        for place in _differing(after):
            if place in differed:
                continue
            changed = [
                rank
                for rank, each in after.items()
                if each.of_weights[place] != before[rank].of_weights[place]
            ]
            if len({after[rank].of_weights[place] for rank in changed}) > 1:
                raise self._drifts([place], after, "at the end of training")
            roots[changed[0]].append(place)
        process_set = _trained_by(self._model) or global_process_set
        weights = weights_of(self._model)
        for root, places in roots.items():
            framework.broadcast_variables(
                [weights[each] for each in places], root, process_set
            )

    def _require_unchanged(self, now: dict[int, Checksums], when: str) -> None:
        """Raises if weights differ that were equal after the last step."""
        before = self._after_steps
        if not _alike(before, now):
            return
        differed = _differing(before)
        weights = weights_of(self._model)
        # Layers may assign others in validation.
        drifted = [
            place
            for place in _differing(now)
            if place not in differed and weights[place].trainable
        ]
        if drifted:
            raise self._drifts(drifted, now, when)

    def _drifts(
        self, places: list[int], now: dict[int, Checksums], when: str
    ) -> RuntimeError:
        return RuntimeError(
            f"callbacks have changed weights of model {self._model.name!r} {when}, not "
            f"the same on all ranks: {self._named(places, now)}. The ranks' weights "
            "would drift apart: let all ranks change them alike"
            f"{self.about_callbacks()}"
        )

    def about_callbacks(self) -> str:
        """The callbacks that may make ranks differ, as the end of a sentence."""
        counts = [collections.Counter(names) for names in self._suspects]
        everywhere = set(counts[0]).intersection(*counts[1:]) if counts else set()
        missing = [
            f"{name} (on rank {', '.join(map(str, ranks))})"
            for name in sorted({name for each in counts for name in each})
            if len({each[name] for each in counts}) > 1
            for ranks in [[rank for rank, each in enumerate(counts) if each[name]]]
        ]
        if missing:
            return f". Only some ranks have the callback {', '.join(missing)}"
        if everywhere:
            return f". The callbacks that may do so are {', '.join(sorted(everywhere))}"
        return ""

    # --- checksums -----------------------------------------------------------------

    def _comparable(self, of_ranks: list[Checksums]) -> dict[int, Checksums]:
        """Checksums of the ranks that train with this one; none if not comparable."""
        mine = of_ranks[basics.rank()]
        if basics.rank() not in mine.ranks:
            return {}
        found = {rank: of_ranks[rank] for rank in mine.ranks}
        like_mine = all(
            (each.ranks, each.structure) == (mine.ranks, mine.structure)
            for each in found.values()
        )
        return found if like_mine else {}

    def checksums(self, of_statistics: bool = False) -> Checksums:
        """This rank's checksums; of the averaged moving statistics only if asked."""
        weights = weights_of(self._model)
        local = self._local(weights)
        shared = [each for each in weights if identity(each) not in local]
        structure = [(tuple(w.shape), w.dtype, _aggregation(w)) for w in shared]
        process_set = _trained_by(self._model)
        if not of_statistics:
            local |= {identity(each) for each in _moving_statistics(self._model)}
        return Checksums(
            tuple(process_set.ranks) if process_set else (),
            zlib.crc32(repr((len(weights), structure)).encode()),
            [None if identity(w) in local else framework.checksum(w) for w in weights],
        )

    def _local(self, weights: list[keras.Variable]) -> set[int]:
        """The `identity` of each weight that is meant to differ between ranks."""
        optimizers = model_optimizers(self._model)
        local = local_variables(optimizers, weights) | self._locals_among(weights)
        local |= {identity(w) for w in weights if framework.is_local_source(w)}
        for layer in layers_of(self._model):
            own = [*layer._trainable_variables, *layer._non_trainable_variables]
            identities = {identity(each) for each in own}
            # A stateful layer keeps state of its rank's own rows.
            is_stateful = isinstance(layer, keras.layers.RNN) and layer.stateful
            if is_stateful or not local.isdisjoint(identities):
                local |= identities
        is_here = framework.current_strategy.of_model(self._model) is not None
        for weight in weights:
            on_read = getattr(weight, "synchronization", "auto") == "on_read"
            if on_read and (is_here or _aggregation(weight) == "none"):
                local.add(identity(weight))
        return local

    def _named(self, places: Iterable[int], now: dict[int, Checksums]) -> str:
        """The weights, with the ranks whose values are not the first rank's."""
        first, *others = now
        weights = weights_of(self._model)
        shown = []
        for place in places:
            of_first = now[first].of_weights[place]
            ranks = [
                str(rank) for rank in others if now[rank].of_weights[place] != of_first
            ]
            path = weights[place].path
            shown.append(f"{path} (rank {', '.join(ranks)} not as rank {first})")
        if len(shown) > 3:
            return f"{'; '.join(shown[:3])}; ... ({len(shown)} in all)"
        return "; ".join(shown)


def _differing(of_ranks: dict[int, Checksums]) -> list[int]:
    """The places of weights that are not equal on all of the ranks."""
    columns = zip(*(each.of_weights for each in of_ranks.values()), strict=True)
    return [
        place
        for place, column in enumerate(columns)
        if None not in column and len({*column}) > 1
    ]


def _alike(before: dict[int, Checksums], now: dict[int, Checksums]) -> bool:
    """Whether both are of the same ranks and weights; validation may create some."""
    return all(
        rank in before and each.structure == before[rank].structure
        for rank, each in now.items()
    )


def _aggregation(weight: keras.Variable) -> str:
    """How the ranks' values are combined; "none" also where they cannot be."""
    aggregation = weight.aggregation
    if weight.dtype == "string":
        return "none"
    if weight.dtype in _NOT_NUMBERS and aggregation != "only_first_replica":
        return "none"
    return aggregation


def _average(weights: list[keras.Variable], process_set: ProcessSet, name: str) -> None:
    averages = framework.grouped_allreduce(
        weights, op=Average, name=f"keras_hvd/{name}", process_set=process_set
    )
    for weight, average in zip(weights, averages, strict=True):
        weight.assign(average)


def process_sets_of(model: keras.Model) -> list[ProcessSet]:
    """The process sets in which the model's gradients are reduced, at least one."""
    distributed = filter(is_distributed, model_leaf_optimizers(model))
    # A tape's set is unknown, but most likely has all ranks.
    return [*map(reduces_with, distributed)] or [global_process_set]


def _trained_by(model: keras.Model) -> ProcessSet | None:
    """The ranks that train the model together; None if its optimizers differ."""
    first, *others = process_sets_of(model)
    return first if all(each.ranks == first.ranks for each in others) else None


def _is_ours(callback: keras.callbacks.Callback) -> bool:
    return type(callback).__module__.startswith("keras_hvd.")


def _may_change_weights(callback: keras.callbacks.Callback) -> bool:
    if type(callback) is keras.callbacks.EarlyStopping:
        return callback.restore_best_weights
    return type(callback) not in _SET_LEARNING_RATES
