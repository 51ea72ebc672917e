"""Connections, sessions, rounds and their history in the event loop. No torch, no sockets"""
