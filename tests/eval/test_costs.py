"""What a step of decoding reads."""

from __future__ import annotations

import pytest

from eval.costs import read_per_round, read_per_step
from tests.eval.test_offline import drafter_of
from tests.helpers.tiny import tiny_model


@pytest.mark.parametrize("sent", [1, 2])
def test_a_token_reads_the_experts_that_it_is_sent_to(sent, tiny_target):
    """As many as of a model that has no others, beside the router's rows."""
    layers, width, others = 2, 32, 62
    options = {"num_experts_per_tok": sent, "layers": layers, "width": width}
    many = tiny_model("qwen3_moe", num_experts=sent + others, **options)
    few = tiny_model("qwen3_moe", num_experts=sent, **options)
    router = layers * others * width
    assert read_per_step(many)[1] == pytest.approx(read_per_step(few)[1] + router)
    assert read_per_step(many)[0] == pytest.approx(4 * read_per_step(many)[1])
    target = tiny_target("llama")
    drafts = [drafter_of(model, target) for model in (many, few)]
    rounds = [read_per_round(drafter, 3)[1] for drafter in drafts]
    assert rounds[0] == pytest.approx(rounds[1] + 3 * router)
