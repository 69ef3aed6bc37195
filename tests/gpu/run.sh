#!/bin/sh
# The GPU on hardware: the laws of the codec, of saves and pools, of the GPU tier and of its memory in two processes;
# then how fast they are against copies of as much, as JSON lines, one a figure.
#
# Needs: a CUDA device with 4 GiB free (compute capability 8.0 or later: bfloat16), and a Python that has kvtier with its
# extras gpu and dev, a CUDA build of torch and the triton that this torch asks for. ROCm may work and was never tried.
# Takes: less than 8 minutes, most of it compiling kernels (kept in TRITON_CACHE_DIR, else ~/.triton).
#
#   tests/gpu/run.sh                    PYTHON=python3 tests/gpu/run.sh
#   tests/gpu/run.sh laws               only the laws
#   tests/gpu/run.sh speed [PLAN ...]   only the codec's times
#   tests/gpu/run.sh copies             only those of the tier, of loads out of its memory and of saves
set -eu
cd "$(dirname "$0")/../.."
unset TRITON_INTERPRET
python=${PYTHON:-.venv/bin/python}
what=${1:-all}
[ $# -eq 0 ] || shift
"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "no CUDA device")'
PYTHONPATH=.:services${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
case $what in
laws | speed | copies | all) ;;
*) echo "$0: laws, speed, copies or nothing, not $what" >&2; exit 2 ;;
esac
case $what in laws | all) "$python" -m pytest -q -p no:cacheprovider -m gpu tests/gpu ;; esac
case $what in copies | all) "$python" -m tests.gpu.copies ;; esac
case $what in speed | all) "$python" -m tests.gpu.speed "$@" ;; esac
