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
    """Three tokens an emoji, and a first call of one token: every call ends inside of one."""
    assert len(client.tokenizer.encode("😀")) == 3
    with client.session() as session:
        generation = session.generate("😀" * 20, 24, stop_tokens=())
        pieces = list(generation)
    assert generation.result.first_tokens == 1
    assert len(pieces) >= 2
    assert set("".join(pieces)) == {"😀"}
    assert "".join(pieces) == generation.text == "😀" * 8
