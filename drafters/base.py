"""The face of every drafter: how it proposes tokens, and with which randomness.

- `target_layers`: ids of the target outputs it consumes, () for none;
- `begin(rows, capacity)`: forget everything, make room for `rows` sequences of `capacity` slots;
- `prefill(rows, ids, lengths, outputs)`: read whole prompts for these batch rows, right-padded
  ids [R, P] (rows are refilled while others go on);
- `keep(rows)`: go on with these batch rows only, in this order;
- `propose(state, budget) -> TokenTree`: draft; commits and rolls back its own slots.

Trained drafters (`TrainedDrafter`) build chains and trees from two steps of their own, `start` and
`extend`, and offer one teacher-forced unroll, `states`, that training, loss and acceptance without
decoding share, so they cannot drift apart. Training-free drafters offer
`continuation(context, count)` instead: what they copy after a context.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar

import torch

from drafters.round import Budget, Drafter, DraftState
from drafters.text import Text
from drafters.trees.chain import Chain
from drafters.trees.tree import TokenTree
from target.fingerprint import grown_eos
from target.model import Target
from target.outputs import TargetOutputs
from target.shared_text import TextGroup
from trainer.errors import UserError
from trainer.logits import OutputHead

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from drafters.acceptance_head import AcceptanceHead

T = TypeVar("T")
S = TypeVar("S")  # what a score returns
FORMAT = 1  # of drafter.json and the files beside it
ACCEPTANCE = "acceptance"  # the attribute that holds an acceptance head, and its tensors' prefix


class DrafterJson(TypedDict):
    """drafter.json: what is stored beside the weights of a drafter in the project's own format."""

    format: int
    kind: str
    vocab_size: int
    target: dict[str, Any]  # the fingerprint of the target it was made for
    rank_accuracy: dict[str, list[list[float]]] | None
    trained_depth: int  # only of heads that were trained on their own states
    provenance: Mapping[str, object]  # only of drafters that were fine-tuned
    settings: dict[str, Any]  # of the kind's own dataclass; causal LMs have none
    layer: dict[str, Any]  # EAGLE heads: the configuration of their decoder layer
    lora: dict[str, Any]  # Medusa-2: `target.adapted.LoraSettings`


class TrainedDrafter(torch.nn.Module, Drafter):
    """A network that drafts.

    `vocab_size`: the target's true vocabulary; `fingerprint`: that of the target it was made for;
    `start_width`: tokens that `start` feeds. `exposes_hidden`: its state after each token it is fed
    depends on that token, so that an acceptance head can judge the token; `extend` then sets
    `hidden` [B, d] to the state that `states` has there. `one_pass`: `start` computes all tokens of
    a round, so that a round is one forward, whatever its shape, and reads each weight once.
    """

    kind: ClassVar[str]
    one_pass: ClassVar[bool] = False
    exposes_hidden: ClassVar[bool] = False
    hidden: torch.Tensor
    acceptance: AcceptanceHead | None
    start_width: int = 1
    max_depth: int | None = None  # longest path it can draft; None: no limit
    vocab_size: int
    fingerprint: dict[str, Any]  # as `target.model.fingerprint` makes it
    tokenizer: PreTrainedTokenizerBase
    # temperature, as it is written -> [depth][rank]: how often that token is the target's on
    # held-out text, for calibrated trees; "1, drawn": how often that draw is the accepted one
    rank_accuracy: dict[str, list[list[float]]] | None = None
    # drafting steps that its training unrolled on its own states; None: not unrolled, or not known
    trained_depth: int | None = None
    provenance: Mapping[str, object] | None = None  # how it was fine-tuned, for drafter.json

    def __init__(self) -> None:
        super().__init__()
        self.register_module(ACCEPTANCE, None)

    def train(self, mode: bool = True) -> TrainedDrafter:
        """Set training mode; under an acceptance head the drafter is frozen, its dropout too."""
        super().train(mode and self.acceptance is None)
        if self.acceptance is not None:
            self.acceptance.train(mode)
        return self

    # --- teacher-forced --------------------------------------------------------------------------

    def states(
        self, text: Text, outputs: TargetOutputs | None, depth: int
    ) -> Iterator[torch.Tensor]:
        """Yield the states [B, L, d] of each of the depths 1..depth, for its `output_head`.

        Index i holds the state that scores token i + 1 when it is the depth-th of its round and the
        tokens before it are those of the text; 0 where the round would have begun before the text,
        or, in a drafter with `one_pass` and some others, at a column outside of `text.columns`. A
        drafter whose distribution is the same at every depth yields one object again and again.
        """
        raise NotImplementedError

    def check_group(self, group: TextGroup) -> None:
        """Check that processes can share the texts that this drafter reads; UserError if not."""

    def output_head(self, depth: int) -> OutputHead:
        """The matrix that makes logits of the states of this depth."""
        raise NotImplementedError

    def network(self) -> dict[str, object]:
        """The settings of its network by name, without those that make no difference to it."""
        return {}

    def output_layers(self) -> list[torch.nn.Linear]:
        """The matrices of its own that make logits; [] where it uses the target's, or shares one
        with its embedding."""
        return []

    def own_logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [..., W] float of states [..., d], over the tokens that it can draft."""
        return self.output_head(depth).logits(states)

    def project(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Project [..., d] to float logits [..., vocab_size], -inf outside a reduced vocabulary."""
        return self.spread(self.own_logits(states, depth), depth)

    def spread(self, logits: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits [..., W] over the tokens that it can draft, as `project` gives them."""
        kept = self.output_head(depth).kept
        if kept is None:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        full[..., kept] = logits
        return full

    def draft_logits(
        self, ids: torch.Tensor, target_outputs: TargetOutputs | None = None, depth: int = 1
    ) -> torch.Tensor:
        """Teacher-forced logits [B, L, vocab_size] of one depth, for all positions at once."""
        *_, last = self.states(Text(ids), target_outputs, depth)
        return self.project(last, depth)

    def forward(
        self,
        text: Text,
        outputs: TargetOutputs | None,
        depth: int,
        score: Callable[[Iterator[torch.Tensor]], S],
    ) -> S:
        """Return `score` of what `states` yields.

        The loss is formed in here, so that wrappers which gather sharded weights around `forward`
        have them in place for the output head too. A score that drops the states of a depth before
        it asks for the next needs the memory of one.
        """
        return score(self.states(text, outputs, depth))

    # --- proposing -------------------------------------------------------------------------------

    def start(self, state: DraftState, budget: Budget) -> torch.Tensor:
        """Begin a round: logits [B, vocab_size] of the token after the last committed one."""
        raise NotImplementedError

    def extend(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
        """Feed drafted nodes of one depth: logits [B, n, vocab_size] of their children.

        tokens: [B, n] int64; parents: [B, n] int64, indices among the nodes fed so far in this
        round, -1 for children of the last committed token.
        """
        raise NotImplementedError

    @property
    def has_slots(self) -> bool:
        """Whether no token of a round depends on those drafted before it, so that the drafter gives
        the distributions of all of them at once, as `drafters.round.Slots`."""
        return False

    @property
    def judges(self) -> bool:
        """Whether it says how likely its tokens are accepted, for rules that end chains by that."""
        return self.acceptance is not None

    def judged(
        self, drafts: Sequence[torch.Tensor], depth: int, rows: torch.Tensor, index: torch.Tensor
    ) -> torch.Tensor:
        """What `acceptance_score` gives, [B, n], where the text's tokens behind the logit indices
        `index` [B, n] are drafted at `depth`; `drafts`: what `states` yields, deeper than that."""
        after = (index + 1).clamp(max=drafts[0].shape[1] - 1)  # the state at a token judges it
        return acceptance_of(self).probability(drafts[depth][rows, after])

    def judging_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that `acceptance_score` reads."""
        return list(acceptance_of(self).parameters())

    def acceptance_score(self) -> torch.Tensor:
        """Probability, [B] float32, that the token which `extend` fed last is accepted."""
        return acceptance_of(self).probability(self.hidden)

    @property
    def context(self) -> int | None:
        """The most positions that it knows; None: as many as the target."""
        return None

    def fits(self, lengths: T, K: int) -> T | bool:
        """Whether rounds of K tokens behind texts of these lengths are drafted.

        vLLM drafts nothing where the text and the drafts are longer than the drafter's own
        `max_position_embeddings`: such a round emits the target's token alone. `lengths`: a tensor
        or an array of int64; returns bool of its shape.
        """
        return True if self.context is None else lengths + K <= self.context  # type: ignore[operator]

    def propose(self, state: DraftState, budget: Budget) -> TokenTree:
        """Draft a round: a chain, or the tree of `budget`; rows that do not fit draft nothing."""
        shape = budget.tree or Chain(budget.max_tokens, budget.stop)
        tree, K = shape.grow(self, state), budget.max_tokens
        if self.one_pass:
            tree.draft_forwards = 1
        if not self.fits(state.max_length, K):
            tree.lengths = tree.lengths * self.fits(state.lengths, K)
        return tree

    # --- what it needs to serve ------------------------------------------------------------------

    def servable(self, folder: Path, ours: bool = False) -> tuple[TrainedDrafter, Target | None]:
        """The drafter that an engine loads, and the target that it needs beside it.

        That target is written to `folder` (`ours`: see `whole_folder`); None: the drafter needs the
        one it was made for.
        """
        return self, None

    @property
    def unserved(self) -> str | None:
        """Why no engine serves this drafter of its kind; None: engines of `drafters.kinds` may."""
        return None

    def served_tokens(self, K: int) -> int:
        """How many tokens of a round an engine is to draft with it where K are asked for."""
        return min(K, self.max_depth or K)

    def drafting_parameters(self, depth: int | None = None) -> Iterable[torch.nn.Parameter]:
        """The parameters that drafting reads, without the acceptance head's; one that each token of
        a round reads anew, in a drafter with `one_pass`, as often.

        `depth`: of the round; a drafter with `one_pass` leaves out what no depth up to it reads.
        None: as deep as it can draft.
        """
        own = self.named_parameters()
        return [p for name, p in own if not name.startswith(f"{ACCEPTANCE}.")]

    def draft_weights(self) -> dict[str, torch.Tensor]:
        """All tensors by name, without the acceptance head's."""
        own = self.state_dict().items()
        return {name: t for name, t in own if not name.startswith(f"{ACCEPTANCE}.")}

    # --- own format ------------------------------------------------------------------------------

    @property
    def draft_vocab_size(self) -> int:
        """Number of different tokens that it can draft."""
        kept = self.output_head(1).kept
        return self.vocab_size if kept is None else len(kept)

    @property
    def num_parameters(self) -> int:
        """Number of parameters, those of an acceptance head included."""
        return sum(p.numel() for p in self.parameters())

    def fresh(self) -> TrainedDrafter:
        """A drafter of the same shape with untrained weights."""
        raise NotImplementedError

    def about(self) -> Mapping[str, object]:
        """Further entries of drafter.json: the constructor's settings."""
        return {}

    def save_weights(self, folder: Path) -> None:
        """Write the weights to `folder`, which exists."""
        raise NotImplementedError

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the project's own format: weights, tokenizer, and drafter.json."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.save_weights(folder)
        self.tokenizer.save_pretrained(folder)
        about: dict[str, object] = {
            "format": FORMAT,
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "target": self.fingerprint,
        }
        about["rank_accuracy"] = self.rank_accuracy
        if self.trained_depth is not None:
            about["trained_depth"] = self.trained_depth
        if self.provenance is not None:
            about["provenance"] = self.provenance
        (folder / "drafter.json").write_text(json.dumps({**about, **self.about()}, indent=1) + "\n")
        if self.acceptance is not None:
            self.acceptance.save(folder)


def acceptance_of(drafter: TrainedDrafter) -> AcceptanceHead:
    """The acceptance head of a drafter; UserError where it has none."""
    if drafter.acceptance is None:
        raise UserError(
            "CapabilityError: eval.policy=head:... needs a drafter with an acceptance head; this "
            f"one, of kind {drafter.kind!r}, has none: train it with recipe=specdecpp"
        )
    return drafter.acceptance


HASHED_TOGETHER = 1 << 20  # numbers, 8 MiB
FINGERPRINT_MUST_AGREE = ("tokenizer", "weights", "vocab_size")


def check_fingerprint(
    stored: Mapping[str, object], target: Mapping[str, object], name: str
) -> None:
    """Raise UserError where a head was made for another target, whose states mean nothing to it, or
    for texts of this one that went on behind what is an EOS now.

    `name`: of the drafter, for the message.
    """
    differing = [key for key in FINGERPRINT_MUST_AGREE if stored.get(key) != target.get(key)]
    if differing:
        raise UserError(
            f"CompatibilityError: drafter {name!r} was made for another target "
            f"({', '.join(differing)} differ): name its own target as model.target"
        )
    if grown := grown_eos(stored, target):
        raise UserError(grown, key="drafter", value=name, remedy="train it again")


def weights_hash(drafter: torch.nn.Module) -> str:
    """Hash of a drafter's weights as float64, the same for every dtype that holds them exactly."""
    weights = hashlib.sha256()
    for tensor in drafter.state_dict().values():
        add_to_hash(weights, tensor)
    return weights.hexdigest()[:16]


def add_to_hash(digest: hashlib._Hash, tensor: torch.Tensor) -> None:
    """Add the numbers of a tensor to a hash, as float64 on the CPU: not all devices have it. They
    are copied in parts, as a large embedding would take gigabytes."""
    for part in tensor.detach().flatten().split(HASHED_TOGETHER):
        digest.update(part.cpu().double().numpy().data)
