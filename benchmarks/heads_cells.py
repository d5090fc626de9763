"""The cells of `benchmarks.heads`, what each trains with, and the claims that compare them."""

from __future__ import annotations

import itertools
from typing import Any

from benchmarks.chat_model import NUM_TEXTS
from target.outputs import LayerId

SEEDS = (0, 1, 2, 3, 4)
STEPS, ROWS, K, NODES = 240, 24, 4, 25
NUM_PROMPTS, NUM_EVAL, NEW_TOKENS = 1600, 300, 64
SMALL = 400  # prompts of the cells with less data
CHAT_STEPS, CHAT_ROWS = 100, 8
LONG_STEPS, LONG_PROMPTS = 2400, 6000
TREES = {"static": "eagle,siblings=top", "dynamic": "dynamic:25:5:8"}
# cell -> (recipe, settings, learning rate, prompts)
CELLS: dict[str, tuple[str, dict[str, Any], float, int]] = {
    "medusa": ("medusa", {}, 4e-3, NUM_PROMPTS),
    "hydra": ("hydra", {}, 4e-3, NUM_PROMPTS),
    "hydra++": ("hydrapp", {}, 4e-3, NUM_PROMPTS),
    "eagle": ("eagle", {}, 4e-3, NUM_PROMPTS),
    # as published: from the trained head of cell eagle, at a third of its rate; beside it the same
    # steps of EAGLE's own loss
    "hass": ("eagle", {"steps": 3, "top_weight": 1.0}, 4e-3 / 3, NUM_PROMPTS),
    "eagle, continued": ("eagle", {}, 4e-3 / 3, NUM_PROMPTS),
    "eagle-3": ("eagle3", {}, 4e-3, NUM_PROMPTS),
    "eagle-3, one step": ("eagle3", {"steps": 1}, 4e-3, NUM_PROMPTS),
    "eagle, less data": ("eagle", {}, 4e-3, SMALL),
    "eagle-3, less data": ("eagle3", {}, 4e-3, SMALL),
}
# EAGLE-1's and EAGLE-3's networks, each on the state that the other reads; EAGLE-3 on later layers
NETWORKS: dict[str, tuple[str, dict[str, Any], float, int]] = {
    "eagle, layer 4": ("eagle", {}, 4e-3, NUM_PROMPTS),
    "eagle-3, one step, layer 4": ("eagle3", {"steps": 1}, 4e-3, NUM_PROMPTS),
    "eagle-3, one step, final state": ("eagle3", {"steps": 1}, 4e-3, NUM_PROMPTS),
    "eagle-3, layers 3 5 7": ("eagle3", {"layers": [3, 5, 7]}, 4e-3, NUM_PROMPTS),
    "eagle-3, final state": ("eagle3", {}, 4e-3, NUM_PROMPTS),
    "eagle-3, normed residual": ("eagle3", {"norm_before_residual": True}, 4e-3, NUM_PROMPTS),
}
CAPTURES: dict[str, tuple[LayerId, ...]] = {  # cell -> what it reads, where its recipe has no word
    "eagle, layer 4": (4,),
    "eagle-3, one step, layer 4": (4,),
    "eagle-3, one step, final state": ("final_norm",),
    "eagle-3, final state": ("final_norm",),
    "chat: eagle, layer 26": (26,),
    "chat: eagle-3, one step, layer 26": (26,),
    "chat: eagle-3, one step, final state": ("final_norm",),
}
# HASS's settings, each from the head of cell eagle
HASS: dict[str, tuple[str, dict[str, Any], float, int]] = {
    f"noise {noise:g}, steps {steps}, top {top:g}": (
        "eagle",
        {"feature_noise": noise, "steps": steps, "top_weight": top},
        4e-3 / 3,
        NUM_PROMPTS,
    )
    for noise, steps, top in itertools.product((0.1, 0.01, 0.0), (1, 3), (0.0, 1.0))
}
# on the chat model: both networks on either state, one step; HASS from the first, with the recipe's
# noise and with the published one
CHAT: dict[str, tuple[str, dict[str, Any], float, int]] = {
    "chat: eagle": ("eagle", {}, 2e-3, NUM_TEXTS),
    "chat: eagle, layer 26": ("eagle", {}, 2e-3, NUM_TEXTS),
    "chat: eagle-3, one step, layer 26": ("eagle3", {"steps": 1}, 2e-3, NUM_TEXTS),
    "chat: eagle-3, one step, final state": ("eagle3", {"steps": 1}, 2e-3, NUM_TEXTS),
    "chat: hass": ("eagle", {"steps": 3, "top_weight": 1.0}, 2e-3 / 3, NUM_TEXTS),
    "chat: eagle, continued": ("eagle", {}, 2e-3 / 3, NUM_TEXTS),
    "chat: hass, noise 0.1": (
        "eagle", {"steps": 3, "top_weight": 1.0, "feature_noise": 0.1}, 2e-3 / 3, NUM_TEXTS,
    ),
    "chat: eagle, continued, noise 0.1": ("eagle", {"feature_noise": 0.1}, 2e-3 / 3, NUM_TEXTS),
}  # fmt: skip
# ten times the steps on four times the text
LONG: dict[str, tuple[str, dict[str, Any], float, int]] = {
    "long: eagle": ("eagle", {}, 4e-3, LONG_PROMPTS),
    "long: eagle-3": ("eagle3", {}, 4e-3, LONG_PROMPTS),
    "long: eagle-3, normed residual": (
        "eagle3", {"norm_before_residual": True}, 4e-3, LONG_PROMPTS,
    ),
}  # fmt: skip
# at the best rate that `sweep` finds up to 1.6e-2; those of the cells above are 4e-3
RATES: dict[str, tuple[str, dict[str, Any], float, int]] = {
    "eagle, rate 0.016": ("eagle", {}, 1.6e-2, NUM_PROMPTS),
    "eagle-3, rate 0.008": ("eagle3", {}, 8e-3, NUM_PROMPTS),
}
# block drafters of two layers beside EAGLE-3: chains of 7, and trees of as many nodes
TWO = {"draft_layers": 2}
BLOCK_RATE = 4e-3
BLOCKS: dict[str, tuple[str, dict[str, Any], float, int]] = {
    "blocks: eagle-3": ("eagle3", {}, 8e-3, NUM_PROMPTS),
    "blocks: eagle-3, lk": ("eagle3", {"divergence": "lk_hybrid"}, 8e-3, NUM_PROMPTS),
    "blocks: dflash": ("dflash", TWO, BLOCK_RATE, NUM_PROMPTS),
    "blocks: dflash, lk": ("dflash", TWO | {"divergence": "lk_hybrid"}, BLOCK_RATE, NUM_PROMPTS),
    "blocks: dflash, no decay": ("dflash", TWO | {"depth_decay": 1.0}, BLOCK_RATE, NUM_PROMPTS),
    "blocks: dflash, dpace": ("dflash", TWO | {"weights": "dpace"}, BLOCK_RATE, NUM_PROMPTS),
    "blocks: dflash, until fail": (
        "dflash", TWO | {"weights": "accept_until_fail"}, BLOCK_RATE, NUM_PROMPTS,
    ),
    "blocks: dflash, markov": (
        "dflash", TWO | {"correction": "markov", "correction_rank": 64}, BLOCK_RATE, NUM_PROMPTS,
    ),
    "blocks: head": ("block_head", TWO, BLOCK_RATE, NUM_PROMPTS),
    "blocks: head, lk": ("block_head", TWO | {"divergence": "lk_hybrid"}, BLOCK_RATE, NUM_PROMPTS),
    "blocks: head, no decay": ("block_head", TWO | {"depth_decay": 1.0}, BLOCK_RATE, NUM_PROMPTS),
    "blocks: dspark": (
        "dspark", TWO | {"correction_rank": 64}, BLOCK_RATE, NUM_PROMPTS,
    ),
    "blocks: domino": (
        "domino", TWO | {"correction_rank": 64, "correction_width": 192}, BLOCK_RATE, NUM_PROMPTS,
    ),
}  # fmt: skip
BLOCK_K, BLOCK_NODES = 7, (16, 64, 256)
BLOCK_TREES = ("blocks: dflash", "blocks: head")  # trees of equal nodes are compared on these
# the states of layer 26 as they are reach 24,790 at the first token, 42 behind the final norm
NORMED = ("chat: eagle, layer 26",)
# cells whose hidden matrices Muon trains, at these rates; all else goes at the cell's own
MUON = {f"{name}, muon": 0.05 for name in ("medusa", "hydra", "eagle", "eagle-3")}
# whose head it trains on, for a quarter of the steps (published: 10 epochs after 40)
STARTS = dict.fromkeys(("hass", "eagle, continued", *HASS), "eagle")
CONTINUED = [cell for cell in CHAT if "hass" in cell or "continued" in cell]
STARTS |= dict.fromkeys(CONTINUED, "chat: eagle")
# claim -> ((cell, shape), the one it must beat, factor in tokens per round, temperature)
Side = tuple[str, str]
CLAIMS: dict[str, tuple[Side, Side, float]] = {
    "Hydra > Medusa, chain": (("hydra", "chain"), ("medusa", "chain"), 1.0),
    "Hydra > Medusa, tree": (("hydra", "calibrated"), ("medusa", "calibrated"), 1.0),
    "Hydra++ > Hydra, chain": (("hydra++", "chain"), ("hydra", "chain"), 1.0),
    "Hydra++ > Hydra, tree": (("hydra++", "calibrated"), ("hydra", "calibrated"), 1.0),
    "EAGLE > 1.15 Medusa, chain": (("eagle", "chain"), ("medusa", "chain"), 1.15),
    "EAGLE > 1.15 Medusa, tree": (("eagle", "calibrated"), ("medusa", "calibrated"), 1.15),
    "EAGLE-2 tree > 1.05 static": (("eagle", "dynamic"), ("eagle", "static"), 1.05),
    "EAGLE-3 > EAGLE-2, dynamic tree": (("eagle-3", "dynamic"), ("eagle", "dynamic"), 1.0),
    "EAGLE-3 > EAGLE-2, chain": (("eagle-3", "chain"), ("eagle", "chain"), 1.0),
    "EAGLE-3 > EAGLE-2, less data": (
        ("eagle-3, less data", "dynamic"),
        ("eagle, less data", "dynamic"),
        1.0,
    ),
    "unrolled > one step, chain": (("eagle-3", "chain"), ("eagle-3, one step", "chain"), 1.0),
    "HASS >= EAGLE-2, dynamic tree": (("hass", "dynamic"), ("eagle, continued", "dynamic"), 1.0),
}
CLAIMS |= {
    f"{better} > {worse}, {shape}": ((better, shape), (worse, shape), 1.0)
    for better, worse in (
        ("eagle", "eagle, layer 4"),
        ("eagle-3, one step, final state", "eagle-3, one step, layer 4"),
        ("eagle", "eagle-3, one step, final state"),
        ("eagle, layer 4", "eagle-3, one step, layer 4"),
        ("eagle-3, layers 3 5 7", "eagle-3"),
        ("eagle-3, final state", "eagle-3"),
        ("eagle-3, final state", "eagle"),
        ("eagle-3, layers 3 5 7", "eagle"),
        ("chat: eagle", "chat: eagle, layer 26"),
        ("chat: eagle-3, one step, final state", "chat: eagle-3, one step, layer 26"),
        ("chat: eagle-3, one step, final state", "chat: eagle"),
        ("chat: eagle-3, one step, layer 26", "chat: eagle, layer 26"),
        ("chat: eagle-3, one step, layer 26", "chat: eagle"),
        ("chat: hass", "chat: eagle, continued"),
        ("chat: hass, noise 0.1", "chat: eagle, continued, noise 0.1"),
        ("chat: hass, noise 0.1", "chat: hass"),
        ("chat: eagle, continued", "chat: eagle"),
        ("eagle-3, normed residual", "eagle-3"),
        ("long: eagle-3", "long: eagle"),
        ("eagle-3, rate 0.008", "eagle, rate 0.016"),
        ("long: eagle-3, normed residual", "long: eagle"),
        *((f"blocks: {name}, lk", f"blocks: {name}") for name in ("eagle-3", "dflash", "head")),
        ("blocks: dflash, dpace", "blocks: dflash"),
        ("blocks: dflash, until fail", "blocks: dflash"),
        ("blocks: dflash, no decay", "blocks: dflash"),
        ("blocks: head, no decay", "blocks: head"),
        ("blocks: head", "blocks: dflash"),
        ("blocks: dflash, markov", "blocks: dflash"),
        ("blocks: dspark", "blocks: dflash"),
        ("blocks: domino", "blocks: dflash"),
        ("blocks: eagle-3", "blocks: dspark"),
        *((cell, "noise 0.01, steps 1, top 0") for cell in HASS if "steps 1, top 0" not in cell),
        *((f"noise {noise}, steps 1, top 0", "noise 0.01, steps 1, top 0") for noise in (0.1, 0)),
    )
    for shape in (("chain",) if better in CHAT or better in BLOCKS else ("chain", "dynamic"))
}
CLAIMS |= {
    f"best_first > {other}, {nodes} nodes, {cell}": (
        (cell, f"best_first {nodes}"), (cell, f"{other} {nodes}"), 1.0,
    )
    for cell in BLOCK_TREES
    for other in ("calibrated", "dynamic")
    for nodes in BLOCK_NODES
}  # fmt: skip
CLAIMS |= {  # what HASS adds to as many steps of EAGLE's loss, and its loss on the likeliest tokens
    f"{better} > {worse}, {shape}": ((better, shape), (worse, shape), 1.0)
    for better, worse in (
        ("noise 0.1, steps 3, top 1", "noise 0.1, steps 1, top 0"),
        ("noise 0.01, steps 3, top 1", "noise 0.01, steps 3, top 0"),
    )
    for shape in ("chain", "calibrated", *TREES)
}
CLAIMS |= {
    f"{name}, muon > {name}, {shape}": ((f"{name}, muon", shape), (name, shape), 1.0)
    for name in ("medusa", "hydra", "eagle", "eagle-3")
    for shape in (("chain", "dynamic") if "eagle" in name else ("chain", "calibrated"))
}
ALL = CELLS | NETWORKS | HASS | CHAT | LONG | RATES | BLOCKS
ALL |= {name: CELLS[name.removesuffix(", muon")] for name in MUON}
GROUPS = {  # word of the command line, and name of the result -> cells
    "heads": [*CELLS],
    "heads_networks": ["eagle", "eagle-3", "eagle-3, one step", *NETWORKS],
    "heads_hass": [*HASS],
    "heads_chat": [*CHAT],
    "heads_long": [*LONG],
    "heads_rates": [*RATES],
    "heads_blocks": [*BLOCKS],
    "heads_muon": ["medusa", "hydra", "eagle", "eagle-3", *MUON],
}
