"""`python -m keras_hvd.report`: the report of a recording, or of timelines."""

from __future__ import annotations

import argparse
import os
import sys

from keras_hvd.report import generations, page, timelines


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m keras_hvd.report",
        description="Writes the report of a job afterwards: of a recording that "
        "khvdrun --report has left, or of timelines.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        metavar="RECORDING|TIMELINE",
        help="the folder that khvdrun has named; or a timeline, also of a job that was "
        "killed. Several timelines are parts of one job, in any order: the report has "
        "them one after the other",
    )
    parser.add_argument(
        *("-o", "--output"),
        default="report.html",
        metavar="FILE",
        help="the report, which is replaced (default: report.html); report.2.html and "
        "so on are those of later jobs, if the ranks went on",
    )
    options = parser.parse_args()
    try:
        print(_write(options.files, options.output))
    except (OSError, ValueError, ImportError) as error:
        print(f"python -m keras_hvd.report: {error}", file=sys.stderr)
        return 1
    return 0


def _write(files: list[str], output: str) -> str:
    """Writes the report, or those of all generations, and tells where they are."""
    folder = next(filter(os.path.isdir, files), None)
    if folder is None:
        page.write(timelines.read(files), output)
        return f"the report is in {output!r}"
    if len(files) > 1:
        raise ValueError(f"{folder!r} is a folder: a report is of one recording alone")
    return generations.read(folder).write(output)


if __name__ == "__main__":
    sys.exit(main())
