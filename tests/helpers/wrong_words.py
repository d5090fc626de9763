"""What people write by mistake on the command line of train.py, and what its error line says.

tests/test_bad_input.py runs them, tests/freeze.py keeps the whole lines.
"""

# on top of a tiny run of recipe=distillspec; refused before any model is loaded
WORDS = [
    ("recipe=destilspec", ["unknown recipe 'destilspec'", "did you mean 'distillspec'?"]),
    ("trainer.max_step=3", ["'trainer.max_step'", "did you mean 'trainer.max_steps'?"]),
    ("method.draft_layer=3", ["'method.draft_layer'", "did you mean 'method.draft_layers'?"]),
    ("data=3", "unknown key 'data'"),
    ("trainer.max_steps=many", ["trainer.max_steps", "'many'"]),
    ("trainer.max_steps=1.5", ["trainer.max_steps", "1.5"]),
    ("trainer.lr=[1]", ["trainer.lr", "[1]"]),
    ("trainer.lr=0", "trainer.lr must be > 0 and finite, got 0.0"),
    ("trainer.lr={a", "trainer.lr: '{a' is not a YAML value"),
    ("data.temperature=[]", "data.temperature must name at least one"),
    ("data.temperature=-1", "data.temperature must be >= 0"),
    ("data.temperature=warm", "data.temperature"),
    ("data.temperature=[[1]]", "data.temperature must hold numbers alone, got [[1]]"),
    ("eval.temperatures=[{a: 1}]", "eval.temperatures must hold numbers alone"),
    ("run.dir=~/x", "run.dir=~/x: a shell has not replaced the ~"),
    ("data.engine=vlm", "data.engine must be one of hf, vllm, openai, got 'vlm'"),
    ("data.chat_template_kwargs=yes", "data.chat_template_kwargs must be a mapping"),
    ("eval.K=0", "eval.K must be >= 1, got 0"),
    ("eval.policy=confidence:2", "eval.policy='confidence:2': threshold must lie in [0, 1]"),
    ("eval.policy=confidence:high", "'confidence:high': threshold must be a number, got 'h"),
    ("eval.drafter=x", "eval.drafter must be left to scripts.evaluate"),
    ("method.divergence=kl", ["method.divergence must be one of fkl[", "fkl"]),
    ("method.divergence=jsd:1.3", "='jsd:1.3': beta must lie in [0, 1], got 1.3"),
    ("method.algorithm=seq_kd", ["must be one of seqkd, supervised_kd", "did you mean 'seqkd'?"]),
    ("method.data_mix={target: 0.5}", ["method.data_mix", "sum to 1", "{'target': 0.5}"]),
    ("method.data_mix={target: 1.5, draft: -0.5}", ["method.data_mix", ">= 0", "-0.5"]),
    ("method.data_mix={human: 1}", ["fixed, target, draft", "'human'"]),
    ("method.data_mix={target: all}", ["method.data_mix", "'all'"]),
    ("method.data_mix={}", "method.data_mix"),
    ("method.draft_layers=0", "method.draft_layers must be >= 1, got 0"),
    ("data.prompts=nothing.jsonl", "prompts file nothing.jsonl does not exist"),
    ("data.prompts=toy:cod", ["'cod'", "available: code, prose, math"]),
]  # fmt: skip

# likewise; refused by what the target is
WORDS_OF_TARGET = [
    ("data.teacher_top_k=5000", "data.teacher_top_k must be at most"),
    ("run.stage=align", "run.stage must be one of control, distill, got 'align'"),
    ("method.draft_hidden_size=17", ["method.draft_hidden_size", "17"]),
    ("model.target=no/such/model", "model.target=no/such/model: there is no such file or fold"),
    ("eval.K=245", "eval.K must draft fewer than 245 tokens: the target's context 256 less"),
    ("eval.tree=dynamic:9:300", "eval.tree must draft fewer than 245 tokens"),
    ("eval.max_new_tokens=256", "eval.max_new_tokens must be below the target's context 256"),
    ("data.max_new_tokens=256", ["max_new_tokens=256", "context of 256"]),
    ("data.max_prompt_tokens=5", ["13 tokens", "the limit is 5", "data.long_prompts=drop"]),
    ("data.system_prompt=Be brief.", ["data.system_prompt", "without a chat template"]),
]  # fmt: skip

# nothing besides
MALFORMED = [
    (
        ["data.num_prompts=3"],
        "name one recipe as recipe=<name>; available: block_head, dflash, distillspec",
    ),
    (["recipe=distillspec", "trainer.lr"], "arguments have the form key=value"),
    (["recipe=distillspec", "run.seed=1", "run.seed=2"], "'run.seed' is given twice"),
    (["recipe=distillspec", "--help"], "key=value"),
]

# recipe and words, on top of a tiny run of it
HEADS = [
    ("eagle3", [], "the defaults [1, 0, -2] collide on a target of 2 layers"),
    ("eagle3", ["method.layers=[0,2]"], "layer id must lie in 0..1"),
    ("eagle3", ["method.layers=[1,1]"], "must be distinct"),
    ("eagle3", ["method.layers=[0,1]", "method.draft_vocab_size=101"], "lie in 1..100"),
    ("eagle3", ["method.layers=[0,1]", "eval.tree=dynamic:9"], "eval.tree must be dynamic:"),
    ("medusa", ["method.num_heads=0"], "method.num_heads must be >= 1"),
    ("medusa", ["method.draft_vocab_size=101"], "method.draft_vocab_size must lie in 1..100"),
    ("medusa", ["eval.K=9", "eval.tree=null"], "this drafter has 4 heads"),
    (
        "medusa",
        ["eval.tree=no/such.json"],
        "a JSON file of rank paths is named as static:no/such.json",
    ),
    ("hydra", ["method.dropout=1"], "method.dropout"),
    (
        "hydra",
        ["eval.engine=vllm", "eval.tree=null"],
        "no engine loads a drafter of kind 'hydra'",
    ),
    ("eagle", ["method.steps=0"], "method.steps must be >= 1"),
    ("eagle", ["model.drafter=none/such"], "model.drafter"),
]
