"""The web pages that may use a server: its own, and those that its settings name.

A browser sends requests for any page, from within the user's network. Headers that no page can choose tell these from
requests of other clients:

    Host                     the name under which a page asks. A page that has led its own name to this machine (DNS
                             rebinding) asks under that name, and counts as the server's own in all other respects
    Origin, Sec-Fetch-Site   which page asks, and whether it is the server's own
    Content-Type             of the types that a page may send without being allowed to (CORS), none is JSON; uploads,
                             which are forms, are protected by the headers above alone

Sources: RFC 9110 7.2 (Host), RFC 6454 (Origin), the Fetch standard (simple requests), Fetch Metadata (Sec-Fetch-*).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mainstem.server.access.envelope import error_response
from mainstem.server.errors import ApiError
from mainstem.server.transport import FILES
from mainstem.settings.server import ServerConfig
from mainstem.settings.tenants import read_tenants

_AUTHORITY = re.compile(r"(?:\[([\da-f.]*:[\da-f:.]+)(?:%[\w.~-]+)?\]|([\w.-]+))(?::(\d{0,5}))?", re.A | re.I)
_ORIGIN = re.compile(r"(https?)://([^/?#@]+)", re.I)
_JSON = re.compile(r"application/([\w.!#$&^-]+\+)?json[ \t]*(;.*)?", re.A | re.I)
_FORM = re.compile(r"multipart/form-data[ \t]*;.*", re.A | re.I)
_PORTS = {"http": 80, "https": 443}
_OURS = ("same-origin", "none")  # of Sec-Fetch-Site; none: the user asks, by a bookmark or the address bar
_MOST_SHOWN = 100  # characters of a header
_POLICY_VIOLATION = 1008

Host = str | IPv4Address | IPv6Address
"""A name in lower case without a dot at its end, or an address."""


class Authority(NamedTuple):
    """The value of `Host`, and of an origin after the scheme. Port: None if there is none."""

    host: Host
    port: int | None

    def at(self, scheme: str) -> Authority:
        """Returns it with the port that it has for a scheme."""
        return self if self.port is not None else self._replace(port=_PORTS[scheme])


def read_authority(text: str) -> Authority | None:
    """Reads `HOST` or `HOST:PORT`, with an IPv6 address in brackets; None: it is neither."""
    match = _AUTHORITY.fullmatch(text)
    if match is None or int(match[3] or 0) > 0xFFFF:
        return None
    host = read_host(match[1] or match[2])
    if not host or (match[1] and isinstance(host, str)):
        return None
    return Authority(host, int(match[3]) if match[3] else None)


def read_host(text: str) -> Host:
    """Returns a host as hosts are compared; an IPv4 address that is written as an IPv6 one is the IPv4 address."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return text.lower().removesuffix(".")
    return getattr(address, "ipv4_mapped", None) or address


class Reach:
    """The hosts and origins from which a server may be used.

    Args:
        bound: the address or name that it listens on. An address that stands for all of the machine's lets any address
            in: in a container, or where NAT is used, a machine does not know its own, and no page can lead an address
            elsewhere.
        allowed_hosts: further names and addresses; `*.example.org` is all names below example.org, `*` any.
        allowed_origins: origins of other web pages that may use it; `*` is any.
        keyed: whether clients need a key. A page does not know it, so it may ask under any name.
    """

    def __init__(
        self, bound: str, allowed_hosts: Sequence[str] = (), allowed_origins: Sequence[str] = (), *, keyed: bool = False
    ) -> None:
        own = read_host(bound or "0.0.0.0")
        self._any_host = keyed or "*" in allowed_hosts
        self._any_address = not isinstance(own, str) and own.is_unspecified
        self._hosts: set[Host] = {"localhost", own, *map(read_host, allowed_hosts)}
        self._below = tuple(name.lower()[1:] for name in allowed_hosts if name.startswith("*."))
        self._origins = frozenset(allowed_origins)

    def check(self, scope: Scope) -> None:
        """Checks a request, or the handshake of a WebSocket.

        Raises:
            ApiError: 400, 403 or 415; it may come from a page that may not use the server.
        """
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        named = read_authority(hosts[0]) if len(hosts) == 1 else None
        if not self._any_host:
            self._check_host(hosts, named, scope.get("server"))
        self._check_page(headers, named, scope.get("method", "GET"))
        _check_type(headers, _FORM if scope.get("path") == FILES else _JSON)

    def _check_host(self, hosts: Sequence[str], named: Authority | None, server: tuple[str, int | None] | None) -> None:
        if named is None:
            shown = ", ".join(hosts)[:_MOST_SHOWN]
            raise ApiError(
                400, f"Host: must name the server once, as HOST or HOST:PORT, not {shown!r}", code="bad_host"
            )
        host = named.host
        if host in self._hosts or (isinstance(host, str) and host.endswith(self._below)):
            return
        if not isinstance(host, str) and (self._any_address or host.is_loopback or _is_at(server, host)):
            return
        name = str(host)[:_MOST_SHOWN]
        message = (
            f"Host: without an API key, this server answers under names of its own machine alone, and {name!r} is none "
            f"that it knows: start it with --allowed-host {name}, or with --api-key."
        )
        raise ApiError(403, message, type="permission_error", code="host_not_allowed")

    def _check_page(self, headers: Headers, named: Authority | None, method: str) -> None:
        origins = headers.getlist("origin")
        for origin in origins:
            if not (self._allows(origin) or _is_same(origin, named)):
                shown = origin[:_MOST_SHOWN]
                raise _foreign(f"of the origin {shown!r}", "'*'" if shown == "null" else shown)
        ours = all(site in _OURS for site in headers.getlist("sec-fetch-site"))
        if ours or "*" in self._origins or any(map(self._allows, origins)):
            return
        # A link that the user follows: the answer is shown alone, and no other page can read it.
        if (method, headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) != ("GET", "navigate", "document"):
            raise _foreign("of another origin", "ORIGIN")

    def _allows(self, origin: str) -> bool:
        return origin in self._origins or "*" in self._origins


def _is_at(server: tuple[str, int | None] | None, host: Host) -> bool:
    """Whether a connection has come to an address, by the address of this end of it."""
    return server is not None and read_host(server[0]) == host


def _is_same(origin: str, named: Authority | None) -> bool:
    """Whether an origin is that of the server, under the name in `Host`."""
    match = _ORIGIN.fullmatch(origin)
    if match is None or named is None:
        return False
    # The scheme of the request does not count: a proxy may have ended TLS.
    scheme, page = match[1].lower(), read_authority(match[2])
    return page is not None and page.at(scheme) == named.at(scheme)


def _foreign(which: str, allowed: str) -> ApiError:
    message = f"Web pages {which} may not use this server: start it with --cors-origin {allowed} if they should."
    return ApiError(403, message, type="permission_error", code="origin_not_allowed")


def _check_type(headers: Headers, allowed: re.Pattern[str]) -> None:
    """Checks the type of a body, if there is one: JSON, but for uploads."""
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    types = headers.getlist("content-type")
    if not types or not all(map(allowed.fullmatch, types)):
        but = f"not {', '.join(types)[:_MOST_SHOWN]!r}" if types else "which is missing"
        words = "JSON: send the header 'Content-Type: application/json'" if allowed is _JSON else "a form with a file"
        message = f"The body must be {words}, {but}."
        raise ApiError(415, message, code="unsupported_media_type")


def reach_of(config: ServerConfig, bound: str) -> Reach:
    """Returns the reach of a server with these settings that listens on `bound`.

    Raises:
        BadArgument: the file of tenants cannot be read.
    """
    tenants = {} if config.tenants is None else read_tenants(config.tenants).keys
    return Reach(bound, config.allowed_host, config.cors_origin, keyed=bool(config.api_key or tenants))


class Guard:
    """The ASGI middleware that answers requests which `Reach` refuses.

    Args:
        app: the application.
        reach: allows requests.
    """

    def __init__(self, app: ASGIApp, reach: Reach) -> None:
        self._app, self._reach = app, reach

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            self._reach.check(scope)
        except ApiError as error:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            else:
                await error_response(error, scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
