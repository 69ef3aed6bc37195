#!/bin/sh
# The GPU codec on hardware: its laws, then how fast it is against a copy of the same KV on the device, as JSON lines.
#
# Needs: a CUDA device with 4 GiB free (compute capability 8.0 or later: bfloat16), and a Python that has kvtier with its
# extras gpu and dev, a CUDA build of torch and the triton that this torch asks for. ROCm may work and was never tried.
# Takes: two to three minutes, nearly all of it compiling kernels (kept in TRITON_CACHE_DIR, else ~/.triton).
#
#   tests/gpu/run.sh                    PYTHON=python3 tests/gpu/run.sh
#   tests/gpu/run.sh laws               only the laws
#   tests/gpu/run.sh speed [PLAN ...]   only the times
set -eu
cd "$(dirname "$0")/../.."
unset TRITON_INTERPRET
python=${PYTHON:-.venv/bin/python}
what=${1:-all}
[ $# -eq 0 ] || shift
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "no CUDA device")'
case $what in laws | speed | all) ;; *) echo "$0: laws, speed or nothing, not $what" >&2; exit 2 ;; esac
[ "$what" = speed ] || "$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu
[ "$what" = laws ] || "$python" -m tests.gpu.speed "$@"
