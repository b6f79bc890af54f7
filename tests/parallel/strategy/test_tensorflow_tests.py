"""The tests for strategies that TensorFlow ships, run against keras_hvd.Strategy.

With one rank they run as they are, with the values that TensorFlow expects; with
several, with the values of as many replicas. Each test runs eagerly and in a graph.
"""

import unittest.mock

import tensorflow as tf
from free_port import free_port
from tensorflow.python.distribute import strategy_test_lib
from tensorflow.python.framework import test_util

import keras_hvd


class _Eagerly:
    """The tests' mode, and the strategy under test."""

    def test_session(self, *arguments, **named):
        return super().test_session(*arguments, **named)

    test_session.__test__ = False  # it is none, despite its name

    def setUp(self):
        super().setUp()
        self.rank, self.size = keras_hvd.rank(), keras_hvd.size()
        self.strategy = keras_hvd.Strategy()


class _InGraph(_Eagerly):
    def setUp(self):
        super().setUp()
        self.enterContext(tf.Graph().as_default())


class _AnyStrategy:
    """The bodies of `DistributionTestBase`."""

    def test_minimize_loss(self):
        if tf.executing_eagerly():
            self._test_minimize_loss_eager(self.strategy)
        else:
            self._test_minimize_loss_graph(self.strategy)

    def test_summary_for_replica_zero_only(self):
        if self.rank == 0:
            self._test_summary_for_replica_zero_only(self.strategy)
            return
        # The file has its header, and no summary.
        with self.assertRaisesRegex(AssertionError, "length of 1"):
            self._test_summary_for_replica_zero_only(self.strategy)

    def test_replica_id(self):
        if self.size == 1:
            self._test_replica_id(self.strategy)
            return
        place = self.strategy.run(
            lambda: tf.distribute.get_replica_context().replica_id_in_sync_group
        )
        self.assertEqual(self.evaluate(place), self.rank)

    def test_call_and_merge_exceptions(self):
        self._test_call_and_merge_exceptions(self.strategy)

    def test_input_fn_iterable(self):
        self._test_input_fn_iterable(
            self.strategy, self.input_fn(), [[i] for i in range(5)]
        )

    def test_input_fn_iterator(self):
        self._test_input_fn_iterator(
            self.strategy.make_input_fn_iterator(self.input_fn()),
            self.strategy.extended.worker_devices,
            [[i] for i in range(5)],
        )

    def test_global_step_update(self):
        self._test_global_step_update(self.strategy)

    def test_numpy_dataset(self):
        self._test_numpy_dataset(self.strategy)  # skips all but TensorFlow 1's

    def test_trainable_variable(self):
        self._test_trainable_variable(self.strategy)

    def input_fn(self):
        return self._input_fn_to_test_input_context(
            lambda: tf.data.Dataset.range(5),
            expected_num_replicas_in_sync=self.size,
            expected_num_input_pipelines=self.size,
            expected_input_pipeline_id=self.rank,
        )


class _OneDevice:
    """The bodies of `OneDeviceDistributionTestBase`."""

    def test_run(self):
        self._test_run(self.strategy)

    def test_all_reduce_sum(self):
        if self.size == 1:
            self._test_all_reduce_sum(self.strategy)
        self._test_collective_comms(
            self.strategy,
            strategy_test_lib._all_sum,
            inputs=(4.0, [42.0, 43.0]),
            expected=(4.0 * self.size, [42.0 * self.size, 43.0 * self.size]),
        )

    def test_all_reduce_sum_gradients(self):
        if self.size == 1:
            self._test_all_reduce_sum_gradients(self.strategy)
        self._test_collective_comms_gradients(
            self.strategy,
            strategy_test_lib._all_sum,
            inputs=[4.0],
            expected_grads=[4.0 * self.size],
        )

    def test_all_reduce_sum_gradient_tape(self):
        if self.size == 1:
            self._test_all_reduce_sum_gradient_tape(self.strategy)
        self._test_collective_comms_gradient_tape(
            self.strategy,
            strategy_test_lib._all_sum,
            inputs=[4.0],
            expected_grads=[4.0 * self.size],
        )

    def test_all_reduce_mean(self):
        self._test_all_reduce_mean(self.strategy)

    def test_all_reduce_mean_gradients(self):
        self._test_all_reduce_mean_gradients(self.strategy)

    def test_all_reduce_mean_gradient_tape(self):
        self._test_all_reduce_mean_gradient_tape(self.strategy)

    def test_device_and_input_device_are_colocated(self):
        self.require_one_rank()
        self._test_device_and_input_device_are_colocated(self.strategy)

    def test_device_and_input_device_are_colocated_with_function(self):
        self.require_one_rank()
        self._test_device_and_input_device_are_colocated_with_function(self.strategy)

    def require_one_rank(self):
        if self.size > 1:
            self.skipTest("starts servers, in a process that is the only one")
        # TensorFlow asks a package for free ports that it does not come with.
        self.enterContext(
            unittest.mock.patch.object(test_util, "pick_unused_port", free_port)
        )


class TestAnyStrategyEagerly(
    _AnyStrategy, _Eagerly, strategy_test_lib.DistributionTestBase
):
    pass


class TestAnyStrategyInGraph(
    _AnyStrategy, _InGraph, strategy_test_lib.DistributionTestBase
):
    pass


class TestOneDeviceEagerly(
    _OneDevice, _Eagerly, strategy_test_lib.OneDeviceDistributionTestBase
):
    pass


class TestOneDeviceInGraph(
    _OneDevice, _InGraph, strategy_test_lib.OneDeviceDistributionTestBase
):
    pass
