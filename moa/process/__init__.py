"""This process and its machine: ports, files replaced whole, memory, the garbage collector. No
torch"""
