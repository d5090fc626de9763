"""What training steps and decoding cost on a device, counted on a CPU: how often they wait for one,
and how often Python launches kernels. `tests/test_sizes.py` counts bytes and operations."""

from __future__ import annotations

import contextlib
from collections import defaultdict

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import train
from drafters.round import Budget
from drafters.trees.dynamic import DynamicTree
from eval.engine import SpeculativeDecoder
from eval.tree_reward import TreeScorer
from phases import source
from recipes import base
from recipes.common.online import Server
from target.graphs import BEFORE_CAPTURE
from target.sampling import Sampling
from tests.eval.test_engine import drafter_of, speculated, target_of
from tests.helpers.commands import command, own_words, write_jsonl
from tests.helpers.eagle import build_eagle, eagle_settings
from tests.helpers.heads import eagle3_word
from tests.helpers.kernels import chosen_as_on_a_gpu
from tests.helpers.tape import decoding_as_on_a_gpu
from tests.helpers.tiny import (
    VOCAB_SIZE,
    perturbed,
    prompts_of,
    save_tiny,
    tiny_model,
    tiny_tokenizer,
)
from tests.helpers.watch import Waits
from tests.target.test_decode import requests_for, responses
from trainer.chunked import chunked_divergence
from trainer.divergence import DIVERGENCES
from trainer.logits import OutputHead, chunk_rows
from trainer.loop import Fit
from trainer.replicated import Replicated

STEPS = 4
OWN_WORDS = {
    "distillspec": ["method.data_mix={draft: 1}"],  # text that the drafter writes in a step
    "eagle3": ["method.layers=[0,1]"],  # the defaults collide on two layers
    "gto": ["method.group_size=2", "method.tree=dynamic:5:3:2", "trainer.lr_warmup_steps=0"],
}  # fmt: skip


class Steps:
    """Waits of the steps of a training, counted as on a GPU: with its attention and its optimiser,
    and with numbers that the host looks at later.

    The making of a batch counts where drafter or target run for it; it handles numbers of the host
    otherwise. The text that they write there is left out, since each of its rounds waits.
    """

    def __init__(self, patch):
        self.patch, self.waits = patch, Waits()
        self.found = defaultdict(list)  # by objective, (length of the text, waits) of each step
        self.vocabularies = 0  # read in a step
        self.inside = False
        self.fetch, self.update = Fit.fetch, Fit.update
        self.get_vocab = PreTrainedTokenizerFast.get_vocab
        patch.setattr("trainer.loop.shows_numbers_at_once", lambda device: False)
        patch.setattr("trainer.chunked.shows_numbers_at_once", lambda device: False)
        patch.setattr(Replicated, "fuses", True)
        chunk = property(lambda scorer: chunk_rows(torch.device("cpu"), scorer.target.vocab_size))
        patch.setattr(TreeScorer, "chunk", chunk)  # not the size of the first step
        patch.setattr(Fit, "fetch", lambda fit: self.fetched(fit))
        patch.setattr(Fit, "update", lambda fit, *given: self.updated(fit, *given))
        patch.setattr(Server, "answer", self.apart(Server.answer))
        patch.setattr(source, "sample_drafter", self.apart(source.sample_drafter))
        patch.setattr(PreTrainedTokenizerFast, "get_vocab", lambda own: self.vocabulary(own))

    @contextlib.contextmanager
    def step(self, counted=True):
        self.inside = True
        with chosen_as_on_a_gpu(), self.waits if counted else contextlib.nullcontext():
            yield
        self.inside = False

    def fetched(self, fit):
        size = 2**24 if fit.counters.step % 2 else 600  # chunks of all positions, or of a few
        self.patch.setattr("trainer.logits.CHUNK_ELEMENTS", size)
        self.waits.found.clear()
        with self.step(fit.objective.computes_batches):
            return self.fetch(fit)

    def updated(self, fit, batches, denominators):
        with self.step():
            self.update(fit, batches, denominators)
        ((batch, _),) = batches
        name = type(fit.objective).__name__
        if not batch.position_ids[:, 1:].all():  # texts that share a row have a mask
            name += ", texts share a row"
        if fit.counters.step:  # the first one may set things up
            self.found[name].append((batch.input_ids.shape[1], dict(self.waits.found)))

    def apart(self, write):
        def run(*given, **options):
            before = dict(self.waits.found)
            text = write(*given, **options)
            self.waits.found.clear()
            self.waits.found.update(before)
            return text

        return run

    def vocabulary(self, tokenizer):
        self.vocabularies += self.inside
        return self.get_vocab(tokenizer)


def saved_target(folder, size):
    """A tiny target of `size` tokens, all of which its tokenizer has."""
    save_tiny(folder, "llama", vocab_size=size)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<{n}>" for n in range(size - VOCAB_SIZE)])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("recipe", base.names())
def test_a_step_waits_equally_often_whatever_its_texts_chunks_and_vocabulary(
    tmp_path, monkeypatch, recipe
):
    """Nor does it read the tokenizer's vocabulary."""
    monkeypatch.setattr("phases.stage.dev_evaluation", lambda *given, **options: None)
    monkeypatch.setattr("phases.report.finish", lambda *given: None)
    steps = Steps(monkeypatch)
    texts = [f"Add {n} and 2. " * (n % 3) or f"{n}" for n in range(8)]  # no two are the same
    rows = [{"prompt": text, "response": f"{n}."} for n, text in enumerate(texts)]
    for size in (VOCAB_SIZE, 3 * VOCAB_SIZE):
        folder = tmp_path / str(size)
        write_jsonl(folder / "train.jsonl", rows)
        write_jsonl(folder / "eval.jsonl", [{"prompt": "What is 3 times 3? "}])
        target = saved_target(folder / "target", size)
        head = [eagle3_word(folder, target)] if recipe == "gto" else []
        words = command(
            folder, target, f"recipe={recipe}", *head,
            f"trainer.max_steps={STEPS}", "eval.temperatures=0", "eval.num_prompts=1",
            "eval.timing_prompts=0", "data.features=live", "trainer.batch_size=1",
            "data.max_new_tokens=16",
        )  # fmt: skip
        if recipe != "distillspec":
            words = [word for word in words if not word.startswith("method.")]
        words += own_words(recipe, folder) + OWN_WORDS.get(recipe, [])
        assert train.main(words) == 0
    assert steps.found
    for objective, found in steps.found.items():
        waits = found[-1][1]
        print(f"{recipe}, {objective}: {sum(waits.values())} waits a step, {waits}")
        assert all(own == waits for _, own in found), found
    assert len({width for found in steps.found.values() for width, _ in found}) > 1
    assert not steps.vocabularies


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_loss_in_chunks_waits_for_no_device(name, kept, monkeypatch):
    """Nor does its backward pass. Whether it is sound is known when its number is read."""
    monkeypatch.setattr("trainer.chunked.shows_numbers_at_once", lambda device: False)
    states, teacher = torch.randn(7, 4, requires_grad=True), torch.randn(7, 10 if kept else 5)
    weight, ids = torch.randn(5, 4, requires_grad=True), torch.arange(0, 10, 2)
    head, labels = OutputHead(weight, kept=ids if kept else None), torch.zeros(7, dtype=torch.long)
    monkeypatch.setattr("trainer.logits.CHUNK_ELEMENTS", 30)
    with Waits() as waits:
        divergence = DIVERGENCES[name]()
        chunked_divergence(divergence, states, head, teacher.__getitem__, labels).total.backward()
    assert not waits.found


# --- decoding -------------------------------------------------------------------------------------


TEMPERATURES = pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(1.0)], ids=["T=0", "T=1"]
)


@TEMPERATURES
def test_decoding_waits_for_its_device_to_read_a_token_and_for_nothing_else(sampling):
    model, requests = tiny_model("llama"), requests_for(prompts_of([9, 3, 21]), sampling)
    responses(model, requests)  # tries the cache, once for a model
    for new_tokens in (20, 30):
        with Waits() as waits:
            responses(model, requests, max_new_tokens=new_tokens)
        assert waits.found == {"tolist": new_tokens}


@pytest.mark.slow
@TEMPERATURES
@pytest.mark.parametrize("tree", [None, DynamicTree(8, 3, 3)], ids=["chain", "tree"])
@pytest.mark.parametrize("head", [False, True])
def test_a_round_waits_equally_often_whatever_its_texts_and_vocabulary(
    head, tree, sampling, monkeypatch
):
    """One row or several, whose texts end and are refilled."""
    rounds, plain = [], SpeculativeDecoder._round

    def counted(decoder):
        with Waits() as waits:
            ended = list(plain(decoder))
        rounds.append(dict(waits.found))
        return iter(ended)

    for size in (VOCAB_SIZE, 3 * VOCAB_SIZE):
        model = tiny_model("llama", vocab_size=size)
        drafter = drafter_of(perturbed(model, 0.1), model)
        if head:
            settings = eagle_settings(3, [0, 1], model.config.hidden_size)
            drafter = build_eagle(target_of(model), settings).eval()
        budget = Budget.of(tree) if tree else Budget(3)
        prompts = prompts_of([9, 3, 21, 14], vocab_size=size)
        options = {"sampling": sampling, "budget": budget, "max_new_tokens": 7}
        speculated(model, drafter, prompts[:1], **options)  # tries the cache
        with monkeypatch.context() as patch:
            patch.setattr(SpeculativeDecoder, "_round", counted)
            speculated(model, drafter, prompts[:1], batch_size=1, **options)
            speculated(model, drafter, prompts, batch_size=3, **options)
    print(f"{sum(rounds[0].values())} waits a round: {rounds[0]}")
    assert len(rounds) > 8
    assert all(found == rounds[0] for found in rounds), rounds


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("speculative", [False, True])
def test_a_longer_answer_takes_no_more_forwards_in_python(speculative, batch_size, monkeypatch):
    """Once its shapes are captured, all that decoding adds are replays. Answers end together here:
    dropped rows would make further shapes."""
    monkeypatch.setattr("target.cache.FEWEST_SLOTS", 128)
    model = tiny_model("llama")
    drafter = drafter_of(model, model)
    calls, forwards = [], []
    model.register_forward_hook(lambda *_: calls.append(1))
    prompts = prompts_of([9] * batch_size)
    options = {"batch_size": batch_size, "eos_ids": ()}
    for new_tokens in (60, 100):
        calls.clear()
        with decoding_as_on_a_gpu() as tapes:
            options["max_new_tokens"] = new_tokens
            if speculative:
                speculated(model, drafter, prompts, **options)
            else:
                responses(model, requests_for(prompts), **options)
        forwards.append(len(calls))
        # of the target, and of the drafter's first step and of its others
        assert sum(tape.graphs for tape in tapes) == (3 if speculative else 1)
    prefills, shapes = (2, 3) if speculative else (1, 1)
    launched = prefills + (BEFORE_CAPTURE + 1) * shapes
    assert forwards == [launched + 3, launched]  # the first run also tries the cache


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 4])
def test_captures_are_few_where_rows_are_dropped(batch_size):
    """At most one for each shape, number of rows and power of two of visible slots."""
    model = tiny_model("llama")
    drafter = drafter_of(perturbed(model, 0.1), model)
    prompts = prompts_of([9, 3, 21, 14, 30, 5, 12, 7])
    with decoding_as_on_a_gpu() as tapes:
        speculated(model, drafter, prompts, batch_size=batch_size, max_new_tokens=80, eos_ids=())
    assert all(tape.graphs <= 2 * 2 for tape in tapes)  # two shapes; 64 and 116 slots
    assert len(tapes) <= 2 * batch_size
