"""Trains, as elastic_line.py says, or counts where COUNTS is set, and goes on.

Takes a folder for what it has seen, and then pairs of a rank, as it was started, and
the step at which that one dies: by SIGKILL; "7!" by an error, "7?" as it joins the next
job, "7-" by SIGKILL once it has stopped rank 1. "2new" is a rank 2 that was started
again: with "start" it ends before it joins, with "never" it does neither; the first
time, it stops as it joins with "once", and has another state with "other". If MEMBERS
is set, step 15 waits for so many ranks. Writes, at the end, what it has seen.
"""

import json
import os
import signal
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
processes = keras_hvd.allgather_object(os.getpid())
if mine == "once":
    mine = "0" if (folder / "once").exists() else "0#"
more = {}
if mine == "other":
    more = {} if (folder / "other").exists() else {"of a rank": 1}
    (folder / "other").touch()
    mine = "0"
die_at, how = int(mine.rstrip("!?-#")), mine.lstrip("0123456789")
members = int(os.environ.get("MEMBERS", "0"))

sizes = []

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
    os.kill(os.getpid(), signal.SIGKILL)


def die_joining(cancel):
    os.kill(os.getpid(), signal.SIGKILL)


def stop_joining(cancel):
    (folder / "once").touch()
    os.kill(os.getpid(), signal.SIGSTOP)


if how in ("?", "#"):
    initialization.rejoin = die_joining if how == "?" else stop_joining


@keras_hvd.elastic.run
def train(state):
    sizes.append(keras_hvd.size())
    while state.step < STEPS:
        if state.step == die_at and how != "?" and die_at:
            end_as_told()
        while state.step == 15 and keras_hvd.size() < members:
            state.check_host_updates()
        step(state.step)
        state.step += 1
        state.commit()


train(state)
all_seen = {
    "rank": keras_hvd.rank(),
    "sizes": sizes,
    "started as": renewal.number,
    "step": state.step,
    **seen(),
}
(folder / f"{os.getpid()}.json").write_text(json.dumps(all_seen))
