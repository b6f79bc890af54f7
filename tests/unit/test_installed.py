"""installed.py: the origin of this copy of keras_hvd, other copies, and the origin of
TensorFlow."""

from __future__ import annotations

import json
import os
import pathlib
import shlex
import sys

import pytest

from keras_hvd.job import installed
from keras_hvd.version import __version__

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


def install(packages, name="keras_hvd", version="0.1.0", module=None, **noted):
    """Writes pip's files into a folder: package, or its source's URL, and metadata."""
    module = module or name
    info = packages / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    (info / "top_level.txt").write_text(module)
    if noted:
        (info / "direct_url.json").write_text(json.dumps(noted))
    if not noted.get("dir_info"):
        (packages / module).mkdir(exist_ok=True)
        (packages / module / "__init__.py").touch()


@pytest.fixture
def packages(tmp_path, monkeypatch) -> pathlib.Path:
    """A folder that this Python looks for packages in, alone."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setattr(sys, "path", [str(folder)])
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    return folder


@pytest.fixture
def this_copy(packages, monkeypatch) -> pathlib.Path:
    """The copy in `packages`, as the one that runs."""
    monkeypatch.setattr(installed, "PACKAGE", packages / "keras_hvd")
    return packages / "keras_hvd"


@pytest.fixture
def checkout(packages, tmp_path, monkeypatch) -> pathlib.Path:
    """One that is not installed, as the copy that runs: its folder is the script's."""
    folder = tmp_path / "checkout"
    (folder / "keras_hvd").mkdir(parents=True)
    (folder / "WORKSPACE").touch()
    # As builds leave it there. It is no installation.
    (folder / "keras_hvd.egg-info").mkdir()
    (folder / "keras_hvd.egg-info" / "PKG-INFO").write_text("Name: keras_hvd\n")
    sys.path.insert(0, str(folder))
    monkeypatch.setattr(installed, "PACKAGE", folder / "keras_hvd")
    return folder


def test_checkout_is_installed_again_in_place():
    assert installed.install_command().endswith(f"pip install -e {CHECKOUT}")
    assert installed.install_command("io").endswith(f"-e '{CHECKOUT}[io]'")


def test_what_came_from_an_index_comes_from_there_again(packages, this_copy):
    install(packages)
    note = "(if it came from a wheel file, name that file instead)"
    again = f"--force-reinstall --no-deps keras_hvd=={__version__} {note}"
    assert installed.install_command().endswith(again)
    extra = f"pip install 'keras_hvd[io]=={__version__}' {note}"
    assert installed.install_command("io").endswith(extra)


@pytest.mark.parametrize("name", ["a checkout", "keras_hvd-0.1.0-py3-none-any.whl"])
def test_what_came_from_here_comes_from_here_again(packages, this_copy, tmp_path, name):
    source = tmp_path / name
    install(packages, url=source.as_uri())
    again = f"--no-deps {shlex.quote(str(source))}"
    # An index might have another package of that name.
    gone = "(which is no longer there: name the place where it is now)"
    assert installed.install_command().endswith(f"{again} {gone}")
    source.touch()
    assert installed.install_command().endswith(again)
    assert installed.install_command("io").endswith(f"pip install '{source}[io]'")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="There is no python -P")
def test_checkout_that_hides_an_installed_copy(packages, checkout, monkeypatch):
    """As for a script in a checkout, beside an installed wheel."""
    wheel = checkout / "keras_hvd-0.1.0-py3-none-any.whl"
    wheel.touch()
    install(packages, url=wheel.as_uri())
    hides = (
        f"The checkout {checkout} hides the keras_hvd that is installed in {packages}"
    )
    elsewhere = "in another folder, or with PYTHONSAFEPATH=1 (python -P)"
    assert installed.how_to_use_the_hidden().startswith(hides)
    assert installed.how_to_use_the_hidden().endswith(elsewhere)
    assert installed.install_command("io").endswith(f"pip install '{wheel}[io]'")
    monkeypatch.setenv("PYTHONPATH", f":{checkout}")
    assert installed.how_to_use_the_hidden().endswith(": take it out of PYTHONPATH")


def test_checkout_that_hides_nothing(packages, checkout):
    assert installed.how_to_use_the_hidden() == ""
    install(packages, url=checkout.as_uri(), dir_info={"editable": True})
    assert installed.how_to_use_the_hidden() == ""
    assert installed.install_command().endswith(f"pip install -e {checkout}")


def test_another_copy_says_nothing_of_this_one(packages, tmp_path, monkeypatch):
    monkeypatch.setattr(installed, "PACKAGE", tmp_path / "copied" / "keras_hvd")
    install(packages, url=tmp_path.as_uri())
    assert f" keras_hvd=={__version__} (if" in installed.install_command()


def test_one_copy(packages, this_copy):
    install(packages)
    assert installed.other_copies() == []


def test_checkout_that_is_installed_in_place_is_one_copy(packages, monkeypatch):
    install(packages, url=CHECKOUT.as_uri(), dir_info={"editable": True})
    monkeypatch.setattr(sys, "path", [str(packages), str(CHECKOUT)])
    assert installed.other_copies() == []


def test_wheel_behind_a_checkout(packages):
    """As in a script that is run in a checkout, or with PYTHONPATH."""
    install(packages)
    assert installed.other_copies() == [packages / "keras_hvd"]


def test_checkout_in_place_behind_a_wheel(packages, this_copy, tmp_path):
    """As where a virtual environment sees the system's packages."""
    install(packages)
    install(tmp_path / "system", url=CHECKOUT.as_uri(), dir_info={"editable": True})
    sys.path.append(str(tmp_path / "system"))
    assert installed.other_copies() == [CHECKOUT / "keras_hvd"]


def test_source_of_an_installed_copy_is_none(packages, this_copy):
    install(packages, url=CHECKOUT.as_uri())
    assert installed.other_copies() == []


def test_copy_without_metadata(packages, this_copy, tmp_path):
    install(packages)
    copy = tmp_path / "keras_hvd"
    copy.mkdir()
    (copy / "__init__.py").touch()
    sys.path.append(str(tmp_path))
    assert installed.other_copies() == [copy]


def test_what_import_passes_over_is_no_copy(packages, this_copy, tmp_path, monkeypatch):
    install(packages)
    (packages / "keras_hvd-0.1.0.dist-info" / "direct_url.json").write_text("{")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    sys.path += ["", str(loop), str(tmp_path / "a.zip")]
    assert installed.other_copies() == []
    os.chdir(tmp_path)


def test_two_tensorflows_in_two_folders(packages, tmp_path):
    """As in a virtual environment that sees the system's packages."""
    install(packages, "tensorflow_cpu", "2.21.0", module="tensorflow")
    install(tmp_path / "system", "tensorflow", "2.20.0")
    sys.path.append(str(tmp_path / "system"))
    assert len(installed.versions("tensorflow")) == 2
    installed.require_one_version("tensorflow")


def test_two_tensorflows_in_one_folder(packages):
    install(packages, "tensorflow", "2.20.0")
    installed.require_one_version("tensorflow")
    install(packages, "tensorflow_cpu", "2.21.0", module="tensorflow")
    with pytest.raises(installed.Overwritten) as raised:
        installed.require_one_version("tensorflow")
    assert "tensorflow 2.20.0 and tensorflow_cpu 2.21.0" in str(raised.value)
    assert "-m pip uninstall tensorflow tensorflow_cpu and" in str(raised.value)
