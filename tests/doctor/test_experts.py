"""Expert sizes: shares of slots and bytes of experts as stored."""

from hypothesis import given
from hypothesis import strategies as st

from strata.doctor.experts import ExpertSizes
from strata.gguf.model_facts import ExpertClass


@st.composite
def sizes(draw: st.DrawFn) -> ExpertSizes:
    per_layer = draw(st.integers(1, 64))
    classes = [
        ExpertClass(
            layers=tuple(range(draw(st.integers(1, 40)))),
            experts_per_layer=per_layer,
            elements=1,
            bytes=draw(st.integers(1, 1 << 24)),
            types=("a", "b", "c"),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]
    ordered = sorted(classes, key=lambda c: -c.bytes)
    counted = tuple((len(c.layers) * per_layer, c.bytes) for c in ordered)
    return ExpertSizes(tuple(ordered), sum(n for n, _ in counted), counted)


@given(sizes(), st.data())
def test_every_slot_goes_to_one_class_and_one_more_takes_none_away(experts, data):
    least = data.draw(st.integers(0, min(len(c.layers) * c.experts_per_layer for c in experts.classes)))
    slots = data.draw(st.integers(least * len(experts.classes), experts.total))
    shares = experts.spread(slots, least)
    assert sum(shares) == slots
    assert all(
        least <= share <= len(c.layers) * c.experts_per_layer for share, c in zip(shares, experts.classes, strict=True)
    )
    if slots < experts.total:
        assert all(a <= b for a, b in zip(shares, experts.spread(slots + 1, least), strict=True))


@given(sizes(), st.integers(0, 1 << 34))
def test_what_memory_holds_is_the_inverse_of_what_experts_take(experts, nbytes):
    held = experts.held_in(nbytes)
    assert experts.held_bytes(held) <= nbytes
    assert held == experts.total or experts.held_bytes(held + 1) > nbytes


@given(sizes())
def test_all_experts_take_what_they_take(experts):
    stored = sum(len(c.layers) * c.experts_per_layer * c.bytes for c in experts.classes)
    assert experts.stored_bytes == stored
    assert stored <= experts.held_bytes(experts.total) < stored + 4096
