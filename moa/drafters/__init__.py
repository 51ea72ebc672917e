"""What drafts. `contract` says what a drafter is, `registry` finds the kind that a folder holds, and
each kind is a folder: `states`, `attention`, `sibling`, `eagle3`."""
