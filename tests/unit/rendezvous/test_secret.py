"""The sources of the secret, refused ones, and that it shows nowhere."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

from keras_hvd.exceptions import RendezvousError
from keras_hvd.world.rendezvous import secret
from keras_hvd.world.rendezvous.secret import FILE_VARIABLE, VARIABLE, Secret

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


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o660, 0o601, 0o450])
def test_refuses_a_file_that_others_may_use(file, mode):
    file.chmod(mode)
    expected = f"has mode {mode:04o}.*chmod 600.*`defaultMode: 0400`.*`fsGroup`"
    with pytest.raises(RendezvousError, match=expected) as at:
        secret.read({FILE_VARIABLE: str(file)})
    assert TEXT not in "".join(traceback.format_exception(at.value))


# A pod's group, and users that no process of these tests is of: Linux's nobody, the
# first one of an image, and one that OpenShift draws.
FS_GROUP = 2_000
USERS = (65_534, 1_000, 1_000_660_000)
# Stands for each of them.
POD = -1


def read_as(user, groups, path):
    """The output of a user's process for a file: its error, or the secret's key."""
    process = subprocess.run(
        ["setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={groups}"]
        + [sys.executable, "-c", READ, str(path)],
        env={"PYTHONPATH": os.pathsep.join(sys.path), FILE_VARIABLE: str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout.strip()


READ = """
import os
from keras_hvd.exceptions import RendezvousError
from keras_hvd.world.rendezvous import secret
try:
    print(secret.read(os.environ).key("job").hex())
except RendezvousError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of others")
@pytest.mark.parametrize("of_pod", USERS)
@pytest.mark.parametrize(
    ("owner", "mode", "user", "groups", "expected"),
    [
        # As kubelet makes a Secret's file, with fsGroup and without.
        ((0, FS_GROUP), 0o440, POD, FS_GROUP, ""),
        ((0, FS_GROUP), 0o640, POD, FS_GROUP, ""),
        ((0, FS_GROUP), 0o440, 0, FS_GROUP, ""),
        ((0, 0), 0o400, 0, 0, ""),
        ((0, 0), 0o400, POD, POD, "Permission denied. .*`fsGroup`"),
        ((0, 0), 0o644, POD, POD, "has mode 0644.*`defaultMode: 0400`"),
        ((0, FS_GROUP), 0o444, POD, FS_GROUP, "has mode 0444"),
        ((0, FS_GROUP), 0o460, POD, FS_GROUP, "has mode 0460"),
        # A group that this user only shares.
        ((POD, FS_GROUP), 0o440, POD, FS_GROUP, "has mode 0440"),
        ((0, FS_GROUP), 0o440, 0, 0, "has mode 0440"),
        ((1, FS_GROUP), 0o440, POD, FS_GROUP, "belongs to user 1, and"),
    ],
)
def test_files_of_root(of_pod, owner, mode, user, groups, expected):
    """The file is where kubelet puts it: behind two links."""

    def known(each):
        return of_pod if each == POD else each

    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        (folder / "..2026_11_29").mkdir(0o755)
        (folder / "..data").symlink_to("..2026_11_29")
        (folder / "secret").symlink_to("..data/secret")
        file = folder / "..2026_11_29/secret"
        file.write_text(TEXT)
        os.chown(file, *map(known, owner))
        file.chmod(mode)
        said = read_as(known(user), known(groups), folder / "secret")
    finally:
        shutil.rmtree(folder)
    assert re.search(expected or f"^{Secret(TEXT.encode()).key('job').hex()}$", said)


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
    "text", ["abc", "short-text", "fifteen bytes..", " padded \n   \t     "]
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
