"""Numbers of ranks and time limits that are none are refused, with the reason."""

import pytest
from tfx import v1 as tfx
from tfx.types import standard_artifacts

import keras_hvd
from keras_hvd.tfx.executor import TrainingFailedError


def trainer(**settings):
    return keras_hvd.tfx.Trainer(
        module_file="module.py",
        examples=tfx.dsl.Channel(standard_artifacts.Examples),
        **settings,
    )


@pytest.mark.parametrize("value", [0, -1, 1.5, "two", True])
def test_what_is_no_number_of_ranks(component, value):
    reason = f"num_ranks must be a whole number from 1 on; got {value!r}"
    with pytest.raises(ValueError, match=reason):
        trainer(num_ranks=value)
    with pytest.raises(ValueError, match=reason):
        trainer(custom_config={"num_ranks": value})
    # As a runtime parameter it is known only then.
    with pytest.raises(TrainingFailedError, match=reason):
        component.execute("", num_ranks=value)


@pytest.mark.parametrize("value", [0, "an hour", float("nan")])
def test_what_is_no_time_limit(value):
    with pytest.raises(ValueError, match=f"number of seconds; got {value!r}"):
        trainer(num_ranks=2, time_limit=value)


def test_the_number_of_ranks_is_needed(component):
    with pytest.raises(ValueError, match="the number of ranks is missing"):
        trainer()
    with pytest.raises(TrainingFailedError, match="custom_config="):
        component.execute("")


def test_two_numbers_of_ranks():
    with pytest.raises(ValueError, match="num_ranks is 2, and 3 in custom_config"):
        trainer(num_ranks=2, custom_config={"num_ranks": 3})


def test_digits_are_a_number():
    made = trainer(num_ranks="3", custom_config={"num_ranks": 3})
    assert made.exec_properties["num_ranks"] == 3
