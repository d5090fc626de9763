"""What makes a run another one, or a stage that runs share: all that decides its weights."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from types import SimpleNamespace

import pytest
import torch

from data.traces import Trace
from drafters.causal_lm import CausalLMDrafter
from phases import shared
from phases.generate import contents
from phases.pipeline import resolve
from phases.run import Run, claim
from target.model import Target
from tests.helpers.commands import command
from trainer import checkpoint, files
from trainer.errors import UserError
from trainer.setup import make_accelerator


def trace(prompt, response, fixed=()):
    rest = ("target", "code", "c", 0, 0, 1.0, 0, 1.0, 0, "eos", "m", "t")
    return Trace(prompt, response, *rest, fixed_ids=list(fixed))


@pytest.fixture
def given(tmp_path, tiny_target):
    """What `shared.place` is given: run, settings of the stage by recipe and trainer, drafter and
    text."""
    config = resolve(command(tmp_path, "target"))[0]
    accelerator = make_accelerator(config.trainer, cpu=True)
    target = tiny_target("llama")
    run = Run(config, accelerator, target, config.run_dir)
    drafter = CausalLMDrafter.from_target(target, num_layers=1, hidden_size=16)
    return [run, {"steps": 3}, config.trainer, drafter, [trace([5], [6])]]


def with_target(given, target):
    given[0] = dataclasses.replace(given[0], target=target)


def with_config(given, section, **changed):
    config = copy.deepcopy(given[0].config)
    for name, value in changed.items():
        setattr(getattr(config, section), name, value)
    given[0] = dataclasses.replace(given[0], config=config)


class OnGPU:
    """What `shared.place` asks of the accelerator of one process on a GPU."""

    device, num_processes = torch.device("cuda"), 1


def with_another_drafter(given):
    given[3] = copy.deepcopy(given[3])
    with torch.no_grad():
        next(given[3].parameters()).view(-1)[0] += 1


# what is changed -> (how, whether a run of the same folder is another one too, and named by what)
CHANGES = {
    "kind of device": (
        lambda g, _: g.__setitem__(0, dataclasses.replace(g[0], accelerator=OnGPU())), None,
    ),
    "settings of the recipe": (lambda g, _: g.__setitem__(1, {"steps": 4}), None),
    "settings of the trainer": (
        lambda g, _: g.__setitem__(2, dataclasses.replace(g[2], lr=0.5)), None,
    ),
    "weights of the target": (
        lambda g, tiny: with_target(g, Target.load(str(tiny("llama", seed=1)))), "target",
    ),
    "chat template of the target": (
        lambda g, tiny: with_target(g, Target.load(str(tiny("llama", chat_template=True)))), None,
    ),
    "starting drafter": (lambda g, _: with_another_drafter(g), "starting drafter"),
    "prompts": (lambda g, _: g.__setitem__(4, [trace([7], [6])]), "training text"),
    "responses": (lambda g, _: g.__setitem__(4, [trace([5], [7])]), "training text"),
    "responses of the data set": (
        lambda g, _: g.__setitem__(4, [trace([5], [6], [8])]), "training text",
    ),
    "seed": (lambda g, _: with_config(g, "run", seed=99), None),
    "depth": (lambda g, _: with_config(g, "eval", K=2), None),
    "kind of features": (lambda g, _: with_config(g, "data", features="cached"), None),
    "dtype of features": (lambda g, _: with_config(g, "data", features_dtype="fp8"), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_shared_stage_is_found_by_all_that_decides_its_weights(
    given, tiny_folder, name, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr("phases.shared.placement", lambda *_: SimpleNamespace(name="NO"))
    before = shared.place(*given)
    assert shared.place(*given) == before
    CHANGES[name][0](given, tiny_folder)
    assert shared.place(*given) != before


def test_where_a_run_lies_and_how_often_it_saves_decide_nothing(given):
    before = shared.place(*given)
    with_config(given, "run", dir="elsewhere")
    given[2] = dataclasses.replace(given[2], save_every=7, log_every=3)
    assert shared.place(*given) == before


@pytest.mark.parametrize("name", [name for name in CHANGES if CHANGES[name][1]])
def test_a_folder_is_not_gone_on_in_with_other_contents(given, tiny_folder, name):
    """Although each has the name that it had."""
    change, named = CHANGES[name]
    claim(given[0], ["train.py"], contents(given[0], *given[3:]))
    claim(given[0], ["train.py"], contents(given[0], *given[3:]))
    before = {path: path.read_bytes() for path in given[0].folder.iterdir()}
    change(given, tiny_folder)
    with pytest.raises(UserError, match=f"was begun with another {named} under the same name"):
        claim(given[0], ["train.py"], contents(given[0], *given[3:]))
    assert {path: path.read_bytes() for path in given[0].folder.iterdir()} == before


def test_the_text_is_hashed_as_one_json_list(given):
    rows = [trace([5, 6], [7], [8]), trace([], [9])]
    for some in (rows, rows[:1], []):
        text = json.dumps([[t.prompt_ids, t.response_ids, t.fixed_ids] for t in some])
        expected = hashlib.sha256(text.encode()).hexdigest()[:16]
        assert contents(given[0], given[3], iter(some))["training text"] == expected


def test_a_shared_stage_that_is_damaged_is_named_and_not_taken(given, tmp_path, capsys):
    run, drafter = given[0], given[3]
    kept = shared.place(*given)
    weights = checkpoint.step_dir(kept, 2)
    checkpoint.write(weights, drafter.state_dict(), {"step": 2, "best_step": None})
    files.write_json(kept / shared.FINISHED, {"step": 2, "best_step": None})
    shared.restore(run, kept, tmp_path / "whole")
    assert checkpoint.is_whole(checkpoint.step_dir(tmp_path / "whole", 2))
    path = weights / checkpoint.WEIGHTS
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    capsys.readouterr()
    shared.restore(run, kept, tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()
    assert f"checkpoint {weights} is damaged" in capsys.readouterr().out
    for text in ("", "[]", "{}"):
        (kept / shared.FINISHED).write_text(text)
        shared.restore(run, kept, tmp_path / "damaged")
        assert not (tmp_path / "damaged").exists()
        assert f"{kept}" in capsys.readouterr().out
