"""Guessing tokens ahead: who gets a draft and how long, where guesses come from, and how much of a draft stands."""
