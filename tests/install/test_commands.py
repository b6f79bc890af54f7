"""Each command of the pages is run, below or by the test that a list names.

The same holds for the files and the output that the pages show. A new one fails until
it is run or listed. Blocks of Python are in tests/parallel/test_guides.py.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import shutil
import sys
import textwrap

import pytest
from free_port import free_port

from keras_hvd.launch.options import BY_NAME

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
RANKS = CHECKOUT / "tests" / "launch" / "ranks"
PAGES = {
    path.stem: path
    for path in (
        CHECKOUT / "README.md",
        CHECKOUT / "CONTRIBUTING.md",
        *sorted((CHECKOUT / "docs").glob("*.md")),
    )
}
BLOCK = re.compile(
    r"^ *```(?P<kind>.*)\n(?P<fenced>(?s:.*?))^ *```$"
    r"|(?<=\n\n)(?P<indented>(?:    .*\n)+)",
    re.M,
)
HERE = "tests/install/test_commands.py"
GUIDES = "tests/install/test_guides.py"
PYTHON_BLOCKS = "tests/parallel/test_guides.py"
ADDITIONS = "tests/install/test_contributing.py"
ELASTIC_HOSTS = "tests/launch/test_elastic_hosts.py"
MEMBERSHIP = "tests/launch/test_membership_service.py"
HOSTS_OPTION = "tests/launch/test_hosts_option.py"
SLURM = "tests/launch/test_slurm.py"

# Pages whose blocks of `sh` are in a list of this file, which compares it with them.
OWN_LISTS = {
    "README": "tests/install/test_readme.py",
    "index": GUIDES,
    "failures": GUIDES,
    "saving": GUIDES,
    "hangs": GUIDES,
    "from_tf_distribute": GUIDES,
}

# By page and command: a file with the page's name, whose tests run it; a file and what
# it has instead; another page that has the command; or why none runs it.
Where = str | tuple[str, str]
PYTEST = ".venv/bin/python -m pytest -q"
TWO_RANKS = f".venv/bin/khvdrun -np 2 {PYTEST} -x"
A_BUILD = "why: takes minutes; make native-tests and make sanitize test all folders"
AFTER_A_BUILD = "why: takes a build with the new collective"
A_GPU = "why: takes a GPU"
A_CLUSTER = "why: takes a cluster; tests/unit/test_kubernetes.py checks manifests"
A_FIREWALL = "why: changes the firewall of this machine"
TFX = "why: downloads what make tfx-tests installs"
ELSEWHERE: dict[str, dict[str, Where]] = {
    "CONTRIBUTING": {
        f"{PYTEST} tests/unit/test_documented.py": ADDITIONS,
        f"{PYTEST} tests/unit/test_docstrings.py -k NAME": ADDITIONS,
        f"{TWO_RANKS} tests/parallel/keras/test_NAME.py": ADDITIONS,
        f"{PYTEST} tests/unit/test_documented.py tests/unit/test_environment.py": (
            ADDITIONS
        ),
        f"{PYTEST} tests/launch/test_launchers.py -k NAME": ADDITIONS,
        f"{PYTEST} tests/unit/test_documented.py tests/unit/test_package.py": ADDITIONS,
        f"{PYTEST} tests/unit/collectives/test_every_collective.py": ADDITIONS,
        "bazel test //tf_ops/coordination/...": A_BUILD,
        "bazel test --config=tsan //tf_ops/coordination/...": A_BUILD,
        "bazel test //tf_ops/collectives:NAME_test //tf_ops/engine:mixed_test "
        "//tf_ops/engine:hosts_test": AFTER_A_BUILD,
        f"{PYTEST} tests/unit/collectives": AFTER_A_BUILD,
        f"{TWO_RANKS} tests/parallel/collectives/test_NAME.py": AFTER_A_BUILD,
        f"{TWO_RANKS} tests/parallel/test_mixed.py": AFTER_A_BUILD,
    },
    "clouds": {
        "khvdrun python train.py": (
            "tests/launch/test_clusters.py",
            "test_the_nodes_of_a_cluster_are_one_job",
        ),
        "khvdrun --dry-run python train.py": (
            "tests/launch/test_clusters.py",
            '"--dry-run", "true"',
        ),
    },
    "clusters": {
        "khvdrun -np 6 -H a:4,b:2 python train.py": HOSTS_OPTION,
        "khvdrun -np 6 --hostfile hosts python train.py": HOSTS_OPTION,
        "khvdrun -np 6 -H a:4,b:2 --dry-run python train.py": HOSTS_OPTION,
    },
    "diagnosing": {
        "khvdrun --diagnose -np 2 --bind-to cores": "tests/launch/test_diagnose.py"
    },
    "elastic": {
        "khvdrun -np 4 --min-np 2 python train.py": (
            "tests/launch/test_elastic.py",
            '*("-np", 4, "--min-np", minimum',
        ),
        "khvdrun -np 4 --min-np 2 --blacklist-cooldown-range 10 300 python train.py": (
            "tests/launch/test_elastic.py",
            'AGAIN = "--blacklist-cooldown-range"',
        ),
        "khvdrun -np 8 --min-np 4 -H node0:4,node1:4 python train.py": (
            ELASTIC_HOSTS,
            "test_ssh_starts_the_ranks",
        ),
        "khvdrun -np 8 --min-np 4 -H node0:4,node1:4 --launch-agent ./on_host python "
        "train.py": (ELASTIC_HOSTS, 'agent=f"--launch-agent'),
        "export KERAS_HVD_SECRET_FILE=~/job.secret": (
            "tests/launch/test_joining.py",
            "KERAS_HVD_SECRET_FILE",
        ),
        **{
            f"khvdrun --nnodes 2:4 --node-rank {number} --rendezvous node0:29400 -np 2 "
            "python train.py": ("tests/launch/test_joining.py", "--nnodes 2:3 -np 2")
            for number in range(2)
        },
        "khvdrun --membership node0:29400 --min-np 2 --max-np 8": (
            MEMBERSHIP,
            'serve("--min-np 2 --max-np 4")',
        ),
        "khvdrun --join node0:29400 -np 2 python train.py": (MEMBERSHIP, "--join {"),
        "khvdrun -np 4 --min-np 2 --max-np 8 -H node0:4,node1:4 python train.py": (
            ELASTIC_HOSTS,
            "--min-np 2 --max-np 4 -H H0:2,H2:4",
        ),
        "khvdrun -np 4 --min-np 2 --max-np 16 --host-discovery-script ./hosts.sh "
        "python train.py": (ELASTIC_HOSTS, "--host-discovery-script {script}"),
        "python -m keras_hvd.elastic.punish --events 20 -- khvdrun -np 4 --min-np 2 "
        "--blacklist-cooldown-range 1 2 python train.py": (
            "tests/launch/test_punish.py",
            '"keras_hvd.elastic.punish"',
        ),
    },
    "firewall": {
        "iptables -A INPUT -p tcp -s 10.0.0.0/24 --dport 30000:30100 -j ACCEPT": (
            A_FIREWALL
        ),
        "iptables -A INPUT -p tcp -s 10.0.0.0/24 --dport 29400 -j ACCEPT": A_FIREWALL,
    },
    "gpus": {
        'pip install "tensorflow[and-cuda]"': "why: downloads 3 GB",
        "khvdrun --check-build": "index",
        "nsys profile --trace cuda,nvtx khvdrun -np 4 python train.py": A_GPU,
        "nvidia-cuda-mps-control -d": A_GPU,
        "echo quit | nvidia-cuda-mps-control": A_GPU,
    },
    "installation": {
        'pip install "$(echo dist/keras_hvd-*.whl)[tensorflow-cpu]"': "README",
        "python -m keras_hvd.build": (
            "tests/install/test_pip.py",
            '"-m", "keras_hvd.build"',
        ),
        "pip install .": ("tests/install/conftest.py", 'pip_install(".", '),
    },
    "torch": {
        "KERAS_BACKEND=torch khvdrun -np 2 python train.py": (
            "tests/torch/alone/test_jobs.py",
            '"-np", str(ranks)',
        )
    },
    "kubernetes": dict.fromkeys(
        (
            "kubectl create secret generic train-keras-hvd "
            "--from-literal=secret=$(openssl rand -hex 32)",
            "kubectl apply -f examples/kubernetes/indexed_job.yaml",
            "kubectl logs -f job/train",
        ),
        A_CLUSTER,
    ),
    "launching": {
        "torchrun --nproc-per-node 4 train.py": (
            "why: takes PyTorch; tests/unit/test_environment.py has its variables"
        )
    },
    "mpi": {"mpirun -np 4 -H a:2,b:2 python train.py": "tests/launch/test_mpi.py"},
    "report": {
        "khvdrun -np 4 --timeline-filename timeline.json python train.py": "timeline"
    },
    "measurements": {
        "python benchmarks/speed.py --picture docs/speed.svg": (
            "tests/launch/test_benchmarks.py",
            'benchmark("speed"',
        )
    },
    "scaling": {
        "khvdrun --scaling 1,2,4 --scaling-steps 300 python train.py": (
            "tests/launch/test_scaling.py"
        )
    },
    "security": {"khvdrun --tls --nnodes 2 ...": "why: the page of launching has it"},
    "slurm": {
        "srun -N 2 -n 8 python train.py": SLURM,
        "KERAS_HVD_TLS=1 srun -N 2 -n 8 python train.py": SLURM,
    },
    "testing": {
        "khvdrun -np 2 chroot ROOT python3 train.py": (
            "why: takes a root file system of another architecture"
        ),
        "bazel build --config=faults //tf_ops:libkeras_hvd.so": (
            "why: takes minutes; make soak builds it"
        ),
    },
    "timeline": {"python -m keras_hvd.report report.html.recording-k3x0q1": "report"},
    "tfx": {
        "pip install 'tensorflow-cpu==2.21.*' -r examples/tfx/requirements.txt": TFX,
        "pip install --no-deps -r examples/tfx/requirements-no-deps.txt": TFX,
    },
}
# By page and first line: the same of files and output.
A_FIGURE = "why: a figure or a formula"
SHOWN: dict[str, dict[str, Where]] = {
    "README": {"import keras": "tests/install/test_readme.py"},
    "architecture": {
        "keras_hvd            Python: the optimizer, callbacks, collectives, "
        "launcher": A_FIGURE
    },
    "autotune": {"keras_hvd autotune 2: ranks=4 state=result": HERE},
    "clusters": {"khvdrun: rank 1's stderr ended with:": HOSTS_OPTION},
    "data": {
        "RuntimeError: the ranks have different numbers of steps to make in an epoch: "
        "2 on rank 0, 3 on rank": PYTHON_BLOCKS
    },
    "diagnosing": {
        "keras_hvd 0.1.0 on Linux 6.18.44-fc-v669, Python 3.11.7: a job of 2 ranks": (
            "tests/launch/test_diagnose.py"
        ),
        "network:": "tests/launch/test_diagnose.py",
    },
    "elastic": {
        "khvdrun: rank 3 (process 18421) was killed by signal 9 (SIGKILL); 3 ranks are "
        "left": ("tests/launch/test_elastic.py", "(SIGKILL); 3 ranks are left"),
        "khvdrun: rank 2 (process 18420) was killed by signal 9 (SIGKILL); 3 ranks are "
        "left; it is started again after 10 s": (
            "tests/launch/test_elastic.py",
            "3 ranks are left; it is started again after 0 s",
        ),
        "punish: event 3, late: rank 1 stops, rank 0 is killed (seed 7)": (
            "tests/launch/test_punish.py",
            "punish: event 8, ",
        ),
    },
    "environment": {
        "2026-11-21 19:34:36.123456 keras_hvd [rank 0] info: joined job "
        "'khvdrun-71-5eed' of 2 ranks": "tests/launch/test_settings.py"
    },
    "failures": {
        "FailedPreconditionError: allreduce 'loss' failed on rank 0: 'loss' differs "
        "between ranks (rank 0:": PYTHON_BLOCKS,
        "[0] keras_hvd [rank 0] error: rank 1 (pid 4711 on node0) was killed by "
        "SIGKILL (by a user, or by the kernel because memory ran out)": GUIDES,
        "allreduce 'step' failed on rank 0: rank 2 (pid 4711 on node1) cannot be "
        "reached: nothing has come": "tests/launch/test_vanished_host.py",
        "allreduce 'train_step/allreduce' failed on rank 0: the result of tensor 3 of "
        "8 of": "tests/parallel/test_check.py",
    },
    "from_tf_distribute": {"import keras": GUIDES},
    "gpus": {
        "yes  CUDA            CUDA 12.4 (libcuda.so.1), 4 devices": (
            "tests/launch/test_gpu_stand_ins.py"
        ),
        "allreduce 'grad/w' and 2 more, 3 tensors, 1048576 bytes": (
            "tf_ops/engine/engine_ranges_test.cc",
            "allreduce 'group', 2 tensors, 16 bytes",
        ),
    },
    "hangs": {
        "[0] keras_hvd [rank 0] warning: rank 0 waited 5 s for allreduce 'extra', "
        "which not every rank has reached.": GUIDES
    },
    "index": {"Epoch 10/10": GUIDES, "[0] Epoch 10/10": GUIDES},
    "launching": {
        "# outside of sections: options by their names": HERE,
        "# HELP keras_hvd_samples_per_second The same in a second.": (
            "tests/launch/test_report.py"
        ),
        "rate(keras_hvd_waited_for_seconds_total[1m])": HERE,
        "khvdrun: rank 0 ended with exit code 1": "tests/launch/test_ends.py",
    },
    "migrating": {"-import horovod.tensorflow as hvd": "tests/unit/test_migrating.py"},
    "mpi": {"import mpi4py": "tests/launch/test_mpi.py"},
    "scaling": {
        "khvdrun: each job is ended after 310 steps or 3 s of them, whatever is later; "
        "Keras and TensorFlow save no models in it": "tests/launch/test_scaling.py"
    },
    "scaling_model": {
        "host of bucket i = max(its gradients are ready, host of bucket i - 1) + "
        "start": A_FIGURE,
        "allreduce = latency + 2 (n - 1) / n * bytes / bus bandwidth": A_FIGURE,
        "tree = 14.0 us + 2 (GPUs of a host - 1) * 1.25 us + 2 log2(hosts) * 8.5 us": (
            A_FIGURE
        ),
    },
    "slurm": {"#!/bin/bash": SLURM},
    "timeline": {"234 ms recorded, 2 ranks": HERE},
    "training": {"192.0": PYTHON_BLOCKS},
}


@functools.cache
def blocks() -> list[tuple[str, str, str]]:
    """Page, kind and text of each block that is not Python."""
    return [
        (page, found["kind"] or "", textwrap.dedent(found["fenced"] or found[0]))
        for page, path in PAGES.items()
        for found in BLOCK.finditer(path.read_text())
        if not (found["kind"] or "").startswith("python")
    ]


def first_line(text: str) -> str:
    return text.partition("\n")[0].strip()


def shown(page: str, first: str) -> str:
    """The block of a page that begins so."""
    (text,) = (
        each for on, _, each in blocks() if on == page and each.startswith(first)
    )
    return text


def commands_in(text: str) -> list[str]:
    """The lines of a shell, without comments."""
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    return [re.sub(r"\s+# .*", "", line) for line in lines]


def on_pages() -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """The commands of all pages and the first lines of their other blocks."""
    commands, others = set(), set()
    for page, kind, text in blocks():
        if first_line(text) in SHOWN.get(page, {}):
            others.add((page, first_line(text)))
        elif kind != "sh" or page not in OWN_LISTS:
            commands |= {(page, each) for each in commands_in(text)}
    return commands, others


def keys(table: dict[str, dict[str, Where]]) -> set[tuple[str, str]]:
    return {(page, each) for page in table for each in table[page]}


# By the decorator: the commands that a test of this file runs.
RUN_HERE: set[tuple[str, str]] = set()


def of(**pages: list[str]) -> pytest.MarkDecorator:
    """Hands a test the commands of each of these pages, which it runs."""
    RUN_HERE.update((page, each) for page in pages for each in pages[page])
    return pytest.mark.parametrize("commands", pages.values(), ids=pages)


def is_true(where: Where, page: str, each: str) -> bool:
    """Whether the file or page of a table's entry has what it should have."""
    if isinstance(where, tuple):
        file, text = where
        return text in (CHECKOUT / file).read_text()
    if where in PAGES:
        return each in PAGES[where].read_text()
    if where.startswith("why: "):
        return True
    text = (CHECKOUT / where).read_text()
    return f"{page}.md" in text or f'"{page}"' in text


def test_each_command_is_run_and_each_other_block_compared():
    commands, others = on_pages()
    known = keys(ELSEWHERE) | RUN_HERE
    assert commands <= known, f"run below, or list, {commands - known}"
    assert commands >= known, f"on no page: {known - commands}"
    assert others == keys(SHOWN), f"on no page: {keys(SHOWN) - others}"
    assert not keys(ELSEWHERE) & RUN_HERE


@pytest.mark.parametrize("table", [ELSEWHERE, SHOWN], ids=["commands", "others"])
def test_what_is_listed_has_the_page_or_the_command(table):
    for page, each in keys(table):
        where = table[page][each]
        assert is_true(where, page, each), f"{where} has not: {page}, {each}"


def test_the_lists_of_other_files_are_compared_with_their_pages():
    for page, file in OWN_LISTS.items():
        assert is_true(file, page, "")
        assert is_true((file, "def test_every_command_is_tested_below("), page, "")


@pytest.fixture(scope="module")
def in_text() -> list[str]:
    """What stands between backquotes outside of blocks."""
    text = "".join(BLOCK.sub("", path.read_text()) for path in PAGES.values())
    return [" ".join(each.split()) for each in re.findall("`([^`]+)`", text)]


def test_make_has_the_targets_that_the_text_names(in_text, run):
    makes = run("make --dry-run --print-data-base lines", CHECKOUT, MAKEFLAGS="")
    named = {
        found[1] for each in in_text if (found := re.match(r"make ([\w-]+)", each))
    }
    assert len(named) > 20
    assert named <= {*re.findall(r"^([\w-]+):", makes, re.M)}


def test_the_programs_that_the_text_names_are_there(in_text):
    named = {
        each for text in in_text for each in re.findall(r"\bpython (\S+/\S+)", text)
    }
    assert len(named) > 10
    assert [each for each in named if not (CHECKOUT / each).exists()] == []


def test_khvdrun_has_the_options_that_the_text_names(in_text):
    named = {
        option
        for each in in_text
        if each.startswith("khvdrun ")
        for option in re.findall(r" (--?[\w-]+)", each.partition(" python ")[0])
    }
    assert len(named) > 5
    assert named <= BY_NAME.keys()


# A job's script that takes no time to import. Rank 0 waits for a line of input.
TRAIN = f"""
import os, shutil, sys, time
sys.path.append({str(RANKS)!r})
from allreduce_loop import allreduce
import keras_hvd

keras_hvd.init()
recording = os.environ.get("KERAS_HVD_REPORT")
for name in ("first.json", "second.json"):
    if recording:
        keras_hvd.start_timeline(name)
    for step in range(30):
        time.sleep(0.002)
        allreduce(f"gradient {{step % 3}}", 1 << 18)
    if recording:
        keras_hvd.stop_timeline()
words = "trained", keras_hvd.rank(), keras_hvd.size(), *sys.argv[1:]
# In one piece: others' lines may end one of rank 0's within which it pauses.
os.write(1, (" ".join(map(str, words)) + chr(10)).encode())
if keras_hvd.rank() == 0:
    sys.stdin.readline()
    if recording:
        # As it stays where khvdrun is killed now.
        shutil.copytree(recording, "report.html.recording-k3x0q1")
allreduce("the end", 1)
"""
# They are not on every machine.
needs_curl, needs_openssl = (
    pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed")
    for name in ("curl", "openssl")
)
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}"


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def ranks_of(printed: str, size: int, arguments: str = "") -> list[int]:
    """The ranks of a job of this size that have trained."""
    lines = re.findall(rf"\[(\d)\] trained \1 {size}{arguments}$", printed, re.M)
    return sorted(map(int, lines))


def without_numbers(text: str) -> str:
    return re.sub(r"\d[\d.,]*", "", text)


@of(
    CONTRIBUTING=[
        "make install",
        "make test-quick",
        "make format",
        "make docs",
        "make lines",
    ],
    gpus=["make bench-gpu"],
    installation=[
        "make wheel",
        "make wheel TENSORFLOW='tensorflow-cpu==2.19.*'",
        "make install",
        "make install TENSORFLOW='tensorflow==2.20.*' PYTHON=python3.12",
        "make core-tests VENV=.venv-2.20 TENSORFLOW='tensorflow-cpu==2.20.*' "
        "EXTRAS=test",
    ],
    performance=["make bench"],
)
def test_make_knows_its_targets(commands, run):
    """They take minutes, and some install. So make only prints their steps."""
    for each in commands:
        printed = run(each.replace("make", "make --dry-run", 1), CHECKOUT, MAKEFLAGS="")
        assert all(version in printed for version in re.findall(r"==([\d.]+)", each))


@of(
    CONTRIBUTING=[
        f"{PYTEST} tests/unit/test_compression.py",
        f".venv/bin/khvdrun -np 3 {PYTEST} -x tests/parallel/test_objects.py",
    ]
)
def test_pytest_finds_the_tests(commands, run):
    """`make test` runs these files, so they are only looked for."""
    here = f"{pathlib.Path(sys.executable).parent}/"
    for each in commands:
        command = each.replace(".venv/bin/", here)
        printed = run(command, CHECKOUT, PYTEST_ADDOPTS="--collect-only")
        assert re.search(r"\d+ tests collected", printed)


@of(
    launching=["khvdrun -np 4 python train.py --epochs 10"],
    gpus=["khvdrun -np 4 python train.py"],
)
def test_a_script_runs_as_so_many_ranks(commands, run, folder):
    (command,) = commands
    arguments = command.partition("train.py")[2]
    assert ranks_of(run(command, folder), 4, arguments) == [0, 1, 2, 3]


@of(
    autotune=[
        "khvdrun -np 4 --autotune --autotune-log-file autotune.csv python train.py"
    ]
)
def test_autotuning_writes_the_log_that_the_page_shows(commands, run, folder):
    few = {"WARMUP_SAMPLES": "1", "STEPS_PER_SAMPLE": "1"}
    few = {f"KERAS_HVD_AUTOTUNE_{name}": value for name, value in few.items()}
    run(*commands, folder, **few)
    page = shown("autotune", "keras_hvd autotune").splitlines()
    log = (folder / "autotune.csv").read_text().splitlines()
    assert log[0].partition("state=")[0] == page[0].partition("state=")[0]
    assert log[1] == page[1]
    assert [*map(without_numbers, log[2:4])] == [*map(without_numbers, page[2:4])]


@of(launching=["khvdrun -np 4 --config-file job.yaml python train.py"])
def test_the_configuration_file_of_the_page(commands, run, folder):
    (folder / "job.yaml").write_text(shown("launching", "# outside of sections"))
    printed = run(*commands, folder)
    assert len(ranks_of(printed, 4)) == 4
    assert "khvdrun: rank 3 ended with exit code 0\n" in printed
    assert re.search(rf"{TIME} keras_hvd \[rank 3\] info: joined job", printed)
    assert json.loads((folder / "timeline.json").read_text())


SECRET = "(umask 077; openssl rand -hex 32 > ~/job.secret)"
EXPORT = "export KERAS_HVD_SECRET_FILE=~/job.secret"
NODES = "--nnodes 2 --node-rank 0 --rendezvous node0:29400 -np 4 python train.py"


def second_nodes(command: str) -> str:
    return command.replace("--node-rank 0", "--node-rank 1").replace("-np 4", "-np 2")


@needs_openssl
@of(
    launching=[
        SECRET,
        EXPORT,
        f"khvdrun {NODES}",
        second_nodes(f"khvdrun {NODES}"),
        f"khvdrun --tls {NODES}",
    ],
    firewall=[f"khvdrun --ports 30000-30100 {NODES}"],
)
def test_a_khvdrun_on_each_host(commands, run, folder):
    """Both hosts are this machine, under different keys."""
    home = {"HOME": str(folder)}
    run(SECRET, folder, **home)
    for first in (each for each in commands if NODES in each):
        job = (
            f"{EXPORT}; KERAS_HVD_HOST_KEY=a {first} & "
            f"{EXPORT}; KERAS_HVD_HOST_KEY=b {second_nodes(first)} && wait $!"
        )
        here = f"127.0.0.1:{free_port()}"
        printed = run(job.replace("node0:29400", here), folder, **home)
        assert ranks_of(printed, 6) == [*range(6)]


@needs_openssl
@of(
    launching=[
        f"{EXPORT} KERAS_HVD_HOST_KEY=a",
        "khvdrun --nnodes 2 --node-rank 0 --rendezvous 127.0.0.1:29400 -np 1 "
        "python train.py",
    ]
)
def test_one_machine_plays_two_hosts(commands, run, folder):
    home = {"HOME": str(folder)}
    run(SECRET, folder, **home)
    (folder / "train.py").write_text(
        "import keras_hvd\nkeras_hvd.init()\n"
        "hosts, here = keras_hvd.cross_size(), keras_hvd.local_size()\n"
        "print(f'hosts: {hosts} ranks here: {here}\\n', end='')"
    )
    export, start = commands
    start = start.replace("29400", str(free_port()))
    other = start.replace("--node-rank 0", "--node-rank 1")
    printed = run(
        f"({export}; {start}) & ({export[:-1]}b; {other}) && wait $!", folder, **home
    )
    assert printed.count("hosts: 2 ranks here: 1") == 2


@needs_curl
@of(
    launching=[
        "khvdrun -np 4 --status 9100 python train.py",
        "curl http://127.0.0.1:9100/status",
        "curl http://127.0.0.1:9100/metrics",
    ]
)
def test_the_status_while_it_runs(commands, run, folder):
    job, status, metrics = (
        each.replace("9100", str(port)) for port in [free_port()] for each in commands
    )
    (query,) = shown("launching", "rate(").splitlines()
    metric = re.search(r"\((\w+)\[", query)[1]
    ask = f"until {metrics} | grep {metric} > found; do sleep 0.1; done; {status} > now"
    # Rank 0 waits for the line.
    run(f"(timeout 60 sh -c '{ask}'; echo go) | {job}", folder)
    now = json.loads((folder / "now").read_text())
    assert [rank["state"] for rank in now["ranks"]] == ["running"] * 4


@of(
    timeline=[
        "khvdrun -np 4 --timeline-filename timeline.json python train.py",
        "python -m keras_hvd.timeline timeline.json",
    ]
)
def test_the_summary_has_the_lines_that_the_page_shows(commands, run, folder):
    job, summary = commands
    run(job, folder)
    printed, page = run(summary, folder), shown("timeline", "234 ms recorded")
    for head in ("phase ", "slowest tensors ", "waited for "):
        (line,) = re.findall(rf"^{head}.*", page, re.M)
        assert line.split() in [each.split() for each in printed.splitlines()]
    phases = re.findall("^ *[A-Z_]{3,}", page, re.M)
    assert re.findall("^ *[A-Z_]{3,}", printed, re.M) == phases
    assert re.search(r"^the others waited most for rank \d: ", printed, re.M)


@of(
    report=[
        "khvdrun -np 4 --report report.html python train.py",
        "python -m keras_hvd.report report.html.recording-k3x0q1 -o report.html",
        "python -m keras_hvd.report timeline.json",
        "python -m keras_hvd.report first.json second.json",
    ],
)
def test_reports(commands, run, folder):
    report = folder / "report.html"
    job, *afterwards = commands
    run(job, folder)
    assert "The job ended successfully." in report.read_text()
    shutil.copy(folder / "first.json", folder / "timeline.json")
    for command in afterwards:
        report.unlink()
        run(command, folder)
        assert "<h1>What the job did</h1>" in report.read_text()
