"""Two processes, with whatever shared out: the losses of one process. On a CPU.

.venv/bin/pip install -c constraints.txt -e ".[deepspeed]"; pytest -m zero
"""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from phases.exits import end
from tests.helpers.commands import ROOT, command, finish, read_jsonl, start
from tests.helpers.heads import eagle3_word
from trainer.replicated import Replicated

pytestmark = pytest.mark.zero

CONFIGS = ROOT / "scripts" / "accelerate"
STAGES = {
    "distillspec": ["method.divergence=fkl"],
    "medusa": [],
    "eagle3": ["method.steps=2", "method.layers=[0,1]"],
}
BLOCKS = ["method.block_size=4", "method.draft_layers=1", "method.layers=[0,1]", "method.anchors=3",
          "method.correction_rank=4", "eval.K=3", "eval.tree=[]"]  # fmt: skip
GIVEN = ("trainer.max_steps=4", "trainer.log_every=1", "trainer.save_every=2",
         "trainer.eval_every=2", "trainer.gradient_accumulation_steps=2", "eval.temperatures=0",
         "eval.num_prompts=1", "eval.timing_prompts=0", "data.features=live",
         "trainer.max_grad_norm=0.5")  # fmt: skip


# held-out text is one batch, so that the second of two processes has none, or three, of which it
# has one; under ZeRO-3 the first of these hangs where processes share it
HELD_OUT = {"eagle3": ("data.samples_per_prompt=3", "data.temperature=[0,0.7,1]")}


def words_of(folder: Path, target: Path, recipe: str, *given: str) -> list[str]:
    held_out = HELD_OUT.get(recipe, ())
    words = command(folder, target, f"recipe={recipe}", *GIVEN, *held_out, *given)
    if recipe != "distillspec":
        words = [word for word in words if not word.startswith("method.")]
    return words + STAGES.get(recipe, BLOCKS)


KINDS = {"ddp": "MULTI_CPU", "zero1": "DEEPSPEED", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED",
         "fsdp2": "FSDP2"}  # fmt: skip


def launched(folder: Path, kind: str, words: list[str], *program: str) -> None:
    """In two processes under `accelerate launch`, as a user would. `program`: as python takes it,
    train.py by default."""
    program = program or ("train.py",)
    config = folder / f"{kind}.yaml"
    config.write_text((CONFIGS / config.name).read_text() + "use_cpu: true\n")
    launch = ("-m", "accelerate.commands.launch", "--config_file", str(config))
    code, _, err = finish(start(*launch, *program, *words))
    assert code == 0, err[-3000:]


def launched_on_two_machines(folder: Path, kind: str, words: list[str]) -> None:
    """As README's srun does, with a process on each: a launcher for each, on one machine here."""
    config = folder / f"{kind}-machines.yaml"
    config.write_text((CONFIGS / f"{kind}.yaml").read_text() + "use_cpu: true\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = ("--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1",
            "--main_process_port", str(port))  # fmt: skip
    launch = ("-m", "accelerate.commands.launch", "--config_file", str(config), *both)
    machines = [
        start(*launch, "--machine_rank", str(i), "train.py", *words, fresh=True) for i in range(2)
    ]
    for code, _, err in map(finish, machines):
        assert code == 0, err[-3000:]


def losses(run: Path) -> list[tuple[float, float]]:
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
    return [(row["loss"], row["grad_norm"]) for row in rows]


def evaluations(run: Path) -> list[dict[str, float]]:
    """The numbers on held-out text, the first before the first step."""
    rows = [row["eval"] for row in read_jsonl(run / "metrics.jsonl") if "eval" in row]
    return [{k: v for k, v in row.items() if isinstance(v, float)} for row in rows]


@pytest.fixture(scope="module", params=STAGES)
def alone(request, tmp_path_factory, tiny_folder):
    """(recipe, its folder, the run of one process with the same global batch)"""
    folder = tmp_path_factory.mktemp(request.param)
    words = words_of(folder, tiny_folder("llama"), request.param, "trainer.batch_size=4")
    assert train.main(words) == 0
    return request.param, folder, folder / "run"


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_lose_what_one_does(alone, tiny_folder, kind):
    compare(*alone, tiny_folder("llama"), kind)


@pytest.mark.parametrize("recipe", ["dspark", "domino"])
def test_two_processes_draw_the_anchors_of_one(tmp_path, tiny_folder, recipe):
    words = words_of(tmp_path, tiny_folder("llama"), recipe, "trainer.batch_size=4")
    assert train.main(words) == 0
    compare(recipe, tmp_path, tmp_path / "run", tiny_folder("llama"), "ddp")


def compare(recipe: str, folder: Path, run: Path, target: Path, kind: str) -> None:
    """Train in two processes what one has trained in `run`."""
    there = folder / kind
    given = ("trainer.batch_size=2", f"run.dir={there}")
    launched(folder, kind, words_of(folder, target, recipe, *given))
    facts = json.loads((there / "run.json").read_text())
    assert (facts["distributed"], facts["num_processes"]) == (KINDS[kind], 2)
    found, expected = losses(there), losses(run)
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):  # added in another order
        assert one == pytest.approx(other, rel=1e-4)
    found, expected = evaluations(there), evaluations(run)
    assert len(found) == len(expected) == 3
    assert found[0] == expected[0]
    for one, other in zip(found, expected, strict=True):  # of weights that are added up otherwise
        assert one == pytest.approx(other, rel=0.01)
    weights = load_file(there / "drafter" / "model.safetensors")
    for name, tensor in load_file(run / "drafter" / "model.safetensors").items():
        assert weights[name].float().sub(tensor.float()).abs().max() < 1e-3


UNDROPPED = ("--module", "tests.helpers.undropped")  # dropout differs from process to process
ROWS = "trainer.pack_tokens=280"
SHARED = "model.device_map=fsdp2"


@pytest.mark.parametrize(
    ("recipe", "kind", "own"),
    [("eagle3", "ddp", [ROWS, SHARED]),
     ("distillspec", "fsdp2", [ROWS]),
     ("dspark", "ddp", [ROWS]),
     # the layers of its target see windows
     ("eagle3-mistral", "ddp", [ROWS]),
     # a text a row, of a block and more
     ("medusa2", "ddp", ["data.max_new_tokens=150"]),
     ("fastdraft", "ddp", ["method.context=200", "method.pretrain_steps=2",
                           "method.stages=[pretrain,align]", "trainer.lr_warmup_steps=0"])],
)  # fmt: skip
def test_two_processes_that_share_texts_lose_what_one_does(
    recipe, kind, own, tmp_path, tiny_folder, monkeypatch
):
    """In rows longer than a block, so that both have positions to train."""
    monkeypatch.setattr("target.adapted.DROPOUT", 0.0)
    found, shared = [], "trainer.context_parallel_size=2"
    recipe, _, arch = recipe.partition("-")
    target = tiny_folder(arch or "llama")
    for name, given in (("alone", ()), (kind, (shared,))):
        run = tmp_path / name
        given = (*own, "trainer.batch_size=1", f"run.dir={run}", *given)
        if recipe in (*STAGES, "dspark"):
            words = words_of(tmp_path, target, recipe, *given)
        else:
            words = command(tmp_path, target, f"recipe={recipe}", *GIVEN, *given)
        if recipe == "medusa2":
            words = [word for word in words if not word.startswith("method.")]
            words.append("method.lora_rank=2")
        if name == "alone":
            assert train.main(words) == 0
        else:
            launched(tmp_path, name, words, *UNDROPPED)
        tokens = [row["num_tokens"] for row in read_jsonl(run / "metrics.jsonl") if "loss" in row]
        found.append((losses(run), tokens))
    assert found[0][1] == found[1][1]
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_two_machines_lose_what_one_process_does(tmp_path, tiny_folder):
    """Each has a first local process; only the very first writes."""
    kind = "fsdp2"
    words = words_of(tmp_path, tiny_folder("llama"), "eagle3", "trainer.batch_size=4")
    assert train.main(words) == 0
    there = tmp_path / kind
    given = ("trainer.batch_size=2", f"run.dir={there}", f"data.cache_dir={there / 'cache'}")
    launched_on_two_machines(
        tmp_path, kind, words_of(tmp_path, tiny_folder("llama"), "eagle3", *given)
    )
    assert json.loads((there / "run.json").read_text())["num_processes"] == 2
    for one, other in zip(losses(there), losses(tmp_path / "run"), strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_medusa2_trains_inside_of_the_target(tmp_path, tiny_folder, kind, monkeypatch):
    """Its adapter is shared out too, and read between steps for what the target has become."""
    monkeypatch.setattr("target.adapted.DROPOUT", 0.0)
    found = []
    for name, rows in (("alone", 4), (kind, 2)):
        run = tmp_path / name
        given = ("recipe=medusa2", *GIVEN, f"trainer.batch_size={rows}", f"run.dir={run}")
        words = command(tmp_path, tiny_folder("llama"), *given)
        words = [word for word in words if not word.startswith("method.")]
        words.append("method.lora_rank=2")
        if name == "alone":
            assert train.main(words) == 0
        else:
            launched(tmp_path, name, words, *UNDROPPED)
        found.append(losses(run))
    assert len(found[0]) == 8  # of heads, and of both
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


UNEVEN = {
    "gto": ("method.num_groups=2", "method.group_size=2", "method.tree=dynamic:8:3:3",
            "data.max_new_tokens=12", "trainer.lr_warmup_steps=0"),
    "osd": ("data.num_prompts=24", "method.replay_share=0.3"),
}  # fmt: skip
ACCEPTANCE = ("alpha", "tokens_per_round", "engine_drafts", "engine_accepted")


def acceptance(run: Path) -> list[list[float]]:
    report = json.loads((run / "report.json").read_text())
    return [[row.get(key) or 0.0 for key in ACCEPTANCE] for row in report["results"]]


def test_a_target_in_parts_is_the_same_target(alone, tiny_folder):
    """Each process holds half of every layer. Text, a layer that starts as the target's, training
    and the report, which one process writes alone."""
    recipe, folder, run = alone
    there, kind = folder / "parts", {"eagle3": "fsdp2", "medusa": "zero3"}.get(recipe, "ddp")
    given = (
        "trainer.batch_size=2",
        f"run.dir={there}",
        SHARED,
        f"data.cache_dir={there / 'cache'}",
    )
    launched(folder, kind, words_of(folder, tiny_folder("llama"), recipe, *given))
    for one, other in zip(losses(there), losses(run), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    for one, other in zip(acceptance(there), acceptance(run), strict=True):
        assert one == pytest.approx(other, rel=0.05)  # of weights that differ in the last digits


@pytest.mark.parametrize("recipe", UNEVEN)
def test_processes_that_ask_a_target_in_parts_unevenly(tmp_path, tiny_folder, recipe):
    """Trees and served requests of each process's own."""
    runs = tmp_path / "whole", tmp_path / "parts"
    for run, given in zip(runs, ((), (SHARED,)), strict=True):
        given = ("trainer.batch_size=2", f"run.dir={run}", f"data.cache_dir={run}-cache", *given)
        given = (f"recipe={recipe}", *GIVEN, *given, *UNEVEN[recipe])
        if recipe == "gto":
            given = (*given, eagle3_word(tmp_path, tiny_folder("llama")))
        words = command(tmp_path, tiny_folder("llama"), *given)
        launched(tmp_path, "ddp", [word for word in words if "draft_hidden_size" not in word])
    whole, parts = map(losses, runs)
    assert len(parts) == len(whole) > 0
    for one, other in zip(parts, whole, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    for one, other in zip(*map(acceptance, runs), strict=True):
        assert one == pytest.approx(other, rel=0.05)
    notes = [("gathered" in (run / "report.md").read_text()) for run in runs]
    assert notes == [False, True]


AS_ON_A_GPU = ("--module", "tests.trainer.test_placements")


@pytest.mark.parametrize(
    ("kind", "program"),
    [("zero3", ()), ("fsdp2", ()), ("zero2", AS_ON_A_GPU), ("fsdp2", AS_ON_A_GPU)],
)
def test_a_run_goes_on_from_the_shares_of_its_processes(tmp_path, tiny_folder, kind, program):
    """From its second step, with the optimiser's state of both, also in one kernel."""
    words = words_of(tmp_path, tiny_folder("llama"), "medusa", "trainer.batch_size=2")
    launched(tmp_path, kind, words, *program)
    run = tmp_path / "run"
    whole = losses(run)
    checkpoints = run / "stages" / "0-train" / "checkpoints"
    names = {path.name for path in (checkpoints / "step-000002").iterdir()}
    assert {"optimizer-0.pt", "optimizer-1.pt"} < names
    shutil.rmtree(checkpoints / "step-000004")
    for name in ("report.json", "stages/0-train/finished.json"):
        (run / name).unlink()
    launched(tmp_path, kind, words, *program)
    assert losses(run) == whole
    assert not list(checkpoints.glob(".tmp*"))


@pytest.mark.parametrize("kind", ["zero2", "fsdp2"])
def test_bf16_computes_in_it_and_trains_float32(tmp_path, tiny_folder, kind):
    """Under ZeRO, where accelerate's own bf16 would round the weights and DeepSpeed switches off an
    autocast on a GPU that it has not begun, and under FSDP2, which reduces gradients in it."""

    def run(name, *given, program=()):
        given = ("trainer.batch_size=2", f"run.dir={tmp_path / name}", *given)
        words = words_of(tmp_path, tiny_folder("llama"), "medusa", *given)
        words = [word for word in words if "accumulation_steps" not in word]
        launched(tmp_path, kind, words, *program)
        return losses(tmp_path / name)

    expected, found = run("run"), run("bf16", "trainer.precision=bf16")
    assert found != expected
    assert found == [pytest.approx(row, rel=0.05) for row in expected]
    if kind == "zero2":
        assert run("gpu", "trainer.precision=bf16", program=AS_ON_A_GPU) == found
    best = max((tmp_path / "bf16/stages/0-train/checkpoints").glob("step-*"))
    assert all(t.dtype == torch.float32 for t in load_file(best / "drafter.safetensors").values())


if __name__ == "__main__":  # train.py with the optimiser that a GPU has
    enabled = torch.is_autocast_enabled
    # asked without a device type, torch answers for CUDA
    torch.is_autocast_enabled = lambda device="cpu": enabled(device)  # type: ignore[assignment]
    Replicated.fuses = property(lambda placement: True)  # type: ignore[assignment, method-assign]
    end(train.main)
