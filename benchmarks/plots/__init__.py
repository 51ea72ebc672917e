"""Pictures of the results, as PNG and SVG in docs/pictures."""
