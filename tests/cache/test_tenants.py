"""Tenants of a server: the file that names them, their quotas, what each has now, and the prefixes that all share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import eventually
from rigs.fake_engine import FakeEngine
from rigs.ghost import GhostTokenizer
from starlette.testclient import TestClient

from bench.tiny_models import loaded, tiny
from mainstem.cache.namespaces import Namespace, owner_of
from mainstem.cache.quotas import Quota, Quotas, Share
from mainstem.errors import BadArgument
from mainstem.runtime.engine import Engine
from mainstem.runtime.memory.shares import OwnerUsage
from mainstem.runtime.request import Request
from mainstem.server.app import create_app
from mainstem.settings.engine import EngineConfig, HostSize, SamplingParams, TierConfig
from mainstem.settings.server import ServerConfig
from mainstem.settings.tenants import Amounts, read_tenants

FILE = """
[others]
device.maximum = "25%"

[tenants.search]
api_key = "key-of-search"
device = { guaranteed = "500", maximum = "80%" }
host = { guaranteed = "1KB" }
retained = 0.5

[tenants.chat]
api_key_env = "KEY_OF_CHAT"
"""
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEY_OF_CHAT", "key-of-chat")
    path = tmp_path / "tenants.toml"
    path.write_text(FILE)
    return path


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def client(engine: Any, **config: Any) -> TestClient:
    return TestClient(create_app(engine, ServerConfig(admin_key="admin", **config), secret=lambda n: bytes(n)))


def ask(server: TestClient, key: str | None = None, **fields: Any) -> Any:
    body = {"model": "fake", "prompt": "a prompt", "max_tokens": 2, **fields}
    return server.post("/v1/completions", json=body, headers={} if key is None else {"Authorization": f"Bearer {key}"})


# ---------------------------------------------------------------- the file


def test_keys_of_tenants_are_keys_of_the_server_and_keep_them_apart(file: Path) -> None:
    engine = FakeEngine()
    server = client(engine, tenants=file, api_key=("another",))
    answers = {key: ask(server, key).status_code for key in ("key-of-search", "key-of-chat", "another", "wrong")}
    assert answers == {"key-of-search": 200, "key-of-chat": 200, "another": 200, "wrong": 401}
    spaces = {stream.request.namespace for stream in engine.streams}
    assert len(spaces) == 3 and all(isinstance(space, Namespace) and space.tenant for space in spaces)
    assert "key-of" not in repr(engine.quotas) and "key-of" not in repr(ServerConfig(tenants=file))


def test_quotas_are_fractions_of_the_tiers(file: Path) -> None:
    engine = FakeEngine()
    server = client(engine, tenants=file)
    ask(server, "key-of-search")
    space = engine.streams[0].request.namespace
    assert isinstance(space, Namespace)
    assert engine.quotas.of(space.encode()) == Quota(Share(0.5, 0.8), Share(0.25), 0.5)
    assert engine.quotas.others == Quota(Share(maximum=0.25))
    assert len(engine.quotas.named) == 2


def test_without_quotas_a_tenant_may_have_all_and_is_promised_nothing(tmp_path: Path, file: Path) -> None:
    for text in ("", '[tenants.a]\napi_key = "one"', '[tenants.a]\napi_key = "one"\nhost = {}\n[others.device]'):
        read = read_tenants(write(tmp_path / "t", text))
        for each in (read.others, *read.tenants.values()):
            for amounts in (each.device, each.host):
                assert amounts == Amounts("0%", "100%") and amounts.fractions("at", 1000) == (0.0, 1.0)
                assert amounts.fractions("at", 0) == (0.0, 1.0)
            assert each.retained is None
    read = read_tenants(file)
    assert (read.tenants["search"].device, read.tenants["search"].host) == (Amounts("500", "80%"), Amounts("1KB"))
    assert (read.others.device, read.others.host) == (Amounts(maximum="25%"), Amounts())


def test_one_key_in_the_file_is_a_tenant_of_its_own(tmp_path: Path) -> None:
    engine = FakeEngine()
    path = write(tmp_path / "t", '[tenants.a]\napi_key = "one"\ndevice.maximum = "10%"')
    ask(client(engine, tenants=path), "one")
    space = engine.streams[0].request.namespace
    assert isinstance(space, Namespace) and engine.quotas.of(space.encode()).device.maximum == 0.1


def test_salts_are_tenants_where_there_are_no_keys(tmp_path: Path) -> None:
    engine = FakeEngine()
    path = write(tmp_path / "t", '[tenants.a]\ncache_salt = "s"\ndevice.guaranteed = "10%"')
    ask(client(engine, tenants=path), cache_salt="s")
    space = engine.streams[0].request.namespace
    assert isinstance(space, Namespace) and engine.quotas.of(space.encode()).device.guaranteed == 0.1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[tenants.a]\n", "tenants.a"),
        ('[tenants.a]\napi_key = "x"\ncache_salt = "y"', "tenants.a"),
        ('[tenants.a]\napi_key = "x y"', "tenants.a.api_key"),
        ('[tenants.a]\napi_key_env = "NOT_SET"', "tenants.a.api_key_env"),
        ('[tenants.a]\napi_key = "x"\n[tenants.b]\napi_key = "x"', "tenants.b"),
        ('[tenants.a]\napi_key = "x"\n[tenants.b]\ncache_salt = "y"', "tenants"),
        ('[tenants.a]\napi_key = "x"\ndevise.maximum = "1%"', "tenants"),
        ("[tenants.a", "tenants"),
        ('[tenants.a]\napi_key = "x"\ndevice.maximum = 5', "tenants"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadArgument) as caught:
        read_tenants(write(tmp_path / "t", text))
    assert caught.value.name == named
    assert "x y" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('device.maximum = "much"', "tenants.a.device.maximum"),
        ('device.maximum = "101%"', "tenants.a.device.maximum"),
        ('device.maximum = "2KB"', "tenants.a.device.maximum"),
        ('device = { guaranteed = "50%", maximum = "10%" }', "tenants.a.device.maximum"),
        ("retained = 1.5", "tenants.a.retained"),
        ('host.maximum = "10%"', "tenants.a.host"),
    ],
)
def test_a_quota_that_no_tier_has_is_refused(tmp_path: Path, text: str, named: str) -> None:
    engine = FakeEngine()
    engine.tier_bytes = (1000,)
    path = write(tmp_path / "t", f'[tenants.a]\napi_key = "x"\n{text}')
    with pytest.raises(BadArgument) as caught:
        client(engine, tenants=path)
    assert caught.value.name == named


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="tenants"):
        read_tenants(tmp_path / "nowhere")


# ---------------------------------------------------------------- usage


def test_only_the_admin_sees_what_tenants_have(file: Path) -> None:
    engine = FakeEngine()
    server = client(engine, tenants=file, api_key=("another",))
    ask(server, "another")
    ask(server, "key-of-search")
    for stream, used in zip(engine.streams, ((70, 100), (300, 2000)), strict=True):
        space = stream.request.namespace
        assert isinstance(space, Namespace)
        engine.used[owner_of(space.encode())] = OwnerUsage(used, 16)
    for headers, status in (({}, 401), ({"Authorization": "Bearer key-of-search"}, 403), (ADMIN, 200)):
        assert server.get("/v1/cache/tenants", headers=headers).status_code == status
    search, chat, another = server.get("/v1/cache/tenants", headers=ADMIN).json()["data"]
    assert search == {
        "name": "search",
        "device": {"bytes": 300, "guaranteed_bytes": 500, "maximum_bytes": 800},
        "host": {"bytes": 2000, "guaranteed_bytes": 1000, "maximum_bytes": 4000},
        "retained_tokens": 16,
    }
    assert (chat["name"], chat["device"]["bytes"], chat["retained_tokens"]) == ("chat", 0, 0)
    assert another["name"].startswith("key ") and another["device"] == {
        "bytes": 70, "guaranteed_bytes": 0, "maximum_bytes": 250,
    }  # fmt: skip


def test_without_a_file_there_are_no_tenants() -> None:
    reply = client(FakeEngine()).get("/v1/cache/tenants", headers=ADMIN)
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "no_tenants"


# ---------------------------------------------------------------- over a real engine


PROMPT = list(range(5, 5 + 4 * 8))


class Silent(GhostTokenizer):
    """Has no text for any token."""

    def get_vocab(self) -> dict[str, int]:
        return {}

    def decode(self, token_ids: Any, **options: Any) -> str:
        return ""


def run(engine: Engine, tokens: list[int], space: Namespace | None = None) -> Any:
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    return engine.submit(Request(tokens, params, namespace=space)).result()


def engine_of(**config: Any) -> Engine:
    model = replace(loaded(tiny("llama")), tokenizer=Silent())
    return Engine(model, EngineConfig(pages=32, page_size=8, **config))


@pytest.mark.parametrize("tiers", [TierConfig(), TierConfig(HostSize(host_ratio=2.0))], ids=["device", "host"])
def test_an_engine_counts_and_bounds_what_tenants_have(tiers: TierConfig) -> None:
    tenant = Namespace(tenant="t")
    with engine_of(tiers=tiers) as engine:
        engine.set_quotas(Quotas({tenant: Quota(Share(maximum=0.25), Share(maximum=0.25))}))
        for at in range(6):
            run(engine, [at, *PROMPT], tenant)
        eventually(lambda: is_still(engine), 20.0)
        used = engine.usage()[owner_of(tenant.encode())]
        page = engine.tier_bytes[0] // 32
        assert used.bytes[0] == 8 * page and all(
            n <= size // 4 for n, size in zip(used.bytes, engine.tier_bytes, strict=True)
        )
        with pytest.raises(BadArgument, match="guarantees of the device"):
            engine.set_quotas(Quotas({tenant: Quota(Share(guaranteed=0.9))}))
        assert engine.usage()[owner_of(tenant.encode())] == used


def is_still(engine: Engine) -> bool:
    """Whether nothing is on its way between tiers."""
    tiers = engine.stats().tiers
    return tiers is None or not (tiers.under_way or tiers.queued)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_leaves_a_page_is_overwritten_where_that_is_asked_for(
    tmp_path: Path, kv_cache_dtype: str, overwrite: bool
) -> None:
    tiers = TierConfig(HostSize(host_ratio=1.0), storage=f"file:{tmp_path}")
    config: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype, "overwrite_freed": overwrite, "tiers": tiers}
    with engine_of(**config) as engine:
        run(engine, PROMPT)
        pool, host, core = engine._core.model.pools["full"], engine._core.cache.tiers.host, engine._core.cache.tree.core  # type: ignore
        end = engine._core.cache.tree.match(PROMPT, Namespace()).node
        pages = core.ids(end, 0, 0)
        eventually(lambda: core.presence(end, 0, 1) == 2, 20.0)
        below = core.ids(end, 0, 1)

        def left() -> tuple[bool, bool]:
            here = any(bool(plane.view(torch.uint8)[:, pages.tolist()].any()) for plane in pool.planes)
            return here, any(any(slot) for slot in host.memory.slots(0, below.tolist()))

        assert left() == (True, True)
        eventually(lambda: (engine.flush(), left())[1] == (not overwrite, not overwrite), 20.0)


def test_a_public_prefix_is_hit_by_every_tenant_and_computed_alike(tmp_path: Path) -> None:
    with engine_of() as engine:
        alone = run(engine, [*PROMPT, 3])
        engine.flush()
        assert engine.publish_prefix([*PROMPT, 1]) == len(PROMPT)
        for name in ("a", "b"):
            answer = run(engine, [*PROMPT, 3], Namespace(tenant=name))
            assert answer.usage.cached_tokens == len(PROMPT) and answer.tokens == alone.tokens
        engine.flush()
        assert run(engine, [*PROMPT, 3], Namespace(tenant="c")).usage.cached_tokens == len(PROMPT)
        with pytest.raises(BadArgument, match="retain"):
            engine.publish_prefix(list(range(1, 1 + 12 * 8)))
        assert engine.publish_prefix([1, 2]) == 0  # less than a page


def test_the_file_of_public_prefixes(tmp_path: Path) -> None:
    lines = '{"prompt": "a public text"}\n\n{"messages": [{"role": "system", "content": "Be kind."}]}\n'
    engine = FakeEngine()
    client(engine, public_prefix=write(tmp_path / "p", lines))
    assert [bytes(tokens).decode() for tokens in engine.published] == ["a public text", "<system>Be kind.\n"]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": 1}',
        "[]",
        "{}",
        '{"prompt": "a", "messages": []}',
        '{"prompt": "a", "cache_salt": "s"}',
        '{"promt": "a"}',
    ],
)
def test_a_wrong_line_of_public_prefixes_is_named(tmp_path: Path, line: str) -> None:
    engine = FakeEngine()
    with pytest.raises(BadArgument) as caught:
        client(engine, public_prefix=write(tmp_path / "p", f'{{"prompt": "fine"}}\n{line}\n'))
    assert caught.value.name.endswith("p:2") and engine.published == []
    with pytest.raises(BadArgument, match="public_prefix"):
        client(engine, public_prefix=tmp_path / "nowhere")
