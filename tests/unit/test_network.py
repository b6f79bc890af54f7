"""Why there are no hosts with networks, as tests that are skipped for it say."""

import network
import pytest

# It says that the namespaces are there, and makes none.
MADE = "echo; exec cat"


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        ({"unshare": "echo not you >&2; exit 1"}, "not you"),
        ({"unshare": MADE, "ip": "echo no such kind >&2; exit 2"}, ": no such kind"),
        ({"unshare": MADE}, "ip is not installed"),
        ({}, "unshare is not installed"),
    ],
)
def test_it_is_what_the_program_that_failed_has_said(
    monkeypatch, tmp_path, programs, expected
):
    for name, does in programs.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{does}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert network.unavailable().endswith(expected)
