"""llama.cpp against this project: the same answers, and its counters by one rule.

Ours are vLLM's: K tokens are drafted in every round, and counted past the end of the answer. In
llama.cpp a round emits one token more than it accepts: it drafts no further than the limit less
one, it stops verifying at an EOS, and a step without room for a draft is counted as none.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil

import pytest
import torch
from gguf import GGUFReader, GGUFWriter

import train
from data.traces import Trace
from drafters.block import BlockDrafter, drafter_type
from drafters.block_settings import BlockSettings
from drafters.causal_lm import CausalLMDrafter
from drafters.eagle3 import Eagle3Drafter, Eagle3Settings
from drafters.export.card import SPEC_TYPES, Export
from drafters.export.gguf import FILE
from drafters.kinds import KINDS, kind_of
from drafters.layers import layer_config
from drafters.load import load_drafter
from drafters.round import Budget
from drafters.training_free.ngram_simple import NgramSimple
from engines import llamacpp_run
from engines.llamacpp_run import (
    COPIES,
    ROWS,
    WHEEL,
    Drafting,
    drafting_seconds,
    plain_steps,
    seconds_by_rows,
    serve,
)
from engines.vllm_run import EngineCounters
from eval.engine import SpeculativeDecoder
from eval.served import answer_counters
from scripts import evaluate, export, push_to_hub
from target.cache import CachedModel
from target.decode import Request
from target.model import Target
from target.sampling import Sampling, warp
from tests.helpers.by_heart import block_drafter
from tests.helpers.commands import ROOT, command, read_jsonl
from tests.helpers.gguf_files import write_gguf
from tests.helpers.tiny import VOCAB_SIZE
from trainer.errors import RunFault, UserError

FROZEN = ROOT / "tests" / "fixtures" / "frozen"
TOY = ROOT / "assets" / "toy"
K, NEW = 4, 60
GREEDY = Sampling(0.0)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    """(target, its GGUF file in float32)."""
    target = Target.load(str(FROZEN / "target"), dtype="float32")
    file = tmp_path_factory.mktemp("frozen") / "target.gguf"
    write_gguf(file, target.model, FROZEN / "target")
    return target, file


def exported(drafter, file, folder):
    kind = kind_of(drafter)
    kind.writers["llamacpp"](drafter, folder, Export("card", "x", K, gguf=file))
    return Drafting((SPEC_TYPES[kind.method],), folder / FILE, K)


def prompts_of(target, count):
    text = [row["prompt"] for row in read_jsonl(FROZEN / "train.jsonl")][:count]
    return [target.tokenizer(one)["input_ids"] for one in text]


def drafters_of(target):
    """A head of the whole vocabulary, one of a reduced vocabulary, and a draft model."""
    reduced = load_drafter(str(FROZEN / "eagle3" / "drafter"), target)
    whole = Eagle3Drafter.build(target, reduced.settings)
    state = reduced.state_dict()
    rows = whole.lm_head.weight.detach().clone()
    rows[reduced.kept] = state["lm_head.weight"]
    whole.load_state_dict({**state, "lm_head.weight": rows}, strict=False)
    model = load_drafter(str(FROZEN / "distillspec" / "drafter"), target)
    return {"whole": whole, "reduced": reduced, "draft model": model}


BLOCKS = {
    "block": {"layers": [0, 2]},
    "causal block": {"layers": [0, 1, 2], "causal": True},
    "reduced block": {"layers": [1], "reduced": True},
    "dspark": {"layers": [0, 2], "from_anchor": True, "correction": "markov"},
    "dspark of masks": {"layers": [1], "causal": True, "correction": "markov"},
    "reduced dspark": {
        "layers": [1], "reduced": True, "from_anchor": True, "correction": "markov"
    },
}  # fmt: skip


def answered(target, prompts):
    """Prompts and the target's own answers to them."""
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = target.model.generate(ids, max_new_tokens=NEW, do_sample=False)
        yield prompt, made[0, len(prompt) :].tolist()


def by_rule(rounds, limit):
    """llama.cpp's counters from our rounds."""
    left, drafts, drafted, reached = limit - 1, 0, 0, [0] * K
    for one in rounds:
        room = min(one.submitted, left - 1)
        left -= one.emitted
        if room:
            drafts, drafted = drafts + 1, drafted + room
            reached = [n + (i < one.emitted - 1) for i, n in enumerate(reached)]
    return EngineCounters(drafts, drafted, sum(reached), reached)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole", "reduced", "draft model", *BLOCKS])
def test_answers_are_identical_and_counters_ours(name, frozen, tmp_path):
    pytest.importorskip("xllamacpp")
    target, file = frozen
    prompts = prompts_of(target, 8)
    if name in BLOCKS:
        drafter = block_drafter(target, answered(target, prompts[:4]), K, **BLOCKS[name])
    else:
        drafter = drafters_of(target)[name].eval()
    jobs = {"plain": None, name: exported(drafter, file, tmp_path / "drafter")}
    found = serve(file, jobs, prompts, max_new_tokens=NEW, sampling=GREEDY, seed=0)
    assert same_as_ours(found[name], found["plain"], target, drafter, prompts) > 10
    if drafter.kind == "dspark":
        drafter.correction.out.weight.data.zero_()
        with pytest.raises(AssertionError):
            same_as_ours(found[name], found["plain"], target, drafter, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_its_own_copies_are_those_of_ngram_simple(size, frozen):
    """Rounds without a copy count as no draft, and one that follows draft by draft has none."""
    pytest.importorskip("xllamacpp")
    target, file = frozen
    prompts = [prompt * 3 for prompt in prompts_of(target, 8)]
    drafter = NgramSimple(size)
    jobs = {"plain": None, "copies": Drafting(("ngram-simple",), None, K, size)}
    found = serve(file, jobs, prompts, max_new_tokens=NEW, sampling=GREEDY, seed=0)
    assert same_as_ours(found["copies"], found["plain"], target, drafter, prompts) > 10


@pytest.mark.slow
def test_a_copy_comes_before_the_head(frozen, tmp_path):
    """Exact all the same; each answer is as long as its rounds emit. It copies from what it was
    asked before, which the answer that warms up must not be."""
    pytest.importorskip("xllamacpp")
    target, file = frozen
    prompts = [prompt * 3 for prompt in prompts_of(target, 8)]
    prompts.append(prompts[0])
    head = exported(drafters_of(target)["whole"], file, tmp_path / "drafter")
    both = dataclasses.replace(head, types=(COPIES, *head.types), ngram=4)
    jobs = {"plain": None, "head": head, "both": both}
    found = serve(file, jobs, prompts, max_new_tokens=NEW, sampling=GREEDY, seed=0)
    assert found["both"].tokens == found["plain"].tokens == found["head"].tokens
    assert found["both"].counters != found["head"].counters
    assert found["both"].counters[0].accepted < found["both"].counters[-1].accepted
    for counted, tokens in zip(found["both"].counters, found["both"].tokens, strict=True):
        assert plain_steps(counted, len(tokens) - 1) <= 1
    assert all(0 < found[name].drafting_share() < 1 for name in ("both", "head"))


@pytest.mark.slow
def test_forwards_are_timed_by_their_rows(frozen, tmp_path, monkeypatch):
    """Of rounds whose drafts are all rejected: a draft in each that has room, none of it kept. A
    clock of ours tells what is left of an answer without the short one."""
    pytest.importorskip("xllamacpp")
    target, file = frozen
    head = exported(drafters_of(target)["whole"], file, tmp_path / "drafter")
    prompts, asked = prompts_of(target, 2), []
    run = llamacpp_run._run

    def clocked(name, job):
        version, answers, _ = run(name, job)
        asked.append((job, answers))
        K, lengths = job["K"], [len(one["tokens"]) for one in answers]
        spent = [0.5 + n * (0.02 + 0.004 * K) for n in lengths]  # 0.5: what both answers have
        timed = [{**one, "seconds": s} for one, s in zip(answers, spent, strict=True)]
        return version, timed, [0.1 + 0.003 * K * n if K else 0.0 for n in lengths]

    monkeypatch.setattr(llamacpp_run, "_run", clocked)
    found = seconds_by_rows(file, head, prompts)
    assert tuple(found) == ROWS
    for rows, (verified, drafted) in found.items():
        K = rows - 1
        assert drafted == pytest.approx(0.003 * K)
        assert verified == pytest.approx(0.02 + 0.001 * K)
    for job, answers in asked:
        for one, limit in zip(answers, job["limits"], strict=True):
            assert one["accepted"] == 0
            rounds = limit - 1
            assert one["drafts"] == (rounds - 1 if job["K"] else 0)  # the last has no room
            assert one["drafted"] == sum(min(job["K"], left - 1) for left in range(1, limit))


def test_times_of_drafting_are_of_the_log_and_a_changed_log_is_a_fault():
    line = "0.1 I spec: statistics  {}: #calls(b,g,a) = 1 2 3, dur(b,g,a) = 9.0, {}, 0.002 ms"
    copies, head = "ngram-mod", "draft-eagle3"
    spent = [(copies, 1), (head, 10), (copies, 3), (head, 30)]
    two = "\n".join(line.format(name, ms) for name, ms in spent)
    assert drafting_seconds(two, 2, 1) == pytest.approx([0.022])
    assert drafting_seconds("", 0, 3) == [0, 0, 0]
    with pytest.raises(RunFault, match=r"wrote 4 times how long it drafted, of 3 answers"):
        drafting_seconds(two, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [Sampling(0.5, top_p=0.6), Sampling(1.5, top_k=3)])
def test_what_it_draws_has_the_law_of_the_target(sampling, frozen):
    """The temperature comes before what is cut off: a nucleus of the sharper law is smaller."""
    pytest.importorskip("xllamacpp")
    target, file = frozen
    prompts = prompts_of(target, 8)
    drawn = serve(file, {"plain": None}, prompts, max_new_tokens=NEW, sampling=sampling, seed=0)
    for prompt, tokens in zip(prompts, drawn["plain"].tokens, strict=True):
        ids = torch.tensor([[*prompt, *tokens]])
        logits = target.outputs(ids).logits[0, len(prompt) - 1 : -1, : target.vocab_size]
        probs = warp(logits.float(), sampling)
        assert (probs[range(len(tokens)), tokens] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_close_logits_part_alike(arch, tiny_folder, tmp_path):
    """Those of a network with random weights, of which a float16 would change the order. The
    drafter is the target's first layer: as a draft model, and as a head of three captures."""
    pytest.importorskip("xllamacpp")
    target = Target.load(str(tiny_folder(arch, layers=4)), dtype="float32")
    llama = Target.load(str(tiny_folder("llama")), dtype="float32")
    tokens = tmp_path / "tokens.gguf"  # of the same tokenizer
    write_gguf(tokens, llama.model, tiny_folder("llama"))
    whole = exported(CausalLMDrafter.of_target(target), tokens, tmp_path / "target")
    small = Target.load(str(tiny_folder(arch, layers=1)))
    shared = {k: v for k, v in target.model.state_dict().items() if k in small.model.state_dict()}
    small.model.load_state_dict(shared)
    settings = Eagle3Settings(captures=[0, 1, 2], target_width=target.hidden_size)
    drafters = {
        "model": CausalLMDrafter(
            small.model, target.tokenizer, target.vocab_size, target.fingerprint
        ),
        "head": Eagle3Drafter.build(target, settings).eval(),
    }
    jobs = {"plain": None}
    jobs |= {name: exported(one, tokens, tmp_path / name) for name, one in drafters.items()}
    prompts = [list(range(20 + i, 32 + 2 * i)) for i in range(8)]
    found = serve(whole.file, jobs, prompts, max_new_tokens=NEW, sampling=GREEDY, seed=0)
    for name, drafter in drafters.items():
        assert same_as_ours(found[name], found["plain"], target, drafter, prompts) > 0


def same_as_ours(served, plain, target, drafter, prompts) -> int:
    """How many drafts were accepted in all, after everything was compared."""
    assert served.tokens == plain.tokens
    decoder = SpeculativeDecoder(
        CachedModel(target.model), drafter, sampling=GREEDY, budget=Budget(K),
        eos_ids=target.eos_ids, max_new_tokens=NEW, batch_size=4, vocab_size=target.vocab_size,
    )  # fmt: skip
    requests = [Request(prompt, i, GREEDY) for i, prompt in enumerate(prompts)]
    ours = {one.request.key: one for one in decoder.run(requests)}
    for i in range(len(prompts)):
        assert ours[i].response_ids == served.tokens[i]
        assert served.counters[i] == by_rule(ours[i].rounds, NEW)
        counted, always = served.counters[i], served.drafter.always
        rounds = answer_counters(counted, served.tokens[i], trace(), K, always=always).rounds
        assert rounds == len(ours[i].rounds)
        assert served.timing(i).rounds == rounds
    return sum(counted.accepted for counted in served.counters)


def trace():
    return Trace([5], [6], "target", "x", "c", 0, 0, 0.0, 0, 1.0, 0, "length", "m", "t")


def test_counters_that_exceed_the_answer_are_a_fault():
    counted = EngineCounters(3, 12, 5, [3, 2, 0, 0])
    assert plain_steps(counted, 8) == 0
    assert answer_counters(counted, [0] * 9, trace(), K).truncated_rounds == 0
    assert answer_counters(counted, [0] * 10, trace(), K).rounds == 4  # one step had no draft
    assert answer_counters(counted, [0] * 8, trace(), K).truncated_rounds == 1
    for tokens in (4, 12):  # more than a draft too many; two steps without one
        with pytest.raises(RunFault, match="the engine counted 8 tokens for one answer"):
            answer_counters(counted, [0] * tokens, trace(), K)


def test_the_file_of_a_head_holds_llama_cpps_names(frozen, tmp_path):
    """Captured layers are counted by their inputs; a reduced vocabulary has the ids themselves."""
    target, file = frozen
    drafter = drafters_of(target)["reduced"]
    exported(drafter, file, tmp_path / "drafter")
    read = GGUFReader(tmp_path / "drafter" / FILE)
    field = {name: one.contents() for name, one in read.fields.items()}
    assert field["general.architecture"] == "eagle3"
    assert field["eagle3.target_layers"] == [1, 2, 3]
    assert field["eagle3.block_count"] == 1
    tokens = GGUFReader(file).fields["tokenizer.ggml.tokens"].contents()
    assert field["tokenizer.ggml.tokens"] == tokens
    (ids,) = [tensor for tensor in read.tensors if tensor.name == "d2t"]
    assert ids.data.tolist() == drafter.kept.tolist()


def test_the_file_of_a_block_drafter_holds_llama_cpps_names(frozen, tmp_path, caplog):
    """The mask among the tokenizer's keys, in place of one that the target's file may name."""
    target, file = frozen
    layers = layer_config(target.model.config)
    layers.num_hidden_layers = 2
    settings = BlockSettings([0, 2], 3, 6, causal=True, own_head=True)
    drafter = BlockDrafter.build(target, settings, layers, torch.tensor([2, 7, 40]))
    exported(drafter, file, tmp_path / "drafter")
    read = GGUFReader(tmp_path / "drafter" / FILE)
    field = {name: one.contents() for name, one in read.fields.items()}
    assert field["general.architecture"] == "dflash"
    assert field["dflash.target_layers"] == [1, 3]
    assert (field["dflash.block_count"], field["dflash.block_size"]) == (2, 6)
    assert field["dflash.attention.causal"] is True
    assert field["tokenizer.ggml.mask_token_id"] == 3
    tensors = {tensor.name: tensor.data for tensor in read.tensors}
    assert tensors["d2t"].tolist() == [2, 7, 40]
    assert tensors["output.weight"].shape == (3, 32)
    own = "attn_norm attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm ffn_norm ffn_gate"
    names = {
        f"blk.{i}.{name}.weight" for i in range(2) for name in f"{own} ffn_up ffn_down".split()
    }
    shared = {"fc.weight", "enc.output_norm.weight", "output_norm.weight"}
    assert tensors.keys() == names | shared | {"output.weight", "d2t"}
    last = drafter.layers[1].q_proj.weight.detach().numpy()  # its rows in the network's order
    assert (tensors["blk.1.attn_q.weight"] == last).all()
    # of a tokenizer that names another mask
    drafter.settings.mask_token = 2
    exported(drafter, tmp_path / "drafter" / FILE, tmp_path / "again")
    again = GGUFReader(tmp_path / "again" / FILE).fields["tokenizer.ggml.mask_token_id"]
    assert again.contents() == 2
    assert "Duplicated key name" not in caplog.text


def test_the_file_of_a_dspark_drafter_holds_its_heads(frozen, tmp_path):
    target, file = frozen
    settings = BlockSettings(
        [0, 2], 3, 4, from_anchor=True, correction="markov", correction_rank=5, confidence=True
    )
    drafter = drafter_type(settings.correction).build(
        target, settings, layer_config(target.model.config)
    )
    exported(drafter, file, tmp_path / "drafter")
    read = GGUFReader(tmp_path / "drafter" / FILE)
    field = {name: one.contents() for name, one in read.fields.items()}
    assert field["general.architecture"] == "dflash"
    assert field["dflash.sample_from_anchor"] is field["dflash.has_confidence_head"] is True
    tensors = {tensor.name: tensor.data for tensor in read.tensors}
    width = target.model.config.vocab_size
    assert tensors["markov_w1.weight"].shape == tensors["markov_w2.weight"].shape == (width, 5)
    assert tensors["conf_proj.weight"].shape == (1, target.hidden_size + 5)
    assert tensors["conf_proj.bias"].shape == (1,)


def test_a_mask_without_a_token_is_refused_by_llama_cpp(tiny_folder, tmp_path):
    target = Target.load(str(tiny_folder("llama_padded", layers=4)))
    file = tmp_path / "target.gguf"
    write_gguf(file, target.model, tiny_folder("llama_padded", layers=4))
    layers = layer_config(target.model.config)
    drafter = BlockDrafter.build(target, BlockSettings([0], VOCAB_SIZE + 1), layers)
    with pytest.raises(UserError, match="is row 101, without a token: train one with method"):
        exported(drafter, file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_that_differs_on_reading_it_back_is_not_kept(frozen, tmp_path, monkeypatch):
    target, file = frozen
    drafter = drafters_of(target)["whole"]
    monkeypatch.setattr(
        GGUFWriter, "add_tensor",
        lambda self, name, values, add=GGUFWriter.add_tensor: add(self, name, values + 1),
    )  # fmt: skip
    with pytest.raises(RunFault, match=r"tensor 'fc\.weight' differs on reading it back"):
        exported(drafter, file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"captures": [0, 1, 3]}, "reads an empty state for the output of the last layer (3)"),
        ({"captures": [0, 1]}, "reads three layers, this head 2"),
        ({"fc_norm": True}, "has no fc_norm"),
        ({"norm_output": True}, "has no norm_output"),
    ],
)
def test_a_head_that_llama_cpp_would_misread_is_refused(change, says, frozen):
    target, _ = frozen
    settings = Eagle3Settings(**{"captures": [0, 1, 2], "target_width": 32, **change})
    drafter = Eagle3Drafter.build(target, settings, layer_from_target=False)
    with pytest.raises(UserError) as caught:
        KINDS["eagle3"].writers["llamacpp"].check(drafter)
    assert says in str(caught.value)


def test_a_block_drafter_that_llama_cpp_would_misread_is_refused(frozen, tiny_folder):
    """It may read any number of layers, but for the last one."""
    target, _ = frozen
    check = KINDS["dflash"].writers["llamacpp"].check
    other = Target.load(str(tiny_folder("phi3", layers=4)))
    for one, captures, says in (
        (target, [0, 3], "reads an empty state for the output of the last layer"),
        (other, [0, 2], "llama and qwen3 targets only, not of phi3"),
    ):
        drafter = BlockDrafter(BlockSettings(captures, 1), layer_config(one.model.config), one)
        with pytest.raises(UserError, match=says):
            check(drafter)
    for captures in ([1], [0, 1, 2]):
        settings = BlockSettings(captures, 1)
        check(BlockDrafter(settings, layer_config(target.model.config), target))


def test_a_target_without_a_hook_is_refused(tiny_folder):
    target = Target.load(str(tiny_folder("phi3", layers=4)))
    settings = Eagle3Settings(captures=[0, 1, 2], target_width=target.hidden_size)
    drafter = Eagle3Drafter.build(target, settings, layer_from_target=False)
    with pytest.raises(UserError, match="llama and qwen3 targets only, not of phi3"):
        KINDS["eagle3"].writers["llamacpp"].check(drafter)


def test_the_file_of_another_target_is_refused(frozen, tmp_path):
    target, _ = frozen
    toy = Target.load(str(TOY / "target"))
    write_gguf(tmp_path / "toy.gguf", toy.model, TOY / "target")
    with pytest.raises(UserError, match="it is of another model") as caught:
        exported(drafters_of(target)["whole"], tmp_path / "toy.gguf", tmp_path / "out")
    assert caught.value.key == "model.target_gguf"
    assert not (tmp_path / "out").exists()


def test_a_cut_file_is_one_line(frozen, tmp_path):
    target, file = frozen
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(UserError, match="is damaged, or no GGUF file"):
        exported(drafters_of(target)["whole"], cut, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("eval.engine=llamacpp", "name it with model.target_gguf=<file.gguf>"),
        ("model.target_gguf=none.gguf", "model.target_gguf must be a GGUF file, got 'none.gguf'"),
        (f"model.target_gguf={__file__}", "model.target_gguf must be a GGUF file, got"),
    ],
)
def test_a_missing_file_is_said_before_a_model_is_loaded(word, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("phases.check.check_wheel", lambda: None)
    assert train.main(command(tmp_path, tmp_path / "no target", word)) == 2
    assert says in capsys.readouterr().err


def test_a_target_has_one_file(tmp_path, frozen, capsys):
    _, file = frozen
    words = command(tmp_path, tmp_path / "other.gguf", f"model.target_gguf={file}")
    assert train.main(words) == 2
    assert "model.target_gguf must be null for model.target=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "says"),
    [(None, "found none"), ("2026.9.11063", "found 2026.9.11063"), ("2026.11.1", None)],
)
def test_a_wheel_that_is_missing_or_too_old_is_said_with_its_name(version, says, monkeypatch):
    def of(name):
        if version is None:
            raise llamacpp_run.importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(llamacpp_run.importlib.metadata, "version", of)
    if says is None:
        llamacpp_run.check_wheel()
        return
    with pytest.raises(UserError, match=says) as caught:
        llamacpp_run.check_wheel()
    assert "[llamacpp]" in caught.value.remedy
    assert f"{WHEEL}\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.slow
def test_an_end_of_llama_cpp_is_a_fault_with_its_last_lines(frozen, tmp_path):
    pytest.importorskip("xllamacpp")
    target, _ = frozen
    (tmp_path / "no.gguf").write_text("no model")
    with pytest.raises(RunFault, match=r"llama\.cpp ended with code"):
        serve(
            tmp_path / "no.gguf", {"plain": None}, prompts_of(target, 1),
            max_new_tokens=4, sampling=GREEDY, seed=0,
        )  # fmt: skip


@pytest.mark.slow
def test_scripts_export_and_the_report_of_llama_cpp(frozen, tmp_path, capsys):
    """The command that exports, and a report with the engine's row beside ours."""
    pytest.importorskip("xllamacpp")
    _, file = frozen
    shutil.copytree(FROZEN / "cache", tmp_path / "cache")
    place = FROZEN / "eagle3" / "drafter"
    words = [
        f"eval.drafter={place}", f"model.target={FROZEN / 'target'}",
        f"data.cache_dir={tmp_path / 'cache'}", f"eval.prompts={FROZEN / 'eval.jsonl'}",
        "eval.num_prompts=4", "eval.K=2", "eval.max_new_tokens=11", "eval.bootstrap_draws=20",
        "eval.timing_prompts=2", f"model.target_gguf={file}", "eval.engine=llamacpp",
        "eval.tree=copy:3", f"script.out={tmp_path / 'out'}",
    ]  # fmt: skip
    assert evaluate.main(words) == 0, capsys.readouterr().err
    results = json.loads((tmp_path / "out" / "report.json").read_text())["results"]
    by_engine = [row for row in results if row["measured_by"] == "llamacpp"]
    copied = [row for row in by_engine if ", ngram-mod:3" in row["drafter"]]
    rows = {row["temperature"]: row for row in by_engine if row not in copied}
    assert sorted(rows) == sorted(row["temperature"] for row in copied) == [0, 1]
    assert all(row["lossless"] and 0 < row["draft_time_share"] < 1 for row in by_engine)
    assert [*rows[0]["seconds_by_rows"]] == ["1", "2", "3", "4", "5", "8"]
    assert rows[0]["mbsu"] is not None
    assert not any(row["mbsu"] or row["seconds_by_rows"] for row in copied)
    (same,) = [
        row for row in results
        if row["measured_by"] == "decoding" and row["temperature"] == 0 and row["tree"] is None
    ]  # fmt: skip
    assert rows[0]["tokens_per_round"] == same["tokens_per_round"]
    assert rows[0]["identical_to_plain"] == 1
    assert rows[0]["lossless"]
    assert rows[0]["speedup"] > 0
    assert rows[1]["drafter"].endswith("greedy drafts")
    assert rows[1]["lossless"], rows[1]["note"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "By the tokens that a round verifies, verifying + drafting" in page
    out = tmp_path / "for-llamacpp"
    given = [f"script.drafter={place}", "script.engine=llamacpp", f"script.out={out}",
             f"model.target={FROZEN / 'target'}"]  # fmt: skip
    assert export.main(given) == 2
    assert "convert_hf_to_gguf.py" in capsys.readouterr().err
    other = [word.replace("=llamacpp", "=vllm") for word in given]
    assert export.main([*other, f"model.target_gguf={file}"]) == 2
    assert "be left out for script.engine=vllm" in capsys.readouterr().err
    assert export.main([*given, f"model.target_gguf={file}"]) == 0
    assert "llama-server -m TARGET -md DRAFTER/drafter.gguf" in (out / "README.md").read_text()
    assert {path.name for path in out.iterdir() if path.name[0] != "."} == {"README.md", FILE}


@pytest.mark.slow
def test_a_report_of_llama_cpps_own_copies(tmp_path, capsys):
    """What it copies by itself, on the file that it runs."""
    pytest.importorskip("xllamacpp")
    toy = Target.load(str(TOY / "target"))
    write_gguf(tmp_path / "toy.gguf", toy.model, TOY / "target")
    lines = [f"a{i} = 1\nb{i} = 1\nc{i} = 1\nd{i} =" for i in range(4)]
    rows = [json.dumps({"prompt": line}) for line in lines]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    words = [
        "eval.drafter=ngram_simple:1", f"model.target={tmp_path / 'toy.gguf'}",
        f"data.cache_dir={tmp_path / 'cache'}", "eval.num_prompts=4", "eval.K=3",
        "eval.max_new_tokens=24", "eval.bootstrap_draws=20", "eval.timing_prompts=2",
        "eval.temperatures=0", "eval.engine=llamacpp", f"script.out={tmp_path / 'out'}",
        f"eval.prompts={tmp_path / 'prompts.jsonl'}",
    ]  # fmt: skip
    assert evaluate.main(words) == 0, capsys.readouterr().err
    results = json.loads((tmp_path / "out" / "report.json").read_text())["results"]
    found = {row["measured_by"]: row for row in results if row["drafter"] == "ngram_simple:1"}
    assert found["llamacpp"]["tokens_per_round"] == found["decoding"]["tokens_per_round"] > 1
    assert found["llamacpp"]["identical_to_plain"] == 1


@pytest.mark.slow
def test_a_run_on_a_gguf_file_writes_for_llama_cpp(tmp_path, capsys):
    toy = Target.load(str(TOY / "target"))
    write_gguf(tmp_path / "toy.gguf", toy.model, TOY / "target")
    words = command(tmp_path, tmp_path / "toy.gguf", "recipe=eagle3", "eval.timing_prompts=2",
                    "eval.temperatures=0", "eval.engine=llamacpp")  # fmt: skip
    assert train.main([word for word in words if not word.startswith("method.")]) == 0
    drafter = tmp_path / "run" / "export" / "llamacpp" / FILE
    assert drafter.exists()
    said = capsys.readouterr().out.splitlines()
    at = said.index("in llama.cpp, without the drafter and with it:")
    assert said[at + 1] == f"    llama-server -m {tmp_path / 'toy.gguf'}"
    assert said[at + 2].startswith(f"    llama-server -m {tmp_path / 'toy.gguf'} -md {drafter} --")
    assert said[at + 4].startswith("timed with llama.cpp (xllamacpp ")
    assert re.fullmatch(r"    T=0: \S+ and \S+ tokens/s, \S+ \[.*\] times as fast", said[at + 5])
    given = [f"script.run={tmp_path / 'run'}", "script.repo=me/head", "dry_run=true"]
    assert push_to_hub.main(given) == 0
    assert FILE in capsys.readouterr().out
