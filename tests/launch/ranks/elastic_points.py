"""Counts steps in a job that is formed anew, and ends at a point while that happens.

Takes a folder, the rank that dies by SIGKILL in step 5, and who ends next, at which
point: "2" or "2,3" for ranks as they were started, "2new" if it has come later. Points
are what it does from the moment on when it leaves its job for the next one: with
--engine, a folder of libraries with faults, each store that other ranks act on and all
that it sends and receives there (tf_ops/transport/faults.h), else each call on a socket
in Python; after the last one, it ends as it has joined. With --leaves 2 it does so in
the second job that it leaves. With --how stops it is stopped, and not killed, with
unplugs its host's cable is pulled. The job ends once these have ended, and there are as
many ranks as --ends-with says. Each rank writes how far it has come.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

import keras_hvd
from keras_hvd.elastic import world
from keras_hvd.job import native
from keras_hvd.world import renewal

STEPS, LOST_AT = 12, 5
SOCKET_CALLS = {name for name in vars(socket.socket) if not name.startswith("__")} | {
    *("send", "sendall", "sendmsg", "sendto", "recv", "recv_into", "recvmsg"),
    *("connect", "connect_ex", "_accept", "listen", "bind", "shutdown", "close"),
}

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("first", type=int)
parser.add_argument("next")
parser.add_argument("point", type=int)
parser.add_argument("--engine", type=Path)
parser.add_argument("--how", choices=("dies", "stops", "unplugs"), default="dies")
parser.add_argument("--leaves", type=int, default=1)
parser.add_argument("--ends-with", type=int, required=True)
parser.add_argument("--elements", type=int, default=8)
options = parser.parse_args()
told = renewal.of(os.environ)
me = f"{told.number}{'new' * told.is_new}"
ended = [options.folder / f"{each}.ended" for each in options.next.split(",")]
mine = options.folder / f"{me}.ended"
# Later ones of the same number live on.
is_next = mine in ended and not mine.exists()
if options.engine is not None:
    native._FOLDER = options.engine
left = times_left = 0


def note(what):
    with (options.folder / f"{me}-{os.getpid()}.log").open("a") as file:
        file.write(what + "\n")


def end_at_socket_call(frame, event, called):
    global left
    if event != "c_call" or called.__name__ not in SOCKET_CALLS:
        return
    if not isinstance(getattr(called, "__self__", None), socket.socket):
        return
    left -= 1
    if left == 0:
        end()


def end():
    if options.how == "unplugs":
        sys.setprofile(None)
        subprocess.run(["ip", "link", "set", "cable", "down"], check=True)
        return
    os.kill(os.getpid(), signal.SIGSTOP if options.how == "stops" else signal.SIGKILL)


def renew():
    """Points count from here on."""
    global left, times_left
    note("leaves")
    times_left += 1
    ends_here = is_next and times_left == options.leaves
    if ends_here:
        mine.write_text(str(os.getpid()))
        if options.engine is None:
            left = options.point
            sys.setprofile(end_at_socket_call)
        else:
            how = "STOP" if options.how == "stops" else "KILL"
            os.environ[f"KERAS_HVD_FAULT_{how}_AT"] = str(options.point)
    renew_as_usual()
    note("has joined")
    if ends_here and left > 0:
        end()


def have_ended():
    # A host that is cut off ends its ranks only later.
    return options.how == "unplugs" or all(
        each.exists() and not Path("/proc", each.read_text()).exists() for each in ended
    )


renew_as_usual, world.renew = world.renew, renew
keras_hvd.init()
state = keras_hvd.elastic.ObjectState(steps=[], array=np.zeros(options.elements))


@keras_hvd.elastic.run
def train(state):
    note("has the state")
    while True:
        step = len(state.steps)
        assert {*keras_hvd.allgather_object(step)} == {step}
        assert np.all(state.array == step)
        if step == LOST_AT and me == str(options.first):
            os.kill(os.getpid(), signal.SIGKILL)
        is_over = step >= STEPS and keras_hvd.size() == options.ends_with
        if any(keras_hvd.allgather_object(is_over and have_ended())):
            return
        state.steps = [*state.steps, step]
        state.array = state.array + 1
        state.commit()


train(state)
seen = {"rank": keras_hvd.rank(), "steps": state.steps, "size": keras_hvd.size()}
(options.folder / f"{me}-{os.getpid()}.json").write_text(json.dumps(seen))
