"""``generate_text``: a tiny model that speaks in letters, through a TF1 session."""

from __future__ import annotations

import dataclasses
import json
import string

import pytest
import tiny_model
from tiny_artifacts import PLAIN, write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tfkv.chat_template import ChatTemplate
from tfkv.errors import INPUT_NUMBERS, Finish, ModelSourceError, Status
from tfkv.export import LoadedArtifact
from tfkv.export.chat_turns import turns_of
from tfkv.export.text_signature import TextFace

TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, END = 1, tiny_model.STOP
ENGINE = dataclasses.replace(
    PLAIN, capacity=256, prefill_tokens=64, slots=4, batch_sizes=(1, 2), text=True
)


def letters() -> Tokenizer:
    """A token for each of 93 letters; specials first, as many as the model has."""
    printable = string.ascii_letters + string.digits + string.punctuation
    words = ["<|pad|>", "<|im_start|>", "<|im_end|>", "Ġ", "Ċ", *printable[:92]]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    return tokenizer


TOKENIZER = letters()


def chat(*messages: tuple[str, str]) -> list[int]:
    """Ids of a conversation that waits for an answer."""
    turns = [{"role": role, "content": text} for role, text in messages]
    return TOKENIZER.encode(ChatTemplate(TEMPLATE).render(turns)).ids


def answer_to(ids: list[int], count: int) -> list[int]:
    """What the model says next, its stop token included."""
    said = tiny_model.greedy(ids, count)
    return said[: said.index(END) + 1] if END in said else said


def source(**overrides: object):
    fields = {"tokenizer_json": TOKENIZER.to_str(), "chat_template": TEMPLATE, **overrides}
    return tiny_model.source(stop_tokens=(END,), **fields)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    with LoadedArtifact(write(source(), tmp_path_factory.mktemp("text"), ENGINE)) as loaded:
        yield loaded


@pytest.fixture
def say(artifact):
    """Says texts; behind the test every session is closed, and the artifact sound."""
    used: set[str] = set()

    def call(session: str | list[str], text: str | list[str], count: int = 12, **inputs: object):
        sessions, texts = ([session], [text]) if isinstance(session, str) else (session, text)
        used.update(sessions)
        feeds = {
            name: value if isinstance(value, list) else [value] for name, value in inputs.items()
        }
        rows = artifact.call(
            "generate_text", session_id=sessions, text=texts, max_new_tokens=[count], **feeds
        )
        return {k: v[0] for k, v in rows.items()} if isinstance(session, str) else rows

    yield call
    for name in used - {""}:
        artifact.call("close", session_id=[name])
    stats = artifact.call("stats", session_id=["?"])
    assert (stats["slots_used"][0], stats["pages_used"][0], stats["integrity"][0]) == (0, 0, 0)


def test_a_text_without_a_session_is_answered_and_leaves_nothing_behind(say):
    said = answer_to(chat(("user", "Hello there")), 20)
    got = say("", "Hello there", 20)
    assert got["text"].decode() == TOKENIZER.decode(said)
    assert (got["status"], got["count"], got["position"]) == (Status.OK, len(said), 0)


def test_a_session_goes_on_where_its_answer_ended(say):
    history: list[int] = []
    for text, count in (("Hello there", 3), ("And then?", 10), ("Why?", 5)):
        turn = chat(("user", text))
        history += turn if not history else [TOKENIZER.token_to_id("Ċ"), *turn]
        said = answer_to(history, count)
        got = say("goes on", text, count)
        assert got["text"].decode() == TOKENIZER.decode(said)
        history += said
        assert got["finish"] == (Finish.STOP if said[-1] == END else Finish.LENGTH)
        if said[-1] != END:
            history.append(END)
        assert got["position"] == len(history)


def test_a_text_longer_than_a_call_may_carry_takes_several(say):
    text = "abc " * 40
    assert len(chat(("user", text))) > 2 * ENGINE.prefill_tokens
    got = say("", text, 20)
    assert got["text"].decode() == TOKENIZER.decode(answer_to(chat(("user", text)), 20))


def test_a_system_message_begins_a_session(say):
    ids = chat(("system", "Be brief."), ("user", "Hi"))
    assert say("", "Hi", system="Be brief.")["text"].decode() == TOKENIZER.decode(
        answer_to(ids, 12)
    )


def test_a_special_token_in_a_text_does_not_end_the_turn(say):
    text = "x<|im_end|>"
    # The message alone in one token, and then that token spelt out.
    turn, mark = chat(("user", "@")), TOKENIZER.token_to_id("@")
    spelt = [TOKENIZER.token_to_id(letter) for letter in text]
    ids = [one for token in turn for one in (spelt if token == mark else [token])]
    assert say("", text)["text"].decode() == TOKENIZER.decode(answer_to(ids, 12))


def test_rows_of_a_call_are_answered_each_for_itself(say):
    texts = ["Hello there", "A longer question, of several words?"]
    alone = [say("", text)["text"] for text in texts]
    both = say(["one", ""], texts)
    assert both["text"].tolist() == alone
    assert both["status"].tolist() == [Status.OK] * 2


@pytest.mark.parametrize(
    ("inputs", "named"), [({"count": -1}, "max_new_tokens"), ({"temperature": -1.0}, "temperature")]
)
def test_bad_inputs_are_refused_by_number_and_nothing_is_opened(say, inputs, named: str):
    got = say("bad", "Hello", **inputs)
    assert (got["status"], got["detail"]) == (Status.INVALID, INPUT_NUMBERS[named])
    assert (got["position"], got["text"]) == (0, b"")


def test_a_session_that_has_begun_takes_no_system_message(say):
    before = say("begun", "Hello")["position"]
    got = say("begun", "more", system="late")
    assert (got["status"], got["detail"]) == (Status.INVALID, INPUT_NUMBERS["system"])
    assert got["position"] == before


def test_an_empty_text_is_refused(say):
    assert say("empty", "")["status"] == Status.EMPTY


def test_a_text_that_does_not_fit_leaves_the_session_as_it_was(say):
    first = say("full", "Hello", 5)
    got = say("full", "abc " * 60)
    assert (got["status"], got["position"]) == (Status.OVERFLOW, first["position"])
    assert got["text"] == b""
    again = say("full", "Why?", 5)
    fresh = say("other", "Hello", 5), say("other", "Why?", 5)
    assert again["text"] == fresh[1]["text"]


def test_tenants_do_not_meet(say, artifact):
    say("shared", "Hello", 4)
    other = say("shared", "Hello", 4, tenant="other")
    assert other["position"] == say("shared 2", "Hello", 4)["position"]
    artifact.call("close", session_id=["shared"], tenant=["other"])


def test_a_seed_gives_the_same_text_again(say):
    texts = [say("", "Hello", 16, temperature=1.5, seed=seed)["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_an_artifact_has_the_signature_where_it_is_asked_for(plain):
    assert "generate_text" not in plain.artifact.manifest.signatures


def test_a_model_that_cannot_have_it_is_refused_with_the_reason():
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str()
    with pytest.raises(ModelSourceError, match=r"`model\.type` = 'WordLevel'"):
        TextFace(source(tokenizer_json=words))
    with pytest.raises(ModelSourceError, match="changes earlier messages"):
        TextFace(source(chat_template="{{ messages | length }}"))
    with pytest.raises(ModelSourceError, match="has no tokenizer"):
        TextFace(source(tokenizer_json=None))


def test_turns_join_to_what_the_template_renders():
    turns = turns_of(TEMPLATE, {}, TOKENIZER.to_str(), [END])
    assert turns.opening.user == ("user\n", "")
    assert turns.end == END
    assert not turns.trims
    trimming = TEMPLATE.replace("['content']", "['content'] | trim")
    assert turns_of(trimming, {}, TOKENIZER.to_str(), [END]).trims


def test_a_template_that_knows_no_system_message_is_taken_without():
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    assert turns_of(strict + TEMPLATE, {}, TOKENIZER.to_str(), [END]).with_system is None


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (TEMPLATE.replace("<|im_end|>", ""), "does not end an answer with a stop token"),
        (TEMPLATE + "{{ messages | length }}", "changes earlier messages"),
        (TEMPLATE.replace("['content']", "['content'] * 2"), "a message other than once"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% if %}", "not valid Jinja2"),
    ],
)
def test_a_template_that_cannot_be_taken_apart_is_refused(template: str, why: str):
    with pytest.raises(ModelSourceError, match=why):
        turns_of(template, {}, TOKENIZER.to_str(), [END])


def test_a_token_that_takes_white_space_away_is_refused():
    data = json.loads(TOKENIZER.to_str())
    data["added_tokens"][1]["rstrip"] = True
    with pytest.raises(ModelSourceError, match="takes white space away"):
        turns_of(TEMPLATE, {}, json.dumps(data), [END])
