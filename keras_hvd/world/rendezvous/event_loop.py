"""Runs coroutines that wait for sockets, in one thread and without asyncio.

`asyncio.run` raises in a thread that already runs a loop, as in a notebook.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import math
import selectors
import socket
import time
import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

_Result = TypeVar("_Result")

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


@dataclass(frozen=True)
class _Wait:
    """A coroutine's wait: for a socket or a condition, until a deadline."""

    descriptor: int = -1
    event: int = 0
    condition: Callable[[], bool] | None = None
    deadline: float = math.inf


@types.coroutine
def _suspend(wait: _Wait) -> Generator[_Wait, bool, bool]:
    return (yield wait)


async def ready(waited_for: socket.socket | int, event: int, deadline: float) -> bool:
    """Waits until a socket can be read or written; False after the deadline.

    `waited_for` may be its descriptor.

    Example:

    >>> here, there = socket.socketpair()
    >>> there.send(b"!")
    1
    >>> EventLoop().run(ready(here, READ, deadline=math.inf))
    True
    """
    if not isinstance(waited_for, int):
        waited_for = waited_for.fileno()
    return await _suspend(_Wait(descriptor=waited_for, event=event, deadline=deadline))


async def until(condition: Callable[[], bool], deadline: float) -> bool:
    """Waits until other coroutines make a condition true; False after the deadline.

    Example:

    >>> EventLoop().run(until(lambda: False, deadline=time.monotonic()))
    False
    """
    return await _suspend(_Wait(condition=condition, deadline=deadline))


async def pause(seconds: float) -> None:
    """Lets other coroutines run.

    Example:

    >>> EventLoop().run(pause(0))
    """
    await _suspend(_Wait(deadline=time.monotonic() + seconds))


class Task:
    """A coroutine that an `EventLoop` runs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]):
        self.coroutine = coroutine
        self.is_done = False
        self.result: Any = None


class EventLoop:
    """Runs coroutines until the main one has ended.

    An exception that one of them does not catch ends all. At most one coroutine waits
    for the same event of a socket.

    Example:

    >>> async def main():
    ...     found = []
    ...     async def find():
    ...         found.append("it")
    ...     loop.start(find())
    ...     await until(lambda: found, deadline=math.inf)
    ...     return found
    >>> loop = EventLoop()
    >>> loop.run(main())
    ['it']
    """

    def __init__(self) -> None:
        self._selector = selectors.EpollSelector()
        self._waits: dict[Task, _Wait] = {}
        # The conditions among the waits. A rank of a large job has thousands of waits,
        # and is woken for each: a wake must not look at all of them.
        self._conditions: dict[Task, Callable[[], bool]] = {}
        # A heap. Deadlines of waits that have ended stay in it until they are the next.
        self._deadlines: list[tuple[float, int, Task, _Wait]] = []
        self._order = itertools.count()
        self._by_event: dict[tuple[int, int], Task] = {}
        self._ready: collections.deque[tuple[Task, bool | None]] = collections.deque()

    def run(self, main: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs `main`, and the coroutines that it starts, and ends those with it."""
        try:
            return self._finish(main)
        finally:
            self.close()

    def wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Runs coroutines until a condition is true; returns False after a deadline.

        Example:

        >>> EventLoop().wait(lambda: True, deadline=math.inf)
        True
        """
        return self._finish(until(condition, deadline))

    def _finish(self, main: Coroutine[Any, Any, _Result]) -> _Result:
        task = self.start(main)
        while not task.is_done:
            self._step()
        return task.result

    def fileno(self) -> int:
        """The descriptor that another loop watches for reading, to call `poll` then."""
        return self._selector.fileno()

    @property
    def next_time(self) -> float:
        """When `poll` has something to do, by `time.monotonic`; infinite if never."""
        return self._next_deadline()

    def poll(self) -> None:
        """Runs coroutines as far as they come without waiting for anything."""
        while True:
            if not self._ready:
                self._select(patience=0)
            if not self._ready:
                return
            self._step()

    def close(self) -> None:
        """Ends all coroutines."""
        for each in [*self._waits, *(task for task, _ in self._ready)]:
            self.cancel(each)
        self._selector.close()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Task:
        """Runs a coroutine beside the others."""
        task = Task(coroutine)
        # A new coroutine takes nothing but None.
        self._ready.append((task, None))
        return task

    def cancel(self, task: Task) -> None:
        """Ends a coroutine that waits, as if its wait had raised GeneratorExit."""
        self._forget(task)
        task.is_done = True
        task.coroutine.close()

    def _step(self) -> None:
        if not self._ready:
            self._select()
        for _ in range(len(self._ready)):
            task, value = self._ready.popleft()
            if not task.is_done:
                self._resume(task, value)
        for task, condition in [*self._conditions.items()]:
            if condition():
                self._wake(task, True)

    def _resume(self, task: Task, value: bool | None) -> None:
        try:
            wait = task.coroutine.send(value)
        except StopIteration as end:
            task.is_done = True
            task.result = end.value
            return
        self._waits[task] = wait
        if wait.condition is not None:
            self._conditions[task] = wait.condition
        if wait.deadline != math.inf:
            entry = wait.deadline, next(self._order), task, wait
            heapq.heappush(self._deadlines, entry)
        if wait.event:
            self._by_event[wait.descriptor, wait.event] = task
            self._watch(wait.descriptor)

    def _select(self, patience: float | None = None) -> None:
        deadline = self._next_deadline()
        if patience is None and deadline != math.inf:
            patience = deadline - time.monotonic()
        for key, events in self._selector.select(patience):
            for event in (READ, WRITE):
                task = self._by_event.get((key.fd, event))
                if events & event and task is not None:
                    self._wake(task, True)
        now = time.monotonic()
        while self._next_deadline() <= now:
            self._wake(self._deadlines[0][2], False)

    def _next_deadline(self) -> float:
        while self._deadlines:
            deadline, _, task, wait = self._deadlines[0]
            if self._waits.get(task) is wait:
                return deadline
            heapq.heappop(self._deadlines)
        return math.inf

    def _wake(self, task: Task, value: bool) -> None:
        self._forget(task)
        self._ready.append((task, value))

    def _forget(self, task: Task) -> None:
        wait = self._waits.pop(task, None)
        self._conditions.pop(task, None)
        if wait is not None and wait.event:
            del self._by_event[wait.descriptor, wait.event]
            self._watch(wait.descriptor)

    def _watch(self, descriptor: int) -> None:
        """Tells the selector the events of a socket for which coroutines wait."""
        events = sum(
            each for each in (READ, WRITE) if (descriptor, each) in self._by_event
        )
        is_watched = descriptor in self._selector.get_map()
        if events and is_watched:
            self._selector.modify(descriptor, events)
        elif events:
            self._selector.register(descriptor, events)
        elif is_watched:
            self._selector.unregister(descriptor)
