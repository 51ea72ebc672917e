"""`python -m cloud_verifier`: how each process of `--tensor-parallel` is started."""

from cloud_verifier.cli import main

main()
