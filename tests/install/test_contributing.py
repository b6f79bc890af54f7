"""CONTRIBUTING.md names the files that a callback, a launcher and a collective change.

`contributions` has one of each. In a copy of the checkout, it passes the guide's
commands. Without its change of any file it does not.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass

import pytest

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
GUIDE = (CHECKOUT / "CONTRIBUTING.md").read_text()
GOOGLETEST = "/usr/src/googletest/googletest/include"
NATIVE = pathlib.Path("keras_hvd", "_native")
# A file, the beginning of the line after which a text comes, and the text. Without that
# line the file is new.
PART = re.compile(r"`(\S+)`(?:, after `([^\n]*)`)?:\n\n```\S*\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Contribution:
    """One that the guide tells how to add; `name` stands for its NAME."""

    kind: str
    name: str
    parts: list[tuple[str, str, str]]

    def named_files(self) -> set[str]:
        """The files of the guide's table."""
        cells = re.findall(r"^\| (`.*?) \|", section(self.kind), re.M)
        return set(re.findall("`(.*?)`", " ".join(cells).replace("NAME", self.name)))

    def commands(self) -> str:
        """The guide's commands that need no build."""
        (block, *_) = re.findall(r"^```sh\n(.*?)^```$", section(self.kind), re.M | re.S)
        return block.replace("NAME", self.name)

    def files(self) -> set[str]:
        return {file for file, _, _ in self.parts}

    def changed(self) -> set[str]:
        return {file for file, line, _ in self.parts if line}

    def pages(self) -> set[str]:
        return {file for file in self.files() if file.endswith(".md")}

    def add_to(self, copy: pathlib.Path, without: Collection[str] = ()) -> None:
        for file, line, text in self.parts:
            if file not in without:
                add(copy / file, line, text)


def section(kind: str) -> str:
    return GUIDE.partition(f"\n## To add a {kind}\n")[2].partition("\n## ")[0]


def add(file: pathlib.Path, line: str, text: str) -> None:
    if not line:
        assert not file.exists()
        file.write_text(text)
        return
    lines = file.read_text().splitlines(keepends=True)
    places = [at for at, each in enumerate(lines) if each.strip().startswith(line)]
    assert len(places) == 1, f"{len(places)} lines of {file} begin with {line!r}"
    lines.insert(places[0] + 1, text)
    file.write_text("".join(lines))


def read(kind: str) -> Contribution:
    page = (pathlib.Path(__file__).parent / "contributions" / f"{kind}.md").read_text()
    return Contribution(kind, re.match(r"# (\w+)", page)[1], PART.findall(page))


CONTRIBUTIONS = [read(kind) for kind in ("callback", "launcher", "collective")]
COLLECTIVE = CONTRIBUTIONS[-1]
# Only a build or a GPU shows that these are missing.
SHOWN_LATER = {
    "tests/gpu/ranks/cases.py",
    "tests/gpu/ranks/engine.py",
    "tests/parallel/test_mixed.py",
    "tf_ops/backend/run_batch.cc",
    "tf_ops/engine/mixed_test.cc",
    "tf_ops/engine/random_plan_testing.h",
    "tf_ops/kernels/xla_kernels.cc",
}
of_each_kind = pytest.mark.parametrize(
    "contribution", CONTRIBUTIONS, ids=lambda each: each.kind
)


@pytest.fixture
def copy(tmp_path) -> pathlib.Path:
    """A copy of the checkout, with its environment and its libraries."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.check_output(listed, cwd=CHECKOUT, text=True).split("\0")
    for file in filter(None, files):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / file, tmp_path / file)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    shutil.copytree(CHECKOUT / NATIVE, tmp_path / NATIVE)
    return tmp_path


@pytest.fixture
def script(copy) -> Callable[[str], subprocess.CompletedProcess]:
    """Runs commands in the copy up to the first that fails."""

    def run(commands: str) -> subprocess.CompletedProcess:
        path = f"{copy}:{os.environ.get('PYTHONPATH', '')}"
        return subprocess.run(
            ["bash", "-ec", commands],
            cwd=copy,
            # This test may run under a make that was asked for another environment.
            env={**os.environ, "PYTHONPATH": path, "MAKEFLAGS": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return run


@of_each_kind
def test_changes_the_files_that_the_guide_names(contribution):
    assert contribution.files() == contribution.named_files()


def test_make_lint_passes_after_make_format(copy, script):
    for each in CONTRIBUTIONS:
        each.add_to(copy)
    # The environment is the checkout's, and stays as it is.
    done = script("make --old-file=install format lint")
    assert done.returncode == 0, done.stdout


@of_each_kind
def test_passes_the_commands_of_the_guide(contribution, copy, script):
    contribution.add_to(copy)
    done = script(contribution.commands())
    assert done.returncode == 0, done.stdout


@of_each_kind
def test_every_page_that_the_guide_names_is_asked_for(contribution, copy, script):
    contribution.add_to(copy, without=contribution.pages())
    done = script(contribution.commands())
    failed = re.findall(r"^FAILED \S+\[(.*?)\]", done.stdout, re.M)
    assert set(failed) == contribution.pages(), done.stdout


@pytest.mark.parametrize(
    ("contribution", "file"),
    [
        pytest.param(each, file, id=f"{each.kind}-{file}")
        for each in CONTRIBUTIONS
        for file in sorted(each.changed() - each.pages() - SHOWN_LATER)
    ],
)
def test_needs_every_change_that_the_guide_names(contribution, file, copy, script):
    contribution.add_to(copy, without={file})
    done = script(contribution.commands())
    assert done.returncode != 0, done.stdout


# XLA's headers take half a minute of a core of its own.
@pytest.mark.timeout(900)
def test_the_compiler_takes_the_collective(copy, script, shared_packages):
    COLLECTIVE.add_to(copy)
    headers = f"{shared_packages}/tensorflow/include"
    folders = [headers, f"{headers}/external/highwayhash"]
    folders += [f"{headers}/external/farmhash_archive/src", GOOGLETEST]
    version = "-DTF_MAJOR_VERSION=2 -DTF_MINOR_VERSION=0 -DTF_PATCH_VERSION=0"
    options = f"-std=c++17 -fsyntax-only -Wall -Wextra -Werror {version}"
    compiler = " ".join(["g++ -I.", options, *(f"-isystem {each}" for each in folders)])
    sources = sorted(each for each in COLLECTIVE.files() if each.endswith(".cc"))
    done = script("\n".join(f"{compiler} {source}" for source in sources))
    assert done.returncode == 0, done.stdout
