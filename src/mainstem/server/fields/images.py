"""Images of requests: from a URL to decoded pixels, within limits.

    data:image/png;base64,...   always
    http://, https://           from allowed hosts, or from any public address if HTTP is allowed; no redirects
    file:///...                 from the allowed folder

The size is checked before the bytes are decoded, and the number of pixels before they are unpacked. An image is the
only frame of its file, rotated to its EXIF orientation (as transformers' own loader does), in the mode of the file. The
model's processor receives it in RGB, without alpha.

All functions here may be slow; callers with an event loop run them on a thread.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import io
import ipaddress
import os
import socket
import ssl
import stat
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

from mainstem.server.errors import ApiError
from mainstem.settings.server import ImagePolicy

if TYPE_CHECKING:
    from PIL.Image import Image

Resolve = Callable[[str, int], list[str]]
"""resolve(host, port) returns the addresses of a host."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_READ_BYTES = 1 << 16
# What Pillow raises on malformed files.
_BROKEN = (
    OSError, SyntaxError, ValueError, TypeError, EOFError, LookupError, ArithmeticError, MemoryError, struct.error,
    zlib.error,
)  # fmt: skip


class Pictures:
    """Fetches and decodes images within the limits of a policy.

    Args:
        policy: the allowed sources and the limits.
        resolve: finds the addresses of a host; None: with the system's resolver.
    """

    def __init__(self, policy: ImagePolicy, resolve: Resolve | None = None) -> None:
        self._policy = policy
        self._resolve = resolve or _addresses

    def load(self, url: str, at: str, taken: int = 0) -> Image:
        """Returns the image at a URL.

        Args:
            url: a URL with one of the schemes above.
            at: the path of the field, for errors.
            taken: pixels of the request's images that were loaded before.

        Raises:
            ApiError: 400; the message says what is wrong or not allowed.
        """
        try:
            return self._decode(self._fetch(url), self._policy.image_max_pixels - taken)
        except _Refused as error:
            raise ApiError(400, f"{at}: {error}", param=at, code=error.code) from error

    def _fetch(self, url: str) -> bytes:
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            return self._from_data(url)
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise _Refused(f"not a URL: {error}") from None
        if scheme in ("http", "https"):
            return self._from_http(parts, port or (443 if scheme == "https" else 80))
        if scheme == "file":
            return self._from_file(parts)
        raise _Refused("must be a URL with the scheme data, http, https or file")

    def _from_data(self, url: str) -> bytes:
        head, comma, payload = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise _Refused("a data URL must read data:image/...;base64,...")
        self._check_bytes(len(payload) // 4 * 3 - 2)
        try:
            data = base64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError):
            raise _Refused("the data URL is not valid base64") from None
        self._check_bytes(len(data))
        return data

    def _from_file(self, parts: SplitResult) -> bytes:
        folder = self._policy.image_folder
        if folder is None:
            raise _Refused("this server does not read files", "image_url_not_allowed")
        try:
            path = Path(unquote(parts.path)).resolve(strict=True)
            if parts.netloc not in ("", "localhost") or not path.is_relative_to(folder.resolve()):
                raise _Refused("not a file that this server reads", "image_url_not_allowed")
            # The flags reject a link that replaced the file meanwhile, and keep a pipe from blocking the thread.
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
        except (OSError, ValueError, RuntimeError):
            raise _Refused("not a file that this server reads", "image_url_not_allowed") from None
        with file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _Refused("not a file that this server reads", "image_url_not_allowed")
            data = file.read(self._policy.image_max_bytes + 1)
        self._check_bytes(len(data))
        return data

    # --- http ---------------------------------------------------------------------------------------------------------

    def _from_http(self, parts: SplitResult, port: int) -> bytes:
        host = (parts.hostname or "").lower()
        self._check_host(host, parts)
        try:
            with self._connect(parts.scheme, host, port) as link:
                return self._get_in_time(link, parts, host, port)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise _Refused(f"cannot be fetched from {host}: {type(error).__name__}", "image_not_fetched") from error

    def _check_host(self, host: str, parts: SplitResult) -> None:
        if not self._policy.image_http and host not in self._policy.image_host:
            raise _Refused("this server does not fetch images from this host; send a data URL", "image_url_not_allowed")
        if not host or parts.username is not None or any(sign <= " " for sign in parts.path + parts.query):
            raise _Refused("must be a URL with a host, without a user name, blanks or control characters")

    def _connect(self, scheme: str, host: str, port: int) -> socket.socket:
        """Connects to the checked address itself, because a second lookup could return another address."""
        addresses = self._resolve(host, port)
        if self._policy.image_http and not all(map(_is_public, addresses)):
            raise _Refused("this server does not fetch images from private addresses", "image_url_not_allowed")
        link = socket.create_connection((addresses[0], port), self._policy.image_timeout_s)
        if scheme == "http":
            return link
        tls = ssl.create_default_context()
        return tls.wrap_socket(link, server_hostname=host, do_handshake_on_connect=False)

    def _get_in_time(self, link: socket.socket, parts: SplitResult, host: str, port: int) -> bytes:
        """Reads a response, with a timer that ends the connection even if the host sends a byte now and then."""
        late = threading.Event()

        def end() -> None:
            late.set()
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(self._policy.image_timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            data = self._get(link, parts, host, port)
        finally:
            timer.cancel()
        if late.is_set():
            raise TimeoutError
        return data

    def _get(self, link: socket.socket, parts: SplitResult, host: str, port: int) -> bytes:
        if isinstance(link, ssl.SSLSocket):
            link.do_handshake()
        client = http.client.HTTPConnection(host, port)
        client.sock = link
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        client.request("GET", target, headers={"Host": parts.netloc, "Connection": "close"})
        with client.getresponse() as response:
            if response.status != 200:
                raise _Refused(f"{host} returned {response.status}; redirects are not followed", "image_not_fetched")
            self._check_bytes(response.length or 0)
            data = bytearray()
            while chunk := response.read1(_READ_BYTES):
                data += chunk
                self._check_bytes(len(data))
            if response.length:
                raise http.client.IncompleteRead(bytes(data), response.length)
        return bytes(data)

    # --- pixels -------------------------------------------------------------------------------------------------------

    def _check_bytes(self, size: int) -> None:
        if size > self._policy.image_max_bytes:
            raise _Refused(f"an image may have at most {self._policy.image_max_bytes} bytes", "image_too_large")

    def _decode(self, data: bytes, max_pixels: int) -> Image:
        from PIL import Image, ImageOps

        try:
            picture = Image.open(io.BytesIO(data), formats=_FORMATS)
            self._check_shape(picture, max_pixels)
            picture.load()
            return ImageOps.exif_transpose(picture)
        except Image.DecompressionBombError as error:
            raise _Refused("the image has too many pixels", "image_too_large") from error
        except _BROKEN as error:
            raise _Refused(f"not a whole image in one of the formats {', '.join(_FORMATS)}", "invalid_image") from error

    def _check_shape(self, picture: Image, max_pixels: int) -> None:
        """Checks the number of pixels and frames by the header of the file, before pixels are unpacked."""
        width, height = picture.size
        if width * height > max_pixels:
            limit = self._policy.image_max_pixels
            message = f"the image has {width} x {height} pixels: a request may have at most {limit}, over all images"
            raise _Refused(message, "image_too_large")
        if getattr(picture, "is_animated", False):
            raise _Refused("the image has several frames; only still images are supported", "invalid_image")


class _Refused(Exception):
    """Why an image is refused, without the name of the field."""

    def __init__(self, message: str, code: str = "invalid_image_url") -> None:
        super().__init__(message)
        self.code = code


def _addresses(host: str, port: int) -> list[str]:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in infos]


def _is_public(address: str) -> bool:
    """Returns whether an address is public, and no detour to another address (RFC 6890; 6052, 3056, 4380)."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return _is_public(str(ip.ipv4_mapped))
        if ip not in _UNICAST or ip.sixtofour is not None or ip.teredo is not None:
            return False
    return ip.is_global and not ip.is_multicast


_UNICAST = ipaddress.IPv6Network("2000::/3")
