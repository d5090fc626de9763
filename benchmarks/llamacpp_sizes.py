"""From which size of the target on a drafter pays in llama.cpp: what a round costs there.

    python -m benchmarks.llamacpp_sizes [tokenizer=runs/smollm2.gguf] [kind=Q4_1,Q4_0]
        [sizes=0.13,0.36,1.1,3.0] [out=benchmarks/results/llamacpp_sizes.json]

Llama targets of drawn weights with an EAGLE-3 head each (float16, 8,192 tokens), on all cores: the
cost of a forward does not depend on the weights. For forwards on 1, 2, 3, 4, 5 and 8 tokens:
milliseconds of verifying, of drafting, and the tokens per round at which the round is as fast as
plain decoding. How many a trained head reaches is not measured here; `computed` is the speed-up at
2 tokens per round and at 3.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader

from benchmarks.gguf_files import Size, drawn_head, drawn_target
from engines.llamacpp_run import Drafting, seconds_by_rows
from phases.exits import fail
from phases.run import provenance
from trainer.config import asks_for_help, parse_overrides
from trainer.errors import require
from trainer.files import write_json

SIZES = {  # billions of parameters with the vocabulary of SmolLM2
    "0.13": Size(576, 30, 1536, 3),
    "0.36": Size(960, 32, 2560, 5),
    "1.1": Size(2048, 22, 5632, 4),
    "3.0": Size(3072, 28, 8192, 8),
}
DEFAULTS = {
    "tokenizer": "runs/smollm2.gguf", "kind": "Q4_1,Q4_0", "sizes": ",".join(SIZES),
    "out": "benchmarks/results/llamacpp_sizes.json",
}  # fmt: skip


def measure(size: Size, tokenizer: Path, kind: GGMLQuantizationType) -> dict[str, object]:
    vocabulary = len(GGUFReader(tokenizer).fields["tokenizer.ggml.tokens"].contents())
    prompts = np.random.default_rng(2).integers(3, 8192, (1, 64)).tolist()
    with tempfile.TemporaryDirectory() as scratch:
        target, head = Path(scratch) / "target.gguf", Path(scratch) / "head.gguf"
        drawn_target(target, size, tokenizer, kind)
        drawn_head(head, size, tokenizer, draft_vocab=8192)
        stored = target.stat().st_size
        found = seconds_by_rows(target, Drafting(("draft-eagle3",), head, 1), prompts)
    token = found[1][0]
    needed = {rows: sum(spent) / token for rows, spent in found.items()}
    return {
        "parameters": size.parameters(vocabulary),
        "file_bytes": stored,
        "ms_by_rows": {
            rows: [round(1000 * part, 2) for part in spent] for rows, spent in found.items()
        },
        "tokens_per_round_needed": {rows: round(one, 2) for rows, one in needed.items()},
        "computed": {
            f"{tokens} tokens per round": {
                rows: round(tokens / one, 2) for rows, one in needed.items() if rows >= tokens
            }
            for tokens in (2, 3)
        },
    }


def main(arguments: list[str]) -> int:
    if arguments and asks_for_help(arguments):
        print(__doc__)
        return 0
    try:
        given = DEFAULTS | parse_overrides(arguments, [*DEFAULTS], DEFAULTS)
        kinds = [one.name for one in GGMLQuantizationType]
        types = given["kind"].split(",")
        require(set(types) <= {*kinds}, "kind", "be types of GGUF tensors", given["kind"])
        chosen = given["sizes"].split(",")
        unknown = [one for one in chosen if one not in SIZES]
        require(not unknown, "sizes", f"be of {', '.join(SIZES)}", given["sizes"])
        result = provenance(["benchmarks.llamacpp_sizes", *arguments])
        for kind, name in itertools.product(types, chosen):
            found = measure(SIZES[name], Path(given["tokenizer"]), GGMLQuantizationType[kind])
            result[f"{name} {kind}"] = found
            print(name, kind, json.dumps(found), flush=True)
            write_json(Path(given["out"]), result)
    except Exception as error:
        return fail(error, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
