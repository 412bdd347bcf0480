"""Settings: each is declared once, is checked when it is made, and is the flag of its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import cyclopts
import pytest

from mainstem import cli
from mainstem.errors import BadArgument
from mainstem.replay.readers.formats import FORMATS
from mainstem.settings import engine, replay, server
from mainstem.settings.fields import (
    SECRET,
    Settings,
    declared,
    integer,
    number,
    one_of,
    seconds,
    secret_bytes,
    setting,
    texts,
)
from mainstem.settings.flags import takes_settings
from mainstem.tiers.storage.codecs import CODECS
from mainstem.units import SIZE, TIME

CLASSES = [
    kind
    for module in (engine, server, replay)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Settings) and kind.__module__ == module.__name__
]


SERVE = (engine.ModelConfig, engine.EngineConfig, server.ServerConfig)


@dataclass(frozen=True)
class Inner(Settings):
    """What is inside.

    Args:
        word: One of two.
        several: Repeat it.
        inner_secret: Known to few.
    """

    word: Literal["a", "b"] = setting("a", one_of(Literal["a", "b"]))
    several: tuple[str, ...] = setting((), texts("a tuple of words", bool))
    inner_secret: bytes | None = setting(None, secret_bytes(4), unit=SECRET, secret=True)


@dataclass(frozen=True)
class Outer(Settings):
    """What is outside.

    Args:
        size: How large.
        wait: How long.
        hidden: For programs.
        inner: The rest.
    """

    size: int = setting(1 << 20, integer(1), unit=SIZE)
    wait: float | None = setting(None, seconds(), unit=TIME, alias="--patience")
    hidden: int = setting(3, integer(0), flag=False)
    inner: Inner = Inner()


def given(*arguments: str) -> Outer:
    """Returns what a command gets."""
    app = cyclopts.App(help_format="plaintext")
    found: list[Outer] = []

    @app.default
    @takes_settings
    def command(*, outer: Outer = Outer()) -> None:
        found.append(outer)

    app(list(arguments), exit_on_error=False, print_error=False, result_action="return_value")
    return found[0] if found else Outer()


# ---------------------------------------------------------------- checks


def test_a_value_outside_its_range_is_named_with_the_range() -> None:
    with pytest.raises(BadArgument, match=r"^size = 0: must be an integer from 1 to"):
        Outer(size=0)
    with pytest.raises(BadArgument, match=r"^word = 'c': must be one of a, b$"):
        Inner(word="c")  # type: ignore[arg-type]


def test_none_is_allowed_only_where_it_is_the_default() -> None:
    assert Outer(wait=None).wait is None
    with pytest.raises(BadArgument, match=r"^size = None"):
        Outer(size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (integer(1, 9), (1, 9), (0, 10, 1.0, True, "1")),
        (number(0, 1), (0, 0.5, 1), (-0.1, 1.1, float("nan"), float("inf"), True, "0")),
        (number(0, 1, above=True, below=True), (0.5,), (0, 1)),
        (number(0), (0, 1e30), (-1e-9, float("inf"))),
        (seconds(), (0, 1.5), (-1, 2e9, "1")),
        (seconds(above=True), (1e-9,), (0,)),
        (one_of(Literal["a", "b"]), ("a", "b"), ("c", None, 1)),
        (secret_bytes(2), (b"ab", b"abc"), (b"a", "ab")),
        (texts("words", bool), ((), ("a",)), (("",), ["a"], "a", (1,))),
    ],
)
def test_ranges(allowed: Any, inside: tuple[object, ...], outside: tuple[object, ...]) -> None:
    assert all(allowed.holds(value) for value in inside)
    assert not any(allowed.holds(value) for value in outside)


def test_a_secret_is_never_shown() -> None:
    assert "hunter2" not in repr(Inner(inner_secret=b"hunter2"))
    with pytest.raises(BadArgument, match=r"^inner_secret = '\(not shown\)': must be at least 4 bytes$"):
        Inner(inner_secret=b"abc")


def test_flags_without_effect_are_refused_but_not_secrets_and_what_is_for_programs() -> None:
    Outer(hidden=5).refuse("a cause")
    Inner(inner_secret=b"hunter2").refuse("a cause")
    with pytest.raises(BadArgument, match=r"^word = 'b': must be left out without a cause"):
        Inner(word="b").refuse("a cause")


# ---------------------------------------------------------------- flags


def test_a_command_gets_the_settings_themselves() -> None:
    found = given("--size", "2MiB", "--wait", "500ms", "--word", "b", "--several", "x", "--several", "y")
    assert found == Outer(2 << 20, 0.5, inner=Inner("b", ("x", "y")))
    assert type(found) is Outer and type(found.inner) is Inner
    assert given() == Outer()


def test_a_command_gets_them_where_pydantic_checks_what_cyclopts_makes() -> None:
    with suppress(ImportError):
        import_module("pydantic")  # cyclopts uses it wherever it is imported
    assert given("--size", "2MiB", "--wait", "1s", "--word", "b") == Outer(2 << 20, 1.0, inner=Inner("b"))


def test_a_class_of_settings_stays_what_it_was() -> None:
    given("--size", "2MiB")

    @dataclass(frozen=True)
    class More(Outer):
        more: int = setting(1, integer(1))

    assert [field.name for field in fields(More)] == ["size", "wait", "hidden", "inner", "more"]
    with pytest.raises(BadArgument, match="size"):
        More(size=0)


def test_a_flag_may_have_the_name_that_others_have_for_it() -> None:
    assert given("--patience", "2s") == given("--wait", "2s") == Outer(wait=2.0)
    with pytest.raises(cyclopts.CycloptsError):
        given("--patience", "2s", "--wait", "3s")


def test_what_is_for_programs_is_no_flag() -> None:
    with pytest.raises(cyclopts.UnknownOptionError):
        given("--hidden", "4")


def test_a_secret_comes_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSTEM_INNER_SECRET", "a\udcff-words")
    assert given().inner.inner_secret == b"a\xff-words"
    assert given("--inner-secret", "given").inner.inner_secret == b"given"


def test_a_flag_is_checked_as_its_setting() -> None:
    with pytest.raises(BadArgument, match=r"^size = 0"):
        given("--size", "0")
    with pytest.raises(cyclopts.CoercionError, match="size = 'huge': must be bytes") as error:
        given("--size", "huge")
    assert isinstance(error.value.__cause__, BadArgument)


def test_the_help_is_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    given("--help")
    shown = capsys.readouterr().out
    for words in (
        r"--size INT +How large\. \[default: 1MiB\]",
        r"--wait,? --patience STR +How long\. +│",
        r"--several STR\.\.\. +Repeat it\. +│",
        r"--inner-secret STR +Known to few\. \[env var:",
    ):
        assert re.search(words, shown), words
    assert "hidden" not in shown and "--inner " not in shown


# ---------------------------------------------------------------- the settings of the program


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_defaults_are_within_their_ranges_and_every_setting_is_described(kind: type[Settings]) -> None:
    kind()
    text = "\n".join(base.__doc__ or "" for base in kind.__mro__ if base is not Settings)
    for field in fields(kind):
        assert re.search(rf"^        {field.name}: [A-Z0]", text, re.MULTILINE), field.name
        assert declared(field) is not None or isinstance(field.default, Settings), f"{field.name} is not declared"


def leaves(kind: type[Settings]) -> Iterator[str]:
    for field in fields(kind):
        if isinstance(field.default, Settings):
            yield from leaves(type(field.default))
        else:
            yield field.name


@pytest.mark.parametrize("kinds", [SERVE, (replay.Assumptions, replay.TraceOptions)])
def test_a_command_has_no_two_settings_of_a_name(kinds: tuple[type[Settings], ...]) -> None:
    names = [name for kind in kinds for name in leaves(kind)]
    assert len(names) == len(set(names))


FOR_PROGRAMS = """
Grammar.kind = 'json_object': one of json_object, json_schema, regex, choice, lark
Grammar.text = '': a string
SamplingParams.ignore_eos = False: True or False
SamplingParams.logprobs = None: an integer from 0 to 20
SamplingParams.prompt_logprobs = None: an integer from 0 to 20
SamplingParams.logprob_start = 0: an integer from 0 to 2147483647
SamplingParams.embedding = False: True or False
SamplingParams.min_tokens = 0: an integer from 0 to 2147483647
SamplingParams.stop_token_ids = (): token ids
SamplingParams.presence_penalty = 0.0: a number, -2 or more, up to 2
SamplingParams.frequency_penalty = 0.0: a number, -2 or more, up to 2
SamplingParams.repetition_penalty = 1.0: a number, 0.01 or more, up to 100
SamplingParams.logit_bias = (): pairs of a token id and a number, up to 1,000,000; each token once
SamplingParams.allowed_token_ids = None: token ids, at least one
SamplingParams.bad_words = (): sequences of at least one token id
SamplingParams.skip_special_tokens = True: True or False
SamplingParams.hidden_tokens = frozenset(): a frozenset of token ids
SamplingParams.include_stop_str_in_output = False: True or False
SamplingParams.grammar = None: a Grammar
Shares.pages = None: an integer from 1 to 2147483647
Shares.state_slots = None: an integer from 1 to 2147483647
Limits.age_limit_s = 30.0: a number, 0 or more
StorageConfig.prefetch_timeout_per_page_s = 0.01: a number of seconds, 0 or more
StorageConfig.prefetch_host_share = 0.5: a number, above 0, up to 1
StorageConfig.max_prefetches = 64: an integer from 1 to 2147483647
StorageConfig.batch_pages = 32: an integer from 1 to 2147483647
StorageConfig.batches = 4: an integer from 1 to 2147483647
StorageConfig.call_timeout_s = 5.0: a number of seconds, above 0
StorageConfig.queue_pages = 1024: an integer from 1 to 2147483647
StorageConfig.writes = 2: an integer from 1 to 2147483647
StorageConfig.breaker_failures = 3: an integer from 1 to 2147483647
StorageConfig.breaker_cooldown_s = 5.0: a number of seconds, 0 or more
PeerConfig.peers_later = False: True or False
ImagePolicy.image_timeout_s = 10.0: a number of seconds, above 0
Setup.host_blocks = None: an integer from 1 to 4611686018427387904
Setup.storage_blocks = None: an integer from 1 to 4611686018427387904
Memory.host_bytes = 0: an integer from 0 to 4611686018427387904
Memory.storage_bytes = 0: an integer from 0 to 4611686018427387904
Memory.storage_bytes_per_s = 0.0: a number, 0 or more, up to 1e+24
"""


def test_settings_that_no_flag_sets_are_these_with_their_defaults_and_ranges() -> None:
    """No help shows them, and no page lists them: one that became a flag, or ten times as large, would go unnoticed."""
    found = [
        f"{kind.__name__}.{field.name} = {field.default!r}: {rule.range.words}"
        for kind in CLASSES
        for field in fields(kind)
        if field.name in kind.__annotations__ and (rule := declared(field)) is not None and not rule.flag
    ]
    assert found == FOR_PROGRAMS.split("\n")[1:-1]


def test_every_flag_of_serve_is_a_setting_of_the_same_name() -> None:
    names = {name for kind in SERVE for name in leaves(kind)}
    flags = {
        argument.name.removeprefix("--").replace("-", "_")
        for argument in cli.app["serve"].assemble_argument_collection()
        if argument.show and argument.name.startswith("--")
    }
    assert flags - names == {"model", "adapter"}


def test_names_that_a_part_knows_are_those_that_its_setting_allows() -> None:
    assert set(get_args(engine.Codec)) == set(CODECS)
    assert set(get_args(replay.TraceFormat)) == {"auto", "mstrace", *(row.name for row in FORMATS)}
    assert set(get_args(replay.PlanRouting)) == {"shared", *get_args(replay.Routing)}


def test_tiers_exist_if_there_is_a_size_or_storage() -> None:
    assert not engine.TierConfig().exist
    assert engine.TierConfig(engine.HostSize(host_ratio=1.0)).exist
    assert engine.TierConfig(storage="memory:").exist
    with pytest.raises(BadArgument, match="write_hits = 3: must be left out without a host tier"):
        engine.TierConfig(host=engine.HostPolicy(write_hits=3))
    with pytest.raises(BadArgument, match="warm = True: must be left out without storage"):
        engine.TierConfig(engine.HostSize(host_ratio=1.0), warm=True)
    with pytest.raises(BadArgument, match="cache = False"):
        engine.EngineConfig(cache=False, tiers=engine.TierConfig(storage="memory:"))


def test_images_come_from_all_public_hosts_or_from_some(tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match="image_host"):
        server.ImagePolicy(image_http=True, image_host=("a.test",))
    assert server.ImagePolicy(image_host=("a.test",), image_folder=tmp_path).image_folder == tmp_path
