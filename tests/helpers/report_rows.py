"""Rows of reports from simulated counters: chains, and the tree of a head."""

from dataclasses import replace

import numpy as np

from eval.counters import PromptCounters
from eval.metrics import paired_difference, per_domain, summarise
from eval.report.rows import role_of
from eval.report.schema import as_json, build_report, parsed, plain_row
from eval.row import COUNTING, row_with
from eval.speed_model import COST_RATIOS, mbsu, modelled_speedup

TREE = "dynamic, 25 nodes, depth 5, top 8"


def measured(alpha, K=4, num_prompts=12, seed=0):
    """Counters of a drafter with i.i.d. acceptance, half the prompts timed."""
    rng = np.random.default_rng(seed)
    counters = []
    for i in range(num_prompts):
        a = float(np.clip(alpha + rng.normal(0, 0.08), 0.02, 0.98))
        reach = [20 * a**j for j in range(1, K + 1)]
        accepted = sum(reach)
        counters.append(
            PromptCounters(
                f"hash{i}",
                ("code", "prose", "math")[i % 3],
                K,
                rounds=20,
                emitted=20 + accepted,
                submitted=20 * K,
                accepted=accepted,
                rejections=20 - reach[-1],
                reach=reach,
                tested=[20.0, *reach[:-1]],
                overlap_sum=90 * a,
                overlap_count=90,
                greedy_sum=90 * a,
                greedy_count=90,
                engine_drafts=20,
                engine_drafted=20 * K,
                engine_accepted=accepted,
                engine_accepted_per_position=reach,
                identical=True,
                plain_s=1.0 * (i % 2),
                plain_tokens=90 * (i % 2),
                speculative_s=0.8 * (1.6 - a) * (i % 2),
                speculative_tokens=90 * (i % 2),
            )
        )
    return counters


def result_row(name, counters, temperature=0.0, cost_ratio=0.12, **more):
    found, K = summarise(counters, draws=200, seed=0), counters[0].K
    row = row_with(
        **vars(found),
        drafter=name,
        role=role_of(name),
        prompts={"name": "toy", "hash": "abc123"},
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        verifier="token",
        policy="fixed",
        K=K,
        counting=COUNTING,
        bonus_counted=True,
        lossless=True,
        measured_by="decoding",
        cost_ratio=cost_ratio,
        modelled_speedup=modelled_speedup(found.tokens_per_round, K, cost_ratio),
        mbsu=mbsu(found.tokens_per_round, K, 0.1),
    )
    row.by_domain = per_domain(counters)
    return replace(row, **more)


def shaped(row, tree=None, nodes=None):
    """The row with what `eval.measure` adds for every shape."""
    at = {str(c): modelled_speedup(row.tokens_per_round, row.K, c) for c in COST_RATIOS}
    return replace(
        row,
        tree=tree,
        tree_children="top" if tree else None,
        nodes=nodes or row.K,
        verify_cost=1.1,
        modelled_speedup_at=at,
    )


def report_with_tree(temperature=0.0, **tree_changes):
    """A head's run: every drafter as a chain on the traces, `after` as a tree too, both decoded."""
    alphas = {"before": 0.5, "control": 0.52, "after": 0.6, "prompt_lookup": 0.2}
    counters = {name: measured(alpha) for name, alpha in alphas.items()}
    rows = []
    for name, of_name in counters.items():
        row = shaped(result_row(name, of_name, temperature, measured_by="offline"))
        if name != "prompt_lookup":
            row.alpha_by_depth = [0.61, 0.58, 0.57, 0.56]
        rows.append(row)
    after = rows[2]
    rows.append(replace(after, measured_by="decoding", alpha=None, draft_time_share=0.25))
    deep = measured(0.75, K=5)
    tree = shaped(result_row("after", deep, temperature, measured_by="offline"), TREE, 25)
    tree = replace(tree, **tree_changes)
    rows += [tree, replace(tree, measured_by="decoding")]
    comparisons = []
    for a, b, pair in (
        ("after", "before", (counters["after"], counters["before"])),
        ("after", "control", (counters["after"], counters["control"])),
        (f"after, {TREE}", "after", (deep, counters["after"])),
    ):
        diff = paired_difference(*pair, "tokens_per_round", draws=200)
        comparisons.append({"a": a, "b": b, "temperature": temperature} | diff)
    return build_report({"recipe": "eagle"}, {}, {}, [plain_row(after), *rows], comparisons, [])


NASTY = "<script>alert('x')</script>"


def report_with_readings():
    """The same with the answers to two prompts: chains, trees, and text that is hard to show."""
    report = report_with_tree()
    deep = [
        {"depth": depth, "tokens": [f" way{depth}-{i}"]} for depth in (1, 2, 3) for i in range(8)
    ]
    rounds = [
        _a_round([" the", " cat", NASTY], 2, "correction", [" dog", " sat\n", ""]),
        _a_round([" Gr", "", "ü", "ße"], 3, "bonus"),
        _a_round(["\n", "\n    ", "x" * 200], 2, "correction", ["y" * 200, NASTY]),
        _a_round([" <|endoftext|>"], 1, None),
    ]
    tree = [
        _a_round([" the", " cat", " sat"], 2, "correction") | {"rejected": deep, "drafted": 60},
        _a_round([" a\u202eb", "\t|", "&lt;"], 2, "bonus"),
    ]
    texts = ["What is a cat?\n" + NASTY + "\n" + "z" * 300, "0 " * 900]
    report["readings"] = [
        {
            "prompt": text,
            "prompt_hash": f"hash{i}",
            "domain": ("code", "a domain of a very long name " * 4)[i],
            "answers": [
                _an_answer(0.0, "K 4", rounds), _an_answer(0.0, TREE, tree),
                _an_answer(1.0, "K 4", rounds * 9), _an_answer(1.0, TREE, tree),
            ],
        }
        for i, text in enumerate(texts)
    ]  # fmt: skip
    return parsed(as_json(report), "the report of the tests")


def _an_answer(temperature, draft, rounds):
    tokens = 6 + sum(len(one["tokens"]) for one in rounds)
    return {"drafter": "after", "temperature": temperature, "draft": draft, "num_tokens": tokens,
            "num_rounds": len(rounds) + 2, "finish_reason": "length", "first": "Well",
            "rounds": rounds}  # fmt: skip


def _a_round(tokens, accepted, last, rejected=()):
    branch = [{"depth": accepted + 1, "tokens": list(rejected)}] if rejected else []
    return {"tokens": tokens, "accepted": accepted, "last": last,
            "drafted": accepted + len(rejected), "rejected": branch}  # fmt: skip
