"""Bad input through a real socket; a bad row or call never disturbs its mates."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from path_support import one

from tfkv.errors import INVALID_INPUTS, RowError, Status
from tfkv.serving import Client, InputError, RefusedError

GOOD = {"session_id": "good", "tokens": [504, 3575, 282], "position": 0, "max_new_tokens": 4}
_NUMBER = {name: number for number, name in INVALID_INPUTS.items()}


def refuse(client: Client, signature: str = "generate", **row: Any) -> tuple[Status, int]:
    """Status and detail of a row, in a batch with a good one that must not notice."""
    alone = one(client, "generate", **GOOD)
    one(client, "close", session_id="good")
    if signature == "generate":
        bad, good = client.call(signature, [{"session_id": "bad", "position": 0, **row}, GOOD])
        one(client, "close", session_id="good")
        for name, value in alone.items():
            # Another batch size rounds otherwise.
            np.testing.assert_allclose(good[name], value, atol=1e-4, err_msg=name)
    else:
        bad = client.call(signature, [{"session_id": "bad", **row}])[0]
    assert bad.get("count", 0) == 0
    assert client.stats()["slots_used"] == 0
    return Status(bad["status"]), bad["detail"]


def test_unknown_session(client: Client):
    assert refuse(client, tokens=[1], position=5) == (Status.UNKNOWN, 0)
    assert refuse(client, "truncate", position=5) == (Status.UNKNOWN, 0)
    assert refuse(client, "decode", tokens=[1], position=5) == (Status.UNKNOWN, 0)
    assert refuse(client, "score", tokens=[1], position=5) == (Status.UNKNOWN, 0)
    assert refuse(client, "close") == (Status.OK, 0)


def test_empty_prompt_and_a_row_of_length_0(client: Client):
    """tensorflow/serving #1279: an explicit length, never inferred."""
    assert refuse(client, tokens=[]) == (Status.EMPTY, 0)
    assert refuse(client, tokens=[5, 6, 7], length=0) == (Status.EMPTY, 0)
    assert refuse(client, "decode", tokens=[], position=0) == (Status.EMPTY, 0)
    with pytest.raises(RowError, match="at least one token"):
        client.generate([], 4, stream=False)
    with client.session() as session, pytest.raises(RowError, match="at least one token"):
        session.generate("", 4, stream=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", [5, 49152]),
        ("tokens", [-1]),
        ("tokens", [2**31 - 1]),
        ("length", -1),
        ("length", 100),
        ("position", -2),
        ("max_new_tokens", -1),
        ("max_new_tokens", 17),
        ("temperature", -0.1),
        ("temperature", np.nan),
        ("temperature", np.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", np.nan),
        ("min_p", -0.1),
        ("min_p", np.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", np.nan),
        ("top_k", -1),
        ("overflow", 3),
        ("pin", 2),
        ("ttl_ms", -1),
        ("stop_tokens", [49152] * 8),
        ("session_id", ""),
    ],
)
def test_a_value_out_of_range(client: Client, name: str, value: Any):
    row = {"tokens": [5, 6], name: value}
    assert refuse(client, **row) == (Status.INVALID, _NUMBER[name])


def test_an_adapter_that_does_not_exist(client: Client):
    assert refuse(client, tokens=[5], adapter="french")[0] == Status.ADAPTER


def test_the_client_says_which_value_is_wrong(client: Client):
    with pytest.raises(RowError, match="`temperature` is out of range"):
        client.generate([5], 4, temperature=-1.0, stream=False)
    with pytest.raises(RowError, match="`tokens` is out of range"):
        client.generate([5, 60000], 4, stream=False)
    with pytest.raises(InputError, match="`top_p` must be finite"):
        client.generate([5], 4, top_p=float("nan"), stream=False)
    with pytest.raises(InputError, match="must not be negative"):
        client.generate([5], -1, stream=False)


def test_position_beyond_the_session(client: Client):
    one(client, "generate", session_id="gap", tokens=[1, 2, 3], position=0, max_new_tokens=0)
    for signature in ("generate", "decode", "score"):
        row = {"session_id": "gap", "tokens": [4], "position": 4}
        answer = client.call(signature, [row])[0]
        assert (answer["status"], answer["detail"]) == (Status.GAP, 3)
        assert answer["position"] == 3
    answer = client.call("truncate", [{"session_id": "gap", "position": 4}])[0]
    assert (answer["status"], answer["detail"]) == (Status.GAP, 3)
    one(client, "close", session_id="gap")


def test_max_new_tokens_0_only_stores(client: Client):
    before = client.stats()
    row = {"session_id": "store", "tokens": [1, 2, 3], "position": 0, "max_new_tokens": 0}
    answer = one(client, "generate", **row)
    assert (answer["count"], answer["finish"], answer["position"]) == (0, 0, 3)
    assert set(answer["tokens"].tolist()) == {-1}
    assert client.stats()["tokens_decoded"] == before["tokens_decoded"]
    with client.session("store") as session:
        generation = session.generate([1, 2, 3], 0, stream=False)
        assert generation.result.tokens == []
        assert session.position == 3


def test_a_prompt_longer_than_a_call(client: Client, real_text: list[int]):
    """The client cuts it; a raw call that is too wide is refused, its mates are not."""
    wide = real_text[:1025]
    row = {"session_id": "wide", "tokens": wide, "position": 0}
    with pytest.raises(InputError, match="at most 1024 tokens"):
        client.call("generate", [row])
    inputs = client.contract.encode("generate", [{**row, "tokens": [1]}, GOOD])
    inputs["tokens"] = np.array([wide, GOOD["tokens"] + [0] * 1022], np.int32)
    inputs["length"] = np.array([1025, 3], np.int32)
    answer = client.predict("generate", inputs)
    assert answer["status"].tolist() == [Status.INVALID, Status.OK]
    assert answer["detail"][0] == _NUMBER["length"]
    one(client, "close", session_id="good")
    with client.session() as session:
        split = session.generate(wide, 4, stop_tokens=(), stream=False).result.tokens
        assert session.position == 1029
    # Cut by hand elsewhere, the answer is the same.
    with client.session() as session:
        session.generate(wide[:300], 0, stream=False)
        assert session.generate(wide[300:], 4, stop_tokens=(), stream=False).result.tokens == split


def test_a_prompt_longer_than_a_session(client: Client, real_text: list[int]):
    with client.session() as session:
        with pytest.raises(RowError) as error:
            session.generate(real_text[:2049], 1, stream=False)
        assert (error.value.status, error.value.detail) == (Status.OVERFLOW, 2048)


@pytest.fixture
def full_pool(client: Client) -> Iterator[Client]:
    rows = [
        {"session_id": f"full-{row}", "tokens": [1, 2], "position": 0, "ttl_ms": 60_000}
        for row in range(8)
    ]
    for answer in client.call("generate", [{**row, "max_new_tokens": 1} for row in rows]):
        assert answer["status"] == Status.OK
    yield client
    for answer in client.call("close", [{"session_id": row["session_id"]} for row in rows]):
        assert answer["status"] == Status.OK


def test_a_full_pool_says_when_to_come_back(full_pool: Client):
    row = {"session_id": "ninth", "tokens": [1, 2], "position": 0, "max_new_tokens": 1}
    mate = {"session_id": "full-3", "tokens": [], "position": 3, "max_new_tokens": 2}
    refused, served = full_pool.call("generate", [row, mate])
    assert refused["status"] == Status.FULL
    assert 0 < refused["detail"] <= 60_000
    assert (served["status"], served["count"]) == (Status.OK, 2)
    with pytest.raises(RowError, match="no free slot"):
        full_pool.generate([1], 1, stream=False, timeout=0.5)
    one(full_pool, "close", session_id="full-0")
    one(full_pool, "generate", **row)
    one(full_pool, "close", session_id="ninth")


def _raw(client: Client, **changes: Any) -> dict[str, np.ndarray]:
    inputs: dict[str, Any] = client.contract.encode("generate", [{**GOOD, "session_id": "raw"}])
    inputs.update(changes)
    return {name: value for name, value in inputs.items() if value is not None}


BAD_CALLS = {
    "wrong dtype": (
        {"tokens": np.array([[1.0]], np.float32)},
        r"Expects arg\[\d+\] to be int32 but float is provided",
    ),
    "wrong dtype of a string": (
        {"session_id": np.array([1], np.int64)},
        r"Expects arg\[\d+\] to be string but int64 is provided",
    ),
    "wrong rank": ({"tokens": np.array([1, 2, 3], np.int32)}, "`tokens` must have rank 2"),
    "a scalar": ({"length": np.array(3, np.int32)}, "`length` must have rank 1"),
    "a matrix": ({"length": np.array([[3]], np.int32)}, "`length` must have rank 1"),
    "wrong rows": (
        {"length": np.array([3, 3, 3], np.int32)},
        "`length` must have as many rows as `session_id`, or one for all",
    ),
    "too few stop tokens": (
        {"stop_tokens": np.array([[1, 2]], np.int32)},
        "`stop_tokens` must have 8 values a row",
    ),
    "missing input": ({"length": None}, "Signature input alias: length"),
    "misnamed input": (
        {"length": None, "lenght": np.array([3], np.int32)},
        "Signature input alias: length",
    ),
    "extra input": (
        {"colour": np.array([3], np.int32)},
        r"Sent extra: \{colour\}",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_malformed_call(client: Client, case: str):
    changes, message = BAD_CALLS[case]
    with pytest.raises(RefusedError, match=message) as error:
        client.predict("generate", _raw(client, **changes))
    assert error.value.code == "INVALID_ARGUMENT"
    assert client.stats()["slots_used"] == 0


def test_a_call_of_no_rows(client: Client):
    answer = client.predict(
        "generate", {name: value[:0] for name, value in _raw(client).items()}, timeout=10
    )
    assert all(len(value) == 0 for value in answer.values())


def test_malformed_calls_never_fail_those_beside_them(client: Client, prompts: list[list[int]]):
    expected = client.generate(prompts[0], 32, stop_tokens=(), stream=False).result.tokens
    over = threading.Event()
    refusals: list[str] = []

    def pester() -> None:
        with Client(client.target) as own:
            while not over.is_set():
                for changes, _ in BAD_CALLS.values():
                    try:
                        own.predict("generate", _raw(own, **changes))
                    except RefusedError as error:
                        refusals.append(error.code)
                own.call("generate", [{"session_id": "", "tokens": [1], "position": 0}])

    pests = [threading.Thread(target=pester) for _ in range(3)]
    for pest in pests:
        pest.start()
    try:
        answers = [
            client.generate(prompts[0], 32, stop_tokens=(), stream=False).result.tokens
            for _ in range(3)
        ]
    finally:
        over.set()
        for pest in pests:
            pest.join()
    assert answers == [expected] * 3
    assert set(refusals) == {"INVALID_ARGUMENT"}


def test_unknown_names(client: Client):
    with pytest.raises(RefusedError, match='Serving signature key "sing" not found'):
        client.predict("sing", _raw(client))
    with (
        Client(client.target, model="nope") as other,
        pytest.raises(RefusedError, match=r"Servable not found for request: Latest\(nope\)"),
    ):
        other.predict("generate", _raw(client))
