from __future__ import annotations

import pytest

from benchmarks.hlo import fusions_a_layer, instructions, large_copies, reshaped_operands

HLO = """\
HloModule a_module, entry_computation_layout={(f32[2,64,8]{2,1,0})->f32[64,2,8]{2,1,0}}

%fused_moving (param_0: f32[2,64,8]) -> f32[64,2,8] {
  %param_0 = f32[2,64,8]{2,1,0} parameter(0)
  %transpose.1 = f32[64,2,8]{1,0,2} transpose(%param_0), dimensions={1,0,2}
  ROOT %copy.1 = f32[64,2,8]{2,1,0} copy(%transpose.1)
}

%fused_reading (param_0.1: f32[2,64,8]) -> f32[8] {
  %param_0.1 = f32[2,64,8]{2,1,0} parameter(0)
  %transpose.2 = f32[64,2,8]{2,1,0} transpose(%param_0.1), dimensions={1,0,2}
  ROOT %reduce.1 = f32[8]{0} reduce(%transpose.2), dimensions={0,1}
}

%body (arg: (s32[], f32[2,64,8])) -> (s32[], f32[2,64,8]) {
  %arg = (s32[], f32[2,64,8]{2,1,0}) parameter(0)
  %get-tuple-element.1 = f32[2,64,8]{2,1,0} get-tuple-element(%arg), index=1
  %copy.2 = f32[2,64,8]{2,1,0} copy(%get-tuple-element.1)
  %copy.3 = s32[] copy(%counter)
  %copy.4 = f32[500,8]{1,0} copy(%logits)
  ROOT %tuple.1 = (s32[], f32[2,64,8]{2,1,0}) tuple(%copy.3, %copy.2)
}

ENTRY %main.1 (p: f32[2,64,8]) -> f32[64,2,8] {
  %p = f32[2,64,8]{2,1,0} parameter(0)
  %reading = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused_reading
  ROOT %moving = f32[64,2,8]{2,1,0} fusion(%p), kind=kLoop, calls=%fused_moving
}
"""


def test_copies_that_are_run_are_found_and_no_others() -> None:
    found = large_copies(HLO, 1024)
    assert [(item.name, item.op, item.computation) for item in found] == [
        ("copy.2", "copy", "body"),
        ("copy.4", "copy", "body"),
        ("moving", "fusion", "main.1"),
    ]


def test_smaller_ones_and_foreign_axes_do_not_count() -> None:
    assert [item.name for item in large_copies(HLO, 1025)] == ["copy.4"]
    assert large_copies(HLO, 1025, frozenset({500})) == []
    assert "copy.3" in [item.name for item in large_copies(HLO, 1)]


def test_instructions_know_dtype_and_shape() -> None:
    by_name = {item.name: item for item in instructions(HLO)}
    assert by_name["copy.2"].shape == (2, 64, 8)
    assert by_name["copy.3"].shape == ()
    assert (by_name["copy.3"].dtype, by_name["copy.3"].elements) == ("s32", 1)
    assert "tuple.1" not in by_name


PRODUCTS = """\
%reshaped (param_0.1: f32[4,8,8], param_1.1: f32[1,2,4]) -> f32[8] {
  %param_1.1 = f32[1,2,4]{2,1,0} parameter(1)
  %bitcast.1 = f32[8]{0} bitcast(%param_1.1), metadata={op_name="x"}
  %param_0.1 = f32[4,8,8]{2,1,0} parameter(0)
  %slice.1 = f32[1,8,8]{2,1,0} dynamic-slice(%param_0.1, %c, %c, %c), dynamic_slice_sizes={1,8,8}
  %bitcast.2 = f32[8,8]{1,0} bitcast(%slice.1)
  ROOT %dot.1 = f32[8]{0} dot(%bitcast.1, %bitcast.2), lhs_contracting_dims={0}
}

%flat (param_0.2: f32[8,8], param_1.2: f32[1,1,8]) -> f32[8] {
  %param_1.2 = f32[1,1,8]{2,1,0} parameter(1)
  %bitcast.3 = f32[8]{0} bitcast(%param_1.2)
  %param_0.2 = f32[8,8]{1,0} parameter(0)
  ROOT %dot.2 = f32[8]{0} dot(%bitcast.3, %param_0.2), lhs_contracting_dims={0}
}

ENTRY %main (a: f32[4,8,8], b: f32[8,8], c: f32[1,2,4], d: f32[1,1,8]) -> f32[8] {
  %a = f32[4,8,8]{2,1,0} parameter(0)
  %one = f32[8]{0} fusion(%a, %c), kind=kLoop, calls=%reshaped
  ROOT %two = f32[8]{0} fusion(%b, %d), kind=kLoop, calls=%flat
}
"""


def test_only_a_product_that_reads_through_another_shape_is_found() -> None:
    assert [item.name for item in reshaped_operands(PRODUCTS)] == ["dot.1"]
    assert [item.name for item in reshaped_operands(PRODUCTS, 64)] == ["dot.1"]
    assert reshaped_operands(PRODUCTS, 65) == []


LOOP = """\
%multiplied (param_0: f32[8,4], param_1: f32[4]) -> f32[8] {
  %param_0 = f32[8,4]{1,0} parameter(0)
  %param_1 = f32[4]{0} parameter(1)
  ROOT %dot.1 = f32[8]{0} dot(%param_1, %param_0), lhs_contracting_dims={0}
}

%inner (arg: f32[4]) -> f32[4] {
  %arg = f32[4]{0} parameter(0)
  ROOT %step = f32[4]{0} fusion(%arg), kind=kLoop, calls=%some
}

%outer (arg.1: f32[4]) -> f32[4] {
  %arg.1 = f32[4]{0} parameter(0)
  %wide = f32[8]{0} fusion(%weights, %arg.1), kind=kLoop, calls=%multiplied
  %scan = f32[4]{0} while(%arg.1), condition=%c1, body=%inner
  %narrow = f32[4]{0} dot(%wide, %more), lhs_contracting_dims={0}
  ROOT %normal = f32[4]{0} fusion(%narrow), kind=kLoop, calls=%some
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %before = f32[4]{0} fusion(%p), kind=kLoop, calls=%some
  ROOT %layers = f32[4]{0} while(%before), condition=%c2, body=%outer
}
"""


def test_fusions_of_a_layer_are_those_of_its_own_loop() -> None:
    assert fusions_a_layer(LOOP, 8) == 2
    assert fusions_a_layer(LOOP, 4) == 2


def test_a_loop_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 loops compute a product of 16"):
        fusions_a_layer(LOOP, 16)
