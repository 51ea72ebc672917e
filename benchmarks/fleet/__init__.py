"""A fleet of verifiers and its devices as a discrete-event simulation, on SimPy, from measured service times"""
