"""Files take their places whole, and with them nothing else changes."""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from keras_hvd.backends.whole_files import staged
from keras_hvd.job import native


def write(path: str | Path, content: str = "new") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content)


def everything(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("before", [None, "old"])
def test_a_file_comes_when_it_is_whole(tmp_path, before):
    target = tmp_path / "model.keras"
    if before is not None:
        write(target, before)
    with staged(target) as own:
        assert Path(own).name == "model.keras"
        write(own)
        assert (target.read_text() if target.exists() else None) == before
    assert everything(tmp_path) == {"model.keras": "new"}


def test_an_error_leaves_what_was(tmp_path):
    write(tmp_path / "model.keras", "old")
    with (
        pytest.raises(OSError, match="No space"),
        staged(tmp_path / "model.keras") as own,
    ):
        write(own, "ne")
        raise OSError(28, "No space left on device")
    assert everything(tmp_path) == {"model.keras": "old"}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_has_the_rights_that_it_would_have(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    write(old, "old")
    old.chmod(0o640)
    before = os.umask(0o027)
    try:
        for each in (new, old):
            with staged(each) as own:
                write(own)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (new, old)] == [0o640, 0o640]


def test_a_link_stays(tmp_path):
    write(tmp_path / "models" / "1", "old")
    (tmp_path / "latest").symlink_to("models/1")
    with staged(tmp_path / "latest") as own:
        write(own)
    assert (tmp_path / "latest").is_symlink()
    assert (tmp_path / "models" / "1").read_text() == "new"


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with staged("model.keras") as own:
        write(own)
    assert everything(tmp_path) == {"model.keras": "new"}


@pytest.mark.parametrize(
    "path", ["gs://bucket/model.keras", "/gcs/bucket/m", "hf://a/b"]
)
def test_what_is_no_local_file_is_left_alone(path):
    with staged(path) as own:
        assert own == path


def test_a_device_is_written_to(tmp_path):
    with staged(os.devnull) as own:
        assert own == os.devnull


def test_a_folder_that_does_not_exist_yet(tmp_path):
    with staged(tmp_path / "a" / "b" / "model.keras") as own:
        write(own)
    assert everything(tmp_path) == {"a/b/model.keras": "new"}


def test_an_error_names_the_path_that_was_given(tmp_path):
    path = tmp_path / "missing" / "model.keras"
    with pytest.raises(FileNotFoundError) as error, staged(path) as own:
        open(own, "wb").close()
    assert error.value.filename == str(path)
    assert not list(tmp_path.iterdir())


def test_a_folder_keeps_what_it_has_under_other_names(tmp_path):
    target = tmp_path / "exported"
    write(target / "notes.txt", "mine")
    write(target / "saved_model.pb", "old")
    with staged(target) as own:
        write(f"{own}/saved_model.pb")
        write(f"{own}/variables/variables.index")
    assert everything(tmp_path) == {
        "exported/notes.txt": "mine",
        "exported/saved_model.pb": "new",
        "exported/variables/variables.index": "new",
    }


def test_a_new_folder_comes_whole(tmp_path):
    """So does one that another rank was quicker to make."""
    for quicker in (False, True):
        target = tmp_path / f"exported{quicker}"
        with staged(target) as own:
            write(f"{own}/saved_model.pb")
            if quicker:
                write(target / "saved_model.pb", "of another rank")
            assert target.exists() == quicker
        assert everything(target) == {"saved_model.pb": "new"}
    assert len(list(tmp_path.iterdir())) == 2


def test_what_names_other_files_comes_last(tmp_path, monkeypatch):
    names = ["c.index", "c.data-00000-of-00001", "m.weights.json", "m_00000.weights.h5"]
    for name in names:
        write(tmp_path / name, "old")
    replace, moved = os.replace, []

    def noting(file, place):
        moved.append(Path(place).name)
        replace(file, place)

    monkeypatch.setattr(os, "replace", noting)
    with staged(tmp_path / "c") as own:
        for name in names:
            write(Path(own).with_name(name))
    assert {*moved[:2]} == {"c.data-00000-of-00001", "m_00000.weights.h5"}
    assert {*moved[2:]} == {"c.index", "m.weights.json"}


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder with a file, of which a user without rights may write neither."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "model.keras", "old")
        (folder / "model.keras").chmod(0o444)
        folder.chmod(0o555)
        if root:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)


def test_a_file_that_may_not_be_written_stays(as_nobody):
    with (
        pytest.raises(PermissionError, match="model.keras"),
        staged(as_nobody / "model.keras"),
    ):
        raise AssertionError("it should not come to this")
    assert everything(as_nobody) == {"model.keras": "old"}


def test_only_rank_0_writes_into_a_file_in_place(as_nobody, monkeypatch):
    """Where no file may be made beside it."""
    path = as_nobody / "model.keras"
    monkeypatch.setattr(os, "access", lambda *_, **__: True)
    monkeypatch.setattr(native, "engine", lambda: SimpleNamespace(khvd_rank=lambda: 0))
    with staged(path) as own:
        assert own == str(path)
    monkeypatch.setattr(native, "engine", lambda: SimpleNamespace(khvd_rank=lambda: 1))
    with (
        pytest.raises(PermissionError, match=r"rank 1 .* keras_hvd.rank\(\) == 0"),
        staged(path),
    ):
        raise AssertionError("it should not come to this")
