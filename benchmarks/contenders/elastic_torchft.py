"""A rank of torchft in elastic.py: a loop with its manager, a replica group of one.

Gradients are reduced by the manager itself. After a death the hook of torchft 0.2.0's
`DistributedDataParallel` may end another rank, by an AssertionError.
"""

from __future__ import annotations

import rank
import torch
import torchft
from elastic_rank import Steps
from torch import distributed, nn

BATCH, COLUMNS = 32, 64


def main() -> None:
    parser = rank.parser()
    parser.add_argument("--number", type=int, required=True, help="of the replica")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = Steps(
        options.socket, options.number, f"torchft 0.2.0, torch {torch.__version__}"
    )
    module = nn.Sequential(nn.Linear(COLUMNS, 128), nn.ReLU(), nn.Linear(128, 1))
    adam = torch.optim.Adam(module.parameters())

    def load(state: dict) -> None:
        module.load_state_dict(state["model"])
        adam.load_state_dict(state["optimizer"])

    # The store of this replica group.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {
            "model": module.state_dict(),
            "optimizer": adam.state_dict(),
        },
        min_replica_size=1,
        rank=0,
        world_size=1,
        replica_id=f"replica_{options.number}",
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
    )
    optimizer = torchft.Optimizer(manager, adam)
    rows = torch.rand(BATCH, COLUMNS)
    step = -1
    while True:
        optimizer.zero_grad()
        nn.functional.mse_loss(module(rows), rows[:, :1]).backward()
        works = [manager.allreduce(each.grad) for each in module.parameters()]
        for work in works:
            work.wait()
        optimizer.step()
        # A step that it has given up does not count.
        if manager.current_step() > step:
            step = manager.current_step()
            steps.end(manager.num_participants())


if __name__ == "__main__":
    main()
