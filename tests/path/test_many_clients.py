"""Many callers of one server."""

from __future__ import annotations

import threading
from concurrent import futures

from path_support import PROMPTS, Reference, assert_same_tokens

from tfkv.serving import Client


def test_eight_clients_at_once_get_their_own_answers_in_batches(
    client: Client, prompts: list[list[int]], reference: Reference
):
    before = client.stats()
    together = threading.Barrier(8)

    def ask(number: int) -> list[int]:
        with Client(client.target, model=client.model, timeout=90) as own:
            together.wait(30)
            return own.generate(prompts[number], 64, stop_tokens=(), stream=False).result.tokens

    with futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    after = client.stats()
    for number, tokens in enumerate(answers):
        expected, logits = reference.tokens[number], reference.logits[number]
        assert_same_tokens(tokens, expected, logits, PROMPTS[number])
    rows, calls = (after[name] - before[name] for name in ("rows", "calls"))
    print(f"\nmean batch of eight clients: {rows / calls:.1f}")
    assert rows / calls > 2
    assert after["tokens_decoded"] - before["tokens_decoded"] == 8 * 64
