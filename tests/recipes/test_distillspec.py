"""DistillSpec: what its options change, where its text comes from, and the pitfalls of the method,
each with a test that names it."""

from __future__ import annotations

import json

import pytest
import torch

import train
from data.batches import Batches, collate
from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.prompts import Prompt
from drafters.base import TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from phases.source import sample_drafter
from recipes import distillspec
from recipes.base import Context, Needs
from recipes.distillspec import ALGORITHMS, Config, Recipe
from tests.helpers.aligned import align
from tests.helpers.commands import command, read_jsonl
from tests.helpers.losses import divergence, listed, ordered
from tests.helpers.objectives import Trained, trained
from tests.helpers.tiny import EOS, tiny_model
from trainer.divergence import DIVERGENCES
from trainer.errors import RunFault, UserError
from trainer.logits import OutputHead

MIXED = {"target": 0.5, "draft": 0.5}
MIX_WORD = "method.data_mix={target: 0.5, draft: 0.5}"
LATE = 10**6  # a step after every warm start


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def traces(target, tmp_path_factory):
    """Of 4 to 12 tokens, with a compressed teacher: an exact head and samples of the tail."""
    prompts = [Prompt(f"Question {i}: ", None, "yes.", "test", "", f"c{i}") for i in range(16)]
    plan = GenerationPlan(
        "test", tuple(prompts), (1.0,), max_new_tokens=12, teacher_top_k=8, teacher_samples=16
    )
    folder = tmp_path_factory.mktemp("traces")
    made = [*generate_traces(target, plan, folder, batch_size=16, rows_per_shard=16)]
    per_token = [
        "response_ids",
        "teacher_ids",
        "teacher_logp",
        "teacher_log_tail",
        "tail_ids",
        "tail_logp",
    ]
    for trace in made:
        for name in per_token:
            setattr(trace, name, getattr(trace, name)[: 4 + trace.index % 9])
    return made


DRAFT = {"draft": 1.0}


def make(target, row="after", **options) -> Trained:
    recipe = Recipe(Config(**options), target)
    torch.manual_seed(0)
    number = [stage.row for stage in recipe.stages()].index(row)
    return trained(recipe, recipe.build([]), stage=number, new=8)


def batch_of(traces, size=8, teacher=False, mix=None):
    return Batches(traces, mix or {"target": 1.0}, size, seed=0, teacher=teacher).at(0)


def loss_of(recipe, batch, step=LATE, later=False) -> torch.Tensor:
    request = recipe.target_request(batch, step)
    outputs = None
    if request is not None:
        outputs = recipe.target.outputs(
            batch.input_ids, batch.position_ids, layers=request.layers, logits=request.logits,
            project_later=later,
        )  # fmt: skip
    ((total, count, weight),) = listed(recipe.loss(batch, outputs, step).terms)
    assert weight == 1
    assert [float(count)] == ordered(recipe.denominators(batch, step))
    return total / count


def context_of(recipe, batch, seed=0) -> Context:
    def generate(prompts, temperature, max_new_tokens, stream):
        return sample_drafter(
            recipe.drafter, prompts, recipe.target, temperature, max_new_tokens, seed + stream
        )

    return Context(batch, recipe.drafter, generate, lambda: None)


def drawn(recipe, traces, index=0, seed=0, lengths=()):
    batch = Batches(traces, {"draft": 1.0}, 8, seed=0, lengths=lengths).at(index)
    return recipe.refresh(0, context_of(recipe, batch, seed))


# every option changes the loss


def test_every_divergence_gives_another_loss(target, traces):
    batch = batch_of(traces)
    values = {loss_of(make(target, divergence=name), batch).item() for name in DIVERGENCES}
    assert len({round(value, 5) for value in values}) == len(DIVERGENCES)


@pytest.mark.parametrize(
    ("common", "change"),
    [
        ({"divergence": "jsd"}, {"divergence": "jsd:0.2"}),
        ({"divergence": "lk_hybrid"}, {"divergence": "lk_hybrid:1"}),
        ({"divergence": "kl_mix"}, {"divergence": "kl_mix:0.3"}),
        ({}, {"divergence": "jsd,draft_temperature=2"}),
        ({}, {"divergence": "jsd,teacher_temperature=2"}),
        (
            {"divergence": "jsd,draft_temperature=2"},
            {"divergence": "jsd,draft_temperature=2,temperature_scale=true"},
        ),
        ({}, {"reduction": "sequence"}),
        ({}, {"draft_layers": 2}),
        ({}, {"draft_hidden_size": 24}),
        ({"divergence": "tvd"}, {"warm_start_steps": LATE + 1}),
    ],
    ids=str,
)
def test_every_option_of_the_loss_changes_it(target, traces, common, change):
    batch = batch_of(traces)
    plain = loss_of(make(target, **common), batch)
    changed = loss_of(make(target, **common | change), batch)
    assert abs((plain - changed).item()) > 1e-5


@pytest.mark.parametrize("approx", [None, "bucket"])
def test_the_stored_teacher_changes_the_loss(target, traces, approx):
    batch = batch_of(traces, teacher=True)
    common = {"divergence": "fkl", "data_mix": {"target": 1.0}}
    live = loss_of(make(target, **common), batch_of(traces))
    stored = loss_of(make(target, teacher="compressed", approx=approx, **common), batch)
    assert abs((live - stored).item()) > 1e-4


def run_losses(folder, target, *words):
    settings = (
        "trainer.log_every=1", "trainer.max_steps=5", "eval.temperatures=0", "eval.num_prompts=1",
        "eval.timing_prompts=0", "method.control=false",
    )  # fmt: skip
    assert train.main(command(folder, target, *settings, *words)) == 0
    return read_jsonl(folder / "run" / "metrics.jsonl")


@pytest.fixture(scope="module")
def usual_run(tmp_path_factory, tiny_folder):
    return run_losses(tmp_path_factory.mktemp("usual"), tiny_folder("llama"))


@pytest.fixture(scope="module")
def mixed_run(tmp_path_factory, tiny_folder):
    """The usual run with draft text, which the options of draft text change."""
    return run_losses(tmp_path_factory.mktemp("mixed"), tiny_folder("llama"), MIX_WORD)


@pytest.mark.slow
@pytest.mark.parametrize(
    "word",
    [
        "method.data_mix={target: 0.5, draft: 0.5}",
        "method.data_mix={fixed: 0.5, draft: 0.5}",
        "method.data_mix={target: 0.5, draft: 0.5} method.mix_per=example",
        "method.data_mix={target: 0.5, draft: 0.5} method.draft_ramp_share=1",
        "method.warm_start_steps=2",
        "method.algorithm=on_policy_gkd",
    ],
)
def test_every_option_of_the_data_changes_the_losses(
    tmp_path, tiny_folder, usual_run, mixed_run, word
):
    words = word.split(" method.")
    given = [words[0], *(f"method.{rest}" for rest in words[1:])]
    rows = run_losses(tmp_path, tiny_folder("llama"), *given)
    if len(given) > 1:
        usual_run = mixed_run
    assert [r.get("loss") for r in rows] != [r.get("loss") for r in usual_run]
    # pitfall 9: whatever is trained on, what is measured is the target's own text
    evaluations = [[r["eval"] for r in each if r["step"] == 0] for each in (rows, usual_run)]
    assert evaluations[0] == evaluations[1]


# named algorithms


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_named_algorithm_sets_divergence_and_mix(name):
    config = Config(algorithm=name)
    assert (config.divergence, config.data_mix) == ALGORITHMS[name]
    assert Config(algorithm=name, divergence=config.divergence, data_mix=config.data_mix) == config


@pytest.mark.parametrize(
    "change",
    [
        {"divergence": "tvd"}, {"data_mix": {"fixed": 1.0}},
        {"divergence": "jsd"}, {"data_mix": {"target": 1.0}},  # the defaults, where they are named
    ],
)  # fmt: skip
def test_a_named_algorithm_refuses_contradictions(change):
    with pytest.raises(UserError, match=r"algorithm=imitkd fixes method.divergence=fkl and"):
        Config(algorithm="imitkd", **change)


def test_without_an_algorithm_jsd_on_the_targets_text_is_the_default():
    assert (Config().divergence, Config().data_mix) == ("jsd", {"target": 1.0})


@pytest.mark.parametrize(
    ("name", "options"),
    [("control", {"divergence": "jsd,draft_temperature=2,temperature_scale=true"}),
     ("after", {"divergence": "ce_hard"})],
)  # fmt: skip
def test_the_control_learns_labels_at_temperature_1(name, options, target, traces):
    batch = batch_of(traces)
    plain = loss_of(make(target, row="control"), batch)
    assert loss_of(make(target, row=name, **options), batch) == plain


def test_logits_made_where_they_are_looked_at_give_the_same_loss(target, traces):
    batch = batch_of(traces)
    for name in ("fkl", "tvd"):
        recipe = make(target, divergence=name)
        whole, later = loss_of(recipe, batch), loss_of(recipe, batch, later=True)
        torch.testing.assert_close(later, whole)


def test_hard_labels_need_no_target(target, traces):
    recipe, batch = make(target, algorithm="seqkd"), batch_of(traces)
    assert recipe.target_request(batch, 0) is None
    logits = recipe.drafter.draft_logits(batch.input_ids)
    aligned = align(batch.input_ids, batch.loss_mask, logits, None)
    expected = torch.nn.functional.cross_entropy(aligned.draft, aligned.labels)
    torch.testing.assert_close(loss_of(recipe, batch), expected)


def test_stages_say_what_text_they_need(target):
    recipe = make(target, data_mix=MIXED, mix_per="example", draft_ramp_share=0.3)
    control, main = recipe.stages()
    assert control.data == Needs({"fixed": 1.0})
    assert main.data == Needs({"target": 0.5, "draft": 0.5}, "example", 0.3, teacher=False)
    assert (control.row, main.row, control.start, main.start) == (
        "control",
        "after",
        "base",
        "base",
    )
    assert [s.row for s in make(target, control=False).stages()] == ["after"]


def test_sequence_reduction_is_the_mean_over_sequences(target, traces):
    batch = batch_of(traces)
    recipe = make(target, divergence="fkl", reduction="sequence")
    alone = [
        loss_of(recipe, collate(batch.prompts[i : i + 1], batch.responses[i : i + 1], ["target"]))
        for i in range(8)
    ]
    torch.testing.assert_close(loss_of(recipe, batch), torch.stack(alone).mean())


# compressed teacher


@pytest.mark.parametrize(
    "options",
    [{"divergence": "fkl"}, {"divergence": "jsd", "approx": "bucket"},
     {"divergence": "tvd_pp", "approx": "bucket"}],
)  # fmt: skip
def test_a_stored_teachers_loss_is_the_same_in_chunks_and_keeps_no_logits(
    options, target, traces, monkeypatch
):
    batch, found, kept = batch_of(traces, teacher=True), [], []
    positions, width = int(batch.num_supervised), target.vocab_size
    for rows in (10**6, 5):
        monkeypatch.setattr(distillspec, "chunk_rows", lambda *_, rows=rows: rows)
        recipe = make(target, teacher="compressed", **options)
        sizes = []

        def note(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = loss_of(recipe, batch)
        loss.backward()
        found.append([loss, *(p.grad for p in recipe.drafter.parameters() if p.grad is not None)])
        kept.append(max(sizes))
    for whole, some in zip(*found, strict=True):
        torch.testing.assert_close(some, whole)
    assert max(kept) < positions * width


def test_live_and_compressed_teacher_agree_within_the_sampling_error(target, traces):
    batch, mix = batch_of(traces, 16, teacher=True), {"data_mix": {"target": 1.0}}
    stored = make(target, divergence="fkl", teacher="compressed", **mix)
    assert stored.target_request(batch, 0) is None
    live = make(target, divergence="fkl", **mix)
    outputs = target.outputs(batch.input_ids)
    logits = live.drafter.draft_logits(batch.input_ids)
    aligned = align(batch.input_ids, batch.loss_mask, logits, outputs.logits)
    # the compressed value is the cross-entropy: larger by the entropy of p, which has no gradient
    exact = divergence("ce_soft", aligned.draft, aligned.teacher)
    sampled = divergence("fkl", aligned.draft, batch.teacher)
    error = (exact - sampled).detach()
    assert len(error) > 90
    assert abs(error.mean()) < 4 * error.std() / len(error) ** 0.5
    assert error.std() > 0
    torch.testing.assert_close(loss_of(stored, batch), sampled.mean())

    def gradient(recipe, given):
        recipe.drafter.zero_grad()
        loss_of(recipe, given).backward()
        return torch.cat([p.grad.flatten() for p in recipe.drafter.parameters()])

    plain = batch_of(traces, 16)
    exact_gradient = gradient(live, plain)
    assert torch.cosine_similarity(exact_gradient, gradient(stored, batch), dim=0) > 0.85
    for name, values in vars(batch.teacher).items():  # what an error of one position would give
        setattr(batch.teacher, name, values.roll(1, 0))
    assert torch.cosine_similarity(exact_gradient, gradient(stored, batch), dim=0) < 0.5


# the pitfalls of distillspec.md, section 11


def test_pitfall_1_draft_text_is_ramped_up_over_the_first_tenth_of_the_steps(target, traces):
    needs = make(target, data_mix=MIXED).stages()[1].data
    assert needs.ramp_share == 0.1
    ramped = Batches(traces, needs.mix, 4, seed=0, ramp=int(needs.ramp_share * 1000))
    early = sum(ramped.at(i).sources[0] == "draft" for i in range(30))
    late = sum(ramped.at(i).sources[0] == "draft" for i in range(200, 230))
    assert early < 10 <= late


def dropping(seed=0):
    """A drafter of another architecture, with as much dropout as there can be."""
    half = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    return tiny_model("gpt2", seed, layers=1, width=16, **half)


def with_model(target, model, **options):
    recipe = make(target, **options)
    tokenizer, fingerprint = recipe.drafter.tokenizer, recipe.drafter.fingerprint
    recipe.drafter = CausalLMDrafter(model, tokenizer, target.vocab_size, fingerprint)
    return recipe


def test_pitfall_2_dropout_is_off_while_sampling_and_on_again_after(target, traces):
    recipe = with_model(target, dropping())
    recipe.drafter.eval()
    expected = drawn(recipe, traces).responses
    assert not recipe.drafter.training
    recipe.drafter.train()
    assert drawn(recipe, traces).responses == expected
    assert recipe.drafter.training
    assert recipe.drafter.model.transformer.drop.training
    ids = torch.tensor([[5, 6, 7, 8]])
    assert not torch.equal(
        recipe.drafter.draft_logits(ids), recipe.drafter.draft_logits(ids)
    )  # it would have shown


def test_pitfall_2_gradient_checkpointing_leaves_the_samples_alone(target, traces):
    recipe = make(target)
    expected = drawn(recipe, traces).responses
    recipe.drafter.gradient_checkpointing_enable()
    recipe.drafter.train()
    assert drawn(recipe, traces).responses == expected


def test_pitfall_3_length_is_capped_and_the_eos_rate_logged(target, traces):
    recipe = make(target)
    batch = drawn(recipe, traces)
    assert max(map(len, batch.responses)) == 8
    metrics = recipe.loss(batch, target.outputs(batch.input_ids), LATE).metrics
    ended = sum(response[-1] == EOS for response in batch.responses)
    total, count = metrics["draft_eos_rate"]
    assert (float(total), count) == (ended, 8)
    stored = recipe.loss(batch_of(traces), target.outputs(batch_of(traces).input_ids), LATE)
    assert "draft_eos_rate" not in stored.metrics


class Given(TrainedDrafter):
    """Stands for a drafter: the logits themselves are the parameter, its head the identity."""

    def __init__(self, shape, dtype=torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))

    def forward(self, text, outputs, depth, score):
        return score(iter([self.logits]))

    def output_head(self, depth):
        return OutputHead(torch.eye(self.logits.shape[-1], dtype=self.logits.dtype))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_pitfalls_4_and_5_exactly_the_response_and_its_eos_are_trained(target, name):
    """Also where padding has the id of the EOS, as here."""
    batch = collate([[10, 11, 12], [13]], [[14, EOS], [15, 16, 17, 18, EOS]], ["target"] * 2)
    recipe = make(target, divergence=name)
    recipe.drafter = Given((2, 6, 100))
    loss_of(recipe, batch).backward()
    touched = (recipe.drafter.logits.grad != 0).any(-1)
    assert touched.int().tolist() == [[0, 0, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]]


def test_pitfall_6_tvd_can_start_warm(target, traces):
    batch = batch_of(traces)
    warm = make(target, divergence="tvd", warm_start_steps=5)
    for name, step in (("fkl", 4), ("tvd", 5)):
        torch.testing.assert_close(
            loss_of(warm, batch, step), loss_of(make(target, divergence=name), batch)
        )
    assert make(target, algorithm="seqkd").target_request(batch, 0) is None  # no target to ask


@pytest.mark.parametrize("name", DIVERGENCES)
def test_pitfall_8_the_softmax_of_bfloat16_logits_is_taken_in_float32(target, traces, name):
    batch = batch_of(traces)
    recipe = make(target, divergence=name)
    recipe.drafter = Given((*batch.input_ids.shape, 100), torch.bfloat16)
    half = loss_of(recipe, batch)
    assert half.dtype == torch.float32
    recipe.drafter = recipe.drafter.float()
    torch.testing.assert_close(half, loss_of(recipe, batch))


@pytest.mark.slow
def test_pitfall_10_the_checkpoint_is_chosen_by_acceptance_on_held_out_traces(
    tmp_path, tiny_folder
):
    words = ("trainer.eval_every=1", "trainer.lr=0.1", "data.num_prompts=16")
    rows = run_losses(tmp_path, tiny_folder("llama"), *words)
    alphas = {r["step"]: r["eval"]["alpha"] for r in rows if "eval" in r}
    assert len(alphas) == 6
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    best = report["drafter"]["stages"]["distill"]
    assert best["best_dev_alpha"] == max(alphas.values()) == alphas[best["best_step"]]


@pytest.mark.parametrize("name", sorted(set(DIVERGENCES) - {"fkl", "ce_soft", "ce_hard"}))
def test_pitfall_11_a_compressed_teacher_refuses_what_is_not_linear_in_it(name):
    mix = {"target": 1.0}
    with pytest.raises(UserError, match="CompressedTeacherError"):
        Config(divergence=name, teacher="compressed", data_mix=mix)
    assert Config(divergence=name, teacher="compressed", data_mix=mix, approx="bucket")


def test_pitfall_12_the_control_is_plain_cross_entropy_for_as_many_steps(target, traces):
    recipe, batch = make(target, row="control"), batch_of(traces, mix={"fixed": 1.0})
    assert recipe.stages()[0].overrides == {}
    assert recipe.target_request(batch, 0) is None
    expected = loss_of(make(target, divergence="ce_hard"), batch)
    torch.testing.assert_close(loss_of(recipe, batch), expected)


# text drawn from the drafter


def test_draft_text_comes_from_the_drafter_as_it_is_now(target, traces, monkeypatch):
    monkeypatch.setattr("recipes.distillspec.GENERATION_TEMPERATURE", 1e-4)
    recipe = make(target, data_mix=DRAFT)
    before = drawn(recipe, traces)
    with torch.no_grad():
        for parameter in recipe.drafter.parameters():
            parameter.mul_(1.5)
            parameter.add_(0.1 * torch.randn(parameter.shape))
    after = drawn(recipe, traces)
    assert before.responses != after.responses
    for prompt, response in zip(after.prompts, after.responses, strict=True):
        ids = torch.tensor([prompt])
        plain = recipe.drafter.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
        )
        assert plain[0, len(prompt) :].tolist() == response


def test_draft_rows_alone_get_new_responses(target, traces):
    recipe = make(target, mix_per="example")
    some = Batches(traces, {"target": 0.5, "draft": 0.5}, 8, seed=0, per="example").at(0)
    assert {"target", "draft"} == set(some.sources)
    fresh = recipe.refresh(0, context_of(recipe, some))
    for i, source in enumerate(some.sources):
        assert (fresh.responses[i] == some.responses[i]) == (source == "target")
    assert (fresh.prompts, fresh.sources, fresh.index) == (some.prompts, some.sources, some.index)
    assert fresh.num_supervised == sum(map(len, fresh.responses))


def test_draft_text_is_drawn_for_every_batch_and_padded_like_it(target, traces):
    recipe = make(target)
    for index in range(3):
        batch = drawn(recipe, traces, index, lengths=[90])
        assert (batch.index, batch.input_ids.shape) == (index, (8, 90))


def test_stored_text_is_left_alone(target, traces):
    recipe, batch = make(target), batch_of(traces)
    assert recipe.refresh(0, context_of(recipe, batch)) is batch


def test_samples_depend_on_the_seed_and_not_on_their_neighbours(target, traces):
    recipe = make(target)
    assert drawn(recipe, traces).responses == drawn(recipe, traces).responses
    assert drawn(recipe, traces).responses != drawn(recipe, traces, seed=1).responses
    prompts = [t.prompt_ids for t in traces[:4]]
    together = sample_drafter(recipe.drafter, prompts, target, 1.0, 8, seed=3)
    assert sample_drafter(recipe.drafter, prompts[:1], target, 1.0, 8, seed=3) == together[:1]


def test_eos_stays_supervised_in_draft_text(target, traces):
    model = tiny_model("llama", 5, layers=1, width=16)
    recipe = with_model(target, ending(model, bias=2.0))
    batch = drawn(recipe, traces)
    ended = [i for i, response in enumerate(batch.responses) if response[-1] == EOS]
    assert ended
    for i in ended:
        end = len(batch.prompts[i]) + len(batch.responses[i])
        assert batch.input_ids[i, end - 1] == EOS
        assert batch.loss_mask[i, end - 1]
        assert not batch.loss_mask[i, end:].any()


def ending(model, bias):
    """The same model with its EOS made likelier."""
    head = torch.nn.Linear(16, 100)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()[EOS] = bias
    model.lm_head = head
    return model


def test_a_drafter_that_ends_at_once_is_refused(target, traces):
    recipe = with_model(target, ending(tiny_model("llama", 5, layers=1, width=16), bias=50.0))
    drawn(recipe, traces)  # eight responses are too few to tell
    ended = r"GenerationError: the drafter ended 16 of its last 16.*rate 1\.00"
    with pytest.raises(RunFault, match=ended):
        drawn(recipe, traces)


def test_padding_of_the_drafters_head_is_never_sampled(target, traces):
    wide = tiny_model("llama_padded", 0, layers=1, width=16)
    with torch.no_grad():
        wide.lm_head.weight[100:] = 10 * wide.lm_head.weight[:28]
    batch = drawn(with_model(target, wide), traces)
    assert max(token for response in batch.responses for token in response) < 100
