"""One rank of the tests of the C API: it runs a task, and prints the result.

`python rank.py PLAN`, where PLAN is JSON; the fields of `Plan`.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
from collections.abc import Sequence

import cuda
import numpy as np
from cases import Case, all_cases, encode, random_cases
from engine import Arena, Dtype, Engine, EngineError, Kind, Op, Pending, Tensor

_ARENA_BYTES = 96 << 20
_LOOP_ELEMENTS = 1 << 18


@dataclasses.dataclass(frozen=True)
class Plan:
    """The task of this rank.

    Args:
        task: a key of `TASKS`.
        engine: path of the engine's library.
        cuda: path of the CUDA driver's; "": the system's.
        nccl: the same of NCCL's.
        job: names the job.
        rank: this one.
        size: the number of ranks.
        device: number of its GPU.
        check: whether the engine compares results between ranks.
        steps: how many random ones.
        seed: of them.
        timeline: path of the file; "": none.
    """

    task: str
    engine: str
    cuda: str
    nccl: str
    job: str
    rank: int
    size: int
    device: int
    check: bool = False
    steps: int = 0
    seed: int = 0
    timeline: str = ""


class Rank:
    """This rank's engine and GPU, with two streams of the caller's."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.gpu = cuda.Gpu(plan.cuda, plan.device)
        self.arena = Arena(self.gpu, _ARENA_BYTES)
        self.host = self.gpu.allocate_host(_ARENA_BYTES)
        self._host_taken = 0
        self.streams = [self.gpu.new_stream() for _ in range(2)]
        # For decisions of this rank alone, which the others need not know.
        self.chance = random.Random(1000 * plan.seed + plan.rank)
        self.engine = Engine(
            plan.engine,
            self.gpu,
            self.arena,
            rank=plan.rank,
            size=plan.size,
            local_rank=plan.rank,
            local_size=plan.size,
            cross_size=1,
            job=plan.job.encode(),
            check=plan.check,
            cuda_library=plan.cuda.encode(),
            nccl_library=plan.nccl.encode(),
        )
        if plan.timeline:
            self.engine.start_timeline(plan.timeline)

    def close(self) -> None:
        """Leaves the job and gives everything back."""
        self.engine.shutdown()
        for stream in self.streams:
            self.gpu.destroy_stream(stream)
        self.gpu.free_host(self.host)
        self.arena.close()
        self.gpu.close()

    def run(self, cases: Sequence[Case], process_set: int = 0, index: int = -1) -> None:
        """Runs some collectives at the same time, and checks their results.

        Args:
            cases: in the order of all ranks.
            process_set: among these.
            index: this rank's place among them; -1: its rank.
        """
        index = self.plan.rank if index < 0 else index
        order = self.chance.sample(range(len(cases)), len(cases))
        begun = {each: self._begin(cases[each], index, process_set) for each in order}
        read = {each: self._read(cases[each], index, *begun[each]) for each in order}
        for stream in self.streams:
            self.gpu.synchronize(stream)
        for number, results in read.items():
            for tensor, memory in enumerate(results):
                cases[number].check(tensor, index, memory)
        self.arena.clear()
        self._host_taken = 0

    def _begin(
        self, case: Case, index: int, process_set: int
    ) -> tuple[int, list[Tensor], Pending]:
        """Puts a case's inputs on a stream, and the collective behind them."""
        stream = self.chance.choice(self.streams)
        rows = case.output_rows(index)
        is_in_place = rows == case.rows[index] and self.chance.random() < 0.5
        tensors = []
        for number, dtype in enumerate(case.dtypes):
            data = encode(case.numbers(number, index), dtype)
            address = self.arena.take(data.nbytes)
            self.gpu.copy_to_device(address, self._on_host(data), stream)
            output = 0
            if is_in_place:
                output = address
            elif rows is not None:
                size = rows * case.columns * dtype.size
                output = self.engine.result_memory(size, stream)
            shape = (case.rows[index], case.columns)
            tensors.append(Tensor(dtype, shape, address, output))
        pending = self.engine.submit(
            case.kind,
            case.name,
            tensors,
            stream,
            with_end=self.chance.random() < 0.5,
            process_set=process_set,
            reduce_op=case.op,
            root=case.root,
            prescale=case.scales[0],
            postscale=case.scales[1],
            splits=case.splits[index] if case.splits else None,
        )
        return stream, tensors, pending

    def _read(
        self,
        case: Case,
        index: int,
        stream: int,
        tensors: Sequence[Tensor],
        pending: Pending,
    ) -> list[np.ndarray]:
        """Copies the results, behind the collective."""
        pending.wait()
        results = []
        for number, tensor in enumerate(tensors):
            address, rows = tensor.output, case.output_rows(index)
            if rows is None:
                address, rows = pending.results[number]
            memory = self._host_memory(rows * case.columns * tensor.dtype.size)
            self.gpu.copy_to_host(memory, address, stream)
            results.append(memory)
        return results

    def _on_host(self, data: np.ndarray) -> np.ndarray:
        memory = self._host_memory(data.nbytes)
        memory[:] = data.reshape(-1).view(np.uint8)
        return memory

    def _host_memory(self, size: int) -> np.ndarray:
        start = self._host_taken
        self._host_taken += -(-size // 64) * 64
        if self._host_taken > len(self.host):
            raise MemoryError("the host's part of the test is too small")
        return self.host[start : start + size]


def collectives(rank: Rank) -> None:
    """All of them, a few at a time; then other calls among the ranks."""
    size = rank.plan.size
    cases = list(all_cases(size))
    for start in range(0, len(cases), 4):
        rank.run(cases[start : start + 4])
    for root in range(size):
        broadcast = (Kind.BROADCAST, (Dtype.INT32,), (4,) * size)
        rank.run([Case(f"of {root}", *broadcast, root=root)])
    rank.engine.barrier("barrier")
    part_of_ranks(rank)
    joined(rank)
    say(cases=len(cases))


def part_of_ranks(rank: Rank) -> None:
    """The last ranks but the first, or the only one, among themselves."""
    members = list(range(rank.plan.size))[1:] or [0]
    number = 0 if members == [0] else rank.engine.add_process_set(members)
    if rank.plan.rank in members:
        place = members.index(rank.plan.rank)
        kinds = (Kind.ALLREDUCE, Kind.ALLGATHER)
        given = (Dtype.FLOAT32,), (6,) * len(members)
        # A broadcast's root is a rank of the job.
        rank.run(
            [Case(f"part {kind.name}", kind, *given) for kind in kinds], number, place
        )
    if number:
        rank.engine.remove_process_set(number)


def joined(rank: Rank) -> None:
    """The last rank has nothing more to give, and takes part with zeros."""
    size = rank.plan.size
    if rank.plan.rank < size - 1:
        stream = rank.streams[0]
        data = rank._on_host(np.full(5, rank.plan.rank + 1, np.float32))
        address = rank.arena.take(data.nbytes)
        rank.gpu.copy_to_device(address, data, stream)
        tensor = Tensor(Dtype.FLOAT32, (5,), address, address)
        fields = {"reduce_op": Op.SUM}
        rank.engine.submit(Kind.ALLREDUCE, "late", [tensor], stream, **fields).wait()
        rank.gpu.copy_to_host(data, address, stream)
        rank.gpu.synchronize(stream)
        np.testing.assert_array_equal(data.view(np.float32), sum(range(1, size)))
    rank.engine.join()


def steps(rank: Rank) -> None:
    """Random collectives, several under way together."""
    for step in range(rank.plan.steps):
        rank.run(random_cases(rank.plan.size, rank.plan.seed, step))
    say(steps=rank.plan.steps)


def loop(rank: Rank) -> None:
    """Reduces until a rank dies; prints when this rank's call raised, and its error."""
    stream = rank.streams[0]
    address = rank.arena.take(4 * _LOOP_ELEMENTS)
    rank.gpu.fill(address, 0, 4 * _LOOP_ELEMENTS, stream)
    tensor = Tensor(Dtype.FLOAT32, (_LOOP_ELEMENTS,), address, address)
    fields = {"reduce_op": Op.SUM}
    step = 0
    try:
        while True:
            pending = rank.engine.submit(
                Kind.ALLREDUCE, f"step {step % 10}", [tensor], stream, **fields
            )
            pending.wait()
            rank.gpu.synchronize(stream)
            step += 1
            if step == 3:
                say(looping=True)
    except EngineError as error:
        say(at=time.monotonic(), text=str(error))


def say(**values: object) -> None:
    """A line for the test."""
    print(json.dumps(values), flush=True)


TASKS = {"collectives": collectives, "steps": steps, "loop": loop}


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    rank = Rank(plan)
    TASKS[plan.task](rank)
    if plan.task != "loop":
        lost = rank.engine.counters().lost_wakes
        assert lost == 0, f"{lost} wakes were lost"
    rank.close()


if __name__ == "__main__":
    main()
