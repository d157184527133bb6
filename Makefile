# The only two commands a newcomer needs: make demo, make test. Each makes .venv and installs what it needs.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -q

.PHONY: demo test test-slow lint bench docs clean

demo: .venv/demo.done
	$(BIN)/statsbridge demo

test: lint
	$(PYTEST) -n 2 --dist worksteal

# Servers, kills and outages need their time: what fails beside another test is run again alone, and has to pass there.
test-slow: .venv/dev.done
	$(PYTEST) -m slow -n 2 --dist worksteal || $(PYTEST) -m slow --last-failed

lint: .venv/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/dev.done
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/log.py
	$(BIN)/python benchmarks/mirrors.py
	$(BIN)/python benchmarks/view.py
	for tracker in tensorboard wandb aim mlflow; do $(BIN)/python benchmarks/mirror_$$tracker.py || exit 1; done

docs: .venv/dev.done
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv build dist site statsbridge-runs

# torch goes first and pinned: asked for as a mere dependency, pip may take another build of several gigabytes.
.venv/torch.done:
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	touch $@

.venv/demo.done: .venv/torch.done pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[demo]'
	touch $@

.venv/dev.done: .venv/torch.done pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
