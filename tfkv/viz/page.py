"""Attention to look around in: a page with the text, a layer and a head to choose."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np

from tfkv.errors import ConfigError
from tfkv.viz.html import Html
from tfkv.viz.style import as_array, check_tokens

#: Pixels of what stands above the text, and of a line of it, of so many characters.
_HEAD, _LINE, _CHARACTERS = 110, 30, 90


def attention_page(weights: Any, tokens: Sequence[str]) -> Html:
    """The text, in which the token under the pointer shows whom it attends to.

    Layer and head are chosen above it, or all heads of a layer together; a click keeps a token.
    The page needs nothing but a browser.

    Args:
        weights: ``[L, N, T, T]``, rows summing to 1.
        tokens: Texts of the T tokens.

    Raises:
        ConfigError: Shapes do not fit.
    """
    array = as_array("weights", weights, "LNTS")
    if array.shape[2] != array.shape[3]:
        raise ConfigError(f"`weights` must be square, [L, N, T, T]. Received: shape={array.shape}.")
    check_tokens(tokens, array.shape[3])
    codes = np.rint(255.0 * np.clip(array, 0.0, 1.0)).astype(np.uint8)
    page = (
        jinja2.Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            layers=array.shape[0],
            heads=array.shape[1],
            tokens=list(tokens),
            codes=base64.b64encode(codes.tobytes()).decode("ascii"),
        )
    )
    lines = sum(1 + len(line) // _CHARACTERS for line in "".join(tokens).split("\n"))
    return Html(page, _HEAD + _LINE * lines)


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Attention</title>
<style>
 body { font: 15px/1.9 system-ui, sans-serif; margin: .5rem; color: #222; background: #fff }
 #text { white-space: pre-wrap } #text span { border-radius: 3px; padding: 2px 0; cursor: pointer }
 #text span.asking { outline: 2px solid #d55e00 } label { margin-right: 1rem }
 #said { color: #555; min-height: 1.9em }
</style>
<label>layer <input id="layer" type="range" min="0" max="{{ layers - 1 }}" value="0">
<output id="at">0</output></label>
<label>head <select id="head"><option value="-1">all, mean</option>
{% for head in range(heads) %}<option>{{ head }}</option>{% endfor %}</select></label>
<div id="said">Point at a token: the bluer another one, the more of its attention that gets.</div>
<div id="text">{% for token in tokens %}<span>{{ token }}</span>{% endfor %}</div>
<script>
const heads = {{ heads }}, count = {{ tokens | length }};
const codes = Uint8Array.from(atob("{{ codes }}"), c => c.charCodeAt(0));
const spans = [...document.querySelectorAll("#text span")];
const layer = document.getElementById("layer"), head = document.getElementById("head");
let asking = count - 1, kept = false;
function weight(of, at) {
  const first = layer.value * heads, one = +head.value;
  const code = n => codes[((first + n) * count + of) * count + at];
  if (one >= 0) return code(one) / 255;
  let sum = 0;
  for (let n = 0; n < heads; n++) sum += code(n);
  return sum / heads / 255;
}
function draw() {
  document.getElementById("at").textContent = layer.value;
  spans.forEach((span, at) => {
    const share = weight(asking, at);
    // The square root lets small weights be seen, as in the other pictures.
    span.style.background = `rgba(0, 114, 178, ${Math.sqrt(share) * .85})`;
    span.style.color = share > .35 ? "#fff" : "";
    span.classList.toggle("asking", at === asking);
    span.title = `token ${at}: ${(100 * share).toFixed(1)} %`;
  });
  const best = [...spans.keys()].sort((a, b) => weight(asking, b) - weight(asking, a)).slice(0, 3);
  document.getElementById("said").textContent = `Token ${asking} attends most to ` + best.map(
    at => `${JSON.stringify(spans[at].textContent)} (${(100 * weight(asking, at)).toFixed(0)} %)`
  ).join(", ") + (kept ? "; click it again to let go." : ".");
}
spans.forEach((span, at) => {
  span.onmouseenter = () => { if (!kept) { asking = at; draw(); } };
  span.onclick = () => { kept = !(kept && asking === at); asking = at; draw(); };
});
layer.oninput = head.onchange = draw;
draw();
</script>
</html>
"""
