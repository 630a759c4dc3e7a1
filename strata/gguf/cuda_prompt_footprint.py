"""The device's arrays for prompts of more tokens than the decode kernels take at once, as pure functions of a model."""

from __future__ import annotations

from strata.gguf.footprint import BufferSpec
from strata.gguf.model_facts import ModelFacts

LEAST_TILE_ROWS = 32  # tokens of the smallest tile of an expert's product (`strata.kernels.cuda_layout`)
_GRAIN = 16  # columns that rows of activations are split by
_INPUT_ALIGNMENT = 128


def reads_prompts(model: ModelFacts) -> bool:
    """Return whether the kernels for prompts can run a model: all products are over whole sixteens of columns."""
    columns = (model.embedding, model.heads * model.value_length, *_widths(model))
    return all(each % _GRAIN == 0 for each in columns)


def prompt_rows_at(tokens: int) -> int:
    """Return where the tokens' rows of the embedding start in "prompt.inputs": after position and tokens."""
    return -(-4 * (1 + tokens) // _INPUT_ALIGNMENT) * _INPUT_ALIGNMENT


def prompt_inputs(model: ModelFacts, tokens: int) -> BufferSpec:
    """Position, tokens, and the tokens' rows of the embedding, as stored."""
    row = model.embedding_table.bytes // max(model.vocab, 1)
    return BufferSpec("prompt.inputs", (prompt_rows_at(tokens) + tokens * row,), "u8")


def prompt_counts(model: ModelFacts) -> BufferSpec:
    """How many tokens of a chunk each expert was chosen by."""
    return BufferSpec("prompt.counts", (model.layers, model.experts), "i32")


def prompt_workspace(model: ModelFacts, tokens: int) -> tuple[BufferSpec, ...]:
    """List what a chunk of `tokens` works in.

    Activations that are multiplied lie split into two halves (see ``kernels/cuda/prompt.cu``): as many bytes as in
    float32, a sum for every 16 columns, and a scale for every row. "results" has one row per (token, rank) of experts'
    results, and before that what they compute in between.
    """
    heads, groups, e = model.heads, max(model.kv_heads), model.embedding
    key, value = model.key_length, model.value_length
    pairs = tokens * model.top_k
    rows = [(tokens, e), (tokens, heads * value)]
    rows += [(tokens, width) for width in _widths(model)[:1]]
    rows += [(pairs, model.expert_width)] if model.experts else []
    buffers = [
        prompt_inputs(model, tokens),
        BufferSpec("prompt.x", (tokens, e)),
        BufferSpec("prompt.q", (tokens, heads * key)),
        BufferSpec("prompt.k", (tokens, groups * key)),
        BufferSpec("prompt.v", (tokens, groups * value)),
        BufferSpec("prompt.attended", (tokens, heads * value)),
        BufferSpec("prompt.split", (max(count * columns for count, columns in rows),)),
        BufferSpec("prompt.split_sums", (max(count * _sums(columns) for count, columns in rows),)),
        BufferSpec("prompt.split_scales", (max(count for count, _ in rows),)),
    ]
    between = 2 * tokens * max(_widths(model)[:1], default=0)  # of a feed-forward that all tokens take: gate and up
    if model.experts:
        between = max(between, pairs * max(e, model.expert_width))
        buffers += [
            prompt_counts(model),
            BufferSpec("prompt.hidden", (tokens, e)),
            BufferSpec("prompt.hidden_sums", (tokens * _sums(e),)),
            BufferSpec("prompt.hidden_scales", (tokens,)),
            BufferSpec("prompt.ids", (tokens, model.top_k), "i32"),
            BufferSpec("prompt.weights", (tokens, model.top_k)),
            BufferSpec("prompt.logits", (tokens, model.experts)),
            BufferSpec("prompt.share", (tokens,)),
            BufferSpec("prompt.pairs", (pairs,), "i32"),
            BufferSpec("prompt.firsts", (model.experts,), "i32"),
            BufferSpec("prompt.tiles", (pairs // LEAST_TILE_ROWS + min(model.experts, pairs), 4), "i32"),
            BufferSpec("prompt.tile_count", (1,), "i32"),
            BufferSpec("prompt.counters", (1,), "u32"),
        ]
    buffers.append(BufferSpec("prompt.results", (between,)))
    return tuple(buffers)


def _widths(model: ModelFacts) -> tuple[int, ...]:
    """Widths of the feed-forwards: of the one that all tokens take, where there is one, then of the experts."""
    if not model.experts:
        return (model.feed_forward,)
    return (model.shared_width, model.expert_width) if model.shared_width else (0, model.expert_width)


def _sums(columns: int) -> int:
    """Floats of a split row's sums (``sums_of`` in kernels/cuda/prompt.cu)."""
    return -(-columns // 64) * 4
