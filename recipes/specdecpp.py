"""SpecDec++: a head on a frozen drafter that says when to stop drafting and verify.

Huang, Guo and Wang 2024, arXiv:2405.19715. On the target's text X the drafter draws a token Y at
every position; its label is the probability min(1, p(Y) / q(Y)) that the target accepts it.
Contexts mix both: a share `mix` of the tokens is X's, the rest Y's, and the head is trained at Y's
by a weighted binary cross-entropy that counts rejections `reject_weight` times. Departures:
independent blocks (the published code repeats one), which start as the identity, tokens drawn anew
at every visit of a text (once in the code), distributions as served (`temperature`, `top_k`,
`top_p`), and the checkpoint of the lowest binary KL after the weighting is inverted. Where the
drafter's distribution changes with the depth of a round (EAGLE), the first `depths` depths are
trained. Without model.drafter a causal LM is distilled first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from data.batches import Batch, collate
from data.traces import Trace
from drafters.acceptance import check_exposed, fresh_head
from drafters.acceptance_head import ACCEPT, AcceptanceHead, calibrate
from drafters.base import TrainedDrafter, acceptance_of
from drafters.text import Text
from eval.calibration import calibration_error
from recipes import base, distillspec
from recipes.base import Context, Evaluate, Metrics, Needs, Objective, Stage, Start, unwrapped
from target.model import Target
from target.outputs import LayerId, TargetOutputs, TargetRequest
from target.padding import by_length
from target.sampling import Sampling, inverse_cdf, keyed_uniform, row_key, warp
from trainer.config import Section
from trainer.errors import UserError, require
from trainer.keys import Rule, key
from trainer.logits import chunk_rows
from trainer.losses import LossOutput, Term
from trainer.shift import supervised

DEV_BATCH = 16


@dataclass
class Config(Section):
    # residual blocks of the head; published: 3; 0 or 1 for a tiny drafter
    num_layers: int = key(3, ge=0)
    shared_blocks: bool = False  # one module for all blocks, as in the published code
    # weight of a rejected token in the loss; the paper's best of 1, 3, 6 and 12
    reject_weight: float = key(6.0, gt=0)
    # share of the target's tokens in the contexts, the rest are the drafter's
    mix: float = key(0.15, ge=0, le=1)
    # temperature of target and drafter, as they will be served
    temperature: float = key(1.0, ge=0)
    # top-k of both, as they will be served; 0: off
    top_k: int = key(0, ge=0, note="0: off")
    top_p: float = key(1.0, gt=0, le=1)  # top-p of both, as they will be served
    # depths of a round that are trained, where the drafter's distribution changes with the depth
    depths: int = key(4, ge=1)
    K_min: int = key(2, ge=1)  # fewest tokens of a round
    K_max: int = key(20, Rule("be >= method.K_min"))  # most tokens of a round
    draft_layers: int = key(1, ge=1)  # layers of a fresh drafter, where model.drafter is null
    # width of a fresh drafter; null: half the target's
    draft_hidden_size: int | None = key(None, ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mix == 1:
            raise UserError(
                "DataError: method.mix=1 leaves no drafted token to train on: it is the share of "
                "the target's tokens, set it below 1"
            )
        rule = f"be >= method.K_min={self.K_min}"
        require(self.K_max >= self.K_min, "method.K_max", rule, self.K_max)


def _no_positions() -> torch.Tensor:
    return torch.zeros(0, dtype=torch.long)


@dataclass
class Drawn(Batch):
    """A batch with its draws at N positions of D depths. mixed [D * B, L] int64: contexts, depth by
    depth; rows, places [N] int64: row and column of each judged token in `mixed`; accept [N] float
    in [0, 1]: its label; depth [N] int64, from 1; hidden: the target's states that the drafter
    reads, each [B, L, H] float, of the forward that gave the labels."""

    mixed: torch.Tensor = field(default_factory=_no_positions)
    rows: torch.Tensor = field(default_factory=_no_positions)
    places: torch.Tensor = field(default_factory=_no_positions)
    accept: torch.Tensor = field(default_factory=_no_positions)
    depth: torch.Tensor = field(default_factory=_no_positions)
    hidden: dict[LayerId, torch.Tensor] = field(default_factory=dict)


class Recipe(base.Recipe):
    no_lora = "recipe=specdecpp trains an acceptance head and leaves the drafter unchanged"
    trains_acceptance = True
    needs_layers = "it reads how the drafter goes on"

    def __init__(self, config: Config, target: Target, given: TrainedDrafter | None = None):
        self.config, self._given = config, given is not None
        if given is not None:
            check_exposed(given)
        own = distillspec.Config(
            divergence="fkl", control=False, draft_layers=config.draft_layers,
            draft_hidden_size=config.draft_hidden_size,
        )  # fmt: skip
        self._distill = distillspec.Recipe(own, target)
        self._objective = AcceptanceObjective(config, target)

    def stages(self) -> list[Stage]:
        (distilled,) = self._distill.stages()
        drafter = dataclasses.replace(distilled, name="draft", row="before", packs=False)
        head = Stage(
            "acceptance", self._objective, Needs({"target": 1.0}), row="after",
            prepare=self._add_head,
        )  # fmt: skip
        return [head] if self._given else [drafter, head]

    def build(self, traces: Sequence[Trace]) -> TrainedDrafter:
        return self._distill.build(traces)

    def _add_head(self, start: Start) -> TrainedDrafter:
        """Freeze the drafter and give it a fresh head."""
        config, drafter = self.config, start.drafter
        names = ("num_layers", "shared_blocks", "reject_weight", "temperature", "top_k", "top_p",
                 "K_min", "K_max")  # fmt: skip
        drafter.acceptance = None
        drafter.requires_grad_(False)
        settings = {name: getattr(config, name) for name in names}
        drafter.acceptance = fresh_head(drafter, **settings)
        self._objective.layers = drafter.target_layers
        return drafter


class AcceptanceObjective(Objective):
    """Weighted binary cross-entropy of the acceptance head at drafted tokens. `layers`: the layers
    of the target that the frozen drafter reads."""

    computes_batches = True
    layers: tuple[LayerId, ...] = ()

    def __init__(self, config: Config, target: Target):
        self.config, self.target = config, target
        self.sampling = Sampling(config.temperature, config.top_k, config.top_p)

    # --- draws ------------------------------------------------------------------------------------

    def target_request(self, batch: Batch, step: int) -> TargetRequest | None:
        """Request logits for the labels; once these are drawn, nothing more."""
        return None if isinstance(batch, Drawn) else TargetRequest(self.layers, logits=True)

    def refresh(self, step: int, context: Context) -> Batch | None:
        outputs = context.outputs()
        assert outputs is not None
        return self.draw(context.drafter, context.batch.to(self.target.device), outputs)

    @torch.no_grad()
    def draw(
        self,
        drafter: TrainedDrafter,
        batch: Batch,
        outputs: TargetOutputs,
        salt: int | None = None,
    ) -> Drawn:
        """Draw the drafter's tokens along the target's text, their labels, and the mixed contexts.
        `salt`: distinguishes visits of a text, the batch's index unless given."""
        depths = self.config.depths if self.layers else 1
        visit = batch.index if salt is None else salt
        keys = [
            row_key(visit, [*prompt, *response], 0)
            for prompt, response in zip(batch.prompts, batch.responses, strict=True)
        ]
        keys = torch.tensor(keys, device=batch.input_ids.device)
        found: list[tuple[torch.Tensor, ...]] = []
        unrolled = drafter.states(Text(batch.input_ids, batch.position_ids), outputs, depths)
        for depth, states in enumerate(unrolled, start=1):
            where = supervised(batch.loss_mask, depth if self.layers else 0)
            rows, index = where.nonzero(as_tuple=True)
            drafted, accept = self._label(drafter, depth, rows, index, states, outputs, keys, batch)
            keep = keyed_uniform(keys[rows], index + 1, f"mix {depth}") < self.config.mix
            mixed = batch.input_ids.clone()
            mixed[rows[~keep], index[~keep] + 1] = drafted[~keep]
            above = (depth - 1) * len(mixed)
            place = (rows + above)[~keep], index[~keep] + 1
            found.append((mixed, *place, accept[~keep], torch.full_like(place[0], depth)))
        parts = [torch.cat(part) for part in zip(*found, strict=True)]
        return _drawn(batch, parts, {layer: outputs.hidden[layer] for layer in self.layers})

    def _label(
        self,
        drafter: TrainedDrafter,
        depth: int,
        rows: torch.Tensor,
        index: torch.Tensor,
        states: torch.Tensor,
        outputs: TargetOutputs,
        keys: torch.Tensor,
        batch: Batch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a token at each logit index, and the probability that it is accepted, [N] each."""
        assert outputs.logits is not None
        size, tokens, labels = self.target.vocab_size, [], []
        coins = keyed_uniform(keys[rows], index + 1, f"draft {depth}")
        chunk = chunk_rows(states.device, size)
        for i in range(0, len(rows), chunk):
            span = slice(i, i + chunk)
            at = rows[span], index[span]
            q = warp(drafter.project(states[at], depth), self.sampling)
            p = warp(outputs.logits[at][..., :size], self.sampling)
            token = inverse_cdf(q, coins[span]).unsqueeze(-1)
            tokens.append(token[:, 0])
            labels.append((p.gather(-1, token) / q.gather(-1, token))[:, 0].clamp(max=1.0))
        if not tokens:
            return index, states.new_zeros(0)
        accept = torch.cat(labels)
        wrong = ~((accept >= 0) & (accept <= 1))
        if bool(wrong.any()):
            first = int(rows[wrong][0])
            raise UserError(
                "DataError: the probability that a drafted token is accepted must lie in [0, 1], "
                f"got {float(accept[wrong][0])} in row {first} of batch {batch.index}, the prompt "
                f"{self.target.tokenizer.decode(batch.prompts[first])[:40]!r}: the drafter or the "
                "target gives no number"
            )
        return torch.cat(tokens), accept

    # --- loss ------------------------------------------------------------------------------------

    def denominators(self, batch: Batch, step: int) -> dict[str, float]:
        """Sum the weights of the labels."""
        if not isinstance(batch, Drawn):  # another rank's step: this one has nothing to train on
            return {"acceptance": 0.0}
        return {"acceptance": float(self._mass(batch.accept).sum())}

    def _mass(self, accept: torch.Tensor) -> torch.Tensor:
        return self.config.reject_weight * (1 - accept) + accept

    def loss(
        self, drafter: nn.Module, batch: Batch, target_outputs: TargetOutputs | None, step: int,
        denominators: Mapping[str, float] | None = None,
    ) -> LossOutput:  # fmt: skip
        if not isinstance(batch, Drawn):
            given = {} if target_outputs is None else target_outputs.hidden
            batch = _empty(batch, {layer: given[layer] for layer in self.layers})
        logits = self.judge(drafter, batch)
        total = weighted_loss(logits, batch.accept, self.config.reject_weight)
        f = calibrate(logits.detach().softmax(-1)[:, ACCEPT], self.config.reject_weight)
        count = float(len(batch.accept))
        metrics: Metrics = {
            "binary_kl": (binary_kl(batch.accept, f).sum(), count),
            "acceptance": (batch.accept.sum(), count),
        }
        return LossOutput({"acceptance": Term(total, self._mass(batch.accept).sum())}, metrics)

    def judge(self, drafter: nn.Module, batch: Drawn) -> torch.Tensor:
        """Compute the head's logits [N, 2] at the drafted tokens: the state at a token of depth d
        is the one that scores depth d + 1."""
        most = len(batch.mixed) // len(batch.input_ids)
        repeated = {layer: states.repeat(most, 1, 1) for layer, states in batch.hidden.items()}

        text = Text(batch.mixed, batch.position_ids.repeat(most, 1))
        score = partial(_judged, acceptance_of(unwrapped(drafter)), batch)
        return drafter(text, TargetOutputs(repeated), most + 1, score)

    # --- which checkpoint is best -----------------------------------------------------------------

    def evaluated(
        self, evaluate: Evaluate | None, dev: Sequence[Trace], share: base.Share = base.alone
    ) -> Evaluate | None:
        """Return an evaluation of the head on held-out text, with fixed draws."""
        if not dev:
            return evaluate
        groups = list(by_length(dev, lambda t: t.num_tokens, DEV_BATCH))
        sizes = {i: sum(trace.num_tokens for trace in group) for i, group in enumerate(groups)}
        drawn: dict[int, Drawn] = {}  # of the texts that this process has

        @torch.no_grad()
        def judged(drafter: nn.Module, step: int) -> dict[str, object]:
            own = unwrapped(drafter)

            def pair(i: int) -> tuple[torch.Tensor, torch.Tensor]:
                if i not in drawn:
                    drawn[i] = self._draw_texts(own, groups[i])
                return self.judge(own, drawn[i]).cpu(), drawn[i].accept.cpu()

            logits, accept = map(torch.cat, zip(*share(sizes, pair).values(), strict=True))
            found = quality(logits.softmax(-1)[:, ACCEPT], accept, self.config.reject_weight)
            return {"select": -found["binary_kl"], **found}

        return judged

    def _draw_texts(self, drafter: TrainedDrafter, traces: Sequence[Trace]) -> Drawn:
        texts = [t.prompt_ids for t in traces], [t.response_ids for t in traces]
        batch = collate(*texts, ["target"] * len(traces)).to(self.target.device)
        outputs = self.target.outputs(
            batch.input_ids, batch.position_ids, layers=self.layers, project_later=True
        )
        return self.draw(drafter, batch, outputs, salt=-1)


def _drawn(
    batch: Batch, parts: Sequence[torch.Tensor], hidden: dict[LayerId, torch.Tensor]
) -> Drawn:
    mixed, rows, places, accept, depth = parts
    fields = {f.name: getattr(batch, f.name) for f in dataclasses.fields(Batch)}
    fields["num_supervised"] = len(rows)
    return Drawn(
        **fields, mixed=mixed, rows=rows, places=places, accept=accept, depth=depth, hidden=hidden
    )


def _judged(head: AcceptanceHead, batch: Drawn, unrolled: Iterator[torch.Tensor]) -> torch.Tensor:
    """The head's logits [N, 2] from the drafter's states of depth 1, which judge no token, 2 and
    further."""
    logits, order = [], []
    for depth, states in enumerate(unrolled):
        if depth:
            mine = (batch.depth == depth).nonzero()[:, 0]
            order.append(mine)
            logits.append(head(states[batch.rows[mine], batch.places[mine]]))
    return torch.cat(logits)[torch.cat(order).argsort()]


def _empty(batch: Batch, hidden: dict[LayerId, torch.Tensor]) -> Drawn:
    """The batch without a token to judge, whose loss is a sum of 0 that has a gradient."""
    none = batch.input_ids.new_zeros(0)
    return _drawn(batch, [batch.input_ids, none, none, none.float(), none], hidden)


def weighted_loss(logits: torch.Tensor, accept: torch.Tensor, reject_weight: float) -> torch.Tensor:
    """Sum -w (1 - a) log(1 - f) - a log f over the N tokens, where f is the softmax of logits [N,
    2], a = accept [N] and w = reject_weight."""
    log_f = F.log_softmax(logits.float(), -1)
    rejected = reject_weight * (1 - accept) * log_f[:, 1 - ACCEPT]
    return -(rejected + accept * log_f[:, ACCEPT]).sum()


def binary_kl(accept: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """KL(a || f) of two Bernoulli distributions, [N] float64, in nats; labels of 0 and 1 are
    allowed."""
    f = f.double().clamp(1e-12, 1 - 1e-12)
    a = accept.double()
    entropy = torch.xlogy(a, a) + torch.xlogy(1 - a, 1 - a)
    return entropy - torch.xlogy(a, f) - torch.xlogy(1 - a, 1 - f)


def quality(f: torch.Tensor, accept: torch.Tensor, reject_weight: float) -> dict[str, float]:
    """Measure how well probabilities f [N] predict the labels accept [N]: binary KL after the
    weighting is inverted, as trained, and of a constant; area under the ROC curve, where each label
    is an accepted and a rejected share; expected calibration error in ten bins after inversion."""
    a = calibrate(f.double(), reject_weight)
    accept = accept.double()
    return {
        "binary_kl": float(binary_kl(accept, a).mean()),
        "binary_kl_as_trained": float(binary_kl(accept, f).mean()),
        "binary_kl_constant": float(binary_kl(accept, accept.mean().expand_as(accept)).mean()),
        "auc": area(a, accept),
        "calibration_error": calibration_error(a, accept),
    }


def area(score: torch.Tensor, accept: torch.Tensor) -> float:
    """The area under the ROC curve: the probability that an accepted token has a higher score [N]
    than a rejected one, where ties count half; 0.5 where all labels are alike."""
    values, place = score.unique(return_inverse=True)
    zeros = torch.zeros(len(values), dtype=torch.double, device=score.device)
    good, bad = zeros.index_add(0, place, accept), zeros.index_add(0, place, 1 - accept)
    below = bad.cumsum(0) - bad / 2
    pairs = float(good.sum() * bad.sum())
    return float((good * below).sum()) / pairs if pairs else 0.5
