#!/usr/bin/env bash
# DeepSpeed into .venv, and what it compiles for CPUs at its first use: bash scripts/deepspeed.sh
#
# Needs a C++ compiler; minutes the first time, seconds afterwards. Processes that begin together
# would compile together, and one that dies on the way leaves a lock for which all others wait.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
set_up dev

if ! command -v "${CXX:-g++}" >/dev/null; then
    echo "error: DeepSpeed compiles at its first use and there is no ${CXX:-g++}: install a C++ compiler" >&2
    exit 2
fi
export PATH="$PWD/.venv/bin:$PATH" DS_BUILD_OPS=0
python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,deepspeed]"
timeout 900 python - <<'END'
import contextlib
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from torch.utils.cpp_extension import _get_build_directory

if get_accelerator().device_name() == "cpu":
    folder = Path(_get_build_directory("deepspeed_shm_comm", verbose=False))
    with contextlib.suppress(FileNotFoundError):
        (folder / "lock").unlink()  # of a process that died
    get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
END
echo "deepspeed: ready"
