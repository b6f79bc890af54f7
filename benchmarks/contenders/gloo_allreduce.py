"""The ranks of torch.distributed with gloo in allreduce.py."""

from __future__ import annotations

import os
import time

import rank


def main() -> None:
    parser = rank.parser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--meeting", required=True, help="a file where ranks meet")
    options = parser.parse_args()
    rank.bind(options.cores, options.rank)
    # Otherwise gloo looks the host's name up, which not every container knows.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as distributed

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{options.meeting}",
        rank=options.rank,
        world_size=options.size,
    )
    session = rank.Session(
        options.socket, options.rank, options.size, f"torch {torch.__version__}"
    )
    array = None
    tensor = None

    def reduce() -> None:
        distributed.all_reduce(tensor)

    def measure(variant: str, size: int, repeats: int, warm_up: int) -> list[float]:
        nonlocal array, tensor
        if array is None or array.nbytes != size:
            array = rank.buffer(size)
            tensor = torch.from_numpy(array)
            rank.require_sum(array, reduce, options.rank, options.size)
        for _ in range(warm_up):
            reduce()
        seconds = []
        before = time.perf_counter()
        for _ in range(repeats):
            reduce()
            after = time.perf_counter()
            seconds.append(after - before)
            before = after
        return seconds

    session.serve(measure)


if __name__ == "__main__":
    main()
