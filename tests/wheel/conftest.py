"""The path of the wheel to test."""

from __future__ import annotations

import pathlib

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]


def pytest_addoption(parser):
    parser.addoption(
        "--dist",
        type=pathlib.Path,
        default=CHECKOUT / "dist",
        help="the folder that `make wheel-all` has put it into",
    )
