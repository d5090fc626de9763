"""Write down what an OpenAI-compatible server (vLLM) answers, for `recipe=osd method.log=...`.

    python -m scripts.request_log script.server=http://127.0.0.1:8000 script.port=8001 \\
        script.log=requests.jsonl

Clients then use port 8001 in place of 8000. `script.token_ids=false` for a server that refuses
`return_token_ids`; its text is tokenised again when the log is read.
"""

from __future__ import annotations

import sys

from data.request_proxy import RequestProxy
from recipes.base import NoMethod
from recipes.phases import run
from trainer.config import UserError, compose, require
from trainer.redaction import redacted


def main(arguments: list[str]) -> int:
    try:
        keys = ("server", "port", "log", "token_ids")
        run.check_words(arguments, ("script",), "scripts.request_log")
        given = compose("request_log", NoMethod, None, arguments, script_keys=keys).script
        for key in ("server", "log"):
            require(isinstance(given[key], str), f"script.{key}", "be given", given[key])
        port = 8001 if given["port"] is None else given["port"]
        require(type(port) is int, "script.port", "be a number", port)
        ids = True if given["token_ids"] is None else given["token_ids"]
        require(isinstance(ids, bool), "script.token_ids", "be true or false", ids)
        with RequestProxy(given["server"], port, given["log"], ids) as proxy:
            address = f"http://127.0.0.1:{proxy.server_port}"
            said = f"{address} answers for {proxy.upstream}; answers go to {proxy.log}"
            print(redacted(said), flush=True)
            proxy.serve_forever()
    except UserError as error:
        return run.fail(error, arguments)
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
