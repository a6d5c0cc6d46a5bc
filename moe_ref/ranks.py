"""Processes of this machine that work together: started, listened to, and ended."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from moe_ref.errors import MoeRefError, RankError

__all__ = ["run_ranks"]

GRACE_S: Final = 10.0
"""How long a process may take to end [s]."""

Result = TypeVar("Result")


def run_ranks(
    worker: Callable[..., Result],
    ranks: int,
    *args: Any,
    threads: int = 1,
    timeout_s: float = 600.0,
) -> list[Result]:
    """Run a function in several new processes of this machine, as the ranks of one gloo group.

    The processes find each other by a temporary file and talk over the loopback interface. When a
    rank fails or dies, the others are ended.

    Parameters
    ----------
    worker : callable
        Called as ``worker(rank, *args)`` in each process. It is sent there by its name, so it
        stands in a module; arguments and results are pickled.
    ranks : int
        Processes to start.
    *args : object
        What each of them gets.
    threads : int
        Of torch, in each process.
    timeout_s : float
        How long a rank waits for the others in one collective until it fails [s].

    Returns
    -------
    list
        What the worker returned in each rank.

    Raises
    ------
    MoeRefError
        Fewer than one rank or thread.
    RankError
        A rank that raised, with its traceback as a note, or that ended without a result.
    """
    for name, value in (("ranks", ranks), ("threads", threads)):
        if value < 1:
            raise MoeRefError(f"{name}={value} must be at least 1; nearest: 1.")
    # by value: what multiprocessing pickles shares the memory of tensors among the ranks
    work = pickle.dumps((worker, args))
    context = multiprocessing.get_context("spawn")
    processes: list[Any] = []
    links: list[Connection] = []
    with TemporaryDirectory() as folder:
        try:
            for rank in range(ranks):
                link, far_end = context.Pipe()
                links.append(link)
                place = _Place(Path(folder) / "ranks", rank, ranks, threads, timeout_s)
                process = context.Process(target=_serve, args=(far_end, place, work), daemon=True)
                process.start()
                processes.append(process)
                far_end.close()
            return _listen(links, processes)
        except BaseException:
            for process in processes:
                process.terminate()
            raise
        finally:
            for link in links:
                link.close()
            for process in processes:
                _end(process)


@dataclass(frozen=True)
class _Place:
    """What a process must know to be a rank; ``path`` is the file by which ranks meet."""

    path: Path
    rank: int
    ranks: int
    threads: int
    timeout_s: float


def _serve(link: Connection, place: _Place, work: bytes) -> None:
    """Be one rank: send a result or an error, and stay until the caller hangs up.

    A rank that left at once would break the connections of the others, and their errors would hide
    its own.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends its ranks
    try:
        _join(place)
        worker, args = pickle.loads(work)
        answer = pickle.dumps((True, worker(place.rank, *args)))
    except Exception as error:  # whatever a rank fails by, the caller is told
        said = "".join(traceback.format_exception_only(error)).strip()
        answer = pickle.dumps((False, (said, traceback.format_exc())))
    with suppress(OSError):  # a caller that hung up before
        link.send_bytes(answer)
        link.poll(None)
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(place: _Place) -> None:
    """Join the group of the ranks."""
    torch.set_num_threads(place.threads)
    _use_loopback()
    dist.init_process_group(
        "gloo",
        init_method=place.path.as_uri(),
        rank=place.rank,
        world_size=place.ranks,
        timeout=timedelta(seconds=place.timeout_s),
    )


def _use_loopback() -> None:
    """Bind gloo to the loopback interface, by the name that it has here."""
    names = {name for _, name in socket.if_nameindex()}
    found = [name for name in ("lo", "lo0") if name in names]
    if found:
        os.environ["GLOO_SOCKET_IFNAME"] = found[0]


def _listen(links: list[Connection], processes: list[Any]) -> list[Any]:
    """Return the results of all ranks, or raise for the first rank that has none."""
    results: dict[int, Any] = {}
    while len(results) < len(links):
        ready = wait([link for rank, link in enumerate(links) if rank not in results])
        failed: list[tuple[int, str, str]] = []
        for rank, link in enumerate(links):
            if link not in ready:
                continue
            try:
                done, answer = link.recv()
            except (EOFError, OSError):  # its death comes before what the others say of it
                processes[rank].join(timeout=GRACE_S)
                raise RankError(
                    f"rank {rank} ended without a result, with exit code "
                    f"{processes[rank].exitcode}."
                ) from None
            if done:
                results[rank] = answer
            else:
                failed.append((rank, *answer))
        for rank, said, trace in failed:
            error = RankError(f"rank {rank} failed: {said}")
            error.add_note(trace)
            raise error
    return [results[rank] for rank in range(len(links))]


def _end(process: Any) -> None:
    """Wait for a process that was hung up on or terminated, and kill it where it stays."""
    process.join(timeout=GRACE_S)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
