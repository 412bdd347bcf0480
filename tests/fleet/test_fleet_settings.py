"""Settings of a fleet: read from a mapping, checked by the classes that `mainstem serve` has, with one clear line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mainstem.errors import BadArgument
from mainstem.settings.engine import EngineConfig
from mainstem.settings.fleet import Autoscaling, FleetConfig, PrefillSize, read_fleet
from mainstem.settings.mapping import names_of, read_settings
from mainstem.settings.server import ServerConfig

OWN = "shared+file:/own"


def read(given: Any, **environment: str) -> FleetConfig:
    return read_fleet(given, environment, Path("/"), OWN)


def test_without_a_file_all_is_at_its_default() -> None:
    config = read(None)
    assert (config.replicas, config.host, config.port) == (2, "127.0.0.1", 8000)
    assert config.engine.tiers.storage == OWN
    assert config.engine.tiers.warm


def test_settings_are_those_of_a_server_and_written_as_its_flags() -> None:
    config = read(
        {
            "replicas": 3,
            "gpus": 0.5,
            "engine": {"kv-bytes": "64MiB", "page_size": 32, "warm": False, "prefetch": "wait_complete"},
            "server": {"api_key": ["a", "b"], "drain_timeout_s": 5, "image_folder": "/"},
            "load": {"dtype": "float32"},
            "adapters": {"french": "/tmp"},
            "store": "file:/kv",
        }
    )
    assert config.engine.kv_bytes == 64 << 20
    assert (config.engine.page_size, config.engine.tiers.warm) == (32, False)
    assert config.engine.tiers.limits.prefetch == "wait_complete"
    assert config.server.api_key == ("a", "b")
    assert config.server.images.image_folder == Path("/")
    assert config.load.dtype == "float32"
    assert config.adapters == (("french", "/tmp"),)
    assert config.engine.tiers.storage == "shared+file:/kv"


def test_a_store_may_be_left_out() -> None:
    assert read({"store": "none"}).engine.tiers.storage is None
    assert read({"store": "redis://a:1/0"}).engine.tiers.storage == "redis://a:1/0"


def test_secrets_come_from_the_environment_unless_they_are_given() -> None:
    config = read(None, MAINSTEM_API_KEY="a b", MAINSTEM_STORAGE_SECRET="s" * 16)
    assert config.server.api_key == ("a", "b")
    assert config.engine.tiers.storage_secret == b"s" * 16
    assert read({"server": {"api_key": ["c"]}}, MAINSTEM_API_KEY="a").server.api_key == ("c",)
    assert "s" * 16 not in repr(config)


def test_replicas_are_peers_where_they_can_be() -> None:
    given = {"MAINSTEM_STORAGE_SECRET": "s" * 16}
    peers = read({"node_host": "10.0.0.2"}, **given).engine_at("10.0.0.2").tiers.peers
    assert (peers.peer_listen, peers.peers_later, peers.peers) == ("10.0.0.2:0", True, ())
    assert read(None).engine_at("::1").tiers.peers.peer_listen == "[::1]:0"
    assert read({"store": "none"}).engine_at("127.0.0.1").tiers.peers.exist
    for alone in ({"peers": False}, {"engine": {"storage-codec": "int8"}}, {"engine": {"tp": 2}}):
        assert not read(alone).engine_at("127.0.0.1").tiers.peers.exist
    assert read({"engine": {"peer_share": 0.5}}).engine.tiers.peers.peer_share == 0.5
    events = read(None).engine_at("127.0.0.1").events
    assert (events.kv_events, events.kv_events_replay) == ("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"peers": True, "engine": {"storage_codec": "int8"}},
            "engine.storage_codec = 'int8': must be none with peers",
        ),
        ({"peers": True, "engine": {"tp": 2}}, "engine.tp = 2: must be 1 with peers"),
        ({"peers": "yes"}, "peers = 'yes': must be True or False"),
        ([1], "fleet file = [1]: must be a mapping"),
        ({"replica": 1}, "replica = '(not a setting)': must be replicas"),
        ({"engine": {"kv_byte": 1}}, "engine.kv_byte = '(not a setting)': must be kv_bytes"),
        ({"engine": {"kv_bytes": "many"}}, "engine.kv_bytes = 'many': must be bytes"),
        ({"engine": {"page_size": 0}}, "engine.page_size = 0: must be an integer from 1"),
        ({"engine": 3}, "engine = 3: must be a mapping"),
        ({"engine": {"storage": "file:x"}}, "engine.storage = 'file:x': must be left out"),
        ({"engine": {"kv_events": "tcp://127.0.0.1:1"}}, "engine.kv_events"),
        ({"engine": {"peer_listen": "127.0.0.1:1"}}, "engine.peer_listen"),
        ({"server": {"port": 9}}, "server.port = 9: must be left out"),
        ({"server": {"record": "x"}}, "server.record"),
        ({"replicas": 0}, "replicas = 0: must be an integer from 1 to 1024"),
        ({"port": 0}, "port = 0: must be 1 to 65535"),
        ({"autoscaling": {"min": 3, "max": 2}}, "autoscaling.min = 3: must be at most max, which is 2"),
        ({"autoscaling": {"mim": 3}}, "autoscaling.mim = '(not a setting)': must be min"),
        ({"autoscaling": {}, "replicas": 3}, "replicas = 3: must be left out with autoscaling"),
        ({"adapters": ["x"]}, "adapters = ['x']: must be a mapping"),
        ({"engine": {"role": "prefill"}}, "engine.role = 'prefill': must be left out: the fleet has `prefill`"),
        ({"server": {"prefill_url": "http://a:1"}}, "server.prefill_url = 'http://a:1': must be left out"),
        ({"prefill": {"replica": 1}}, "prefill.replica = '(not a setting)': must be replicas"),
        ({"prefill": {"replicas": 0}}, "prefill.replicas = 0: must be an integer from 1 to 1024"),
        ({"prefill": {}, "peers": False}, "peers = False: must be on with `prefill`"),
        ({"prefill": {}, "engine": {"storage_codec": "int8"}}, "peers = False: must be on with `prefill`"),
        ({"prefill": {}, "engine": {"write_policy": "write_back"}}, "write_policy = 'write_back': must be"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(given: Any, said: str) -> None:
    with pytest.raises(BadArgument) as raised:
        read(given)
    assert str(raised.value).startswith(said)


def test_more_than_the_machine_has_is_refused() -> None:
    read({"cpus": 2}).check_room(4, 0)
    with pytest.raises(BadArgument, match=r"cpus = 3: must be at most 2 for 2 replicas: this machine has 4"):
        read({"cpus": 3}).check_room(4, 0)
    with pytest.raises(BadArgument, match=r"gpus = 1: must be at most 0.5 for 2 replicas: this machine has 1"):
        read({"gpus": 1}).check_room(4, 1)
    assert read({"autoscaling": {"max": 8}}).most_replicas == 8
    assert read({"autoscaling": {}}).autoscaling == Autoscaling()
    with pytest.raises(BadArgument, match=r"at most 0\.8 for 5 replicas: this machine has 4"):
        read({"cpus": 1, "prefill": {"replicas": 3}}).check_room(4, 0)


def test_some_replicas_may_compute_prompts_for_the_others() -> None:
    config = read({"replicas": 3, "prefill": {"replicas": 2, "min_bytes": 10, "timeout_s": 5}})
    assert config.prefill == PrefillSize(replicas=2, min_bytes=10, timeout_s=5)
    assert (config.replicas, config.most_replicas) == (3, 5)
    assert (config.engine_at("127.0.0.1").role, config.engine_at("127.0.0.1", "prefill").role) == ("both", "prefill")
    assert read({"prefill": {}}).prefill == PrefillSize() and read(None).prefill is None


def test_every_flag_is_a_name() -> None:
    assert {"kv_bytes", "storage", "host_bytes", "max_running"} <= names_of(EngineConfig)
    assert {"api_key", "image_http", "record_text"} <= names_of(ServerConfig)
    assert read_settings(EngineConfig, None) == EngineConfig()
