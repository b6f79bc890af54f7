"""One reduction serves many steps, whose gradients are alike or not."""

import keras
import pytest
import torch

from keras_hvd.backends.dense_collectives import Together
from keras_hvd.backends.gradient_reduction import GradientReduction
from keras_hvd.backends.torch.gradients.step_reduction import StepReduction


@pytest.fixture
def step() -> StepReduction:
    variables = [keras.Variable(torch.zeros(3, 2), name=name) for name in ("p", "q")]
    reduction = GradientReduction(sparse_as_dense=True)
    return StepReduction(reduction, "sgd", variables, [24, 24], "", in_place=False)


def rows(rank: int) -> torch.Tensor:
    return torch.arange(6.0).reshape(3, 2) * (rank + 1)


def columns(rank: int) -> torch.Tensor:
    return rows(rank).T.contiguous().T


def sparse(rank: int) -> torch.Tensor:
    return rows(rank).to_sparse()


def a_parameter(rank: int) -> torch.Tensor:
    return torch.nn.Parameter(rows(rank))


def a_parameter_in_columns(rank: int) -> torch.Tensor:
    return torch.nn.Parameter(columns(rank))


def a_view(rank: int) -> torch.Tensor:
    """With gaps between its elements."""
    return torch.stack([rows(rank), rows(rank)], dim=-1)[..., 0]


def doubles(rank: int) -> torch.Tensor:
    return rows(rank).double()


KINDS = [rows, columns, sparse, a_parameter, a_parameter_in_columns, a_view, doubles]


@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("another", [rows, columns, sparse, a_view])
@pytest.mark.parametrize("one", [rows, a_parameter])
def test_gradients_of_another_kind_between_those_of_one(
    one, other, another, step, rank, size
):
    pairs = [(one, one), (one, one), (other, another), (one, one), (other, another)]
    for number, kinds in enumerate(pairs):
        for place, kind in enumerate(kinds):
            step.give(place, kind(rank) + number if kind is one else kind(rank))
        results = step.finish()
        mean = rows(0) * (size + 1) / 2
        for place, kind in enumerate(kinds):
            wanted = mean + number if kind is one else mean
            assert torch.equal(results[place].float(), wanted)


def test_a_step_with_like_gradients_makes_no_request_anew(
    step, rank, size, groups, monkeypatch
):
    made, plain = [], Together.allreduce

    def allreduce(self, name, *arguments, **named):
        made.append(name)
        return plain(self, name, *arguments, **named)

    monkeypatch.setattr(Together, "allreduce", allreduce)
    kept = []
    for number in range(3):
        kept.append([rows(rank) + number, rows(rank) - number])
        for place, grad in enumerate(kept[-1]):
            step.give(place, grad)
        step.finish()
    assert made == ["sgd/gradients/0"]
    # In the order in which backprop gives them.
    wanted = [[each.data_ptr() for each in reversed(grads)] for grads in kept]
    assert [each.addresses for each in groups] == wanted
    assert groups[0].results == groups[1].results == groups[2].results
