"""Sockets, TLS, admission, authentication and rate limits: everything before a message reaches a
session"""
