"""Where the secret comes from, what is refused, and that it shows nowhere."""

import os
import traceback

import pytest

from keras_hvd.exceptions import RendezvousError
from keras_hvd.rendezvous import secret
from keras_hvd.rendezvous.secret import FILE_VARIABLE, VARIABLE, Secret

TEXT = "0123456789abcdef-of-tests"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "secret"
    path.write_text(TEXT + "\n")
    path.chmod(0o600)
    return path


def test_a_variable_and_a_file_with_the_same_text_are_the_same_secret(file):
    keys = {
        secret.read(variables).key("job")
        for variables in ({VARIABLE: TEXT}, {FILE_VARIABLE: str(file)})
    }
    assert len(keys) == 1


@pytest.mark.parametrize("mode", [0o400, 0o600])
def test_takes_a_file_that_others_cannot_read(file, mode):
    file.chmod(mode)
    secret.read({FILE_VARIABLE: str(file)})


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_refuses_a_file_that_others_may_use(file, mode):
    file.chmod(mode)
    with pytest.raises(RendezvousError, match=f"has mode {mode:04o}.*chmod 600") as at:
        secret.read({FILE_VARIABLE: str(file)})
    assert TEXT not in "".join(traceback.format_exception(at.value))


def test_refuses_a_file_of_another_user(file, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    with pytest.raises(RendezvousError, match=r"belongs to user \d+, and this process"):
        secret.read({FILE_VARIABLE: str(file)})


def test_refuses_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, expected in (
        ("none", "cannot be read: No such file"),
        ("pipe", "is not a regular file"),
        (".", "is not a regular file"),
    ):
        with pytest.raises(RendezvousError, match=expected):
            secret.read({FILE_VARIABLE: str(tmp_path / name)})


def test_refuses_a_file_that_is_too_large(file):
    file.write_text("x" * 5000)
    with pytest.raises(RendezvousError, match="is larger than 4096 bytes"):
        secret.read({FILE_VARIABLE: str(file)})


@pytest.mark.parametrize(
    "text", ["short-text", "fifteen bytes..", " padded \n   \t     "]
)
def test_refuses_a_secret_that_is_too_short(file, text):
    file.write_text(text)
    for variables in ({VARIABLE: text}, {FILE_VARIABLE: str(file)}):
        with pytest.raises(RendezvousError, match="bytes, and needs 16 or more") as at:
            secret.read(variables)
        assert text.strip() not in str(at.value)


@pytest.mark.parametrize("variables", [{}, {VARIABLE: ""}, {FILE_VARIABLE: ""}])
def test_says_how_to_set_a_secret(variables):
    with pytest.raises(RendezvousError, match="openssl rand -hex 32.* mode 0600"):
        secret.read(variables)


def test_refuses_two_secrets(file):
    with pytest.raises(RendezvousError, match="both .* unset one"):
        secret.read({VARIABLE: TEXT, FILE_VARIABLE: str(file)})


def test_what_is_taken_is_gone_from_the_environment_and_still_known(monkeypatch):
    monkeypatch.setattr(secret, "_taken", None)
    environment = {VARIABLE: TEXT, "HOME": "/"}
    taken = secret.take(environment)
    assert environment == {"HOME": "/"}
    assert secret.take(environment) is taken
    environment[VARIABLE] = "another secret of these tests"
    assert secret.take(environment).key("") != taken.key("")


def test_shows_nothing_of_itself():
    assert repr(Secret(TEXT.encode())) == str(Secret(TEXT.encode())) == "Secret(...)"
