#!/usr/bin/env bash
# Debian's Chromium, in which the tests look at the report: bash scripts/chromium.sh
set -euo pipefail
if command -v chromium >/dev/null; then
    exit
fi
as_root=()
if ((EUID != 0)); then
    as_root=(sudo)
fi
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
