"""The project's commands with settings under which they end within seconds: what a command says
about sizes is replaced, all else is as it is written."""

from __future__ import annotations

from tests.helpers.commands import SETTINGS

HEAD = "runs/eagle3-head"
TRAINING = {**SETTINGS, "trainer.lr_warmup_steps": 0, "trainer.gradient_accumulation_steps": 1}
OF_RECIPE: dict[str, dict[str, object]] = {
    "fastdraft": {"method.pretrain_steps": 2, "method.continue_steps": 2},
    "gto": {"method.num_groups": 1, "method.group_size": 2},
}  # fmt: skip
SECTIONS = {"scripts.generate": ("data.",), "scripts.evaluate": ("eval.",)}


def words_of(command: list[str]) -> tuple[str | None, int]:
    """The entry point that a command starts (train.py or scripts.<name>), and where its own words
    begin."""
    for at, word in enumerate(command):
        if word == "train.py" or (word.startswith("scripts.") and command[at - 1] == "-m"):
            return word, at + 1
    return None, len(command)


def shrunk(command: list[str]) -> list[str]:
    """The same command on little text and for few steps."""
    entry, begin = words_of(command)
    words = command[begin:]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    if not words or "help=true" in words or entry not in ("train.py", *SECTIONS):
        return command
    if entry == "train.py":
        small = TRAINING | OF_RECIPE.get(given.get("recipe", ""), {})
        if "method.search_parameters" in given:
            small["method.search_steps"] = 2
        if given.get("recipe") == "gto":  # whose stage base has the steps of recipe eagle3
            small["model.drafter"] = HEAD
    else:
        small = {k: v for k, v in SETTINGS.items() if k.startswith(SECTIONS[str(entry)])}
    if entry != "scripts.generate" and "eval.temperatures" not in given:
        small["eval.temperatures"] = 0
    kept = [word for word in words if word.partition("=")[0] not in small]
    return [*command[:begin], *kept, *(f"{key}={value}" for key, value in small.items())]
