"""The pieces of work that `benchmarks.faults` disturbs: each into a folder, with a result by name
that can be compared piece by piece."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import train
from data import corpus
from data.batches import Batch, Batches
from data.features import write_features
from data.features_layout import FeaturesPlan
from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.prompts import load_prompts
from data.traces import Trace, TraceStore
from recipes.distillspec import Config, Recipe
from target.model import Target
from target.outputs import TargetOutputs
from trainer.config import TrainerConfig
from trainer.loop import Fit, fit
from trainer.losses import LossOutput
from trainer.objective import Source
from trainer.setup import make_accelerator
from trainer.tracking import Tracker

ROWS, NEW, STEPS, DOCUMENTS = 48, 12, 24, 60
# opens the addresses of servers that generate
Servers = Callable[[], contextlib.AbstractContextManager[Sequence[str]]]
Result = dict[str, Any]  # what a piece of work leaves, by name
TINY = (
    "data.num_prompts=8", "data.max_new_tokens=8", "data.batch_size=4", "data.rows_per_shard=2",
    "trainer.batch_size=4", "trainer.log_every=1", "trainer.save_every=1", "eval.num_prompts=4",
    "eval.max_new_tokens=8", "eval.timing_prompts=0", "eval.bootstrap_draws=5",
    "eval.temperatures=0", "model.drafter=null", "trainer.lr_warmup_steps=0",
)  # fmt: skip
RECIPES = {
    "run": ("recipe=distillspec", "trainer.max_steps=4", "method.draft_hidden_size=16",
            "method.control=false"),
    "stages": ("recipe=eagle", "method.steps=2", "method.base_max_steps=2", "eval.tree=null",
               "trainer.max_steps=2", "trainer.eval_every=2"),
    "sizes": ("recipe=fastdraft", "method.stages=[align]", "method.from_scratch=true",
              "method.search_parameters=[600, 6000]",
              "method.search_layers=[1]", "method.search_steps=4", "trainer.max_steps=2",
              "data.temperature=1"),
}  # fmt: skip


class Work:
    """Each into a folder, and what it leaves there."""

    def __init__(self, scratch: Path):
        config = LlamaConfig(
            vocab_size=2048, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, max_position_embeddings=512, eos_token_id=0, bos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        # fresh weights give every token the same chance: text of any model would be as likely
        model.lm_head.weight.data *= 40
        model.save_pretrained(scratch / "target")
        AutoTokenizer.from_pretrained("assets/toy/target").save_pretrained(scratch / "target")
        # in float32 a draw at the edge of two tokens depends on which rows are decoded together
        self.target = Target.load(str(scratch / "target"), dtype="float64")
        prompts = tuple(load_prompts("toy", count=ROWS, seed=0))
        self.plan = GenerationPlan("toy", prompts, (1.0,), max_new_tokens=NEW)
        self.served: Servers | None = None  # servers, where the text comes from some
        self.broken_step = -1  # whose loss is no number
        self.starter = 0  # of several that do the same work
        self.raw = scratch / "raw.jsonl"
        texts = [f"Document {i} says {'so ' * (i % 9)}and ends." * 4 for i in range(DOCUMENTS)]
        self.raw.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        self.rows = self._generate(scratch / "rows")

    def _generate(self, folder: Path) -> Sequence[Trace]:
        plan = replace(self.plan, served=self.served is not None)
        return generate_traces(
            self.target, plan, folder, batch_size=8, rows_per_shard=4, servers=self.served
        )

    def traces(self, folder: Path) -> Result:
        self._generate(folder)
        return {t.key: t.response_ids for t in TraceStore.open(folder, None, create=False).load()}

    def features(self, folder: Path) -> Result:
        plan = FeaturesPlan((0, "final_norm"), "fp32", tokens_per_shard=400)
        store = write_features(self.target, self.rows, plan, folder, batch_size=4)
        found = {}
        for trace in self.rows:
            batch = Batches([trace], {"target": 1.0}, 1, seed=0).at(0)
            outputs: Any = store.outputs(batch)
            states = b"".join(outputs.hidden[layer].numpy().tobytes() for layer in plan.layers)
            found[trace.key] = hashlib.sha256(states).hexdigest()
        return found

    def training(self, folder: Path) -> Result:
        config = TrainerConfig(
            max_steps=STEPS, batch_size=4, log_every=1, save_every=3, eval_every=STEPS
        )
        recipe = Recipe(Config(divergence="ce_hard", draft_hidden_size=16), self.target)
        torch.manual_seed(0)
        drafter = recipe.build([])
        (stage, *_) = recipe.stages()
        objective: Any = stage.objective
        whole = objective.loss

        def loss(
            drafter: nn.Module,
            batch: Batch,
            outputs: TargetOutputs | None,
            step: int,
            denominators: Mapping[str, float] | None = None,
        ) -> LossOutput:
            output = whole(drafter, batch, outputs, step, denominators)
            if step == self.broken_step:
                terms = {name: replace(one, total=one.total * float("nan"))
                         for name, one in output.terms.items()}  # fmt: skip
                output = replace(output, terms=terms)
            return output

        objective.loss = loss
        tracker = Tracker(config, folder, "faults", {})
        batches = Batches(self.rows, {"target": 1.0}, 4, seed=0)
        source = Source(batches, lambda batch, step: None)
        fit(Fit(
            objective=objective, drafter=drafter, source=source, evaluate=None, config=config,
            folder=folder / "fit", seed=0, accelerator=make_accelerator(config, cpu=True),
            tracker=tracker,
        ))  # fmt: skip
        tracker.finish()
        found = losses(folder)
        for name, tensor in drafter.state_dict().items():
            found[name] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        return found

    def corpus(self, folder: Path) -> Result:
        corpus.BLOCK_DOCUMENTS = 4
        source = corpus.Source.parse(str(self.raw))
        for num_tokens in (2000, 10**6):  # a later stage makes the same file longer
            file = corpus.tokenised(source, self.target, num_tokens, folder)
        documents = np.split(file.tokens, file.ends[:-1].astype(int))
        return {f"document {i}": part.tolist() for i, part in enumerate(documents)}

    def run(self, folder: Path) -> Result:
        return self.command("run", folder)

    def stages(self, folder: Path) -> Result:
        return self.command("stages", folder)

    def sizes(self, folder: Path) -> Result:
        return self.command("sizes", folder)

    def command(self, name: str, folder: Path) -> Result:
        """train.py as a user calls it; a second starter has its own run and the same cache."""
        run = folder / f"run{self.starter}"
        words = (
            *RECIPES[name], *TINY, f"run.dir={run}", f"data.cache_dir={folder / 'cache'}",
            f"model.target={self.target.name}",
        )  # fmt: skip
        if code := train.main(list(words)):
            raise SystemExit(code)
        report = json.loads((run / "report.json").read_text())
        # a stage may be taken from the cache and then has no losses of its own
        found = losses(run) if name == "run" else {}
        for row in report["results"]:
            about = "/".join(str(row[key]) for key in ("drafter", "measured_by", "temperature"))
            found[about] = [row[key] for key in ("tokens_per_round", "alpha", "num_rounds")]
        for path in (run / "drafter").glob("*.safetensors"):
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found


def losses(folder: Path) -> Result:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    return {f"step {i}": [r["step"], r["loss"]] for i, r in enumerate(rows)}


class State:
    """The state of a server: how many requests it still answers, and how."""

    url = ""
    left, asked = 0, 0
    broken: list[int]
    odd: Callable[[list[int]], object] | None = None  # what becomes of an answer
    odd_after = 0


@contextlib.contextmanager
def server(answers: dict[tuple[int, ...], list[int]]) -> Iterator[State]:
    """Answers with `answers`, `left` times; those numbered in `broken` break off."""
    state, lock = State(), threading.Lock()
    state.broken = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self, content: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def do_GET(self) -> None:
            self.reply({"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.asked += 1
                state.left -= 1
                gone = state.left < 0 or state.asked in state.broken
                odd = state.odd if state.asked > state.odd_after else None
            if not gone:
                tokens = answers[tuple(asked["prompt"])]
                self.reply({"choices": [{"token_ids": odd(tokens) if odd else tokens}]})

        def log_message(self, *_: object) -> None:
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{running.server_port}"
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        running.shutdown()
        thread.join()
        running.server_close()
