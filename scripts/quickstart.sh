#!/usr/bin/env bash
# Set up and run the main job on the embedded toy: bash scripts/quickstart.sh [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
set_up

# The control would double the training time; method.control=true trains it.
if [[ " $*" != *" method.control="* ]]; then
    set -- method.control=false "$@"
fi
start=$SECONDS
launch_train recipe=distillspec "$@"
cat <<END
main job: $((SECONDS - start)) s

Answers are cut at 96 tokens on purpose, so that this takes minutes: about one in five has no end.
Open the report.html named above in a browser: it shows what was gained and explains every number.
Next, from this folder after 'source .venv/bin/activate':
    python train.py                              the methods, one line each
    python train.py recipe=eagle3 help=true      the settings of one of them
    accelerate launch train.py recipe=distillspec model.target=... model.drafter=... data.prompts=...
                                                 the same for your own target (docs/recipes)
END
