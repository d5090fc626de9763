"""Reader of the published layouts of heads.

It shares no table with the writers, so that a mistake in one of them shows as a difference.

`read` knows the names, shapes, dtypes and keys of each layout and refuses, by name, what is
missing, unknown or contradictory. Layouts: Medusa (vLLM's names with or without `medusa_heads.`, or
the original repository's), Hydra's original repository, EAGLE-1, EAGLE-3 flat (`midlayer.*` or
`layers.0.*`), EAGLE-3 of the speculators library, DFlash flat, of transformers and of speculators,
DSpark flat and of speculators.
"""

from __future__ import annotations

from pathlib import Path

from transformers import LlamaConfig

from drafters.formats.dflash import read_dflash
from drafters.formats.files import (
    Tensors,
    check_architecture,
    check_keys,
    check_tensors,
    read_json,
    read_tensors,
    renamed,
    tensor_names,
    weight_files,
)
from drafters.formats.head import PublishedHead, check_vocabulary
from drafters.formats.hydra import read_hydra
from drafters.formats.keys import (
    DFLASH,
    DFLASH_HF,
    DSPARK,
    EAGLE1,
    EAGLE3,
    EAGLE_WITHOUT,
    KEYS,
    LAYER_IDS,
    LAYER_KEYS,
    OTHERS,
    EagleConfig,
    HeadConfig,
)
from drafters.formats.layer import layer_config, refuse_variants
from drafters.formats.medusa import read_medusa
from drafters.formats.speculators import check_proposal
from target.outputs import LayerId
from trainer.errors import UserError


def layout_of(folder: Path) -> str | None:
    """Layout of the head, by its key in `KEYS`; None where it is unknown, a language model's.

    Raises UserError for the drafters of other methods.
    """
    if not (folder / "config.json").exists():
        return None
    config = read_json(folder / "config.json", dict)
    if "speculators_model_type" in config:
        kind = config["speculators_model_type"]
        return f"{kind}_speculators" if kind in ("dflash", "dspark") else "speculators"
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    if "hydra_num_heads" in config:
        return "hydra"
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise UserError(f"{folder}: key 'architectures' must be of type list, got {names!r}")
    blocks = {DFLASH: "dflash", DFLASH_HF: "dflash_hf"} | dict.fromkeys(DSPARK, "dspark")
    if len(names) == 1 and names[0] in blocks:
        return blocks[names[0]]
    if any(part in str(name) for name in names for part in OTHERS):
        raise UserError(
            "is no kind of drafter known here",
            key=f"{folder}: architectures",
            value=names,
            remedy="name an EAGLE, EAGLE-3, Medusa or Hydra head, a DFlash or DSpark drafter, or "
            "a language model",
        )
    for part, layout in (("Eagle3", "eagle3"), ("Eagle", "eagle")):
        if any(part in str(name) for name in names):
            return layout
    if names == ["LlamaForCausalLM"] and config.get("num_hidden_layers") == 1:
        # what an ordinary model could call itself
        found = set(tensor_names(folder))
        if "fc.weight" in found or any(name.startswith("layers.0.") for name in found):
            return "eagle3" if "norm.weight" in found else "eagle"
    return None


def read(
    folder: str | Path, *, strict: bool = False, num_target_layers: int | None = None
) -> PublishedHead:
    """Read the head in `folder`; UserError where it is not in a layout known here.

    `strict`: for exports of this project, whose keys and tensors must all be as documented; else a
    head may leave out what has a default and add what has no effect. `num_target_layers`: for the
    default captures of EAGLE-3.
    """
    folder = Path(folder)
    layout, config = layout_of(folder), read_json(folder / "config.json", HeadConfig)
    if layout is None:
        raise UserError(
            f"{folder}: key 'architectures' is {config.get('architectures')}, no head known here"
        )
    if strict and [path.name for path in weight_files(folder)] != ["model.safetensors"]:
        raise UserError(f"{folder}: the weights must lie in model.safetensors")
    if layout.startswith(("dflash", "dspark")):
        return read_dflash(folder, layout, config, read_tensors(folder), strict)
    check_keys(folder, config, KEYS[layout], strict)
    tensors = read_tensors(folder)
    if layout == "medusa":
        return read_medusa(folder, config, tensors, strict)
    if layout == "hydra":
        return read_hydra(folder, config, tensors)
    if layout == "eagle":
        return _eagle1(folder, config, tensors, strict)
    return _eagle3(folder, layout, config, tensors, strict, num_target_layers)


# --- EAGLE ---------------------------------------------------------------------------------------


def _eagle1(folder: Path, config: HeadConfig, tensors: Tensors, strict: bool) -> PublishedHead:
    names = config["architectures"]
    check_architecture(folder, names, EAGLE1)
    layer = layer_config(folder, config, strict)
    width, vocab = layer.hidden_size, layer.vocab_size
    tensors, given = _named(folder, tensors, r"layers\.0" if strict else r"midlayer|layers\.0")
    wanted = {"fc.weight": (width, 2 * width), **_layer_shapes(layer, width)}
    optional: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab, width)}
    if not strict:
        optional |= {"fc.bias": (width,), "lm_head.weight": (vocab, width)}
    if (strict and names == ["LlamaForCausalLMEagle"]) or config.get("bias"):
        wanted["fc.bias"] = (width,)  # its readers would leave it unset
    check_tensors(folder, tensors, wanted, optional, given)
    if "fc.bias" in tensors and not bool(tensors["fc.bias"].any()):
        del tensors["fc.bias"]
    return PublishedHead("eagle", tensors, ["final_norm"], vocab, layer)


def _eagle3(
    folder: Path,
    layout: str,
    config: HeadConfig,
    tensors: Tensors,
    strict: bool,
    num_target_layers: int | None,
) -> PublishedHead:
    nested, prefix = config, "midlayer"
    if layout == "speculators":
        if (kind := config["speculators_model_type"]) != "eagle3":
            raise UserError(
                f"{folder}: key 'speculators_model_type' must be 'eagle3', 'dflash' or 'dspark', "
                f"got {kind!r}"
            )
        nested, prefix = config["transformer_layer_config"], r"layers\.0"
        keys = LAYER_KEYS | {"num_aux_hidden_states": (int, False)}
        check_keys(folder, nested, keys, strict)
        if strict:
            check_proposal(folder, config["speculators_config"], "eagle3")
    else:
        check_architecture(folder, config.get("architectures"), (*EAGLE3, "LlamaForCausalLM"))
    refuse_variants(folder, config if layout == "speculators" else {})
    layer = layer_config(folder, nested, strict)
    tensors, given = _named(folder, tensors, prefix if strict else r"midlayer|layers\.0")

    width, vocab = layer.hidden_size, layer.vocab_size
    drafted, state_width = config.get("draft_vocab_size"), config.get("target_hidden_size")
    drafted, state_width = drafted or vocab, state_width or width
    captures = _captures(folder, config, strict, num_target_layers)
    counted = nested.get("num_aux_hidden_states")
    if counted is not None and counted != len(captures):
        raise UserError(
            f"{folder}: key 'num_aux_hidden_states' must be {len(captures)}, the number of "
            f"captured layers, got {counted}"
        )
    switches = ("norm_before_residual", "fc_norm", "norm_output")
    flags = {name: bool(config.get(name, False)) for name in switches}
    wanted: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(captures) * state_width),
        "layer.input_layernorm.weight": (width,),
        "layer.hidden_norm.weight": (width,),
        "norm.weight": (width,),
        "lm_head.weight": (drafted, width),
        **_layer_shapes(layer, 2 * width),
    }
    if flags["fc_norm"]:
        wanted |= {f"fc_norm.{i}.weight": (state_width,) for i in range(len(captures))}
    maps: dict[str, tuple[int, ...]] = {"d2t": (drafted,), "t2d": (vocab,)}
    if drafted != vocab:  # where they are equal, vLLM has no place for the maps
        wanted |= maps if strict else {"d2t": maps["d2t"]}
    optional = {"embed_tokens.weight": (vocab, width), **({} if strict else maps)}
    check_tensors(folder, tensors, wanted, optional, given)
    head = PublishedHead("eagle3", tensors, captures, vocab, layer, flags=flags)
    check_vocabulary(folder, head)
    return head


def _named(folder: Path, tensors: Tensors, prefix: str) -> tuple[Tensors, dict[str, str]]:
    """Tensors under this reader's names; `prefix`: expression for the layer's tensors."""
    rules = [
        (rf"(?:model\.)?(?:{prefix})\.(.+)", r"layer.\1"),
        (r"model\.((?:fc|norm|embed_tokens|fc_norm)\..+)", r"\1"),
    ]
    return renamed(folder, tensors, rules)


def _layer_shapes(layer: LlamaConfig, reads: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the layer's tensors; `reads`: width of the input of q, k and v."""
    width, inner, head = layer.hidden_size, layer.intermediate_size, int(layer.head_dim or 0)
    attended, grouped = layer.num_attention_heads * head, (layer.num_key_value_heads or 0) * head
    return {
        "layer.self_attn.q_proj.weight": (attended, reads),
        "layer.self_attn.k_proj.weight": (grouped, reads),
        "layer.self_attn.v_proj.weight": (grouped, reads),
        "layer.self_attn.o_proj.weight": (width, attended),
        "layer.mlp.gate_proj.weight": (inner, width),
        "layer.mlp.up_proj.weight": (inner, width),
        "layer.mlp.down_proj.weight": (width, inner),
        "layer.post_attention_layernorm.weight": (width,),
    }


def _captures(
    folder: Path, config: HeadConfig, strict: bool, num_target_layers: int | None
) -> list[LayerId]:
    """Captured layers, counted from 0.

    At the top level the key counts the layers that a state has passed; in `eagle_config` it counts
    layers from 0. Both may be there.
    """
    inner: EagleConfig = config.get("eagle_config") or {}
    passed, below = config.get(LAYER_IDS), inner.get(LAYER_IDS)
    for ids in (passed or [], below or []):
        if not isinstance(ids, list) or not all(type(k) is int for k in ids):
            raise UserError(f"{folder}: key {LAYER_IDS!r} must be a list of numbers, got {ids!r}")
    for key in ("use_aux_hidden_state", LAYER_IDS):
        if strict and "eagle_config" in config and key not in inner:
            raise UserError(f"{folder}: key 'eagle_config.{key}' is missing")
    for key, needed in EAGLE_WITHOUT.items():
        if inner.get(key) not in (None, needed):
            raise UserError(f"{folder}: key 'eagle_config.{key}' must be {needed} here")
    if passed and below and [k - 1 for k in passed] != below:
        raise UserError(
            f"{folder}: key {LAYER_IDS!r} is {passed}, in eagle_config {below}: the first counts "
            "the layers a state has passed, so each must be one more"
        )
    if passed:
        layers = [k - 1 for k in passed]
    elif below:
        layers = list(below)
    elif num_target_layers is not None:
        layers = [k - 1 for k in (2, num_target_layers // 2, num_target_layers - 3)]
        print(
            f"{folder}: config.json names no layers of the target, so the head reads the outputs "
            f"of layers {layers}, from 0, as vLLM and SGLang take it (2, L/2 and L-3 layers "
            f"passed, L={num_target_layers})"
        )
    else:
        raise UserError(f"{folder}: key {LAYER_IDS!r} is missing")
    end = num_target_layers or max(layers) + 1
    if layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= end:
        raise UserError(
            f"{folder}: key {LAYER_IDS!r} must name distinct layers of the target, ascending; "
            f"it means the outputs of layers {layers}"
        )
    return list(layers)
