#!/usr/bin/env bash
# The first hour on a GPU: train H-Spec and DSpark on SmolLM2 with the paper's loss, measure both, and time drafting.
#
#   benchmarks/gpu_first_hour.sh pack DIR     where there is a network: everything the GPU machine needs, in parts of 55 MB
#   benchmarks/gpu_first_hour.sh unpack DIR   on the GPU machine: put the parts together, install, and say what is there
#   benchmarks/gpu_first_hour.sh answers      the target answers the prompts
#   benchmarks/gpu_first_hour.sh train hspec  (and: train dspark) goes on where it stopped
#   benchmarks/gpu_first_hour.sh measure      tau, speedup, acceptance of both: results/summary.json
#   benchmarks/gpu_first_hour.sh costs        drafting over concurrency 1..128 and lengths 512..4096: results/costs.json
#   benchmarks/gpu_first_hour.sh all          answers, both trainings, measure, costs, one after the other
#
# Each part ends within MINUTES (9), and may be called again to go on. TOY=1 makes everything tiny, so that it can be seen to work on a
# CPU. Every part has been run so, unpack in an environment that had torch alone. Not run on a GPU yet.
#
#   WORK     folder for runs and results (./gpu-first-hour)      DEVICE   cuda, or cpu with TOY=1
#   PYTHON   interpreter with torch 2.10 or newer (python3)      STEPS    optimiser steps of a training
#
# The GPU machine needs Python 3.11 or newer with torch (2.10 or newer); the rest is packed for PACK_PYTHON (3.12), Linux x86_64.
set -euo pipefail

ROOT=$(cd "$(dirname "$0")/.." && pwd)
WORK=${WORK:-$PWD/gpu-first-hour}
PYTHON=${PYTHON:-python3}
MINUTES=${MINUTES:-9}
PACK_PYTHON=${PACK_PYTHON:-3.12}
if [ "${TOY:-}" = 1 ]; then
    DEVICE=${DEVICE:-cpu} STEPS=${STEPS:-4} PROMPTS=12 BATCH_TOKENS=256 LIMIT=1 MAX_TOKENS=12 TASKS=math,qa
    CONCURRENCY=1,2 LENGTHS=32,64 PRECISION=fp32 REPEATS=1
else
    DEVICE=${DEVICE:-cuda} STEPS=${STEPS:-3000} PROMPTS=10000 BATCH_TOKENS=16384 LIMIT=6 MAX_TOKENS=256 TASKS=families
    CONCURRENCY=1,2,4,8,16,32,64,128 LENGTHS=512,1024,2048,4096 PRECISION=bf16 REPEATS=15
fi
export HSPEC_CACHE=${HSPEC_CACHE:-$WORK/cache}
hspec() { "$PYTHON" -m hspec.cli "$@"; }

# Runs a command for at most MINUTES; then it gets Ctrl-C, and saves.
within() { timeout --foreground -s INT $((MINUTES * 60)) "$@" || [ $? -eq 124 ] || [ $? -eq 130 ]; }

pack() {
    local to=$1 staging
    mkdir -p "$to"
    staging=$(mktemp -d)
    mkdir -p "$staging/wheels"
    HSPEC_CACHE=${PACK_FROM:-$HOME/.cache/hspec} "$PYTHON" "$ROOT/benchmarks/gpu_pack.py" "$staging"
    "$PYTHON" -m pip wheel --quiet --no-deps -w "$staging/wheels" "$ROOT"
    # torch is the machine's own; of the rest, wheels for its Python.
    "$PYTHON" -m pip download --quiet --only-binary=:all: --no-deps --python-version "$PACK_PYTHON" --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any -d "$staging/wheels" -r <(grep -vE '^(torch|nvidia|triton|setuptools|pytest|hypothesis|ruff|mypy|coverage|iniconfig|pluggy|ast_serialize|librt)' "$ROOT/constraints.txt")
    tar -C "$staging" -c . | split -b 55m - "$to/part-"
    rm -rf "$staging"
    ls -l "$to"
}

unpack() {
    mkdir -p "$WORK"
    cat "$1"/part-* | tar -C "$WORK" -x
    "$PYTHON" -m pip install --quiet --no-index --no-deps "$WORK"/wheels/*.whl
    "$PYTHON" - <<'PY'
import torch, transformers
print("torch", torch.__version__, "transformers", transformers.__version__, "device", torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
PY
    hspec info smollm2
}

settings() {
    mkdir -p "$WORK"
    local data='[sharegpt]'
    [ -f "$WORK/prompts.jsonl" ] && data="[$WORK/prompts.jsonl]"
    cat > "$WORK/settings.yaml" <<YAML
target: smollm2
data: $data
max_prompts: $PROMPTS
answers: {max_tokens: $([ "${TOY:-}" = 1 ] && echo 24 || echo 256), batch: $([ "${TOY:-}" = 1 ] && echo 6 || echo 512)}
train:
  steps: $STEPS
  batch_tokens: $BATCH_TOKENS
  max_tokens: 512
  learning_rate: 6.0e-4
  precision: $PRECISION
  warm_kl_until: 0.1        # 0.1 CE + 0.9 TV, the paper's loss, from a fifth of the steps on
  tv_from: 0.2
  growth:
    - {start: 0.0, slots: 7, density: 0.5}
  save_minutes: 2
  validate_minutes: 2
YAML
}

answers() {
    settings
    within "$PYTHON" - "$WORK/settings.yaml" "$DEVICE" <<'PY'
import sys
from pathlib import Path
from hspec.training.build import training_target
from hspec.training.data import prepare_data
from hspec.training.job import read_job
job = read_job(Path(sys.argv[1]))
prepare_data(job, training_target(job, sys.argv[2]), print)
PY
}

train() {
    settings
    local out=$WORK/$1
    if [ -f "$out/run.yaml" ]; then
        within "$PYTHON" -m hspec.cli train --out "$out" --resume --device "$DEVICE"
    else
        within "$PYTHON" -m hspec.cli train --config "$WORK/settings.yaml" --method "$1" --out "$out" --device "$DEVICE"
    fi
    tail -n 1 "$out/log.jsonl"
}

measure() {
    within "$PYTHON" -m hspec.cli eval -d "hspec=$WORK/hspec" -d "dspark=$WORK/dspark" --tasks "$TASKS" --limit "$LIMIT" \
        --max-tokens "$MAX_TOKENS" --temperature 0 --temperature 1 --device "$DEVICE" --out "$WORK/results"
    hspec report "$WORK/results" --training "$WORK/hspec" --training "$WORK/dspark"
}

costs() {
    mkdir -p "$WORK/results"
    hspec costs --methods hspec,dspark,dflash,dflash-kv --concurrency "$CONCURRENCY" --lengths "$LENGTHS" --repeats "$REPEATS" \
        --device "$DEVICE" --memory 60 --json > "$WORK/results/costs.json"
    echo "$WORK/results/costs.json"
}

case ${1:-} in
    pack | unpack) "$1" "${2:?give a folder}" ;;
    train) train "${2:?hspec or dspark}" ;;
    answers | measure | costs) "$1" ;;
    all) answers && train hspec && train dspark && measure && costs ;;
    *) sed -n '2,20p' "$0" && exit 2 ;;
esac
