"""Trains, as elastic_line.py says, or counts where COUNTS is set, and goes on.

Takes a folder for what it has seen, and then pairs of a rank, as it was started, and
the step at which that one dies: by SIGKILL; "7!" by an error, "7?" as it joins the next
job, "0^" once it has, "7-" by SIGKILL once it has stopped rank 1. "2new" is a rank 2
that was started again: with "start" it ends before it joins, with "never" it does
neither; the first time, it stops as it joins with "once", has another state with
"other", and dies once it has joined, before it knows of the others, with "joined". With
MEMBERS=4,2 step 15 waits until there are 4 ranks, and step 16 until there are 2, which
rank 0 says; with ON=host1 step 15 waits until all are there. Writes, at the end, what
it has seen.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

import keras_hvd
from keras_hvd.world import initialization
from keras_hvd.world.renewal import of

STEPS = 20

folder = Path(sys.argv[1])
ends = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
renewal = of(os.environ)
mine = ends.get(f"{renewal.number}{'new' * renewal.is_new}", "0")
if mine == "start":
    sys.exit(3)
if mine == "never":
    signal.pause()
keras_hvd.init()
processes = []
if mine in ("once", "joined"):
    how = "#" if mine == "once" else "+"
    mine = "0" if (folder / mine).exists() else f"0{how}"
more = {}
if mine == "other":
    more = {} if (folder / "other").exists() else {"of a rank": 1}
    (folder / "other").touch()
    mine = "0"
die_at, how = int(mine.rstrip("!?-#+^")), mine.lstrip("0123456789")
wanted = [int(each) for each in os.environ.get("MEMBERS", "").split(",") if each]

sizes, steps = [], []

if "COUNTS" in os.environ:
    state = keras_hvd.elastic.ObjectState(step=0, **more)
    step, seen = keras_hvd.allgather_object, dict
else:
    from elastic_line import seen, state, step


def end_as_told():
    if how == "!":
        raise ValueError("a mistake of this rank alone")
    if how == "-":
        os.kill(processes[1], signal.SIGSTOP)
        while ") T" not in Path(f"/proc/{processes[1]}/stat").read_text():
            os.sched_yield()
    if timeline := os.environ.get("DIES_AFTER"):
        # A thread that may have no core writes every 0.1 s.
        while b'"start"' not in Path(timeline).read_bytes():
            os.sched_yield()
    os.kill(os.getpid(), signal.SIGKILL)


def die_joining(cancel):
    os.kill(os.getpid(), signal.SIGKILL)


def stop_joining(cancel):
    (folder / "once").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def die_joined(cancel):
    (folder / "joined").write_text(str(os.getpid()))
    rejoin(cancel)
    os.kill(os.getpid(), signal.SIGKILL)


def join_later(cancel):
    """Until khvdrun has collected the process that dies once it has joined."""
    rejoin(cancel)
    if (folder / "joined").exists():
        process = Path("/proc", (folder / "joined").read_text())
        while process.exists():
            os.sched_yield()


if how == "^":
    state.register_reset_callbacks([end_as_told])
rejoin = initialization.rejoin
joining = {"?": die_joining, "#": stop_joining, "+": die_joined}
if "joined" in ends.values():
    initialization.rejoin = join_later
initialization.rejoin = joining.get(how, initialization.rejoin)


def await_members(state, count):
    if keras_hvd.rank() == 0 and keras_hvd.size() != count:
        print(f"{keras_hvd.size()} wait to be {count}", flush=True)
    while keras_hvd.size() != count:
        keras_hvd.allgather_object(None)
        state.check_host_updates()


def await_all_on(state, host):
    print(f"waits to be on {host}", flush=True)
    while {*keras_hvd.allgather_object(socket.gethostname())} != {host}:
        state.check_host_updates()


@keras_hvd.elastic.run
def train(state):
    processes[:] = keras_hvd.allgather_object(os.getpid())
    sizes.append(keras_hvd.size())
    steps.append(state.step)
    while state.step < STEPS:
        if state.step == die_at and how != "?" and die_at:
            end_as_told()
        if state.step == 15 and "ON" in os.environ:
            await_all_on(state, os.environ["ON"])
        if 0 <= state.step - 15 < len(wanted):
            await_members(state, wanted[state.step - 15])
        step(state.step)
        state.step += 1
        state.commit()


train(state)
all_seen = {
    "rank": keras_hvd.rank(),
    "sizes": sizes,
    "began at": steps,
    "threads": os.environ.get("OMP_NUM_THREADS"),
    "started as": renewal.number,
    "step": state.step,
    **seen(),
}
(folder / f"{os.getpid()}.json").write_text(json.dumps(all_seen))
