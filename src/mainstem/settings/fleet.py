"""The settings of a fleet: its replicas, their number, and the address of the front.

model: ./my-model                   # as for `mainstem serve`
replicas: 2
cpus: 4                             # for each replica
port: 8000
store: file:/srv/kv?capacity=64GiB  # shared by all replicas
engine: {kv_bytes: 4GiB}            # the engine's flags of `mainstem serve`
server: {api_key: [secret]}         # the server's
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mainstem.errors import BadArgument
from mainstem.settings.engine import EngineConfig, ModelConfig, Role
from mainstem.settings.fields import INT64_MAX, Range, Settings, instance, integer, number, seconds, setting, switch
from mainstem.settings.mapping import read_settings
from mainstem.settings.server import PrefillConfig, ServerConfig

NO_STORE = "none"
ANY_PORT = "127.0.0.1:0"
_EVENTS = f"tcp://{ANY_PORT}"
_REPLICAS, _MOST_REPLICAS = 2, 1024


@dataclass(frozen=True)
class Autoscaling(Settings):
    """The number of replicas, by the load.

    Args:
        min: The fewest replicas; 1 or more.
        max: The most replicas.
        target_ongoing: Running requests of each replica at which another replica is started; above 0.
        min_hit_rate: Part of the prompts' tokens that should be found, up to 1. Another replica is started if fewer are
            found and pages are evicted. Default: hits do not count.
        window_s: Seconds over which hits and evictions are counted.
    """

    min: int = setting(1, integer(1, _MOST_REPLICAS))
    max: int = setting(4, integer(1, _MOST_REPLICAS))
    target_ongoing: float = setting(8.0, number(0, above=True))
    min_hit_rate: float | None = setting(None, number(0, 1, above=True))
    window_s: float = setting(60.0, seconds(above=True))

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        if self.min > self.max:
            raise BadArgument("min", self.min, f"at most max, which is {self.max}")


@dataclass(frozen=True)
class PrefillSize(Settings):
    """Replicas that compute prompts, for those that answer.

    Args:
        replicas: How many there are, beside the others; 1 or more.
        min_bytes: A request with a shorter body is computed by the replica that answers it.
        timeout_s: Seconds that this may take; the replica that answers computes the rest. Above 0.
    """

    replicas: int = setting(1, integer(1, _MOST_REPLICAS))
    min_bytes: int = setting(PrefillConfig.prefill_min_bytes, integer(0, INT64_MAX))
    timeout_s: float = setting(PrefillConfig.prefill_timeout_s, seconds(above=True))


def _are_adapters(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) and isinstance(path, str) for name, path in value)


@dataclass(frozen=True)
class FleetSize(Settings):
    """How large a fleet is, and where it is found.

    Args:
        model: A folder, a .gguf file or a Hugging Face name. Default: SmolLM2-135M-Instruct.
        replicas: How many engines there are; 1 or more.
        cpus: Cores of each replica; above 0. Default: the machine's cores, divided by the replicas.
        gpus: GPUs of each replica, 0 or more; a fraction shares one.
        host: Address of the front. The default is reachable from this machine only, 0.0.0.0 from everywhere.
        port: Port of the front, 1 to 65535.
        store: Store that all replicas share, or none. Default: a folder of this user.
        peers: Whether replicas read pages in the memory of others. Default: if they can, which needs no
            `engine.storage_codec` and one process each.
        node_host: Address of this machine at which Ray's processes listen. The default is this machine only.
        address: HOST:PORT of a Ray cluster that runs already. Default: one is started here.
        warm_timeout_s: Seconds for which a new replica reads hot prefixes from the store before it gets requests.
        start_timeout_s: Seconds for all replicas to start.
    """

    model: str | None = setting(None, instance(str, "a folder, a .gguf file or a name"))
    replicas: int = setting(_REPLICAS, integer(1, _MOST_REPLICAS))
    cpus: float | None = setting(None, number(0, above=True))
    gpus: float = setting(0.0, number(0))
    host: str = setting("127.0.0.1", instance(str, "an address"))
    port: int = setting(8000, Range("1 to 65535", integer(1, 65535).holds))
    store: str | None = setting(None, instance(str, "a store, see docs/storage.md, or none"))
    peers: bool | None = setting(None, switch())
    node_host: str = setting("127.0.0.1", instance(str, "an address"))
    address: str | None = setting(None, Range("HOST:PORT", lambda text: isinstance(text, str) and ":" in text))
    warm_timeout_s: float = setting(30.0, seconds())
    start_timeout_s: float = setting(600.0, seconds(above=True))


@dataclass(frozen=True)
class FleetConfig(FleetSize):
    """The settings of a fleet.

    Args:
        adapters: LoRA adapters as pairs of name and path.
        autoscaling: How the number of replicas follows the load; None: it is `replicas`.
        prefill: Replicas that compute prompts alone; None: each one computes those that it answers.
        load: How the model is loaded.
        engine: The settings of each engine, without its store and the addresses of its events.
        server: The settings of each server, without its address and recording.
    """

    adapters: tuple[tuple[str, str], ...] = setting((), Range("a mapping of names and folders", _are_adapters))
    autoscaling: Autoscaling | None = setting(None, instance(Autoscaling, "a mapping of min, max and target_ongoing"))
    prefill: PrefillSize | None = setting(None, instance(PrefillSize, "a mapping of replicas and min_bytes"))
    load: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()

    def __post_init__(self) -> None:
        """Checks every field, and that nothing is given that the fleet sets for each replica."""
        super().__post_init__()
        if self.autoscaling is not None and self.replicas != _REPLICAS:
            raise BadArgument("replicas", self.replicas, "left out with autoscaling, which has min and max")
        fixed = (
            ("server.host", self.server.host, ServerConfig.host, "the fleet has `host`"),
            ("server.port", self.server.port, ServerConfig.port, "the fleet has `port`"),
            ("server.record", self.server.record.record, None, "several replicas cannot write one file"),
            ("engine.kv_events", self.engine.events.kv_events, None, "the fleet sets it for each replica"),
            ("engine.role", self.engine.role, EngineConfig.role, "the fleet has `prefill`"),
            ("server.prefill_url", self.server.prefill.prefill_url, None, "the fleet has `prefill`"),
        )
        for name, value, default, why in fixed:
            if value != default:
                raise BadArgument(name, value, f"left out: {why}")
        if self.prefill is not None:
            if self.engine.tiers.peers.peer_listen is None:
                why = "with `prefill`: its pages are read by peers, which need tp 1 and no storage_codec"
                raise BadArgument("peers", bool(self.peers), f"on {why}")
            self.engine_at("127.0.0.1", "prefill")  # which checks that settings and role agree

    @property
    def on_this_machine(self) -> bool:
        """Whether only the front, if anything, can be reached from another machine."""
        return self.node_host == "127.0.0.1" and self.address is None

    def engine_at(self, host: str, role: Role = "both") -> EngineConfig:
        """Returns the settings of a replica with a role; other replicas reach it at `host`."""
        events = replace(self.engine.events, kv_events=_EVENTS, kv_events_replay=_EVENTS)
        engine = replace(self.engine, events=events, role=role)
        peers = engine.tiers.peers
        if peers.peer_listen is None:
            return engine
        listen = f"[{host}]:0" if ":" in host else f"{host}:0"
        return replace(engine, tiers=replace(engine.tiers, peers=replace(peers, peer_listen=listen, peers_later=True)))

    @property
    def most_replicas(self) -> int:
        """How many replicas there may be, with those that compute prompts alone."""
        answering = self.replicas if self.autoscaling is None else self.autoscaling.max
        return answering + (0 if self.prefill is None else self.prefill.replicas)

    def cpus_of(self, cores: int) -> float:
        """Returns the cores of each replica on a machine with so many."""
        return self.cpus if self.cpus is not None else max(cores / self.most_replicas, 0.01)

    def check_room(self, cores: int, gpus: int) -> None:
        """Checks that all replicas fit a machine.

        Raises:
            BadArgument: they do not; it names what there is too little of.
        """
        for name, one, there in (("cpus", self.cpus_of(cores), cores), ("gpus", self.gpus, gpus)):
            if one * self.most_replicas > there + 1e-6:
                share = f"at most {there / self.most_replicas:g}"
                raise BadArgument(name, one, f"{share} for {self.most_replicas} replicas: this machine has {there}")


def read_fleet(given: object, environment: Mapping[str, str], folder: Path, own_store: str) -> FleetConfig:
    """Makes the settings of a fleet from the content of its file.

    Args:
        given: what the file holds; None: nothing.
        environment: where secrets that are not given are looked up.
        folder: where relative paths of models and adapters begin.
        own_store: the store of a fleet that names none.

    Raises:
        BadArgument: it is no mapping, a name is unknown, or a value is outside its range; the error names it.
    """
    own = _mapping("fleet file", given)
    engine, adapters = _mapping("engine", own.pop("engine", None)), _mapping("adapters", own.pop("adapters", None))
    scaling, prefill, load, server = (own.pop(name, None) for name in ("autoscaling", "prefill", "load", "server"))
    size = read_settings(FleetSize, own)
    if "storage" in engine:
        raise BadArgument("engine.storage", engine["storage"], "left out: the fleet has `store`")
    if listen := engine.get("peer_listen", engine.get("peer-listen")):
        raise BadArgument("engine.peer_listen", listen, "left out: replicas cannot share one address")
    alone = engine.get("storage_codec", engine.get("storage-codec", "none")) != "none" or engine.get("tp", 1) != 1
    if size.peers or (size.peers is None and not alone):
        engine = {**engine, "peer_listen": ANY_PORT}
    if (store := size.store or own_store) != NO_STORE:
        engine = {"warm": True, **engine, "storage": _shared(store)}
    model = None if size.model is None else _path(size.model, folder)
    return FleetConfig(
        **{**vars(size), "model": model},
        adapters=tuple((str(name), _path(str(path), folder)) for name, path in adapters.items()),
        autoscaling=None if scaling is None else read_settings(Autoscaling, scaling, "autoscaling."),
        prefill=None if prefill is None else read_settings(PrefillSize, prefill, "prefill."),
        load=read_settings(ModelConfig, load, "load."),
        engine=read_settings(EngineConfig, engine, "engine.", environment),
        server=read_settings(ServerConfig, server, "server.", environment),
    )


def _mapping(name: str, value: object) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise BadArgument(name, value, "a mapping of names and values")
    return dict(value or {})


def _shared(store: str) -> str:
    """Returns the store as several processes open it: one owner has a folder open for all of a machine."""
    return f"shared+{store}" if store.startswith("file:") else store


def _path(name: str, folder: Path) -> str:
    """Returns the absolute path of a file that exists, else the name: replicas have other working folders."""
    path = folder / Path(name).expanduser()
    return os.path.realpath(path) if path.exists() else name
