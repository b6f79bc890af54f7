"""`python -m keras_hvd.report RECORDING`: the report of a recording that was left."""

from __future__ import annotations

import argparse
import sys

from keras_hvd.report import page, recording


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m keras_hvd.report",
        description="Writes the report of a recording that khvdrun --report has left.",
    )
    parser.add_argument("recording", help="the folder that khvdrun has named")
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE")
    options = parser.parse_args()
    try:
        page.write(recording.read(options.recording), options.output)
    except (OSError, ValueError, ImportError) as error:
        print(f"python -m keras_hvd.report: {error}", file=sys.stderr)
        return 1
    print(f"the report is in {options.output!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
