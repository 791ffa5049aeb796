"""Tokens to text without broken characters, and conversations that keep their cache."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from tfkv.serving import ChatTemplate, Client, Detokenizer, Retry, TextError, Tokenizer

TEXTS = [
    "plain ascii",
    "naïve café – 10 €",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 family and 🏳️‍🌈 flag",
    "mixed é日👍 end",
    "  leading and trailing  ",
    "a\ufffdb",
    "",
]


@pytest.fixture
def tokenizer(byte_tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(byte_tokenizer)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(3))
def test_stream_never_splits_a_character(tokenizer: Tokenizer, text: str, seed: int) -> None:
    ids = tokenizer.encode(text)
    stream, chance, pieces = Detokenizer(tokenizer), random.Random(seed), []
    while ids:
        size = chance.randrange(1, 6)
        pieces.append(stream.push(ids[:size]))
        del ids[:size]
    pieces.append(stream.flush())
    assert "".join(pieces) == text
    allowed = 1 if "\ufffd" in text else 0
    assert sum(piece.count("\ufffd") for piece in pieces) == allowed


def test_unfinished_character_is_shown_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x👍")[:-1]
    stream = Detokenizer(tokenizer)
    assert [stream.push([token]) for token in ids] == ["x", "", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_invalid_bytes_do_not_hold_text_back_for_ever(tokenizer: Tokenizer) -> None:
    stray = tokenizer.encode("é")[1:]
    stream = Detokenizer(tokenizer)
    text = stream.push(tokenizer.encode("a") + stray + tokenizer.encode("bc"))
    assert text == "a\ufffdbc"


def test_long_stream_is_decoded_in_a_window(tokenizer: Tokenizer) -> None:
    text = "hello wörld " * 500
    stream = Detokenizer(tokenizer)
    assert stream.push(tokenizer.encode(text)) + stream.flush() == text
    assert len(stream._ids) < 20


def _sentencepiece_like() -> Tokenizer:
    pieces = ["<unk>", "▁hello", "▁world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = [(piece, -1.0) for piece in pieces]
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


def test_tokenizer_whose_decode_depends_on_neighbours() -> None:
    # Llama's decoder strips the first space of whatever it is given, and turns a whole run of
    # bytes into U+FFFD while one character of it is unfinished.
    llama = _sentencepiece_like()
    ids = [1, 2, *(4 + byte for byte in "日本".encode()), 3, 2]
    for size in (1, 2, 3):
        stream = Detokenizer(llama)
        pieces = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
        assert "".join(pieces) + stream.flush() == "hello world日本! world"
        assert "\ufffd" not in "".join(pieces)
    continued = Detokenizer(llama, context=[1])
    assert continued.push([2]) == " world"


def test_template_environment() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
        "{{ m | tojson }}{% if loop.first %}{% continue %}{% endif %};{% endfor %}"
        "{% if add_generation_prompt %}>{{ eos_token }}{% endif %}",
        {"bos": "<s>", "eos_token": "</s>"},
    )
    two = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "b"}]
    assert template.render(two) == (
        '<s>{"role": "user", "content": "<é>"}{"role": "user", "content": "b"};></s>'
    )
    assert not template.render(two, add_generation_prompt=False).endswith("</s>")
    with pytest.raises(TextError, match="no tools here"):
        template.render([{"role": "tool", "content": ""}])
    year = ChatTemplate("{{ strftime_now('%Y') }}").render(two)
    assert year.isdigit() and len(year) == 4


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ nothing.at.all }}",
        "{{ 1 + 'a' }}",
    ],
)
def test_template_stays_in_its_sandbox(source: str) -> None:
    message = {"role": "user", "content": "x"}
    try:
        rendered = ChatTemplate(source).render([message])
    except TextError:
        pass
    else:
        assert rendered == ""
    assert message == {"role": "user", "content": "x"}


def test_bad_templates_and_messages() -> None:
    with pytest.raises(TextError, match="not valid Jinja2"):
        ChatTemplate("{% if %}")
    with pytest.raises(TextError, match="at least one message"):
        ChatTemplate("x").render([])
    with pytest.raises(TextError, match="`role`"):
        ChatTemplate("x").render([{"content": "x"}])


@pytest.fixture
def chatty(server: Any, artifact: Any, fast_retry: Retry) -> Any:
    with Client(server.target, artifact=artifact, retry=fast_retry) as client:
        yield client


def test_text_in_text_out(server: Any, chatty: Client, tokenizer: Tokenizer) -> None:
    script = tokenizer.encode("ça va 👍")
    server.next_token = lambda history, row: [*script, 1][len(history) - 5]
    with chatty.session() as session:
        generation = session.generate("bon :", 99)
        pieces = list(generation)
        assert "".join(pieces) == "ça va 👍"
        assert all("\ufffd" not in piece for piece in pieces)
        assert generation.result.text == "ça va 👍"
        assert generation.result.tokens == [*script, 1]
        assert chatty.generate("bon :", 99, stream=False).text == "ça va 👍"


def test_tokenizer_path_without_artifact(server: Any, artifact: Any) -> None:
    path = artifact / "1" / "assets.extra" / "tokenizer.json"
    with Client(server.target, tokenizer=path) as client:
        assert isinstance(client.generate("hello", 3, stream=False).text, str)
        with pytest.raises(TextError, match="chat template"):
            client.session().chat("hello")


def test_second_turn_continues_the_cache(
    server: Any, chatty: Client, say: Any, tokenizer: Tokenizer
) -> None:
    say("Hé, 👍!", "second")
    with chatty.session() as session:
        assert "".join(session.chat("hello", system="Be brief.")) == "Hé, 👍!"
        held, computed = session.tokens, server.computed
        assert "".join(session.chat("and now?")) == "second"
        assert session.tokens[: len(held)] == held
        new = tokenizer.encode("\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n")
        assert server.computed == computed + len(new) + len(tokenizer.encode("second")) + 1
        assert [message["role"] for message in session.messages] == [
            "system",
            "user",
            "assistant",
            "user",
            "assistant",
        ]
        assert not [name for name, _ in server.calls if name in ("truncate", "close")]


def test_answer_in_other_tokens_than_the_tokenizers(
    server: Any, chatty: Client, tokenizer: Tokenizer
) -> None:
    # The model spells "hell" letter by letter; the tokenizer would merge it.
    letters = [token for letter in "hell" for token in tokenizer.encode(letter)]
    assert letters != tokenizer.encode("hell")
    start = len(tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    server.next_token = lambda history, row: [*letters, 1, 1][min(len(history) - start, 5)]
    with chatty.session() as session:
        assert session.chat("hi", stream=False).text == "hell"
        held, computed = session.tokens, server.computed
        session.chat("again", 1, stream=False)
        assert session.tokens[: len(held)] == held
        assert server.computed - computed < 50
        assert not [name for name, _ in server.calls if name == "truncate"]


def test_answer_cut_short_goes_on(server: Any, chatty: Client, say: Any) -> None:
    say("a long answer", "ok")
    with chatty.session() as session:
        assert session.chat("hi", 6, stream=False).text == "a long"
        assert session.chat("next", stream=False).text == "ok"
        assert chatty.tokenizer is not None
        assert "a long<|im_end|>\n<|im_start|>user\nnext" in chatty.tokenizer.decode(
            session.tokens, skip_special_tokens=False
        )


def test_abandoned_answer_stays_in_the_conversation(server: Any, chatty: Client, say: Any) -> None:
    say("first answer", "ok")
    with chatty.session() as session:
        generation = session.chat("hi")
        heard = next(generation) + next(generation)
        assert session.chat("stop", stream=False).text == "ok"
        assert session.messages[1]["content"].startswith(heard)
        assert len(session.messages) == 4


def test_edited_conversation_truncates_at_the_first_difference(
    server: Any, chatty: Client, say: Any, tokenizer: Tokenizer
) -> None:
    say("one", "two")
    with chatty.session() as session:
        session.chat("hello", stream=False)
        session.chat("again", stream=False)
        edited = [dict(message) for message in session.messages[:3]]
        edited[2]["content"] = "aside"
        say("one", "other")
        assert session.generate(edited, stream=False).text == "other"
        positions = [row["position"] for name, row in server.calls if name == "truncate"]
        kept = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n"
        kept += "<|im_start|>user\na"
        assert positions == [len(tokenizer.encode(kept))]
        text = tokenizer.decode(session.tokens, skip_special_tokens=False)
        assert text.endswith("aside<|im_end|>\n<|im_start|>assistant\nother<|im_end|>")


@pytest.mark.parametrize("fault", ["epoch", "lost", "busy", "partial"])
def test_chat_under_faults(server: Any, chatty: Client, say: Any, fault: str) -> None:
    say("première réponse 👍", "deuxième")
    server.faults.extend([None, None, fault, None, None, None, fault, None, fault])
    with chatty.session() as session:
        assert "".join(session.chat("hello")) == "première réponse 👍"
        assert "".join(session.chat("encore")) == "deuxième"


def test_failed_turn_is_not_in_the_conversation(server: Any, chatty: Client, say: Any) -> None:
    say("one", "two")
    with chatty.session() as session:
        session.chat("hello", stream=False)
        server.faults.extend(["unavailable"] * 10_000)
        with pytest.raises(Exception, match="UNAVAILABLE"):
            session.chat("again", timeout=0.2, stream=False)
        server.faults.clear()
        assert len(session.messages) == 2
        assert session.chat("again", stream=False).text == "two"
