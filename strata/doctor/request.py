"""What was asked for, checked against the model: the part of a plan that no budget may change."""

from __future__ import annotations

from dataclasses import dataclass

from strata.doctor.plan import PlanOptions
from strata.errors import UsageError
from strata.gguf.model_facts import ModelFacts

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Request:
    """Options with their defaults filled in.

    Attributes
    ----------
    context : int
        Tokens. Never shortened by the planner.
    kv : str
        Type of the KV cache.
    chunks : tuple of int
        Prompt chunks the planner may choose from, largest first; one when the person chose.
    slots : int or None
        Exact number of expert slots, or None for what is left.
    threads : int
        That compute on the host.
    notes : tuple of str
        Defaults that were filled in, as sentences.
    """

    context: int
    kv: str
    chunks: tuple[int, ...]
    slots: int | None
    threads: int
    notes: tuple[str, ...] = ()


def minimum_slots(model: ModelFacts, classes: int = 1) -> int:
    """Return the fewest expert slots that work: those of one token, in each size class; prompts then go in waves."""
    return min(model.top_k, model.experts) * classes


def resolve(
    model: ModelFacts,
    options: PlanOptions,
    *,
    kv_types: tuple[str, ...],
    chunks: tuple[int, ...],
    minimum: int,
    threads: int,
) -> Request:
    """Fill in defaults and refuse what cannot be meant.

    Parameters
    ----------
    kv_types : tuple of str
        What the backend's KV cache can be, its default first.
    chunks : tuple of int
        Prompt chunks to choose from, largest first.
    minimum : int
        Fewest expert slots that work.
    threads : int
        That compute on the host.

    Raises
    ------
    UsageError
        An option contradicts the model, the backend or another option.
    """
    notes = []
    if options.max_context is None:
        context = min(model.context_length, DEFAULT_CONTEXT) if model.context_length else DEFAULT_CONTEXT
        if context < model.context_length:
            notes.append(
                f"The context is {context:,} tokens; the model allows {model.context_length:,} (--max-context)."
            )
    else:
        context = options.max_context
        _check_context(context, model)
    kv = options.kv or kv_types[0]
    if kv not in kv_types:
        raise UsageError(
            f"keep the KV cache as {kv} (--kv {kv})",
            f"this backend keeps it as {' or '.join(kv_types)}",
            f"Use --kv {kv_types[0]}",
        )
    return Request(
        context=context,
        kv=kv,
        chunks=_chunks(options.prefill, chunks, context),
        slots=_slots(options.expert_cache, model, minimum),
        threads=threads,
        notes=tuple(notes),
    )


def _check_context(context: int, model: ModelFacts) -> None:
    if context < 1:
        raise UsageError(
            f"plan a context of {context} tokens (--max-context)", "it holds no token", "Give at least --max-context 1"
        )
    if model.context_length and context > model.context_length:
        raise UsageError(
            f"plan a context of {context:,} tokens (--max-context)",
            f"{model.name} was made for at most {model.context_length:,}",
            f"Use --max-context {model.context_length} or less",
        )


def _chunks(prefill: int | None, chunks: tuple[int, ...], context: int) -> tuple[int, ...]:
    if prefill is None:
        return tuple(dict.fromkeys(min(chunk, context) for chunk in chunks))
    if prefill < 1:
        raise UsageError(
            f"read prompts {prefill} tokens at a time (--prefill)", "a chunk holds at least one", "Use --prefill 1"
        )
    if prefill > context:
        raise UsageError(
            f"read prompts {prefill:,} tokens at a time (--prefill)",
            f"the context has only {context:,} tokens",
            f"Use --prefill {context} or less, or a larger --max-context",
        )
    return (prefill,)


def _slots(asked: int | None, model: ModelFacts, minimum: int) -> int | None:
    if asked is None:
        return None
    total = sum(len(c.layers) * c.experts_per_layer for c in model.expert_classes)
    question = f"keep {asked:,} expert slots (--expert-cache)"
    if total == 0:
        raise UsageError(question, f"{model.name} is a dense model without experts", "Leave --expert-cache out")
    if asked > total:
        raise UsageError(question, f"{model.name} has {total:,} experts in all", f"Use --expert-cache {total} or less")
    if asked < minimum:
        raise UsageError(
            question,
            f"one token needs {minimum:,} at once",
            f"Use --expert-cache {minimum} or more",
        )
    return asked
