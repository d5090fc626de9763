"""OpenAI-compatible servers of a tiny target's greedy answers, played on this machine."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
import types

import torch

from data.generate import generate_traces
from data.generation_plan import GenerationPlan
from data.prompts import Prompt

NEW = 12
MODELS = {"data": [{"id": "tiny"}]}


def plan_of(count=20, temperature=0.0, served=True, **options):
    prompts = tuple(
        Prompt(f"Question {i}: ", None, None, "test", "", f"c{i}") for i in range(count)
    )
    return GenerationPlan(
        "test", prompts, (temperature,), max_new_tokens=NEW, served=served, **options
    )


def filled(plan, target, folder, servers=None, **options):
    context = {} if servers is None else {"servers": lambda: contextlib.nullcontext(servers)}
    return generate_traces(
        target, plan, folder, batch_size=4, rows_per_shard=4, **context, **options
    )


def answers_of(traces):
    """What a server says to each prompt, and to each answer that is to go on past its end."""
    behind = {(*t.prompt_ids, *t.response_ids): t.lookahead_ids for t in traces}
    return behind | {tuple(t.prompt_ids): t.response_ids for t in traces}


def scoring(model):
    """score(ids): `logprobs` of a completion, of all tokens of a text, as this model has them."""

    @torch.inference_mode()
    def score(ids):
        rows = model(input_ids=torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        own = rows.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        tops = []
        for token, one, row in zip(ids[1:], own, rows, strict=True):
            values, names = row.topk(20)
            named = dict(zip(names.tolist(), values.tolist(), strict=True)) | {token: one}
            tops.append({f"token_id:{name}": value for name, value in named.items()})
        return {"token_logprobs": [None, *own], "top_logprobs": [None, *tops]}

    return score


@contextlib.contextmanager
def played(known):
    """Answers as `known` tells, prompt -> trace. `faults`: what the next requests get instead, a
    status, "drop", "half" or "abort"; `models`: what it says of itself, the last first;
    `down`: every request is dropped; `change`: of an answer's tokens; `beside`: further keys of an
    answer; `score`: what `scoring` makes, where log-probabilities are asked for."""
    state = types.SimpleNamespace(
        faults=[],
        down=False,
        models=[MODELS],
        asked=[],
        headers=[],
        change=lambda ids: ids,
        beside={},
        score=None,
        most=0,
        now=0,
        delay=0,
    )
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        def reply(self, content, status=200):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def do_GET(self):
            if state.down:
                return self.close_connection
            return self.reply(state.models.pop() if len(state.models) > 1 else state.models[0])

        def do_POST(self):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                fault = "drop" if state.down else state.faults.pop() if state.faults else None
                state.asked.append(content)
                state.headers.append(dict(self.headers))
                state.now += 1
                state.most = max(state.most, state.now)
            time.sleep(state.delay)
            with lock:
                state.now -= 1
            if fault == "drop":
                return None
            if fault == "half":
                self.send_response(500)
                self.send_header("Content-Length", "99")
                self.end_headers()
                return self.wfile.write(b"half of wh")
            if fault == "abort":
                return self.reply({"choices": [{"token_ids": [5], "finish_reason": "abort"}]})
            if fault:
                return self.reply({"message": "no"}, fault)
            prompt = content["prompt"]
            if content.get("echo"):
                return self.reply({"choices": [{"logprobs": state.score([*prompt, 5])}]})
            tokens = state.change(list(answers_of(known.values())[tuple(prompt)]))
            choice = {"token_ids": tokens, **state.beside}
            if content.get("logprobs") is not None and state.score:
                found = state.score([*prompt, *tokens])
                choice["logprobs"] = {name: one[len(prompt) :] for name, one in found.items()}
            return self.reply({"choices": [choice]})

        def log_message(self, *_):
            pass

    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    state.url = f"http://127.0.0.1:{running.server_port}"
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        running.shutdown()
        thread.join()
        running.server_close()
