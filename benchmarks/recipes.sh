#!/usr/bin/env bash
# Every recipe on one toy with one budget, and their leaderboard (about an hour on one core):
#
#     bash benchmarks/recipes.sh [key=value ...]
#
# The budget is 19,200 target texts read in training, taken from the same 2,600 (96 tokens, T=1), each
# recipe from its own start and at its own learning rate: 600 steps of 32 rows, or as many rows in
# steps of another size. Two cannot spend it: what learns online sees a request once (2,600 texts),
# and a drafter made from nothing spends half of it on raw text of 128 tokens. Measured on the same
# 96 held-out prompts. Killed, the same command goes on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=runs/benchmarks/recipes

run() { # recipe, its settings
    accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
        train.py recipe="$1" run.dir="$folder/$1" data.num_prompts=2600 data.max_new_tokens=96 \
        data.temperature=1 eval.K=4 'eval.temperatures=[0,1]' eval.timing_prompts=0 "${@:2}" "${rest[@]}"
}

rest=("$@")
steps=(trainer.max_steps=600 trainer.batch_size=32)
run distillspec "${steps[@]}"
for recipe in medusa hydra hydrapp eagle eagle3 dflash block_head dspark domino; do
    run $recipe "${steps[@]}"
done
run medusa2 trainer.max_steps=300 trainer.batch_size=32 # in each of its two stages
# a head that has had what the trees leave of the budget
(folder="$folder-base" && run eagle3 trainer.max_steps=562 trainer.batch_size=32)
run gto "model.drafter=$folder-base/eagle3/drafter" trainer.max_steps=150 trainer.batch_size=8
run osd trainer.max_steps=325 trainer.batch_size=8
run fastdraft trainer.max_steps=300 trainer.batch_size=32 method.pretrain_steps=200 \
    method.continue_steps=100
run specdecpp "model.drafter=$folder/distillspec/drafter" trainer.max_steps=300 trainer.batch_size=64
python -m scripts.compare "$folder"/*/report.json script.rows=after,target,prompt_lookup \
    script.out="$folder"
cp "$folder/leaderboard.md" benchmarks/results/recipes.md
