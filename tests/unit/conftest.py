"""A browser, for the tests of pages."""

import os
import shutil
from collections.abc import Iterator

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """The distribution's Chromium; where there is none, the test is skipped."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        # Chromium's own sandbox refuses root.
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules",
        type=int,
        default=2_000,
        help="how many orders of events of an elastic job test_membership.py tries",
    )
