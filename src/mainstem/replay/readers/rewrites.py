"""Rewrites bodies of requests by rules of prompts, as a server does before it reads their prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mainstem.imports import load_package
from mainstem.prompt_rules.bodies import rewritten_body
from mainstem.prompt_rules.notes import Notes
from mainstem.prompt_rules.rule_file import read_rules
from mainstem.prompt_rules.rules import counts
from mainstem.replay.readers.formats import BadLine, Line


class Rewrites:
    """Rewrites bodies, and counts what it changed.

    Args:
        sources: files of rules, and names of Mainstem's own.

    Raises:
        BackendUnavailable: the package for patterns is missing.
        BadRule: a rule is refused.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        load_package("re2", "rules of prompts need google-re2: pip install 'mainstem[rules]'")
        self._rules = read_rules(sources)
        self._notes = Notes()
        self._requests = self._changed = 0
        self._counts = Counter({rule.name: 0 for rule in self._rules})

    def __call__(self, body: Line, url: object) -> Line:
        """Returns a body as the rules leave it; `url`: for which it was, if that is known.

        Raises:
            BadLine: it is nested too deeply, or a text is not valid Unicode.
        """
        try:
            made = rewritten_body(self._rules, body, url, self._notes)
        except RecursionError:
            raise BadLine("it is nested too deeply") from None
        except UnicodeEncodeError:
            raise BadLine("a text is not valid Unicode") from None
        self._requests += 1
        self._changed += bool(made.changes)
        self._counts.update(counts(made.changes))
        return dict(made.body)

    @property
    def said(self) -> str:
        """The changes so far, as a trace's notes say them."""
        by_rule = ", ".join(f"{name} {count:,} times" for name, count in self._counts.items())
        return f"Rules changed {self._changed:,} of {self._requests:,} requests: {by_rule}."
