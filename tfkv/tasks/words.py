"""Words that facts are made of."""

from __future__ import annotations

PEOPLE = (
    "Alice", "Bruno", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Irene", "Jonas",
    "Karen", "Lucas", "Maria", "Nadia", "Oscar", "Paula", "Quinn", "Rosa", "Simon", "Tanya",
)  # fmt: skip

CITIES = (
    "Paris", "London", "Berlin", "Rome", "Madrid", "Vienna", "Oslo", "Athens", "Cairo", "Tokyo",
    "Boston", "Chicago", "Dublin", "Lisbon", "Prague", "Warsaw", "Sydney", "Toronto", "Delhi",
    "Moscow",
)  # fmt: skip

ANIMALS = (
    "dog", "cat", "horse", "parrot", "rabbit", "snake", "turtle", "goat", "pig", "duck",
    "sheep", "monkey", "fox", "bear", "frog", "owl", "spider", "lizard", "donkey", "camel",
)  # fmt: skip

JOBS = (
    "baker", "doctor", "lawyer", "farmer", "painter", "pilot", "nurse", "teacher", "singer",
    "sailor", "dentist", "carpenter", "chef", "judge", "writer", "actor", "soldier", "librarian",
    "gardener", "driver",
)  # fmt: skip

NOUNS = (
    "table", "river", "window", "paper", "garden", "winter", "silver", "engine", "bridge",
    "music", "candle", "forest", "mirror", "pocket", "hammer", "island", "market", "needle",
    "orange", "pillow", "rocket", "school", "ticket", "valley", "wagon", "yellow", "basket",
    "carpet", "desert", "feather", "guitar", "harbor", "jacket", "kitchen", "ladder", "magnet",
    "nation", "ocean", "pencil", "ribbon",
)  # fmt: skip
