# Everything is set up by the first command that needs it: a virtual environment in .venv with the versions in
# constraints.txt. Later runs reinstall only when pyproject.toml or constraints.txt changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# The oldest supported transformers and its own dependencies, in a folder that comes first on the path.
OLDEST_TRANSFORMERS := $(VENV)/transformers-5.17.0

.PHONY: help demo data quick test check format bench test-gpu test-hf test-machine-code docs dist seeds-report clean
help:
	@echo "make demo      run dilated attention on a real text, next to dense attention"
	@echo "make quick     run the tests for before a commit, in about 2 minutes on 2 cores"
	@echo "make test      run all tests that need no GPU, in 8 to 12 minutes on 2 cores"
	@echo "make check     ruff and mypy"
	@echo "make format    let ruff format and fix the sources"
	@echo "make bench     measure on this machine's CPU; ARGS=\"--out FILE\" writes the results"
	@echo "make seeds-report  reproduce the seed reports and write docs/seeds.md, in up to 27 minutes"
	@echo "make test-gpu  run the GPU tests with the python3 that holds torch, without installing"
	@echo "make test-hf   run the tests of transformers with its oldest supported and its newest version"
	@echo "make test-machine-code  compare the kernels' machine code with the numbers of Triton 3.9.0"
	@echo "make data      fetch the genomes of benchmarks into data/, 29 MB of a download of 97 MB"
	@echo "make docs      build the documentation into build/docs and check its links"
	@echo "make dist      build the wheel and the source distribution into dist/ and check them"
	@echo "make clean     delete the virtual environment"

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/dilated-attention demo $(ARGS)

quick: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m quick $(ARGS)

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not gpu" $(ARGS)

$(OLDEST_TRANSFORMERS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@ transformers==5.17.0
	@touch $@

test-hf: $(INSTALLED) $(OLDEST_TRANSFORMERS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "hf or not hf" tests/hf $(ARGS)
	OMP_NUM_THREADS=1 PYTHONPATH=$(OLDEST_TRANSFORMERS) $(BIN)/python -m pytest -n 2 -m "hf or not hf" tests/hf $(ARGS)

test-machine-code: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m machine_code $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)
	$(BIN)/python benchmarks/cpu.py $(ARGS)

seeds-report: $(INSTALLED)
	$(BIN)/python benchmarks/seeds_report.py --out benchmarks/results/seeds.json --page docs/seeds.md $(ARGS)

data: $(INSTALLED)
	$(BIN)/python benchmarks/fetch_data.py $(ARGS)

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -b html -c docs . build/docs
	$(BIN)/python docs/check_site.py build/docs

$(VENV)/.dist: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dist]'
	@touch $@

dist: $(VENV)/.dist
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

test-gpu:
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests $(ARGS)

clean:
	rm -rf $(VENV)
