"""How deep to draft, guesses ahead of a stream, and drafts from a predicted text. Pure; no torch"""
