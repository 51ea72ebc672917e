"""The drafters a user could pick instead: EAGLE-2, EAGLE-3, an independent small model; trained and run alike."""
