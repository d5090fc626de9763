"""States from a server: its answers and files are played by a small one, and taken from vLLM."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import train
from data.batches import collate
from data.config import DataConfig
from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.prompts import load_prompts
from data.served_states import ServedStates
from engines import states as module
from engines.states import PLUGIN, StatesClient, layer_numbers, states_options
from engines.vllm_server import vllm_server
from phases.check import check_address
from phases.states import about, served_states
from recipes.common.heads import HeadObjective
from target.model import Target, decoder_layers, final_norm
from tests.engines.states_server import LAYERS, Handler, serving, written
from tests.helpers.commands import ROOT, command, read_jsonl
from tests.helpers.tiny import ARCHITECTURES
from trainer.errors import RunFault, UserError
from trainer.files import write_json


@pytest.fixture(scope="module")
def target(tiny_target):
    return tiny_target("llama", layers=3)


@pytest.fixture
def server(target, tmp_path):
    with serving(target, tmp_path / "states") as one:
        yield one


@pytest.fixture
def second(target, tmp_path):
    with serving(target, tmp_path / "others") as one:
        yield one


@pytest.fixture
def client(server, target, monkeypatch):
    monkeypatch.setattr(module, "DELAYS_S", (0.01,))
    numbers = [*layer_numbers(LAYERS, target.num_layers).values()]

    def alive():
        if server.ended:
            raise RunFault("vLLM's server ended")

    one = StatesClient([server.url], numbers, target.hidden_size, concurrency=3, alive=alive)
    yield one
    one.close()


def traces_of(target, count=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        ids = torch.randint(5, target.vocab_size, (4 + 3 * index,), generator=draw).tolist()
        made.append(SimpleNamespace(prompt_ids=ids[:3], response_ids=ids[3:]))
    return made


def batch_of(traces):
    return collate(
        [t.prompt_ids for t in traces], [t.response_ids for t in traces], ["target"] * len(traces)
    )


def test_layers_have_the_numbers_of_vllm():
    assert layer_numbers((0, 3, "final_norm"), 8) == {0: 1, 3: 4, "final_norm": 8}
    assert layer_numbers((7, "final_norm"), 8) == {7: 8, "final_norm": 8}  # one state for both


def test_states_are_the_targets_at_every_token(server, client, target):
    source, batch = ServedStates(client, target, LAYERS), batch_of(traces_of(target))
    source.ahead(batch)
    found = source.outputs(batch).hidden
    own = target.outputs(batch.input_ids, layers=LAYERS, logits=False).hidden
    real = batch.position_ids < torch.tensor([4 + 3 * i for i in range(6)]).unsqueeze(1)
    real &= torch.arange(batch.input_ids.shape[1]) < torch.tensor(
        [4 + 3 * i for i in range(6)]
    ).unsqueeze(1)
    for layer in LAYERS:
        torch.testing.assert_close(found[layer][real], own[layer][real], rtol=1e-5, atol=1e-5)
    assert len(server.asked) == 6, "what was announced is not asked for again"
    assert not list(server.folder.iterdir()), "a file that was read is deleted"
    source.outputs(batch)
    assert len(server.asked) == 12, "and is held for one batch alone"


@pytest.mark.parametrize(
    "faults", [["busy"], ["cut"], ["busy", "cut", "busy"], ["not a file"], ["a list"], ["late"]]
)
def test_a_server_that_fails_for_a_while_is_asked_again(faults, server, client, target, capsys):
    server.faults += faults
    ids = [5, 6, 7, 8]
    torch.testing.assert_close(client.submit(ids).result(timeout=30), written(target, ids))
    assert len(server.asked) == len(faults) + (faults != ["late"])
    said = capsys.readouterr().out
    assert said.count("asked again for 300 s") == (faults != ["late"]), "once, and not silently"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("no connector", "writes no hidden states"),
        ("other text", "of another text"),
        ("two layers", "shape [4, 2, 32], expected [4, 3, 32]"),
        ("sparse", "shape nothing, expected [4, 3, 32]"),
        ("whole numbers", "of the kind torch.int64"),
        ("stretched", "of another text"),
        ("large", "is no file of at most 1050144 bytes"),
        ("folder", "is no file of at most"),
        ("pipe", "is no file of at most"),
    ],
)
def test_a_server_with_other_answers_is_refused_at_once(fault, says, server, client):
    server.faults += [fault] * 9
    with pytest.raises(RunFault, match=r"data\.features_engine") as raised:
        client.submit([5, 6, 7, 8]).result(timeout=30)
    assert says in str(raised.value)
    assert len(server.asked) == 1


@pytest.mark.parametrize("fault", ["no file", "no path"])
def test_a_folder_that_is_not_shared_is_said(fault, server, client, monkeypatch):
    monkeypatch.setattr(module, "FILE_S", 0.1)
    monkeypatch.setattr(module, "PATIENCE_S", -1.0)
    server.faults += [fault]
    with pytest.raises(RunFault, match="a folder that both see"):
        client.submit([5, 6, 7, 8]).result(timeout=30)


def test_a_server_that_stays_away_ends_the_run(server, client, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    server.faults += ["busy"] * 10_000
    began = time.monotonic()
    with pytest.raises(RunFault, match="run the same command again"):
        client.submit([5, 6, 7, 8]).result(timeout=30)
    assert time.monotonic() - began < 10


def test_a_server_of_the_run_that_ended_is_not_waited_for(server, client):
    server.faults += ["busy"] * 10_000
    server.ended = True
    with pytest.raises(RunFault, match="vLLM's server ended"):
        client.submit([5, 6, 7, 8]).result(timeout=30)
    assert len(server.asked) == 1


# --- several servers -----------------------------------------------------------------------------


@pytest.fixture
def both(server, second, target, monkeypatch):
    monkeypatch.setattr(module, "DELAYS_S", (0.01,))
    numbers = [*layer_numbers(LAYERS, target.num_layers).values()]
    one = StatesClient([server.url, second.url], numbers, target.hidden_size, concurrency=2)
    yield one
    one.close()


def texts(count):
    return [[5 + (3 * i + j) % 50 for j in range(4 + i % 3)] for i in range(count)]


def test_several_servers_share_the_texts(server, second, both, target):
    futures = [both.submit(ids) for ids in texts(40)]
    for ids, future in zip(texts(40), futures, strict=True):
        torch.testing.assert_close(future.result(timeout=60), written(target, ids))
    assert len(server.asked) + len(second.asked) == 40
    assert min(len(server.asked), len(second.asked)) > 5
    assert not [*server.folder.iterdir(), *second.folder.iterdir()]


@pytest.mark.parametrize(("fault", "patience"), [("busy", 0.2), ("two layers", 300.0)])
def test_a_server_that_fails_is_left_out_by_name(
    fault, patience, server, second, both, target, monkeypatch, capsys
):
    monkeypatch.setattr(module, "PATIENCE_S", patience)
    second.faults += [fault] * 10_000
    began = time.monotonic()
    while len(both.servers) == 2:
        for ids in texts(10):
            torch.testing.assert_close(both.submit(ids).result(20), written(target, ids))
        assert time.monotonic() - began < 60
    assert [one.root for one in both.servers] == [server.url]
    said = capsys.readouterr().out
    assert said.count("left out, 1 remain") == 1
    assert next(line for line in said.splitlines() if "left out" in line).startswith(second.url)
    asked = len(second.asked)
    futures = [both.submit(ids) for ids in texts(20)]
    for ids, future in zip(texts(20), futures, strict=True):
        torch.testing.assert_close(future.result(20), written(target, ids))
    assert len(second.asked) == asked


def test_the_last_server_ends_the_run(server, second, both, monkeypatch):
    for one in (server, second):
        one.faults += ["no connector"] * 100
    for _ in range(3):  # however many are asked for
        with pytest.raises(RunFault, match=r"writes no hidden states.*same command again"):
            both.submit([5, 6, 7, 8]).result(timeout=20)


def run_on(target, *servers, cache="unused", processes=1):
    data = DataConfig(features_engine=",".join(servers), cache_dir=str(cache))
    place = SimpleNamespace(is_main_process=True, num_processes=processes)
    return SimpleNamespace(config=SimpleNamespace(data=data), target=target, accelerator=place)


def test_each_of_several_servers_is_compared_before_any_is_believed(server, second, target, capsys):
    traces = traces_of(target)
    run = run_on(target, server.url, second.url)
    with served_states(run, LAYERS, traces) as states:
        assert len(states.client.servers) == 2
    said = capsys.readouterr().out.splitlines()
    width = 3 * target.hidden_size * 4
    for line, one in zip(said, (server, second), strict=True):
        assert line.startswith(f"states from {one.url}: {width:,} bytes a token, the first 0.0 MB")
        assert line.endswith(f"MB/s, in {one.folder}")
    second.faults += ["one layer off"] * 4
    with (
        pytest.raises(UserError, match=rf"from {second.url} .* off those of"),
        served_states(run, LAYERS, traces),
    ):
        pass


def test_a_network_disk_is_said_to_be_slow(monkeypatch):
    part = SimpleNamespace
    parts = [part(mountpoint="/", fstype="ext4"), part(mountpoint="/data", fstype="nfs4"),
             part(mountpoint="/data/fast", fstype="xfs")]  # fmt: skip
    monkeypatch.setattr("phases.states.psutil.disk_partitions", lambda all: parts)
    for folder, slow in (("/data/states", True), ("/data/fast/a", False), ("/datax", False)):
        one = module.StatesServer("http://a:1", folder=Path(folder), num_bytes=800, num_tokens=4)
        one.began, one.ended = 1.0, 2.0
        line = about(one)
        assert "200 bytes a token" in line
        assert ("a network disk (nfs4): /dev/shm is faster" in line) == slow


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        ("http://a:1,http://a:1", "must name each server once"),
        ("http://a:1,b:2", r"must be http://host:port or https://host:port, got 'b:2'"),
        ("http://a:1,", "must be http://host:port"),
        ("hf,http://a:1", "must be hf, vllm or the addresses of servers"),
    ],
)
def test_a_list_of_servers_is_checked_word_by_word(engine, says):
    with pytest.raises(UserError, match=rf"data\.features_engine {says}"):
        DataConfig(features_engine=engine)


def test_patience_begins_with_the_first_failure(server, client, monkeypatch):
    """Not with the last answer: nothing is asked for during an evaluation."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.2)
    client.submit([5, 6, 7, 8]).result(timeout=30)
    time.sleep(0.3)
    server.faults += ["busy"]
    client.submit([5, 6, 7, 8]).result(timeout=30)


def test_nothing_is_asked_for_that_no_batch_may_use(server, client, target):
    """The drafter has yet to write a row, and text of another batch may take this one's place."""
    source, batch = ServedStates(client, target, LAYERS), batch_of(traces_of(target, 2))
    source.ahead(collate(batch.prompts, [batch.responses[0], []], ["target", "draft"]))
    other = batch_of(traces_of(target, 2, seed=1))
    source.outputs(collate(other.prompts, other.responses, ["target", "draft"]))
    client.close()
    texts = [[*p, *r] for p, r in zip(other.prompts, other.responses, strict=True)]
    assert sorted(server.asked) == sorted(texts)


def test_closing_does_not_wait_for_a_server_that_hangs(server, client, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    server.faults += ["hang"] * 3
    futures = [client.submit([5, 6, 7, 8]) for _ in range(5)]
    while len(server.asked) < 3:
        time.sleep(0.01)
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 10
    server.released.set()
    for future in futures[:3]:
        future.result(timeout=20)
    for future in futures[3:]:
        with pytest.raises(CancelledError):
            future.result(timeout=20)
    assert not list(server.folder.iterdir()), "what is answered later is read and deleted"


def test_a_file_that_comes_while_the_run_ends_is_deleted(server, client):
    server.faults += ["late"]
    future = client.submit([5, 6, 7, 8])
    while not server.asked:
        time.sleep(0.01)
    client.close()
    assert len(future.result(timeout=0)) == 4
    assert not list(server.folder.iterdir())


@pytest.mark.slow
def test_a_process_ends_while_a_server_hangs():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code = (
            "import time; from engines import states; states.CLOSE_S = 0.1; client = states."
            f"StatesClient(['{address}'], [1], 8, concurrency=1, alive=print); client.submit([5]);"
            "time.sleep(1); client.close()"
        )
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_layers_of_another_number_are_refused(server, client, target):
    """Off by one is the mistake that trains a drafter on states it never sees in serving."""
    source, traces = ServedStates(client, target, LAYERS), traces_of(target)
    source.check(traces)
    server.faults += ["one layer off"] * 4
    with pytest.raises(UserError, match=r"states of layer 0 from .* off those of"):
        source.check(traces)


@pytest.mark.parametrize("growth", [1.0, 0.003])
def test_a_massive_token_does_not_hide_other_layers(growth, tiny_folder, server, client):
    """Its states, 1000 times the others', hardly change between layers; times `growth`, those of
    the others hardly do either."""
    target = Target.load(str(tiny_folder("llama", layers=3)), dtype="bfloat16")
    with torch.no_grad():
        target.embedding.weight[5] *= 1000
        for layer in decoder_layers(target.model):
            layer.self_attn.o_proj.weight *= growth
            layer.mlp.down_proj.weight *= growth
    server.target, source = target, ServedStates(client, target, LAYERS)
    traces = traces_of(target)
    for trace in traces:
        trace.prompt_ids[0] = 5
    source.check(traces)
    server.faults += ["one layer late"] * 4
    with pytest.raises(UserError, match=r"layer 0 from .* nearest to layer 1:"):
        source.check(traces)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_final_norm_is_found(kind, tiny_target):
    target = tiny_target(kind)
    last = target.num_layers - 1
    ids = torch.tensor([[5, 6, 7, 8]])
    hidden = target.outputs(ids, layers=(last, "final_norm"), logits=False).hidden
    norm = final_norm(target.model)
    torch.testing.assert_close(norm(hidden[last]), hidden["final_norm"])


def losses(folder: Path, target: Any, *words: str) -> list[float]:
    """Of a tiny run whose states come as `words` say."""
    given = command(folder, target, *words, "recipe=eagle3", "data.num_prompts=8",
                    "data.features_dtype=fp32", "method.layers=[0,1,2]", "method.steps=2",
                    "trainer.max_steps=4", "trainer.log_every=1",
                    "trainer.gradient_accumulation_steps=2", "run.stage=train")  # fmt: skip
    given = [word for word in given if not word.startswith("method.draft_hidden_size")]
    assert train.main(given) == 0
    rows = read_jsonl(folder / "run" / "metrics.jsonl")
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("features", ["live", "cached"])
def test_a_run_on_an_engines_states_has_the_same_losses(features, tiny_folder, server, tmp_path):
    folder = tiny_folder("llama", layers=3)
    own = losses(tmp_path / "own", folder, f"data.features={features}")
    server.faults += ["", "", "busy", "", "cut", "late"]
    served = losses(
        tmp_path / "served", folder, f"data.features={features}",
        f"data.features_engine={server.url}",
    )  # fmt: skip
    assert served == pytest.approx(own, rel=1e-5)
    assert len(own) == 4
    texts = {tuple(ids) for ids in server.asked}
    assert len(texts) > 4
    assert not list(server.folder.iterdir())


def test_states_are_asked_for_while_a_step_before_is_trained(tiny_folder, server, tmp_path):
    """Both batches of a step while the first loss of the one before has not begun."""
    order: list[tuple[str, int]] = []
    ahead, loss = ServedStates.ahead, HeadObjective.loss

    def asked(self, batch):
        order.append(("ask", batch.index))
        return ahead(self, batch)

    def trained(self, drafter, batch, outputs, step, *denominators):
        order.append(("train", batch.index))
        return loss(self, drafter, batch, outputs, step, *denominators)

    with (
        mock.patch.object(ServedStates, "ahead", asked),
        mock.patch.object(HeadObjective, "loss", trained),
    ):
        losses(
            tmp_path, tiny_folder("llama", layers=3), "data.features=live",
            f"data.features_engine={server.url}",
        )  # fmt: skip
    for step in range(1, 4):
        for index in (2 * step, 2 * step + 1):
            assert order.index(("ask", index)) < order.index(("train", 2 * step - 2))
    assert max(index for _, index in order) == 7, "nothing past the last step"
    assert len(server.asked) <= 4 + 8 * 4, "each text once a batch, and four that are compared"


@pytest.mark.parametrize("end", ["", "/v1/"])
def test_an_address_that_does_not_answer_is_refused_before_the_target_is_loaded(
    end, server, monkeypatch, tmp_path
):
    answering = f"{server.url}{end}"
    check_address(DataConfig(features_engine=answering))
    with socket.socket() as free:  # bound and not listening: connections are refused
        free.bind(("127.0.0.1", 0))
        gone = f"http://127.0.0.1:{free.getsockname()[1]}{end}"
        with pytest.raises(UserError) as caught:
            check_address(DataConfig(features_engine=f"{answering},{gone}"))
    assert (caught.value.key, caught.value.value) == ("data.features_engine", gone)
    assert "Cannot connect to host 127.0.0.1" in caught.value.rule
    cached = DataConfig(features="cached", features_engine=gone, cache_dir=str(tmp_path))
    for stored in ({"engine": "vllm"}, {}):  # of a server, of transformers
        (tmp_path / "features" / "a").mkdir(parents=True, exist_ok=True)
        write_json(tmp_path / "features/a/manifest.json", {"identity": stored, "complete": True})
        if stored:
            check_address(cached)  # they may be those of this run
        else:
            with pytest.raises(UserError, match="no server answers there"):
                check_address(cached)
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.reply({"detail": "Not Found"}, 404))
    with pytest.raises(UserError, match="no server answers there"):
        check_address(DataConfig(features_engine=server.url))


def test_a_server_that_has_ended_is_not_waited_for(target, tmp_path):
    """At the first text of a store, too."""
    run = run_on(target, "http://127.0.0.1:9")
    with pytest.raises(UserError) as caught, served_states(run, LAYERS, traces_of(target)):
        pass
    assert caught.value.key == "data.features_engine"


@pytest.mark.engine
def test_vllms_states_are_transformers_and_train_the_same(vllm_python, tmp_path):
    """A vLLM server that the run starts, its connector, and 200 texts."""
    target = Target.load("assets/toy/target", dtype="float32")
    layers = (1, 3, 4, "final_norm")
    prompts = load_prompts("toy", count=200, seed=3, toy_split="train")
    plan = GenerationPlan("toy train", tuple(prompts), (1.0,), max_new_tokens=16)
    traces = generate_traces(target, plan, tmp_path / "text", batch_size=32, rows_per_shard=256)
    numbers = [*layer_numbers(layers, target.num_layers).values()]
    with vllm_server(target, states_options(target, layers, tmp_path / "states"), PLUGIN) as server:
        client = StatesClient(
            [server.url], numbers, target.hidden_size, concurrency=16, alive=server.alive
        )
        source = ServedStates(client, target, layers)
        source.check(traces)
        for i in range(0, len(traces), 25):
            batch = batch_of(traces[i : i + 25])
            found = source.outputs(batch).hidden
            own = target.outputs(batch.input_ids, layers=layers, logits=False).hidden
            for row, (prompt, response) in enumerate(
                zip(batch.prompts, batch.responses, strict=True)
            ):
                size = len(prompt) + len(response)
                for layer in layers:
                    apart = (found[layer][row, :size] - own[layer][row, :size]).norm()
                    assert apart <= 1e-4 * own[layer][row, :size].norm()
        client.close()
        assert not list((tmp_path / "states").iterdir())
    words = ["recipe=eagle3", "data.num_prompts=32", "data.max_new_tokens=16",
             "trainer.max_steps=4", "trainer.batch_size=8", "trainer.log_every=1",
             "eval.num_prompts=2", "run.stage=train",
             f"data.cache_dir={tmp_path / 'cache'}"]  # fmt: skip
    found = {}
    for engine in ("hf", "vllm"):
        folder = tmp_path / engine
        assert train.main([*words, f"data.features_engine={engine}", f"run.dir={folder}"]) == 0
        found[engine] = [r["loss"] for r in read_jsonl(folder / "metrics.jsonl") if "loss" in r]
    assert found["vllm"] == pytest.approx(found["hf"], rel=1e-4)
