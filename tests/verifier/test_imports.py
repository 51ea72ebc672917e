from __future__ import annotations

import subprocess
import sys

MODULES = (
    *("serving.transport", "serving.auth", "sessions.channel", "sessions.service", "sessions.table"),
    *("sessions.record_sender", "engine.scheduler", "cli"),
)


def test_the_loop_side_needs_no_torch() -> None:
    imports = ", ".join(f"cloud_verifier.{module}" for module in MODULES)
    code = f"import sys, {imports}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0
