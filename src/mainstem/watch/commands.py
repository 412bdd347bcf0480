"""`mainstem top`, `lint` and `explain`, which `mainstem.cli` mounts. Arguments, files, HTTP and printing only."""

from __future__ import annotations

import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict
from http.client import HTTPException
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from mainstem.errors import BadArgument, MainstemError
from mainstem.imports import needs
from mainstem.settings.flags import SEVERAL, Switch, alone
from mainstem.terminal import results
from mainstem.units import counted

if TYPE_CHECKING:
    from rich.table import Table

    from mainstem.prompt_rules.rules import Rule
    from mainstem.watch.lint import Linter, Report
    from mainstem.watch.top import Look, Watch

_TIMEOUT_S = 5.0
_BAD_ANSWER = (HTTPException, ValueError, LookupError, TypeError, AttributeError, RecursionError)
_LONGEST_S = 3600.0


@alone("top")
def top(*server: str, interval_s: float = 2.0, json: Switch = False) -> None:
    """Show the hits by tier, latencies, memory and storage of servers: now, and since they started.

    Ctrl-C ends it.

    Args:
        server: URL or HOST:PORT of `mainstem serve`; each argument is a server. Default: http://127.0.0.1:8000.
        interval_s: Seconds between two looks, 0.1 to 3600.
        json: Look twice, print one JSON object per server (and one of all), and end.

    Examples:

      mainstem top
      mainstem top 10.0.0.5:8000 10.0.0.6:8000 --interval-s 5
      mainstem top https://kv.example.com --json
    """
    with needs("prometheus_client", "mainstem top needs prometheus-client: pip install 'mainstem[server]'"):
        from mainstem.watch.top import Watch, address
    if not 0.1 <= interval_s <= _LONGEST_S:
        raise BadArgument("interval_s", interval_s, "0.1 to 3600")
    servers = list(dict.fromkeys(map(address, server or ("127.0.0.1:8000",))))
    watch = Watch(servers, _fetch, time.monotonic)
    looks = watch.look()
    errors = [f"{look.server}: {look.error}" for look in looks if look.error]
    if len(errors) == len(servers):
        raise MainstemError("no server answers: " + "; ".join(errors))
    if json:
        time.sleep(interval_s)
        for look in watch.look():
            print(dumps(asdict(look), ensure_ascii=False))
        return
    try:
        _show(watch, looks, interval_s, time.sleep)
    except KeyboardInterrupt:
        return  # the usual end, not a failure


@alone("lint")
def lint(
    requests: Annotated[str, Parameter(help="Bodies of requests, one JSON object a line; - is standard input.")],
    *,
    tokenizer: str | None = None,
    prefill_tokens_per_s: float | None = None,
    on_bad: Literal["fail", "skip"] = "fail",
    prompt_rules: Annotated[tuple[str, ...], SEVERAL] = (),
    fix: Annotated[Path | None, Parameter(negative="")] = None,
    replace: Switch = False,
    json: Switch = False,
) -> None:
    """Find the parts of prompts that keep them from sharing prefixes, their cost, and the remedy.

    Args:
        tokenizer: Name or folder of the tokenizer that counts tokens. Default: four bytes are a token.
        prefill_tokens_per_s: Prompt tokens that the model computes a second, to show the cost as time; above 0.
        on_bad: Whether a line without a prompt ends it, or is skipped and counted.
        prompt_rules: File of rules, or the name of one of Mainstem's own: prompts are compared as these rules leave
            them. Repeat it for several files.
        fix: Write rules that mend what is found to this file, .toml, for `mainstem serve --prompt-rules`.
        replace: Replace that file if it is there.
        json: Print one JSON object.

    Examples:

      mainstem lint requests.jsonl
      mainstem lint requests.jsonl --fix rules.toml
      mainstem lint requests.jsonl --prompt-rules rules.toml
      mainstem lint requests.jsonl.zst --tokenizer ./my-model --prefill-tokens-per-s 20000
      zcat log.gz | mainstem lint - --on-bad skip --json
    """
    from mainstem.watch.fixing import Fixing, as_json, rules_for
    from mainstem.watch.lint import Linter, about

    if prefill_tokens_per_s is not None and not prefill_tokens_per_s > 0:
        raise BadArgument("prefill_tokens_per_s", prefill_tokens_per_s, "above 0")
    rules = rules_for(prompt_rules)
    fixing = None if fix is None else Fixing(fix, requests, prompt_rules, rules, replaces=replace)
    linter = Linter(about if tokenizer is None else _counter(tokenizer), *([] if fixing is None else [fixing.lost]))
    skipped = _read_all(linter, requests, rules, skips=on_bad == "skip")
    report = linter.report()
    if not report.requests:
        raise MainstemError(f"{requests} has no request")
    fixed = None if fixing is None else fixing.write(report)
    if json:
        findings = [{**asdict(finding), "advice": finding.advice} for finding in report.findings]
        more = {} if fixed is None else {"fixes": as_json(fixed)}
        print(dumps({**asdict(report), "findings": findings, "skipped": skipped, **more}, ensure_ascii=False))
        return
    _print(report, skipped, prefill_tokens_per_s)
    if fixing is not None and fixed is not None:
        fixing.show(fixed, report)


def _read_all(linter: Linter, requests: str, rules: Sequence[Rule], *, skips: bool) -> int:
    """Gives the bodies of a file to a linter, as rules leave them; returns the number of bad lines."""
    from mainstem.replay.readers.lines import Source
    from mainstem.watch.fixing import after_rules
    from mainstem.watch.prompts import BadRequestBody

    skipped = 0
    with Source(requests) as source:
        for number, line in source.lines():
            try:
                body, time_s, url = _body(line)
                linter.add(after_rules(rules, body, url), time_s)
            except BadRequestBody as error:
                if not skips:
                    wrong = f"{requests}, line {number}: {error} (--on-bad skip leaves bad lines out)"
                    raise MainstemError(wrong) from None
                skipped += 1
    return skipped


Route = Literal["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]


@alone("explain")
def explain(
    request: Annotated[str, Parameter(help="File with the body of a request; with --trace also the number of one.")],
    *,
    server: str = "127.0.0.1:8000",
    route: Route | None = None,
    api_key: Annotated[str | None, Parameter(env_var="MAINSTEM_API_KEY")] = None,
    admin_key: Annotated[str | None, Parameter(env_var="MAINSTEM_ADMIN_KEY")] = None,
    trace: str | None = None,
    capacity: str = "10%",
    policy: str = "lru",
    json: Switch = False,
) -> None:
    """Explain which part of a prompt would be found, and why the rest would be computed. Nothing is run.

    Args:
        server: URL or HOST:PORT of `mainstem serve`.
        route: What the body is for. Default: as its fields say.
        api_key: Key of the server. With --admin-key: of the client whose cache is asked about, if it has several.
        admin_key: Key of the admin, who also learns how much memory would have kept what was evicted.
        trace: Ask a cache that has served this trace or recording instead of a server.
        capacity: Size of that cache.
        policy: Its eviction policy.
        json: Print one JSON object.

    Examples:

      mainstem explain request.json
      mainstem explain request.json --server https://kv.example.com --route /v1/messages --json
      mainstem explain request.json --admin-key secret --api-key theirs
      mainstem explain 1234 --trace requests.jsonl --capacity 40%
      mainstem explain request.json --trace prompts.jsonl --capacity 2Mtok --policy slru

    A server explains if it was started with --explain. A file with --trace has what the trace has: a body of a request if
    that has bodies, token ids or hashes if it has those. Requests of a recording are named by their numbers. Capacities are
    blocks (1000), tokens (2Mtok) or percentages of the trace's distinct blocks (5%).
    """  # noqa: E501  # lines as the help shows them
    if trace is not None:
        prompts = [_explain_offline(request, trace, capacity, policy)]
    else:
        prompts = _explain_online(_read_body(request), server, route, api_key, admin_key)
    if json:
        print(dumps({"prompts": prompts}, ensure_ascii=False))
        return
    console = results()
    for prompt in prompts:
        console.print(*_shown(prompt), sep="\n")


def _shown(prompt: dict[str, Any]) -> tuple[str, Table]:
    from mainstem.watch.wording import table

    return f"{prompt['cached_tokens']:,} of {prompt['prompt_tokens']:,} tokens are cached.", table(prompt["stretches"])


def _read_body(path: str) -> dict[str, Any]:
    from mainstem.watch.prompts import BadRequestBody

    try:
        with open(path, "rb") as file:
            return _body(file.read())[0]
    except BadRequestBody as error:
        raise MainstemError(f"{path}: {error}") from None


def _explain_online(
    body: dict[str, Any], server: str, route: str | None, api_key: str | None, admin_key: str | None
) -> list[dict[str, Any]]:
    from mainstem.watch.top import address, not_ours

    if route is None:
        fields = {"prompt": "/v1/completions", "input": "/v1/responses", "system": "/v1/messages"}
        route = next((fields[name] for name in fields if name in body), "/v1/chat/completions")
    query = {"route": route, "distances": "true"}  # which only the admin is given
    base, headers = address(server), {"Content-Type": "application/json", **_keys(api_key, admin_key)}
    url = f"{base}/v1/cache/explain?{urllib.parse.urlencode(query)}"
    request = urllib.request.Request(url, dumps(body).encode(), headers)  # http or https, see `address`
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as reply:
            return _checked(loads(reply.read()))
    except urllib.error.HTTPError as error:
        raise MainstemError(_said(error) or f"{base} {not_ours(error)}") from None
    except _BAD_ANSWER as error:
        raise MainstemError(f"{base} {not_ours(error)}") from None
    except OSError as error:
        raise MainstemError(f"{base}: {error}") from None


def _keys(api_key: str | None, admin_key: str | None) -> dict[str, str]:
    """Returns the headers with a request's keys. The admin names a client by its key. Raises BadArgument."""
    for name, key in (("api_key", api_key), ("admin_key", admin_key)):
        if key is not None and not (key.isascii() and key.isprintable()):
            raise BadArgument(name, "as given", "printable ASCII")
    keys = {"Authorization": f"Bearer {admin_key or api_key}"} if admin_key or api_key else {}
    return keys | ({"x-api-key": api_key} if admin_key and api_key else {})


def _checked(answer: Any) -> list[dict[str, Any]]:
    """Returns the prompts of an answer. Raises any error of `_BAD_ANSWER` where it has another shape."""
    prompts: list[dict[str, Any]] = answer["prompts"]
    if not (isinstance(prompts, list) and prompts):
        raise ValueError("no list of prompts")
    for prompt in prompts:
        _shown(prompt)
    return prompts


def _said(error: urllib.error.HTTPError) -> str | None:
    """Returns the message of a server's error; None: it has none."""
    try:
        return str(loads(error.read())["error"]["message"])
    except (OSError, *_BAD_ANSWER):
        return None


def _explain_offline(request: str, path: str, capacity: str, policy: str) -> dict[str, Any]:
    from mainstem.cache.explain import as_json, count_found
    from mainstem.replay.explain import check_comparable, explain_request
    from mainstem.replay.readers.open import open_trace
    from mainstem.replay.simulate.sweep import check_policy, parse_capacities
    from mainstem.settings.replay import TraceOptions

    trace = open_trace(path)
    blocks = parse_capacities(capacity, trace)
    if len(blocks) != 1:
        raise BadArgument("capacity", capacity, "one capacity")
    check_policy(policy)
    number = int(request) if request.isascii() and request.isdecimal() else None
    own = open_trace(request, TraceOptions(block_size=trace.block_size)) if number is None else None
    if own is not None:
        check_comparable(path, trace, request, own)
    found = explain_request(trace, number, blocks[0], policy, own)
    return {
        "request": found.number,
        "prompt_tokens": found.tokens,
        "cached_tokens": count_found(found.stretches),
        "stretches": [as_json(each, trace.block_size) for each in found.stretches],
    }


def _body(line: bytes) -> tuple[dict[str, Any], float | None, object]:
    """Returns the body of a request, when it came, and its URL, if the line says so. Raises BadRequestBody."""
    from mainstem.watch.prompts import BadRequestBody

    try:
        value = loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRequestBody(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise BadRequestBody("not a JSON object")
    body = value["body"] if isinstance(value.get("body"), dict) else value
    times = (value.get(key, body.get(key)) for key in ("timestamp", "time", "created"))
    time_s = next((float(time_s) for time_s in times if isinstance(time_s, int | float)), None)
    return body, time_s, value.get("url")


def _counter(name: str) -> Callable[[str], int]:
    from mainstem.replay.readers.texts import Tokenizer

    tokenizer = Tokenizer(name)
    return lambda text: len(tokenizer({"prompt": text}))


def _print(report: Report, skipped: int, tokens_per_s: float | None) -> None:
    console = results()
    part = report.shared_tokens / max(report.tokens, 1)
    counts = f"{counted(report.requests, 'request')}, {counted(report.tokens, 'prompt token')}"
    bad = f" Left out: {counted(skipped, 'bad line')}." if skipped else ""
    console.print(f"{counts}; {part:.1%} of them are the beginning of an earlier prompt.{bad}")
    if not report.findings:
        console.print("Nothing was found that keeps prompts from sharing more.")
        return
    console.print(_findings(report, tokens_per_s))
    for finding in report.findings:
        console.print(f"\n{finding.cause} in {finding.where}: {finding.advice}", markup=False)
        for example in finding.examples:
            console.print(f"    {example}", markup=False)


def _findings(report: Report, tokens_per_s: float | None) -> Table:
    """Returns a table of the cost of each finding, a day if requests have times."""
    from rich.table import Table

    from mainstem.units import show_seconds

    a_day = 86400 / report.seconds if report.seconds else None
    made = Table(box=None, pad_edge=False)
    for title in ("cause", "where", "requests", "tokens lost", "of all"):
        made.add_column(title, justify="left" if title in ("cause", "where") else "right")
    made.add_column("tokens a day" if a_day else "")
    made.add_column("computing" + (" a day" if a_day else "") if tokens_per_s else "", justify="right")
    for one in report.findings:
        lost = one.lost_tokens * (a_day or 1)
        made.add_row(
            one.cause,
            one.where.replace("[", "\\["),
            f"{one.requests:,}",
            f"{one.lost_tokens:,}",
            f"{one.lost_tokens / max(report.tokens, 1):.1%}",
            f"{lost:,.0f}" if a_day else "",
            show_seconds(lost / tokens_per_s) if tokens_per_s else "",
        )
    return made


def _show(watch: Watch, looks: Sequence[Look], interval_s: float, sleep: Callable[[float], None]) -> None:
    from rich.console import Console
    from rich.live import Live

    from mainstem.watch.top import table

    console = Console(file=sys.stdout)
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            live.update(table(looks), refresh=True)
            sleep(interval_s)
            looks = watch.look()


def _fetch(server: str) -> str:
    """Returns a server's metrics."""
    with urllib.request.urlopen(f"{server}/metrics", timeout=_TIMEOUT_S) as answer:  # http or https, see `address`
        return str(answer.read().decode())
