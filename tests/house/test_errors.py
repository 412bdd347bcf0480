"""Errors show no passwords."""

from __future__ import annotations

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
