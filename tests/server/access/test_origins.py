"""Which web pages may use a server: names, origins and types of bodies, at the server and at a fleet's front."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

import anyio
import httpx
import pytest
from rigs.clients import served
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.errors import BadArgument
from mainstem.server.access.origins import Guard, Reach, reach_of, read_authority
from mainstem.server.app import create_app
from mainstem.settings.server import ServerConfig
from tests.fleet.test_fleet_front import Rig, front

JSON = [("content-type", "application/json"), ("content-length", "2")]
EVIL = "http://evil.example"


def ask(
    reach: Reach,
    headers: Sequence[tuple[str, str]],
    method: str = "GET",
    *,
    path: str = "/v1/models",
    server: tuple[str, int | None] | None = ("10.0.0.2", 8000),
    type: str = "http",
) -> tuple[int, dict[str, Any]]:
    """Sends a request through the middleware; returns the status (200: it was let through) and the body of an error."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read of a request that is refused")

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": type, "method": method, "path": path, "headers": raw, "server": server, "query_string": b""}
    if type == "websocket":
        del scope["method"]
    anyio.run(Guard(app, reach), scope, receive, send)
    if sent[0].get("type") == "websocket.close":
        return 403, {}
    return sent[0]["status"], json.loads(sent[1]["body"]) if len(sent) > 1 else {}


LOCAL = Reach("127.0.0.1")


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "localhost:8000", "LocalHost:21500", "localhost.:8000", "localhost:",
        "127.0.0.1", "127.0.0.1:8000", "127.8.9.1:1", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:80",
        "[::ffff:127.0.0.1]:8000", "10.0.0.2:8000", "10.0.0.2",
    ],
)  # fmt: skip
def test_names_of_the_machine_itself(host: str) -> None:
    assert ask(LOCAL, [("host", host)])[0] == 200
    assert ask(LOCAL, [("host", host), *JSON], "POST")[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "attacker.example", "attacker.example:8000", "localhost.attacker.example", "attacker.localhost:8000",
        "127.0.0.1.attacker.example", "127.0.0.1.nip.io:8000", "xlocalhost", "localhost..", "2130706433", "0x7f.0.0.1",
        "10.0.0.3", "192.0.2.1:8000", "0.0.0.0:8000", "[::]:8000", "[2001:db8::1]:8000", "[::ffff:10.0.0.3]",
    ],
)  # fmt: skip
def test_other_names_are_refused(host: str) -> None:
    for scope in ("http", "websocket"):
        assert ask(LOCAL, [("host", host)], type=scope)[0] == 403
    status, body = ask(LOCAL, [("host", host), ("origin", f"http://{host}"), ("sec-fetch-site", "same-origin")])
    assert (status, body["error"]["code"], body["error"]["type"]) == (403, "host_not_allowed", "permission_error")
    assert "--allowed-host" in body["error"]["message"] and "--api-key" in body["error"]["message"]


@pytest.mark.parametrize(
    "hosts",
    [
        [], ["localhost", "localhost"], ["localhost", "attacker.example"], [""], ["."], ["localhost:port"],
        ["localhost:80:80"], ["localhost:99999"], ["local host"], ["user@localhost"], ["localhost/"], ["::1"],
        ["[::1"], ["[localhost]"], ["[127.0.0.1]"], ["localhost,attacker.example"], ["locälhost"], ["http://localhost"],
        ["a" * 10_000 + "/"],
    ],
)  # fmt: skip
def test_a_host_that_is_none_is_refused(hosts: list[str]) -> None:
    status, body = ask(LOCAL, [("host", host) for host in hosts])
    assert (status, body["error"]["code"]) == (400, "bad_host")
    assert len(body["error"]["message"]) < 250


def test_an_error_has_the_form_of_its_api() -> None:
    status, body = ask(LOCAL, [("host", "attacker.example")], path="/v1/messages")
    assert (status, body["type"], body["error"]["type"]) == (403, "error", "permission_error")


def test_an_address_with_a_zone() -> None:
    there = ("fe80::7%eth0", 8000)
    for zone in ("%eth0", "%25eth0"):
        assert ask(LOCAL, [("host", f"[fe80::7{zone}]:8000")], server=there)[0] == 200
    assert ask(LOCAL, [("host", "[fe80::7]:8000")], server=there)[0] == 200
    assert ask(LOCAL, [("host", "[fe80::8%eth0]:8000")], server=there)[0] == 403


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", ""])
def test_a_server_at_all_addresses_answers_at_any_but_not_under_any_name(bound: str) -> None:
    reach = Reach(bound)
    for host in ("192.168.1.7:8000", "0.0.0.0:8000", "[2001:db8::1]:8000", "localhost", "8.8.8.8"):
        assert ask(reach, [("host", host)], server=None)[0] == 200
    assert ask(reach, [("host", "mainstem:8000")])[0] == 403


@pytest.mark.parametrize(
    ("bound", "good", "bad"),
    [
        ("192.168.1.7", ["192.168.1.7:8000", "localhost"], ["192.168.1.8", "there.lan"]),
        ("there.lan", ["There.lan:8000", "there.lan.", "10.0.0.2"], ["lan", "10.0.0.3", "x.there.lan"]),
        ("::1", ["[::1]:8000", "127.0.0.1"], ["[::2]"]),
    ],
)
def test_the_name_that_it_listens_on(bound: str, good: list[str], bad: list[str]) -> None:
    assert [ask(Reach(bound), [("host", host)])[0] for host in good] == [200] * len(good)
    assert [ask(Reach(bound), [("host", host)])[0] for host in bad] == [403] * len(bad)


def test_names_that_are_allowed() -> None:
    reach = Reach("0.0.0.0", ["llm.Example.org", "*.svc.cluster.local", "my_service"])
    for host in (
        "llm.example.org",
        "LLM.example.org:443",
        "a.b.svc.cluster.local:8000",
        "my_service:8000",
        "localhost",
    ):
        assert ask(reach, [("host", host)])[0] == 200
    for host in ("example.org", "x.llm.example.org", "svc.cluster.local", "evilsvc.cluster.local"):
        assert ask(reach, [("host", host)])[0] == 403
    assert ask(Reach("127.0.0.1", ["2001:db8::1"]), [("host", "[2001:DB8:0::1]:8000")])[0] == 200
    for host in ("attacker.example", "1.2.3.4"):
        assert ask(Reach("127.0.0.1", ["*"]), [("host", host)])[0] == 200


@pytest.mark.parametrize("given", [[], ["attacker.example"], ["a", "b"], ["not a host"]])
def test_a_key_makes_every_name_good_but_no_foreign_page(given: list[str]) -> None:
    reach, hosts = Reach("127.0.0.1", keyed=True), [("host", host) for host in given]
    assert ask(reach, hosts)[0] == 200
    assert ask(reach, [*hosts, ("origin", EVIL)])[0] == 403
    assert ask(reach, [*hosts, ("sec-fetch-site", "cross-site")])[0] == 403


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),
        ("LOCALHOST:8000", "http://localhost:8000"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("llm.example.org", "https://llm.example.org"),  # a proxy has ended TLS
        ("llm.example.org:443", "https://llm.example.org"),
    ],
)
def test_pages_of_the_server_itself(host: str, origin: str) -> None:
    reach = Reach("127.0.0.1", ["llm.example.org"])
    for method in ("GET", "POST", "DELETE"):
        for more in ([], [("sec-fetch-site", "same-origin"), ("sec-fetch-mode", "cors")]):
            assert ask(reach, [("host", host), ("origin", origin), *more, *JSON], method)[0] == 200


@pytest.mark.parametrize(
    "origin",
    [
        EVIL, "null", "", "http://localhost", "http://localhost:3000", "https://localhost:8000.evil.example",
        "http://127.0.0.1:8000", "http://evil.example:8000", "chrome-extension://localhost:8000", "file://",
        "http://localhost:8000/", "http://evil@localhost:8000", "localhost:8000", "http://localhost:8000,http://x",
    ],
)  # fmt: skip
def test_foreign_origins_are_refused(origin: str) -> None:
    headers = [("host", "localhost:8000"), ("origin", origin)]
    for method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD"):
        for more in ([], [("sec-fetch-site", "same-origin")]):
            status, body = ask(LOCAL, [*headers, *more, *JSON], method)
            assert (status, body["error"]["code"]) == (403, "origin_not_allowed")
            assert "--cors-origin" in body["error"]["message"]
    assert ask(LOCAL, headers, type="websocket")[0] == 403
    both = [*headers, ("origin", "http://localhost:8000")]
    assert ask(LOCAL, both)[0] == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site", "something-new"])
def test_what_a_foreign_page_loads_without_an_origin_is_refused(site: str) -> None:
    headers = [("host", "localhost:8000"), ("sec-fetch-site", site)]
    for mode, dest in (("no-cors", "image"), ("no-cors", "script"), ("navigate", "iframe"), ("cors", "empty")):
        more = [("sec-fetch-mode", mode), ("sec-fetch-dest", dest)]
        assert ask(LOCAL, [*headers, *more], path="/cache")[0] == 403
    link = [*headers, ("sec-fetch-mode", "navigate"), ("sec-fetch-dest", "document")]
    assert ask(LOCAL, link, path="/cache")[0] == 200, "a link that the user follows"
    assert ask(LOCAL, link, "POST", path="/v1/cache/flush")[0] == 403, "a form"
    assert ask(LOCAL, [*link, ("origin", "null")])[0] == 403


@pytest.mark.parametrize("site", ["none", "same-origin"])
def test_what_the_user_or_an_own_page_asks_for(site: str) -> None:
    assert ask(LOCAL, [("host", "localhost:8000"), ("sec-fetch-site", site)], path="/cache")[0] == 200


def test_origins_that_are_allowed() -> None:
    reach, host = Reach("127.0.0.1", (), ["https://chat.example.org"]), ("host", "localhost:8000")
    sent = [host, ("origin", "https://chat.example.org"), ("sec-fetch-site", "cross-site")]
    assert ask(reach, [*sent, *JSON], "POST")[0] == 200
    assert ask(reach, [*sent, ("origin", EVIL)])[0] == 403
    for origin in (EVIL, "http://chat.example.org", "https://chat.example.org:8443", "null"):
        assert ask(reach, [host, ("origin", origin)])[0] == 403
    assert ask(reach, [host, ("sec-fetch-site", "cross-site")])[0] == 403
    for header in (("origin", EVIL), ("origin", "null"), ("sec-fetch-site", "cross-site")):
        assert ask(Reach("127.0.0.1", (), ["*"]), [host, header])[0] == 200


@pytest.mark.parametrize(
    "type",
    [
        "application/json", "Application/JSON", "application/json; charset=utf-8", "application/json;charset=UTF-8",
        "application/vnd.api+json", "application/problem+json; charset=utf-8", "application/json ;x",
    ],
)  # fmt: skip
def test_bodies_that_are_json(type: str) -> None:
    assert ask(LOCAL, [("host", "localhost"), ("content-type", type), ("content-length", "2")], "POST")[0] == 200


@pytest.mark.parametrize("length", [("content-length", "2"), ("transfer-encoding", "chunked")])
@pytest.mark.parametrize(
    "types",
    [
        [], [""], ["text/plain"], ["text/plain;charset=UTF-8"], ["application/x-www-form-urlencoded"],
        ["multipart/form-data; boundary=application/json"], ["text/plain, application/json"], ["text/json"],
        ["application/jsonp"], ["application/json, text/plain"], ["text/plain", "application/json"],
        ["application/json", "text/plain"], ["text/plain; application/json"],
    ],
)  # fmt: skip
def test_other_bodies_are_refused(types: list[str], length: tuple[str, str]) -> None:
    """A page may send those without being asked first; a body without a type, too."""
    headers = [("host", "localhost"), length, *(("content-type", type) for type in types)]
    for method in ("POST", "DELETE"):
        status, body = ask(LOCAL, headers, method)
        assert (status, body["error"]["code"]) == (415, "unsupported_media_type")
        assert "'Content-Type: application/json'" in body["error"]["message"]
        assert ask(Reach("127.0.0.1", keyed=True), headers, method)[0] == 415


def test_uploads_are_forms_of_pages_that_may_use_the_server() -> None:
    host, length = ("host", "localhost"), ("content-length", "2")
    form = ("content-type", "multipart/form-data; boundary=x")
    assert ask(LOCAL, [host, length, form], "POST", path="/v1/files")[0] == 200
    for refused in ([("content-type", "application/json")], [("content-type", "text/plain")], [], [form, form[:1] * 2]):
        status, body = ask(LOCAL, [host, length, *refused], "POST", path="/v1/files")
        assert (status, "a form with a file" in body["error"]["message"]) == (415, True)
    for path in ("/v1/batches", "/v1/files/x", "/v1/completions"):
        assert ask(LOCAL, [host, length, form], "POST", path=path)[0] == 415
    for page in (("origin", EVIL), ("sec-fetch-site", "cross-site")):
        assert ask(LOCAL, [host, length, form, page], "POST", path="/v1/files")[0] == 403


def test_no_body_needs_no_type() -> None:
    for more in ([], [("content-length", "0")], [("content-type", "text/plain")]):
        assert ask(LOCAL, [("host", "localhost"), *more], "POST", path="/v1/cache/flush")[0] == 200


def test_the_settings_say_who_may_ask(tmp_path: Any) -> None:
    host, foreign = [("host", "attacker.example")], [("host", "localhost"), ("origin", "https://chat.example.org")]
    assert ask(reach_of(ServerConfig(), "127.0.0.1"), host)[0] == 403
    assert ask(reach_of(ServerConfig(admin_key="a"), "127.0.0.1"), host)[0] == 403, "all but the cache is open"
    assert ask(reach_of(ServerConfig(api_key=("k",)), "127.0.0.1"), host)[0] == 200
    assert ask(reach_of(ServerConfig(allowed_host=("attacker.example",)), "127.0.0.1"), host)[0] == 200
    assert ask(reach_of(ServerConfig(), "127.0.0.1"), foreign)[0] == 403
    assert ask(reach_of(ServerConfig(cors_origin=("https://chat.example.org",)), "127.0.0.1"), foreign)[0] == 200
    for table, status in (('api_key = "k"', 200), ('cache_salt = "s"', 403)):
        file = tmp_path / "tenants.toml"
        file.write_text(f"[tenants.one]\n{table}\n")
        assert ask(reach_of(ServerConfig(tenants=file), "127.0.0.1"), host)[0] == status


@pytest.mark.parametrize("name", ["", "http://x", "a:80", "a b", "a/b", "*x", "x.*", "[::1]"])
def test_a_name_that_is_none_is_named(name: str) -> None:
    with pytest.raises(BadArgument, match="allowed_host"):
        ServerConfig(allowed_host=(name,))


def test_authorities() -> None:
    assert read_authority("A.example:080") == ("a.example", 80)
    assert read_authority("[::FFFF:7f00:1]:1") == (ip_address("127.0.0.1"), 1)
    assert read_authority("1.2.3.4") == (ip_address("1.2.3.4"), None)
    assert read_authority("010.0.0.1") == ("010.0.0.1", None), "some read it as octal: it is no address"


# --- the server, its routes, and a fleet's front ------------------------------------------------------------------

FOREIGN = {"Origin": EVIL, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Content-Type": "text/plain"}
REBOUND = {"Host": "attacker.example", "Origin": "http://attacker.example", "Sec-Fetch-Site": "same-origin"}


def test_no_route_of_a_server_answers_a_foreign_page() -> None:
    engine = FakeEngine()
    app = create_app(engine, ServerConfig(), reach=Reach("127.0.0.1"))  # type: ignore[arg-type]
    http = TestClient(app, base_url="http://localhost:8000")
    routes = {(method, route.path) for route in app.routes for method in route.methods}  # type: ignore[attr-defined]
    assert {("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/cache/events"), ("GET", "/health")} <= routes
    for method, path in [*routes, ("GET", "/nothing"), ("OPTIONS", "/v1/completions")]:
        for headers in (FOREIGN, REBOUND, {"Sec-Fetch-Site": "same-site"}):
            reply = http.request(method, path, headers=headers, content=b"{}")
            assert reply.status_code == 403, (method, path, headers)
            assert reply.headers["x-request-id"] and "access-control-allow-origin" not in reply.headers
        if method == "POST":
            assert http.post(path, content=b"{}").status_code == 415
    assert not (engine.streams or engine.removed or engine.advised)
    assert http.post("/v1/cache/flush").status_code == 200
    assert http.get("/v1/models", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_a_page_that_may_use_the_server_reads_its_errors() -> None:
    page = "https://chat.example.org"
    app = create_app(FakeEngine(), ServerConfig(cors_origin=(page,)), reach=Reach("127.0.0.1", (), (page,)))  # type: ignore[arg-type]
    http, headers = TestClient(app, base_url="http://localhost"), {"Origin": page, "Sec-Fetch-Site": "cross-site"}
    reply = http.post("/v1/completions", headers=headers, content=b"{}")
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (415, page)
    asked = {**headers, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    assert http.options("/v1/completions", headers=asked).status_code == 200
    body = {"model": "fake", "prompt": "x", "max_tokens": 1}
    assert http.post("/v1/completions", headers=headers, json=body).status_code == 200


def test_a_fleets_front_looks_before_it_asks_a_replica() -> None:
    rig = Rig()
    guarded = Guard(front(rig), Reach("127.0.0.1"))

    async def run() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://localhost") as http:
            replies = [
                await http.request(method, path, headers=headers, content=b"{}")
                for method, path in (("POST", "/v1/cache/flush"), ("GET", "/health"), ("POST", "/v1/chat/completions"))
                for headers in (FOREIGN, REBOUND)
            ]
            assert not rig.asked
            replies.append(await http.post("/v1/cache/flush"))
            return [reply.status_code for reply in replies]

    assert anyio.run(run) == [403] * 6 + [200]
    assert {name for name, _ in rig.asked} == {"a", "b"}


def raw(port: int, text: str) -> str:
    """Sends bytes, and returns all that comes back."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(text.replace("\n", "\r\n").encode())
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def test_over_a_socket() -> None:
    with served(FakeEngine()) as url:
        port = int(url.rpartition(":")[2])
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", "[::1]", "LOCALHOST."):
            assert raw(port, f"GET /v1/models HTTP/1.1\nHost: {host}\nConnection: close\n\n").startswith("HTTP/1.1 200")
        for hosts in ("", "Host: \n", "Host: localhost\nHost: localhost\n", "Host: localhost\nHost: evil.example\n"):
            assert raw(port, f"GET /v1/models HTTP/1.1\n{hosts}Connection: close\n\n").startswith("HTTP/1.1 400")
        for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "8.8.8.8"):
            reply = raw(port, f"GET /metrics HTTP/1.1\nHost: {host}\nConnection: close\n\n")
            assert reply.startswith("HTTP/1.1 403") and "--allowed-host" in reply
        key = "Sec-WebSocket-Version: 13\nSec-WebSocket-Key: YWFhYWFhYWFhYWFhYWFhYQ=="
        upgrade = f"Connection: Upgrade\nUpgrade: websocket\n{key}"
        reply = raw(port, f"GET /cache/events HTTP/1.1\nHost: localhost\nOrigin: {EVIL}\n{upgrade}\n\n")
        assert reply.startswith("HTTP/1.1 403")
