#!/usr/bin/env bash
# Everything that wants a GPU, in calls of under ten minutes each: bench/gpu.sh PART; see bench/gpu.py.
set -eu
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
exec "$PYTHON" bench/gpu.py "$@"
