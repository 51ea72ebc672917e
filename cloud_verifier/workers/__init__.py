"""Several verifier processes behind one port: `cloud-verifier serve --workers N`"""
