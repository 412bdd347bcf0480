"""Measures what states at marks cost: the CPU time of chats on a hybrid model, with their marks and without.

A random Falcon-H1. Two engines serve the same chats by turns, each prompt with all turns before it, so that they hit
the same prefixes. The CPU time of the process (all threads) is added up for each: prefills and one new token.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from bench.prompts import Prompts
from bench.report import Report
from bench.tiny_models import HYBRIDS, loaded, tiny
from mainstem.runtime.engine import Engine
from mainstem.runtime.request import Request
from mainstem.settings.engine import EngineConfig, SamplingParams

MOST_SLOWER = 0.02
_FAMILY = "falcon_h1"
_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark.

    Args:
        chats: after a first one, which is not counted.
        turns: of each chat.
        system, turn: tokens of the system prompt of a chat, and of each of its turns.
        hidden, layers: size of the model.
    """

    chats: int = 15
    turns: int = 4
    system: int = 500
    turn: int = 220
    hidden: int = 512
    layers: int = 8


QUICK = Settings(chats=2, turns=2, hidden=64, layers=2)


def run(settings: Settings, report: Report) -> None:
    """Serves all chats with both engines; adds the seconds of each chat, the goal and a table to the report."""
    report.settings.update(asdict(settings), model=_FAMILY)
    shape = {"hidden_size": settings.hidden, "intermediate_size": 2 * settings.hidden, "vocab_size": 8192}
    changes = HYBRIDS[_FAMILY] | shape | {"num_hidden_layers": settings.layers, "max_position_embeddings": _CONTEXT}
    words: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0}))
    )  # never used: prompts are tokens
    model = replace(loaded(tiny(_FAMILY, **changes)), tokenizer=words)
    prompts = Prompts(model)
    config = EngineConfig(kv_bytes=1 << 30)
    with Engine(model, config) as with_marks, Engine(model, config) as without:
        engines = ((with_marks, True), (without, False))
        for chat in range(-1, settings.chats):
            report.progress(f"marks: chat {chat + 1} of {settings.chats}")
            turns = list(_chat(prompts, settings))
            seconds = dict.fromkeys(("with", "without"), 0.0)
            for engine, marked in engines if chat % 2 else engines[::-1]:
                began = time.process_time()
                for tokens, marks in turns:
                    engine.submit(Request(tokens, SamplingParams(max_tokens=1), marks=marks if marked else ())).result()
                seconds["with" if marked else "without"] = time.process_time() - began
            if chat >= 0:
                report.rows.append({"chat": chat, "seconds": seconds})
    slower = median(row["seconds"]["with"] / row["seconds"]["without"] for row in report.rows) - 1
    report.more["slower"] = slower
    what = "CPU time with marks over without, less 1"
    goal = {"what": what, "goal": MOST_SLOWER, "unit": "", "measured": slower, "met": slower <= MOST_SLOWER}
    report.more["goals"] = [goal]
    table = Table("chats", "slower with marks", title=f"a random {_FAMILY}")
    table.add_row(str(settings.chats), f"{slower:.1%}")
    report.tables.append(table)


def _chat(prompts: Prompts, settings: Settings) -> Iterator[tuple[NDArray[np.int32], tuple[int, ...]]]:
    """Yields the prompts of a chat, with the positions where its messages begin."""
    tokens = prompts.tokens(settings.system)
    marks: tuple[int, ...] = (settings.system,)
    for _ in range(settings.turns):
        tokens = prompts.extend(tokens, settings.turn)
        yield tokens, marks
        marks = (*marks, len(tokens))
