"""The command line: what it prints and where, its exit codes, and that it starts quickly."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rigs.fake_engine import FakeEngine

from mainstem import cli
from mainstem.errors import EngineClosed, ModelNotFound
from mainstem.server import serving
from mainstem.settings.engine import EngineConfig, ModelConfig
from mainstem.settings.fields import Settings
from mainstem.storage import open_backend


class Machine:
    """Replaces what the commands would load, and records how it was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = FakeEngine(lambda prompt: f"[{prompt}]", max_context=20_000)
        self.loaded: list[tuple[Any, ModelConfig]] = []
        self.config = EngineConfig()
        self.failure: Exception | None = None
        parallel, models = ModuleType("parallel"), ModuleType("models")
        parallel.open_engine = self._open  # type: ignore[attr-defined]
        models.DEFAULT_NAME = "the-default"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mainstem.runtime.parallel.launch", parallel)
        monkeypatch.setitem(sys.modules, "mainstem.runtime.models.loading", models)
        monkeypatch.setattr("mainstem.runtime.parallel.launch", parallel, raising=False)
        monkeypatch.setattr("mainstem.runtime.models.loading", models, raising=False)
        monkeypatch.setattr("mainstem.runtime.models.adapters.read_adapter", lambda path: None)

    @contextmanager
    def _open(
        self, name: str | None, model: ModelConfig, config: EngineConfig, *, progress: Any
    ) -> Iterator[FakeEngine]:
        if self.failure is not None:
            raise self.failure
        self.loaded.append((name, model))
        for stage, done in (("load", 0), ("load", 1), ("test", 0), ("measure", 0)):  # as with storage
            progress(stage, done, 1)
        self.config = config
        self.engine.closed = False
        with self.engine as engine:
            yield engine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv("MAINSTEM_DEBUG", raising=False)
    return Machine(monkeypatch)


def changed(settings: Settings) -> dict[str, Any]:
    """The settings that are not at their defaults."""
    values = {field.name: (field.default, getattr(settings, field.name)) for field in fields(settings)}
    return {name: value for name, (default, value) in values.items() if value != default}


def run(*arguments: str) -> int:
    return cli.main(list(arguments))


# --- help and errors ----------------------------------------------------------------------------------------------


def commands(app: Any = cli.app, *above: str) -> Iterator[list[str]]:
    for name in app:
        if not name.startswith("-"):
            yield [*above, name]
            if above == ():
                yield from commands(app[name], name)


@pytest.mark.parametrize("command", [[], *commands()], ids=" ".join)
def test_every_command_shows_examples_of_its_own(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command, "--help") == 0
    _, found, examples = capsys.readouterr().out.partition("Examples:")
    lines = [line for line in examples.splitlines() if line.startswith("  ") and "mainstem " in line]
    assert found and lines
    for line in lines:
        assert f"mainstem {' '.join(command)}".strip() in line


def test_every_option_says_what_it_is() -> None:
    for command in ("serve", "generate", "demo", "replay", "plan"):
        for argument in cli.app[command].assemble_argument_collection(parse_docstring=True):
            assert argument.parameter.help or not argument.show, (command, argument.name)


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from mainstem.cli import main; main(['serve', '--help']); main(['serve', '--port', 'x'])\n"
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn', 'msgspec', 'mainstem.runtime'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("mainstem ")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["serve", "--port", "abc"], 2, "mainstem: --port abc: must be a whole number."),
        (["serve", "--port", "70000"], 2, "--port 70000: must be 0 (any free port) to 65535"),
        (["serve", "--kv-bytes", "lots"], 2, "mainstem: --kv-bytes lots: must be bytes, or a number with KB,"),
        (["plan", "t", "--model", "m", "--gpu", "cpu", "--storage", "8TB"], 2, "mainstem: --storage 8TB: must be"),
        (["serve", "--drain-timeout-s", "-1"], 2, "--drain-timeout-s"),
        (["serve", "a", "b"], 2, "mainstem: serve takes [MODEL]: b is too much. Try 'mainstem serve --help'."),
        (["storage", "stats", "a", "b"], 2, "mainstem: storage stats takes SPEC: b is too much."),
        (["calibrate"], 2, "mainstem: calibrate needs TEXT. Try 'mainstem calibrate --help'."),
        (["serve", "--host"], 2, "mainstem: --host needs a value."),
        (["serve", "--warm=7"], 2, "mainstem: --warm 7: must be given without a value."),
        (["generate", "x", "--temperature", "hot"], 2, "mainstem: --temperature hot: must be a number."),
        (["nonsense"], 2, "nonsense"),
        (["generate", "x", "--top-p", "3"], 2, "--top-p 3.0: must be"),
        (["generate", "x", "--dtype", "int4"], 2, "int4"),
        (
            ["serve", "--quantization", "int3"],
            2,
            'Choose from: "none", "int4"',
        ),
        (["serve", "--max-context", "0"], 2, "mainstem: --max-context 0: must be"),
        (["serve", "--threads", "0"], 2, "mainstem: --threads 0: must be"),
        (["serve", "--cors-origin", "example.org"], 2, "mainstem: --cors-origin ('example.org',): must be"),
        (["generate", "--file", "/does/not/exist"], 1, "/does/not/exist"),
        (["generate", "a\udcffb"], 2, "'\\udcff' at character 1: must be text that UTF-8 can encode"),
        (["generate", "--no-chat", "a\udcffb"], 2, "UTF-8"),
        (["generate", "--no-chat", ""], 2, "mainstem: prompt (empty): must be"),
        (["serve", "--api-key", "a b"], 2, "mainstem: --api-key (not shown): must be"),
        (["serve", "--admin-key", "a b"], 2, "--admin-key (not shown): must be"),
        (["demo", "--prefix-tokens", "0"], 2, "--prefix-tokens 0"),
        (["demo", "--json", "extra"], 2, "mainstem: demo takes nothing but options: extra is too much."),
        (["calibrate", __file__, "/no/where"], 2, "/no/where: must be a file in a folder that exists; /no does not"),
        (["calibrate", __file__, __file__], 2, "must be a file that is neither read nor another result"),
    ],
)
def test_errors_are_one_line(
    machine: Machine, arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mainstem: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("failure", "code", "says"),
    [
        (ModelNotFound("no model of that name"), 1, "no model of that name"),
        (ZeroDivisionError("oh"), 1, "internal error: ZeroDivisionError: oh (MAINSTEM_DEBUG=1 shows where)"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 1, "pip install 'mainstem[runtime]'"),
        (ModuleNotFoundError("x", name="starlette.routing"), 1, "pip install 'mainstem[server]'"),
        (
            ImportError("cannot import name 'Cache' from 'transformers'", name="transformers"),
            1,
            "mainstem: a package cannot be imported: cannot import name 'Cache' from 'transformers' (MAINSTEM_DEBUG=1",
        ),
        (ModuleNotFoundError("No module named 'torchvision'", name="torchvision"), 1, "No module named 'torchvision'"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_failures(
    machine: Machine, failure: Exception, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.failure = failure
    assert run("generate", "x") == code
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSTEM_DEBUG", "1")
    machine.failure = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        run("generate", "x")


# --- generate -----------------------------------------------------------------------------------------------------


def test_generate_prints_the_answer_alone(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "hi") == 0
    out, err = capsys.readouterr()
    assert out == "[<user>hi\n<assistant>]\n"
    assert err == ""


def test_generate_without_a_template(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--no-chat", "hi") == 0
    machine.engine.tokenizer.chat_template = ""
    assert run("generate", "hi") == 0
    assert capsys.readouterr().out == "[hi]\n[hi]\n"


def test_generate_from_standard_input(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped"))
    assert run("generate", "--no-chat") == 0
    assert capsys.readouterr().out == "[piped]\n"


def test_a_file_goes_before_every_prompt(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text.txt"
    file.write_text("facts")
    assert run("generate", "--no-chat", "--file", str(file), "one", "two") == 0
    assert capsys.readouterr().out == "> one\n[facts\n\none]\n> two\n[facts\n\ntwo]\n"
    assert run("generate", "--no-chat", "--file", str(file)) == 0
    assert capsys.readouterr().out == "[facts]\n"
    file.write_bytes(b"\xff")
    assert run("generate", "--file", str(file)) == 2


def test_the_same_prompt_twice_is_answered_twice(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--no-chat", "Hi", "Hi") == 0
    assert capsys.readouterr().out == "> Hi\n[Hi]\n> Hi\n[Hi]\n"


def test_standard_input_that_is_no_text(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    assert run("generate") == 2
    assert "UTF-8" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert run("generate") == 2
    assert capsys.readouterr().err.startswith("mainstem: prompt (none): must be given as an argument")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_generate_json(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--no-chat", "--json", "one", "two") == 0
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (first["prompt"], first["text"], first["finish_reason"]) == ("one", "[one]", "stop")
    assert first["dtype"] == "float32"
    assert (second["prompt"], second["prompt_tokens"], second["cached_tokens"]) == ("two", 3, 0)


def test_sampling_options_arrive(machine: Machine) -> None:
    options = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --seed 3 --stop a --stop b"
    chosen = "--dtype bfloat16 --max-context 300 --quantization int4 --model m"
    assert run("generate", "x", *chosen.split(), *options.split()) == 0
    params = machine.engine.streams[0].request.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (5, 0.5, 0.9, 4)
    assert (params.min_p, params.seed, params.stop) == (0.1, 3, ("a", "b"))
    assert machine.loaded == [("m", ModelConfig("bfloat16", 300, "int4"))]


def test_the_length_of_the_context_has_the_name_that_vllm_has_for_it_and_threads_arrive(machine: Machine) -> None:
    assert run("generate", "x", "--max-model-len", "300", "--threads", "3") == 0
    assert machine.loaded == [(None, ModelConfig(max_context=300, threads=3))]


def test_a_failed_generation_is_a_failure(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--no-chat", "fail!") == 1
    assert "the generation failed" in capsys.readouterr().err


# --- serve and demo -----------------------------------------------------------------------------------------------


def test_serve_passes_its_options_on(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served: list[Any] = []
    monkeypatch.setattr(serving, "serve", lambda engine, config, listener: served.append((engine, config)))
    monkeypatch.setenv("MAINSTEM_API_KEY", "from-the-environment")
    engine_options = "--kv-bytes 1.5GiB --page-size 32 --token-budget 64 --max-running 2 --max-waiting 3 --no-cache"
    hybrid_options = "--window-ratio 0.25 --state-share 0.3 --checkpoint-tokens 0 --states-per-path 4"
    image_options = f"--image-host a.test --image-host b.test --image-folder {tmp_path} --max-images 2"
    server_options = "--host 0.0.0.0 --port 0 --max-body-bytes 2MB --drain-timeout-s 1"
    options = f"{engine_options} {hybrid_options} {image_options} {server_options}"
    assert run("serve", "a-model", "--policy", "lfu", *options.split()) == 0
    engine, config = served[0]
    assert engine is machine.engine
    assert engine.closed
    assert (config.host, config.port, config.max_body_bytes, config.drain_timeout_s) == ("0.0.0.0", 0, 2_000_000, 1.0)
    assert config.api_key == ("from-the-environment",)
    assert (config.images.image_host, config.images.max_images) == (("a.test", "b.test"), 2)
    assert config.images.image_folder == tmp_path
    assert machine.loaded == [("a-model", ModelConfig())]
    assert changed(machine.config) == {
        "kv_bytes": 3 << 29,
        "window_ratio": 0.25,
        "state_share": 0.3,
        "checkpoint_tokens": 0,
        "states_per_path": 4,
        "page_size": 32,
        "token_budget": 64,
        "max_running": 2,
        "max_waiting": 3,
        "policy": "lfu",
        "cache": False,
    }
    assert run("serve", "--port", "0", "--api-key", "one", "--api-key", "two") == 0
    assert served[1][1].api_key == ("one", "two")
    assert served[1][1].admin_key is None


def test_serve_says_what_it_is_doing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "serve", lambda *_: print("serving", file=sys.stderr))
    assert run("serve", "a-model", "--port", "0", "--adapter", f"french={tmp_path}") == 0
    out, err = capsys.readouterr()
    first, *stages = err.splitlines()
    assert re.fullmatch(r"mainstem: starting to serve a-model at 127\.0\.0\.1 port \d+", first)
    assert stages == [
        "mainstem: importing PyTorch and transformers",
        "mainstem: loading the model",
        "mainstem: allocating memory for KV, testing the model over it",
        "mainstem: measuring how fast the model computes, to compare with storage",
        "mainstem: loading adapters",
        "serving",
    ]
    assert out == ""


def test_a_terminal_shows_bars_while_serve_starts_and_none_after(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    served: list[str] = []
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(serving, "serve", lambda *_: served.append(terminal.getvalue()))
    assert run("serve", "--port", "0") == 0
    (shown,) = served
    assert "mainstem: starting to serve the-default" in shown.splitlines()[0]
    assert "loading the model" in shown and "100%" in shown
    assert "mainstem: loading the model" not in shown, "a bar, not a line"
    assert terminal.getvalue() == shown, "the bars are removed before it serves"


def test_serve_speaks_before_it_imports_what_takes_long() -> None:
    code = """
import sys
from mainstem import cli

class Heavy:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            print("heavy", file=sys.stderr)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Heavy())
sys.exit(cli.main(["serve", "--port", "0", "--host-ratio", "1"]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    first, second, third = result.stderr.splitlines()
    assert first.startswith("mainstem: starting to serve SmolLM2-135M-Instruct at 127.0.0.1 port ")
    assert (second, third) == ("mainstem: importing PyTorch and transformers", "heavy")
    assert result.returncode == 130


def test_serve_loads_adapters(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "serve", lambda *_: None)
    adapters = [f"{name}={tmp_path}" for name in ("french", "legal")]
    assert run("serve", "--port", "0", "--adapter", adapters[0], "--adapter", adapters[1]) == 0
    assert machine.engine.adapters == ("french", "legal")
    machine.loaded.clear()
    for wrong in ("french", "=x", "french="):
        assert run("serve", "--port", "0", "--adapter", wrong) == 2
        assert f"--adapter {wrong}: must be NAME=PATH" in capsys.readouterr().err
    assert not machine.loaded, "the error comes before the model is loaded"


def test_a_taken_port_is_found_before_the_model_is_loaded(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run("serve", "--port", str(port)) == 2
    says = f"mainstem: --port {port}: must be free: another program listens at 127.0.0.1 port {port}\n"
    assert capsys.readouterr().err == says
    assert machine.loaded == []


def test_a_dead_engine_is_a_failure(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(*_: object) -> None:
        raise EngineClosed("the engine failed: RuntimeError: out of memory")

    monkeypatch.setattr(serving, "serve", dies)
    assert run("serve", "--port", "0") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "mainstem: the engine failed: RuntimeError: out of memory"


def test_the_help_says_how_keys_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "In MAINSTEM_API_KEY, separate keys by spaces." in shown
    assert "MAINSTEM_ADMIN_KEY" in shown


def test_several_keys_in_the_environment(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(serving, "serve", lambda engine, config, listener: served.append(config))
    monkeypatch.setenv("MAINSTEM_API_KEY", "one two")
    monkeypatch.setenv("MAINSTEM_ADMIN_KEY", "root")
    assert run("serve", "--port", "0") == 0
    assert (served[0].api_key, served[0].admin_key) == (("one", "two"), "root")


def test_demo_of_a_document(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--json", "--prefix-tokens", "200") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == "fake" and report["reused_tokens"] >= 200
    assert run("demo", "--prefix-tokens", "200") == 0
    assert "times sooner" in capsys.readouterr().out


def test_demo_of_agents(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--story", "agents", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] and 0 < report["reused_tokens"] < report["prompt_tokens"]
    assert run("demo", "--story", "agents") == 0
    assert "the agent waited" in capsys.readouterr().out
    assert run("demo", "--story", "agents", "--prefix-tokens", "200") == 2
    assert "left out with --story agents" in capsys.readouterr().err


# --- storage ------------------------------------------------------------------------------------------------------


def test_a_store_is_described_checked_and_emptied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"file:{tmp_path}/kv?capacity=64MiB"
    assert run("storage", "check", spec) == 0
    shown = capsys.readouterr().out
    assert "pass  round_trip" in shown and "FAIL" not in shown
    with contextlib.closing(open_backend(spec)) as backend:
        backend.put([bytes(32)], [memoryview(bytearray(b"value"))])
    assert run("storage", "stats", spec, "--json") == 0
    assert json.loads(capsys.readouterr().out)["entries"] == 1
    assert run("storage", "check", spec) == 2
    assert "--erase" in capsys.readouterr().err
    assert run("storage", "clear", spec) == 0
    assert run("storage", "stats", spec) == 0
    assert "entries         0" in capsys.readouterr().out


def test_stats_of_a_store_name_who_wrote_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mainstem.cache.identity import Identity
    from mainstem.tiers.storage.identities import enter
    from mainstem.tiers.storage.sealer import PUBLIC_SECRET, Sealer

    spec, secret = f"file:{tmp_path}/kv?capacity=64MiB", "a secret of more than sixteen bytes"
    one = Identity("m-1", "w" * 64, "bfloat16", "none", "l", "s", "gqa", "r", "t", "ids/4", 16, tp_size=2)
    for name, key in (("m-1", secret.encode()), ("m-2", PUBLIC_SECRET)):
        with contextlib.closing(open_backend(spec)) as backend:
            enter(backend, Sealer(replace(one, model=name), key), Counter())
    assert run("storage", "stats", spec, "--storage-secret", secret) == 0
    shown = capsys.readouterr().out
    assert f"written by      model m-1, weights {'w' * 40}..., dtype bfloat16" in shown
    assert "ranks 2" in shown and "m-2" not in shown and secret not in shown
    assert run("storage", "stats", spec, "--json") == 0
    (writer,) = json.loads(capsys.readouterr().out)["writers"]
    assert (writer["model"], writer["ranks"]) == ("m-2", "2")
    monkeypatch.setenv("MAINSTEM_STORAGE_SECRET", secret)
    assert run("storage", "stats", spec, "--json") == 0
    assert [entry["model"] for entry in json.loads(capsys.readouterr().out)["writers"]] == ["m-1"]
    monkeypatch.setenv("MAINSTEM_STORAGE_SECRET", "short")
    assert run("storage", "stats", spec) == 2


def test_a_spec_that_names_no_store_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("storage", "stats", "floppy:/dev/fd0") == 2
    assert "file:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--prefetch best_effort", "--prefetch"),
        ("--warm --host-ratio 1", "--warm"),
        ("--write-hits 3", "--write-hits"),
        ("--write-hits 0 --host-ratio 1", "--write-hits 0"),
        ("--host-ratio 0", "--host-ratio 0"),
        ("--storage memory: --storage-secret short", "16 bytes"),
        ("--no-cache --storage memory:", "--cache"),
    ],
)
def test_options_that_would_do_nothing_or_cannot_be_are_refused(
    options: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", "no-such-model", "--port", "0", *options.split()) == 2
    assert says in capsys.readouterr().err


def test_a_store_is_not_cut_by_reading_its_stats(tmp_path: Path) -> None:
    """Without a capacity a store keeps its size; only an explicit capacity may make it smaller."""
    from mainstem.storage.file import FileBackend

    with contextlib.closing(FileBackend(tmp_path / "kv", 9 << 30)) as backend:
        backend.put([bytes(32)], [memoryview(bytearray(b"value"))])
    with (tmp_path / "kv" / "values").open("r+b") as values:
        values.truncate(9 << 30)  # sparse
    assert run("storage", "stats", f"file:{tmp_path}/kv", "--json") == 0
    assert (tmp_path / "kv" / "values").stat().st_size == 9 << 30
