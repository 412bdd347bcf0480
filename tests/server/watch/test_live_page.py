"""The live page: who may see it, what it is sent, and what a browser makes of it."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from rigs.browser import Page, browsing
from rigs.clients import running
from rigs.fake_engine import FakeEngine
from rigs.serving import tiny_folder
from skips import BROWSER
from starlette.testclient import TestClient

from mainstem.cache.explain import Parted, Stretch
from mainstem.cache.tree import Tree
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import load_model
from mainstem.server.access.origins import reach_of
from mainstem.server.app import create_app
from mainstem.server.watch.live import LiveSample, page
from mainstem.settings.engine import EngineConfig, HostSize, TierConfig
from mainstem.settings.server import ServerConfig
from mainstem.watch.outline import SLICE

ROUTES = ("/cache", "/cache/sample", "/cache/events")
MOST_MS = 16.0


def basic(key: str, user: str = "admin") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()}


def large_tree(nodes: int) -> Tree:
    """System prompts, documents and sessions of a few pages each; the last ones are in use."""
    tree, chance, ids = Tree(page_size=16, tiers=2), random.Random(5), iter(range(10**9))
    made = 0
    while made < nodes:
        system = [chance.randrange(2**30)] * 16 * chance.randrange(1, 30)
        for _ in range(chance.randrange(3, 60)):
            document = [chance.randrange(2**30)] * 16 * chance.randrange(1, 40)
            for _ in range(chance.randrange(1, 60)):
                turn = [chance.randrange(2**30)] * 16 * chance.randrange(1, 12)
                tokens = system + document + turn
                tree.insert(tokens, [next(ids) for _ in range(len(tokens) // 16)], chance.choice([None, "a salt"]))
                made += 1
    return tree


# --- who may see it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
def test_it_needs_the_admin_key(path: str) -> None:
    app = create_app(FakeEngine(), ServerConfig(api_key=("one", "two"), admin_key="root"))  # type: ignore[arg-type]
    app.state.draining = True  # which ends a stream
    http = TestClient(app)
    missing = http.get(path)
    assert missing.status_code == 401
    assert missing.headers["www-authenticate"].startswith("Basic ")
    assert http.get(path, headers=basic("wrong")).status_code == 401
    assert http.get(path, headers={"Authorization": "Basic ???"}).status_code == 401
    assert http.get(path, headers=basic("one")).status_code == 403
    assert http.get(path, headers={"x-api-key": "two"}).status_code == 403
    assert http.get(path, headers=basic("root")).status_code == 200
    assert http.get(path, headers={"Authorization": "Bearer root"}).status_code == 200


def test_a_password_of_a_browser_changes_nothing() -> None:
    """Any page can make a browser post with the password that it was given."""
    app = create_app(FakeEngine(), ServerConfig(api_key=("one",), admin_key="root"))  # type: ignore[arg-type]
    assert TestClient(app).post("/v1/cache/flush", headers=basic("root")).status_code == 401


def test_without_keys_it_is_open() -> None:
    http = TestClient(create_app(FakeEngine()))  # type: ignore[arg-type]
    assert http.get("/cache").text == page()


# --- what it is sent -----------------------------------------------------------------------------------------------


def test_the_page_is_one_file_that_asks_for_nothing_else() -> None:
    http = TestClient(create_app(FakeEngine()))  # type: ignore[arg-type]
    policy = http.get("/cache").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert not re.findall(
        r"(?:src|href)=\"(?!data:)|https?://|@import|url\(", page().replace("url(path", "").replace('url("/', "")
    )
    assert len(re.findall("'sha256-", policy)) == 2


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tiny_folder("llama", tmp_path_factory.mktemp("live") / "tiny", max_position_embeddings=128)
    with Engine(
        load_model(str(folder), dtype="float32"),
        EngineConfig(kv_bytes=1 << 20, tiers=TierConfig(size=HostSize(host_bytes=1 << 20))),
    ) as running:
        yield running


def test_a_sample_of_a_real_engine(engine: Engine) -> None:
    http = TestClient(create_app(engine, ServerConfig()))
    prompt = [7] * 40
    for tail in ([8] * 20, [9] * 20, [9] * 20):
        body = {"model": "tiny", "prompt": prompt + tail, "max_tokens": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
    answer = http.get("/cache/sample")
    assert answer.headers["cache-control"] == "no-store"
    sample = answer.json()
    assert set(sample) == set(LiveSample.__struct_fields__)
    assert sample["prompt_tokens"] == 180
    assert sum(sample["cached_tokens"].values()) > 0
    assert {(pool["tier"], pool["component"]) for pool in sample["pools"]} == {("device", "full"), ("host", "full")}
    tree = sample["tree"]
    nodes = [dict(zip(tree["columns"], row, strict=True)) for row in tree["rows"]]
    tops = [node for node in nodes if node["parent"] < 0]
    assert [node["tokens"] for node in tops] == [0]
    assert tops[0]["tokens_below"] == tree["tokens"] == sum(node["tokens"] for node in nodes)
    assert tops[0]["nodes_below"] == tree["nodes"] == len(nodes) - 1
    assert sample["tenants"] == [
        {
            "name": "default namespace",
            "nodes": tree["nodes"],
            "device": tree["tokens"],
            "host": sample["tenants"][0]["host"],
        }
    ]
    shared = max((node for node in nodes if node["tokens"]), key=lambda node: node["tokens_below"])
    assert shared["hits"] >= 2
    part = http.get("/cache/sample", params={"node": shared["id"]}).json()["tree"]
    assert part["top"] == shared["id"]
    assert len(part["rows"]) == shared["nodes_below"]
    assert http.get("/cache/sample?node=999999").json()["tree"]["top"] == 0
    assert http.get("/cache/sample?node=x").status_code == 400


def test_the_engine_is_asked_for_bounded_slices_and_once_for_all_who_look() -> None:
    engine = FakeEngine()
    engine.shown = large_tree(30_000)
    http = TestClient(create_app(engine))  # type: ignore[arg-type]
    tree = http.get("/cache/sample").json()["tree"]
    assert len(tree["rows"]) == 2000 < tree["nodes"]
    assert set(engine.surveyed) == {SLICE}
    assert len(engine.surveyed) == -(-engine.shown.core.places() // SLICE)
    http.get("/cache/sample")
    http.get("/cache/sample", params={"node": tree["rows"][5][0]})
    assert len(engine.surveyed) == -(-engine.shown.core.places() // SLICE)
    assert len(engine.shown.survey(0, SLICE).rows) <= SLICE
    below = tree["columns"].index("nodes_below")
    assert sum(row[below] for row in tree["rows"] if row[1] < 0) == tree["nodes"]


def test_what_left_the_device_is_told_by_age() -> None:
    engine, now = FakeEngine(), [1000.0]
    ids = iter(range(1000))
    app = create_app(engine, clock=lambda: now[0], now=lambda: now[0])  # type: ignore[arg-type]
    http = TestClient(app)
    engine.shown.insert([1] * 32, [next(ids), next(ids)])
    http.get("/cache/sample")
    now[0] += 30
    engine.shown.insert([2] * 48, [next(ids) for _ in range(3)])
    assert http.get("/cache/sample").json()["left"]["by_age"] == [0] * 6
    now[0] += 100
    engine.shown.flush()
    left = http.get("/cache/sample").json()["left"]
    assert left["by_age"] == [0, 0, 0, 5, 0, 0]  # 100 s and 130 s ago
    assert left["median_s"] == pytest.approx(100, abs=1)


def test_misses_by_cause_are_in_the_sample_where_they_are_counted() -> None:
    engine = FakeEngine()
    assert TestClient(create_app(engine)).get("/cache/sample").json()["missed_tokens"] == {}  # type: ignore[arg-type]
    engine.missed = {"parted": 7, "evicted": 7}
    sample = TestClient(create_app(engine)).get("/cache/sample").json()  # type: ignore[arg-type]
    assert sample["missed_tokens"] == engine.missed


# --- in a browser ---------------------------------------------------------------------------------------------------


@contextmanager
def served(engine: Any, **config: Any) -> Iterator[str]:
    """Serves an engine over HTTP; yields the address."""
    settings = ServerConfig(port=0, **config)
    app = create_app(engine, settings, reach=reach_of(settings, settings.host))
    with running(app, settings) as url:
        try:
            yield url.removeprefix("http://")
        finally:
            app.state.draining = True  # which ends the streams


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    BROWSER.need()
    with browsing(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def crowded() -> FakeEngine:
    engine = FakeEngine()
    engine.shown = large_tree(100_000)
    return engine


@pytest.mark.slow
@pytest.mark.deadline
def test_a_browser_draws_a_hundred_thousand_nodes_in_a_frame(browser: Page, crowded: FakeEngine) -> None:
    with served(crowded, admin_key="root", api_key=("one", "two")) as address:
        browser.open(f"http://admin:root@{address}/cache")
        browser.until("document.querySelector('#main')?.dataset.samples >= 3", 60)
        title = browser.run("document.querySelector('#tree-title').textContent")
        assert int(re.findall(r"([\d,]+) nodes", title)[0].replace(",", "")) >= 100_000
        browser.run("document.querySelector('#icicle').focus()")
        for key in ["ArrowRight", "ArrowDown", "ArrowRight", "ArrowLeft", "ArrowUp"] * 20:
            browser.press(key)
        frames = json.loads(browser.run("JSON.stringify({...document.querySelector('#main').dataset})"))
        assert int(frames["frames"]) > 100
        assert float(frames["frameMs"]) <= MOST_MS
        assert browser.run("document.querySelector('#link').textContent") == "live"
    assert not browser.errors
    assert all(
        url.startswith((f"http://{address}/", f"http://admin:root@{address}/", "data:")) for url in browser.requests
    )


@pytest.mark.deadline
def test_keys_walk_the_tree_and_it_is_said(browser: Page, crowded: FakeEngine) -> None:
    said = "document.querySelector('#picked').textContent"
    with served(crowded) as address:
        browser.open(f"http://{address}/cache")
        browser.until("document.querySelector('#main')?.dataset.samples >= 1", 60)
        browser.run("document.querySelector('#icicle').focus()")
        browser.press("ArrowRight")
        assert browser.run(said).startswith("All of ")
        browser.press("ArrowDown")
        node = browser.run(said)
        assert re.match(r"[\d,]+ tokens from 0 · ", node), node
        assert "on the device" in node
        browser.press("Enter")
        browser.until("document.querySelector('#tree-title').textContent.includes('one subtree')")
        browser.press("Escape")
        browser.until("!document.querySelector('#tree-title').textContent.includes('one subtree')")
        assert "Hit rate" in browser.run("document.querySelector('#summary').textContent")
    assert not [error for error in browser.errors if "ERR_CONNECTION" not in error and "INCOMPLETE" not in error]


@pytest.mark.deadline
def test_pools_and_causes_are_told_apart(browser: Page) -> None:
    with served(FakeEngine()) as address:
        browser.open(f"http://{address}/cache")
        browser.until("document.querySelector('#main')?.dataset.samples >= 2", 60)
        pools = browser.run("document.querySelector('#pool-bars').textContent")
        assert re.search(r"KV pages on the device: \d+ of 100 filled", pools), pools
        assert re.search(r"state slots on the device: \d+ of 9 filled", pools), pools
        browser.run(
            "last.missed_tokens = {new: 3, evicted: 2, parted: 1}; delete by('flow-legend').dataset.shown; drawFlow()"
        )
        swatches = "[...document.querySelectorAll('#flow-legend i')].map(each => each.style.background)"
        shown = json.loads(browser.run(f"JSON.stringify({swatches})"))
        assert len(shown) == len({*shown}) == 6  # three tiers, three causes
    assert not browser.errors


@pytest.mark.deadline
def test_a_browser_without_events_asks_instead_and_says_so_once(browser: Page) -> None:
    with served(FakeEngine()) as address:
        browser.open(f"http://{address}/cache", before="if (location.pathname === '/cache') delete window.EventSource")
        browser.until("document.querySelector('#main')?.dataset.samples >= 2", 60)
        assert "no server-sent events" in browser.run("document.querySelector('#link').textContent")
        assert any(url.endswith("/cache/sample") for url in browser.requests)


@pytest.mark.deadline
def test_a_request_is_explained_by_the_id_of_its_answer(browser: Page) -> None:
    engine = FakeEngine()
    engine.config = replace(engine.config, explain=True)
    other = b"".join(letter.to_bytes(4, "little") for letter in b"the 24th")
    engine.why = {0: Stretch(0, 0, cause="parted", parted=Parted(7, other))}
    with served(engine, admin_key="root", api_key=("one", "two")) as address:
        body = {"model": "fake", "prompt": "It is <b>the 25th</b> of a month."}
        reply = httpx.post(f"http://{address}/v1/completions", json=body, headers={"x-api-key": "one"})
        browser.open(f"http://admin:root@{address}/cache")
        latest = "document.querySelector('#why-recent button')?.textContent"
        browser.until(f"{latest} === {json.dumps(reply.json()['id'])}", 60)
        browser.run("document.querySelector('#why-recent button').click()")
        browser.until("document.querySelector('#why-rows').rows.length === 1", 60)
        cells = json.loads(
            browser.run(
                "JSON.stringify([...document.querySelector('#why-rows').rows[0].cells].map(c => c.textContent))"
            )
        )
        assert cells[1:] == ["parted, at token 7", "It is <b>the 25t", "the 24th"]
        browser.run("document.querySelector('#why-id').value = 'cmpl-0'")
        browser.run("document.querySelector('#why-form').requestSubmit()")
        browser.until("document.querySelector('#why-told').textContent.includes('No explanation of')", 60)
    assert not [error for error in browser.errors if "404" not in error and "CONNECTION" not in error]
