"""Judges whether an engine has the weights that the trainer published. Pure.

The engine's logprobs of a probe are compared with the trainer's. Rounding makes them differ a little,
and how much is measured when the run starts. A part of the weights that was not loaded may change less
than that. But its error points back to the values before the load, for many tokens at once: so the
*move* of the engine, from the old values to the new ones, shows parts that the size of an error hides.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ...records.probe import Probe
from ...records.turn import Routes
from .dialect import ProbeAnswer
from .facts import EXTENSION

CEILINGS = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.1}
"""The largest mean difference of a logprob that rounding may cause, by the coarser number format."""
COARSEST = "bfloat16"
"""What a number format that is not known is taken for."""
FLOORS = {"float32": 2e-4, "float16": 5e-3, "bfloat16": 0.02}
"""A mean difference below this is never a mismatch by itself, however small the first one was."""
NOISE = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 5e-3}
"""The least difference that rounding makes."""
MAX_GROWTH = 4.0
"""The mean difference may grow to this many times the one at the start of the run."""
MIN_AGREEING = {"float32": 0.98, "float16": 0.85, "bfloat16": 0.7}
"""The smallest share of tokens and layers in which the same experts are chosen."""
MAX_UNSURE = 0.05
"""The move is judged if its standard error is at most this."""
STALE = 0.3
"""An engine that has moved by less of the way has old weights."""
MAX_OLD = 0.1
"""Old weights are this much nearer to the version before than to the new one."""
MIN_MOVED = {"float32": 0.95, "float16": 0.85, "bfloat16": 0.8}
"""An engine that has moved by less has some old weights. A coarse format also rounds a part of the way
off: in bfloat16 a right load was seen to move by 0.94."""
MAX_ELSEWHERE = 0.98
"""The share of an error that may point elsewhere than back to the old values."""
MOVE_SIGMAS = 4.0
"""How many standard errors of the move are allowed for."""
EXPERT_SIGMAS = 6.0
EXPERT_MOVED = {"float32": 0.97, "float16": 0.85, "bfloat16": 0.75}
"""The tokens of one expert show that it is old if they moved less than this, by that many standard
errors."""
MAX_OUTLIER = 4.0
"""Differences count as at most this many times the median, so that a few tokens decide nothing."""

Values = NDArray[np.float64]


class Comparison(Struct, frozen=True):
    """How an engine's logprobs of a probe differ from the trainer's."""

    num_tokens: int
    mean: float
    largest: float
    moved: float | None = None
    """How much of the way from the old values to the new ones the engine went. None if the weights
    changed too little to tell."""
    stale_expert: tuple[int, int] | None = None
    """Layer and number of an expert whose tokens show that it is old."""
    agreeing: float | None = None
    """The share of tokens and layers in which the engine chose the same experts."""
    all_zero: bool = False
    """All its routes are expert 0."""
    cache_error: float | None = None
    """How far the most likely token after a text that was cached before the load is off."""

    def __str__(self) -> str:
        text = (
            f"the logprobs of {self.num_tokens} tokens differ by {self.mean:.2g} on average and "
            f"{self.largest:.2g} at most"
        )
        if self.agreeing is not None:
            text += f", {self.agreeing:.0%} of the expert choices agree"
        if self.moved is not None:
            text += (
                f", and the engine went {self.moved:.0%} of the way from the version before"
            )
        return text


class Tolerance(Struct, frozen=True):
    """What differences are rounding: by the coarser number format of engine and trainer, and the mean
    difference of the first comparison, when the run started."""

    dtype: str = "bfloat16"
    first_mean: float | None = None

    @property
    def noise(self) -> float:
        """The typical difference that rounding makes."""
        return max(NOISE[self.dtype], 1.5 * (self.first_mean or 0.0))

    @property
    def limit(self) -> float:
        """The mean difference above which the engine has other weights."""
        ceiling, floor = CEILINGS[self.dtype], FLOORS[self.dtype]
        if self.first_mean is None:
            return ceiling
        return min(ceiling, max(floor, MAX_GROWTH * self.first_mean))


def compare(probe: Probe, answers: Sequence[ProbeAnswer], tolerance: Tolerance) -> Comparison:
    """Compare the answers to a probe with what the trainer says of the same texts."""
    texts = probe.texts
    wanted = np.concatenate([text.logprobs for text in texts]).astype(np.float64)
    found = np.concatenate([answer.logprobs for answer in answers]).astype(np.float64)
    if len(found) != len(wanted):
        raise ValueError(f"{len(found)} logprobs for {len(wanted)} tokens")
    errors = found - wanted
    routes, own = _routes(probe, answers), _own_routes(probe)
    moved, stale_expert = None, None
    if all(text.before for text in texts):
        way = wanted - np.concatenate([text.before for text in texts])
        length = float(np.linalg.norm(way))
        if length and tolerance.noise / length <= MAX_UNSURE:
            moved = 0.0 if _is_old(errors, way) else _moved(errors, way)
            limit = EXPERT_MOVED[tolerance.dtype]
            stale_expert = _stale_expert(probe, own, errors, way, limit)
    return Comparison(
        num_tokens=len(wanted),
        mean=float(np.abs(errors).mean()),
        largest=float(np.abs(errors).max()),
        moved=moved,
        stale_expert=stale_expert,
        agreeing=None if routes is None else _share_agreeing(own, routes),
        all_zero=routes is not None and not routes.any(),
    )


def _moved(errors: Values, way: Values) -> float | None:
    """Return how much of the way the engine went: the most that its other errors leave room for. None if
    most of its error points elsewhere than back."""
    length, clipped = float(np.linalg.norm(way)), _without_outliers(errors)
    missing = float(clipped @ way) / length**2
    rest = _rms(clipped - missing * way)
    unsure = MOVE_SIGMAS * rest / length
    if unsure > MAX_UNSURE and rest > MAX_ELSEWHERE * _rms(clipped):
        return None
    return min(1.0, 1 + missing + unsure)


def _is_old(errors: Values, way: Values) -> bool:
    """Return whether the engine says of nearly all tokens what the version before said."""
    return float(np.abs(errors + way).mean()) < MAX_OLD * float(np.abs(errors).mean())


def _without_outliers(errors: Values) -> Values:
    most = MAX_OUTLIER * float(np.median(np.abs(errors)))
    return np.clip(errors, -most, most)


def _rms(values: Values) -> float:
    return float(np.sqrt(np.mean(values**2)))


def _routes(probe: Probe, answers: Sequence[ProbeAnswer]) -> Routes | None:
    """Return the engine's choices in the layers that have experts. It reports these, or all layers."""
    if not probe.topk or any(answer.routes is None for answer in answers):
        return None
    routes = np.concatenate(
        [answer.routes for answer in answers if answer.routes is not None]
    )
    if routes.shape[1] == len(probe.moe_layers):
        return routes
    return routes[:, list(probe.moe_layers)]


def _own_routes(probe: Probe) -> Routes:
    """Return the trainer's choices `[tokens, layers, topk]`."""
    joined = np.frombuffer(b"".join(text.routes for text in probe.texts), np.uint16)
    return joined.reshape(-1, len(probe.moe_layers), probe.topk) if probe.topk else joined


def _share_agreeing(own: Routes, routes: Routes) -> float:
    if own.shape != routes.shape:
        return 0.0
    return float((np.sort(own) == np.sort(routes)).all(axis=-1).mean())


def _stale_expert(
    probe: Probe, own: Routes, errors: Values, way: Values, limit: float
) -> tuple[int, int] | None:
    """Return the expert whose tokens point back to the old values most clearly, if one does. Each layer
    sends a token to several experts, so one old expert is a small part of what its tokens show."""
    if not probe.topk:
        return None
    lengths = [len(text.token_ids) for text in probe.texts]
    has_next = np.ones(sum(lengths), np.bool_)
    has_next[np.cumsum(lengths) - 1] = False
    routes = own[has_next]
    worst, found = -EXPERT_SIGMAS, None
    for place, layer in enumerate(probe.moe_layers):
        for expert in np.unique(routes[:, place]):
            chosen = (routes[:, place] == expert).any(axis=-1)
            length = float(np.linalg.norm(way[chosen]))
            clipped = _without_outliers(errors[chosen])
            pull, spread = float(clipped @ way[chosen]), _rms(clipped)
            if not length or not spread or 1 + pull / length**2 > limit:
                continue
            sigmas = pull / (length * spread)
            if sigmas < worst:
                worst, found = sigmas, (layer, int(expert))
    return found


NOT_RECORDED = (
    "it does not record its routes: start vLLM with --enforce-eager, because compiled on CPU it sends "
    "zeros"
)
OTHER_MODEL = (
    "it does not serve the weights in model.path, or computes in a coarser number format: start it with "
    "this folder, and with --dtype float32 if the trainer computes in float32"
)
PLUGIN = f"start vLLM with --worker-extension-cls {EXTENSION}"
WRONG_LAYOUT = (
    f"its load leaves experts in a wrong layout, as vLLM's own does on CPU: {PLUGIN}"
)
OLD_PART = (
    "a part of its weights is old, as the output layer is after vLLM's own reload of a model with tied "
    f"embeddings: {PLUGIN}"
)
WRONG_LOAD = f"its load does not give the weights that it is given: {PLUGIN}"
OLD_CACHE = (
    "its prefix cache has keys and values of old weights: start it without a prefix cache "
    "(vLLM: --no-enable-prefix-caching)"
)


def why_refused(comparison: Comparison, version: int, tolerance: Tolerance) -> str:
    """Return the likely cause and its remedy, or "" if the engine has the right weights."""
    is_wrong = not comparison.mean <= tolerance.limit  # also if it is not a number
    moved, agreeing, dtype = comparison.moved, comparison.agreeing, tolerance.dtype
    disagrees = agreeing is not None and agreeing < MIN_AGREEING[dtype]
    if comparison.all_zero and not is_wrong:
        return NOT_RECORDED
    if version == 0:
        return OTHER_MODEL if is_wrong or disagrees else ""
    if moved is not None and moved < STALE:
        return f"it still has the weights of version {version - 1}: its load changes nothing"
    if disagrees:
        return WRONG_LAYOUT
    if moved is not None and moved < MIN_MOVED[dtype]:
        return OLD_PART
    if comparison.stale_expert is not None:
        layer, expert = comparison.stale_expert
        return f"expert {expert} of layer {layer} has old weights: {PLUGIN}"
    if is_wrong:
        return WRONG_LOAD
    error = comparison.cache_error
    most = MAX_GROWTH * max(tolerance.limit, FLOORS[dtype])
    return OLD_CACHE if error is not None and not error <= most else ""


MIN_KL = 0.01
"""A KL up to this is rounding, in any number format."""
MAX_KL_RATIO = 10.0
"""How many times the largest KL of the other engines is too much."""


def find_departing(kls: Mapping[str, float]) -> tuple[str, str] | None:
    """Return the engine whose KL departs from those of all others, and what was seen. None if no engine
    does. Each KL is that between trainer and engine, on rows of one version."""
    if len(kls) < 2:
        return None
    worst = max(kls, key=lambda url: kls[url])
    of_others = max(kl for url, kl in kls.items() if url != worst)
    if kls[worst] <= max(MIN_KL, MAX_KL_RATIO * of_others):
        return None
    return worst, (
        f"the KL between trainer and engine is {kls[worst]:.2g} on rows that it drew, and "
        f"{of_others:.2g} at most for the other engines: compare how they were started ('rollway "
        "doctor' examines each)"
    )
