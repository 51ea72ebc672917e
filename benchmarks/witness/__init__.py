"""A witness that is a real language model: Gemma 3 270M from a package, with its vocabulary trimmed
for two cores"""
