"""lm_eval over local-completions: a task of multiple choice, whose answers are judged by their log-likelihood."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import lm_eval
from lm_eval.tasks import TaskManager

URL, MODEL = sys.argv[1:]
TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: ["Paris", "Rome"]
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""

with TemporaryDirectory() as folder:
    data = Path(folder, "capitals.jsonl")
    data.write_text("\n".join(map(json.dumps, [{"country": "France", "answer": 0}, {"country": "Italy", "answer": 1}])))
    Path(folder, "capitals.yaml").write_text(TASK.format(data=data))
    given = {"base_url": f"{URL}/v1/completions", "model": MODEL, "tokenized_requests": False, "num_concurrent": 2}
    results = lm_eval.simple_evaluate(
        "local-completions",
        model_args={**given, "tokenizer_backend": "remote"},
        tasks=["capitals"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    assert results["results"]["capitals"]["acc,none"] == 1.0, results["results"]
    print("multiple_choice")
