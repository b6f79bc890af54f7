"""The examples in the docstrings have the results that they show."""

import doctest
import importlib
import inspect
import pkgutil

import keras
import pytest

import keras_hvd

# Their examples take pipelines, a cluster or torch: tests/tfx, tests/clusters,
# tests/torch.
NEED_A_LIBRARY = {
    "keras_hvd.ray.executor",
    "keras_hvd.ray.places",
    "keras_hvd.ray.report_callback",
    "keras_hvd.ray.trainer",
    "keras_hvd.spark.collecting",
    "keras_hvd.spark.columns",
    "keras_hvd.spark.estimator",
    "keras_hvd.spark.fitting",
    "keras_hvd.spark.function",
    "keras_hvd.spark.model",
    "keras_hvd.spark.params",
    "keras_hvd.spark.rank",
    "keras_hvd.spark.task",
    "keras_hvd.tfx.component",
    "keras_hvd.tfx.dataset",
    "keras_hvd.tfx.executor",
    "keras_hvd.tfx.rank",
}
MODULES = [
    module.name
    for module in pkgutil.walk_packages(keras_hvd.__path__, "keras_hvd.")
    if not module.name.endswith("__main__") and module.name not in NEED_A_LIBRARY
    if not module.name.startswith("keras_hvd.backends.torch.")
]
# The modules where users find names.
NAMESPACES = ("keras_hvd", "keras_hvd.callbacks", "keras_hvd.data")

# Each public name here takes a job, processes or a library of its own, and is tested
# with these, or it changes Keras for good.
WITHOUT_EXAMPLES = {
    "keras_hvd.build",
    "keras_hvd.data.readers.avro",
    "keras_hvd.elastic.world",
    "keras_hvd.launch.check_build",
    "keras_hvd.launch.diagnosis.measurement",
    "keras_hvd.launch.diagnosis.rank",
    "keras_hvd.launch.diagnosis.report",
    "keras_hvd.launch.elastic",
    "keras_hvd.launch.guardian",
    "keras_hvd.launch.job",
    "keras_hvd.launch.joined_hosts",
    "keras_hvd.launch.joined_job",
    "keras_hvd.launch.membership_service",
    "keras_hvd.launch.memory",
    "keras_hvd.launch.other_hosts",
    "keras_hvd.launch.rank",
    "keras_hvd.launch.reached_hosts",
    "keras_hvd.launch.remote_ranks",
    "keras_hvd.launch.scaling",
    "keras_hvd.launch.speaking_job",
    "keras_hvd.launch.talk",
    "keras_hvd.launch.usage",
    "keras_hvd.world.rendezvous.connection",
    "keras_hvd.world.rendezvous.links",
    "keras_hvd.world.launchers.launcher",
    "keras_hvd.world.launchers.mpi",
    "keras_hvd.world.launchers.munge",
    "keras_hvd.world.rendezvous.ranks",
    "keras_hvd.report.page",
    "keras_hvd.report.record",
    "keras_hvd.job.mpi_functions",
    "keras_hvd.tfx.joint_training",
}


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    keras.utils.clear_session()  # Keras numbers the names of layers and optimizers
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    has_names = any(is_defined_in(module, each) for each in vars(module))
    wants_examples = has_names and name not in WITHOUT_EXAMPLES
    assert (result.attempted > 0) == wants_examples


def is_defined_in(module, name: str) -> bool:
    """Whether a name is that of a public function or class of a module's own."""
    value = vars(module)[name]
    is_named = inspect.isfunction(value) or inspect.isclass(value)
    return is_named and not name.startswith("_") and value.__module__ == module.__name__


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_whatever_users_call_has_an_example(namespace):
    module = importlib.import_module(namespace)
    public = {name: getattr(module, name) for name in module.__all__}
    without = [
        name
        for name, value in public.items()
        if inspect.isfunction(value) or inspect.isclass(value)
        if not (inspect.isclass(value) and issubclass(value, Exception))
        if ">>>" not in inspect.getdoc(value)
    ]
    assert without == []
