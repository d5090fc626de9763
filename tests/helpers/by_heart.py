"""Block drafters that know some answers by heart, without training: their features are random, and
least squares lead from these to the tokens.

from tests.helpers.by_heart import block_drafter
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from drafters.block import BlockDrafter
from drafters.block_settings import BlockSettings
from drafters.layers import layer_config
from drafters.mask_token import default_mask_token
from drafters.text import Text
from target.model import Target

SHARP = 6.0  # gain of the queries: slots of a block look at different places
STIRRED = 3.0  # standard deviation of the matrix of a correction
SURE = 10.0  # length of a state, in rows of the output matrix


@torch.no_grad()
def block_drafter(
    target: Target,
    texts: Iterable[tuple[list[int], list[int]]],
    K: int,
    *,
    layers: Sequence[int],
    causal: bool = False,
    reduced: bool = False,
    from_anchor: bool = False,
    correction: str = "none",
) -> BlockDrafter:
    """One of K tokens that drafts most tokens of these answers, `texts`: prompts and responses.

    `layers`: captures; `reduced`: every eighth token is not drafted; `correction`: of drawn
    weights, so that some tokens are drafted for those before them alone.
    """
    torch.manual_seed(0)
    kept = torch.arange(target.vocab_size).remainder(8).nonzero()[:, 0] if reduced else None
    settings = BlockSettings(
        list(layers), default_mask_token(target), K + 1 - from_anchor, causal, from_anchor,
        own_head=reduced, correction=correction, correction_rank=8, confidence=from_anchor,
    )  # fmt: skip
    config = layer_config(target.model.config)
    config.num_hidden_layers = 1
    drafter = BlockDrafter.build(target, settings, config, kept).eval()
    (layer,) = drafter.layers
    layer.q_norm.weight.fill_(SHARP)
    layer.mlp.down_proj.weight.zero_()
    seen = {}
    hooks = [
        module.register_forward_pre_hook(lambda own, given: seen.update({own: given[0][0]}))
        for module in (layer.mlp.down_proj, drafter.norm)
    ]
    rows = target.head.weight - target.head.weight[: target.vocab_size].mean(0)
    inputs, goals = [], []
    for prompt, response in texts:
        ids = torch.tensor([prompt + response])
        outputs = target.outputs(ids, layers=drafter.target_layers, logits=False)
        next(drafter.states(Text(ids), outputs, K))
        anchors = torch.arange(1, ids.shape[1]).unsqueeze(1)
        places = anchors + torch.arange(settings.block_size) + from_anchor
        known = ((anchors >= len(prompt)) & (places > anchors) & (places < ids.shape[1])).flatten()
        labels = ids[0, places.flatten()[known]]
        inputs.append(seen[layer.mlp.down_proj][known])
        goals.append(SURE * rows[labels] - seen[drafter.norm][known])
    for hook in hooks:
        hook.remove()
    features, wanted = torch.cat(inputs).double(), torch.cat(goals).double()
    ridge = 1e-4 * features.square().mean() * torch.eye(features.shape[1])
    found = torch.linalg.solve(features.T @ features + ridge, features.T @ wanted)
    layer.mlp.down_proj.weight.copy_(found.T)
    if drafter.correction is not None:
        drafter.correction.out.weight.normal_(std=STIRRED)
    return drafter
