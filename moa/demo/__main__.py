"""`python -m moa.demo`: where the embedded pair is, as JSON."""

import dataclasses
import json

from moa.demo import paths

print(json.dumps({name: str(path) for name, path in dataclasses.asdict(paths()).items()}, indent=2))
