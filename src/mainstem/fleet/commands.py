"""The `mainstem fleet` commands, which `mainstem.cli` mounts. Arguments and printing, nothing else.

Examples:

  mainstem fleet up --replicas 2
  mainstem fleet up fleet.yaml
  mainstem fleet status --json
  mainstem fleet scale 4
  mainstem fleet drain REPLICA
  mainstem fleet down

docs/fleet.md lists what fleet.yaml may hold. A second `up` changes the fleet that runs, replica by replica.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from mainstem.errors import BadArgument
from mainstem.here import listen
from mainstem.settings.flags import command, group
from mainstem.terminal import say

if TYPE_CHECKING:
    from mainstem.fleet.place import Place, Record
    from mainstem.settings.fleet import FleetConfig


JsonFlag = Annotated[bool, Parameter(name="json", negative="", help="Print one JSON object.")]
PrefillFlag = Annotated[bool, Parameter(negative="", help="Of those that compute prompts alone.")]

fleet = group("fleet", __doc__, help="Run many engines at one address, with Ray Serve.")


@command(fleet)
def up(
    file: Path | None = None,
    *,
    model: str | None = None,
    replicas: int | None = None,
    host: str | None = None,
    port: int | None = None,
    store: str | None = None,
    json: JsonFlag = False,
) -> None:
    """Start a fleet, or change the one that runs: replica by replica, so that no request is lost.

    Args:
        file: YAML file of settings, see docs/fleet.md. Without one, all are at their defaults.
        model: A folder, a .gguf file or a Hugging Face name. Default: SmolLM2-135M-Instruct.
        replicas: Number of engines. Default: 2.
        host: Address of the front. Default: 127.0.0.1.
        port: Port of the front. Default: 8000.
        store: Store that all replicas share, or none. Default: a folder of this user.

    Examples:

      mainstem fleet up --replicas 2
      mainstem fleet up fleet.yaml --port 9000
    """
    from mainstem.fleet.place import MARK, Place, Record, end_all, read_file, secrets_of
    from mainstem.owner.start import absolute

    place = Place.default()
    content = read_file(file)
    flags = {"model": model, "replicas": replicas, "host": host, "port": port, "store": store}
    config = _config(content, flags, secrets_of(os.environ, place), Path.cwd() if file is None else file.parent, place)
    tiers = config.engine.tiers
    if tiers.storage is not None:
        config = replace(config, engine=replace(config.engine, tiers=replace(tiers, storage=absolute(tiers.storage))))
    cores, gpus = len(os.sched_getaffinity(0)), _gpus()
    if config.address is None:
        config.check_room(cores, gpus)
    with place.changing():
        running = _alive(place)
        serving = _serving(place, "" if running is None else running.mark)
        url = f"http://{_shown_host(config.host)}:{config.port}/v1"
        if running is None:
            listen(config.host, config.port).close()
        elif running.url != url:
            raise BadArgument("port", url, f"that of the fleet that runs, {running.url}: end it with `down` first")
        _find_model(config)
        mark = running.mark if running is not None else "" if config.address is not None else secrets.token_hex(8)
        try:
            if running is not None:
                address = running.address
            elif config.address is not None:
                address = config.address
            else:
                say("starting Ray")
                address = place.start_ray(config, cores, gpus, mark)
            os.environ[MARK] = mark
            serving.connect(address)
            record = Record(address, url, mark, config.most_replicas)
            place.write(record)
            serving.deploy(config, cores, say)
            serving.disconnect()
        except BaseException:
            if running is None:  # nothing stays that is half started
                serving.shut_down()
                end_all(mark)
                place.write(None)
            raise
    _print({"url": record.url, "address": record.address, "replicas": config.replicas}, json)


@command(fleet)
def status(*, json: JsonFlag = False) -> None:
    """Show the replicas, and how many requests each of them answered.

    Examples:

      mainstem fleet status
      mainstem fleet status --json
    """
    with _connected() as (record, serving, _):
        _print({"url": record.url, **serving.status()}, json)


@command(fleet)
def scale(replicas: int, *, prefill: PrefillFlag = False, timeout_s: float = 600.0, json: JsonFlag = False) -> None:
    """Change the number of replicas. Those that go finish their requests, and write to the store what it lacks.

    Args:
        replicas: How many there shall be; 1 or more.
        timeout_s: Seconds to wait for it.

    Examples:

      mainstem fleet scale 4
      mainstem fleet scale 2 --prefill
    """
    if not 1 <= replicas <= 1024:
        raise BadArgument("replicas", replicas, "an integer from 1 to 1024")
    with _connected() as (record, serving, place), place.changing():
        if prefill:
            serving.scale(replicas, timeout_s, serving.PREFILL)
        else:
            serving.scale(replicas, timeout_s)
            place.write(replace(record, replicas=replicas))
        _print({"url": record.url, **serving.status()}, json)


@command(fleet)
def drain(replica: str | None = None, *, timeout_s: float = 60.0, json: JsonFlag = False) -> None:
    """Let requests end: those of one replica, whose place another one takes, or all.

    Args:
        replica: A replica, as `status` names it. Without one, the front refuses new requests, and those under way end.
        timeout_s: Seconds to wait for the end of all requests.

    Examples:

      mainstem fleet drain REPLICA
      mainstem fleet drain --timeout-s 120
    """
    with _connected() as (_, serving, place), place.changing():
        if replica is not None:
            serving.renew(replica)
            _print({"drained": replica}, json)
        else:
            _print({"drained": serving.drain(timeout_s)}, json)


@command(fleet)
def down(*, timeout_s: float = 60.0, json: JsonFlag = False) -> None:
    """End the fleet: requests under way end first, and what the store lacks is written.

    Args:
        timeout_s: Seconds to wait for the end of all requests.

    Examples:

      mainstem fleet down
      mainstem fleet down --timeout-s 5
    """
    from mainstem.fleet.place import FleetError, Place, end_all

    place = Place.default()
    with place.changing():
        record = _known(place)
        drained = False
        try:
            serving = _serving(place, "")
            serving.connect(record.address)
            drained = serving.drain(timeout_s)
            serving.shut_down()
        except FleetError as error:
            say(f"the fleet does not answer: {error}")
        ended = end_all(record.mark)
        place.write(None)
    _print({"drained": drained, "processes": ended}, json)


# ---------------------------------------------------------------- parts


def _config(
    content: object, flags: Mapping[str, object], environment: Mapping[str, str], folder: Path, place: Place
) -> FleetConfig:
    from mainstem.settings.fleet import read_fleet

    if content is not None and not isinstance(content, Mapping):
        raise BadArgument("fleet file", content, "a mapping of names and values")
    overrides = {name: value for name, value in flags.items() if value is not None}
    return read_fleet({**(content or {}), **overrides}, environment, folder, place.own_store)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _find_model(config: FleetConfig) -> None:
    """Downloads the model once, before all replicas look for it."""
    from mainstem.runtime.models.loading import load_tokenizer

    load_tokenizer(config.model, config.load.max_context)


def _serving(place: Place, mark: str) -> Any:
    """Imports the module that talks to Ray, after setting the environment that Ray reads at its import."""
    os.environ.update(place.environment(mark))
    from mainstem.fleet import serving

    return serving


def _known(place: Place) -> Record:
    from mainstem.fleet.place import FleetError

    record = place.read()
    if record is None:
        raise FleetError("no fleet runs here: start one with `mainstem fleet up`")
    return record


def _alive(place: Place) -> Record | None:
    """Returns the fleet that runs; what is left of one that has ended is cleared away."""
    from mainstem.fleet.place import end_all, marked

    record = place.read()
    if record is None or not record.mark or len(marked(record.mark)) > 1:
        return record
    end_all(record.mark)
    place.write(None)
    return None


@contextmanager
def _connected() -> Iterator[tuple[Record, Any, Place]]:
    from mainstem.fleet.place import Place

    place = Place.default()
    record = _known(place)
    serving = _serving(place, "")
    serving.connect(record.address)
    try:
        yield record, serving, place
    finally:
        serving.disconnect()


def _shown_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _print(values: Mapping[str, Any], json: bool) -> None:
    if json:
        print(dumps(values, ensure_ascii=False))
        return
    for name, value in values.items():
        if isinstance(value, Mapping):
            print(f"{name}:")
            for key, each in value.items():
                words = " ".join(f"{k}={v}" for k, v in each.items()) if isinstance(each, Mapping) else each
                print(f"  {key:12} {words}")
        else:
            print(f"{name:12} {value}")
