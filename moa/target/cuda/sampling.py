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
        """The operations that the settings of one node ask for."""
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
    """Nodes of one kind whose scores fit into memory at once."""

    kind: _Kind
    indices: list[int]
    """Which of the draws they are."""


@torch.inference_mode()
def choose(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose the token after each of n nodes of drafts, given their logits `[n, vocab]` and how
    each is drawn; `NO_NUMBER` where logits are not finite.

    The tokens are those of `moa.sampling.choose`. Most nodes are decided with their
    best tokens alone. Those that need more are computed again over the whole vocabulary, and those
    that rounding could decide are left to numpy's rule.
    """
    chosen = _choose_some(logits, draws, range(len(draws)), _SORTED_FIRST)
    undecided = [node for node, token in enumerate(chosen) if token == _WIDER]
    if undecided:
        decided = _choose_some(logits, draws, undecided, logits.shape[1])
        for node, token in zip(undecided, decided, strict=True):
            chosen[node] = token
    for node, token in enumerate(chosen):
        if token == _UNSURE:
            chosen[node] = _on_host(logits[node], draws[node])
    return chosen


def _on_host(logits: Tensor, draw: Draw) -> int:
    """The token after one node by `moa.sampling`'s own rule in numpy, which decides in doubt. Its
    logits are copied to the host."""
    row = logits.float().cpu().numpy()
    allowed = None if draw.allowed is None else unpacked(draw.allowed, len(row))
    context = [*draw.text, *draw.drafted]
    answer = [*draw.text[draw.start :], *draw.drafted]
    return sampling.choose(row, draw.settings, draw.position, context, allowed, answer)


def _choose_some(
    logits: Tensor, draws: Sequence[Draw], nodes: Sequence[int], sorted_first: int
) -> list[int]:
    """The tokens after the `nodes`, which are indices of rows of `logits` and of `draws`, in their
    order. Filters sort the `sorted_first` best tokens of each. All tokens are read from the device
    at once, at the end, because each reading waits for it."""
    some_draws = [draws[node] for node in nodes]
    chosen = torch.empty(len(nodes), dtype=torch.long, device=logits.device)
    for piece in _pieces(some_draws, logits.shape[1]):
        nodes_of_piece = [nodes[index] for index in piece.indices]
        draws_of_piece = [some_draws[index] for index in piece.indices]
        rows = logits.index_select(0, _index(nodes_of_piece, logits.device))
        tokens = _choose(rows, draws_of_piece, piece.kind, sorted_first)
        chosen[_index(piece.indices, logits.device)] = tokens
    tokens_of_nodes: list[int] = chosen.tolist()
    return tokens_of_nodes


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """The sampling noise of n nodes for token ids `[k]` or `[n, k]`, in float64: the same numbers as
    `moa.sampling.gumbel`. `keys` are those of `moa.sampling.noise_keys`, as int64 `[n, 1]`."""
    # The product and the sum wrap around, as they do in numpy's unsigned numbers.
    bits = _mix(keys + (ids + 1) * _signed(GOLDEN))
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53  # 53 bits between 0 and 1
    return -(-uniform.log()).log()


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64, as in `moa.sampling`, on int64 numbers that stand for unsigned
    ones."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift int64 numbers right by some bits as if they were unsigned: torch's shift repeats the
    sign, which is masked away here."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    """The int64 that has the bits of an unsigned 64-bit number."""
    if number >= 1 << 63:
        return number - (1 << 64)
    return number


def _pieces(draws: Sequence[Draw], vocab: int) -> Iterator[_Piece]:
    """Yield all nodes in pieces that are computed together: nodes whose settings need the same
    operations (their kind), and no more than may have scores over the vocabulary in memory."""
    indices_by_kind: dict[_Kind, list[int]] = {}
    for index, draw in enumerate(draws):
        indices_by_kind.setdefault(_Kind.of(draw), []).append(index)
    at_once = max(1, _NUMBERS_AT_ONCE // vocab)
    for kind, indices in indices_by_kind.items():
        for start in range(0, len(indices), at_once):
            yield _Piece(kind, indices[start : start + at_once])


def _choose(rows: Tensor, draws: Sequence[Draw], kind: _Kind, sorted_first: int) -> Tensor:
    """The tokens `[n]` after nodes whose settings need the same operations (`kind`), and whose
    logits are the `rows` `[n, vocab]`. In place of a token it is `NO_NUMBER` where logits are not
    finite, `_WIDER` where more than `sorted_first` tokens must be sorted, and `_UNSURE` where
    rounding could decide."""
    finite = rows.amax(-1).isfinite()  # NaN and infinity are the maximum of their row
    if kind.masked:
        rows = rows.where(_allowed(draws, rows), -torch.inf)
    chosen = _choose_allowed(rows, draws, kind, sorted_first)
    return torch.where(finite, chosen, NO_NUMBER)


def _choose_allowed(rows: Tensor, draws: Sequence[Draw], kind: _Kind, sorted_first: int) -> Tensor:
    """The tokens `[n]` after nodes with these logits, in which what a grammar forbids is minus
    infinity: `_choose` without its first and last step."""
    if kind.greedy and not kind.penalizes and not kind.adjusts:
        return rows.argmax(-1)
    scores = rows.double()  # as in numpy's rule
    if kind.penalizes:
        scores = _penalized(scores, draws)
    if kind.adjusts:
        scores = _adjusted(scores, draws)
    if kind.greedy:
        return scores.argmax(-1)
    scores = scores / _column([draw.settings.temperature for draw in draws], scores)
    keys = _noise_keys(draws, scores.device)
    if kind.filters:
        return _filtered(scores, draws, keys, min(sorted_first, scores.shape[1]))
    noisy = scores + gumbel(keys, torch.arange(scores.shape[1], device=scores.device))
    # What is forbidden stays so even where the noise is infinite.
    return _best(noisy.where(scores > -torch.inf, -torch.inf), best_score=scores.amax(-1))


def _noise_keys(draws: Sequence[Draw], device: torch.device) -> Tensor:
    """The keys of each node's sampling noise, `[n, 1]`: unsigned numbers with the bits of int64."""
    seeds = [draw.settings.seed for draw in draws]
    positions = [draw.position for draw in draws]
    keys = noise_keys(seeds, positions).view(np.int64)
    return torch.from_numpy(keys).to(device).unsqueeze(1)


def _best(noisy: Tensor, best_score: Tensor) -> Tensor:
    """The index `[n]` of the largest score with noise of each row `[n, tokens]`; `_UNSURE` where
    another one is as large but for rounding. Rounding is relative to the scores before the noise,
    the largest of which is `best_score` `[n]`."""
    best, index = noisy.max(-1)
    margin = _CLOSE_SCORES * (1.0 + best_score.abs())
    is_close = noisy >= (best - margin).unsqueeze(-1)
    several = is_close.sum(-1) > 1
    return torch.where(several, _UNSURE, index)


def _filtered(scores: Tensor, draws: Sequence[Draw], keys: Tensor, count: int) -> Tensor:
    """The token `[n]` that is drawn after each node, out of those that top-k, top-p and min-p
    leave.

    Only the `count` best tokens of each node are sorted and looked at. It is `_WIDER` where others
    may survive the filters, too, and `_UNSURE` where rounding could decide which do: another
    library may sum up probabilities in another order. `scores` `[n, vocab]` are logits by the
    temperature, `keys` `[n, 1]` those of the sampling noise.
    """
    vocab = scores.shape[1]
    best_scores, ids = _sorted_best(scores, count)
    top_k = torch.tensor([[draw.settings.top_k or vocab] for draw in draws], device=scores.device)
    has_top_k = top_k < vocab
    among_top_k = _among_top_k(best_scores, top_k, has_top_k)
    probability = _probabilities(scores, best_scores, among_top_k, has_top_k)
    survivors = _survivors(probability, among_top_k, draws)
    chosen = _drawn(best_scores, ids, keys, survivors)
    if count == vocab:
        return chosen
    # Behind the last one that was sorted there may be others of its score, and more of top-k,
    # whose mass top-p must know.
    is_last = best_scores <= best_scores[:, -1:]
    needs_more = (survivors.possible & is_last).any(-1)
    needs_more |= (has_top_k & among_top_k & is_last).any(-1)
    return torch.where(needs_more, _WIDER, chosen)


class _Survivors(NamedTuple):
    """Flags `[n, count]`: which of the best tokens of each node the filters leave."""

    possible: Tensor
    """They may stay: another way to round may leave some of them out."""
    sure: Tensor
    """They stay however sums are rounded."""


def _among_top_k(best_scores: Tensor, top_k: Tensor, has_top_k: Tensor) -> Tensor:
    """A flag for each of the best scores `[n, count]`, the likeliest first: whether it is among the
    `top_k` `[n, 1]` of its node, or in a node without top-k a possible token. Ties at the edge stay
    in, as in `moa.sampling.candidates`."""
    edge = best_scores.gather(-1, (top_k - 1).clamp(max=best_scores.shape[1] - 1))
    is_possible = best_scores > -torch.inf
    return is_possible & ((best_scores >= edge) | ~has_top_k)


def _probabilities(
    scores: Tensor, best_scores: Tensor, among_top_k: Tensor, has_top_k: Tensor
) -> Tensor:
    """The probability of each of the best tokens `[n, count]` among those that top-k leaves: without
    it, those of the whole vocabulary."""
    best = best_scores[:, :1]
    weight = (best_scores - best).exp().where(among_top_k, 0.0)
    mass = torch.where(
        has_top_k,
        weight.sum(-1, keepdim=True),
        (scores - best).exp().sum(-1, keepdim=True),
    )
    return weight / mass


def _survivors(probability: Tensor, among_top_k: Tensor, draws: Sequence[Draw]) -> _Survivors:
    """Which of the tokens with these probabilities `[n, count]`, the likeliest first, top-p and
    min-p leave of those that are among the top k."""
    top_p, min_p = _edges(draws, probability)
    likelier_mass = probability.cumsum(-1) - probability  # of the tokens before each one
    fewest = min_p * probability[:, :1]
    possible = (likelier_mass < top_p + _CLOSE) & (probability >= fewest * (1.0 - _CLOSE))
    possible &= among_top_k
    sure = (likelier_mass < top_p - _CLOSE) & (probability >= fewest * (1.0 + _CLOSE))
    sure[:, 0] = True  # the likeliest always stays
    return _Survivors(possible, sure)


def _drawn(best_scores: Tensor, ids: Tensor, keys: Tensor, survivors: _Survivors) -> Tensor:
    """The token `[n]` of the largest score with noise of those that survive the filters; `_UNSURE`
    where rounding could decide which do, or which score is the largest."""
    noisy = (best_scores + gumbel(keys, ids)).where(survivors.possible, -torch.inf)
    index = _best(noisy, best_score=best_scores[:, 0])
    index_or_0 = index.clamp(min=0).unsqueeze(-1)
    is_sure = survivors.sure.gather(-1, index_or_0).squeeze(-1)
    token = ids.gather(-1, index_or_0).squeeze(-1)
    return torch.where((index >= 0) & is_sure, token, _UNSURE)


def _sorted_best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best scores of each row and their tokens, `[n, count]` each, the likeliest first.
    Of equal ones the smallest id comes first: top-p may cut between them."""
    unsorted, ids = scores.topk(count, -1)
    by_id = ids.argsort(-1)
    best_scores, order = unsorted.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return best_scores, ids.gather(-1, by_id).gather(-1, order)


def _edges(draws: Sequence[Draw], like: Tensor) -> tuple[Tensor, Tensor]:
    """The settings of each node for top-p and min-p, `[n, 1]` each, in the dtype and on the device
    of `like`."""
    top_ps = []
    min_ps = []
    for draw in draws:
        settings = draw.settings
        filters = settings.top_p < 1.0 or settings.min_p > 0.0
        # As in `moa.sampling.candidates`: with one of the two both apply. With neither, which is
        # top-k alone, nothing more is left out, not even a token behind a sum that rounds to 1.
        top_ps.append(settings.top_p if filters else np.inf)
        min_ps.append(settings.min_p)
    return _column(top_ps, like), _column(min_ps, like)


def _allowed(draws: Sequence[Draw], rows: Tensor) -> Tensor:
    """A flag for each token after each of n nodes, `[n, vocab]`: whether the node's grammar allows
    it; every node has one here. The masks travel to the device packed, eight tokens in a byte, the
    lowest bit first."""
    packed = np.stack([draw.allowed for draw in draws if draw.allowed is not None])
    packed_bytes = torch.from_numpy(packed).to(rows.device).unsqueeze(-1)
    bits = (packed_bytes >> torch.arange(8, device=rows.device)) & 1
    allowed = bits.bool().flatten(1)[:, : rows.shape[1]]
    # Logits may be wider than the grammar's vocabulary: what is behind it is forbidden.
    return torch.nn.functional.pad(allowed, (0, rows.shape[1] - allowed.shape[1]))


def _penalized(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The scores with the repetition penalty: tokens of the text so far become less likely."""
    penalty = _column([draw.settings.repetition_penalty for draw in draws], scores)
    less_likely = torch.where(scores > 0, scores / penalty, scores * penalty)
    return torch.where(_seen(draws, scores), less_likely, scores)


def _adjusted(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The scores with penalties for repeated tokens and with biases, as `moa.sampling.adjust` makes
    them. Only the tokens that these concern travel to the device. All penalties come before all
    biases, so that each sum is made in numpy's order and has the same bits."""
    scores = scores.clone()
    _add(scores, _penalties(draws))
    _add(scores, _biases(draws, scores.shape[1]))
    return scores


class _Change(NamedTuple):
    """What is added to the score of one token after one node."""

    row: int
    token: int
    amount: float


def _penalties(draws: Sequence[Draw]) -> list[_Change]:
    """The changes of scores by frequency and presence penalties: for each node, of each token that
    is in its answer so far."""
    changes = []
    for row, draw in enumerate(draws):
        settings = draw.settings
        if settings.counts:
            answer = [*draw.text[draw.start :], *draw.drafted]
            for token, times in Counter(answer).items():
                penalty = settings.frequency_penalty * times + settings.presence_penalty
                changes.append(_Change(row, token, -penalty))
    return changes


def _biases(draws: Sequence[Draw], vocab: int) -> list[_Change]:
    """The biases that each node's settings give to tokens of the vocabulary."""
    changes = []
    for row, draw in enumerate(draws):
        for token, bias in draw.settings.logit_bias:
            if token < vocab:
                changes.append(_Change(row, token, bias))
    return changes


def _add(scores: Tensor, changes: Sequence[_Change]) -> None:
    """Add changes to the scores `[n, vocab]` in place. A token of a row is among them once, so
    nothing depends on the order of the sums."""
    if not changes:
        return
    rows = _index([change.row for change in changes], scores.device)
    tokens = _index([change.token for change in changes], scores.device)
    amounts = [change.amount for change in changes]
    added = torch.tensor(amounts, dtype=scores.dtype, device=scores.device)
    scores[rows, tokens] = scores[rows, tokens] + added


def _seen(draws: Sequence[Draw], scores: Tensor) -> Tensor:
    """A flag for each token after each node, `[n, vocab]`: whether the repetition penalty applies to
    it. The nodes of one draft share a text, which is sent to the device once."""
    # By identity: to compare texts token by token would cost more than to send one twice.
    texts = {id(draw.text): draw.text for draw in draws}
    text_index = {key: index for index, key in enumerate(texts)}
    of_texts = torch.zeros(len(texts), scores.shape[1], dtype=torch.bool, device=scores.device)
    _mark(of_texts, list(texts.values()))
    indices = [text_index[id(draw.text)] for draw in draws]
    seen = of_texts.index_select(0, _index(indices, scores.device))
    _mark(seen, [draw.drafted for draw in draws])
    return seen


def _mark(seen: Tensor, tokens: Sequence[Sequence[int]]) -> None:
    """Set the flags `[n, vocab]` of each row's tokens."""
    rows = np.repeat(np.arange(len(tokens)), [len(one) for one in tokens])
    ids = np.concatenate([np.asarray(one, dtype=np.int64) for one in tokens])
    where = torch.from_numpy(np.stack([rows, ids])).to(seen.device)
    seen[where[0], where[1]] = True


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """A number for each node as a tensor `[n, 1]`, in the dtype and on the device of another."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _index(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Whole numbers as a tensor to index others with."""
    return torch.tensor(numbers, dtype=torch.long, device=device)
