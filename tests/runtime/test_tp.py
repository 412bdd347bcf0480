"""Several processes serve one model: the answers of one process, tiers of each rank, ends of any of them.

Rank 0 is this process or a server's. The others are forked from processes that have imported what they need.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from machine import eventually, patience
from rigs.byte_pairs import byte_pairs
from rigs.greedy import family_of_prompts
from rigs.scheduler import Bench
from rigs.servers import free_port, valkey
from rigs.slow import slow_but

from bench.tiny_models import FAMILIES, HYBRIDS, LATENT, RESUMED, WINDOWED, tiny
from mainstem.errors import BadArgument, EngineClosed, MainstemError, RankFailed, UnsupportedModel
from mainstem.runtime.engine import Engine
from mainstem.runtime.parallel.launch import open_engine
from mainstem.runtime.parallel.ranks import ANSWER_S, FirstRank, LaterRank, Peer, largest, require_equal
from mainstem.runtime.request import Completion, Request
from mainstem.runtime.stream import Stream
from mainstem.server.fields.tools import NO_TOOLS
from mainstem.server.parsing.dialect import Dialect, TemplateTraits
from mainstem.server.parsing.formats import FORMATS
from mainstem.server.parsing.reasoning import THINKING
from mainstem.settings.engine import (
    EngineConfig,
    Grammar,
    HostPolicy,
    HostSize,
    ModelConfig,
    SamplingParams,
    StorageConfig,
    TierConfig,
)

VOCAB, CONTEXT, PAGE = 97, 512, 16
NEW_TOKENS = 8
TOLERANCE = 1e-3  # of logprobs, in float32; below it, two tokens are a tie
pytestmark = pytest.mark.deadline
PATIENCE_S = patience(60)
PRELOADED = [
    "mainstem.cli",
    "mainstem.runtime.parallel.launch",
    "mainstem.server.serving",
    "mainstem.storage.file",
    "torch.distributed.tensor",
    "transformers.distributed.tensor_parallel",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
]
FLOAT32 = ModelConfig("float32")
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 4}
Folder = Callable[..., str]


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Makes processes that have already imported what a rank needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Saves a tiny random model whose text has one word per token; returns its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made: dict[str, str] = {}

    def save(family: str, **changes: Any) -> str:
        name = f"{family}-{sorted(changes.items())}"
        if name not in made:
            path = tmp_path_factory.mktemp("model") / family
            tiny(family, **{"max_position_embeddings": CONTEXT, **changes}).save_pretrained(path)
            words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(VOCAB)}, unk_token="w0"))
            words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
            made[name] = str(path)
        return made[name]

    return save


Open = Callable[..., Any]


@pytest.fixture(scope="module")
def opened(processes: ForkServerContext) -> Open:
    """Opens an engine: `with opened(folder, ranks, **settings) as engine`."""

    @contextmanager
    def start(name: str | None, ranks: int, answer_s: float = ANSWER_S, **settings: Any) -> Iterator[Engine]:
        config = EngineConfig(**{"tp": ranks, "kv_bytes": 8 << 20, "page_size": PAGE, **settings})
        with open_engine(name, FLOAT32, config, context=processes, answer_s=answer_s) as engine:
            yield engine

    return start


def submit(engine: Engine, prompt: Sequence[int], new: int = NEW_TOKENS) -> Stream:
    params = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=2)
    return engine.submit(Request(np.array(prompt), params))


def ask(engine: Engine, prompts: Sequence[Sequence[int]], new: int = NEW_TOKENS) -> list[Completion]:
    """Runs all prompts at once."""
    streams = [submit(engine, prompt, new) for prompt in prompts]
    return [stream.result(timeout_s=PATIENCE_S) for stream in streams]


def same(several: Completion, one: Completion) -> None:
    """Checks that greedy answers are equal, up to a token that another equals but for rounding."""
    assert several.finish_reason == one.finish_reason
    for ours, theirs in zip(several.logprobs, one.logprobs, strict=True):
        assert abs(ours.logprob - theirs.logprob) < TOLERANCE
        if ours.token != theirs.token:
            (_, best), (_, second) = theirs.top
            assert best - second < TOLERANCE, f"{ours} is not {theirs}, and not a tie"
            return


def all_same(several: Sequence[Completion], one: Sequence[Completion]) -> None:
    for ours, theirs in zip(several, one, strict=True):
        same(ours, theirs)


def children() -> list[BaseProcess]:
    return [child for child in multiprocessing.active_children() if child.name.startswith("mainstem-rank")]


def documents(count: int, length: int = 5 * PAGE + 3) -> list[list[int]]:
    """Returns prompts that share nothing; ids below 2 are special."""
    return [[2 + (n * 7919 + at * (at + 3 * n + 11)) % (VOCAB - 2) for at in range(length)] for n in range(count)]


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "kept"),
    [
        (8, 4, 2, "auto"),
        (8, 4, 2, "int8"),
        pytest.param(4, 2, 2, "auto", marks=pytest.mark.slow),
        pytest.param(2, 2, 2, "auto", marks=pytest.mark.slow),
        pytest.param(8, 8, 2, "auto", marks=pytest.mark.slow),
        pytest.param(8, 4, 4, "auto", marks=pytest.mark.slow),
    ],
)
def test_ranks_give_the_answers_and_the_hits_of_one_process(
    opened: Open, folder: Folder, heads: int, kv_heads: int, ranks: int, kept: str
) -> None:
    model = folder("llama", num_attention_heads=heads, num_key_value_heads=kv_heads)
    prompts = family_of_prompts(VOCAB, 2 * PAGE, [3, 9, 20, 1])

    def serve(count: int) -> tuple[list[Completion], int, int]:
        with opened(model, count, kv_cache_dtype=kept) as engine:
            answers = ask(engine, prompts) + ask(engine, prompts)
            return answers, engine.stats().totals.cached_tokens, engine.pages

    one, cached, pages = serve(1)
    several, cached_by_several, pages_of_several = serve(ranks)
    all_same(several, one)
    assert len({answer.tokens for answer in one}) > 1
    assert cached_by_several == cached > 0
    assert pages_of_several // ranks == pages, "a rank keeps its own heads only"
    assert not children()


def plan(what: str, family: str, changes: dict[str, Any], *, slow: bool = True) -> Any:
    return pytest.param(family, changes, id=what, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        plan("windows", "gemma3_text", {**WINDOWED["gemma3_text"], "vocab_size": VOCAB}, slow=False),
        plan("heads on every rank", "phi3", FAMILIES["phi3"]),
        plan("query, key and value as one", "gpt_neox", FAMILIES["gpt_neox"]),
        plan("experts", "mixtral", FAMILIES["mixtral"], slow=False),
        plan("latents", "deepseek_v2", LATENT["deepseek_v2"], slow=False),
        plan("latents of all heads", "deepseek_v3", LATENT["deepseek_v3"]),
        plan("states", "qwen3_next", HYBRIDS["qwen3_next"]),
        plan("our scan", "jamba", RESUMED["jamba"], slow=False),
        plan("latents and states", "kimi_linear", HYBRIDS["kimi_linear"]),
    ],
)
def test_other_layers_and_plans(opened: Open, folder: Folder, family: str, changes: dict[str, Any]) -> None:
    model = folder(family, **changes)
    prompts = family_of_prompts(VOCAB, 2 * PAGE, [3, 25])
    with opened(model, 1) as engine:
        one = ask(engine, prompts)
    with opened(model, 2) as engine:
        all_same(ask(engine, prompts), one)


def test_prompts_are_scored_as_by_one_process(opened: Open, folder: Folder) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=1)
    tokens = np.arange(2, 40)
    found = []
    for ranks in (1, 2):
        with opened(folder("llama", **LLAMA), ranks, token_budget=16) as engine:
            found += [engine.submit(Request(tokens, params)).result(timeout_s=PATIENCE_S) for _ in range(2)]
    assert all(completion.usage.cached_tokens == 0 for completion in found)
    first, *others = [[score.logprob for score in completion.prompt_logprobs] for completion in found]
    assert len(first) == len(tokens) - 1
    for other in others:
        assert other == pytest.approx(first, abs=1e-3)


def test_a_grammar_is_followed_by_all_ranks_and_known_to_one(opened: Open, tmp_path: Path) -> None:
    tiny("llama", **LLAMA, vocab_size=400, max_position_embeddings=CONTEXT).save_pretrained(tmp_path)
    byte_pairs().save_pretrained(tmp_path)
    params = SamplingParams(max_tokens=60, grammar=Grammar("regex", "It says: (?:yes|no){2,9}!"), ignore_eos=True)
    prompt = list(range(5, 25))

    def followed(ranks: int) -> list[Completion]:
        with opened(str(tmp_path), ranks) as engine:
            answers = engine.generate([prompt, prompt], params) + engine.generate([prompt], params)
            totals = engine.stats().totals
            assert totals.grammar_requests == 3 and totals.accepted_tokens >= 3, (
                "what is forced is drafted on all ranks"
            )
            return answers

    one, two = followed(1), followed(2)
    assert [answer.tokens for answer in two] == [answer.tokens for answer in one]
    for answer in two:
        assert answer.finish_reason == "stop" and re.fullmatch("It says: (?:yes|no){2,9}!", answer.text)


class TestTwoRanks:
    """One engine of one process, then one of two, serve all of these."""

    @pytest.fixture(scope="class")
    def one(self, opened: Open, folder: Folder) -> dict[str, Any]:
        """The answers of one process."""
        with opened(folder("llama", **LLAMA), 1) as engine:
            thought = self.answered(engine, "no word")[0][0]
            stop = f"w{thought[2]} "
            return {
                "sampled": self.sampled(engine),
                "greedy": ask(engine, documents(3), 24),
                "thought": thought,
                "stop": stop,
                "stopped": self.answered(engine, stop),
            }

    @pytest.fixture(scope="class")
    def two(self, one: dict[str, Any], opened: Open, folder: Folder) -> Iterator[Engine]:
        with opened(folder("llama", **LLAMA), 2) as engine:
            yield engine

    @staticmethod
    def sampled(engine: Engine) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, seed=7)
        return tuple(engine.generate([documents(1)[0]], params)[0].tokens)

    @staticmethod
    def answered(engine: Engine, stop: str) -> list[tuple[tuple[int, ...], str]]:
        """Returns the answers to a prompt that begins a thought, and to one that does not, with a stop text."""
        thinks = Dialect(FORMATS["json"], THINKING["qwen3"], TemplateTraits(), {})
        params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, stop=(stop,))
        made = [partial(thinks.reading, NO_TOOLS, ending, params) for ending in ("<think>", "")]
        streams = [engine.submit(Request(np.array(documents(1)[0]), params, content=each)) for each in made]
        answers = [stream.result(timeout_s=PATIENCE_S) for stream in streams]
        return [(answer.tokens, answer.finish_reason) for answer in answers]

    def test_sampled_answers_are_those_of_one_process(self, one: dict[str, Any], two: Engine) -> None:
        assert self.sampled(two) == one["sampled"]

    def test_rank_0_samples_for_all(self, two: Engine) -> None:
        params = SamplingParams(max_tokens=3 * PAGE, ignore_eos=True, temperature=1.0)  # each rank has its own seeds
        (answer,) = two.generate([documents(1)[0]], params)
        (again,) = two.generate([[*documents(1)[0], *answer.tokens]], params)
        assert again.usage.cached_tokens == (len(documents(1)[0]) + 3 * PAGE - 1) // PAGE * PAGE

    def test_stop_texts_count_on_all_ranks_where_they_do_on_one(self, one: dict[str, Any], two: Engine) -> None:
        assert one["stopped"] == self.answered(two, one["stop"])
        (thought, _), (plain, reason) = one["stopped"]
        assert thought == one["thought"], "within a thought it does not count"
        assert reason == "stop" and len(plain) < NEW_TOKENS

    def test_a_cancelled_request_ends_on_every_rank(self, one: dict[str, Any], two: Engine) -> None:
        first, second, third = documents(3)
        cancelled, going = submit(two, first, 400), submit(two, second, 24)
        next(iter(cancelled))
        cancelled.cancel()
        assert cancelled.result(timeout_s=PATIENCE_S).finish_reason == "cancelled"
        same(going.result(timeout_s=PATIENCE_S), one["greedy"][1])
        all_same(ask(two, [third], 24), one["greedy"][2:])
        cache = two.stats().cache
        assert cache.tree.locked_pages == cache.retention.device["full"], "anchors are kept, and nothing else is"

    def test_removals_and_flushes_reach_every_rank(self, one: dict[str, Any], two: Engine) -> None:
        two.flush()
        all_same(ask(two, documents(3), 24), one["greedy"])
        assert two.remove(documents(1)[0][:PAGE]) >= 5
        assert two.flush() > 0
        assert two.tree()
        all_same(ask(two, documents(3), 24), one["greedy"])

    def test_adapters_are_refused(self, two: Engine, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match="adapter french: only a single process serves adapters"):
            two.load_adapter("french", tmp_path)
        assert ask(two, documents(1))


@pytest.mark.slow
def test_the_real_model_on_three_ranks(opened: Open, smollm2: Any) -> None:
    text = "A lighthouse stands at the end of the pier. " * 4
    shared = smollm2.tokenizer.encode(text)
    prompts = [shared + smollm2.tokenizer.encode(q) for q in ("How tall is the lighthouse?", "Who dug it?", "It")]
    with opened(None, 1, pages=64) as engine:
        one = ask(engine, prompts, 24)
    with opened(None, 3, pages=64) as engine:
        several = ask(engine, prompts, 24)
        assert engine.stats().totals.cached_tokens > 0
    for ours, theirs in zip(several, one, strict=True):
        same(ours, theirs)


# ---------------------------------------------------------------- scheduling


def test_preempted_requests_resume_on_every_rank(opened: Open, folder: Folder) -> None:
    prompts, model = documents(3), folder("llama", **LLAMA)
    with opened(model, 1) as engine:
        one = ask(engine, prompts, 20)
    with opened(model, 2, pages=13) as engine:  # two have room until they have a page more
        all_same(ask(engine, prompts, 20), one)
        assert engine.stats().totals.preemptions > 0


def test_new_weights_come_to_every_rank_or_to_none(opened: Open, folder: Folder, tmp_path: Path) -> None:
    model, other = folder("llama", **LLAMA), tiny("llama", **{"max_position_embeddings": CONTEXT, **LLAMA})
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.25)
    other.save_pretrained(tmp_path / "new")
    shutil.copytree(model, tmp_path / "begun")
    shutil.copy(tmp_path / "new" / "model.safetensors", tmp_path / "begun")
    prompts = documents(2)
    with opened(str(tmp_path / "begun"), 1) as engine:
        one = ask(engine, prompts)
    with opened(model, 2) as engine:
        before = ask(engine, prompts)
        for wrong in (tmp_path / "nowhere", other.state_dict()):
            with pytest.raises(BadArgument, match="weights"):
                engine.update_weights(wrong)
        all_same(ask(engine, prompts), before)
        assert engine.update_weights(tmp_path / "new") == 1
        after = ask(engine, prompts)
        assert [each.usage.cached_tokens for each in after] == [0, 0]
        all_same(after, one)
        assert [each.tokens for each in one] != [each.tokens for each in before]


# ---------------------------------------------------------------- host and storage


def stored(spec: str) -> TierConfig:
    """Tiers whose hits do not depend on time."""
    limits = StorageConfig(prefetch="wait_complete", prefetch_min_tokens=PAGE)
    return TierConfig(HostSize(host_ratio=2.0), storage=spec, storage_secret=b"0123456789abcdef", limits=limits)


def settled(engine: Engine) -> Engine:
    """Waits until nothing moves between tiers."""

    def under_way() -> int:
        stats = engine.stats().tiers
        assert stats is not None
        return stats.under_way

    eventually(lambda: not under_way(), 60.0)
    return engine


SMALL = 12  # pages of a device that holds two of the documents
MANY = 5


@pytest.fixture(scope="module")
def uncached(opened: Open, folder: Folder) -> list[Completion]:
    with opened(folder("llama", **LLAMA), 1, cache=False) as engine:
        return ask(engine, documents(MANY))


@pytest.mark.parametrize("where", slow_but(["a file of each rank", "one Valkey"], "one Valkey"))
def test_what_ranks_stored_is_found_after_a_restart_with_as_many(
    opened: Open, folder: Folder, uncached: list[Completion], tmp_path: Path, where: str
) -> None:
    prompts, model = documents(MANY), folder("llama", **LLAMA)
    port = free_port()
    with valkey(port):
        spec = f"redis://127.0.0.1:{port}/0" if where == "one Valkey" else f"file:{tmp_path}/{{rank}}?capacity=64MiB"

        def serve(ranks: int) -> list[Completion]:
            answers = []
            with opened(model, ranks, pages=SMALL, tiers=stored(spec)) as engine:
                for prompt in prompts:
                    answers += ask(engine, [prompt])
                    settled(engine)
                assert not engine.stats().tiers.faults
            all_same(answers, uncached)
            return answers

        serve(2)
        again = serve(2)
        assert sum(answer.usage.storage_tokens for answer in again) == MANY * 5 * PAGE
        other = serve(1)
        assert sum(answer.usage.storage_tokens for answer in other) == 0
        again = serve(2 if where == "one Valkey" else 1)
        assert sum(answer.usage.storage_tokens for answer in again) == MANY * 5 * PAGE


def test_what_one_rank_lost_is_computed_by_all(
    opened: Open, folder: Folder, uncached: list[Completion], tmp_path: Path
) -> None:
    prompts, model = documents(4), folder("llama", **LLAMA)
    settings = {"pages": SMALL, "tiers": stored(f"file:{tmp_path}/{{rank}}?capacity=64MiB")}
    with opened(model, 2, **settings) as engine:
        all_same(ask(engine, prompts), uncached[:4])
        settled(engine)
    for name in ("values", "index"):
        (tmp_path / "1" / name).unlink()
    with opened(model, 2, **settings) as engine:
        answers = ask(engine, prompts)
        all_same(answers, uncached[:4])
        assert sum(answer.usage.storage_tokens for answer in answers) == 0


@pytest.mark.slow
def test_stored_latents_are_found_with_any_number_of_ranks_that_divide_the_work(opened: Open, folder: Folder) -> None:
    prompts, model, port = documents(4), folder("deepseek_v2", **LATENT["deepseek_v2"]), free_port()
    with opened(model, 1, cache=False) as engine:
        uncached = ask(engine, prompts)

    def serve(ranks: int) -> int:
        with opened(model, ranks, tiers=stored(f"redis://127.0.0.1:{port}/0")) as engine:
            answers = ask(engine, prompts)
            all_same(answers, uncached)
            settled(engine)
            return sum(answer.usage.storage_tokens for answer in answers)

    with valkey(port):
        assert [serve(2), serve(4), serve(2)] == [0, *[4 * 5 * PAGE] * 2]
        assert [serve(1), serve(1)] == [0, 4 * 5 * PAGE]  # one rank is exact, and finds what is: docs/arithmetic.md


@pytest.mark.slow
def test_states_come_back_from_the_store_of_every_rank(opened: Open, folder: Folder, tmp_path: Path) -> None:
    prompts, model = documents(4), folder("qwen3_next", **HYBRIDS["qwen3_next"])
    with opened(model, 1, cache=False) as engine:
        uncached = ask(engine, prompts)

    def serve() -> int:
        with opened(model, 2, tiers=stored(f"file:{tmp_path}/{{rank}}?capacity=64MiB")) as engine:
            answers = [*ask(engine, prompts[:1]), *ask(engine, prompts[1:])]
            all_same(answers, uncached)
            settled(engine)
            return sum(answer.usage.storage_tokens for answer in answers)

    assert [serve(), serve()] == [0, 4 * 5 * PAGE]


@pytest.mark.parametrize("write", slow_but(["write_back", "write_through_selective"], "write_back"))
def test_pages_come_back_from_the_host_of_every_rank(
    opened: Open, folder: Folder, uncached: list[Completion], write: Any
) -> None:
    tiers = TierConfig(HostSize(host_ratio=8.0), HostPolicy(write_policy=write, load_min_tokens=PAGE))
    order = [*[0, 1] * 3, 2, 3, *range(MANY), *reversed(range(MANY))]
    with opened(folder("llama", **LLAMA), 2, pages=SMALL, tiers=tiers) as engine:
        for number in order:
            all_same(ask(engine, [documents(MANY)[number]]), [uncached[number]])
        assert engine.stats().totals.host_tokens > 0


# ---------------------------------------------------------------- ends


def test_a_rank_that_is_killed_in_the_middle_of_an_answer_ends_the_engine(opened: Open, folder: Folder) -> None:
    with opened(folder("llama", **LLAMA), 2) as engine:
        stream = submit(engine, documents(1)[0], 400)
        next(iter(stream))
        (child,) = children()
        child.kill()
        with pytest.raises(EngineClosed, match="rank 1 of 2 has ended: it was killed by signal 9"):
            stream.result(timeout_s=PATIENCE_S)
        with pytest.raises(EngineClosed, match="killed by signal 9"):
            submit(engine, documents(1)[0])
        assert isinstance(engine.failure, RankFailed)
    assert not children()


def test_a_rank_that_is_killed_while_there_is_nothing_to_do_ends_all_others(opened: Open, folder: Folder) -> None:
    with opened(folder("llama", **LLAMA), 4) as engine:
        second = sorted(children(), key=lambda child: child.name)[1]
        second.kill()
        eventually(lambda: engine.failure is not None)
        assert str(engine.failure) == "rank 2 of 4 has ended: it was killed by signal 9"
    assert not children()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_does_not_answer_ends_all_others(opened: Open, folder: Folder, ranks: int) -> None:
    with opened(folder("llama", **LLAMA), ranks, answer_s=patience(5)) as engine:
        assert ask(engine, documents(1))
        first = min(children(), key=lambda child: child.name)
        os.kill(first.pid or 0, signal.SIGSTOP)
        with pytest.raises(EngineClosed, match=f"rank 1 of {ranks} does not answer: .* s are allowed"):
            ask(engine, documents(2))
        assert isinstance(engine.failure, RankFailed)
    assert not children()


def test_an_error_of_one_rank_ends_the_engine_with_its_words(opened: Open, folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "1").write_text("no folder")
    tiers = stored(f"file:{tmp_path}/{{rank}}?capacity=64MiB")
    with (
        pytest.raises(RankFailed, match=r"rank 1 of 2 has ended: file store .*/1"),
        opened(folder("llama", **LLAMA), 2, tiers=tiers),
    ):
        pass
    assert not children()


def test_an_engine_leaves_the_environment_as_it_was(
    opened: Open, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    with opened(folder("llama", **LLAMA), 2):
        assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] != "mine"
    assert dict(os.environ) == before


def test_nothing_listens_beyond_this_machine(opened: Open, folder: Folder) -> None:
    before = sockets(os.getpid())  # other tests' clients
    with opened(folder("llama", **LLAMA), 2):
        found = [sockets(pid) for pid in (os.getpid(), *(child.pid for child in children()))]
    here = {address for own in found for socket, address in own.items() if socket not in before}
    assert here, "gloo connects the ranks"
    assert here <= {"0100007F", "loopback in IPv6"}, here


def sockets(pid: int | None) -> dict[str, str]:
    """Returns the local addresses of the TCP sockets that a process listens on or has connected, by socket."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except FileNotFoundError:
            continue
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if (socket := f"socket:[{fields[9]}]") in inodes:
                address = fields[1].rpartition(":")[0]
                found[socket] = "loopback in IPv6" if address == "0" * 24 + "01000000" else address
    return found


# ---------------------------------------------------------------- what is refused


def refusal(opened: Open, model: str, kind: type[MainstemError], words: str, ranks: int = 2, **settings: Any) -> None:
    with pytest.raises(kind, match=words), opened(model, ranks, **settings):
        pass
    assert not children()


def test_heads_that_the_ranks_cannot_divide_are_refused_with_the_numbers_that_can(opened: Open, folder: Folder) -> None:
    words = r"tp = 3: must be 1 or 2 or 4, since the model has 4 KV heads"
    refusal(opened, folder("llama", **LLAMA), BadArgument, words, 3)
    words = r"tp = 3: must be 1 or 2 or 4, since the model has 4 heads"
    refusal(opened, folder("deepseek_v2", **LATENT["deepseek_v2"]), BadArgument, words, 3)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt2", FAMILIES["gpt2"], "gpt2 cannot be divided among ranks: transformers has no plan for it"),
        ("lfm2", HYBRIDS["lfm2"], "lfm2 cannot be divided among ranks: transformers has no plan for it"),
    ],
)
def test_models_that_ranks_cannot_serve_are_refused(
    opened: Open, folder: Folder, family: str, changes: dict[str, Any], words: str
) -> None:
    refusal(opened, folder(family, **changes), UnsupportedModel, words)


def test_a_plan_that_divides_a_model_wrongly_is_refused(opened: Open, folder: Folder, tmp_path: Path) -> None:
    """Gate and up projection are one matrix: cut in two, one rank has all gates."""
    model = shutil.copytree(folder("phi3", **FAMILIES["phi3"]), tmp_path / "cut")
    config = json.loads((model / "config.json").read_text())
    config["base_model_tp_plan"] = {"layers.*.mlp.gate_up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    (model / "config.json").write_text(json.dumps(config))
    words = r"cut: divided among several ranks .* its logits in float32 differ by 0\.\d+ of their spread; 0.0001 is"
    refusal(opened, str(model), UnsupportedModel, words)


def test_models_that_read_images_are_refused_before_their_weights_are_read(
    opened: Open, folder: Folder, tmp_path: Path
) -> None:
    from transformers import LlavaConfig

    model = shutil.copytree(folder("llama", **LLAMA), tmp_path / "llava")
    (model / "model.safetensors").unlink()
    LlavaConfig().save_pretrained(model)
    refusal(opened, str(model), UnsupportedModel, "llava takes images, which ranks do not serve")


def test_a_store_that_only_one_process_can_open_is_refused(opened: Open, folder: Folder, tmp_path: Path) -> None:
    words = "storage = .*: must be a store that several processes can open, or one with {rank} in its spec"
    refusal(opened, folder("llama", **LLAMA), BadArgument, words, tiers=stored(f"file:{tmp_path}/kv"))


def test_a_misspelt_store_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    tiers = TierConfig(HostSize(host_bytes=1 << 20), storage="fle:./kv-{rank}")
    with (
        pytest.raises(BadArgument, match=r"fle:\./kv-0"),
        open_engine(f"{tmp_path}/none", config=EngineConfig(tiers=tiers)),
    ):
        raise AssertionError("it was opened")


def test_a_part_of_the_free_memory_is_refused_because_ranks_would_take_different_ones() -> None:
    with pytest.raises(BadArgument, match=r"host_fraction = 0.5: must be None if tp > 1"):
        EngineConfig(tp=2, tiers=TierConfig(HostSize(host_fraction=0.5)))


def test_an_engine_has_as_many_ranks_as_have_loaded_its_model(opened: Open, folder: Folder) -> None:
    from mainstem.runtime.models.loading import load_model

    with pytest.raises(BadArgument, match="tp = 2: must be 1, the number of ranks"):
        Engine(load_model(folder("llama", **LLAMA), dtype="float32"), EngineConfig(tp=2))


# ---------------------------------------------------------------- what ranks exchange


def joined(answer_s: float = ANSWER_S) -> tuple[FirstRank, LaterRank]:
    """Returns two ranks of this process."""
    ours, theirs = multiprocessing.Pipe()
    return FirstRank([Peer(1, multiprocessing.current_process(), ours)], answer_s), LaterRank(1, 2, theirs)


def both(first: Callable[[], Any], later: Callable[[], Any]) -> list[Any]:
    """Returns what two ranks return at once."""
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(later)
        return [first(), theirs.result()]


def test_a_rank_that_would_compute_something_else_ends_instead() -> None:
    first, later = joined()
    require_equal(first, lambda: [1, 2], "pages")
    require_equal(later, lambda: [1, 2], "pages")
    require_equal(first, lambda: [1, 2], "pages")
    with pytest.raises(RankFailed, match="its pages are not those of rank 0"):
        require_equal(later, lambda: [1, 3], "pages")


def test_a_scheduler_compares_each_step_with_that_of_rank_0_before_it_computes() -> None:
    class Other:
        """Rank 1, whose rank 0 has another page."""

        rank, size = 1, 2

        def share(self, make: Callable[[], Any]) -> Any:
            return [(0, -1, 0, 0)]

    bench = Bench()
    bench.scheduler._ranks = Other()  # type: ignore[assignment]
    bench.add([2, 3, 4], max_tokens=1)
    with pytest.raises(RankFailed, match="its requests or pages are not those of rank 0"):
        bench.step()


def test_ranks_agree_on_the_lowest_votes() -> None:
    first, later = joined()
    assert both(lambda: first.agree([0, 3, 1]), lambda: later.agree([1, 2, 0])) == [[0, 2, 0], [0, 2, 0]]


@pytest.mark.parametrize("values", [(0.0, 1e-9), (2e-5, 1e-5), (math.inf, 3.0), (0.0, 0.0), (1e300, math.inf)], ids=str)
def test_ranks_agree_on_the_largest_value(values: tuple[float, float]) -> None:
    first, later = joined()
    assert both(lambda: largest(first, values[0]), lambda: largest(later, values[1])) == [max(values)] * 2


def test_a_rank_that_does_not_vote_has_failed() -> None:
    first, _later = joined(answer_s=0.0)
    with pytest.raises(RankFailed, match="rank 1 of 2 does not answer: 0 s are allowed"):
        first.agree([1])


# ---------------------------------------------------------------- servers


def _serve(model: str, port: int, options: dict[str, Any], log: str) -> None:
    """A server's process, whose other rank is forked from it before it computes anything."""
    from mainstem.server.serving import bind, serve
    from mainstem.settings.server import ServerConfig

    tempfile.tempdir = str(Path(log).parent / "temporary")
    Path(tempfile.tempdir).mkdir(exist_ok=True)
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    config, server = EngineConfig(tp=2, page_size=PAGE, **options), ServerConfig(port=port)
    listener = bind(server)
    with open_engine(model, FLOAT32, config, context=multiprocessing.get_context("fork")) as engine:
        serve(engine, server, listener)


@contextmanager
def served(processes: ForkServerContext, model: str, log: Path, **options: Any) -> Iterator[tuple[Any, httpx.Client]]:
    port = free_port()
    process = processes.Process(target=_serve, args=(model, port, options, str(log)))
    process.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            eventually(lambda: up(client, process.exitcode, log), 60.0)
            yield process, client
    finally:
        process.kill()
        process.join()


def up(client: httpx.Client, code: int | None, log: Path) -> bool:
    assert code is None, f"the server ended with {code}: {log.read_text()[-2000:]}"
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def complete(client: httpx.Client, prompt: Sequence[int], new: int = NEW_TOKENS) -> Any:
    body = {"model": "llama", "prompt": list(prompt), "max_tokens": new, "temperature": 0}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_server_that_was_killed_leaves_no_rank_and_no_file_and_starts_again_with_its_store(
    processes: ForkServerContext, folder: Folder, tmp_path: Path
) -> None:
    model, prompts = folder("llama", **LLAMA), documents(3)
    options = {"pages": SMALL, "tiers": stored(f"file:{tmp_path}/{{rank}}?capacity=64MiB")}
    with served(processes, model, tmp_path / "log", **options) as (process, client):
        before = [complete(client, prompt)["choices"][0]["text"] for prompt in prompts]
        eventually(lambda: not client.get("/v1/cache/stats").json()["tiers"]["under_way"], 60.0)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert list((tmp_path / "temporary").iterdir())
        process.kill()
        eventually(lambda: not Path(f"/proc/{child}").exists(), 60.0)
        assert not list((tmp_path / "temporary").iterdir())
    with served(processes, model, tmp_path / "log", **options) as (_, client):
        for prompt, text in zip(prompts, before, strict=True):
            answer = complete(client, prompt)
            assert answer["choices"][0]["text"] == text
            tiers = answer["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
            assert tiers == {"device": 0, "host": 0, "storage": 5 * PAGE}


@pytest.mark.slow
def test_the_command_serves_with_several_ranks_and_ends_with_one_line_when_one_dies(
    folder: Folder, tmp_path: Path
) -> None:
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", "mainstem", "serve", folder("llama", **LLAMA), "--tp", "2", "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen([*command, "--dtype", "float32"], stdout=file, stderr=file)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            eventually(lambda: up(client, server.poll(), log), 120.0)
            assert complete(client, documents(1)[0])["usage"]["completion_tokens"] == NEW_TOKENS
            asking = threading.Thread(target=lambda: replies.append(client.post("/v1/completions", json=body)))
            replies: list[httpx.Response] = []
            body = {"model": "llama", "prompt": documents(1)[0], "max_tokens": 400}
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as other:
                asking.start()
                eventually(lambda: other.get("/v1/cache/stats").json()["running"] == 1, 60.0)
                os.kill(rank_of(server.pid), signal.SIGKILL)
                asking.join(PATIENCE_S)
        assert server.wait(PATIENCE_S) == 1
    finally:
        server.kill()
        server.wait()
    (reply,) = replies
    assert reply.status_code == 503
    lines = [line for line in log.read_text().splitlines() if "rank 1" in line or "Traceback" in line]
    assert lines == ["mainstem: the engine failed: RankFailed: rank 1 of 2 has ended: it was killed by signal 9"]


def rank_of(pid: int) -> int:
    """Returns the process of rank 1; another child tracks resources."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (rank,) = (int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text())
    return rank
