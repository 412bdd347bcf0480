"""What all back ends share: specs, errors and options. Test wrappers check the spec syntax of wrappers."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import pytest

from mainstem.errors import BackendUnavailable, BadArgument, MainstemError, StorageError
from mainstem.storage import base, open_backend
from mainstem.storage.base import Backend, check_spec
from mainstem.storage.memory import MemoryBackend
from mainstem.storage.options import check_options

HERE = __name__


class Mine(MemoryBackend):
    """A user's own back end."""

    opened: ClassVar[list[Mine]] = []
    options: Mapping[str, str]

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        check_options(options, ("level", "name"))
        mine = cls()
        mine.options = options
        cls.opened.append(mine)
        return mine


class Recorder(MemoryBackend):
    """A wrapper that only records its arguments."""

    def __init__(self, *parts: Backend) -> None:
        super().__init__()
        self.parts = parts
        if any(isinstance(part, Mine) and part.options.get("name") == "refuse" for part in parts):
            raise BadArgument("recorder", "refuse", "anything else")


class Abstract(Backend):
    """A back end that is not complete."""


class Vague(MemoryBackend):
    """A back end that forgets to return the opened store."""

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        return None  # type: ignore[return-value]


class Failing(MemoryBackend):
    """A back end with a bug."""

    mistake: ClassVar[Exception]

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        raise cls.mistake


not_a_class = 3


@pytest.fixture(autouse=True)
def _recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(base, "WRAPPERS", dict.fromkeys(base.WRAPPERS, f"{HERE}:Recorder"))
    Mine.opened.clear()
    yield
    Mine.opened.clear()


def parts(spec: str) -> Sequence[object]:
    opened = open_backend(spec)
    assert isinstance(opened, Recorder)
    return opened.parts


def test_a_class_of_ones_own_is_named_by_its_module() -> None:
    mine = open_backend(f"{HERE}:Mine?level=3&name=a%20b")
    assert isinstance(mine, Mine)
    assert mine.options == {"level": "3", "name": "a b"}


@pytest.mark.parametrize("name", ["not_a_class", "HERE", "Sequence"])
def test_what_is_no_backend_is_refused(name: str) -> None:
    with pytest.raises(BadArgument, match="a subclass of mainstem"):
        open_backend(f"{HERE}:{name}")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("no_such_module.store:Class", "there is no module no_such_module"),
        (f"{HERE}:absent", f"{HERE} has no absent"),
        (f"{HERE}:Abstract", f"with from_spec; {HERE}:Abstract has none"),
        (f"{HERE}:Vague", f"whose from_spec returns a back end; {HERE}:Vague returned None"),
    ],
)
def test_what_a_spec_of_ones_own_lacks_is_named(spec: str, says: str) -> None:
    with pytest.raises(BadArgument, match=re.escape(says)) as caught:
        open_backend(spec)
    assert caught.value.name == "storage"


@pytest.mark.parametrize("mistake", [KeyError("bucket"), TypeError("no such argument"), OSError("refused")], ids=repr)
def test_a_mistake_inside_a_class_of_ones_own_is_reported_as_its_own(mistake: Exception) -> None:
    Failing.mistake = mistake
    with pytest.raises(BackendUnavailable) as caught:
        open_backend(f"{HERE}:Failing")
    assert f"from_spec of {HERE}:Failing failed: {type(mistake).__name__}: {mistake}" in str(caught.value)
    assert caught.value.__cause__ is mistake


def test_an_error_of_ours_from_a_class_of_ones_own_is_left_as_it_is() -> None:
    Failing.mistake = BackendUnavailable("nobody answers at 10.0.0.9")
    with pytest.raises(BackendUnavailable, match=r"^nobody answers"):
        open_backend(f"{HERE}:Failing")


def test_a_class_beside_the_caller_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])  # as for a console script
    (tmp_path / "store_beside.py").write_text(
        "from mainstem.storage.memory import MemoryBackend\nclass Store(MemoryBackend): pass\n"
    )
    assert type(open_backend("store_beside:Store")).__name__ == "Store"


@pytest.mark.parametrize(
    "spec",
    ["", "nothing", "no such:", "ftp://somewhere", "1a:B", "memory", "readonly+", "+memory:", "shared+fle:./a"]
    + ["readonly+fle:./a", f"tee+{HERE}:Mine,fle:./a"],
)
@pytest.mark.parametrize("use", [open_backend, check_spec])
def test_what_is_no_spec_is_refused_with_the_list_of_schemes(spec: str, use: Callable[[str], object]) -> None:
    with pytest.raises(BadArgument, match=r"memory:, file:.*module:Class"):
        use(spec)
    assert not Mine.opened


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("fiel:./kv", "file:"),
        ("rediss://127.0.0.1:6379/0", "redis:"),
        ("readonyl+file:./kv", "readonly+"),
        ("shred(host_bytes=1GiB)+file:./kv", "shared+"),
        ("readonly+fiel:./kv", "file:"),
    ],
)
def test_a_slip_in_a_spec_is_answered_with_what_may_be_meant(spec: str, meant: str) -> None:
    with pytest.raises(BadArgument, match=rf"one of .*; did you mean {re.escape(meant)}\?$"):
        check_spec(spec)


def test_a_spec_is_checked_without_opening_anything(tmp_path: Path) -> None:
    for spec in (f"file:{tmp_path}/kv", f"shared+file:{tmp_path}/kv", f"tee+{HERE}:Mine,{HERE}:absent"):
        check_spec(spec)
    assert not Mine.opened and not list(tmp_path.iterdir())
    with pytest.raises(BadArgument, match="in place of"):
        check_spec(f"file:{tmp_path}/kv-{{rank}}")


BAD = """
memory:somewhere memory:?size=1 memory:?capacity=lots memory:?capacity=0
redis: redis:relative.sock redis:// redis://127.0.0.1:0 redis://127.0.0.1:99999 redis://127.0.0.1:6379/zero
redis://user:hunter2@127.0.0.1:6379/0 redis://127.0.0.1?colour=red redis://127.0.0.1?prefix= redis://127.0.0.1?prefix=a*
redis://127.0.0.1?timeout=0 redis://127.0.0.1?ttl=never redis://127.0.0.1?tls=maybe
redis://127.0.0.1?password_env=NO_SUCH_VARIABLE
s3:bucket s3:// s3://Bucket s3://bucket/../up s3://bucket/a//b s3://bucket/.hidden s3://bucket?endpoint=127.0.0.1:9000
s3://bucket?endpoint=ftp://127.0.0.1 s3://bucket?requests=0 s3://bucket?requests=many s3://bucket?timeout=-1
s3://bucket?secret=1
mooncake:h:1 mooncake://h mooncake://h:99999 mooncake://h:1?colour=red mooncake://h:1?prefix=a/b mooncake://h:1?segment=x
mooncake://h:1?segment=1MiB mooncake://h:1?protocol=carrier
nixl:posix nixl:gds?path=/tmp nixl:posix?path=/tmp/x&api=fast nixl:posix?path=/tmp/x&bucket=b nixl:obj
nixl:obj?bucket=b&path=c
aibrix: aibrix:mock?path=/tmp/x aibrix:shfs aibrix:shfs?path= aibrix:shfs?path=/tmp/x&namespace=../b
aibrix:shfs?path=/tmp/x&timeout=0 aibrix:shfs?path=/tmp/x&size=3
lmcache: lmcache:127.0.0.1:1 lmcache://127.0.0.1 lmcache://h:port lmcache://h:1/path lmcache://h:1?timeout=0
lmcache://h:1?prefix= lmcache://h:1?prefix=a@b lmcache://h:1?size=3
"""


@pytest.mark.parametrize("spec", BAD.split())
def test_an_address_or_an_option_that_is_wrong_is_refused_before_any_client_is_asked(spec: str) -> None:
    with pytest.raises(BadArgument) as caught:
        open_backend(spec)
    assert "hunter2" not in str(caught.value)


def test_options_that_a_class_does_not_have_are_refused() -> None:
    with pytest.raises(BadArgument, match="one of level, name"):
        open_backend(f"{HERE}:Mine?levle=3")
    with pytest.raises(BadArgument, match="none"):
        check_options({"a": "1"}, ())


def test_a_wrapper_wraps_the_spec_after_the_plus() -> None:
    (inner,) = parts("readonly+memory:")
    assert isinstance(inner, MemoryBackend)


@pytest.mark.parametrize("spec", ["readonly(really)+memory:", "tee()+memory:,memory:"])
def test_only_the_owner_takes_options_in_brackets(spec: str) -> None:
    with pytest.raises(BadArgument, match="without brackets"):
        open_backend(spec)


def test_wrappers_wrap_wrappers() -> None:
    (inner,) = parts("readonly+tee+memory:?capacity=1KiB,memory:")
    assert isinstance(inner, Recorder) and inner.parts[0].stats().capacity_bytes == 1024


def test_tee_takes_two_specs_with_their_own_wrappers() -> None:
    first, second = parts(f"tee+{HERE}:Mine?level=1,readonly+memory:")
    assert isinstance(first, Mine) and first.options == {"level": "1"}
    assert isinstance(second, Recorder)


def test_a_spec_with_a_plus_in_its_address_needs_no_wrapper() -> None:
    with pytest.raises(BadArgument, match="storage address"):
        open_backend("memory:a+b")


def test_what_a_wrapper_refuses_is_closed() -> None:
    with pytest.raises(BadArgument, match="anything else"):
        open_backend(f"readonly+{HERE}:Mine?name=refuse")
    (mine,) = Mine.opened
    with pytest.raises(StorageError, match="closed"):
        mine.stats()


def test_a_tee_closes_its_first_store_if_the_second_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "mistake", KeyError("a bug in it"), raising=False)
    with pytest.raises(BackendUnavailable, match="a bug in it"):
        open_backend(f"tee+{HERE}:Mine,{HERE}:Failing")
    (mine,) = Mine.opened
    with pytest.raises(StorageError, match="closed"):
        mine.stats()


@pytest.mark.parametrize(
    "spec",
    [
        "redis://anna:hunter2@127.0.0.1:6379/0",
        "ftp://anna:hunter2@127.0.0.1",
        "readonly+redis://:hunter2@127.0.0.1:6379/0",
        f"{HERE}:Failing?password=hunter2",
        f"{HERE}:Vague?password=hunter2",
        f"{HERE}:Abstract?token=hunter2",
        "memory:?password=hunter2",
        "memory:/{rank}?password=hunter2",
        "s3://bucket?endpoint=anna:hunter2@127.0.0.1",
        "s3://bucket?endpoint=ftp://anna:hunter2@127.0.0.1",
    ],
)
def test_no_error_of_a_spec_shows_its_password(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "mistake", OSError("no answer of http://anna:hunter2@127.0.0.1"), raising=False)
    with pytest.raises(MainstemError) as caught:
        open_backend(spec)
    assert "hunter2" not in f"{caught.value!r} {caught.value}"


def test_every_scheme_names_a_class_in_a_file_of_its_own_and_is_documented() -> None:
    documented = Path(__file__).parents[2].joinpath("docs", "storage.md").read_text()
    folders = "".join(f"{folder}.|" for folder in base.FOLDERS)
    for scheme, path in base.SCHEMES.items():
        assert re.fullmatch(rf"mainstem\.storage\.({folders}){scheme}:BACKEND", path)
        assert f"| [`{scheme}:`](#" in documented
        module = importlib.import_module(path.partition(":")[0])
        assert issubclass(module.BACKEND, Backend) and module.BACKEND.__module__.startswith(module.__name__)


def test_a_storage_error_says_its_cause_and_is_one_of_ours() -> None:
    error = StorageError("timeout", "no answer in 5 s")
    assert isinstance(error, MainstemError)
    assert error.cause == "timeout" and str(error) == "timeout: no answer in 5 s"


def test_a_cause_that_nobody_counts_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="sunspots"):
        StorageError("sunspots", "")


def test_registering_memory_is_optional() -> None:
    MemoryBackend().register([memoryview(bytearray(10))])


def test_storage_needs_no_client_to_be_imported() -> None:
    assert importlib.import_module("mainstem.storage").Backend is Backend


@pytest.mark.parametrize(
    ("module", "name", "defaults"),
    [
        ("vendors.aibrix", "AIBrixBackend", {"timeout_s": 5.0}),
        ("vendors.lmcache", "LMCacheBackend", {"timeout_s": 5.0}),
        ("vendors.redis", "RedisBackend", {"timeout_s": 5.0}),
        ("vendors.s3", "S3Backend", {"timeout_s": 5.0}),
        (
            "vendors.mooncake",
            "MooncakeBackend",
            {"timeout_s": 5.0, "segment_bytes": 512 << 20, "staging_bytes": 64 << 20},
        ),
        ("vendors.nixl", "NixlBackend", {"staging_bytes": 64 << 20}),
        ("unproven.eic", "EICBackend", {"timeout_s": 5.0, "staging_bytes": 64 << 20}),
        ("unproven.hf3fs", "HF3FSBackend", {"timeout_s": 5.0, "slot_bytes": 2 << 20}),
        ("unproven.infinistore", "InfiniStoreBackend", {"timeout_s": 5.0, "staging_bytes": 64 << 20}),
        ("unproven.simm", "SiMMBackend", {"timeout_s": 5.0, "staging_bytes": 64 << 20}),
    ],
)
def test_a_call_takes_five_seconds_and_its_memory_is_small_where_a_spec_says_nothing(
    module: str, name: str, defaults: dict[str, float]
) -> None:
    """What each does with another time is in its own tests, with its service or a double of it."""
    kind = getattr(importlib.import_module(f"mainstem.storage.{module}"), name)
    given = inspect.signature(kind).parameters
    assert {each: given[each].default for each in defaults} == defaults
