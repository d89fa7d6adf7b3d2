"""Layouts of the kernels: adding and removing one gives the same arrays as packing all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cdc.pgoutput.kernel_arrays import TupleLayout, pack_layouts, with_layout, without_layout


@st.composite
def layouts(draw: st.DrawFn) -> TupleLayout:
    """Of a few OIDs, so that one is often replaced by another width and key."""
    width = draw(st.integers(0, 4))
    key = draw(st.permutations(range(width)))[: draw(st.integers(0, width))]
    oid = draw(st.integers(1, 6))
    return TupleLayout(oid, draw(st.integers(-1, 9)), f"t{oid}", tuple(range(1, width + 1)), tuple(key))


@given(st.lists(st.tuples(layouts(), st.booleans(), st.integers(0, 9)), max_size=12))
def test_layouts_put_in_and_taken_out_are_those_packed_at_once(steps):
    packed, held = pack_layouts([]), dict[int, tuple[TupleLayout, int]]()
    for layout, taken_out, topic in steps:
        if taken_out:
            packed = without_layout(packed, layout.oid)
            held.pop(layout.oid, None)
        else:
            packed = with_layout(packed, layout, topic)
            held[layout.oid] = layout, topic
        expected = pack_layouts(list(held.values()))
        assert [array.tolist() for array in packed] == [array.tolist() for array in expected]
        assert [array.dtype for array in packed] == [array.dtype for array in expected]
