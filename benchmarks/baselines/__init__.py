"""The drafters a user could pick instead, trained and run alike: EAGLE-2, EAGLE-3.1, PARD, an independent model."""
