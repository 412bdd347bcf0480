"""Pictures of requests: the sources that are allowed, and what is refused before it costs anything."""

from __future__ import annotations

import base64
import io
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import patience
from PIL import Image

from mainstem.errors import BadArgument
from mainstem.server.errors import ApiError
from mainstem.server.fields.images import Pictures
from mainstem.settings.server import ImagePolicy

AT = "messages[0].content[0].image_url.url"


def png(width: int = 8, height: int = 6, kind: str = "PNG", **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes, head: str = "data:image/png;base64") -> str:
    return f"{head},{base64.b64encode(data).decode()}"


def refused(policy: ImagePolicy, url: str, resolve: Any = None) -> tuple[str, str]:
    """The message and code of the refusal."""
    with pytest.raises(ApiError) as caught:
        Pictures(policy, resolve).load(url, AT)
    assert (caught.value.status, caught.value.detail.param) == (400, AT)
    assert caught.value.detail.message.startswith(f"{AT}: ")
    return caught.value.detail.message, str(caught.value.detail.code)


# ---------------------------------------------------------------- data URLs and pixels


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_a_data_url_is_always_taken(kind: str) -> None:
    picture = Pictures(ImagePolicy()).load(data_url(png(kind=kind), "DATA:image/x;base64"), AT)
    assert picture.size == (8, 6)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png,abc", "must read"),
        ("data:image/png;base64", "must read"),
        ("data:image/png;base64,????", "not valid base64"),
        ("data:image/png;base64,é", "not valid base64"),
        (data_url(b"no image"), "not a whole image"),
        (data_url(png()[:-30]), "not a whole image"),
        (data_url(png(kind="BMP")), "not a whole image"),
        ("", "scheme"),
        ("cat.png", "scheme"),
        ("ftp://a/b", "scheme"),
        ("http://[", "not a URL"),
        ("http://a:x/", "not a URL"),
    ],
)
def test_what_is_no_picture_is_refused(url: str, says: str) -> None:
    assert says in refused(ImagePolicy(), url)[0]


def test_too_many_bytes_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base64, "b64decode", lambda *_args, **_options: pytest.fail("decoded"))
    assert refused(ImagePolicy(image_max_bytes=1000), f"data:;base64,{'A' * 1400}")[1] == "image_too_large"


def test_a_picture_of_just_the_bytes_is_taken() -> None:
    data = png()
    Pictures(ImagePolicy(image_max_bytes=len(data))).load(data_url(data), AT)
    assert refused(ImagePolicy(image_max_bytes=len(data) - 1), data_url(data))[1] == "image_too_large"


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header declares a huge size, and which holds a few zeros."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [6000, 60000])
def test_a_bomb_is_refused_by_its_head(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda _self: pytest.fail("unpacked"))
    assert refused(ImagePolicy(), data_url(bomb(side, side)))[1] == "image_too_large"


def test_a_picture_of_just_the_pixels_is_taken() -> None:
    Pictures(ImagePolicy(image_max_pixels=48)).load(data_url(png()), AT)
    assert refused(ImagePolicy(image_max_pixels=47), data_url(png()))[1] == "image_too_large"
    Pictures(ImagePolicy(image_max_pixels=96)).load(data_url(png()), AT, taken=48)
    with pytest.raises(ApiError, match="a request may have at most 96, over all images"):
        Pictures(ImagePolicy(image_max_pixels=96)).load(data_url(png()), AT, taken=49)


def test_a_picture_is_turned_as_its_orientation_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    picture = Pictures(ImagePolicy()).load(data_url(png(kind="JPEG", exif=exif)), AT)
    assert picture.size == (6, 8)


def test_several_frames_are_refused() -> None:
    frames = [Image.new("L", (4, 4), colour) for colour in (0, 99)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    assert "several frames" in refused(ImagePolicy(), data_url(file.getvalue()))[0]


# ---------------------------------------------------------------- files


def test_files_are_read_in_the_folder_that_is_allowed_only(tmp_path: Path) -> None:
    folder = tmp_path / "shown"
    folder.mkdir()
    inside, outside = folder / "a b.png", tmp_path / "secret.png"
    for path in (inside, outside):
        path.write_bytes(png())
    (folder / "link.png").symlink_to(outside)
    policy = ImagePolicy(image_folder=folder)
    assert Pictures(policy).load(inside.as_uri(), AT).size == (8, 6)
    for url in (
        outside.as_uri(),
        f"file://{folder}/../secret.png",
        f"file://{folder}/%2e%2e/secret.png",
        (folder / "link.png").as_uri(),
        folder.as_uri(),
        f"file://{folder}/none.png",
        f"file://other{inside}",
        f"file://{folder}/%00",
    ):
        assert refused(policy, url) == (f"{AT}: not a file that this server reads", "image_url_not_allowed")
    assert refused(ImagePolicy(), inside.as_uri())[1] == "image_url_not_allowed"
    assert refused(ImagePolicy(image_folder=folder, image_max_bytes=10), inside.as_uri())[1] == "image_too_large"


# ---------------------------------------------------------------- http


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answers: dict[str, Callable[[], None]] = {
            "/cat.png?size=1": lambda: self.give(png()),
            "/moved": lambda: self.give(b"", 302, Location="/cat.png?size=1"),
            "/none": lambda: self.give(b"", 404),
            "/long": lambda: self.give(png(), length=10**9),
            "/endless": self.endless,
            "/slow": self.slow,
            "/short": lambda: self.give(png(), length=len(png()) + 1),
        }
        answers[self.path]()

    def give(self, data: bytes, status: int = 200, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data) if length is None else length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        with_ = b"x" * 4096
        for _ in range(1000):
            self.wfile.write(with_)

    def slow(self) -> None:
        self.send_response(200)
        self.end_headers()
        for byte in png():
            self.wfile.write(bytes([byte]))
            self.server.stop.wait(0.05)  # type: ignore[attr-defined]

    def log_message(self, *_args: Any) -> None:
        """Logs nothing."""


class Sites(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_args: Any) -> None:
        """Ignores errors: clients may close connections early."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = Sites(("127.0.0.1", 0), Site)
    server.stop = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_address[1]
    server.stop.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


HERE = ImagePolicy(image_host=("127.0.0.1", "here.test"), image_max_bytes=1 << 16, image_timeout_s=patience(5))


def here(_host: str, _port: int) -> list[str]:
    return ["127.0.0.1"]


def test_http_is_refused_unless_it_is_allowed(port: int) -> None:
    url = f"http://127.0.0.1:{port}/cat.png?size=1"
    assert refused(ImagePolicy(), url)[1] == "image_url_not_allowed"
    assert refused(ImagePolicy(image_host=("elsewhere",)), url)[1] == "image_url_not_allowed"
    assert Pictures(HERE).load(url, AT).size == (8, 6)


def test_a_host_that_is_allowed_by_name_may_be_anywhere(port: int) -> None:
    assert Pictures(HERE, here).load(f"http://Here.TEST:{port}/cat.png?size=1#part", AT).size == (8, 6)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1",
        "2002:7f00:1::", "2001:0:7f00:1::", "ff02::1",
    ],
)  # fmt: skip
def test_private_addresses_are_not_contacted_even_after_a_public_one(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_args: pytest.fail("connected"))
    policy = ImagePolicy(image_http=True)
    for found in ([address], ["93.184.216.34", address]):
        url = "http://site.test/cat.png"
        assert refused(policy, url, lambda _host, _port, found=found: found)[1] == "image_url_not_allowed"


def test_public_addresses_are_asked_as_they_were_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def connect(address: Any, _timeout_s: float) -> Any:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    found = iter([["93.184.216.34"], ["127.0.0.1"]])  # a second look-up would give another
    assert (
        refused(ImagePolicy(image_http=True), "https://site.test/a", lambda *_: next(found))[1] == "image_not_fetched"
    )
    assert asked == [("93.184.216.34", 443)]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/moved", "image_not_fetched"),
        ("/none", "image_not_fetched"),
        ("/long", "image_too_large"),
        ("/endless", "image_too_large"),
        ("/short", "image_not_fetched"),
    ],
)
def test_answers_that_are_not_taken(port: int, path: str, code: str) -> None:
    assert refused(HERE, f"http://127.0.0.1:{port}{path}")[1] == code


@pytest.mark.deadline
def test_a_site_that_sends_a_byte_now_and_then_runs_out_of_time(port: int) -> None:
    policy = ImagePolicy(image_host=("127.0.0.1",), image_timeout_s=0.3)
    assert refused(policy, f"http://127.0.0.1:{port}/slow")[1] == "image_not_fetched"


@pytest.mark.parametrize(
    "url", ["http://me@127.0.0.1/", "http:///a", "http://127.0.0.1/a b", "http://127.0.0.1/\r\nX: 1"]
)
def test_urls_that_are_not_plain_are_refused(url: str) -> None:
    refused(HERE, url)
    refused(ImagePolicy(image_http=True), url, here)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image_max_bytes", 0),
        ("image_max_pixels", 0),
        ("max_images", 0),
        ("image_timeout_s", 0),
        ("image_folder", Path("/none/such")),
        ("image_host", ("",)),
    ],
)
def test_a_policy_names_what_is_wrong_with_it(field: str, value: Any) -> None:
    with pytest.raises(BadArgument, match=f"^{field} = "):
        ImagePolicy(**{field: value})
