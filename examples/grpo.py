"""A small loop of GRPO: sample groups behind one prompt, score them, train, and give the engine the new weights.

    python examples/grpo.py
    python examples/grpo.py --model ./my-model --steps 5 --samples 16

The reward is a toy: how much of an answer is digits. PyTorch trains the last layer of a copy of the model, and the
engine takes the weights while it runs. Prints what was computed with the cache and without, and how far the
log-probabilities of scoring, and those of PyTorch, are from those of sampling. Exits with 1 if scores differ in a bit.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import numpy as np
import torch

from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import LoadedModel, load_model
from mainstem.runtime.request import Completion, Hints, Request
from mainstem.settings.engine import EngineConfig, SamplingParams

PROMPT = (
    "Answer every question with a number only.\n"
    "Q: How many legs has a spider? A: 8\nQ: How many minutes has an hour? A: 60\n"
    "Q: How many sides has a triangle? A: 3\nQ: How many weeks has a year? A: 52\n"
    "Q: How many letters has the alphabet? A: 26\nQ: How many months has a year? A: 12\n"
    "Q: How many strings has a violin? A: 4\nQ: How many planets has the sun? A: 8\n"
    "Q: {question} A:"
)
QUESTIONS = ("How many wheels has a car?", "How many days has a week?", "How many hours has a day?")


def main() -> int:
    options = _options()
    loaded = load_model(options.model, dtype="float32")
    trainer: Any = copy.deepcopy(loaded.model)  # the engine changes how its own model attends
    weights = [*trainer.get_decoder().layers[-1].parameters()]
    trainer.requires_grad_(False)
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.SGD(weights, lr=options.rate)
    same = True
    with Engine(loaded, EngineConfig(pages=512, draft_tokens=0)) as engine:
        for step in range(options.steps):
            prompt = engine.tokenizer.encode(PROMPT.format(question=QUESTIONS[step % len(QUESTIONS)]))
            began_s, before = time.perf_counter(), engine.stats().totals.computed_tokens
            group = sample(engine, prompt, options, step)
            scored = engine.score(prompt, [list(each.tokens) for each in group])
            seconds, computed = time.perf_counter() - began_s, engine.stats().totals.computed_tokens - before
            off = max(abs(s - p) for g, each in zip(group, scored, strict=True) for s, p in _pairs(g, each))
            rewards = torch.tensor([_reward(each.text) for each in group])
            theirs = train(trainer, optimizer, prompt, group, rewards)
            far = max(abs(s - float(t)) for g, row in zip(group, theirs, strict=True) for s, t in _pairs(g, row))
            version = engine.update_weights(trainer.state_dict())
            same = same and off == 0
            print(
                f"step {step}: reward {rewards.mean():.2f}; {computed} tokens computed in {seconds:.1f} s; scores "
                f"differ from samples by {off:.1g}, PyTorch's by {far:.1g}; version {version} computes now"
            )
    compare(loaded, options)
    return 0 if same else 1


def sample(engine: Engine, prompt: list[int], options: argparse.Namespace, step: int) -> list[Completion]:
    """Returns a group: several answers to one prompt, with the log-probability of each token."""
    streams = []
    for number in range(options.samples):
        params = SamplingParams(max_tokens=options.tokens, temperature=1.0, seed=1000 * step + number, logprobs=0)
        streams.append(engine.submit(Request(np.array(prompt), params, hints=Hints(group=f"step {step}"))))
    return [stream.result() for stream in streams]


def train(
    model: Any, optimizer: torch.optim.Optimizer, prompt: list[int], group: list[Completion], rewards: torch.Tensor
) -> list[torch.Tensor]:
    """Makes one step along the advantages of a group; returns PyTorch's log-probabilities of each answer."""
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    longest = max(len(each.tokens) for each in group)
    rows = [
        [*prompt, *each.tokens, *[0] * (longest - len(each.tokens))] for each in group
    ]  # causal: the rest is unseen
    logits = model(input_ids=torch.tensor(rows), logits_to_keep=longest + 1, use_cache=False).logits[:, :-1]
    chosen = torch.tensor(rows)[:, len(prompt) :, None]
    logprobs = logits.float().log_softmax(-1).gather(-1, chosen)[..., 0]
    answers = [row[: len(each.tokens)] for row, each in zip(logprobs, group, strict=True)]
    loss = -torch.stack([a * row.mean() for a, row in zip(advantages, answers, strict=True)]).mean()
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return [row.detach() for row in answers]


def compare(loaded: LoadedModel, options: argparse.Namespace) -> None:
    """Samples and scores one group with the cache, and without."""
    for cache in (True, False):
        with Engine(loaded, EngineConfig(pages=512, draft_tokens=0, cache=cache)) as engine:
            prompt = engine.tokenizer.encode(PROMPT.format(question=QUESTIONS[0]))
            began_s = time.perf_counter()
            group = sample(engine, prompt, options, 0)
            engine.score(prompt, [list(each.tokens) for each in group])
            seconds, computed = time.perf_counter() - began_s, engine.stats().totals.computed_tokens
        print(f"a group {'with the cache' if cache else 'without it'}: {computed} tokens computed in {seconds:.1f} s")


def _pairs(completion: Completion, others: Any) -> list[tuple[float, float]]:
    numbers = others if isinstance(others, torch.Tensor) else others.logprobs
    return [(each.logprob, float(other)) for each, other in zip(completion.logprobs, numbers, strict=True)]


def _reward(text: str) -> float:
    return sum(letter.isdigit() for letter in text) / max(1, len(text))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--model", help="a folder or a name; default: SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--samples", type=int, default=16, help="answers in a group")
    parser.add_argument("--tokens", type=int, default=8, help="of an answer at most")
    parser.add_argument("--rate", type=float, default=0.05, help="of learning")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
