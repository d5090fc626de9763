"""The features store: stored states are the live ones, whenever the writer died."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
from threading import BrokenBarrierError

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from data.batches import Batch, collate
from data.features import FeaturesStore, write_features
from data.features_layout import FeaturesPlan, bytes_per_token, features_folder
from data.features_local import LocalFolder
from target.model import Target
from target.outputs import TargetOutputs
from tests.data.test_traces import cut, flip, make
from tests.helpers.tiny import prompts_of, save_tiny, tiny_model
from trainer.errors import RunFault, UserError

ROOT = Path(__file__).parents[2]
LAYERS = (0, 1, "final_norm")
LENGTHS = [(7, 5), (30, 21), (3, 1), (12, 17), (9, 9), (25, 3), (1, 40), (18, 0), (14, 30), (6, 6)]
TRACES = [
    make(i, prompt_ids=prompts_of([p], seed=i)[0], response_ids=prompts_of([r], seed=i + 99)[0])
    for i, (p, r) in enumerate(LENGTHS)
]
TOKENS = sum(p + r for p, r in LENGTHS)
PLAN = FeaturesPlan(LAYERS, "fp32", tokens_per_shard=60)  # six shards
FILES = [f"shard-{i:05d}.safetensors" for i in range(6)]


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama")


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory):
    """The store of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    fill(target, folder)
    return folder


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def fill(target, folder, traces=TRACES, plan=PLAN, batch_size=2, **options) -> FeaturesStore:
    return write_features(target, traces, plan, folder, batch_size=batch_size, **options)


def reopen(target, folder, traces=TRACES, layers=LAYERS, **changes) -> FeaturesStore:
    fingerprint = target.fingerprint | changes
    return FeaturesStore.open(folder, target_fingerprint=fingerprint, layers=layers, traces=traces)


def batch_of(*traces):
    texts = [t.prompt_ids for t in traces], [t.response_ids for t in traces]
    return collate(*texts, ["target"] * len(traces))


def answer(store: FeaturesStore, batch: Batch) -> TargetOutputs:
    found = store.outputs(batch)
    assert found is not None
    return found


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}


def assert_same(folder: Path, other: Path) -> None:
    """The same shards to the last bit and the same list of them, and nothing else about."""
    assert shards(folder) == shards(other)
    assert [path.name for path in sorted(folder.iterdir())] == [".lock", "manifest.json", *FILES]
    assert json.loads((folder / "manifest.json").read_text()) == json.loads(
        (other / "manifest.json").read_text()
    )


def rounding(dtype: str, live: torch.Tensor) -> torch.Tensor:
    """The largest error of each number that the dtype explains."""
    if dtype == "fp32":
        return torch.zeros_like(live)
    if dtype == "bf16":
        return live.abs() * 2**-8
    scale = live.abs().amax(-1, keepdim=True) / 448
    return torch.maximum(live.abs() * 2**-4, scale * 2**-10) * (1 + 1e-5)


# what is read


@pytest.mark.parametrize("dtype", ["fp32", "fp8"])
def test_states_are_read_ahead_of_their_step(target, tmp_path, monkeypatch, dtype):
    """Once for each time that they were asked for, in the order of the batch that asks."""
    store = fill(target, tmp_path / "ahead", plan=dataclasses.replace(PLAN, dtype=dtype))
    first, second = batch_of(TRACES[1], TRACES[0], TRACES[0]), batch_of(TRACES[0], TRACES[1])
    expected = [answer(store, batch).hidden for batch in (first, second)]
    reads, rows = [], store.folder.rows
    monkeypatch.setattr(
        store.folder, "rows", lambda *given: reads.append(threading.get_ident()) or rows(*given)
    )
    store.ahead(batch_of(make(99)))  # is not stored
    store.ahead(first)
    store.ahead(second)
    for batch, states in zip((second, first), reversed(expected), strict=True):
        found = answer(store, batch).hidden
        assert all(torch.equal(found[layer], states[layer]) for layer in LAYERS)
    assert len(reads) == 2
    assert threading.get_ident() not in reads
    answer(store, first)
    assert reads[2:] == [threading.get_ident()]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_states_come_back_within_the_rounding_of_the_dtype(target, tmp_path, dtype):
    store = fill(target, tmp_path, plan=FeaturesPlan(LAYERS, dtype, 60), batch_size=1)
    for trace in TRACES:
        batch = batch_of(trace)
        live = target.outputs(batch.input_ids, layers=LAYERS, logits=False).hidden
        found = answer(store, batch).hidden
        assert list(found) == list(LAYERS)
        for layer, states in found.items():
            assert states.dtype == torch.float32
            assert bool(((states - live[layer]).abs() <= rounding(dtype, live[layer])).all())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("rows", [2, 1000])
def test_summaries_are_those_of_the_logits_that_the_stored_states_give(
    target, tmp_path, monkeypatch, dtype, rows
):
    """For each token of a response, NaN where nothing is trained."""
    monkeypatch.setattr("trainer.logits.CHUNK_ELEMENTS", rows * target.vocab_size)
    plan = FeaturesPlan(LAYERS, dtype, 60, summary=True)
    store = fill(target, tmp_path, plan=plan, batch_size=1)
    batch = batch_of(*TRACES)
    found = answer(store, batch)
    logits = target.head.logits(found.hidden["final_norm"])
    assert found.summary is not None
    trained = torch.zeros(batch.input_ids.shape, dtype=torch.bool)
    for row, (prompt, response) in enumerate(LENGTHS):
        trained[row, prompt - 1 : prompt + response - 1] = True
    torch.testing.assert_close(found.summary.log_z[trained], logits[trained].logsumexp(-1))
    assert torch.equal(found.summary.first[trained], logits[trained].argmax(-1))
    assert bool(found.summary.log_z[~trained & (batch.document_ids >= 0)].isnan().all())
    assert answer(fill(target, tmp_path / "without"), batch).summary is None


def test_fp8_keeps_the_direction_of_each_token(target, tmp_path):
    """Of a whole token the errors are a few percent, also where one channel is far larger."""
    store = fill(target, tmp_path, plan=FeaturesPlan(LAYERS, "fp8"))
    batch = batch_of(*TRACES)
    live = target.outputs(batch.input_ids, layers=LAYERS, logits=False).hidden
    for layer, states in answer(store, batch).hidden.items():
        real = batch.document_ids >= 0
        error = (states - live[layer]).norm(dim=-1) / live[layer].norm(dim=-1)
        assert float(error[real].max()) < 2**-4
        assert float(error[real].mean()) > 1e-3  # it was fp8 that was read


def test_fp8_is_read_as_torch_itself_reads_it(target, tmp_path):
    store = fill(target, tmp_path, plan=FeaturesPlan(LAYERS, "fp8"))
    tensors = load_file(tmp_path / FILES[0])
    longest = max(TRACES, key=lambda t: len(t.prompt_ids) + len(t.response_ids))
    for layer, states in answer(store, batch_of(longest)).hidden.items():
        num_tokens = states.shape[1]
        plain = tensors[f"hidden.{layer}"].float() * tensors[f"scale.{layer}"]
        assert torch.equal(states[0], plain[:num_tokens])


def test_a_state_of_zeros_comes_back_as_zeros(tmp_path):
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = 0
    target = Target.load(str(save_tiny(tmp_path / "target", "llama")))
    target.model = model
    trace = make(0, prompt_ids=[7], response_ids=[])
    store = fill(target, tmp_path / "store", [trace], FeaturesPlan(LAYERS, "fp8"))
    for states in answer(store, batch_of(trace)).hidden.values():
        assert torch.equal(states, torch.zeros(1, 1, 32))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "llama_padded"])
def test_the_store_answers_like_the_live_target(tiny_target, tmp_path, name):
    target = tiny_target(name)
    fill(target, tmp_path, batch_size=3)
    store = reopen(target, tmp_path)
    picked = random.Random(0)
    for _ in range(5):
        batch = batch_of(*picked.choices(TRACES, k=4))  # in any order, repeated
        live = target.outputs(batch.input_ids, batch.position_ids, layers=LAYERS, logits=False)
        found = answer(store, batch)
        real = batch.document_ids >= 0
        for layer in LAYERS:
            states = found.hidden[layer]
            assert states.shape == live.hidden[layer].shape
            torch.testing.assert_close(states[real], live.hidden[layer][real], rtol=1e-5, atol=1e-5)
            assert not bool(states[~real].any())
        assert found.logits is None


def test_states_have_the_dtype_of_the_target(tmp_path):
    folder = save_tiny(tmp_path / "target", "llama")
    target = Target.load(str(folder), dtype="bfloat16")
    store = fill(target, tmp_path / "store", plan=FeaturesPlan(LAYERS, "bf16"), batch_size=1)
    batch = batch_of(TRACES[0])
    live = target.outputs(batch.input_ids, layers=LAYERS, logits=False).hidden
    for layer, states in answer(store, batch).hidden.items():
        assert torch.equal(states, live[layer])


@pytest.mark.parametrize(
    "change",
    [
        lambda p, r: (p, [*r, 5]),
        lambda p, r: (p, []),
        lambda p, r: (p[:-1], [p[-1], *r]),  # the same tokens, another boundary
    ],
)
def test_a_row_that_is_not_stored_is_left_to_the_live_target(target, whole, change):
    store = reopen(target, whole)
    prompts = [t.prompt_ids for t in TRACES[:2]]
    responses = [t.response_ids for t in TRACES[:2]]
    assert store.outputs(collate(prompts, responses, ["target"] * 2)) is not None
    prompts[1], responses[1] = change(prompts[1], responses[1])
    assert store.outputs(collate(prompts, responses, ["target", "draft"])) is None


def test_an_empty_row_is_neither_stored_nor_missed(target, tmp_path):
    empty = make(99, prompt_ids=[], response_ids=[])
    assert fill(target, tmp_path, [*TRACES, empty]).num_rows == len(TRACES)
    with pytest.raises(UserError, match="no trace has a token"):
        fill(target, tmp_path / "none", [empty])


# what is written


def test_equal_rows_are_stored_once_and_their_order_means_nothing(target, whole, tmp_path):
    again = [dataclasses.replace(t, index=50, temperature=0.5) for t in TRACES]
    store = fill(target, tmp_path, [*TRACES[::-1], *again])
    assert (store.num_rows, store.num_tokens) == (len(TRACES), TOKENS)
    assert_same(tmp_path, whole)


def test_long_rows_come_first_and_no_shard_is_too_large(whole):
    tokens = [
        entry["tokens"] for entry in json.loads((whole / "manifest.json").read_text())["shards"]
    ]
    assert sum(tokens) == TOKENS
    assert max(tokens) <= PLAN.tokens_per_shard
    assert len(tokens) == len(FILES)


def test_a_row_longer_than_a_shard_has_its_own(target, tmp_path):
    plan = FeaturesPlan(LAYERS, "fp32", tokens_per_shard=1)
    store = fill(target, tmp_path, plan=plan)
    assert len(shards(tmp_path)) == len(TRACES)
    assert store.outputs(batch_of(*TRACES)) is not None


def test_a_shard_says_by_itself_what_it_is(target, whole):
    with safe_open(whole / FILES[0], "pt") as file:
        header = json.loads(file.metadata()["draftsmith.features"])
        assert sorted(file.keys()) == ["hidden.0", "hidden.1", "hidden.final_norm", "sha256"]
        assert file.get_slice("hidden.0").get_shape() == [header["shard"]["tokens"], 32]
    identity = header["identity"]
    assert identity["target"] == target.fingerprint
    assert identity["layers"] == [0, 1, "final_norm"]
    assert identity["after_final_norm"] == [False, False, True]
    assert identity["dtype"] == "fp32"
    assert json.loads((whole / "manifest.json").read_text())["identity"] == identity
    mode = (whole / "manifest.json").stat().st_mode
    assert (whole / FILES[0]).stat().st_mode == mode  # readable for whoever reads the manifest


def test_the_folder_follows_from_what_decides_the_states(target, tiny_target, tmp_path):
    same = [
        features_folder(target, TRACES, PLAN, tmp_path),
        features_folder(target, TRACES[::-1] * 2, PLAN, tmp_path),
        features_folder(target, TRACES, FeaturesPlan(LAYERS[::-1], "fp32", 60), tmp_path),
    ]
    assert len(set(same)) == 1
    assert same[0].parent == tmp_path / "features"
    others = [
        features_folder(tiny_target("llama", seed=1), TRACES, PLAN, tmp_path),
        features_folder(target, TRACES[1:], PLAN, tmp_path),
        features_folder(target, TRACES, FeaturesPlan((0, 1), "fp32", 60), tmp_path),
        features_folder(target, TRACES, FeaturesPlan(LAYERS, "fp8", 60), tmp_path),
        features_folder(target, TRACES, FeaturesPlan(LAYERS, "fp32", 70), tmp_path),
    ]
    assert len({*same, *others}) == 6


def test_a_finished_store_is_found_and_not_written(target, copy, capsys, monkeypatch):
    monkeypatch.setattr(Target, "outputs", None)  # nothing is computed
    before = {path: path.stat().st_mtime_ns for path in copy.iterdir()}
    assert fill(target, copy).outputs(batch_of(TRACES[0])) is not None
    assert {path: path.stat().st_mtime_ns for path in copy.iterdir()} == before
    assert capsys.readouterr().out == ""


def test_a_store_with_further_layers_serves_a_recipe_that_reads_fewer(target, tmp_path):
    def found(layers, traces=TRACES, dtype="fp32", summary=False):
        plan = FeaturesPlan(layers, dtype, tokens_per_shard=60, summary=summary)
        own = LocalFolder(features_folder(target, traces, plan, tmp_path))
        return FeaturesStore.with_further_layers(target, traces, plan, own)

    folder = features_folder(target, TRACES, PLAN, tmp_path)
    fill(target, folder)
    batch = batch_of(*TRACES[:3])
    store = found(("final_norm",))
    assert store is not None
    assert str(store.folder) == str(folder)
    assert set(answer(store, batch).hidden) == {"final_norm"}
    every = answer(fill(target, folder), batch).hidden["final_norm"]
    assert torch.equal(answer(store, batch).hidden["final_norm"], every)
    assert found((0, "final_norm")) is not None
    assert found(LAYERS) is None  # its own store, which is opened as such
    assert found(("final_norm",), TRACES[1:]) is None
    assert found(("final_norm",), dtype="bf16") is None
    assert not found(LAYERS, summary=True).has_summaries
    other = folder.parent / "0-damaged" / "manifest.json"
    other.parent.mkdir()
    other.write_text("")
    assert found(("final_norm",)) is not None
    manifest = folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"complete": true', '"complete": false'))
    assert found(("final_norm",)) is None
    assert found(LAYERS, summary=True) is None
    more = dataclasses.replace(PLAN, summary=True)
    fill(target, features_folder(target, TRACES, more, tmp_path), plan=more)
    assert found(LAYERS) is not None
    fill(target, folder)
    shutil.copytree(folder, folder.parent / "0-without")
    assert found(("final_norm",), summary=True).has_summaries


def test_states_that_are_not_finite_are_named(tmp_path):
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[TRACES[3].prompt_ids[2]] = torch.inf
    trace = dataclasses.replace(TRACES[3], conversation_id="chat 8", turn=2)
    target = Target.load(str(save_tiny(tmp_path / "target", "llama")))
    target.model = model
    message = r"layers \[0, 1, 'final_norm'\] is not finite in trace 3 \('chat 8', turn 2\); check"
    with pytest.raises(RunFault, match=message):
        fill(target, tmp_path / "store", [trace])
    assert not shards(tmp_path / "store")


# killed and started again


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("survivors", range(6))
def test_a_run_that_dies_at_any_shard_goes_on(
    target, whole, tmp_path, monkeypatch, call, survivors
):
    """Before a shard has its bytes on the disk, and before it has its name."""

    class Killed(BaseException):
        pass

    real = getattr(os, call)
    done = iter(range(99))

    def dying(*arguments):
        of_folder = call == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
        if not of_folder and next(done) == survivors + 1:  # the first is the manifest
            raise Killed
        return real(*arguments)

    monkeypatch.setattr(os, call, dying)
    with pytest.raises(Killed):
        fill(target, tmp_path)
    monkeypatch.undo()
    assert list(shards(tmp_path)) == FILES[:survivors]
    assert (tmp_path / ".writing" / FILES[survivors]).exists()
    with pytest.raises(UserError, match="is not complete; start the command"):
        reopen(target, tmp_path)
    early = {path: path.stat().st_mtime_ns for path in tmp_path.glob("shard-*")}
    fill(target, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in early} == early
    assert_same(tmp_path, whole)


KILLED = """
import sys, time
from data.features import write_features
from target.model import Target
from tests.data import test_features as job
target, outputs = Target.load(sys.argv[1]), Target.outputs
def slow(*arguments, **options):
    time.sleep(0.1)
    return outputs(*arguments, **options)
Target.outputs = slow
write_features(target, job.TRACES, job.PLAN, sys.argv[2], batch_size=2)
"""


@pytest.mark.slow
def test_kill_9_at_a_random_moment_loses_and_doubles_nothing(target, whole, tmp_path):
    command = [sys.executable, "-c", KILLED, target.name, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT)
    while not (tmp_path / FILES[1]).exists() and process.poll() is None:
        time.sleep(0.005)
    time.sleep(random.random() * 0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = shards(tmp_path)
    assert len(left) >= 2
    (tmp_path / ".writing").mkdir(exist_ok=True)
    (tmp_path / ".writing" / ".tmpHalf").write_bytes(b"half a shard")
    fill(target, tmp_path)
    assert_same(tmp_path, whole)


def test_all_shards_there_but_the_manifest_behind(target, copy, whole):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest |= {"complete": False, "shards": []}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    fill(target, copy)
    assert_same(copy, whole)
    (copy / "manifest.json").unlink()
    fill(target, copy)
    assert_same(copy, whole)


def test_a_full_disk_is_named_and_finished_shards_stay(target, whole, tmp_path, monkeypatch):
    real, done = os.fsync, iter(range(99))

    def full(descriptor):
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode) and next(done) == 3:
            raise OSError(28, os.strerror(28))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    words = rf"cannot write .*{FILES[2]}: No space left on device; remove the cause"
    with pytest.raises(RunFault, match=words):
        fill(target, tmp_path)
    monkeypatch.undo()
    fill(target, tmp_path)
    assert_same(tmp_path, whole)


def test_two_commands_at_once_are_refused(target, tmp_path):
    seen = []

    def second() -> None:
        if not seen:  # while the first one holds the store
            seen.append(True)
            with pytest.raises(UserError, match="is being written by another command; wait"):
                fill(target, tmp_path)

    assert fill(target, tmp_path, barrier=second).num_rows == len(TRACES)
    assert seen


# several processes


def test_a_store_that_another_command_completes_meanwhile_is_complete_for_all_ranks(
    target, whole, tmp_path
):
    met = []

    def meet() -> None:
        if not met:
            fill(target, tmp_path)
        met.append(True)

    assert fill(target, tmp_path, rank=1, world=2, barrier=meet).num_rows == len(TRACES)
    assert len(met) == 1
    assert_same(tmp_path, whole)


def together(folder: Path, name: str, world: int, dying: int | None = None) -> None:
    """One thread a rank, each with a target of its own; rank `dying` breaks at its second shard."""
    barrier = threading.Barrier(world)
    faults = []
    # loaded here: transformers swaps torch's initialisers while it loads, for all threads
    targets = [Target.load(name) for _ in range(world)]

    def work(rank: int) -> None:
        target = targets[rank]
        outputs, calls = target.outputs, iter(range(99))

        def breaking(*arguments, **options):
            if rank == dying and next(calls) == 2:
                raise RuntimeError("killed")
            return outputs(*arguments, **options)

        target.outputs = breaking
        try:
            fill(target, folder, rank=rank, world=world, barrier=barrier.wait)
        except Exception as error:
            barrier.abort()
            faults.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(fault) for fault in faults if str(fault)] == ["killed"] * (dying is not None)


def test_one_rank_alone_makes_the_folder_of_half_written_shards(target, tmp_path):
    def meet() -> None:  # between looking for the folder and making it, the first rank clears it
        met.append(True)
        if len(met) == 2:
            raise BrokenBarrierError(sorted(path.name for path in tmp_path.iterdir()))

    for rank, made in ((1, []), (0, [".lock", ".writing", "manifest.json"])):
        met: list[bool] = []
        with pytest.raises(BrokenBarrierError) as found:
            fill(target, tmp_path, rank=rank, world=2, barrier=meet)
        assert found.value.args[0] == made


@pytest.mark.parametrize("world", [2, 7])
def test_several_ranks_write_the_same_store(target, whole, tmp_path, world):
    together(tmp_path, target.name, world)
    assert_same(tmp_path, whole)


@pytest.mark.parametrize("world", [1, 3])
def test_another_number_of_processes_goes_on(target, whole, tmp_path, world):
    together(tmp_path, target.name, 2, dying=1)
    assert 0 < len(shards(tmp_path)) < 6
    together(tmp_path, target.name, world)
    assert_same(tmp_path, whole)


# what is refused


def test_no_store_is_named(target, tmp_path):
    with pytest.raises(UserError, match=r"data.features: no store in .*manifest.json is missing"):
        reopen(target, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "other"}, r"target.weights '\w+' \(wanted: 'other'\); delete it or use"),
        ({"layers": (0, 1)}, r"layers \[0, 1, 'final_norm'\] \(wanted: \[0, 1\]\)"),
        ({"layers": (0, "final_norm")}, r"layers .* \(wanted: \[0, 'final_norm'\]\)"),
        ({"traces": TRACES[1:]}, r"rows 10 \(wanted: 9\); .*traces '\w+' \(wanted: '\w+'\)"),
        ({"traces": [*TRACES[1:], make(11)]}, r"traces '\w+' \(wanted: '\w+'\)"),
    ],
)
def test_another_target_other_layers_other_traces_are_refused(target, whole, changes, words):
    with pytest.raises(UserError, match=f"data.features: the store .* was made with .*{words}"):
        reopen(target, whole, **changes)


def test_writing_into_another_store_is_refused_before_it_is_touched(target, whole, copy):
    with pytest.raises(UserError, match=r"dtype 'fp32' \(wanted: 'bf16'\)"):
        fill(target, copy, plan=FeaturesPlan(LAYERS, "bf16", 60))
    assert shards(copy) == shards(whole)


@pytest.mark.parametrize("layers", [(0, 2), (-1,), (0, 0), ("norm",)])
def test_layers_the_target_does_not_have_are_refused(target, tmp_path, layers):
    with pytest.raises(UserError, match="layer id"):
        fill(target, tmp_path / "store", plan=FeaturesPlan(layers))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "fp16"}, "data.features_dtype must be one of fp32, bf16, fp8, got 'fp16'"),
        ({"layers": ()}, "data.features layers must name at least one"),
        ({"tokens_per_shard": 0}, "data.features tokens_per_shard must be >= 1, got 0"),
        ({"summary": True}, r"data.features layers must name final_norm, .* got \[0\]"),
    ],
)
def test_a_bad_plan_is_refused(options, words):
    with pytest.raises(UserError, match=words):
        FeaturesPlan(**({"layers": (0,)} | options))


def refused(target, folder, words) -> None:
    with pytest.raises(UserError, match=words):
        reopen(target, folder)


@pytest.mark.parametrize("number", [0, 3, 5])
@pytest.mark.parametrize("damage", [cut, lambda path: path.write_bytes(b"")])
def test_a_shard_cut_short_is_named_and_the_remedy_works(target, whole, copy, damage, number):
    damage(copy / FILES[number])
    words = rf"{FILES[number]} is damaged \(not readable: .*delete this file and start"
    refused(target, copy, words)
    with pytest.raises(UserError, match=words):
        fill(target, copy)
    (copy / FILES[number]).unlink()
    refused(target, copy, rf"{FILES[number]} is missing; start the command that made it again")
    fill(target, copy)
    assert_same(copy, whole)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_flipped_byte_is_named_when_its_row_is_read(target, copy, ahead):
    flip(copy / FILES[1], 0.6)
    store = reopen(target, copy)  # a store of terabytes is not read to open it
    failed = []
    for trace in TRACES * 2:
        if ahead:
            store.ahead(batch_of(trace))
        try:
            store.outputs(batch_of(trace))
        except UserError as error:
            failed.append(str(error))
    assert len(failed) == 2  # the same row, whenever it is asked for
    assert failed[0] == failed[1]
    assert re.search(rf"{FILES[1]} is damaged \(the states of its row \d are not", failed[0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_any_flipped_byte_of_a_shard_is_found(target, tmp_path, dtype):
    """Wherever it is: in the header, the states, the scales or the checksums."""
    layers, traces = (0, "final_norm"), TRACES[:3]
    fill(target, tmp_path, traces, FeaturesPlan(layers, dtype))
    good = (tmp_path / FILES[0]).read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    places = [*range(0, length, 23), *range(length, len(good), 211), *range(-90, 0, 7)]
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1
        (tmp_path / FILES[0]).write_bytes(bad)
        with pytest.raises(UserError, match=FILES[0]):
            reopen(target, tmp_path, traces, layers).outputs(batch_of(*traces))
    (tmp_path / FILES[0]).write_bytes(good)
    assert reopen(target, tmp_path, traces, layers).outputs(batch_of(*traces)) is not None


def test_shards_that_changed_places_are_refused(target, copy):
    (copy / FILES[0]).rename(copy / "kept")
    (copy / FILES[1]).rename(copy / FILES[0])
    (copy / "kept").rename(copy / FILES[1])
    refused(target, copy, rf"{FILES[0]} is damaged")


def test_a_shard_of_another_store_is_refused(target, copy, tmp_path):
    fill(target, tmp_path / "other", TRACES[1:])
    shutil.copy(tmp_path / "other" / FILES[0], copy / FILES[0])
    refused(target, copy, rf"{FILES[0]} belongs to another store; move or delete it")


def test_a_damaged_manifest_is_named_and_the_remedy_works(target, copy, whole):
    path = copy / "manifest.json"
    good = json.loads(path.read_text())
    listed = [{**entry, "rows": 9} for entry in good["shards"]]
    for text in ("{", json.dumps({**good, "shards": listed})):
        path.write_text(text)
        refused(target, copy, r"manifest.json is damaged .*delete this file and start")
    path.unlink()
    fill(target, copy)
    assert_same(copy, whole)


# bytes


def test_bytes_per_token():
    assert bytes_per_token(LAYERS, 192, "fp32") == 3 * 192 * 4
    assert bytes_per_token(LAYERS, 192, "bf16") == 3 * 192 * 2
    assert bytes_per_token((3,), 4096, "fp8") == 4096 + 4
    assert bytes_per_token((3,), 4096, "fp8", summary=True) == 4096 + 4 + 8


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_files_hold_little_more_than_the_states(tmp_path, tiny_target, dtype):
    """Within one percent of the raw tensors at ordinary sizes."""
    target = tiny_target("llama", width=64)
    traces = [make(i, prompt_ids=[i % 90 + 5] * 60, response_ids=[9] * (60 + i)) for i in range(60)]
    plan = FeaturesPlan((0, 1), dtype)
    store = fill(target, tmp_path, traces, plan, batch_size=20)
    size = sum(len(data) for data in shards(tmp_path).values())
    raw = store.num_tokens * bytes_per_token(plan.layers, 64, dtype)
    assert raw < size < 1.01 * raw


def test_budget_is_printed_before_the_run(target, tmp_path, capsys, copy):
    fill(target, tmp_path / "store")
    line = rf"features: 10 rows, {TOKENS} tokens of 384 bytes, 0.0987 MB in .*; to write 0.0987 MB,"
    assert re.match(line + r" free [\d.e+]+ GB\n", capsys.readouterr().out)
    (copy / FILES[5]).unlink()
    fill(target, copy, label="training features")
    assert re.match(r"training features: 10 rows, .*to write 0.00", capsys.readouterr().out)


def test_what_does_not_fit_on_the_disk_is_refused_before_it_begins(
    target, tmp_path, copy, monkeypatch
):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 50_000))
    words = r"data.features need 0.0987 MB in .*, only 0.05 MB are free: lower .*data.cache_dir"
    with pytest.raises(UserError, match=words):
        fill(target, tmp_path / "new" / "store")
    assert not (tmp_path / "new").exists()
    (copy / FILES[5]).unlink()
    assert fill(target, copy).num_rows == len(TRACES)  # only what is missing must fit
