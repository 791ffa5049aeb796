"""Measures caches on the functions that an artifact runs: the engine's own pages."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfkv import sample_text
from tfkv.cache_report import Measuring, Progress, Report, evaluate
from tfkv.cache_scores import (
    ContinuationScore,
    Score,
    TaskScore,
    TextScore,
    continuation_measure,
    task_measure,
    text_measure,
)
from tfkv.calibration import Calibration
from tfkv.config import DecoderConfig, EngineConfig, described
from tfkv.errors import ConfigError
from tfkv.evaluation import Comparison, compare_caches, continuation
from tfkv.export import model_text
from tfkv.export.engine import PREFILL_PIECE, Engine
from tfkv.export.engine_reader import EngineReader
from tfkv.export.exact_tail import exact_bytes
from tfkv.export.exporter import checked, fitted
from tfkv.export.importers import ModelSource, load
from tfkv.layers.cache_spec import CacheSpec
from tfkv.layers.per_layer import normal_form, with_exceptions
from tfkv.layers.policies import (
    EvictingPolicy,
    Quest,
    RandomEviction,
    RandomPages,
    RecentPages,
    RecentTokens,
)
from tfkv.tasks import TASKS, Context, Hay, chosen
from tfkv.tasks.asking import Answers, ask

_FULL = "dense+float32"
#: Tokens that follow a passage, and most tokens of a question with its answer.
_CONTINUED, _ASKED = 128, 128


@dataclasses.dataclass(frozen=True)
class EvalPlan:
    """What `evaluate_caches` measures of each cache.

    Args:
        tokens: Lengths of passages that are read.
        passages: How many of each length, spread evenly over the text.
        continuations: Most of them that are continued greedily, over 128 tokens.
        tasks: Kinds of `tfkv.tasks.TASKS`; ``"all"`` or ``"none"``.
        task_tokens: Lengths of contexts.
        contexts: How many of each length; of a kind with one question a context, so many for
            each depth.
        depths: Places that a task asks for, spread evenly.

    Raises:
        ConfigError: A value is out of range.
    """

    tokens: tuple[int, ...] = (2048,)
    passages: int = 4
    continuations: int = 2
    tasks: tuple[str, ...] = ("needle", "facts")
    task_tokens: tuple[int, ...] = (1024,)
    contexts: int = 2
    depths: int = 5

    def __post_init__(self) -> None:
        least = {"passages": 1, "continuations": 0, "contexts": 1, "depths": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(
                    f"`{name}` must be at least {value}. Received: {getattr(self, name)}."
                )
        if not self.tokens or (chosen(self.tasks) and not self.task_tokens):
            raise ConfigError("`tokens` and `task_tokens` must hold one length at least.")

    @property
    def kinds(self) -> list[str]:
        """Names of the tasks."""
        return chosen(self.tasks)

    @property
    def longest(self) -> int:
        """Most tokens that a session reads."""
        asked = [length + _ASKED for length in self.task_tokens] if self.kinds else []
        return max(*self.tokens, *asked, 128)


def evaluate_caches(
    source: Any,
    caches: Sequence[str],
    out: str | pathlib.Path,
    text: str | None = None,
    plan: EvalPlan | None = None,
    baselines: bool = True,
    calibration: Calibration | str | pathlib.Path | None = None,
    layer_caches: Sequence[str] = (),
    weights: str = "float32",
    progress: Progress = lambda *_: None,
) -> list[Score]:
    """Compares caches with the full float32 one, and writes a report.

    Everything is read by the functions and pages that an artifact serves with: passages
    teacher-forced in pieces of 64 tokens, so that all but the newest piece is read back from
    the cache under test; what follows them, token by token; and contexts of tasks, of whose
    questions those are asked that the full cache answers.

    Args:
        source: As of `tfkv.export.export`; it needs a tokenizer.
        caches: Policies and codecs, such as ``"int8"`` or ``"sliding_window(window=512)"``.
        out: Directory of ``eval.json`` and ``eval.html``. What it holds already is not
            measured again.
        text: What to read; Python's language reference where left out.
        plan: What to measure; the defaults of `EvalPlan` where left out.
        baselines: Whether to measure windows of as many bytes as each cache that forgets
            nothing, or other things in each layer, without and with sinks: what a codec, or a
            choice of layers, has to beat; and for each policy that evicts, to evict at random
            and to keep the newest, on the same budget.
        calibration: As of `tfkv.export.export`.
        layer_caches: Layers that have another policy or codec in each of `caches`, as of
            `EngineConfig.layer_caches`. A score's cache then names them, too.
        weights: As of `EngineConfig.weights`, of all but the reference.
        progress: Called with a stage, ``"caches"``, ``"continuations"`` or ``"tasks"``, scores
            done and scores in all.

    Returns:
        A score for each measure and each of `caches` and of the baselines.

    Raises:
        ConfigError: A cache or a task is unknown, or the text is too short.
        ModelSourceError: The source cannot be read, or has no tokenizer.
    """
    plan = plan or EvalPlan()
    for cache in caches:
        CacheSpec.parse(cache)  # refused before a model is read
    EngineConfig(weights=weights)
    model = load(source)
    forms = [normal_form(cache, model.config.num_layers, layer_caches) for cache in caches]
    mixed = {described(*form): form for form in forms}
    whole = sample_text.language_reference() if text is None else text
    bench = CacheBench(model, whole, plan, calibration, mixed, weights)
    setting = {
        "model": model.description,
        "text": "Python's language reference" if text is None else "given",
        "text hash": hashlib.sha256(whole.encode()).hexdigest()[:12],
        "passages": plan.passages,
        "continuations": plan.continuations,
        "contexts": plan.contexts,
        "depths": plan.depths,
    }
    if weights != "float32":
        setting["weights"] = weights
    report = Report(out, setting)

    def beside(length: int) -> list[str]:
        others = _baselines(model.config, mixed.values(), length) if baselines else []
        return list(dict.fromkeys([*mixed, *others]))

    return evaluate(bench.measurings(beside, report), report, progress)


class CacheBench:
    """Takes measures of caches on the pages of an engine.

    Args:
        model: Architecture, weights and tokenizer.
        text: What is read, and what facts are hidden in.
        plan: What is measured.
        calibration: As of `tfkv.export.export`.
        mixed: Caches whose layers differ, by how they are called: the cache of most layers, and
            exceptions.
        weights: As of `EngineConfig.weights`, of all but the reference.

    Raises:
        ConfigError: The text is too short, or lengths are beyond the model's context.
    """

    def __init__(
        self,
        model: ModelSource,
        text: str,
        plan: EvalPlan,
        calibration: Calibration | str | pathlib.Path | None = None,
        mixed: Mapping[str, tuple[CacheSpec, tuple[str, ...]]] | None = None,
        weights: str = "float32",
    ) -> None:
        self._model = model
        self._mixed = mixed or {}
        self._weights = weights
        self._plan = plan
        self._tables = checked(model, calibration)
        ids = model_text.encode(model, text)
        self._hay = Hay(ids, lambda said: model_text.encode(model, said).tolist())
        self._passages = {
            length: model_text.passages(model, ids, plan.passages, length) for length in plan.tokens
        }
        if plan.longest > model.config.context_length:
            raise ConfigError(
                f"`task_tokens` must leave {_ASKED} of the model's {model.config.context_length} "
                f"tokens for questions. Received: task_tokens={plan.task_tokens}."
            )
        self._contexts = {
            (task, length): TASKS[task].contexts(
                self._hay, length, plan.contexts, plan.depths, seed=length
            )
            for task in plan.kinds
            for length in plan.task_tokens
        }
        # One cache at a time beside the full one.
        self._reader = functools.lru_cache(maxsize=1)(self._read_through)

    def measurings(self, beside: Callable[[int], Sequence[str]], report: Report) -> list[Measuring]:
        """All that is planned.

        Args:
            beside: Caches that are measured at a length.
            report: What was found before.
        """
        planned = []
        take: Callable[[str], Score]
        for length in self._plan.tokens:
            take = functools.partial(self.text, length=length)
            planned.append(Measuring("caches", text_measure(length), beside(length), take))
        for length in self._plan.tokens if self._plan.continuations else ():
            take = functools.partial(self.continuation, length=length, report=report)
            measure = continuation_measure(length)
            planned.append(Measuring("continuations", measure, beside(length), take))
        for task, length in self._contexts:
            take = functools.partial(self.task, task=task, length=length, report=report)
            planned.append(Measuring("tasks", task_measure(task, length), beside(length), take))
        return planned

    def text(self, cache: str, length: int) -> TextScore:
        """Reads passages through a cache and the full one."""
        passages = self._passages[length]
        found, bytes_per_token = _compare(self._full, self._reader(cache), passages)
        return TextScore.of(cache, length, bytes_per_token, found, PREFILL_PIECE)

    def continuation(self, cache: str, length: int, report: Report) -> ContinuationScore:
        """Continues passages with a cache, and with the full one where that was not done yet."""
        known = report.of_measure(continuation_measure(length))
        if isinstance(known, ContinuationScore):
            expected = known.expected
        else:
            expected = self._continued(self._full, length)
        made = self._continued(self._reader(cache), length)
        return ContinuationScore(cache, length, expected, made)

    def task(self, cache: str, task: str, length: int, report: Report) -> TaskScore:
        """Asks what the full cache answers; which that is is found out where it is not known."""
        contexts = self._contexts[task, length]
        known = report.of_measure(task_measure(task, length))
        if isinstance(known, TaskScore):
            solved = known.solved
        else:
            every = (True,) * sum(len(context.questions) for context in contexts)
            solved, _ = _asked(self._full, contexts, every)
        agnostic, aware = _asked(self._reader(cache), contexts, solved)
        depths = tuple(question.depth for context in contexts for question in context.questions)
        return TaskScore(cache, task, length, depths, solved, agnostic, aware)

    def _continued(self, reader: EngineReader, length: int) -> tuple[tuple[int, ...], ...]:
        count = min(_CONTINUED, length // 2)
        begun = [passage[: length - count] for passage in self._passages[length]]
        return tuple(
            tuple(continuation(reader, prompt, count))
            for prompt in begun[: self._plan.continuations]
        )

    @functools.cached_property
    def _full(self) -> EngineReader:
        return open_reader(self._model, _FULL, self._plan.longest, self._tables)

    def _read_through(self, cache: str) -> EngineReader:
        spec, exceptions = self._mixed.get(cache, (cache, ()))
        return open_reader(
            self._model, str(spec), self._plan.longest, self._tables, exceptions, self._weights
        )


def against_full(
    model: ModelSource,
    read: Sequence[np.ndarray],
    calibration: Calibration | str | pathlib.Path | None = None,
) -> Callable[[str], tuple[Comparison, float]]:
    """What compares a cache with the full float32 one, on the pages of an engine.

    Args:
        model: Architecture and weights.
        read: Passages of one length, token ids.
        calibration: As of `tfkv.export.export`.

    Returns:
        A function of policy and codec: what the comparison found, and the bytes that a
        session of one passage stores, for each of its tokens.
    """
    tables, longest = checked(model, calibration), max(len(read[0]), 128)
    full = open_reader(model, _FULL, longest, tables)
    return lambda cache: _compare(full, open_reader(model, cache, longest, tables), read)


def open_reader(
    model: ModelSource,
    cache: str,
    capacity: int,
    tables: Calibration | None,
    exceptions: tuple[str, ...] = (),
    weights: str = "float32",
) -> EngineReader:
    """A reader through a cache with room for so many tokens, on pages of its own."""
    config = EngineConfig(
        cache=cache,
        slots=1,
        capacity=capacity,
        batch_sizes=(1,),
        layer_caches=exceptions,
        weights=weights,
    )
    policy = CacheSpec.parse(cache).policy
    if policy.selects:
        config = dataclasses.replace(config, page_size=policy.together)
    config = fitted(model, config, tables)
    return EngineReader(Engine(model.config, model.weights, config, calibration=tables))


def _compare(
    full: EngineReader, reader: EngineReader, read: Sequence[np.ndarray]
) -> tuple[Comparison, float]:
    """What `against_full` says of one cache."""
    found, length = compare_caches(full, reader, read, _piece(reader)), len(read[0])
    engine = reader.engine
    policy = engine.groups.first.cache.policy
    stored = engine.groups.stored_bytes(engine.config, length)
    if isinstance(policy, EvictingPolicy):
        # On pages are the tokens since the last eviction.
        stored = engine.bytes_per_token * min(policy.interval, length)
    return found, (stored + engine.beside_bytes) / length


def _piece(reader: EngineReader) -> int:
    """Tokens read at once, so that a cache is read as decode steps read it."""
    return 1 if reader.engine.groups.first.cache.policy.selects else PREFILL_PIECE


def _asked(
    reader: EngineReader, contexts: Sequence[Context], wanted: Sequence[bool]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which questions are answered where they were unknown, and where they were known."""
    cuts = np.cumsum([len(context.questions) for context in contexts])[:-1]
    differs = not reader.engine.groups.chunk_invariant
    agnostic: list[bool] = []
    aware: list[bool] = []
    for context, asks in zip(contexts, np.split(np.array(wanted), cuts), strict=True):
        if asks.any():
            answers = ask(reader, context, asks.tolist(), differs, _piece(reader))
        else:
            answers = Answers(asks.tolist(), asks.tolist())
        agnostic += answers.agnostic
        aware += answers.aware
    return tuple(agnostic), tuple(aware)


def _baselines(
    model: DecoderConfig, forms: Iterable[tuple[CacheSpec, tuple[str, ...]]], length: int
) -> list[str]:
    """What caches, with exceptions, have to beat where so many tokens are read."""
    forms = list(forms)
    windows = [window for form in forms for window in _windows(model, *form, length)]
    plain = [
        other for spec, _ in forms for other in (*_plain_evictions(spec), *_plain_selections(spec))
    ]
    return windows + plain


def _plain_selections(spec: CacheSpec) -> list[str]:
    """What a policy that selects has to beat: other pages, as many of them."""
    policy = spec.policy
    if not isinstance(policy, Quest) or isinstance(policy, (RandomPages, RecentPages)):
        return []
    common = dataclasses.asdict(policy)
    return [
        str(dataclasses.replace(spec, policy=one(**common))) for one in (RandomPages, RecentPages)
    ]


def _plain_evictions(spec: CacheSpec) -> list[str]:
    """What a policy that evicts has to beat: at random, and all but the newest, on its budget."""
    policy = spec.policy
    if not isinstance(policy, EvictingPolicy) or isinstance(policy, (RandomEviction, RecentTokens)):
        return []
    same = ("budget", "sinks", "interval", "whole_prompt")
    common = {name: getattr(policy, name) for name in same}
    plain = (RandomEviction(**common), RecentTokens(**common))
    return [str(dataclasses.replace(spec, policy=one)) for one in plain]


def _windows(
    model: DecoderConfig, spec: CacheSpec, exceptions: tuple[str, ...], tokens: int
) -> list[str]:
    """Float32 windows, without and with sinks, of the bytes that a cache takes which forgets
    nothing, or other things in each layer."""
    full, width = CacheSpec.parse(_FULL).codec, model.head_dim
    specs = with_exceptions(spec, model.num_layers, exceptions)
    codecs = [one.codec for one in specs]
    alike = len({str(one.policy) for one in specs}) == 1
    if alike and (spec.policy.bounded or all(codec.name == full.name for codec in codecs)):
        return []
    layouts = [one.policy.layout(tokens, PREFILL_PIECE) for one in specs]
    shares = [min(layout.entries, tokens) / tokens for layout in layouts]
    per_layer = [
        codec.bytes_per_token(width) * share for codec, share in zip(codecs, shares, strict=True)
    ]
    beside = exact_bytes(model, codecs) / (model.num_layers * model.num_key_value_heads)
    stored = sum(per_layer) / model.num_layers + beside / tokens
    share = stored / full.bytes_per_token(width)
    # A window stores one piece more than it shows.
    piece, sinks = PREFILL_PIECE, 4
    window = max(int(share * tokens) // piece * piece - 2 * piece, piece)
    return [
        f"sliding_window(window={window + piece})+float32",
        f"sliding_window(window={window},sinks={sinks})+float32",
    ]
