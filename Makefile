# One verb a job. Every verb works from a bare clone: Python >= 3.11 and make are all it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TSC ?= tsc
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
# On a terminal pip shows what it does, for that takes minutes. In $$(...) standard output is none, so the other is asked.
PIP_INSTALL = $(BIN)/python -m pip install $$(test -t 2 || echo --quiet) -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test avx2 cover torture audit dist oldest optimum clients ray check fix bench gpu upstreams docs clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

demo: $(DEMO_STAMP) ## device and verifier on this machine, with the embedded model pair
	$(BIN)/edge-client demo

test: $(STAMP) ## every fast test, on all cores
	$(BIN)/python -m pytest --numprocesses auto

# Sums of floats differ between instruction sets. ONNX Runtime has no such switch: its kernels stay the processor's own.
avx2: $(STAMP) ## the tests, with torch's and numpy's kernels of a processor without AVX-512
	ATEN_CPU_CAPABILITY=avx2 DNNL_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 NPY_DISABLE_CPU_FEATURES="X86_V4 AVX512_ICL AVX512_SPR" \
		$(BIN)/python -m pytest --numprocesses auto

# Counting lines takes three times as long as the tests of pure Python. The floor is in pyproject.toml.
cover: $(STAMP) ## the same, with the lines that no test runs; fails where they are more than the floor allows
	$(BIN)/python -m pytest --numprocesses auto --cov --cov-report=term

torture: $(STAMP) ## fuzzers, floods, kills, overload and a soak: minutes (FULL=1: the counts of docs/reliability.md, hours)
	$(BIN)/python -m tests.torture $(if $(FULL),--full)

audit: $(STAMP) ## known vulnerabilities of what we depend on; asks a public database
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip

# The tools that check a release are needed for nothing else: an environment of their own, and an empty one for the wheel.
dist: ## wheel and sdist, checked, and the wheel at work in an empty environment
	rm -rf dist build
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/python -m pip install --quiet build twine
	$(VENV)-dist/bin/python -m build --outdir dist
	$(VENV)-dist/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear $(VENV)-wheel
	$(VENV)-wheel/bin/python -m pip install --quiet dist/*.whl
	cd dist && ../$(VENV)-wheel/bin/edge-client generate "What is 17 plus 25?" --offline
	cd dist && ../$(VENV)-wheel/bin/moa-edge --version

# The oldest versions that pyproject.toml allows, with transformers 4 and with optimum, which has no release for transformers 5.
OLDEST := $(VENV)-oldest/bin/python
$(OLDEST): pyproject.toml constraints.txt
	test -x $@ || $(PYTHON) -m venv $(VENV)-oldest
	$@ -m pip install --quiet packaging
	$@ -m tools.oldest > $(VENV)-oldest/constraints.txt
	$@ -m pip install --quiet -c $(VENV)-oldest/constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)" -e ".[optimum,serve,upstream,verifier]" hypothesis psutil pytest pytest-asyncio pytest-timeout pytest-xdist
	touch $@

oldest: $(OLDEST) ## model, training and export tests with the oldest versions of what they depend on
	$(OLDEST) -m pytest --numprocesses auto tests/target tests/export tests/training

optimum: $(OLDEST) ## int8 by optimum's quantizer, which must give the bits of ONNX Runtime's
	$(OLDEST) -m pytest --numprocesses 0 tests/export/test_optimum.py

# Their dependencies are many and conflict with each other: an environment of their own, which sees what is installed here.
clients: $(STAMP) ## clients that others wrote, a browser, and OpenAI's specification, against the endpoint
	test -x $(VENV)-clients/bin/python || $(PYTHON) -m venv $(VENV)-clients
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > "$$($(VENV)-clients/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	$(VENV)-clients/bin/python -m pip install --quiet -c constraints.txt axe-playwright-python langchain langchain-openai litellm llm playwright schemathesis
	$(VENV)-clients/bin/python -m pytest --numprocesses 0 tests/clients
	npx --yes --package typescript@7.0.2 tsc --project tests/web/jsconfig.json

# Ray brings a hundred packages of which nothing else needs one: an environment of its own, as for `clients`.
ray: $(STAMP) ## the example of deploy/ray, on this machine
	test -x $(VENV)-ray/bin/python || $(PYTHON) -m venv $(VENV)-ray
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > "$$($(VENV)-ray/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	$(VENV)-ray/bin/python -m pip install --quiet -c constraints.txt "ray[serve]"
	$(VENV)-ray/bin/python -m pytest --numprocesses 0 -m slow tests/ray

check: $(STAMP) ## formatting, lint, types, import arrows, and the types of the browser's modules where tsc is
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	if $(TSC) --version > /dev/null 2>&1; then $(TSC) --project tests/web/jsconfig.json; else echo "skipped: no TypeScript"; fi
	$(BIN)/bandit --quiet --recursive --configfile pyproject.toml moa edge_client cloud_verifier export

fix: $(STAMP) ## repair formatting and what lint can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## the experiments; writes tables and pictures
	$(BIN)/python -m benchmarks --out benchmarks/results
	$(MAKE) docs

upstreams: $(STAMP) ## greedy answers of other engines, cut and resumed (GGUF=file for a llama.cpp server, ENGINE=url for one that runs)
	$(BIN)/python -m benchmarks upstreams $(if $(GGUF),--gguf $(GGUF)) $(if $(BUNDLE),--bundle $(BUNDLE)) $(if $(ENGINE),--url $(ENGINE)) $(if $(API),--api $(API)) $(if $(KEPT),--kept $(KEPT))

gpu: $(STAMP) ## on a machine with a card, check and measure the accelerator in at most 8 minutes
	$(BIN)/python -m benchmarks.gpu --out benchmarks/results/gpu

docs: $(STAMP) ## regenerate the pictures, the trees, the command reference and the page of results
	$(BIN)/python -m benchmarks.plots
	$(BIN)/python -m tools.readme

clean: ## remove the environment, builds and caches
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-clients $(VENV)-dist $(VENV)-ray $(VENV)-wheel build dist *.egg-info .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Device and verifier alone: the tools of a developer take minutes more, and nobody needs them to look.
$(DEMO_STAMP): pyproject.toml constraints.txt
	@echo "Installing device and verifier into $(VENV): 1 to 10 minutes, 1.2 GB (with CUDA's torch more)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test $(STAMP) -nt pyproject.toml || $(PIP_INSTALL) -e ".[demo]"
	touch $@

# The stamp is older than what it was made from whenever a dependency changes, so an environment never goes stale.
$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV): some minutes, 1.5 GB (with CUDA's torch more)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e ".[dev]"
	touch $@
