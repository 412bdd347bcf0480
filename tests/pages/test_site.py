"""The site's own rules, without Sphinx: where links lead, what stands in no menu, and that its commands are commands.

`make docs` builds it, and checks each link and each name of the reference.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import cyclopts
import pytest
from machine import patience
from rigs.serving import real_server

import mainstem
from bench import figures
from mainstem import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CONF = runpy.run_path(str(DOCS / "conf.py"))
BLOCK = re.compile(r"^```(?:sh|bash|)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def relinked(text: str, folder: Path = DOCS, docname: str = "page", repository: str = "") -> str:
    return str(CONF["relinked"](text, folder, docname, repository))


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("[a page](serving.md#images)", "[a page](serving.md#images)"),
        ("[a page](../CONTRIBUTING.md)", "[a page](contributing.md)"),
        ("[the front page](../README.md)", "[the front page](index.md)"),
        ("[a source](../examples/tiers.py)", "[a source](../examples/tiers.py)"),
        ("[a folder](../examples)", "a folder"),
        ("[elsewhere](https://example.org/a.md)", "[elsewhere](https://example.org/a.md)"),
        ("[nothing](../nothing.py)", "[nothing](../nothing.py)"),
        ("```\n[code](../examples)\n```\n[text](../examples)\n", "```\n[code](../examples)\n```\ntext\n"),
    ],
)
def test_a_link_of_a_page_works_on_the_site(text: str, becomes: str) -> None:
    assert relinked(text) == becomes


def test_a_link_of_a_page_from_elsewhere_in_the_repository() -> None:
    text = "[a](docs/serving.md) [b](src/mainstem/cache/prefix_cache.py) [c](examples)"
    assert relinked(text, ROOT, "contributing") == "[a](serving.md) [b](../src/mainstem/cache/prefix_cache.py) c"
    assert relinked("[a](../serving.md)", DOCS / "start", "start/serve") == "[a](../serving.md)"


def test_sources_are_linked_to_in_the_repository_if_it_has_an_address() -> None:
    address = "https://example.org/files"
    text = "[a](../examples) [b](../src/mainstem/cache/prefix_cache.py)"
    assert (
        relinked(text, repository=address)
        == f"[a]({address}/examples) [b]({address}/src/mainstem/cache/prefix_cache.py)"
    )


def test_every_page_is_in_the_menu() -> None:
    menus = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    listed = [line for menu in menus for line in menu.splitlines() if line and not line.startswith(":")]
    assert sorted(listed) == sorted(set(listed))
    assert set(listed) == {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES} - {"index"}


def test_the_reference_has_every_public_name_and_the_numbers_every_record() -> None:
    reference = "".join((DOCS / "reference" / name).read_text() for name in ("python.md", "lower.md"))
    assert set(re.findall(r":: mainstem\.(\w+)", reference)) == set(mainstem.__all__) - {"__version__"}
    records = set(figures.load())
    assert set(re.findall(r"^\| `([\w-]+)` \|", (DOCS / "numbers.md").read_text(), re.MULTILINE)) == records


def test_the_page_of_the_commands_is_that_of_the_parser() -> None:
    page = CONF["commands"]()
    assert page.startswith("# Commands\n") and "Table of Contents" not in page
    assert "\nmainstem serve [OPTIONS]" in page and "`--kv-bytes" in page
    assert set(re.findall(r"^## mainstem (\w+)$", page, re.MULTILINE)) == {
        name for name in cli.app if not name.startswith("-")
    }


@pytest.mark.slow
@pytest.mark.deadline
def test_the_commands_of_a_start_page_run(tmp_path: Path) -> None:
    """Those that need no model: the page says that a test runs them, and what `plan` says."""
    page = (DOCS / "start" / "memory.md").read_text()
    (said,) = re.findall(r"^```\n(Within .*?)^```$", page, re.MULTILINE | re.DOTALL)
    for words in commands(page):
        command = [sys.executable, "-m", "mainstem", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(120))
        assert done.returncode == 0, done.stderr
        if words[0] == "plan":
            assert said in done.stdout and "\nKnee: " in done.stdout
            _, buy, table = done.stdout.split("\n\n")[:3]
            assert buy.startswith("Buy: 458 GB of host memory.") and "458 GB of host memory" in page
            assert "886%" not in table and ">100%" in table


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.deadline
def test_the_first_page_serves_a_model_and_the_second_request_hits() -> None:
    blocks = BLOCK.findall((DOCS / "start" / "serve.md").read_text())
    assert "mainstem serve\n" in blocks
    ask = next(block for block in blocks if "/v1/chat/completions" in block)
    tree = next(line for block in blocks for line in block.splitlines() if "/v1/cache/tree" in line)

    def shell(command: str) -> str:
        at = command.replace("127.0.0.1:8000", f"127.0.0.1:{server.http.base_url.port}")
        return subprocess.run(
            ["bash", "-c", at], capture_output=True, text=True, timeout=patience(60), check=True
        ).stdout

    with real_server({}) as server:
        first, second = (json.loads(shell(ask))["usage"] for _ in range(2))
        assert "harbour" in shell(tree)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens"] - 16 <= second["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens"]


@pytest.mark.parametrize("name", ["vllm.md", "sglang.md"])
def test_the_commands_for_engines_are_those_of_their_guides(name: str) -> None:
    """The lanes run what the guides say; a start page says the same."""
    start, guide = (
        {word for word in re.findall(r"[^\s']+", text) if re.match(r'--[a-z]|"\w+":', word)}
        for text in ("".join(BLOCK.findall((DOCS / "start" / "plugin.md").read_text())), (DOCS / name).read_text())
    )
    own = {"vllm.md": "kv_", "sglang.md": "hicache"}[name]
    assert {word for word in start if own in word} <= guide


@pytest.mark.parametrize("page", ["sglang.md", "start/plugin.md"])
def test_sglang_runs_in_its_lane_with_the_options_of_the_pages(page: str) -> None:
    lane = (ROOT / "tests" / "rigs" / "sglang_process.py").read_text()
    given = re.findall(r"--(hicache-[a-z-]+) (\w+)", (DOCS / page).read_text())
    assert len(given) == 5
    assert [option for option in given if '"{}": "{}"'.format(*option) not in lane] == []


def test_links_to_other_sites_have_the_form_of_links() -> None:
    found = re.compile(r"(?:\]\(|^\[[\w-]+\]: )(https?:[^)\n]*)", re.MULTILINE)
    links = [(page, link, urlsplit(link)) for page in PAGES for link in found.findall(page.read_text())]
    assert [
        (page, link)
        for page, link, parts in links
        if parts.scheme != "https" or not re.fullmatch(r"[a-z0-9.-]+\.[a-z]+", parts.netloc) or re.search(r"\s", link)
    ] == []


def test_every_bold_cell_of_the_comparison_has_a_source() -> None:
    """The page says that each was looked up in the source that its row names for that project."""
    page = (DOCS / "comparison.md").read_text()
    addresses = dict(re.findall(r"^\[([\w-]+)\]: (https:\S+)$", page, re.MULTILINE))
    bold = 0
    for row in re.findall(r"^\|(.+)\|$", page, re.MULTILINE):
        cells = [cell.strip() for cell in row.split("|")]
        if cells[1] == "SGLang":
            heads = cells
            continue
        named = {name.split()[0].lower() for name, _ in re.findall(r"\[([^\]]+)\](?:\((https:)|\[)", cells[-1])}
        for project, cell in zip(heads[1:-1], cells[1:-1], strict=True):
            if "**" in cell:
                bold += 1
                assert project.lower() in named, (cells[0], project)
    assert bold > 50 and set(re.findall(r"\]\[([\w-]+)\]", page)) == set(addresses)


def examples(command: cyclopts.App) -> Iterator[str]:
    """Yields the examples of a command's help, and of the commands below it."""
    if isinstance(command.help_epilogue, str):
        yield f"```\n{re.sub(r'^ +(?=mainstem )', '', command.help_epilogue, flags=re.MULTILINE)}\n```\n"
    for name in command:
        if not name.startswith("-"):
            yield from examples(command[name])


def commands(text: str) -> Iterator[list[str]]:
    """Yields the arguments of each `mainstem` command in a page's blocks."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(MAINSTEM_\w+=\S+ +)*(\.venv/bin/)?mainstem ", line):
                words = shlex.split(line, comments=True)
                words = words[[word.rpartition("/")[2] for word in words].index("mainstem") + 1 :]
                ends = [at for at, word in enumerate(words) if word in ("&", "|", ">", ";")]
                yield words[: min(ends, default=None)]


SHOWN = {str(page.relative_to(ROOT)): page.read_text() for page in [ROOT / "README.md", *PAGES]}


@pytest.mark.parametrize("where", [*SHOWN, "--help"])
def test_the_commands_of_the_documentation_are_accepted(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MAINSTEM_STORAGE_SECRET", "0123456789abcdef")
    monkeypatch.chdir(tmp_path)
    Path("smollm2.npz").touch()  # what `mainstem calibrate` would have written
    Path("tenants.toml").write_text('[tenants.search]\ncache_salt = "search"\n')
    Path("public.jsonl").write_text('{"prompt": "You are a clerk."}\n')
    refused: list[str] = []
    for words in commands(SHOWN[where] if where in SHOWN else "".join(examples(cli.app))):
        try:
            cli.app.parse_args(words, exit_on_error=False, print_error=False)
        except Exception as error:  # noqa: BLE001  # each command is judged
            refused.append(f"{' '.join(words)}: {error!r}")
    assert refused == []
