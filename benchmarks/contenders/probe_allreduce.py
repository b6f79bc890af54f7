"""The ranks of the bare probe (probe.c) in allreduce.py."""

from __future__ import annotations

import ctypes
import mmap
import os

import rank

KINDS = ("ordinary", "stream_result", "stream_all")  # in the order of probe.c
SLOTS = (256 << 10, 512 << 10)
# Looks at a flag before the core goes to another rank, where ranks share cores.
SPINS_BEFORE_YIELDING = 10


def main() -> None:
    parser = rank.parser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--probe", required=True, help="probe.c, compiled")
    parser.add_argument("--memory", type=int, required=True, help="of a shared file")
    options = parser.parse_args()
    rank.bind(options.cores, options.rank)
    probe = ctypes.CDLL(options.probe)
    probe.probe_memory.restype = ctypes.c_int64
    probe.probe_vectors.restype = ctypes.c_char_p
    slots = map_slots(probe, options.memory, options.size)
    shares_cores = options.size > len(set(options.cores.split("/")))
    spins = SPINS_BEFORE_YIELDING if shares_cores else 0
    session = rank.Session(
        options.socket,
        options.rank,
        options.size,
        "probe with " + probe.probe_vectors().decode(),
    )
    array = None

    def seconds(kind: str, slot: int, repeats: int) -> list[float]:
        measured = (ctypes.c_double * repeats)()
        probe.time_probe(
            slots[slot],
            options.rank,
            options.size,
            ctypes.c_int64(slot),
            spins,
            KINDS.index(kind),
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_int64(array.size),
            repeats,
            measured,
        )
        return list(measured)

    def measure(variant: str, size: int, repeats: int, warm_up: int) -> list[float]:
        nonlocal array
        kind, slot_text = variant.split("/")
        slot = int(slot_text)
        if array is None or array.nbytes != size:
            array = rank.buffer(size)
            for each in KINDS:
                for slot_bytes in SLOTS:
                    rank.require_sum(
                        array,
                        lambda k=each, s=slot_bytes: seconds(k, s, 1),
                        options.rank,
                        options.size,
                    )
        seconds(kind, slot, warm_up)
        return seconds(kind, slot, repeats)

    session.serve(measure)


def map_slots(
    probe: ctypes.CDLL, descriptor: int, ranks: int
) -> dict[int, ctypes.Array]:
    """Maps the shared file; a part of it for each slot size."""
    lengths = [probe.probe_memory(ranks, ctypes.c_int64(slot)) for slot in SLOTS]
    pages = [-(-length // mmap.PAGESIZE) * mmap.PAGESIZE for length in lengths]
    if os.fstat(descriptor).st_size < sum(pages):
        raise ValueError(f"the shared file is too short: {sum(pages)} bytes are needed")
    memory = mmap.mmap(descriptor, sum(pages))
    parts = zip(pages, (0, pages[0]))
    return {
        slot: (ctypes.c_char * length).from_buffer(memory, offset)
        for slot, (length, offset) in zip(SLOTS, parts)
    }


if __name__ == "__main__":
    main()
