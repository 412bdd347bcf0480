"""Forms of uploads, in pieces of any size."""

from __future__ import annotations

import io

import pytest

from mainstem.server.batches import upload
from mainstem.server.batches.upload import Form
from mainstem.server.errors import ApiError

TYPE = "multipart/form-data; boundary=XyZ"


def part(name: str, content: bytes, filename: str = "") -> bytes:
    more = f'; filename="{filename}"' if filename else ""
    return f'--XyZ\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + content + b"\r\n"


def read(body: bytes, step: int, kind: str = TYPE) -> tuple[Form, bytes]:
    file = io.BytesIO()
    form = Form(kind, file)
    for at in range(0, len(body), step):
        form.feed(body[at : at + step])
    return form, file.getvalue()


@pytest.mark.parametrize("content", [b"", b"a\n", b"\r\n--XyY\r\n--Xy\r\n\r\n-", b"--XyZ", bytes(range(256)) * 9])
@pytest.mark.parametrize("step", [1, 2, 7, 64, 10000])
def test_a_file_comes_in_pieces(content: bytes, step: int) -> None:
    body = b"preamble\r\n" + part("purpose", b"batch") + part("file", content, "a.jsonl") + b"--XyZ--\r\nepilogue"
    form, taken = read(body, step)
    assert (form.fields, form.filename, taken) == ({"purpose": "batch"}, "a.jsonl", content)


def test_a_boundary_may_be_quoted() -> None:
    form, taken = read(part("file", b"x", "f") + b"--XyZ--", 5, 'multipart/form-data; charset=utf-8; boundary="XyZ"')
    assert (form.fields, taken) == ({}, b"x")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (part("purpose", b"batch") + b"--XyZ--", "file: this field is required"),
        (part("file", b"x", "f"), "no end"),
        (part("file", b"x", "f") + part("file", b"y", "g") + b"--XyZ--", "a name of its own"),
        (part("a", b"x") + part("a", b"y") + b"--XyZ--", "a name of its own"),
        (b"--XyZ\r\nContent-Type: text/plain\r\n\r\nx\r\n--XyZ--", "a name of its own"),
        (b"--XyZ?\r\n", "goes on"),
        (b"nothing", "no end"),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(ApiError, match=says):
        _ = read(body, 3)[0].fields


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=x"])
def test_other_types_are_refused(kind: str) -> None:
    with pytest.raises(ApiError, match="Content-Type"):
        Form(kind, io.BytesIO())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ('filename="ü 你好.jsonl"', "ü 你好.jsonl"),
        ("filename=ü.jsonl", "ü.jsonl"),
        ("filename*=UTF-8''%C3%BC%20a.jsonl", "ü a.jsonl"),
        ("filename*=utf-8'de'%C3%BC.jsonl", "ü.jsonl"),
        ("filename=\"u.jsonl\"; filename*=UTF-8''%C3%BC.jsonl", "ü.jsonl"),
        ("filename*=UTF-8''%C3%BC.jsonl; filename=u.jsonl", "ü.jsonl"),
        ("filename*=iso-8859-1''%FC.jsonl", "ü.jsonl"),
        ('FileName="a;b=\\"c.jsonl"', 'a;b="c.jsonl'),
        ("filename*=UTF-8''%FF", "\ufffd"),
        ("filename*=raw_unicode_escape''%5Cud800", "?"),
        ('filename=""', "upload"),
    ],
)
def test_names_of_files_are_in_any_script(given: str, name: str) -> None:
    head = f'--XyZ\r\nContent-Disposition: form-data; name="file"; {given}\r\n\r\nx\r\n--XyZ--'
    assert read(head.encode(), 5)[0].filename == name


@pytest.mark.parametrize("charset", ["idna", "a\0"])
def test_a_charset_that_decodes_nothing_is_refused(charset: str) -> None:
    head = f"--XyZ\r\nContent-Disposition: form-data; name=file; filename*={charset}''%FF\r\n\r\nx\r\n--XyZ--"
    with pytest.raises(ApiError, match="filename"):
        read(head.encode(), 5)


def test_fields_and_heads_are_bounded() -> None:
    most = upload._MOST_FIELDS
    assert most == 1 << 14
    form, _ = read(part("a", b"x" * most) + part("file", b"", "f") + b"--XyZ--", 1000)
    assert len(form.fields["a"]) == most
    with pytest.raises(ApiError, match="too long"):
        read(part("a", b"x" * (most + 1)) + part("file", b"", "f") + b"--XyZ--", 1000)
    head = b'Content-Disposition: form-data; name="file"; filename="f"\r\nX: '
    fits = b"--XyZ\r\n" + head + b"y" * (most - len(head))
    form, taken = read(fits + b"\r\n\r\nz\r\n--XyZ--", 1000)
    assert (form.fields, taken) == ({}, b"z")
    with pytest.raises(ApiError, match="too long"):
        read(fits + b"y\r\n\r\nz\r\n--XyZ--", 1000)
