"""Several verifiers behind one address: devices that go on through whatever happens, and the places they talk to"""
