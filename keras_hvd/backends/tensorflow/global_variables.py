"""Global variables of TensorFlow 1: graphs and sessions (`tf.compat.v1`)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_hvd import exceptions
from keras_hvd.backends.tensorflow.collectives import submission
from keras_hvd.backends.tensorflow.collectives.broadcast import broadcast
from keras_hvd.job import arrival


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """An op that sets the global variables of a TensorFlow 1 graph to the root's.

    Run it in a session after the variables' initializers. TensorFlow 2 has no global
    variables: give `keras_hvd.broadcast_variables` the variables instead, or use the
    callback `BroadcastGlobalVariables` for a model and its optimizer.

    Args:
        root_rank: the rank that sends its values.

    Returns:
        The op, in the default `tf.compat.v1` graph.

    Raises:
        NotInitializedError: `keras_hvd.init` was not called.
        RuntimeError: called eagerly or in a `tf.function`, or there are no variables.

    Example:

    >>> import keras_hvd, tensorflow as tf
    >>> keras_hvd.init()
    >>> with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ...     weight = tf.compat.v1.get_variable("weight", initializer=[1.0, 2.0])
    ...     broadcast = keras_hvd.broadcast_global_variables(root_rank=0)
    ...     session.run(tf.compat.v1.global_variables_initializer())
    ...     session.run(broadcast)
    ...     session.run(weight)
    array([1., 2.], dtype=float32)
    """
    arrival.require_arrived("broadcast_global_variables")
    _require_session_graph()
    variables = tf.compat.v1.global_variables()
    if not variables:
        raise RuntimeError(
            "broadcast_global_variables: the default graph has no global variables; "
            "call it after the model is made, in the same graph"
        )
    with tf.name_scope("broadcast_global_variables"):
        return tf.group(
            *(
                variable.assign(
                    broadcast(variable, root_rank, name=f"global/{variable.name}")
                )
                for variable in variables
            )
        )


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts global variables when a monitored `tf.compat.v1` session begins.

    Args:
        root_rank: the rank that sends its values.
        device: where the variables are assigned; by default on their own devices.

    Raises:
        RuntimeError: the graph has no variables (when the session begins).

    Example:

    >>> import keras_hvd, tensorflow as tf
    >>> keras_hvd.init()
    >>> with tf.Graph().as_default():
    ...     weight = tf.compat.v1.get_variable("weight", initializer=[1.0, 2.0])
    ...     step = tf.compat.v1.train.get_or_create_global_step()
    ...     with tf.compat.v1.train.MonitoredTrainingSession(
    ...         hooks=[keras_hvd.BroadcastGlobalVariablesHook(0)]
    ...     ) as session:
    ...         session.run(weight)
    array([1., 2.], dtype=float32)
    """

    def __init__(self, root_rank: int, device: str = ""):
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self._broadcast: tf.Operation | None = None

    def begin(self) -> None:
        """Adds the op to the graph, before the graph is final."""
        graph = tf.compat.v1.get_default_graph()
        if self._broadcast is None or self._broadcast.graph is not graph:
            with tf.device(self.device or None):
                self._broadcast = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the op after the variables are initialized."""
        try:
            session.run(self._broadcast)
        except tf.errors.AbortedError as error:
            # Monitored sessions treat this error as the loss of a server, and would
            # start again for ever.
            raise exceptions.RankFailedError(error.message) from error


def refuse_session_optimizer(optimizer: Any) -> None:
    """Raises TypeError if it is an optimizer of `tf.compat.v1`, which has gradients."""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise TypeError(
            "DistributedOptimizer takes a Keras 3 optimizer; got a "
            f"tf.compat.v1.train.{type(optimizer).__name__}. Reduce the gradients that "
            "its compute_gradients returns with keras_hvd.grouped_allreduce, and give "
            "the results to its apply_gradients."
        )


def _require_session_graph() -> None:
    if submission.in_session_graph():
        return
    raise RuntimeError(
        "broadcast_global_variables is for graphs and sessions of tf.compat.v1: "
        "TensorFlow 2 has no global variables. Use keras_hvd.broadcast_variables("
        "model.variables, root_rank), once for the model and once for its optimizer, "
        "or the callback keras_hvd.callbacks.BroadcastGlobalVariables(root_rank)."
    )
