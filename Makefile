# make run     export the embedded checkpoint and draw a sheet of pictures (make run PROMPT="an owl": one)
# make test    style and tests, offline after the packages are installed
# make parity FAMILY=sd1|sd2|sdxl
#              compare with diffusers at full size (about an hour on two cores)
# make bench   time the embedded checkpoint beside diffusers and OpenVINO: build/bench/emoji.{json,md,png}
#              CHECKPOINT=FOLDER [SIZES=512x512,768x512] [BENCH_FLAGS="--num_steps 20"]: another one
#              FULL=1: then also the full-size model of FAMILY, beside KerasCV too (75 minutes on two cores)
# make peers   only the environments of diffusers and OpenVINO
# Each builds its own virtual environment first.

# The newest that is there and runs.
PYTHON ?= $(shell for v in 3.13 3.12 3.11; do \
	python$$v -c "import ensurepip" > /dev/null 2>&1 && echo python$$v && break; done)
FAMILY ?= sd1
CHECKPOINT ?= checkpoints/emoji
SIZES ?=
FULL ?=
FULL_SIZES ?= 256x256,512x512
FULL_FLAGS ?= --jit_compile --num_steps 20 --guidance_scale 7.5 --warmup 0 --repeats 1
BENCH_FLAGS ?= --repeats 3 --rounds 2
# -cpu: --target cpu; bfloat16 where the processor has it
VARIANTS ?= float32 float32-cpu $(shell grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo && echo bfloat16)
PROMPT ?=
PROMPTS = "a red apple on a blue background" "a panda on a red background" "sunflower, purple background" \
	"laughing face with tears on black" "an owl" "a fox on a green background" "a slice of pizza on a gray background" \
	"octopus on a yellow background"

comma := ,
BENCH = build/bench/$(notdir $(CHECKPOINT))$(if $(SIZES),-$(subst $(comma),-,$(SIZES)))
BENCH_EXPORTS = $(VARIANTS:%=$(BENCH)-%)

.PHONY: run test parity peers bench bench-table clean

run: .venv/run.stamp exports/emoji.stamp
	.venv/bin/python -m pipeline.generate $(if $(PROMPT),"$(PROMPT)",$(PROMPTS)) --output outputs --sheet outputs/sheet.png

# Anew whenever the checkpoint or the contract has changed; what an older toolkit made cannot be added to.
exports/emoji.stamp: $(wildcard checkpoints/emoji/*/*.safetensors) pipeline/manifest.py | .venv/run.stamp
	.venv/bin/python -m pipeline.manifest exports/emoji > /dev/null 2>&1 || rm -rf exports/emoji
	.venv/bin/python serialize_savedmodels.py
	touch $@

test: .venv/test.stamp
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder

bench: .venv/test.stamp peers
	$(MAKE) bench-table
	$(if $(FULL),$(MAKE) build/bench/$(FAMILY)/model_index.json)
	$(if $(FULL),$(MAKE) bench-table CHECKPOINT=build/bench/$(FAMILY) SIZES=$(FULL_SIZES) \
		BENCH_FLAGS="$(FULL_FLAGS) $(if $(filter sd1,$(FAMILY)),--kerascv --random_weights)")

bench-table: $(BENCH_EXPORTS:%=%/manifests/1.json)
	.venv/bin/python benchmark.py --models $(subst $() ,$(comma),$(strip $(BENCH_EXPORTS))) --all_sizes --sampler ddim \
		--peers diffusers,openvino --checkpoint $(CHECKPOINT) $(BENCH_FLAGS) \
		--json $(BENCH).json --markdown $(BENCH).md --plot $(BENCH).png

# Anew whenever what is exported may have changed.
$(BENCH)-%/manifests/1.json: $(wildcard models/*.py) pipeline/export.py
	rm -rf $(BENCH)-$*
	.venv/bin/python serialize_savedmodels.py --checkpoint $(CHECKPOINT) --output_dir $(BENCH)-$* \
		--dtype $(firstword $(subst -, ,$*)) $(if $(filter %-cpu,$*),--target cpu) $(if $(SIZES),--sizes $(SIZES))

build/bench/$(FAMILY)/model_index.json:
	.venv-peers/bin/python tests/peers/write_checkpoint.py build/bench/$(FAMILY) --family $(FAMILY) \
		--tokenizer checkpoints/emoji/tokenizer

peers: .venv-peers/run.stamp .venv-openvino/run.stamp

parity: .venv/test.stamp .venv-peers/run.stamp
	.venv/bin/python tests/parity.py --peers .venv-peers/bin/python --family $(FAMILY)

.venv/bin/python:
	$(if $(PYTHON),,$(error no Python 3.11, 3.12 or 3.13 was found: make PYTHON=/path/to/python))
	$(PYTHON) -m venv .venv

.venv/run.stamp: requirements.txt | .venv/bin/python
	.venv/bin/python -m pip install --quiet -r requirements.txt
	touch $@

.venv/test.stamp: tests/requirements.txt requirements-serving.txt .venv/run.stamp
	.venv/bin/python -m pip install --quiet -r tests/requirements.txt -r requirements-serving.txt
	touch $@

.venv-peers/run.stamp: pipeline/benchmark/workers/diffusers-requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet -r pipeline/benchmark/workers/diffusers-requirements.txt
	touch $@

# It sees the packages of .venv-peers behind its own: torch and diffusers once, in one version.
.venv-openvino/run.stamp: pipeline/benchmark/workers/openvino-requirements.txt .venv-peers/run.stamp
	$(PYTHON) -m venv .venv-openvino
	.venv-openvino/bin/python -m pip install --quiet -r pipeline/benchmark/workers/openvino-requirements.txt
	.venv-peers/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$(.venv-openvino/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/peers.pth"
	touch $@

clean:
	rm -rf .venv .venv-peers .venv-openvino exports outputs build/bench build/peers
