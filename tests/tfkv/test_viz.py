"""Pictures show the data that they were given."""

from __future__ import annotations

import base64
import re
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from tfkv import viz
from tfkv.errors import ConfigError

LAYERS, HEADS, TOKENS = 3, 4, 8
WORDS = ["The", " cat", " costs", " $5", " to", " $7", ".\n", " Cheap"]


@pytest.fixture
def weights():
    """Causal, rows summing to 1; float32 ``[L, N, T, T]``."""
    scores = np.random.default_rng(0).normal(size=(LAYERS, HEADS, TOKENS, TOKENS))
    seen = np.tril(np.exp(scores))
    return (seen / seen.sum(axis=-1, keepdims=True)).astype(np.float32)


def drawn(figure):
    """Draws it, which is when a label that cannot be drawn shows; gives its first axes."""
    figure.canvas.draw()
    return figure.axes[0]


def image_of(axes):
    (image,) = axes.images
    return np.asarray(image.get_array())


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def lines_of(axes):
    return {line.get_label(): line.get_xydata() for line in axes.lines}


# Attention


def test_attention_map_shows_the_weights_and_the_tokens(weights):
    axes = drawn(viz.attention_map(weights[1, 2], WORDS, title="layer 1"))
    np.testing.assert_array_equal(image_of(axes), weights[1, 2])
    assert axes.get_title() == "layer 1"
    shown = ["The", "·cat", "·costs", "·$5", "·to", "·$7", ".↵", "·Cheap"]
    assert labels(axes.xaxis) == labels(axes.yaxis) == shown


def test_attention_map_of_the_last_tokens_names_these(weights):
    axes = drawn(viz.attention_map(weights[0, 0, -2:], WORDS))
    assert labels(axes.yaxis) == [".↵", "·Cheap"]
    assert image_of(axes).shape == (2, TOKENS)


def test_attention_grid_has_a_panel_for_each_layer_and_head(weights):
    figure = viz.attention_grid(weights, layers=[2, 0], heads=[1, 3])
    drawn(figure)
    panels = [axes for axes in figure.axes if axes.images]
    for axes, (layer, head) in zip(panels, [(2, 1), (2, 3), (0, 1), (0, 3)], strict=True):
        np.testing.assert_array_equal(image_of(axes), weights[layer, head])
    assert [axes.get_ylabel() for axes in panels] == ["layer 2", "", "layer 0", ""]
    assert [axes.get_title() for axes in panels[:2]] == ["head 1", "head 3"]


def test_attention_grid_spreads_the_layers_that_it_shows():
    many = np.full((30, 2, 1, 1), 1.0)
    figure = viz.attention_grid(many)
    names = [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel().startswith("layer")]
    assert names == [f"layer {layer}" for layer in (0, 6, 12, 17, 23, 29)]


def test_one_panel_is_a_grid_too(weights):
    drawn(viz.attention_grid(weights, layers=[0], heads=[0]))


def test_share_of_sinks_leaves_out_queries_that_have_no_choice(weights):
    found = viz.sink_share(weights, sinks=2)
    expected = weights[:, :, 2:, :2].sum(axis=-1).mean(axis=-1)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_share_of_sinks_of_a_text_that_was_cut(weights):
    last = weights[:, :, -3:]
    expected = last[..., :2].sum(axis=-1).mean(axis=-1)
    np.testing.assert_allclose(viz.sink_share(last, sinks=2), expected, atol=1e-6)


def test_sinks_by_layer_shows_heads_and_means(weights):
    axes = drawn(viz.sinks_by_layer(weights))
    shares = 100 * viz.sink_share(weights)
    points = axes.collections[0].get_offsets()
    np.testing.assert_allclose(points[:, 1], shares.ravel())
    np.testing.assert_array_equal(points[:, 0], np.repeat(range(LAYERS), HEADS))
    np.testing.assert_allclose(lines_of(axes)["mean of the layer"][:, 1], shares.mean(axis=1))
    assert axes.get_ylabel() == "attention paid to the first token (%)"


def test_entropy_of_even_attention_counts_the_tokens():
    even = np.full((1, 1, 2, 8), 1 / 8)
    one = np.eye(8)[np.newaxis, np.newaxis]
    assert viz.attention_entropy(even)[0, 0] == pytest.approx(3.0)
    assert viz.attention_entropy(one)[0, 0] == 0.0


def test_entropy_by_layer_shows_how_far_from_even_it_is(weights):
    axes = drawn(viz.entropy_by_layer(weights))
    even = np.log2(np.arange(1, TOKENS + 1)).mean()
    assert lines_of(axes)["attends to all alike"][0, 1] == pytest.approx(even)
    points = axes.collections[0].get_offsets()[:, 1]
    np.testing.assert_allclose(points, viz.attention_entropy(weights).ravel())
    assert points.max() < even


def test_page_carries_all_weights_and_the_text(weights):
    page = viz.attention_page(weights, [*WORDS[:-1], "<b>"])
    codes = base64.b64decode(re.search(r'atob\("([^"]+)"\)', page.text).group(1))
    found = np.frombuffer(codes, np.uint8).reshape(weights.shape) / 255
    np.testing.assert_allclose(found, weights, atol=0.5 / 255 + 1e-6)
    spans = re.findall(r"<span>(.*?)</span>", page.text, re.DOTALL)
    assert spans == [*WORDS[:-1], "&lt;b&gt;"]
    assert 'max="2"' in page.text and page.text.count("<option") == 1 + HEADS


def test_page_is_as_high_as_its_text(weights):
    short = viz.attention_page(weights, WORDS)
    long = viz.attention_page(weights, ["word " * 50 + "\n"] * TOKENS)
    assert 100 < short.height < 250 < long.height


def test_page_needs_nothing_from_elsewhere(weights):
    assert not re.search(r"(src|href)=|https?:|import ", viz.attention_page(weights, WORDS).text)


# Retention


def test_kept_tokens_are_those_whose_positions_are_there():
    first = np.array([[[9, 9, 9], [9, 9, 9]], [[0, 2, -1], [1, -1, -1]]])
    second = np.array([[[9], [9]], [[3], [-1]]])
    kept = viz.kept_tokens([first, second], tokens=4, row=1)
    assert kept.astype(int).tolist() == [[[1, 0, 1, 0], [0, 1, 0, 0]], [[0, 0, 0, 1], [0, 0, 0, 0]]]
    with pytest.raises(ConfigError, match="position 3"):
        viz.kept_tokens([first, second], tokens=3, row=1)


def test_retention_map_shows_the_share_of_heads():
    kept = np.zeros((2, 4, 3), bool)
    kept[0, :, 0] = kept[1, :2, 1] = True
    axes = drawn(viz.retention_map(kept, WORDS[:3]))
    assert image_of(axes).tolist() == [[100, 0, 0], [0, 50, 0]]
    assert labels(axes.xaxis) == ["The", "·cat", "·costs"]


def colour(share):
    return to_hex(matplotlib.colormaps["cividis"](share))


def test_text_has_a_span_for_each_token_in_its_colour():
    shares = np.linspace(0, 1, TOKENS)
    text = viz.coloured_text(WORDS, shares, title="a & b").text
    spans = re.findall(r'<span style="background: (#\w+); color: (#\w+)" title="([^"]+)">(.*?)<',
                       text, re.DOTALL)  # fmt: skip
    assert [span[3] for span in spans] == WORDS
    assert [span[0] for span in spans] == [colour(share) for share in shares]
    assert spans[0][1] == "#ffffff" and spans[-1][1] == "#000000", "letters can be read"
    assert spans[-1][2] == "token 7: kept by 100 % of layers and heads"
    assert "a &amp; b" in text
    scale = re.findall(r'<b style="background: (#\w+);[^>]*>(\d+) %', text)
    assert scale == [(colour(share / 100), str(share)) for share in (0, 25, 50, 75, 100)]


def test_drawn_text_has_a_box_for_each_token_in_its_colour():
    shares = np.linspace(0, 1, TOKENS)
    axes = drawn(viz.coloured_text_figure(WORDS, shares))
    boxes = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [to_hex(box.get_facecolor()) for box in boxes] == [colour(share) for share in shares]
    assert [box.get_y() for box in boxes] == [0] * 7 + [1], "a line ends where the text's does"
    assert [text.get_text() for text in axes.texts][3] == "·$5"


def test_drawn_text_is_wrapped():
    axes = drawn(viz.coloured_text_figure([" word"] * 60, np.ones(60)))
    assert {box.get_y() for box in axes.patches} == {0, 1, 2}
    assert max(box.get_x() + box.get_width() for box in axes.patches) <= axes.get_xlim()[1]


# Curves


def test_quality_curve_tells_what_is_on_the_front():
    points = [
        viz.QualityPoint("small", 10, 1e-2),
        viz.QualityPoint("worse", 20, 2e-2, (1e-2, 3e-2)),
        viz.QualityPoint("large", 30, 1e-3),
        viz.QualityPoint("exact", 40, 0.0),
    ]
    axes = drawn(viz.quality_curve(points))
    places = {text.get_text(): tuple(text.xy) for text in axes.texts}
    assert places == {"small": (10, 1e-2), "worse": (20, 2e-2), "large": (30, 1e-3)}
    markers = [line.get_marker() for line in axes.lines if line.get_marker() in "ox"]
    assert markers == ["o", "x", "o"]
    assert axes.get_xlabel() == "bytes a token; losing nothing: exact at 40"


def test_names_of_points_that_are_near_do_not_overlap():
    points = [viz.QualityPoint(f"cache {at}", 10, 0.1 + at / 1000) for at in range(6)]
    axes = drawn(viz.quality_curve([*points, viz.QualityPoint("far", 40, 1e-4)]))
    boxes = [text.get_window_extent() for text in axes.texts]
    overlapping = [(a, b) for at, a in enumerate(boxes) for b in boxes[:at] if a.overlaps(b)]
    assert overlapping == []


def test_memory_curve_has_a_line_for_each_cache():
    axes = drawn(viz.memory_curve([0, 10, 20], {"a": [0, 1e6, 2e6], "b": [0, 5e5, 5e5]}))
    lines = lines_of(axes)
    assert lines["a"].tolist() == [[0, 0], [10, 1], [20, 2]]
    assert lines["b"].tolist() == [[0, 0], [10, 0.5], [20, 0.5]]


def test_more_caches_than_colours_are_told_apart_by_their_lines():
    sizes = {f"cache {index}": [1, 2] for index in range(9)}
    axes = drawn(viz.memory_curve([1, 2], sizes))
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 9


def test_learning_curve_shows_steps_their_mean_and_held_out_text():
    axes = drawn(viz.learning_curve(np.arange(40.0, 0, -1), held_out=(41.0, 2.0)))
    lines = lines_of(axes)
    assert lines["a step"][0].tolist() == [1, 40]
    assert lines["mean of 2"][0].tolist() == [2, 39.5]
    assert lines["held out, before and after"].tolist() == [[0, 41], [40, 2]]


# Calls


def test_timeline_notes_blocks_in_their_order_and_those_that_fail():
    timeline = viz.Timeline()
    with timeline.span("A", "prompt"):
        pass
    with pytest.raises(KeyError), timeline.span("B", "decode"):
        raise KeyError
    first, second = timeline.spans
    assert (first.row, first.kind, second.row) == ("A", "prompt", "B")
    assert 0 <= first.start <= first.end <= second.start <= second.end


def test_session_timeline_has_a_line_for_each_row_and_a_colour_for_each_kind():
    spans = [viz.Span("A", "x", 0, 1), viz.Span("B", "y", 1, 3), viz.Span("A", "y", 3, 3)]
    axes = drawn(viz.session_timeline(spans))
    assert labels(axes.yaxis) == ["A", "B"]
    bars = [(bar.get_x(), bar.get_width(), bar.get_y()) for bar in axes.patches]
    assert bars[:2] == [(0, 1, -0.3), (1, 2, 0.7)]
    assert bars[2][1] > 0, "what took no time is still to be seen"
    colours = [bar.get_facecolor() for bar in axes.patches]
    assert colours[0] != colours[1] == colours[2]


def test_more_kinds_than_colours_are_told_apart_by_their_patterns():
    spans = [viz.Span("A", f"kind {index}", index, index + 1) for index in range(20)]
    axes = drawn(viz.session_timeline(spans))
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in axes.patches}) == 20


def test_tokens_by_call_are_stacked():
    axes = drawn(
        viz.tokens_by_call([viz.CallTokens("first", 0, 5, 2), viz.CallTokens("2", 7, 3, 0)])
    )
    bars = [(bar.get_y() + 0.3, bar.get_x(), bar.get_width()) for bar in axes.patches]
    assert bars == [(0, 0, 5), (0, 5, 2), (1, 0, 7), (1, 7, 3)]
    assert [text.get_text() for text in axes.texts] == ["5", "2", "7", "3"]


# Errors, and what all have in common


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: viz.attention_map(np.ones((2, 2, 2))), r"axes \[T, S\]"),
        (lambda: viz.attention_map(np.ones((3, 2))), "as many columns as rows"),
        (lambda: viz.attention_map(np.ones((2, 2)), ["a"]), "each of 2 tokens"),
        (lambda: viz.attention_map(np.full((2, 2), np.nan)), "finite"),
        (lambda: viz.attention_grid(np.ones((1, 2, 2))), r"axes \[L, N, T, S\]"),
        (lambda: viz.attention_grid(np.ones((1, 1, 2, 2)), layers=[1]), "`layers`"),
        (lambda: viz.attention_grid(np.ones((1, 1, 2, 2)), heads=[]), "`heads`"),
        (lambda: viz.sink_share(np.ones((1, 1, 2, 2)), sinks=2), "from 1 to 1"),
        (lambda: viz.sinks_by_layer(np.ones((1, 1, 2, 2)), sinks=0), "`sinks`"),
        (lambda: viz.attention_entropy(np.ones(3)), "`weights`"),
        (lambda: viz.attention_page(np.ones((1, 1, 1, 2)), ["a", "b"]), "square"),
        (lambda: viz.attention_page(np.ones((1, 1, 2, 2)), ["a"]), "each of 2 tokens"),
        (lambda: viz.retention_map(np.ones((2, 2))), r"axes \[L, K, S\]"),
        (lambda: viz.coloured_text(["a"], [0.5, 0.5]), "each of 2 tokens"),
        (lambda: viz.coloured_text_figure(["a"], [1.5]), "from 0 to 1"),
        (lambda: viz.quality_curve([viz.QualityPoint("a", 1, 0)]), "loses something"),
        (lambda: viz.memory_curve([1, 2], {"a": [1]}), "each of 2 lengths"),
        (lambda: viz.memory_curve([], {}), "`sizes`"),
        (lambda: viz.learning_curve([]), "`losses`"),
        (lambda: viz.session_timeline([viz.Span("A", "x", 2, 1)]), "before it begins"),
        (lambda: viz.tokens_by_call([viz.CallTokens("a", 0, -1, 0)]), "negative"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, words):
    with pytest.raises(ConfigError, match=words):
        draw()


def test_a_page_is_shown_in_a_frame_and_a_fragment_as_it_is(tmp_path):
    page = viz.Html('<p class="a">', height=100)
    assert 'srcdoc="&lt;p class=&quot;a&quot;&gt;"' in page._repr_html_()
    assert viz.Html("<p>")._repr_html_() == "<p>"
    page.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == page.text


def test_no_figure_is_kept_by_pyplot():
    code = (
        "import sys; from tfkv import viz; viz.attention_map([[1.0]]); viz.learning_curve([1.0]);"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
