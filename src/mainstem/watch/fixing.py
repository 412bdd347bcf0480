"""The part of `mainstem lint` that reads rules of prompts, and writes them. Arguments, files and printing only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mainstem.errors import BadArgument
from mainstem.here import check_output
from mainstem.imports import load_package
from mainstem.prompt_rules.bodies import Body, rewritten_body
from mainstem.prompt_rules.rule_file import own_files, read_rules
from mainstem.prompt_rules.rules import Rule
from mainstem.terminal import printable, results
from mainstem.watch.fixes import Fixed, Fixes, document, saving
from mainstem.watch.lint import Report
from mainstem.watch.prompts import BadRequestBody


def rules_for(sources: Sequence[str]) -> tuple[Rule, ...]:
    """Returns the rules of files, none for none.

    Raises:
        BackendUnavailable: the package for patterns is missing.
        BadRule: a rule is refused.
    """
    if sources:
        _load_patterns()
    return read_rules(sources)


def _load_patterns() -> None:
    load_package("re2", "rules of prompts need google-re2: pip install 'mainstem[rules]'")


def after_rules(rules: Sequence[Rule], body: Body, url: object) -> Body:
    """Returns a body as rules leave it; `url`: for which it was, if that is known.

    Raises:
        BadRequestBody: it is nested too deeply, or a text is not valid Unicode.
    """
    try:
        return rewritten_body(rules, body, url).body
    except RecursionError:
        raise BadRequestBody("nested too deeply") from None
    except UnicodeEncodeError:
        raise BadRequestBody("a text is not valid Unicode") from None


class Fixing:
    """Writes the rules that mend what a linter finds.

    Args:
        target: the file.
        traffic: the file that is linted.
        sources: files of rules that are in use.
        rules: those rules.
        replaces: whether the target may be there.

    Raises:
        BadArgument: the target cannot be written, or is there.
        BackendUnavailable: the package for patterns is missing.
    """

    def __init__(
        self, target: Path, traffic: str, sources: Sequence[str], rules: Sequence[Rule], *, replaces: bool
    ) -> None:
        read = [source for source in sources if source not in own_files()]
        check_output("fix", target, *([] if traffic == "-" else [traffic]), *read)
        if target.exists() and not replaces:
            raise BadArgument("fix", str(target), "a file that is not there yet, or given with --replace")
        _load_patterns()
        self._target, self._traffic, self._rules, self._replaces = target, traffic, rules, replaces
        self._fixes = Fixes()
        self.lost = self._fixes.add

    def write(self, report: Report) -> Fixed:
        """Writes the rules, and returns them; without any, there is no file."""
        fixed = self._fixes.fixed(report, str(self._target), self._rules)
        if fixed.fixes:
            text = document(fixed, report, self._traffic)
            with open(self._target, "w" if self._replaces else "x", encoding="utf-8") as file:
                file.write(text)
        return fixed

    def show(self, fixed: Fixed, report: Report) -> None:
        """Prints what was written."""
        console = results()
        if not fixed.fixes:
            console.print(f"\nNo rule mends any of it; {self._target} is not written.", markup=False, soft_wrap=True)
            return
        console.print(f"\nWritten to {printable(str(self._target))}:", markup=False, soft_wrap=True)
        for fix in fixed.fixes:
            line = f"    {fix.action} {fix.name}: would save {saving(fix.cost, report)}"
            console.print(line, markup=False, soft_wrap=True)
        if fixed.left:
            console.print("Findings that no rule mends are at its end.")


def as_json(fixed: Fixed) -> list[Mapping[str, Any]]:
    """Returns the rules for a program."""
    return [
        {
            "name": fix.name,
            "action": fix.action,
            "cause": fix.cause,
            "requests": fix.cost.requests,
            "saved_characters": fix.cost.characters,
            "saved_tokens": fix.cost.tokens,
        }
        for fix in fixed.fixes
    ]
