"""How a run begins and how it is asked to stop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType
from wandb.sdk.lib.wbauth import unauthenticate_session

from phases.exits import stop_softly
from phases.pipeline import resolve
from phases.run import Run, load_target, provenance
from recipes.base import names
from tests.helpers.commands import command, start
from train import main
from trainer.errors import UserError


def test_without_git_no_commit_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance(["train.py"])["commit"] is None


@pytest.mark.parametrize(
    ("stage", "given", "says"),
    [(2, ["trainer.optimizer=muon"], "trainer.optimizer must be adamw under ZeRO"),
     (0, [], "zero_stage must be 1, 2 or 3, got 0")],
)  # fmt: skip
@pytest.mark.parametrize("is_main", [True, False])
def test_what_zero_cannot_train_is_refused_before_a_model_is_loaded(
    tmp_path, stage, given, says, is_main, monkeypatch
):
    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage))
    launched = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, state=state, num_processes=2,
        is_main_process=is_main,
    )  # fmt: skip
    monkeypatch.setattr("phases.run.make_accelerator", lambda config: launched)
    config = resolve(command(tmp_path, tmp_path / "no target", *given))[0]
    with pytest.raises(UserError, match=says):
        Run.open(config)


@pytest.mark.parametrize(
    ("recipe", "given", "processes", "key", "value"),
    [
        ("distillspec", ["trainer.gradient_accumulation_steps=2"], 1, "divergence", "tvd_pp"),
        ("eagle3", [], 2, "divergence", "tvd_pp"),
        ("osd", [], 4, "divergence", "tvd_pp,draft_temperature=2"),
        ("medusa", ["preset=published"], 1, "divergence", "tvd_pp"),  # it accumulates four batches
    ],
)
def test_a_loss_with_moments_of_its_batch_needs_one_batch_a_step(
    recipe, given, processes, key, value
):
    config, module = resolve([f"recipe={recipe}", f"method.{key}={value}", *given])
    with pytest.raises(UserError) as caught:
        module.Recipe.check_launch(config, processes)
    assert (caught.value.key, caught.value.value) == (f"method.{key}", value)
    assert f"={config.trainer.gradient_accumulation_steps}, processes" in caught.value.rule
    assert f"processes: {processes})" in caught.value.rule
    config.trainer.gradient_accumulation_steps = 1
    module.Recipe.check_launch(config, 1)


def test_what_a_launch_cannot_train_is_refused_before_a_model_is_loaded(
    tmp_path, tiny_folder, monkeypatch, capsys
):
    words = command(tmp_path, tmp_path / "no target", "method.divergence=tvd_pp")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(words) == 2
    assert "method.divergence=tvd_pp: its mean and deviation" in capsys.readouterr().err
    monkeypatch.delenv("WORLD_SIZE")
    assert main([*words, "dry_run=true", "trainer.gradient_accumulation_steps=3"]) == 2
    assert "accumulation" in capsys.readouterr().err
    assert main([*words, "dry_run=true"]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    words = command(tmp_path, tiny_folder("llama"), "method.divergence=tvd_pp")
    assert main([*words, "dry_run=true"]) == 0


def test_a_missing_login_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    unauthenticate_session()  # another test of this process may have logged in
    config = resolve(command(tmp_path, tmp_path / "no target", "trainer.wandb=online"))[0]
    with pytest.raises(UserError, match=r"trainer\.wandb=online needs a login"):
        Run.open(config)


def test_the_laptop_presets_model_names_the_command_that_gets_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for recipe in names():
        config = resolve([f"recipe={recipe}", "preset=laptop"])[0]
        with pytest.raises(UserError) as caught:
            load_target(config, "cpu")
        assert (caught.value.key, caught.value.value) == ("model.target", "runs/smollm2")
        assert caught.value.remedy == "python -m scripts.get_smollm2 downloads it"


ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--module")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "says"), [(ACCELERATE, "stopped: rerun"), (("-m",), "goes on alone")]
)
def test_a_run_ends_with_the_launcher_that_does_not_pass_on_a_signal(launcher, says, tmp_path):
    """Whatever else started it, such as a shell, may end before it."""
    log = tmp_path / "log"
    module = "tests.phases.test_run"
    own = [] if launcher == ACCELERATE else ["launch"]
    process = start(*launcher, module, *own, log=log, fresh=True)
    while "ready" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    process.terminate()
    process.wait(60)
    until = time.monotonic() + 30
    while says not in log.read_text() and time.monotonic() < until:
        time.sleep(0.05)
    said = log.read_text()
    assert says in said
    assert ("goes on alone" in said) != ("stopped: rerun" in said)


def wait_for_the_end_of_the_parent() -> None:
    parent = os.getppid()
    stop_softly()
    print("ready", flush=True)
    while os.getppid() == parent:
        time.sleep(0.05)
    time.sleep(0.5)
    print("goes on alone", flush=True)


if __name__ == "__main__":
    if "launch" in sys.argv:
        subprocess.run([sys.executable, "-m", "tests.phases.test_run"])
    else:
        wait_for_the_end_of_the_parent()
