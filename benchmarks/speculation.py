"""What speculation gains: a text that is repeated with a small change, and one written freely:
``python -m benchmarks.speculation [SPECULATION ...]``.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

from benchmarks import texts
from benchmarks.bars import Measurement
from benchmarks.registry import Measured, Say, measures
from tfkv import terminal
from tfkv.config import EngineConfig
from tfkv.export.engine_calls import EngineCalls

SPECULATION = "prompt_lookup(tokens=7,ngram=3)"
_TURNS, _MOST = 7, 160

_STORY = (
    "The old lighthouse stood on a rock above the bay. Every evening at six the keeper, a man "
    "named Thomas, climbed the ninety-two steps and lit the lamp. Ships on their way to the "
    "harbour looked for its light, and in winter, when the fog was thick, he rang the bell as "
    "well. His daughter brought him bread, cheese and a can of hot tea, and together they "
    "watched the boats come home."
)
_MINUTES = (
    "The committee met on Tuesday, 4 March, at ten o'clock in the library. Present were Anna "
    "Keller, John Brown and Maria Rossi. The treasurer reported that 1,250 euros had been spent "
    "on new shelves and 340 euros on lamps. It was agreed to open the reading room on Saturdays "
    "from May on, and to ask the city for a contribution of 2,000 euros. The next meeting will "
    "be held on Tuesday, 1 April, at the same time and place."
)
_LETTER = (
    "Dear Ms Miller, thank you for your order of 3 May. We have sent the twelve chairs and the "
    "two tables to your office in Hamburg today. They will arrive by Friday at the latest. "
    "Please check the parcels for damage and write to us within fourteen days if something is "
    "missing. The invoice is in the first box. You can pay by bank transfer or by card. With "
    "kind regards, Paul Weber"
)
_REPORT = (
    "The bridge over the river was closed for repairs on Monday. Engineers found cracks in two "
    "of the main beams during a routine inspection last week. The city council expects the work "
    "to take about six months and to cost four million euros. Until then, drivers have to use "
    "the motorway bridge in the north. Cyclists and pedestrians can still cross on the old "
    "railway bridge. The council will publish a new bus timetable before the end of the month."
)
#: Edits and a summary: what is to be done, and with which text.
EDITS = (
    ("Repeat the following text, but replace the name Thomas by Peter.", _STORY),
    ("Repeat the following text word by word, but write Wednesday instead of Tuesday.", _MINUTES),
    ("Rewrite the following letter, but address it to Mr Miller.", _LETTER),
    ("Repeat the following text, but write Tuesday instead of Monday.", _REPORT),
    ("Summarize the following text in two sentences, in its own words.", _REPORT),
)
#: Answers whose words the question does not have.
FREE = (
    "Write a short story about a dog that learns to swim.",
    "Explain why the sky is blue.",
    "What should I think of before I buy a used bicycle?",
)


@dataclasses.dataclass(frozen=True)
class Gain:
    """Decode steps with speculation, over those without.

    Args:
        prompt: What was asked.
        tokens: Of the answer, the same on both sides.
        without_ms: A token without speculation, milliseconds; the median.
        ratio: How many times as fast speculation is; the median over turns.
        spread: Quartiles of the same.
        guessed: Tokens that were guessed.
        accepted: Of those, sampled.
    """

    prompt: str
    tokens: int
    without_ms: float
    ratio: float
    spread: tuple[float, float]
    guessed: int
    accepted: int

    def __str__(self) -> str:
        low, high = self.spread
        return (
            f"{self.ratio:.2f} ({low:.2f} to {high:.2f}; {self.without_ms:.1f} ms a token without; "
            f"{self.accepted} of {self.guessed} guesses right, {self.tokens} tokens): "
            f"{self.prompt[:60]!r}"
        )


class _Answers:
    """Greedy answers of an engine, timed behind their prompts.

    Args:
        engine: What to compile for.
    """

    def __init__(self, engine: EngineConfig) -> None:
        self._calls = EngineCalls(texts.model(), engine)
        self._stops = [texts.model().stop_tokens]

    def answer(self, prompt: Sequence[int]) -> tuple[list[int], float]:
        """Tokens of an answer, and the seconds they took."""
        position, said = self._generate(prompt, 0, 0)
        start = time.perf_counter()
        while not said or (len(said) < _MOST and said[-1] not in self._stops[0]):
            position, more = self._generate([], position, self._calls.engine.decode_chunk)
            said += more
        seconds = time.perf_counter() - start
        self._calls.call("close", session_id=["edit"])
        return said, seconds

    def _generate(self, tokens: Sequence[int], position: int, count: int) -> tuple[int, list[int]]:
        answer = self._calls.call(
            "generate",
            session_id=["edit"],
            tokens=[list(tokens)],
            length=[len(tokens)],
            position=[position],
            max_new_tokens=[count],
        )
        if answer["status"][0]:
            raise RuntimeError(f"A row was refused: {answer}.")
        return int(answer["position"][0]), answer["tokens"][0][: answer["count"][0]].tolist()

    def guesses(self) -> tuple[int, int]:
        """Tokens that were guessed and accepted so far."""
        stats = self._calls.call("stats", session_id=["?"])
        return int(stats["tokens_guessed"][0]), int(stats["tokens_accepted"][0])


def gains(speculation: str, prompts: Sequence[str], weights: str = "int8") -> Iterator[Gain]:
    """Measures each prompt in turns with and without speculation, one session at a time.

    Args:
        speculation: As of `EngineConfig.speculation`.
        prompts: What the user says.
        weights: As of `EngineConfig.weights`, on both sides.

    Raises:
        RuntimeError: The two say different things.
    """
    engine = EngineConfig(slots=2, capacity=2048, batch_sizes=(1,), weights=weights)
    without = _Answers(engine)
    guessing = _Answers(dataclasses.replace(engine, speculation=speculation))
    for prompt in prompts:
        yield _gain(without, guessing, prompt)


def _gain(without: _Answers, guessing: _Answers, prompt: str) -> Gain:
    said = texts.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
    ratios, plain = [], []
    for turn in range(_TURNS + 1):
        before = guessing.guesses()
        tokens, seconds = without.answer(said)
        same, faster = guessing.answer(said)
        if same != tokens:
            raise RuntimeError(f"Expected {tokens}, received {same} for {prompt!r}.")
        if turn:
            ratios.append(seconds / faster)
            plain.append(1e3 * seconds / len(tokens))
    counts = (after - old for after, old in zip(guessing.guesses(), before, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Gain(prompt, len(tokens), statistics.median(plain), middle, (low, high), *counts)


@measures("fast.speculation_gain")
def speculation_gain(say: Say) -> Measured:
    """The median edit, of answers that are token by token the same."""
    found = []
    for gain in gains(SPECULATION, [f"{task}\n\n{text}" for task, text in EDITS]):
        say(str(gain))
        found.append(gain)
    note = "; ".join(f"{gain.ratio:.2f}" for gain in found)
    return {
        "fast.speculation_gain": Measurement(statistics.median(g.ratio for g in found), {}, note)
    }


def main() -> None:
    """Prints a line for each prompt, with the forms of speculation that are named."""
    for speculation in sys.argv[1:] or [SPECULATION]:
        for weights in ("int8", "float32"):
            print(f"{speculation}, {weights} weights", flush=True)
            prompts = [*(f"{task}\n\n{text}" for task, text in EDITS), *FREE]
            for gain in gains(speculation, prompts, weights):
                print(gain, flush=True)


if __name__ == "__main__":
    terminal.load_tensorflow()
    main()
