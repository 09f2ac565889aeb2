# make install   creates .venv when absent and installs raylt into it (with uv when it is on the PATH)
# make run       install, then a federated training on scikit-learn's handwritten digits
# make test      install with the test extra, then ruff, the type checker and the suite
# make mutants   plausible mistakes in the methods, each of which their tests must notice (an hour; WORD=sfd for some)
# make bench     the speed table of docs/speed.md: installs other frameworks in environments of their own (TURNS=1 for fewer runs)
# make fuzz      2,000 malformed inputs (N=10000 for more), each of which must be refused in a line or change nothing
# make soak      tests that take minutes and mostly repeat others: kills at random moments, every hostile client on Ray
# make docs      the documentation as a site, docs/_build/html

PYTHON ?= python3
BIN := .venv/bin
# byte code is written once here: every Ray worker process would otherwise compile all that it imports
export PYTHONDONTWRITEBYTECODE :=

ifneq ($(shell command -v uv),)
INSTALL = uv pip install --quiet --compile-bytecode --python $(BIN)/python
else
INSTALL = $(BIN)/python -m pip install --quiet
endif

# a file of tests on one process; the slow tests in the order of the folders, which begins with those of clusters
FAST = $(BIN)/pytest -m "not slow" -n 2 --dist loadfile
SLOW = $(BIN)/pytest -m slow -n 2 --dist loadfile --no-loadscope-reorder --durations=10
# tests that failed when another file ran beside them
ALONE = $(addprefix tests/actors/,test_jobs.py test_joining.py test_two_nodes.py)

.PHONY: install run test fast mutants bench fuzz soak docs

.venv/bin/python:
	$(PYTHON) -m venv .venv

# a stamp per set of extras: `make run` after `make test` must not install again
.venv/%.stamp: pyproject.toml | .venv/bin/python
	$(INSTALL) -e '.$(if $(filter-out plain,$*),[$*])'
	touch $@

install: .venv/plain.stamp

run: install
	$(BIN)/raylt run

test: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(FAST)
	$(SLOW) $(addprefix --ignore=,$(ALONE))
	$(BIN)/pytest -m slow $(ALONE)

fast: .venv/test.stamp
	$(FAST)

mutants: .venv/test.stamp
	$(BIN)/python tests/mutants/transfers.py 0
	$(BIN)/python tests/mutants/run.py $(WORD)

bench: .venv/test.stamp
	$(BIN)/python benchmarks/speed.py --turns $(or $(TURNS),3)

fuzz: .venv/test.stamp
	RAYLT_FUZZ=$(or $(N),2000) $(BIN)/pytest tests/fuzz -m slow

soak: .venv/test.stamp
	RAYLT_SOAK=1 $(BIN)/pytest -m soak

docs: .venv/docs.stamp
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html
