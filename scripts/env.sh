# Sourced by the other scripts from the repository root: `source scripts/env.sh`, then `set_up [dev]`,
# and `launch_train key=value ...` for a run on this machine.
#
# Makes .venv with the pinned dependencies, on any machine with Python 3.10 or later and a package
# index. PYTHON chooses the interpreter; pip's own settings say where packages come from.

require_python() { # interpreter [the environment that it belongs to, for which PYTHON is not read]
    local version remedy="${2:+remove $2 and }set PYTHON to"
    if ! version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
        echo "error: no Python runs as '$1'; $remedy an interpreter of version 3.10 or later" >&2
        return 2
    fi
    case $version in
        2.* | 3.[0-9])
            echo "error: Python 3.10 or later is needed, '$1' is $version; $remedy a newer one" >&2
            return 2
            ;;
    esac
}

# The stamp is written after pip has finished, so an interrupted installation is taken up again. Its
# second line is where .venv lies: its commands hold that path, so one that was moved is made again.
set_up() { # nothing, or dev for the tools of scripts/test.sh
    local extra=${1:-} python=${PYTHON:-python3} stamp=.venv/.set-up start=$SECONDS wanted quiet=
    local made='' moved='' before folder
    if [[ -e .venv/bin/python ]]; then
        python=.venv/bin/python made=.venv
    fi
    require_python "$python" "$made" || return
    before=$(sed -n 2p "$stamp" 2>/dev/null || true)
    if [[ -n $before && $before != "$(cd ./.venv && pwd -P)" ]]; then
        moved=--clear
    fi
    if [[ -n $moved ]] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        echo "creating .venv ($("$python" --version))"
        if ! "$python" -m venv ${moved:+"$moved"} .venv; then
            echo "error: '$python -m venv .venv' failed; remove .venv, or install your system's venv package" >&2
            return 2
        fi
    fi
    wanted=$(cat pyproject.toml constraints.txt | .venv/bin/python -c \
        'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())') || return
    folder=$(cd ./.venv && pwd -P)
    if [[ $before != "$folder" ]] || ! grep -qsxE "${extra:-(base|dev)} $wanted" "$stamp"; then
        if [[ $(uname) == Linux ]] && ! command -v nvidia-smi >/dev/null; then
            echo "no GPU found: if pip fetches the CUDA build of torch (several GB), stop it and point" \
                "PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS at CPU-only wheels"
        fi
        if [[ ! -t 1 ]]; then
            quiet=--quiet
        fi
        echo "installing into .venv"
        .venv/bin/python -m pip install ${quiet:+"$quiet"} --disable-pip-version-check \
            -c constraints.txt -e ".${extra:+[$extra]}" || return
        printf '%s\n' "${extra:-base} $wanted" "$folder" >"$stamp"
    fi
    echo "installation: $((SECONDS - start)) s"
}

# All that `accelerate config` would ask, so that no earlier answer is needed and none interferes.
launch_train() { # words of train.py
    local cores launch=(--num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no)
    if ! .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        cores=$(.venv/bin/python -c 'import psutil; print(psutil.cpu_count(logical=False) or 1)')
        launch+=(--cpu --num_cpu_threads_per_process "${OMP_NUM_THREADS:-$cores}")
    fi
    .venv/bin/accelerate launch "${launch[@]}" train.py "$@"
}
