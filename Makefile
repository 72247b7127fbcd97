# Two commands do everything on a fresh machine: `make bench` and `make test`.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: bench test clean

bench: $(STAMP)
	$(VENV)/bin/dspark bench

test: $(STAMP)
	$(VENV)/bin/python -m pytest -n auto

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else f"dspark-runtime needs Python 3.11 or newer, found {v[0]}.{v[1]}; set PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $(STAMP)

clean:
	rm -rf $(VENV)
