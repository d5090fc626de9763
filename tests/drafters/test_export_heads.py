"""Exports of heads: written, read back on an independent road, and refused when they are spoilt."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModel, LlamaConfig, PhiConfig, PhiForCausalLM
from transformers.generation import DFlashTokenCandidateGenerator

from drafters.block import BlockDrafter, drafter_type
from drafters.block_settings import BlockSettings
from drafters.eagle1 import Eagle1Drafter, Eagle1Settings
from drafters.eagle3 import Eagle3Settings
from drafters.export.card import Export, Serving, model_card
from drafters.export.reread import reread
from drafters.formats.reader import read
from drafters.hydra import HydraDrafter, HydraSettings
from drafters.kinds import KINDS, kind_of
from drafters.layers import layer_config
from drafters.load import load_drafter
from drafters.medusa import MedusaDrafter, MedusaSettings
from eval.config import EvalConfig
from phases.check import check_engine
from phases.export import check_export
from scripts.export import main
from target.model import Target
from tests.helpers.eagle import build_eagle
from tests.helpers.gguf_files import write_gguf
from tests.helpers.heads import fitted
from tests.helpers.tiny import PAD, PADDED_WIDTH, VOCAB_SIZE, prompts_of, tiny_tokenizer
from trainer.errors import RunFault, UserError

WIDTH = 32
KEPT = torch.arange(3, 90, 4)
IDS = "eagle_aux_hidden_state_layer_ids"
MEDUSA = {
    "medusa": MedusaSettings(3, 2),
    "medusa_shared": MedusaSettings(2, 1, own_head=False),
    "medusa_tied": MedusaSettings(2, 2, tie_layers=True),
    "medusa_no_layers": MedusaSettings(2, 0),
    "medusa_reduced": MedusaSettings(2, 1),
}
EAGLE = {
    "eagle": Eagle1Settings(["final_norm"], WIDTH),
    "eagle_biased": Eagle1Settings(["final_norm"], WIDTH, fc_bias=True),
    "eagle3": Eagle3Settings([2, 0, 1], WIDTH),  # not in the order in which engines join
    "eagle3_reduced": Eagle3Settings([0, 1, 2], WIDTH),
    "eagle3_variants": Eagle3Settings([0, 2], WIDTH, fc_norm=True, norm_output=True),
}
DFLASH = {
    "dflash": BlockSettings([2, 0, 1], PAD, 5),
    "dflash_causal": BlockSettings([0, 2], PAD, 3, causal=True),
    "dflash_reduced": BlockSettings([0, 2], PAD, 5, own_head=True),
    "dflash_widened": BlockSettings([1], PAD, 5, own_head=True),
    "dspark": BlockSettings(
        [2, 0], PAD, 4, from_anchor=True, correction="markov", correction_rank=6, confidence=True
    ),
    "dspark_masks": BlockSettings([0, 2], PAD, 5, correction="markov", correction_rank=6),
    "dspark_reduced": BlockSettings(
        [0, 2], PAD, 4, from_anchor=True, own_head=True, correction="markov", correction_rank=6
    ),
    "dspark_widened": BlockSettings(
        [1], PAD, 4, causal=True, from_anchor=True, own_head=True, correction="markov",
        correction_rank=6, confidence=True,
    ),
    "dspark_gated": BlockSettings(
        [0, 2], PAD, 4, from_anchor=True, correction="gated", correction_rank=6, confidence=True
    ),
}  # fmt: skip


def noisy(drafter, seed=0):
    """Fresh heads repeat the target: no weight may be a 0 or 1 that hides a wrong name."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2, generator=generator)
            else:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return drafter.eval()


def made(kind, target):
    kept = KEPT if kind.endswith("_reduced") else None
    if kind in MEDUSA:
        return noisy(MedusaDrafter.build(target, MEDUSA[kind], kept))
    if kind in DFLASH:
        config = layer_config(target.model.config)
        config.num_hidden_layers = 2
        return noisy(drafter_type(DFLASH[kind].correction)(DFLASH[kind], config, target, kept))
    return noisy(build_eagle(target, EAGLE[kind], kept=kept))


def exported(engine, drafter, folder):
    return kind_of(drafter).writers[engine](drafter, folder, Export("x", "org/target", 3))


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


CASES = [
    *[("vllm", k) for k in (*MEDUSA, *EAGLE, *DFLASH) if k not in ("eagle_biased", "dspark_gated")],
    *[("sglang", kind) for kind in EAGLE],
    *[("speculators", kind) for kind in EAGLE if kind.startswith("eagle3")],
    *[("sglang", kind) for kind in ("dflash", "dflash_causal", "dspark", "dspark_gated")],
    *[("speculators", k) for k in ("dflash", "dflash_reduced", "dspark", "dspark_reduced")],
    ("transformers", "dflash"),
]


@pytest.mark.parametrize(("engine", "kind"), CASES)
@pytest.mark.parametrize("name", ["llama", "llama_padded"])
def test_every_head_is_read_back_with_the_same_logits(tiny_target, tmp_path, name, engine, kind):
    drafter = made(kind, tiny_target(name, layers=4))
    folder = exported(engine, drafter, tmp_path / "deep" / "out")
    assert [path.name for path in folder.parent.iterdir()] == ["out"]
    assert sorted(path.name for path in folder.iterdir()) == [
        ".draftsmith.json", "README.md", "config.json", "model.safetensors",
    ]  # fmt: skip
    assert reread(folder, drafter) < 1e-5
    config = config_of(folder)
    vocabulary = config.get("transformer_layer_config", config)["vocab_size"]
    assert vocabulary == (VOCAB_SIZE if name == "llama" else PADDED_WIDTH)


# --- what the documents of the engines say ------------------------------------------------------


def test_medusa_heads_are_numbered_and_padded_with_the_mean_of_the_real_rows(tiny_target, tmp_path):
    drafter = made("medusa", tiny_target("llama_padded", layers=4))
    folder = exported("vllm", drafter, tmp_path / "out")
    tensors, config = tensors_of(folder), config_of(folder)
    names = {f"medusa_heads.{i}.2.weight" for i in range(3)}
    names |= {f"medusa_heads.{i}.{j}.linear.{p}" for i in range(3) for j in range(2) for p in
              ("weight", "bias")}  # fmt: skip
    assert set(tensors) == names
    rows = tensors["medusa_heads.1.2.weight"]
    assert torch.equal(rows[:VOCAB_SIZE], drafter.lm_heads[1].weight)
    assert torch.allclose(rows[VOCAB_SIZE:], rows[:VOCAB_SIZE].mean(0), atol=1e-6)
    assert config["architectures"] == ["MedusaModel"]
    assert (config["num_heads"], config["num_hidden_layers"]) == (3, 2)
    assert config["medusa_fc_bias"] is True


@pytest.mark.parametrize("name", ["llama", "llama_padded"])
def test_a_reduced_vocabulary_of_medusa_is_padded_so_that_it_drafts_the_same(
    tiny_target, tmp_path, name
):
    target = tiny_target(name, layers=4)
    drafter = made("medusa_reduced", target)
    folder = exported("vllm", drafter, tmp_path / "out")
    config, rows = config_of(folder), tensors_of(folder)["medusa_heads.1.1.weight"]
    assert config["truncated_vocab_size"] == config["vocab_size"] == len(rows)
    assert torch.equal(rows[KEPT], drafter.lm_heads[1].weight)
    outside = [i for i in range(len(rows)) if i not in KEPT]
    assert torch.allclose(rows[outside], rows[KEPT].mean(0), atol=1e-6)
    states = torch.randn(2000, WIDTH, generator=torch.Generator().manual_seed(0))
    first = (states @ rows.T).argmax(-1)
    assert torch.equal(first, drafter.project(states, 2).argmax(-1))


def test_dflash_is_written_as_the_layers_of_qwen3_without_tables(tiny_target, tmp_path):
    drafter = made("dflash", tiny_target("llama", layers=4))
    folder = exported("vllm", drafter, tmp_path / "out")
    tensors, config = tensors_of(folder), config_of(folder)
    own = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
           "mlp.down_proj", *(f"self_attn.{n}_proj" for n in "qkvo"),
           *(f"self_attn.{n}_norm" for n in "qk"))  # fmt: skip
    names = {f"layers.{i}.{name}.weight" for i in range(2) for name in own}
    assert set(tensors) == {*names, "fc.weight", "hidden_norm.weight", "norm.weight"}
    assert tensors["layers.1.self_attn.k_norm.weight"].shape == (8,)
    # engines join the states in the order of their layers
    joined = drafter.fc.weight.unflatten(1, (3, WIDTH))[:, [1, 2, 0]].flatten(1)
    assert torch.equal(tensors["fc.weight"], joined)
    assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert (config["block_size"], config["num_target_layers"]) == (5, 4)
    assert config["layer_types"] == ["full_attention"] * config["num_hidden_layers"]
    assert len(config["layer_types"]) == 2
    inner = {"mask_token_id": PAD, "target_layer_ids": [0, 1, 2], "causal": False}
    assert config["dflash_config"] == inner
    assert "is_causal" not in config
    other = made("dflash_causal", tiny_target("llama", layers=4))
    causal = exported("vllm", other, tmp_path / "causal")
    assert config_of(causal)["is_causal"] is True
    assert config_of(causal)["dflash_config"]["causal"] is True


def test_dflash_is_named_for_transformers_and_for_speculators(tiny_target, tmp_path):
    drafter = made("dflash", tiny_target("llama", layers=4))
    folder = exported("transformers", drafter, tmp_path / "hf")
    config, names = config_of(folder), set(tensors_of(folder))
    assert {"encoder.fc.weight", "encoder.output_norm_enc.weight", "norm.weight"} <= names
    assert not {"fc.weight", "hidden_norm.weight"} & names
    assert config["model_type"] == "muse_glimmer_assistant"
    assert config["dflash_config"]["target_layer_ids"] == config["target_layer_ids"] == [0, 1, 2]
    reduced = made("dflash_reduced", tiny_target("llama", layers=4))
    folder = exported("speculators", reduced, tmp_path / "nested")
    config, tensors = config_of(folder), tensors_of(folder)
    assert config["aux_hidden_state_layer_ids"] == [1, 3]  # by the layers that have passed
    assert config["sliding_window_non_causal"] is True  # else vLLM makes blocks causal
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert config["draft_vocab_size"] == len(tensors["lm_head.weight"]) == len(KEPT)
    assert torch.equal(tensors["d2t"] + torch.arange(len(KEPT)), KEPT)


def test_dspark_is_named_as_its_authors_and_speculators_name_it(tiny_target, tmp_path):
    target = tiny_target("llama_padded", layers=4)
    drafter = made("dspark", target)
    for engine, name in (("vllm", "Qwen3DSparkModel"), ("speculators", "DSparkSpeculator")):
        folder = exported(engine, drafter, tmp_path / engine)
        config, tensors = config_of(folder), tensors_of(folder)
        assert config["architectures"] == [name]
        assert config["sample_from_anchor"] is config["enable_confidence_head"] is True
        assert config["confidence_head_with_markov"] is True
        assert (config["markov_rank"], config["markov_head_type"]) == (6, "vanilla")
        assert config["mask_token_id"] == PAD
        assert tensors["markov_head.markov_w1.weight"].shape == (PADDED_WIDTH, 6)
        # what fills the table up to the configuration's width is never the likeliest
        rows = tensors["markov_head.markov_w2.weight"]
        torch.testing.assert_close(rows[-1], drafter.correction.out.weight.mean(0))
    assert config["speculators_model_type"] == "dspark"
    assert config["aux_hidden_state_layer_ids"] == [1, 3]
    gated = made("dspark_gated", target)
    folder = exported("sglang", gated, tmp_path / "sglang")
    config, tensors = config_of(folder), tensors_of(folder)
    assert (config["markov_head_type"], config["target_layer_ids"]) == ("gated", [0, 2])
    assert "markov_head.gate_proj.bias" in tensors
    # SGLang's confidence reads the row before the gate, this one what is behind it
    assert gated.confidence is not None
    assert config["enable_confidence_head"] is False
    assert "confidence_head.proj.weight" not in tensors


def test_transformers_drafts_with_a_block_drafter_as_we_do(tiny_target, tmp_path):
    """Its candidates, one round after the other, and the target's own text."""
    target = tiny_target("llama", layers=4)
    drafter = fitted(made("dflash", target), target, 4, steps=60, learning_rate=0.01)
    folder = exported("transformers", drafter, tmp_path / "out")
    assistant, drafted = AutoModel.from_pretrained(folder), []
    ids = torch.tensor(prompts_of([9]))

    def noted(self, *given, _made=DFlashTokenCandidateGenerator.get_candidates, **named):
        found, scores = _made(self, *given, **named)
        if scores is not None:
            drafted.append((given[0] if given else named["input_ids"]).shape[1])
            drafted.append(found[0, drafted[-1] :].tolist())
        return found, scores

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlashTokenCandidateGenerator, "get_candidates", noted)
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
        made_with = target.model.generate(
            ids, assistant_model=assistant, speculation_type="dflash", **options
        )
    assert torch.equal(made_with, target.model.generate(ids, **options))
    outputs = target.outputs(made_with, layers=drafter.target_layers)
    assert len(drafted) > 4
    for length, tokens in zip(drafted[::2], drafted[1::2], strict=True):
        for depth, token in enumerate(tokens[: made_with.shape[1] - length], start=1):
            logits = drafter.draft_logits(made_with, outputs, depth)
            assert int(logits[0, length - 2 + depth].argmax()) == token


def test_a_target_that_scales_its_embeddings_gives_dflash_a_table_of_its_own(tiny_target, tmp_path):
    target = tiny_target("gemma3", layers=4)
    drafter = made("dflash", target)
    folder = exported("vllm", drafter, tmp_path / "out")
    assert reread(folder, drafter) < 1e-5
    table = tensors_of(folder)["embed_tokens.weight"]
    assert torch.equal(table, target.embedding(torch.arange(VOCAB_SIZE)))
    for engine, says in (
        ("sglang", "scales"), ("transformers", "no table"), ("speculators", "which is scaled")
    ):  # fmt: skip
        with pytest.raises(UserError, match=says):
            exported(engine, drafter, tmp_path / engine)


@pytest.mark.parametrize(("engine", "kind"), [case for case in CASES if case[1] in DFLASH])
def test_an_exported_block_drafter_is_loaded_again_wherever_one_is_named(
    engine, kind, tiny_target, tmp_path
):
    target = tiny_target("llama", layers=4)
    drafter = made(kind, target)
    folder = exported(engine, drafter, tmp_path / "out")
    again = load_drafter(str(folder), target)
    assert isinstance(again, BlockDrafter)
    expected = dataclasses.replace(
        drafter.settings, captures=sorted(drafter.settings.captures),
        confidence=drafter.settings.confidence and kind != "dspark_gated",
    )  # fmt: skip
    assert again.settings == expected
    assert again.kind == drafter.kind
    if expected.confidence:
        weights = [one.confidence.out.state_dict() for one in (again, drafter)]
        torch.testing.assert_close(*weights)
    assert again.draft_vocab_size == drafter.draft_vocab_size
    ids = torch.arange(4, 14).unsqueeze(0)
    found, expected = (
        one.draft_logits(ids, target.outputs(ids, layers=one.target_layers), 2)
        for one in (again, drafter)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    if engine in ("speculators", "transformers"):
        return
    config = config_of(folder)
    config["dflash_config"]["block_size"] = config.pop("block_size")  # where newer files have it
    (folder / "config.json").write_text(json.dumps(config))
    assert read(folder).block_size == drafter.settings.block_size
    torch.save({}, folder / "mask_embedding.pt")
    with pytest.raises(UserError, match="an embedding of its own for the mask"):
        read(folder)


def test_what_no_engine_has_of_block_drafters_is_said_and_trained_all_the_same(
    tiny_target, tmp_path, capsys
):
    target = tiny_target("llama", layers=4)
    config, settings = layer_config(target.model.config), BlockSettings([0], PAD, from_anchor=True)
    drafter = BlockDrafter(settings, config, target)
    check_export(drafter, True, False)
    assert not capsys.readouterr().out
    with pytest.raises(UserError, match=r"method\.from_anchor=true"):
        exported("vllm", drafter, tmp_path / "out")
    late = BlockDrafter(BlockSettings(["final_norm"], PAD), config, target)
    with pytest.raises(UserError, match="train with numbered layers"):
        check_export(late, True, False)
    whole, causal = (
        BlockDrafter(BlockSettings([0], PAD, 8, causal=causal), config, target)
        for causal in (False, True)
    )
    assert [one.served_tokens(4) for one in (whole, causal, drafter)] == [7, 4, 8]
    with pytest.raises(UserError, match=r"eval\.K must be 7, the whole block"):
        check_engine(whole, EvalConfig(K=4, engine="vllm"))


def test_a_shared_output_matrix_is_written_once(tiny_target, tmp_path):
    target = tiny_target("llama", layers=4)
    folder = exported("vllm", made("medusa_shared", target), tmp_path / "out")
    tensors = tensors_of(folder)
    assert config_of(folder)["original_lm_head"] is True
    assert torch.equal(tensors["medusa_heads.0.1.weight"], target.head.weight)
    assert "medusa_heads.1.1.weight" not in tensors


def test_captured_layers_are_named_for_each_engine_and_joined_in_order(tiny_target, tmp_path):
    drafter = made("eagle3", tiny_target("llama", layers=4))
    folder = exported("vllm", drafter, tmp_path / "out")
    config = config_of(folder)
    assert config[IDS] == [1, 2, 3]
    assert config["eagle_config"] == {"use_aux_hidden_state": True, IDS: [0, 1, 2]}
    fused = tensors_of(folder)["fc.weight"]
    assert torch.equal(fused[:, :WIDTH], drafter.fc.weight[:, WIDTH : 2 * WIDTH])  # layer 0
    assert torch.equal(fused[:, 2 * WIDTH :], drafter.fc.weight[:, :WIDTH])  # layer 2
    nested = config_of(exported("speculators", drafter, tmp_path / "nested"))
    assert nested[IDS] == [1, 2, 3]
    assert nested["norm_before_residual"] is False
    assert nested["transformer_layer_config"]["num_aux_hidden_states"] == 3
    assert nested["speculators_config"]["verifier"]["name_or_path"] == "org/target"


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
def test_vocabulary_maps_stand_only_beside_a_reduced_vocabulary(tiny_target, tmp_path, engine):
    target = tiny_target("llama_padded", layers=4)
    reduced = exported(engine, made("eagle3_reduced", target), tmp_path / "reduced")
    tensors = tensors_of(reduced)
    assert config_of(reduced)["draft_vocab_size"] == len(KEPT)
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(tensors["d2t"] + torch.arange(len(KEPT)), KEPT)
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].shape == (PADDED_WIDTH,)
    assert tensors["t2d"].nonzero()[:, 0].tolist() == KEPT.tolist()
    full = exported(engine, made("eagle3", target), tmp_path / "full")
    assert config_of(full)["draft_vocab_size"] == PADDED_WIDTH
    assert tensors_of(full)["lm_head.weight"].shape == (PADDED_WIDTH, WIDTH)
    assert not {"d2t", "t2d"} & set(tensors_of(full))


def test_eagle1_is_named_for_each_engine(tiny_target, tmp_path):
    drafter = made("eagle", tiny_target("llama", layers=4))
    ours, theirs = (exported(e, drafter, tmp_path / e) for e in ("vllm", "sglang"))
    assert config_of(ours)["architectures"] == ["LlamaForCausalLM"]
    assert config_of(theirs)["architectures"] == ["LlamaForCausalLMEagle"]
    assert not tensors_of(theirs)["fc.bias"].any()
    names = set(tensors_of(ours))
    assert names == set(tensors_of(theirs)) - {"fc.bias"}
    assert "layers.0.self_attn.q_proj.weight" in names
    assert not {"layers.0.input_layernorm.weight", "norm.weight", "lm_head.weight"} & names


def test_rotary_settings_survive_in_both_spellings(tiny_target, tmp_path):
    rope = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    drafter = made("eagle", tiny_target("llama", layers=4))
    drafter = Eagle1Drafter(
        drafter.settings,
        LlamaConfig(**{**drafter.config.to_dict(), "rope_parameters": rope}),
        drafter.shared.target,
    )
    config = config_of(exported("vllm", noisy(drafter), tmp_path / "out"))
    new, old = dict(config), dict(config)
    del new["rope_theta"], new["rope_scaling"], old["rope_parameters"]
    for spelling in (new, old):
        assert LlamaConfig.from_dict(spelling).rope_parameters == rope


def test_a_target_that_scales_its_embeddings_needs_the_table_in_the_file(tiny_target, tmp_path):
    target = tiny_target("gemma3", layers=4)
    for kind in ("eagle", "eagle3"):
        drafter = made(kind, target)
        folder = exported("vllm", drafter, tmp_path / kind)
        table = tensors_of(folder)["embed_tokens.weight"]
        assert torch.equal(table, target.embedding(torch.arange(VOCAB_SIZE)))
        spoil(folder, lambda tensors, config: tensors.pop("embed_tokens.weight"))
        with pytest.raises(RunFault, match=r"'embed_tokens\.weight' is missing"):
            reread(folder, drafter)
        with pytest.raises(UserError, match="scales its embeddings"):
            exported("sglang", drafter, tmp_path / "sglang")


def test_soft_capped_logits_keep_their_order(tiny_target, tmp_path):
    target = tiny_target("gemma3", layers=4, final_logit_softcapping=3.0)
    assert target.head.transform is not None
    for kind in ("medusa", "medusa_shared", "eagle"):
        exported("vllm", made(kind, target), tmp_path / kind)


def test_a_biased_target_head_is_refused(tmp_path):
    config = PhiConfig(
        vocab_size=VOCAB_SIZE, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    model = PhiForCausalLM(config).eval()
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    target = Target.load(str(tmp_path / "target"))
    for kind in ("medusa", "medusa_shared", "eagle"):
        with pytest.raises(UserError, match="output head has a bias"):
            exported("vllm", made(kind, target), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("engine", "settings", "complaint"),
    [
        ("vllm", Eagle1Settings([1], WIDTH), "final-normed state"),
        ("vllm", EAGLE["eagle_biased"], "drops 'fc.bias', which .* script.engine=sglang"),
        ("vllm", Eagle3Settings([0, "final_norm"], WIDTH), "numbered layers"),
        ("sglang", Eagle3Settings([0, 1, 3], WIDTH), "last layer"),
        ("sglang", Eagle3Settings([1], WIDTH), "single captured state"),
        ("sglang", Eagle3Settings([0, 1], WIDTH, norm_before_residual=True), "norm_before_resi"),
        ("sglang", BlockSettings([0, 3], PAD), "last layer"),
        ("sglang", BlockSettings([0], PAD, own_head=True), "skips the drafter's own"),
        ("transformers", BlockSettings([0, 3], PAD), "normed state .* last layer"),
        ("transformers", BlockSettings([0], PAD, causal=True), "see each other"),
        ("transformers", BlockSettings([0], PAD, own_head=True), "draft_vocab_size=0"),
        ("speculators", BlockSettings([0], PAD, causal=True), "no causal blocks"),
        ("speculators", BlockSettings([0], PAD, own_head=True), "reduced vocabulary only"),
    ],
)
def test_what_an_engine_cannot_serve_is_refused(tiny_target, tmp_path, engine, settings, complaint):
    target = tiny_target("llama", layers=4)
    if isinstance(settings, BlockSettings):
        drafter = BlockDrafter(settings, layer_config(target.model.config), target)
    else:
        drafter = build_eagle(target, settings)
    with pytest.raises(UserError, match=complaint):
        exported(engine, drafter, tmp_path / "out")
    assert not any(tmp_path.iterdir())
    if engine == "vllm":  # a report by vLLM refuses it before it is trained
        with pytest.raises(UserError, match=complaint):
            check_engine(drafter, EvalConfig(engine="vllm"))


@pytest.mark.parametrize("engine", ["own", "other"])
def test_what_an_export_would_refuse_is_known_before_the_first_step(tiny_target, capsys, engine):
    """The engine that the run writes for refuses it, others are named."""
    target = tiny_target("llama", layers=4)
    if engine == "own":
        drafter = build_eagle(target, Eagle3Settings([0, "final_norm"], WIDTH))
        with pytest.raises(UserError) as caught:
            check_export(drafter, True, False)
        assert (caught.value.key, caught.value.value) == ("export", "vllm")
        assert "numbered layers" in caught.value.rule
        return
    for layers, warned in (([0, 1, 3], True), ([0, 1, 2], False)):
        check_export(build_eagle(target, Eagle3Settings(layers, WIDTH)), True, False)
        said = capsys.readouterr().out
        assert ("sglang" in said and "last layer" in said) == warned
    check_export(build_eagle(target, Eagle3Settings([0, 1, 3], WIDTH)), False, False)
    assert not capsys.readouterr().out  # another process says it


def test_every_writer_has_the_rule_of_what_it_writes(tiny_target, tiny_folder, tmp_path):
    """Each refuses by its check alone: what passes is written."""
    target = tiny_target("llama", layers=4)
    file = tmp_path / "target.gguf"
    write_gguf(file, target.model, tiny_folder("llama", layers=4))
    for kind in ("medusa", "eagle", "eagle_biased", "eagle3", "eagle3_variants", *DFLASH):
        drafter = made(kind, target)
        for engine, writer in kind_of(drafter).writers.items():
            try:
                writer.check(drafter)
            except UserError:
                continue
            assert writer(
                drafter, tmp_path / kind / engine, Export("", "org/target", 3, gguf=file)
            ).exists()


# --- spoilt exports -----------------------------------------------------------------------------


def spoil(folder, change):
    tensors, config = tensors_of(folder), config_of(folder)
    change(tensors, config)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def rename(old, new):
    return lambda tensors, config: tensors.update({new: tensors.pop(old)})


def recast(name, dtype):
    return lambda tensors, config: tensors.update({name: tensors[name].to(dtype)})


def both_ids_wrong(tensors, config):
    config[IDS], config["eagle_config"][IDS] = [1, 2, 4], [0, 1, 3]


def swap_norms(tensors, config):
    names = "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight"
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


SPOILT = {
    "renamed tensor": (rename("norm.weight", "normal.weight"), "'norm.weight'.*is missing"),
    "missing tensor": (
        lambda t, c: t.pop("midlayer.mlp.up_proj.weight"),
        "'.*mlp.up_proj.weight' of shape .64, 32. is missing",
    ),
    "unknown tensor": (
        lambda t, c: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}),
        "unknown tensor 'midlayer.self_attn.q_norm.weight'",
    ),
    "missing d2t": (lambda t, c: t.pop("d2t"), "'d2t' of shape .22. is missing"),
    "missing t2d": (lambda t, c: t.pop("t2d"), "'t2d' of shape .100. is missing"),
    "float d2t": (recast("d2t", torch.float32), "'d2t' must be torch.int64, got torch.float32"),
    "bf16 d2t": (recast("d2t", torch.bfloat16), "'d2t' must be torch.int64, got torch.bfloat16"),
    "d2t holds ids": (lambda t, c: t.update({"d2t": KEPT.clone()}), "'d2t' must lead from"),
    "d2t shifted": (lambda t, c: t["d2t"].add_(1), "'t2d' and 'd2t' name different ids"),
    "both maps shifted": (
        lambda t, c: (t["d2t"].add_(1), t.update({"t2d": t["t2d"].roll(1)})),
        "'d2t' names other ids",
    ),
    "wrong shape": (
        lambda t, c: t.update({"fc.weight": t["fc.weight"][:, :64]}),
        "'fc.weight' must have shape .32, 96., got .32, 64.",
    ),
    "not finite": (lambda t, c: t["fc.weight"][3].fill_(torch.nan), "'fc.weight' holds values"),
    "integer weights": (recast("norm.weight", torch.int32), "'norm.weight' must be torch.float32"),
    "wrong vocabulary": (lambda t, c: c.update(vocab_size=99), "'t2d' must have shape .99."),
    "wrong draft vocabulary": (lambda t, c: c.update(draft_vocab_size=50), "' must have shape .50"),
    "missing key": (lambda t, c: c.pop("draft_vocab_size"), "key 'draft_vocab_size' is missing"),
    "unknown key": (lambda t, c: c.update(norm_after=True), "unknown key 'norm_after'"),
    "key of another type": (lambda t, c: c.update(fc_norm="no"), "'fc_norm' must be of type bool"),
    "unknown variant": (lambda t, c: c.update(attention_bias=True), "'attention_bias' must be"),
    "unknown architecture": (
        lambda t, c: c.update(architectures=["GptEagle3"]),
        "'architectures' must name one of .*got .'GptEagle3'",
    ),
    "not even a head": (lambda t, c: c.update(architectures=["Gpt"]), "'architectures' is .'Gpt'"),
    "top-level ids off by one": (lambda t, c: c.update({IDS: [0, 1, 2]}), f"key '{IDS}' is"),
    "inner ids off by one": (
        lambda t, c: c["eagle_config"].update({IDS: [1, 2, 3]}),
        f"key '{IDS}' is .1, 2, 3., in eagle_config .1, 2, 3.",
    ),
    "both ids wrong": (both_ids_wrong, "logits at depth 1 differ.*the layer ids"),
    "ids out of range": (
        lambda t, c: (c.update({IDS: [1, 2, 9]}), c["eagle_config"].update({IDS: [0, 1, 8]})),
        f"key '{IDS}' must name distinct layers",
    ),
    "inner ids missing": (lambda t, c: c.pop("eagle_config"), "key 'eagle_config' is missing"),
    "swapped norms": (swap_norms, "logits at depth 1 differ"),
    "changed value": (lambda t, c: t["lm_head.weight"][5].mul_(1.001), "logits at depth 1 differ"),
    "changed setting": (
        lambda t, c: c.update(norm_before_residual=True),
        "logits at depth 1 differ.*a setting",
    ),
    "recycled state": (lambda t, c: c.update(norm_output=True), "logits at depth 2 differ"),
    "rotary base": (
        lambda t, c: c.update(rope_theta=7.0),
        r"rope_parameters\.rope_theta must be that of rope_theta, 7",
    ),
}


@pytest.fixture(scope="module")
def whole(tiny_target, tmp_path_factory):
    """Exports to copy and spoil: folder and drafter by kind."""
    found = {}

    def get(kind, engine="vllm"):
        if (kind, engine) not in found:
            drafter = made(kind, tiny_target("llama", layers=4))
            folder = tmp_path_factory.mktemp(kind) / "out"
            found[kind, engine] = exported(engine, drafter, folder), drafter
        return found[kind, engine]

    return get


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_eagle3_export_is_refused_by_name(whole, tmp_path, name):
    change, complaint = SPOILT[name]
    folder, drafter = whole("eagle3_reduced")
    shutil.copytree(folder, tmp_path / "out")
    spoil(tmp_path / "out", change)
    with pytest.raises(RunFault, match=complaint):
        reread(tmp_path / "out", drafter)


@pytest.mark.parametrize(
    ("kind", "engine", "change", "complaint"),
    [
        ("medusa", "vllm", lambda t, c: c.update(medusa_fc_bias=False), "'medusa_fc_bias' must be"),
        ("medusa", "vllm", lambda t, c: c.update(num_heads=4), "'num_heads' must be 3"),
        ("medusa", "vllm", lambda t, c: c.update(num_hidden_layers=1), "'num_hidden_layers' must"),
        (
            "medusa",
            "vllm",
            lambda t, c: t.pop("medusa_heads.1.0.linear.bias"),
            "'medusa_heads.1.0.linear.bias' of shape .32. is missing",
        ),
        (
            "medusa",
            "vllm",
            rename("medusa_heads.1.2.weight", "medusa_heads.1.1.weight"),
            "unknown tensor 'medusa_heads.1.1.weight'",
        ),
        ("medusa", "vllm", lambda t, c: c.update(original_lm_head=True), "unknown tensor"),
        (
            "medusa_shared",
            "vllm",
            lambda t, c: t.pop("medusa_heads.0.1.weight"),
            "'medusa_heads.0.1.weight' is missing",
        ),
        (
            "medusa_reduced",
            "vllm",
            lambda t, c: t["medusa_heads.1.1.weight"].index_copy_(
                0, KEPT + 1, 2 * t["medusa_heads.1.1.weight"][KEPT]
            ),
            "at depth 2 an id could be drafted that has no token or is not in the draft vocabulary",
        ),
        (
            "medusa_reduced",
            "vllm",
            lambda t, c: t["medusa_heads.0.1.weight"][KEPT[5]].mul_(1.01),
            "logits at depth 1 differ",
        ),
        ("medusa_shared", "vllm", lambda t, c: c.update(vocab_size=128), "'truncated_vocab_size'"),
        (
            "medusa_shared",
            "vllm",
            lambda t, c: c.update(vocab_size=128, truncated_vocab_size=128),
            "'medusa_heads.0.1.weight' must have shape .128, 32.",
        ),
        ("eagle", "vllm", lambda t, c: t.update({"fc.bias": torch.zeros(32)}), "tensor 'fc.bias'"),
        ("eagle", "sglang", lambda t, c: t.pop("fc.bias"), "'fc.bias' of shape .32. is missing"),
        ("eagle", "sglang", lambda t, c: t["fc.bias"].add_(1), "logits at depth 1"),
        (
            "eagle3",
            "vllm",
            lambda t, c: t.update({"d2t": torch.zeros(100, dtype=torch.int64)}),
            "unknown tensor 'd2t'",
        ),
        (
            "eagle3",
            "speculators",
            lambda t, c: c.pop("norm_before_residual"),
            "'norm_before_residual' is missing",
        ),
        ("eagle3", "speculators", lambda t, c: c.update({IDS: [2, 3, 4]}), "logits at depth 1"),
        (
            "eagle3",
            "speculators",
            lambda t, c: c["speculators_config"].pop("verifier"),
            "'speculators_config.verifier'",
        ),
        (
            "eagle3",
            "speculators",
            lambda t, c: c["transformer_layer_config"].pop("rms_norm_eps"),
            "'rms_norm_eps' is missing",
        ),
        ("dflash", "vllm", lambda t, c: c["dflash_config"].update(causal=True), "logits at depth"),
        ("dflash", "vllm", lambda t, c: c.update(is_causal=True), "logits at depth 1"),
        ("dflash", "vllm", lambda t, c: c.update(block_size=6), "logits at depth 1"),
        ("dflash", "vllm", lambda t, c: c["dflash_config"].update(mask_token_id=2), "at depth 1"),
        (
            "dflash",
            "vllm",
            lambda t, c: c["dflash_config"].update(target_layer_ids=[1, 2, 3]),
            "logits at depth 1",
        ),
        (
            "dflash",
            "vllm",
            lambda t, c: c["dflash_config"].update(target_layer_ids=[2, 0, 1]),
            "'target_layer_ids' must be ascending",
        ),
        (
            "dflash",
            "vllm",
            rename("layers.1.self_attn.q_norm.weight", "layers.2.self_attn.q_norm.weight"),
            "'layers.1.self_attn.q_norm.weight' of shape .8. is missing",
        ),
        ("dflash", "vllm", lambda t, c: c.update(num_hidden_layers=1), "unknown tensor 'layers.1"),
        ("dflash", "vllm", lambda t, c: c.update(model_type="llama"), "'model_type' must be"),
    ],
)
def test_other_spoilt_exports_are_refused_by_name(whole, tmp_path, kind, engine, change, complaint):
    folder, drafter = whole(kind, engine)
    shutil.copytree(folder, tmp_path / "out")
    spoil(tmp_path / "out", change)
    with pytest.raises(RunFault, match=complaint):
        reread(tmp_path / "out", drafter)


def test_weights_that_are_not_finite_leave_no_folder(tiny_target, tmp_path):
    drafter = made("eagle3", tiny_target("llama", layers=4))
    with torch.no_grad():
        drafter.hidden_norm.weight[3] = torch.inf
    with pytest.raises(RunFault, match=r"'midlayer\.hidden_norm\.weight' holds values"):
        exported("vllm", drafter, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_failed_export_leaves_the_earlier_one_and_others_folders_are_refused(
    tiny_target, tmp_path, monkeypatch
):
    drafter = made("medusa", tiny_target("llama", layers=4))
    folder = exported("vllm", drafter, tmp_path / "out")
    before = (folder / "model.safetensors").read_bytes()

    def fail(*_):
        raise RunFault("damaged")

    with monkeypatch.context() as patch:
        patch.setattr("drafters.export.heads.reread", fail)
        with pytest.raises(RunFault):
            exported("vllm", noisy(drafter, 5), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (folder / "model.safetensors").read_bytes() == before
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.md").write_text("precious")
    drafter.save_pretrained(tmp_path / "drafter")
    for name in ("thesis", "drafter"):
        with pytest.raises(UserError, match="holds files that were not exported here"):
            exported("vllm", drafter, tmp_path / name)


# --- the command and the card -------------------------------------------------------------------


@pytest.fixture
def run(tiny_target, tiny_folder, tmp_path):
    """run(drafter) -> its folder inside a run folder of the tiny target"""
    target = str(tiny_folder("llama", layers=4))
    config = {"recipe": "some", "model": {"target": target}, "eval": {"K": 5}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    def save(drafter):
        drafter.save_pretrained(tmp_path / "drafter")
        return tmp_path / "drafter"

    return save


def arguments(drafter, engine, out):
    return [f"script.drafter={drafter}", f"script.engine={engine}", f"script.out={out}"]


@pytest.mark.parametrize(
    ("kind", "engine", "says"),
    [
        ("medusa", "vllm", '{"method": "medusa", "model": "DRAFTER", "num_speculative_tokens": 3}'),
        ("eagle", "sglang", "--speculative-algorithm EAGLE "),
        ("eagle3", "speculators", '"method": "eagle3"'),
        ("eagle3", "sglang", "--speculative-num-draft-tokens 6"),
        ("dflash", "vllm", '"method": "dflash", "model": "DRAFTER", "num_speculative_tokens": 4'),
    ],
)
def test_script_exports_heads(run, tiny_target, tmp_path, capsys, kind, engine, says):
    drafter = made(kind, tiny_target("llama", layers=4))
    out = tmp_path / "out"
    assert main(arguments(run(drafter), engine, out)) == 0
    assert reread(out, drafter) < 1e-5
    card = (out / "README.md").read_text()
    assert says in card
    assert ("Transformers has no loader for such heads" in card) == (kind != "dflash")
    assert "library_name" not in card
    assert ("vllm serve" in card) == (engine != "sglang")


def test_script_says_which_engines_serve_a_kind(run, tiny_target, tmp_path, capsys):
    target = tiny_target("llama", layers=4)
    cases = [
        (made("medusa", target), "sglang", "must be one of vllm for a drafter of kind 'medusa'"),
        (made("eagle", target), "speculators", "must be one of vllm, sglang for a drafter of kind"),
        (made("eagle3", target), "transformers", "must be one of vllm, speculators, sglang"),
        (
            HydraDrafter.build(target, HydraSettings()),
            "vllm",
            "of kind 'hydra', its own format is all there is; engines serve causal_lm: ",
        ),
    ]
    for drafter, engine, complaint in cases:
        assert main(arguments(run(drafter), engine, tmp_path / "out")) == 2
        error = capsys.readouterr().err
        assert complaint in error
        assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_script_refuses_another_target_with_one_line(
    run, tiny_target, tiny_folder, tmp_path, capsys
):
    folder = run(made("medusa", tiny_target("llama", layers=4)))
    other = f"model.target={tiny_folder('llama', layers=4, seed=3)}"
    assert main([*arguments(folder, "vllm", tmp_path / "out"), other]) == 2
    error = capsys.readouterr().err
    assert "was made for another target" in error
    assert error.count("\n") == 1


def test_the_card_of_a_head_names_its_kind():
    card = model_card(
        None, Serving("org/model", "eagle3", 4), recipe="eagle3", engine="vllm",
        words=KINDS["eagle3"].words,
    )  # fmt: skip
    assert card.split("---\n")[2].startswith("\n# Drafter for `org/model`\n\nAn EAGLE-3 head for")
    assert yaml.safe_load(card.split("---\n")[1])["tags"][1] == "eagle3"
