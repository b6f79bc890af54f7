"""Prints results as Markdown: `python benchmarks/report.py results/allreduce.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("result", nargs="+", type=Path, help="a benchmark's JSON")
    for path in parser.parse_args().result:
        print(tables.report(json.loads(path.read_text())), end="\n\n")


if __name__ == "__main__":
    main()
