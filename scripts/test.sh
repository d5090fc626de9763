#!/usr/bin/env bash
# Set up, lint and test: bash scripts/test.sh [pytest arguments, such as -m slow or tests/eval]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
set_up dev

export PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # tiny tensors: threads cost more than they give
export HF_HUB_OFFLINE=1                        # a test that reaches for the network fails

failed=
check() { # command ...
    "$@" || failed+="${failed:+, }$1"
}
check ruff check .
check ruff format --check .
check pyright
check lint-imports
if (($# == 0)); then
    set -- -n auto --maxprocesses 4 # one thread each
fi
check python -m pytest "$@"
if ! python -c "import deepspeed" 2>/dev/null; then
    echo "NOT TESTED: DDP, ZeRO and FSDP2 in two processes; bash scripts/deepspeed.sh, then bash scripts/test.sh -m zero"
fi
if [[ -n $failed ]]; then
    echo "FAILED: $failed" >&2
    exit 1
fi
