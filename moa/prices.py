"""Prices of an upstream, as both ends are given them."""

from __future__ import annotations

from moa.errors import ConfigError


def check_prices(price_in: float, price_out: float, budget: float) -> None:
    """Raise a `ConfigError` for a price or budget that is no amount of money, or for a budget
    without a price to count it by. Prices are for a million tokens of prompts and of answers."""
    for name, value in (
        ("--upstream-price-in", price_in),
        ("--upstream-price-out", price_out),
        ("--upstream-budget", budget),
    ):
        if not 0 <= value < 1e9:
            raise ConfigError(f"{name} must be 0 or more, not {value}")
    if budget and not (price_in or price_out):
        raise ConfigError(
            "--upstream-budget needs prices",
            hint="give --upstream-price-in and --upstream-price-out, for a million tokens",
        )
