"""Links of the pages, beyond what MkDocs does.

Pages link to files of the checkout, such as examples: each such file becomes a page of
its own, under source/. Names of the package in text become links to the reference.
"""

from __future__ import annotations

import functools
import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

CHECKOUT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")
# A link, or a heading, keeps its content.
NAME = re.compile(
    r"(<a\b.*?</a>|<h\d.*?</h\d>|<pre.*?</pre>)"
    r"|<code>(([A-Za-z_][\w.]*)(?:\([^<]*\))?)</code>",
    re.S,
)
LANGUAGES = {".py": "python", ".h": "cpp", ".cc": "cpp", ".c": "c"}
# Of the checkout's pages these are in the navigation.
NAMED = ("CONTRIBUTING.md", "CHANGELOG.md")
# uri: the file of the checkout that is the page
SOURCES: dict[str, str] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file of the checkout that a page links to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting += NAMED
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.startswith("docs/"):
            content = _as_page(path)
            files.append(File.generated(config, _uri(path), content=content))
            SOURCES[_uri(path)] = path
        if path.endswith(".md"):
            text = (CHECKOUT / path).read_text()
            linked = (_target(path, link[1]) for link in LINK.finditer(text))
            waiting += [each for each in linked if not each.startswith("docs/")]
        elif (CHECKOUT / path).is_dir():
            waiting += _files_in(path)
    return files


def on_page_markdown(markdown: str, page: Page, **_) -> str:
    """Turns links within the checkout into links within the site."""
    here = page.file.src_uri
    path = _path(page)

    def within_site(link: re.Match) -> str:
        uri = _uri(_target(path, link[1]))
        return f"]({posixpath.relpath(uri, posixpath.dirname(here))}{link[2] or ''})"

    return LINK.sub(within_site, markdown)


def on_page_content(html: str, **_) -> str:
    """Makes mkdocs-autorefs link names of the package that the reference has."""

    def linked(found: re.Match) -> str:
        if found[1] or found[3] not in names:
            return found[0]
        to = names[found[3]]
        return f'<autoref identifier="{to}"><code>{found[2]}</code></autoref>'

    names = _names()
    return NAME.sub(linked, html)


@functools.cache
def _names() -> dict[str, str]:
    """The names of the reference; with a capital letter, also by their last part."""
    pages = (CHECKOUT / "docs/reference").glob("*.md")
    entries = (re.findall(r"^::: (.+)$", page.read_text(), re.M) for page in pages)
    names = {name: name for each in entries for name in each}
    short = {name.rpartition(".")[2]: name for name in names}
    return names | {name: to for name, to in short.items() if name != name.lower()}


def _target(path: str, link: str) -> str:
    """The path in the checkout that a link in one of its files leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _uri(path: str) -> str:
    """The page, or picture, that a file of the checkout has in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    # MkDocs leaves out names that begin with a dot.
    return f"source/{path.lstrip('.').removesuffix('.md')}.md"


def _path(page: Page) -> str:
    """The file of the checkout that is a page of the site."""
    return SOURCES.get(page.file.src_uri, f"docs/{page.file.src_uri}")


def _as_page(path: str) -> str:
    """A file or folder of the checkout as a page, which searches leave out."""
    file = CHECKOUT / path
    if path in NAMED:
        return file.read_text()
    head = "---\nsearch:\n  exclude: true\n---\n"
    if path.endswith(".md"):
        return head + file.read_text()
    if path.endswith(".ipynb"):
        return head + _cells(json.loads(file.read_text()))
    title = f"{head}# {path}\n\n"
    if file.is_dir():
        names = (posixpath.relpath(each, path) for each in _files_in(path))
        base = posixpath.basename(path)
        return title + "\n".join(f"- [{name}]({base}/{name})" for name in names)
    language = LANGUAGES.get(file.suffix, "text")
    return f"{title}````{language}\n{file.read_text()}\n````\n"


def _cells(notebook: dict) -> str:
    texts = ((each["cell_type"], "".join(each["source"])) for each in notebook["cells"])
    return "\n\n".join(
        text if kind == "markdown" else f"````python\n{text}\n````"
        for kind, text in texts
    )


def _files_in(path: str) -> list[str]:
    return sorted(
        each.relative_to(CHECKOUT).as_posix()
        for each in (CHECKOUT / path).iterdir()
        if each.is_file() and not each.name.startswith(".")
    )
