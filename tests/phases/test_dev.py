"""The evaluation on held-out texts: processes share it, and it gives the numbers of one."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

import phases.dev as dev
from drafters.medusa import MedusaDrafter, MedusaSettings
from recipes import base
from recipes import specdecpp as specdecpp_recipe
from target.sampling import Sampling
from tests.eval.test_offline import drafter_of, target_of, traces_of
from tests.helpers import heads
from tests.helpers.tiny import perturbed, prompts_of, tiny_model
from tests.recipes import test_gto as gto
from tests.recipes import test_specdecpp as specdecpp

PATIENCE_S = 60


class Processes:
    """Threads in place of processes, of which one at a time computes: they share a target."""

    def __init__(self, number: int):
        self.number, self.given = number, [None] * number
        self.turn, self.all_there = threading.Lock(), threading.Barrier(number)
        self.here = threading.local()

    def gather(self, objects):
        self.given[self.here.rank] = objects
        self.turn.release()
        self.all_there.wait(PATIENCE_S)
        return [one for given in self.given for one in given]

    def run(self, work):
        """What `work(rank)`, which gathers once, returns on each."""

        def begin(rank):
            self.here.rank = rank
            assert self.turn.acquire(timeout=PATIENCE_S)
            return work(rank)

        with ThreadPoolExecutor(self.number) as pool:
            return list(pool.map(begin, range(self.number)))


def placed(rank: int, number: int, zero_stage: int | None):
    plugin = None if zero_stage is None else SimpleNamespace(zero_stage=zero_stage)
    kind = DistributedType.MULTI_CPU if plugin is None else DistributedType.DEEPSPEED
    return SimpleNamespace(
        process_index=rank, num_processes=number, distributed_type=kind,
        state=SimpleNamespace(deepspeed_plugin=plugin),
    )  # fmt: skip


@pytest.fixture(scope="module")
def texts():
    """Two batches at T=0 and three at T=1, of three domains that cross them."""
    target = target_of(tiny_model("llama"))
    found = []
    for sampling, count in ((Sampling(0.0), 19), (Sampling(1.0), 40)):
        prompts = prompts_of([3 + 7 * i % 20 for i in range(count)], seed=count)
        found += traces_of(target, prompts, sampling, lookahead=0)
    return target, [
        dataclasses.replace(trace, domain="abc"[i % 3], prompt_hash=str(i))
        for i, trace in enumerate(found)
    ]


def drafter(kind: str, target):
    if kind == "causal_lm":
        return drafter_of(perturbed(target.model, 0.1), target)
    torch.manual_seed(0)
    return heads.randomised(MedusaDrafter(MedusaSettings(num_heads=3), target), 0.02)


def evaluated(monkeypatch, texts, kind, number, zero_stage=None):
    """The numbers on each process, and how many tokens of text its drafter read."""
    target, traces = texts
    processes, own, read = Processes(number), drafter(kind, target), [0] * number
    states = own.states

    def counted(text, *given):
        read[processes.here.rank] += text.ids.numel()
        return states(text, *given)

    monkeypatch.setattr(own, "states", counted)
    monkeypatch.setattr(dev, "gather_object", processes.gather)

    def work(rank):
        accelerator = placed(rank, number, zero_stage)
        config = SimpleNamespace(eval=SimpleNamespace(K=4))
        run = SimpleNamespace(target=target, config=config, accelerator=accelerator)
        return dev.dev_evaluation(run, traces, own)(own, 0)

    found = processes.run(work)
    return found, read


@pytest.mark.parametrize("kind", ["causal_lm", "medusa"])
@pytest.mark.parametrize(("number", "zero_stage"), [(2, None), (2, 2), (3, None), (7, None)])
def test_processes_share_the_texts_and_give_the_numbers_of_one(
    monkeypatch, texts, kind, number, zero_stage
):
    """Bit for bit, with more processes than batches too."""
    (alone,), (whole,) = evaluated(monkeypatch, texts, kind, 1)
    found, read = evaluated(monkeypatch, texts, kind, number, zero_stage)
    assert alone["select"] == alone["alpha" if kind == "causal_lm" else "tokens_per_round"] > 0
    assert alone["tokens_per_round"] > 1
    assert found == [alone] * number
    assert sum(read) == whole  # nobody reads what another one reads
    assert max(read) <= {2: 0.6, 3: 0.4, 7: 0.4}[number] * whole


@pytest.mark.parametrize("kind", ["causal_lm", "medusa"])
def test_under_stage_3_of_zero_each_process_reads_all(monkeypatch, texts, kind):
    """It compares what processes call, and those with another share would wait for ever."""
    (alone,), (whole,) = evaluated(monkeypatch, texts, kind, 1)
    found, read = evaluated(monkeypatch, texts, kind, 2, zero_stage=3)
    assert found == [alone] * 2
    assert read == [whole] * 2


def measured_by(recipe: str, target, monkeypatch):
    """What a recipe adds to the evaluation, by a `Share`, and the sizes of the texts it reads."""
    seen: list[int] = []

    def noted(call):
        return lambda first, *rest: (seen.append(len(first)), call(first, *rest))[1]

    if recipe == "gto":
        made = gto.tuned(target)
        plain = zip(heads.PROMPTS, heads.plain_texts(target), strict=True)
        texts = [SimpleNamespace(prompt_ids=p, response_ids=r) for p, r in plain]
        monkeypatch.setattr(made.objective, "tree_scorer", noted(made.tree_scorer))
    else:
        made = specdecpp.recipe_of(target)
        monkeypatch.setattr("recipes.specdecpp.DEV_BATCH", 3)
        texts = traces_of(target, prompts_of([3, 9, 5, 8] * 3, seed=3), Sampling(1.0), lookahead=0)
        monkeypatch.setattr(specdecpp_recipe, "collate", noted(specdecpp_recipe.collate))

    def measure(share):
        evaluated = made.objective.evaluated(lambda drafter, step: {}, texts, share)
        return evaluated(made.drafter.eval(), 0)

    return measure, seen


@pytest.mark.parametrize("recipe", ["gto", "specdecpp"])
@pytest.mark.parametrize("number", [2, 3])
def test_processes_share_what_a_recipe_measures_itself(recipe, number, tiny_target, monkeypatch):
    measure, seen = measured_by(recipe, tiny_target("llama"), monkeypatch)
    alone = measure(base.alone)
    whole = seen.copy()
    seen.clear()
    processes = Processes(number)
    monkeypatch.setattr(dev, "gather_object", processes.gather)

    def work(rank):
        accelerator = placed(rank, number, None)
        run = SimpleNamespace(target=tiny_target("llama"), accelerator=accelerator)
        return measure(dev.sharing(run))

    assert processes.run(work) == [alone] * number
    assert alone["select"] != 0
    assert sorted(seen) == sorted(whole)  # everything once


@pytest.mark.parametrize(("kind", "evaluates"), [("causal_lm", True), ("medusa", False)])
def test_answers_of_one_token_leave_a_head_nothing_to_draft(texts, kind, evaluates):
    target, traces = texts
    traces = [dataclasses.replace(one, response_ids=one.response_ids[:1]) for one in traces]
    config = SimpleNamespace(eval=SimpleNamespace(K=4))
    run = SimpleNamespace(target=target, config=config, accelerator=placed(0, 1, None))
    own = drafter(kind, target)
    evaluate = dev.dev_evaluation(run, traces, own)
    assert (evaluate is not None) == evaluates
    if evaluate is not None:
        assert evaluate(own, 0)["alpha"] > 0


@pytest.mark.parametrize(
    ("sizes", "number", "owners"),
    [([4, 9, 1, 5], 1, [0, 0, 0, 0]), ([4, 9, 1, 5], 2, [1, 0, 0, 1]), ([3, 3], 3, [0, 1]),
     ([], 2, [])],
)  # fmt: skip
def test_the_largest_batches_go_first_to_who_has_least(sizes, number, owners):
    assert dev.shared_out(sizes, number) == owners
