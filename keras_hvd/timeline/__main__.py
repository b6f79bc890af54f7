"""`python -m keras_hvd.timeline FILE`: prints a summary of a timeline."""

import argparse
import io
import sys

from keras_hvd.timeline import events, summary


def main() -> int:
    """Runs the command with this process' arguments and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m keras_hvd.timeline",
        description="Prints where the time went, from a timeline.",
    )
    parser.add_argument("file", help="a timeline, also of a job that was killed")
    path = parser.parse_args().file
    # Names of tensors may have characters that the terminal cannot show.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            print(summary.text(summary.read(lines)))
    except (OSError, events.NotATimelineError) as error:
        print(f"{parser.prog}: {path}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
