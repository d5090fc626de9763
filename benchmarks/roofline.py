"""What one EAGLE-3 step costs on a GPU by part, computed and not measured: a roofline.

    python -m benchmarks.roofline

The target and the draft head are those of `benchmarks.gpu_training`: 8B, 32,000 draft tokens, seven
steps. A part takes the longer of its products at the peak rate of the device and its bytes at the
peak bandwidth; parts run one after the other, so that the sum is the least time of a step, and its
utilisation the most, with these passes. Assumptions: bfloat16; a batch of 8,192 tokens, all of them
supervised; causal attention by a fused kernel; elementwise passes read or write a tensor of the
layer's width 12 times a layer and of its inner width 5 times, three times as often with a backward
pass; those over a vocabulary are fused: logits are written once and read twice, and so is their
gradient; AdamW moves 28 bytes a parameter. Launches, padding and recomputation cost nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu import SHAPES
from benchmarks.gpu_training import LENGTHS, METHODS, PEAK_FLOPS, TOKENS

DEVICE, BANDWIDTH = "H100", 3.35e12  # bytes a second
CAPTURES = 3
PASSES, INNER_PASSES, LOGIT_PASSES, GRADIENT_PASSES = 12, 5, 3, 3


@dataclass
class Part:
    name: str
    flops: float
    bytes_moved: float
    useful: bool = True  # its FLOPs are products that no implementation can leave out

    @property
    def seconds(self) -> float:
        return max(self.flops / PEAK_FLOPS[DEVICE], self.bytes_moved / BANDWIDTH)


def parts(length: int, tokens: int) -> list[Part]:
    """The parts of a step on `tokens` tokens in texts of `length`."""
    shape, common = SHAPES["full"]["target"], SHAPES["full"]["common"]
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, groups = shape["num_attention_heads"], shape["num_key_value_heads"]
    size, vocabulary = common["head_dim"], common["vocab_size"]
    kept, steps = METHODS["full"]["eagle3"]["draft_vocab_size"], METHODS["full"]["eagle3"]["steps"]
    layers = shape["num_hidden_layers"]

    attention = width * size * (heads + 2 * groups) + heads * size * width
    layer = attention + 3 * width * inner
    # the draft layer's queries, keys and values read the embedding beside the state
    draft = layer + width * size * (heads + 2 * groups)
    attended = 4 * heads * size * length / 2  # FLOPs a token
    passes = 2 * (PASSES * width + INNER_PASSES * inner)  # bytes a token and layer
    fuse = CAPTURES * width * width
    trained = draft + fuse + kept * width
    return [
        Part("target's layers: products", tokens * layers * (2 * layer + attended),
             2 * layers * layer),
        Part("target's layers: elementwise", 0.0, layers * tokens * passes, useful=False),
        Part("target's output matrix", 2 * tokens * width * vocabulary,
             2 * width * vocabulary + 2 * LOGIT_PASSES * tokens * vocabulary),
        Part("draft layer: products",
             3 * steps * tokens * (2 * draft + attended) + 4 * tokens * fuse, 6 * steps * draft),
        Part("draft layer: elementwise", 0.0, 3 * steps * tokens * passes, useful=False),
        Part("draft's output matrix", 3 * steps * 2 * tokens * width * kept,
             3 * steps * 2 * width * kept),
        Part("softmax, divergence, gradient", 0.0,
             2 * steps * (LOGIT_PASSES + GRADIENT_PASSES) * tokens * kept, useful=False),
        Part("AdamW", 0.0, 28.0 * trained, useful=False),
    ]  # fmt: skip


def main() -> None:
    tokens = TOKENS["full"]
    print(f"{DEVICE}: {PEAK_FLOPS[DEVICE] / 1e12:.0f} TFLOP/s, {BANDWIDTH / 1e12} TB/s\n")
    print("| part | " + " | ".join(f"{n:,} tokens, ms" for n in LENGTHS["full"]) + " | bound by |")
    print("| --- |" + " ---: |" * len(LENGTHS["full"]) + " --- |")
    # a text of 32,768 tokens is a batch by itself
    columns = [parts(length, max(tokens, length)) for length in LENGTHS["full"]]
    for row in zip(*columns, strict=True):
        one = row[0]
        memory = one.bytes_moved / BANDWIDTH > one.flops / PEAK_FLOPS[DEVICE]
        times = " | ".join(f"{1000 * part.seconds:.1f}" for part in row)
        print(f"| {one.name} | {times} | {'memory' if memory else 'products'} |")
    whole = [sum(part.seconds for part in column) for column in columns]
    useful = [sum(part.flops for part in column if part.useful) for column in columns]
    print("| a step | " + " | ".join(f"{1000 * one:.1f}" for one in whole) + " | |")
    share = [f / PEAK_FLOPS[DEVICE] / t for f, t in zip(useful, whole, strict=True)]
    print("| most utilisation | " + " | ".join(f"{100 * one:.0f} %" for one in share) + " | |")
    rates = [max(tokens, n) / t for n, t in zip(LENGTHS["full"], whole, strict=True)]
    print("| most tokens/s | " + " | ".join(f"{one:,.0f}" for one in rates) + " | |")
    at_goal = [0.45 * PEAK_FLOPS[DEVICE] / f * max(tokens, n)
               for n, f in zip(LENGTHS["full"], useful, strict=True)]  # fmt: skip
    print("| tokens/s at 45 % | " + " | ".join(f"{one:,.0f}" for one in at_goal) + " | |")


if __name__ == "__main__":
    main()
