"""What agents are asked: a call of a tool, then a text. The model is scripted, and does what it is asked."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import Any

URL, MODEL = sys.argv[1:]
V1 = f"{URL}/v1"
SAID = "It is sunny."
ASKED = f'<call name="weather">{{"city": "Paris"}}</call><say>{SAID}</say>'
cities: list[str] = []
"""What the tool was called with since the last check."""


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: where.
    """
    cities.append(city)
    return "sunny"


def check(answer: Any) -> None:
    """Asserts that the tool was called once, and then the text said."""
    assert cities == ["Paris"], cities
    assert SAID in str(answer), answer
    cities.clear()


def run(*parts: Callable[[], None]) -> None:
    """Runs parts in order, and prints the name of each that worked."""
    for part in parts:
        part()
        print(f"\n{part.__name__}", flush=True)


def run_async(*parts: Callable[[], Awaitable[None]]) -> None:
    """The same in one loop, as long-lived clients want it."""
    import asyncio

    async def all() -> None:
        for part in parts:
            await part()
            print(f"\n{part.__name__}", flush=True)

    asyncio.run(all())
