"""Several small causal LMs as one drafter: the prompt decides which of them drafts.

Liu et al. 2023 (ICML 2024), arXiv:2310.07177, Sec. 3.3, keep one draft model per language or topic
and classify the query first. Here the classifier is naive Bayes over the tokens of the prompt.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from drafters.base import DrafterJson, TrainedDrafter
from drafters.causal_lm import CausalLMDrafter
from drafters.formats.files import read_json
from drafters.round import Budget, DraftState
from drafters.text import Text
from target.model import Target
from target.outputs import TargetOutputs
from trainer.errors import RunFault, UserError
from trainer.logits import OutputHead


class NaiveBayes(torch.nn.Module):
    """Multinomial naive Bayes over token counts with add-one smoothing.

    `names`: the classes, the most frequent one first. `log_prior`: [M], `log_token`: [M, V], both
    float.
    """

    log_prior: torch.Tensor
    log_token: torch.Tensor

    def __init__(self, names: Sequence[str], log_prior: torch.Tensor, log_token: torch.Tensor):
        super().__init__()
        self.names = list(names)
        self.register_buffer("log_prior", log_prior)  # [M]
        self.register_buffer("log_token", log_token)  # [M, V]

    @classmethod
    def fit(
        cls, prompts: Iterable[list[int]], labels: Sequence[str], vocab_size: int
    ) -> NaiveBayes:
        """Fit the classifier to labelled prompts; UserError where there is only one label."""
        frequency = Counter(labels)
        names = sorted(frequency, key=lambda name: (-frequency[name], name))
        if len(names) < 2:
            raise UserError(
                f"method.bank=true needs prompts of several domains, all {len(labels)} are of "
                f"{names[0] if names else 'none'!r}: name them in a column `domain`, or set "
                "method.bank=false"
            )
        counts = torch.ones(len(names), vocab_size)
        for prompt, label in zip(prompts, labels, strict=True):
            ids = torch.tensor(prompt)
            counts[names.index(label)].index_add_(0, ids, torch.ones(len(ids)))
        prior = torch.tensor([float(frequency[name]) for name in names])
        log_token = (counts / counts.sum(1, keepdim=True)).log()
        return cls(names, (prior / prior.sum()).log(), log_token)

    def route(self, prompt_ids: Sequence[int]) -> int:
        """Index of the class of a prompt."""
        ids = torch.tensor(prompt_ids, device=self.log_token.device)
        return int((self.log_prior + self.log_token[:, ids].sum(1)).argmax())


class DrafterBank(TrainedDrafter):
    """A bank of drafters of one shape, `members`, in the order of the router's names.

    `prefill` selects the member of each row, or `routed` for text that is read at once. A batch
    with rows of several members runs each of these over all rows; one row costs what one drafter
    does. Raises RunFault where `states` gets rows that were not routed.
    """

    kind = "bank"
    start_width = CausalLMDrafter.start_width
    chosen: torch.Tensor  # [B] the member of each row

    def __init__(self, members: Sequence[CausalLMDrafter], router: NaiveBayes):
        super().__init__()
        if len(members) != len(router.names):
            raise UserError(
                f"RoutingError: the router knows {len(router.names)} drafters, the bank holds "
                f"{len(members)}"
            )
        self.members: Any = torch.nn.ModuleList(members)  # a list of CausalLMDrafter
        self.router = router
        first = members[0]
        self.tokenizer, self.fingerprint = first.tokenizer, first.fingerprint
        self.vocab_size = first.vocab_size

    @classmethod
    def copies_of(cls, drafter: CausalLMDrafter, router: NaiveBayes) -> DrafterBank:
        """A bank whose members all start as `drafter`."""
        device = next(drafter.parameters()).device
        return cls([copy.deepcopy(drafter) for _ in router.names], router.to(device))

    def route(self, prompt_ids: Sequence[int]) -> int:
        """Index of the member that drafts for this prompt."""
        return self.router.route(prompt_ids)

    def routed(self, prompts: Sequence[Sequence[int]]) -> None:
        """Select the members of the rows that `states` reads next, by their prompts."""
        self.chosen = torch.tensor([self.route(p) for p in prompts], device=self._device)

    @property
    def _device(self) -> torch.device:
        return next(self.parameters()).device

    def _active(self) -> list[int]:
        return sorted(set(self.chosen.tolist()))

    def _rows(self, member: int) -> torch.Tensor:
        return (self.chosen == member).nonzero()[:, 0]

    # --- teacher-forced --------------------------------------------------------------------------

    def states(
        self, text: Text, outputs: TargetOutputs | None, depth: int
    ) -> Iterator[torch.Tensor]:
        if len(self.chosen) != len(text.ids):
            raise RunFault(
                f"RoutingError: {len(self.chosen)} prompts were routed for {len(text.ids)}"
            )

        def read(member: int, rows: torch.Tensor) -> torch.Tensor:
            positions = None if text.position_ids is None else text.position_ids[rows]
            return next(self.members[member].states(Text(text.ids[rows], positions), outputs, 1))

        hidden = self._joined(read)
        for _ in range(depth):
            yield hidden

    def own_logits(self, states: torch.Tensor, depth: int) -> torch.Tensor:
        """Logits of states [B, ..., d], one row for each that was routed."""
        return self._joined(lambda m, rows: self.members[m].own_logits(states[rows], depth))

    def _joined(self, read: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Call read(member, its rows) for every member with rows; results in the order of rows."""
        parts = [(self._rows(m), read(m, self._rows(m))) for m in self._active()]
        places = torch.cat([rows for rows, _ in parts])
        return torch.cat([own for _, own in parts])[places.argsort()]

    def output_head(self, depth: int) -> OutputHead:
        """The output head of the first member; all have one shape."""
        return self.members[0].output_head(depth)

    # --- proposing -------------------------------------------------------------------------------

    def begin(self, rows: int, capacity: int) -> None:
        self.chosen = torch.zeros(rows, dtype=torch.long, device=self._device)
        for member in self.members:
            member.begin(rows, capacity)

    def keep(self, rows: torch.Tensor) -> None:
        self.chosen = self.chosen[rows]
        for member in self.members:
            member.keep(rows)

    def prefill(
        self,
        rows: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        outputs: TargetOutputs | None = None,
    ) -> None:
        prompts = [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
        members = torch.tensor([self.route(prompt) for prompt in prompts], device=ids.device)
        self.chosen[rows] = members
        for member in sorted(set(members.tolist())):
            own = members == member
            self.members[member].prefill(rows[own], ids[own], lengths[own], None)

    def start(self, state: DraftState, budget: Budget) -> torch.Tensor:
        return self._each(lambda member: member.start(state, budget))

    def extend(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
        return self._each(lambda member: member.extend(tokens, parents, depth))

    def _each(self, call: Callable[[CausalLMDrafter], torch.Tensor]) -> torch.Tensor:
        """Logits of every row from its own member."""
        found: torch.Tensor | None = None
        for member in self._active():
            own = call(self.members[member])
            mine = (self.chosen == member).view(-1, *[1] * (own.dim() - 1))
            found = own if found is None else torch.where(mine, own, found)
        assert found is not None
        return found

    # --- own format ------------------------------------------------------------------------------

    def drafting_parameters(self, depth: int | None = None) -> Iterable[torch.nn.Parameter]:
        """Parameters of one member: a step reads no other one."""
        return self.members[0].drafting_parameters(depth)

    def fresh(self) -> DrafterBank:
        return DrafterBank([member.fresh() for member in self.members], copy.deepcopy(self.router))

    def about(self) -> Mapping[str, object]:
        return {"settings": {"names": self.router.names}}

    def save_weights(self, folder: Path) -> None:
        """Write each member to a folder of its own, which loads as a causal LM."""
        for i, member in enumerate(self.members):
            member.save_pretrained(folder / f"member-{i}")
        save_file(self.router.state_dict(), folder / "router.safetensors")

    @classmethod
    def from_pretrained(cls, folder: Path, target: Target) -> DrafterBank:
        """Load a folder of this project."""
        settings = read_json(Path(folder) / "drafter.json", DrafterJson)["settings"]
        members = [
            CausalLMDrafter.from_pretrained(str(Path(folder) / f"member-{i}"), target)
            for i in range(len(settings["names"]))
        ]
        stored = load_file(Path(folder) / "router.safetensors", str(target.device))
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        count = len(members)
        wanted = {"log_prior": (count,), "log_token": (count, target.vocab_size)}
        if shapes != wanted:
            raise UserError(
                f"must hold the tensors {wanted}, one row for each name in drafter.json",
                key=str(Path(folder) / "router.safetensors"),
                value=shapes,
            )
        router = NaiveBayes(settings["names"], stored["log_prior"], stored["log_token"])
        return cls(members, router).eval()
