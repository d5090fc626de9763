"""GTO: fine-tune a trained EAGLE head for the trees it drafts, not for one greedy path.

Group Tree Optimization, arXiv:2509.22134 (ICLR 2026). At adjacent positions of a text the drafter
and a frozen copy of it, the reference, draft trees; the target scores how many tokens of each it
would accept. The drafter's gain over the reference, standardised within the group of adjacent
positions, is the advantage of a clipped policy-gradient step on the accepted path. The head's own
token loss, that of its own recipe, is added: L = token_weight L_token + omega L_tree. Without
`model.drafter` recipe eagle3 trains the head first (stage base). At the first step of stage gto
both drafters are the same, so that all advantages are 0 and only the token loss acts.

The default reward is the expected number of accepted tokens, exactly (`node_sum`): what the paper's
abstract names. Its printed formula, in `preset=published`, is log sum exp over the branches
(`lse`), which also grows with their number.

Departures, where the paper is silent: clip 0.2; the population's standard deviation; positions are
drawn with the text as seed, so that a text always has the same positions; a round begins after a
token that the target wrote, and at least two more follow in the answer. EAGLE heads have no dropout
to turn off.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from data.batches import Batch
from data.traces import Trace
from drafters.base import TrainedDrafter, weights_hash
from drafters.eagle import EagleDrafter
from drafters.eagle3 import Eagle3Drafter
from drafters.load import load_drafter
from drafters.round import Shape
from drafters.trees.table import SHAPES, parse_shape
from eval.tree_reward import AGGREGATIONS, ScoredTrees, TreeScorer
from recipes import base
from recipes.base import (
    Evaluate,
    Metrics,
    Needs,
    Objective,
    Share,
    Stage,
    Start,
    alone,
    check_kind,
    unwrapped,
)
from recipes.common.config import Config as RunConfig
from recipes.common.config import compose
from recipes.common.draft_vocabulary import VocabularyConfig
from recipes.common.heads import HeadConfig, HeadObjective, HeadRecipe
from recipes.common.reference_rewards import (
    ReferenceRewards,
    check_same_network,
    gain,
)
from recipes.common.tree_loss import Paths, advantages, tree_loss
from target.model import Target
from target.outputs import TargetOutputs, TargetRequest
from trainer.checks import require_read
from trainer.config import Section
from trainer.errors import UserError, require
from trainer.keys import Rule, key
from trainer.losses import LossOutput, Term
from trainer.specs import choices

# settings that drafter.json records
RECORDED = ("tree", "num_groups", "group_size", "aggregation", "eta", "debias", "standardize",
            "epsilon", "omega", "token_weight")  # fmt: skip
STD_FLOOR = 1e-6  # added to the spread of a group that is divided by; not stated in the paper
# kinds of heads whose trees can be trained; each has the name of the recipe that trains it
BASES = ("eagle3", "eagle")
# trainer.* of that recipe, which stage base has in place of the run's own
OF_BASE = ("max_steps", "batch_size", "gradient_accumulation_steps", "lr", "lr_schedule",
           "lr_warmup_steps", "lr_min_ratio")  # fmt: skip


@dataclass
class Config(Section):
    NAMES: ClassVar[tuple[str, ...]] = ("reference", "tree")
    NEEDED: ClassVar[tuple[str, ...]] = NAMES
    # preset of the head's own recipe, for its token loss and for stage base, which trains it where
    # model.drafter is null; null: that recipe's settings for the toy
    base_preset: str | None = key(None, one_of=(None, *base.presets("eagle3")))
    # frozen drafter whose reward is subtracted; null: the one that stage gto starts with
    reference: str | None = None
    # tree that is drafted in training; should be eval.tree
    tree: str = key("dynamic:60:7:10", Rule(choices(SHAPES)))
    # groups of adjacent positions in a text at which trees are drafted
    num_groups: int = key(16, ge=1)
    group_size: int = key(8, ge=1)  # positions of a group
    # how the expected lengths of a tree's branches make its reward: node_sum, the expected accepted
    # tokens themselves; lse, the smooth maximum as published; lse_mean, max or mean
    aggregation: str = key("node_sum", one_of=AGGREGATIONS)
    eta: float = key(1.0, gt=0)  # sharpness of lse and lse_mean
    debias: bool = True  # subtract the reference's reward
    standardize: bool = True  # divide by the spread within the group; else rewards as they are
    epsilon: float = key(0.2, gt=0, lt=1)  # clip of the ratio of probabilities
    omega: float = key(0.5, gt=0)  # weight of the tree loss beside the token loss
    token_weight: float = key(1.0, ge=0)  # weight of the token loss; 0 trains on trees alone

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.standardize and self.group_size < 2:
            raise UserError(
                "method.group_size must be >= 2, got 1: standardised within a group of one every "
                "advantage is 0; or set method.standardize=false"
            )
        lse = self.aggregation in ("lse", "lse_mean")
        require_read(self, "eta", lse, "method.aggregation=lse or lse_mean")
        self.shape()

    def shape(self) -> Shape:
        """The tree that is drafted in training."""
        shape = parse_shape(self.tree, "method.tree")
        rule = f"hold at least as many nodes as its depth {shape.depth}"
        require(shape.num_nodes >= shape.depth, "method.tree", rule, self.tree)
        return shape


def of_preset(name: str, preset: str | None) -> tuple[ModuleType, RunConfig]:
    """A recipe with its settings under that preset."""
    module, files = base.load(name, preset)
    return module, compose(name, module.Config, files, [])


def settings_of_base(config: Config) -> dict[str, object]:
    """The settings trainer.* that stage base has in place of the run's own."""
    _, settings = of_preset("eagle3", config.base_preset)
    return {key: getattr(settings.trainer, key) for key in OF_BASE}


class Recipe(base.Recipe):
    needs_layers = "it scores the branches of trees"

    def __init__(self, config: Config, target: Target, given: TrainedDrafter | None = None):
        self.config, self.target = config, target
        self.shape = config.shape()
        self._given = given is not None
        self._reference: TrainedDrafter | None = None  # method.reference
        if config.reference is not None:
            self._reference = load_drafter(config.reference, target, key="method.reference")
        self.heads = self._recipe_of_heads(given)
        self.objective = TreeObjective(config, target, self.heads.objective)
        if given is not None:
            self._check(given)

    def _recipe_of_heads(self, given: TrainedDrafter | None) -> HeadRecipe[HeadConfig]:
        """Make the recipe that trains heads like `given`, for the token loss and for stage base."""
        kind = "eagle3" if given is None else given.kind
        if given is not None and kind not in BASES:
            check_kind(given, Eagle3Drafter, "gto")
        module, config = of_preset(kind, self.config.base_preset)
        if given is None:
            try:
                return module.Recipe(config.method, self.target)
            except UserError as error:
                remedy = "train a head with recipe=eagle3 and name it as model.drafter"
                raise UserError(f"stage base: {error}; {remedy}") from error
        if isinstance(config.method, VocabularyConfig):
            config.method.draft_vocab_size = None  # a trained head keeps its own
        return module.Recipe(config.method, self.target, given)

    @property
    def unroll(self) -> tuple[str, int] | None:
        if self.heads.unroll is None:
            return None
        name, steps = self.heads.unroll
        return f"{name} of recipe={type(self.heads).__module__.partition('.')[2]}", steps

    @property
    def trains(self) -> type[TrainedDrafter]:
        return self.heads.trains

    @property
    def builds_from_traces(self) -> bool:
        return self.heads.builds_from_traces

    def build(self, traces: Sequence[Trace]) -> TrainedDrafter:
        drafter = self.heads.build(traces)
        self._check(drafter)
        return drafter

    def _check(self, drafter: TrainedDrafter) -> None:
        rule = f"have at most {drafter.draft_vocab_size} children under a node, its vocabulary"
        require(self.shape.width <= drafter.draft_vocab_size, "method.tree", rule, self.config.tree)
        if self._reference is not None:
            check_same_network(self._reference, drafter)

    def stages(self) -> list[Stage]:
        text = Needs({"target": 1.0})
        tuned = Stage("gto", self.objective, text, row="after", prepare=self._freeze_reference)
        if self._given:
            return [tuned]
        # the same for all settings of the other stage
        shared = {
            "recipe": type(self.heads).__module__,
            **dataclasses.asdict(self.heads.config),
        }
        first = Stage(
            "base", self.heads.objective, text, settings_of_base(self.config), start="base",
            row="before", shared=shared,
        )  # fmt: skip
        return [first, tuned]

    @staticmethod
    def describe(config: RunConfig) -> str:
        """Describe stage base, for `dry_run`."""
        if config.model.drafter is not None:
            return ""
        module, base = of_preset("eagle3", config.method.base_preset)
        plain, own = vars(module.Config()), vars(base.method)
        words = [f"trainer.{key}={value}" for key, value in settings_of_base(config.method).items()]
        words += [f"method.{key}={own[key]}" for key in own if own[key] != plain[key]]
        return f"stage base trains recipe=eagle3 with {', '.join(words)}"

    def _freeze_reference(self, start: Start) -> TrainedDrafter:
        """Freeze a copy of the drafter as the reference, unless method.reference names one."""
        drafter, objective = start.drafter, self.objective
        objective.compare_with(self._reference or copy.deepcopy(drafter))
        drafter.provenance = {
            "recipe": "gto",
            "reference": weights_hash(objective.reference),
            **{name: getattr(self.config, name) for name in RECORDED},
        }
        return drafter


class TreeObjective(Objective):
    """The head's own token loss, and the policy-gradient loss of its trees against a frozen
    reference. `tokens`: the objective of the token loss."""

    reference: EagleDrafter
    rewards: ReferenceRewards

    def __init__(self, config: Config, target: Target, tokens: HeadObjective):
        self.config, self.target, self.tokens = config, target, tokens
        self.shape = config.shape()
        self.tree_scorer = TreeScorer(target, self.shape)
        self._warned = False

    def compare_with(self, reference: TrainedDrafter) -> None:
        """Freeze the drafter that rewards are measured against."""
        self.reference = _head(reference.eval().requires_grad_(False))
        self.rewards = ReferenceRewards()

    # --- loss ------------------------------------------------------------------------------------

    def target_request(self, batch: Batch, step: int) -> TargetRequest | None:
        return self.tokens.target_request(batch, step)

    def denominators(self, batch: Batch, step: int) -> dict[str, float]:
        groups = sum(len(starts) for _, starts in self.texts(batch))
        return {**self.tokens.denominators(batch, step), "trees": float(groups)}

    def loss(
        self, drafter: nn.Module, batch: Batch, target_outputs: TargetOutputs | None, step: int,
        denominators: Mapping[str, float] | None = None,
    ) -> LossOutput:  # fmt: skip
        output = self.tokens.loss(drafter, batch, target_outputs, step, denominators)
        assert target_outputs is not None
        config, metrics = self.config, Metrics()
        texts = self.texts(batch)
        paths, rewards, found = self.paths(_head(drafter), texts, batch.input_ids.device)
        self.target.sync()  # each process scored as many trees as it has
        advantage, flat = advantages(
            rewards.view(-1, config.group_size), STD_FLOOR if config.standardize else None
        )
        total, clipped = tree_loss(
            drafter, self.reference, batch.input_ids, target_outputs, paths,
            advantage.flatten(), config.epsilon,
        )  # fmt: skip
        groups = len(rewards) / config.group_size
        for name, values in (
            ("reward", rewards), ("accepted", paths.lengths.float()), *found.items(),
            ("flat_groups", flat.float()), ("clipped", clipped.float()),
        ):  # fmt: skip
            if len(values):
                metrics[name] = (values.sum(), float(len(values)))
        terms = {name: term.times(config.token_weight) for name, term in output.terms.items()}
        terms["trees"] = Term(total / config.group_size, groups, config.omega)
        return LossOutput(terms, output.metrics | metrics)

    def texts(self, batch: Batch) -> list[tuple[list[int], list[int]]]:
        """List for each row its ids, and the first prefix length of each of its groups."""
        mask = batch.loss_mask
        first, number = mask.long().argmax(1).tolist(), mask.sum(1).tolist()
        ids = batch.input_ids.tolist()
        ends = [a + n for a, n in zip(first, number, strict=True)]
        return [
            (row[:end], self.groups(row[:end], start))
            for row, start, end in zip(ids, first, ends, strict=True)
        ]

    def groups(self, ids: list[int], first: int) -> list[int]:
        """Draw the first prefix length of each group; `first`: index of the answer's first token. A
        prefix ends in a token of the answer, and two more follow."""
        config = self.config
        low = first + 1
        high = min(len(ids) - 1, self.target.context - self.shape.depth + 1)
        groups = min(config.num_groups, max(0, high - low) // config.group_size)
        if groups < config.num_groups and high > low and not self._warned:
            self._warned = True
            print(
                f"warning: an answer of {len(ids) - first} tokens has room for {groups} of "
                f"{config.num_groups} groups of {config.group_size} positions: shorter answers "
                "train on fewer trees, or on none"
            )
        seed = hashlib.sha256(array("q", ids).tobytes()).digest()
        spare = high - low - groups * config.group_size
        gaps = np.random.default_rng(list(seed)).integers(0, spare + 1, groups) if groups else []
        return [low + int(gap) + i * config.group_size for i, gap in enumerate(sorted(gaps))]

    def lengths(self, starts: list[int]) -> list[int]:
        """List the prefix lengths of all positions of these groups."""
        return [start + i for start in starts for i in range(self.config.group_size)]

    def paths(
        self,
        drafter: EagleDrafter,
        texts: list[tuple[list[int], list[int]]],
        device: torch.device,
    ) -> tuple[Paths, torch.Tensor, dict[str, torch.Tensor]]:
        """Draft and score the trees at all P prefixes of a batch. Returns the accepted paths, the
        rewards [P] float (with `debias` less the reference's), and for the log node_sum [P] and
        whether the drafter's own greedy path was pruned [P]."""
        config = self.config
        nothing = torch.zeros(0, device=device)
        paths, rewards = Paths.none(self.shape.depth, device), [nothing]
        node_sum, pruned = [nothing], [nothing]
        for row, (ids, starts) in enumerate(texts):
            if not starts:
                continue
            lengths = self.lengths(starts)
            known = self.rewards.get(ids, lengths) if config.debias else None
            both = config.debias and known is None
            scored = self.tree_scorer(
                ids, lengths, [drafter, self.reference] if both else [drafter]
            )
            own, *others = (self._reward(one) for one in scored)
            if both:
                known = others[0], scored[1].tree.names
                self.rewards.put(ids, lengths, *known)
            rewards.append(own if known is None else gain(own, scored[0].tree.names, *known))
            node_sum.append(scored[0].node_sum())
            pruned.append((scored[0].greedy_depth() < self.shape.depth).float())
            paths.add(row, lengths, *scored[0].accepted())
        log = {"node_sum": torch.cat(node_sum), "greedy_pruned": torch.cat(pruned)}
        return paths, torch.cat(rewards), log

    def _reward(self, scored: ScoredTrees) -> torch.Tensor:
        return scored.reward(self.config.aggregation, self.config.eta)

    # --- which checkpoint is best ----------------------------------------------------------------

    def evaluated(
        self, evaluate: Evaluate | None, dev: Sequence[Trace], share: Share = alone
    ) -> Evaluate | None:
        """Add the numbers of trees, which choose the checkpoint here, to the usual ones."""
        if evaluate is None:
            return None
        return lambda drafter, step: (
            evaluate(drafter, step) | self.dev_metrics(_head(drafter), dev, share)
        )

    def dev_metrics(
        self, drafter: EagleDrafter, traces: Sequence[Trace], share: Share = alone
    ) -> dict[str, float]:
        """Measure the expected tokens per round with trees, at the positions of held-out texts."""
        texts = [(t.prompt_ids + t.response_ids, len(t.prompt_ids)) for t in traces]
        starts = [self.groups(ids, first) for ids, first in texts]

        def expected(i: int) -> torch.Tensor:
            (scored,) = self.tree_scorer(texts[i][0], self.lengths(starts[i]), [drafter])
            return scored.node_sum().cpu()

        sizes = {i: len(ids) for i, (ids, _) in enumerate(texts) if starts[i]}
        if not sizes:
            return {}
        tokens = 1 + float(torch.cat([*share(sizes, expected).values()]).mean())
        return {"select": tokens, "tree_tokens_per_round": tokens}


def _head(drafter: nn.Module) -> EagleDrafter:
    """The EAGLE head in its wrappers."""
    head = unwrapped(drafter)
    assert isinstance(head, EagleDrafter)  # as all bases of GTO
    return head
