from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from rigs.ghost import EOS, VOCAB, Ghost, GhostTokenizer, WrongKVError, chain, complete, prompt
from rigs.scheduler import PAGE, Bench

from mainstem.errors import BadArgument, BadTokens, RequestTooLong
from mainstem.runtime.request import LOWEST_PRIORITY, Progress, Request
from mainstem.runtime.segments import Segment
from mainstem.settings.engine import SamplingParams

# Output

RULES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -1.0},
    {"logit_bias": ((3, 4.0), (EOS, -2.0)), "stop_token_ids": (5,)},
    {"allowed_token_ids": (2, 3, 4, 5), "bad_words": ((2, 3), (4,))},
)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_random_work_gives_what_it_would_give_without_a_cache(seed: int, page_size: int, cache: bool) -> None:
    rng = random.Random(f"{seed} {page_size} {cache}")
    longest = 44
    pages = rng.choice([1, 1, 2, 3, 8]) * -(-longest // page_size)
    bench = Bench(
        pages,
        page_size,
        partial=rng.random() < 0.6,
        cache=cache,
        token_budget=rng.choice([1, 3, 7, 64]),
        max_running=rng.choice([1, 2, 5, 12]),
        draft_tokens=rng.choice([0, 3, 20]),
        age_limit_s=rng.choice([0.0, 5.0, 1e9]),
    )
    stems = [prompt(rng.random(), rng.randint(1, 30)) for _ in range(4)]
    cancelled = set()
    for _ in range(25):
        stem = rng.choice(stems)
        tokens = stem[: rng.randint(1, len(stem))] + prompt(rng.random(), rng.choice([0, 0, 1, 2, 4]))
        id = bench.add(
            tokens,
            namespace=rng.choice([None, None, None, "a"]),
            priority=rng.choice([0, 0, 0, 1]),
            max_tokens=rng.choice([0, *range(3, 11)]),
            temperature=rng.choice([0.0, 0.0, 1.0]),
            seed=rng.randrange(2**32),
            ignore_eos=rng.random() < 0.5,
            stop=rng.choice([(), ("A", "BC"), (chr(ord("A") + rng.randrange(VOCAB)),)]),
            include_stop_str_in_output=rng.random() < 0.5,
            **rng.choice(RULES),
        )
        bench.step(rng.choice([0, 0, 1, 1, 5]))
        if rng.random() < 0.15:
            victim = rng.choice([id, rng.choice(list(bench.requests))])
            cancelled |= {victim} - {i for i in bench.requests if bench.ended(i)}
            bench.scheduler.cancel(victim)
            bench.check()
    bench.run_and_flush()
    bench.assert_complete(*(set(bench.requests) - cancelled))
    for id in cancelled:
        tokens, text, _ = complete(bench.requests[id])
        got_tokens, got_text, reason = bench.output(id)
        assert reason == "cancelled" and tokens[: len(got_tokens)] == got_tokens
        assert text.startswith(got_text) or bench.requests[id].params.stop
    usages = [bench.last(id).usage for id in bench.requests]
    totals = bench.scheduler.totals
    assert sum(u.completion_tokens for u in usages) == totals.generated_tokens
    assert sum(u.cached_tokens for u in usages) == totals.cached_tokens
    assert len(bench.ghost.computed) == totals.computed_tokens
    assert cache or totals.cached_tokens == 0


@pytest.mark.parametrize("seed", range(2))
def test_an_answer_goes_on_from_what_another_engine_has_said_of_it(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        tokens = prompt(rng.random(), rng.randint(1, 30))
        params: dict[str, Any] = {
            "max_tokens": rng.randint(1, 12),
            "temperature": rng.choice([0.0, 1.0]),
            "seed": rng.randrange(2**32),
            "ignore_eos": rng.random() < 0.5,
            "min_tokens": 0,
            "stop": rng.choice([(), ("A", "BC"), (chr(ord("A") + rng.randrange(VOCAB)),)]),
            "include_stop_str_in_output": rng.random() < 0.5,
            **rng.choice(RULES),
        }
        answer = complete(Request(np.array(tokens), SamplingParams(**params)))[0]
        bench = Bench(rng.choice([12, 64]), draft_tokens=rng.choice([0, 3]), token_budget=rng.choice([3, 64]))
        ids = [bench.add(tokens, said=answer[:length], **params) for length in range(len(answer) + 1)]
        bench.run_and_flush()
        bench.assert_complete(*ids)
        for length, id in enumerate(ids):
            usage = bench.last(id).usage
            assert usage is not None
            assert usage.completion_tokens == len(answer)
            assert 0 <= usage.cached_tokens <= len(tokens), length
        assert bench.scheduler.totals.generated_tokens == sum(range(len(answer) + 1))


def test_what_another_engine_said_must_be_tokens_of_the_vocabulary_and_no_more_than_the_answer_may_have() -> None:
    bench = Bench()
    with pytest.raises(BadTokens, match=f"said: token {VOCAB}: must be below {VOCAB}"):
        bench.add(prompt(1, 3), said=[VOCAB], max_tokens=2)
    with pytest.raises(BadArgument, match="said = 3: must be at most max_tokens tokens"):
        bench.add(prompt(1, 3), said=[1, 1, 1], max_tokens=2)
    assert not bench.scheduler.busy


def test_a_stop_token_ends_a_request_even_past_eos_and_its_text_is_shown_if_asked_for() -> None:
    bench = Bench()
    tokens, letters, _ = complete(Request(prompt(1, 6), SamplingParams(max_tokens=9, ignore_eos=True)))
    at = next(i for i in range(1, 9) if tokens[i] not in tokens[:i] and tokens[i] != EOS)
    given = {"max_tokens": 9, "ignore_eos": True, "stop_token_ids": (tokens[at],)}
    for shown in (False, True):
        id = bench.add(prompt(1, 6), include_stop_str_in_output=shown, **given)
        bench.run()
        assert bench.output(id) == (tokens[: at + 1], letters[: at + shown], "stop")
    id = bench.add(prompt(1, 6), **{**given, "min_tokens": at + 2})
    bench.run()
    assert tokens[at] not in bench.output(id)[0][: at + 2]


def test_a_request_for_no_tokens_caches_its_prompt() -> None:
    bench = Bench()
    tokens = prompt(1, 3 * PAGE)
    id = bench.add(tokens, max_tokens=0)
    bench.run()
    assert bench.output(id) == ((), "", "length")
    again = bench.one([*tokens, 1])
    usage = bench.last(again).usage
    assert usage is not None and usage.cached_tokens == 3 * PAGE


def test_no_tokens_still_need_pages_for_the_whole_prompt() -> None:
    bench = Bench(pages=2)
    with pytest.raises(RequestTooLong, match=r"length is 8 tokens\. However, your prompt resulted in 9 tokens"):
        bench.add(prompt(1, 2 * PAGE + 1), max_tokens=0)


@pytest.mark.parametrize("rule", ["allowed_token_ids", "stop_token_ids"])
def test_rules_name_tokens_of_the_vocabulary(rule: str) -> None:
    bench = Bench()
    with pytest.raises(BadArgument, match=rule):
        bench.add(prompt(1, 3), **{rule: (VOCAB,)})
    assert not bench.scheduler.busy


def test_requests_end_by_eos_by_stop_string_and_by_length() -> None:
    bench = Bench()
    seed = next(s for s in range(1000) if EOS in complete(Request(prompt(s, 6), SamplingParams(max_tokens=9)))[0])
    by_eos = bench.add(prompt(seed, 6), max_tokens=9)
    past_eos = bench.add(prompt(seed, 6), max_tokens=9, ignore_eos=True)
    letters = complete(Request(prompt(seed, 6), SamplingParams(max_tokens=9, ignore_eos=True)))[1]
    by_text = bench.add(prompt(seed, 6), max_tokens=9, ignore_eos=True, stop=(letters[1:3],))
    bench.run_and_flush()
    assert bench.output(by_eos)[2] == "stop" and bench.output(by_eos)[0][-1] == EOS
    assert bench.output(past_eos)[2] == "length" and len(bench.output(past_eos)[0]) == 9
    assert bench.output(by_text)[1:] == (letters[0], "stop")


class Later:
    """Stop texts count from a character on; those that are only blanks, at the end of the text."""

    def __init__(self, begin: int, text: str, at_end: bool = False) -> None:
        self.begin, self.text, self.at_end, self.read = begin, text, at_end, ""
        self.stop: str | None = None

    def feed(self, text: str) -> None:
        self.read += text
        if self.text in self.read[self.begin :] and not self.at_end:
            self.stop = self.text

    def close(self, cut: bool = False) -> None:
        if self.at_end and self.read.endswith(self.text):
            self.stop = "cut" if cut else self.text


def test_stop_texts_count_where_the_reader_of_the_answer_says_so() -> None:
    bench = Bench(draft_tokens=2)
    tokens, letters, _ = complete(Request(prompt(1, 6), SamplingParams(max_tokens=9, ignore_eos=True)))
    given: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "stop": (letters[0],)}
    at = next(at for at in range(2, 8) if letters[at] not in letters[2:at])
    made = functools.partial(Later, 2, letters[at])
    stopped = bench.add(prompt(1, 6), content=made, **given)
    goes_on = bench.add(prompt(1, 6), content=made, said=tokens[: at - 1], **given)
    never = bench.add(prompt(1, 6), content=functools.partial(Later, 99, letters[at]), **given)
    unasked = bench.add(prompt(1, 6), content=made, max_tokens=9, ignore_eos=True)
    by_end = bench.add(prompt(1, 6), content=functools.partial(Later, 0, letters[8], at_end=True), **given)
    bench.run_and_flush()
    for id in (stopped, goes_on):
        assert bench.output(id) == (tokens[: at + 1], letters[: at + 1], "stop"), "with the token that completes it"
        assert bench.last(id).stop == letters[at]
        assert bench.last(id).usage.completion_tokens == at + 1
    assert bench.output(never)[1:] == bench.output(unasked)[1:] == (letters, "length")
    assert (bench.output(by_end)[2], bench.last(by_end).stop) == ("stop", "cut"), "found when nothing follows"


def test_a_stop_text_that_is_a_special_token_stops() -> None:
    bench, tokenizer = Bench(), GhostTokenizer()
    seed = next(s for s in range(1000) if EOS in complete(Request(prompt(s, 6), SamplingParams(max_tokens=9)))[0][1:8])
    tokens, letters, _ = complete(Request(prompt(seed, 6), SamplingParams(max_tokens=9, ignore_eos=True)))
    at, text = tokens.index(EOS), tokenizer.decode([EOS])
    for shown in (False, True):
        given = {"max_tokens": 9, "ignore_eos": True, "stop": (text,), "include_stop_str_in_output": shown}
        id = bench.add(prompt(seed, 6), **given)
        bench.run()
        assert bench.output(id) == (tokens[: at + 1], letters[:at] + text * shown, "stop")
        assert bench.last(id).stop == text


def test_logprobs_come_with_their_tokens() -> None:
    bench = Bench()
    plain, asked = bench.add(prompt(1, 5), max_tokens=4), bench.add(prompt(1, 5), max_tokens=4, logprobs=2)
    bench.run_and_flush()
    assert all(delta.logprobs == () for delta in bench.deltas[plain])
    assert [delta.logprobs[0].token for delta in bench.deltas[asked]] == list(bench.output(asked)[0])
    assert all(len(delta.logprobs[0].top) == 2 for delta in bench.deltas[asked])


def test_a_wrong_page_would_be_noticed() -> None:
    """The ghost itself: every kind of wrong page raises."""
    ghost = Ghost(pages=4, page_size=2)
    first = np.array([1, 2, 3, 4], np.int32)
    ghost.forward([Segment(first, 0, (np.array([0, 1], np.int32),), logits=True)])
    ghost.forward([Segment(np.array([9, 2], np.int32), 0, (np.array([2], np.int32),), logits=False)])
    ghost.copy_page(1, 3, 1)
    after = np.array([5], np.int32)
    for table in ([2, 1, 3], [1, 0, 3], [0, 3, 2], [0, 0, 3]):
        with pytest.raises(WrongKVError):
            ghost.forward([Segment(after, 4, (np.array(table, np.int32),), logits=True)])
    ghost.forward([Segment(after, 3, (np.array([0, 3], np.int32),), logits=True)])


# The batch


def test_every_running_request_gets_a_token_in_every_step_beside_a_long_prompt() -> None:
    bench = Bench(token_budget=8)
    decoding = [bench.add(prompt(i, 3), max_tokens=20, ignore_eos=True) for i in range(2)]
    bench.step()
    long = bench.add(prompt(9, 60), max_tokens=1, ignore_eos=True)
    bench.step(8)
    assert bench.ghost.forwards[1:] == [[1, 1, 8]] * 7 + [[1, 1, 4]]
    assert all(len(bench.deltas[id]) == 9 for id in decoding)
    assert bench.ended(long)
    bench.run_and_flush()


def test_prompts_share_the_chunk_in_order_of_admission() -> None:
    bench = Bench(token_budget=10)
    for i, length in enumerate((7, 7, 7)):
        bench.add(prompt(i, length), max_tokens=1)
    bench.run_and_flush()
    assert bench.ghost.forwards == [[7, 3], [4, 6], [1]]


def test_what_nobody_waits_for_is_computed_32_tokens_at_a_time() -> None:
    """So that a request which comes meanwhile waits for no more than these."""
    bench = Bench(token_budget=512)
    bench.add(prompt(1, 80), max_tokens=0, priority=LOWEST_PRIORITY)
    bench.run_and_flush()
    bench.add(prompt(2, 80), max_tokens=0, priority=LOWEST_PRIORITY + 1)
    bench.run_and_flush()
    assert bench.ghost.forwards == [[32], [32], [16], [80]]


def test_what_nobody_waits_for_computes_nothing_while_somebody_waits() -> None:
    bench = Bench(token_budget=8)
    batch = [bench.add(prompt(i, 3), max_tokens=30, ignore_eos=True, priority=LOWEST_PRIORITY) for i in range(2)]
    bench.step(2)
    asked = bench.add(prompt(9, 20), max_tokens=3, ignore_eos=True)
    late = bench.add(prompt(5, 3), max_tokens=3, priority=LOWEST_PRIORITY)
    begun = len(bench.ghost.forwards)
    bench.step(6)
    assert bench.ghost.forwards[begun:] == [[8], [8], [4], [1], [1], [1, 1, 3]]
    bench.run_and_flush()
    assert all(bench.ended(id) for id in (*batch, asked, late))
    bench.assert_complete()


def test_what_nobody_waits_for_has_its_share_of_the_steps() -> None:
    bench = Bench(token_budget=64, batch_share=0.25)
    batch = bench.add(prompt(1, 3), max_tokens=4, ignore_eos=True, priority=LOWEST_PRIORITY)
    bench.step(2)
    asked = bench.add(prompt(9, 3), max_tokens=30, ignore_eos=True)
    late = bench.add(prompt(5, 40), max_tokens=1, priority=LOWEST_PRIORITY)
    begun = len(bench.ghost.forwards)
    bench.step(13)
    forwards = bench.ghost.forwards[begun:]
    assert [sum(each) for each in forwards] == [3, 1, 1, 34, 1, 1, 1, 10, *[1] * 5]
    assert bench.ended(batch) and bench.ended(late) and not bench.ended(asked)
    bench.run_and_flush()
    bench.assert_complete()


@pytest.mark.parametrize(
    ("share", "steps", "computed"), [(0, 10, 0), (0.1, 9, 0), (0.1, 10, 1), (0.3, 10, 3), (1, 10, 10)]
)
def test_the_share_is_of_the_steps_in_which_somebody_waits(share: float, steps: int, computed: int) -> None:
    bench = Bench(batch_share=share)
    bench.add(prompt(9, 3), max_tokens=100, ignore_eos=True)
    bench.step(7)  # without anybody else, which counts for nothing
    batch = bench.add(prompt(1, 3), max_tokens=30, ignore_eos=True, priority=LOWEST_PRIORITY)
    bench.step(steps)
    assert len(bench.deltas[batch]) == computed
    bench.run_and_flush()


def test_with_its_share_it_is_still_the_first_to_give_way() -> None:
    bench = Bench(max_running=2, batch_share=1.0)
    batch = [bench.add(prompt(i, 3), max_tokens=30, ignore_eos=True, priority=LOWEST_PRIORITY) for i in range(2)]
    bench.step(2)
    asked = [bench.add(prompt(i, 3), max_tokens=3, ignore_eos=True) for i in (7, 8)]
    bench.step(2)
    assert [len(bench.deltas[id]) for id in asked] == [2, 1]
    bench.run_and_flush()
    assert all(bench.ended(id) for id in batch)


def test_nobody_waits_for_a_prefix_of_what_has_but_a_share() -> None:
    bench = Bench(page_size=4, batch_share=1.0)
    shared = prompt(1, 100)
    bench.add([*shared, 1], max_tokens=1, priority=LOWEST_PRIORITY)
    bench.step()
    asked = bench.add([*shared, 2], max_tokens=1)
    bench.step()
    assert bench.ended(asked)
    bench.run_and_flush()


@pytest.mark.parametrize("seed", range(16))
def test_random_requests_beside_what_has_a_share_are_as_without_a_cache(seed: int) -> None:
    draw = random.Random(seed)
    bench = Bench(
        pages=draw.choice((12, 16, 32)), page_size=4, max_running=draw.choice((1, 2, 3, 6)),
        token_budget=draw.choice((8, 32, 64)), batch_share=draw.choice((0.1, 0.5, 1.0)),
    )  # fmt: skip
    for _ in range(60):
        for _ in range(draw.choice((0, 0, 1, 2))):
            given = {"max_tokens": draw.randint(0, 8), "priority": draw.choice((0, LOWEST_PRIORITY))}
            bench.add(prompt(draw.randint(0, 5), draw.randint(1, 26)), ignore_eos=True, **given)
        bench.step()
    bench.run_and_flush()
    bench.assert_complete()


def test_what_nobody_waits_for_gives_up_its_slot() -> None:
    bench = Bench(max_running=2)
    batch = [bench.add(prompt(i, 3), max_tokens=30, ignore_eos=True, priority=LOWEST_PRIORITY) for i in range(2)]
    bench.step(2)
    asked = [bench.add(prompt(i, 3), max_tokens=3, ignore_eos=True) for i in (7, 8)]
    bench.step(2)
    assert [len(bench.deltas[id]) for id in asked] == [2, 1]
    bench.run_and_flush()
    assert all(bench.ended(id) for id in batch)
    bench.assert_complete()


def test_what_nobody_waits_for_gives_up_its_pages() -> None:
    bench = Bench(pages=8, page_size=4)
    batch = [bench.add(prompt(i, 9), max_tokens=4, ignore_eos=True, priority=LOWEST_PRIORITY) for i in range(2)]
    bench.step()
    asked = bench.add(prompt(9, 20), max_tokens=3, ignore_eos=True)
    bench.step()
    assert len(bench.deltas[asked]) == 1
    bench.run_and_flush()
    assert bench.scheduler.totals.preemptions >= 1
    assert all(bench.ended(id) for id in batch)
    bench.assert_complete()


def test_a_request_does_not_wait_for_its_prefix_where_nobody_computes_it() -> None:
    """A request of the lowest priority that waits itself would never publish it."""
    bench = Bench(token_budget=8, page_size=4)
    shared = prompt(1, 40)
    bench.add([*shared, 1], max_tokens=1, priority=LOWEST_PRIORITY)
    bench.step()
    asked = bench.add([*shared, 2], max_tokens=1)
    bench.step(6)
    assert bench.ended(asked)
    bench.run_and_flush()


def test_no_more_run_than_allowed() -> None:
    bench = Bench(max_running=3)
    for i in range(8):
        bench.add(prompt(i, 5), max_tokens=4, ignore_eos=True)
    while bench.scheduler.busy:
        bench.step()
        assert bench.scheduler.running <= 3
    assert max(map(len, bench.ghost.forwards)) == 3
    bench.assert_complete()


def test_progress_of_a_prompt_is_reported_from_the_hit_to_the_end() -> None:
    bench = Bench(token_budget=8)
    first = bench.add(prompt(1, 20), max_tokens=1)
    bench.run_and_flush()
    assert bench.progress[first] == [Progress(n, 20) for n in (0, 8, 16, 20)]
    bench = Bench(token_budget=8)
    bench.add(prompt(1, 12), max_tokens=1)
    bench.step(3)
    again = bench.add(prompt(1, 12) + [1] * 10, max_tokens=1)
    bench.run_and_flush()
    assert bench.progress[again] == [Progress(n, 22) for n in (12, 20, 22)]


# The cache


@pytest.mark.parametrize("token_budget", [6, 40, 512])
def test_a_prefix_that_several_wait_for_is_computed_once(token_budget: int) -> None:
    bench = Bench(token_budget=token_budget)
    shared = prompt(1, 16)
    ids = [bench.add(shared + [i] * 5, max_tokens=3, ignore_eos=True) for i in range(6)]
    bench.run_and_flush()
    assert len(bench.ghost.computed) == len(set(bench.ghost.computed)) == 16 + 6 * (5 + 2)
    assert [bench.last(id).usage.cached_tokens for id in ids] == [0] + [16] * 5


def test_nested_shared_prefixes_are_each_computed_once() -> None:
    bench = Bench(token_budget=5)
    trunk, left, right = prompt(1, 8), prompt(2, 12), prompt(3, 4)
    for tail in ([], left, left + [1] * 4, right, right + [2] * 4, left + [3] * 8):
        bench.add(trunk + tail + [9], max_tokens=1)
    bench.run_and_flush()
    assert len(bench.ghost.computed) == len(set(bench.ghost.computed))


def test_a_deferred_request_starts_in_the_step_after_its_prefix_is_published() -> None:
    bench = Bench(token_budget=8, page_size=4)
    long = bench.add(prompt(1, 21), max_tokens=1)
    short = bench.add(prompt(1, 8) + [1, 2], max_tokens=1)
    bench.step()
    assert bench.scheduler.waiting == 1
    bench.step(2)
    assert bench.ghost.forwards == [[8], [8], [5, 2]], "the rest of the last budget is for the next request"
    assert bench.ended(long) and bench.last(short).usage.cached_tokens == 8


def test_a_prompt_that_is_all_shared_waits_for_all_pages_but_its_last() -> None:
    bench = Bench(token_budget=8, page_size=4)
    bench.add(prompt(1, 21), max_tokens=1)
    inside = bench.add(prompt(1, 16), max_tokens=1)
    bench.step(3)
    assert bench.ghost.forwards == [[8], [8], [5, 1]]
    assert bench.last(inside).usage.cached_tokens == 15


def test_each_page_is_published_as_it_fills_and_all_become_one_node() -> None:
    bench = Bench(token_budget=4, page_size=4)
    id = bench.add(prompt(1, 12), max_tokens=20, ignore_eos=True)
    all_tokens = prompt(1, 12) + list(complete(bench.requests[id])[0])
    for published in (4, 8, 12, 12, 12, 12, 16, 16, 16, 16, 20):
        bench.step()
        assert bench.cache.peek([*all_tokens, 0]) == published
    bench.run()
    assert bench.cache.peek([*all_tokens, 0]) == 28  # 31 positions were computed: seven whole pages
    assert bench.cache.stats().tree.nodes == 1


def test_nothing_is_waited_for_that_would_not_come() -> None:
    for settings in ({"namespace": "other"}, {"namespace": None}):
        bench = Bench(cache=settings["namespace"] == "other")
        bench.add(prompt(1, 16) + [1], max_tokens=1)
        bench.add(prompt(1, 16) + [2], max_tokens=1, **settings)
        bench.step()
        assert bench.ghost.forwards == [[17, 17]], settings
        bench.run_and_flush()


def test_a_deferred_request_goes_on_when_the_one_that_computes_its_prefix_ends() -> None:
    bench = Bench(token_budget=4)
    maker = bench.add(prompt(1, 40), max_tokens=1)
    follower = bench.add(prompt(1, 40) + [3], max_tokens=1)
    bench.step(3)
    bench.scheduler.cancel(maker)
    bench.run_and_flush()
    assert bench.last(maker).finish_reason == "cancelled"
    bench.assert_complete(follower)
    assert bench.last(follower).usage.cached_tokens == 12
    assert len(bench.ghost.computed) == 41


def test_the_next_turn_hits_prompt_and_answer() -> None:
    bench = Bench(page_size=1)
    first = bench.add(prompt(1, 10), max_tokens=7, ignore_eos=True)
    bench.run()
    second = bench.add(prompt(1, 10) + list(bench.output(first)[0]) + [1, 2], max_tokens=2)
    bench.run_and_flush()
    assert bench.last(second).usage.cached_tokens == 16  # all but the last token, which no forward has seen
    bench.assert_complete()


def test_a_hit_may_end_inside_a_page() -> None:
    for partial, cached in ((True, 14), (False, 12)):
        bench = Bench(page_size=4, partial=partial)
        bench.add(prompt(1, 20), max_tokens=1)
        bench.run()
        second = bench.add([*prompt(1, 14), (prompt(1, 20)[14] + 1) % VOCAB, 3], max_tokens=5)
        bench.run_and_flush()
        assert bench.last(second).usage.cached_tokens == cached
        bench.assert_complete()


# Drafts


def test_an_answer_given_before_is_drafted_from_the_tree_and_verified_in_few_forwards() -> None:
    bench = Bench(draft_tokens=7)
    steps = []
    for _ in range(2):
        before = len(bench.ghost.forwards)
        bench.add(prompt(3, 9), max_tokens=20, ignore_eos=True)
        bench.run()
        steps.append(len(bench.ghost.forwards) - before)
    bench.assert_complete()
    assert steps[0] == 20
    assert steps[1] <= 5  # 1, then drafts of 2, 4 and 7 tokens, and one more for the last
    assert bench.scheduler.totals.accepted_tokens >= 15


def test_a_text_that_repeats_itself_is_drafted_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    text = [5, 6, 9] * 9
    following = {chain(text[:n]): torch.eye(VOCAB)[text[n]] for n in range(9, len(text))}
    monkeypatch.setattr("rigs.ghost.logits", following.__getitem__)
    bench = Bench(draft_tokens=7, cache=False)
    id = bench.add(text[:9], max_tokens=18, ignore_eos=True)
    bench.run()
    assert list(bench.output(id)[0]) == text[9:]
    assert len(bench.ghost.forwards) <= 6


def test_drafts_that_are_wrong_are_overwritten_and_never_published() -> None:
    bench = Bench(page_size=1, draft_tokens=7)
    tokens = prompt(3, 9)
    first = bench.add(tokens, max_tokens=12, temperature=0.25, seed=1, ignore_eos=True)
    bench.run()
    for seed in range(2, 12):  # each is drafted as others went on, and parts from them
        bench.add(tokens, max_tokens=12, temperature=0.25, seed=seed, ignore_eos=True)
        bench.run()
    totals = bench.scheduler.totals
    assert totals.drafted_tokens > totals.accepted_tokens > 0
    bench.add([*tokens, *bench.output(first)[0]], max_tokens=3)
    bench.run_and_flush()


def test_the_decodes_of_a_step_share_the_drafts() -> None:
    bench = Bench(draft_tokens=6)
    bench.add(prompt(3, 9), max_tokens=20, ignore_eos=True)
    bench.run()
    for _ in range(3):
        bench.add(prompt(3, 9), max_tokens=20, ignore_eos=True)
    bench.run()
    decodes = [forward for forward in bench.ghost.forwards if len(forward) == 3 and max(forward) <= 7]
    assert max(map(max, decodes)) == 3  # the next token and two more
    for _ in range(7):
        bench.add(prompt(3, 9), max_tokens=20, ignore_eos=True)
    drafted = bench.scheduler.totals.drafted_tokens
    while len(bench.scheduler._running) < 7:
        bench.step()
    bench.step()
    assert bench.scheduler.totals.drafted_tokens == drafted
    bench.run_and_flush()


def test_drafts_preempt_nobody_and_need_no_page_that_is_not_there() -> None:
    bench = Bench(pages=6, page_size=4, draft_tokens=20, partial=False)
    for _ in range(2):
        first = bench.add(prompt(3, 4), max_tokens=9, ignore_eos=True)
        bench.run()
    other = bench.add(prompt(4, 4), max_tokens=9, ignore_eos=True)
    again = bench.add(prompt(3, 4), max_tokens=9, ignore_eos=True)
    bench.run_and_flush()
    assert bench.scheduler.totals.preemptions == 0
    assert bench.output(again) == bench.output(first) != bench.output(other)


def test_a_draft_ends_with_its_request() -> None:
    bench = Bench(draft_tokens=20)
    whole = bench.add(prompt(3, 9), max_tokens=12, ignore_eos=True)
    bench.run()
    letters = bench.output(whole)[1]
    short = bench.add(prompt(3, 9), max_tokens=5, ignore_eos=True)
    stopped = bench.add(prompt(3, 9), max_tokens=12, ignore_eos=True, stop=(letters[5:7],))
    bench.run_and_flush()
    assert bench.output(short)[1:] == (letters[:5], "length")
    assert bench.output(stopped)[1:] == (letters[:5], "stop")
    assert [bench.deltas[id][-1].stop for id in (short, stopped)] == [None, letters[5:7]]
    bench.assert_complete()


# The order of admission


def _order_of_first_tokens(bench: Bench) -> list[str]:
    order: list[str] = []
    for _ in range(500):
        if not bench.scheduler.busy:
            return order
        bench.step()
        order += [id for id in bench.requests if bench.deltas[id] and id not in order]
    raise AssertionError("it goes on for ever")


def _warm(bench: Bench, tokens: list[int]) -> None:
    bench.add(tokens, max_tokens=1)
    bench.run()


def test_what_is_queued_is_what_no_hit_spares() -> None:
    bench = Bench(max_running=1, token_budget=8, partial=False)
    stem = prompt(1, 16)
    bench.add(stem, max_tokens=0)
    assert bench.scheduler.queued() == 16
    bench.step()
    assert bench.scheduler.queued() == 8
    bench.run()
    assert bench.scheduler.queued() == 0
    for seed, length in ((2, 4), (3, 12)):
        bench.add(stem + prompt(seed, length), max_tokens=4, ignore_eos=True)
    assert bench.scheduler.queued() == 4 + 12
    bench.step()
    assert bench.scheduler.queued() == 12  # the other one decodes
    bench.run()
    assert bench.scheduler.queued() == 0


def test_of_many_that_wait_the_first_say_how_much_is_queued() -> None:
    bench = Bench(1000, max_running=1)
    for seed in range(300):
        bench.add(prompt(seed, 16), max_tokens=0)
    assert bench.scheduler.queued() == 300 * 16


def test_the_longest_cached_prefix_goes_first_then_the_oldest() -> None:
    bench = Bench(max_running=1)
    _warm(bench, prompt(1, 32))
    cold = bench.add(prompt(2, 8), max_tokens=1)
    cold_too = bench.add(prompt(3, 8), max_tokens=1)
    short = bench.add(prompt(1, 8) + [1], max_tokens=1)
    long = bench.add(prompt(1, 24) + [1], max_tokens=1)
    assert _order_of_first_tokens(bench)[1:] == [long, short, cold, cold_too]


def test_a_higher_priority_goes_before_any_hit_and_any_age() -> None:
    bench = Bench(max_running=1, age_limit_s=5)
    _warm(bench, prompt(1, 32))
    cached = bench.add(prompt(1, 24) + [1], max_tokens=1)
    bench.now_s += 100
    urgent = bench.add(prompt(2, 8), max_tokens=1, priority=1)
    assert _order_of_first_tokens(bench)[1:] == [urgent, cached]


@pytest.mark.parametrize("age_limit_s", [10.0, 40.0])
def test_a_request_without_a_hit_waits_for_the_age_limit_and_no_longer(age_limit_s: float) -> None:
    bench = Bench(max_running=1, age_limit_s=age_limit_s)
    _warm(bench, prompt(1, 32))
    cold = bench.add(prompt(2, 8), max_tokens=1)
    added = bench.now_s
    while not bench.deltas[cold]:
        bench.add([*prompt(1, 24), int(bench.now_s) % VOCAB], max_tokens=1)
        bench.step()
        assert bench.now_s < added + 100
    assert age_limit_s < bench.now_s - added <= age_limit_s + 2


def test_a_request_over_the_age_limit_is_not_deferred() -> None:
    for age_limit_s, running in ((3.0, 2), (1e9, 1)):
        bench = Bench(token_budget=4, age_limit_s=age_limit_s)
        bench.add(prompt(1, 6), max_tokens=1)
        bench.add(prompt(2, 40), max_tokens=1)
        follower = bench.add(prompt(2, 40) + [3], max_tokens=1)
        bench.step(2)
        assert bench.scheduler.waiting == 1
        bench.now_s += 10
        bench.step(12)
        cached = bench.last(follower).usage.cached_tokens
        assert (cached < 40) == (running == 2)


def test_nothing_passes_a_request_that_waits_for_pages() -> None:
    bench = Bench(pages=8, page_size=4)
    bench.add(prompt(1, 8), max_tokens=9, ignore_eos=True)
    bench.step()
    large = bench.add(prompt(2, 28), max_tokens=2)
    small = bench.add(prompt(3, 4), max_tokens=1)
    bench.step(7)
    assert (bench.scheduler.running, bench.scheduler.waiting) == (1, 2)
    bench.step()
    assert bench.scheduler.waiting == 2
    bench.step()
    assert bench.deltas[large]
    bench.run_and_flush()
    assert bench.last(small).usage.queue_s >= 9


# Pages


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    bench = Bench(pages=4, page_size=4, max_context=40)
    with pytest.raises(RequestTooLong, match=r"16 tokens\. .* 41 tokens \(30 in the prompt, 11 in the completion\)"):
        bench.add(prompt(1, 30), max_tokens=11)
    with pytest.raises(RequestTooLong, match=r"16 tokens\. .* 18 tokens \(10 in the prompt, 8 in the"):
        bench.add(prompt(1, 10), max_tokens=8)
    with pytest.raises(BadTokens):
        bench.add([1, VOCAB], max_tokens=1)
    assert not bench.scheduler.busy
    just_fits = bench.add(prompt(1, 10), max_tokens=7, ignore_eos=True)
    bench.run_and_flush()
    assert len(bench.output(just_fits)[0]) == 7


def test_what_does_not_fit_now_waits() -> None:
    bench = Bench(pages=4, page_size=4)
    bench.add(prompt(1, 10), max_tokens=4, ignore_eos=True)
    waits = bench.add(prompt(2, 10), max_tokens=4, ignore_eos=True)
    bench.step(4)
    assert (bench.scheduler.running, bench.scheduler.waiting) == (0, 1)
    bench.run_and_flush()
    assert bench.last(waits).usage.queue_s == 5.0


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("partial", [True, False])
def test_a_preempted_request_gives_the_same_output(page_size: int, partial: bool) -> None:
    outputs = []
    for pages in (1000, 28 // page_size):
        bench = Bench(pages, page_size, partial=partial)
        for i in range(5):
            bench.add(prompt(i, 4), max_tokens=20, ignore_eos=True, temperature=0.8 * (i % 2), seed=i, stop=("ABC",))
        bench.run_and_flush()
        outputs.append([bench.output(id) for id in bench.requests])
        assert (bench.scheduler.totals.preemptions > 0) == (pages < 1000)
    assert outputs[0] == outputs[1]


def test_the_newest_is_preempted_and_resumed_from_the_cache() -> None:
    bench = Bench(pages=6, page_size=4)
    older = bench.add(prompt(1, 8), max_tokens=6, ignore_eos=True)
    newer = bench.add(prompt(2, 8), max_tokens=12, ignore_eos=True)
    while not bench.scheduler.totals.preemptions:
        bench.step()
    before = len(bench.ghost.forwards)
    late = bench.add(prompt(3, 4), max_tokens=1)
    assert (len(bench.output(older)[0]), len(bench.output(newer)[0])) == (6, 5)
    bench.run_and_flush()
    assert bench.scheduler.totals.preemptions == 1
    recomputed = len(bench.ghost.computed) - (13 + 19 + 4)
    assert recomputed == 4, "one of its pages was evicted for the older request, two were hit"
    assert bench.ghost.forwards[before] == [5, 4], "the missing positions are computed in one chunk"
    assert bench.last(newer).usage.cached_tokens == 0, "finding its own pages does not count as a hit"
    assert bench.last(late).usage.queue_s > 0


def test_generated_tokens_that_were_evicted_are_computed_again_in_chunks() -> None:
    bench = Bench(pages=6, page_size=4, token_budget=4)
    bench.add(prompt(1, 8), max_tokens=7, ignore_eos=True)
    newer = bench.add(prompt(2, 8), max_tokens=12, ignore_eos=True)
    while not bench.scheduler.totals.preemptions:
        bench.step()
    known = 8 + len(bench.output(newer)[0])
    bench.cache.flush()
    while bench.scheduler.running:
        bench.step()
    before = len(bench.ghost.forwards)
    bench.run_and_flush()
    assert known == 11 and bench.ghost.forwards[before:] == [[4], [4], [3]] + [[1]] * 8
    assert [each.done for each in bench.progress[newer]] == [0, 4, 8], "a client saw the end of its prompt"


def test_a_preempted_request_goes_before_all_others_of_its_priority() -> None:
    bench = Bench(pages=6, page_size=4, max_running=2, age_limit_s=4)
    _warm(bench, prompt(2, 8))
    bench.add(prompt(1, 7), max_tokens=14, ignore_eos=True)
    bench.step()
    old = bench.add(prompt(3, 3), max_tokens=1)
    bench.add(prompt(2, 8) + [5], max_tokens=9, ignore_eos=True)
    while not bench.scheduler.totals.preemptions:
        bench.step()
    bench.step(2)
    assert not bench.deltas[old], "it is past the age limit, and there are pages for it"
    bench.run_and_flush()


def test_a_request_that_can_not_go_on_alone_ends() -> None:
    bench = Bench(pages=6, page_size=4)
    foreign = bench.cache.lease(prompt(5, 8))
    foreign.reserve(12)
    decoding = bench.add(prompt(1, 8), max_tokens=16, ignore_eos=True)
    never = bench.add(prompt(2, 16), max_tokens=1)
    for _ in range(20):
        bench.step()
    assert not bench.scheduler.busy
    assert bench.last(decoding).finish_reason == bench.last(never).finish_reason == "error"
    assert "pages needed" in str(bench.last(decoding).error) and "pages needed" in str(bench.last(never).error)
    assert len(bench.output(decoding)[0]) == 5
    foreign.abort()
    bench.check_at_rest()


# Ends


@pytest.mark.parametrize("when", range(12))
def test_cancelling_at_any_moment_frees_everything(when: int) -> None:
    bench = Bench(pages=5, page_size=4, token_budget=3)
    ids = [bench.add(prompt(i, 8), max_tokens=8, ignore_eos=True) for i in range(3)]
    bench.step(when)
    alive = [id for id in ids if not bench.ended(id)]
    for id in ids:
        bench.scheduler.cancel(id)
        bench.check()
    assert bench.scheduler.running == bench.scheduler.waiting == 0
    assert bench.cache.pool.private == 0
    bench.run_and_flush()
    assert [id for id in ids if bench.output(id)[2] == "cancelled"] == alive
    bench.scheduler.cancel(ids[0])
    bench.scheduler.cancel("unknown")
    assert not bench.scheduler.busy


def test_a_failed_forward_ends_its_requests_and_no_others() -> None:
    bench = Bench(max_running=2)
    doomed = [bench.add(prompt(i, 6), max_tokens=8, ignore_eos=True) for i in range(2)]
    bench.add(prompt(7, 6), max_tokens=8, ignore_eos=True)
    bench.step(2)
    bench.ghost.fail_next = torch.OutOfMemoryError("no memory")
    bench.step()
    assert [bench.output(id)[2] for id in doomed] == ["error", "error"]
    assert bench.last(doomed[0]).error == "OutOfMemoryError: no memory"
    assert bench.cache.pool.private == 0
    bench.run_and_flush(*doomed)
    assert bench.scheduler.totals.errors == 2


def test_a_request_whose_logits_are_not_finite_ends_alone() -> None:
    bench = Bench()
    forward = bench.ghost.forward
    lost, spared = bench.add(prompt(1, 20), max_tokens=6), bench.add(prompt(2, 20), max_tokens=6)
    bench.step()

    def broken(segments: list[Segment]) -> torch.Tensor:
        logits = forward(segments)
        logits[0] = float("nan")
        return logits

    bench.ghost.forward = broken  # type: ignore[method-assign]
    bench.step()
    bench.ghost.forward = forward  # type: ignore[method-assign]
    bench.run_and_flush(lost)
    assert bench.output(lost)[2] == "error"
    bench.assert_complete(spared)


def test_nothing_of_a_failed_step_is_published() -> None:
    bench = Bench()
    forward = bench.ghost.forward

    def broken(segments: list[Segment]) -> torch.Tensor:
        return forward(segments) * float("nan")

    bench.ghost.forward = broken  # type: ignore[method-assign]
    failed = bench.add(prompt(1, 20), max_tokens=2)
    bench.step()
    assert bench.output(failed)[2] == "error" and "NaN" in str(bench.last(failed).error)
    assert bench.cache.pool.free == bench.cache.pool.total
    bench.ghost.forward = forward  # type: ignore[method-assign]
    again = bench.add(prompt(1, 20), max_tokens=2)
    bench.run_and_flush(failed)
    assert bench.last(again).usage.cached_tokens == 0
    bench.assert_complete(again)


def test_usage_counts_tokens_and_times() -> None:
    bench = Bench(max_running=1, token_budget=8)
    first = bench.add(prompt(1, 16), max_tokens=3, ignore_eos=True)
    second = bench.add(prompt(1, 12) + [1, 2], max_tokens=1, ignore_eos=True)
    bench.run_and_flush()
    used = bench.last(first).usage
    assert used is not None
    assert (used.prompt_tokens, used.cached_tokens, used.completion_tokens) == (16, 0, 3)
    assert (used.queue_s, used.ttft_s, used.duration_s) == (1.0, 2.0, 4.0)
    used = bench.last(second).usage
    assert used is not None
    assert (used.prompt_tokens, used.cached_tokens, used.completion_tokens) == (14, 12, 1)
    assert (used.queue_s, used.ttft_s, used.duration_s) == (5.0, 5.0, 5.0)
    waiting = bench.add(prompt(1, 16), max_tokens=1)
    bench.now_s += 7.0
    bench.scheduler.cancel(waiting)
    bench.run_and_flush()
    used = bench.last(waiting).usage
    assert used is not None and (used.completion_tokens, used.ttft_s) == (0, 0.0)
    assert (used.queue_s, used.duration_s) == (7.0, 7.0)


def test_a_step_with_nothing_to_do_does_nothing() -> None:
    bench = Bench()
    assert not bench.scheduler.busy
    assert bench.scheduler.step() == []
    assert bench.ghost.forwards == []


def test_a_token_that_cannot_be_decoded_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bad = bench.add(prompt(1, 12), max_tokens=6, ignore_eos=True)
    good = bench.add(prompt(2, 12), max_tokens=6, ignore_eos=True)
    poison = complete(bench.requests[bad])[0][2]
    assert poison not in complete(bench.requests[good])[0]
    decode = GhostTokenizer.decode

    def fails(self: GhostTokenizer, token_ids: list[int], *args: object, **kwargs: object) -> str:
        if poison in token_ids:
            raise IndexError("no such token")
        return decode(self, token_ids)

    monkeypatch.setattr(GhostTokenizer, "decode", fails)
    bench.run()
    assert bench.last(bad).finish_reason == "error"
    assert "no such token" in str(bench.last(bad).error)
    assert bench.last(good).finish_reason == "length"


def test_a_request_that_waits_for_pages_asks_once_and_counts_once() -> None:
    bench = Bench(pages=10, page_size=4)
    first = bench.add(prompt(1, 24), max_tokens=12, ignore_eos=True)
    bench.step()
    second = bench.add(prompt(1, 8) + prompt(2, 16), max_tokens=4, ignore_eos=True)
    matches = bench.cache.tree.stats().match_calls
    bench.step(6)
    assert bench.scheduler.waiting == 1
    assert bench.cache.tree.stats().match_calls <= matches + 2
    bench.run()
    leases = bench.cache.stats().leases
    assert leases.queried == 48 == bench.scheduler.totals.prompt_tokens
    assert leases.hit == bench.scheduler.totals.cached_tokens
    assert bench.last(first).finish_reason == bench.last(second).finish_reason == "length"
