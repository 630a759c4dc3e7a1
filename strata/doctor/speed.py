"""How fast a placement can be: bytes moved over bandwidths. The planner's score and the speed a person may expect.

The score of a candidate is the time of a reference turn, `PROMPT` tokens read and `ANSWER` tokens written: less is
better. More slots, more experts in faster tiers and larger chunks never make it longer, so a score never worsens
when a budget grows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from strata.doctor.plan import ExpectedSpeed, Tier

Range = tuple[float, float]

PROMPT = 4096  # tokens of the reference turn, or what the context holds
ANSWER = 512

# Hits are not spread evenly: few experts are asked for often. Published runs of a 48 x 512-expert, top-10 model
# missed 105 of 480 requests with 16 % of the experts in slots, and 15 with 42 %; even use would miss 402 and 281.
# An exponent of 6 gives 165 and 20: a little more than was seen, for models whose routing is less skewed.
_LOCALITY = 6


@dataclass(frozen=True, slots=True)
class Placement:
    """What a candidate chose: the prompt chunk, the tiers of embedding and staging ring, how many experts lie where."""

    chunk: int
    embedding: Tier
    staging: Tier
    slots: int
    pinned: int
    pageable: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the forward pass of one model touches, in bytes as the backend holds them."""

    dense_bytes: int  # every weight but head and experts
    head_bytes: int
    kv_bytes: int  # read by one token after the prompt
    embedding_row_bytes: int
    prompt: int  # tokens of the reference turn's prompt
    layers: int
    expert_layers: int
    experts_per_layer: int
    top_k: int
    ready_bytes: int  # one expert in a slot
    stored_bytes: int  # one expert as stored, on average
    weights_per_token: int  # that a token of the prompt is multiplied by, attention's products among them
    answer_weights: int  # the same for one token after the prompt, the head's among them

    @property
    def experts(self) -> int:
        return self.expert_layers * self.experts_per_layer


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bandwidths in bytes per second, and what else takes time.

    `pinned`, `pageable` and `file` carry an expert as stored to a slot; `ready` is how many bytes of a ready slot are
    made of stored ones per second (infinite where slots hold the stored form).
    """

    vram: float
    pinned: float
    pageable: float
    file: float
    unstaged: float  # bounds all but `pinned` where the staging ring is not page-locked
    ready: float
    weights: float  # multiplied per second in matrix products over a whole chunk
    # Up to so many, a call multiplies each token by itself, while it reads the weights; where experts may be missed
    # there are no larger ones. 0: calls are all alike.
    call_tokens: int
    products: float  # multiplied per second then
    layer_s: float  # launching one layer's kernels or calls
    prompt_layer_s: float  # the same in a call of more than `call_tokens`, while the device works
    call_s: float  # what the host does between two calls
    expert_s: float  # one expert's share of a call of several tokens, beside its weights: gathering, small products
    look_s: float  # the host's look at one layer's experts, where some lie where the device cannot fetch them
    efficiency: (
        float  # the least part of the bandwidths that the backend is held to; the expected range ends at its double
    )
    basis: tuple[str, ...]

    def of(self, tier: Tier, staging: Tier) -> float:
        """Return the speed at which `tier` is read into a slot, never faster than a tier above it."""
        if tier is Tier.VRAM:
            return self.vram
        if tier is Tier.PINNED:
            return self.pinned
        pageable = min(self.pinned, self.pageable)
        if staging is not Tier.PINNED:
            pageable = min(pageable, self.unstaged)
        return pageable if tier is Tier.PAGEABLE else min(pageable, self.file)


def hit_rate(share: float) -> float:
    """Return the share of expert requests that find a slot when `share` of all experts have one, while decoding."""
    return 1.0 - (1.0 - share) ** _LOCALITY


def decode_seconds(traffic: Traffic, speeds: Speeds, placement: Placement) -> float:
    """Return the time of one decoded token at the full bandwidths."""
    return _decode_seconds(traffic, speeds, placement, _miss_seconds(traffic, speeds, placement))


def _decode_seconds(
    traffic: Traffic, speeds: Speeds, placement: Placement, miss_s: float, misses: float | None = None
) -> float:
    requests = traffic.expert_layers * traffic.top_k
    read = traffic.dense_bytes + traffic.head_bytes + traffic.kv_bytes + requests * traffic.ready_bytes
    seconds = _call_seconds(traffic, speeds, placement, tokens=1)
    seconds += max(read / speeds.vram, traffic.answer_weights / speeds.products)
    if misses is None:
        misses = requests * (1.0 - hit_rate(placement.slots / traffic.experts)) if traffic.experts else 0.0
    return seconds + misses * miss_s


def prefill_seconds(traffic: Traffic, speeds: Speeds, placement: Placement) -> float:
    """Return the time to read the reference turn's prompt, every chunk asking for all its experts anew."""
    return _prefill_seconds(traffic, speeds, placement, _miss_seconds(traffic, speeds, placement))


def _prefill_seconds(
    traffic: Traffic, speeds: Speeds, placement: Placement, miss_s: float, misses: float | None = None
) -> float:
    tokens = traffic.prompt
    chunk = min(placement.chunk, tokens)
    if speeds.call_tokens and placement.slots < traffic.experts:
        chunk = min(chunk, speeds.call_tokens)
    chunks = ceil(tokens / chunk)
    distinct = 0.0
    if traffic.experts:
        distinct = traffic.experts * (1.0 - (1.0 - traffic.top_k / traffic.experts_per_layer) ** chunk)
    if misses is None:
        misses = chunks * distinct * (1.0 - placement.slots / traffic.experts) if traffic.experts else 0.0
    read = (traffic.dense_bytes + traffic.head_bytes + distinct * traffic.ready_bytes) / speeds.vram
    seconds = chunks * _call_seconds(traffic, speeds, placement, tokens=chunk) + misses * miss_s
    if chunk <= speeds.call_tokens:
        return seconds + max(chunks * read, tokens * traffic.weights_per_token / speeds.products)
    seconds += chunks * (read + distinct * speeds.expert_s) + tokens * traffic.weights_per_token / speeds.weights
    return max(seconds, chunks * traffic.layers * speeds.prompt_layer_s)


def turn_seconds(traffic: Traffic, speeds: Speeds, placement: Placement) -> float:
    """Return the score: the time of the reference turn. Less is better."""
    miss_s = _miss_seconds(traffic, speeds, placement)
    prompt_s = _prefill_seconds(traffic, speeds, placement, miss_s)
    return prompt_s + ANSWER * _decode_seconds(traffic, speeds, placement, miss_s)


def expected_speed(traffic: Traffic, speeds: Speeds, placement: Placement) -> ExpectedSpeed:
    """Return what a person may expect of a placement, and what that rests on."""
    decode = 1.0 / decode_seconds(traffic, speeds, placement)
    prefill = traffic.prompt / prefill_seconds(traffic, speeds, placement)
    low, high = speeds.efficiency, 2.0 * speeds.efficiency
    hits = hit_rate(placement.slots / traffic.experts) if traffic.experts else 1.0
    requests = traffic.expert_layers * traffic.top_k
    read = {Tier.VRAM: traffic.dense_bytes + traffic.head_bytes + traffic.kv_bytes + requests * traffic.ready_bytes}
    for tier, share in _homes(traffic, placement).items():
        read[tier] = round(requests * (1.0 - hits) * share * traffic.stored_bytes)
    basis = speeds.basis
    if traffic.experts and placement.slots < traffic.experts:
        basis += (
            f"Hit rate {hits:.0%} with {placement.slots / traffic.experts:.0%} of the experts in slots: "
            "the locality published for a model of 512 experts a layer, somewhat lowered.",
        )
    if traffic.experts:
        basis += ("The first tokens are slower: slots are filled as experts are asked for.",)
    return ExpectedSpeed(
        decode_tokens_per_s=(decode * low, decode * high),
        prefill_tokens_per_s=(prefill * low, prefill * high),
        hit_rate=hits,
        bytes_per_token={tier: nbytes for tier, nbytes in read.items() if nbytes},
        basis=basis,
    )


def speed_of_turn(
    traffic: Traffic, speeds: Speeds, placement: Placement, *, prefill_misses: int, misses_per_token: float
) -> tuple[Range, Range]:
    """Return the expected ranges of decoding and of reading the prompt, in tokens/s, for a turn whose misses are known.

    Parameters
    ----------
    traffic : Traffic
        Of a prompt as long as that of the turn.
    prefill_misses : int
        Experts that had no slot while the prompt was read.
    misses_per_token : float
        The same for one token of the answer.
    """
    miss_s = _miss_seconds(traffic, speeds, placement)
    decode = 1.0 / _decode_seconds(traffic, speeds, placement, miss_s, misses_per_token)
    prefill = traffic.prompt / _prefill_seconds(traffic, speeds, placement, miss_s, prefill_misses)
    low, high = speeds.efficiency, 2.0 * speeds.efficiency
    return (decode * low, decode * high), (prefill * low, prefill * high)


def _call_seconds(traffic: Traffic, speeds: Speeds, placement: Placement, tokens: int) -> float:
    """The time of one call beside reading and multiplying weights, whatever is missed."""
    rows = tokens * traffic.embedding_row_bytes / speeds.of(placement.embedding, Tier.PINNED)  # no ring on their way
    looks = traffic.expert_layers if placement.slots < traffic.experts and placement.pinned < traffic.experts else 0
    return speeds.call_s + traffic.layers * speeds.layer_s + looks * speeds.look_s + rows


def _homes(traffic: Traffic, placement: Placement) -> dict[Tier, float]:
    """The shares of all experts by the tier their stored form lies in."""
    if not traffic.experts:
        return {}
    pinned, pageable = placement.pinned / traffic.experts, placement.pageable / traffic.experts
    return {Tier.PINNED: pinned, Tier.PAGEABLE: pageable, Tier.FILE: 1.0 - pinned - pageable}


def _miss_seconds(traffic: Traffic, speeds: Speeds, placement: Placement) -> float:
    """The time to make one expert ready that has no slot, over all places it may lie in."""
    fetch = sum(
        share * traffic.stored_bytes / speeds.of(tier, placement.staging)
        for tier, share in _homes(traffic, placement).items()
        if share
    )
    return fetch + traffic.ready_bytes / speeds.ready
