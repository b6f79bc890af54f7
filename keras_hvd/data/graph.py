"""Reads and changes the graph of a `tf.data.Dataset`.

TensorFlow can serialize a dataset's graph, to save it or to send it to another process.
This module reads that graph, changes it in one place, and makes a dataset of it again.
As that happens in the same process, the graph's Python functions stay valid.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import message
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import gen_experimental_dataset_ops

from keras_hvd.data.one_job import MARK

# `ParallelMapDatasetV2` is a `MapDataset`.
_DATASET = re.compile(r"(Experimental|Legacy)?(Parallel)?([\w>]*Dataset)(V\d+)?$")

FOR_ONE_JOB = "DatasetForOneJob"
"""The kind of datasets of `for_one_job`, which change nothing."""

LARGEST = 2**31 - 2**20
"""The most bytes of arrays in a graph: a protocol buffer is smaller than 2 GiB."""


def kinds(names: str) -> frozenset[str]:
    """Kinds of datasets, from their names without "Dataset"."""
    return frozenset(f"{name}Dataset" for name in names.split())


# Ops of tf.data that read files, in their shortest names.
_READERS = kinds("CSV FixedLengthRecord LMDB SSTable TFRecord TextLine")

# Prefixes of the names of random ops, without the stateless ones.
_RANDOM = (
    *("Multinomial", "NonDeterministicInts", "ParameterizedTruncatedNormal", "Random"),
    *("RngReadAndSkip", "SampleDistortedBoundingBox", "StatefulRandom"),
    *("StatefulStandardNormal", "StatefulTruncatedNormal", "StatefulUniform"),
    "TruncatedNormal",
)

# The arguments of these datasets may differ between ranks that read the same data:
# seeds, the path of a cache, the number of a shard.
_OWN_ARGUMENTS = kinds("Cache Random Sampling Shard ShuffleAndRepeat Shuffle")

# Arguments that hold a dataset's state, and the ops that create new state.
_STATE = {"cache": "DummyMemoryCache", "seed_generator": "DummySeedGenerator"}

_HANDLES = (tf.resource.as_datatype_enum, tf.variant.as_datatype_enum)
_NO_NUMBERS = (*_HANDLES, tf.string.as_datatype_enum)

_VARYING = "reshuffle_each_iteration", "rerandomize_each_iteration"

# Variables and tables that a dataset's functions use. The graph copies them.
_COPIED = {"VarHandleOp": "a variable", "MutableHashTableV2": "a mutable table"}


class DatasetGraph:
    """The graph of a dataset. `function` is the public function's name, for messages.

    Raises ValueError if TensorFlow cannot serialize it: it is too large, or has
    something that exists in this process only.

    Example:

    >>> graph = DatasetGraph(tf.data.Dataset.range(3).batch(2), "shard")
    >>> [graph.kind(name) for name in graph.chain()]
    ['RangeDataset', 'BatchDataset']
    >>> [batch.tolist() for batch in graph.build().as_numpy_iterator()]
    [[0, 1], [2]]
    """

    def __init__(self, dataset: tf.data.Dataset, function: str):
        self._dataset = dataset
        self._function = function
        if (in_memory := _bytes_in_memory(dataset)) > LARGEST:
            error = ValueError(f"it has {in_memory} bytes of arrays")
            raise self._cannot("be written down", error)
        try:
            serialized = dataset._as_serialized_graph(
                external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE
            )
            self._graph = graph_pb2.GraphDef.FromString(serialized.numpy())
        except (tf.errors.OpError, message.Error) as error:
            raise self._cannot("be written down", error) from error
        self._nodes = {node.name: node for node in self._graph.node}
        self._functions = {
            each.signature.name: each for each in self._graph.library.function
        }
        for node in self._graph.node:
            _remove_unknown_attributes(node)
        (self._end,) = (node for node in self._graph.node if node.op == "_Retval")
        self._added = 0
        self._take_own_state()

    def chain(self) -> list[str]:
        """Names of datasets from source to end, each the only input of the next.

        The first is a source, or has several datasets as inputs.
        """
        names = [self._source_of(self._end, 0)]
        while len(inputs := self.inputs(names[-1])) == 1:
            names.append(inputs[0])
        return names[::-1]

    def inputs(self, name: str) -> list[str]:
        """The datasets that this dataset reads."""
        sources = map(_node_of, self._nodes[name].input)
        found = [each for each in sources if self._is_dataset(each)]
        # The first input only checks.
        return found[1:] if self.kind(name) == FOR_ONE_JOB else found

    def before(self, name: str) -> list[str]:
        """This dataset and all datasets that it is made of, sources first."""
        found: dict[str, None] = {}
        stack = [(name, False)]
        while stack:
            current, is_done = stack.pop()
            if is_done:
                found[current] = None
            elif current not in found:
                stack.append((current, True))
                stack.extend((each, False) for each in self.inputs(current))
        return list(found)

    def kind(self, name: str) -> str:
        """The name of a dataset's op, without version and variant."""
        return FOR_ONE_JOB if self.has_mark(name, MARK) else _kind(self._nodes[name].op)

    def has_mark(self, name: str, mark: str) -> bool:
        """Whether a dataset was made with this name."""
        own = self._nodes[name].attr
        return "metadata" in own and mark.encode() in own["metadata"].s

    def reads_files(self, name: str) -> bool:
        """Whether a dataset's functions read files as datasets."""
        return any(_kind(op) in _READERS for op in self._ops(name))

    def draws(self, name: str) -> bool:
        """Whether a dataset's functions draw random numbers."""
        return any(op.startswith(_RANDOM) for op in self._ops(name))

    def inner(self, name: str) -> list[InnerDataset]:
        """The datasets in a dataset's functions."""
        return [
            InnerDataset(function, node)
            for function in self._functions_in(name)
            for node in [*function.node_def]
            if _DATASET.match(node.op)
        ]

    def copies(self) -> str:
        """A resource of functions that the graph copies, such as a variable, or ""."""
        found = [_COPIED[n.op] for n in self._graph.node if n.op in _COPIED]
        return found[0] if found else ""

    def varies(self, name: str) -> bool:
        """Whether each iteration draws anew, although there are seeds."""
        own = self._nodes[name].attr
        return any(each in own and own[each].b for each in _VARYING)

    def stop_varying(self, name: str) -> None:
        """Makes each iteration draw the same."""
        own = self._nodes[name].attr
        for each in filter(own.__contains__, _VARYING):
            own[each].b = False

    def settle(self, name: str) -> None:
        """Makes a dataset's elements come in order."""
        _settle(self._nodes[name])

    def argument(self, name: str, place: int) -> np.ndarray:
        """The constant that is a dataset's input number `place`."""
        node = self._nodes[self._source_of(self._nodes[name], place)]
        return tf.make_ndarray(node.attr["value"].tensor)

    def set_argument(self, name: str, place: int, value: Any, dtype: tf.DType) -> None:
        """Replaces a dataset's input number `place` by a constant."""
        self._nodes[name].input[place] = self._constant(value, dtype)

    def digest(self, name: str) -> int:
        """A checksum of the elements' origin, to compare between ranks.

        It covers the dataset and everything before it: ops, arrays and names of files,
        but not the results of Python functions.
        """
        crc = 0
        for each in self.before(name):
            node = self._nodes[each]
            text = f"{self.kind(each)} {sorted(self._ops(each))}"
            crc = zlib.crc32(text.encode(), crc)
            if self.kind(each) in _OWN_ARGUMENTS:
                continue
            for source in map(_node_of, node.input):
                tensor = self._nodes[source].attr["value"].tensor
                if tensor.tensor_content:
                    # Large tensors, without a copy.
                    crc = zlib.crc32(str(tensor.tensor_shape).encode(), crc)
                    crc = zlib.crc32(tensor.tensor_content, crc)
                elif tensor.dtype not in _HANDLES:
                    crc = zlib.crc32(tensor.SerializeToString(deterministic=True), crc)
        return crc

    def add_shard(self, name: str, size: int, index: int) -> None:
        """Makes readers of a dataset in the chain read only every `size`-th element."""
        arrays = self._own_arrays(name)
        for tensor in arrays:
            part = tf.make_ndarray(tensor)[index::size]
            tensor.CopyFrom(tf.make_tensor_proto(part, tensor.dtype, part.shape))
        if not arrays:
            self._insert("ShardDataset", name, size, index)

    def add_cardinality(self, name: str, count: int) -> None:
        """Declares how many elements a dataset in the chain has."""
        self._insert("AssertCardinalityDataset", name, count)

    def remove(self, name: str) -> None:
        """Removes a dataset with one input from the chain."""
        (source,) = self.inputs(name)
        _redirect(self._reader_of(name), name, source)

    def build(self) -> tf.data.Dataset:
        """Makes a dataset of this graph. Raises ValueError if TensorFlow cannot."""
        return _Built(self._variant(self._graph), self._dataset)

    def build_part(self, name: str) -> tf.data.Dataset:
        """Makes one of the inner datasets, with flat tuples as elements."""
        types, shapes = self._structure(name)
        spec = tuple(
            tf.TensorSpec(tf.TensorShape(shape), tf.dtypes.as_dtype(dtype))
            for dtype, shape in zip(types.list.type, shapes.list.shape)
        )
        graph = graph_pb2.GraphDef()
        graph.library.CopyFrom(self._graph.library)
        graph.versions.CopyFrom(self._graph.versions)
        graph.node.extend(self._needed(name))
        end = graph.node.add()
        end.CopyFrom(self._end)
        end.input[0] = name
        return _Built(self._variant(graph), self._dataset, spec)

    def _take_own_state(self) -> None:
        """Replaces the original's caches and generators of seeds by new ones.

        The data in the original's caches is not part of this dataset, and seeds' states
        differ between ranks.
        """
        for node in list(self._graph.node):
            definition = op_def_registry.get(node.op)
            if definition is None or not self._is_dataset(node.name):
                continue
            for place, argument in enumerate(definition.input_arg):
                if argument.name in _STATE:
                    node.input[place] = self._add(_STATE[argument.name]).name

    def _variant(self, graph: graph_pb2.GraphDef) -> tf.Tensor:
        try:
            return gen_experimental_dataset_ops.dataset_from_graph(
                graph.SerializeToString()
            )
        except (tf.errors.OpError, message.Error) as error:
            raise self._cannot("be made anew", error) from error

    def _needed(self, end: str) -> Iterator[node_def_pb2.NodeDef]:
        """The nodes that lead to `end`, in the graph's order."""
        wanted, stack = set(), [_node_of(end)]
        while stack:
            name = stack.pop()
            if name not in wanted:
                wanted.add(name)
                stack.extend(map(_node_of, self._nodes[name].input))
        return (node for node in self._graph.node if node.name in wanted)

    def _source_of(self, node: node_def_pb2.NodeDef, place: int) -> str:
        """The node behind an input, past `Identity` nodes."""
        name = _node_of(node.input[place])
        while self._nodes[name].op == "Identity":
            name = _node_of(self._nodes[name].input[0])
        return name

    def _is_dataset(self, name: str) -> bool:
        return _DATASET.match(self._nodes[name].op) is not None

    def _ops(self, name: str) -> set[str]:
        """The ops in a dataset's functions, and in the functions that these call."""
        functions = self._functions_in(name)
        return {node.op for function in functions for node in function.node_def}

    def _functions_in(self, name: str) -> list[function_pb2.FunctionDef]:
        """A dataset's functions and those they call, in the same order on all ranks."""
        known: dict[str, function_pb2.FunctionDef] = {}
        stack = list(_called(self._nodes[name]))
        while stack:
            function = stack.pop()
            if function in known or function not in self._functions:
                continue
            known[function] = self._functions[function]
            for node in self._functions[function].node_def:
                stack.extend([node.op, *_called(node)])
        return list(known.values())

    def _own_arrays(self, name: str) -> list[Any]:
        """The arrays that a dataset slices, if nothing else uses them."""
        if self.kind(name) != "TensorSliceDataset":
            return []
        sources = list(self._nodes[name].input)
        used = Counter(_node_of(each) for n in self._graph.node for each in n.input)
        nodes = [self._nodes[_node_of(each)] for each in sources]
        tensors = [node.attr["value"].tensor for node in nodes if node.op == "Const"]
        is_own = len(tensors) == len(sources) and all(
            used[node.name] == 1 and node.attr["dtype"].type not in _NO_NUMBERS
            for node in nodes
        )
        return tensors if is_own else []

    def _insert(self, op: str, name: str, *arguments: int) -> None:
        """Inserts a dataset behind another one, with elements of the same type."""
        reader, (types, shapes) = self._reader_of(name), self._structure(name)
        node = self._add(op)
        node.input.append(name)
        node.input.extend(self._constant(each, tf.int64) for each in arguments)
        node.attr["output_types"].CopyFrom(types)
        node.attr["output_shapes"].CopyFrom(shapes)
        _redirect(reader, name, node.name)

    def _reader_of(self, name: str) -> node_def_pb2.NodeDef:
        """The next node in the chain."""
        chain = self.chain()
        place = chain.index(name) + 1
        return self._nodes[chain[place]] if place < len(chain) else self._end

    def _structure(self, name: str) -> tuple[Any, Any]:
        """The types and shapes of a dataset's elements, as attributes."""
        attributes = self._nodes[name].attr
        if "output_shapes" not in attributes:
            # A reader of files: its elements are strings.
            strings = node_def_pb2.NodeDef().attr
            strings["types"].list.type.append(tf.string.as_datatype_enum)
            strings["shapes"].list.shape.add()
            return strings["types"], strings["shapes"]
        types = "output_types" if "output_types" in attributes else "Toutput_types"
        return attributes[types], attributes["output_shapes"]

    def _constant(self, value: Any, dtype: tf.DType) -> str:
        node = self._add("Const")
        _set_value(node, value, dtype)
        return node.name

    def _add(self, op: str) -> node_def_pb2.NodeDef:
        self._added += 1
        node = self._graph.node.add(op=op, name=f"keras_hvd/{op}_{self._added}")
        self._nodes[node.name] = node
        return node

    def _cannot(self, what: str, error: Exception) -> ValueError:
        return ValueError(
            f"{self._function}: the graph of this dataset cannot {what}, so it cannot "
            "be changed. Give each rank its part at the start of the dataset, with "
            ".shard(keras_hvd.size(), keras_hvd.rank()) or slices of arrays, and pass "
            f"policy='off'. TensorFlow says: {str(error)[:500]}"
        )


class InnerDataset:
    """A dataset (`node`) that a function of another dataset makes."""

    def __init__(self, function: function_pb2.FunctionDef, node: node_def_pb2.NodeDef):
        self._function = function
        self._node = node

    @property
    def kind(self) -> str:
        """As `DatasetGraph.kind`."""
        return _kind(self._node.op)

    def constant(self, place: int) -> int | None:
        """The constant at input number `place`, or a number that stands for several.

        None if it depends on more than constants.
        """
        nodes = {node.name: node for node in self._function.node_def}
        constants, stack = [], [_node_of(self._node.input[place])]
        while stack:
            name = stack.pop()
            if name not in nodes:
                return None
            if nodes[name].op == "Const":
                constants.append(tf.make_ndarray(nodes[name].attr["value"].tensor))
            stack.extend(map(_node_of, nodes[name].input))
        if len(constants) == 1:
            return int(constants[0])
        return zlib.crc32(repr([each.tolist() for each in constants]).encode()) or 1

    def set_constant(self, place: int, value: int) -> None:
        """Replaces input number `place`."""
        name = f"{self._node.name}_keras_hvd_{place}"
        self._node.input[place] = f"{name}:output:0"
        node = self._function.node_def.add(op="Const", name=name)
        _set_value(node, value, tf.int64)

    def settle(self) -> None:
        """Makes its elements come in order."""
        _settle(self._node)


class _Built(dataset_ops.DatasetSource):
    """A dataset from a graph, with the element spec of `origin` by default.

    It keeps `origin`'s functions alive: otherwise Python would free the functions that
    it implements.
    """

    def __init__(self, variant: tf.Tensor, origin: tf.data.Dataset, spec: Any = None):
        self._spec = origin.element_spec if spec is None else spec
        self._kept = list(_functions_of(origin))
        super().__init__(variant)
        # For Python code; TensorFlow uses the options in the graph.
        self._options_attr = origin.options()

    @property
    def element_spec(self) -> Any:
        return self._spec


def _functions_of(dataset: tf.data.Dataset) -> Iterator[Any]:
    yield getattr(dataset, "_kept", None)
    yield from dataset._functions()
    for each in _sources(dataset):
        yield from _functions_of(each)


def _sources(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The datasets that a dataset reads."""
    # Readers have no inputs; they keep their inner dataset here.
    inner = getattr(dataset, "_impl", None)
    return [*dataset._inputs(), *([] if inner is None else [inner])]


def _node_of(source: str) -> str:
    return source.lstrip("^").split(":")[0]


def _kind(op: str) -> str:
    match = _DATASET.match(op)
    return match.group(3) if match else op


def _called(node: node_def_pb2.NodeDef) -> Iterator[str]:
    """The functions that are attributes of a node."""
    for value in node.attr.values():
        kind = value.WhichOneof("value")
        if kind == "func":
            yield value.func.name
        elif kind == "list":
            yield from (each.name for each in value.list.func)


def _settle(node: node_def_pb2.NodeDef) -> None:
    if "deterministic" in node.attr:
        node.attr["deterministic"].s = b"true"


def _set_value(constant: node_def_pb2.NodeDef, value: Any, dtype: tf.DType) -> None:
    constant.attr["dtype"].type = dtype.as_datatype_enum
    constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))


def _redirect(node: node_def_pb2.NodeDef, old: str, new: str) -> None:
    for place, source in enumerate(node.input):
        if _node_of(source) == old:
            node.input[place] = new


def _remove_unknown_attributes(node: node_def_pb2.NodeDef) -> None:
    """Removes attributes that TensorFlow writes and later complains about on stderr."""
    definition = op_def_registry.get(node.op)
    if definition is None:
        return
    known = {each.name for each in definition.attr}
    for key in [each for each in node.attr if each not in known and each[0] != "_"]:
        del node.attr[key]


def _bytes_in_memory(dataset: tf.data.Dataset) -> int:
    """The size of the arrays at the start of a dataset."""
    tensors = tf.nest.flatten(getattr(dataset, "_tensors", ()))
    own = sum(int(tf.size(each)) * each.dtype.size for each in tensors)
    return own + sum(map(_bytes_in_memory, _sources(dataset)))
