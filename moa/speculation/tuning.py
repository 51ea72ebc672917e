"""The numbers of `moa.speculation.cost`, `policy` and `ledger`. All others follow from these. What
each is worth: docs/decisions/0023 and 0038, and `python -m tests.speculation.sweep`.
"""

from __future__ import annotations

FEW = 8
"""So many of anything say something: rounds, drafts, nodes. The first drafts of a process may take
so many times as long as later ones."""

# ---- what a forward costs, and a level of drafting

WEIGHT_IF_FASTER = 2 / FEW
"""Weight of a sample that took less than was estimated, so that the latest few count most; also of
one in the time of reading."""
WEIGHT_IF_SLOWER = 0.05
"""Weight of a sample that took more; also of one in plain means, and of a draft in its text's
acceptance. Other load makes forwards slower, never faster, so an estimate of seconds follows the
fastest tenth or so."""
OUTLIER = 2.0
"""A sample counts as at most this many times the estimate, for a machine that slept says nothing of
forwards; and the estimate is at most this many times the latest sample, for one that was measured
asleep would not be tried again."""
GROUPS_PER_OCTAVE = 2
"""Sizes that are told apart between two powers of two; also depths of drafts."""
LOADING = 12
"""Fetching a session's keys and values costs about as much as so many tokens attending to them."""

# ---- whether a draft pays

MARGIN = 1.05
"""Draft only for an expected speed of at least this many times plain decoding: what things cost is
an estimate, too."""
PRIOR = 0.7
"""Chance that a level is accepted, before anything was drafted."""
HOPE = 0.8
"""Chance that a level is accepted, assumed for trials."""
PRIOR_WEIGHT = 3
"""Drafts that what others say of a text counts as; and so many first drafts of it say something of
others, for later ones are of texts that drafts do well for."""

# ---- when to try and to measure again

RETRY = 2 * FEW
"""Plain rounds of a text between its first trial and the next."""
AGAIN = FEW * FEW
"""After so many rounds of one way, drafted or plain, the other is measured again: its cost may have
changed. That is one plain round, or one level drafted against the estimate; the latter after twice
as many rounds each time."""
LONGEST = FEW * AGAIN
"""Plain rounds before a trial or a probe, at most."""
