"""`data.*` of the configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

from data.bad_rows import DROP, FEW
from trainer.checks import SIDE_BY_SIDE, addresses_of, require_address
from trainer.config import Section, suggest
from trainer.errors import UserError, require
from trainer.keys import Rule, key

TEMPERATURES = Rule("name at least one temperature", bool)


@dataclass
class DataConfig(Section):
    NAME: ClassVar[str] = "data"
    HERE: ClassVar[tuple[str, ...]] = (
        "engine_options", "servers", "features_url", "features_cache_dir", "traces", "cache_dir",
    )  # fmt: skip
    NAMES: ClassVar[tuple[str, ...]] = ("prompts", "features_engine")
    NEEDED: ClassVar[tuple[str, ...]] = ("prompts", "traces", "servers")
    # the same model may answer elsewhere tomorrow
    FREE: ClassVar[tuple[str, ...]] = (
        "servers", "features_engine", "features_url", "features_cache_dir", "features_cache_gb",
    )  # fmt: skip
    # toy, toy:<domain>+<domain> (of code, math, prose), questions or questions:<domain> (the same
    # text as questions to a chat model), a file, or the id of a Hub data set
    prompts: str = "toy"
    prompts_config: str | None = None  # configuration of the Hub data set
    prompts_split: str = "train"  # split of the Hub data set
    # column that holds the prompts, or a list of columns whose texts are joined by a blank line in
    # that order; null: the usual names
    prompts_column: list[str] = field(default_factory=list)
    # column that holds responses of the data set's own, for the source `fixed` of a data mix
    response_column: str | None = None
    # rows that cannot be read; few: left out up to 1 % of a source, and at least 3, of eval.prompts
    # none; drop: left out however many they are
    bad_rows: str = key(FEW, one_of=(FEW, DROP))
    # conversations used for training; each user turn of one is a text
    num_prompts: int = key(768, ge=1)
    # share of the prompts held out for evaluation, by hash, where eval.prompts is null
    eval_share: float = key(0.1, ge=0, lt=1)
    system_prompt: str | None = None  # put before every conversation that has none
    # further arguments of the chat template, such as {enable_thinking: false}
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # what generates the target's text, for training and for the report; hf: transformers, in this
    # process; vllm: a vLLM server that the run starts (scripts/engine_env.sh); openai: the servers
    # of data.servers
    engine: str = key("hf", one_of=("hf", "vllm", "openai"))
    # arguments of the vLLM server of data.engine=vllm or data.features_engine=vllm, such as
    # {tensor_parallel_size: 4}
    engine_options: dict[str, Any] = field(default_factory=dict)
    # addresses for data.engine=openai, such as [http://host:8000]; an address that is named twice
    # gets twice the requests
    servers: list[str] = field(default_factory=list)
    # live: the target reads every batch again; cached: its hidden states are stored once
    features: str = key("live", one_of=("live", "cached"))
    # what reads the text for these states; hf: transformers, in this process; vllm: a vLLM server
    # that the run starts; or the addresses of running ones, such as http://a:8001,http://b:8001
    features_engine: str = key("hf", Rule("be hf, vllm or the addresses of servers"))
    # of stored hidden states; fp8 has one scale per token
    features_dtype: str = key("bf16", one_of=("bf16", "fp8", "fp32"))
    # URL of object storage for these states, such as s3://bucket/states; null: below data.cache_dir
    features_url: str | None = None
    # folder for what is read of them, on a disk of each machine; null: below data.cache_dir
    features_cache_dir: str | None = None
    features_cache_gb: float = key(100.0, gt=0)  # most that this folder takes
    # folder of the trace store to write and use; null: one below data.cache_dir
    traces: str | None = None
    cache_dir: str = "runs/cache"  # folder of what several runs share: traces, states, corpora
    # longest prompt; null: the target's context less data.max_new_tokens
    max_prompt_tokens: int | None = key(None, ge=1)
    # stop at a prompt that is too long, or drop it and count it
    long_prompts: str = key("refuse", one_of=("refuse", "drop"))
    max_new_tokens: int = key(96, ge=1)  # longest response of the training text
    # of the training text; a list is cycled over prompts and samples, and a temperature that is
    # named twice gets twice the share
    temperature: list[float] = key([1.0], TEMPERATURES, ge=0)
    top_k: int = key(0, ge=0, note="0: off")  # of the training text
    top_p: float = key(1.0, gt=0, le=1)  # of the training text
    samples_per_prompt: int = key(1, ge=1, le=SIDE_BY_SIDE)  # responses to each prompt
    # texts that end a response of the training text; answers of the report go on behind them
    stop_strings: list[str] = field(default_factory=list)
    # rows that are decoded side by side; with servers: requests under way at each of them
    batch_size: int = key(32, ge=1, le=SIDE_BY_SIDE)
    rows_per_shard: int = key(256, ge=1, le=SIDE_BY_SIDE)  # rows that are written to disk at once
    # most likely tokens whose log-probabilities are stored with each trace, as a compressed
    # teacher; 0: none
    teacher_top_k: int = key(0, ge=0)
    # tokens drawn from the rest of the distribution and stored as well
    teacher_samples: int = key(0, ge=0)

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, list):
            self.temperature = [self.temperature]
        self.temperature = [float(t) for t in self.temperature]
        super().__post_init__()
        if addresses := addresses_of(self.features_engine):
            for address in addresses:
                require_address("data.features_engine", address)
            once = len(set(addresses)) == len(addresses)
            rule = "name each server once"
            require(once, "data.features_engine", rule, self.features_engine)
        else:
            require(
                self.features_engine in ("hf", "vllm"),
                "data.features_engine",
                "be hf, vllm or the addresses of servers",
                self.features_engine,
            )
        if self.engine_options and "vllm" not in (self.engine, self.features_engine):
            raise UserError(
                "data.engine_options are of data.engine=vllm and data.features_engine=vllm, got "
                f"{self.engine} and {self.features_engine}"
            )
        if bool(self.servers) != (self.engine == "openai"):
            raise UserError(
                "data.servers=[http://host:8000] names the servers of data.engine=openai, got "
                f"data.engine={self.engine} and data.servers={self.servers}"
            )
        for server in self.servers:
            require_address("data.servers", server)
        if "" in self.stop_strings:
            raise UserError(
                "data.stop_strings must hold text, got '', which ends every answer at once: "
                "remove it"
            )
        self._check_features_url()

    def _check_features_url(self) -> None:
        given = [key for key in ("features_url", "features_cache_dir") if getattr(self, key)]
        if given and (self.features == "live" or self.features_url is None):
            raise UserError(
                f"data.{given[0]} is for states that lie on object storage: set "
                "data.features=cached and data.features_url, or leave it out"
            )
        if self.features_url is None:
            return
        key, (protocol, _, place) = "data.features_url", self.features_url.partition("://")
        if re.match(r"[^/]*:[^/]*@", place):  # not shown: a password
            raise UserError(f"{key} must hold no password: the storage's own settings name it")
        require(bool(place), key, "be a URL such as s3://bucket/states", self.features_url)
        import fsspec

        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError as error:
            hint = suggest(protocol, fsspec.available_protocols())
            raise UserError(f"{key}={self.features_url}: no protocol {protocol!r}{hint}") from error
        except ImportError as error:
            raise UserError(
                f"{key}={self.features_url} needs a package that is not installed: {error}"
            ) from error
