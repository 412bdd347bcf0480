"""One evaluation by lm_eval, in the environment that has it: python -m bench.evaluation, with a job as JSON on stdin.

The job: model and arguments as on lm_eval's command line, the folder with the task `generated`, and how many questions.
The last line of its output: the seconds that the evaluation took once the model was there, the accuracy, and of each
question the log-likelihoods of its options and whether each is what greedy decoding gives.

https://github.com/EleutherAI/lm-evaluation-harness, docs/interface.md and docs/task_guide.md.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    """Runs the job."""
    import lm_eval
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    job: dict[str, Any] = json.load(sys.stdin)
    model = get_model(job["model"]).create_from_arg_string(
        ",".join(f"{name}={value}" for name, value in job["arguments"].items()), {"batch_size": job["batch_size"]}
    )
    tasks = TaskManager(include_path=job["folder"], include_defaults=False)
    began_s = time.perf_counter()
    found = lm_eval.simple_evaluate(
        model=model, tasks=["generated"], limit=job["questions"], task_manager=tasks, log_samples=True,
        bootstrap_iters=0,
    )  # fmt: skip
    seconds = time.perf_counter() - began_s
    samples = sorted(found["samples"]["generated"], key=lambda sample: sample["doc_id"])
    options = [[(float(value), bool(greedy)) for value, greedy in sample["filtered_resps"]] for sample in samples]
    print(json.dumps({"seconds": seconds, "accuracy": found["results"]["generated"]["acc,none"], "options": options}))


if __name__ == "__main__":
    main()
