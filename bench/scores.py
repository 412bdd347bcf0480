"""What an evaluation takes: lm_eval asks for the likelihoods of options, of servers and of its own transformers.

    passage, question, four options, answer     five times: the shots, the same for all questions
    passage, question                           of one question
    option                                      four of them, each a request with all of the above

lm_eval is unchanged, from its package; the questions are generated. All compute in float32. Only the server that keeps
scores is asked all questions: the others compute every prompt from its beginning, so that a few say what one takes.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import yaml
from rich.table import Table

from bench.client import ServerFailed
from bench.hosted import ROOT, SYSTEMS, THREADS, Hosted, System
from bench.report import Report

EVAL_PYTHON = ROOT / ".venv-clients" / "eval" / "bin" / "python"
KEPT, COMPUTED, VLLM, OWN = "Mainstem, scores kept", "Mainstem, scores computed", "vLLM", "lm_eval's transformers"
PARTS = (KEPT, OWN, COMPUTED, VLLM)
TOLERANCE = 1e-5  # of log-probabilities, between float32 and float32
GOALS: Mapping[str, float] = {COMPUTED: 10.0, VLLM: 10.0, OWN: 2.0}
"""How many times less time a question must take with kept scores."""


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Args:
        questions: of the evaluation.
        few: questions that those are asked who keep no scores.
        shots: questions with answers before each.
        options: of each question.
        at_once: requests at once, to servers.
        batch_size: of lm_eval's own transformers.
    """

    questions: int = 500
    few: int = 20
    shots: int = 5
    options: int = 4
    at_once: int = 8
    batch_size: int = 8


QUICK = Settings(questions=12, few=4)

_PLACES = ("bridge", "castle", "garden", "harbour", "library", "market", "mill", "museum", "river", "station", "tower")
_NAMES = ("Arden", "Bellow", "Carrow", "Dunmore", "Elstow", "Farley", "Garth", "Helm", "Inver", "Jarrow", "Kelso")


def questions(settings: Settings, seed: str) -> list[dict[str, Any]]:
    """Returns generated questions, whose answers their passages say, and the shots before them."""
    draw = random.Random(seed)

    def one() -> dict[str, Any]:
        names = [f"the {draw.choice(_PLACES)} of {name}" for name in draw.sample(_NAMES, settings.options)]
        years = draw.sample(range(1100, 2000), settings.options)
        told = (f"{name.capitalize()} was built in {year}." for name, year in zip(names, years, strict=True))
        right = draw.randrange(settings.options)
        return {
            "passage": " ".join(told),
            "question": f"What was built in {years[right]}?",
            "options": [name.capitalize() for name in names],
            "right": right,
        }

    return [one() for _ in range(settings.questions + settings.shots)]


def write_task(folder: Path, settings: Settings) -> None:
    """Writes the questions, and the task of lm_eval that asks them."""
    made = questions(settings, "scores")
    for name, part in (("shots", made[: settings.shots]), ("questions", made[settings.shots :])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in part))
    task = {
        "task": "generated",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"shots": str(folder / "shots.jsonl"), "questions": str(folder / "questions.jsonl")}
        },
        "test_split": "questions",
        "fewshot_split": "shots",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": settings.shots,
        "output_type": "multiple_choice",
        "doc_to_text": "{{passage}}\nQuestion: {{question}}\nAnswer:",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "generated.yaml").write_text(yaml.safe_dump(task))


def systems() -> dict[str, System]:
    """Returns the servers, by the names of the parts."""
    own, vllm = (next(each for each in SYSTEMS if each.name == name) for name in ("Mainstem", "vLLM"))
    own = replace(own, command=own.command.replace("bfloat16", "float32").replace(str(1 << 30), str(2 << 30)))
    return {
        KEPT: replace(own, command=f"{own.command} --keep-scores 1"),
        COMPUTED: own,
        VLLM: replace(
            vllm,
            command=vllm.command.replace("bfloat16", "float32"),
            environment={**vllm.environment, "VLLM_CPU_KVCACHE_SPACE": "2"},
        ),
    }


def evaluate(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs an evaluation in the environment of lm_eval; see `bench.evaluation`.

    Raises:
        ServerFailed: it failed; the message has the end of what it printed.
    """
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin"}
    ran = subprocess.run(
        [str(EVAL_PYTHON), "-m", "bench.evaluation"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env={**environment, "HOME": job["folder"], "OPENAI_API_KEY": "none"},
    )
    if ran.returncode:
        raise ServerFailed(f"lm_eval failed: {ran.stderr[-2000:]}")
    return dict(json.loads(ran.stdout.strip().rpartition("\n")[2]))


def measure(part: str, model: Path, folder: Path, settings: Settings) -> dict[str, Any]:
    """Runs one part; returns its row, and the likelihoods of its options.

    Raises:
        ServerFailed: the server or lm_eval failed.
    """
    count = settings.questions if part == KEPT else settings.few
    job: dict[str, Any] = {"folder": str(folder), "questions": count, "batch_size": 1}
    if part == OWN:
        arguments = {"pretrained": str(model), "dtype": "float32", "device": "cpu"}
        found = evaluate({**job, "model": "hf", "arguments": arguments, "batch_size": settings.batch_size})
        return _row(part, count, found) | {"options": found["options"]}
    with Hosted(systems()[part], model, folder / "log", stopped=False) as server:
        arguments = {
            "base_url": f"{server.url}/v1/completions", "model": model.name, "tokenizer": str(model),
            "tokenizer_backend": "huggingface", "num_concurrent": str(settings.at_once), "max_retries": "1",
        }  # fmt: skip
        found = evaluate({**job, "model": "local-completions", "arguments": arguments})
        counts = _tokens(server.url) if part in (KEPT, COMPUTED) else {}
    return _row(part, count, found) | counts | {"options": found["options"]}


def _row(part: str, count: int, found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "part": part, "questions": count, "seconds": found["seconds"], "question_s": found["seconds"] / count,
        "accuracy": found["accuracy"],
    }  # fmt: skip


def _tokens(url: str) -> dict[str, int]:
    """Returns the prompt tokens that a server of ours was sent, and those that it found."""
    text = httpx.get(f"{url}/metrics").text

    def total(name: str) -> int:
        return int(sum(map(float, re.findall(rf"^mainstem_{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE))))

    return {name: total(name) for name in ("prompt_tokens", "cached_tokens")}


def compare(right: Sequence[Sequence[Sequence[float]]], made: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Compares the likelihoods of options: the greatest difference, and how many questions rank them differently."""
    pairs = list(zip(right, made, strict=False))
    worst = max(abs(a[0] - b[0]) for one, other in pairs for a, b in zip(one, other, strict=True))
    ranks = [[sorted(range(len(each)), key=lambda at: -each[at][0]) for each in pair] for pair in pairs]
    greedy = sum(a[1] != b[1] for one, other in pairs for a, b in zip(one, other, strict=True))
    return {"difference": worst, "other_ranks": sum(a != b for a, b in ranks), "other_greedy": greedy}


def run(settings: Settings, report: Report) -> None:
    """Runs the parts whose programs are installed, one after the other; the others are named in a note."""
    from mainstem.runtime.models.loading import load_model

    loaded = load_model(dtype="float32")
    model = Path(str(loaded.model.config.name_or_path))
    report.settings.update(asdict(settings), model=loaded.name, dtype="float32", threads=THREADS)
    del loaded
    if not EVAL_PYTHON.exists():
        report.failures.append("lm_eval is not installed: make .venv-clients/ready")
        return
    there, options = systems(), {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder, settings)
        for part in PARTS:
            if part in there and (version := there[part].version()) is None:
                report.notes.append(f"{part} is left out: it is not installed")
                continue
            if part in there:
                report.versions[f"{there[part].packages[0]}, scoring"] = str(version)
            report.progress(f"scores: {part}")
            try:
                row = measure(part, model, folder, settings)
            except ServerFailed as error:
                report.failures.append(f"{part}: {error}")
                continue
            options[part] = row.pop("options")
            report.rows.append(row)
    for row in report.rows:
        if row["part"] != OWN and OWN in options:
            row |= compare(options[OWN], options[row["part"]])
    report.more["goals"] = judge(report.rows)
    report.tables.append(table(report.rows))


def judge(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each goal, in the form of `goals.judge`."""
    by_part = {row["part"]: row for row in rows}
    kept, judged = by_part.get(KEPT), []
    for part, goal in GOALS.items():
        both = kept is not None and part in by_part
        ratio = by_part[part]["question_s"] / kept["question_s"] if kept is not None and both else None
        name = f"seconds of a question, {part} over {KEPT}"
        judged.append(
            {
                "what": name,
                "goal": goal,
                "unit": "ratio",
                "measured": ratio,
                "met": None if ratio is None else ratio >= goal,
            }
        )
    if kept is not None and "difference" in kept:
        for what, goal, unit in (("difference", TOLERANCE, "nats"), ("other_ranks", 0, "questions")):
            name = f"{KEPT} and {OWN}: {what.replace('_', ' ')}"
            judged.append({"what": name, "goal": goal, "unit": unit, "measured": kept[what], "met": kept[what] <= goal})
    return judged


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Builds the table for the terminal."""
    shown = Table("", "questions", "s a question", "accuracy", "prompt tokens", "cached", "difference, nats")
    for row in rows:
        counts = [f"{row[name]:,}" if name in row else "" for name in ("prompt_tokens", "cached_tokens")]
        worst = f"{row['difference']:.1e}" if "difference" in row else ""
        shown.add_row(
            row["part"], str(row["questions"]), f"{row['question_s']:.3f}", f"{row['accuracy']:.2f}", *counts, worst
        )
    return shown
