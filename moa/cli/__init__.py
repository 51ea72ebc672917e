"""Command lines: parsers, flags from settings classes, the `moa-edge` command, console scripts. No
torch"""
