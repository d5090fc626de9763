"""Chains and trees beside each other: names, gains, acceptance by depth, modelled speed."""

from dataclasses import replace

from eval.metrics import per_domain
from eval.report.page import headline, report_blocks
from eval.report.render import to_markdown
from eval.report.schema import build_report, headline_numbers, markdown_table, write_report
from eval.report.terminal import summary
from eval.speed_model import goodput
from tests.helpers.report_rows import TREE, measured, report_with_tree, result_row, shaped


def section(text, heading):
    """The part of a Markdown text below one heading of the second level."""
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_headline_names_the_best_lossless_shape_and_its_gain_over_the_chain():
    report = report_with_tree()
    tree, chain = (next(r for r in report["results"] if r.drafter == "after" and r.tree == t)
                   for t in (TREE, None))  # fmt: skip
    text = headline(report)
    gain = tree.tokens_per_round - chain.tokens_per_round
    assert f"gives {tree.tokens_per_round:.2f} [" in text
    assert f"with a tree ({TREE})" in text
    assert f"; +{gain:.2f} [" in text
    assert f"over its chain of K = 4, which gives {chain.tokens_per_round:.2f} [" in text
    assert text.index("its chain") < text.index("over before") < text.index("over control")

    lossy = headline(report_with_tree(1.0, lossless=False, verifier="typical"))
    assert f"gives {chain.tokens_per_round:.2f} [" in lossy
    assert "tree" not in lossy


def test_a_policys_tuned_length_is_not_the_headline():
    """Its chain was only decoded, and every difference is of chains of eval.K."""
    report = report_with_tree()
    tuned = shaped(result_row("after", measured(0.95, K=6), measured_by="decoding"))
    served = replace(shaped(result_row("after", measured(0.9), measured_by="vllm")), alpha=None)
    more = build_report(
        report["run"], report["target"], report["drafter"],
        [*report["results"], tuned, served], report["comparisons"], [],
    )  # fmt: skip
    assert headline(more) == headline(report)
    assert headline_numbers(more) == headline_numbers(report)
    assert headline_numbers(more)["after/T=0/alpha"] is not None


def test_text_that_parts_where_numbers_are_coarse_is_not_called_another_law():
    gap = {"prompt_hash": "hash1", "position": 3, "logit_gap": 0.01, "near_tie": False}
    changes = {"lossless": False, "num_compared": 6, "differing_prompts": [gap]}
    text = to_markdown(report_blocks(report_with_tree(**changes)))
    assert "not lossless, its greedy text differs from the target's" in text
    assert "the output does not have the target's distribution" not in text


def test_comparisons_name_their_temperature_as_it_was_set():
    report = report_with_tree()
    for one in report["comparisons"]:
        one["temperature"] = 0.25
    table = to_markdown(report_blocks(report)).split("| pair | temperature |")[1]
    lines = table.split("\n\n")[0].splitlines()[2:]
    assert {line.split(" | ")[1] for line in lines} == {"0.25"}


def test_what_an_engine_does_wrong_is_said_beside_a_row_measured_on_traces():
    found = shaped(result_row("after", measured(0.7), measured_by="offline"))
    said = {"lossless": False, "note": "the engine does not sample the target's distribution"}
    served = shaped(result_row("after", measured(0.6), measured_by="vllm", **said))
    text = to_markdown(report_blocks(build_report({}, {}, {}, [found, served], [], [])))
    assert f"- after, vLLM: {said['note']}" in text


def test_twins_are_told_apart_by_drafter_and_shape():
    text = markdown_table(report_with_tree()["results"])
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines()]
    names = lines[2]
    places = [names.index(name) for name in ("drafter", "draft", "nodes")]
    shown = [[line[i] for i in places] for line in lines if line[0].strip("*").startswith("after")]
    assert shown == [
        ["after, decoded", "K 4", "4"],
        ["**after**", "K 4", "4"],
        ["after, decoded", TREE, "25"],
        ["**after**", TREE, "25"],
    ]
    assert "after, decoded (" not in text  # the notes speak of each shape once


def test_a_tree_known_from_decoding_only_is_no_twin_of_the_chain():
    report = report_with_tree(1.0)
    rows = [r for r in report["results"] if not (r.tree and r.measured_by == "offline")]
    for row in rows:
        if row.tree:
            row.tree_children = "sampled"
    report["results"] = rows
    text = to_markdown(report_blocks(report))
    (line,) = [line for line in text.splitlines() if f"| {TREE}, sampled children |" in line]
    assert line.startswith("| **after** | 3.34 ")
    assert f"after ({TREE}, sampled children)" in section(text, "By domain")


def test_acceptance_stands_by_depth_for_chains_and_trees():
    text = section(to_markdown(report_blocks(report_with_tree())), "Acceptance by depth")
    assert "| drafter | measure | depth 1 | depth 2 | depth 3 | depth 4 | depth 5 |" in text
    for name in ("before", "control", "after"):
        assert f"| {name} (K 4) | alpha_by_depth | 0.610 | 0.580 | 0.570 | 0.560 | – |" in text
        assert f"| {name} (K 4) | alpha_pos |" in text
    for measure in ("alpha_pos", "reach_pos"):
        assert f"| after ({TREE}) | {measure} |" in text
    assert "prompt_lookup" not in text


def test_modelled_speed_stands_at_each_cost_for_every_row():
    report = report_with_tree()
    chain = next(r for r in report["results"] if r.drafter == "after")
    assert chain.tree is None
    text = section(to_markdown(report_blocks(report)), "Modelled speed-up")
    line = next(line for line in text.splitlines() if line.startswith("| **after (K 4)**"))
    assert " | ".join(f"{x:.2f}" for x in chain.modelled_speedup_at.values()) in line
    assert line.endswith("| 0.25 |")  # known from the decoded twin
    assert f"| **after ({TREE})** |" in text
    for name in ("before", "control", "prompt_lookup"):
        assert f"| {name} (K 4) |" in text


def test_a_stop_rule_has_the_modelled_speed_of_its_decoding_and_no_figure_over_K(tmp_path):
    """Its alpha_pos says nothing about other lengths, and a replay knows no cost."""
    decoded = shaped(result_row("after", measured(0.7), policy="confidence:0.4"))
    offline = replace(decoded, measured_by="offline", modelled_speedup_at=None)
    report = build_report({}, {}, {}, [offline, decoded], [], [])
    text = section(to_markdown(report_blocks(report)), "Modelled speed-up")
    values = " | ".join(f"{x:.2f}" for x in decoded.modelled_speedup_at.values())
    assert text.count(f"| **after (K 4, confidence:0.4)** | {values} |") == 1
    assert "the best K is" not in text
    write_report(report, tmp_path)
    assert "Modelled speed-up against K" not in (tmp_path / "report.html").read_text()


def test_best_K_says_where_the_measured_K_ends():
    row = shaped(result_row("after", measured(0.7), measured_by="offline"))
    row.alpha_pos = [0.9, 0.8, 0.1, 0.1]
    text = to_markdown(report_blocks(build_report({}, {}, {}, [row], [], [])))
    assert "at a cost ratio of 0.05 the best K is 2, 2.4x;" in text
    row.alpha_pos = [0.9, 0.9, 0.9, None]
    text = to_markdown(report_blocks(build_report({}, {}, {}, [row], [], [])))
    assert "at a cost ratio of 0.05 the best K is 3 or more, 3.0x;" in text
    row.alpha_pos = [0.01]
    text = to_markdown(report_blocks(build_report({}, {}, {}, [row], [], [])))
    assert "at a cost ratio of 0.05 the best is not to speculate" in text


def test_goodput_compares_chain_and_tree_by_batch_size():
    report = report_with_tree()
    tree = next(r for r in report["results"] if r.tree)
    text = section(to_markdown(report_blocks(report)), "Goodput by batch size")
    assert "| plain decoding | 1.0 | 2.0 | 4.0 | 8.0 | 16.0 | 32.0 | 64.0 |" in text
    line = next(line for line in text.splitlines() if line.startswith(f"| after ({TREE}), c = 0.1"))
    ours = goodput(tree.tokens_per_round, 5, 25, 0.1, 64)
    assert line.endswith(f"{ours:.1f} ({ours / 64:.2f}) |")
    assert ours < 64  # 64 x 26 tokens a forward: past the knee, the tree costs more than it gives
    assert text.count("| after (K 4), c = ") == 3
    assert "| after, best K, c = 0.05 | 4+" in text
    assert "before (K 4)" not in text


def test_plots_hold_the_trees_beside_the_chains(tmp_path):
    write_report(report_with_tree(), tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 5  # acceptance twice, domains, speed-up over K, goodput
    assert page.count("</i>after, dynamic, 25 nodes<") == 4
    assert "after (K 4): measured acceptance at assumed costs" in page


def test_drafter_is_described_in_words():
    drafter = {"kind": "eagle3", "parameters": 1_234_567, "trained_parameters": 1_000_000,
               "active_parameters": 999, "feature_bytes_per_token": 6144, "captures": [2, 16, 29],
               "draft_vocab_size": 32_000, "coverage": 0.9712, "start": "new"}  # fmt: skip
    text = to_markdown(report_blocks(build_report({}, {}, drafter, [], [], [])))
    for line in (
        "| kind | eagle3 |",
        "| parameters | 1,234,567 |",
        "| parameters trained | 1,000,000 |",
        "| parameters active per step | 999 |",
        "| bytes per token of features | 6,144 |",
        "| target layers read | 2, 16, 29 |",
        "| draft vocabulary | 32,000 |",
        "| coverage of the draft vocabulary | 97.12 % |",
        "| start | new |",
    ):
        assert line in text


def test_stages_stand_in_their_order_with_acceptance_by_domain():
    alphas = {"after": 0.7, "continued": 0.9, "pretrained": 0.4, "before": 0.1, "control": 0.5}
    rows = [result_row(name, measured(alpha)) for name, alpha in alphas.items()]
    for row, alpha in zip(rows, alphas.values(), strict=True):
        row.by_domain = per_domain(measured(alpha))
    report = build_report({}, {}, {}, rows, [], [])
    order = ["before", "pretrained", "continued", "control", "after"]
    assert [row.drafter for row in report["results"]] == order
    assert headline(report).startswith("At temperature 0, the trained drafter gives")  # not a stage
    text = section(to_markdown(report_blocks(report)), "By stage")
    table = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in table[0]] == [
        "stage", "code", "math", "prose", "all", "block efficiency", "mbsu, by parameters",
    ]  # fmt: skip
    assert [line[0].strip() for line in table[2:]] == ["before", "pretrained", "continued", "after"]
    (pretrained,) = [row for row in rows if row.drafter == "pretrained"]
    one = pretrained.by_domain["domains"]["code"]
    assert table[3][1] == f"{one['draft_acceptance_rate']:.3f} / {one['alpha']:.3f}"
    assert table[3][4] == f"{pretrained.draft_acceptance_rate:.3f} / {pretrained.alpha:.3f}"


def test_without_stages_there_is_no_such_table():
    assert "By stage" not in to_markdown(report_blocks(report_with_tree()))


def offline_chain(report):
    """The row of the trained drafter's chain on the traces."""
    rows = [row for row in report["results"] if row.drafter == "after" and not row.tree]
    return next(row for row in rows if row.measured_by == "offline")


def test_domains_are_columns_with_their_intervals_where_there_are_several():
    report = report_with_tree()
    after = offline_chain(report)
    after.by_domain = own = per_domain(measured(0.6), draws=100)
    page = to_markdown(report_blocks(report))
    text = section(page, "By domain")
    assert "| drafter | code | math | prose | mean over domains | worst |" in text
    code = own["domains"]["code"]
    low, high = code["tokens_per_round_ci95"]
    cell = f"{code['tokens_per_round']:.2f} [{low:.2f}, {high:.2f}] / {code['alpha']:.3f}"
    assert f"| after (K 4) | {cell} |" in text
    printed = summary(report)
    headers = printed.splitlines()[3]
    (line,) = [line for line in printed.splitlines() if line.startswith("  after (K 4)")]
    assert headers.split()[-3:] == ["code", "math", "prose"]
    values = [own["domains"][name]["tokens_per_round"] for name in ("code", "math", "prose")]
    assert line.split()[-3:] == [f"{value:.2f}" for value in values]
    for row in report["results"]:
        if row.by_domain:
            row.by_domain["domains"].pop("code")
            row.by_domain["domains"].pop("math")
    assert "## By domain" not in to_markdown(report_blocks(report))
    assert summary(report).splitlines()[3].split()[-1] == "speed-up"


def test_positions_are_columns_where_there_are_several(tmp_path):
    report = report_with_tree()
    row = offline_chain(report)
    place = {"num_rounds": 8, "tokens_per_round_ci95": None}
    row.by_position = [{"first": 0, "last": 31, "tokens_per_round": 2.5, **place}]
    assert "By position" not in to_markdown(report_blocks(report))
    row.by_position.append({"first": 32, "last": 63, "tokens_per_round": 1.25, **place})
    row.by_position[0]["tokens_per_round_ci95"] = [2.25, 2.75]
    text = section(to_markdown(report_blocks(report)), "By position in the answer")
    assert "| drafter | 0-31 | 32-63 |" in text
    assert "| after (K 4) | 2.50 [2.25, 2.75] | 1.25 |" in text
    write_report(report, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 6
    assert "Tokens per round by position in the answer" in page


def test_a_draft_vocabulary_says_what_it_costs():
    report = report_with_tree()
    for row in report["results"]:
        if row.drafter in ("before", "after") and row.measured_by == "offline":
            row.draft_vocabulary = {"size": 8192, "tokens_outside": 0.0212, "alpha_lost": 0.025,
                                       "tokens_per_round_lost": 0.061}  # fmt: skip
    text = to_markdown(report_blocks(report))
    sentence = (
        "2.12 % of the target's tokens are not among the 8,192 of the draft vocabulary, which "
        "costs at most 0.025 of alpha and 0.06 tokens per round."
    )
    assert f"- after (K 4): {sentence}" in text
    assert f"before: {sentence}" not in text
