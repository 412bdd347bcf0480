"""`Watch`: the measures of several servers, look by look, and the table that shows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from math import isfinite
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mainstem.errors import BadArgument, MainstemError
from mainstem.units import show_seconds
from mainstem.watch.sample import MEASURES, Measure, Sample, Window, measure, totals

if TYPE_CHECKING:
    from rich.table import Table

ALL = "all"
"""The name of the column of all servers that answered."""

_MOST = 1e100  # beyond it, and where it is NaN, a value is no count of anything


@dataclass(frozen=True, slots=True)
class Look:
    """The measures of one server, or of all, since the look before and since the start.

    Args:
        server: its address, or `ALL`.
        measures: by their names in `MEASURES`; None: unknown, or nothing happened.
        totals: since the start, by their names; see `Measure.total_name`.
        error: why there is nothing of this server.
    """

    server: str
    measures: dict[str, float | None] = field(default_factory=dict)
    totals: dict[str, float | None] = field(default_factory=dict)
    error: str | None = None


def address(text: str) -> str:
    """Returns the URL of a server from a URL, `host:port`, or `:port`.

    Raises:
        BadArgument: it is none of them.
    """
    url = text if "://" in text else f"http://{'127.0.0.1' if text.startswith(':') else ''}{text}"
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 80) > 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise BadArgument("server", text, "a URL such as http://127.0.0.1:8000, or HOST:PORT")
    return url.rstrip("/")


def not_ours(error: Exception) -> str:
    """Says why an answer cannot come from `mainstem serve`."""
    return " ".join(f"does not answer as mainstem serve does ({type(error).__name__}: {error})".split())


class Watch:
    """Several servers.

    Args:
        servers: their URLs, each once.
        fetch: returns the metrics of a server as text, or raises OSError, HTTPException, ValueError or MainstemError.
        clock: returns seconds, monotonic.
    """

    def __init__(self, servers: Sequence[str], fetch: Callable[[str], str], clock: Callable[[], float]) -> None:
        self._servers = servers
        self._fetch = fetch
        self._clock = clock
        self._last: dict[str, Sample] = {}

    def look(self) -> list[Look]:
        """Scrapes every server, all at once. The first look at a server has no measures, as it has nothing to compare.

        Returns:
            One for each server, in order; after them that of all which answered now and before, if there are several
            servers.
        """
        with ThreadPoolExecutor(len(self._servers)) as pool:
            samples = list(pool.map(self._scrape, self._servers))
        looks, windows = [], []
        for server, sample in zip(self._servers, samples, strict=True):
            before = self._last.pop(server, None)
            if isinstance(sample, str):
                looks.append(Look(server, error=sample))
                continue
            self._last[server] = sample
            if before is not None:
                windows.append(_between(before, sample))
            looks.append(_seen(server, sample, None if before is None else windows[-1]))
        if len(self._servers) > 1:
            together = Sample.of_all(map(_good, self._last.values()))
            looks.append(_seen(ALL, together, _joined(windows) if windows else None))
        return looks

    def _scrape(self, server: str) -> Sample | str:
        """Returns a server's sample, or why there is none."""
        try:
            sample = Sample.parse(self._fetch(server), self._clock())
            measure(_between(sample, sample))  # fails here, rather than for all servers, if its labels are bad
        except (OSError, MainstemError) as error:
            return " ".join(str(error).split()) or type(error).__name__
        except (HTTPException, ValueError, LookupError) as error:
            return not_ours(error)
        return sample


def _between(before: Sample, now: Sample) -> Window:
    """Returns the time between two scrapes, without series that were no number in one of them."""
    bad = {key for each in (before, now) for key, value in each.values.items() if not abs(value) < _MOST}

    def good(sample: Sample) -> Sample:
        return replace(sample, values={key: value for key, value in sample.values.items() if key not in bad})

    return Window.between(good(before), good(now))


def _seen(server: str, sample: Sample, window: Window | None) -> Look:
    return Look(server, {} if window is None else _finite(measure(window)), _finite(totals(_good(sample))))


def _good(sample: Sample) -> Sample:
    """Returns a sample without series that are no number."""
    return replace(sample, values={key: value for key, value in sample.values.items() if abs(value) < _MOST})


def _finite(found: dict[str, float | None]) -> dict[str, float | None]:
    return {name: value if value is not None and isfinite(value) else None for name, value in found.items()}


def _joined(windows: Sequence[Window]) -> Window:
    seconds = sum(window.seconds for window in windows) / len(windows)
    return Window(
        Sample.of_all(window.now for window in windows), Sample.of_all(window.growth for window in windows), seconds
    )


def table(looks: Sequence[Look]) -> Table:
    """Returns a table with a row for each measure, and two columns for each server: now, and since its start."""
    from rich.markup import escape
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    made.add_column("")
    for look in looks:
        made.add_column(look.server.removeprefix("http://"), justify="right")
        made.add_column("in all", justify="right")
    if any(look.error for look in looks):
        errors = (f"[red]{escape(look.error)}[/red]" if look.error else "" for look in looks)
        made.add_row("", *(cell for error in errors for cell in (error, "")))
    for each in MEASURES:
        made.add_row(each.title, *(cell for look in looks for cell in _cells(each, look)))
    return made


def _cells(each: Measure, look: Look) -> tuple[str, str]:
    total = _shown(each.total_name, look.totals.get(each.total_name)) if each.grows else ""
    return _shown(each.name, look.measures.get(each.name)), total


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    if name.endswith("_ratio"):
        return f"{value:.1%}"
    if name.endswith("_per_s"):
        return f"{value:,.1f}/s" if value < 1000 else f"{value:,.0f}/s"
    return show_seconds(value) if name.endswith("_s") else f"{value:,.0f}"
