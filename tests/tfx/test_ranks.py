"""The arguments of a run_fn on each rank: FnArgs as in TFX, its part of the data."""

import json

import attrs
import pytest
from tfx.components.trainer.executor import GenericExecutor
from tfx.types import standard_artifacts

TRAIN_ARGS = '{"numSteps": 9}'
DIRS = ("serving_model_dir", "eval_model_dir", "model_run_dir")


@pytest.fixture(params=[2, 3])
def noted(component, request):
    """The notes of each rank, with all inputs that a Trainer may have."""
    component.add("schema", standard_artifacts.Schema, {"schema.pbtxt": ""})
    component.add("transform_graph", standard_artifacts.TransformGraph, {})
    component.add(
        "hyperparameters",
        standard_artifacts.HyperParameters,
        {"best.txt": json.dumps({"values": {"units": 5}})},
    )
    component.add("base_model", standard_artifacts.Model, {"Format-Serving/a.pb": ""})
    component.execute(
        component.MODULES / "inspecting.py",
        num_ranks=request.param,
        train_args=TRAIN_ARGS,
    )
    return [component.noted(rank) for rank in range(request.param)]


def test_what_ranks_get(component, noted):
    check_fn_args(component, noted)
    check_samples(component, [each["samples"] for each in noted])


def check_fn_args(component, noted):
    """They are the same as TFX's own executor makes, but for scratch folders."""
    expected = attrs.asdict(
        GenericExecutor()._GetFnArgs(
            component.inputs,
            component.outputs,
            {
                "train_args": TRAIN_ARGS,
                "eval_args": "{}",
                "custom_config": json.dumps({"notes": str(component.notes)}),
            },
        ),
        filter=lambda field, _: field.name not in ("data_accessor", "working_dir"),
    )
    unset = {name for name, value in expected.items() if value is None}
    assert unset == {"eval_steps"}
    for rank, each in enumerate(noted):
        assert each["working_dir"] == noted[0]["working_dir"] is not None
        assert each["record batch rows"] == sum(component.FILES)
        differing = {name for name in expected if each[name] != expected[name]}
        assert differing == (set(DIRS) if rank > 0 else set())
    assert len({each["serving_model_dir"] for each in noted}) == len(noted)


# The samples of an epoch where ranks read files of 5, 7 and 11, some left out: the rank
# with the fewest decides how many batches of 3, or of 2, all have.
BY_FILE = {2: 9 + 7, 3: 5 + 6 + 6}


def check_samples(component, samples):
    """Each sample once an epoch, on one rank; equally many steps on all."""
    rows = [*range(sum(component.FILES))]
    assert len(rows) % len(samples)
    seen = {
        way: sorted(row for each in samples for batch in each[way] for row in batch)
        for way in samples[0]
    }
    steps = {way: {len(each[way]) for each in samples} for way in samples[0]}
    assert seen["in order"] == rows
    assert seen["shuffled"] == sorted(2 * rows)
    assert seen["plain parsing"] == rows
    assert seen["from_files"] == rows
    assert {*seen["without end"]} == {*rows}
    assert len({*seen["by file"]}) == len(seen["by file"]) == BY_FILE[len(samples)]
    assert steps["without end"] == {40}
    # from_files evens nothing out unless it is told to.
    assert all(len(steps[way]) == 1 for way in steps if way != "from_files")
