"""The configuration: the order of its layers, its types, and that what is written is read back."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

import pytest
import yaml

import train
from data.config import DataConfig
from eval.config import EvalConfig
from phases import pipeline
from recipes import base
from recipes.common.config import Config, compose
from tests.helpers.commands import ROOT
from trainer.checks import require_address
from trainer.config import TrainerConfig, known_keys, parse_overrides, sections, to_yaml
from trainer.errors import UserError


@dataclass
class Method:
    beta: float = 0.5
    draft_temperature: float = 1.0
    steps: int = 3
    name: str = "a"
    width: int | None = None
    on: bool = True
    data_mix: dict[str, float] = field(default_factory=lambda: {"target": 0.5, "draft": 0.5})


def made(*words, layer=None, tmp_path=None, method=Method, recipe="test", **options):
    files = ()
    if layer is not None:
        files = (tmp_path / "layer.yaml",)
        files[0].write_text(layer)
    return compose(recipe, method, files, list(words), **options)


# layers


def test_defaults_then_the_yaml_then_the_command_line(tmp_path):
    layer = "trainer: {lr: 0.5, max_steps: 7}\nmethod: {beta: 0.1}\n"
    config = made("trainer.lr=0.25", layer=layer, tmp_path=tmp_path)
    assert config.trainer.batch_size == TrainerConfig().batch_size  # nobody said otherwise
    assert config.trainer.max_steps == 7
    assert config.method.beta == 0.1
    assert config.trainer.lr == 0.25


def test_sections_are_plain_dataclasses():
    config = made()
    assert type(config.data) is DataConfig
    assert type(config.method) is Method
    assert type(config.data.temperature) is list
    assert type(config.method.data_mix) is dict
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_mappings_are_replaced_as_a_whole(tmp_path):
    layer = "method: {data_mix: {fixed: 0.2, target: 0.8}}\n"
    assert made(layer=layer, tmp_path=tmp_path).method.data_mix == {"fixed": 0.2, "target": 0.8}
    config = made("method.data_mix={draft: 1}", layer=layer, tmp_path=tmp_path)
    assert config.method.data_mix == {"draft": 1}
    options = made("data.chat_template_kwargs={enable_thinking: false, effort: low}")
    assert options.data.chat_template_kwargs == {"enable_thinking": False, "effort": "low"}


def test_an_unknown_key_of_a_yaml_names_the_file(tmp_path):
    with pytest.raises(UserError, match=r"layer.yaml: unknown key 'trainer.lrr'; did you mean"):
        made(layer="trainer: {lrr: 1}", tmp_path=tmp_path)


@pytest.mark.parametrize(("content", "says"), [("a: [", "is not YAML"), (None, "does not exist")])
def test_a_yaml_that_cannot_be_read_is_named(tmp_path, content, says):
    path = tmp_path / "layer.yaml"
    if content:
        path.write_text(content)
    with pytest.raises(UserError, match=says):
        compose("test", Method, (path,), [])


# values


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("trainer.lr=1e-4", "trainer.lr", 1e-4),
        ("trainer.lr=1E-4", "trainer.lr", 1e-4),
        ("trainer.lr=1", "trainer.lr", 1.0),
        ("method.beta=5.0e-1", "method.beta", 0.5),
        ("method.width=null", "method.width", None),
        ("method.width=", "method.width", None),
        ("method.width=24", "method.width", 24),
        ("method.on=false", "method.on", False),
        ("method.on=no", "method.on", False),
        ("data.temperature=0.7", "data.temperature", [0.7]),
        ("data.temperature=1e-1", "data.temperature", [0.1]),
        ("data.temperature=[0, 0.7, 1]", "data.temperature", [0.0, 0.7, 1.0]),
        ("eval.temperatures=1", "eval.temperatures", [1.0]),
        ("eval.tree=eagle,siblings=top", "eval.tree", ["eagle,siblings=top"]),
        (
            "eval.tree=[dynamic:9:3, 'eagle,siblings=top']",
            "eval.tree",
            ["dynamic:9:3", "eagle,siblings=top"],
        ),
        ("eval.tree=null", "eval.tree", []),
        ("eval.tree=", "eval.tree", []),
        ("data.stop_strings=['\\n\\n', '###']", "data.stop_strings", ["\\n\\n", "###"]),
        ('data.stop_strings=["\\n"]', "data.stop_strings", ["\n"]),
        ("data.prompts=a=b.jsonl", "data.prompts", "a=b.jsonl"),
        ("model.target=Qwen/Qwen3-8B", "model.target", "Qwen/Qwen3-8B"),
    ],
)
def test_values_are_read_by_the_type_of_their_key(word, key, value):
    section, name = key.split(".")
    found = getattr(getattr(made(word), section), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("layer", ["trainer: {lr: 1e-4}", "eval: {temperatures: 1}"])
def test_a_yaml_file_reads_values_as_the_command_line_does(tmp_path, layer):
    (word,) = [f"{s}.{k}={v}" for s, kv in yaml.safe_load(layer).items() for k, v in kv.items()]
    assert made(layer=layer, tmp_path=tmp_path) == made(word)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("method.steps=2.5", "method.steps: cannot take 2.5"),
        ("method.steps=two", "method.steps: cannot take 'two'"),
        ("method.on=perhaps", "method.on: cannot take 'perhaps'"),
        ("trainer.lr=fast", "trainer.lr: cannot take 'fast'"),
        ("trainer.max_steps=null", "trainer.max_steps"),
        ("dry_run=flase", "dry_run"),
        ("run.seed=-1", "run.seed must lie in 0..2147483647, got -1"),
        ("run.seed=2147483648", "run.seed must lie in 0..2147483647, got 2147483648"),
        ("eval.seed=18446744073709551616", "eval.seed must lie in 0..2147483647, got 18446"),
        ("trainer.weight_decay=.inf", "trainer.weight_decay must be a number of float32: 0, or"),
        ("trainer.max_grad_norm=.inf", "trainer.max_grad_norm must be a number of float32"),
        ("trainer.lr=1e-45", "trainer.lr must be a number of float32"),
        ("trainer.lr=1e39", "trainer.lr must be a number of float32"),
        ("method.beta=.nan", "method.beta must be a number of float32: .*, got nan"),
        ("method.data_mix={target: .nan}", "method.data_mix.target must be a number of float32"),
        ("data.temperature=[1, 1e-45]", "data.temperature must be a number of float32"),
        ("data.temperature=9e-6", "data.temperature must be 0 or >= 1e-05: logits divided by"),
        ("eval.temperatures=[0, 9e-6]", "eval.temperatures must be 0 or >= 1e-05"),
        ("method.draft_temperature=9e-6", "method.draft_temperature must be 0 or >= 1e-05"),
        ("eval.temperatures=[1, 1.0]", "eval.temperatures must name each temperature once"),
        ("method.steps=1000000000000", "method.steps must be below 1000000000000, got 1000000"),
        ("data.samples_per_prompt=1000001", "data.samples_per_prompt must lie in 1..1000000"),
        ("trainer.batch_size=1000001", "trainer.batch_size must lie in 1..1000000"),
        ("eval.bootstrap_draws=1000001", "eval.bootstrap_draws must lie in 1..1000000"),
        ("trainer.lora_rank=1000001", r"trainer.lora_rank must lie in 0..1000000 \(0: off\)"),
        ("trainer.pack_tokens=1000001", "trainer.pack_tokens must lie in 0..1000000"),
        (
            "trainer.max_steps=5  trainer.lr_warmup_steps=6",
            r"trainer.lr_warmup_steps must lie in 0..5 \(trainer.max_steps\), got 6",
        ),
        ("data.chat_template_kwargs={1: 2}", "data.chat_template_kwargs must have text as its"),
        ("data.chat_template_kwargs={a: {1: 2}}", "data.chat_template_kwargs.a must have text as"),
        ("data.chat_template_kwargs={a: 2020-01-01}", "kwargs.a must hold text, numbers, lists"),
        ("data.chat_template_kwargs={a: '\ud800'}", "is not a YAML value"),
        ("data.system_prompt=a\0b", "data.system_prompt must be text in UTF-8 without NUL"),
        (
            "data.system_prompt=\udce9",
            r"must be text in UTF-8 without NUL characters, got '\\udce9'",
        ),
        ("data.stop_strings=['']", "data.stop_strings must hold text, got ''"),
        ("data.stop_strings=[No]", r"data.stop_strings must hold text alone.*, got \[False\]"),
        ("data.stop_strings=[[a]]", "data.stop_strings must hold text alone"),
        ("eval.engine=http://h:abc", "eval.engine must be http://host:port or https://host:port"),
        ("data.engine=openai  data.servers=[http://h:99999]", "data.servers must be http://host:p"),
        ("method.data_mix=0.5", "method.data_mix must be a mapping"),
        ("trainer.lr_schedule=step", "trainer.lr_schedule must be one of constant, linear"),
        ("trainer.precision=fp16", "trainer.precision must be one of auto, fp32, bf16"),
        ("data.features=disk", "data.features"),
        ("data.features_dtype=int4", "data.features_dtype"),
        ("data.top_p=0", r"data.top_p must lie in \(0, 1\], got 0"),
        ("data.eval_share=1", r"data.eval_share must lie in \[0, 1\)"),
        ("recipe", "arguments have the form key=value, got 'recipe'"),
        ("trainer.lr=1  trainer.lr=2", "key 'trainer.lr' is given twice"),
        ("script.out=x", "unknown key 'script.out'"),
    ],
)
def test_a_wrong_value_is_said_with_its_key(word, says):
    with pytest.raises(UserError, match=says) as error:
        made(*word.split("  "))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "value",
    ["9" * 5000, "0x" + "f" * 5000, "[" * 999, "&a [*a]", "2020-13-45", "{2020-01-01: 1}",
     "[" * 60 + "]" * 60],
)  # fmt: skip
@pytest.mark.parametrize("key", ["trainer.max_steps", "trainer.lr", "data.temperature"])
def test_a_value_that_python_cannot_hold_is_no_yaml(tmp_path, key, value):
    with pytest.raises(UserError, match=f"{key}: .* is not a YAML value") as error:
        made(f"{key}={value}")
    assert len(str(error.value)) < 500
    section, name = key.split(".")
    with pytest.raises(UserError, match=r"layer\.yaml is not YAML"):
        made(layer=f"{section}:\n  {name}: {value}\n", tmp_path=tmp_path)


def test_a_value_too_large_for_its_type_is_cut_in_the_line():
    with pytest.raises(
        UserError, match=r"trainer.lr: cannot take 999.*\.\.\. \(int too large"
    ) as e:
        made(f"trainer.lr={'9' * 4000}")
    assert len(str(e.value)) < 500


def test_what_is_named_twice_counts_twice():
    twice = made("data.temperature=[0.7, 0.7, 1]").data.temperature
    assert twice == [0.7, 0.7, 1.0]
    words = ("data.engine=openai", "data.servers=[http://a, http://a]")
    assert made(*words).data.servers == ["http://a", "http://a"]


def test_numbers_of_gpus_and_of_bytes_are_taken():
    words = ("model.device_map=auto", "model.max_memory={0: 20GiB, cpu: 64GiB}")
    assert made(*words).model.max_memory == {0: "20GiB", "cpu": "64GiB"}
    words = ("data.engine=vllm", "data.engine_options={kv_cache_memory_bytes: 20000000000}")
    assert made(*words).data.engine_options == {"kv_cache_memory_bytes": 20_000_000_000}
    assert made("data.temperature=1e-5").data.temperature == [1e-5]


# addresses


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1:8000", "https://a.example/v1/", "http://[::1]:80", "http://localhost"],
)
def test_an_address_is_taken(address):
    require_address("key", address)


@pytest.mark.parametrize(
    "address",
    ["ftp://h", "http://", "http://:80", "http://h:abc", "http://h:99999", "http://h:0",
     "http://h h", "http://[::1", "http://h?x=1", "http://h#x", "http://a..b", "http://h\u00f6",
     "http://" + "a" * 64 + ".b", "http://h\n"],
)  # fmt: skip
def test_what_is_no_address_is_refused(address):
    with pytest.raises(UserError, match=r"key must be http://host:port or https://host:port, got"):
        require_address("key", address)


@pytest.mark.parametrize("address", ["http://user:secret@h", "http://u:secret:x@h:abc"])
def test_a_password_in_an_address_is_refused_and_not_shown(address):
    with pytest.raises(UserError, match=r"no user name or password: .* OPENAI_API_KEY") as error:
        require_address("key", address)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("section", [DataConfig, TrainerConfig, EvalConfig])
def test_every_count_refuses_zero(section):
    counts = [
        "num_prompts",
        "max_new_tokens",
        "batch_size",
        "max_steps",
        "K",
        "save_every",
        "log_every",
    ]
    names = {f.name for f in dataclasses.fields(section)} & set(counts)
    assert len(names) >= 2
    for name in names:
        with pytest.raises(UserError, match=f"{name} must (be >= 1|lie in 1\\.\\.1000000), got 0"):
            section(**{name: 0})


def test_scripts_have_keys_of_their_own():
    config = made("script.out=x", script_keys=("out", "engine"))
    assert config.script == {"out": "x", "engine": None}


def test_overrides_know_their_keys():
    known = known_keys({**sections(Config), "method": Method})
    assert {"run.seed", "data.prompts", "eval.K", "method.beta"} < set(known)
    assert parse_overrides(["run.seed=3"], known) == {"run.seed": 3}
    with pytest.raises(UserError, match=r"'method.beat'; did you mean 'method.beta'"):
        parse_overrides(["method.beat=3"], known)


# written and read back


@pytest.mark.parametrize("name", base.names())
def test_config_yaml_composes_to_the_same_configuration(tmp_path, name):
    module, files = base.load(name)
    words = [
        "trainer.lr=3e-5", "data.temperature=[0, 1]", "data.stop_strings=['a: b', '\\n']",
        "data.chat_template_kwargs={a: {b: 1}}", "run.dir=x", "eval.policy=confidence:0.5",
    ]  # fmt: skip
    config = compose(name, module.Config, files, words)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    again = compose(name, module.Config, (tmp_path / "config.yaml",), [])
    assert again == config
    assert again.hash() == config.hash()


@pytest.mark.parametrize("name", base.names())
def test_every_recipe_says_in_its_yaml_only_what_differs(name):
    module, files = base.load(name)
    for path in files:
        assert compose(name, module.Config, files, []) != compose(name, module.Config, (), [])
        assert path.parent == ROOT / "recipes"


PRESETS = [(name, preset) for name in base.names() for preset in base.presets(name)]


@pytest.mark.parametrize("wanted", ["published", "laptop"])
def test_every_recipe_has_the_setting_of_its_paper_and_one_for_a_laptop(wanted):
    assert {name for name, preset in PRESETS if preset == wanted} == set(base.names())


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_a_preset_lies_between_the_yaml_of_the_recipe_and_the_command_line(capsys, name, preset):
    own = pipeline.resolve([f"recipe={name}"])[0]
    words = [f"recipe={name}", f"preset={preset}"]
    taken = pipeline.resolve(words)[0]
    assert taken.trainer.max_steps != own.trainer.max_steps
    assert taken.trainer.precision == ("fp32" if preset == "laptop" else "bf16")
    assert pipeline.resolve([*words, "trainer.max_steps=200000"])[0].trainer.max_steps == 200_000
    assert taken.hash() != own.hash()
    words += ["model.target=assets/toy/target", "data.num_prompts=8", "eval.num_prompts=8"]
    too_long = (name, preset) == ("fastdraft", "published")  # its texts, for the toy
    assert train.main([*words, "dry_run=true"]) == (2 if too_long else 0)
    assert f"  max_steps: {taken.trainer.max_steps}\n" in capsys.readouterr().out


PUBLISHED = {  # what the papers and their code state, by recipe and preset
    ("distillspec", "published"): "trainer.max_steps=300000 trainer.batch_size=32 trainer.lr=3e-4 "
    "trainer.lr_warmup_steps=5000 method.algorithm=on_policy_gkd data.num_prompts=204000",
    ("fastdraft", "published"): "method.continue_steps=14300 method.draft_layers=6 "
    "method.draft_hidden_size=512 eval.K=3 data.num_prompts=100000",
    ("medusa", "published"): "method.num_heads=5 trainer.lr=2e-3 trainer.lr_warmup_steps=40 "
    "trainer.batch_size=2 trainer.gradient_accumulation_steps=4",
    ("medusa2", "published"): "trainer.lr=1e-4 method.heads_lr_multiplier=4 "
    "method.heads_weight=0.01 trainer.lr_warmup_steps=20 data.temperature=0.3",
    ("hydra", "published"): "trainer.lr=1e-3 trainer.lr_warmup_steps=100",
    ("hydrapp", "published"): "trainer.lr=5e-4 trainer.weight_decay=0.1",
    ("eagle", "published"): "trainer.lr=3e-5 trainer.lr_warmup_steps=2000 method.feature_noise=0.1",
    ("eagle", "hass"): "trainer.lr=1e-5 method.steps=3 method.top_weight=1 method.base_lr=3e-5",
    ("eagle3", "published"): "trainer.lr=5e-5 trainer.lr_warmup_steps=12000 method.steps=7",
    ("dflash", "published"): "trainer.lr=6e-4 method.block_size=16 method.draft_layers=5 "
    "method.anchors=512 method.divergence=ce_hard eval.K=15",
    ("dspark", "published"): "method.block_size=7 method.from_anchor=true method.correction=markov "
    "method.correction_rank=256 method.label_weight=0.1 method.divergence_weight=1.8 "
    "method.confidence_weight=1 method.depth_decay=0.78 trainer.lr=6e-4 eval.K=7",
    ("domino", "published"): "method.correction=gru method.correction_rank=256 "
    "method.correction_width=1024 method.anchors=256 method.depth_decay=0.867 "
    "method.divergence=ce_hard method.base_share=1 eval.K=15",
    ("block_head", "published"): "method.causal=true method.block_size=16 method.divergence=fkl "
    "eval.K=15",
    ("gto", "published"): "trainer.lr=5e-6 method.num_groups=16 method.group_size=8 "
    "method.base_preset=published method.aggregation=lse method.omega=0.5",
    ("osd", "published"): "method.K=5 trainer.batch_size=8 trainer.lr=1e-4 data.max_new_tokens=128 "
    "eval.max_new_tokens=128 method.offline_lr=2e-5",
    ("specdecpp", "published"): "method.num_layers=3 method.reject_weight=6 method.mix=0.15 "
    "method.K_max=20 method.top_k=50 data.top_k=50 eval.top_k=50 eval.temperatures=[1]",
}


@pytest.mark.parametrize(("recipe", "preset"), PUBLISHED)
def test_presets_hold_published_numbers(recipe, preset):
    words = [f"recipe={recipe}", f"preset={preset}"]
    taken = pipeline.resolve(words)[0]
    stated = pipeline.resolve([*words, *PUBLISHED[recipe, preset].split()])[0]
    assert stated == taken


def test_a_published_tree_of_64_nodes_counts_its_root():
    for name in ("medusa", "medusa2", "hydra", "hydrapp"):
        published = pipeline.resolve([f"recipe={name}", "preset=published"])[0]
        assert published.eval.tree == ["calibrated:63"]


def test_presets_hold_the_quirks_of_published_code():
    def method(name):
        return pipeline.resolve([f"recipe={name}", "preset=published"])[0].method

    for name in ("medusa", "medusa2", "hydra", "hydrapp"):
        assert method(name).draft_vocab_size == 0
        assert method(name).tie_layers
        assert not base.load(name)[0].Config().tie_layers
    for name in ("hydra", "hydrapp"):
        assert not method(name).identity_residual
    assert method("specdecpp").shared_blocks
    assert (method("eagle3").steps, method("eagle3").draft_vocab_size) == (7, 32_000)
    hass = pipeline.resolve(["recipe=eagle", "preset=hass"])[0].method
    assert (hass.steps, hass.top_weight, hass.feature_noise) == (3, 1, 0.1)
    assert hass.base_max_steps  # it starts from a trained head


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["preset=hass"], r"preset must be one of laptop, published, got 'hass'"),
        (["preset=published", "preset=published"], r"name one preset, got preset=published pr"),
        (["preset="], r"preset must be one of laptop, published, got ''"),
    ],
)
def test_a_preset_that_is_not_there_is_refused(words, says):
    with pytest.raises(UserError, match=says):
        pipeline.resolve(["recipe=medusa", *words])


def test_the_hash_is_of_what_can_change_a_number(tmp_path):
    config = made()
    for word in ("run.dir=elsewhere", "dry_run=true"):
        assert made(word).hash() == config.hash()
    assert made("script.out=x", script_keys=("out",)).hash() == config.hash()
    words = ["run.seed=1", "trainer.lr=0.5", "method.beta=0.6", "data.top_k=1", "eval.K=3",
             "model.target=x", "method.data_mix={target: 1.0}"]  # fmt: skip
    assert len({config.hash(), *(made(word).hash() for word in words)}) == len(words) + 1
    assert made(recipe="other").hash() != config.hash()


def test_the_run_folder_is_named_by_recipe_and_hash():
    config = made()
    assert str(config.run_dir) == f"runs/test-{config.hash()}"
    assert str(made("run.dir=here/there").run_dir) == "here/there"


@pytest.mark.parametrize("text", ["Note: be brief", "# hi", "yes", "off", "[a]", "1e-4"])
def test_text_is_taken_as_it_stands(text):
    config = compose("distillspec", Method, (), [f"data.system_prompt={text}"])
    assert config.data.system_prompt == text


def test_quotes_around_text_are_dropped_and_null_is_none():
    given = ['data.system_prompt="a: b"', "model.drafter=null", "trainer.wandb=off"]
    config = compose("distillspec", Method, (), given)
    assert (config.data.system_prompt, config.model.drafter) == ("a: b", None)
    assert config.trainer.wandb == "off"


def test_how_often_a_run_saves_is_no_part_of_its_identity():
    one = compose("distillspec", Method, (), [])
    free = ["trainer.save_every=7", "trainer.wandb=offline", "run.stage=x", "run.dir=y"]
    assert compose("distillspec", Method, (), free).hash() == one.hash()
    assert compose("distillspec", Method, (), ["trainer.lr=7"]).hash() != one.hash()


def test_one_tree_and_a_list_of_it_name_the_same_run():
    def hash_with(*words):
        return compose("distillspec", Method, (), list(words)).hash()

    assert hash_with("eval.tree=eagle") == hash_with("eval.tree=[eagle]")
    assert hash_with("eval.tree=null") == hash_with()
    assert hash_with("eval.tree=[eagle, dynamic:9:3]") != hash_with("eval.tree=eagle")


@pytest.mark.parametrize(
    "text", ["Price ${5}", "${oc.env:HOME}", "${run.seed}", "${", "$${a}", "\\${a}"]
)
def test_text_is_taken_literally_never_looked_up(tmp_path, text):
    words = [f"data.system_prompt={text}", f"data.stop_strings={json.dumps([text])}",
             f"data.chat_template_kwargs={json.dumps({'a': text})}"]  # fmt: skip
    config = compose("none", Method, (), words)
    assert config.data.system_prompt == text
    assert config.data.stop_strings == [text]
    assert config.data.chat_template_kwargs == {"a": text}
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert compose("none", Method, (tmp_path / "config.yaml",), []).to_dict() == config.to_dict()


def test_a_number_is_never_looked_up_in_the_environment(monkeypatch):
    monkeypatch.setenv("SEED", "7")
    with pytest.raises(UserError, match=r"run.seed: cannot take '\$\{oc.env:SEED\}'"):
        compose("none", Method, (), ["run.seed=${oc.env:SEED}"])
