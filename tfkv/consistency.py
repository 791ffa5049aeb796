"""`tfkv verify`: whether two systems give the same answers to the same prompts.

A system is an artifact, or a cache of a model: the signatures that its artifact would have,
in this process. Tokens are compared, distributions and meaning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfkv.agreement import Agreement, Limits, PromptAgreement, compare_answers
from tfkv.config import EngineConfig
from tfkv.errors import ConfigError
from tfkv.manifest import TOKENIZER_PATH, Manifest, latest_version

if TYPE_CHECKING:
    from tfkv.calibration import Calibration
    from tfkv.export.importers import ModelSource
    from tfkv.export.speaker import Callee, Speaker

__all__ = ["PROMPTS", "Agreement", "Limits", "check_consistency", "read_prompts"]

#: A text, turned into a message of a chat where the model has a template; or token ids.
Prompt = str | Sequence[int]
#: Called with stage, steps done and steps in all.
Progress = Callable[[str, int, int], None]

_ARTICLE = """\
The lighthouse at Port Ellery was built in 1871, after three ships were lost on the reef in a \
single winter. Its lamp burned whale oil at first, then paraffin, and was electrified in 1934. \
For a hundred years a keeper and his family lived in the cottage beside the tower, grew \
vegetables in the walled garden and rowed to the mainland once a week for flour and letters. The \
last keeper left in 1972, when the light was automated. Since then the cottage has been a school, \
a bird station and, for six years, empty. In 2009 a group of villagers bought it for one pound, \
repaired the roof and opened a small museum. It has the first lamp, the keepers' logbooks and a \
model of the reef. Some four thousand people visit it each summer; the money keeps the path safe \
and pays a student who looks after the terns that nest below the tower."""

_FUNCTION = """\
def merge(left, right):
    result = []
    while left and right:
        if left[0] <= right[0]:
            result.append(left.pop(0))
        else:
            result.append(right.pop(0))
    return result
"""

#: What is asked where no prompts are given: questions, code, summaries.
PROMPTS: tuple[str, ...] = (
    "What is the capital of France, and what is it famous for?",
    "Explain to a child why the sky is blue.",
    "Give me five tips for learning a new language.",
    "What should I check before I buy a used bicycle?",
    "Write a short, friendly letter that declines an invitation to a wedding.",
    "Write a Python function that tells whether a string is a palindrome.",
    f"What is wrong with this function, and how can it be corrected?\n\n{_FUNCTION}",
    f"Summarise the following text in three sentences.\n\n{_ARTICLE}",
    f"When did the last keeper leave, and who bought the cottage?\n\n{_ARTICLE}",
    "Compare trains and aeroplanes: speed, price, comfort and the climate.",
)


def check_consistency(
    reference: str | pathlib.Path,
    candidate: str | pathlib.Path,
    model: Any = None,
    prompts: Sequence[Prompt] = PROMPTS,
    *,
    max_new_tokens: int = 128,
    meaning: bool = True,
    chat: bool = True,
    calibration: Calibration | str | pathlib.Path | None = None,
    progress: Progress = lambda *_: None,
) -> Agreement:
    """Asks two systems the same and compares what they answer.

    Each answers greedily, in calls of `generate`; that gives the agreement of tokens, the first
    divergence and the texts whose meaning is compared. Then both are given the reference's
    answer token by token, in calls of `decode`, which gives the distributions whose KL
    divergence is taken: of the same text, so that it says what the change costs at each step
    even where an answer took another turn early.

    Args:
        reference: What is held to be right: directory of an artifact, or the cache string of
            `model`.
        candidate: Likewise.
        model: As of `tfkv.export.export`, for cache strings.
        prompts: What is asked.
        max_new_tokens: Most tokens of an answer.
        meaning: Whether to compare sentence embeddings, see `SentenceEmbedding`.
        chat: Whether texts are put into the model's chat template, if it has one.
        calibration: As of `tfkv.export.export`, for cache strings.
        progress: Called with ``"answers"``, prompts done and prompts in all.

    Returns:
        What was found, prompt by prompt and over all.

    Raises:
        ConfigError: An argument is out of range, a cache is unknown, the two do not have the
            same vocabulary, or the model of the sentence embeddings is missing.
        ArtifactError: A directory holds no artifact.
        RowError: A prompt and its answer do not fit.

    Example:
        >>> found = check_consistency("float32", "int8", "smollm2")
        >>> Limits(max_kl=0.01, min_similarity=0.95).broken(found)
        []
    """
    if not prompts or max_new_tokens < 1:
        raise ConfigError(
            "`prompts` must not be empty and `max_new_tokens` at least 1. Received: "
            f"{len(prompts)} prompts, max_new_tokens={max_new_tokens}."
        )
    similarity = None
    if meaning:
        from tfkv.sentence_embedding import SentenceEmbedding

        similarity = SentenceEmbedding().similarity
    systems = _Systems(model, calibration, max_new_tokens)
    words = systems.words(reference, candidate)
    if meaning and not words.reads:
        raise ConfigError(
            "Meanings are compared of texts, and the model has no tokenizer. Give `meaning=False`."
        )
    ids = [words.encode(prompt, chat) for prompt in prompts]
    with contextlib.ExitStack() as stack:
        pair = [systems.open(stack, one, ids) for one in (reference, candidate)]
        found = []
        for index, prompt in enumerate(ids):
            progress("answers", index, len(ids))
            shown = prompts[index]
            found.append(
                _compare(
                    shown if isinstance(shown, str) else words.decode(shown),
                    prompt,
                    (pair[0], pair[1]),
                    max_new_tokens,
                    words,
                    similarity,
                )
            )
        progress("answers", len(ids), len(ids))
    return Agreement(str(reference), str(candidate), tuple(found))


def _compare(
    shown: str,
    prompt: Sequence[int],
    pair: tuple[Speaker, Speaker],
    max_new_tokens: int,
    words: _Words,
    similarity: Callable[[str, str], float] | None,
) -> PromptAgreement:
    import numpy as np

    from tfkv.evaluation import compare_logits

    expected, given = (speaker.answer(prompt, max_new_tokens) for speaker in pair)
    kl, same_top = [], []
    none = np.array([-1], np.int32)
    for one, other in zip(*(speaker.logits(prompt, expected) for speaker in pair), strict=True):
        gap, same, *_ = compare_logits(one[np.newaxis], other[np.newaxis], none)
        kl.append(max(float(gap[0]), 0.0))  # rounding leaves −1e-9 of two equal ones
        same_top.append(bool(same[0]))
    texts = (words.decode(expected), words.decode(given))
    return compare_answers(
        shown, (expected, given), texts, np.array(kl), np.array(same_top), similarity
    )


class _Words:
    """Text of one model and back.

    Args:
        tokenizer_json: Of the ``tokenizers`` library; None = token ids are all there is.
        chat_template: Jinja2, empty where there is none.
        special_tokens: Role to text.
    """

    def __init__(
        self, tokenizer_json: str | None, chat_template: str, special_tokens: dict[str, str]
    ) -> None:
        import tokenizers

        from tfkv.chat_template import ChatTemplate
        from tfkv.serving.text import Tokenizer

        self._tokenizer = None
        if tokenizer_json is not None:
            self._tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer_json))
        self._template = ChatTemplate(chat_template, special_tokens) if chat_template else None

    @property
    def reads(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def encode(self, prompt: Prompt, chat: bool) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ConfigError: It is empty, or a text without a tokenizer.
        """
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ConfigError("Without a tokenizer, `prompts` must be token ids.")
            if chat and self._template is not None:
                prompt = self._template.render([{"role": "user", "content": prompt}])
            prompt = self._tokenizer.encode(prompt)
        if not len(prompt):
            raise ConfigError("A prompt must have at least one token. Received: an empty one.")
        return list(prompt)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, or themselves where there is no tokenizer."""
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        return self._tokenizer.decode(ids)


class _Systems:
    """Opens what is named: an artifact by its directory, anything else as a cache.

    Args:
        model: For caches.
        calibration: For caches.
        most: Tokens of an answer, which must fit.
    """

    def __init__(self, model: Any, calibration: Any, most: int) -> None:
        from tfkv.export.exporter import checked
        from tfkv.export.importers import load

        self._model: ModelSource | None = None if model is None else load(model)
        self._calibration = None if self._model is None else checked(self._model, calibration)
        self._most = most

    def words(self, *names: str | pathlib.Path) -> _Words:
        """How the systems read and write.

        Raises:
            ConfigError: They have different vocabularies, or a cache has no model.
        """
        artifacts = [latest_version(name) for name in names if pathlib.Path(name).is_dir()]
        manifests = [Manifest.read(directory) for directory in artifacts]
        # What an artifact does not say of its model cannot differ.
        sizes = {one.model.vocabulary_size for one in manifests if one.model is not None}
        if self._model is not None:
            sizes.add(self._model.config.vocabulary_size)
        elif len(artifacts) < len(names):
            (cache, *_) = (name for name in names if not pathlib.Path(name).is_dir())
            raise ConfigError(
                f"{str(cache)!r} is no directory of an artifact. To compare caches, give "
                "`model`: --model smollm2, or the path of a .gguf file."
            )
        if len(sizes) > 1:
            raise ConfigError(
                f"Both systems must have one vocabulary. Received: {sorted(sizes)} tokens."
            )
        if self._model is not None:
            of = self._model
            return _Words(of.tokenizer_json, of.chat_template, of.special_tokens)
        path = artifacts[0] / TOKENIZER_PATH
        text = path.read_text(encoding="utf-8") if path.exists() else None
        return _Words(text, manifests[0].chat_template, manifests[0].special_tokens)

    def open(
        self, stack: contextlib.ExitStack, name: str | pathlib.Path, prompts: Sequence[list[int]]
    ) -> Speaker:
        """A system, until the stack ends; a cache gets room for the longest of the prompts.

        Raises:
            ConfigError: The cache cannot be had.
        """
        from tfkv.export.speaker import Speaker
        from tfkv.export.verification import LoadedArtifact

        if pathlib.Path(name).is_dir():
            return Speaker(stack.enter_context(LoadedArtifact(latest_version(name))))
        return Speaker(self._engine(str(name), max(map(len, prompts)) + self._most))

    def _engine(self, cache: str, tokens: int) -> Callee:
        from tfkv.export.engine_calls import EngineCalls
        from tfkv.export.exporter import fitted
        from tfkv.layers.cache_spec import CacheSpec

        if self._model is None:
            raise ConfigError(f"Cache {cache!r} needs a `model`.")
        config = EngineConfig(cache=str(CacheSpec.parse(cache)), slots=1, batch_sizes=(1,))
        config = dataclasses.replace(config, capacity=max(config.capacity, tokens))
        config = fitted(self._model, config, self._calibration)
        return EngineCalls(self._model, config, self._calibration)


def read_prompts(path: str | pathlib.Path) -> list[Prompt]:
    """Prompts of a file: of a ``.jsonl`` file a JSON string or a list of token ids a line, of
    any other a text a line. Empty lines are left out.

    Raises:
        ConfigError: The file cannot be read, or a line is something else.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Prompts must be a UTF-8 file. Received: {path} ({error}).") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if pathlib.Path(path).suffix != ".jsonl":
        return list(lines)
    return [_prompt_of(line) for line in lines]


def _prompt_of(line: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, str) or (
        isinstance(value, list) and all(type(token) is int for token in value)
    ):
        return value
    raise ConfigError(
        f"A line of prompts must be a JSON string or a list of token ids. Received: {line[:80]!r}."
    )
