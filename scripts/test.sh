#!/usr/bin/env bash
# Set up, lint and test: bash scripts/test.sh [pytest arguments, such as -m slow or tests/eval]
#
# The linters run beside the tests; what they say stands below.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
set_up dev

export PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # tiny tensors: threads cost more than they give
export HF_HUB_OFFLINE=1                        # a test that reaches for the network fails

beside=$(mktemp -d)
trap 'rm -rf "$beside"' EXIT
check() { # command ...; a program in the background would ignore SIGINT
    env --default-signal=INT "$@" || echo "$1" >>"$beside/failed"
}
{
    check ruff check .
    check ruff format --check .
    check pyright
    check lint-imports
} >"$beside/said" 2>&1 &
linters=$!
if (($# == 0)); then
    # one thread each; a file goes to one process, which makes its runs once
    set -- -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
fi
tests=passed
python -m pytest "$@" || tests=failed
wait "$linters" || true
cat "$beside/said"
if [[ $tests == failed ]]; then
    echo python >>"$beside/failed"
fi
if ! python -c "import deepspeed" 2>/dev/null; then
    echo "NOT TESTED: DDP, ZeRO and FSDP2 in two processes; bash scripts/deepspeed.sh, then bash scripts/test.sh -m zero"
fi
if [[ -e $beside/failed ]]; then
    echo "FAILED: $(paste -sd, "$beside/failed" | sed 's/,/, /g')" >&2
    exit 1
fi
