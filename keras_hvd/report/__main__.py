"""`python -m keras_hvd.report`: the report of a recording, or of timelines."""

from __future__ import annotations

import argparse
import os
import sys

from keras_hvd.report import page, recording, timelines
from keras_hvd.report.record import JobRecord


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
        help="the report, which is replaced (default: report.html)",
    )
    options = parser.parse_args()
    try:
        page.write(_read(options.files), options.output)
    except (OSError, ValueError, ImportError) as error:
        print(f"python -m keras_hvd.report: {error}", file=sys.stderr)
        return 1
    print(f"the report is in {options.output!r}")
    return 0


def _read(files: list[str]) -> JobRecord:
    folder = next(filter(os.path.isdir, files), None)
    if folder is None:
        return timelines.read(files)
    if len(files) > 1:
        raise ValueError(f"{folder!r} is a folder: a report is of one recording alone")
    return recording.read(folder)


if __name__ == "__main__":
    sys.exit(main())
