"""The `mainstem` command: serve, generate, demo, calibrate, fleet, storage, store, replay, plan, trace, and so on.

Parses arguments and prints, nothing else. The commands import heavy packages (torch, transformers, starlette) when they
run, so that `--help` and usage errors are instant. Standard output carries results only; progress and errors go to
standard error.

Exit codes: 0 success; 1 failure; 2 wrong usage; 130 interrupted.

Examples:

  See what the cache saves, on a small model (downloaded on first use):
    mainstem demo

  Ask several questions about one file, whose KV is computed only once:
    mainstem generate --file report.txt "What is it about?" "Who wrote it?"

  Serve a model to OpenAI clients at http://127.0.0.1:8000/v1:
    mainstem serve

Set MAINSTEM_DEBUG=1 to see tracebacks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial, reduce
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from mainstem import __version__
from mainstem.errors import BadArgument, MainstemError
from mainstem.here import check_output
from mainstem.imports import is_missing, needs
from mainstem.settings.engine import EngineConfig, ModelConfig, SamplingParams
from mainstem.settings.server import ServerConfig
from mainstem.terminal import STAGES, Bars, say

try:
    with needs("cyclopts", "cyclopts is not installed: pip install 'mainstem[cli]'"):
        import cyclopts

        from mainstem.settings.flags import SEVERAL, Switch, command, group
except MainstemError as missing:
    sys.exit(f"mainstem: {missing}")

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mainstem.demo import AgentReport, Report
    from mainstem.runtime.engine import Engine
    from mainstem.runtime.stream import Stream
    from mainstem.runtime.text.prompts import Prompts


_EXTRAS = {
    "storage": ("blake3",),
    "events": ("zmq",),
    "fleet": ("ray", "yaml"),
    "lora": ("peft",),
    "runtime": ("torch", "transformers", "tokenizers", "safetensors", "gguf", "jinja2", "platformdirs"),
    "server": ("starlette", "uvicorn", "anyio", "msgspec", "prometheus_client"),
}


app = group(
    "mainstem",
    __doc__,
    help="A prefix cache for LLM inference: what was computed for one prompt is not computed again for the next.",
    version=f"mainstem {__version__}",
    suppress_keyboard_interrupt=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code.

    Args:
        arguments: without the program's name; None: those of the process.
    """
    debug = os.environ.get("MAINSTEM_DEBUG", "") not in ("", "0")
    try:
        app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at exit
        return 1
    except Exception as error:
        if debug:
            raise
        message, code = _explain(error)
        print(f"mainstem: {' '.join(message.split())}", file=sys.stderr)
        return code
    return 0


def _explain(error: Exception) -> tuple[str, int]:
    """Returns a message of one line for the user, and the exit code."""
    match error:
        case cyclopts.CycloptsError() if isinstance(error.__cause__, BadArgument):
            return _explain(error.__cause__)
        case cyclopts.CycloptsError():
            return _misused(error), 2
        case BadArgument():
            return f"{_option(error.name)} {str(error.value) or '(empty)'}: must be {error.allowed}", 2
        case ImportError() if extra := _missing_extra(error):
            return f"{error.name} is not installed: pip install 'mainstem[{extra}]'", 1
        case ImportError():
            return f"a package cannot be imported: {error} (MAINSTEM_DEBUG=1 shows where)", 1
        case MainstemError() | OSError():
            return str(error), 1
    return f"internal error: {type(error).__name__}: {error} (MAINSTEM_DEBUG=1 shows where)", 1


_WRITTEN = {int: "a whole number", float: "a number", bool: "given without a value"}


def _misused(error: cyclopts.CycloptsError) -> str:
    """Describes the error in a command line, in the words in which it is written."""
    chain = tuple(error.command_chain or ())
    command = " ".join(chain)
    match error:
        case cyclopts.UnusedCliTokensError(unused_tokens=[first, *_]):
            takes = " ".join(_positional(chain)) or "nothing but options"
            wrong = f"{command} takes {takes}: {first} is too much."
        case cyclopts.MissingArgumentError(argument=argument, keyword=None) if argument and not argument.tokens:
            wrong = f"{command} needs {_shown(argument)}."
        case cyclopts.MissingArgumentError(argument=argument) if argument:
            wrong = f"{error.keyword or argument.name} needs a value."
        case cyclopts.CoercionError(token=token, target_type=kind) if token and token.keyword and kind in _WRITTEN:
            wrong = f"{token.keyword} {token.value}: must be {_WRITTEN[kind]}."
        case _:
            wrong = str(error)
    return f"{wrong} Try '{' '.join(('mainstem', *chain, '--help'))}'."


def _positional(chain: Sequence[str]) -> Iterator[str]:
    """Yields the arguments of a command that are no options, as its help shows them."""
    for argument in reduce(lambda above, name: above[name], chain, app).assemble_argument_collection():
        if argument.index is not None:
            yield _shown(argument) if argument.required else f"[{_shown(argument)}]"


def _shown(argument: cyclopts.Argument) -> str:
    return argument.name.lstrip("-").replace("-", "_").upper()


def _option(name: str) -> str:
    """Returns the option that sets an argument, or the argument's own name if no option does."""
    flag = f"--{name.replace('_', '-')}"
    names = ("serve", "generate", "demo", "calibrate", "batch", "replay", "plan")
    commands = [*(app[name] for name in names), app["store"]["serve"]]
    arguments = [argument for command in commands for argument in command.assemble_argument_collection()]
    return flag if any(flag in argument.names for argument in arguments) else name


def _missing_extra(error: ImportError) -> str | None:
    extras = (extra for extra, packages in _EXTRAS.items() if any(is_missing(error, package) for package in packages))
    return next(extras, None)


# --- commands -----------------------------------------------------------------------------------------------------


@command(app)
def serve(
    model: str | None = None,
    *,
    adapter: Annotated[tuple[str, ...], SEVERAL] = (),
    load: ModelConfig = ModelConfig(),
    server: ServerConfig = ServerConfig(),
    engine: EngineConfig = EngineConfig(),
) -> None:
    """Serve a model to OpenAI clients over HTTP.

    Args:
        model: A folder, a .gguf file or a Hugging Face name. Default: SmolLM2-135M-Instruct.
        adapter: LoRA adapter as NAME=PATH, where PATH is a folder saved by PEFT. Clients select it as model NAME.
            Repeat it for several adapters.

    Examples:

      mainstem serve
      mainstem serve ./my-model --port 9000 --kv-bytes 4GiB
      MAINSTEM_API_KEY=secret mainstem serve --host 0.0.0.0
      mainstem serve ./my-model --adapter french=./french-lora --adapter legal=./legal-lora
      mainstem serve --kv-bytes 64MB --host-bytes 256MB --storage 'file:./kv?capacity=8GiB'
      mainstem serve --record requests.jsonl

      curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "Hello!"}]}'

    GET /metrics serves Prometheus, GET /v1/cache/tree shows what is cached, POST /v1/cache/flush empties the cache.
    SIGTERM or Ctrl-C lets running requests finish; a second one stops the server at once.
    """
    import logging

    from mainstem.server.serving import bind
    from mainstem.server.serving import serve as serve_http

    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own, and would say all twice
    adapters = [_adapter(text) for text in adapter]
    with ExitStack() as stack:
        listener = stack.enter_context(bind(server))
        say(f"starting to serve {_model_name(model)} at {server.host} port {listener.getsockname()[1]}")
        bars = stack.enter_context(Bars(STAGES, lines=True))
        running = stack.enter_context(_engine(model, load, bars, engine, adapters))
        bars.close()
        serve_http(running, server, listener)


@command(app)
def generate(
    *prompt: str,
    model: str | None = None,
    file: Path | None = None,
    sampling: SamplingParams = SamplingParams(),
    chat: bool | None = None,
    json: Switch = False,
    load: ModelConfig = ModelConfig(),
) -> None:
    """Generate text in the terminal. Several prompts share the KV of their common beginning.

    Args:
        prompt: Text to answer; each argument is a prompt of its own. Default: the file, or else standard input.
        model: A folder, a .gguf file or a Hugging Face name. Default: SmolLM2-135M-Instruct.
        file: Text file to put before every prompt.
        chat: Use the model's chat template; --no-chat continues the text as it is. Default: --chat if there is one.
        json: Print one JSON object per prompt instead of the text alone.

    Examples:

      mainstem generate "Name three rivers."
      mainstem generate --file report.txt "What is it about?" "Who wrote it?"
      git log -5 | mainstem generate --json
      mainstem generate --no-chat --temperature 0.8 --seed 7 "Once upon a time"
    """
    texts = _texts(prompt, file)
    with Bars(STAGES) as bars, _engine(model, load, bars) as engine:
        streams = _submit_all(engine, [text for _, text in texts], sampling, chat, bars)
        for (name, _), stream in zip(texts, streams, strict=True):
            if json:
                _print_json(name, engine, stream)
            else:
                _print_text(name if len(texts) > 1 else None, stream, bars)


@command(app)
def demo(
    *,
    model: str | None = None,
    json: Switch = False,
    load: ModelConfig = ModelConfig(),
    story: Literal["document", "agents"] = "document",
    prefix_tokens: int | None = None,
) -> None:
    """Show how much sooner the first token arrives with a cached prefix, on a real model.

    Args:
        model: A folder, a .gguf file or a Hugging Face name. Default: SmolLM2-135M-Instruct.
        story: Five questions about a document, cold and warm; or an agent that gets the results of its tools and has
            the time in its system prompt, without a rule that moves it and with one.
        json: Print the measurements as one JSON object.
        prefix_tokens: Length of the document in tokens, 1 up to what fits the model. Default: all of it, about 1,100.
            Not for --story agents.

    Examples:

      mainstem demo
      mainstem demo --dtype float32 --prefix-tokens 2000
      mainstem demo --story agents
      mainstem demo --json > demo.json
    """
    if story == "agents" and prefix_tokens is not None:
        raise BadArgument("prefix_tokens", prefix_tokens, "left out with --story agents")
    report: Report | AgentReport
    with Bars(STAGES) as bars, _engine(model, load, bars) as engine:
        import torch

        from mainstem import demo as demonstration

        threads = torch.get_num_threads()
        if story == "agents":
            report = demonstration.run_agents(engine, threads=threads, progress=bars.update)
        else:
            report = demonstration.run(engine, threads=threads, prefix_tokens=prefix_tokens, progress=bars.update)
    if json:
        print(_to_json(asdict(report)))
        return
    from rich.console import Console

    demonstration.show(report, Console())


@command(app)
def calibrate(
    text: Path,
    out: Path,
    *,
    model: str | None = None,
    ratio: float = 6.0,
    load: ModelConfig = ModelConfig(),
) -> None:
    """Calibrate a codec for a model, so that its stored pages become much smaller.

    Args:
        text: Text file of 16,000 tokens or more, like the prompts to be stored.
        out: File to write, for --storage-codec.
        model: A folder, a .gguf file or a Hugging Face name. Default: SmolLM2-135M-Instruct.
        ratio: How many times smaller a page becomes, 1 to 1000. The higher, the more precision is lost.

    Examples:

      mainstem calibrate prompts.txt smollm2.npz
      mainstem calibrate prompts.txt my-model.npz --model ./my-model --ratio 4

    Every server of a store gets the same file: mainstem serve --storage file:./kv --storage-codec smollm2.npz
    """
    written = _read("text", str(text), lambda: text.read_text(encoding="utf-8"))
    check_output("out", out, text)
    if not 1 <= ratio <= 1000:
        raise BadArgument("ratio", ratio, "1 to 1000")
    with Bars(STAGES) as bars:
        bars.update("import", 0, 0)
        from mainstem.runtime.models.calibration import calibrate as find
        from mainstem.runtime.models.calibration import tokens_of
        from mainstem.runtime.models.loading import load_model
        from mainstem.runtime.parallel.launch import computing_on
        from mainstem.tiers.storage.calibrated import save

        with computing_on(load.threads):
            loaded = load_model(
                model,
                dtype=load.dtype,
                max_context=load.max_context,
                quantization=load.quantization,
                progress=bars.update,
            )
            save(out, find(loaded, tokens_of(loaded, written), ratio, bars.update))


# --- running ------------------------------------------------------------------------------------------------------


def _adapter(text: str) -> tuple[str, str]:
    """Splits NAME=PATH into an adapter's name and path."""
    name, _, path = text.partition("=")
    if not name or not path or " " in name or not (name.isascii() and name.isprintable()):
        raise BadArgument("adapter", text, "NAME=PATH, with a NAME of printable ASCII characters without spaces")
    return name, path


def _for_each_adapter(adapters: Sequence[tuple[str, str]], do: Callable[[str, str], object]) -> None:
    for name, path in adapters:
        try:
            do(name, path)
        except BadArgument as error:
            raise BadArgument("adapter", f"{name}={path}", error.allowed) from None


def _model_name(model: str | None) -> str:
    from mainstem.runtime.models.loading import DEFAULT_NAME

    return DEFAULT_NAME if model is None else model


# These commands import their modules only when they run.
app.command(
    "mainstem.batch.command:batch", name="batch", help="Answer a file of requests, computing as little as can be."
)
app.command("mainstem.fleet.commands:fleet", name="fleet", help="Run many engines at one address, with Ray Serve.")
app.command("mainstem.owner.commands:store", name="store", help="Hold a store for all processes on this machine.")
app.command(
    "mainstem.replay.commands.replay:replay", name="replay", help="Replay a trace against caches of several sizes."
)
app.command("mainstem.replay.commands.plan:plan", name="plan", help="Find what memory a trace of requests pays for.")
app.command(
    "mainstem.replay.commands.trace:trace", name="trace", help="Inspect, convert and generate traces of requests."
)
app.command("mainstem.tiers.commands:storage", name="storage", help="Inspect, verify, move, empty and test stores.")
app.command("mainstem.watch.commands:explain", name="explain", help="Say why a prompt would be found in part only.")
app.command("mainstem.watch.commands:lint", name="lint", help="Find what keeps prompts from sharing their prefixes.")
app.command("mainstem.watch.commands:top", name="top", help="Watch what servers find in their caches, as it happens.")


@contextmanager
def _engine(
    model: str | None,
    load: ModelConfig,
    bars: Bars,
    config: EngineConfig = EngineConfig(),
    adapters: Sequence[tuple[str, str]] = (),
) -> Iterator[Engine]:
    bars.update("import", 0, 0)
    from mainstem.runtime.parallel.launch import open_engine

    if adapters:
        from mainstem.runtime.models.adapters import read_adapter

        _for_each_adapter(adapters, lambda _, path: read_adapter(path))  # before the model is loaded, to find errors
    bars.update("import", 1, 1)
    with open_engine(model, load, config, progress=bars.update) as engine:
        if adapters:
            bars.update("adapters", 0, 0)
        _for_each_adapter(adapters, engine.load_adapter)
        yield engine


def _texts(prompts: Sequence[str], file: Path | None) -> list[tuple[str, str]]:
    """Returns a name for each prompt, and its text."""
    if file is not None:
        context = _read("file", str(file), lambda: file.read_text(encoding="utf-8"))
        return [(prompt, f"{context}\n\n{prompt}") for prompt in prompts] or [(str(file), context)]
    if prompts:
        return [(prompt, prompt) for prompt in prompts]
    if sys.stdin.isatty():
        raise BadArgument("prompt", "(none)", "given as an argument, as --file, or on standard input")
    return [("-", _read("prompt", "(standard input)", sys.stdin.read))]


def _read(name: str, source: str, read: Callable[[], str]) -> str:
    try:
        return read()
    except UnicodeDecodeError as error:
        raise BadArgument(name, source, f"text in UTF-8: {error}") from error


def _submit_all(
    engine: Engine, texts: Sequence[str], params: SamplingParams, chat: bool | None, bars: Bars
) -> list[Stream]:
    from mainstem.runtime.request import Request
    from mainstem.runtime.text.prompts import Prompts

    templated = bool(engine.tokenizer.chat_template) if chat is None else chat
    prompts = Prompts(engine.tokenizer, engine.max_context)
    streams = []
    for number, text in enumerate(texts, 1):
        request = Request(_tokens(prompts, text, templated), params)
        streams.append(engine.submit(request, on_progress=partial(bars.update, f"reading prompt {number}")))
    return streams


def _tokens(prompts: Prompts, text: str, templated: bool) -> NDArray[np.int32]:
    return prompts.conversation([{"role": "user", "content": text}]) if templated else prompts.text(text)


def _print_text(heading: str | None, stream: Stream, bars: Bars) -> None:
    """Prints an answer as it is generated."""
    for number, delta in enumerate(stream):
        if number == 0:
            bars.close()
            if heading is not None:
                print(f"> {heading}")
        print(delta.text, end="", flush=True)
        _check(delta.finish_reason, delta.error)
    print()


def _print_json(prompt: str, engine: Engine, stream: Stream) -> None:
    completion = stream.result()
    _check(completion.finish_reason, None)
    answer = {"prompt": prompt, "text": completion.text, "finish_reason": completion.finish_reason}
    dtype = str(engine.dtype).removeprefix("torch.")
    usage = {name: value for name, value in asdict(completion.usage).items() if name != "prefixes"}  # none is marked
    print(_to_json({**answer, "dtype": dtype, **usage}))


def _check(finish_reason: str | None, error: str | None) -> None:
    if finish_reason == "error":
        raise MainstemError(f"the generation failed: {error or 'the engine gave up'}")


def _to_json(value: object) -> str:
    return dumps(value, ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(main())
