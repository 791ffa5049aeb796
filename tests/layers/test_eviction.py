"""Policies that evict by score, against their papers."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable

import cache_conformance as conformance
import eviction_reference as papers
import numpy as np
import pytest
import tensorflow as tf

from tfkv.errors import CacheError, ConfigError
from tfkv.layers import CachedMultiHeadAttention
from tfkv.layers.policies import POLICIES, EvictingPolicy, PyramidKV

BUDGET, INTERVAL, LENGTH = 8, 4, 30


@dataclasses.dataclass(frozen=True)
class EvictionCase:
    """One policy and its paper.

    Args:
        cache: The policy's string, of `BUDGET` and `INTERVAL`.
        score: The paper's score.
        sinks: First tokens that stay.
        recent: Newest tokens that stay.
        highest: Whether the highest attention counts instead of the sum.
        together: Whether heads keep the same tokens.
    """

    cache: str
    score: Callable[[papers.Head], np.ndarray]
    sinks: int
    recent: int
    highest: bool = False
    together: bool = False


def of(name: str, **arguments: object) -> str:
    given = {"budget": BUDGET, "interval": INTERVAL, "whole_prompt": False, **arguments}
    return f"{name}({','.join(f'{key}={value!r}' for key, value in given.items())})"


votes = functools.partial(papers.snapkv, window=3)
CASES = [
    EvictionCase(of("h2o", sinks=1, recent=3), papers.h2o, 1, 3),
    EvictionCase(
        of("h2o", sinks=0, recent=4, normalize=False),
        functools.partial(papers.h2o, normalize=False),
        0,
        4,
    ),
    EvictionCase(
        of("tova", sinks=1, recent=1),
        lambda head: head.attention(1).mean(axis=(0, 1)),
        1,
        1,
        together=True,
    ),
    EvictionCase(of("snapkv", sinks=1, window=3), votes, 1, 3),
    EvictionCase(of("ada_kv", sinks=1, window=3, caps=""), votes, 1, 3),
    EvictionCase(
        of("pyramid_kv", sinks=0, window=3, beta=1),
        functools.partial(papers.snapkv_max, window=3),
        0,
        3,
    ),
    EvictionCase(
        of("critical_kv", sinks=0, window=2),
        functools.partial(papers.critical, window=2, budget=BUDGET),
        0,
        2,
    ),
    EvictionCase(
        of("defensive_kv", sinks=1, window=3, caps=""),
        functools.partial(papers.defensive, window=3),
        1,
        3,
    ),
    EvictionCase(
        of("layer_defensive_kv", sinks=1, window=3, caps=""),
        functools.partial(papers.defensive, window=3),
        1,
        3,
    ),
    EvictionCase(
        of("expected_attention", sinks=1, recent=2, window=5, future=7),
        functools.partial(papers.expected, window=5, future=7),
        1,
        2,
    ),
    EvictionCase(of("key_diff", sinks=1, recent=2), papers.key_diff, 1, 2),
    EvictionCase(of("knorm", sinks=1, recent=2), papers.knorm, 1, 2),
    EvictionCase(of("kvzip", sinks=1, recent=2), papers.kvzip, 1, 2, highest=True),
    EvictionCase(of("recent_tokens", sinks=2), lambda head: np.array(head.positions, float), 2, 0),
    EvictionCase(
        of("duo_attention", sinks=2, recent=1, caps=""),
        lambda head: np.array(head.positions, float),
        2,
        1,
    ),
]
SCORED = pytest.mark.parametrize("case", CASES, ids=lambda case: case.cache)


def make_layer(cache: str, **arguments: object) -> CachedMultiHeadAttention:
    policy, _, codec = cache.partition("+")
    whole = conformance.CacheCase(policy, None, 0, 0, BUDGET + INTERVAL, bounded=True)
    layer = conformance.make_layer(whole, codec or "float32")
    if not arguments:
        return layer
    twin = CachedMultiHeadAttention.from_config({**layer.get_config(), **arguments})
    twin.build((None, None, conformance.HIDDEN))
    twin.set_weights(layer.get_weights())
    return twin


def expected_of(layer, case: EvictionCase, x: np.ndarray, cuts, codec="float32", budgets=None):
    names = ("query", "key", "value", "output")
    weights = dict(zip(names, layer.get_weights(), strict=True))
    return papers.session(
        x,
        weights,
        cuts,
        case.score,
        budgets or [BUDGET] * conformance.KV_HEADS,
        INTERVAL,
        case.sinks,
        case.recent,
        conformance.BASE,
        codec,
        case.highest,
        case.together,
    )


@SCORED
@pytest.mark.parametrize(
    "cuts", [[1] * LENGTH, [4] * 7 + [2], [3, 1, 4, 4, 1, 2, 4, 4, 3, 4]], ids=str
)
def test_what_is_kept_and_what_is_answered_are_the_papers(case: EvictionCase, cuts: list[int]):
    layer = make_layer(case.cache)
    x = conformance.make_input(LENGTH, batch=2)
    actual, state = conformance.run(layer, x, cuts)
    for row in range(len(x)):
        output, kept = expected_of(layer, case, x[row], cuts)
        held = layer.store.view(state).positions.numpy()[row]
        for head in range(conformance.KV_HEADS):
            assert held[head][held[head] >= 0].tolist() == kept[head]
        # float32 sums of 24 and 8 terms against float64.
        np.testing.assert_allclose(actual[row], output, atol=4e-6)
    assert state["filled"].numpy().tolist() == [LENGTH] * 2
    assert state["dropped"].numpy().tolist() == [0, 0]


@SCORED
def test_eager_graph_and_xla_agree(case: EvictionCase):
    conformance.check_modes_agree(make_layer(case.cache), conformance.between_cuts("float32"))


@pytest.mark.parametrize("codec", ["int8", "bfloat16", "k8v4(recent=0,sinks=0)"])
@pytest.mark.parametrize("name", ["key_diff", "recent_tokens", "snapkv"])
def test_any_codec_writes_what_stays(name: str, codec: str):
    case = next(one for one in CASES if one.cache.startswith(name + "("))
    layer = make_layer(f"{case.cache}+{codec}")
    x = conformance.make_input(LENGTH, batch=1)
    cuts = [4] * 7 + [2]
    output, kept = expected_of(layer, case, x[0], cuts, codec.partition("(")[0])
    actual, state = conformance.run(layer, x, cuts)
    held = layer.store.view(state).positions.numpy()[0]
    assert [row[row >= 0].tolist() for row in held] == kept
    key = {"k8v4(recent=0,sinks=0)": "k8v4(recent=5,sinks=2)"}.get(codec, codec)
    np.testing.assert_allclose(actual[0], output, atol=conformance.TOLERANCE[key])


def test_exact_tokens_of_a_codec_are_seen_whether_or_not_they_were_evicted():
    x = conformance.make_input(LENGTH, batch=1)
    evicting = make_layer(of("recent_tokens", sinks=2) + "+k8v4(recent=16,sinks=2)")
    # All that is stored beside them is younger than 16, or a sink.
    window = make_layer("sliding_window(window=16,sinks=2)")
    actual, expected = (conformance.run(layer, x, [1] * LENGTH)[0] for layer in (evicting, window))
    np.testing.assert_allclose(actual, expected, atol=4e-6)


@pytest.mark.parametrize(
    "tokens", [BUDGET + INTERVAL - 1, BUDGET + INTERVAL, BUDGET + INTERVAL + 1]
)
def test_nothing_goes_before_the_room_is_full(tokens: int):
    layer = make_layer(of("knorm", sinks=1, recent=2))
    _, state = conformance.run(layer, conformance.make_input(tokens), [1] * tokens)
    held = (layer.store.view(state).positions.numpy() >= 0).sum(-1)
    full = tokens > BUDGET + INTERVAL
    assert (held == (BUDGET + 1 if full else tokens)).all()
    assert (state["evicted"].numpy() == (tokens - 1 if full else 0)).all()


def test_a_prompt_kept_whole_is_judged_once_it_was_read():
    layer = make_layer(f"snapkv(budget={BUDGET},window=3,interval={INTERVAL})")
    x = conformance.make_input(conformance.CAPACITY)
    _, state = conformance.run(layer, x[:, :18], [6, 6, 6])
    assert (state["evicted"].numpy() == 0).all()
    _, state = layer(tf.constant(x[:, 18:19]), state=state)
    assert (state["evicted"].numpy() == 18).all()
    held = (layer.store.view(state).positions.numpy() >= 0).sum(-1)
    assert (held == BUDGET + 1).all()


def test_evict_goes_back_to_the_budget_and_leaves_short_rows_alone():
    layer = make_layer(of("knorm", sinks=1, recent=2))
    x = conformance.make_input(11)
    mask = np.array([[True] * 11, [True] * BUDGET + [False] * 3, [True] * 3 + [False] * 8])
    pieces = [slice(0, 4), slice(4, 8), slice(8, 11)]
    state = layer.init_state(3)
    for piece in pieces:
        _, state = layer(tf.constant(x[:, piece]), state=state, mask=mask[:, piece])
    after = layer.evict(state)
    held = (layer.store.view(after).positions.numpy() >= 0).sum(-1)
    assert held.tolist() == [[BUDGET] * 2, [BUDGET] * 2, [3] * 2]
    assert after["evicted"].numpy().tolist() == [11, 0, 0]


def test_tokens_since_the_last_eviction_can_be_taken_back_and_no_others():
    layer = make_layer(of("snapkv", sinks=1, window=3))
    x, other = conformance.make_input(16), conformance.make_input(16)[:, ::-1].copy()
    straight, _ = conformance.run(layer, x, [1] * 16)
    _, state = conformance.run(layer, x, [1] * 13)  # evicted at 12
    _, state = layer(tf.constant(other[:, :2]), state=state)
    positions = np.broadcast_to(np.arange(13, 15, dtype=np.int32), [3, 2])
    again, state = layer(tf.constant(x[:, 13:15]), positions=positions, state=state)
    np.testing.assert_allclose(again.numpy(), straight[:, 13:15], atol=4e-6)
    with pytest.raises(CacheError, match="must continue each session"):
        layer(tf.constant(x[:, :1]), positions=np.full([3, 1], 11, np.int32), state=state)


def test_taking_back_needs_no_room_of_its_own():
    """Replayed chunks once evicted what they were measured on."""
    layer = make_layer(f"kvzip(budget={BUDGET},recent=2,sinks=1,interval={INTERVAL})")
    x = conformance.make_input(conformance.CAPACITY)
    _, state = conformance.run(layer, x[:, :14], [14])
    for _ in range(3):
        positions = np.broadcast_to(np.arange(14, 20, dtype=np.int32), [3, 6])
        _, state = layer(tf.constant(x[:, 14:]), positions=positions, state=state)
    assert (state["evicted"].numpy() == 0).all()
    assert (state["filled"].numpy() == 20).all()


@pytest.mark.parametrize("name", ["key_diff", "h2o"])
def test_what_is_taken_back_is_not_judged_when_its_successor_needs_room(name: str):
    layer = make_layer(of(name, sinks=1, recent=2))
    x, other = conformance.make_input(24), conformance.make_input(24)[:, ::-1].copy()
    _, before = conformance.run(layer, x[:, :11], [1] * 11)
    expected, straight = layer(tf.constant(x[:, 11:15]), state=before)  # evicts at 11
    _, state = layer(tf.constant(other[:, :1]), state=before)
    assert (state["evicted"].numpy() == 0).all() and (state["filled"].numpy() == 12).all()
    positions = np.broadcast_to(np.arange(11, 15, dtype=np.int32), [3, 4])
    actual, state = layer(tf.constant(x[:, 11:15]), positions=positions, state=state)
    assert (state["evicted"].numpy() == 11).all() and (state["filled"].numpy() == 15).all()
    kept, wanted = (layer.store.view(one).positions.numpy() for one in (state, straight))
    if name == "key_diff":  # h2o counts what a token that was taken back looked at
        np.testing.assert_array_equal(kept, wanted)
        np.testing.assert_allclose(actual.numpy(), expected.numpy(), atol=4e-6)
    assert (kept.max(axis=-1) == 14).all() and ((kept >= 0).sum(-1) == (wanted >= 0).sum(-1)).all()


def test_a_row_that_is_full_evicts_alone():
    layer = make_layer(of("key_diff", sinks=1, recent=2))
    x = conformance.make_input(LENGTH, batch=2)
    together = layer.init_state(2)
    lengths = [LENGTH, 10]
    outputs = []
    for t in range(LENGTH):
        mask = np.array([[t < n] for n in lengths])
        output, together = layer(tf.constant(x[:, t : t + 1]), state=together, mask=mask)
        outputs.append(output.numpy())
    joint = np.concatenate(outputs, axis=1)
    for row, n in enumerate(lengths):
        alone, _ = conformance.run(layer, x[row : row + 1, :n], [1] * n)
        np.testing.assert_allclose(joint[row, :n], alone[0], atol=2e-6)


def test_tokens_that_shall_not_be_kept_are_seen_by_their_own_chunk_alone():
    layer = make_layer(of("recent_tokens", sinks=0))
    x = conformance.make_input(6)
    keep = np.array([[True, False, True, True]] * 3)
    _, state = layer(tf.constant(x[:, :4]), state=layer.init_state(3), keep=keep)
    held = layer.store.view(state).positions.numpy()
    assert held[0, 0][held[0, 0] >= 0].tolist() == [0, 2, 3]
    _, state = conformance.run(layer, x[:, 4:], [1, 1], state=state)
    assert (state["filled"].numpy() == 6).all()
    with pytest.raises(CacheError, match="policy that evicts"):
        dense = make_layer("dense")
        dense(tf.constant(x), state=dense.init_state(3), keep=np.ones([3, 6], bool))


@pytest.mark.parametrize("name", ["snapkv", "h2o", "key_diff"])
def test_heads_with_budgets_of_their_own_keep_as_many(name: str):
    case = next(one for one in CASES if one.cache.startswith(name + "("))
    cache = case.cache[:-1] + ",budgets=(6,9))"
    layer = make_layer(cache, capacity=40)
    x = conformance.make_input(LENGTH, batch=2)
    cuts = [4] * 7 + [2]
    actual, state = conformance.run(layer, x, cuts)
    for row in range(2):
        output, kept = expected_of(layer, case, x[row], cuts, budgets=[6, 9])
        for head, (store, _, own) in enumerate(layer.store.parts(state)):
            held = store.view(own).positions.numpy()[row, 0]
            assert held[held >= 0].tolist() == kept[head]
        np.testing.assert_allclose(actual[row], output, atol=4e-6)
    held = sum(x.numpy().nbytes for x in layer.init_state(1).values())
    assert layer.store.bytes_per_session() == held
    for xla in (False, True):
        step = tf.function(lambda x, state: layer(x, state=state), jit_compile=xla)
        np.testing.assert_allclose(conformance.run(layer, x, cuts, step=step)[0], actual, atol=2e-6)


def test_what_one_head_has_evicted_past_is_refused_by_all():
    layer = make_layer(of("snapkv", sinks=1, window=3)[:-1] + ",budgets=(6,9))", capacity=40)
    x = conformance.make_input(20, batch=1)
    _, state = conformance.run(layer, x[:, :14], [1] * 14)
    last = sorted(int(own["evicted"][0]) for _, _, own in layer.store.parts(state))
    assert 0 <= last[0] < last[1] < 14
    before = {name: value.numpy() for name, value in state.items()}
    step = tf.function(lambda x, at, state: layer(x, positions=at, state=state)[1])
    for width in (2, 9):  # one piece, and several
        at = tf.range(last[1] - 1, last[1] - 1 + width)[tf.newaxis]
        after = step(tf.constant(x[:, :width]), at, state)
        assert after["dropped"].numpy().tolist() == [width]
        for name in set(before) - {"dropped"}:
            np.testing.assert_array_equal(after[name].numpy(), before[name], err_msg=name)


@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_states_move_and_models_come_back(name: str, tmp_path: pathlib.Path):
    case = next(one for one in CASES if one.cache.startswith(name + "("))
    layer = make_layer(case.cache)
    whole = conformance.CacheCase(case.cache, None, 0, 0, BUDGET + INTERVAL, bounded=True)
    conformance.check_spec(layer, whole)
    room = conformance.between_cuts("float32")
    conformance.check_reorder(layer, room)
    conformance.check_round_trips(layer, tmp_path, room)


def test_every_policy_that_evicts_has_its_paper_here():
    named = {one.cache.partition("(")[0] for one in CASES}
    evicting = {name for name, policy in POLICIES.items() if issubclass(policy, EvictingPolicy)}
    assert named == evicting - {"random_eviction"}


def test_random_eviction_keeps_what_is_guarded_and_does_not_favour_a_place():
    layer = make_layer("random_eviction(budget=64,recent=8,sinks=4,interval=192)", capacity=300)
    _, state = conformance.run(layer, conformance.make_input(256, batch=1), [64] * 4)
    held = layer.store.view(layer.evict(state)).positions.numpy()[0]
    for row in held:
        kept = row[row >= 0]
        assert len(kept) == 64 and set(range(4)) | set(range(248, 256)) <= set(kept.tolist())
        # 52 of 244 at random: the mean is 126, its standard deviation below 10.
        assert 96 < kept[4:-8].mean() < 156
    assert held[0].tolist() != held[1].tolist()


@pytest.mark.parametrize(("budget", "layers"), [(512, 30), (100, 7), (300, 2), (64, 1)])
def test_pyramid_budgets_fall_evenly_and_add_up_to_the_entry(budget: int, layers: int):
    policy = PyramidKV(budget=budget, sinks=0)
    budgets = policy.budgets_of(layers)
    assert sum(budgets) == budget * layers
    assert budgets == sorted(budgets, reverse=True)
    if layers > 1:
        # min = (C − w) // β beyond the window, up to what rounding moved.
        assert abs(budgets[-1] - 8 - (budget - 8) // 20) <= 1


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ("snapkv(budget=0)", "`budget` must be at least 1"),
        ("snapkv(budget=16,window=32)", "what is never evicted"),
        ("snapkv(kernel_size=4)", "must be odd"),
        ("snapkv(pooling='sum')", "mean or max"),
        ("tova(budgets=(40,50))", "same tokens in all heads"),
        ("pyramid_kv(budget=40,sinks=4)", "leave the last layer its 4 sinks"),
        ("ada_kv", "`caps` names a table of a calibration"),
        ("duo_attention(share=2,caps='')", "`share` must be from 0 to 1"),
        ("snapkv(budgets=(600,600,600))", "one number for each of 2 KV heads"),
    ],
)
def test_what_cannot_work_is_refused(cache: str, message: str):
    with pytest.raises(ConfigError, match=message):
        CachedMultiHeadAttention(4, 8, 2, cache=cache)
