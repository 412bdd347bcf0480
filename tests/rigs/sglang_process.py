"""SGLang's real server in processes of its own, over a tiny random model. Needs SGLang: `make test-sglang`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
from machine import patience
from rigs.servers import free_port
from transformers import LlamaConfig, LlamaForCausalLM

PAGE = 16
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 32
PAGE_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * PAGE


def save_model(folder: Path) -> Path:
    """Makes a tiny random model."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 1024}
    heads = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": KV_HEADS}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, head_dim=HEAD_DIM, initializer_range=0.3)).float().save_pretrained(
        folder
    )
    return folder


class Server:
    """A server, from `with` to the end of its block.

    Args:
        model: a folder.
        store: the spec of a store.
        log: a file to which the server's output is added.
    """

    def __init__(self, model: Path, store: str, log: Path) -> None:
        self._port, self._log = free_port(), log
        extra = {
            "backend_name": "mainstem",
            "module_path": "mainstem.integrations.sglang",
            "class_name": "MainstemHiCache",
            "interface_v1": 1,
            "prefetch_threshold": PAGE,
            "storage": store,
        }
        options = {
            "model-path": model, "port": self._port, "page-size": PAGE, "device": "cpu", "dtype": "float32",
            "attention-backend": "torch_native", "sampling-backend": "pytorch", "mem-fraction-static": 0.05,
            "max-total-tokens": 2048, "hicache-ratio": 2, "hicache-mem-layout": "layer_first",
            "hicache-io-backend": "direct", "hicache-write-policy": "write_through",
            "hicache-storage-backend": "dynamic", "hicache-storage-prefetch-policy": "wait_complete",
            "hicache-storage-backend-extra-config": json.dumps(extra),
        }  # fmt: skip
        flags = ("enable-hierarchical-cache", "skip-tokenizer-init", "disable-overlap-schedule", "skip-server-warmup")
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self._command = [
            sys.executable, str(Path(__file__).parent / "sglang_server.py"), *words, *(f"--{flag}" for flag in flags)
        ]  # fmt: skip

    def __enter__(self) -> Server:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        end_s = time.monotonic() + patience(300)
        while time.monotonic() < end_s and self._process.poll() is None:
            try:
                self.ask("/health")
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        self.__exit__()
        raise AssertionError(self._log.read_text(errors="replace")[-3000:])

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask(self, path: str, body: Any = None, method: str | None = None) -> bytes:
        """Returns the answer to a request, with a body in JSON if there is one."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=patience(120)) as answer:
            return bytes(answer.read())

    def generate(self, tokens: list[int]) -> tuple[list[int], int]:
        """Returns the answer's tokens, and how many of the prompt's came from storage."""
        sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
        got = json.loads(self.ask("/generate", {"input_ids": tokens, "sampling_params": sampling}))
        details = got["meta_info"].get("cached_tokens_details") or {}
        return got["output_ids"], details.get("storage", 0)
