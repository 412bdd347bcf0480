"""`mainstem batch`, which `mainstem.cli` mounts. Arguments, signals, HTTP and printing only."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from mainstem.errors import BadArgument, MainstemError
from mainstem.here import check_output
from mainstem.settings.engine import EngineConfig, ModelConfig
from mainstem.settings.flags import SEVERAL, Switch, alone
from mainstem.terminal import STAGES, Bars, say
from mainstem.units import counted, show_seconds

if TYPE_CHECKING:
    from mainstem.batch.answers import Answers
    from mainstem.batch.lines import Requests
    from mainstem.batch.ordering import Prompt
    from mainstem.batch.plan import Plan
    from mainstem.batch.runner import Send, Totals
    from mainstem.runtime.engine import Engine

_TEXT_TOKEN = 4  # bytes of text, about


@alone("batch")
def batch(
    requests: Path,
    *,
    output: Path,
    to: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="MAINSTEM_API_KEY")] = None,
    model: str | None = None,
    served_model_name: Annotated[tuple[str, ...], SEVERAL] = (),
    concurrency: int = 16,
    until: str | None = None,
    max_cost: int | None = None,
    retry_s: float = 300.0,
    dry_run: Switch = False,
    load: ModelConfig = ModelConfig(),
    engine: EngineConfig = EngineConfig(),
) -> None:
    """Answer a file of requests, in the order in which the fewest tokens are computed.

    Each line of the file is a request by OpenAI's batch format, and each line of the output an answer. What ended
    early, even by SIGKILL, goes on with the same command.

    Args:
        requests: File of requests, a line of JSON each: custom_id, method, url, body.
        output: File of answers. One that is there has answers to these requests, and gets the others.
        to: URL or HOST:PORT of `mainstem serve` or of a fleet. Default: an engine of its own.
        api_key: Key of that server.
        model: A folder, a .gguf file or a Hugging Face name, for an engine of its own. Default: SmolLM2-135M-Instruct.
        served_model_name: Name that requests have for that model. Repeat it for several names. Default: its own.
        concurrency: Requests that are sent at the same time; 1 to 4096.
        until: Time of day, HH:MM, from which no more requests are sent.
        max_cost: Tokens, those of prompts that are computed and those of answers, after which no more requests are
            sent; 1 or more.
        retry_s: Seconds for which a server may answer nothing before the command ends; 0 or more.
        dry_run: Say what would be computed, and end.

    Examples:

      mainstem batch requests.jsonl --output answers.jsonl
      mainstem batch requests.jsonl --output answers.jsonl --to 127.0.0.1:8000 --concurrency 64
      mainstem batch requests.jsonl --output answers.jsonl --model ./my-model --kv-bytes 8GiB --until 07:00
      mainstem batch requests.jsonl --output answers.jsonl --dry-run
    """
    from mainstem.batch.answers import Answers
    from mainstem.batch.lines import BadBatch, Requests

    _check(to, model, served_model_name, concurrency, max_cost, retry_s, load, engine)
    ends = None if until is None else _time_of_day(until, datetime.now())
    check_output("output", output, requests)
    try:
        read = Requests(requests)
    except BadBatch as error:
        raise MainstemError(f"{requests}: {error}") from None
    except OSError as error:
        raise BadArgument("requests", str(requests), f"a file that can be read: {error.strerror}") from None
    with closing(read), closing(Answers(output, read, only_reads=dry_run)) as answers, Bars(STAGES) as bars:
        if answers.answered.all():
            say(f"all {counted(len(read), 'request')} are answered in {output}")
            return
        if to is not None:
            job = _Job(read, answers, bars, concurrency, ends, max_cost, retry_s, dry_run=dry_run)
            job.remotely(to, api_key)
            return
        from mainstem.runtime.parallel.launch import open_engine

        bars.update("import", 1, 1)
        with open_engine(model, load, engine, progress=bars.update) as running:
            job = _Job(read, answers, bars, concurrency, ends, max_cost, retry_s, dry_run=dry_run)
            job.here(running, served_model_name)


def _check(
    to: str | None,
    model: str | None,
    names: Sequence[str],
    concurrency: int,
    max_cost: int | None,
    retry_s: float,
    load: ModelConfig,
    engine: EngineConfig,
) -> None:
    """Checks the arguments that no one else does. Raises BadArgument."""
    if to is not None:
        own = {"model": model, "served_model_name": names or None}
        for name, value in own.items():
            if value is not None:
                raise BadArgument(name, value, "left out with --to")
        if (load, engine) != (ModelConfig(), EngineConfig()):
            raise BadArgument("to", to, "left out with flags of a model or of an engine of its own")
    if not 1 <= concurrency <= 4096:
        raise BadArgument("concurrency", concurrency, "1 to 4096")
    if max_cost is not None and max_cost < 1:
        raise BadArgument("max_cost", max_cost, "1 or more")
    if not 0 <= retry_s <= 1e9:
        raise BadArgument("retry_s", retry_s, "a number of seconds, 0 or more")


def _time_of_day(text: str, now: datetime) -> datetime:
    """Returns when it is next that time of day."""
    try:
        at = datetime.strptime(text, "%H:%M")
    except ValueError:
        raise BadArgument("until", text, "a time of day, HH:MM, such as 07:00") from None
    today = now.replace(hour=at.hour, minute=at.minute, second=0, microsecond=0)
    return today if today > now else today + timedelta(days=1)


class _Job:
    """One run of a batch.

    Args:
        requests, answers: of the batch.
        bars: show how far it is.
        at_once, ends, max_cost, retry_s, dry_run: see `batch`.
    """

    def __init__(
        self,
        requests: Requests,
        answers: Answers,
        bars: Bars,
        at_once: int,
        ends: datetime | None,
        max_cost: int | None,
        retry_s: float,
        *,
        dry_run: bool,
    ) -> None:
        self._requests, self._answers, self._bars = requests, answers, bars
        self._at_once, self._ends, self._max_cost = at_once, ends, max_cost
        self._retry_s, self._dry_run = retry_s, dry_run
        self._why: str | None = None  # no more requests are sent
        self._failure: Callable[[], BaseException | None] = lambda: None

    def remotely(self, server: str, api_key: str | None) -> None:
        """Lets a server answer. How it makes tokens of a text is not known here, so requests are ordered by text."""
        from mainstem.batch.ordering import TEXT_PAGE, text_prompt
        from mainstem.batch.runner import to_server
        from mainstem.watch.top import address

        url, headers = address(server), {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        made = self._plan(text_prompt, TEXT_PAGE, None)
        about = [number // _TEXT_TOKEN for number in (made.tokens, made.computed, made.least)]
        self._begin(
            made,
            lambda: to_server(url, headers),
            f"about {_described(about[0], about[1], about[2], made.answers)}",
        )

    def here(self, engine: Engine, names: Sequence[str]) -> None:
        """Lets an engine in this process answer, by the application that serves it."""
        from mainstem.batch.lines import MAX_LINE_BYTES
        from mainstem.batch.runner import to_app
        from mainstem.server.app import create_app
        from mainstem.settings.server import ServerConfig

        config = ServerConfig(
            served_model_name=tuple(names), embeddings=True, precompute_turns=0.0, max_body_bytes=MAX_LINE_BYTES
        )
        app = create_app(engine, config)
        size, self._failure = engine.config.page_size, lambda: engine.failure
        made = self._plan(app.state.generating.prompt, size, engine.pages * size)
        text = _described(made.tokens, made.computed, made.least, made.answers)
        rates = _rates(engine, self._at_once)
        took, least = made.seconds(*rates), made.seconds(*rates) - (made.computed - made.least) / rates[0]
        self._begin(
            made,
            lambda: to_app(app, {}, {}),
            f"{text}: about {show_seconds(took)}, and {show_seconds(least)} if all of it fitted the cache",
        )

    def _plan(self, prompt: Prompt, page_size: int, capacity: int | None) -> Plan:
        from mainstem.batch.ordering import planned

        rest = (~self._answers.answered).nonzero()[0].tolist()
        seen = partial(self._bars.update, "read", total=len(rest))
        return planned(self._requests, rest, prompt, page_size=page_size, capacity=capacity, read=seen)

    def _begin(self, plan: Plan, sender: Callable[[], Send], words: str) -> None:
        """Says what a plan takes, and runs it."""
        done = len(self._requests) - len(plan.order)
        before = f", after {done:,} that are answered" if done else ""
        if self._dry_run:
            self._bars.close()
            print(f"{counted(len(plan.order), 'request')}{before}: {words}.")
            return
        say(f"{counted(len(plan.order), 'request')}{before}: {words}")
        import anyio

        anyio.run(self._run, plan, sender)
        self._bars.close()
        answered, failed = int(self._answers.answered.sum()), self._answers.failed
        errors = f", {failed:,} of them with an error" if failed else ""
        if answered < len(self._requests):
            rest = f"{answered:,} of {len(self._requests):,} requests are answered{errors}"
            raise MainstemError(f"{self._why}: {rest}; the same command goes on")
        used = self._totals
        found = f"{used.prompt:,} prompt tokens, of which {used.prompt - used.cached:,} were computed"
        say(f"all {counted(len(self._requests), 'request')} are answered{errors}; this run had {found}")

    async def _run(self, plan: Plan, sender: Callable[[], Send]) -> None:
        import anyio

        from mainstem.batch.runner import Runner, ServerGone

        self._bars.update("answer", len(self._requests) - len(plan.order), len(self._requests))
        runner = Runner(
            self._requests, sender(), self._answers.add, self._may_send, retry_s=self._retry_s, answered=self._show
        )
        self._totals, twice = runner.totals, False

        async def interrupts() -> None:
            nonlocal twice
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async for _ in signals:
                    if self._why == "interrupted":
                        twice = True
                        group.cancel_scope.cancel()
                        return
                    self._why = "interrupted"
                    say("requests under way are answered; a second Ctrl-C stops at once")

        async with anyio.create_task_group() as group:
            group.start_soon(interrupts)
            try:
                await runner.run(map(int, plan.order), self._at_once)
            except ServerGone as error:
                self._why = str(error)
            except (MainstemError, OSError) as error:
                self._why = str(error)
            group.cancel_scope.cancel()
        if twice:
            raise KeyboardInterrupt

    async def _may_send(self) -> bool:
        if (failure := self._failure()) is not None:
            self._why = f"the engine failed: {type(failure).__name__}: {failure}"
        elif self._ends is not None and datetime.now() >= self._ends:
            self._why = self._why or f"it is {self._ends:%H:%M}"
        elif self._max_cost is not None and self._totals.computed >= self._max_cost:
            self._why = self._why or f"{self._totals.computed:,} tokens were computed"
        return self._why is None

    def _show(self, totals: Totals) -> None:
        found = f", {totals.cached / totals.prompt:.0%} of prompts found" if totals.prompt else ""
        errors = f", {totals.failed:,} errors" if totals.failed else ""
        done = int(self._answers.answered.sum())
        self._bars.update("answer", done, len(self._requests), f"answering{found}{errors}")


def _described(tokens: int, computed: int, least: int, answers: int) -> str:
    most = f", and at most {answers:,} of answers" if answers else ""
    return f"{tokens:,} prompt tokens, of which {computed:,} are computed (at least {least:,}){most}"


def _rates(engine: Engine, at_once: int) -> tuple[float, float]:
    """Returns how many tokens of prompts, and of answers to several requests, an engine computes in a second."""
    import numpy as np

    from mainstem.runtime.request import Hints, Request
    from mainstem.settings.engine import SamplingParams

    def taken_s(count: int, length: int, answer: int) -> float:
        prompt, params = np.full(length, 1, np.int32), SamplingParams(max_tokens=answer, ignore_eos=True)
        began_s = time.perf_counter()
        streams = [engine.submit(Request(prompt, params, hints=Hints(no_store=True))) for _ in range(count)]
        for stream in streams:
            stream.result()
        return time.perf_counter() - began_s

    length = min(512, engine.max_context // 2)
    count, answer = min(at_once, engine.config.max_running), min(16, length)
    prefill = length / taken_s(1, length, 1)
    taken_s(1, 1, 1)
    return prefill, count * answer / taken_s(count, 1, answer)
