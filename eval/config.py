"""`eval.*` of the configuration, and the objects that it names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from data.config import TEMPERATURES
from drafters.training_free.table import (
    TRAINING_FREE,
    is_training_free,
    parse_training_free,
)
from drafters.trees.spec import TreeSpec
from drafters.trees.table import TREES, parse_tree
from drafters.trees.tree import CHAIN
from eval.policies.table import POLICIES, parse_policy
from eval.verifiers.table import VERIFIERS, parse_verifier
from eval.verifiers.token import Token
from target.sampling import Sampling
from trainer.checks import SEEDS, SIDE_BY_SIDE, is_address, require_address
from trainer.config import Section
from trainer.errors import UserError, excerpt, require
from trainer.keys import Rule, key
from trainer.specs import choices

ENGINE = Rule("be own, vllm, llamacpp, or the address of a running vLLM server (http://...)")


@dataclass
class EvalConfig(Section):
    """`eval.*`: what is measured, on which prompts, and how."""

    NAME: ClassVar[str] = "eval"
    NAMES: ClassVar[tuple[str, ...]] = ("drafter", "acceptance_head", "prompts", "tree", "engine")
    NEEDED: ClassVar[tuple[str, ...]] = ("prompts", "tree")
    HERE: ClassVar[tuple[str, ...]] = ("traces", "plain_engine")
    # drafter that scripts.evaluate measures: a folder, a Hub id, or a training-free one by name
    drafter: str | None = None
    # published acceptance head for eval.drafter, which policies head* ask: a folder or a Hub id
    acceptance_head: str | None = None
    # prompts of the report, named as data.prompts; null: held out from data.prompts by hash, of the
    # toy from modules of their own
    prompts: str | None = None
    # store of an imported log (scripts.import_traces) whose answers scripts.evaluate replays, in
    # place of answers to eval.prompts: nothing is generated or decoded
    traces: str | None = None
    prompts_config: str | None = None  # configuration of the Hub data set
    prompts_split: str = "test"  # split of the Hub data set
    prompts_column: list[str] = field(default_factory=list)  # as data.prompts_column
    num_prompts: int = key(96, ge=1)  # prompts of the report
    max_new_tokens: int = key(96, ge=1)  # longest answer in the report
    temperatures: list[float] = key([0.0, 1.0], TEMPERATURES, ge=0)  # each gets its own rows
    top_k: int = key(0, ge=0, note="0: off")  # of the report's answers
    top_p: float = key(1.0, gt=0, le=1)  # of the report's answers
    # tokens drafted per round by a chain, at most where a policy ends it early
    K: int = key(4, ge=1)
    # trees to measure beside the chain, one or a list; null: none. At temperatures above 0 the
    # children of static trees are drawn without replacement, with siblings=top the most likely
    # tokens
    tree: list[str] = key([], Rule(choices(TREES)))
    # the drafter's own temperature in rows at temperatures above 0; null: the row's. Output still
    # has the target's distribution
    draft_temperature: float | None = key(None, gt=0)
    # rule that decides which drafted tokens are accepted; token: the exact rule for what is
    # drafted, of sampled children multi_round; rows of a lossy one say so
    verifier: str = key("token", Rule(choices(VERIFIERS)))
    # rule that ends a chain before eval.K tokens; head* need such a head
    policy: str = key("fixed", Rule(choices(POLICIES)))
    # training-free drafters that get rows beside those of the drafter
    baselines: list[str] = key(["lookup:3"], Rule(choices(TRAINING_FREE)))
    # where the drafter is measured beside the project's own decoding; vllm: in vLLM too; llamacpp:
    # in llama.cpp too, on the target's GGUF file; http://...: on that running vLLM server too
    engine: str = key("own", ENGINE)
    # requests under way at a time, such as [1,8,32]: at each of these loads eval.engine is measured
    # with the drafter and without it; null: at none
    concurrency: list[int] = key([], ge=1, le=SIDE_BY_SIDE)
    # address of a vLLM server like that of eval.engine, but without the drafter
    plain_engine: str | None = None
    batch_size: int = key(8, ge=1, le=SIDE_BY_SIDE)  # prompts that are decoded side by side
    # prompts decoded one by one for tokens per second, after a warm-up
    timing_prompts: int = key(12, ge=0)
    # resamples of the prompts for each 95 % interval
    bootstrap_draws: int = key(1000, ge=1, le=SIDE_BY_SIDE)
    # of the report: its prompts, its answers, its resamples
    seed: int = key(1234, ge=0, le=SEEDS - 1)

    def __post_init__(self) -> None:
        self.temperatures = [float(t) for t in self.temperatures]
        if self.draft_temperature is not None:
            self.draft_temperature = float(self.draft_temperature)
        super().__post_init__()
        distinct = len(set(self.temperatures)) == len(self.temperatures)
        require(distinct, "eval.temperatures", "name each temperature once", self.temperatures)
        rule, drafted = "be null for an engine, which drafts its own way", self.draft_temperature
        require(drafted is None or self.engine == "own", "eval.draft_temperature", rule, drafted)
        if is_address(self.engine):
            require_address("eval.engine", self.engine)
        else:
            known = self.engine in ("own", "vllm", "llamacpp")
            require(known, "eval.engine", ENGINE.words, self.engine)
        self._check_load()
        if self.traces is not None:
            for name, plain in (("prompts", None), ("engine", "own"), ("drafter", True)):
                given = getattr(self, name)
                good = given is not None if plain is True else given == plain
                rule = "name what is replayed" if plain is True else f"be {plain or 'null'}"
                require(good, f"eval.{name}", f"{rule} with eval.traces, which is a log", given)
        _check_names(self)

    def _check_load(self) -> None:
        if self.plain_engine is not None:
            require_address("eval.plain_engine", self.plain_engine)
            rule = "be null where eval.engine is no address, or eval.concurrency names no load"
            named = is_address(self.engine) and bool(self.concurrency)
            require(named, "eval.plain_engine", rule, self.plain_engine)
            other = self.plain_engine != self.engine
            require(other, "eval.plain_engine", "be another server than eval.engine", self.engine)
        if self.concurrency:
            served = self.engine == "vllm" or is_address(self.engine)
            rule = "be null where eval.engine is neither vllm nor the address of a server"
            require(served, "eval.concurrency", rule, self.concurrency)
            rising = sorted(set(self.concurrency)) == self.concurrency
            require(rising, "eval.concurrency", "name each load once, rising", self.concurrency)

    def draft_sampling(self, sampling: Sampling) -> Sampling:
        """The drafter's sampling in a row of this one."""
        if self.draft_temperature is None or sampling.temperature == 0:
            return sampling
        return replace(sampling, temperature=self.draft_temperature)


def _check_names(config: EvalConfig) -> None:
    """Raise UserError for an unknown name, a value out of range, or keys that exclude each
    other."""
    policy = parse_policy(config.policy)
    if config.acceptance_head is not None:
        rule = "name the drafter that eval.acceptance_head judges, in scripts.evaluate"
        require(config.drafter is not None, "eval.drafter", rule, config.drafter)
        rule = "be head:<h> or head_last:<h>, which ask eval.acceptance_head"
        require(policy.uses_head, "eval.policy", rule, config.policy)
    rule = f"have K_min <= eval.K={config.K}"
    require(policy.K_min <= config.K, "eval.policy", rule, config.policy)
    _check_trees(config)
    drafts = [(f"eval.tree={text}, {one.siblings}", one.siblings) for text, one in trees_of(config)]
    verifier = parse_verifier(config.verifier)
    for what, form in drafts or [("eval.tree=null, a chain", CHAIN)]:
        # `token`, the default, stands for the exact rule of whatever is drafted
        if form not in verifier.judges and type(verifier) is not Token:
            others = [name for name, one in VERIFIERS.items() if form in one.judges or one is Token]
            raise UserError(
                f"eval.verifier={config.verifier} cannot judge these drafts ({what}): name "
                f"{' or '.join(others)}, or another eval.tree"
            )
    for one in config.baselines:
        parse_training_free(one, "eval.baselines")
    once = len(set(config.baselines)) == len(config.baselines)
    require(once, "eval.baselines", "name each drafter once", config.baselines)
    if is_training_free(config.drafter):
        copies = parse_training_free(str(config.drafter), "eval.drafter")
        engine = "llamacpp" if copies.in_llamacpp and config.engine == "llamacpp" else "own"
        for key, plain in (("tree", []), ("policy", "fixed"), ("engine", engine)):
            rule = f"be {plain or 'null'} for {config.drafter}, which drafts chains of copies"
            rule += "; ngram_simple:<size> is what llama.cpp copies" * (config.engine == "llamacpp")
            require(getattr(config, key) == plain, f"eval.{key}", rule, getattr(config, key))


def _check_trees(config: EvalConfig) -> None:
    """Raise UserError for a tree that is named twice, and for two of one name in the report that
    differ in more than how children are chosen."""
    once = len(set(config.tree)) == len(config.tree)
    require(once, "eval.tree", "name each tree once", config.tree)
    known = dict[str, dict[str, object]]()
    for text, tree in trees_of(config):
        if tree.needs_accuracy:
            continue
        shape = tree.shape(None, config.K)
        own, name = {**vars(shape), "siblings": None}, shape.describe()
        rule = f"hold no two trees that the report calls {name!r}: give one file another name"
        require(known.setdefault(name, own) == own, "eval.tree", rule, text)


def trees_of(config: EvalConfig) -> list[tuple[str, TreeSpec]]:
    """The trees of eval.tree with their names; UserError where eval.K does not allow one."""
    for text in config.tree:
        if "=" in text.split(",")[0]:
            raise UserError(
                f"eval.tree must name trees, got {excerpt(text)}: quote one that has a comma, "
                "as in 'eval.tree=[\"eagle,siblings=top\"]'"
            )
    found = [(text, parse_tree(text)) for text in config.tree]
    for text, tree in found:
        try:
            tree.deepest(config.K)
        except UserError as error:
            raise UserError(f"eval.tree={excerpt(text)}: {error}") from error
    return found


def tree_depth(config: EvalConfig) -> int:
    """The most tokens that a path of eval.tree may have, 0 without a tree."""
    return max((tree.deepest(config.K) for _, tree in trees_of(config)), default=0)
