"""Errors show no passwords, and name what is wrong before what it is and what is allowed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from mainstem.errors import BadArgument, redacted


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        ("redis://anna:hunter2@10.0.0.1:6379/0?ttl=5", "redis://***@10.0.0.1:6379/0?ttl=5"),
        ("redis://:hun@ter2/@10.0.0.1", "redis://***@10.0.0.1"),
        ("s3://bucket?endpoint=http://anna:hunter2@127.0.0.1:9000", "s3://***@127.0.0.1:9000"),
        ("my.store:Mine?level=1&password=hunter2&name=a", "my.store:Mine?level=1&password=***&name=a"),
        ("my.store:Mine?API_KEY=hunter2", "my.store:Mine?API_KEY=***"),
        ("shared(linger=5&token=hunter2&x=1)+memory:", "shared(linger=5&token=***&x=1)+memory:"),
        ("tee+file:/a,my.store:Mine?client_secret=a=hunter2", "tee+file:/a,my.store:Mine?client_secret=***"),
        ("password=hunter2", "password=***"),
        ("anna:hunter2@127.0.0.1:9000", "***@127.0.0.1:9000"),
    ],
)
def test_logins_and_secret_options_are_hidden(spec: str, shown: str) -> None:
    assert redacted(spec) == shown
    error = BadArgument("storage", spec, "another one")
    assert "hunter2" not in f"{error!r} {error} {error.value}"
    assert shown in str(error)


@pytest.mark.parametrize(
    "spec",
    [
        "file:/var/a@b/kv?capacity=64GiB&sync=none",
        "shared(host_bytes=4GiB)+redis://127.0.0.1:6379/0?user=anna&password_env=REDIS&ca_file=/a/ca.pem",
        "my.store:Mine?key_file=/etc/key",
        "readonly+s3://bucket/prefix?endpoint=http://127.0.0.1:9000",
        "",
    ],
)
def test_what_is_no_secret_is_shown(spec: str) -> None:
    assert redacted(spec) == spec


# ---------------------------------------------------------------- the arguments of each error

SOURCE = Path(__file__).parents[2] / "src" / "mainstem"
_NAMES = {"name", "argument", "at", "place", "kind"}
_ALLOWED = {"allowed", "_ALLOWED", "whole", "wanted", "words", "range_"}


def _last_word(node: ast.expr) -> str:
    """Returns the name of a variable or attribute, or of what a call or an index is of."""
    if isinstance(node, ast.Call):
        return _last_word(node.func)
    if isinstance(node, ast.Subscript):
        return _last_word(node.slice)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.IfExp):
        return _is_text(node.orelse)
    if isinstance(node, ast.BoolOp):
        return _is_text(node.values[-1])
    if isinstance(node, ast.BinOp):
        return _is_text(node.left)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_said(node: ast.expr) -> bool:
    """Whether an expression says what is allowed, in words."""
    return _is_text(node) or _last_word(node) in {*_ALLOWED, "one_of"}


def _disordered(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _last_word(node.func) == "BadArgument":
            name, _, allowed = node.args
            if not (_is_text(name) or _last_word(name) in _NAMES) or not _is_said(allowed):
                yield ast.unparse(node)


def test_each_error_names_the_argument_then_its_value_then_what_is_allowed() -> None:
    """A test that only asks for the kind of an error does not see these in another order."""
    wrong = {
        str(path.relative_to(SOURCE)): found
        for path in sorted(SOURCE.rglob("*.py"))
        if (found := list(_disordered(path.read_text())))
    }
    assert not wrong


@pytest.mark.parametrize(
    "call",
    [
        'BadArgument(width, "width", "8 or 16")',
        'BadArgument("width", "8 or 16", width)',
        'BadArgument("8 or 16", width, name)',
        'BadArgument(value, name, "above 0")',
        'BadArgument(str(path), name, f"a file in {folder}")',
        'BadArgument("policy", f"one of {known}", policy)',
    ],
)
def test_another_order_is_found(call: str) -> None:
    assert list(_disordered(f"raise {call}"))
