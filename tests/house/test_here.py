"""What a machine has, and what settings need of it: said before a model is loaded, in one line."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from mainstem import cli
from mainstem.errors import BadArgument
from mainstem.here import Memory, check_output, listen
from mainstem.runtime.parallel import launch as parallel
from mainstem.runtime.readiness import check_machine, too_large
from mainstem.settings.engine import EngineConfig, HostSize, TierConfig

GIB = 1 << 30


@contextmanager
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


# ---------------------------------------------------------------- files, addresses


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path, says in ((tmp_path, "not a folder"), (tmp_path / "no" / "file", f"{tmp_path / 'no'} does not")):
        with pytest.raises(BadArgument, match=says):
            check_output("record", path)
    check_output("record", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "", "*"])
def test_an_address_of_this_machine_is_bound(host: str) -> None:
    with closing(listen(host, 0)) as bound:
        assert bound.getsockname()[1] > 0


def test_a_port_that_is_taken_names_the_settings_port_and_another_host_its_host() -> None:
    with taken() as port, pytest.raises(BadArgument) as caught:
        listen("127.0.0.1", port)
    assert (caught.value.name, caught.value.value) == ("port", port)
    assert caught.value.allowed == f"free: another program listens at 127.0.0.1 port {port}"
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(BadArgument, match="an address of this machine") as caught:
            listen(host, 0)
        assert (caught.value.name, caught.value.value) == ("host", host)


# ---------------------------------------------------------------- memory


def there(machine: str) -> Memory:
    return Memory(total=8 * GIB, free=4 * GIB)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (EngineConfig(kv_bytes=9 * GIB), "kv_bytes = '9.66 GB': must be at most 8.59 GB: of 8.59 GB, 4.29 GB are free"),
        (
            EngineConfig(kv_bytes=5 * GIB, tiers=TierConfig(HostSize(host_bytes=4 * GIB))),
            "host_bytes = '4.29 GB': must be at most 3.22 GB: .* less 5.37 GB for other pages",
        ),
        (EngineConfig(kv_bytes=5 * GIB, tp=2), "at most 4.29 GB, for each of 2 processes"),
    ],
)
def test_more_memory_than_there_is_is_refused_with_how_much_there_is(config: EngineConfig, says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        check_machine(config, there)


def test_more_memory_than_is_free_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_machine(EngineConfig(kv_bytes=3 * GIB), there)
        assert not caplog.records
        check_machine(EngineConfig(kv_bytes=5 * GIB), there)
    assert "--kv-bytes 5.37 GB: pages may take more memory than is free" in caplog.text


def test_where_the_memory_is_unknown_nothing_is_refused() -> None:
    def unknown(machine: str) -> Memory:
        raise OSError("no /proc")

    check_machine(EngineConfig(kv_bytes=9 * GIB), unknown)


def test_memory_that_could_not_be_allocated_is_told_from_what_there_is() -> None:
    error = too_large("host_bytes", 5 * GIB, "cpu")
    assert (error.name, error.value) == ("host_bytes", "5.37 GB") and " are free" in error.allowed


# ---------------------------------------------------------------- before a model is loaded


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded first")

    monkeypatch.delenv("MAINSTEM_DEBUG", raising=False)
    monkeypatch.setattr(parallel, "load_model", load)


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Returns the line in which `mainstem serve` refuses options."""
    assert cli.main(["serve", *([] if "--port" in options else ["--port", "0"]), *options]) in (1, 2)
    err = capsys.readouterr().err
    assert "Traceback" not in err and "internal error" not in err
    return err.splitlines()[-1]


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--host 192.0.2.1", "--host 192.0.2.1: must be an address of this machine"),
        ("--host no.such.host.invalid", "--host no.such.host.invalid: must be an address of this machine"),
        ("--port TAKEN", "--port TAKEN: must be free: another program listens at 127.0.0.1 port TAKEN"),
        ("--record TMP/no/r.jsonl", "--record TMP/no/r.jsonl: must be a file in a folder that exists; TMP/no does not"),
        ("--record TMP", "--record TMP: must be a file, not a folder"),
        ("--record TMP/text", "--record TMP/text: must be a new file, or a recording to append to"),
        ("--public-prefix TMP/no", "--public-prefix TMP/no: must be a file of lines of JSON"),
        ("--public-prefix TMP/text", "TMP/text:1 some text: must be a line with either"),
        ("--tenants TMP/no", "--tenants TMP/no: must be"),
        ("--image-folder TMP/no", "--image-folder TMP/no: must be a folder"),
        ("--kv-events-keys TMP/no --kv-events tcp://127.0.0.1:0", "--kv-events-keys TMP/no: must be a folder"),
        ("--kv-events tcp://127.0.0.1:TAKEN", "--kv-events tcp://127.0.0.1:TAKEN: must be an address of this machine"),
        ("--peer-listen 127.0.0.1:TAKEN", "--peer-listen 127.0.0.1:TAKEN: must be an address of this machine"),
        ("--storage file:TMP/text", "TMP/text"),
        ("--storage redis://127.0.0.1:TAKEN?timeout=1s", "127.0.0.1:TAKEN"),
        ("--storage no.such.module:Store", "no module no"),
        ("--storage memory: --storage-codec TMP/text", "--storage-codec TMP/text: must be a file written by"),
        ("--adapter a=TMP/no", "--adapter a=TMP/no: must be a folder with adapter_config.json"),
        ("--kv-bytes 1000TB", "--kv-bytes 1 PB: must be at most"),
        ("--host-bytes 1000TB", "--host-bytes 1 PB: must be at most"),
    ],
)
def test_what_a_setting_names_is_tried_first(
    options: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("some text\n")

    def filled(text: str) -> str:
        return text.replace("TMP", str(tmp_path)).replace("TAKEN", str(port))

    with taken() as port:
        assert filled(says) in refused(capsys, *filled(options).split())
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("options", "package", "extra"),
    [
        ("--otlp http://127.0.0.1:4318", "opentelemetry", "otlp"),
        ("--adapter a=.", "peft", "lora"),
        ("--kv-events tcp://127.0.0.1:0", "zmq", "events"),
        ("--peers 127.0.0.1:1", "zmq", "events"),
        ("--peer-listen 127.0.0.1:0", "zmq", "events"),
        ("--storage memory:", "blake3", "storage"),
        ("--storage redis://127.0.0.1:1", "redis", "redis"),
        ("--storage s3://bucket", "obstore", "s3"),
        ("--storage mooncake://127.0.0.1:1", "mooncake", "mooncake"),
    ],
)
def test_a_missing_extra_is_named_first(
    options: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert f"pip install 'mainstem[{extra}]'" in refused(capsys, *options.split())
