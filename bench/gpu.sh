#!/usr/bin/env bash
# Everything that wants a GPU, in calls of under ten minutes each:
#   bench/gpu.sh           steps against open_clip, then a training run
#   bench/gpu.sh llip      Llip's score to 32k texts, steps with mixture tokens and with six captions
#   bench/gpu.sh scenes    the papers' claims on drawn scenes at s16; call again to go on where it stopped
#   bench/gpu.sh photos    the presets on Flickr8k at s16; call again to go on where it stopped
#   bench/gpu.sh prolip    what Gaussians cost, then ProLIP on scenes and on photos at s16; call again to go on
#   bench/gpu.sh sycoca    what captions and masked pictures cost, then SyCoCa on photos and on scenes at s16, and pages
#                          of captions and reconstructions to look at; call again to go on
#   bench/gpu.sh engines   a GPU against the CPU (varlen attention, checkpointing, compiling), engines, profile of a step
#   bench/gpu.sh loss      peak memory of the pair loss alone, to 64k texts, in blocks and all at once
#   bench/gpu.sh plan      what `kiloword plan` says of memory against the allocator, and how long training stands for a
#                          save
# Settings: PYTHON, OUT (folder of the results), DATA (folder that holds flickr8k and coco_hier), BUDGET (seconds in
# all), WORKERS.
# Results: $OUT/gpu-PART.jsonl, one line for the machine, then one a run; what is missing is skipped with a sentence.
set -u
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
OUT=${OUT:-bench/results}
DATA=${DATA:-../shared/data}
BUDGET=${BUDGET:-560}
WORKERS=${WORKERS:-$(($(nproc) > 2 ? $(nproc) - 2 : 0))}
PART=${1:-steps}
RESULTS=$OUT/gpu-$PART.jsonl
SCRATCH=$(mktemp -d)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
trap 'rm -rf "$SCRATCH"' EXIT

machine() {
  "$PYTHON" - <<'END'
import json, subprocess, torch

git = ["git", "-c", "safe.directory=*"]
commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip() or None
changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
card = torch.cuda.get_device_properties(0)
print(json.dumps({
    "card": card.name, "memory_gib": round(card.total_memory / 2**30, 1), "torch": torch.__version__,
    "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "commit": commit,
    "uncommitted_changes": bool(changed) if commit else None,
}))
END
}

# One line of results: the last JSON object that the run printed, or why there is none.
record() { # NAME SECONDS STATUS
  "$PYTHON" - "$SCRATCH/stdout" "$SCRATCH/stderr" "$@" >>"$RESULTS" <<'END'
import json, sys

stdout, stderr, name, seconds, status = sys.argv[1:]
text = open(stdout, errors="replace").read()
lines = text.splitlines(keepends=True)
result = None
for start in (i for i in reversed(range(len(lines))) if lines[i].startswith("{")):
    try:
        result, _ = json.JSONDecoder().raw_decode("".join(lines[start:]))
        break
    except ValueError:
        continue
row = {"run": name, "seconds": int(seconds), "status": int(status), "result": result}
if status != "0":
    said = [line.strip() for line in open(stderr, errors="replace") if line.strip()]
    row["error"] = "ran out of time" if status in ("124", "137") else (said or ["nothing was said"])[-1][:500]
print(json.dumps(row))
END
}

left() { echo $((BUDGET - SECONDS)); }

run() { # NAME LIMIT COMMAND...
  local name=$1 limit=$2 began status
  shift 2
  [ "$limit" -gt "$(left)" ] && limit=$(left)
  if [ "$limit" -lt 10 ]; then
    echo "skipped: $name, the $BUDGET seconds are used up"
    return
  fi
  echo "== $name (at most $limit s)"
  began=$SECONDS
  timeout --kill-after=5 "$limit" "$@" >"$SCRATCH/stdout" 2>"$SCRATCH/stderr"
  status=$?
  record "$name" $((SECONDS - began)) "$status"
  tail -n 1 "$RESULTS"
}

step() { # SIZE BATCH FLAGS...
  local name="step $*" size=$1 batch=$2
  shift 2
  run "$name" 150 "$PYTHON" bench/step.py --size "$size" --device cuda --batch "$batch" \
    --dtype bf16 --steps 20 --warmup 5 "$@"
}

train() {
  if [ ! -d "$DATA/flickr8k/train" ]; then
    echo "skipped: training, there is no folder $DATA/flickr8k/train; set DATA"
    return
  fi
  local val=()
  [ -d "$DATA/flickr8k/dev" ] && val=(--val "$DATA/flickr8k/dev")
  run "train siglip s16 30 epochs" 200 "$PYTHON" -m kiloword train siglip --size s16 \
    --data "$DATA/flickr8k/train" "${val[@]}" --epochs 30 --out "$SCRATCH/s16" --precision bf16 --workers "$WORKERS"
  if [ -f "$SCRATCH/s16/metrics.jsonl" ]; then
    cp "$SCRATCH/s16/metrics.jsonl" "$OUT/s16-metrics.jsonl"
  fi
  if [ -d "$SCRATCH/s16/model" ] && [ -d "$DATA/flickr8k/dev" ]; then
    run "eval s16 retrieval" 60 "$PYTHON" -m kiloword eval "$SCRATCH/s16/model" retrieval \
      --data "$DATA/flickr8k/dev" --json "$OUT/s16-retrieval.json"
  fi
}

case $PART in
  steps | llip | scenes | photos | prolip | sycoca | engines | loss | plan) ;;
  *)
    echo "unknown part $PART: expected steps, llip, scenes, photos, prolip, sycoca, engines, loss or plan" >&2
    exit 2
    ;;
esac

# A missing card is an answer, not a failure: the caller may try this on any machine.
if ! machine >"$SCRATCH/machine" 2>"$SCRATCH/stderr"; then
  echo "skipped: no GPU that torch can use ($(tail -n 1 "$SCRATCH/stderr"))"
  exit 0
fi
mkdir -p "$OUT"
tee "$RESULTS" <"$SCRATCH/machine"

steps() {
  # The figures that are quoted come first, so that a slow machine loses only the others.
  step b32 1024
  step b32 1024 --compile
  step b16 512
  step l14 256
  step b32 256 --captions 6
  train
  step b16 512 --compile
  step l14 256 --compile
  step b32 256 --captions 6 --compile
  step b32 256
  step b32 32
  step b16 1024
  step l14 512
}

llip() {
  run "llip pair loss" 150 "$PYTHON" bench/llip.py --device cuda --images 1024 --texts 1024 4096 16384 32768
  run "llip pair loss K 64" 100 "$PYTHON" bench/llip.py --device cuda --images 1024 --k 64 --texts 1024 4096 16384
  run "tokens b32" 100 "$PYTHON" bench/tokens.py --size b32 --batch 512 --dtype bf16 --device cuda
  run "six captions b32" 100 "$PYTHON" bench/captions.py --size b32 --batch 256 --dtype bf16 --device cuda
  run "six captions b16" 100 "$PYTHON" bench/captions.py --size b16 --batch 128 --dtype bf16 --device cuda
}

loss() {
  run "loss memory" 200 "$PYTHON" bench/loss.py --device cuda --images 1024 --texts 4096 8192 16384 32768 65536
  run "loss memory, heads" 200 "$PYTHON" bench/loss.py --device cuda --images 1024 --texts 4096 16384 \
    --head gaussian contextual --loss softmax sigmoid matching
}

plan() {
  run "plan" 400 "$PYTHON" bench/plan.py --device cuda
  run "save" 150 "$PYTHON" bench/save.py --device cuda --sizes b32 l14
}

# Experiments resume by the same command: what the budget cuts is done by the next call.
experiment() { # NAME FLAGS...
  local name=$1
  shift
  run "experiment $name" "$(left)" "$PYTHON" -m "kiloword.experiments.$name" --out "$OUT/$name" --size s16 \
    --device cuda --workers "$((WORKERS / 2))" --jobs 2 "$@"
}

scenes() {
  experiment llip --steps 3000
  experiment clip_c --steps 3000 --scenes inner
  experiment fff --steps 3000
  experiment shortcut --steps 2000 --seeds 0
}

photos() {
  experiment flickr --data "$DATA/flickr8k/train" --val "$DATA/flickr8k/dev" --mined --seeds 0 1 2 --batch 256 \
    --steps 700
}

prolip() {
  # Measured once: a later call has the card for the experiments.
  if ! grep -qs '"run": "prolip pair loss".*"status": 0' "$OUT/gpu-prolip-cost.jsonl"; then
    run "prolip step b32" 100 "$PYTHON" bench/prolip.py --size b32 --batch 512 --dtype bf16 --device cuda --steps 15
    run "prolip step b16" 120 "$PYTHON" bench/prolip.py --size b16 --batch 256 --dtype bf16 --device cuda --steps 15
    run "prolip pair loss" 100 "$PYTHON" bench/prolip_pairs.py --device cuda --pairs 1024 2048 4096 8192 16384 \
      --chunk 0 1024 --repeat 10
    cp "$RESULTS" "$OUT/gpu-prolip-cost.jsonl"
  fi
  if [ -d "$DATA/flickr8k/train" ] && [ -d "$DATA/flickr8k/dev" ] && [ -d "$DATA/coco_hier/dev" ]; then
    experiment prolip_photos --data "$DATA/flickr8k/train" --val "$DATA/flickr8k/dev" --chains "$DATA/coco_hier/dev" \
      --seeds 0 1 2 --batch 256 --steps 1500
  else
    echo "skipped: photos, there are no folders flickr8k/train, flickr8k/dev and coco_hier/dev in $DATA; set DATA"
  fi
  experiment prolip --seeds 0 1 2 --steps 3000
}

# Pages of what the finished models of an experiment write and paint.
pages() { # EXPERIMENT DATA
  local folder=$OUT/$1 data=$2 model page
  for model in "$folder"/{coca,sycoca}-0-*/model; do
    [ -d "$model" ] || continue
    page=$folder/$(basename "$(dirname "$model")")
    if [ ! -f "$page-captions.html" ]; then
      run "captions $page" 120 "$PYTHON" -m kiloword eval "$model" caption --data "$data" --device cuda \
        --html "$page-captions.html" --json "$page-captions.json"
    fi
    [[ $model == */sycoca-* ]] || continue
    if [ ! -f "$page-reconstruction.html" ]; then
      run "reconstruction $page" 120 "$PYTHON" -m kiloword eval "$model" reconstruction --data "$data" --device cuda \
        --html "$page-reconstruction.html" --json "$page-reconstruction.json"
    fi
  done
}

# What the decoders of a finished model do with three photos and one caption of each.
inside() { # EXPERIMENT SHARD
  local model=("$OUT/$1"/sycoca-0-*/model) out=$OUT/$1/inside names=() texts=() name
  [ -d "${model[0]}" ] && [ -f "$2" ] && [ ! -d "$out" ] || return 0
  mapfile -t names < <(tar -tf "$2" | grep -v '\.txt$' | head -n 3)
  for name in "${names[@]}"; do
    tar -xf "$2" -C "$SCRATCH" "$name" "${name%.*}.txt"
    texts+=("$(head -n 1 "$SCRATCH/${name%.*}.txt")")
  done
  run "inside $1" 60 "$PYTHON" -m kiloword score "${model[0]}" --images "${names[@]/#/$SCRATCH/}" \
    --texts "${texts[@]}" --explain "$out" --device cuda
}

sycoca() {
  if ! grep -qs '"run": "caption loss".*"status": 0' "$OUT/gpu-sycoca-cost.jsonl"; then
    run "sycoca steps b32" 150 "$PYTHON" bench/sycoca.py --size b32 --batch 256 --dtype bf16 --device cuda
    run "sycoca steps b32, five captions" 150 "$PYTHON" bench/sycoca.py --size b32 --batch 64 --captions 5 \
      --dtype bf16 --device cuda
    run "coca step b32 against open_clip" 100 "$PYTHON" bench/coca.py --batch 256 --dtype bf16 --device cuda --steps 15
    run "caption loss" 60 "$PYTHON" bench/words.py --dtype bf16 --device cuda --time --repeat 10
    cp "$RESULTS" "$OUT/gpu-sycoca-cost.jsonl"
  fi
  if [ -d "$DATA/flickr8k/train" ] && [ -d "$DATA/flickr8k/dev" ]; then
    experiment sycoca_photos --data "$DATA/flickr8k/train" --val "$DATA/flickr8k/dev" --seeds 0 --batch 256 --steps 3000
    pages sycoca_photos "$DATA/flickr8k/dev"
    inside sycoca_photos "$DATA/flickr8k/dev/0.tar"
  else
    echo "skipped: photos, there are no folders flickr8k/train and flickr8k/dev in $DATA; set DATA"
  fi
  experiment sycoca --seeds 0 1 2 --steps 3000
  pages sycoca "scenes:test?n=500&captions=5"
}

engines() {
  local ranks size
  ranks=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
  run "device against CPU, tiny" 120 "$PYTHON" bench/device_check.py --device cuda --size tiny --batch 32
  run "device against CPU, b32" 240 "$PYTHON" bench/device_check.py --device cuda --size b32 --batch 32 --profile
  for size in b32 l14; do
    run "engines $size" 150 "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
      bench/engines.py --device cuda --dtype bf16 --size "$size" --batch 128 --steps 10
  done
}

"$PART"
echo "results: $RESULTS"
