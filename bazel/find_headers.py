"""Prints the folder with some headers that NVIDIA's packages in this Python have.

    python -I bazel/find_headers.py HEADER...

Prints nothing where no package has all of them.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys


def find(headers: list[str]) -> pathlib.Path | None:
    """Finds the first include folder of NVIDIA's packages that has all of `headers`."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations or () if spec is not None else ()
    for root in roots:
        for folder in sorted(pathlib.Path(root).glob("*/include")):
            if all((folder / header).exists() for header in headers):
                return folder
    return None


if __name__ == "__main__":
    print(find(sys.argv[1:]) or "")
