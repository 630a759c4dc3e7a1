"""What a plan gave up, in words: one sentence for every step down a ladder, and for what no plan can save yet."""

from __future__ import annotations

from strata.doctor.candidates import Backend
from strata.doctor.plan import Reservation, Tier
from strata.doctor.request import Request
from strata.doctor.speed import Placement
from strata.doctor.units import size
from strata.gguf.model_facts import ModelFacts


def given_up(backend: Backend, request: Request, fixed: tuple[Reservation, ...], where: Placement) -> tuple[str, ...]:
    """Return a sentence for everything that a larger memory would have made better."""
    total = backend.experts.total
    sentences = []
    if where.chunk < request.chunks[0]:
        needs_all = where.slots < total and backend.speeds.call_tokens
        why = "larger chunks need a slot for every expert" if needs_all else "larger ones gain less than they take"
        sentences.append(f"Prompts are read {where.chunk} tokens at a time instead of {request.chunks[0]}: {why}.")
    best = backend.host_choices[0]
    if where.embedding is not best.embedding:
        usable = next(b.usable_bytes for b in backend.limits.budgets if b.tier is best.embedding)
        table = next(line for line in fixed if line.id == "embedding").bytes
        why = f"only {size(usable)} of that may be used" if usable else "none of that may be used"
        why = "experts gain more from it" if usable >= table else why
        lies, wished = backend.limits.names[where.embedding], backend.limits.names[best.embedding]
        sentences.append(f"The embedding ({size(table)}) lies in {lies}, not in {wished}: {why}.")
    if where.slots == total:
        return tuple(sentences)
    if where.staging is not best.staging:
        sentences.append("Experts go to their slots through pageable RAM, which is slower than page-locked.")
    whole = size(backend.slot_bytes(total))
    sentences.append(f"{where.slots:,} of {total:,} experts have a slot; all of them would take {whole}.")
    places = (
        (where.pinned, Tier.PINNED),
        (where.pageable, Tier.PAGEABLE),
        (total - where.pinned - where.pageable, Tier.FILE),
    )
    lie = [f"{count:,} in {backend.limits.names[tier]}" for count, tier in places if count]
    sentences.append(f"When missed, experts are read as stored: {', '.join(lie)}.")
    return tuple(sentences)


def about_windows(model: ModelFacts, context: int, chunk: int, kv_bytes: int) -> tuple[str, ...]:
    """Say what a windowed KV cache would save: attention reads a cache with a cell for every position.

    Parameters
    ----------
    model : ModelFacts
    context, chunk : int
        Tokens, and those of the largest call.
    kv_bytes : int
        Of the whole KV cache.
    """
    cells = model.window + chunk
    windowed = sum(model.kv_heads[layer] for layer in model.windowed_layers)
    if not windowed or cells >= context:
        return ()
    saved = round(kv_bytes * windowed / sum(model.kv_heads) * (context - cells) / context)
    return (
        f"Layers that see {model.window:,} tokens only: {len(model.windowed_layers)} of {model.layers}. Their KV cache "
        f"holds all {context:,} like that of the others, since attention cannot read a windowed one yet, which would "
        f"take {size(saved)} less.",
    )
