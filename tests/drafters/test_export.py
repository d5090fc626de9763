import json
import shlex
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
)

from drafters.causal_lm import CausalLMDrafter
from drafters.export.card import Serving, is_hub_id, model_card
from drafters.export.hf import export, pad_vocabulary, reread
from eval.row import row_with
from phases.export import run_card
from scripts.export import main
from target.vocabulary import real_ids
from trainer.errors import RunFault, UserError

WORDS = 60
CARD = "---\ntags: [draft-model]\n---\ntext\n"
SHAPE = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip


@pytest.fixture
def tokenizer():
    vocabulary = {f"w{i}": i for i in range(WORDS - 2)} | {"<eos>": WORDS - 2, "<pad>": WORDS - 1}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


def llama(width=WORDS, tied=False, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=width, tie_word_embeddings=tied, **SHAPE)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    # rows around a common mean, so that many hidden states have only negative logits
    torch.nn.init.normal_(model.get_output_embeddings().weight, mean=0.3, std=0.1)
    return model


def written(model, tokenizer, width, folder, **changes):
    return export(
        model, tokenizer, width, folder, **{"num_assistant_tokens": 4, "card": CARD, **changes}
    )


def test_tokens_past_the_targets_embedding_are_no_obstacle(tokenizer, tmp_path):
    """A tokenizer may name more tokens than the target's embedding has rows."""
    tokenizer.add_tokens(["<extra>"])
    with pytest.raises(UserError, match="the tokenizer names ids up to"):
        written(llama(), tokenizer, WORDS, tmp_path / "out")
    written(llama(), tokenizer, WORDS, tmp_path / "out", known=WORDS)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == WORDS


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("own", "target"), [(WORDS, WORDS), (WORDS, 96), (80, 96), (96, 64), (64, 64)]
)
def test_padded_ids_are_never_the_argmax(tokenizer, tied, own, target):
    model = llama(own, tied)
    padded = pad_vocabulary(model, tokenizer, target)
    assert padded.config.vocab_size == target
    hidden = torch.randn(20_000, 32, generator=torch.Generator().manual_seed(1)) * 10
    logits = padded.get_output_embeddings()(hidden)
    assert logits.shape[-1] == target
    assert logits.argmax(-1).max() < WORDS
    negative = logits[:, :WORDS].max(-1).values < 0
    assert negative.any()  # where rows of zeros would have been drafted
    torch.testing.assert_close(logits[:, :WORDS], model.get_output_embeddings()(hidden)[:, :WORDS])
    assert (logits.softmax(-1)[:, WORDS:] < 1 / WORDS).all()


def test_padded_ids_are_never_the_argmax_in_bfloat16_and_with_a_bias(tokenizer):
    torch.manual_seed(0)
    shape = {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}
    model = PhiForCausalLM(PhiConfig(vocab_size=WORDS, **shape)).eval()
    torch.nn.init.normal_(model.lm_head.bias, mean=-9)  # all far below a padded bias of zero
    hidden = torch.randn(20_000, 32)
    assert pad_vocabulary(model, tokenizer, 96).lm_head(hidden).argmax(-1).max() < WORDS
    half = pad_vocabulary(llama(dtype=torch.bfloat16), tokenizer, 96)
    assert half.dtype == torch.bfloat16
    assert half.get_output_embeddings()(hidden.bfloat16()).float().argmax(-1).max() < WORDS


def test_ids_missing_inside_the_tokenizer_are_padding_too(tokenizer):
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    del state["model"]["vocab"]["w7"]
    gapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<eos>", pad_token="<pad>"
    )
    assert 7 not in real_ids(gapped)
    head = pad_vocabulary(llama(), gapped, WORDS).get_output_embeddings()
    assert not (head(torch.randn(5000, 32)).argmax(-1) == 7).any()


def test_padding_neither_changes_the_model_nor_the_random_state(tokenizer):
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    pad_vocabulary(model, tokenizer, 96)
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.config.vocab_size == WORDS
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_loads_as_an_ordinary_folder(tokenizer, tmp_path, tied, dtype):
    model = llama(tied=tied, dtype=dtype)
    folder = written(model, tokenizer, 96, tmp_path / "deep" / "out", eos_ids=(WORDS - 2, 5))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["out"]
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert loaded.dtype == dtype
    assert loaded.config.vocab_size == loaded.get_input_embeddings().weight.shape[0] == 96
    assert loaded.config.use_cache
    settings = loaded.generation_config
    assert settings.num_assistant_tokens == 4
    assert settings.num_assistant_tokens_schedule == "constant"
    assert settings.assistant_confidence_threshold == 0.0
    assert settings.eos_token_id == [WORDS - 2, 5]
    assert settings.pad_token_id == WORDS - 1
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()
    assert (folder / "README.md").read_text() == CARD
    # all widths here give the same float32 logits; LOGITS_TOLERANCE is for other processors
    assert reread(folder, model, real_ids(tokenizer)) <= 1e-6
    same = written(model, tokenizer, WORDS, tmp_path / "same")
    assert reread(same, model, real_ids(tokenizer)) == 0


def test_assisted_generation_with_the_export_equals_plain_greedy(tokenizer, tmp_path):
    target, drafter = llama(96, seed=1), llama(seed=2)
    target = pad_vocabulary(target, tokenizer, 96)
    drafter = AutoModelForCausalLM.from_pretrained(
        written(drafter, tokenizer, 96, tmp_path / "out")
    )
    prompt = torch.tensor([[1, 2, 3, 4]])
    options = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=WORDS - 1)
    plain = target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assisted = target.generate(
        prompt, attention_mask=torch.ones_like(prompt), assistant_model=drafter, **options
    )
    assert torch.equal(plain, assisted)


def damage(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda t: t.update({"model.extra.weight": torch.zeros(2)}),
            "unexpected keys.*model.extra",
        ),
        (lambda t: t.pop("model.norm.weight"), "missing keys.*model.norm.weight"),
        (lambda t: t["lm_head.weight"][3].add_(1e-3), "lm_head.weight.*differs"),
        (lambda t: t["model.layers.0.mlp.up_proj.weight"].mul_(1.001), "up_proj.weight.*differs"),
    ],
)
def test_reread_refuses_a_damaged_folder(tokenizer, tmp_path, change, complaint):
    model = llama()
    folder = written(model, tokenizer, 96, tmp_path / "out")
    damage(folder, change)
    with pytest.raises(RunFault, match=complaint):
        reread(folder, model, real_ids(tokenizer))


def test_reread_sees_a_wrong_configuration(tokenizer, tmp_path):
    model = llama()
    folder = written(model, tokenizer, 96, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    config["rms_norm_eps"] = 0.1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RunFault, match="logits differ"):
        reread(folder, model, real_ids(tokenizer))


def test_a_model_cast_with_its_rotary_buffers_is_refused(tokenizer, tmp_path):
    """`.to(bfloat16)` rounds the rotary frequencies, which loading does not: what was trained is
    not what would be served."""
    model = llama()
    for layer in model.model.layers:  # make attention count
        layer.self_attn.q_proj.weight.data *= 100
        layer.self_attn.o_proj.weight.data *= 100
    with pytest.raises(RunFault, match="logits differ"):
        written(model.to(torch.bfloat16), tokenizer, 96, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_failed_export_leaves_the_earlier_one(tokenizer, tmp_path, monkeypatch):
    folder = written(llama(), tokenizer, 96, tmp_path / "out", card="first")

    def fail(*_):
        raise RunFault("damaged")

    with monkeypatch.context() as patch:
        patch.setattr("drafters.export.hf.reread", fail)
        with pytest.raises(RunFault):
            written(llama(seed=5), tokenizer, 96, folder, card="second")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (folder / "README.md").read_text() == "first"
    written(llama(seed=5), tokenizer, 96, folder, card="second")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (folder / "README.md").read_text() == "second"


def test_other_folders_and_small_vocabularies_are_refused(tokenizer, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.md").write_text("precious")
    with pytest.raises(UserError, match=r"holds files that were not exported here \(chapter1.md\)"):
        written(llama(), tokenizer, 96, tmp_path / "thesis")
    with pytest.raises(UserError, match="use the target's tokenizer"):
        written(llama(), tokenizer, WORDS - 1, tmp_path / "out")
    assert (tmp_path / "thesis" / "chapter1.md").exists()
    assert not (tmp_path / "out").exists()


def test_model_card_front_matter_and_text():
    report = {"run": {"command": "train.py recipe=distillspec", "commit": "abc"}}
    card = model_card(
        report,
        Serving("org/model-8b", "draft_model", 6),
        recipe="distillspec",
        table="| a |\n| - |\n| 1 |",
    )
    _, front, body = card.split("---\n", 2)
    front = yaml.safe_load(front)
    assert front["base_model"] == "org/model-8b"
    assert front["library_name"] == "transformers"
    assert {"speculative-decoding", "draft-model"} <= set(front["tags"])
    assert "license" not in front
    assert "| a |\n| - |\n| 1 |" in body
    assert "train.py recipe=distillspec" in body
    assert "assistant_model=drafter" in body
    line = next(line for line in body.splitlines() if line.startswith("vllm serve org/model-8b"))
    settings = json.loads(line.split("'")[1])
    assert settings == {
        "method": "draft_model", "model": "DRAFTER", "num_speculative_tokens": 6,
        "draft_sample_method": "probabilistic",
    }  # fmt: skip
    served = Serving("org/model-8b", "medusa", 4)
    heads = model_card(None, served, recipe="medusa", engine="vllm")
    assert "draft_sample_method" not in heads  # vLLM draws no tokens of Medusa's heads


def test_the_card_of_a_block_drafter_has_the_commands_of_its_engine():
    served = Serving("a/b", "dflash", 7)
    cards = {name: model_card(None, served, recipe="dflash", engine=name)
             for name in ("transformers", "vllm", "speculators", "sglang", "llamacpp")}  # fmt: skip
    call = 'drafter = AutoModel.from_pretrained("DRAFTER")'
    assert [name for name, card in cards.items() if call in card] == ["transformers"]
    assert 'assistant_model=drafter, speculation_type="dflash")' in cards["transformers"]
    assert not any("has no loader" in card for card in cards.values())
    served = [name for name, card in cards.items() if "vllm serve a/b" in card]
    assert served == ["transformers", "vllm", "speculators"]
    assert "    --speculative-num-draft-tokens 8\n" in cards["sglang"]
    assert "num-steps" not in cards["sglang"]
    assert "--spec-type draft-dflash" in cards["llamacpp"]


@pytest.mark.parametrize("engine", ["transformers", "sglang"])
def test_a_card_serves_the_revision_of_the_target_that_the_drafter_was_trained_for(engine):
    head = engine == "sglang"
    served = Serving("a/b", "eagle" if head else "draft_model", 4)
    card, pinned = (
        model_card(None, replace(served, revision=revision), recipe="eagle", engine=engine)
        for revision in (None, "v1")
    )
    assert "revision" not in card
    assert f"{'--model-path' if head else 'vllm serve'} a/b --revision v1 " in pinned
    assert pinned.count('from_pretrained("a/b", revision="v1")') == (0 if head else 2)


def test_a_runs_card_names_its_revision_but_not_for_a_target_trained_with_the_drafter(tokenizer):
    data = SimpleNamespace(chat_template_kwargs={"enable_thinking": False})
    config = {"recipe": "distillspec", "eval": SimpleNamespace(K=4), "data": data}
    model = SimpleNamespace(target_revision="v2")
    run = SimpleNamespace(
        config=SimpleNamespace(model=model, **config), target=SimpleNamespace(name="org/model-8b")
    )
    about = {"vocab_size": WORDS, "eos_ids": [5]}
    drafter = CausalLMDrafter(llama(), tokenizer, WORDS, about)
    card, other = (
        run_card(run, drafter, "vllm", name, None) for name in ("org/model-8b", "trained")
    )
    assert "vllm serve org/model-8b --revision v2 " in card
    thinking = "--default-chat-template-kwargs '{\"enable_thinking\": false}' --spec"
    assert f"vllm serve trained {thinking}" in other


def test_servers_render_chats_as_the_training_text_was():
    served = Serving("a/b", "eagle3", 4, template={"enable_thinking": False})
    quoted = "'{\"enable_thinking\": false}'"
    assert f" --default-chat-template-kwargs {quoted} " in served.vllm("D")
    assert f" --default-chat-template-kwargs {quoted} " in served.sglang("D")
    assert f" --chat-template-kwargs {quoted} " in served.llamacpp("D")
    assert "template" not in replace(served, template={}).vllm("D")
    hostile = replace(served, template={"a": "'; rm -rf x; '"}, revision="$(x)")
    for command in (hostile.vllm("D"), hostile.sglang("D"), hostile.llamacpp("D")):
        words = shlex.split(command.replace("\\\n", " "))
        at = next(i for i, word in enumerate(words) if word.endswith("chat-template-kwargs"))
        assert json.loads(words[at + 1]) == {"a": "'; rm -rf x; '"}


def test_a_card_carries_the_headline_numbers_as_the_hubs_model_index():
    row = row_with(drafter="after", measured_by="offline", tokens_per_round=2.25, alpha=0.6,
                   temperature=1.0, K=4, num_prompts=96, prompts={"name": "gsm8k"})  # fmt: skip
    rows = [row, replace(row, drafter="before"), replace(row, measured_by="decoding"),
            replace(row, tree="eagle", alpha=None)]  # fmt: skip
    card = ModelCard(
        model_card({"results": rows}, Serving("a/b", "draft_model", 4), recipe="eagle")
    )
    found = [(r.metric_type, r.metric_value, r.metric_config) for r in card.data.eval_results]
    assert found == [
        ("tokens_per_round", 2.25, "T=1, K=4, 96 prompts"),
        ("alpha", 0.6, "T=1, K=4, 96 prompts"),
        ("tokens_per_round", 2.25, "T=1, tree eagle, 96 prompts"),
    ]
    assert card.data.eval_results[0].dataset_name == "gsm8k"
    assert card.data.eval_results[1].metric_name == "alpha, depth 1"  # of a head the first of many
    assert yaml.safe_load(str(card).split("---\n")[1])["model-index"][0]["name"] == "Drafter for b"


def test_model_card_of_a_local_target_names_no_base_model():
    served = Serving("assets/toy/target", "draft_model", 4)
    card = model_card(None, served, recipe=None, license="apache-2.0")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "apache-2.0"
    assert "base_model" not in front
    assert "Not measured." in card


def test_a_model_card_holds_no_secret_and_no_place_of_this_machine(monkeypatch):
    """Also that of a report which was written before or elsewhere."""
    monkeypatch.setenv("HOME", "/home/of-me")
    command = "train.py run.dir=/home/of-me/run data.system_prompt=glpat-abcdefghij0123456789"
    row = row_with(drafter="after", measured_by="offline", tokens_per_round=2.25, alpha=0.6,
                   temperature=1.0, K=4, num_prompts=96,
                   prompts={"name": "/data/of-us/set.jsonl"})  # fmt: skip
    card = model_card(
        {"run": {"command": command}, "results": [row]},
        Serving("/home/of-me/models/m", "draft_model", 4),
        recipe="eagle",
    )
    for part in ("/home", "of-me", "of-us", "glpat"):
        assert part not in card
    assert "`train.py run.dir=~/run data.system_prompt=<redacted: pass it again>`" in card
    assert "name: set.jsonl" in card
    assert "vllm serve ~/models/m --spec" in card
    assert 'from_pretrained("~/models/m")' in card


def test_hub_ids():
    assert is_hub_id("Qwen/Qwen3-8B")
    for name in ("assets/toy/target", "/data/model", "model", "tests/drafters", "a b/c", ""):
        assert not is_hub_id(name)


@pytest.fixture
def run(tokenizer, tmp_path):
    run = tmp_path / "run"
    llama().save_pretrained(run / "drafter")
    tokenizer.save_pretrained(run / "drafter")
    target = {"vocab_size": 96, "eos_ids": [5]}
    about = {"format": 1, "kind": "causal_lm", "vocab_size": WORDS, "target": target}
    (run / "drafter" / "drafter.json").write_text(json.dumps(about))
    model = {"target": "org/model-8b", "target_revision": "v2"}
    config = {"recipe": "distillspec", "model": model, "eval": {"K": 3}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_script_exports_with_the_settings_of_the_run(run, tmp_path, capsys, engine):
    out = tmp_path / "out"
    arguments = [f"script.drafter={run}/drafter", f"script.engine={engine}", f"script.out={out}"]
    assert main(arguments) == 0
    assert str(out) in capsys.readouterr().out
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.vocab_size == 96
    assert loaded.generation_config.num_assistant_tokens == 3
    assert loaded.generation_config.eos_token_id == 5
    assert "base_model: org/model-8b" in (out / "README.md").read_text()
    assert not (out / "drafter.json").exists()
    assert main([*arguments, "eval.K=7"]) == 0
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.num_assistant_tokens == 7


def test_numbers_of_the_run_are_of_its_own_target(run, tokenizer, tmp_path):
    """So is its revision. Another target with the same tokens may be named; nothing was measured
    with it. Its vocabulary may be padded otherwise, which vLLM compares, and its answers end
    otherwise."""
    other = tmp_path / "other"
    tokenizer.save_pretrained(other)
    model = llama(width=80)
    model.generation_config.eos_token_id = [5, 6]
    model.save_pretrained(other)
    out = tmp_path / "out"
    words = [f"script.drafter={run}/drafter", "script.engine=vllm", f"script.out={out}"]
    row = row_with(drafter="after", measured_by="offline", tokens_per_round=2.25, alpha=0.6,
                   temperature=1.0, K=4, num_prompts=96, prompts={"name": "gsm8k"})  # fmt: skip
    report = {"run": {"command": "train.py"}, "results": [row]}
    (run / "report.json").touch()
    with (
        mock.patch("scripts.export.read_report", return_value=report),
        mock.patch("scripts.export.markdown_table", return_value="| 2.25 |"),
    ):
        for same in ([], ["model.target=org/model-8b"]):
            assert main([*words, *same]) == 0
            card = (out / "README.md").read_text()
            assert "2.25" in card
            assert "org/model-8b --revision v2" in card
        assert main([*words, f"model.target={other}"]) == 0
    card = (out / "README.md").read_text()
    assert "Not measured." in card
    assert "revision" not in card
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.config.vocab_size == 80
    assert loaded.generation_config.eos_token_id == [5, 6, tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"script.drafter": None}, "script.drafter must be given"),
        ({"script.drafter": "nowhere"}, "no drafter in 'nowhere'"),
        (
            {"script.engine": "sglang"},
            "script.engine must be one of transformers, vllm, llamacpp, got 'sglang'",
        ),
        ({"script.ingine": "vllm"}, "unknown key 'script.ingine'; did you mean 'script.engine'?"),
        ({"eval.K": "0"}, "eval.K must be a whole number >= 1, got 0"),
        ({"eval.K": "true"}, "eval.K must be a whole number >= 1, got True"),
        (
            {"model.target": "no/such"},
            "model.target=no/such: its tokenizer and configuration cannot",
        ),
        ({"model.target": "assets/toy/target"}, "ids differently"),
    ],
)
def test_script_refuses_with_one_line(run, tmp_path, capsys, change, complaint):
    given = {
        "script.drafter": f"{run}/drafter",
        "script.engine": "vllm",
        "script.out": f"{tmp_path}/out",
    } | change
    assert main([f"{key}={value}" for key, value in given.items() if value]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert complaint in error
    assert not (tmp_path / "out").exists()


def test_script_refuses_other_kinds_and_drafters_outside_a_run(run, tmp_path, capsys):
    arguments = [
        f"script.drafter={run}/drafter",
        "script.engine=vllm",
        f"script.out={tmp_path}/out",
    ]
    (run / "config.yaml").unlink()
    assert main(arguments) == 2
    assert "model.target=" in capsys.readouterr().err
    (run / "drafter" / "drafter.json").write_text('{"format": 1, "kind": "medusa", "target": {}}')
    assert main(arguments) == 2
    assert "kind 'medusa'" in capsys.readouterr().err
    about = '{"format": 1, "kind": "causal_lm", "target": {}}'
    (run / "drafter" / "drafter.json").write_text(about)
    assert main([*arguments, "model.target=org/target"]) == 2
    assert "is damaged (KeyError('vocab_size'))" in capsys.readouterr().err
