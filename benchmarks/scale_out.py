"""Several verifiers behind one address, over real websockets: exactness, affinity, throughput, and the loss of one.

    python -m benchmarks.scale_out workers --json results.json
    python -m benchmarks.scale_out serve --ray-python .venv-ray/bin/python

Devices draft chains whose tokens are right with a stated probability; every text is compared with what one plain
verifier says by plain streaming. The embedded pair is served.
"""
