"""TFX's Tuner whose trials train on several ranks, beside TFX's own in one process."""

import json
import re

import pytest
from ml_metadata.proto import metadata_store_pb2
from tfx import v1 as tfx
from tfx.types import standard_artifacts

import keras_hvd
from keras_hvd.tfx.executor import TrainingFailedError, TunerExecutor

RANKS = (1, 2, 3)
TUNER_TYPE = "tfx.components.tuner.component.Tuner"
COMPLETE = metadata_store_pb2.Execution.COMPLETE


@pytest.fixture(scope="module")
def searched(workplace):
    """The workplace after TFX's Tuner, ours, and a Trainer that takes the result."""
    example_gen = tfx.components.CsvExampleGen(input_base=str(workplace.data))
    given = {
        "module_file": str(workplace.modules / "tuning.py"),
        "examples": example_gen.outputs["examples"],
    }
    plain = tfx.components.Tuner(**given, custom_config={}).with_id("plain")
    tuners = {
        ranks: keras_hvd.tfx.Tuner(
            **given,
            custom_config={"notes": str(workplace.notes(f"tuner-{ranks}"))},
            num_ranks=ranks,
        ).with_id(f"ranks-{ranks}")
        for ranks in RANKS
    }
    trainer = keras_hvd.tfx.Trainer(
        **given,
        hyperparameters=tuners[2].outputs["best_hyperparameters"],
        custom_config={"notes": str(workplace.notes("trainer"))},
        num_ranks=2,
    )
    workplace.run_components([example_gen, plain, *tuners.values(), trainer])
    return workplace


def published(workplace, name):
    """The best hyperparameters that a component has published, and all results."""
    folder = workplace.root / "pipeline" / name
    (best,) = folder.glob("best_hyperparameters/*/best_hyperparameters.txt")
    (results,) = folder.glob("tuner_results/*/tuner_results.json")
    return json.loads(best.read_text()), json.loads(results.read_text())


@pytest.mark.parametrize("ranks", RANKS)
def test_the_results_are_those_of_tfx_in_one_process(searched, ranks):
    best, results = published(searched, f"ranks-{ranks}")
    best_of_plain, results_of_plain = published(searched, "plain")
    assert best == best_of_plain
    assert len(results) == 3
    for mine, its in zip(results, results_of_plain, strict=True):
        assert mine.pop("score") == pytest.approx(its.pop("score"), rel=1e-5)
        assert mine == its


def test_all_ranks_have_trained_each_trial(searched):
    for ranks in RANKS:
        for rank in range(ranks):
            path = searched.notes(f"tuner-{ranks}") / f"trained-{rank}"
            assert len(path.read_text().splitlines()) == 3


def test_the_records_are_those_of_tfx(searched):
    executions = searched.store.get_executions_by_type(TUNER_TYPE)
    assert [each.last_known_state for each in executions] == [COMPLETE] * 4
    for execution in executions:
        events = searched.store.get_events_by_execution_ids([execution.id])
        outputs = [
            event.artifact_id
            for event in events
            if event.type == metadata_store_pb2.Event.OUTPUT
        ]
        artifacts = searched.store.get_artifacts_by_id(outputs)
        assert {each.type for each in artifacts} == {"HyperParameters", "TunerResults"}
        assert {each.state for each in artifacts} == {metadata_store_pb2.Artifact.LIVE}


def test_a_trainer_takes_the_best(searched):
    best, _ = published(searched, "ranks-2")
    for rank in (0, 1):
        noted = searched.notes("trainer") / f"rank-{rank}.json"
        assert json.loads(noted.read_text()) == best["values"]


def test_nothing_is_left_of_the_searches(searched):
    for ranks in RANKS:
        folder = searched.root / f"pipeline/ranks-{ranks}/.system/stateful_working_dir"
        assert [*folder.iterdir()] == []


def test_a_retry_goes_on_with_the_search(workplace):
    notes = workplace.notes("retry")
    (notes / "fault").touch()

    def run():
        example_gen = tfx.components.CsvExampleGen(input_base=str(workplace.data))
        tuner = keras_hvd.tfx.Tuner(
            module_file=str(workplace.modules / "tuning.py"),
            examples=example_gen.outputs["examples"],
            custom_config={"notes": str(notes)},
            num_ranks=2,
        ).with_id("retried")
        workplace.run_components([example_gen, tuner])

    with pytest.raises(Exception, match="rank 1"):
        run()
    execution = workplace.store.get_executions_by_type(TUNER_TYPE)[-1]
    assert execution.last_known_state == metadata_store_pb2.Execution.FAILED
    result = execution.custom_properties["__execution_result__"].string_value
    assert "RankFailedError" in json.loads(result)["resultMessage"]
    (notes / "fault").unlink()
    run()
    _, results = published(workplace, "retried")
    assert len(results) == 3
    # The first trial once, the second twice, the third once.
    assert len((notes / "trained-1").read_text().splitlines()) == 4


# --- refusals -----------------------------------------------------------------------


@pytest.fixture
def search(component):
    """Executes a module with a tuner_fn, and returns the message of its failure."""

    def run(body: str, ranks: int = 2) -> str:
        module = "import keras_hvd, keras_tuner\n" + body
        component.outputs = {
            "best_hyperparameters": component.output(
                standard_artifacts.HyperParameters
            ),
            "tuner_results": component.output(standard_artifacts.TunerResults),
        }
        with pytest.raises(TrainingFailedError) as raised:
            component.execute(module, executor=TunerExecutor, num_ranks=ranks)
        for (artifact,) in component.outputs.values():
            assert not [*component.folder.glob(f"{artifact.type_name}/*")]
        return str(raised.value)

    return run


PLAIN = """
def tuner_fn(fn_args):
    space = lambda hp: hp.Int("n", 1, 2)
    return keras_tuner.RandomSearch(space, "loss", directory=fn_args.working_dir), {}
"""


def test_a_tuner_that_is_a_plain_one(search):
    said = search(PLAIN)
    assert re.search("tuner_fn has made a RandomSearch that knows of no other", said)
    assert "keras_hvd.keras_tuner.distribute(RandomSearch)" in said


def test_a_module_without_a_tuner_fn(search):
    said = search("def run_fn(fn_args): pass", ranks=1)
    assert "cannot load tuner_fn from" in said
    assert "tuner_fn(fn_args), which makes a tuner" in said


def test_an_exception_on_one_rank(search):
    body = """
def tuner_fn(fn_args):
    keras_hvd.init()
    if keras_hvd.rank() == 1:
        raise ArithmeticError("no such space")
    keras_hvd.barrier()
"""
    said = search(body)
    assert said.startswith("ArithmeticError: no such space\non rank 1:\n")


def test_trials_at_the_same_time():
    with pytest.raises(ValueError, match="remove tune_args, which would train"):
        keras_hvd.tfx.Tuner(
            module_file="module.py",
            examples=tfx.dsl.Channel(standard_artifacts.Examples),
            tune_args=tfx.proto.TuneArgs(num_parallel_trials=2),
            num_ranks=2,
        )
