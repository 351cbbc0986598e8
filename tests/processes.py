"""Run a test body in two gloo processes that end with the test."""

import os
import socket
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2
# Seconds after which a test that waits for a process fails. It ends a deadlock, and is far above
# what a busy machine needs.
DEADLOCK = 900.0


def run_two(body: Callable[..., None], *args: object, seconds: float = DEADLOCK) -> None:
    """Run body(rank, *args) in two processes of one process group; raises their errors."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.spawn(_process, (port, body, args), nprocs=WORLD, join=False)
    try:
        deadline = time.monotonic() + seconds
        while not context.join(timeout=1):  # returns when one process ends
            if time.monotonic() > deadline:
                raise TimeoutError(f"{body.__name__} did not finish within {seconds} s")
    finally:
        for process in context.processes:
            process.kill()


def _process(rank: int, port: int, body: Callable[..., None], args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    body(rank, *args)
    dist.barrier()
    # Skip the interpreter's shutdown, in which gloo's threads can deadlock.
    os._exit(0)
