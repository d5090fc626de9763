"""A small server of hidden states, which plays the answers and files of vLLM's, and its faults."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import threading
from pathlib import Path

import torch

from engines.states import layer_numbers

LAYERS = (0, 1, "final_norm")
READING = threading.Lock()  # what a model gives is caught by hooks on it


class Server(http.server.ThreadingHTTPServer):
    """Answers with the target's own states, after `faults`: words for what goes wrong first."""

    def __init__(self, target, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.target, self.folder, self.faults, self.asked = target, folder, [], []
        self.layers = LAYERS
        self.ended, self.released = False, threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def serving(target, folder: Path):
    """A server that runs inside the block; its files lie in `folder`, which is made."""
    folder.mkdir()
    with Server(target, folder) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield one
        one.shutdown()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def reply(self, content, status=200):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def do_GET(self):
        self.reply({"data": [{"id": "tiny"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.asked.append(asked["prompt"])
            fault = server.faults.pop(0) if server.faults else ""
        if fault == "busy":
            self.reply({"error": "busy"}, 503)
        elif fault == "cut":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")
        elif fault == "no connector":
            self.reply({"choices": [{"text": ""}]})
        else:
            if fault == "hang":
                server.released.wait(20)
            self.answer(asked, fault)

    def answer(self, asked, fault):
        server = self.server
        ids = asked["prompt"][:-1] if fault == "other text" else asked["prompt"]
        states = written(server.target, ids, server.layers)
        if fault == "one layer off":
            states = states.roll(1, 1)
        if fault == "one layer late":
            states = states[:, [1, 2, 2]]
        if fault == "two layers":
            states = states[:, :2]
        if fault == "whole numbers":
            states = states.long()
        if fault == "sparse":
            states = states.to_sparse()
        path = server.folder / asked["kv_transfer_params"]["states"]
        numbers = sorted({*layer_numbers(server.layers, server.target.num_layers).values()})
        content = {"ids": torch.tensor(ids), "states": states, "layers": numbers}
        if fault == "other layers":
            content["layers"] = [1, 2, 3, 4]
        if fault == "stretched":
            content["ids"] = torch.tensor(5).expand(10**12)
        if fault == "a list":
            content = [1]
        if fault == "not a file":
            path.write_text("nothing")
        elif fault == "large":
            with path.open("wb") as file:
                file.truncate(2**40)
        elif fault == "folder":
            path.mkdir()
        elif fault == "pipe":
            os.mkfifo(path)
        elif fault == "no path":
            path = f"\0/{path.name}"
        elif fault == "late":
            threading.Timer(0.3, lambda: save(content, path)).start()
        elif fault != "no file":
            save(content, path)
        self.reply({"choices": [{"text": ""}], "kv_transfer_params": {"path": str(path)}})

    def log_message(self, *_):
        pass


def save(content, path):
    torch.save(content, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


@torch.no_grad()
def written(target, ids, wanted=LAYERS):
    """The states that vLLM would write: [n, layers, H], of the last layer before the norm."""
    last = target.num_layers - 1
    layers = sorted({layer for layer in wanted if layer != "final_norm"} | {last})
    with READING:
        hidden = target.outputs(torch.tensor([ids]), layers=layers, logits=False).hidden
    return torch.stack([hidden[layer][0] for layer in layers], 1)
