"""Export of a causal-LM drafter as a Hugging Face folder.

Both transformers (`assistant_model`) and vLLM (`method: draft_model`) load this layout.

vLLM requires the target's configured `vocab_size`, and transformers concludes from an equal one
that the tokenizers are equal; it may be wider than the tokenizer, so embeddings and head are
padded. An id outside the tokenizer must never be drafted, whatever the hidden state. A zero row
does not ensure this: its logit 0 wins wherever all real logits are negative, and no constant row
can be low for every hidden state. **Each padded head row is the mean of the real rows** (so is a
padded bias): its logit is the mean of the real logits, thus never above the largest, and equal to
it only where all real logits are equal. The argmax is then a real token for every hidden state, and
a padded id drawn under sampling has probability below 1 / (number of real ids). This holds in exact
arithmetic; the mean is rounded once to the weights' dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from drafters.acceptance_head import AcceptanceHead, draft_length
from drafters.causal_lm import CausalLMDrafter, output_weight
from drafters.export.card import Export
from target.model import eos_ids as default_eos_ids
from target.vocabulary import real_ids
from trainer.errors import RunFault, UserError, require
from trainer.files import whole_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOGITS_TOLERANCE = (
    1e-5  # relative; zero for equal widths, a wider matrix product may round otherwise
)


def write(drafter: CausalLMDrafter, folder: str | Path, asked: Export) -> Path:
    """Write the drafter, and its acceptance head beside it; a tuned head sets the draft length.

    Raises UserError where the tokenizer does not fit, RunFault where reading it back fails.
    """
    length = draft_length(drafter.acceptance, asked.num_tokens)
    return export(
        drafter.model, drafter.tokenizer, drafter.fingerprint["vocab_size"], folder,
        card=asked.card, eos_ids=drafter.fingerprint["eos_ids"], ours=asked.ours,
        num_assistant_tokens=length.num_assistant_tokens,
        confidence_threshold=length.confidence_threshold or 0.0, acceptance=drafter.acceptance,
        known=drafter.vocab_size,
    )  # fmt: skip


@torch.no_grad()
def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target_config_vocab_size: int,
    folder: str | Path,
    *,
    num_assistant_tokens: int,
    card: str,
    eos_ids: Sequence[int] | None = None,
    confidence_threshold: float = 0.0,
    acceptance: AcceptanceHead | None = None,
    ours: bool = False,
    known: int | None = None,
) -> Path:
    """Write `model` to `folder`, in its own dtype, complete or not at all.

    An earlier export there is replaced. `card` becomes README.md. `eos_ids`: the target's (None:
    the model's own). `confidence_threshold`: transformers ends a chain after a token less likely
    than that, 0: never. `acceptance`: a head for this model, written beside it; transformers does
    not read it. `ours`: see `whole_folder`. `known`: see `pad_vocabulary`.
    """
    require(num_assistant_tokens >= 1, "num_assistant_tokens", "be >= 1", num_assistant_tokens)
    padded = pad_vocabulary(model, tokenizer, target_config_vocab_size, known)
    padded.config.use_cache = True
    padded.generation_config = _generation_config(
        model, tokenizer, num_assistant_tokens, eos_ids, confidence_threshold
    )
    with whole_folder(folder, ours) as partial:
        padded.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / "README.md").write_text(card, encoding="utf-8")
        if acceptance is not None:
            acceptance.save(partial)
        reread(partial, model, _known(tokenizer, known))
    return Path(folder)


@torch.no_grad()
def pad_vocabulary(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    known: int | None = None,
) -> PreTrainedModel:
    """A copy of `model` on the CPU, `vocab_size` wide, that cannot draft an id without a token.

    The module's docstring says how. Padded embedding rows are zero, unless tied to the head.
    `known`: tokens from this id on are none of the target's, whose tokenizer names more than its
    embedding holds. Raises UserError where the tokenizer names another id that the drafter or the
    target lacks.
    """
    real, width = _known(tokenizer, known), output_weight(model).shape[0]
    _check_ids(real, width, vocab_size)
    padded: Any = copy.deepcopy(model).cpu().eval()  # embeddings and heads are typed as None
    if width != vocab_size:
        with torch.random.fork_rng(devices=[]):  # resizing draws rows, which are overwritten below
            padded.resize_token_embeddings(vocab_size, mean_resizing=False)
    padding = torch.ones(vocab_size, dtype=torch.bool)
    padding[real] = False
    embedding, head = padded.get_input_embeddings(), padded.get_output_embeddings()
    embedding.weight[padding] = 0  # before the head: tied, they are one matrix
    head.weight[padding] = head.weight[real].double().mean(0).to(head.weight.dtype)
    if getattr(head, "bias", None) is not None:
        head.bias[padding] = head.bias[real].double().mean().to(head.bias.dtype)
    return padded


def check(drafter: CausalLMDrafter) -> None:
    """Raise UserError for a drafter that the engines cannot serve."""
    real = _known(drafter.tokenizer, drafter.vocab_size)
    _check_ids(real, output_weight(drafter.model).shape[0], drafter.fingerprint["vocab_size"])


def _check_ids(real: torch.Tensor, width: int, vocab_size: int) -> None:
    if int(real[-1]) >= min(width, vocab_size):
        raise UserError(
            f"the tokenizer names ids up to {int(real[-1])}, but the drafter has {width} and the "
            f"target {vocab_size}: use the target's tokenizer"
        )


def _known(tokenizer: PreTrainedTokenizerBase, known: int | None) -> torch.Tensor:
    """The ids [n] of tokens, below `known` where it is given."""
    real = real_ids(tokenizer)
    return real if known is None else real[real < known]


def _generation_config(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_assistant_tokens: int,
    eos_ids: Sequence[int] | None,
    confidence_threshold: float,
) -> GenerationConfig:
    """Settings for `num_assistant_tokens` a round, fewer only by the confidence threshold."""
    ends = list(default_eos_ids(model, tokenizer) if eos_ids is None else eos_ids)
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = ends[0] if ends else None
    return GenerationConfig(
        num_assistant_tokens=num_assistant_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=confidence_threshold,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=pad,
    )


@torch.no_grad()
def reread(folder: str | Path, model: PreTrainedModel, real: torch.Tensor) -> float:
    """Load `folder` as a user would and compare it with `model` over the ids `real` [n].

    Every tensor must be known, present and bit-identical, and the float32 logits on random tokens
    must agree; RunFault otherwise. Returns their largest absolute difference: 0 where the two are
    equally wide.
    """
    # code of its own was allowed where the model was loaded, and was written as it is
    foreign = not type(model).__module__.startswith("transformers.")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=model.dtype, attn_implementation="eager", output_loading_info=True,
        trust_remote_code=foreign,
    )  # fmt: skip
    written, info = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            names = sorted(map(str, info[problem]))
            raise RunFault(f"{folder}: {problem.replace('_', ' ')} on reading it back: {names}")
    original: Any = copy.deepcopy(model).cpu().eval()
    original.set_attn_implementation("eager")

    tables = {id(m.get_input_embeddings().weight) for m in (original, written)}
    tables |= {id(p) for m in (original, written) for p in m.get_output_embeddings().parameters()}
    theirs = dict(written.named_parameters())
    for name, ours in original.named_parameters():
        if name not in theirs:
            raise RunFault(f"{folder}: tensor {name!r} is missing on reading it back")
        read = theirs.pop(name)
        same = (
            torch.equal(ours[real], read[real]) if id(ours) in tables else torch.equal(ours, read)
        )
        if not same:
            raise RunFault(f"{folder}: tensor {name!r} differs on reading it back")
    if theirs:
        raise RunFault(f"{folder}: unknown tensors on reading it back: {sorted(theirs)}")

    draws = torch.Generator().manual_seed(0)
    ids = real[torch.randint(len(real), (2, 32), generator=draws)]
    expected, found = (
        m.float()(input_ids=ids, use_cache=False).logits[..., real] for m in (original, written)
    )
    difference = (expected - found).abs().max().item()
    if not difference <= LOGITS_TOLERANCE * max(1.0, expected.abs().max().item()):
        raise RunFault(
            f"{folder}: logits differ by {difference:.3g} on reading it back, though the weights "
            "are equal: the model was changed outside its weights (.to(bfloat16) rounds the "
            "rotary frequencies, loading with dtype= does not)"
        )
    return difference
