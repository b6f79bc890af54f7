"""docs/ as a site: it builds without warnings, is whole, and readable in a browser."""

from __future__ import annotations

import enum
import functools
import html
import http.server
import importlib.util
import inspect
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import keras_hvd

CHECKOUT = Path(__file__).parents[2]
SUBMODULES = (
    "callbacks",
    "data",
    "environment",
    "exceptions",
    "keras_tuner",
    "ray",
    "spark",
    "tfx",
)
START, OF_A_FILE = "index.html", "source/examples/mnist.py.html"
# One of each kind of page.
KINDS = (
    START,
    "training.html",
    "reference/collectives.html",
    "performance.html",
    OF_A_FILE,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="MkDocs is not installed"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = "-m mkdocs build --quiet --config-file docs/site/mkdocs.yml --site-dir"
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command.split(), folder],
        cwd=CHECKOUT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU time: a minute on a core of its own.
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 60
    return folder


def pages(site: Path) -> list[str]:
    return sorted(each.relative_to(site).as_posix() for each in site.rglob("*.html"))


# --- its content --------------------------------------------------------------------


def public_names() -> dict[str, object]:
    """The objects of the package and its public modules, each under its first name."""
    found = {each: getattr(keras_hvd, each) for each in keras_hvd.__all__}
    for each in SUBMODULES:
        module = found[each]
        own = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and getattr(value, "__module__", "") == module.__name__
        ]
        for name in getattr(module, "__all__", own):
            # They need what is not installed here.
            value = None if each in ("ray", "spark", "tfx") else getattr(module, name)
            if value is None or not any(value is other for other in found.values()):
                found[f"{each}.{name}"] = value
    return found


def arguments() -> Iterator[tuple[str, inspect.Parameter]]:
    """The arguments of public functions and classes, without exceptions and enums."""
    for name, value in public_names().items():
        is_class = inspect.isclass(value)
        if is_class and issubclass(value, (Exception, enum.Enum)):
            continue
        if is_class or inspect.isfunction(value):
            for each in inspect.signature(value).parameters.values():
                yield name, each


@functools.cache
def entries(site: Path) -> dict[str, str]:
    """The HTML of each entry of the reference, by its name."""
    found = {}
    for page in (site / "reference").glob("*.html"):
        parts = re.split(
            r'<h[23] id="keras_hvd\.([\w.]+)" class="doc', page.read_text()
        )
        found.update(zip(parts[1::2], parts[2::2]))
    return found


def test_every_public_name_has_an_entry(site):
    assert [each for each in public_names() if each not in entries(site)] == []


def test_every_argument_is_explained_with_its_default(site):
    missing = [
        f"{name}: {argument}"
        for name, argument in arguments()
        if not is_explained(argument, entries(site)[name])
    ]
    assert missing == []


def is_explained(parameter: inspect.Parameter, entry: str) -> bool:
    name = {
        parameter.VAR_POSITIONAL: f"*{parameter.name}",
        parameter.VAR_KEYWORD: f"**{parameter.name}",
    }.get(parameter.kind, parameter.name)
    after = entry.partition(f"<b><code>{name}</code></b>")[2].partition("–")[0]
    if parameter.default is parameter.empty:
        return bool(after)
    shown = html.unescape(re.sub(r"<.*?>|\s", "", after.partition("default:")[2]))
    is_literal = type(parameter.default) in (bool, int, float, str, type(None))
    return bool(shown) and (not is_literal or f"{parameter.default!r})" == shown)


def test_every_link_leads_somewhere(site):
    anchors = {page: ids(site / page) for page in pages(site)}
    broken = []
    for page in anchors.keys() - {"404.html"}:  # whose links name the site's address
        for link in re.findall(r'(?:href|src)="([^"]*)"', (site / page).read_text()):
            path, anchor = urldefrag(unquote(html.unescape(link)))
            if re.match(r"\w+:", path):
                continue
            target = (site / page).parent.joinpath(path or Path(page).name).resolve()
            there = anchors.get(target.relative_to(site).as_posix(), {anchor})
            if not target.exists() or (anchor and anchor not in there):
                broken.append(f"{page}: {link}")
    assert broken == []


def test_nothing_is_taken_from_elsewhere(site):
    taken = r'<(?:script|img|iframe|link)[^>]+(?:src|href)="(\w+:[^"]*)"'
    texts = {page: (site / page).read_text() for page in pages(site)}
    found = {page: re.findall(taken, text) for page, text in texts.items()}
    assert [each for each in found.items() if each[1]] == []


def ids(page: Path) -> set[str]:
    return set(re.findall(r'\bid="?([^\s">]+)', page.read_text()))


def test_figures_of_the_results_are_in_the_tables():
    results = (CHECKOUT / "docs" / "performance.md").read_text()
    lines = (CHECKOUT / "docs" / "measurements.md").read_text().splitlines()
    tables = "\n".join(line for line in lines if line.startswith("|"))
    known = set(re.findall(r"[\d.]+ (?:us|ms)\b", tables))
    rows = "\n".join(re.findall(r"^\|.*", results, re.M))
    figures = re.findall(r"[\d.]+ (?:us|ms)\b", rows)
    assert len(figures) > 8
    assert set(figures) - known == set()


# --- in a browser -------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(site) -> list[str]:
    """The pages of docs/, and one of those that show a file."""
    return [each for each in pages(site) if "source/" not in each] + [OF_A_FILE]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_pages_ask_for_nothing_else_and_have_no_errors(address, browser, written):
    page, complaints = browser.new_page(), []
    page.on("console", lambda each: complaints.append((page.url, each.text)))
    page.on("pageerror", lambda error: complaints.append((page.url, str(error))))
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.on(
        "requestfailed",
        # A request that is still loading when the next page is asked for is aborted.
        lambda each: (
            each.failure == "net::ERR_ABORTED"
            or complaints.append((page.url, each.url, each.failure))
        ),
    )
    page.on(
        "response",
        lambda each: (
            each.status < 400 or complaints.append((page.url, each.url, each.status))
        ),
    )
    for each in written:
        until = "networkidle" if each in KINDS else "load"
        page.goto(address + each, wait_until=until)
    page.close()
    assert complaints == []
    assert [each for each in requests if not each.startswith((address, "data:"))] == []
    assert len(requests) > 5 * len(written)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(scheme, address, browser, written):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    context = browser.new_context(color_scheme=scheme, reduced_motion="reduce")
    page, low = context.new_page(), []
    for each in written if scheme == "light" else KINDS:
        page.goto(address + each)
        palette = page.locator("body").get_attribute("data-md-color-scheme")
        assert palette == {"light": "default", "dark": "slate"}[scheme]
        rule = {"runOnly": {"type": "rule", "values": ["color-contrast"]}}
        # The surroundings of the article are the same on every page.
        part = None if each == START else "article"
        found = axe.run(page, context=part, options=rule).response
        assert found["passes"]
        low += [
            f"{each}: {node['html'][:100]} {node['any'][0]['message']}"
            for violation in found["violations"]
            for node in violation["nodes"]
        ]
    context.close()
    assert low == []


def test_a_phone_need_not_scroll_sideways(address, browser, written):
    page, widths = browser.new_page(viewport={"width": 390, "height": 844}), {}
    for each in written:
        page.goto(address + each)
        widths[each] = page.evaluate("document.documentElement.scrollWidth")
    page.close()
    assert {each: width for each, width in widths.items() if width > 390} == {}


def test_search_finds_without_a_network(address, browser):
    page = browser.new_page()
    page.goto(address + "index.html")
    page.locator("[data-md-component=search-query]").click()
    page.keyboard.type("MetricAverage")
    page.locator(".md-search-result__link", has_text="MetricAverage").first.wait_for()
    page.close()
