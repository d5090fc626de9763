"""What `eval.*` names, and pairs that do not fit."""

from __future__ import annotations

import pytest

from eval.config import EvalConfig
from eval.verifiers.table import VERIFIERS
from trainer.errors import UserError

SAMPLED = "eagle,siblings=without_replacement"


@pytest.mark.parametrize(
    ("tree", "verifier"),
    [
        ([], "token"),
        ([], "lenient:0.5"),
        (["eagle"], "token"),
        (["eagle,siblings=top"], "token"),
        (["eagle"], "multi_round"),
        (["dynamic:9:3:3", "eagle"], "typical"),
        (["calibrated:9,siblings=without_replacement", "eagle"], "multi_round"),
        ([SAMPLED], "multi_round"),
        ([SAMPLED], "typical:0.2,delta=0.4"),
    ],
)
def test_a_verifier_that_judges_the_tree_is_taken(tree, verifier):
    EvalConfig(tree=tree, verifier=verifier)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"verifier": "typical"},
            r"verifier=typical cannot judge .* a chain\): name token or block or lenient",
        ),
        ({"verifier": "multi_round"}, "cannot judge .* a chain"),
        (
            {"verifier": "multi_round", "tree": ["dynamic:9:3:3"]},
            r"cannot judge these drafts \(eval\.tree=dynamic:9:3:3, top\): name token or typical",
        ),
        (
            {"verifier": "multi_round", "tree": ["eagle,siblings=top"]},
            r"cannot judge these drafts .*, top\): name token or typical",
        ),
        (
            {"verifier": "tokens"},
            r"eval\.verifier must be one of token, block, multi_round",
        ),
        (
            {"verifier": "typical:0", "tree": ["eagle"]},
            r"eval\.verifier='typical:0': epsilon must be > 0, got 0",
        ),
        ({"verifier": "lenient"}, r"eval\.verifier must be lenient:<lenience>, got 'lenient'"),
        ({"verifier": "lenient:1.5"}, r"lenience must lie in \(0, 1\], got 1\.5"),
        ({"verifier": "lenient:0.5", "tree": ["eagle"]}, r"cannot judge these drafts"),
        ({"draft_temperature": 0.0}, r"eval\.draft_temperature must be > 0, got 0"),
        (
            {"draft_temperature": 0.5, "engine": "vllm"},
            r"eval\.draft_temperature must be null for an engine",
        ),
        ({"baselines": ["lookup:0"]}, r"eval\.baselines='lookup:0': max_ngram must be >= 1, got 0"),
        (
            {"baselines": ["look"]},
            r"eval\.baselines must be one of lookup\[:<max_ngram>\], ngram_simple\[:<size>\], got",
        ),
        ({"baselines": ["lookup", "lookup"]}, r"eval\.baselines must name each drafter once"),
        ({"drafter": "lookup:x"}, r"eval\.drafter='lookup:x': max_ngram must be a whole number"),
        (
            {"drafter": "lookup:3", "tree": ["eagle"]},
            r"eval\.tree must be null for lookup:3, which drafts chains",
        ),
        (
            {"drafter": "lookup:3", "policy": "product:0.5"},
            r"eval\.policy must be fixed for lookup:3",
        ),
        ({"drafter": "lookup:3", "engine": "vllm"}, r"eval\.engine must be own for lookup:3"),
        (
            {"drafter": "lookup:3", "engine": "llamacpp"},
            r"eval\.engine must be own for lookup:3.*ngram_simple:<size> is what llama\.cpp copies",
        ),
        (
            {"drafter": "ngram_simple:3", "engine": "vllm"},
            r"eval\.engine must be own for ngram_simple:3",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        EvalConfig(**options)


def test_a_folder_may_be_called_like_a_drafter():
    EvalConfig(drafter="./lookup:3", tree=["eagle"])


def test_every_verifier_is_named_as_its_table_says():
    assert {name: one.name for name, one in VERIFIERS.items()} == {n: n for n in VERIFIERS}
