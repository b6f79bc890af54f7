"""The GPU that a rank gets, the words about it, and nothing without one."""

import subprocess
import sys

import pytest
import tensorflow as tf

from keras_hvd.backends import gpu_sharing
from keras_hvd.backends.tensorflow import gpu_pinning
from keras_hvd.backends.tensorflow.gpu_pinning import Choice, Gpu
from keras_hvd.job import gpu_libraries

BY_KHVDRUN = {"KERAS_HVD_RANK": "0"}
FREE, HIDDEN = Gpu(), Gpu(is_visible=False)


@pytest.mark.parametrize(
    ("gpus", "place", "variables", "expected"),
    [
        pytest.param([], (0, 2), {}, Choice(None, (), False), id="none"),
        pytest.param([FREE], (0, 1), {}, Choice(None, (0,), False), id="one"),
        pytest.param([FREE] * 4, (0, 1), {}, Choice(0, (0,), False), id="alone"),
        pytest.param([FREE] * 4, (3, 4), {}, Choice(3, (3,), False), id="all-visible"),
        pytest.param([FREE] * 4, (1, 2), {}, Choice(1, (1,), False), id="fewer-ranks"),
        # With mpirun and srun no rank knows whether it is the same GPU on all ranks.
        pytest.param([FREE], (3, 4), {}, Choice(None, (0,), False), id="one-each"),
        pytest.param(
            *([FREE], (3, 4), BY_KHVDRUN, Choice(None, (0,), True)), id="one-for-all"
        ),
        # A script in between may have chosen another one for each.
        pytest.param(
            [FREE],
            (3, 4),
            {**BY_KHVDRUN, "CUDA_VISIBLE_DEVICES": "3"},
            Choice(None, (0,), False),
            id="one-each-under-khvdrun",
        ),
        pytest.param([FREE] * 2, (3, 4), {}, Choice(1, (1,), True), id="round-robin"),
        pytest.param(
            *([HIDDEN, FREE], (0, 2), BY_KHVDRUN, Choice(None, (1,), False)),
            id="the-users-choice",
        ),
        pytest.param([HIDDEN], (0, 2), {}, Choice(None, (), False), id="cpu-by-choice"),
        pytest.param(
            *([FREE, Gpu(growth=False)], (1, 2), {}, Choice(1, (), False)),
            id="the-users-memory",
        ),
        pytest.param(
            *([FREE, Gpu(growth=False)], (0, 2), {}, Choice(0, (0,), False)),
            id="the-users-memory-elsewhere",
        ),
        pytest.param(
            *([Gpu(is_divided=True)], (0, 1), {}, Choice(None, (), False)),
            id="the-users-limit",
        ),
        pytest.param(
            [FREE],
            (0, 1),
            {"TF_FORCE_GPU_ALLOW_GROWTH": "false"},
            Choice(None, (), False),
            id="the-users-variable",
        ),
    ],
)
def test_choice(gpus, place, variables, expected):
    assert gpu_pinning.choose(gpus, *place, variables) == expected


def test_every_gpu_gets_as_many_ranks_as_the_others():
    chosen = [gpu_pinning.choose([FREE] * 3, rank, 6, {}).only for rank in range(6)]
    assert chosen == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("choice", "ranks", "part"),
    [
        (Choice(1, (1,), False), 2, "computes on the first, like all others"),
        (Choice(None, (0,), True), 2, "nearly all of its memory"),
        (Choice(None, (0,), False), 2, None),
        (Choice(0, (0,), False), 1, None),
    ],
)
def test_what_is_said_where_tensorflow_was_first(choice, ranks, part):
    text = gpu_pinning.too_late(choice, 2, ranks)
    if part is None:
        assert text == ""
    else:
        assert part in text
        assert "call keras_hvd.init() before" in text


def test_what_is_said_where_ranks_share():
    text = gpu_sharing.message(2, 8)
    assert text.startswith("8 ranks share 2 GPUs in turn: ")
    assert "2.30" in text
    assert "NCCL_MULTI_RANK_GPU_ENABLE=1" in text


def test_without_a_gpu_tensorflow_stays_as_it_is(capfd):
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("this machine has a GPU")
    visible = tf.config.get_visible_devices()
    gpu_pinning.pin_tensorflow(tf, 1, 2, {})
    assert tf.config.get_visible_devices() == visible
    assert capfd.readouterr().err == ""


def test_without_a_driver_init_does_not_import_tensorflow():
    if gpu_libraries.driver_is_loaded():
        pytest.skip("this machine has a GPU")
    program = (
        "import sys, keras_hvd; keras_hvd.init(); print('tensorflow' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout, ended.stderr) == ("False\n", "")
