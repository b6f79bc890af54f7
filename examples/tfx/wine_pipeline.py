"""A TFX pipeline whose Trainer trains on several ranks: wine, told apart by chemistry.

    python wine_pipeline.py --ranks 2

It needs no network: the data come with scikit-learn. docs/tfx.md has what to install.
"""

import argparse
import csv
import os

from tfx import v1 as tfx
from wine_features import load

import keras_hvd

_HERE = os.path.dirname(os.path.abspath(__file__))


def write_data(folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    columns = load()
    with open(os.path.join(folder, "wine.csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(column.tolist() for column in columns.values())))


def make_pipeline(root: str, ranks: int) -> tfx.dsl.Pipeline:
    data = os.path.join(root, "data")
    write_data(data)
    examples = tfx.components.CsvExampleGen(input_base=data)
    trainer = keras_hvd.tfx.Trainer(
        module_file=os.path.join(_HERE, "wine_trainer.py"),
        examples=examples.outputs["examples"],
        num_ranks=ranks,
    )
    pusher = tfx.components.Pusher(
        model=trainer.outputs["model"],
        push_destination=tfx.proto.PushDestination(
            filesystem=tfx.proto.PushDestination.Filesystem(
                base_directory=os.path.join(root, "serving")
            )
        ),
    )
    return tfx.dsl.Pipeline(
        pipeline_name="wine",
        pipeline_root=os.path.join(root, "pipeline"),
        components=[examples, trainer, pusher],
        enable_cache=True,
        metadata_connection_config=(
            tfx.orchestration.metadata.sqlite_metadata_connection_config(
                os.path.join(root, "metadata.sqlite")
            )
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--root", default="wine-pipeline")
    arguments = parser.parse_args()
    root = os.path.abspath(arguments.root)
    tfx.orchestration.LocalDagRunner().run(make_pipeline(root, arguments.ranks))


if __name__ == "__main__":
    main()
