"""API keys, the admin key, and scripts of web pages: who may use the application, over a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from typing import Any

import pytest
from rigs.app_client import called, client, complete, error_of
from rigs.fake_engine import FakeEngine

from mainstem.errors import BadArgument
from mainstem.server.app import create_app
from mainstem.settings.server import ServerConfig


def test_keys() -> None:
    engine = FakeEngine()
    server = client(engine, api_key=("first-key", "second-key"))
    refusal = complete(server)
    assert error_of(refusal, 401)["code"] == "invalid_api_key"
    assert refusal.headers["www-authenticate"] == "Bearer"
    for wrong in ("Bearer other", "Bearer ", "Basic first-key", "first-key", "Bearer first-keyx"):
        assert complete(server, headers={"Authorization": wrong}).status_code == 401
    assert not engine.streams

    def cached(key: str) -> int:
        body = complete(server, headers={"Authorization": f"Bearer {key}"}).json()
        return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("first-key"), cached("second-key"), cached("first-key"), cached("second-key")] == [0, 0, 48, 48]


@pytest.mark.parametrize(
    ("key", "admin", "draining", "status"),
    [(None, False, False, 401), ("wrong", False, False, 401), ("right", False, True, 503), ("right", True, False, 403)],
)
def test_a_body_is_not_read_for_a_client_that_is_refused_anyway(
    key: str | None, admin: bool, draining: bool, status: int
) -> None:
    app = create_app(FakeEngine(), ServerConfig(api_key=("right",), admin_key="admin"))
    app.state.draining = draining
    closed_to_them = ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/update_weights", "/v1/cache/remove"]
    for path in (
        closed_to_them
        if admin
        else ["/v1/completions", "/v1/chat/completions", *(closed_to_them if status == 401 else [])]
    ):
        read: list[str] = []

        async def receive(read: list[str] = read) -> dict[str, Any]:
            read.append("a part of the body")
            return {"type": "http.request", "body": b"{}", "more_body": False}

        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        assert (asyncio.run(called(app, receive, path, headers))[0]["status"], read) == (status, [])


def test_namespaces_reveal_nothing_about_keys() -> None:
    def namespace() -> str:
        engine = FakeEngine()
        complete(client(engine, api_key=("first-key", "second-key")), headers={"Authorization": "Bearer first-key"})
        return repr(engine.streams[0].request.namespace)

    one, other = namespace(), namespace()
    assert "first-key" not in one
    assert hashlib.sha256(b"first-key").hexdigest() not in one
    assert one != other  # each server has its own secret


CACHE_ROUTES = [("POST", "/v1/cache/flush"), ("GET", "/v1/cache/stats"), ("GET", "/v1/cache/tree")]


REMOVAL = "/v1/cache/remove"


WITH_A_BODY = [REMOVAL, "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]


@pytest.mark.parametrize(
    ("api_key", "admin_key", "shown", "expected"),
    [
        ((), None, None, 200),
        (("k",), None, None, 401),
        (("k",), None, "k", 200),
        (("k", "l"), None, "k", 403),
        (("k", "l"), None, None, 401),
        (("k", "l"), "root", "k", 403),
        (("k", "l"), "root", "root", 200),
        (("k", "l"), "root", "other", 401),
        (("k",), "root", "k", 403),
        (("k",), "root", "root", 200),
        ((), "root", None, 401),
        ((), "root", "root", 200),
        (("k",), "k", "k", 200),
    ],
)
def test_who_may_see_the_cache(
    api_key: tuple[str, ...], admin_key: str | None, shown: str | None, expected: int
) -> None:
    server = client(api_key=api_key, admin_key=admin_key)
    headers = {} if shown is None else {"Authorization": f"Bearer {shown}"}
    for method, path in [*CACHE_ROUTES, *(("POST", path) for path in WITH_A_BODY)]:
        response = server.request(method, path, headers=headers)
        is_own = path == REMOVAL and len(api_key) > 1 and shown in api_key
        admitted = 400 if path in WITH_A_BODY else 200  # bodies are empty
        status = admitted if is_own or expected == 200 else expected
        assert response.status_code == status, (path, response.text)
        if status == 403:
            assert "--admin-key" in error_of(response, 403)["message"]


@pytest.mark.parametrize(
    "key", ["k", "a:b", ":", "::a:", "a@b", "user:pass@host", "a%3Ab", "a/b?c=d&e", "=" * 3, "k" * 512]
)
@pytest.mark.parametrize("user", ["", "any", "Ås"])
def test_any_key_is_a_password(key: str, user: str) -> None:
    """Of HTTP Basic the user ends at the first colon, and a password may have others (RFC 7617)."""
    server = client(admin_key=key)
    for given, status in ((key, 200), (f"{key}x", 401), (f"x:{key}", 401), (key[1:], 401), ("", 401)):
        sent = base64.b64encode(f"{user}:{given}".encode()).decode()
        assert server.get("/cache", headers={"Authorization": f"Basic {sent}"}).status_code == status, given
    for header in (f"Bearer {key}", f"bearer   {key}"):
        assert server.get("/v1/cache/tree", headers={"Authorization": header}).status_code != 401


def test_the_admin_key_is_no_tenant() -> None:
    server = client(api_key=("k",), admin_key="root")
    assert complete(server, headers={"Authorization": "Bearer root"}).status_code == 401


def test_models_need_the_key_too_and_health_does_not() -> None:
    server = client(api_key=("k",))
    for path in ("/v1/models", "/v1/models/fake"):
        assert server.get(path).status_code == 401
        assert server.get(path, headers={"Authorization": "Bearer k"}).status_code == 200
    assert server.get("/health").status_code == 200


def test_one_key_shares_with_itself_under_no_name() -> None:
    engine = FakeEngine()
    complete(client(engine, api_key=("k",)), headers={"Authorization": "Bearer k"})
    assert engine.streams[0].request.namespace is None


ORIGIN = {"Origin": "https://chat.example.org"}


PREFLIGHT = {
    **ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("allowed", ["https://chat.example.org", "*"])
def test_scripts_of_an_allowed_origin(allowed: str) -> None:
    server = client(cors_origin=("https://other.example.org", allowed), api_key=("k",))
    asked = server.options("/v1/chat/completions", headers=PREFLIGHT)
    assert asked.status_code == 200, "a preflight has no key"
    assert asked.headers["access-control-allow-origin"] in (allowed, ORIGIN["Origin"])
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert "POST" in asked.headers["access-control-allow-methods"]
    with_key = {**ORIGIN, "Authorization": "Bearer k"}
    for reply in (complete(server, headers=with_key), complete(server, headers=with_key, stream=True)):
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == allowed
        assert "X-Request-Id" in reply.headers["access-control-expose-headers"]
    refused = complete(server, headers=ORIGIN)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == allowed


@pytest.mark.parametrize("origins", [(), ("https://other.example.org",)])
def test_scripts_of_other_origins(origins: tuple[str, ...]) -> None:
    server = client(cors_origin=origins)
    asked = server.options("/v1/chat/completions", headers=PREFLIGHT)
    assert asked.status_code == (400 if origins else 405)
    for reply in (asked, complete(server, headers=ORIGIN)):
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 65536},
        {"port": -1},
        {"max_body_bytes": 0},
        {"drain_timeout_s": -1},
        {"api_key": ("",)},
        {"api_key": ("a b",)},
        {"admin_key": ""},
        {"admin_key": "a b"},
        {"served_model_name": ("",)},
        {"cors_origin": ("example.org",)},
        {"cors_origin": ("https://example.org/path",)},
    ],
)
def test_bad_settings_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match=next(iter(fields))):
        ServerConfig(**fields)


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ServerConfig(api_key=("secret",), admin_key="secret"))
