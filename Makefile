# make run     export the embedded checkpoint and draw a sheet of pictures (make run PROMPT="an owl": one)
# make test    style and tests, offline after the packages are installed
# make parity FAMILY=sd1|sd2|sdxl
#              compare with diffusers at full size (about an hour on two cores)
# make bench   time the embedded checkpoint, with and without XLA
# Each builds its own virtual environment first.

PYTHON ?= python3.11
FAMILY ?= sd1
PROMPT ?=
PROMPTS = "a red apple on a blue background" "a panda on a red background" "sunflower, purple background" \
	"laughing face with tears on black" "an owl" "a fox on a green background" "a slice of pizza on a gray background" \
	"octopus on a yellow background"

.PHONY: run test parity bench clean

run: .venv/run.stamp
	test -e exports/emoji/manifests/1.json || .venv/bin/python serialize_savedmodels.py
	.venv/bin/python -m pipeline.generate $(if $(PROMPT),"$(PROMPT)",$(PROMPTS)) --output outputs --sheet outputs/sheet.png

test: .venv/test.stamp
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m pytest tests -n 2 --dist loadfile

bench: .venv/run.stamp
	test -e exports/emoji/manifests/1.json || .venv/bin/python serialize_savedmodels.py
	.venv/bin/python benchmark.py --models exports/emoji

parity: .venv/test.stamp .venv-peers/run.stamp
	.venv/bin/python tests/parity.py --peers .venv-peers/bin/python --family $(FAMILY)

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/run.stamp: requirements.txt | .venv/bin/python
	.venv/bin/python -m pip install --quiet -r requirements.txt
	touch $@

.venv/test.stamp: tests/requirements.txt requirements-serving.txt .venv/run.stamp
	.venv/bin/python -m pip install --quiet -r tests/requirements.txt -r requirements-serving.txt
	touch $@

.venv-peers/run.stamp: tests/peers/requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet -r tests/peers/requirements.txt
	touch $@

clean:
	rm -rf .venv .venv-peers exports outputs
