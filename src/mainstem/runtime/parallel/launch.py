"""Opens an engine: loads a model in one process or several, and starts and ends those.

    rank 0, this process   start -> load its part -> engine ............................. close -> join
    rank k, a child        start -> load its part -> engine, repeats the steps of rank 0 -> end

All parts of a forward meet in `torch.distributed`: gloo on CPUs, NCCL on GPUs. Its rendezvous is a file, and nothing
listens beyond loopback. A rank that ends, ends all: rank 0 watches its children, and they watch rank 0. So does a rank
that does not answer in time.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import DefaultContext, ForkContext, ForkServerContext, SpawnContext
from pathlib import Path

import torch

from mainstem.errors import BadArgument, MainstemError, RankFailed
from mainstem.runtime.engine import Engine
from mainstem.runtime.loop import EngineLoop
from mainstem.runtime.memory.tiers import open_store
from mainstem.runtime.models.loading import load_model
from mainstem.runtime.parallel.ranks import ANSWER_S, ONE_RANK, FirstRank, LaterRank, Peer, Ranks
from mainstem.runtime.readiness import check_machine
from mainstem.settings.engine import EngineConfig, ModelConfig

Context = DefaultContext | ForkContext | ForkServerContext | SpawnContext
Progress = Callable[[str, int, int], None]

_END_S = 10.0  # for a rank that closes its tiers when the engine ends; then it is killed
_LOOPBACK = "lo" if os.path.exists("/sys/class/net/lo") else "lo0"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SET = (*_INTERFACES, "LOCAL_RANK")


@dataclass(frozen=True, slots=True)
class _Spec:
    """The model and the engine that every rank opens."""

    name: str | None
    model: ModelConfig
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class _World:
    """The number of ranks, the folder in which they find each other, and how long one waits for another."""

    size: int
    folder: str
    answer_s: float


@contextmanager
def open_engine(
    name: str | None = None,
    model: ModelConfig = ModelConfig(),
    config: EngineConfig = EngineConfig(),
    *,
    progress: Progress | None = None,
    context: Context | None = None,
    answer_s: float = ANSWER_S,
) -> Iterator[Engine]:
    """Loads a model and opens its engine, with `config.tp` processes.

    Args:
        name: see `load_model`.
        model: how it is loaded.
        config: the settings of the engine.
        progress: see `load_model` and `Engine`.
        context: starts processes; None: "spawn", so the program needs the usual `if __name__ == "__main__"`.
        answer_s: seconds after which a process that does not answer has failed.

    Raises:
        BadArgument, UnsupportedModel, ModelNotFound: see `load_model` and `Engine`.
        RankFailed: a process has ended, or does not answer.
    """
    check_machine(config)
    spec = _Spec(name, model, config)
    if config.tp == 1:
        with computing_on(None), _engine(spec, ONE_RANK, progress) as engine:
            yield engine
        return
    with computing_on(None), _started(config.tp, context or multiprocessing.get_context("spawn"), answer_s) as ranks:
        try:
            ranks.share(lambda: spec)
            engine = _engine(spec, ranks, progress)
        except Exception as error:  # noqa: BLE001  # the end of another rank may be the cause
            cause = ranks.cause(error)
            raise cause from (None if cause is error else error)
        with engine:
            ranks.watch(engine.wake)
            yield engine


@contextmanager
def computing_on(threads: int | None) -> Iterator[None]:
    """Computes on so many threads, PyTorch's and the kernels'; None: as many as before. Undoes later changes, too."""
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def _engine(spec: _Spec, ranks: Ranks, progress: Progress | None = None) -> Engine:
    """Loads a rank's part of the model, and starts its engine."""
    model = spec.model
    if model.threads is not None:
        torch.set_num_threads(model.threads)
    with ExitStack() as undo:
        # First, because loading a model takes long.
        if (backend := open_store(spec.config.tiers, ranks)) is not None:
            undo.callback(backend.close)
        loaded = load_model(
            spec.name,
            dtype=model.dtype,
            max_context=model.max_context,
            quantization=model.quantization,
            progress=progress,
            ranks=ranks,
        )
        engine = Engine(loaded, spec.config, progress=progress, backend=backend)
        undo.pop_all()
        return engine


@contextmanager
def _started(size: int, context: Context, answer_s: float) -> Iterator[FirstRank]:
    """Starts the other ranks, and joins the group of `torch.distributed`; ends both."""
    if torch.distributed.is_initialized():
        raise BadArgument("tp", size, "1: this process belongs to a group of torch.distributed already")
    if torch.cuda.is_available() and size > torch.cuda.device_count():
        raise BadArgument("tp", size, f"at most {torch.cuda.device_count()}, the number of GPUs")
    with ExitStack() as stack:
        stack.enter_context(_environment())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mainstem-"))
        world = _World(size, folder, answer_s)
        peers = [_start(rank, world, context, stack) for rank in range(1, size)]
        _join(0, world)
        stack.callback(torch.distributed.destroy_process_group)
        yield FirstRank(peers, answer_s)


@contextmanager
def _environment() -> Iterator[None]:
    """Undoes what `_join` sets: groups that are made later read it too, so it stays until the ranks end."""
    before = {name: os.environ.get(name) for name in _SET}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _start(rank: int, world: _World, context: Context, stack: ExitStack) -> Peer:
    ours, theirs = context.Pipe()
    process = context.Process(target=_follow, args=(rank, world, theirs), name=f"mainstem-rank-{rank}")
    process.start()
    theirs.close()

    def end() -> None:
        ours.close()
        process.join(_END_S)
        process.kill()
        process.join()

    stack.callback(end)
    return Peer(rank, process, ours)


def _join(rank: int, world: _World) -> None:
    """Joins the group, whose members find each other by a file, and shares the cores with them."""
    if torch.cuda.is_available():
        os.environ["LOCAL_RANK"] = str(rank)  # transformers reads it
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world.size))
    os.environ.update(dict.fromkeys(_INTERFACES, _LOOPBACK))
    torch.distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"{Path(world.folder, 'rendezvous').as_uri()}",
        rank=rank,
        world_size=world.size,
        timeout=timedelta(seconds=world.answer_s),
    )


def _follow(rank: int, world: _World, pipe: Connection) -> None:
    """The process of a rank other than 0."""
    # They may be sent to all processes, but the others end when rank 0 has drained.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(world.folder,), daemon=True).start()
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s: rank {rank}: %(message)s")
    logging.getLogger(EngineLoop.__module__).disabled = True  # rank 0 says why the engine ends
    ranks = LaterRank(rank, world.size, pipe)
    try:
        _join(rank, world)
        spec = ranks.share(_not_here)
        _engine(spec, ranks).wait()
    except Exception as error:  # noqa: BLE001  # rank 0 raises it
        with suppress(RankFailed):  # rank 0 has ended
            ranks.leave(str(error) if isinstance(error, MainstemError) else f"{type(error).__name__}: {error}")
        os._exit(1)  # the end of an interpreter would wait for what cannot end


def _not_here() -> _Spec:
    raise AssertionError("rank 0 shares it")


def _end_with_parent(folder: str) -> None:
    """Ends this process when its parent has ended, whatever it waits for, and removes what a killed parent leaves."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
