"""What a GPU does with pages: copies, loads beside computing, attention, folding, the engine, and what `--exact` costs.

    make bench-gpu                            on a machine with a GPU
    python -m bench.gpu --dry-run             the same code with tiny sizes on the CPU: no figure of it says anything

Writes `gpu-<hardware>.json` after each part, so that a run that is cut off keeps what it has. A part that fails is
named, and the others run. Times are those of the clock, after the device has finished. Models have random weights.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from rigs.letters import Letters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, LlamaConfig

from bench import throughput, ttft
from bench.attention import Shape, extents_of, step_s
from bench.report import Report
from mainstem.runtime.attention.paged import Attention, Extent, SdpaAttention, plan_batch
from mainstem.runtime.memory.host import HostPool, Planes
from mainstem.runtime.memory.kv import KVPool, KVShape
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.runner import ModelRunner, attention_for, recorder_for
from mainstem.runtime.segments import Segment
from mainstem.tiers.host.transfer import Move, Ticket

RESULTS = Path(__file__).parent / "results"
COPY_GOAL = 0.8
"""The share of the link's own speed that copies of scattered pages should reach."""

EXACT_GOALS = 0.1, 0.2
"""What `--exact` may add to a decode step and to a prompt, of the time without it."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the benchmark. The shape is that of Llama 3.2 1B.

    Args:
        device: "cuda", or "cpu" for a rehearsal.
        dtype: of weights, keys and values.
        layers, heads, kv_heads, head_dim, hidden, inner, vocab: of the model.
        context: positions of a request at most.
        page_sizes: positions per page.
        copied_bytes: in one direction, for each measure.
        rounds: of each measure; the median counts.
        decodes: requests of a decode step, for attention.
        prefills: likewise of a prefill.
        sharers: numbers of requests that share one prefix.
        prefix, own: positions that these share, and that each has beside it.
        prompts: lengths of prefixes, for the time to the first token.
        chunks: prompt tokens of a step, likewise.
        concurrent: requests at a time, for throughput.
        new_tokens: of each of them.
        decoded: positions of each request whose decode steps are measured; `concurrent` at a time.
    """

    device: str = "cuda"
    dtype: str = "bfloat16"
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    hidden: int = 2048
    inner: int = 8192
    vocab: int = 128_256
    context: int = 16_384
    page_sizes: tuple[int, ...] = (16, 64)
    copied_bytes: int = 1 << 30
    rounds: int = 9
    decodes: tuple[Shape, ...] = (Shape(1, 0, 8192), Shape(32, 0, 1024), Shape(64, 2048, 256), Shape(8, 0, 16_000))
    prefills: tuple[Shape, ...] = (Shape(1, 0, 0, 4096), Shape(8, 2048, 0, 256))
    sharers: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    prefix: int = 4096
    own: int = 128
    prompts: tuple[int, ...] = (1024, 4096, 8192)
    chunks: tuple[int, ...] = (512, 4096)
    concurrent: tuple[int, ...] = (1, 8, 32)
    new_tokens: int = 64
    decoded: int = 1024


REHEARSAL = Settings(
    device="cpu",
    dtype="float32",
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    hidden=64,
    inner=96,
    vocab=97,
    context=512,
    page_sizes=(16,),
    copied_bytes=1 << 18,
    rounds=1,
    decodes=(Shape(2, 32, 16),),
    prefills=(Shape(1, 0, 0, 20),),
    sharers=(1, 2),
    prefix=32,
    own=8,
    prompts=(64,),
    chunks=(32,),
    concurrent=(2,),
    new_tokens=2,
    decoded=32,
)


# ---------------------------------------------------------------- the machine


def hardware(device: str) -> dict[str, Any]:
    """Returns the name of the device, and what PyTorch says of it."""
    if device == "cpu":
        return {"name": platform.processor() or "cpu"}
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "capability": f"{found.major}.{found.minor}",
        "cuda": torch.version.cuda,
    }


def name_of(device: str, what: str = "gpu") -> str:
    """Returns the name of a record: "gpu-nvidia-h100-80gb-hbm3"."""
    return f"{what}-{re.sub('[^a-z0-9]+', '-', hardware(device)['name'].lower()).strip('-')}"


def record_tests(device: str, outcomes: Mapping[str, Sequence[Any]], folder: Path = RESULTS) -> Path:
    """Writes how many tests had each outcome on a device, and which failed: `gpu-tests-<hardware>.json`.

    Args:
        device: on which they ran.
        outcomes: pytest's reports, by outcome.
        folder: for the JSON.
    """
    report = Report(name_of(device, "gpu-tests"), datetime.now(UTC).isoformat(timespec="seconds"), False, print)
    report.more["hardware"] = [hardware(device)]
    report.rows = [{name: len(outcomes.get(name, ())) for name in ("passed", "failed", "error", "skipped")}]
    report.notes = [each.nodeid for name in ("failed", "error") for each in outcomes.get(name, ())]
    return report.write(folder)


def clock_of(device: str) -> Callable[[], float]:
    """Returns a clock in seconds, which first waits until the device has finished."""

    def clock() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    return clock


class Bench:
    """One run of the benchmark.

    Args:
        settings: its settings.
        attention: the kernel of the device.
    """

    def __init__(self, settings: Settings, attention: Attention) -> None:
        self._settings, self._attention = settings, attention
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._clock = clock_of(settings.device)
        self._recorder = recorder_for(torch.device(settings.device))

    @property
    def parts(self) -> dict[str, Callable[[], Iterator[Row]]]:
        """What is measured, by name."""
        return {
            "copies": self.copies,
            "hidden loads": self.hidden,
            "attention": self.attention,
            "folding": self.folding,
            "decode": self.decode,
            "ttft": self.ttft,
            "throughput": self.throughput,
            "exact": self.exact,
        }

    def _seconds(self, work: Callable[[], object], rounds: int | None = None) -> float:
        """Returns the median time of some work, which runs once before."""
        work()
        taken = []
        for _ in range(rounds or self._settings.rounds):
            began_s = self._clock()
            work()
            taken.append(self._clock() - began_s)
        return median(taken)

    # ------------------------------------------------------------ copies

    def copies(self) -> Iterator[Row]:
        """Yields scattered pages, down and up, beside one pinned copy of the same bytes."""
        for page_size in self._settings.page_sizes:
            planes = self._planes(page_size)
            size = planes.payload_bytes * planes.pages
            link = self._link(size)
            for layout in ("page_first", "layer_first"):
                pool = HostPool([planes], [planes.pages], layout)  # type: ignore[arg-type]
                move = [Move(0, *self._scattered(planes.pages))]
                for way, begin in (("down", pool.down), ("up", pool.up)):
                    taken_s = self._seconds(partial(_whole, begin, move))
                    share = link[way] / taken_s
                    yield {
                        "page_size": page_size,
                        "layout": layout,
                        "way": way,
                        "pages": planes.pages,
                        "bytes_per_s": size / taken_s,
                        "link_bytes_per_s": size / link[way],
                        "share": share,
                        "goal": COPY_GOAL,
                        "met": share >= COPY_GOAL,
                    }
                pool.close()

    def _planes(self, page_size: int) -> Planes:
        s = self._settings
        page_bytes = 2 * s.layers * page_size * s.kv_heads * s.head_dim * self._dtype.itemsize
        shape = (s.layers, max(2, s.copied_bytes // page_bytes), page_size, s.kv_heads, s.head_dim)
        return Planes(tuple(torch.randn(shape, dtype=self._dtype, device=s.device) for _ in range(2)))

    def _scattered(self, pages: int) -> tuple[Any, Any]:
        chance = np.random.default_rng(0)
        return chance.permutation(pages).astype(np.int32), chance.permutation(pages).astype(np.int32)

    def _link(self, size: int) -> dict[str, float]:
        """Returns the seconds that one copy of so many bytes takes between pinned memory and the device."""
        is_gpu = self._settings.device != "cpu"
        host = torch.empty(size, dtype=torch.uint8, pin_memory=is_gpu).fill_(1)
        there = torch.empty(size, dtype=torch.uint8, device=self._settings.device).fill_(2)
        up = self._seconds(lambda: there.copy_(host, non_blocking=True))
        return {"up": up, "down": self._seconds(lambda: host.copy_(there, non_blocking=True))}

    def hidden(self) -> Iterator[Row]:
        """Yields how much of a load passes while the layers before it compute."""
        s = self._settings
        planes = self._planes(s.page_sizes[0])
        pool = HostPool([planes], [planes.pages], "page_first")
        move = [Move(0, *self._scattered(planes.pages))]
        pool.down(move).wait()
        size = min(4096, 64 * s.hidden // 32)
        left, right = (torch.randn(size, size, dtype=self._dtype, device=s.device) for _ in range(2))
        load_s = self._seconds(lambda: pool.up(move).wait())
        product_s = self._seconds(lambda: left @ right)
        products = max(1, round(load_s / s.layers / max(product_s, 1e-6)))  # a layer computes as long as it loads

        def compute(layer: int) -> None:
            for _ in range(products):
                left @ right

        def both() -> None:
            ticket = pool.up(move)
            for layer in range(s.layers):
                ticket.wait_layer(layer)
                compute(layer)
            ticket.wait()

        compute_s = self._seconds(lambda: [compute(layer) for layer in range(s.layers)])
        both_s = self._seconds(both)
        hidden = (compute_s + load_s - both_s) / min(compute_s, load_s)
        yield {"load_s": load_s, "compute_s": compute_s, "both_s": both_s, "hidden": hidden}
        pool.close()

    # ------------------------------------------------------------ attention

    def attention(self) -> Iterator[Row]:
        """Yields a step's attention in all layers by each kernel, and by dense ones that read no pages.

        `graph_s` are times of one CUDA graph, planned before. Others launch each kernel, and plan in each step.
        """
        kernels = {type(kernel).__name__: kernel for kernel in (self._attention, SdpaAttention())}
        for shape in (*self._settings.decodes, *self._settings.prefills):
            for page_size in self._settings.page_sizes:
                step = self._step(shape, page_size)
                times = {f"{name}_s": self._seconds(partial(step, kernel)) for name, kernel in kernels.items()}
                graph_s = self._seconds(self._planned(shape, page_size))
                yield {"shape": shape.label, "page_size": page_size, **times, "graph_s": graph_s, **self._dense(shape)}

    def _step(self, shape: Shape, page_size: int) -> Callable[[Attention], float]:
        extents, pool, new = self._batch(shape, page_size)
        return lambda kernel: step_s(kernel, extents, pool, new, time.perf_counter)

    def _planned(self, shape: Shape, page_size: int) -> Callable[[], object]:
        """Returns a step's attention in all layers, with its plan made, as one launch."""
        extents, pool, new = self._batch(shape, page_size)
        plan = plan_batch(extents, pool)

        def layers() -> torch.Tensor:
            for layer in range(self._settings.layers):
                out = self._attention.attend(layer, *new, self._settings.head_dim**-0.5, plan)  # type: ignore[call-arg]
            return out

        return self._recorded(layers)

    def _recorded(self, work: Callable[[], torch.Tensor]) -> Callable[[], object]:
        """Returns what repeats all launches of some work at once; on a CPU, the work."""
        if self._recorder is None:
            return work
        work()
        return self._recorder(work)[0]

    def _batch(self, shape: Shape, page_size: int) -> tuple[list[Extent], KVPool, list[torch.Tensor]]:
        """Returns the requests of a step, their pages, and new queries, keys and values."""
        s = self._settings
        extents = extents_of(shape, page_size)
        pages = 1 + max(int(extent.page_table.max()) for extent in extents)
        pool = KVPool(KVShape(s.layers, s.kv_heads, s.head_dim, s.head_dim), pages, page_size, self._dtype, s.device)
        for plane in pool.planes:
            plane.normal_()
        return extents, pool, self._rows(shape.requests * shape.new)

    def _rows(self, tokens: int) -> list[torch.Tensor]:
        s = self._settings
        sizes = (s.heads, s.kv_heads, s.kv_heads)
        return [torch.randn(tokens, n, s.head_dim, dtype=self._dtype, device=s.device) for n in sizes]

    def _dense(self, shape: Shape) -> Row:
        """Returns the times of attention to keys that are contiguous for each request; None where it cannot run."""
        s, keys = self._settings, shape.shared + shape.own + shape.new
        if shape.new not in (1, keys):
            return {}  # neither a decode nor a whole prompt
        q = torch.randn(shape.requests, s.heads, shape.new, s.head_dim, dtype=self._dtype, device=s.device)
        k, v = (
            torch.randn(shape.requests, s.kv_heads, keys, s.head_dim, dtype=self._dtype, device=s.device)
            for _ in range(2)
        )
        is_causal = shape.new > 1

        def torch_flash() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION if s.device != "cpu" else SDPBackend.MATH):
                for _ in range(s.layers):
                    out = scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
            return out

        flash_s = {"torch_flash_s": torch_flash, "torch_flash_graph_s": self._recorded(torch_flash)}
        times: Row = {name: self._seconds(work) for name, work in flash_s.items()} | {"flash_attn_s": None}
        try:
            from flash_attn import flash_attn_func  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError:
            return times
        across = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

        def flash_attn() -> None:
            for _ in range(s.layers):
                flash_attn_func(*across, causal=is_causal)

        return {**times, "flash_attn_s": self._seconds(flash_attn)}

    def folding(self) -> Iterator[Row]:
        """Yields a decode of requests that share a prefix, beside as many that have copies of it: as CUDA graphs."""
        s = self._settings
        for count in s.sharers:
            shared, apart = Shape(count, s.prefix, s.own), Shape(count, 0, s.prefix + s.own)
            taken = [self._seconds(self._planned(shape, s.page_sizes[0])) for shape in (shared, apart)]
            yield {"sharers": count, "shared_s": taken[0], "apart_s": taken[1], "ratio": taken[1] / taken[0]}

    # ------------------------------------------------------------ the engine

    def decode(self) -> Iterator[Row]:
        """Yields decode steps: repeated, launched, and those of transformers, beside the bytes that they must read.

        Requests share nothing. The floor is the time to read weights, keys and values at the bandwidth that a copy on
        the device has.
        """
        s = self._settings
        loaded, bandwidth = self._loaded(), self._bandwidth()
        read = sum(weight.nbytes for weight in loaded.model.parameters())
        position = 2 * s.layers * s.kv_heads * s.head_dim * self._dtype.itemsize
        tokens = torch.randint(0, s.vocab, (max(s.concurrent), s.decoded), device=s.device)
        theirs = {count: self._transformers_s(loaded.model, tokens[:count]) for count in s.concurrent}
        for count in s.concurrent:
            floor_s = (read + count * s.decoded * position) / bandwidth
            times = {
                f"{name}_s": self._step_s(
                    ModelRunner(loaded, self._pages(count), 16, cuda_graphs=graphs), tokens[:count]
                )
                for name, graphs in (("graph", True), ("launched", False))
            }
            row = {
                "requests": count,
                "context": s.decoded,
                **times,
                "transformers_s": theirs[count],
                "floor_s": floor_s,
            }
            yield {**row, "ratio": row["transformers_s"] / row["graph_s"], "share": floor_s / row["graph_s"]}

    def exact(self) -> Iterator[Row]:
        """Yields what `--exact` costs: decode steps and prompts with it, beside the same without."""
        s = self._settings
        loaded = self._loaded()
        tokens = torch.randint(0, s.vocab, (max(s.concurrent), s.decoded), device=s.device)
        kinds = {"plain_s": False, "exact_s": s.device != "cpu"}
        for count in s.concurrent:
            how = {name: ModelRunner(loaded, self._pages(count), 16, exact=exact) for name, exact in kinds.items()}
            times = {name: self._step_s(runner, tokens[:count]) for name, runner in how.items()}
            yield {"step": f"decode of {count}", **times, **_cost(times, EXACT_GOALS[0])}
        for length in s.prompts:
            times = {name: self._prompt_s(loaded, length, exact) for name, exact in kinds.items()}
            yield {"step": f"prompt of {length:,}", **times, **_cost(times, EXACT_GOALS[1])}

    def _prompt_s(self, loaded: LoadedModel, length: int, exact: bool) -> float:
        """Returns the seconds of the forward of a whole prompt."""
        runner = ModelRunner(loaded, -(-length // 16), 16, exact=exact)
        prompt = np.random.default_rng(0).integers(0, self._settings.vocab, length).astype(np.int32)
        table = np.arange(-(-length // 16), dtype=np.int32)
        return self._seconds(lambda: runner.forward([Segment(prompt, 0, (table,), 1)]))

    def _pages(self, requests: int) -> int:
        return requests * (self._settings.decoded // 16 + self._settings.rounds + 2)

    def _step_s(self, runner: ModelRunner, tokens: torch.Tensor) -> float:
        """Returns the seconds of a step of some requests after their prompts, [requests, positions]."""
        tables = np.split(np.arange(self._pages(len(tokens)), dtype=np.int32), len(tokens))
        prompts, length = tokens.cpu().numpy().astype(np.int32), tokens.shape[1]
        for prompt, table in zip(prompts, tables, strict=True):
            runner.forward([Segment(prompt, 0, (table,), 1)])
        at = iter(range(length, self._settings.context))

        def step() -> None:
            end = next(at)
            runner.forward(
                [Segment(prompt[:1], end, (table,), 1) for prompt, table in zip(prompts, tables, strict=True)]
            )

        for _ in range(2):  # the first is recorded, and the second compared
            step()
        return self._seconds(step)

    def _transformers_s(self, model: Any, tokens: torch.Tensor) -> float:
        """Returns the seconds of a step by the model's own code and transformers' cache."""
        cache = model(tokens, use_cache=True, logits_to_keep=1).past_key_values
        model(tokens[:, :1], past_key_values=cache, use_cache=True)
        return self._seconds(lambda: model(tokens[:, :1], past_key_values=cache, use_cache=True))

    def _bandwidth(self) -> float:
        """Returns the bytes per second that a copy on the device reads and writes."""
        there = torch.empty(self._settings.copied_bytes, dtype=torch.uint8, device=self._settings.device).fill_(1)
        other = torch.empty_like(there)
        return 2 * there.nbytes / self._seconds(lambda: other.copy_(there))

    def ttft(self) -> Iterator[Row]:
        """Yields the time to the first token, cold and warm, with the default size of a step and a larger one."""
        prompts = self._settings.prompts
        for chunk in self._settings.chunks:
            lengths = ttft.Settings(prompts, token_budget=2 * max(prompts), repeats=(5, 3), chunk=chunk)
            for row in self._engine(lambda report, loaded, lengths=lengths: ttft.run(lengths, report, loaded)):  # type: ignore[misc]
                yield {"chunk": chunk, **row}

    def throughput(self) -> Iterator[Row]:
        """Yields requests and tokens per second of requests that share a prefix, with and without reuse."""
        s = self._settings
        loads = throughput.Settings(s.concurrent, max(s.prompts) // 4, 20, s.new_tokens, rounds=3, dtype=s.dtype)
        yield from self._engine(lambda report, loaded: throughput.run(loads, report, loaded))

    def _engine(self, measure: Callable[[Report, LoadedModel], None]) -> list[Row]:
        report = Report("gpu", "", quick=False, progress=lambda line: None)
        measure(report, self._loaded())
        return report.rows

    def _loaded(self) -> LoadedModel:
        s = self._settings
        config = LlamaConfig(
            vocab_size=s.vocab,
            hidden_size=s.hidden,
            intermediate_size=s.inner,
            num_hidden_layers=s.layers,
            num_attention_heads=s.heads,
            num_key_value_heads=s.kv_heads,
            head_dim=s.head_dim,
            max_position_embeddings=s.context,
        )
        torch.manual_seed(0)
        with torch.device(s.device):
            model = AutoModelForCausalLM.from_config(config, dtype=self._dtype).eval()
        return LoadedModel(model, Letters(), "llama, random weights", self._dtype, s.context)  # type: ignore[arg-type]


def _cost(times: Row, goal: float) -> Row:
    cost = times["exact_s"] / times["plain_s"] - 1
    return {"cost": cost, "goal": goal, "met": cost <= goal}


def _whole(begin: Callable[[list[Move]], Ticket], move: list[Move]) -> None:
    begin(move).wait()


# ---------------------------------------------------------------- one run


def run(settings: Settings, report: Report, save: Callable[[], object], attention: Attention | None = None) -> None:
    """Measures all parts into `report.more`, and saves after each.

    Args:
        settings: of the benchmark.
        report: to fill in.
        save: called after each part.
        attention: the kernel; None: that of the device.
    """
    found = hardware(settings.device)
    report.settings.update(asdict(replace(settings, decodes=(), prefills=())))
    report.more["hardware"] = [found]
    bench = Bench(settings, attention or attention_for(torch.device(settings.device)))
    for name, measure in bench.parts.items():
        report.progress(f"gpu: {name}")
        rows: list[Row] = []
        try:
            with torch.no_grad():
                rows.extend(measure())
        except Exception as error:  # noqa: BLE001  # libraries of devices raise all kinds, and the other parts count
            report.failures.append(f"{name}: {type(error).__name__}: {error}")
        report.more[name] = rows
        if rows:
            report.tables.append(_table(name, rows))
        report.notes = [f"failed: {failure}" for failure in report.failures]
        save()


def _table(name: str, rows: list[Row]) -> Table:
    shown = Table(*rows[0], title=name)
    for row in rows:
        shown.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    return shown


def main() -> int:
    """Returns 1 if a part failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print("bench-gpu needs a GPU that PyTorch finds; --dry-run runs its code on the CPU", file=sys.stderr)
        return 2
    settings = REHEARSAL if options.dry_run else Settings()
    log = Console(stderr=True)
    name = "rehearsal-gpu" if options.dry_run else name_of(settings.device)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(name, date, options.dry_run, progress=lambda line: log.print(line, style="dim"))
    run(settings, report, lambda: report.write(options.out))
    report.show(Console(width=160))
    print(f"written to {report.write(options.out)}")
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
