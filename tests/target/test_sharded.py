"""A target whose layers lie in parts on two processes, which need it at different times."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from phases.exits import end
from target.adapted import LoraSettings, check_lora
from target.loading import loaded_tensors, not_finite
from target.model import Target, decoder_layers
from tests.helpers.commands import TWO, finish, start
from tests.helpers.tiny import assert_same_greedy
from trainer.errors import UserError

LAYERS = (0, "final_norm")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # gathered weights lie elsewhere in memory


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gpt2", "qwen3_moe"])
def test_processes_that_ask_unevenly_get_what_the_whole_target_says(arch, tiny_folder):
    code, _, err = finish(start(*TWO, "-m", "tests.target.test_sharded", str(tiny_folder(arch))))
    assert code == 0, err[-3000:]


def test_one_process_has_nothing_to_share_out(tiny_folder):
    target = Target.load(str(tiny_folder("llama")), device_map="fsdp2")
    target.sync()
    assert target.sharded is None
    assert not hasattr(target.model, "hf_device_map")


def ask(words: list[str]) -> int:
    """One of the two processes."""
    [folder] = words
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    whole, parts = Target.load(folder), Target.load(folder, device_map="fsdp2")
    assert parts.fingerprint == whole.fingerprint
    assert parts.sharded is not None
    assert not_finite(loaded_tensors(parts.model)) == []
    assert parts.sharded.of_all([f"tensor {rank}"]) == ["tensor 0", "tensor 1"]
    theirs, ours = (list(decoder_layers(target.model)) for target in (whole, parts))
    size = sum(p.numel() for p in theirs[0].parameters())
    own = sum(p.to_local().numel() for p in ours[0].parameters())
    assert own < 0.6 * size

    ids = torch.arange(24).view(2, 12) + rank
    for turn in range(1 if rank else 4):  # inference mode and plain, alone and together
        with torch.inference_mode(turn % 2 == rank):
            mine, other = (t.outputs(ids + turn, layers=LAYERS) for t in (parts, whole))
        torch.testing.assert_close(mine.logits, other.logits, **CLOSE)
        for layer in LAYERS:
            torch.testing.assert_close(mine.hidden[layer], other.hidden[layer], **CLOSE)
    parts.sync()

    if rank:
        with parts.in_place(ours[-1], None):
            found = dict(ours[-1].named_parameters())
            for name, expected in theirs[-1].named_parameters():
                assert torch.equal(found[name], expected)
    else:  # while the other one reads a layer
        assert torch.isfinite(parts.outputs(ids).logits).all()
    later = parts.outputs(ids, project_later=True).logits[torch.tensor([1]), torch.tensor([3])]
    torch.testing.assert_close(later, whole.outputs(ids).logits[1:, 3, : whole.vocab_size], **CLOSE)

    given = {"max_new_tokens": 3 + 4 * rank, "do_sample": False, "pad_token_id": 0}
    mine, other = (target.model.generate(ids[:1, : 5 + rank], **given) for target in (parts, whole))
    prompt = ids[0, : 5 + rank].tolist()
    answers = [row[0, len(prompt) :].tolist() for row in (mine, other)]
    assert_same_greedy(whole.model, prompt, *answers)
    with pytest.raises(UserError, match="whole on one device"):
        check_lora(parts, LoraSettings())
    parts.sync()
    return 0


if __name__ == "__main__":
    end(ask)
