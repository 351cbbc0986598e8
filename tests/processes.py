"""Two gloo processes for a test, which cannot outlive it."""

import os
import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2


def run_two(body: Callable[..., None], *args: object, seconds: float = 120) -> None:
    """body(rank, *args) in each of two processes that form the default group; errors are raised."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.spawn(_process, (port, body, args), nprocs=WORLD, join=False)
    try:
        deadline = time.monotonic() + seconds
        while not context.join(timeout=1):  # returns whenever one process ends
            if time.monotonic() > deadline:
                raise TimeoutError(f"{body.__name__} still runs after {seconds} s")
    finally:
        for process in context.processes:
            process.kill()


def _process(rank: int, port: int, body: Callable[..., None], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    body(rank, *args)
    dist.barrier()
    # Without a word of farewell: gloo's threads can wait for each other forever as Python winds up.
    os._exit(0)
