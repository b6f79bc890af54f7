"""keras_hvd.keras_tuner where there is no job, or no KerasTuner."""

import subprocess
import sys
import textwrap


def run(program: str) -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_before_init(tmp_path):
    run(f"""
        import keras_hvd, keras_tuner
        tuner = keras_hvd.keras_tuner.distribute(keras_tuner.RandomSearch)
        try:
            tuner(lambda hp: None, "loss", max_trials=1, directory={str(tmp_path)!r})
        except keras_hvd.NotInitializedError as error:
            assert "call keras_hvd.init()" in str(error), error
        else:
            raise SystemExit("made without init")
    """)
    assert list(tmp_path.iterdir()) == []


def test_without_kerastuner():
    run("""
        import sys
        sys.modules["keras_tuner"] = None
        import keras_hvd
        try:
            keras_hvd.keras_tuner
        except ImportError as error:
            assert "pip install keras-tuner" in str(error), error
        else:
            raise SystemExit("there is none")
    """)
