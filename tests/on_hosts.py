"""Runs a command as a job on several hosts, all of which are this machine.

    python tests/on_hosts.py 2 1 python -m pytest tests/parallel

starts one khvdrun for 2 ranks and one for 1. Host keys keep their ranks from sharing
memory, so they talk over TCP as on different machines. The exit code is the first
khvdrun's that failed.
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile


def run(counts: list[str], command: list[str]) -> int:
    """Runs the command with so many ranks on each host; returns an exit code."""
    with tempfile.NamedTemporaryFile("w", prefix="secret") as secret:
        secret.write(secrets.token_hex())
        secret.flush()
        with socket.create_server(("127.0.0.1", 0)) as found:
            rendezvous = f"127.0.0.1:{found.getsockname()[1]}"
        nodes = [
            subprocess.Popen(
                [sys.executable, "-m", "keras_hvd.launch"]
                + ["--nnodes", str(len(counts)), "--node-rank", str(number)]
                + ["--rendezvous", rendezvous, "-np", count, *command],
                env={
                    **os.environ,
                    "KERAS_HVD_HOST_KEY": f"host {number}",
                    "KERAS_HVD_TEST_HOSTS": " ".join(counts),
                    "KERAS_HVD_SECRET_FILE": secret.name,
                },
            )
            for number, count in enumerate(counts)
        ]
        codes = [node.wait() for node in nodes]
    return next((code for code in codes if code), 0)


def main() -> int:
    words = sys.argv[1:]
    hosts = next(i for i, word in enumerate(words) if not word.isdecimal())
    return run(words[:hosts], words[hosts:])


if __name__ == "__main__":
    sys.exit(main())
