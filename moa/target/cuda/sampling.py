"""`moa.sampling`'s rule in torch, for all nodes of a forward at once: only the chosen tokens travel
to the host.

The noise is the same bit for bit (integers), its logarithms in float64. What rounding could decide
otherwise than numpy does, two scores or a sum of probabilities that are closer to each other or to
an edge, is left to numpy: so the tokens are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from moa import sampling
from moa.grammar.matcher import unpacked
from moa.sampling import GOLDEN, noise_keys
from moa.target.contract import NO_NUMBER, Draw

_WIDER = -3
"""Chosen where more tokens may survive top-k, top-p and min-p than were sorted."""
_UNSURE = -4
"""Chosen where the rounding of another library might choose another token."""
_CLOSE = 1e-10
"""Probabilities that are no further from an edge may be on its other side elsewhere: sums of 2^18
float64 in another order differ by less."""
_CLOSE_SCORES = 1e-12
"""The same for scores with noise, relative to a large one."""
_SORTED_FIRST = 1024
"""Tokens that are sorted for top-k, top-p and min-p; the whole vocabulary only for nodes that need
more."""
_NUMBERS_AT_ONCE = 2**24
"""Bounds the memory of one pass: 128 MiB for each temporary tensor of float64."""


class _Kind(NamedTuple):
    """What a node needs. Only nodes of one kind are computed together: none pays for another's
    settings, and none is chosen by them."""

    greedy: bool
    filters: bool
    penalizes: bool
    adjusts: bool
    masked: bool

    @classmethod
    def of(cls, draw: Draw) -> _Kind:
        settings = draw.settings
        narrows = settings.top_k > 0 or settings.top_p < 1.0 or settings.min_p > 0.0
        return cls(
            greedy=settings.greedy,
            filters=narrows and not settings.greedy,
            penalizes=settings.repetition_penalty != 1.0,
            adjusts=settings.adjusts,
            masked=draw.allowed is not None,
        )


class _Piece(NamedTuple):
    """Nodes of one kind that fit into memory at once."""

    kind: _Kind
    places: list[int]


@torch.inference_mode()
def choose(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The token after each node, given their logits `[n, vocab]`; `NO_NUMBER` where these are not
    finite."""
    places = range(len(draws))
    found = _choose_at(logits, draws, places, _SORTED_FIRST)
    wider = [place for place in places if found[place] == _WIDER]
    if wider:
        again = _choose_at(logits, draws, wider, logits.shape[1])
        for place, token in zip(wider, again, strict=True):
            found[place] = token
    for place in places:
        if found[place] == _UNSURE:
            found[place] = _on_host(logits[place], draws[place])
    return found


def _on_host(logits: Tensor, draw: Draw) -> int:
    """The token by the rule itself."""
    row = logits.float().cpu().numpy()
    allowed = None if draw.allowed is None else unpacked(draw.allowed, len(row))
    context = [*draw.text, *draw.drafted]
    answer = [*draw.text[draw.start :], *draw.drafted]
    return sampling.choose(row, draw.settings, draw.position, context, allowed, answer)


def _choose_at(
    logits: Tensor, draws: Sequence[Draw], places: Sequence[int], sorted_first: int
) -> list[int]:
    """The tokens of some nodes, read from the device once."""
    mine = [draws[place] for place in places]
    chosen = torch.empty(len(mine), dtype=torch.long, device=logits.device)
    for piece in _pieces(mine, logits.shape[1]):
        rows = logits.index_select(0, _index([places[at] for at in piece.places], logits.device))
        tokens = _choose(rows, [mine[at] for at in piece.places], piece.kind, sorted_first)
        chosen[_index(piece.places, logits.device)] = tokens
    found: list[int] = chosen.tolist()
    return found


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """`moa.sampling.gumbel` for `moa.sampling.noise_keys`, as int64 `[n, 1]`, and token ids `[k]`
    or `[n, k]`."""
    # The product and the sum wrap around, as they do in numpy's unsigned numbers.
    bits = _mix(keys + (ids + 1) * _signed(GOLDEN))
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shifted right as an unsigned number: torch's shift of int64 repeats the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _pieces(draws: Sequence[Draw], vocab: int) -> Iterator[_Piece]:
    """The nodes by kind, no more at once than memory is bounded for."""
    kinds: dict[_Kind, list[int]] = {}
    for place, draw in enumerate(draws):
        kinds.setdefault(_Kind.of(draw), []).append(place)
    at_once = max(1, _NUMBERS_AT_ONCE // vocab)
    for kind, places in kinds.items():
        for start in range(0, len(places), at_once):
            yield _Piece(kind, places[start : start + at_once])


def _choose(rows: Tensor, draws: Sequence[Draw], kind: _Kind, sorted_first: int) -> Tensor:
    """The tokens of nodes of one kind, whose logits are the rows."""
    finite = rows.amax(-1).isfinite()
    if kind.masked:
        rows = rows.where(_allowed(draws, rows), -torch.inf)
    if kind.greedy and not kind.penalizes and not kind.adjusts:
        return torch.where(finite, rows.argmax(-1), NO_NUMBER)
    scores = rows.double()
    if kind.penalizes:
        penalty = _column([draw.settings.repetition_penalty for draw in draws], scores)
        less_likely = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(_seen(draws, scores), less_likely, scores)
    if kind.adjusts:
        scores = _adjusted(scores, draws)
    if kind.greedy:
        return torch.where(finite, scores.argmax(-1), NO_NUMBER)
    scores = scores / _column([draw.settings.temperature for draw in draws], scores)
    seeds = [draw.settings.seed for draw in draws]
    positions = [draw.position for draw in draws]
    unsigned = noise_keys(seeds, positions)
    keys = torch.from_numpy(unsigned.view(np.int64)).to(scores.device).unsqueeze(1)
    if kind.filters:
        chosen = _filtered(scores, draws, keys, min(sorted_first, scores.shape[1]))
        return torch.where(finite, chosen, NO_NUMBER)
    noisy = scores + gumbel(keys, torch.arange(scores.shape[1], device=scores.device))
    # What is forbidden stays so even where the noise is infinite.
    chosen = _best(noisy.where(scores > -torch.inf, -torch.inf), best_score=scores.amax(-1))
    return torch.where(finite, chosen, NO_NUMBER)


def _best(noisy: Tensor, best_score: Tensor) -> Tensor:
    """The place of the largest of each row; `_UNSURE` where another is as large but for rounding,
    which is relative to the scores."""
    best, place = noisy.max(-1)
    close = _CLOSE_SCORES * (1.0 + best_score.abs())
    several = (noisy >= (best - close).unsqueeze(-1)).sum(-1) > 1
    return torch.where(several, _UNSURE, place)


def _filtered(scores: Tensor, draws: Sequence[Draw], keys: Tensor, count: int) -> Tensor:
    """The choice among the `count` best tokens; `_WIDER` where others may survive too."""
    vocab = scores.shape[1]
    some, ids = scores.topk(count, -1)
    # The likeliest first; of equal ones the smallest id, for top-p may cut between them.
    by_id = ids.argsort(-1)
    some, order = some.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, by_id).gather(-1, order)
    possible = some > -torch.inf
    top_k = torch.tensor([[draw.settings.top_k or vocab] for draw in draws], device=scores.device)
    limited = top_k < vocab
    # Ties at the edge stay in, as in `moa.sampling.candidates`.
    edge = some.gather(-1, (top_k - 1).clamp(max=count - 1))
    among_top_k = possible & ((some >= edge) | ~limited)
    best = some[:, :1]
    weight = (some - best).exp()
    mass = torch.where(
        limited,
        weight.where(among_top_k, 0.0).sum(-1, keepdim=True),
        (scores - best).exp().sum(-1, keepdim=True),
    )
    probability = weight.where(among_top_k, 0.0) / mass
    before = probability.cumsum(-1) - probability
    # Without top-p and min-p nothing is left out, not even behind a sum that rounds to 1.
    filters = [(draw.settings.top_p, draw.settings.min_p) for draw in draws]
    top_p = _column([top if top < 1.0 or least > 0.0 else np.inf for top, least in filters], scores)
    min_p = _column([least for _, least in filters], scores)
    least = min_p * probability[:, :1]
    keep = among_top_k & (before < top_p + _CLOSE) & (probability >= least * (1.0 - _CLOSE))
    surely = (before < top_p - _CLOSE) & (probability >= least * (1.0 + _CLOSE))
    surely[:, 0] = True  # the likeliest always stays
    noisy = (some + gumbel(keys, ids)).where(keep, -torch.inf)
    place = _best(noisy, best_score=best.squeeze(-1))
    decided = (place >= 0) & surely.gather(-1, place.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    token = ids.gather(-1, place.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    chosen = torch.where(decided, token, _UNSURE)
    if count == vocab:
        return chosen
    # Behind the last one that was sorted there may be others of its score, and more of top-k,
    # whose mass top-p must know.
    last = some <= some[:, -1:]
    more = (keep & last).any(-1) | (limited & among_top_k & last).any(-1)
    return torch.where(more, _WIDER, chosen)


def _allowed(draws: Sequence[Draw], rows: Tensor) -> Tensor:
    """`[n, vocab]`: the tokens that grammars allow. The masks travel packed."""
    packed = np.stack([draw.allowed for draw in draws if draw.allowed is not None])
    bits = torch.from_numpy(packed).to(rows.device).unsqueeze(-1) >> torch.arange(
        8, device=rows.device
    )
    allowed = (bits & 1).bool().flatten(1)[:, : rows.shape[1]]
    return torch.nn.functional.pad(allowed, (0, rows.shape[1] - allowed.shape[1]))


def _adjusted(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """`moa.sampling.adjust`: only the tokens that it concerns travel, and each sum is made in the
    same order."""
    vocab = scores.shape[1]
    scores = scores.clone()
    for subtract in (True, False):
        rows: list[int] = []
        ids: list[int] = []
        changes: list[float] = []
        for row, draw in enumerate(draws):
            settings = draw.settings
            if subtract and settings.counts:
                answer = [*draw.text[draw.start :], *draw.drafted]
                for token, times in Counter(answer).items():
                    rows.append(row)
                    ids.append(token)
                    changes.append(
                        -(settings.frequency_penalty * times + settings.presence_penalty)
                    )
            elif not subtract:
                for token, bias in settings.logit_bias:
                    if token < vocab:
                        rows.append(row)
                        ids.append(token)
                        changes.append(bias)
        if rows:
            # Of a row, each token is there once: nothing depends on the order of these sums.
            where = _index(rows, scores.device), _index(ids, scores.device)
            change = torch.tensor(changes, dtype=scores.dtype, device=scores.device)
            scores[where] = scores[where] + change
    return scores


def _seen(draws: Sequence[Draw], scores: Tensor) -> Tensor:
    """`[n, vocab]`: the tokens that the penalty applies to. A row's text is sent once for all its
    nodes."""
    texts = {id(draw.text): draw.text for draw in draws}
    at = {key: place for place, key in enumerate(texts)}
    seen = torch.zeros(len(texts), scores.shape[1], dtype=torch.bool, device=scores.device)
    _mark(seen, list(texts.values()))
    seen = seen.index_select(0, _index([at[id(draw.text)] for draw in draws], scores.device))
    _mark(seen, [draw.drafted for draw in draws])
    return seen


def _mark(seen: Tensor, tokens: Sequence[Sequence[int]]) -> None:
    rows = np.repeat(np.arange(len(tokens)), [len(one) for one in tokens])
    ids = np.concatenate([np.asarray(one, dtype=np.int64) for one in tokens])
    where = torch.from_numpy(np.stack([rows, ids])).to(seen.device)
    seen[where[0], where[1]] = True


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _index(places: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(places, dtype=torch.long, device=device)
