"""vLLM finds after a restart what it computed before: the same document, two engines one after the other.

    python examples/vllm_restart.py MODEL                  # a folder, or a name on the Hugging Face hub
    python examples/vllm_restart.py MODEL --storage redis://127.0.0.1:6379/0

Run it in the environment of vLLM, with `mainstem[vllm]`. Prints the time to the first token, and what was cached.
Without a model, or without vLLM, it says what it needs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec

DOCUMENT = "The lighthouse of Port Arden stands 41 metres tall and was lit in 1889. " * 60
QUESTION = "How tall is the lighthouse?"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--storage", help="the spec of a store; default: a file store in a new folder")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is None or find_spec("vllm") is None:
        print("needs vLLM 0.32 in this environment, and a model: python examples/vllm_restart.py MODEL")
        return 0
    if options.once:
        return ask(options.model, options.storage)
    with tempfile.TemporaryDirectory() as folder:
        storage = options.storage or f"file:{folder}/kv?capacity=4GiB"
        for name in ("first", "second"):
            print(f"{name} engine:", flush=True)
            command = [sys.executable, __file__, options.model, "--storage", storage, "--once"]
            quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env=quiet)
    return 0


def ask(model: str, storage: str) -> int:
    """Starts an engine, asks, and ends it with everything written."""
    from vllm import LLM, SamplingParams

    connector = {
        "kv_connector": "MainstemConnector",
        "kv_connector_module_path": "mainstem.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"storage": storage},
    }
    engine = LLM(model=model, max_model_len=2048, enforce_eager=True, kv_transfer_config=connector)
    began = time.perf_counter()
    out = engine.generate([DOCUMENT + QUESTION], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0]
    seconds = time.perf_counter() - began
    print(f"  {out.num_cached_tokens} of {len(out.prompt_token_ids)} tokens cached, first token after {seconds:.2f} s")
    engine.llm_engine.engine_core.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
