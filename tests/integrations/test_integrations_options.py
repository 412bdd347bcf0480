"""The options of a store inside another engine, and what is said of a store that does not open."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mainstem.errors import BackendUnavailable, BadArgument
from mainstem.integrations.options import Options
from mainstem.integrations.vllm_plugin import register


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"storge": "file:./kv"}, "did you mean storage?"),
        ({"storage": "file:./kv", "host_byte": "1GiB"}, "did you mean host_bytes?"),
        ({"storage": "file:./kv", "colour": 3}, "one of storage, host_bytes, buffer_bytes, timeout, weights"),
        ({"storage": "fiel:./kv"}, "did you mean file:?"),
        ({}, "the spec of a store"),
        ({"storage": 3}, "the spec of a store"),
        ({"storage": "file:./kv", "host_bytes": "many"}, "host_bytes"),
        ({"storage": "file:./kv", "timeout": "soon"}, "timeout"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument) as caught:
        Options.read(given)
    assert said in str(caught.value)


def test_a_store_that_opens_is_left_closed(tmp_path: Path) -> None:
    options = Options.read({"storage": f"file:{tmp_path}/kv?capacity=1MiB", "host_bytes": 0})
    for _ in range(2):  # it has no owner afterwards
        options.try_store()


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("file:%/kv?capacty=1MiB", "did you mean capacity?"),
        ("file:%/kv?capacity=much", "capacity"),
        ("file:%/none/kv", "none"),
        ("redis://127.0.0.1:1/0", "redis"),
        ("no.such:Backend", "no module"),
    ],
)
def test_a_store_that_does_not_open_is_named_in_one_line(tmp_path: Path, storage: str, said: str) -> None:
    (tmp_path / "none").write_text("a file")
    options = Options.read({"storage": storage.replace("%", str(tmp_path)), "host_bytes": 0})
    with pytest.raises(BackendUnavailable) as caught:
        options.try_store()
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_password_is_neither_said_nor_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Any] = []

    def run(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "it is down")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(BackendUnavailable) as caught:
        Options.read({"storage": "redis://:hunter2@127.0.0.1:1/0", "host_bytes": 0}).try_store()
    assert "hunter2" not in str(caught.value) + str(commands) and "it is down" in str(caught.value)


OURS = {"kv_connector": "MainstemConnector", "kv_connector_module_path": "mainstem.integrations.vllm"}


class EngineArgs:
    """vLLM's, as far as the plug-in knows it."""

    def __init__(self, config: Any) -> None:
        self.kv_transfer_config = config

    def create_engine_config(self, usage: str = "", headless: bool = False) -> tuple[str, bool]:
        return usage, headless


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> type[EngineArgs]:
    """The class after vLLM has called the plug-in, twice."""
    module = ModuleType("vllm.engine.arg_utils")
    made = type("EngineArgs", (EngineArgs,), {"create_engine_config": EngineArgs.create_engine_config})
    module.EngineArgs = made  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", module)
    register()
    once = made.create_engine_config
    register()
    assert made.create_engine_config is once is not EngineArgs.create_engine_config
    return made


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("as_object", [False, True])
def test_vllm_names_a_wrong_store_in_one_line_when_it_reads_its_configuration(
    arguments: type[EngineArgs], caplog: pytest.LogCaptureFixture, nested: bool, as_object: bool
) -> None:
    config: Any = {**OURS, "kv_connector_extra_config": {"storage": "fiel:./kv"}}
    if nested:
        config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [config]}}
    with pytest.raises(BadArgument, match="did you mean file:"):
        arguments(SimpleNamespace(**config) if as_object else config).create_engine_config("x", headless=True)
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert line.name == "vllm.mainstem" and "--kv-transfer-config: storage = 'fiel:./kv'" in line.getMessage()


def test_vllm_goes_on_with_a_store_that_opens_and_without_one_of_ours(
    arguments: type[EngineArgs], tmp_path: Path
) -> None:
    good = {**OURS, "kv_connector_extra_config": {"storage": f"file:{tmp_path}/kv", "host_bytes": 0}}
    other = {"kv_connector": "OtherConnector", "kv_connector_extra_config": {"storage": "fiel:./kv"}}
    for config in (None, good, other, {"kv_connector": None}):
        assert arguments(config).create_engine_config("x", headless=True) == ("x", True)
    assert (tmp_path / "kv").is_dir()
