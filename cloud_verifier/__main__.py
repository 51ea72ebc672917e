"""`python -m cloud_verifier`: how `torchrun` starts each process of `--tensor-parallel`."""

from cloud_verifier.cli import main

main()
