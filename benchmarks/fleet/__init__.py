"""A fleet of verifiers and its devices as a discrete-event simulation from measured service times"""
