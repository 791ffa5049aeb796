"""Text over the wire: streamed pieces are whole characters."""

from __future__ import annotations

import pytest

from tfkv.serving import Client

EMOJI = "Repeat exactly: 🦊🐉🌍👩‍👩‍👧 naïve café 日本語"


@pytest.mark.parametrize("first_call", [1, 3])
def test_streamed_text_is_never_broken(client: Client, first_call: int):
    with client.session() as session:
        pieces = list(session.chat(EMOJI, 48, temperature=0.7, seed=first_call))
    assert all("\ufffd" not in piece for piece in pieces[:-1])
    for piece in pieces:
        piece.encode("utf-8")


def test_a_character_split_over_calls_comes_whole(client: Client):
    """The model is made to say the bytes of an emoji: each token one call."""
    tokenizer = client.tokenizer
    ids = tokenizer.encode("🦊🐉")
    assert len(ids) > 2, "the emoji must be split over tokens for this test to mean anything"
    # Sampled tokens are whatever the model likes: teach it by repetition, greedily.
    prompt = tokenizer.encode("🦊🐉" * 30)
    with client.session() as session:
        generation = session.generate(prompt, len(ids) * 4, stop_tokens=())
        pieces = list(generation)
    assert "🦊" in "".join(pieces)
    assert all("\ufffd" not in piece for piece in pieces[:-1])
    assert "".join(pieces) == generation.text
    assert tokenizer.decode(generation.result.tokens).startswith("".join(pieces).rstrip("\ufffd"))
