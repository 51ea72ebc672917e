"""The closed word lists that the exercises draw from; small, so that a tiny model meets every word often."""

NAMES = ("Mia", "Tom", "Anna", "Ben", "Lily", "Max", "Nora", "Sam", "Ella", "Jack", "Ruth", "Leo", "Ida", "Paul")
CITIES = ("Paris", "London", "Rome", "Berlin", "Madrid", "Oslo", "Vienna", "Prague", "Tokyo", "Boston", "Lima", "Cairo")
ANIMALS = ("fox", "bear", "rabbit", "duck", "horse", "cat", "frog", "goat", "mouse", "dog")
PLACES = ("forest", "river", "garden", "village", "lake", "castle", "beach", "farm", "park", "mountain")
THINGS = ("apples", "pears", "books", "coins", "cards", "shells", "stamps", "pens")
GOODS = ("apple", "pen", "cup", "book", "lamp", "chair", "hat", "ball", "plate", "spoon", "table", "clock", "shoe")
ADJECTIVES = ("old", "young", "small", "big", "quick", "happy", "quiet", "brown", "white", "clever")
VERBS = ("sleeps", "sits", "waits", "plays", "walks", "rests", "sings", "runs")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
