"""Tries what the settings of an engine need of this machine, before a model is loaded, which takes long.

A store is opened then, too (`tiers.open_store`); what else can only be tried is tried here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

import torch

from mainstem.errors import BadArgument
from mainstem.here import Memory, machine_memory
from mainstem.imports import needs
from mainstem.settings.engine import EngineConfig
from mainstem.tiers.storage.calibrated import open_codec
from mainstem.units import show_bytes

log = logging.getLogger(__name__)


def memory_of(device: torch.device | str) -> Memory:
    """Returns the memory of a device.

    Raises:
        OSError: the system does not report it.
    """
    if torch.device(device).type != "cuda":
        return machine_memory()
    free, total = torch.cuda.mem_get_info(device)
    return Memory(total, free)


def check_machine(config: EngineConfig, memory: Callable[[str], Memory] = memory_of) -> None:
    """Tries what the settings need of this machine.

    Args:
        config: the settings.
        memory: returns that of "cuda" or "cpu".

    Raises:
        BadArgument: an address cannot be bound, a size exceeds the memory, or a file is no calibration.
        BackendUnavailable: a package is missing.
    """
    for name, value, packages in _packages(config):
        for package, extra in packages if value else ():
            with needs(package, f"{_flag(name)} needs {package}: pip install 'mainstem[{extra}]'"):
                import_module(package)
    for name, address in _addresses(config):
        _check_address(name, address)
    open_codec(config.tiers.storage_codec)
    _check_memory(config, memory)


def too_large(name: str, size: int, device: torch.device | str) -> BadArgument:
    """Returns the error of a size whose memory could not be allocated on a device."""
    try:
        there = _described(memory_of(device))
    except OSError:
        there = f"{device} has less"
    return BadArgument(name, show_bytes(size), f"memory that can be allocated: {there}")


def _described(memory: Memory) -> str:
    return f"of {show_bytes(memory.total)}, {show_bytes(memory.free)} are free"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _packages(config: EngineConfig) -> Sequence[tuple[str, object, Sequence[tuple[str, str]]]]:
    """Returns settings, their values, and the packages and extras that they need unless they are empty."""
    peers = config.tiers.peers
    return (
        ("kv_events", config.events.kv_events, (("zmq", "events"), ("msgspec", "events"))),
        ("peer_listen", peers.peer_listen, (("zmq", "events"), ("blake3", "storage"))),
        ("peers", peers.peers, (("zmq", "events"), ("blake3", "storage"))),
        ("storage", config.tiers.storage, (("blake3", "storage"),)),
    )


def _addresses(config: EngineConfig) -> Iterator[tuple[str, str]]:
    """Yields the settings that name an address to listen on, and the address."""
    for own, names in ((config.events, ("kv_events", "kv_events_replay")), (config.tiers.peers, ("peer_listen",))):
        for name in names:
            if (address := getattr(own, name)) is not None:
                yield name, address


def _check_address(name: str, address: str) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.ROUTER) as tried:
        tried.setsockopt(zmq.IPV6, "[" in address)
        try:
            tried.bind(f"tcp://{address.removeprefix('tcp://')}")
        except zmq.ZMQError as error:
            raise BadArgument(name, address, f"an address of this machine, with a free port: {error}") from None


def _check_memory(config: EngineConfig, memory: Callable[[str], Memory]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = [("host_bytes", "cpu", config.tiers.size.host_bytes or 0)]
    if config.pages is None:
        sizes.insert(0, ("kv_bytes", device, config.kv_bytes))
    taken = dict.fromkeys(("cuda", "cpu"), 0)
    for name, where, size in sizes:
        try:
            there = memory(where)
        except OSError:  # it is not known: an allocation may fail later
            continue
        ranks = config.tp if where == "cpu" else 1  # each has as much, and those on GPUs have one each
        left = (there.total - taken[where]) // ranks
        if size > left:
            beside = f", less {show_bytes(taken[where])} for other pages" if taken[where] else ""
            each = f", for each of {ranks} processes" if ranks > 1 else ""
            raise BadArgument(name, show_bytes(size), f"at most {show_bytes(left)}{each}: {_described(there)}{beside}")
        taken[where] += size * ranks
        if taken[where] > there.free:
            log.warning(
                "%s %s: pages may take more memory than is free: %s", _flag(name), show_bytes(size), _described(there)
            )
